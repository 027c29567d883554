"""Priors on global parameters for the server's optimizer: a ridge around zero, or a constant value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from fedrecon._src.core.pytrees import Which, by_pattern, flatten, matcher, unflatten

Strength = float | Callable[[Any], Any]  # constant, or an optax schedule


class PriorState(NamedTuple):
    """The state of a prior that changes: how many steps were taken."""

    step: Array


def with_prior(
    optimizer: optax.GradientTransformation, prior: Strength | Mapping[str, Strength], *, examples: float
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
    """
    for value in prior.values() if isinstance(prior, Mapping) else [prior]:
        if not callable(value) and not value >= 0:
            raise ValueError(f"`prior` is {prior}; it must not be negative")
    if not examples > 0:
        raise ValueError(f"`examples` is {examples}; it must be above 0")

    def add(updates: optax.Updates, params: optax.Params, step: Array | None) -> optax.Updates:
        strengths = by_pattern(prior, "prior", params)
        values, structure = flatten(params)
        slopes, _ = flatten(updates)
        now = {path: value(step) if callable(value) else value for path, value in strengths.items()}
        total = {path: examples * slope + now.get(path, 0.0) * values[path] for path, slope in slopes.items()}
        return unflatten(structure, total)

    def add_and_count(
        updates: optax.Updates, state: PriorState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, PriorState]:
        return add(updates, params, state.step), PriorState(state.step + 1)

    if any(map(callable, prior.values() if isinstance(prior, Mapping) else [prior])):
        start = PriorState(jnp.zeros([], jnp.int32))
        return optax.chain(optax.GradientTransformation(lambda params: start, add_and_count), optimizer)
    return optax.chain(optax.stateless(lambda updates, params: add(updates, params, None)), optimizer)


def keep_constant(optimizer: optax.GradientTransformation, which: Which) -> optax.GradientTransformation:
    """Keep some global parameters at their initial value.

    Args:
      optimizer: for all other parameters.
      which: the parameters to keep: a glob pattern on the path, several of them, or a predicate
        `(path, leaf) -> bool`.
    """

    def labels(params: Any) -> Any:
        leaves, structure = flatten(params)
        constant = matcher(which, "which", leaves)
        return unflatten(
            structure, {path: "constant" if constant(path, leaf) else "free" for path, leaf in leaves.items()}
        )

    return optax.multi_transform({"free": optimizer, "constant": optax.set_to_zero()}, labels)
