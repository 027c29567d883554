"""Arrays on disk: pytrees as safetensors with a JSON manifest, in folders that are whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from fedrecon.model import flatten, unflatten

ARRAYS, MANIFEST = "arrays.safetensors", "manifest.json"


class StorageError(ValueError):
    """Something on disk is not what it should be."""


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Write a folder under a temporary name, sync it to disk, then give it its name.

    Whoever finds the folder under its name finds all of it: a process that is killed leaves at most a folder with a
    temporary name, which nobody reads and the next writer removes.
    """
    temporary = path.with_name(f".{path.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    for file in temporary.iterdir():
        _sync(file)
    _sync(temporary)
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it is either the old one or the new one, whenever the process ends."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file, with an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise StorageError(f"{path} is not valid JSON: {problem}") from None


def save_arrays(path: Path, tree: Any) -> None:
    """Save a pytree of arrays to one safetensors file, by path."""
    leaves, _ = flatten(tree)
    save_file({name or "value": np.ascontiguousarray(leaf) for name, leaf in leaves.items()}, path)


def load_arrays(path: Path, like: Any) -> Any:
    """Load a pytree of arrays.

    Args:
      path: a file that `save_arrays` wrote.
      like: a pytree of the same structure, of arrays or of shapes, that says what is expected.

    Raises:
      StorageError: if the file is missing, damaged, or holds something else.
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
