"""Ratings from Parquet files."""

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedrecon._src.core.tabular import import_parquet
from fedrecon._src.data.errors import BadRows, DataError
from fedrecon._src.data.ratings.accepted import Accepted
from fedrecon._src.data.ratings.columns import Column, Found, find_columns, say_unwanted
from fedrecon._src.data.ratings.fast import LARGEST
from fedrecon._src.data.ratings.ids import Coded, IdColumn, check_id, code
from fedrecon._src.data.ratings.text import SKIP, RatingTable
from fedrecon._src.data.sources import ALWAYS_ALLOWED, MOST_EXPANSION, is_stream

ROWS = 1 << 20  # in memory at a time, as Parquet holds them
BYTES_A_ROW = 8  # of a column, unpacked
MOST_TIME = 9.2e18  # just within 64 bits


def read_parquet_ratings(
    path: str | Path,
    stream: IO[bytes],
    source: str,
    columns: Mapping[str, Column | None],
    bad_rows: BadRows,
    usual: Mapping[str, Column | None] | None = None,
    accepted: Accepted | None = None,
) -> RatingTable:
    """Read the wanted columns of a Parquet file.

    Args:
      path: the file.
      stream: the same file, opened; used if `path` is a pipe or standard input.
      source: its name, for messages.
      columns: where user, item, rating and time are; see `load_ratings`.
      bad_rows: whether rows with empty or non-finite entries are errors or are counted.
      usual: see `load_ratings`.
      accepted: rows with other ratings are bad ones, too; None takes all.

    Raises:
      DataError: it cannot be read, or is not what it should be.
    """
    try:
        parquet = import_parquet()
    except ImportError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    import pyarrow as pa

    data = stream.read() if is_stream(path) else None
    try:
        with parquet.ParquetFile(str(path) if data is None else pa.BufferReader(data)) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        names = schema.names
        size = Path(path).stat().st_size if data is None else len(data)
        if rows * BYTES_A_ROW > max(ALWAYS_ALLOWED, size * MOST_EXPANSION):
            raise DataError(f"{source} says that it has {rows:,} rows in {size:,} bytes, which no real data does.")
        found = find_columns(names, len(names), source, columns, usual)
        chosen = {role: names[k] for role, k in found.positions.items()}
        for role, name in chosen.items():
            if names.count(name) > 1:
                raise DataError(f"{source} has several columns {name!r}; rename all but the one for {role}.")
        # text that is stored once is read as it is stored: unpacked, few bytes could become any number of gigabytes
        texts = [chosen[role] for role in ("user", "item") if _holds_text(schema.field(chosen[role]), source)]
        place = str(path) if data is None else pa.BufferReader(data)
        with parquet.ParquetFile(place, read_dictionary=texts) as file:
            return _Reader(source, chosen, bad_rows, found, accepted).read(file)
    except (pa.ArrowException, OSError, KeyError, IndexError, OverflowError, UnicodeError) as problem:
        raise DataError(f"cannot read {path}: {problem}") from None


