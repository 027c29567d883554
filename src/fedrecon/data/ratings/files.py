"""Ratings: clients that rated items, and files of (user, item, rating, time) to read them from."""

import csv
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedrecon.clients import Clients
from fedrecon.data.errors import BadRows, DataError, check_choice
from fedrecon.disk.tabular import read_parquet

Duplicates = Literal["last", "first", "mean", "error"]
Column = str | int


@dataclass(frozen=True, eq=False, repr=False)
class Ratings(Clients):
    """Clients whose examples are ratings: columns `item` (int32), `rating` (float32), maybe `time` (int64).

    Attributes:
      item_ids: original id of item k.
      titles: title of item k, or None.
      skipped: what loading left out: counts of bad_rows, unknown_items, duplicates, users_below_minimum.
    """

    item_ids: np.ndarray = field(kw_only=True)
    titles: np.ndarray | None = field(default=None, kw_only=True)
    skipped: Mapping[str, int] = field(default_factory=dict, kw_only=True)

    @property
    def num_items(self) -> int:
        """Number of items there are, rated here or not."""
        return len(self.item_ids)

    def title(self, k: int) -> str:
        """Return the title of item `k`, or its original id where there is none."""
        return str(self.item_ids[k] if self.titles is None else self.titles[k])


class RatingTable(NamedTuple):
    """Ratings row by row, as read; `lines` says where each row stands, if that is known."""

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray | None
    lines: np.ndarray | None = None
    bad_rows: int = 0


class Layout(NamedTuple):
    """How a text file is laid out: what separates fields, lines before the data, where each column stands."""

    delimiter: str
    skip: int
    positions: dict[str, int]


def load_ratings(
    path: str | Path,
    user: Column = "user",
    item: Column = "item",
    rating: Column = "rating",
    time: Column | None = "auto",
    delimiter: str | None = None,
    header: bool | None = None,
    duplicates: Duplicates = "last",
    bad_rows: BadRows = "error",
    min_ratings: int = 1,
    encoding: str = "utf-8",
    item_ids: np.ndarray | Sequence[Any] | None = None,
) -> Ratings:
    """Read ratings from a text file or a Parquet file (`.parquet`, `.pq`).

    Args:
      path: the file.
      user: header of the column with user ids, or its position counted from 0.
      item: the same for item ids. Ids may be integers or text.
      rating: the same for ratings.
      time: the same for timestamps. "auto" takes `time` or `timestamp` if there is one; None takes none.
      delimiter: what separates fields; None looks for tab, comma, semicolon or `::` in the first line.
      header: whether the first line names the columns; None takes a line without any number for a header.
        Without a header the columns are user, item, rating, time unless positions are given.
      duplicates: which of several ratings of an item by one user counts: the last, the first, or their mean;
        "error" refuses them.
      bad_rows: "error" refuses rows that cannot be read and names the first; "skip" counts them.
      min_ratings: users with fewer ratings are left out.
      encoding: of a text file.
      item_ids: number the items as in this list, and leave out those that are not in it.

    Returns:
      The ratings. Users and items are in ascending order of their ids; `skipped` counts what was left out.

    Raises:
      DataError: the file is missing, empty or malformed; the message names the line.
    """
    check_choice("duplicates", duplicates, Duplicates)
    check_choice("bad_rows", bad_rows, BadRows)
    columns = {"user": user, "item": item, "rating": rating, "time": time}
    if not Path(path).is_file():
        raise DataError(f"{path} is not a file; expected a ratings file (text or Parquet). Check the path.")
    if Path(path).suffix in (".parquet", ".pq"):
        table = _read_parquet_table(path, columns, bad_rows)
    else:
        try:
            text = Path(path).read_bytes().decode("utf-8-sig" if encoding == "utf-8" else encoding)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not {encoding} text ({error}). Name its encoding with encoding=...") from None
        table = parse_ratings(text, str(path), columns, delimiter, header, bad_rows, duplicates == "error")
    return collect_ratings(table, str(path), duplicates, min_ratings, item_ids)


