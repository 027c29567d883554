"""Tables on disk: safetensors files read with numpy alone, and rows of int8 or float16 made float32 again."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from fedrecon_device.errors import BundleError

GLOBAL, START, ROW_SCALE, METADATA = "global/", "start/", "row_scale/", "__metadata__"
MOST_HEADER = 1 << 20  # bytes
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1"}


def read_tensors(data: bytes, name: str) -> dict[str, np.ndarray]:
    """Read a safetensors file; every range is checked before it is used.

    Args:
      data: the whole file.
      name: of the file, for messages.

    Raises:
      BundleError: it is not a safetensors file, or its parts overlap, leave gaps or reach beyond its end.
    """
    header, length = _header(data, name)
    header.pop(METADATA, None)
    body, tensors, places = memoryview(data)[8 + length :], {}, []
    for path, about in header.items():
        dtype, shape, (start, end) = _described(about, f"{name}: {path!r}")
        if end > len(body) or end - start != math.prod(shape) * dtype.itemsize:
            raise BundleError(f"{name}: {path!r} is {dtype}{shape} in bytes {start} to {end} of {len(body)}")
        places.append((start, end))
        try:
            tensors[path] = np.frombuffer(body[start:end], dtype).reshape(shape)
        except ValueError:  # too many dimensions, or sizes of which one is 0 and others are beyond everything
            raise BundleError(f"{name}: {path!r} has a shape that no table has: {shape}") from None
    places.sort()
    if [start for start, _ in places] != [0, *(end for _, end in places)][:-1] or (places or [(0, 0)])[-1][1] != len(
        body
    ):
        raise BundleError(f"{name}: its tensors overlap or leave bytes that belong to none")
    return tensors


def read_metadata(data: bytes, name: str) -> dict[str, str]:
    """Read the texts in the header of a safetensors file; raises like `read_tensors`."""
    metadata = _header(data, name)[0].get(METADATA, {})
    return {key: text for key, text in metadata.items() if isinstance(text, str)} if isinstance(metadata, dict) else {}


def _header(data: bytes, name: str) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and how many bytes it has."""
    if len(data) < 8:
        raise BundleError(f"{name} has {len(data)} bytes, too few for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > min(MOST_HEADER, len(data) - 8):
        raise BundleError(f"{name}: its header should have {length} bytes; the file has {len(data)}")
    return _json(data[8 : 8 + length], name), length


def _json(data: bytes, name: str) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        raise BundleError(f"{name}: its header is not JSON") from None
    if not isinstance(header, dict):
        raise BundleError(f"{name}: its header is not a JSON object")
    return header


def _described(about: Any, where: str) -> tuple[np.dtype, tuple[int, ...], tuple[int, int]]:
    try:
        dtype, shape = np.dtype(DTYPES[about["dtype"]]), tuple(about["shape"])
        start, end = about["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise BundleError(f"{where} needs a known dtype, a shape and two offsets, not {about!r}") from None
    numbers = (*shape, start, end)
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise BundleError(f"{where} has shape {shape} and offsets {start}, {end}; expected whole numbers of at least 0")
    return dtype, shape, (start, end)


def as_float32(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the tensors under a prefix, by path, with quantised ones as float32.

    Args:
      tensors: as `read_tensors` returns them.
      prefix: `GLOBAL` or `START`.

    Raises:
      BundleError: rows of int8 have no scale, or one of another length.
    """
    by_path = {}
    for name, values in tensors.items():
        if not name.startswith(prefix):
            continue
        path = name.removeprefix(prefix)
        if values.dtype == np.int8:
            scale = tensors.get(ROW_SCALE + path)
            if scale is None or scale.shape != values.shape[:1]:
                raise BundleError(f"{name} is int8 and needs one scale per row in {ROW_SCALE + path}")
            values = values.astype(np.float32) * scale.astype(np.float32).reshape(-1, *[1] * (values.ndim - 1))
        elif values.dtype == np.float16:
            values = values.astype(np.float32)
        by_path[path] = values
    return by_path
