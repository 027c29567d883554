"""The weighted mean of uploads, with its guards: finite numbers, norms that are clipped or dropped, weights, scales.

A clipping norm may follow the clients' norms, so that an upload far longer than the others hardly counts. The server
sees sums only, so clients add up a histogram of their norms, and it takes a quantile of that. No noise is added, so no
privacy is promised: this protects the model from clients, not clients from the server. `private` does the latter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Num

from fedrecon._src.core.checks import check_choice, check_number, check_numbers
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Model, metric_names
from fedrecon._src.core.pytrees import by_pattern
from fedrecon._src.core.upload import DELTA, Parts, RowChanges, Summand, Total, leave_out, map_values, values_of
from fedrecon._src.server.aggregator import Aggregator, Report, chain, stateless

# (examples, sums of metrics) -> weights
WeightFunction = Callable[[Num[Array, " clients"], Float[Array, "clients metrics 2"]], Num[Array, " clients"]]
Weigh = Literal["examples", "sqrt-examples", "uniform"] | WeightFunction
WEIGHTS: dict[str, WeightFunction] = {
    "examples": lambda examples, sums: examples,
    "sqrt-examples": lambda examples, sums: jnp.sqrt(examples),
    "uniform": lambda examples, sums: jnp.ones(examples.shape),
}


@register_factory
def mean(weigh: Weigh = "examples", *, clip_norm: float | None = None, zero_norm: float | None = None) -> Aggregator:
    """Average uploads.

    Clients with a non-finite upload are excluded from the mean and reported as `non_finite`. A round without any
    weight, or whose mean is not finite, is skipped: the server's state stays as it was.

    Args:
      weigh: `examples` weighs a client by the query examples it processed, `sqrt-examples` by their square root,
        `uniform` weighs all alike; or a function
        of `(examples, sums)`, both clients first, that returns `(clients,)` weights, such as `weight_of` makes.
      clip_norm: scale an upload down to this norm over all its entries; None for no limit.
      zero_norm: exclude a client whose upload has a norm above this; None for no limit.

    Returns:
      An `Aggregator`, to be given to an algorithm as `aggregate`.

    Example:
      >>> import fedrecon as fr
      >>> aggregate = fr.aggregators.mean("uniform", clip_norm=1.0)
    """
    stages = [finite()]
    stages += [] if zero_norm is None else [zero(zero_norm)]
    stages += [] if clip_norm is None else [clip(clip_norm)]
    return chain(*stages, by_weight(weigh))


@register_factory
def finite() -> Aggregator:
    """Exclude clients whose upload has any non-finite entry, and report them as `non_finite`.

    Example:
      >>> from fedrecon import aggregators
      >>> aggregate = aggregators.chain(aggregators.finite(), aggregators.by_weight())
    """

    def encode(summand: Summand) -> Summand:
        taint = jnp.zeros(summand.examples.shape)
        for flat in _flat_changes(summand):
            # A finite number times zero is zero, anything else is not. As a product with a vector of zeros, hidden from
            # the compiler so that it is not left out, this is many times faster than a reduction of isfinite.
            taint += flat @ jax.lax.optimization_barrier(jnp.zeros(flat.shape[1], flat.dtype))
        return leave_out(summand, taint != 0, "non_finite")

    return stateless(encode)


@register_factory
def clip(norm: float) -> Aggregator:
    """Scale uploads down to a norm over all their entries, and report how many were as `clipped`.

    Args:
      norm: above 0.

    Example:
      >>> from fedrecon import aggregators
      >>> aggregate = aggregators.chain(aggregators.clip(1.0), aggregators.by_weight())
    """
    check_number("clip_norm", norm, above=True)
    return stateless(lambda summand: clip_to(summand, norms(summand), jnp.float32(norm)))


@register_factory
def zero(norm: float) -> Aggregator:
    """Exclude clients whose upload has a norm above this, and report them as `zeroed`.

    Args:
      norm: above 0.

    Example:
      >>> from fedrecon import aggregators
      >>> aggregate = aggregators.chain(aggregators.zero(10.0), aggregators.by_weight())
    """
    check_number("zero_norm", norm, above=True)
    return stateless(lambda summand: leave_out(summand, norms(summand) > norm, "zeroed"))


@register_factory
def by_weight(weigh: Weigh = "examples") -> Aggregator:
    """Weigh uploads, and divide their sum by the sum of weights.

    Args:
      weigh: as for `mean`.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> by_root = fr.aggregators.by_weight(lambda examples, sums: jnp.sqrt(examples))
    """
    weights_of = weigher(weigh)

    def encode(summand: Summand) -> Summand:
        weight = jnp.where(summand.scale > 0, weights_of(summand.examples, summand.metrics), 0.0).astype(jnp.float32)
        summand = leave_out(summand, ~jnp.isfinite(weight), "non_finite")
        summand = leave_out(summand, ~(weight > 0))
        weight = jnp.where(summand.scale > 0, weight, 0.0)
        return summand._replace(scale=summand.scale * weight, scalars={**summand.scalars, "weight": weight})

    def decode(total: Total) -> tuple[Total, Report]:
        weight = total.scalars["weight"]
        divisor = jnp.where(weight > 0, weight, 1.0)
        mean = map_values(lambda values: values / divisor, total.parts)
        return total._replace(parts=mean), {"skipped": ~((weight > 0) & all_finite(total.parts, divisor))}

    return stateless(encode, decode)


@register_factory
def weight_of(model: Model, metric: str = "loss") -> Callable[[Array, Array], Array]:
    """Weigh clients by the weight that one of the model's metrics gives their query examples, such as tokens.

    Args:
      model: the model that has the metric.
      metric: the name of one of them, or `loss`.

    Returns:
      A function for `mean(weigh=...)`.

    Example:
      >>> import fedrecon as fr
      >>> model = fr.models.next_word(vocabulary=100)
      >>> by_tokens = fr.aggregators.mean(fr.aggregators.weight_of(model, "perplexity"))
    """
    names = metric_names(model)
    check_choice("metric", metric, names)
    index = names.index(metric)
    return lambda examples, sums: sums[:, index, 1]


def weigher(weigh: Weigh) -> WeightFunction:
    """Return the function that a way to weigh stands for; refuse a name that is none."""
    if callable(weigh):
        return weigh
    check_choice("weigh", weigh, WEIGHTS)
    return WEIGHTS[weigh]


def norms(summand: Summand) -> Float[Array, " clients"]:
    """Return the norm of every client's upload over all its entries."""
    squares = (jax.vmap(jnp.vdot)(flat, flat) for flat in _flat_changes(summand))
    return jnp.sqrt(sum(squares, jnp.zeros(summand.examples.shape)))


