"""Ratings files of text: their layout, and their rows, piece by piece, by the fastest reader that can read a piece.

Three readers give the same: pyarrow's where it is installed, numpy's where it is not, and rows one by one, which copes
with anything and names the line of an error. A piece goes to the last one if the others might read it differently.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.data.dates import whole_seconds
from fedrecon._src.data.errors import BadRows, DataError
from fedrecon._src.data.ratings.accepted import Accepted
from fedrecon._src.data.ratings.columns import Column, say_unwanted
from fedrecon._src.data.ratings.fast import LARGEST, Rows, fast_reader
from fedrecon._src.data.ratings.ids import Coded, IdColumn, check_id
from fedrecon._src.data.ratings.layout import Layout, Pieces, csv_reader, find_layout, pass_over

SKIP = 'leave such rows out with bad_rows="skip"'

_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+", re.ASCII)
_LIKE_DATE = re.compile(r"[0-9]+[-/.][0-9]+[-/.]|[0-9]{4}-W?[0-9]", re.ASCII)  # no number begins like this


class RatingTable(NamedTuple):
    """Ratings row by row, as read; `lines` has the line number of each row, if known, and `recognised` the columns that
    were taken though nobody named them.
    """

    user: Coded
    item: Coded
    rating: np.ndarray
    time: np.ndarray | None
    lines: np.ndarray | None = None
    bad_rows: int = 0
    recognised: Mapping[str, str] = MappingProxyType({})


def parse_ratings(
    text: Iterable[str],
    source: str,
    columns: Mapping[str, Column | None],
    delimiter: str | None = None,
    header: bool | None = None,
    bad_rows: BadRows = "error",
    number_lines: bool = False,
    skip_lines: int = 0,
    usual: Mapping[str, Column | None] | None = None,
    accepted: Accepted | None = None,
) -> RatingTable:
    """Read the rows of a text file.

    Args:
      text: the file's content in pieces of whole lines, as `sources.read_text` gives them.
      source: its name, for messages.
      columns: where user, item, rating and time are; see `load_ratings`.
      delimiter: what separates fields; None to detect it.
      header: whether there is a header line; None to detect it.
      bad_rows: whether rows that cannot be read are errors or are counted.
      number_lines: always read row by row, to know the line of each row.
      skip_lines: how many lines to skip at the beginning.
      usual: see `load_ratings`.
      accepted: rows with other ratings cannot be read; None takes all.
    """
    pieces = Pieces(text)
    pass_over(pieces, skip_lines, source)
    layout = find_layout(pieces, source, columns, delimiter, header, usual)
    fast = None if number_lines else fast_reader()
    user, item = IdColumn(source, "user"), IdColumn(source, "item")
    rating, time, lines = [np.empty(0, np.float32)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    bad = 0
    while piece := pieces.take():
        if piece.isspace():
            continue
        rows = None if fast is None else fast(piece, layout)
        if rows is None or (accepted is not None and not accepted.has(rows.rating).all()):
            rows = _read_rows(piece, pieces, source, layout, bad_rows, number_lines, accepted)
        _add_ids(user, rows.user)
        _add_ids(item, rows.item)
        bad += rows.bad
        rating.append(rows.rating)
        for values, column in ((rows.time, time), (rows.lines, lines)):
            if values is not None:
                column.append(values)
    return RatingTable(
        user.finish(),
        item.finish(),
        _joined(rating),
        _joined(time) if "time" in layout.positions else None,
        _joined(lines) if number_lines else None,
        bad,
        layout.recognised,
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Join arrays and forget them, so that not all columns are in memory twice."""
    whole = np.concatenate(parts)
    parts.clear()
    return whole


def _add_ids(column: IdColumn, ids: Any) -> None:
    """Add ids in whatever form a reader gave them."""
    if isinstance(ids, list):
        column.add_texts(ids)
    elif isinstance(ids, tuple):
        column.add_coded(*ids)
    elif isinstance(ids, np.ndarray):
        column.add_integers(ids)
    else:
        column.add_dictionary(ids)


# ---- rows one by one ----


