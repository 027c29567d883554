"""R and U, what a client solves: gradient descent with any optax optimizer, or least squares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from fedrecon.cohort import Examples
from fedrecon.lookups import Reach, Tables, change_rows, merge_repeats, reach, state_labels
from fedrecon.model import Batch, Model, Params, measure, metric_names


class Objective(NamedTuple):
    """What one client minimises: the model's loss, seen as a function of what is solved for.

    Attributes:
      model: whose loss and metrics are taken.
      predict: `(what is solved for, what else this client has, batch) -> predictions`.
    """

    model: Model
    predict: Callable[[Params, Any, Batch], Any]

    def measure(self, params: Params, context: Any, batch: Batch, mask: Array) -> tuple[Array, Array]:
        """Return the mean loss of a batch, and the sums of loss and metrics."""
        return measure(self.model, self.predict(params, context, batch), batch, mask)


class Solution(NamedTuple):
    """What several clients found, clients first in every leaf.

    Attributes:
      params: the solution, without lookup tables.
      changes: for every lookup table, the change of each row in the client's list.
      sums: `(clients, metrics, 2)` over the examples, each measured before the step that used it.
      examples: `(clients,)` how many examples were processed, counting every epoch.
    """

    params: Params
    changes: dict[str, Array]
    sums: Array
    examples: Array


class Solve(Protocol):
    """Solve for `params` of `(clients, ...)`, each client on its own examples."""

    def __call__(
        self,
        objective: Objective,
        params: Params,
        context: Any,
        examples: Examples,
        tables: Tables | None = None,
        *,
        measured: bool = True,
        differentiable: bool = False,
    ) -> Solution:
        """Solve; with `differentiable`, in a way that gradients can flow back through."""


class Solver(NamedTuple):
    """A way to solve for parameters.

    Attributes:
      solve: see `Solve`.
      limit: no more than this many examples of a client are ever used; None for no limit.
      reach: how much of a lookup table it must hold (see `lookups.reach`); "whole" if it cannot use them.
      check: `(objective, params, context, batch, mask)` of one client; raises if this solver cannot solve that.
    """

    solve: Solve
    limit: int | None
    reach: Callable[[], Reach]
    check: Callable[[Objective, Params, Any, Batch, Array], None]


def gradient_descent(
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
) -> Solver:
    """Descend the loss in batches, in the order of the examples, with a fresh optimizer for every client.

    Args:
      optimizer: any optax optimizer.
      batch_size: examples of a step; a client's last batch may be smaller.
      epochs: how often a client goes through its examples.
      steps: at most this many steps; None for no cap. 0 leaves the parameters as they started.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1")
    if epochs < 1 or (steps is not None and steps < 0):
        raise ValueError(f"`epochs` must be at least 1 and `steps` at least 0, not {epochs} and {steps}")

    reach_once = functools.cache(lambda: reach(optimizer))

    def solve(
        objective: Objective,
        params: Params,
        context: Any,
        examples: Examples,
        tables: Tables | None = None,
        *,
        measured: bool = True,
        differentiable: bool = False,
    ) -> Solution:
        clients = examples.count.shape[0]
        batches = -(-examples.count // batch_size)  # (clients,)
        todo = batches * epochs if steps is None else jnp.minimum(batches * epochs, steps)
        alone = clients == 1 and not differentiable  # then no step is run that its client does not take
        if tables is None:
            take = _dense_step(objective, optimizer, params, context, examples, measured, alone)
        else:
            each = reach_once() == "each"
            take = _row_step(objective, optimizer, params, context, examples, tables, each, measured, alone)

        def advance(t: Array, carry: Any) -> Any:
            batch_number = t + 0 * batches if epochs == 1 else t % jnp.maximum(batches, 1)
            index = batch_number[:, None] * batch_size + jnp.arange(batch_size)  # (clients, batch)
            active = t < todo
            mask = (index < examples.count[:, None]) & active[:, None]
            # Padding is never read: a partial batch repeats the client's last example, with no weight.
            index = jnp.clip(index, 0, jnp.maximum(examples.count[:, None] - 1, 0))
            return take.advance(carry, index, mask, active)

        carry = take.start
        if differentiable:
            longest = -(-next(iter(examples.columns.values())).shape[1] // batch_size) * epochs
            longest = longest if steps is None else min(longest, steps)
            carry, _ = jax.lax.scan(lambda c, t: (advance(t, c), None), carry, jnp.arange(longest))
        else:
            last = jnp.max(todo)
            _, carry = jax.lax.while_loop(
                lambda c: c[0] < last, lambda c: (c[0] + 1, advance(c[0], c[1])), (jnp.int32(0), carry)
            )
        whole, rest = jnp.divmod(todo, jnp.maximum(batches, 1))
        seen = whole * examples.count + jnp.minimum(rest * batch_size, examples.count)
        return Solution(*take.finish(carry), seen)

    limit = None if steps is None else max(1, steps * batch_size)
    return Solver(solve, limit, reach_once, lambda *args: None)


class _Step(NamedTuple):
    """A kind of step: where it starts, `(carry, index, mask, active) -> carry`, and `carry -> params, changes, sums`."""

    start: Any
    advance: Callable[[Any, Array, Array, Array], Any]
    finish: Callable[[Any], tuple[Any, dict[str, Array], Array]]


def _dense_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    params: Params,
    context: Any,
    examples: Examples,
    measured: bool,
    alone: bool,
) -> _Step:
    """Step on whole parameters: every client has its own copy."""

    def one(
        params: Params, state: Any, context: Any, batch: Batch, mask: Array, active: Array
    ) -> tuple[Params, Any, Array]:
        (_, sums), grads = jax.value_and_grad(objective.measure, has_aux=True)(params, context, batch, mask)
        updates, new_state = optimizer.update(grads, state, params)
        if not alone:
            updates = _where(active, updates, jax.tree.map(jnp.zeros_like, updates))
            new_state = _where(active, new_state, state)
        return optax.apply_updates(params, updates), new_state, jnp.where(active, sums, 0)

    def advance(carry: Any, index: Array, mask: Array, active: Array) -> Any:
        params, state, total = carry
        batch = _batch(examples.columns, index)
        params, state, sums = jax.vmap(one)(params, state, context, batch, mask, active)
        return params, state, total + sums if measured else total

    start = (params, jax.vmap(optimizer.init)(params), no_sums(objective.model, examples))
    return _Step(start, advance, lambda carry: (carry[0], {}, carry[2]))


def _row_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    params: Params,
    context: Any,
    examples: Examples,
    tables: Tables,
    each: bool,
    measured: bool,
    alone: bool,
) -> _Step:
    """Step on the rows of a batch: gradients, state and updates of no other row are ever formed.

    Exact for optimizers whose reach is `each` or `rows`; `each` spares summing repeats first. The change of a row is kept apart from its value: the
    values stay where all clients share them, and the changes are what a client returns.
    """
    unchanged = tables.unchanged(examples.count.shape[0])
    first = jax.tree.map(lambda x: x[0], {**params, **unchanged})
    labels = state_labels(optimizer, first)

    def one(
        params: Params,
        changes: dict[str, Array],
        state: Any,
        context: Any,
        batch: Batch,
        slots: Batch,
        mask: Array,
        active: Array,
    ) -> tuple[Params, dict[str, Array], Any, dict[str, Array], Array]:
        fetched = tables.fetch(changes, batch, slots)
        rows, slot = fetched.rows, fetched.slot

        def loss(trained: Params, rows: dict[str, Array]) -> tuple[Array, Array]:
            return objective.measure({**trained, **fetched.as_tables(rows)}, context, fetched.batch, mask)

        (_, sums), (grads, row_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, rows)
        if not each:
            merged = {path: merge_repeats(slot[path], row_grads[path]) for path in rows}
            row_grads = {path: pair[0] for path, pair in merged.items()}
            slot = {path: pair[1] for path, pair in merged.items()}
        leaves, structure = jax.tree.flatten(state)
        small = [
            leaf[fetched.slot[label]] if label in rows else leaf for leaf, label in zip(leaves, labels, strict=True)
        ]
        updates, small_state = optimizer.update(
            {**grads, **row_grads}, jax.tree.unflatten(structure, small), {**params, **rows}
        )
        if not alone:
            updates = _where(active, updates, jax.tree.map(jnp.zeros_like, updates))
            small_state = _where(active, small_state, jax.tree.unflatten(structure, small))
        params = {path: params[path] + updates[path] for path in params}
        return params, {path: updates[path] for path in rows}, small_state, slot, jnp.where(active, sums, 0)

    def advance(carry: Any, index: Array, mask: Array, active: Array) -> Any:
        params, changes, state, total = carry
        batch = _batch(examples.columns, index)
        slots = _batch(tables.slots, index)
        params, updates, small_state, slot, sums = jax.vmap(one)(
            params, changes, state, context, batch, slots, mask, active
        )
        changes = {path: change_rows(changes[path], slot[path], updates[path]) for path in changes}
        leaves, structure = jax.tree.flatten(state)
        state = jax.tree.unflatten(
            structure,
            [
                change_rows(leaf, slot[label], new, replace=True) if label in changes else new
                for leaf, new, label in zip(leaves, jax.tree.leaves(small_state), labels, strict=True)
            ],
        )
        return params, changes, state, total + sums if measured else total

    state = jax.vmap(optimizer.init)({**params, **unchanged})
    start = (params, unchanged, state, no_sums(objective.model, examples))
    return _Step(start, advance, lambda carry: (carry[0], carry[1], carry[3]))


