"""Noise: discrete (Skellam) noise that clients add, and noise of the server that is correlated between rounds.

With discrete noise the server never sees a sum without noise. Each client adds Skellam noise, the difference of two
Poisson variables. A sum of Skellam variables is one, too: `least` clients together have the noise that was asked for,
whoever they are, and more clients have more. Clients that work together with the server can remove their own share
again; count only trusted clients in `least`.

The Poisson variables are numpy's. In deployment its generator is seeded with 256 bits of the system's entropy; it is a
statistical generator, not a cryptographic one. Its noise leaves the client only under the masks of a secure sum.

With independent noise the errors of all rounds add up in the model. With correlated noise (banded matrix factorization)
later rounds take part of it back, so that less of it stays in the model: what is added is `C^-1 Z`, not `Z`, where
row t of `Z` is fresh noise and `C` is a lower triangular matrix with few bands. A client whose rounds are at least as
far apart as there are bands changes the rows of `C` times its uploads by one column for each time, and these columns do
not overlap: k times cost what k releases with the noise of `Z` cost. So nothing has to be drawn at random or kept
unseen. What must be promised is that nobody takes part twice within that many rounds.

References: Agarwal, Kairouz and Liu, The Skellam mechanism for differentially private federated learning, NeurIPS 2021.
Choquette-Choo et al., (Amplified) banded matrix factorization, NeurIPS 2023.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.checks import check_choice, check_number, check_numbers, require
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.privacy.ring import WIDTHS, IntegerGrid

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

    grid: IntegerGrid
    variance: float
    noise_multiplier: float
    steps: float
    length: int
    least: int

    def release(self, rate: float, rounds: int = 1, honest: float | None = None) -> Release:
        """Return what rounds with this noise release, for a ledger.

        Args:
          rate: the probability with which a client takes part, unseen; 1 against somebody who sees who does.
          rounds: how many.
          honest: how many clients really add their share; `least` by default. Fewer have less noise than was promised.
        """
        multiplier = self.noise_multiplier * math.sqrt((self.least if honest is None else honest) / self.least)
        return Release(multiplier, rate, rounds, "skellam", steps=self.steps, length=self.length)


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
      bits: of the ring: 20, 24, 32 or 64.
      resolution: how many integers the noise in the sum is wide at most. Finer ones gain nothing: rounding to an
        integer lengthens an upload by half the root of `length` steps, which is part of the noise's calibration.
    """
    check_numbers({"clip": clip, "noise_multiplier": noise_multiplier}, above=True)
    check_number("least", least, least=1, most=clients)
    check_number("length", length, least=1)
    check_choice("bits", bits, WIDTHS)
    step = 2.0 ** math.ceil(math.log2(noise_multiplier * clip / resolution))
    while True:
        trial = IntegerGrid(clip, clients, step, bits)
        steps = trial.norm(clip, length)
        variance = (noise_multiplier * steps) ** 2 / least
        headroom = math.ceil(TAIL * math.sqrt(clients * variance))
        if clients * trial.levels + headroom < 2 ** min(bits - 1, 53):
            return ShareOfNoise(trial, variance, noise_multiplier, steps, length, least)
        if step > clip:
            advice = "use more bits or less noise"
            raise ValueError(f"{bits} bits cannot hold the sum of {clients} clients with noise; {advice}")
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


# ---- correlated noise ----


@functools.lru_cache(maxsize=16)
def coefficients(bands: int, rounds: int) -> tuple[float, ...]:
    """Return the bands of `C`, best for the sums over all rounds so far, with norm 1.

    Args:
      bands: how many; 1 is independent noise.
      rounds: how many are planned.
    """
    check_numbers({"correlated": bands, "rounds": rounds}, least=1)
    if bands == 1:
        return (1.0,)
    toeplitz = require("jax_privacy.matrix_factorization.toeplitz")
    bands_weights = np.asarray(toeplitz.optimize_banded_toeplitz(max(rounds, bands), bands), np.float64)
    return tuple((bands_weights / np.linalg.norm(bands_weights)).tolist())


def nothing_yet(bands: int, like: Any) -> Any:
    """Return the noise of the rounds before the first: none.

    Args:
      bands: of `C`.
      like: a tree of arrays, or of their shapes, that noise is added to.

    Example:
      >>> import jax.numpy as jnp
      >>> import fedrecon as fr
      >>> fr.privacy.nothing_yet(3, {"w": jnp.zeros(4)})["w"].shape
      (2, 4)
    """
    return jax.tree.map(lambda leaf: jnp.zeros((bands - 1, *leaf.shape), leaf.dtype), like)


def correlate(bands: tuple[float, ...], fresh: Any, past: Any) -> tuple[Any, Any]:
    """Return a round's row of `C^-1 Z`, and what the next round needs to know.

    Args:
      bands: of `C`, the diagonal first.
      fresh: a tree of fresh noise, the round's row of `Z`.
      past: the rows of the rounds before, the last first, as many as there are bands beside the diagonal. Whoever knows
        them can take the noise off: they stay with the server.

    Example:
      >>> import jax.numpy as jnp
      >>> import fedrecon as fr
      >>> noise, past = fr.privacy.correlate((1.0, 0.5), jnp.ones(2), fr.privacy.nothing_yet(2, jnp.ones(2)))
      >>> noise.tolist(), past.tolist()
      ([1.0, 1.0], [[1.0, 1.0]])
      >>> fr.privacy.correlate((1.0, 0.5), jnp.ones(2), past)[0].tolist()  # half of the last round's is taken back
      [0.5, 0.5]
    """
    weights = jnp.asarray(bands[1:], jnp.float32)

    def subtract_past(noise: Array, rows: Array) -> Array:
        return (noise - jnp.tensordot(weights.astype(noise.dtype), rows, 1)) / bands[0]

    now = jax.tree.map(subtract_past, fresh, past)
    return now, jax.tree.map(lambda row, rows: jnp.concatenate([row[None], rows])[: len(bands) - 1], now, past)
