"""Run clients with the same weights as one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

Layer = Callable[[Any, Any], Any]  # (arrays with a batch axis, weights) -> arrays with a batch axis
_plain: ContextVar[bool] = ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Trace layers in their plain form for export: without loops of unknown length and without sorting."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def merging(axis: int | None, plain: Layer | None = None, *, exported: bool = False) -> Callable[[Layer], Layer]:
    """Make `jax.vmap` of a layer merge the mapped axis into the layer's batch, if the weights are not mapped.

    Clients whose global parameters are frozen then run like one client with a larger batch, and a product of many rows
    costs less per row than one of few. If the weights are mapped too, every client has its own. A single client runs
    as without `jax.vmap`.

    The layer must treat the examples of a batch independently of each other. Derivatives of any order work.

    Args:
      axis: the batch axis, of all arrays of the layer's first argument and of all its results. None if results have
        sums over the batch: then several clients run `plain`, side by side.
      plain: the same function, for derivatives and for clients with their own weights, if the layer itself does not
        support them; by default the layer.
      exported: export the layer as it is, too.
    """

    def decorate(layer: Layer) -> Layer:
        batched, simple = custom_vmap(layer), plain or layer

        @batched.def_vmap
        def map_over(clients: int, mapped: Any, batches: Any, weights: Any) -> Any:
            private = any(jax.tree.leaves(mapped[1]))
            if clients == 1:
                alone = jax.tree.map(lambda x, is_mapped: x[0] if is_mapped else x, (batches, weights), tuple(mapped))
                result = jax.tree.map(lambda x: x[None], batched(*alone))
            elif axis is None or private:
                axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
                result = jax.vmap(simple, axes, axis_size=clients)(batches, weights)
            else:
                whole = jax.tree.map(
                    lambda x, is_mapped: x if is_mapped else jnp.broadcast_to(x, (clients, *x.shape)),
                    batches,
                    mapped[0],
                )
                merged = batched(jax.tree.map(lambda x: _merge(x, axis), whole), weights)
                result = jax.tree.map(lambda x: _divide(x, axis, clients), merged)
            return result, jax.tree.map(lambda _: True, result)

        @jax.custom_vjp
        def differentiable(batches: Any, weights: Any) -> Any:
            return simple(batches, weights) if _plain.get() and not exported else batched(batches, weights)

        # A function with a custom vmap rule has no derivative, so we define one.
        differentiable.defvjp(
            lambda batches, weights: (differentiable(batches, weights), (batches, weights)),
            lambda arguments, cotangent: jax.vjp(simple, *arguments)[1](cotangent),
        )
        return differentiable

    return decorate


def _merge(x: Array, axis: int) -> Array:
    """Turn `(clients, ..., batch, ...)` into `(..., clients * batch, ...)`."""
    moved = jnp.moveaxis(x, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


def _divide(x: Array, axis: int, clients: int) -> Array:
    """Undo `_merge`."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], clients, -1, *x.shape[axis + 1 :]), axis, 0)
