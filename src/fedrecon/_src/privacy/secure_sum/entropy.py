"""Where random bytes come from: the system, or a given seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


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
