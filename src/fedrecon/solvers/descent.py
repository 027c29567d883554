"""Gradient descent as a solver: any optax optimizer, on whole parameters or on the rows of lookup tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon.cohort import Examples
from fedrecon.lookups.reach import reach, state_labels
from fedrecon.lookups.tables import change_rows, merge_repeats
from fedrecon.model import Batch, Step
from fedrecon.recipes import recorded
from fedrecon.solvers.batches import batch_places, number_of_batches, take_batch
from fedrecon.solvers.growing import cut, phases, put_back
from fedrecon.solvers.problem import Problem, Solution, Solver, no_sums
from fedrecon.trees import Params


class Carry(NamedTuple):
    """The state of several clients between two steps, clients first in every leaf.

    Attributes:
      params: what is solved for, without lookup tables.
      changes: for every lookup table, `(clients, rows, ...)` how the client's rows have changed so far.
      state: of the optimizer, for both together.
      sums: `(clients, metrics, 2)` of loss and metrics.
    """

    params: Params
    changes: dict[str, Array]
    state: Any
    sums: Array


class Turn(NamedTuple):
    """One step of several clients: the examples of each, and which clients take the step.

    Attributes:
      places: `(clients, batch)` positions of the examples.
      mask: `(clients, batch)` false for padding.
      active: `(clients,)` whether the client takes this step.
      keys: of the clients for this step; None if nothing is random.
    """

    places: Array
    mask: Array
    active: Array
    keys: Array | None


@recorded
def gradient_descent(
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
) -> Solver:
    """Minimise the loss by gradient descent in batches, with a fresh optimizer state for every client.

    Batches follow the order of the examples.

    Args:
      optimizer: any optax optimizer.
      batch_size: examples of a step; a client's last batch may be smaller.
      epochs: how often a client goes through its examples.
      steps: at most this many steps; None for no limit. 0 leaves the parameters as they started.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1")
    if epochs < 1 or (steps is not None and steps < 0):
        raise ValueError(f"`epochs` must be at least 1 and `steps` at least 0, not {epochs} and {steps}")

    reach_once = functools.cache(lambda: reach(optimizer))

    def solve(problem: Problem) -> Solution:
        examples = problem.examples
        batches = number_of_batches(examples, batch_size)  # (clients,)
        todo = batches * epochs if steps is None else jnp.minimum(batches * epochs, steps)
        by_rows = problem.tables is not None
        start = _start(problem, optimizer)
        step = _row_step(problem, optimizer, reach_once() == "each") if by_rows else _dense_step(problem, optimizer)

        def advance(t: Array, carry: Carry) -> Carry:
            number = t + 0 * batches if epochs == 1 else t % jnp.maximum(batches, 1)
            # If the model has a `fit`, padding may enter the statistics of a batch, so it must be real examples.
            index, mask = batch_places(examples, number, batch_size, cyclic=problem.objective.fit is not None)
            active = t < todo
            return step(carry, Turn(index, mask & active[:, None], active, _keys_of_step(problem, t)))

        if problem.differentiable:
            carry = _scan(advance, start, _longest(examples, batch_size, epochs, steps))
        else:
            carry = _loop(advance, start, jnp.max(todo), problem, optimizer, batch_size)
        whole, rest = jnp.divmod(todo, jnp.maximum(batches, 1))
        seen = whole * examples.count + jnp.minimum(rest * batch_size, examples.count)
        return Solution(carry.params, carry.changes, carry.sums, seen, todo)

    limit = None if steps is None else max(1, steps * batch_size)
    return Solver(solve, limit, reach_once, lambda *args: None, batch_size)


def _start(problem: Problem, optimizer: optax.GradientTransformation) -> Carry:
    clients = problem.examples.count.shape[0]
    changes = {} if problem.tables is None else problem.tables.unchanged(clients)
    solved = {**problem.params, **changes} if changes else problem.params
    # `axis_size` is explicit, since there may be no leaves to solve for.
    state = jax.vmap(optimizer.init, axis_size=clients)(solved)
    return Carry(problem.params, changes, state, no_sums(problem.objective.model, problem.examples))


def _keys_of_step(problem: Problem, t: Array) -> Array | None:
    if problem.objective.fit is None or problem.keys is None:
        return None
    return jax.vmap(jax.random.fold_in, (0, None))(problem.keys, t)


