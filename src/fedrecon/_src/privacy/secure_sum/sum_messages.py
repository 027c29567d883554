"""Messages as bytes: how each is written, and how it is read without trusting it.

Every message begins alike: magic, version, kind, the digest of the terms, and the client that it comes from or goes to.
Whatever is read is a slice of the message itself, and counts are compared with what is left of it before anything is
made from them. So a hostile message costs no more memory than its size.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedrecon._src.core.checks import check_rules
from fedrecon._src.privacy.secure_sum.primitives import SECRET
from fedrecon._src.privacy.secure_sum.terms import MAGIC, VERSION, MessageError, Terms

T = TypeVar("T")
VerifyKeys = Mapping[int, Ed25519PublicKey]  # of the clients that exist
KINDS = ("", "advertise", "roster", "shares", "delivery", "masked", "request", "reveal")  # by their numbers
_HEADER = struct.Struct(">4sBB32sQ")
_CLIENT = struct.Struct(">Q")
_ASKED = struct.Struct(">QB")
_COUNT = struct.Struct(">H")
NONCE, SEALED = 12, 2 * SECRET + 16  # two shares and the tag of AES-GCM
ENTRY = {"shares": NONCE + SEALED, "delivery": NONCE + SEALED, "reveal": SECRET}  # bytes of an entry


class Hello(NamedTuple):
    """What a client advertises.

    Attributes:
      client: its number.
      cipher: the public key with which shares are encrypted for it.
      mask: the public key from which masks follow.
      commitment: tells a right seed from a wrong one, and nothing else about it.
      message: all of it as it was sent, signed or not.
    """

    client: int
    cipher: bytes
    mask: bytes
    commitment: bytes
    message: bytes


def _header(kind: str, terms: Terms, client: int) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, KINDS.index(kind), terms.digest(), client)


class _Reader:
    """Takes a message apart from the front."""

    def __init__(self, message: bytes, kind: str, terms: Terms, client: int | None) -> None:
        self._left = memoryview(message if isinstance(message, bytes | bytearray | memoryview) else b"")
        self._kind = kind
        *version, number, digest, self.client = _HEADER.unpack(self.take(_HEADER.size))
        name = KINDS[number] if number < len(KINDS) else number
        rules = {
            f"this is not a message of a secure sum of protocol version {VERSION}": version == [MAGIC, VERSION],
            f"a message of kind {name!r} came where {kind!r} was expected": number == KINDS.index(kind),
            f"the {kind} message is from another session, round or group": digest == terms.digest(),
            f"the {kind} message names client {self.client}; it should name client {client}": (
                client in (None, self.client)
            ),
        }
        check_rules(rules, MessageError)

    def take(self, size: int) -> bytes:
        if len(self._left) < size:
            raise MessageError(f"a {self._kind} message ends too early: it is damaged")
        part, self._left = bytes(self._left[:size]), self._left[size:]
        return part

    def count(self) -> int:
        return _COUNT.unpack(self.take(_COUNT.size))[0]

    def records(self, size: int) -> list[bytes]:
        """Read a count and that many records of one size, which must be all that is left."""
        records = [self.take(size) for _ in range(self.count())]
        self.end()
        return records

    def end(self) -> None:
        if len(self._left):
            raise MessageError(f"a {self._kind} message has {len(self._left)} bytes too many: it is damaged")


def _by_client(kind: str, entries: Iterable[tuple[int, T]]) -> dict[int, T]:
    """Return the entries of a message by client; refuse a client that is named twice."""
    by_client: dict[int, T] = {}
    for client, entry in entries:
        if client in by_client:
            raise MessageError(f"a {kind} message names client {client} twice")
        by_client[client] = entry
    return by_client


# ---- advertise, roster ----


def write_hello(
    terms: Terms, client: int, cipher: bytes, mask: bytes, commitment: bytes, signing_key: Ed25519PrivateKey | None
) -> bytes:
    """Write what a client advertises, signed if there is a key."""
    body = _header("advertise", terms, client) + cipher + mask + commitment
    signature = b"" if signing_key is None else signing_key.sign(body)
    return body + _COUNT.pack(len(signature)) + signature


def read_hello(message: bytes, terms: Terms, client: int | None, verify_keys: VerifyKeys | None) -> Hello:
    """Read what a client advertises; with verify keys, only if it is signed with the client's own."""
    reader = _Reader(message, "advertise", terms, client)
    cipher, mask, commitment = (reader.take(32) for _ in range(3))
    signature = reader.take(reader.count())
    reader.end()
    if verify_keys is not None:
        if reader.client not in verify_keys:
            unknown = "has no verify key here: it is not one of the clients that are known"
            raise MessageError(f"client {reader.client} {unknown}")
        try:
            verify_keys[reader.client].verify(signature, bytes(message[: _HEADER.size + 96]))
        except InvalidSignature:
            wrong = "has not signed its keys, or not with the key that is known here"
            raise MessageError(f"client {reader.client} {wrong}") from None
    return Hello(reader.client, cipher, mask, commitment, bytes(message))


