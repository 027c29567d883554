"""Gradient descent as a solver: any optax optimizer, on whole parameters or on the rows of lookup tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedrecon._src.client.batches import Batches
from fedrecon._src.client.lookup_reach import reach, state_labels
from fedrecon._src.client.lookup_tables import change_rows, cut, merge_repeats, phases, put_back, read_rows
from fedrecon._src.client.objectives import Problem, Solution, Solver, zero_sums
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch, Step
from fedrecon._src.core.pytrees import Params


class Carry(NamedTuple):
    """The state of several clients between two steps, clients first in every leaf.

    Attributes:
      params: what is solved for, without lookup tables.
      changes: for every lookup table, `(clients, rows, ...)` how the client's rows have changed so far.
      state: the optimizer's state, for both together.
      sums: `(clients, metrics, 2)` of loss and metrics.
    """

    params: Params
    changes: dict[str, Array]
    state: Any
    sums: Array


class Turn(NamedTuple):
    """One step of several clients: the examples of each, and which clients take the step.

    Attributes:
      batch: `(clients, batch, ...)` the examples, by feature.
      slots: `(clients, batch, ...)` where the rows of the batch's ids are in the client's lists, by feature.
      mask: `(clients, batch)` false for padding.
      active: `(clients,)` whether the client takes this step.
      keys: the clients' keys for this step; None if nothing is random.
    """

    batch: Batch
    slots: Batch
    mask: Array
    active: Array
    keys: Array | None


TakeStep = Callable[[Carry, Array, Turn], Carry]  # (carry, which step, its examples) -> carry


@register_factory
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
      batch_size: examples per step; a client's last batch may be smaller.
      epochs: how often a client goes through its examples.
      steps: at most this many steps; None for no limit. 0 leaves the parameters as they started
        and puts no limit on the support, which evidence or finetuning may still read.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> solver = fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=10)
      >>> solver.limit  # a client uses at most this many examples
      50
    """
    check_number("batch_size", batch_size, least=1)
    check_number("epochs", epochs, least=1)
    check_number("steps", steps)
    reach_once = functools.cache(lambda: reach(optimizer))

    def solve(problem: Problem) -> Solution:
        examples, tables = problem.examples, problem.tables
        # If the model has a `predict_train`, padding may enter the statistics of a batch, so it must be real examples.
        batches = Batches(examples, batch_size, epochs=epochs, cyclic=problem.objective.predict_train is not None)
        todo = batches.number * epochs if steps is None else jnp.minimum(batches.number * epochs, steps)
        if tables is not None:
            tables = tables.in_batches(examples.columns, batches.in_step, batch_size)
            problem = problem._replace(tables=tables)
        columns, slots = batches.arrange(examples.columns), batches.arrange(tables.slots if tables else {})
        start = _start(problem, optimizer)
        step = _row_step(problem, optimizer, reach_once() == "each") if tables else _dense_step(problem, optimizer)

        def advance(t: Array, carry: Carry) -> Carry:
            active = t < todo
            mask = batches.mask(t) & active[:, None]
            batch, at = batches.take(columns, t), batches.take(slots, t)
            return step(carry, t, Turn(batch, at, mask, active, _keys_of_step(problem, t)))

        if problem.differentiable:
            carry = _scan(advance, start, _longest(examples, batch_size, epochs, steps))
        else:
            carry = _loop(advance, start, jnp.max(todo), problem, optimizer, batch_size)
        whole, rest = jnp.divmod(todo, jnp.maximum(batches.number, 1))
        seen = whole * examples.count + jnp.minimum(rest * batch_size, examples.count)
        return Solution(carry.params, tables.cut(carry.changes) if tables else {}, carry.sums, seen, todo)

    limit = steps * batch_size if steps else None  # without steps, whatever else reads the support reads all of it

    def count_steps(examples: np.ndarray) -> np.ndarray:
        return np.minimum(-(-examples // batch_size) * epochs, np.inf if steps is None else steps)

    return Solver(solve, limit, reach_once, lambda *args: None, batch_size, count_steps)


def _start(problem: Problem, optimizer: optax.GradientTransformation) -> Carry:
    clients = problem.examples.count.shape[0]
    changes = {} if problem.tables is None else problem.tables.unchanged(clients)
    solved = {**problem.params, **changes} if changes else problem.params
    # `axis_size` is explicit, since there may be no leaves to solve for.
    state = jax.vmap(optimizer.init, axis_size=clients)(solved)
    return Carry(problem.params, changes, state, zero_sums(problem.objective.model, problem.examples))


def _keys_of_step(problem: Problem, t: Array) -> Array | None:
    if problem.objective.predict_train is None or problem.keys is None:
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


def _dense_step(problem: Problem, optimizer: optax.GradientTransformation) -> TakeStep:
    """Return a step on whole parameters, of which every client has its own copy."""
    objective, alone = problem.objective, _alone(problem)

    def step_client(
        params: Params, state: Any, context: Any, batch: Batch, mask: Array, active: Array, key: Array | None
    ) -> tuple[Params, Any, Array]:
        measure = jax.value_and_grad(objective.measure, has_aux=True)
        (_, sums), grads = measure(params, context, batch, mask, Step(mask, key))
        updates, new_state = optimizer.update(grads, state, params)
        if not alone:
            updates = _where(active, updates, jax.tree.map(jnp.zeros_like, updates))
            new_state = _where(active, new_state, state)
        return optax.apply_updates(params, updates), new_state, jnp.where(active, sums, 0)

    def advance(carry: Carry, t: Array, turn: Turn) -> Carry:
        params, state, sums = jax.vmap(step_client)(
            carry.params, carry.state, problem.context, turn.batch, turn.mask, turn.active, turn.keys
        )
        return Carry(params, {}, state, carry.sums + sums if problem.measured else carry.sums)

    return advance


def _row_step(problem: Problem, optimizer: optax.GradientTransformation, each: bool) -> TakeStep:
    """Return a step on the rows of a batch, which never forms gradients, state or updates of other rows.

    It is exact for optimizers whose reach is `each` or `rows`; with `each`, the gradients of repeated rows need not be
    summed first. Changes of rows are separate from their values: all clients share the values, and a client returns
    only its changes.
    """
    objective, tables, alone = problem.objective, problem.tables, _alone(problem)
    assert tables is not None
    unchanged = tables.unchanged(1)
    labels = state_labels(optimizer, _first({**problem.params, **unchanged}))

    def step_client(
        params: Params, state: Any, changes: dict[str, Array], slot: dict[str, Array], context: Any, turn: Turn
    ) -> _RowUpdate:
        fetched = tables.fetch(changes, turn.batch)  # rows: (ids, ...) of each table

        def loss(trained: Params, rows: dict[str, Array]) -> tuple[Array, Array]:
            everything = {**trained, **fetched.as_tables(rows)}
            return objective.measure(everything, context, fetched.batch, turn.mask, Step(turn.mask, turn.keys))

        (_, sums), (grads, row_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, fetched.rows)
        if not each:
            merged = {path: merge_repeats(slot[path], row_grads[path]) for path in slot}
            row_grads |= {path: pair[0] for path, pair in merged.items()}
            slot = {path: pair[1] for path, pair in merged.items()}
        updates, new_state = optimizer.update({**grads, **row_grads}, state, {**params, **fetched.rows})
        if not alone:
            updates = _where(turn.active, updates, jax.tree.map(jnp.zeros_like, updates))
            new_state = _where(turn.active, new_state, state)
        new = {path: params[path] + updates[path] for path in params}
        rows = {path: updates[path] for path in fetched.rows}
        return _RowUpdate(new, rows, new_state, slot, jnp.where(turn.active, sums, 0))

    def advance(carry: Carry, t: Array, turn: Turn) -> Carry:
        places = tables.places(t, turn.batch, turn.slots)
        changes = {path: read_rows(carry.changes[path], at) for path, at in places.items()}  # (clients, ids, ...)
        leaves, structure = jax.tree.flatten(carry.state)
        row_leaves = [
            read_rows(leaf, places[at]) if at in places else leaf for leaf, at in zip(leaves, labels, strict=True)
        ]
        slot = {path: at.slot for path, at in places.items() if at.slot is not None}
        row_state = jax.tree.unflatten(structure, row_leaves)
        new = jax.vmap(step_client)(carry.params, row_state, changes, slot, problem.context, turn)
        places = {path: at._replace(slot=new.slot.get(path)) for path, at in places.items()}
        lists = {path: change_rows(carry.changes[path], at, new.rows[path]) for path, at in places.items()}
        state = [
            change_rows(old, places[label], rows, replace=True) if label in places else rows
            for old, rows, label in zip(leaves, jax.tree.leaves(new.state), labels, strict=True)
        ]
        sums = carry.sums + new.sums if problem.measured else carry.sums
        return Carry(new.params, lists, jax.tree.unflatten(structure, state), sums)

    return advance


class _RowUpdate(NamedTuple):
    """The result of one client's step: new parameters and sums, updates and new state of the batch's rows."""

    params: Params
    rows: dict[str, Array]  # table -> (ids, ...) updates
    state: Any  # of whole parameters, and of the batch's rows
    slot: dict[str, Array]  # table -> (ids,) positions in the client's list of rows; past its end for repeats
    sums: Array


def _where(active: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, old)


def _first(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[0], params)
