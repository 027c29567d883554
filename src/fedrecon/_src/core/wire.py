"""Uploads, totals and messages as bytes: safetensors with a version, checked on reading against what is expected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedrecon._src.core.checks import check_rules
from fedrecon._src.core.pytrees import flatten, from_named_arrays, to_named_arrays
from fedrecon._src.core.upload import ROW_CHUNK, Upload, is_rows, map_changes

FORMAT, VERSION = "fedrecon-message", "1"
ABOUT = "fedrecon"
MOST_HEADER = 2**20  # bytes of a header that lists arrays
MOST_BYTES = 2**31  # of a message, by default
SLACK = 8 + MOST_HEADER  # bytes that a message may have on top of its arrays: a header, and how long it is

T = TypeVar("T")


class WireError(ValueError):
    """The bytes are not the expected message."""


def to_bytes(value: Any) -> bytes:
    """Write an upload, a total, a message or any other pytree of arrays as bytes.

    Padding of rows is cut off, down to the largest number of rows of any client.

    Args:
      value: a pytree of numpy or JAX arrays.

    Example:
      >>> data = fr.kit.to_bytes({"bias": np.ones(3, np.float32)})
      >>> fr.kit.from_bytes(data, like={"bias": np.zeros(3, np.float32)})
      {'bias': array([1., 1., 1.], dtype=float32)}
    """
    arrays = to_named_arrays(_map_rows(_trim, value))
    about = {"format": FORMAT, "version": VERSION, "kind": type(value).__name__}
    return save(arrays, {ABOUT: json.dumps(about)})  # one entry, since several would come in any order


def from_bytes(data: bytes, like: T, *, most: int = MOST_BYTES) -> T:
    """Read what `to_bytes` wrote.

    Reading allocates no more memory than the size of the message, whatever its header claims.

    Args:
      data: the bytes.
      like: the expected value, of arrays or of shapes. For an `Upload`, the number of clients and the number of rows of
        each table may differ.
      most: the largest message that is accepted, in bytes.

    Raises:
      WireError: the bytes are not the expected message.

    Example:
      >>> fr.kit.from_bytes(fr.kit.to_bytes(np.arange(3)), like=np.zeros(3, int))
      array([0, 1, 2])
    """
    if len(data) > most:
        raise WireError(f"the message has {len(data)} bytes; at most {most} are accepted")
    _check_header(data, type(like).__name__)
    try:
        arrays = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as problem:
        raise WireError(f"the message is damaged: {problem}") from None
    value = from_named_arrays(arrays, like, "the message", WireError, _free_dimensions(like))
    if isinstance(value, Upload):
        _check_clients(value)
    return _map_rows(_pad, value)


def _check_header(data: bytes, kind: str) -> None:
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size] if size <= MOST_HEADER else b""
    try:
        about = json.loads(json.loads(header)["__metadata__"][ABOUT])
        actual = tuple(about.get(name) for name in ("format", "version", "kind"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        actual = ("no header that can be read",)
    if actual != (FORMAT, VERSION, kind):
        raise WireError(f"the message has {actual!r}; expected {(FORMAT, VERSION, kind)!r}")


def _free_dimensions(like: Any) -> dict[str, int]:
    """Return how many leading dimensions of each array may differ: clients, and rows of tables."""
    if not isinstance(like, Upload):
        return {}
    ones = jax.tree.map(lambda leaf: 1, like)
    return flatten(_map_rows(lambda change: dataclasses.replace(change, ids=2, values=2), ones))[0]


def _check_clients(upload: Upload) -> None:
    clients = len(upload.examples)
    for path, leaf in flatten(upload)[0].items():
        if leaf.shape[0] != clients:
            raise WireError(f"{path!r} is of {leaf.shape[0]} clients, 'examples' of {clients}")
    for path, change in ((p, c) for part in upload.parts.values() for p, c in part.items() if is_rows(c)):
        rows = change.ids.shape[1]
        if change.values.shape[1] != rows:
            raise WireError(f"{path!r} has {rows} ids and {change.values.shape[1]} rows")
        padding = np.arange(rows)[None] >= change.count[:, None]
        rules = {
            f"names a row outside of 0 to {change.table - 1}": (change.ids >= 0) & (change.ids < change.table),
            f"counts fewer than 0 or more than {rows} rows": (change.count >= 0) & (change.count <= rows),
            "has values that are not zero in its padding": change.values[padding] == 0,
        }
        check_rules({f"{path!r} {rule}": np.all(holds) for rule, holds in rules.items()}, WireError)


def _map_rows(function: Callable[[Any], Any], tree: T) -> T:
    """Apply a function to the changes of rows in a pytree."""
    return map_changes(lambda leaf: function(leaf) if is_rows(leaf) else leaf, tree)


def _trim(change: Any) -> Any:
    """Cut off the padding of rows, down to the largest number of rows of any client."""
    most = int(np.max(np.asarray(change.count), initial=0))
    return dataclasses.replace(change, ids=change.ids[:, :most], values=change.values[:, :most])


def _pad(change: Any) -> Any:
    """Pad lists of rows to a multiple of `ROW_CHUNK`."""
    rows = change.ids.shape[1]
    widen = [(0, 0), (0, max(ROW_CHUNK, rows + -rows % ROW_CHUNK) - rows)]
    values = np.pad(change.values, widen + [(0, 0)] * (change.values.ndim - 2))
    return dataclasses.replace(change, ids=np.pad(change.ids, widen), values=values)