class _Reader:
    """Reads batches of rows and collects their columns."""

    def __init__(
        self,
        source: str,
        chosen: Mapping[str, str],
        bad_rows: BadRows,
        found: Found,
        accepted: Accepted | None = None,
    ) -> None:
        self.source, self.chosen, self.bad_rows = source, chosen, bad_rows
        self.found, self.accepted = found, accepted
        self.bad = self.done = 0
        self.ids: dict[str, list[Any]] = {"user": [], "item": []}
        self.numbers: dict[str, list[np.ndarray]] = {role: [] for role in ("rating", "time") if role in chosen}

    def read(self, file: Any) -> RatingTable:
        for batch in file.iter_batches(ROWS, columns=list(dict.fromkeys(self.chosen.values()))):
            self._add({role: batch.column(name) for role, name in self.chosen.items()}, len(batch))
        numbers = {role: np.concatenate([np.empty(0, np.int64), *parts]) for role, parts in self.numbers.items()}
        user, item = (self._coded(role) for role in ("user", "item"))
        rating = numbers["rating"].astype(np.float32) if "rating" in numbers else np.ones(len(user.codes), np.float32)
        return RatingTable(user, item, rating, numbers.get("time"), None, self.bad, self.found.recognised)

    def _add(self, columns: Mapping[str, Any], size: int) -> None:
        good = np.ones(size, bool)
        for role, column in columns.items():
            empty = np.asarray(column.is_null())
            if empty.any() and self.bad_rows == "error":
                count = int(empty.sum())
                raise self._problem(
                    role, f"column {self.chosen[role]!r} has {count} empty entries: drop them, or {SKIP}"
                )
            good &= ~empty
        arrays = {role: self._numbers(role, columns[role]) for role in self.numbers}
        for role, values in arrays.items():
            most = LARGEST if role == "rating" else MOST_TIME
            wrong = good & ~(np.abs(values.astype(np.float64)) <= most)
            if wrong.any() and self.bad_rows == "error":
                row = int(np.argmax(wrong))
                what = f"is beyond {most:.2g}" if np.isfinite(values[row]) else f"is not finite; {SKIP}"
                raise DataError(f"{self.source} row {self.done + row + 1}: {role} {str(values[row])!r} {what}")
            good &= ~wrong
        if self.accepted is not None and "rating" in arrays:
            good &= self._accepted(arrays["rating"].astype(np.float32), good)
        rows = np.flatnonzero(good)
        for role in self.ids:
            self.ids[role].append(columns[role].take(rows))
        for role, values in arrays.items():
            self.numbers[role].append(values[rows].astype(np.int64 if role == "time" else np.float32))
        self.bad += size - len(rows)
        self.done += size

    def _problem(self, role: str, what: str) -> DataError:
        """Return an error about a column, with what to do if nobody asked for it."""
        advice = f"; {say_unwanted(role)}" if role in self.found.guessed else ""
        return DataError(f"{self.source}: {what}{advice}.")

    def _numbers(self, role: str, column: Any) -> np.ndarray:
        """Return a column of numbers; empty entries are 0."""
        name = self.chosen[role]
        if role == "time" and (column := _seconds(column)) is None:
            raise self._problem(role, f"column {name!r} holds text that is not dates such as 2024-01-31 10:00")
        if not _holds_numbers(column.type):
            shown = "text" if _is_text(column.type) else str(column.type)
            raise self._problem(role, f"column {name!r} holds {shown}, not numbers")
        return np.asarray(column.fill_null(0))

    def _accepted(self, rating: np.ndarray, good: np.ndarray) -> np.ndarray:
        """Return which ratings a model takes; if bad rows are errors, name the first of the others."""
        assert self.accepted is not None
        taken = self.accepted.has(rating)
        if self.bad_rows == "error" and (good & ~taken).any():
            row = int(np.argmax(good & ~taken))
            why = self.accepted.why_not(float(rating[row]))
            raise DataError(
                f"{self.source} row {self.done + row + 1}: {why}. Correct it, or leave such rows out with "
                'bad_rows="skip"'
            )
        return taken

    def _coded(self, role: str) -> Coded:
        """Number the ids of a column."""
        import pyarrow as pa

        parts, name = self.ids[role], self.chosen[role]
        if not parts:
            return code(np.empty(0, np.int64))
        kind = parts[0].type.value_type if pa.types.is_dictionary(parts[0].type) else parts[0].type
        if pa.types.is_integer(kind):
            return code(np.concatenate([np.asarray(part) for part in parts]))
        if pa.types.is_floating(kind):  # as pandas writes whole numbers where some are missing
            values = np.concatenate([np.asarray(part, np.float64) for part in parts])
            if (np.abs(values) < 2**53).all() and (values == np.rint(values)).all():
                return code(values.astype(np.int64))
            raise DataError(f"{self.source}: column {name!r} holds numbers that are not whole: they cannot be ids.")
        column = IdColumn(self.source, role, numbers=False)
        for part in parts:
            coded = part if pa.types.is_dictionary(part.type) else part.dictionary_encode()
            codes = np.asarray(coded.indices)
            used = np.bincount(codes, minlength=len(coded.dictionary)) > 0
            values = coded.dictionary.take(np.flatnonzero(used)).to_pylist()
            for value in values:
                try:
                    check_id(role, value)
                except ValueError as problem:
                    raise DataError(f"{self.source}: {problem}.") from None
            column.add_coded((np.cumsum(used) - 1)[codes], values)
        return column.finish()


def _holds_text(field: Any, source: str) -> bool:
    """Tell whether a column of ids holds text; it may hold numbers instead, but nothing else."""
    from pyarrow import types

    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    text = types.is_string(kind) or types.is_large_string(kind)
    if not (text or types.is_integer(kind) or types.is_floating(kind)):
        raise DataError(f"{source}: column {field.name!r} holds {kind}; ids are whole numbers or text.")
    return text


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _holds_numbers(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind))


def _seconds(column: Any) -> Any:
    """Return dates as seconds since 1970, and other columns as they are; None for text that is not dates."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("s"), safe=False), pa.timestamp("s")
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("s", kind.tz), safe=False).cast(pa.int64())
    if not _is_text(kind):
        return column
    text = column.cast(pa.string())
    for zone in (None, "UTC"):
        try:
            exact = text.cast(pa.timestamp("us", zone)).cast(pa.int64())
        except pa.ArrowInvalid:
            continue
        return pa.array(np.asarray(exact.fill_null(0)) // 1_000_000)
    return None
