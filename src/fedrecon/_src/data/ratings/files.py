"""Ratings: clients that rated items, and files of (user, item, rating, time) to read them from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedrecon._src.core.clients import Clients
from fedrecon._src.core.formatting import listed_counts
from fedrecon._src.data.errors import BadRows, DataError, check_choice
from fedrecon._src.data.ratings.accepted import Accepted
from fedrecon._src.data.ratings.columns import Column
from fedrecon._src.data.ratings.ids import Coded
from fedrecon._src.data.ratings.parquet import read_parquet_ratings
from fedrecon._src.data.ratings.summary import Summary, summarize
from fedrecon._src.data.ratings.text import RatingTable, parse_ratings
from fedrecon._src.data.sources import is_readable, open_bytes, read_text

Duplicates = Literal["last", "first", "mean", "sum", "error"]
PARQUET = b"PAR1"


@dataclass(frozen=True, eq=False, repr=False)
class Ratings(Clients):
    """Clients whose examples are ratings: columns `item` (int32), `rating` (float32), maybe `time` (int64).

    Attributes:
      item_ids: original id of item k.
      titles: title of item k, or None.
      skipped: what loading left out: counts of bad_rows, unknown_items, duplicates, low_ratings, users_below_minimum.
      recognised: the columns of the file that were taken by common names, by what they are for; see `load_ratings`.
    """

    item_ids: np.ndarray = field(kw_only=True)
    titles: np.ndarray | None = field(default=None, kw_only=True)
    skipped: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    recognised: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def num_items(self) -> int:
        """Number of items, rated here or not."""
        return len(self.item_ids)

    def title(self, k: int) -> str:
        """Return the title of item `k`, or its original id if it has none."""
        return str(self.item_ids[k] if self.titles is None else self.titles[k])

    def describe(self) -> Summary:
        """Return what these ratings look like: how many, on which scale, how dense, what was left out."""
        return summarize(self.columns["rating"], self.starts, self.ends, self.num_items, self.skipped, self.recognised)


def load_ratings(
    path: str | Path,
    user: Column = "user",
    item: Column = "item",
    rating: Column | None = "rating",
    time: Column | None = "auto",
    delimiter: str | None = None,
    header: bool | None = None,
    duplicates: Duplicates = "last",
    bad_rows: BadRows = "error",
    min_ratings: int = 1,
    encoding: str = "utf-8",
    item_ids: np.ndarray | Sequence[Any] | None = None,
    skip_lines: int = 0,
    at_least: float | None = None,
    usual: Mapping[str, Column | None] | None = None,
    accepted: Accepted | None = None,
) -> Ratings:
    """Read ratings from a text file, plain or gzip, or a Parquet file (`.parquet`, `.pq`).

    A text file is read in pieces, so that only its ratings are in memory. pyarrow reads it if it is installed, a few
    times faster; the result is the same.

    Columns `user`, `item` and `rating` may have other common names, such as `userId`, `Movie ID` or `stars`, in large
    or small letters, with spaces, underscores or dashes. A column of exactly the name asked for comes first. If two
    columns could be meant, that is an error.

    Args:
      path: the file, a pipe, or "-" for standard input.
      user: header of the column with user ids, or its position counted from 0.
      item: the same for item ids. Ids may be integers or text.
      rating: the same for ratings. "auto" takes one if there is one; None takes none, and every row then counts 1.
      time: the same for timestamps. "auto" takes `time` or `timestamp` if there is one; None takes none.
      delimiter: what separates fields; None looks for tab, comma, semicolon or `::` in the first line.
      header: whether the first line names the columns; None takes a line without any number for a header.
        Without a header the columns are user, item, rating, time unless positions are given.
      duplicates: which of several ratings of an item by one user counts: the last, the first, their mean or their sum;
        "error" refuses them.
      bad_rows: "error" refuses rows that cannot be read and names the first; "skip" counts them.
      min_ratings: users with fewer ratings are left out.
      encoding: the encoding of a text file.
      item_ids: number the items as in this list, and leave out those that are not in it.
      skip_lines: how many lines to skip before the header or the data.
      at_least: ratings below this are left out; None keeps all.
      usual: what `user`, `item`, `rating` and `time` are in files like this one. It counts where the argument has its
        default, and the file has such a column.
      accepted: the ratings that a trained model takes; rows with others cannot be read. None takes all.

    Returns:
      The ratings. Users and items are in ascending order of their ids; `skipped` counts what was left out.

    Raises:
      DataError: the file is missing, empty or malformed; the message names the line.
    """
    check_choice("duplicates", duplicates, Duplicates)
    check_choice("bad_rows", bad_rows, BadRows)
    columns = {"user": user, "item": item, "rating": rating, "time": time}
    source = "standard input" if str(path) == "-" else str(path)
    if not is_readable(path):
        raise DataError(f"{path} is not a file; expected a ratings file (text or Parquet). Check the path.")
    with open_bytes(path) as stream:
        if Path(path).suffix in (".parquet", ".pq") or stream.peek(len(PARQUET))[: len(PARQUET)] == PARQUET:  # type: ignore[attr-defined]
            table = read_parquet_ratings(path, stream, source, columns, bad_rows, usual, accepted)
        else:
            text = read_text(stream, source, encoding)
            lines = duplicates == "error"
            table = parse_ratings(
                text, source, columns, delimiter, header, bad_rows, lines, skip_lines, usual, accepted
            )
    return collect_ratings(table, source, duplicates, min_ratings, item_ids, at_least=at_least)


def collect_ratings(
    table: RatingTable,
    source: str,
    duplicates: Duplicates = "last",
    min_ratings: int = 1,
    item_ids: np.ndarray | Sequence[Any] | None = None,
    titles: Mapping[Any, str] | None = None,
    at_least: float | None = None,
) -> Ratings:
    """Group rows by user, number the items, and leave out what the options say.

    Args:
      table: the rows.
      source: where they come from, for messages.
      duplicates: see `load_ratings`.
      min_ratings: see `load_ratings`.
      item_ids: see `load_ratings`.
      titles: title by item id; items without one are called by their id.
      at_least: see `load_ratings`.
    """
    skipped = {"bad_rows": table.bad_rows, "unknown_items": 0}
    if item_ids is not None:
        known = (_find(np.asarray(item_ids), table.item.values) >= 0)[table.item.codes]
        skipped["unknown_items"] = int((~known).sum())
        table = _rows_of(table, known)
    before = len(table.rating)
    table = _without_duplicates(table, source, duplicates)
    skipped["duplicates"] = before - len(table.rating)
    if at_least is not None:
        high = table.rating >= at_least
        skipped["low_ratings"] = int((~high).sum())
        table = _rows_of(table, high)
    sizes = np.bincount(table.user.codes, minlength=len(table.user.values))
    skipped["users_below_minimum"] = int(((sizes > 0) & (sizes < min_ratings)).sum())
    table = _rows_of(table, (sizes >= min_ratings)[table.user.codes])
    if not len(table.rating):
        reasons = listed_counts(skipped)
        raise DataError(f"{source} has no ratings{f' left after leaving out {reasons}' if reasons else ''}.")
    if item_ids is None:
        table = table._replace(item=_used(table.item))
        vocabulary, item = table.item.values, table.item.codes
    else:
        vocabulary = np.asarray(item_ids)
        item = _find(vocabulary, table.item.values)[table.item.codes]
    columns = {"item": item.astype(np.int32, copy=False), "rating": table.rating.astype(np.float32, copy=False)}
    if table.time is not None:
        columns["time"] = table.time.astype(np.int64, copy=False)
    user, recognised = _used(table.user), table.recognised
    del table, item  # so that ordering need not hold all columns twice
    texts = None if titles is None else np.array([titles.get(k, str(k)) for k in vocabulary.tolist()], dtype=str)
    return _group(columns, user, item_ids=vocabulary, titles=texts, skipped=skipped, recognised=dict(recognised))


def _group(columns: dict[str, np.ndarray], user: Coded, **fields: Any) -> Ratings:
    """Bring each user's rows together, in their order."""
    if (user.codes[1:] < user.codes[:-1]).any():
        order = np.argsort(user.codes, kind="stable")
        for name in columns:
            columns[name] = columns[name][order]
    sizes = np.bincount(user.codes, minlength=len(user.values))
    ends = np.cumsum(sizes)
    return Ratings(columns=columns, starts=ends - sizes, ends=ends, names=user.values, **fields)


