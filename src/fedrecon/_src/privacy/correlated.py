"""Correlated noise: what a round adds is partly taken back by later rounds, so that less of it stays in the model.

With independent noise the errors of all rounds add up in the model. Correlated noise (banded matrix factorization) adds
`C^-1 Z` instead of `Z`, where row t of `Z` is fresh noise and `C` is a lower triangular matrix with few bands. A client
whose rounds are at least as far apart as there are bands changes the rows of `C` times its uploads by one column for
each time, and these columns do not overlap: k times cost what k releases with the noise of `Z` cost. So nothing has to
be drawn at random or kept unseen. What must be promised is that nobody takes part twice within that many rounds.

References: Choquette-Choo et al., (Amplified) banded matrix factorization, NeurIPS 2023.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.extras import require


@functools.lru_cache(maxsize=16)
def coefficients(bands: int, rounds: int) -> tuple[float, ...]:
    """Return the bands of `C`, best for the sums over all rounds so far, with norm 1.

    Args:
      bands: how many; 1 is independent noise.
      rounds: how many are planned.
    """
    if bands < 1:
        raise ValueError(f"`correlated` is {bands}; it is a number of rounds, 1 or more")
    if rounds < 1:
        raise ValueError(f"`rounds` is {rounds}; there must be one or more")
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
    """
    return jax.tree.map(lambda leaf: jnp.zeros((bands - 1, *leaf.shape), leaf.dtype), like)


def correlate(bands: tuple[float, ...], fresh: Any, past: Any) -> tuple[Any, Any]:
    """Return a round's row of `C^-1 Z`, and what the next round needs to know.

    Args:
      bands: of `C`, the diagonal first.
      fresh: a tree of fresh noise, the round's row of `Z`.
      past: the rows of the rounds before, the last first, as many as there are bands beside the diagonal. Whoever knows
        them can take the noise off: they stay with the server.
    """
    weights = jnp.asarray(bands[1:], jnp.float32)

    def one(noise: Array, rows: Array) -> Array:
        return (noise - jnp.tensordot(weights.astype(noise.dtype), rows, 1)) / bands[0]

    now = jax.tree.map(one, fresh, past)
    return now, jax.tree.map(lambda row, rows: jnp.concatenate([row[None], rows])[: len(bands) - 1], now, past)
