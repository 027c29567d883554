"""Tables as a device gets them: float32, float16, or int8 with a scale a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save

from fedrecon_device.tensors import GLOBAL, ROW_SCALE, START, as_float32

Quantisation = Literal["int8", "float16"]
SMALL = 1024  # numbers: smaller leaves stay float32: quantising them would save next to nothing
NARROW = 4  # numbers of a row: with a scale of four bytes, int8 rows of so few are no smaller than float16


def packed(leaves: Mapping[str, Any], quantise: Quantisation | None) -> dict[str, np.ndarray]:
    """Return global parameters as they are stored, by the name of the tensor.

    Args:
      leaves: float arrays by path.
      quantise: `int8`, with one float32 scale for each row of a table, and in float16 what has few numbers a row; or
        `float16`; None keeps float32.

    Raises:
      ValueError: a leaf has numbers that the form cannot hold.
    """
    found: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        values = np.asarray(leaf)
        if not np.all(np.isfinite(values)):
            raise ValueError(f"global parameter {path!r} has entries that are not finite; train again or repair it")
        if quantise is None or values.dtype != np.float32 or values.size < SMALL:
            found[GLOBAL + path] = values
        elif quantise == "float16" or values.size <= NARROW * len(values):
            if np.max(np.abs(values)) > np.finfo(np.float16).max:
                raise ValueError(f"global parameter {path!r} has entries above 65504: float16 cannot hold them")
            found[GLOBAL + path] = values.astype(np.float16)
        else:
            rows = values.reshape(len(values), -1)
            scale = (np.max(np.abs(rows), 1) / np.float32(127)).astype(np.float32)
            safe = np.where(scale > 0, scale, 1)
            found[GLOBAL + path] = np.rint(rows / safe[:, None]).astype(np.int8).reshape(values.shape)
            found[ROW_SCALE + path] = scale
    return found


def unpacked(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the global parameters that a device computes with, by path."""
    return as_float32(dict(stored), GLOBAL)


def tables_file(stored: Mapping[str, np.ndarray], start: Mapping[str, Any]) -> bytes:
    """Return the file with global parameters and the start of local ones."""
    local = {START + path: np.asarray(leaf, order="C") for path, leaf in start.items()}
    return save({**{name: np.asarray(one, order="C") for name, one in stored.items()}, **local})
