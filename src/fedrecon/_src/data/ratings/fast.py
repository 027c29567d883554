"""Fast readers of ratings: pyarrow's, and numpy's where pyarrow is not installed.

They read a piece of a file only if the result is certain to be the same as when it is read row by row.
"""

import io
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.data.ratings.ids import LONGEST_ID
from fedrecon._src.data.ratings.layout import Layout, split_line

LARGEST = float(np.finfo(np.float32).max)
FIRST_YEAR = -62_135_596_800  # in seconds: Python knows no dates before
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")  # how most dates begin
SEPARATOR = "\x1f"  # stands for a delimiter of several characters
SPACES = " \t\x0b\x0c\x1c\x1d\x1e\x1f"  # the ASCII characters that `str.strip` removes, except line ends


class Rows(NamedTuple):
    """Some rows: ids in whatever form a reader gives them (see `IdColumn`), ratings, times and line numbers."""

    user: Any
    item: Any
    rating: np.ndarray
    time: np.ndarray | None
    lines: np.ndarray | None = None
    bad: int = 0


def fast_reader() -> Callable[[str, Layout], Rows | None]:
    """Return the fastest reader there is. It returns None for pieces that have to be read row by row."""
    try:
        import pyarrow.csv  # noqa: F401
    except ImportError:
        return read_numbers
    return read_with_arrow


class Clean(NamedTuple):
    """A piece in which every line feed ends a row and quotes surround whole fields, if there are any."""

    text: str
    delimiter: str
    quoted: bool


def _clean(piece: str, layout: Layout) -> Clean | None:
    """Return a piece that all readers read alike; None if they might not."""
    places, delimiter = list(layout.positions.values()), layout.delimiter
    if "\0" in piece or len(set(places)) < len(places) or not delimiter.isascii():
        return None
    if len(delimiter) > 1:
        return None if SEPARATOR in piece else Clean(piece.replace(delimiter, SEPARATOR), SEPARATOR, False)
    if '"' not in piece:
        return Clean(piece, delimiter, False)
    mark = re.escape(delimiter)
    rows = rf'(?:(?:[^"\n{mark}]*+|"(?:[^"\n]++|"")*+")[{mark}\n])*+'
    return Clean(piece, delimiter, True) if re.fullmatch(rows, piece) else None


def read_with_arrow(piece: str, layout: Layout) -> Rows | None:
    """Read a piece with pyarrow; None if it has to be read row by row."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    clean = _clean(piece, layout)
    if clean is None or ("time" in layout.positions and ("0x" in piece or "0X" in piece)):  # a number to pyarrow
        return None
    first = next(line for line in io.StringIO(clean.text) if line != "\n")
    fields = split_line(first, clean.delimiter) if clean.quoted else first.split(clean.delimiter)
    names = [str(k) for k in range(len(fields))]
    if max(layout.positions.values()) >= len(names):
        return None
    text = pa.dictionary(pa.int32(), pa.string())
    dates = "time" in layout.positions and DATE.match(fields[layout.positions["time"]]) is not None
    time = pa.timestamp("us") if dates else pa.int64()
    kinds = {"user": text, "item": text, "rating": pa.float64(), "time": time}
    data = clean.text.encode()
    try:
        table = arrow.read_csv(
            pa.BufferReader(data),
            arrow.ReadOptions(column_names=names, block_size=len(data) + 1),
            arrow.ParseOptions(delimiter=clean.delimiter, quote_char='"' if clean.quoted else False),
            arrow.ConvertOptions(
                column_types={str(place): kinds[role] for role, place in layout.positions.items()},
                include_columns=[str(place) for place in layout.positions.values()],
                null_values=[],
            ),
        )
    except pa.ArrowException:
        return None
    columns = {role: table.column(str(place)).combine_chunks() for role, place in layout.positions.items()}
    rating = columns["rating"].to_numpy() if "rating" in columns else np.ones(len(table))
    if not (np.abs(rating) <= LARGEST).all():
        return None
    spaces = not piece.isascii() or any(mark in piece for mark in SPACES if mark != layout.delimiter)
    ids = [_arrow_ids(columns[role], spaces) for role in ("user", "item")]
    if ids[0] is None or ids[1] is None:
        return None
    times = columns["time"].cast(pa.int64()).to_numpy() if "time" in columns else None
    if times is not None and dates:
        times = times // 1_000_000
        if not (times >= FIRST_YEAR).all():
            return None
    return Rows(ids[0], ids[1], rating.astype(np.float32), times)


def _arrow_ids(ids: Any, spaces: bool) -> Any:
    """Return ids without spaces around them; None if one of them is not an id."""
    import pyarrow.compute as pc

    if spaces:
        values = ids.dictionary.to_pylist()
        stripped = [text.strip() for text in values]
        if stripped != values:
            good = all(0 < len(text) <= LONGEST_ID for text in stripped)
            return (ids.indices.to_numpy(), stripped) if good else None
    lengths = pc.min_max(pc.utf8_length(ids.dictionary))
    return ids if lengths["min"].as_py() >= 1 and lengths["max"].as_py() <= LONGEST_ID else None


def read_numbers(piece: str, layout: Layout) -> Rows | None:
    """Read a piece of plain numbers with numpy; None if it holds anything else."""
    clean = _clean(piece, layout)
    if clean is None or _has_odd_numbers(clean, layout):
        return None
    kinds = {role: np.float64 if role == "rating" else np.int64 for role in layout.positions}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = np.loadtxt(
                io.StringIO(clean.text),
                list(kinds.items()),
                comments=None,
                delimiter=clean.delimiter,
                usecols=list(layout.positions.values()),
                quotechar='"' if clean.quoted else None,
                ndmin=1,
            )
    except (ValueError, OverflowError, Warning):
        return None
    columns = {role: np.ascontiguousarray(rows[role]) for role in kinds}
    columns.setdefault("rating", np.ones(len(rows)))
    if not (np.abs(columns["rating"]) <= LARGEST).all():
        return None
    return Rows(columns["user"], columns["item"], columns["rating"].astype(np.float32), columns.get("time"))


def _has_odd_numbers(clean: Clean, layout: Layout) -> bool:
    """Tell whether an id may be written differently from a number: 007 and 7 are two ids."""
    if "_" in clean.text:
        return True
    mark = re.escape(clean.delimiter)
    field = rf'(?:[^"\n{mark}]*+|"(?:[^"\n]++|"")*+"){mark}'
    odd = r'[\s"]*(?:\+|-?0[0-9]|-0)'
    return any(
        re.search(rf"^(?:{field}){{{layout.positions[role]}}}{odd}", clean.text, re.MULTILINE)
        for role in ("user", "item")
    )
