"""Solvers in closed form: sufficient statistics of the support, and least squares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from fedrecon._src.client.batches import fold_batches
from fedrecon._src.client.lookup_tables import original_batch
from fedrecon._src.client.objectives import Objective, Problem, Solution, Solver, measure_all, zero_sums
from fedrecon._src.core.checks import check_numbers, check_rules
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch, Model, Step, measure, metric_names, predict_in
from fedrecon._src.core.pytrees import Params, by_pattern, flatten, unflatten


@register_factory
def closed_form(*, batch_size: int = 32, limit: int | None = None) -> Solver:
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
    check_numbers({"batch_size": batch_size, "limit": limit}, least=1)

    def solve(problem: Problem) -> Solution:
        objective, statistics = problem.objective, _statistics_of(problem.objective)
        assert not problem.tables.values, "its reach is whole"

        def add(total: Params, batch: Batch, mask: Array, held: tuple[Params, Any]) -> Params:
            predictions = objective.predict(*held, batch)
            return jax.tree.map(jnp.add, total, statistics(predictions, original_batch(batch), mask))

        examples, held = _limit_examples(limit, problem.examples), (problem.params, problem.context)
        if problem.differentiable:  # a loop of unknown length has no gradient
            mask = jnp.arange(next(iter(examples.columns.values())).shape[1]) < examples.count[:, None]
            solved = jax.vmap(add)(problem.params, examples.columns, mask, held)
        else:
            solved = fold_batches(add, problem.params, held, examples, batch_size)
        sums = zero_sums(objective.model, examples)
        if problem.measured:
            sums = measure_all(objective, *held, examples, batch_size=batch_size)
        return Solution(solved, {}, sums, examples.count, jnp.ones_like(examples.count))

    return Solver(solve, limit, lambda: "whole", _check_statistics)


def _limit_examples(limit: int | None, examples: Examples) -> Examples:
    """Return at most so many examples of each client."""
    columns = {name: column[:, :limit] for name, column in examples.columns.items()}
    return Examples(columns, examples.count if limit is None else jnp.minimum(examples.count, limit))


def _statistics_of(objective: Objective) -> Callable[..., Params]:
    if objective.model.statistics is None:
        raise ValueError("`closed_form` needs a model with `statistics`; use gradient_descent")
    return objective.model.statistics


def _check_statistics(objective: Objective, params: Params, context: Any, batch: Batch, mask: Array) -> None:
    """Raise an error unless the model's statistics have the shapes of its local parameters."""
    statistics = _statistics_of(objective)
    made = jax.eval_shape(lambda: statistics(objective.predict(params, context, batch), batch, mask))
    shapes = jax.eval_shape(lambda: params)
    if jax.tree.map(jnp.shape, made) != jax.tree.map(jnp.shape, shapes):
        raise ValueError(f"`statistics` must have the shapes of the local parameters, {shapes} (got {made})")


# ---- least squares, for models with a squared error that are linear in what is solved for ----


Ridge = float | Mapping[str, Any]  # one for all, or by pattern: a number for a leaf, or one for each of its entries
SMALL_BLOCK = 32  # rows of a matrix that is inverted by elimination
MOST_SOLVED_FOR = 2048  # numbers per client: least squares forms a square matrix of this side for every client


@register_factory
def least_squares(ridge: Ridge, *, limit: int | None = None) -> Solver:
    """Solve exactly, in one step, for models with a squared error that are linear in what is solved for.

    Minimises the sum of squared errors plus `ridge` times the squared distance from where the parameters started. For
    parameters that start near zero this is ordinary ridge regression; with a learned default it pulls clients with
    little data towards the default. The loss may be a multiple of the squared error.

    Args:
      ridge: above 0, so that clients with fewer examples than parameters have a solution too. One value, or a mapping
        from patterns on paths of what is solved for to values, such as `{"user_bias": 5.0, "*": 1.0}`; the first
        pattern that matches applies. A value may be an array in the parameter's shape.
      limit: use at most this many examples of a client.

    Example:
      >>> import fedrecon as fr
      >>> fr.least_squares({"user_bias": 5.0, "*": 1.0}, limit=100).limit
      100
    """
    for value in ridge.values() if isinstance(ridge, Mapping) else [ridge]:
        if not np.all(np.asarray(value) > 0):
            raise ValueError(f"`ridge` must be above 0, or clients with little data have no solution (got {ridge})")

    def solve(problem: Problem) -> Solution:
        objective, examples = problem.objective, _limit_examples(limit, problem.examples)
        assert not problem.tables.values, "its reach is whole"

        def solve_client(params: Params, context: Any, batch: Batch, count: Array) -> tuple[Params, Array]:
            mask = jnp.arange(next(iter(batch.values())).shape[0]) < count
            start, restore = ravel_pytree(params)
            if start.size > MOST_SOLVED_FOR:
                raise ValueError(
                    f"least squares needs at most {MOST_SOLVED_FOR} parameters (got {start.size}); use gradient_descent"
                )

            def predict(vector: Array) -> Array:
                return predict_in(objective, restore(vector), context, batch, Step(mask, None))

            predictions = predict(start)
            matrix = jax.jacfwd(predict)(start)  # (examples, parameters)
            seen = original_batch(batch)
            error, weights = _error(objective.model, predictions, seen)
            weights = jnp.where(mask, weights, 0)
            error = jnp.where(weights > 0, error, 0)
            gram = matrix.T @ (weights[:, None] * matrix) + jnp.diag(_ridges(ridge, params))
            moment = matrix.T @ (weights * error)
            solution = start - solve_positive(gram, moment)
            if not problem.measured:
                return restore(solution), jnp.zeros((len(metric_names(objective.model)), 2))
            return restore(solution), measure(objective.model, predictions, seen, mask)[1]

        solved, sums = jax.vmap(solve_client)(problem.params, problem.context, examples.columns, examples.count)
        return Solution(solved, {}, sums, examples.count, jnp.ones_like(examples.count))

    return Solver(solve, limit, lambda: "whole", _check_least_squares)


