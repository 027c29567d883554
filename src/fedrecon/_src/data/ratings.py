"""Ratings: clients that rated items, what they look like, how they are read from tables, and titles of items."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Unpack, get_args

import numpy as np

from fedrecon._src.core.checks import check_choice, check_rules
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.display import readable, say_left_out
from fedrecon._src.data.columns import (
    PARSE,
    Column,
    ColumnMatch,
    IdColumn,
    Values,
    convert_column,
    describe_columns,
    find_columns,
)
from fedrecon._src.data.sources import BadRows, DataError, RowErrors, check_left
from fedrecon._src.data.tables import Batch, Table, TextOptions, open_table

Duplicates = Literal["last", "first", "mean", "sum", "error"]
COUNTS_SKEWNESS = 2.0  # ratings on a scale stay below; plays, clicks and purchases are far above
USERS_PER_BLOCK = 1 << 13  # whose ratings are in memory at a time


@dataclass(frozen=True)
class Summary:
    """What ratings look like.

    Attributes:
      users: how many users there are.
      items: how many items there are.
      ratings: how many ratings there are.
      least: the lowest rating.
      greatest: the highest rating.
      mean: the mean of all ratings.
      deviation: their standard deviation.
      skewness: their third standardised moment: 0 if they are symmetric, large if a few are far above the others.
      density: the share of all pairs of a user and an item that is rated.
      whole: whether all ratings are whole numbers.
      skipped: how many rows, items or users loading left out, by reason.
      recognised: the columns that were recognised, by what they are for.

    Example:
      >>> import fedrecon as fr
      >>> summary = fr.data.load_ratings({"user": [1, 1, 2], "item": [1, 2, 1], "rating": [1, 2, 6]}).describe()
      >>> summary.mean, summary.are_counts
      (3.0, False)
      >>> summary.sentence()
      'users: 2; items: 2; ratings: 3, ...'
    """

    users: int
    items: int
    ratings: int
    least: float
    greatest: float
    mean: float
    deviation: float
    skewness: float
    density: float
    whole: bool
    skipped: Mapping[str, int]
    recognised: Mapping[str, str] = field(default_factory=dict)

    @property
    def are_counts(self) -> bool:
        """Whether these look like plays, clicks or purchases: nothing negative, and a few far above the others."""
        return self.least >= 0 and self.skewness > COUNTS_SKEWNESS

    def sentence(self, counts: bool = True) -> str:
        """Describe the ratings in one paragraph.

        Args:
          counts: say so if they look like counts; False if the caller says it.
        """
        per_user = self.ratings / max(1, self.users)
        text = (
            f"users: {self.users:,}; items: {self.items:,}; ratings: {self.ratings:,}, {per_user:.1f} per user, "
            f"{100 * self.density:.3g} % of all pairs. "
            f"Ratings go from {readable(self.least, 6)} to {readable(self.greatest, 6)}, "
            f"with mean {readable(self.mean)} and standard deviation {readable(self.deviation)}."
        )
        if counts and self.are_counts:
            text += f" These look like counts rather than ratings on a scale (skewness {self.skewness:.1f})."
        text += f" {say_left_out(self.skipped)}"
        return " ".join(filter(None, (text, describe_columns(self.recognised))))


@dataclass(frozen=True, eq=False, repr=False)
class Ratings(Clients):
    """Clients whose examples are ratings: columns `item` (int32), `rating` (float32), maybe `time` (int64).

    Attributes:
      item_ids: original id of item k.
      titles: title of item k, or None.
      skipped: what loading left out: counts of bad_rows, unknown_items, duplicates, low_ratings, users_below_minimum.
      recognised: the columns of the table that were recognised, by what they are for; see `load_ratings`.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.load_ratings({"user": [7, 7, 9], "item": ["a", "b", "a"], "rating": [1, 2, 3]})
      >>> ratings.num_items, ratings.title(0), ratings.describe().mean
      (2, 'a', 2.0)
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
        count = max(1, self.num_examples)
        sums = [(v.min(), v.max(), v.sum(), (v == np.rint(v)).all()) for v in self._blocks()]
        least, greatest, total, whole = map(np.array, zip(*sums or [(np.nan, np.nan, np.nan, True)], strict=True))
        mean = total.sum() / count
        moments = [(((v - mean) ** 2).sum(), ((v - mean) ** 3).sum()) for v in self._blocks()] or [(np.nan, np.nan)]
        second, third = np.sum(moments, 0) / count
        deviation = float(np.sqrt(second))
        return Summary(
            users=len(self),
            items=self.num_items,
            ratings=self.num_examples,
            least=float(least.min()),
            greatest=float(greatest.max()),
            mean=float(mean),
            deviation=deviation,
            skewness=0.0 if deviation == 0 else float(third / deviation**3),
            density=self.num_examples / max(1, len(self) * self.num_items),
            whole=bool(whole.all()),
            skipped=dict(self.skipped),
            recognised=dict(self.recognised),
        )

    def _blocks(self) -> Iterator[np.ndarray]:
        """Yield the ratings of some users at a time."""
        for first in range(0, len(self), USERS_PER_BLOCK):
            users = slice(first, first + USERS_PER_BLOCK)
            values = self.columns["rating"][rows_of(self.starts[users], self.ends[users])]
            if len(values):
                yield np.asarray(values, np.float64)


