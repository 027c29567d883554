"""Read columns from CSV files, Parquet files and data frames."""

import csv
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MOST_TEXT = 1 << 32  # bytes of a text column, which numpy stores at the width of its longest entry


def import_parquet() -> Any:
    """Return pyarrow's module for Parquet files; the error says how to install it."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("reading Parquet needs pyarrow: pip install fedrecon[parquet]") from error
    return parquet


def read_parquet(
    path: str | Path, choose: Callable[[list[str]], list[str]], skip_empty: bool = False
) -> tuple[dict[str, np.ndarray], int]:
    """Read columns of a Parquet file.

    Args:
      path: the file.
      choose: `names of all columns -> names of the columns to read`.
      skip_empty: skip rows with an empty entry instead of raising an error.

    Returns:
      The columns, and how many rows were left out.

    Raises:
      ValueError: the file is damaged, has empty entries, or text too long for a column.
    """
    parquet = import_parquet()
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        with parquet.ParquetFile(path) as file:
            table = file.read(columns=choose(file.schema_arrow.names))
    except (pa.ArrowException, OSError) as problem:
        raise ValueError(f"cannot read {path}: {problem}") from None
    empty = [name for name in table.column_names if table[name].null_count]
    if empty and not skip_empty:
        raise ValueError(f"{path}: column {empty[0]!r} has {table[empty[0]].null_count} empty entries: drop them.")
    full = table.drop_null()
    columns = {}
    for name in full.column_names:
        if "string" in str(full.schema.field(name).type):
            check_width(f"{path}: column {name!r}", len(full), pc.max(pc.utf8_length(full[name])).as_py() or 0)
            columns[name] = full[name].to_numpy().astype(str)
        else:
            columns[name] = full[name].to_numpy()
    return columns, len(table) - len(full)


def check_width(column: str, rows: int, longest: int) -> None:
    """Raise an error if one long entry would make a text column too large for memory.

    Args:
      column: its name, for the message.
      rows: how many rows it has.
      longest: the length of its longest entry.
    """
    if rows * longest * 4 > MOST_TEXT:
        raise ValueError(
            f"{column} has an entry of {longest:,} characters, which makes {rows:,} rows of text "
            f"{rows * longest * 4 / 1e9:.0f} GB: shorten it, or leave the column out with `columns`."
        )


def read_csv_column(path: str | Path, index: int, dtype: Any, delimiter: str) -> np.ndarray:
    """Read one column of a text file with a header line.

    Args:
      path: the file.
      index: of the column.
      dtype: of the column; None tries integers, floats, then text.
      delimiter: the character between fields.
    """
    for kind in (np.int64, np.float64, str) if dtype is None else (dtype,):
        try:
            if kind is str:
                return _read_texts(path, index, delimiter)
            with warnings.catch_warnings():  # numpy before 2.4 warns when it reads 2.0 as an integer
                warnings.simplefilter("error", DeprecationWarning)
                return np.loadtxt(
                    path,
                    kind,
                    None,
                    delimiter,
                    skiprows=1,
                    usecols=index,
                    ndmin=1,
                    encoding="utf-8",
                    quotechar='"',
                )
        except (ValueError, OverflowError, DeprecationWarning) as error:
            problem = error
    raise ValueError(f"{path}: {problem}") from problem


def _read_texts(path: str | Path, index: int, delimiter: str) -> np.ndarray:
    """Read one column as text, and check its width before it becomes an array."""
    texts = []
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        try:
            next(reader, None)
            for fields in reader:
                if fields and len(fields) <= index:
                    raise ValueError(f"line {reader.line_num} has {len(fields)} fields; expected {index + 1}")
                if fields:
                    texts.append(fields[index])
        except csv.Error as problem:
            raise ValueError(f"line {reader.line_num}: {problem}") from None
    check_width(f"column {index}", len(texts), max(map(len, texts), default=0))
    return np.array(texts, dtype=str)


def frame_columns(frame: Any, wanted: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return columns of a pandas or polars data frame, or of a pyarrow table, as arrays.

    Text becomes text of fixed width, dates become whole seconds since 1970, lists of one length become rows.

    Args:
      frame: the data frame.
      wanted: names of columns; None for all.

    Raises:
      ValueError: it is not a data frame, or a column is missing, occurs twice, or has empty entries.
    """
    if hasattr(frame, "collect") and not hasattr(frame, "to_pandas"):
        raise ValueError("`frame` is a lazy data frame: give frame.collect().")
    names = getattr(frame, "column_names", None) or getattr(frame, "columns", None)
    if names is None or not hasattr(frame, "__getitem__"):
        raise ValueError(f"`frame` is {type(frame).__name__}; expected a data frame of pandas, polars or pyarrow.")
    there = list(names)
    wanted = there if wanted is None else list(dict.fromkeys(wanted))
    for name in wanted:
        if there.count(name) != 1:
            times = "no column" if name not in there else "several columns"
            raise ValueError(f"the data frame has {times} {name!r}; it has: {', '.join(map(str, there))}.")
    return {str(name): _frame_column(frame[name], str(name)) for name in wanted}


def _frame_column(values: Any, name: str) -> np.ndarray:
    count = values.isna().sum() if hasattr(values, "isna") else values.null_count
    empty = int(count() if callable(count) else count)
    if empty:
        raise ValueError(f"column {name!r} of the data frame has {empty} empty entries: drop or fill them.")
    array = np.asarray(values.to_numpy())
    if array.dtype.kind == "M":
        return array.astype("datetime64[s]").astype(np.int64)
    if array.dtype.kind not in "OT":
        return array
    entries = array.tolist()
    if all(isinstance(entry, str) for entry in entries):
        check_width(f"column {name!r} of the data frame", len(entries), max(map(len, entries), default=0))
        return np.array(entries, dtype=str)
    try:
        array = np.array(entries)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"column {name!r} of the data frame holds neither numbers nor text, nor lists of one length.")
    return array
