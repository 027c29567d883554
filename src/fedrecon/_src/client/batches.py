"""Batches: several clients go through their examples side by side, each until its own examples end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, Shaped

from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.model import Batch

# (carry, batch, mask, the client's context) -> carry, of one client
Step = Callable[[Any, Batch, Array, Any], Any]


class Batches:
    """The batches of several clients, numbered from 0; a client's last one may be partial.

    A partial batch is padded with copies of the client's last example; or, with `cyclic`, with its examples from the
    first on, for models that use statistics of a batch and take no mask.
    """

    def __init__(self, examples: Examples, size: int, *, epochs: int = 1, cyclic: bool = False):
        """Divide examples into batches.

        Args:
          examples: the examples of several clients.
          size: examples per batch.
          epochs: how often clients go through their examples; a client with fewer batches begins again before others.
          cyclic: how to pad a partial batch.
        """
        self._count, self._size, self._cyclic, self._repeats = examples.count, size, cyclic, epochs > 1
        self._last = jnp.maximum(examples.count - 1, 0)
        self.number = -(-examples.count // size)  # (clients,)
        self.in_step = not self._repeats and not cyclic

    def arrange(self, columns: Any) -> Any:
        """Prepare columns, or any arrays by example, for `take`.

        If clients are `in_step`, padding is filled in once here, so that a batch is a plain slice. Inside a loop this
        is several times faster than a gather.

        Args:
          columns: of `(clients, examples, ...)`.
        """
        return {name: self._filled(column) for name, column in columns.items()} if self.in_step else dict(columns)

    def _filled(self, column: Shaped[Array, "clients examples ..."]) -> Shaped[Array, "clients padded ..."]:
        """Replace padding by copies of each client's last example, up to whole batches."""
        column = jnp.asarray(column)
        short = -column.shape[1] % self._size
        real = jnp.arange(column.shape[1] + short) < self._count[:, None]  # (clients, examples)
        last = _pick(column, self._last[:, None])  # (clients, 1, ...)
        padded = jnp.pad(column, [(0, 0), (0, short)] + [(0, 0)] * (column.ndim - 2)) if short else column
        return jnp.where(real.reshape(*real.shape, *([1] * (column.ndim - 2))), padded, last)

    def take(self, arranged: Any, t: Array) -> Any:
        """Return batch `t` of every client.

        Args:
          arranged: what `arrange` returned.
          t: which batch; with several epochs, the count continues after a client's last batch.
        """
        if self.in_step:
            return {
                name: jax.lax.dynamic_slice_in_dim(column, t * self._size, self._size, 1)
                for name, column in arranged.items()
            }
        index, last = self._index(t), self._last[:, None]
        inside = index % (last + 1) if self._cyclic else jnp.clip(index, 0, last)
        return {name: _pick(column, inside) for name, column in arranged.items()}

    def mask(self, t: Array) -> Bool[Array, "clients size"]:
        """Return which examples of batch `t` are not padding."""
        return self._index(t) < self._count[:, None]

    def _index(self, t: Array) -> Array:
        number = t % jnp.maximum(self.number, 1) if self._repeats else t
        return jnp.reshape(number, (-1, 1)) * self._size + jnp.arange(self._size)  # (clients or 1, size)


def _pick(
    column: Shaped[Array, "clients examples ..."], places: Int[Array, "clients n"]
) -> Shaped[Array, "clients n ..."]:
    """Return the examples of each client at places that are in range."""
    return jax.vmap(lambda examples, index: examples.at[index].get(mode="promise_in_bounds"))(column, places)


def fold_batches(
    step: Step, start: Any, held: Any, examples: Examples, size: int | None, *, cyclic: bool = False
) -> Any:
    """Fold a function over the batches of several clients, once through all examples.

    Args:
      step: `(carry, batch, mask, held) -> carry` of one client. A client without another batch gets one whose mask is
        all false.
      start: the initial carry, clients first.
      held: what each client holds fixed, clients first.
      examples: each client's examples.
      size: examples per batch; None for all at once.
      cyclic: how to pad a partial batch (see `Batches`).
    """
    length = next(iter(examples.columns.values())).shape[1]
    batches = Batches(examples, length if size is None else min(size, length), cyclic=cyclic)
    columns, most = batches.arrange(examples.columns), jnp.max(batches.number)

    def advance(carry: Any) -> Any:
        t, folded = carry
        return t + 1, jax.vmap(step)(folded, batches.take(columns, t), batches.mask(t), held)

    return jax.lax.while_loop(lambda carry: carry[0] < most, advance, (jnp.int32(0), start))[1]
