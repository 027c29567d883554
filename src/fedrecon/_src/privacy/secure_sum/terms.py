"""What clients and server agree on before a secure sum: terms and circles; where randomness comes from; errors."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np


class SecureSumError(ValueError):
    """A secure sum cannot continue."""


class MessageError(SecureSumError):
    """A message that is damaged, of another session, round or kind, or made to harm."""


class Refusal(SecureSumError):
    """A client does not do what the server asks, since it would give too much away."""


class TooFewClients(SecureSumError):
    """Too many clients dropped out. Nobody's data is known.

    Attributes:
      stage: after which of the four messages they were missing: advertise, share, mask or unmask.
      present: how many clients were left, of the cohort or of the circle that decides.
      needed: how many there must be.
    """

    def __init__(self, stage: str, present: int, needed: int, where: str = "") -> None:
        """Say how many were left."""
        self.stage, self.present, self.needed = stage, present, needed
        super().__init__(
            f"{present} clients{where} are left after '{stage}', and the threshold is {needed}: there is no sum, and "
            "nobody's data is known; try again with other clients, or a larger cohort"
        )


class Entropy(NamedTuple):
    """A source of random bytes.

    Attributes:
      name: `system`, or `seed 7`: results say which it was.
      draw: `number of bytes -> bytes`.
    """

    name: str
    draw: Callable[[int], bytes]


SYSTEM = Entropy("system", os.urandom)


def seeded(seed: int) -> Entropy:
    """Draw bytes that follow from a seed: for tests and simulation only, they protect nobody.

    Args:
      seed: any whole number from 0.
    """
    return Entropy(f"seed {seed}", np.random.default_rng(seed).bytes)


MAGIC, VERSION = b"FRSS", 1
_LAYOUT = struct.Struct(">4sB16sQQBII")
WIDTHS: dict[int, np.dtype] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


class Terms(NamedTuple):
    """The terms of one secure sum. Every key and message is bound to all of them.

    Attributes:
      session: 16 bytes that the server draws for a training run.
      round: which round of it.
      length: how many integers a client sends.
      bits: 32 or 64: sums are modulo 2**bits.
      circle: how many clients a client exchanges keys with, itself included; all, if the cohort is no larger.
      threshold: how many of each circle must stay until the end; above half of the circle.
    """

    session: bytes
    round: int
    length: int
    bits: int
    circle: int
    threshold: int

    @property
    def dtype(self) -> np.dtype:
        """The type of the integers, as they are sent."""
        return WIDTHS[self.bits]

    def check(self) -> Terms:
        """Return the same, or say which term makes no sense."""
        if len(self.session) != 16:
            raise SecureSumError(f"`session` has {len(self.session)} bytes; it must have 16")
        if not (0 <= self.round < 2**64 and 1 <= self.length < 2**64):
            raise SecureSumError(f"`round` is {self.round} and `length` {self.length}; they must be at least 0 and 1")
        if self.bits not in WIDTHS:
            raise SecureSumError(f"`bits` is {self.bits}; integers have 32 or 64")
        if not 2 <= self.circle < 2**16:
            raise SecureSumError(f"`circle` is {self.circle}; it must be from 2 to 65535")
        if not self.circle < 2 * self.threshold <= 2 * self.circle:
            raise SecureSumError(
                f"`threshold` is {self.threshold} for circles of {self.circle}; it must be above half of that, so that "
                "nobody can collect both secrets of a client, and no more than all of it"
            )
        return self

    def to_bytes(self) -> bytes:
        """Write the terms as a message of the server."""
        return _LAYOUT.pack(
            MAGIC, VERSION, self.session, self.round, self.length, self.bits, self.circle, self.threshold
        )

    @classmethod
    def from_bytes(cls, message: bytes) -> Terms:
        """Read the terms from a message of the server."""
        if len(message) != _LAYOUT.size or message[:4] != MAGIC:
            raise MessageError(f"{len(message)} bytes are not the terms of a secure sum")
        _, version, *rest = _LAYOUT.unpack(message)
        if version != VERSION:
            raise MessageError(f"the terms are of protocol version {version}; this is version {VERSION}")
        return cls(*rest).check()

    def digest(self) -> bytes:
        """Return 32 bytes that stand for exactly these terms."""
        return hashlib.sha256(b"fedrecon secure sum" + self.to_bytes()).digest()


def plan(
    cohort: int,
    length: int,
    *,
    bits: int = 32,
    round: int = 0,
    circle: int = 41,
    threshold: int | None = None,
    session: bytes | None = None,
    entropy: Entropy = SYSTEM,
) -> Terms:
    """Choose terms for a cohort.

    If clients drop out at random, one in ten, a circle of 41 falls below its threshold of 25 in one of seven million
    cases. For one in five, set the threshold to 21 (one of 120,000) or the circle to 101 (one of 570,000).

    Args:
      cohort: how many clients are invited.
      length: how many integers each sends.
      bits: 32 or 64.
      round: which round.
      circle: how many clients exchange keys with each other; fewer if the cohort is smaller.
      threshold: how many of a circle must stay; three fifths, rounded up, by default.
      session: 16 bytes; drawn by default.
      entropy: where they are drawn from.
    """
    size = min(circle, cohort)
    if size < 2:
        raise SecureSumError(
            f"a secure sum of {cohort} clients in circles of {circle} hides nobody; it takes two or more"
        )
    needed = -(-3 * size // 5) if threshold is None else threshold
    return Terms(session or entropy.draw(16), round, length, bits, size, needed).check()


def circles(clients: Iterable[int], size: int, entropy: Entropy = SYSTEM) -> dict[int, tuple[int, ...]]:
    """Give each client a circle: itself and those it exchanges keys with, in order of their numbers.

    Up to `size` clients are one circle. More are put on a ring in random order, and a client's circle is those up to
    `(size - 1) // 2` places away on either side. So being in somebody's circle is mutual.

    Args:
      clients: their numbers.
      size: of a circle.
      entropy: where the order on the ring comes from.
    """
    members = sorted(clients)
    if len(members) <= size:
        return dict.fromkeys(members, tuple(members))
    tags = {client: entropy.draw(16) for client in members}
    ring = sorted(members, key=tags.__getitem__)
    reach = (size - 1) // 2
    return {
        client: tuple(sorted(ring[(place + step) % len(ring)] for step in range(-reach, reach + 1)))
        for place, client in enumerate(ring)
    }
