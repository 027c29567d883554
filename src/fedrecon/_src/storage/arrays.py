"""Read and write pytrees of arrays as safetensors files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.storage.atomic import StorageError, open_regular, write_bytes

MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts
MAX_PARAMETER = 1e15  # products of larger float32 parameters overflow


def save_arrays(path: Path, tree: Any, *, mode: int = 0o666) -> None:
    """Save a pytree of arrays to one safetensors file, by path.

    Args:
      path: the file.
      tree: the arrays.
      mode: its permissions, before the process's umask applies.

    Raises:
      StorageError: the disk is full, or the file cannot be written for another reason.
    """
    leaves, _ = flatten(tree)
    try:
        content = save({name or "value": np.asarray(leaf, order="C") for name, leaf in leaves.items()})
    except SafetensorError as problem:
        raise StorageError(f"{path} cannot be written: {problem}") from None
    write_bytes(path, content, mode=mode)


def load_arrays(path: Path, like: Any) -> Any:
    """Load a pytree of arrays that `save_arrays` wrote.

    Args:
      path: the file.
      like: a pytree of arrays or of shapes, with the expected structure, shapes and types.

    Raises:
      StorageError: if the file is missing, damaged, or not what is expected.
    """
    leaves, structure = flatten(like)
    expected = {name or "value": leaf for name, leaf in leaves.items()}
    array_bytes = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in expected.values())
    open_regular(path, array_bytes + MAX_HEADER_BYTES).close()
    try:
        arrays = load_file(path)
    except Exception as problem:
        raise StorageError(f"{path} cannot be read: {problem}") from None
    actual = {name: f"{array.dtype}{array.shape}" for name, array in arrays.items()}
    described = {name: f"{np.dtype(leaf.dtype)}{tuple(leaf.shape)}" for name, leaf in expected.items()}
    if wrong := sorted(name for name in {*actual, *described} if actual.get(name) != described.get(name)):
        name = wrong[0]
        raise StorageError(f"{path}: {name!r} is {actual.get(name, 'missing')}; expected {described.get(name, 'none')}")
    return jax.tree.map(np.asarray, unflatten(structure, {name: arrays[name or "value"] for name in leaves}))


def check_parameters(path: Path, tree: Any) -> None:
    """Raise `StorageError` unless all floating-point parameters are finite and small enough to compute with."""
    for name, leaf in flatten(tree)[0].items():
        array = np.asarray(leaf)
        # Written so that NaN fails. Types of ml_dtypes, such as bfloat16, have kind V.
        if array.dtype.kind in "fV" and not np.all(np.abs(array.astype(np.float64)) <= MAX_PARAMETER):
            raise StorageError(f"{path}: {name!r} must be finite and at most {MAX_PARAMETER:g} in absolute value")