def _flat_changes(summand: Summand) -> list[Float[Array, "clients entries"]]:
    return [values.reshape(values.shape[0], -1) for values in values_of(summand.parts)]


def weigh_and_clip(summand: Summand, weights_of: WeightFunction, limit: Array) -> tuple[Summand, Array]:
    """Multiply uploads by weights and scale the products down to a limit; return the norms of the products, too.

    However large a weight is, nobody adds more to the sum than the limit.
    """
    weight = weights_of(summand.examples, summand.metrics)
    weight = jnp.where(jnp.isfinite(weight) & (weight > 0), weight, 0.0)
    norm = norms(summand) * weight
    summand = clip_to(summand, norm, limit)
    return summand._replace(scale=summand.scale * weight), norm


def clip_to(summand: Summand, norm: Array, limit: Array) -> Summand:
    """Scale uploads of the given norms down to a limit, and count them as `clipped`."""
    over = norm > limit
    scale = summand.scale * jnp.where(over, limit / jnp.maximum(norm, 1e-30), 1.0)
    clipped = ((summand.scale > 0) & over).astype(jnp.float32)
    return summand._replace(scale=scale, flags={**summand.flags, "clipped": clipped})


def all_finite(parts: Mapping[str, Mapping[str, Any]], divisor: Array | float = 1.0) -> Array:
    """Say whether all numbers of a total are finite once they are divided.

    A finite sum of squares answers with one product that reads the total once, and leaves the division to be fused with
    the server's step. Only if it is not finite, perhaps by overflow, is every number checked.

    Args:
      parts: of the total.
      divisor: above 0.
    """
    changes = values_of(parts)
    if not changes:  # of a model without global parameters
        return jnp.bool_(True)
    squares = sum((jnp.vdot(values, values) for values in changes), jnp.zeros(()))
    return jax.lax.cond(
        jnp.isfinite(squares / divisor / divisor),
        lambda: jnp.bool_(True),
        lambda: jnp.all(jnp.stack([jnp.all(jnp.isfinite(values / divisor)) for values in changes])),
    )


