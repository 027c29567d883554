"""Batches: several clients go through their examples side by side, each until its own examples end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon.cohort import Examples
from fedrecon.model import Batch

# (carry, batch, mask, the client's context) -> carry, of one client
Step = Callable[[Any, Batch, Array, Any], Any]


def number_of_batches(examples: Examples, size: int) -> Array:
    """Return how many batches each client has, `(clients,)`; the last may be partial.

    Args:
      examples: of several clients.
      size: examples of a batch.
    """
    return -(-examples.count // size)


def batch_places(examples: Examples, number: Array, size: int, *, cyclic: bool) -> tuple[Array, Array]:
    """Return the positions of a batch's examples, and which of them are not padding.

    A partial batch is padded with copies of the client's last example; or, with `cyclic`, with its examples from the
    first on, for models that use statistics of a batch and take no mask.

    Args:
      examples: of several clients.
      number: `(clients,)` which batch of each client.
      size: examples of a batch.
      cyclic: how to pad a partial batch.

    Returns:
      Positions and mask, both `(clients, size)`.
    """
    index = number[:, None] * size + jnp.arange(size)
    mask = index < examples.count[:, None]
    last = jnp.maximum(examples.count[:, None] - 1, 0)
    return index % (last + 1) if cyclic else jnp.clip(index, 0, last), mask


def take_batch(columns: Any, index: Array) -> Any:
    """Take one batch of each client.

    Args:
      columns: of `(clients, examples, ...)`.
      index: `(clients, batch)` positions of the examples.
    """
    pick = jax.vmap(lambda column, at: column.at[at].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda column: pick(column, index), dict(columns))


def fold_batches(
    step: Step, start: Any, held: Any, examples: Examples, size: int | None, *, cyclic: bool = False
) -> Any:
    """Fold a function over the batches of several clients, once through all examples.

    Args:
      step: `(carry, batch, mask, held) -> carry` of one client. A client without another batch gets one whose mask is
        all false.
      start: the initial carry, clients first.
      held: what each client holds fixed, clients first.
      examples: of each client.
      size: examples of a batch; None for all at once.
      cyclic: how to pad a partial batch (see `batch_places`).
    """
    length = next(iter(examples.columns.values())).shape[1]
    size = length if size is None else min(size, length)
    most = jnp.max(number_of_batches(examples, size))

    def advance(carry: Any) -> Any:
        t, folded = carry
        index, mask = batch_places(examples, t + 0 * examples.count, size, cyclic=cyclic)
        return t + 1, jax.vmap(step)(folded, take_batch(examples.columns, index), mask, held)

    return jax.lax.while_loop(lambda carry: carry[0] < most, advance, (jnp.int32(0), start))[1]
