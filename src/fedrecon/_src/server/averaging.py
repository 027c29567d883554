"""The weighted mean of uploads, with its guards: finite numbers, norms that are clipped or dropped, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Num

from fedrecon._src.core.checks import check_choice, check_number
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Model, metric_names
from fedrecon._src.core.upload import Summand, Total, leave_out, map_values, values_of
from fedrecon._src.server.aggregator import Aggregator, Report, chain, stateless

Weigh = Literal["examples", "sqrt-examples", "uniform"] | Callable[[Array, Array], Array]


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
        for values in values_of(summand.parts):
            flat = values.reshape(values.shape[0], -1)
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

    def encode(summand: Summand) -> Summand:
        return clip_to(summand, norms(summand), jnp.float32(norm))

    return stateless(encode)


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
    check_weigh(weigh)

    def encode(summand: Summand) -> Summand:
        takes_part = summand.scale > 0
        weight = jnp.where(takes_part, weigh_clients(weigh, summand.examples, summand.metrics), 0.0).astype(jnp.float32)
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


def check_weigh(weigh: Weigh) -> None:
    """Refuse a name that is not a way to weigh."""
    if not callable(weigh):
        check_choice("weigh", weigh, ("examples", "sqrt-examples", "uniform"))


def norms(summand: Summand) -> Float[Array, " clients"]:
    """Return the norm of every client's upload over all its entries."""
    squares = jnp.zeros(summand.examples.shape)
    for values in values_of(summand.parts):
        flat = values.reshape(values.shape[0], -1)
        squares += jax.vmap(jnp.vdot)(flat, flat)
    return jnp.sqrt(squares)


def weigh_and_clip(summand: Summand, weigh: Weigh, limit: Array) -> tuple[Summand, Array]:
    """Multiply uploads by weights and scale the products down to a limit; return the norms of the products, too.

    However large a weight is, nobody adds more to the sum than the limit.
    """
    if weigh == "uniform":
        norm = norms(summand)
        return clip_to(summand, norm, limit), norm
    weight = weigh_clients(weigh, summand.examples, summand.metrics)
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


def weigh_clients(
    weigh: Weigh, examples: Num[Array, " clients"], sums: Float[Array, "clients metrics 2"]
) -> Num[Array, " clients"]:
    """Return the weights of clients."""
    if callable(weigh):
        return weigh(examples, sums)
    if weigh == "sqrt-examples":
        return jnp.sqrt(examples)
    return examples if weigh == "examples" else jnp.ones(examples.shape)
