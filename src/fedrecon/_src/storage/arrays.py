"""Read and write pytrees of arrays as safetensors files, and settings as JSON files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.storage.folders import sync
from fedrecon._src.storage.storage_errors import StorageError

ARRAYS, MANIFEST = "arrays.safetensors", "manifest.json"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` while a file is written into a `StorageError` that names the file.

    Args:
      path: the file.
    """
    try:
        yield
    except OSError as problem:
        raise StorageError(f"{path} cannot be written: {problem.strerror or problem}") from None


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically: if the process is killed, either the old or the new content is there.

    Args:
      path: the file.
      content: all of it.
      mode: its permissions, before the process's umask applies.

    Raises:
      StorageError: the disk is full, or the file cannot be written for another reason.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # a leftover one may have other permissions
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
            sync(temporary)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically.

    Args:
      path: the file.
      value: what to write; numbers that are not finite become null.
    """
    write_bytes(path, (json.dumps(without_nan(value), indent=2) + "\n").encode())


def without_nan(value: Any) -> Any:
    """Replace numbers that JSON cannot write (NaN, infinity) by None.

    Args:
      value: of JSON types.
    """
    if isinstance(value, Mapping):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Args:
      path: the file.

    Raises:
      StorageError: it is missing, cannot be read, or is not JSON; the message names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(f"{path} is missing") from None
    except OSError as problem:
        raise StorageError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except RecursionError:
        raise StorageError(f"{path} is not valid: its JSON is nested too deeply") from None
    except ValueError as problem:  # not JSON, not UTF-8, or a number of thousands of digits
        raise StorageError(f"{path} is not valid JSON: {problem}") from None


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
    """Load a pytree of arrays.

    Args:
      path: a file that `save_arrays` wrote.
      like: a pytree of arrays or of shapes, with the expected structure, shapes and types.

    Raises:
      StorageError: if the file is missing, damaged, or not what is expected.
    """
    try:
        found = load_file(path)
    except FileNotFoundError:
        raise StorageError(f"{path} is missing") from None
    except Exception as problem:
        raise StorageError(f"{path} cannot be read: {problem}") from None
    leaves, structure = flatten(like)
    wanted = {name or "value": leaf for name, leaf in leaves.items()}
    if set(found) != set(wanted):
        raise StorageError(f"{path} holds {sorted(found)}; expected {sorted(wanted)}")
    for name, leaf in wanted.items():
        if found[name].shape != tuple(leaf.shape) or found[name].dtype != leaf.dtype:
            raise StorageError(
                f"{path}: {name!r} is {found[name].dtype}{found[name].shape}; expected {leaf.dtype}{tuple(leaf.shape)}"
            )
    return jax.tree.map(np.asarray, unflatten(structure, {name: found[name or "value"] for name in leaves}))