def parse_ratings(
    text: str,
    source: str,
    columns: Mapping[str, Column | None],
    delimiter: str | None = None,
    header: bool | None = None,
    bad_rows: BadRows = "error",
    number_lines: bool = False,
) -> RatingTable:
    """Read the rows of a text file.

    Clean numeric files go through numpy's reader in one piece. Anything else is read row by row, which copes
    with text ids and can name the line of an error.

    Args:
      text: the file's content.
      source: its name, for messages.
      columns: where user, item, rating and time are; see `load_ratings`.
      delimiter: what separates fields, None to find out.
      header: whether there is a header line, None to find out.
      bad_rows: whether rows that cannot be read are errors or are counted.
      number_lines: read row by row in any case, to know the line of each row.
    """
    layout = _layout(text, source, columns, delimiter, header)
    table = None if number_lines else _parse_numbers(text, layout)
    return _parse_rows(text, source, layout, bad_rows) if table is None else table


def collect_ratings(
    table: RatingTable,
    source: str,
    duplicates: Duplicates = "last",
    min_ratings: int = 1,
    item_ids: np.ndarray | Sequence[Any] | None = None,
    titles: Mapping[Any, str] | None = None,
) -> Ratings:
    """Group rows by user, number the items, and leave out what the options say.

    Args:
      table: the rows.
      source: where they come from, for messages.
      duplicates: see `load_ratings`.
      min_ratings: see `load_ratings`.
      item_ids: see `load_ratings`.
      titles: title by item id; items without one are called by their id.
    """
    skipped = {"bad_rows": table.bad_rows, "unknown_items": 0}
    if item_ids is not None:
        known = _find(np.asarray(item_ids), table.item) >= 0
        skipped["unknown_items"] = int((~known).sum())
        table = _rows_of(table, known)
    before = len(table.user)
    table = _without_duplicates(table, source, duplicates)
    skipped["duplicates"] = before - len(table.user)
    _, who, sizes = np.unique(table.user, return_inverse=True, return_counts=True)
    skipped["users_below_minimum"] = int((sizes < min_ratings).sum())
    table = _rows_of(table, (sizes >= min_ratings)[who])
    if not len(table.user):
        reasons = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in skipped.items() if count)
        raise DataError(f"{source} has no ratings{f' left after leaving out {reasons}' if reasons else ''}.")
    vocabulary = np.unique(table.item) if item_ids is None else np.asarray(item_ids)
    columns = {
        "item": _find(vocabulary, table.item).astype(np.int32),
        "rating": table.rating.astype(np.float32),
    }
    if table.time is not None:
        columns["time"] = table.time.astype(np.int64)
    texts = None if titles is None else np.array([titles.get(k, str(k)) for k in vocabulary.tolist()], dtype=str)
    return Ratings.from_columns(columns, client=table.user, item_ids=vocabulary, titles=texts, skipped=skipped)


def _rows_of(table: RatingTable, rows: np.ndarray) -> RatingTable:
    """Return these rows (a mask or indices) of all columns."""
    return table._replace(
        user=table.user[rows],
        item=table.item[rows],
        rating=table.rating[rows],
        time=None if table.time is None else table.time[rows],
        lines=None if table.lines is None else table.lines[rows],
    )


