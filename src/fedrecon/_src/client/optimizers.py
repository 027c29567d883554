"""Optimizers: those of optax in a form that can be saved, the server optimizers of federated learning, and priors.

`fr.optimizers.sgd(0.1)` is `optax.sgd(0.1)`. Any optax optimizer can train; those made here can also be saved with
`fr.save_algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.pytrees import Which, by_pattern, flatten, select_paths, unflatten

sgd = register_factory(optax.sgd)
adam = register_factory(optax.adam)
adamw = register_factory(optax.adamw)
adagrad = register_factory(optax.adagrad)
rmsprop = register_factory(optax.rmsprop)
chain = register_factory(optax.chain)
identity = register_factory(optax.identity)
clip_by_global_norm = register_factory(optax.clip_by_global_norm)
add_decayed_weights = register_factory(optax.add_decayed_weights)
scale = register_factory(optax.scale)
scale_by_schedule = register_factory(optax.scale_by_schedule)
linear_schedule = register_factory(optax.linear_schedule)
cosine_decay_schedule = register_factory(optax.cosine_decay_schedule)


@register_factory
def fedadagrad(
    learning_rate: float, eps: float = 1e-3, initial_accumulator: float = 0.0
) -> optax.GradientTransformation:
    """Adagrad as federated optimization uses it: accumulators start at zero, `eps` is large and outside the root.

    `optax.adagrad` starts them at 0.1. The mean updates of federated rounds are far smaller than that, so it would need
    hundreds of rounds to adapt.

    Args:
      learning_rate: the learning rate.
      eps: added to the root of the accumulators.
      initial_accumulator: where the accumulators start.

    References:
      Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> optimizer = fr.optimizers.fedadagrad(0.1, eps=0.0)
      >>> updates, _ = optimizer.update(jnp.array([4.0]), optimizer.init(jnp.zeros(1)))
      >>> print(f"{updates[0]:.1f}")  # the first step is as long as the learning rate
      -0.1
    """

    def init(params: optax.Params) -> optax.Updates:
        return jax.tree.map(lambda x: jnp.full_like(x, initial_accumulator), params)

    def update(
        updates: optax.Updates, state: optax.Updates, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.Updates]:
        state = jax.tree.map(lambda total, g: total + g**2, state, updates)
        return jax.tree.map(lambda total, g: -learning_rate * g / (jnp.sqrt(total) + eps), state, updates), state

    return optax.GradientTransformation(init, update)


@register_factory
def fedyogi(
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    initial_accumulator: float = 0.0,
) -> optax.GradientTransformation:
    """Yogi as federated optimization uses it: accumulators start at zero, `eps` is large.

    Args:
      learning_rate: the learning rate.
      b1: decay of the mean of gradients.
      b2: how fast the accumulators follow the squares of gradients.
      eps: added to the root of the accumulators.
      initial_accumulator: where the accumulators start.

    References:
      Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> optimizer = fr.optimizers.fedyogi(0.1)
      >>> updates, _ = optimizer.update(jnp.array([4.0]), optimizer.init(jnp.zeros(1)))
      >>> print(f"{updates[0]:.2f}")
      -0.10
    """
    return optax.chain(
        optax.scale_by_yogi(b1=b1, b2=b2, eps=eps, initial_accumulator_value=initial_accumulator),
        optax.scale_by_learning_rate(learning_rate),
    )


# ---- priors ----

Strength = float | Callable[[Any], Any]  # constant, or an optax schedule


class PriorState(NamedTuple):
    """The state of a prior: how many steps were taken, and the parameters that it is around, None for zeros."""

    step: Array
    start: Any = None


def with_prior(
    optimizer: optax.GradientTransformation,
    prior: Strength | Mapping[str, Strength],
    *,
    examples: float,
    around_start: bool = False,
) -> optax.GradientTransformation:
    """Add a ridge on global parameters to what the server's optimizer minimises.

    The optimizer gets `examples * gradient + prior * parameters`, where `gradient` is the mean over the examples of a
    cohort, an estimate of the mean over all clients' examples. So uploads should be weighted by examples, and be plain
    gradients: one step of SGD with rate 1. The server then minimises the sum of all losses plus
    `prior / 2 * |parameters|^2`.

    Without a prior, table rows that few clients use are fitted to noise.

    Args:
      optimizer: any optimizer; it gets gradients of sums, so adaptive ones work best.
      prior: one value for all global parameters, or a mapping from patterns on their paths to values; parameters that
        no pattern matches have no prior. A value may be a schedule, a function of the number of steps so far.
      examples: how many examples all clients together would update on, as counted in round zero.
      around_start: draw parameters to where they started instead of to zero.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> import optax
      >>> server = fr.optimizers.with_prior(optax.sgd(1.0), 2.0, examples=10)
      >>> params = {"w": jnp.array([3.0])}
      >>> server.update({"w": jnp.array([0.5])}, server.init(params), params)[0]["w"].tolist()
      [-11.0]
    """
    strengths = list(prior.values()) if isinstance(prior, Mapping) else [prior]
    for value in strengths:
        check_number("prior", None if callable(value) else value)
    check_number("examples", examples, above=True)

    def init(params: optax.Params) -> PriorState:
        return PriorState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.asarray, params) if around_start else None)

    def update(
        updates: optax.Updates, state: PriorState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, PriorState]:
        values, structure = flatten(params if state.start is None else jax.tree.map(jnp.subtract, params, state.start))
        of_leaves = by_pattern(prior, "prior", params)
        now = {path: value(state.step) if callable(value) else value for path, value in of_leaves.items()}
        slopes = flatten(updates)[0].items()
        total = {path: examples * slope + now.get(path, 0.0) * values[path] for path, slope in slopes}
        return unflatten(structure, total), state._replace(step=state.step + 1)

    if around_start or any(map(callable, strengths)):
        return optax.chain(optax.GradientTransformation(init, update), optimizer)
    add = optax.stateless(lambda updates, params: update(updates, PriorState(jnp.int32(0)), params)[0])
    return optax.chain(add, optimizer)


def keep_constant(optimizer: optax.GradientTransformation, which: Which) -> optax.GradientTransformation:
    """Keep some global parameters at their initial value.

    Args:
      optimizer: for all other parameters.
      which: the parameters to keep: a glob pattern on the path, several of them, or a predicate
        `(path, leaf) -> bool`.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> import optax
      >>> server = fr.optimizers.keep_constant(optax.sgd(1.0), "bias")
      >>> params = {"bias": jnp.ones(1), "w": jnp.ones(1)}
      >>> updates, _ = server.update(params, server.init(params), params)
      >>> updates["bias"].tolist(), updates["w"].tolist()
      ([0.0], [-1.0])
    """

    def labels(params: Any) -> Any:
        leaves, structure = flatten(params)
        constant = dict.fromkeys(select_paths(which, "which", leaves), "constant")
        return unflatten(structure, dict.fromkeys(leaves, "free") | constant)

    return optax.multi_transform({"free": optimizer, "constant": optax.set_to_zero()}, labels)