class RatingLimits(NamedTuple):
    """Ratings that a trained model accepts: those of its scale, and a little beyond.

    Attributes:
      minimum: no rating is below.
      maximum: no rating is above.
      low: where the scale begins, for messages.
      high: where it ends.

    Example:
      >>> import fedrecon as fr
      >>> stars = fr.data.RatingLimits(0.5, 5.5, 1, 5)
      >>> stars.contains([1, 6]).tolist()
      [True, False]
      >>> stars.describe_error(6)
      'rating 6 is outside of the scale that the model was trained on, 1 to 5'
    """

    minimum: float
    maximum: float
    low: float
    high: float

    def contains(self, rating: Any) -> Any:
        """Return for every rating whether it is accepted, in single precision, as ratings are stored."""
        rating = np.asarray(rating, np.float32)
        return (rating >= self.minimum) & (rating <= self.maximum)

    def describe_error(self, rating: float) -> str:
        """Say what is wrong with a rating that is not accepted."""
        ends = f"{self.low:.4g} to {self.high:.4g}" if np.isfinite(self.high) else f"{self.low:.4g} or more"
        return f"rating {rating:.9g} is outside of the scale that the model was trained on, {ends}"


class RatingsSchema(NamedTuple):
    """What a trained model expects of a table of ratings.

    Attributes:
      item_ids: number the items as in this list, and leave out those that are not in it; None numbers those that occur.
      columns: what `user`, `item`, `rating` and `time` are usually called. It counts where the argument of
        `load_ratings` has its default, and the table has such a column.
      rating_limits: rows with ratings outside of it are bad rows; None accepts all.

    Example:
      >>> import fedrecon as fr
      >>> table = {"user": [1, 1], "item": ["a", "b"], "rating": [3.0, 4.0]}
      >>> ratings = fr.data.load_ratings(table, schema=fr.data.RatingsSchema(item_ids=["b", "c"]))
      >>> ratings.columns["item"].tolist(), ratings.skipped["unknown_items"]
      ([0], 1)
    """

    item_ids: np.ndarray | Sequence[Any] | None = None
    columns: Mapping[str, Column | None] = MappingProxyType({})
    rating_limits: RatingLimits | None = None


NO_SCHEMA = RatingsSchema()


