"""Columns: which one holds users, items, ratings or times, and what their values are.

Ids are stored as codes: every row holds a number, and every distinct id is stored once. So one long id among millions
costs its own length and no more, and whether ids are numbers or text is decided by the distinct ones alone: a single
`007` does not turn millions of rows into text.
"""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedrecon._src.data.sources import DataError, since_1970
from fedrecon._src.data.tables import Table, is_text

Column = str | int

MAX_RATING = float(np.finfo(np.float32).max)
MAX_TIME = 9.2e18  # just within 64 bits
MAX_WHOLE_FLOAT = 2**53
FIRST_YEAR = -62_135_596_800  # in seconds: Python knows no dates before
LONGEST_ID = 200  # characters
MAX_ID_BYTES = 1 << 31  # of all distinct ids of a column as text of fixed width

AUTO = {"rating": ("rating", "count"), "time": ("time", "timestamp")}  # what "auto" looks for before all else
_PEOPLE = "user customer member person reader reviewer client account visitor listener viewer subscriber buyer"
_THINGS = (
    "item movie film product book artist song track album game article video recipe anime business restaurant joke "
    "beer wine place venue hotel course podcast app"
)
_RATINGS = "rating ratings score scores star stars value overall count counts plays playcount listens weight r"

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9]{1,400}", re.ASCII)
_DATE_START = re.compile(r"[0-9]+[-/.][0-9]+[-/.]|[0-9]{4}-W?[0-9]", re.ASCII)  # no number begins like this

logger = logging.getLogger(__name__)


def _with_ids(nouns: str) -> frozenset[str]:
    return frozenset(noun + end for noun in nouns.split() for end in ("", "id"))


# Common names, as `_normalize` spells them.
COMMON: dict[str, frozenset[str]] = {
    "user": _with_ids(_PEOPLE) | {"uid"},
    "item": _with_ids(_THINGS) | {"iid", "isbn", "asin", "sku"},
    "rating": frozenset([*_RATINGS.split(), *(noun + "rating" for noun in f"{_PEOPLE} {_THINGS}".split())]),
    "time": frozenset(AUTO["time"]),
    "title": frozenset(("title",)),
}


class MissingColumnsError(DataError):
    """A table without columns that are needed; `fields` says for what."""


class ColumnMatch(NamedTuple):
    """Where columns are.

    Attributes:
      positions: of each column, by what it is for.
      names: of each column, or its position in a table without a header.
      recognised: the names of those that nobody gave, and that were recognised.
      optional: what columns are for that "auto" took.
    """

    positions: dict[str, int]
    names: dict[str, Column]
    recognised: dict[str, str]
    optional: tuple[str, ...]


def find_columns(
    table: Table, columns: Mapping[str, Column | None], usual: Mapping[str, Column | None] | None = None
) -> ColumnMatch:
    """Find each column by its name or position, or recognise it by a common name.

    Args:
      table: the table.
      columns: the column by what it is for: a header or a position, "auto" for one if there is one, None for none.
        A column with the default name, which is what it is for, may have any common name.
      usual: what columns are called in tables like this one. It counts where `columns` has the default, and the table
        has such a column.

    Raises:
      MissingColumnsError: there are no such columns; the message names all.
      DataError: two columns could be meant, or one occurs twice.
    """
    search = _Search(table, columns, usual or {})
    chosen = {role: search.choose(role, position) for position, role in enumerate(columns)}
    if table.names is not None:
        search.take_remaining(chosen)
        absent = {role: name for role, name in chosen.items() if isinstance(name, str) and name not in table.names}
        if absent:
            names = ", ".join(repr(name) for name in absent.values())
            options = ", ".join(f"{role}=..." for role in absent)
            header = ", ".join(name[:40] for name in table.names[:20])
            without = ", or pass rating=None if there is none" if "rating" in absent else ""
            message = f"{table.source}: no column {names}; it has: {header}. Name it with {options}{without}"
            raise MissingColumnsError(message, list(absent))
    positions = {role: search.position(role, column) for role, column in chosen.items() if column is not None}
    if search.recognised:
        logger.info("%s: %s", table.source, describe_columns(search.recognised))
    headers = {role: table.names[k] if table.names else k for role, k in positions.items()}
    optional = tuple(role for role in positions if columns[role] == "auto")
    return ColumnMatch(positions, headers, search.recognised, optional)


