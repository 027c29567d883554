"""Noise that clients add in integers, so that the server never sees a sum without noise.

Each client adds Skellam noise, the difference of two Poisson variables. A sum of Skellam variables is one, too: `least`
clients together have the noise that was asked for, whoever they are, and more clients have more. Clients that work
together with the server can remove their own share again; count only trusted clients in `least`.

The Poisson variables are numpy's. In deployment its generator is seeded with 256 bits of the system's entropy; it is a
statistical generator, not a cryptographic one. Its noise leaves the client only under the masks of a secure sum.

References: Agarwal, Kairouz and Liu, The Skellam mechanism for differentially private federated learning, NeurIPS 2021.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np

from fedrecon._src.privacy.accounting import Release, check_clip
from fedrecon._src.privacy.ring import WIDTHS, Grid

TAIL = 12  # standard deviations of noise that are left free in the ring: more have a probability below 1e-30


class ShareOfNoise(NamedTuple):
    """What each client adds.

    Attributes:
      grid: what the integers stand for.
      variance: of one client's noise, in steps squared.
      noise_multiplier: of `least` clients together, in units of the most that one client can add to the sum.
      steps: the most that one client can add to the sum: its norm after rounding, in integers.
      length: how many entries a client sends.
      least: how many clients together have the noise that was asked for.
    """

    grid: Grid
    variance: float
    noise_multiplier: float
    steps: float
    length: int
    least: int

    def release(self, rate: float, rounds: int = 1) -> Release:
        """Return what rounds with this noise release, for a ledger.

        Args:
          rate: the probability with which a client takes part, unseen; 1 against somebody who sees who does.
          rounds: how many.
        """
        return Release(self.noise_multiplier, rate, rounds, "skellam", steps=self.steps, length=self.length)


def share_of_noise(
    clip: float,
    length: int,
    noise_multiplier: float,
    *,
    clients: int,
    least: int,
    bits: int = 32,
    resolution: int = 2**16,
) -> ShareOfNoise:
    """Choose the grid and each client's share of the noise.

    Args:
      clip: the largest norm of an upload.
      length: how many entries it has.
      noise_multiplier: noise in the sum, in units of the clipping norm.
      clients: the most that are added up; sums of this many do not overflow.
      least: the fewest trusted clients that are added up; together they add all the noise.
      bits: of the ring, 32 or 64.
      resolution: how many integers the noise in the sum is wide at most. Finer ones gain nothing: rounding to an
        integer lengthens an upload by half the root of `length` steps, which is part of the noise's calibration.
    """
    check_clip(clip)
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"`noise_multiplier` is {noise_multiplier}; it must be a number above 0")
    if not 1 <= least <= clients:
        raise ValueError(f"`least` is {least} of {clients} clients; it must be from 1 to all of them")
    if length < 1:
        raise ValueError(f"`length` is {length}; an upload has one entry or more")
    if bits not in WIDTHS:
        raise ValueError(f"`bits` is {bits}; integers have 32 or 64")
    step = 2.0 ** math.ceil(math.log2(noise_multiplier * clip / resolution))
    while True:
        trial = Grid(clip, clients, step, bits)
        steps = trial.norm(clip, length)
        variance = (noise_multiplier * steps) ** 2 / least
        headroom = math.ceil(TAIL * math.sqrt(clients * variance))
        if clients * trial.levels + headroom < 2 ** min(bits - 1, 53):
            return ShareOfNoise(trial._replace(headroom=headroom), variance, noise_multiplier, steps, length, least)
        if step > clip:
            raise ValueError(
                f"{bits} bits cannot hold the sum of {clients} clients and their noise; use 64 bits, or less noise"
            )
        step *= 2


def system_generator() -> np.random.Generator:
    """Return a generator seeded with 256 bits of the system's entropy."""
    return np.random.Generator(np.random.PCG64DXSM(int.from_bytes(os.urandom(32), "big")))


def draw(share: ShareOfNoise, rng: np.random.Generator, clients: int = 1) -> np.ndarray:
    """Draw the noise of a client, as integers of the ring.

    Args:
      share: of the noise.
      rng: `system_generator()` in deployment; a simulation may seed one, and must say so.
      clients: draw the sum of this many clients' noise at once, for a simulation.
    """
    signed, unsigned = WIDTHS[share.grid.bits]
    rate = clients * share.variance / 2
    noise = rng.poisson(rate, share.length) - rng.poisson(rate, share.length)
    return noise.astype(signed).astype(unsigned)