def _find(vocabulary: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return where in the vocabulary each id stands, -1 where it does not."""
    if (vocabulary.dtype.kind in "SU") != (ids.dtype.kind in "SU"):
        vocabulary, ids = vocabulary.astype(str), ids.astype(str)
    order = np.argsort(vocabulary, kind="stable")
    ordered = vocabulary[order]
    if (ordered[1:] == ordered[:-1]).any():
        raise ValueError("`item_ids` lists an item twice: every item needs one number.")
    if not len(ordered):
        return np.full(len(ids), -1)
    place = np.minimum(np.searchsorted(ordered, ids), len(ordered) - 1)
    return np.where(ordered[place] == ids, order[place], -1)


def _without_duplicates(table: RatingTable, source: str, duplicates: Duplicates) -> RatingTable:
    """Keep one row per user and item, at the place where it stands in the file."""
    if not len(table.user):
        return table
    users, who = np.unique(table.user, return_inverse=True)
    items, what = np.unique(table.item, return_inverse=True)
    pair = who * len(items) + what
    order = np.argsort(pair, kind="stable")  # rows of a pair together, in file order
    first = np.append(True, pair[order][1:] != pair[order][:-1])
    if first.all():
        return table
    if duplicates == "error":
        row = order[~first].min()
        where = f"row {row + 1}" if table.lines is None else f"line {table.lines[row]}"
        raise DataError(
            f"{source} {where}: user {users[who[row]]} rates item {items[what[row]]} again. "
            'Choose which rating counts with duplicates="last", "first" or "mean".'
        )
    if duplicates == "mean":
        starts = np.flatnonzero(first)
        mean = np.add.reduceat(table.rating[order], starts) / np.diff(starts, append=len(order))
        rating = np.empty(len(order))
        rating[order] = mean[np.cumsum(first) - 1]
        table = table._replace(rating=rating)
    kept = first if duplicates == "first" else np.append(first[1:], True)
    return _rows_of(table, np.sort(order[kept]))


# ---- text files ----


def _layout(
    text: str,
    source: str,
    columns: Mapping[str, Column | None],
    delimiter: str | None,
    header: bool | None,
) -> Layout:
    """Find the delimiter, the header and the columns from the first line that is not blank."""
    if not text or text.isspace():
        raise DataError(f"{source} is empty; expected one rating a line.")
    blank = re.match(r"\s*", text).end()  # type: ignore[union-attr]
    skip = text.count("\n", 0, blank)
    end = text.find("\n", blank)
    first = text[text.rfind("\n", 0, blank) + 1 : end if end >= 0 else None].rstrip("\r")
    if delimiter is None:
        delimiter = max(("::", "\t", ",", ";"), key=lambda mark: first.count(mark) * len(mark))
        if delimiter not in first:
            raise DataError(
                f"{source}: cannot tell what separates fields in {first[:60]!r}; name it with delimiter=..."
            )
    fields = next(_fields(first, delimiter))[1]
    if header is None:
        header = not any(_is_number(name) for name in fields)
    return Layout(delimiter, skip + header, _positions(fields if header else None, len(fields), source, columns))


def _positions(
    header: Sequence[str] | None, width: int, source: str, columns: Mapping[str, Column | None]
) -> dict[str, int]:
    """Return where each wanted column stands, by header or, without one, by position."""
    positions = {}
    for place, (role, column) in enumerate(columns.items()):
        if column is None:
            continue
        if column == "auto":
            found = [name for name in ("time", "timestamp") if name in (header or ())]
            column = found[0] if found else 3 if header is None and width > 3 else None
            if column is None:
                continue
        if header is None and column == role:
            column = place
        if isinstance(column, str) and header is None:
            raise DataError(f"{source} has no header line to find {column!r} in; give a position, as in {role}=0.")
        if isinstance(column, str) and column not in (header or ()):
            there = ", ".join(header or ())
            raise DataError(f"{source}: no column {column!r}; it has: {there}. Name it with {role}=...")
        positions[role] = (header or ()).index(column) if isinstance(column, str) else column
        if not 0 <= positions[role] < width:
            raise DataError(f"{source}: no column {positions[role]} for {role}; its first line has {width} fields.")
    return positions


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fields(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line that is not blank, and its fields."""
    if len(delimiter) > 1:
        for number, line in enumerate(io.StringIO(text), 1):
            if line.strip():
                yield number, [name.strip() for name in line.split(delimiter)]
        return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    number = 1
    for fields in reader:
        if any(name.strip() for name in fields):
            yield number, [name.strip() for name in fields]
        number = reader.line_num + 1


def _parse_numbers(text: str, layout: Layout) -> RatingTable | None:
    """Read a file of plain numbers at once; None if it holds anything else."""
    delimiter = layout.delimiter
    if len(delimiter) > 1:
        if "\t" in text:
            return None
        text, delimiter = text.replace(delimiter, "\t"), "\t"
    # 007 and 7 may be two different ids: keep them as text
    padded = any(mark + "0" in text for mark in (delimiter, "\n"))
    if padded and re.search(rf"(?:^|{re.escape(delimiter)})0[0-9]", text, re.MULTILINE):
        return None
    kinds = {role: np.float64 if role == "rating" else np.int64 for role in layout.positions}
    places = list(layout.positions.values())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = np.loadtxt(
                io.StringIO(text),
                list(kinds.items()),
                comments=None,
                delimiter=delimiter,
                skiprows=layout.skip,
                usecols=places,
                quotechar='"',
                ndmin=1,
            )
    except (ValueError, OverflowError, Warning):
        return None
    if not np.isfinite(rows["rating"]).all():
        return None
    columns = {role: np.ascontiguousarray(rows[role]) for role in kinds}
    return RatingTable(columns["user"], columns["item"], columns["rating"], columns.get("time"))


def _parse_rows(text: str, source: str, layout: Layout, bad_rows: BadRows) -> RatingTable:
    """Read row by row; name the first bad row or count them all."""
    rows, bad = [], 0
    lines = _fields(text, layout.delimiter)
    number = 0
    try:
        for number, fields in lines:
            if number <= layout.skip:
                continue
            try:
                rows.append((*_parse_row(fields, layout.positions), number))
            except ValueError as problem:
                if bad_rows == "error":
                    raise DataError(f"{source} line {number}: {problem}") from None
                bad += 1
    except csv.Error as problem:
        raise DataError(f"{source} after line {number}: {problem}; is a quote left open?") from None
    user, item, rating, time, where = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    times = np.array(time, np.int64) if "time" in layout.positions else None
    return RatingTable(_ids(user), _ids(item), np.array(rating, float), times, np.array(where, np.int64), bad)


def _parse_row(fields: list[str], positions: dict[str, int]) -> tuple[str, str, float, int]:
    """Return user, item, rating and time (0 without one) of a row, or raise ValueError with what is wrong."""
    if len(fields) <= max(positions.values()):
        raise ValueError(f"expected at least {max(positions.values()) + 1} fields, but there are {len(fields)}")
    found = {role: fields[place] for role, place in positions.items()}
    for role in ("user", "item"):
        if not found[role]:
            raise ValueError(f"{role} is empty")
    numbers = {}
    for role in ("rating", "time"):
        text = found.get(role, "0")
        try:
            numbers[role] = float(text)
        except ValueError:
            raise ValueError(f"{role} {text!r} is not a number") from None
        if not math.isfinite(numbers[role]):
            raise ValueError(f"{role} {text!r} is not finite")
    time = found.get("time", "0")
    return (
        found["user"],
        found["item"],
        numbers["rating"],
        int(time) if time.isdigit() else int(numbers["time"]),
    )


def _ids(texts: Sequence[str]) -> np.ndarray:
    """Return ids as integers if that loses nothing, else as text."""
    array = np.array(texts, dtype=str)
    try:
        numbers = array.astype(np.int64)
    except (ValueError, OverflowError):
        return array
    return numbers if (numbers.astype(str) == array).all() else array


# ---- Parquet ----


def _read_parquet_table(path: str | Path, columns: Mapping[str, Column | None], bad_rows: BadRows) -> RatingTable:
    """Read the wanted columns of a Parquet file."""
    chosen: dict[str, str] = {}

    def choose(there: list[str]) -> list[str]:
        places = _positions(there, len(there), str(path), columns)
        chosen.update({role: there[place] for role, place in places.items()})
        return list(chosen.values())

    try:
        arrays, empty = read_parquet(path, choose, skip_empty=bad_rows == "skip")
    except DataError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    for role in ("rating", "time"):
        if role in chosen and arrays[chosen[role]].dtype.kind not in "iuf":
            raise DataError(f"{path}: column {chosen[role]!r} holds {arrays[chosen[role]].dtype}, not numbers.")
    found = {role: arrays[name] for role, name in chosen.items()}
    table = RatingTable(found["user"], found["item"], found["rating"], found.get("time"))
    finite = np.isfinite(table.rating)
    if bad_rows == "error" and not finite.all():
        row = int(np.argmin(finite))
        raise DataError(f"{path} row {row + 1}: rating {str(table.rating[row])!r} is not finite")
    return _rows_of(table, finite)._replace(bad_rows=empty + int((~finite).sum()))
