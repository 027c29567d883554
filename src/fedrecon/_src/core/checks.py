"""Checks of arguments that are numbers."""

from __future__ import annotations

import math

MOST_FLOAT = 3.4e38  # beyond it, numbers are infinite in 32 bits
MOST_ROUNDS = 2**31 - 1  # the number of a round has 32 bits


def check_number(
    name: str, value: float | None, *, least: float = 0, most: float = MOST_FLOAT, above: bool = False
) -> None:
    """Check a number; None passes.

    Args:
      name: of the argument.
      value: what was given.
      least: the smallest number that is allowed.
      most: the largest.
      above: whether `least` itself is too small.

    Raises:
      ValueError: it is not finite, too small or too large.
    """
    if value is None:
        return
    finite = isinstance(value, int) or math.isfinite(value)  # `isfinite` fails for an int of 400 digits
    if not finite or value > most or value < least or (above and value == least):
        bound = f"above {least}" if above else f"at least {least}"
        raise ValueError(f"`{name}` must be {bound} and at most {most} (got {value!r:.30})")
