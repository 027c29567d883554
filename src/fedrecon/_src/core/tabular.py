"""Whole tables as arrays: CSV and Parquet files and data frames, through pyarrow."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fedrecon._src.storage.atomic import storage_errors

MAX_TEXT_BYTES = 1 << 32  # of a text column, which numpy stores at the width of its longest entry


def to_arrow(frame: Any) -> pa.Table:
    """Convert a pandas or polars data frame, a pyarrow table or a dict of columns to a pyarrow table."""
    try:
        if hasattr(frame, "to_arrow"):
            return frame.to_arrow()
        if hasattr(frame, "iloc"):
            return pa.Table.from_pandas(frame, preserve_index=False)
        return frame if isinstance(frame, pa.Table) else pa.table(dict(frame))
    except (pa.ArrowException, AttributeError, ValueError, TypeError) as problem:
        raise ValueError(
            "`frame` must be a data frame of pandas, polars (of a lazy one, pass frame.collect()) or pyarrow "
            f"(got {type(frame).__name__}: {problem})"
        ) from None


def _errors_of(path: str | Path) -> AbstractContextManager[None]:
    return storage_errors(path, "cannot be read", pa.ArrowException, OSError, KeyError)


def read_csv(path: str | Path, delimiter: str, dtypes: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Read the columns with these dtypes (None for integers, floats or text, whichever fits), or all."""
    kinds = {name: np.dtype(dtype) for name, dtype in (dtypes or {}).items() if dtype is not None}
    types = {name: pa.string() if kind.kind == "U" else pa.from_numpy_dtype(kind) for name, kind in kinds.items()}
    convert = pa.csv.ConvertOptions(column_types=types, include_columns=list(dtypes or []), null_values=[""])
    with _errors_of(path):
        table = pa.csv.read_csv(path, parse_options=pa.csv.ParseOptions(delimiter=delimiter), convert_options=convert)
    if not table.num_rows:
        raise ValueError(f"{path} has no rows: expected a header line and one line per example.")
    return to_arrays(table, str(path))


def read_parquet(path: str | Path, names: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Read the columns with these names, or all."""
    with _errors_of(path), pa.parquet.ParquetFile(path) as file:
        _check_names(file.schema_arrow.names, names, str(path))
        table = file.read(columns=None if names is None else list(names))
    return to_arrays(table, str(path))


def to_arrays(table: pa.Table, source: str, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Convert columns to arrays: dates to whole seconds since 1970, lists of one length to rows."""
    _check_names(table.column_names, names, source)
    return {name: _to_array(table[name], f"{source}: column {name!r}") for name in names or table.column_names}


def _check_names(names: Sequence[str], wanted_names: Sequence[str] | None, source: str) -> None:
    for name in names if wanted_names is None else wanted_names:
        if list(names).count(name) != 1:
            number = "no column" if name not in names else "several columns"
            raise ValueError(f"{source} has {number} {name!r}; it has: {', '.join(names)}.")


def _to_array(column: pa.ChunkedArray, name: str) -> np.ndarray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if column.null_count:
        raise ValueError(f"{name} has {column.null_count} empty entries: drop or fill them.")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return column.to_numpy().astype("datetime64[s]").astype(np.int64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.asarray(column.to_numpy())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        longest = pc.max(pc.utf8_length(column.cast(pa.large_string()))).as_py() or 0
        if len(column) * longest * 4 > MAX_TEXT_BYTES:
            raise ValueError(
                f"{name} has an entry of {longest:,} characters, which makes {len(column):,} rows of text "
                f"{len(column) * longest * 4 / 1e9:.0f} GB: shorten it, or leave the column out with `columns`."
            )
        return column.to_numpy().astype(str)
    try:
        array = np.array(column.to_pylist())
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold numbers, text, dates or lists of one length (got {kind}).")
    return array