# ---- changes in other units while they are clipped, summed and noised: what matters more gets less noise ----


Scale = float | np.ndarray  # one for all entries, or one for each row of a table
Scales = Mapping[str, Scale]


def rescale(scales: Scales) -> Aggregator:
    """Multiply changes of the global parameters before they are clipped, and divide their sum afterwards.

    A change that is multiplied by 0 is not sent: it uses none of the clipping norm, and its sum is 0 without any
    noise. That is for parameters, or rows of a table, that the server leaves as they are.

    Args:
      scales: from patterns on the parameters' paths to what they are multiplied by: a number, or one for every row of
        a table. They must not depend on anything that is not public, such as counts without noise. What no pattern
        matches is left as it is.

    Example:
      >>> from fedrecon import aggregators
      >>> halved = aggregators.rescale({"item_embedding": 0.5})
      >>> aggregate = aggregators.chain(aggregators.finite(), halved, aggregators.clip(1.0), aggregators.by_weight())
    """
    for pattern, scale in scales.items():
        values = np.asarray(scale)
        if not (np.isfinite(values).all() and (values >= 0).all() and values.ndim <= 1):
            raise ValueError(f"the scale of {pattern!r} must be a number of at least 0, or one for each row")

    def apply(function: Callable[[Any, Array], Any], parts: Parts) -> Parts:
        delta = parts[DELTA]
        factors = by_pattern(scales, "scales", dict.fromkeys(delta, 0))
        changed = {path: function(delta[path], jnp.asarray(scale, jnp.float32)) for path, scale in factors.items()}
        return {**parts, DELTA: {**delta, **changed}}

    return stateless(
        lambda summand: summand._replace(parts=apply(_multiply, summand.parts)),
        lambda total: (total._replace(parts=apply(_divide, total.parts)), {}),
    )


def _multiply(change: Any, factor: Array) -> Any:
    if isinstance(change, RowChanges):
        of_rows = factor if factor.ndim == 0 else factor[change.ids]
        return dataclasses.replace(change, values=change.values * _widen(of_rows, change.values.ndim))
    return change * _widen(factor, change.ndim - 1)


def _divide(values: Array, factor: Array) -> Array:
    factor = _widen(factor, values.ndim)
    return jnp.where(factor > 0, values / jnp.where(factor > 0, factor, 1.0), 0.0)


def _widen(factor: Array, dimensions: int) -> Array:
    """Give one number, or one for each row, the dimensions of a table."""
    return factor if factor.ndim == 0 else factor.reshape(*factor.shape, *[1] * (dimensions - factor.ndim))


# ---- adaptive clipping ----


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
    check_numbers({"times": times, "start": start}, above=True)
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
    clients = histogram[bin_index]
    inside = jnp.clip((target - (below[bin_index] - clients)) / jnp.maximum(clients, 1e-30), 0, 1)
    return 2.0 ** (LOWEST + (bin_index + inside) / PER_DOUBLING)
