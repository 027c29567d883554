"""Columns from CSV and Parquet files."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def read_parquet(
    path: str | Path, choose: Callable[[list[str]], list[str]], skip_empty: bool = False
) -> tuple[dict[str, np.ndarray], int]:
    """Read columns of a Parquet file.

    Args:
      path: the file.
      choose: given the names of all columns, returns those wanted.
      skip_empty: leave out rows with an empty entry instead of refusing the file.

    Returns:
      The columns, and how many rows were left out.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("reading Parquet needs pyarrow: pip install fedrecon[parquet]") from error
    with parquet.ParquetFile(path) as file:
        table = file.read(columns=choose(file.schema_arrow.names))
    empty = [name for name in table.column_names if table[name].null_count]
    if empty and not skip_empty:
        raise ValueError(f"{path}: column {empty[0]!r} has {table[empty[0]].null_count} empty entries: drop them.")
    full = table.drop_null()
    arrays = {name: full[name].to_numpy() for name in full.column_names}
    texts = {name for name in arrays if "string" in str(full.schema.field(name).type)}
    columns = {name: values.astype(str) if name in texts else values for name, values in arrays.items()}
    return columns, len(table) - len(full)


def read_csv_column(path: str | Path, index: int, dtype: Any, delimiter: str) -> np.ndarray:
    """Read one column of a text file with a header line; without a dtype try integers, floats, then text."""
    for kind in (np.int64, np.float64, str) if dtype is None else (dtype,):
        try:
            with warnings.catch_warnings():  # numpy before 2.4 warns where it reads 2.0 as an integer
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
        except (ValueError, DeprecationWarning) as error:
            problem = error
    raise ValueError(f"{path}: {problem}") from problem
