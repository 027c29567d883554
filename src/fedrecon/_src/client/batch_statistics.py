"""Set state from examples: leaves that no optimizer moves, such as running statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array

from fedrecon._src.client.batches import fold_batches
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.model import Batch, Model, ModelState
from fedrecon._src.core.pytrees import Params, flatten, unflatten

STATE_BATCH = 64  # examples that statistics are computed over at once; of more examples, the mean over such batches


def set_local_state(model: Model, params: Params, local: Params, examples: Examples) -> Params:
    """Set the local state of several clients from their examples.

    A moving average (`ModelState.momenta`) becomes the mean of the batches' own values, over batches of `STATE_BATCH`
    examples; its initial value and its momentum do not matter. Any other leaf becomes the mean of its values after each
    single batch. Without examples the state is unchanged.

    Args:
      model: its state is set.
      params: the global parameters, the same for all clients.
      local: the local parameters, clients first.
      examples: each client's examples.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> from fedrecon import kit
      >>> state = fr.kit.ModelState((), ("mean",), lambda params, local, batch, mask: ({}, {"mean": batch["x"].mean()}))
      >>> model = fr.models.matrix_factorization(3)._replace(state=state)
      >>> examples = kit.Examples({"x": jnp.array([[1.0, 3.0]])}, jnp.array([2]))
      >>> kit.set_local_state(model, {}, {"mean": jnp.zeros(1)}, examples)["mean"].tolist()
      [2.0]
    """
    state = model.state
    if state is None or not state.local:
        return local

    def add(total: dict[str, Array], batch: Batch, mask: Array, local: Params) -> dict[str, Array]:
        statistics = _of_batch(state, params, local, batch, mask)
        # After its last batch a client gets batches of padding, whose statistics mean nothing.
        counted = {path: jnp.where(jnp.any(mask), jnp.sum(mask) * value, 0) for path, value in statistics.items()}
        return {path: total[path] + counted[path].astype(total[path].dtype) for path in total}

    leaves, structure = flatten(local)
    empty = {path: jnp.zeros_like(leaves[path]) for path in state.local}
    sums = fold_batches(add, empty, local, examples, STATE_BATCH, cyclic=True)

    def mean(total: Array, old: Array) -> Array:
        count = examples.count.reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(count > 0, total / jnp.maximum(count, 1), old).astype(old.dtype)

    return unflatten(structure, {**leaves, **{path: mean(sums[path], leaves[path]) for path in state.local}})


def _of_batch(state: ModelState, params: Params, local: Params, batch: Batch, mask: Array) -> dict[str, Array]:
    """Return one client's local state as computed from one batch alone.

    Moving averages start from 0 here, so they become `1 - momentum` times the batch's value.
    """
    leaves, structure = flatten(local)
    empty = {path: jnp.zeros_like(leaves[path]) for path in state.momenta}
    statistics = state.advance(params, unflatten(structure, {**leaves, **empty}), batch, mask)[1]
    return {path: value / (1 - state.momenta.get(path, 0.0)) for path, value in statistics.items()}


def advance_shared(
    state: ModelState,
    shared: Mapping[str, Array],
    rest: Params,
    examples: Examples,
    batch_size: int | None,
    merge: Callable[..., tuple[Params, Params]],
) -> dict[str, Array]:
    """Advance the global state of several clients over their examples, batch by batch, as the layers do.

    Args:
      state: the model's state.
      shared: the global state by path, clients first.
      rest: what else each client needs to predict, clients first.
      examples: each client's examples.
      batch_size: examples per batch; None for all.
      merge: `(shared, rest) -> (global, local)` of one client.
    """

    def step(shared: dict[str, Array], batch: Batch, mask: Array, rest: Params) -> dict[str, Array]:
        new = state.advance(*merge(shared, rest), batch, mask)[0]
        return {path: jnp.where(jnp.any(mask), new[path], shared[path]).astype(shared[path].dtype) for path in shared}

    return fold_batches(step, dict(shared), rest, examples, batch_size, cyclic=True)