def _read_rows(
    piece: str,
    pieces: Pieces,
    source: str,
    layout: Layout,
    bad_rows: BadRows,
    number_lines: bool,
    accepted: Accepted | None,
) -> Rows:
    """Read a piece row by row; name the first bad row or count them all."""
    user: list[str] = []
    item: list[str] = []
    rating: list[float] = []
    time: list[int] = []
    lines: list[int] = []
    bad, number = 0, pieces.line - piece.count("\n") - 1
    try:
        for number, fields in _records(piece, pieces, layout.delimiter):
            try:
                found = _parse_row(fields, layout)
                _check_accepted(found[2], accepted)
            except ValueError as problem:
                if bad_rows == "error":
                    raise DataError(f"{source} line {number}: {problem}") from None
                bad += 1
                continue
            for values, value in zip((user, item, rating, time), found, strict=True):
                values.append(value)  # type: ignore[attr-defined]
            lines.append(number)
    except csv.Error as problem:
        raise DataError(f"{source} after line {number}: {problem}; is a quote left open?") from None
    return Rows(
        user,
        item,
        np.array(rating, np.float32),
        np.array(time, np.int64) if "time" in layout.positions else None,
        np.array(lines, np.int64) if number_lines else None,
        bad,
    )


def _records(piece: str, pieces: Pieces, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line that is not blank, and its fields.

    A record that does not end with the piece, since a quoted field has line feeds in it, continues in the next one,
    whose records are then read here too.
    """
    if len(delimiter) > 1:
        for number, line in enumerate(io.StringIO(piece), pieces.line - piece.count("\n")):
            if line.strip():
                yield number, [name.strip() for name in line.split(delimiter)]
        return
    feed = _Feed(piece, pieces)
    reader = csv_reader(feed, delimiter)
    before = feed.number
    while feed.left:
        fields = next(reader)
        if any(name.strip() for name in fields):
            yield before, [name.strip() for name in fields]
        before = feed.number


class _Feed:
    """Lines of a piece, and of those after it if more are needed; `left` counts those the piece still has."""

    def __init__(self, piece: str, pieces: Pieces) -> None:
        self.pieces = pieces
        self._begin(piece)

    def _begin(self, piece: str) -> None:
        self.lines, self.left = iter(io.StringIO(piece)), piece.count("\n")
        self.number = self.pieces.line - self.left  # of the line that comes next

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        if not self.left:
            if not (piece := self.pieces.take()):
                raise StopIteration
            self._begin(piece)
        self.left -= 1
        self.number += 1
        return next(self.lines)


def _parse_row(fields: list[str], layout: Layout) -> tuple[str, str, float, int]:
    """Return user, item, rating (1 if there is none) and time (0) of a row; ValueError says what is wrong with it."""
    positions = layout.positions
    if len(fields) <= max(positions.values()):
        raise ValueError(f"expected at least {max(positions.values()) + 1} fields, but there are {len(fields)}")
    found = {role: fields[place] for role, place in positions.items()}
    for role in ("user", "item"):
        check_id(role, found[role])
    role = "rating"
    try:
        rating = _rating(found[role]) if role in found else 1.0
        role = "time"
        time = _time(found[role]) if role in found else 0
    except ValueError as problem:
        if role in layout.guessed:
            raise ValueError(f"{problem}; {say_unwanted(role)}") from None
        raise
    return found["user"], found["item"], rating, time


def _rating(text: str) -> float:
    rating = _number("rating", text)
    if abs(rating) > LARGEST:
        raise ValueError(f"rating {text[:50]!r} is beyond {LARGEST:.2g}, the largest that can be stored")
    return rating


def _check_accepted(rating: float, accepted: Accepted | None) -> None:
    if accepted is not None and not accepted.has(rating):
        raise ValueError(f'{accepted.why_not(rating)}. Correct it, or leave such rows out with bad_rows="skip"')


def _number(role: str, text: str) -> float:
    try:
        number = float(text.replace("_", "x"))  # only Python takes 1_000 for a number
    except ValueError:
        raise ValueError(f"{role} {text[:50]!r} is not a number{_advice(text)}") from None
    if not math.isfinite(number):
        raise ValueError(f"{role} {text[:50]!r} is not finite; {SKIP}")
    return number


def _advice(text: str) -> str:
    """Return what to do about a text that is not a number, if that is plain."""
    if not text:
        return f"; {SKIP}"
    return ": decimals need a point, not a comma" if _DECIMAL_COMMA.fullmatch(text) else ""


def _time(text: str) -> int:
    if _LIKE_DATE.match(text):
        return _date(text)
    whole = _WHOLE.fullmatch(text) and len(text) <= 400
    time = int(text) if whole else int(_number("time", text))
    if not -(1 << 63) <= time < 1 << 63:
        raise ValueError(f"time {text[:50]!r} is beyond the range of 64-bit integers: are these seconds?")
    return time


def _date(text: str) -> int:
    try:
        return whole_seconds(text)
    except ValueError:
        raise ValueError(
            f"time {text[:50]!r} is neither a number of seconds nor a date such as 2024-01-31 10:00"
        ) from None
