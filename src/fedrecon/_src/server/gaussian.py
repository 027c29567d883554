"""User-level differential privacy: what the server takes hardly depends on any one client.

Every upload is weighed, then clipped to a norm over all its entries. The sum is divided by the expected number of
clients and not by the counted one. The server adds Gaussian noise to every entry: rows of a table that nobody touched
get noise, too. Counts, losses and metrics of a round are data; they are left out of the sum, so a round has no loss.
The server that adds the noise sees the sum without it; `secure` has noise that clients add.

Noise is drawn in single precision by JAX's generator, from the system's entropy in deployment and from the seed in
simulation, which protects nobody. Attacks on the last bits of floating-point noise (Mironov 2012) are not covered.

References: McMahan et al., Learning differentially private recurrent language models, ICLR 2018.
Andrew et al., Differentially private learning with adaptive clipping, NeurIPS 2021.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon._src.core.checks import check_number, check_numbers
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.upload import Parts, Summand, Total
from fedrecon._src.privacy.accounting import Release, update_noise_for
from fedrecon._src.privacy.noise import coefficients, correlate, nothing_yet
from fedrecon._src.server.aggregator import Aggregator, Report, chain
from fedrecon._src.server.averaging import Scales, Weigh, finite, rescale, weigh_and_clip, weigher

MARGIN = 1e-5  # norms are computed in single precision, so uploads are clipped a little below the norm that is claimed
BELOW = "below"


@register_factory
def private(
    clip: float,
    noise_multiplier: float,
    *,
    per_round: float,
    rounds: int | None = None,
    correlated: int | None = None,
    weigh: Weigh = "uniform",
    scales: Scales | None = None,
    quantile: float | None = None,
    count_noise: float | None = None,
    clip_rate: float = 0.2,
) -> Aggregator:
    """Average uploads with user-level differential privacy.

    Args:
      clip: the largest norm of an upload; with `quantile`, that of the first round.
      noise_multiplier: standard deviation of the noise in the sum, in units of the clipping norm. With `quantile` it is
        that of updates and count together. `privacy.noise_for` computes it from a privacy budget.
      per_round: how many clients take part in a round, on average. The sum is divided by this, whoever takes part.
      rounds: how many rounds are planned; only needed for correlated noise.
      correlated: correlate the noise of this many rounds in a row (`fedrecon._src.privacy.noise`), for when random
        sampling cannot be promised. It needs `rounds`, and holds if a client takes part at most once in this many
        rounds (`Sampling(apart=...)`). None draws the noise of every round independently.
      weigh: multiply uploads by this before they are clipped, as for `mean`: with `examples`, what a client adds is the
        sum over its examples and not their mean. Whatever the weight, nobody adds more than the clipping norm.
      scales: what changes of the parameters are multiplied by while they are clipped and noised, as for `rescale`;
        0 for what the server leaves as it is.
      quantile: let the norm follow this share of the clients' norms (adaptive clipping); None keeps it fixed.
      count_noise: standard deviation of the noise in the count of clients below the norm, which adaptive clipping
        needs and which costs privacy, too; a twentieth of `per_round` by default.
      clip_rate: how fast the norm follows.

    Returns:
      An `Aggregator`. Its reports have no loss and no counts; with `quantile` they have `clip_norm`.

    Example:
      >>> import fedrecon as fr
      >>> aggregate = fr.aggregators.private(clip=0.4, noise_multiplier=1.0, per_round=100)
      >>> aggregate.release({}).noise_multiplier  # what a round gives away, for a ledger
      1.0
    """
    check_numbers({"clip": clip, "noise_multiplier": noise_multiplier, "per_round": per_round}, above=True)
    check_number("quantile", quantile, most=1, above=True, below=True)
    weights_of = weigher(weigh)
    bands: tuple[float, ...] = (1.0,)
    if correlated is not None:
        if rounds is None or quantile is not None:
            rule = "`correlated` noise needs a number of rounds and one clipping norm: give `rounds`, and no `quantile`"
            raise ValueError(f"{rule} (got rounds={rounds}, quantile={quantile})")
        bands = coefficients(correlated, rounds)
    count_noise = per_round / 20 if count_noise is None else count_noise
    update_noise = noise_multiplier if quantile is None else update_noise_for(noise_multiplier, count_noise)
    apart = len(bands) if len(bands) > 1 else None
    released = Release(update_noise, 1.0, 1, count_noise=None if quantile is None else count_noise, apart=apart)

    def encode(limit: Array, summand: Summand, keys: Array) -> Summand:
        present = summand.scale > 0
        summand, norm = weigh_and_clip(summand, weights_of, limit * (1 - MARGIN))
        # A half up or down, so that one client changes the count by one half at most.
        below = jnp.where(present, jnp.where(norm <= limit, 0.5, -0.5), 0.0)
        return summand._replace(scalars={} if quantile is None else {BELOW: below}, flags={})

    def decode(state: _NoiseState, total: Total, key: Array) -> tuple[Total, _NoiseState, Report]:
        limit, past = state
        fresh = draw_noise(total.parts, update_noise * limit, jax.random.fold_in(key, 0))
        if apart is not None:
            fresh, past = correlate(bands, fresh, past)
        parts = jax.tree.map(lambda values, noise: (values + noise) / per_round, total.parts, fresh)
        if quantile is None:
            return Total(parts, {}), _NoiseState(limit, past), {}
        counted = total.scalars[BELOW] + count_noise * jax.random.normal(jax.random.fold_in(key, 1))
        share = jnp.clip(counted / per_round + 0.5, 0.0, 1.0)
        follows = limit * jnp.exp(clip_rate * (quantile - share))
        # The exact count must not get into the report under its name.
        return Total(parts, {}), _NoiseState(follows, past), {"clip_norm": limit, BELOW: counted}

    clip_and_noise = Aggregator(
        init=lambda parts: _NoiseState(jnp.float32(clip), () if apart is None else nothing_yet(apart, parts)),
        message=lambda state: state.limit,
        encode=encode,
        decode=decode,
        release=lambda parts: released,
    )
    stages = [] if scales is None else [rescale(scales)]
    return chain(finite(), *stages, clip_and_noise)


class _NoiseState(NamedTuple):
    """What the server keeps: the clipping norm, and noise of past rounds where it is correlated."""

    limit: Array
    past: Any


def draw_noise(parts: Parts, deviation: Array | float, key: Array) -> Parts:
    """Draw Gaussian noise for every entry of a sum.

    Args:
      parts: of a total, whole.
      deviation: standard deviation.
      key: from the system's entropy where somebody is to be protected.
    """
    leaves, structure = jax.tree.flatten(parts)
    keys = jax.random.split(key, max(len(leaves), 1))
    drawn = [
        deviation * jax.random.normal(leaf_key, values.shape, values.dtype)
        for values, leaf_key in zip(leaves, keys, strict=False)
    ]
    return jax.tree.unflatten(structure, drawn)