def measure_all(objective: Objective, params: Params, context: Any, examples: Examples, *, batch_size: int) -> Array:
    """Measure several clients on all their examples, without solving: sums of `(clients, metrics, 2)`."""
    batches = -(-examples.count // batch_size)

    def advance(carry: Any) -> Any:
        t, total = carry
        index = t * batch_size + jnp.arange(batch_size)[None] + 0 * batches[:, None]
        mask = index < examples.count[:, None]
        index = jnp.clip(index, 0, jnp.maximum(examples.count[:, None] - 1, 0))
        batch = _batch(examples.columns, index)
        _, sums = jax.vmap(objective.measure)(params, context, batch, mask)
        return t + 1, total + jnp.where(jnp.any(mask, 1)[:, None, None], sums, 0)

    start = (jnp.int32(0), no_sums(objective.model, examples))
    return jax.lax.while_loop(lambda c: c[0] < jnp.max(batches), advance, start)[1]


def no_sums(model: Model, examples: Examples) -> Array:
    """Return the sums of loss and metrics over nothing."""
    return jnp.zeros((examples.count.shape[0], len(metric_names(model)), 2))


def _batch(columns: Any, index: Array) -> Any:
    """Take `(clients, batch)` places of columns of `(clients, examples, ...)`."""
    pick = jax.vmap(lambda column, at: column.at[at].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda column: pick(column, index), dict(columns))


def _where(active: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, old)


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

    def solve(
        objective: Objective,
        params: Params,
        context: Any,
        examples: Examples,
        tables: Tables | None = None,
        *,
        measured: bool = True,
        differentiable: bool = False,
    ) -> Solution:
        del differentiable  # a linear solve is
        if tables is not None:
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
            error, weights = _error(objective.model, predictions, batch)
            weights = jnp.where(mask, weights, 0)
            error = jnp.where(weights > 0, error, 0)
            gram = matrix.T @ (weights[:, None] * matrix) + ridge * jnp.eye(start.size)
            moment = matrix.T @ (weights * error)
            solution = start - jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(gram), moment)
            if not measured:
                return restore(solution), jnp.zeros((len(metric_names(objective.model)), 2))
            return restore(solution), measure(objective.model, predictions, batch, mask)[1]

        columns = {name: column[:, :limit] for name, column in examples.columns.items()}
        count = examples.count if limit is None else jnp.minimum(examples.count, limit)
        solved, sums = jax.vmap(one)(params, context, columns, count)
        return Solution(solved, {}, sums, count)

    return Solver(solve, limit, lambda: "whole", _check_least_squares)


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
    vector, restore = ravel_pytree(params)
    a, b = (jax.random.normal(key, vector.shape) for key in jax.random.split(jax.random.key(0)))

    def predict(v: Array) -> Array:
        return objective.predict(restore(v), context, batch)

    bend = predict(a + b) - predict(a) - predict(b) + predict(jnp.zeros_like(a))
    scale = 1 + jnp.max(jnp.abs(predict(a))) + jnp.max(jnp.abs(predict(b)))
    if not bool(jnp.all(jnp.abs(bend) <= 1e-3 * scale)):
        raise ValueError(
            "least squares needs predictions that are linear in what is solved for, and these are not; "
            "use gradient_descent"
        )
    predictions = predict(a)
    error, _ = _error(objective.model, predictions, batch)
    values, _ = objective.model.loss(predictions, batch)
    if values.shape != error.shape or not bool(jnp.allclose(values, error**2, 1e-3, 1e-4)):
        raise ValueError(
            "least squares needs the squared error as the loss, one value a prediction; use gradient_descent"
        )
