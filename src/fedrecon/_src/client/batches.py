"""Batches: several clients go through their examples side by side; state that is set from batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int, Shaped

from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.model import Batch, Model
from fedrecon._src.core.pytrees import Params, flatten, unflatten

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
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t * self._size, self._size, 1), arranged)
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


# ---- state: leaves that no optimizer moves, such as running statistics ----


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
        leaves, structure = flatten(local)
        # Moving averages start from 0, so they become `1 - momentum` times the batch's value.
        zeros = {path: jnp.zeros_like(leaves[path]) for path in state.momenta}
        after = state.advance(params, unflatten(structure, leaves | zeros), batch, mask)[1]
        statistics = {path: value / (1 - state.momenta.get(path, 0.0)) for path, value in after.items()}
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