def load_ratings(
    source: Any,
    user: Column = "user",
    item: Column = "item",
    rating: Column | None = "rating",
    time: Column | None = "auto",
    *,
    duplicates: Duplicates = "last",
    bad_rows: BadRows = "error",
    min_ratings: int = 1,
    at_least: float | None = None,
    schema: RatingsSchema = NO_SCHEMA,
    **text: Unpack[TextOptions],
) -> Ratings:
    """Read ratings from a text file (plain or gzip), a Parquet file or a data frame.

    Columns `user`, `item` and `rating` may have other common names, such as `userId`, `Movie ID` or `stars`, in large
    or small letters, with spaces, underscores or dashes; a column of exactly the name given comes first. If only one
    column is left for what is missing, it is taken. `Ratings.recognised` says which columns were recognised. If two
    columns could be meant, that is an error.

    Args:
      source: the path of a file or a pipe, "-" for standard input, or a data frame (pandas, polars, a pyarrow table or
        a dict of columns).
      user: header of the column with user ids, or its position counted from 0. Without a header the columns are user,
        item, rating and time unless positions are given.
      item: the same for item ids. Ids may be integers or text.
      rating: the same for ratings. "auto" takes one if there is one; None takes none, and every row then counts 1.
      time: the same for timestamps. "auto" takes `time` or `timestamp` if there is one; None takes none.
      duplicates: which of several ratings of an item by one user counts: the last, the first, their mean or their sum;
        "error" refuses them.
      bad_rows: "error" refuses rows that cannot be read and names the first; "skip" counts them.
      min_ratings: users with fewer ratings are left out.
      at_least: ratings below this are left out; None keeps all.
      schema: what a trained model expects.
      **text: delimiter, header, encoding and skip_lines of a text file; see `TextOptions`.

    Returns:
      The ratings. Users and items are in ascending order of their ids; `skipped` counts what was left out.

    Raises:
      DataError: the table is missing, empty or malformed; the message names the line and the column.

    Example:
      >>> import fedrecon as fr
      >>> table = {"userId": ["ann", "ann", "bob"], "film": ["Alien", "Brazil", "Alien"], "stars": [5, 3, 4]}
      >>> ratings = fr.data.load_ratings(table)
      >>> ratings
      Ratings(2 clients, 3 examples: item int32, rating float32)
      >>> ratings.item_ids.tolist(), ratings.recognised["rating"]
      (['Alien', 'Brazil'], 'stars')
    """
    check_choice("duplicates", duplicates, get_args(Duplicates))
    columns = {"user": user, "item": item, "rating": rating, "time": time}
    with open_table(source, **text) as table:
        limits: dict[str, Any] = {"duplicates": duplicates, "min_ratings": min_ratings, "at_least": at_least}
        return collect_ratings(table, columns, RowErrors(bad_rows), schema, **limits)


def _read_valid(
    table: Table, match: ColumnMatch, errors: RowErrors, limits: RatingLimits | None = None
) -> Iterator[dict[str, Values]]:
    """Yield the columns of a table, a batch of rows at a time; report rows that are not valid, and leave them out."""
    done = 0
    for batch in table.batches(match.positions, errors):
        values, valid = _check_batch(table.source, match, batch, limits)
        if batch.reread is not None and not valid.all():
            batch = batch.reread()
            values, valid = _check_batch(table.source, match, batch, limits)
        if not valid.all():
            row = int(np.argmin(valid))
            problem, remedies = _describe_error(match, batch, values, row, limits)
            errors.add(f"{table.source} {batch.describe_row(row, done)}", problem, int((~valid).sum()), **remedies)
        yield {role: value._replace(array=value.array[valid]) for role, value in values.items()}
        done += len(valid)


def _check_batch(
    source: str, match: ColumnMatch, batch: Batch, limits: RatingLimits | None
) -> tuple[dict[str, Values], np.ndarray]:
    """Convert the columns of a batch, and tell which rows are valid."""
    columns = batch.columns.items()
    values = {role: convert_column(role, match.names[role], column, source) for role, column in columns}
    valid = np.logical_and.reduce([value.valid for value in values.values()])
    if limits is not None and "rating" in values:
        with np.errstate(over="ignore"):
            valid &= limits.contains(values["rating"].array)
    return values, valid


def _describe_error(
    match: ColumnMatch, batch: Batch, values: Mapping[str, Values], row: int, limits: RatingLimits | None
) -> tuple[str, dict[str, str | None]]:
    """Describe what is wrong with a row, and name the arguments that help."""
    role = next((role for role, value in values.items() if not value.valid[row]), "")
    if not role and limits is not None:
        return limits.describe_error(values["rating"].array[row]), {}
    problem: object = "the value cannot be read"
    try:
        PARSE[role](role, batch.columns[role][row].as_py())
    except (ValueError, TypeError, OverflowError) as error:
        problem = error
    if role not in match.optional:
        return f"{problem} (column {match.names[role]!r})", {}
    return f"{problem} (column {match.names[role]!r}, which was detected as the {role} column)", {role: None}


