"""How a ratings file of text is laid out: what separates fields, and where each column is."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedrecon.data.errors import DataError

Column = str | int
AUTO = {"rating": ("rating", "count"), "time": ("time", "timestamp")}  # what "auto" looks for in a header


class Layout(NamedTuple):
    """How a text file is laid out: what separates fields, and where each column is."""

    delimiter: str
    positions: dict[str, int]


class Pieces:
    """A text in pieces of whole lines, which knows the number of the line that comes next."""

    def __init__(self, pieces: Iterable[str]) -> None:
        """Begin at line 1."""
        self._pieces, self._first, self.line = iter(pieces), "", 1

    def take(self) -> str:
        """Return the next piece; "" if there is none."""
        piece, self._first = self._first or next(self._pieces, ""), ""
        self.line += piece.count("\n")
        return piece

    def give_back(self, piece: str) -> None:
        """Return the end of the piece that was just taken."""
        self._first = piece
        self.line -= piece.count("\n")


def check_delimiter(delimiter: str | None) -> None:
    """Refuse a delimiter that cannot separate fields."""
    if delimiter is not None and (not delimiter or set(delimiter) & set('\r\n\0"')):
        raise DataError(
            f"the delimiter is {delimiter!r}; give characters that are neither quotes nor the end of a line."
        )


def pass_over(pieces: Pieces, count: int, source: str) -> None:
    """Skip the first lines."""
    if count < 0:
        raise DataError(f"skip_lines is {count}; give how many lines are before the header or the data, 0 or more.")
    while count and (piece := pieces.take()):
        there = piece.count("\n")
        if there <= count:
            count -= there
            continue
        place = 0
        for _ in range(count):
            place = piece.index("\n", place) + 1
        pieces.give_back(piece[place:])
        return


def find_layout(
    pieces: Pieces,
    source: str,
    columns: Mapping[str, Column | None],
    delimiter: str | None,
    header: bool | None,
) -> Layout:
    """Find the delimiter, the header and the columns from the first line that is not blank."""
    check_delimiter(delimiter)
    piece = pieces.take()
    while piece and piece.isspace():
        piece = pieces.take()
    if not piece:
        raise DataError(f"{source} is empty; expected one rating per line.")
    blank = re.match(r"(?:[^\S\n]*\n)*", piece).end()  # type: ignore[union-attr]
    end = piece.index("\n", blank) + 1
    first, rest = piece[blank : end - 1], piece[end:]
    if delimiter is None:
        delimiter = max(("::", "\t", ",", ";"), key=lambda mark: first.count(mark) * len(mark))
        if delimiter not in first:
            raise DataError(
                f"{source}: cannot tell what separates fields in {first[:60]!r}; name it with delimiter=..."
            )
    fields = split_line(first, delimiter)
    if not any(fields):
        number = pieces.line - piece.count("\n", blank)
        raise DataError(f"{source} line {number} has only empty fields; expected the names of columns, or a rating.")
    if header is None:
        header = not any(_is_number(name) for name in fields)
    positions = find_columns(fields if header else None, len(fields), source, columns)
    pieces.give_back(rest if header else piece[blank:])
    return Layout(delimiter, positions)


def find_columns(
    header: Sequence[str] | None, width: int, source: str, columns: Mapping[str, Column | None]
) -> dict[str, int]:
    """Return where each wanted column is, by header or, without one, by position."""
    positions = {}
    for place, (role, column) in enumerate(columns.items()):
        if column is None:
            continue
        if column == "auto":
            found = [name for name in AUTO[role] if name in (header or ())]
            column = found[0] if found else place if header is None and width > place else None
            if column is None:
                continue
        if header is None and column == role:
            column = place
        if isinstance(column, str) and header is None:
            raise DataError(f"{source} has no header line to find {column!r} in; give a position, as in {role}=0.")
        names = list(header or ())
        if isinstance(column, str) and column not in names:
            there = ", ".join(name[:40] for name in names[:20])
            raise DataError(f"{source}: no column {column!r}; it has: {there}. Name it with {role}=...")
        if isinstance(column, str) and names.count(column) > 1:
            places = " and ".join(str(k) for k, name in enumerate(names) if name == column)
            raise DataError(
                f"{source} has several columns {column!r}, at {places}: say which one by its position, as in "
                f"{role}={names.index(column)}."
            )
        positions[role] = names.index(column) if isinstance(column, str) else column
        if not 0 <= positions[role] < width:
            raise DataError(f"{source}: no column {positions[role]} for {role}; its first line has {width} fields.")
    return positions


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def split_line(line: str, delimiter: str) -> list[str]:
    """Return the fields of one line."""
    try:
        fields = line.split(delimiter) if len(delimiter) > 1 else next(iter(csv_reader([line + "\n"], delimiter)), [])
    except csv.Error:  # a field that is too long
        fields = line.split(delimiter)
    return [name.strip() for name in fields]


def csv_reader(lines: Iterable[str], delimiter: str) -> Any:
    """Return a reader of rows; Python 3.13 cannot skip spaces before a field if spaces separate fields."""
    return csv.reader(lines, delimiter=delimiter, skipinitialspace=delimiter != " ")