def _used(ids: Coded) -> Coded:
    """Number only the ids that still occur."""
    there = np.bincount(ids.codes, minlength=len(ids.values)) > 0
    if there.all():
        return ids
    return Coded((np.cumsum(there, dtype=np.int32) - 1)[ids.codes], ids.values[there])


def _rows_of(table: RatingTable, rows: np.ndarray) -> RatingTable:
    """Return these rows (a mask or indices) of all columns."""
    if rows.dtype == bool and rows.all():
        return table
    return table._replace(
        user=table.user._replace(codes=table.user.codes[rows]),
        item=table.item._replace(codes=table.item.codes[rows]),
        rating=table.rating[rows],
        time=None if table.time is None else table.time[rows],
        lines=None if table.lines is None else table.lines[rows],
    )


def _find(vocabulary: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return where in the vocabulary each id is, -1 if it is not in it."""
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
    """Keep one row per user and item, in the order of the file."""
    pair = table.user.codes * np.int64(len(table.item.values)) + table.item.codes
    pair.sort()  # in place: nearly always there are none, and memory counts
    if not (pair[1:] == pair[:-1]).any():
        return table
    pair = table.user.codes * np.int64(len(table.item.values)) + table.item.codes
    order = np.argsort(pair, kind="stable")  # rows of a pair together, in file order
    first = np.append(True, np.diff(pair[order]) != 0)
    if duplicates == "error":
        row = order[~first].min()
        where = f"row {row + 1}" if table.lines is None else f"line {table.lines[row]}"
        user, item = (ids.values[ids.codes[row]] for ids in (table.user, table.item))
        raise DataError(
            f"{source} {where}: user {user} rates item {item} again. "
            "Choose which rating counts with duplicates=...: last, first, mean or sum."
        )
    if duplicates in ("mean", "sum"):
        starts = np.flatnonzero(first)
        whole = np.add.reduceat(table.rating[order].astype(np.float64), starts)
        if duplicates == "mean":
            whole /= np.diff(starts, append=len(order))
        rating = np.empty(len(order))
        rating[order] = whole[np.cumsum(first) - 1]
        table = table._replace(rating=rating)
    kept = first if duplicates == "first" else np.append(first[1:], True)
    return _rows_of(table, np.sort(order[kept]))