def collect_ratings(
    table: Table,
    columns: Mapping[str, Column | None],
    errors: RowErrors,
    schema: RatingsSchema = NO_SCHEMA,
    *,
    duplicates: Duplicates = "last",
    min_ratings: int = 1,
    at_least: float | None = None,
) -> Ratings:
    """Read a table, group its rows by user, number the items, and leave out what the options of `load_ratings` say."""
    match = find_columns(table, columns, schema.columns)
    values, users, items = read_columns(table, match, errors, schema.rating_limits)
    skipped = {"bad_rows": errors.skipped["bad_rows"], "unknown_items": 0}

    def leave_out(reason: str, mask: np.ndarray) -> None:
        nonlocal values
        skipped[reason] = int(mask.sum())
        if skipped[reason]:
            values = {name: column[~mask] for name, column in values.items()}

    if schema.item_ids is not None:
        known = np.asarray(schema.item_ids)
        values["item"], items = _find_ids(known, items)[values["item"]], known
        leave_out("unknown_items", values["item"] < 0)
    before = len(values["rating"])
    values = _drop_duplicates(values, users, items, table.source, duplicates)
    skipped["duplicates"] = before - len(values["rating"])
    if at_least is not None:
        leave_out("low_ratings", ~(values["rating"] >= at_least))
    sizes = np.bincount(values["user"], minlength=len(users))
    leave_out("users_below_minimum", (sizes < min_ratings)[values["user"]])
    skipped["users_below_minimum"] = int(((sizes > 0) & (sizes < min_ratings)).sum())
    check_left(len(values["rating"]), table.source, "ratings", skipped)
    if schema.item_ids is None:
        values["item"], items = _drop_unused(values["item"], items)
    user, users = _drop_unused(values.pop("user"), users)
    if (user[1:] < user[:-1]).any():
        order = np.argsort(user, kind="stable")
        for name in values:  # one by one, so that not all are in memory twice
            values[name] = values[name][order]
    sizes = np.bincount(user, minlength=len(users))
    ends = np.cumsum(sizes)
    kinds = {"item": np.int32, "rating": np.float32, "time": np.int64}
    values = {name: values[name].astype(kind, copy=False) for name, kind in kinds.items() if name in values}
    fields: dict[str, Any] = {"item_ids": items, "skipped": skipped, "recognised": dict(match.recognised)}
    return Ratings(columns=values, starts=ends - sizes, ends=ends, names=users, **fields)


