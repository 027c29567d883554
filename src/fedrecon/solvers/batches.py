"""Batches: how several clients go through their examples side by side, each as far as it has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon.cohort import Examples
from fedrecon.model import Batch

# (what is folded, batch, mask, what else the client has) -> what is folded, of one client
Step = Callable[[Any, Batch, Array, Any], Any]


def number_of_batches(examples: Examples, size: int) -> Array:
    """Return how many batches each client has, `(clients,)`; the last may be partial."""
    return -(-examples.count // size)


def batch_places(examples: Examples, number: Array, size: int, *, cyclic: bool) -> tuple[Array, Array]:
    """Say where the examples of a batch are, and which of them count.

    Padding is never read. A partial batch is filled up with the client's last example; or, with `cyclic`, with its
    examples from the first on, for models that look at statistics of a batch and cannot be given a mask.

    Args:
      examples: of several clients.
      number: `(clients,)` which batch of each client.
      size: examples of a batch.
      cyclic: how a partial batch is filled up.

    Returns:
      Places and mask, both `(clients, size)`.
    """
    index = number[:, None] * size + jnp.arange(size)
    mask = index < examples.count[:, None]
    last = jnp.maximum(examples.count[:, None] - 1, 0)
    return index % (last + 1) if cyclic else jnp.clip(index, 0, last), mask


def take_batch(columns: Any, index: Array) -> Any:
    """Take `(clients, batch)` places of columns of `(clients, examples, ...)`."""
    pick = jax.vmap(lambda column, at: column.at[at].get(mode="promise_in_bounds"))
    return jax.tree.map(lambda column: pick(column, index), dict(columns))


def fold_batches(
    step: Step, start: Any, held: Any, examples: Examples, size: int | None, *, cyclic: bool = False
) -> Any:
    """Fold a function over the batches of several clients, once through all examples.

    Args:
      step: of one client. A client without a next batch is given one whose mask is all false.
      start: what is folded, clients first.
      held: what else each client has, clients first.
      examples: of each client.
      size: examples of a batch; None for all at once.
      cyclic: how a partial batch is filled up (see `batch_places`).
    """
    length = next(iter(examples.columns.values())).shape[1]
    size = length if size is None else min(size, length)
    most = jnp.max(number_of_batches(examples, size))

    def advance(carry: Any) -> Any:
        t, folded = carry
        index, mask = batch_places(examples, t + 0 * examples.count, size, cyclic=cyclic)
        return t + 1, jax.vmap(step)(folded, take_batch(examples.columns, index), mask, held)

    return jax.lax.while_loop(lambda carry: carry[0] < most, advance, (jnp.int32(0), start))[1]
