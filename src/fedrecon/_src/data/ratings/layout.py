"""How a ratings file of text is laid out: what separates fields, and where each column is."""

import csv
import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fedrecon._src.data.errors import DataError
from fedrecon._src.data.ratings.columns import Column, find_columns


class JsonLines(DataError):
    """A file of JSON objects, where rows of ratings were expected."""


class Layout(NamedTuple):
    """How a text file is laid out: what separates fields, where each column is, and how it was found."""

    delimiter: str
    positions: dict[str, int]
    recognised: Mapping[str, str] = MappingProxyType({})
    guessed: tuple[str, ...] = ()


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
    usual: Mapping[str, Column | None] | None = None,
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
    if _is_object(first):
        raise JsonLines(f"{source} holds JSON objects; expected rows of user, item and rating, as in a CSV file")
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
    found = find_columns(fields if header else None, len(fields), source, columns, usual)
    pieces.give_back(rest if header else piece[blank:])
    return Layout(delimiter, found.positions, found.recognised, found.guessed)


def _is_object(line: str) -> bool:
    """Tell whether a line is a JSON object."""
    if not (line.lstrip().startswith("{") and line.rstrip().endswith("}")):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


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
