"""Data of a bundle: tables as float32, float16 or int8 with a scale per row, and test vectors for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save

from fedrecon_device.tensors import GLOBAL, ROW_SCALE, START, as_float32

Quantisation = Literal["int8", "float16"]
SMALL = 1024  # numbers: smaller leaves stay float32: quantising them would save next to nothing
NARROW = 2  # numbers of a row: with a scale of two bytes, int8 rows this short are no smaller than float16


def packed(
    leaves: Mapping[str, Any], quantise: Quantisation | None, exact: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return global parameters as they are stored, by the name of the tensor.

    Args:
      leaves: float arrays by path.
      quantise: `int8`, with one float16 scale per row of a table, and float16 for tables with few numbers per row; or
        `float16`; None keeps float32.
      exact: patterns of paths that stay float32.

    Raises:
      ValueError: a leaf has numbers that the form cannot hold.
    """
    stored_tables: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        values = np.asarray(leaf)
        if not np.all(np.isfinite(values)):
            raise ValueError(f"global parameter {path!r} has entries that are not finite; train again or repair it")
        small = values.dtype != np.float32 or values.size < SMALL
        if quantise is None or small or any(fnmatchcase(path, pattern) for pattern in exact):
            stored_tables[GLOBAL + path] = values
        elif quantise == "float16" or values.size <= NARROW * len(values):
            if np.max(np.abs(values)) > np.finfo(np.float16).max:
                raise ValueError(f"global parameter {path!r} has entries above 65504: float16 cannot hold them")
            stored_tables[GLOBAL + path] = values.astype(np.float16)
        else:
            rows = values.reshape(len(values), -1)
            scale = _halves_from(np.max(np.abs(rows), 1) / np.float32(127), path)
            safe = np.where(scale > 0, scale, 1).astype(np.float32)
            stored_tables[GLOBAL + path] = np.rint(rows / safe[:, None]).astype(np.int8).reshape(values.shape)
            stored_tables[ROW_SCALE + path] = scale
    return stored_tables


def _halves_from(scale: np.ndarray, path: str) -> np.ndarray:
    """Return scales in float16, rounded up: divided by its scale, no number of a row is above 127."""
    if np.max(scale) > np.finfo(np.float16).max:
        raise ValueError(f"global parameter {path!r} has entries above 8,319,008: rows of int8 cannot hold them")
    near = scale.astype(np.float16)
    return np.where(near < scale, np.nextafter(near, np.float16(np.inf)), near)


def unpacked(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the global parameters that a device computes with, by path."""
    return as_float32(dict(stored), GLOBAL)


def tables_file(stored: Mapping[str, np.ndarray], start: Mapping[str, Any]) -> bytes:
    """Return the file with global parameters and the start of local ones."""
    local = {START + path: np.asarray(leaf, order="C") for path, leaf in start.items()}
    return save({**{name: np.asarray(table, order="C") for name, table in stored.items()}, **local})


FULL = 512  # numbers: of larger arrays only some are written
Columns = Mapping[str, np.ndarray]


def promised(values: Any, unlike: Any = None) -> dict[str, Any]:
    """Write an array for a test vector: all of a small one, the most telling places of a large one.

    Args:
      values: the array; unsigned integers of a ring are written with their sign.
      unlike: what it was before. Of a large array, the places that differ most from it are written, and some others.
    """
    array = np.asarray(values)
    array = array.view(np.int32) if array.dtype == np.uint32 else array.astype(np.float32)
    flat = array.reshape(-1)

    def written(some: np.ndarray) -> list[Any]:
        return some.tolist() if some.dtype == np.int32 else numbers(some)

    if flat.size <= FULL:
        return {"shape": list(array.shape), "values": written(flat)}
    moved = np.abs(flat - (0 if unlike is None else np.asarray(unlike, np.float32).reshape(-1)))
    at = {*np.argsort(-moved, kind="stable")[: FULL // 2].tolist(), *range(0, flat.size, -(-flat.size // (FULL // 2)))}
    places = sorted(at)
    return {"shape": list(array.shape), "at": places, "values": written(flat[places])}


def numbers(values: Any) -> list[float]:
    """Write float32 numbers with as many digits as tell them apart."""
    return [float(f"{value:.9g}") for value in np.asarray(values, np.float32).reshape(-1)]


def plain(columns: Columns) -> dict[str, Any]:
    """Write columns of examples as JSON values."""
    return {
        name: numbers(column) if column.dtype.kind == "f" and column.ndim == 1 else column.tolist()
        for name, column in columns.items()
    }


def draws(like: Columns, most: int) -> dict[str, dict[str, np.ndarray]]:
    """Return examples for test vectors: none, one, five, as many as fit, more, and some that are repeated.

    Args:
      like: made-up examples to take them from, in order, again from the first when there are too few.
      most: how many examples reconstruction takes.
    """

    def first(count: int) -> dict[str, np.ndarray]:
        return {name: np.asarray(column)[np.arange(count) % len(column)] for name, column in like.items()}

    repeated = {name: np.concatenate([column, column[:2]]) for name, column in first(3).items()}
    sizes = {"none": 0, "one": 1, "five": min(5, most), "most": most, "more": most + 3}
    return {**{name: first(size) for name, size in sizes.items()}, "repeated": repeated}


def made_up_ratings(num_items: int, scale: Sequence[float] | None, most: int) -> dict[str, np.ndarray]:
    """Return made-up ratings, for the test vectors of a ratings model."""
    low, high = scale or (1.0, 5.0)
    draw = np.random.default_rng(0)
    count = most + 3
    items = np.resize(draw.permutation(num_items), count).astype(np.int32)
    ratings = low + (high - low) * draw.integers(0, 5, count) / 4
    return {"item": items, "rating": ratings.astype(np.float32)}


def made_up_clicks(num_items: int, most: int, *, counted: bool) -> dict[str, np.ndarray]:
    """Return made-up clicks, for the test vectors of a clicks model; with counts if the model reads them."""
    columns = made_up_ratings(num_items, (1, 9), most)
    return columns if counted else {"item": columns["item"]}
