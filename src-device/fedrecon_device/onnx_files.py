"""What a graph's file may hold: checked before ONNX Runtime loads it, which sets no limit on time and memory.

An ONNX file is a protocol buffer. This walks through its fields, by their numbers. It refuses functions (nested ones
turn a kilobyte into millions of operations), files beside it, sparse tables, text, and operations of other domains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedrecon_device.errors import BundleError

DEEPEST = 20  # graphs within graphs
TEXT = 8  # the type of a tensor of text
INNER: dict[str, dict[int, str]] = {  # by message: fields that hold messages, and of which kind
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": {},
}
REFUSED: dict[tuple[str, int], str] = {
    ("model", 25): "functions of its own",
    ("graph", 15): "sparse tables",
    ("attribute", 22): "sparse tables",
    ("attribute", 23): "sparse tables",
    ("tensor", 13): "tables in files beside it",
}


def check_graph_file(name: str, data: bytes) -> None:
    """Check the file of a graph.

    Args:
      name: of the file, for messages.
      data: the whole file.

    Raises:
      BundleError: it is not a graph, or holds what no graph of a bundle does.
    """
    todo: list[tuple[str, memoryview, int]] = [("model", memoryview(data), 0)]
    while todo:
        kind, message, depth = todo.pop()
        if depth > DEEPEST:
            raise BundleError(f"{name}: graphs within graphs go deeper than {DEEPEST}")
        try:
            fields = list(_fields(message))
        except (IndexError, ValueError):
            raise BundleError(f"{name} is not an ONNX file") from None
        for number, value in fields:
            what = REFUSED.get((kind, number)) or _refused(kind, number, value)
            if what is not None:
                raise BundleError(f"{name} has {what}; a graph of a bundle has none")
            if number in INNER[kind]:
                if not isinstance(value, memoryview):
                    raise BundleError(f"{name} is not an ONNX file")
                todo.append((INNER[kind][number], value, depth + (kind == "attribute")))


def _refused(kind: str, number: int, value: Any) -> str | None:
    """Say what is wrong with one value of a message; None if nothing is."""
    if kind == "node" and number in (4, 7):
        word = bytes(value[:100]) if isinstance(value, memoryview) else b""
        if number == 7 and word not in (b"", b"ai.onnx"):
            return f"an operation of {word!r}"
        if number == 4 and word.startswith(b"String"):
            return f"the operation {word!r} on text"
    if kind == "tensor" and number == 2 and value == TEXT:
        return "text"
    return None


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: their number, and a whole number or bytes."""
    at = 0
    while at < len(message):
        tag, at = _whole(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _whole(message, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError("groups")
        length, at = _whole(message, at) if wire == 2 else ((8, at) if wire == 1 else (4, at))
        if at + length > len(message):
            raise ValueError("beyond the end")
        yield number, message[at : at + length]
        at += length


def _whole(message: memoryview, at: int) -> tuple[int, int]:
    """Read a whole number of one to ten bytes; return it and where it ends."""
    value = 0
    for position in range(10):
        byte = message[at + position]
        value |= (byte & 127) << (7 * position)
        if byte < 128:
            return value, at + position + 1
    raise ValueError("too long")
