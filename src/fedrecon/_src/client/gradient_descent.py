"""Gradient descent as a solver: any optax optimizer, on whole parameters or on the rows of lookup tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedrecon._src.client.batches import Batches
from fedrecon._src.client.lookup_reach import map_labelled, reach, state_labels
from fedrecon._src.client.lookup_tables import (
    LookupTables,
    change_rows,
    map_growing,
    merge_repeats,
    phases,
    read_rows,
)
from fedrecon._src.client.objectives import Problem, Solution, Solver, zero_sums
from fedrecon._src.core.checks import check_number, check_numbers
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.keys import fold_keys
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
    check_numbers({"batch_size": batch_size, "epochs": epochs}, least=1)
    check_number("steps", steps)
    reach_once = functools.cache(lambda: reach(optimizer))

    def solve(problem: Problem) -> Solution:
        examples = problem.examples
        # If the model has a `predict_train`, padding may enter the statistics of a batch, so it must be real examples.
        batches = Batches(examples, batch_size, epochs=epochs, cyclic=problem.objective.predict_train is not None)
        todo = batches.number * epochs if steps is None else jnp.minimum(batches.number * epochs, steps)
        tables = problem.tables.in_batches(examples.columns, batches.in_step, batch_size)
        columns, slots = batches.arrange(examples.columns), batches.arrange(tables.slots)
        step = _step(problem, tables, optimizer, each=bool(tables.values) and reach_once() == "each")
        keys = None if problem.objective.predict_train is None else problem.keys

        def advance(t: Array, carry: Carry) -> Carry:
            active = t < todo
            mask = batches.mask(t) & active[:, None]
            batch, at = batches.take(columns, t), batches.take(slots, t)
            return step(carry, t, Turn(batch, at, mask, active, None if keys is None else fold_keys(keys, t)))

        clients = examples.count.shape[0]
        changes = tables.unchanged(clients)
        # `axis_size` is explicit, since there may be no leaves to solve for.
        state = jax.vmap(optimizer.init, axis_size=clients)(_with_rows(problem.params, changes))
        carry = Carry(problem.params, changes, state, zero_sums(problem.objective.model, examples))
        if problem.differentiable:  # a fixed number of steps, so that gradients can flow back through them
            most = int(count_steps(next(iter(examples.columns.values())).shape[1]))
            carry = jax.lax.scan(lambda c, t: (advance(t, c), None), carry, jnp.arange(most))[0]
        else:
            t, last = jnp.int32(0), jnp.max(todo)  # as many steps as any client has
            labels = state_labels(optimizer, _of_one_client(problem.params), problem.grows)
            for stop, rows in phases(problem.params, problem.grows, batch_size):
                until = last if stop is None else jnp.minimum(stop, last)
                start = t, map_growing(lambda count, leaf: leaf[:, :count], rows, labels, carry)
                t, part = _advance_until(until, advance, start)
                carry = map_growing(lambda count, old, new: old.at[:, :count].set(new), rows, labels, carry, part)
        whole, rest = jnp.divmod(todo, jnp.maximum(batches.number, 1))
        seen = whole * examples.count + jnp.minimum(rest * batch_size, examples.count)
        return Solution(carry.params, problem.tables.without_padding(carry.changes), carry.sums, seen, todo)

    limit = steps * batch_size if steps else None  # without steps, whatever else reads the support reads all of it

    def count_steps(examples: Any) -> Any:
        return np.minimum(-(-examples // batch_size) * epochs, np.inf if steps is None else steps)

    return Solver(solve, limit, reach_once, lambda *args: None, batch_size, count_steps)


def _with_rows(params: Params, rows: Mapping[str, Any]) -> Params:
    """Return parameters, which are by path if there are tables, with rows of tables."""
    return {**params, **rows} if rows else params


def _advance_until(stop: Array, advance: Callable[[Array, Carry], Carry], start: tuple[Array, Carry]) -> Any:
    return jax.lax.while_loop(lambda state: state[0] < stop, lambda state: (state[0] + 1, advance(*state)), start)


def _step(
    problem: Problem, tables: LookupTables, optimizer: optax.GradientTransformation, each: bool
) -> Callable[[Carry, Array, Turn], Carry]:
    """Return a step on whole parameters, of which every client has its own copy, and on the batch's rows of tables.

    Of tables, it never forms gradients, state or updates of other rows. That is exact for optimizers whose reach is
    `each` or `rows`; with `each`, the gradients of repeated rows need not be summed first. Changes of rows are separate
    from their values: all clients share the values, and a client returns only its changes.
    """
    objective, clients = problem.objective, problem.examples.count.shape[0]
    alone = clients == 1 and not problem.differentiable  # every step that runs is one that its client takes
    labels = state_labels(optimizer, _of_one_client(_with_rows(problem.params, tables.unchanged(1))), tables.values)

    def step_client(
        params: Params, state: Any, changes: dict[str, Array], slot: dict[str, Array], context: Any, turn: Turn
    ) -> tuple[Carry, dict[str, Array]]:
        fetched, batch = tables.fetch(changes, turn.batch)  # rows: (ids, ...) of each table

        def loss(trained: Params, rows: dict[str, Array]) -> tuple[Array, Array]:
            everything = _with_rows(trained, tables.as_tables(rows, batch))
            return objective.measure(everything, context, batch, turn.mask, Step(turn.mask, turn.keys))

        (_, sums), (grads, row_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, fetched)
        if not each:
            merged = {path: merge_repeats(slot[path], row_grads[path]) for path in slot}
            row_grads |= {path: pair[0] for path, pair in merged.items()}
            slot = {path: pair[1] for path, pair in merged.items()}
        solved = _with_rows(params, fetched)
        updates, new_state = optimizer.update(_with_rows(grads, row_grads), state, solved)
        if not alone:
            updates = optax.tree.where(turn.active, updates, optax.tree.zeros_like(updates))
            new_state = optax.tree.where(turn.active, new_state, state)
        rows = {path: updates.pop(path) for path in fetched}
        return Carry(optax.apply_updates(params, updates), rows, new_state, jnp.where(turn.active, sums, 0)), slot

    def advance(carry: Carry, t: Array, turn: Turn) -> Carry:
        places = tables.places(t, turn.batch, turn.slots)
        changes = {path: read_rows(carry.changes[path], at) for path, at in places.items()}  # (clients, ids, ...)
        row_state = map_labelled(lambda path, leaf: read_rows(leaf, places[path]), labels, carry.state)
        slot = {path: at.slot for path, at in places.items() if at.slot is not None}
        # Of `new`, changes are those of this step, and changes and state of tables are of the batch's rows.
        new, slot = jax.vmap(step_client)(carry.params, row_state, changes, slot, problem.context, turn)
        written = {path: at._replace(slot=slot.get(path)) for path, at in places.items()}
        state = map_labelled(
            lambda path, leaf, rows: change_rows(leaf, written[path], rows, replace=True),
            labels,
            carry.state,
            new.state,
        )
        lists = {path: change_rows(carry.changes[path], at, new.changes[path]) for path, at in written.items()}
        return Carry(new.params, lists, state, carry.sums + new.sums if problem.measured else carry.sums)

    return advance


def _of_one_client(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[0], params)