def read_columns(
    table: Table, match: ColumnMatch, errors: RowErrors, limits: RatingLimits | None
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Read the rows of a table, a batch in memory at a time; return columns of numbers, and ids of users and items."""
    ids = {role: IdColumn(table.source, role, integers=not table.typed) for role in ("user", "item")}
    kinds = {role: kind for role, kind in (("rating", "f4"), ("time", "i8")) if role in match.positions}
    parts = {role: [np.empty(0, kind)] for role, kind in kinds.items()}
    for values in _read_valid(table, match, errors, limits):
        for role, column in ids.items():
            column.add(values[role])
        for role, kind in kinds.items():
            parts[role].append(values[role].array.astype(kind, copy=False))
    # one by one, so that not all are in memory twice
    arrays = {role: np.concatenate(parts.pop(role)) for role in kinds}
    (arrays["user"], users), (arrays["item"], items) = (column.finish() for column in ids.values())
    arrays.setdefault("rating", np.ones(len(arrays["user"]), "f4"))
    return arrays, users, items


def _drop_unused(codes: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number only the ids that still occur."""
    used = np.bincount(codes, minlength=len(ids)) > 0
    return (codes, ids) if used.all() else ((np.cumsum(used, dtype=np.int32) - 1)[codes], ids[used])


def _find_ids(vocabulary: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return where in the vocabulary each id is, -1 if it is not in it."""
    if (vocabulary.dtype.kind in "SU") != (ids.dtype.kind in "SU"):
        vocabulary, ids = vocabulary.astype(str), ids.astype(str)
    numbers = {item_id: k for k, item_id in enumerate(vocabulary.tolist())}
    if len(numbers) < len(vocabulary):
        raise ValueError("`item_ids` must not list an item twice.")
    return np.array([numbers.get(item_id, -1) for item_id in ids.tolist()], np.int64)


def _drop_duplicates(
    columns: dict[str, np.ndarray], users: np.ndarray, items: np.ndarray, source: str, duplicates: Duplicates
) -> dict[str, np.ndarray]:
    """Keep one row per user and item, in the order of the file."""
    pair = columns["user"] * np.int64(len(items)) + columns["item"]
    ordered = np.sort(pair)
    if not (ordered[1:] == ordered[:-1]).any():  # as nearly always: what follows is slow
        return columns
    order = np.argsort(pair, kind="stable")  # rows of a pair together, in file order
    first = np.append(True, np.diff(pair[order]) != 0)
    if duplicates == "error":
        row = order[~first].min()
        user, item = users[columns["user"][row]], items[columns["item"][row]]
        advice = "Choose which rating counts with duplicates=...: last, first, mean or sum."
        raise DataError(f"{source}: user {user} rates item {item} more than once. {advice}", ["duplicates"])
    if duplicates in ("mean", "sum"):
        starts = np.flatnonzero(first)
        whole = np.add.reduceat(columns["rating"][order].astype(np.float64), starts)
        if duplicates == "mean":
            whole /= np.diff(starts, append=len(order))
        rating = np.empty(len(order))
        rating[order] = whole[np.cumsum(first) - 1]
        columns = {**columns, "rating": rating}
    chosen = np.sort(order[first if duplicates == "first" else np.append(first[1:], True)])
    return {name: values[chosen] for name, values in columns.items()}


# ---- titles: a table of ids and titles, and labels that tell items with the same title apart ----


LONGEST_TITLE = 500  # characters


def load_titles(
    source: Any,
    item: Column = "item",
    title: Column = "title",
    bad_rows: BadRows = "error",
    **text: Unpack[TextOptions],
) -> dict[str, str]:
    """Read what items are called.

    Args:
      source: the path of a text or Parquet file or a pipe, "-" for standard input, or a data frame.
      item: header of the column with item ids, or its position counted from 0.
      title: the same for titles.
      bad_rows: "error" refuses rows that cannot be read and names the first; "skip" leaves them out.
      **text: delimiter, header, encoding and skip_lines of a text file; see `TextOptions`.

    Returns:
      Title by item id, as text. If an item has several, the last counts; items without one are left out.

    Raises:
      DataError: the table is missing or malformed; the message names the line.

    Example:
      >>> import fedrecon as fr
      >>> fr.data.load_titles({"movieId": [1, 2], "title": ["Alien", "Brazil"]})
      {'1': 'Alien', '2': 'Brazil'}
    """
    text.setdefault("header", True)
    with open_table(source, **text) as table:
        return read_titles(table, item, title, RowErrors(bad_rows))


def read_titles(table: Table, item: Column, title: Column, errors: RowErrors) -> dict[str, str]:
    """Read titles by item id."""
    match = find_columns(table, {"item": item, "title": title})
    titles: dict[str, str] = {}
    for values in _read_valid(table, match, errors):
        pairs = zip(values["item"].to_texts(), values["title"].to_texts(), strict=True)
        titles |= {item_id: name[:LONGEST_TITLE] for item_id, name in pairs if name}
    return titles


def unique_labels(titles: Sequence[str], ids: Sequence[Any]) -> list[str]:
    """Return a label for every item: its title, followed by its id where several items share the title.

    Args:
      titles: the title of every item; an empty one is replaced by the id.
      ids: the id of every item, each different.

    Example:
      >>> import fedrecon as fr
      >>> fr.data.unique_labels(["Hamlet", "Brazil", "Hamlet"], [1, 2, 3])
      ['Hamlet [1]', 'Brazil', 'Hamlet [3]']
    """
    rules = {
        f"`titles` and `ids` must have the same length (got {len(titles)} and {len(ids)}).": len(titles) == len(ids),
        "`ids` must be distinct.": len(set(map(str, ids))) == len(ids),
    }
    check_rules(rules)
    names = [title or str(id_) for title, id_ in zip(titles, ids, strict=True)]
    while clash := {name for name, count in Counter(names).items() if count > 1}:  # a title may look like a label
        names = [f"{name} [{id_}]" if name in clash else name for name, id_ in zip(names, ids, strict=True)]
    return names
