"""Which columns of a file hold users, items, ratings and times: by name, by position, or by a name that is common."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedrecon._src.data.errors import DataError

Column = str | int
AUTO = {"rating": ("rating", "count"), "time": ("time", "timestamp")}  # what "auto" looks for before all else

_PEOPLE = "user customer member person reader reviewer client account visitor listener viewer subscriber buyer"
_THINGS = (
    "item movie film product book artist song track album game article video recipe anime business restaurant joke "
    "beer wine place venue hotel course podcast app"
)
_RATINGS = "rating ratings score scores star stars value overall count counts plays playcount listens weight r"


def _with_ids(nouns: str) -> frozenset[str]:
    return frozenset(noun + end for noun in nouns.split() for end in ("", "id"))


# Names that are common, as `_plain` spells them.
COMMON: dict[str, frozenset[str]] = {
    "user": _with_ids(_PEOPLE) | {"uid"},
    "item": _with_ids(_THINGS) | {"iid", "isbn", "asin", "sku"},
    "rating": frozenset([*_RATINGS.split(), *(noun + "rating" for noun in f"{_PEOPLE} {_THINGS}".split())]),
    "time": frozenset(AUTO["time"]),
    "title": frozenset(("title",)),
}


class MissingColumns(DataError):
    """A file without columns that are needed."""

    def __init__(self, message: str, roles: Sequence[str]) -> None:
        """Say it; keep what the columns are for."""
        super().__init__(message)
        self.roles = tuple(roles)


class Found(NamedTuple):
    """Where columns stand.

    Attributes:
      positions: of each column, by what it is for.
      recognised: the names of those that were found by a common name, which nobody gave.
      guessed: what columns are for that nobody asked for: they are there, and "auto" took them.
    """

    positions: dict[str, int]
    recognised: dict[str, str]
    guessed: tuple[str, ...]


def find_columns(
    header: Sequence[str] | None,
    width: int,
    source: str,
    columns: Mapping[str, Column | None],
    usual: Mapping[str, Column | None] | None = None,
) -> Found:
    """Return where each wanted column stands, by header or, without one, by position.

    Args:
      header: the names of the columns, None if the file does not name them.
      width: how many columns there are.
      source: the file's name, for messages.
      columns: the wanted column by what it is for. One that is called as what it is for may have another common name;
        "auto" takes one if there is one, None none.
      usual: what columns are called in files like this one, where `columns` leaves it open.

    Raises:
      MissingColumns: there are no such columns; the message names all.
      DataError: two columns could be meant, or one occurs twice.
    """
    search = _Search(None if header is None else list(header), width, source, columns, usual or {})
    chosen = {role: search.choose(role, place) for place, role in enumerate(columns)}
    absent = {role: column for role, column in chosen.items() if isinstance(column, str) and column not in search.names}
    if header is not None and absent:
        raise _missing(source, search.names, absent)
    positions = {role: search.position(role, column) for role, column in chosen.items() if column is not None}
    guessed = tuple(role for role in positions if columns[role] == "auto")
    return Found(positions, search.recognised, guessed)


class _Search:
    """Looks for the columns of one file."""

    def __init__(
        self,
        header: list[str] | None,
        width: int,
        source: str,
        columns: Mapping[str, Column | None],
        usual: Mapping[str, Column | None],
    ) -> None:
        self.header, self.width, self.source, self.columns, self.usual = header, width, source, columns, usual
        self.names = header or []
        self.recognised: dict[str, str] = {}

    def choose(self, role: str, place: int) -> Column | None:
        """Return the name or the position of a column; its role if there is none that fits, None if it is not needed.

        Args:
          role: what it is for.
          place: where it stands in a file without a header.
        """
        wanted = self.columns[role]
        if wanted is None or wanted not in (role, "auto"):
            return wanted
        if role in self.usual:
            usual = self.usual[role]
            here = self.header is None and isinstance(usual, int) and usual < self.width
            if usual is None or usual in self.names or here:
                return usual
        optional = wanted == "auto" and role in AUTO
        if self.header is None:
            return place if place < self.width or not optional else None
        found = self._by_name(role, AUTO[role] if optional else (role,), wanted)
        if found is None and isinstance(position := self.usual.get(role), int):
            found = position
        return found if found is not None or optional else role

    def _by_name(self, role: str, exact: Sequence[str], wanted: Column) -> Column | None:
        for name in exact:
            if name in self.names:
                return name
        if role == "time" and wanted == role:  # who asks for that is not the default
            return None
        others = {column for other, column in self.columns.items() if other != role}
        fits = [name for name in dict.fromkeys(self.names) if _plain(name) in COMMON[role] and name not in others]
        if len(fits) > 1:
            listed = " and ".join(repr(name[:40]) for name in fits[:5])
            raise DataError(
                f"{self.source}: the columns {listed} could each be the one for {role}; say which with {role}=..."
            )
        if fits:
            self.recognised[role] = fits[0]
        return fits[0] if fits else None

    def position(self, role: str, column: Column) -> int:
        """Return where a column stands."""
        if isinstance(column, str) and self.header is None:
            raise DataError(f"{self.source} has no header line to find {column!r} in; give a position, as in {role}=0.")
        if isinstance(column, str) and self.names.count(column) > 1:
            places = " and ".join(str(k) for k, name in enumerate(self.names) if name == column)
            raise DataError(
                f"{self.source} has several columns {column!r}, at {places}: say which one by its position, as in "
                f"{role}={self.names.index(column)}."
            )
        place = self.names.index(column) if isinstance(column, str) else column
        if not 0 <= place < self.width:
            raise MissingColumns(
                f"{self.source}: no column {place} for {role}; its first line has {self.width} fields", [role]
            )
        return place


def _missing(source: str, names: Sequence[str], wanted: Mapping[str, str]) -> MissingColumns:
    """Return an error that names all columns that are not there, those that are, and what to do."""
    there = ", ".join(name[:40] for name in names[:20])
    absent = _listed([repr(column) for column in wanted.values()])
    options = _listed([f"{role}=..." for role in wanted])
    one = len(wanted) == 1
    return MissingColumns(
        f"{source}: no column{'' if one else 's'} {absent}; it has: {there}. "
        f"Name {'it' if one else 'them'} with {options}",
        list(wanted),
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _plain(name: str) -> str:
    """Return a name in small letters, without spaces, underscores and dashes."""
    return re.sub(r"[\s_-]+", "", name).casefold()


def say_unwanted(role: str) -> str:
    """Say what to do about a column that nobody asked for and that cannot be read.

    Args:
      role: what it was taken for.
    """
    return f"nobody asked for this column: leave it out with {role}=None"


def say_recognised(recognised: Mapping[str, str]) -> str:
    """Say which columns were taken though nobody named them; "" if there are none.

    Args:
      recognised: the names of the columns, by what they are for.
    """
    if not recognised:
        return ""
    return f"Columns taken: {', '.join(f'{name[:40]!r} for {role}' for role, name in recognised.items())}."
