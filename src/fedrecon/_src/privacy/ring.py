"""Real numbers as integers of a ring and back, so that sums of many clients are exact and cannot overflow.

A value is a whole number of steps. The step is a power of two: dividing by it is exact, so numpy in double precision
and JAX in single precision give the same integers, and weights that are whole numbers are not rounded at all. The only
loss is the rounding of a value to a step: at most half a step for each client and entry (`Grid.error`).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

WIDTHS = {32: (np.int32, np.uint32), 64: (np.int64, np.uint64)}


class Grid(NamedTuple):
    """Which real numbers the integers stand for.

    Attributes:
      limit: values are from `-limit` to `limit`.
      clients: at most this many values are added up.
      step: what one integer is worth, a power of two.
      bits: 32 or 64: sums are modulo 2**bits.
      headroom: integers that are left free on either side for noise in the sum.
    """

    limit: float
    clients: int
    step: float
    bits: int
    headroom: int = 0

    @property
    def levels(self) -> int:
        """The largest integer that a client sends."""
        return _levels(self.limit, self.step)

    @property
    def error(self) -> float:
        """How far rounding may move a client's value; a mean is off by at most this, a sum of n by n times this."""
        return self.step / 2

    def norm(self, clip: float, length: int) -> float:
        """Return the largest Euclidean norm, in steps, that `length` entries of norm `clip` have once rounded."""
        return clip / self.step + math.sqrt(length) / 2


def grid(limit: float, clients: int, *, bits: int = 32, headroom: int = 0) -> Grid:
    """Choose the finest grid on which the sum of `clients` values cannot overflow.

    Args:
      limit: the largest absolute value, such as the clipping norm.
      clients: how many values are added up at most.
      bits: of the ring, 32 or 64.
      headroom: integers to leave free on either side, for noise that clients add.

    Returns:
      The grid. Sums stay below 2**53 even with 64 bits, so that they are exact as double precision.
    """
    if not (limit > 0 and math.isfinite(limit)):
        raise ValueError(f"`limit` is {limit}; it must be a number above 0")
    if clients < 1:
        raise ValueError(f"`clients` is {clients}; a sum has one client or more")
    if bits not in WIDTHS:
        raise ValueError(f"`bits` is {bits}; integers have 32 or 64")
    if headroom < 0:
        raise ValueError(f"`headroom` is {headroom}; it cannot be negative")
    room = (2 ** min(bits - 1, 53) - 1 - headroom) // clients  # integers for each client
    if room < 1:
        raise ValueError(
            f"{bits} bits cannot hold the sum of {clients} clients"
            + (f" and noise up to {headroom}" if headroom else "")
            + ("; use 64 bits" if bits == 32 else "; use fewer clients or less noise")
        )
    step = 2.0 ** math.ceil(math.log2(limit) - math.log2(room))
    while _levels(limit, step) > room:
        step *= 2
    return Grid(float(limit), clients, step, bits, headroom)


def _levels(limit: float, step: float) -> int:
    # In single precision the limit itself may be rounded up.
    return math.ceil(limit * (1 + 2.0**-22) / step)


def quantise(grid: Grid, values: Any, xp: ModuleType = np) -> Any:
    """Round values to integers of the ring. Values beyond the limit become the limit.

    Args:
      grid: what integers stand for.
      values: any shape; the caller makes sure that they are finite.
      xp: numpy, or `jax.numpy` for use inside a compiled function (32 bits only).
    """
    signed, unsigned = WIDTHS[grid.bits]
    steps = xp.rint(xp.clip(values, -grid.limit, grid.limit) / grid.step)
    return steps.astype(signed).astype(unsigned)  # negative integers wrap around, which is what the ring does


def restore(grid: Grid, total: Any, xp: ModuleType = np) -> Any:
    """Return the real numbers that a sum of integers stands for.

    Args:
      grid: what integers stand for.
      total: the sum, modulo 2**bits, of at most `grid.clients` clients.
      xp: numpy, which gives double precision, or `jax.numpy`.
    """
    signed = WIDTHS[grid.bits][0]
    return total.astype(signed).astype(xp.float64 if xp is np else xp.float32) * grid.step


class Code(NamedTuple):
    """How a client's vector and its weight become integers.

    Attributes:
      values: the grid of weighted entries.
      weight: the grid of weights.
    """

    values: Grid
    weight: Grid

    def mean_error(self, clients: int, weight: float, mean: float = 0.0) -> float:
        """Return how far an entry of a weighted mean may be from the exact one.

        Args:
          clients: how many are in the sum.
          weight: the sum of their weights, as decoded.
          mean: the entry's absolute value. Only matters where weights are not multiples of the weight's step.
        """
        whole = self.weight.step <= 1
        return clients * (self.values.error + (0.0 if whole else self.weight.error * abs(mean))) / weight


def code(limit: float, clients: int, *, max_weight: float = 1.0, bits: int = 32, headroom: int = 0) -> Code:
    """Choose grids for vectors whose entries are at most `limit` and that are weighed.

    Args:
      limit: the largest absolute entry before weighing, such as the clipping norm.
      clients: how many are added up at most.
      max_weight: the largest weight.
      bits: of the ring, 32 or 64.
      headroom: integers to leave free for noise.
    """
    if not (max_weight > 0 and math.isfinite(max_weight)):
        raise ValueError(f"`max_weight` is {max_weight}; it must be a number above 0")
    return Code(
        grid(limit * max_weight, clients, bits=bits, headroom=headroom),
        grid(max_weight, clients, bits=bits, headroom=headroom),
    )


def encode(code: Code, vector: Any, weight: Any = 1.0, xp: ModuleType = np) -> Any:
    """Return `(length + 1,)` integers: the vector times the weight, and the weight.

    Args:
      code: how numbers become integers.
      vector: `(length,)` finite entries.
      weight: of this client.
      xp: numpy, or `jax.numpy`.
    """
    weight = xp.asarray(weight)
    parts = [quantise(code.values, vector * weight, xp), quantise(code.weight, weight, xp).reshape(1)]
    return xp.concatenate(parts)


def decode(code: Code, total: Any, xp: ModuleType = np) -> tuple[Any, Any]:
    """Return the weighted sum of vectors and the sum of weights.

    Args:
      code: how numbers became integers.
      total: `(length + 1,)` the sum of what clients encoded.
      xp: numpy, or `jax.numpy`.
    """
    return restore(code.values, total[:-1], xp), restore(code.weight, total[-1], xp)