class _Search:
    """Looks for the columns of one table."""

    def __init__(self, table: Table, columns: Mapping[str, Column | None], usual: Mapping[str, Column | None]) -> None:
        self.table, self.columns, self.usual = table, columns, usual
        self.names = table.names or []
        self.recognised: dict[str, str] = {}

    def choose(self, role: str, position: int) -> Column | None:
        """Return the name or the position of a column; its role if none fits, None if it is not needed."""
        column, has_header = self.columns[role], self.table.names is not None
        if column not in (role, "auto"):
            return column
        usual = self.usual.get(role, role)
        fits = not has_header and isinstance(usual, int) and usual < self.table.width
        if usual is None or fits or (role in self.usual and usual in self.names):
            return usual
        optional = column == "auto" and role in AUTO
        if not has_header:
            return position if position < self.table.width or not optional else None
        name: Column | None = self._match(role, AUTO[role] if optional else (role,), column)
        if name is None and isinstance(usual, int):
            return usual
        return name if name is not None or optional else role

    def _match(self, role: str, exact: Sequence[str], column: Column) -> str | None:
        if name := next((name for name in exact if name in self.names), None):
            return name
        if role == "time" and column == role:  # somebody named it: that is not the default
            return None
        taken = {other for other_role, other in self.columns.items() if other_role != role}
        fits = [name for name in dict.fromkeys(self.names) if _normalize(name) in COMMON[role] and name not in taken]
        if len(fits) > 1:
            listed = " and ".join(repr(name[:40]) for name in fits[:5])
            advice = f"could each be the {role} column; name it with {role}=..."
            raise DataError(f"{self.table.source}: the columns {listed} {advice}", [role])
        if fits:
            self.recognised[role] = fits[0]
        return fits[0] if fits else None

    def take_remaining(self, chosen: dict[str, Column | None]) -> None:
        """Fill roles that are still open where the columns that are left can only be read in one way."""
        missing = [role for role in ("user", "item", "rating") if chosen.get(role) == role and role not in self.names]
        used = {self.names.index(c) if isinstance(c, str) and c in self.names else c for c in chosen.values()}
        left = [k for k, name in enumerate(self.names) if k not in used and self.names.count(name) == 1]
        if missing == ["rating"]:
            left = [k for k in left if self.table.is_numeric(k)]
        elif "rating" in missing and len(self.names) == 2:  # there are no ratings: these are clicks
            missing.remove("rating")
        elif "rating" in missing or "title" in chosen:
            return
        if len(left) == len(missing):
            for role, position in zip(missing, left, strict=True):
                chosen[role] = self.recognised[role] = self.names[position]

    def position(self, role: str, column: Column) -> int:
        """Return where a column is."""
        source = self.table.source
        if isinstance(column, str) and self.table.names is None:
            raise DataError(f"{source} has no header line to find {column!r} in; give a position, as in {role}=0.")
        if isinstance(column, str) and self.names.count(column) > 1:
            positions = " and ".join(str(k) for k, name in enumerate(self.names) if name == column)
            advice = f"choose one by its position, as in {role}={self.names.index(column)}"
            raise DataError(f"{source} has several columns {column!r}, at {positions}: {advice}.")
        position = self.names.index(column) if isinstance(column, str) else column
        if not 0 <= position < self.table.width:
            fields = f"its first line has {self.table.width} fields"
            raise MissingColumnsError(f"{source}: no column {position} for {role}; {fields}", [role])
        return position


