"""Closed-form reconstruction as a solver: sufficient statistics of the support become the local parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon._src.client.batches import fold_batches
from fedrecon._src.client.lookups.lookup_tables import original_batch
from fedrecon._src.client.objectives import Objective, Problem, Solution, Solver, measure_all, zero_sums
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch
from fedrecon._src.core.pytrees import Params


@register_factory
def closed_form(*, batch_size: int = 16, limit: int | None = None) -> Solver:
    """Reconstruct without an optimizer: add the model's sufficient statistics of every example to the start.

    For models with `statistics`, such as `models.next_word(local="output_bias")`. Statistics may compare the examples
    with what the global model predicts for them, but all predictions are made with the local parameters as they
    started, so the order of the examples and the batches do not matter, and new examples are simply added.

    Args:
      batch_size: how many examples are predicted at once.
      limit: use at most this many examples of a client.

    Example:
      >>> import fedrecon as fr
      >>> fr.closed_form(limit=200).limit
      200
    """
    check_number("batch_size", batch_size, least=1)
    check_number("limit", limit, least=1)

    def solve(problem: Problem) -> Solution:
        objective = problem.objective
        statistics = objective.model.statistics
        if statistics is None or problem.tables is not None:
            raise ValueError("`closed_form` needs a model with `statistics` and solves only for local parameters")

        def add(total: Params, batch: Batch, mask: Array, held: tuple[Params, Any]) -> Params:
            predictions = objective.predict(*held, batch)
            return jax.tree.map(jnp.add, total, statistics(predictions, original_batch(batch), mask))

        columns = {name: column[:, :limit] for name, column in problem.examples.columns.items()}
        count = problem.examples.count if limit is None else jnp.minimum(problem.examples.count, limit)
        examples, held = Examples(columns, count), (problem.params, problem.context)
        if problem.differentiable:  # a loop of unknown length has no gradient
            mask = jnp.arange(next(iter(columns.values())).shape[1]) < count[:, None]
            solved = jax.vmap(add)(problem.params, columns, mask, held)
        else:
            solved = fold_batches(add, problem.params, held, examples, batch_size)
        sums = zero_sums(objective.model, examples)
        if problem.measured:
            sums = measure_all(objective, *held, examples, batch_size=batch_size)
        return Solution(solved, {}, sums, count, jnp.ones_like(count))

    return Solver(solve, limit, lambda: "whole", _check_statistics)


def _check_statistics(objective: Objective, params: Params, context: Any, batch: Batch, mask: Array) -> None:
    """Raise an error unless the model's statistics have the shapes of its local parameters."""
    statistics = objective.model.statistics
    if statistics is None:
        raise ValueError("`closed_form` needs a model with `statistics`; use gradient_descent")
    made = jax.eval_shape(lambda: statistics(objective.predict(params, context, batch), batch, mask))
    shapes = jax.eval_shape(lambda: params)
    if jax.tree.map(jnp.shape, made) != jax.tree.map(jnp.shape, shapes):
        raise ValueError(f"`statistics` must have the shapes of the local parameters, {shapes} (got {made})")
