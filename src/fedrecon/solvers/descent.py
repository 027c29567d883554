"""Gradient descent as a solver: any optax optimizer, on whole parameters or on the rows of lookup tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon.cohort import Examples
from fedrecon.lookups.tables import Tables, change_rows, merge_repeats, reach, state_labels
from fedrecon.model import Batch, Step
from fedrecon.solvers.problem import Objective, Problem, Solution, Solver, no_sums, take_batch
from fedrecon.trees import Params


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

    def solve(problem: Problem) -> Solution:
        objective, params, context, examples, tables, grows, measured, differentiable, keys = problem
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
            last = jnp.maximum(examples.count[:, None] - 1, 0)
            if objective.fit is None:
                # Padding is never read: a partial batch repeats the client's last example, with no weight.
                return take.advance(carry, jnp.clip(index, 0, last), mask, active, None)
            # What fills a partial batch up may enter its statistics: then examples from the first on, not one often.
            step_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, t)
            return take.advance(carry, index % (last + 1), mask, active, step_keys)

        carry = take.start
        if differentiable:
            longest = -(-next(iter(examples.columns.values())).shape[1] // batch_size) * epochs
            longest = longest if steps is None else min(longest, steps)
            carry, _ = jax.lax.scan(lambda c, t: (advance(t, c), None), carry, jnp.arange(longest))
        else:
            t, last = jnp.int32(0), jnp.max(todo)
            labels = state_labels(optimizer, _first(params)) if grows else []
            for stop, sizes in _phases(params, grows, batch_size):
                until = last if stop is None else jnp.minimum(stop, last)
                t, part = _advance_until(until, advance, t, _cut(carry, sizes, labels))
                carry = _put_back(carry, part, sizes, labels)
        whole, rest = jnp.divmod(todo, jnp.maximum(batches, 1))
        seen = whole * examples.count + jnp.minimum(rest * batch_size, examples.count)
        return Solution(*take.finish(carry), seen)

    limit = None if steps is None else max(1, steps * batch_size)
    return Solver(solve, limit, reach_once, lambda *args: None, batch_size)


def _advance_until(until: Array, advance: Callable[[Array, Any], Any], t: Array, carry: Any) -> tuple[Array, Any]:
    return jax.lax.while_loop(lambda c: c[0] < until, lambda c: (c[0] + 1, advance(c[0], c[1])), (t, carry))


class _Step(NamedTuple):
    """A kind of step: its first carry, `(carry, index, mask, active, keys) -> carry`, what is left in the end."""

    start: Any
    advance: Callable[[Any, Array, Array, Array, Array | None], Any]
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
        params: Params, state: Any, context: Any, batch: Batch, mask: Array, active: Array, key: Array | None
    ) -> tuple[Params, Any, Array]:
        measure = jax.value_and_grad(objective.measure, has_aux=True)
        (_, sums), grads = measure(params, context, batch, mask, Step(mask, key))
        updates, new_state = optimizer.update(grads, state, params)
        if not alone:
            updates = _where(active, updates, jax.tree.map(jnp.zeros_like, updates))
            new_state = _where(active, new_state, state)
        return optax.apply_updates(params, updates), new_state, jnp.where(active, sums, 0)

    def advance(carry: Any, index: Array, mask: Array, active: Array, keys: Array | None) -> Any:
        params, state, total = carry
        batch = take_batch(examples.columns, index)
        params, state, sums = jax.vmap(one)(params, state, context, batch, mask, active, keys)
        return params, state, total + sums if measured else total

    clients = examples.count.shape[0]  # said, for where everything is local and there is nothing to map over
    state = jax.vmap(optimizer.init, axis_size=clients)(params)
    start = (params, state, no_sums(objective.model, examples))
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

    Exact for optimizers whose reach is `each` or `rows`; `each` spares summing repeats first. The change of a row is
    kept apart from its value: the values stay where all clients share them, and the changes are what a client returns.
    """
    unchanged = tables.unchanged(examples.count.shape[0])
    labels = state_labels(optimizer, _first({**params, **unchanged}))

    def one(
        params: Params,
        changes: dict[str, Array],
        state: Any,
        context: Any,
        batch: Batch,
        slots: Batch,
        mask: Array,
        active: Array,
        key: Array | None,
    ) -> tuple[Params, dict[str, Array], Any, dict[str, Array], Array]:
        fetched = tables.fetch(changes, batch, slots)
        rows, slot = fetched.rows, fetched.slot

        def loss(trained: Params, rows: dict[str, Array]) -> tuple[Array, Array]:
            everything = {**trained, **fetched.as_tables(rows)}
            return objective.measure(everything, context, fetched.batch, mask, Step(mask, key))

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

    def advance(carry: Any, index: Array, mask: Array, active: Array, keys: Array | None) -> Any:
        params, changes, state, total = carry
        batch = take_batch(examples.columns, index)
        slots = take_batch(tables.slots, index)
        params, updates, small_state, slot, sums = jax.vmap(one)(
            params, changes, state, context, batch, slots, mask, active, keys
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


def _where(active: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, old)


def _first(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[0], params)


PHASES = 4


def _phases(params: Params, grows: Mapping[str, int], batch_size: int) -> list[tuple[int | None, dict[str, int]]]:
    """Divide the steps into phases, each with the number of rows that its steps can have touched by its end.

    Returns:
      For each phase the step before which it ends (None for the last) and the rows of each growing table.
    """
    if not grows:
        return [(None, {})]
    found: list[tuple[int | None, dict[str, int]]] = []
    for phase in reversed(range(1, PHASES)):
        sizes = {path: params[path].shape[1] >> phase for path in grows}
        stop = min(sizes[path] // (ids * batch_size) for path, ids in grows.items())
        if stop > 0:
            found.append((stop, sizes))
    return [*found, (None, {path: params[path].shape[1] for path in grows})]


def _cut(carry: Any, sizes: Mapping[str, int], labels: Sequence[str | None]) -> Any:
    """Keep the first rows of growing tables, and of the optimizer's state for them."""
    if not sizes:
        return carry
    params, state, sums = carry
    params = {path: leaf[:, : sizes[path]] if path in sizes else leaf for path, leaf in params.items()}
    leaves, structure = jax.tree.flatten(state)
    cut = [leaf[:, : sizes[at]] if at and at in sizes else leaf for leaf, at in zip(leaves, labels, strict=True)]
    return params, jax.tree.unflatten(structure, cut), sums


def _put_back(carry: Any, part: Any, sizes: Mapping[str, int], labels: Sequence[str | None]) -> Any:
    """Undo `_cut` with what has changed."""
    if not sizes:
        return part
    params = {path: carry[0][path].at[:, : sizes[path]].set(x) if path in sizes else x for path, x in part[0].items()}
    leaves, structure = jax.tree.flatten(carry[1])
    news = zip(leaves, jax.tree.leaves(part[1]), labels, strict=True)
    state = [old.at[:, : sizes[at]].set(new) if at and at in sizes else new for old, new, at in news]
    return params, jax.tree.unflatten(structure, state), part[2]
