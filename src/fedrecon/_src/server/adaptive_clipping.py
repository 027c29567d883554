"""Clipping to a norm that follows the clients' norms, so that an upload far longer than the others hardly counts.

The server sees sums only, so clients add up a histogram of their norms, and it takes a quantile of that. No noise is
added, so no privacy is promised: this protects the model from clients, not clients from the server. `private` does the
latter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.upload import Parts, Summand, Total, map_values
from fedrecon._src.server.aggregator import Aggregator, Report
from fedrecon._src.server.averaging import clip_to, norms

PER_DOUBLING = 4  # bins of the histogram for each doubling of the norm: a quantile is found to a few percent
LOWEST, HIGHEST = -40, 40  # powers of two between which norms are told apart
BINS = (HIGHEST - LOWEST) * PER_DOUBLING
HISTOGRAM = "norms"


class NormsSeen(NamedTuple):
    """What the server keeps: norms of past rounds, older ones with less weight; and the limit that follows."""

    histogram: Array  # (BINS,)
    limit: Array


@register_factory
def adaptive_clip(
    quantile: float = 0.5, *, times: float = 1.0, start: float | None = None, memory: float = 0.8
) -> Aggregator:
    """Scale uploads down to a norm that follows a quantile of the clients' norms; report it as `clip_norm`.

    The limit of a round follows from the rounds before it, so clients of this round cannot raise it for themselves.
    As long as fewer than one minus `quantile` of the clients are hostile, the limit stays within the norms of others.

    Args:
      quantile: the limit follows the norm that this share of the clients stays below. 0.5 for the median.
      times: the limit is this multiple of the quantile. 1 shortens everybody beyond it; a few times the median
        leaves ordinary clients as they are and shortens those that are far off.
      start: the limit of the first round. By default no norm is known in it, so all its uploads are scaled to one norm,
        that of its own quantile.
      memory: how much an earlier round counts in the next; 0 takes the quantile of the last round alone.

    Returns:
      A stage for `chain`, such as `chain(finite(), adaptive_clip(), by_weight())`.

    References: Andrew et al., Differentially private learning with adaptive clipping, NeurIPS 2021 (there with noise,
    and in steps, which find the quantile more slowly).

    Example:
      >>> from fedrecon import aggregators
      >>> median = aggregators.adaptive_clip(0.5, times=3.0)
      >>> aggregate = aggregators.chain(aggregators.finite(), median, aggregators.by_weight())
    """
    check_number("quantile", quantile, most=1, above=True, below=True)
    check_number("times", times, above=True)
    check_number("start", start, above=True)
    check_number("memory", memory, most=1, below=True)

    def init(parts: Parts) -> NormsSeen:
        return NormsSeen(jnp.zeros(BINS), jnp.float32(0.0 if start is None else start))

    def encode(limit: Array, summand: Summand, keys: Array) -> Summand:
        norm = norms(summand)
        present = (summand.scale > 0).astype(jnp.float32)
        histogram = present[:, None] * (_bin(norm)[:, None] == jnp.arange(BINS))  # (clients, BINS)
        # As long as no norm is known, uploads are summed as directions of length 1; `decode` gives them their length.
        has_limit, direction = limit > 0, summand.scale / jnp.where(norm > 0, norm, 1.0)
        clipped = clip_to(summand, norm, limit)
        flags = {**clipped.flags, "clipped": jnp.where(has_limit, clipped.flags["clipped"], 0.0)}
        flags[HISTOGRAM] = histogram.astype(jnp.float32)
        return summand._replace(scale=jnp.where(has_limit, clipped.scale, direction), flags=flags)

    def decode(state: NormsSeen, total: Total, key: Array) -> tuple[Total, NormsSeen, Report]:
        seen = memory * state.histogram + total.scalars[HISTOGRAM]
        norm = quantile_of(seen, quantile)
        length = jnp.where(state.limit > 0, 1.0, norm)
        total = total._replace(parts=map_values(lambda values: length * values, total.parts))
        limit = jnp.where(jnp.sum(seen) > 0, times * norm, state.limit)
        report: dict[str, Any] = {"clip_norm": jnp.where(state.limit > 0, state.limit, norm)}
        return total, NormsSeen(seen, limit.astype(jnp.float32)), report

    return Aggregator(init, lambda state: state.limit, encode, decode)


def _bin(norm: Array) -> Array:
    bin_index = jnp.floor((jnp.log2(jnp.maximum(norm, 2.0**LOWEST)) - LOWEST) * PER_DOUBLING)
    return jnp.clip(bin_index, 0, BINS - 1).astype(jnp.int32)


def quantile_of(histogram: Array, quantile: float) -> Array:
    """Return the norm below which a share of the clients is, as if they were spread evenly within a bin.

    Args:
      histogram: `(BINS,)` how many clients have which norm.
      quantile: the share.
    """
    below = jnp.cumsum(histogram)
    target = quantile * below[-1]
    bin_index = jnp.argmax(below >= target)
    inside = jnp.clip(
        (target - (below[bin_index] - histogram[bin_index])) / jnp.maximum(histogram[bin_index], 1e-30), 0, 1
    )
    return 2.0 ** (LOWEST + (bin_index + inside) / PER_DOUBLING)
