"""Test vectors: examples, and what JAX makes of them with the very tables that a device has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FULL = 512  # numbers: of larger arrays only some are written
Columns = Mapping[str, np.ndarray]


def promised(values: Any, unlike: Any = None) -> dict[str, Any]:
    """Write an array for a test vector: all of a small one, the most telling places of a large one.

    Args:
      values: the array.
      unlike: what it was before. Of a large array, the places that differ most from it are written, and some others.
    """
    array = np.asarray(values, np.float32)
    flat = array.reshape(-1)
    if flat.size <= FULL:
        return {"shape": list(array.shape), "values": numbers(flat)}
    moved = np.abs(flat - (0 if unlike is None else np.asarray(unlike, np.float32).reshape(-1)))
    at = {*np.argsort(-moved, kind="stable")[: FULL // 2].tolist(), *range(0, flat.size, -(-flat.size // (FULL // 2)))}
    places = sorted(at)
    return {"shape": list(array.shape), "at": places, "values": numbers(flat[places])}


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
    """Return ratings that nobody gave, for test vectors of a ratings model."""
    low, high = scale or (1.0, 5.0)
    draw = np.random.default_rng(0)
    count = most + 3
    items = np.resize(draw.permutation(num_items), count).astype(np.int32)
    ratings = low + (high - low) * draw.integers(0, 5, count) / 4
    return {"item": items, "rating": ratings.astype(np.float32)}


def made_up_clicks(num_items: int, most: int, *, counted: bool) -> dict[str, np.ndarray]:
    """Return items that nobody has, for test vectors of a model of clicks; with counts if the model reads them."""
    columns = made_up_ratings(num_items, (1, 9), most)
    return columns if counted else {"item": columns["item"]}
