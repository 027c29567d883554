"""Messages as bytes: how each is written, and how it is read without trusting it.

Every message begins alike: magic, version, kind, the digest of the terms, and the client that it comes from or goes to.
A body follows: of one size, or entries of one size by client, at most as many as a circle has members. The size is
checked before anything else is made from a message, so a hostile one costs little more memory than its size.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedrecon._src.core.checks import check_rules
from fedrecon._src.privacy.secure_sum.primitives import SHARE
from fedrecon._src.privacy.secure_sum.terms import MAGIC, VERSION, MessageError, Terms

VerifyKeys = Mapping[int, Ed25519PublicKey]  # of the clients that exist
KINDS = ("", "advertise", "roster", "shares", "delivery", "masked", "request", "reveal")  # by their numbers
_HEADER = struct.Struct(">4sBB32sQ")
_HELLO = struct.Struct(">32s32s32s64s")
NONCE = 12  # bytes, before two shares and the tag of AES-GCM
SEALED = NONCE + 2 * SHARE + 16
_SIZES = {"roster": _HELLO.size, "shares": SEALED, "delivery": SEALED, "request": 1, "reveal": SHARE}
ENTRIES = {kind: struct.Struct(f">Q{size}s") for kind, size in _SIZES.items()}  # a client, and bytes
DROPPED, ANSWERED = b"\0", b"\1"  # what a request says of a client


class Hello(NamedTuple):
    """What a client advertises.

    Attributes:
      cipher: the public key with which shares are encrypted for it.
      mask: the public key from which masks follow.
      commitment: tells a right seed from a wrong one, and nothing else about it.
      signature: of the message up to here; zeros without.
    """

    cipher: bytes
    mask: bytes
    commitment: bytes
    signature: bytes = bytes(64)


def _header(kind: str, terms: Terms, client: int) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, KINDS.index(kind), terms.digest(), client)


def _body(kind: str, message: bytes, terms: Terms, client: int, sizes: Collection[int]) -> memoryview:
    """Return what follows the header of a message; refuse another header, and a body of none of the sizes."""
    view = memoryview(message if isinstance(message, bytes | bytearray | memoryview) else b"")
    start, body = bytes(view[: _HEADER.size]), view[_HEADER.size :]
    *version, number, digest, named = _HEADER.unpack(start.ljust(_HEADER.size, b"\0"))
    name = KINDS[number] if number < len(KINDS) else number
    rules = {
        f"this is not a message of a secure sum of protocol version {VERSION}": version == [MAGIC, VERSION],
        f"a message of kind {name!r} came where {kind!r} was expected": number == KINDS.index(kind),
        f"the {kind} message is from another session, round or group": digest == terms.digest(),
        f"the {kind} message names client {named}; it should name client {client}": named == client,
        f"no {kind} message of this sum has {len(view)} bytes": len(start) == _HEADER.size and len(body) in sizes,
    }
    check_rules(rules, MessageError)
    return body


# ---- entries by client: roster, shares, delivery, request, reveal ----


def write_entries(kind: str, terms: Terms, client: int, entries: Mapping[int, bytes]) -> bytes:
    """Write what a client says to others or about them, or the server says of them to it."""
    return _header(kind, terms, client) + b"".join(ENTRIES[kind].pack(*entry) for entry in entries.items())


def read_entries(
    kind: str, message: bytes, terms: Terms, client: int, expected: Collection[int] | None = None
) -> dict[int, bytes]:
    """Read what `write_entries` wrote, by the other client.

    Args:
      kind: of the message.
      message: as it was received.
      terms: of the sum.
      client: that it comes from or goes to.
      expected: the other clients that it must name; None for any.
    """
    layout = ENTRIES[kind]
    body = _body(kind, message, terms, client, range(0, layout.size * terms.circle + 1, layout.size))
    entries: dict[int, bytes] = {}
    for other, entry in layout.iter_unpack(body):
        if other in entries:
            raise MessageError(f"a {kind} message names client {other} twice")
        entries[other] = entry
    if expected is not None and set(entries) != set(expected):
        raise MessageError(f"a {kind} message of client {client} must name exactly {sorted(expected)}")
    return entries


# ---- advertise, roster ----


def write_hello(terms: Terms, client: int, hello: Hello, signing_key: Ed25519PrivateKey | None) -> bytes:
    """Write what a client advertises, signed if there is a key."""
    signature = hello.signature if signing_key is None else signing_key.sign(_signed(terms, client, hello))
    return _header("advertise", terms, client) + _HELLO.pack(*hello._replace(signature=signature))


def _signed(terms: Terms, client: int, hello: Hello) -> bytes:
    return _header("advertise", terms, client) + b"".join(hello[:3])


def read_hello(message: bytes, terms: Terms, client: int, verify_keys: VerifyKeys | None) -> Hello:
    """Read what a client advertises; with verify keys, only if it is signed with the client's own."""
    return _verified(_body("advertise", message, terms, client, [_HELLO.size]), terms, client, verify_keys)


def write_roster(terms: Terms, client: int, circle: Mapping[int, Hello]) -> bytes:
    """Write a client's circle: what each member advertised."""
    return write_entries("roster", terms, client, {member: b"".join(hello) for member, hello in circle.items()})


def read_roster(message: bytes, terms: Terms, client: int, verify_keys: VerifyKeys | None) -> dict[int, Hello]:
    """Read a client's circle."""
    entries = read_entries("roster", message, terms, client)
    return {member: _verified(entry, terms, member, verify_keys) for member, entry in entries.items()}


def _verified(body: bytes | memoryview, terms: Terms, client: int, verify_keys: VerifyKeys | None) -> Hello:
    hello = Hello(*_HELLO.unpack(body))
    if verify_keys is not None:
        if client not in verify_keys:
            raise MessageError(f"client {client} has no verify key here: it is not one of the clients that are known")
        try:
            verify_keys[client].verify(hello.signature, _signed(terms, client, hello))
        except InvalidSignature:
            wrong = "has not signed its keys, or not with the key that is known here"
            raise MessageError(f"client {client} {wrong}") from None
    return hello


# ---- masked ----


def write_masked(terms: Terms, client: int, vector: np.ndarray) -> bytes:
    """Write a masked vector."""
    return _header("masked", terms, client) + vector.astype(terms.dtype, copy=False).tobytes()


def read_masked(message: bytes, terms: Terms, client: int) -> np.ndarray:
    """Read a masked vector."""
    return np.frombuffer(_body("masked", message, terms, client, [terms.length * terms.dtype.itemsize]), terms.dtype)