def write_roster(terms: Terms, client: int, hellos: Sequence[bytes]) -> bytes:
    """Write a client's circle: what each member advertised, as it was sent."""
    entries = b"".join(_COUNT.pack(len(hello)) + hello for hello in hellos)
    return _header("roster", terms, client) + _COUNT.pack(len(hellos)) + entries


def read_roster(message: bytes, terms: Terms, client: int, verify_keys: VerifyKeys | None) -> dict[int, Hello]:
    """Read a client's circle."""
    reader = _Reader(message, "roster", terms, client)
    hellos = [read_hello(reader.take(reader.count()), terms, None, verify_keys) for _ in range(reader.count())]
    reader.end()
    return _by_client("roster", ((hello.client, hello) for hello in hellos))


# ---- shares, delivery, reveal ----


def write_entries(kind: str, terms: Terms, client: int, entries: Mapping[int, bytes]) -> bytes:
    """Write shares that a client gives (`shares`) or gets (`delivery`), or reveals (`reveal`)."""
    records = b"".join(_CLIENT.pack(other) + entry for other, entry in entries.items())
    return _header(kind, terms, client) + _COUNT.pack(len(entries)) + records


def read_entries(
    kind: str, message: bytes, terms: Terms, client: int, expected: Collection[int] | None = None
) -> dict[int, bytes]:
    """Read what `write_entries` wrote, by the other client: whom shares are for, from, or whose secret they are of.

    Args:
      kind: of the message.
      message: as it was received.
      terms: of the sum.
      client: that it comes from or goes to.
      expected: the other clients that it must name; None for any.
    """
    records = _Reader(message, kind, terms, client).records(_CLIENT.size + ENTRY[kind])
    pairs = ((*_CLIENT.unpack(record[: _CLIENT.size]), record[_CLIENT.size :]) for record in records)
    entries: dict[int, bytes] = _by_client(kind, pairs)
    if expected is not None and set(entries) != set(expected):
        raise MessageError(f"a {kind} message of client {client} must name exactly {sorted(expected)}")
    return entries


# ---- masked ----


def write_masked(terms: Terms, client: int, vector: np.ndarray) -> bytes:
    """Write a masked vector."""
    return _header("masked", terms, client) + vector.astype(terms.dtype, copy=False).tobytes()


def read_masked(message: bytes, terms: Terms, client: int) -> np.ndarray:
    """Read a masked vector."""
    reader = _Reader(message, "masked", terms, client)
    vector = np.frombuffer(reader.take(terms.length * terms.dtype.itemsize), terms.dtype)
    reader.end()
    return vector


# ---- request ----


def write_request(terms: Terms, client: int, answered: Mapping[int, bool]) -> bytes:
    """Write which clients of a circle answered, and which did not."""
    entries = b"".join(_ASKED.pack(other, yes) for other, yes in answered.items())
    return _header("request", terms, client) + _COUNT.pack(len(answered)) + entries


def read_request(message: bytes, terms: Terms, client: int) -> list[tuple[int, bool]]:
    """Read which shares are asked for, as they are: the caller refuses a client that is named twice."""
    requested = [_ASKED.unpack(record) for record in _Reader(message, "request", terms, client).records(_ASKED.size)]
    if any(flag > 1 for _, flag in requested):
        raise MessageError("a request message asks for a kind of share that does not exist")
    return [(other, bool(flag)) for other, flag in requested]
