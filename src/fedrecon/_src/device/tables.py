"""Tables as a device gets them: float32, float16, or int8 with a scale per row."""

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
    found: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        values = np.asarray(leaf)
        if not np.all(np.isfinite(values)):
            raise ValueError(f"global parameter {path!r} has entries that are not finite; train again or repair it")
        small = values.dtype != np.float32 or values.size < SMALL
        if quantise is None or small or any(fnmatchcase(path, pattern) for pattern in exact):
            found[GLOBAL + path] = values
        elif quantise == "float16" or values.size <= NARROW * len(values):
            if np.max(np.abs(values)) > np.finfo(np.float16).max:
                raise ValueError(f"global parameter {path!r} has entries above 65504: float16 cannot hold them")
            found[GLOBAL + path] = values.astype(np.float16)
        else:
            rows = values.reshape(len(values), -1)
            scale = _halves_from(np.max(np.abs(rows), 1) / np.float32(127), path)
            safe = np.where(scale > 0, scale, 1).astype(np.float32)
            found[GLOBAL + path] = np.rint(rows / safe[:, None]).astype(np.int8).reshape(values.shape)
            found[ROW_SCALE + path] = scale
    return found


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
    return save({**{name: np.asarray(one, order="C") for name, one in stored.items()}, **local})
