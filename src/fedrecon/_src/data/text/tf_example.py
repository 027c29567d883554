"""`tf.train.Example` messages read without TensorFlow: the wire format of protocol buffers, and nothing more.

An Example holds Features (field 1), a map (field 1) whose entries have a key (field 1) and a Feature (field 2): a list
of bytes (field 1), of floats (field 2) or of int64 (field 3), each with its values in field 1, packed or one by one.
"""

import struct
from collections.abc import Collection, Iterator
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Value = list[bytes] | list[float] | list[int]


def decode_example(message: bytes, wanted: Collection[str] | None = None) -> dict[str, Value]:
    """Return the features of an Example by name.

    Args:
      message: the serialized Example.
      wanted: names of the features to decode; None for all.

    Raises:
      ValueError: the bytes are not an Example.
    """
    found: dict[str, Value] = {}
    for features in _nested(message, 1):
        for entry in _nested(features, 1):
            name, feature = "", b""
            for field, kind, value in _fields(entry):
                if field == 1 and kind == BYTES:
                    name = value.decode("utf-8")
                elif field == 2 and kind == BYTES:
                    feature = value
            if wanted is None or name in wanted:
                found[name] = _values(feature)
    return found


def _values(feature: bytes) -> Value:
    """Return the list that a Feature holds; an empty one if it holds none."""
    values: Any = []
    for field, kind, content in _fields(feature):
        if kind != BYTES or field not in (1, 2, 3):
            continue
        values = []  # if there are several lists, the last counts, as for any `oneof`
        for inner, how, value in _fields(content):
            if inner != 1:
                continue
            if field == 1 and how == BYTES:
                values.append(value)
            elif field == 2 and how == FIXED32:
                values.append(struct.unpack("<f", value)[0])
            elif field == 2 and how == BYTES and len(value) % 4 == 0:
                values.extend(number for (number,) in struct.iter_unpack("<f", value))
            elif field == 3 and how == VARINT:
                values.append(_signed(value))
            elif field == 3 and how == BYTES:
                values.extend(_packed(value))
            else:
                raise ValueError(f"a value of a feature is not of its kind (wire type {how})")
    return values


def _nested(message: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the nested messages in a field."""
    return (value for field, kind, value in _fields(message) if field == wanted and kind == BYTES)


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield the number, the wire type and the content of each field: an int for VARINT, else bytes."""
    place, end = 0, len(message)
    while place < end:
        tag, place = _varint(message, place)
        field, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, place = _varint(message, place)
            yield field, kind, value
            continue
        if kind == BYTES:
            size, place = _varint(message, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {kind} at byte {place}")
        if field == 0 or place + size > end:
            raise ValueError(f"a field of {size} bytes at byte {place} does not fit in a message of {end}")
        yield field, kind, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return the number that begins at a place, and the place after it."""
    if place < len(message) and message[place] < 0x80:  # nearly always
        return message[place], place + 1
    number = 0
    for k, byte in enumerate(message[place : place + 10]):
        number |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            return number, place + k + 1
    raise ValueError(f"a number at byte {place} does not end")


def _packed(content: bytes) -> Iterator[int]:
    place = 0
    while place < len(content):
        number, place = _varint(content, place)
        yield _signed(number)


def _signed(number: int) -> int:
    """Read 64 bits as a signed integer."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
