"""JSON files of a bundle: written the same every time, read within limits, those named `.zlib` compressed."""

from __future__ import annotations

import json
import zlib
from typing import Any, NoReturn

from fedrecon_device.errors import BundleError

COMPRESSED = ".zlib"
MOST_JSON = 1 << 26  # bytes, uncompressed: a million items with titles take half of it


def written(name: str, content: Any) -> bytes:
    """Return the bytes of a JSON file, compressed if its name says so.

    Args:
      name: of the file in the bundle.
      content: what JSON can hold.

    Raises:
      ValueError: it is larger than a runtime reads.
    """
    text = (json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n").encode()
    if len(text) > MOST_JSON:
        raise ValueError(f"{name} would have {len(text)} bytes; at most {MOST_JSON} are read")
    return zlib.compress(text, 9) if name.endswith(COMPRESSED) else text


def content_of(name: str, data: bytes) -> Any:
    """Return what a JSON file holds.

    Args:
      name: of the file in the bundle.
      data: its bytes.

    Raises:
      BundleError: it is not JSON, not compressed as its name says, or larger than any bundle's.
    """
    return parsed(name, _inflated(name, data) if name.endswith(COMPRESSED) else data)


def parsed(name: str, text: bytes) -> Any:
    """Parse JSON: no NaN, no infinities, nothing too long or too deep."""
    if len(text) > MOST_JSON:
        raise BundleError(f"{name} has {len(text)} bytes; at most {MOST_JSON} are read")
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        raise BundleError(f"{name} is not valid JSON") from None


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


def _inflated(name: str, data: bytes) -> bytes:
    """Return what was compressed; never more than the limit is in memory."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, MOST_JSON + 1)
    except zlib.error:
        raise BundleError(f"{name} is not compressed with zlib") from None
    if len(text) > MOST_JSON:
        raise BundleError(f"{name} has more than {MOST_JSON} bytes when decompressed")
    if not stream.eof or stream.unused_data:
        raise BundleError(f"{name} ends too early or has bytes after its end")
    return text