def _ridges(ridge: Ridge, params: Params) -> Array:
    """Return the ridge of every number that is solved for, `(parameters,)`."""
    leaves, structure = flatten(params)
    values = by_pattern(ridge, "ridge", params)
    if without := [path for path in leaves if path not in values]:
        raise ValueError(f"`ridge` has no pattern for {without[0]!r}; add one, such as '*' for all others")
    full = {
        path: jnp.broadcast_to(jnp.asarray(values[path], jnp.float32), jnp.shape(leaf)) for path, leaf in leaves.items()
    }
    return ravel_pytree(unflatten(structure, full))[0]


def solve_positive(matrix: Float[Array, "params params"], vector: Float[Array, " params"]) -> Float[Array, " params"]:
    """Solve a symmetric positive definite system, by elimination without pivots.

    LAPACK's Cholesky would need a sixth of the arithmetic, but it can deadlock when two CPU devices call it at once,
    and not every device that a client runs on has it. Gradients take one more solve.

    Args:
      matrix: of the system.
      vector: its right-hand side.
    """
    size = vector.shape[0]

    def eliminate(k: Array, system: Array) -> Array:
        row = system[k] / system[k, k]
        return (system - jnp.outer(system[:, k], row)).at[k].set(row)

    def solve(_: Any, right: Array) -> Array:
        return jax.lax.fori_loop(0, size, eliminate, jnp.concatenate([matrix, right[:, None]], 1))[:, -1]

    return jax.lax.custom_linear_solve(lambda x: matrix @ x, vector, solve, symmetric=True)


def invert_positive(matrix: Float[Array, "size size"]) -> Float[Array, "size size"]:
    """Invert a symmetric positive definite matrix: halves by products of matrices, small blocks by elimination.

    Products run at the speed of the processor's caches, where elimination waits for memory: ten times faster for a
    size of 256.
    """
    size = matrix.shape[0]
    if size <= SMALL_BLOCK:
        return _eliminate(matrix)
    half = size // 2
    first, corner, last = matrix[:half, :half], matrix[:half, half:], matrix[half:, half:]
    inverse = invert_positive(first)
    carried = inverse @ corner
    rest = invert_positive(last - corner.T @ carried)
    side = -carried @ rest
    return jnp.block([[inverse - side @ carried.T, side], [side.T, rest]])


def _eliminate(matrix: Array) -> Array:
    """Invert by Gauss-Jordan elimination without pivots, in place."""

    def step(k: Array, matrix: Array) -> Array:
        pivot = 1 / matrix[k, k]
        row, column = matrix[k] * pivot, matrix[:, k]
        reduced = (matrix - jnp.outer(column, row)).at[:, k].set(-column * pivot)
        return reduced.at[k].set(row.at[k].set(pivot))

    return jax.lax.fori_loop(0, matrix.shape[0], step, matrix)


def _error(model: Model, predictions: Array, batch: Batch) -> tuple[Array, Array]:
    """Return the errors (p - y) of predictions p under a loss c (p - y)^2, and the weights, c times the model's.

    Both follow from the loss alone: its first derivative is 2 c (p - y), and its second is 2 c.
    """

    def summed(predictions: Array) -> tuple[Array, Array]:
        values, weights = model.loss(predictions, batch)
        return jnp.sum(values), weights

    slope = jax.grad(summed, has_aux=True)
    (first, weights), (second, _) = jax.jvp(slope, (predictions,), (jnp.ones_like(predictions),))
    return first / jnp.where(second > 0, second, 1.0), weights * second / 2


def _check_least_squares(objective: Objective, params: Params, context: Any, batch: Batch, mask: Array) -> None:
    """Raise an error unless predictions are affine in the parameters and the loss is the squared error."""
    if objective.model.state is not None and objective.model.state.local:
        raise ValueError(
            "least squares needs predictions that do not use local statistics, which are only set after it; "
            "use gradient_descent, or give the model state='averaged' or state='frozen'"
        )

    @jax.jit
    def try_out(params: Params, context: Any, batch: Batch) -> tuple[Array, ...]:
        vector, restore = ravel_pytree(params)
        a, b = (jax.random.normal(key, vector.shape) for key in jax.random.split(jax.random.key(0)))
        points, step = (a + b, a, b, jnp.zeros_like(a)), Step(mask, None)
        both, first, second, none = (predict_in(objective, restore(v), context, batch, step) for v in points)
        scale = 1 + jnp.max(jnp.abs(first)) + jnp.max(jnp.abs(second))
        bend = jnp.abs(both - first - second + none) / scale
        values, loss_weights = objective.model.loss(first, batch)
        if jnp.shape(values) != jnp.shape(first):
            return bend, jnp.ones(1), jnp.zeros(1)  # not one value per prediction
        error, weights = _error(objective.model, first, batch)
        return bend, values * loss_weights, weights * error**2

    bend, values, squares = (np.asarray(x) for x in try_out(params, context, batch))
    needs = {
        "predictions that are linear in what is solved for": np.all(bend <= 1e-3),
        "the squared error as `loss`, one value per prediction": np.allclose(values, squares, 1e-3, 1e-4),
    }
    check_rules({f"least squares needs {need}; use gradient_descent": holds for need, holds in needs.items()})