def _normalize(name: str) -> str:
    """Return a name in small letters, without spaces, underscores and dashes."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def describe_columns(recognised: Mapping[str, str]) -> str:
    """Say which columns were recognised; "" if there are none."""
    if not recognised:
        return ""
    return f"Columns taken: {', '.join(f'{name[:40]!r} for {role}' for role, name in recognised.items())}."


# ---- values one by one: the rule, and the error ----


def _parse_id(role: str, value: Any) -> str:
    """Return an id as text, without white space around it."""
    text = "" if value is None else str(value).strip()
    whole = not isinstance(value, float) or (abs(value) < MAX_WHOLE_FLOAT and value.is_integer())
    if not (whole and 0 < len(text) <= LONGEST_ID and "\0" not in text):
        rule = f"a whole number or 1 to {LONGEST_ID} characters other than NUL"
        raise ValueError(f"{role} {str(value)[:30]!r} must be {rule}")
    return text


def _parse_time(role: str, value: Any) -> int:
    """Return a time in whole seconds since 1970, from a number or an ISO date."""
    if isinstance(value, str) and _DATE_START.match(value):
        return since_1970(value) // timedelta(seconds=1)
    whole = isinstance(value, int) or (isinstance(value, str) and _WHOLE.fullmatch(value))
    time = int(value) if whole else int(_parse_number(role, value, MAX_TIME))
    if not -(1 << 63) <= time < 1 << 63:
        raise ValueError(f"{role} {str(value)[:50]!r} must be a number of seconds in 64 bits")
    return time


def _parse_number(role: str, value: Any, most: float = MAX_RATING) -> float:
    text = "" if value is None else str(value)
    try:
        number = float(text.replace("_", "x"))  # only Python reads 1_000
    except ValueError:
        number = math.nan
    if not abs(number) <= most:
        advice = ", with a point for decimals" if "," in text else ""
        raise ValueError(f"{role} {text[:50]!r} must be a finite number up to {most:.2g}{advice}")
    return number


# By what a column is for: what a value means. Raises ValueError if it cannot be one.
PARSE: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("user", "item"), _parse_id),
    "rating": _parse_number,
    "time": _parse_time,
}


# ---- values column by column ----


class Values(NamedTuple):
    """The values of a column, and which of them are valid; `texts` has the distinct texts that `array` numbers."""

    array: np.ndarray
    valid: np.ndarray
    texts: list[str] | None = None

    def to_texts(self) -> list[str]:
        """Return all values as text."""
        return [str(value) if self.texts is None else self.texts[value] for value in self.array.tolist()]


def convert_column(role: str, name: object, column: pa.Array, source: str) -> Values:
    """Convert a column of users, items, ratings, times or titles."""
    kind = column.type
    valid = np.asarray(column.is_valid())
    if role == "title":
        texts = ["" if value is None else str(value).strip() for value in column.to_pylist()]
        return Values(np.arange(len(texts)), np.ones(len(texts), bool), texts)
    if is_text(kind):
        return _convert_text(role, column, valid)
    if role == "time" and (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        array = column.to_numpy(zero_copy_only=False).astype("datetime64[s]").astype(np.int64)
        return Values(array, valid & (array >= FIRST_YEAR))
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        rule = "must hold whole numbers or text" if role in ("user", "item") else "must hold numbers"
        raise DataError(f"{source}: the {role} column {name!r} {rule} (got {kind}).")
    array = np.asarray(column.fill_null(0))
    if role == "rating":
        array = array.astype(np.float64)
        return Values(array, valid & (np.abs(array) <= MAX_RATING))
    if pa.types.is_floating(kind):
        limit = MAX_TIME if role == "time" else MAX_WHOLE_FLOAT
        valid = valid & (np.abs(array) < limit) & ((role == "time") | (array == np.rint(array)))
        return Values(np.where(valid, array, 0).astype(np.int64), valid)
    return Values(array.astype(np.int64), valid & (array <= np.iinfo(np.int64).max))


def _convert_text(role: str, column: pa.Array, valid: np.ndarray) -> Values:
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    codes = np.asarray(encoded.indices.fill_null(0)).astype(np.int32)
    parsed: list[Any] = []
    for text in [*encoded.dictionary.to_pylist(), None]:  # None, so that there is one to begin with
        try:
            parsed.append(PARSE[role](role, text))
        except ValueError:
            parsed.append(None)
    valid = valid & np.array([value is not None for value in parsed])[codes]
    if role in ("user", "item"):
        return Values(codes, valid, parsed)
    numbers = np.array([0 if value is None else value for value in parsed], float if role == "rating" else np.int64)
    return Values(numbers[codes], valid)


# ---- ids ----


class IdColumn:
    """Collects the ids of a column, batch by batch."""

    def __init__(self, source: str, role: str, integers: bool) -> None:
        """Start empty; `integers` allows text to become integers if that loses nothing."""
        self.source, self.role, self.integers = source, role, integers
        self._index: defaultdict[str, int] = defaultdict()  # numbers texts in the order of their first lookup
        self._index.default_factory = self._index.__len__
        self._parts: list[np.ndarray] = []
        self._is_text = False

    def add(self, values: Values) -> None:
        """Add the ids of some rows."""
        array = values.array
        if values.texts is not None:
            self._is_text = True
            used = np.flatnonzero(np.bincount(array, minlength=len(values.texts)))
            numbers = np.zeros(len(values.texts), np.int32)
            numbers[used] = [self._index[values.texts[k]] for k in used.tolist()]
            array = numbers[array]
        self._parts.append(array)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the id of every row, and the distinct ids in ascending order."""
        codes = np.concatenate(self._parts or [np.empty(0, np.int64)])
        self._parts.clear()
        if not self._is_text:
            values, codes = np.unique(codes, return_inverse=True)
            return codes.astype(np.int32), values
        values, ranks = np.unique(self._to_array(list(self._index)), return_inverse=True)
        return ranks.astype(np.int32)[codes], values

    def _to_array(self, texts: list[str]) -> np.ndarray:
        if self.integers and all(map(_INTEGER.fullmatch, texts)):
            try:
                return np.array(list(map(int, texts)), np.int64)
            except OverflowError:
                pass
        longest = max(texts, key=len, default="")
        size = len(longest) * 4 * len(texts)
        if size > MAX_ID_BYTES:
            ids = f"{len(texts):,} different {self.role} ids, the longest of {len(longest)} characters"
            raise DataError(f"{self.source} has {ids} ({longest[:30]!r}): {size / 1e9:.1f} GB. Shorten the longest.")
        return np.array(texts, dtype=str)
