"""Real numbers as integers of a ring and back, so that sums of many clients are exact and cannot overflow.

A value is a whole number of steps. The step is a power of two: dividing by it is exact, so numpy in double precision
and JAX in single precision give the same integers, and weights that are whole numbers are not rounded at all. The only
loss is the rounding of a value to a step: at most half a step for each client and entry.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.core.checks import check_choice, check_number

# The types that hold integers of so many bits. A ring of 20 or 24 bits is computed in 32, which changes nothing modulo
# 2**20; only `restore` and whoever packs integers cut the rest off.
WIDTHS = dict.fromkeys((20, 24, 32), (np.int32, np.uint32)) | {64: (np.int64, np.uint64)}


class IntegerGrid(NamedTuple):
    """Which real numbers the integers stand for.

    Attributes:
      limit: values are from `-limit` to `limit`.
      clients: at most this many values are added up.
      step: what one integer is worth, a power of two.
      bits: 20, 24, 32 or 64: sums are modulo 2**bits.
    """

    limit: float
    clients: int
    step: float
    bits: int

    @property
    def levels(self) -> int:
        """The largest integer that a client sends."""
        return _levels(self.limit, self.step)

    def norm(self, clip: float, length: int) -> float:
        """Return the largest Euclidean norm, in steps, that `length` entries of norm `clip` have once rounded."""
        return clip / self.step + math.sqrt(length) / 2


def grid(limit: float, clients: int, *, bits: int = 32) -> IntegerGrid:
    """Choose the finest grid on which the sum of `clients` values cannot overflow.

    Args:
      limit: the largest absolute value, such as the clipping norm.
      clients: how many values are added up at most.
      bits: of the ring: 20, 24, 32 or 64.

    Returns:
      The grid. Sums stay below 2**53 even with 64 bits, so that they are exact as double precision.
    """
    check_number("limit", limit, above=True)
    check_number("clients", clients, least=1)
    check_choice("bits", bits, WIDTHS)
    room = (2 ** min(bits - 1, 53) - 1) // clients  # integers for each client
    if room < 1:
        advice = "fewer clients" if bits == 64 else "more bits"
        raise ValueError(f"{bits} bits cannot hold the sum of {clients} clients; use {advice}")
    step = 2.0 ** math.ceil(math.log2(limit) - math.log2(room))
    while _levels(limit, step) > room:
        step *= 2
    return IntegerGrid(float(limit), clients, step, bits)


def _levels(limit: float, step: float) -> int:
    # In single precision the limit itself may be rounded up.
    return math.ceil(limit * (1 + 2.0**-22) / step)


def quantise(grid: IntegerGrid, values: Any, xp: ModuleType = np) -> Any:
    """Round values to integers of the ring. Values beyond the limit become the limit.

    Args:
      grid: what integers stand for.
      values: any shape; the caller makes sure that they are finite.
      xp: numpy, or `jax.numpy` for use inside a compiled function (not for 64 bits).
    """
    signed, unsigned = WIDTHS[grid.bits]
    steps = xp.rint(xp.clip(values, -grid.limit, grid.limit) / grid.step)
    return steps.astype(signed).astype(unsigned)  # negative integers wrap around, which is what the ring does


def restore(grid: IntegerGrid, total: Any, xp: ModuleType = np) -> Any:
    """Return the real numbers that a sum of integers stands for.

    Args:
      grid: what integers stand for.
      total: the sum, modulo 2**bits, of at most `grid.clients` clients.
      xp: numpy, which gives double precision, or `jax.numpy`.
    """
    signed, unsigned = WIDTHS[grid.bits]
    spare = np.dtype(unsigned).itemsize * 8 - grid.bits  # the sign is the first bit of the ring
    steps = (total.astype(unsigned) << spare).astype(signed) >> spare
    return steps.astype(xp.float64 if xp is np else xp.float32) * grid.step
