"""What clients and server agree on before a secure sum: terms and circles; errors."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fedrecon._src.core.checks import check_rules


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
        """Describe how many clients remained."""
        self.stage, self.present, self.needed = stage, present, needed
        super().__init__(
            f"{present} clients{where} are left after '{stage}', and the threshold is {needed}: there is no sum, and "
            "nobody's data is known; try again with other clients, or a larger cohort"
        )


MAGIC, VERSION = b"FRSS", 2
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
        """Return the terms unchanged; raise if one is invalid."""
        rules = {
            "`session` must have 16 bytes": len(self.session) == 16,
            "`round` must be from 0 to 2**64 - 1": 0 <= self.round < 2**64,
            "`length` must be from 1 to 2**64 - 1": 1 <= self.length < 2**64,
            "`bits` must be 32 or 64": self.bits in WIDTHS,
            "`circle`, at most the cohort, must be from 2 to 65535": 2 <= self.circle < 2**16,
            "`threshold` must be above half of `circle`, so that nobody can collect both secrets of a client, and not "
            "above `circle`": self.circle < 2 * self.threshold <= 2 * self.circle,
        }
        check_rules({f"{rule} (got {self})": holds for rule, holds in rules.items()}, SecureSumError)
        return self

    def to_bytes(self) -> bytes:
        """Write the terms as a message of the server."""
        return _LAYOUT.pack(MAGIC, VERSION, *self)

    @classmethod
    def from_bytes(cls, message: bytes) -> Terms:
        """Read the terms from a message of the server."""
        if len(message) != _LAYOUT.size or _LAYOUT.unpack(message)[:2] != (MAGIC, VERSION):
            raise MessageError(f"{len(message)} bytes are not the terms of a secure sum of protocol version {VERSION}")
        return cls(*_LAYOUT.unpack(message)[2:]).check()

    def digest(self) -> bytes:
        """Return 32 bytes that stand for exactly these terms."""
        return hashlib.sha256(b"fedrecon secure sum" + self.to_bytes()).digest()


def expect_step(
    step: str, next_step: str, who: str = "the server", error: type[SecureSumError] = SecureSumError
) -> None:
    """Raise an error if somebody is asked for another step than the next: each is taken once, and in order."""
    if step != next_step:
        raise error(f"{who} was asked for {step!r}, and its next step is {next_step!r}")


def plan(
    cohort: int, length: int, *, bits: int = 32, round: int = 0, circle: int = 41, threshold: int | None = None
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
    """
    size = min(circle, cohort)
    needed = -(-3 * size // 5) if threshold is None else threshold
    return Terms(os.urandom(16), round, length, bits, size, needed).check()


def circles(clients: Iterable[int], size: int) -> dict[int, tuple[int, ...]]:
    """Give each client a circle: itself and those it exchanges keys with, in order of their numbers.

    Up to `size` clients are one circle. More are put on a ring in random order, and a client's circle is those up to
    `(size - 1) // 2` places away on either side. So being in somebody's circle is mutual.

    Args:
      clients: their numbers.
      size: of a circle.
    """
    members = sorted(clients)
    if len(members) <= size:
        return dict.fromkeys(members, tuple(members))
    tags = {client: os.urandom(16) for client in members}
    ring = sorted(members, key=tags.__getitem__)
    reach = (size - 1) // 2
    return {
        client: tuple(sorted(ring[(position + step) % len(ring)] for step in range(-reach, reach + 1)))
        for position, client in enumerate(ring)
    }