def _longest(examples: Examples, batch_size: int, epochs: int, steps: int | None) -> int:
    """Return how many steps a client takes if its examples fill the arrays."""
    most = -(-next(iter(examples.columns.values())).shape[1] // batch_size) * epochs
    return most if steps is None else min(most, steps)


def _scan(advance: Callable[[Array, Carry], Carry], carry: Carry, steps: int) -> Carry:
    """Take a fixed number of steps, so that gradients can flow back through them."""
    return jax.lax.scan(lambda c, t: (advance(t, c), None), carry, jnp.arange(steps))[0]


def _loop(
    advance: Callable[[Array, Carry], Carry],
    carry: Carry,
    last: Array,
    problem: Problem,
    optimizer: optax.GradientTransformation,
    batch_size: int,
) -> Carry:
    """Take as many steps as any client has. Early steps work only on the first rows of growing tables."""
    labels = state_labels(optimizer, _first(problem.params)) if problem.grows else []
    t = jnp.int32(0)
    for phase in phases(problem.params, problem.grows, batch_size):
        until = last if phase.stop is None else jnp.minimum(phase.stop, last)
        t, part = _until(until, advance, t, cut(carry, phase.rows, labels))
        carry = put_back(carry, part, phase.rows, labels)
    return carry


def _until(until: Array, advance: Callable[[Array, Carry], Carry], t: Array, carry: Carry) -> tuple[Array, Carry]:
    return jax.lax.while_loop(lambda c: c[0] < until, lambda c: (c[0] + 1, advance(c[0], c[1])), (t, carry))


def _alone(problem: Problem) -> bool:
    """Return whether every step that runs is one that its client takes."""
    return problem.examples.count.shape[0] == 1 and not problem.differentiable


def _dense_step(problem: Problem, optimizer: optax.GradientTransformation) -> Callable[[Carry, Turn], Carry]:
    """Return a step on whole parameters, of which every client has its own copy."""
    objective, alone = problem.objective, _alone(problem)

    def one(
        params: Params, state: Any, context: Any, batch: Batch, mask: Array, active: Array, key: Array | None
    ) -> tuple[Params, Any, Array]:
        measure = jax.value_and_grad(objective.measure, has_aux=True)
        (_, sums), grads = measure(params, context, batch, mask, Step(mask, key))
        updates, new_state = optimizer.update(grads, state, params)
        if not alone:
            updates = _where(active, updates, jax.tree.map(jnp.zeros_like, updates))
            new_state = _where(active, new_state, state)
        return optax.apply_updates(params, updates), new_state, jnp.where(active, sums, 0)

    def advance(carry: Carry, turn: Turn) -> Carry:
        batch = take_batch(problem.examples.columns, turn.places)
        params, state, sums = jax.vmap(one)(
            carry.params, carry.state, problem.context, batch, turn.mask, turn.active, turn.keys
        )
        return Carry(params, {}, state, carry.sums + sums if problem.measured else carry.sums)

    return advance


def _row_step(problem: Problem, optimizer: optax.GradientTransformation, each: bool) -> Callable[[Carry, Turn], Carry]:
    """Return a step on the rows of a batch, which never forms gradients, state or updates of other rows.

    It is exact for optimizers whose reach is `each` or `rows`; with `each`, the gradients of repeated rows need not be
    summed first. Changes of rows are separate from their values: all clients share the values, and a client returns
    only its changes.
    """
    objective, tables, alone = problem.objective, problem.tables, _alone(problem)
    assert tables is not None
    unchanged = tables.unchanged(1)
    labels = state_labels(optimizer, _first({**problem.params, **unchanged}))

    def one(
        carry: Carry, context: Any, batch: Batch, slots: Batch, mask: Array, active: Array, key: Array | None
    ) -> _RowUpdate:
        fetched = tables.fetch(carry.changes, batch, slots)  # rows: (ids, ...), slot: (ids,) of each table

        def loss(trained: Params, rows: dict[str, Array]) -> tuple[Array, Array]:
            everything = {**trained, **fetched.as_tables(rows)}
            return objective.measure(everything, context, fetched.batch, mask, Step(mask, key))

        (_, sums), (grads, row_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(carry.params, fetched.rows)
        slot = fetched.slot
        if not each:
            merged = {path: merge_repeats(slot[path], row_grads[path]) for path in row_grads}
            row_grads = {path: pair[0] for path, pair in merged.items()}
            slot = {path: pair[1] for path, pair in merged.items()}
        state = _rows_of_state(carry.state, labels, fetched.slot)  # of tables, (ids, ...)
        solved = {**carry.params, **fetched.rows}
        updates, new_state = optimizer.update({**grads, **row_grads}, state, solved)
        if not alone:
            updates = _where(active, updates, jax.tree.map(jnp.zeros_like, updates))
            new_state = _where(active, new_state, state)
        params = {path: carry.params[path] + updates[path] for path in carry.params}
        return _RowUpdate(params, {path: updates[path] for path in slot}, new_state, slot, jnp.where(active, sums, 0))

    def advance(carry: Carry, turn: Turn) -> Carry:
        batch = take_batch(problem.examples.columns, turn.places)  # (clients, batch, ...)
        slots = take_batch(tables.slots, turn.places)
        new = jax.vmap(one)(carry, problem.context, batch, slots, turn.mask, turn.active, turn.keys)
        changes = {path: change_rows(carry.changes[path], new.slot[path], new.rows[path]) for path in carry.changes}
        leaves, structure = jax.tree.flatten(carry.state)
        state = [
            change_rows(old, new.slot[label], rows, replace=True) if label in changes else rows
            for old, rows, label in zip(leaves, jax.tree.leaves(new.state), labels, strict=True)
        ]
        sums = carry.sums + new.sums if problem.measured else carry.sums
        return Carry(new.params, changes, jax.tree.unflatten(structure, state), sums)

    return advance


class _RowUpdate(NamedTuple):
    """The result of one client's step: new parameters and sums, updates and new state of the batch's rows."""

    params: Params
    rows: dict[str, Array]  # table -> (ids, ...) updates
    state: Any  # of whole parameters, and of the batch's rows
    slot: dict[str, Array]  # table -> (ids,) positions in the client's list of rows; past its end for repeats
    sums: Array


def _rows_of_state(state: Any, labels: list[str | None], slot: dict[str, Array]) -> Any:
    """Return an optimizer's state with only the batch's rows of lookup tables."""
    leaves, structure = jax.tree.flatten(state)
    small = [leaf[slot[label]] if label in slot else leaf for leaf, label in zip(leaves, labels, strict=True)]
    return jax.tree.unflatten(structure, small)


def _where(active: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, old)


def _first(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[0], params)
