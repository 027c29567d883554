"""Least squares as a solver: for squared-error models that are linear in what is solved for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedrecon.lookups.tables import original_batch
from fedrecon.model import Batch, Model, measure, metric_names
from fedrecon.solvers.problem import Objective, Problem, Solution, Solver
from fedrecon.trees import Params

MOST_SOLVED_FOR = 2048  # least squares forms a square matrix of this side for every client


def least_squares(ridge: float, *, limit: int | None = None) -> Solver:
    """Solve a squared-error model that is linear in what is solved for, at once and exactly.

    Minimises the sum of squared errors plus `ridge` times the squared distance from where the parameters started,
    which is zero-centred ridge regression for parameters that start near zero, and draws clients with little
    data towards the default where one is learned.

    Args:
      ridge: above 0, so that clients with less data than parameters have a solution too.
      limit: use at most this many examples of a client.
    """
    if not ridge > 0:
        raise ValueError(f"`ridge` is {ridge}; it must be above 0, or clients with little data have no solution")

    def solve(problem: Problem) -> Solution:
        objective, examples = problem.objective, problem.examples
        if problem.tables is not None:
            raise ValueError("least squares solves for whole parameters, not for rows of lookup tables")

        def one(params: Params, context: Any, batch: Batch, count: Array) -> tuple[Params, Array]:
            mask = jnp.arange(next(iter(batch.values())).shape[0]) < count
            start, restore = ravel_pytree(params)
            if start.size > MOST_SOLVED_FOR:
                raise ValueError(f"least squares would solve for {start.size} numbers; at most {MOST_SOLVED_FOR}")

            def predict(vector: Array) -> Array:
                return objective.predict(restore(vector), context, batch)

            predictions = predict(start)
            matrix = jax.jacfwd(predict)(start)  # (examples, parameters)
            seen = original_batch(batch)
            error, weights = _error(objective.model, predictions, seen)
            weights = jnp.where(mask, weights, 0)
            error = jnp.where(weights > 0, error, 0)
            gram = matrix.T @ (weights[:, None] * matrix) + ridge * jnp.eye(start.size)
            moment = matrix.T @ (weights * error)
            solution = start - solve_positive(gram, moment)
            if not problem.measured:
                return restore(solution), jnp.zeros((len(metric_names(objective.model)), 2))
            return restore(solution), measure(objective.model, predictions, seen, mask)[1]

        columns = {name: column[:, :limit] for name, column in examples.columns.items()}
        count = examples.count if limit is None else jnp.minimum(examples.count, limit)
        solved, sums = jax.vmap(one)(problem.params, problem.context, columns, count)
        return Solution(solved, {}, sums, count, jnp.ones_like(count))

    return Solver(solve, limit, lambda: "whole", _check_least_squares)


def solve_positive(matrix: Array, vector: Array) -> Array:
    """Solve a symmetric positive definite system, by elimination without pivots.

    LAPACK's Cholesky would do a sixth of the arithmetic, but called from two CPU devices at once it can wait for itself
    for ever, and it is not there on every device that a client may run on. Gradients come from one more solve.
    """
    size = vector.shape[0]

    def eliminate(k: Array, system: Array) -> Array:
        row = system[k] / system[k, k]
        return (system - jnp.outer(system[:, k], row)).at[k].set(row)

    def solve(_: Any, right: Array) -> Array:
        return jax.lax.fori_loop(0, size, eliminate, jnp.concatenate([matrix, right[:, None]], 1))[:, -1]

    return jax.lax.custom_linear_solve(lambda x: matrix @ x, vector, solve, symmetric=True)


def _error(model: Model, predictions: Array, batch: Batch) -> tuple[Array, Array]:
    """Return the error of predictions under a squared loss, (p - y), and the weights: half the loss's slope."""
    slope, weights = jax.grad(lambda p: _summed(model, p, batch), has_aux=True)(predictions)
    return slope / 2, weights


def _summed(model: Model, predictions: Array, batch: Batch) -> tuple[Array, Array]:
    values, weights = model.loss(predictions, batch)
    return jnp.sum(values), weights


def _check_least_squares(objective: Objective, params: Params, context: Any, batch: Batch, mask: Array) -> None:
    """Fail unless predictions are affine in the parameters and the loss is the squared error."""
    del mask
    if objective.model.state is not None and objective.model.state.local:
        raise ValueError(
            "least squares predicts with local statistics, which are rebuilt only after it; "
            "use gradient_descent, or give the model state='averaged' or state='frozen'"
        )

    @jax.jit
    def try_out(params: Params, context: Any, batch: Batch) -> tuple[Array, ...]:
        vector, restore = ravel_pytree(params)
        a, b = (jax.random.normal(key, vector.shape) for key in jax.random.split(jax.random.key(0)))
        both, one, other, none = (
            objective.predict(restore(v), context, batch) for v in (a + b, a, b, jnp.zeros_like(a))
        )
        error, _ = _error(objective.model, one, batch)
        scale = 1 + jnp.max(jnp.abs(one)) + jnp.max(jnp.abs(other))
        return both - one - other + none, scale, objective.model.loss(one, batch)[0], error

    bend, scale, values, error = (np.asarray(x) for x in try_out(params, context, batch))
    if not np.all(np.abs(bend) <= 1e-3 * scale):
        raise ValueError(
            "least squares needs predictions that are linear in what is solved for, and these are not; "
            "use gradient_descent"
        )
    if values.shape != error.shape or not np.allclose(values, error**2, 1e-3, 1e-4):
        raise ValueError(
            "least squares needs the squared error as the loss, one value a prediction; use gradient_descent"
        )
