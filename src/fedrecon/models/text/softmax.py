"""Cross-entropy over many outputs, without logits that nobody needs, or more at a time than fit into a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from fedrecon.models.text.merging import merging

Rows = tuple[Array, Array]  # hidden, and the targets
Weights = tuple[Array, Array]  # kernel and bias

LOGITS_BYTES = 2**22  # of logits that are there at once where they need not all be: they are to stay in a cache


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "kernel", "bias", "moved", "where_moved", "held"],
    meta_fields=[],
    drop_fields=["found"],
)
@dataclasses.dataclass
class Logits:
    """Logits as the product that they come from: as an array only when it is asked for, by `np.asarray`.

    Attributes:
      hidden: `(..., features)`.
      kernel: `(features, outputs)`.
      bias: `(outputs,)`.
      moved: `(...)`, where `hidden` depends on anything else than what is in `held`.
      where_moved: `hidden` again where it is moved, anything elsewhere: it may take less to compute.
      held: what `hidden` depends on where it is not moved. In reconstruction none of this is differentiated, and only
        rows that are moved have a gradient.
      found: what `against` returned last, and for what.
    """

    hidden: Array
    kernel: Array
    bias: Array
    moved: Array
    where_moved: Array
    held: tuple[Array, ...]
    found: tuple[Any, Any] = dataclasses.field(default=(None, None), repr=False)

    def against(self, target: Array) -> tuple[Array, Array]:
        """Compare with the outputs that should have been.

        Args:
          target: `(...)`; 0 is padding.

        Returns:
          The cross-entropies, and 1 where no output has a higher logit than the target (0 elsewhere), both `(...)` and
          0 where there is padding.
        """
        if self.found[0] is not target:  # the loss and each metric ask for the same
            rows, moved_rows = (h.reshape(-1, h.shape[-1]) for h in (self.hidden, self.where_moved))
            losses, best = cross_entropy(
                rows, self.kernel, self.bias, target.reshape(-1), self.moved.reshape(-1), moved_rows, self.held
            )
            self.found = (target, (losses.reshape(target.shape), best.reshape(target.shape)))
        return self.found[1]

    def values(self) -> Array:
        """Return the logits, `(..., outputs)`."""
        return self.hidden @ self.kernel + self.bias

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the logits for NumPy."""
        del copy
        return np.asarray(self.values(), dtype)


@jax.custom_vjp
def cross_entropy(
    hidden: Array,
    kernel: Array,
    bias: Array,
    target: Array,
    moved: Array,
    where_moved: Array,
    held: tuple[Array, ...],
) -> tuple[Array, Array]:
    """Return the cross-entropy of each row, and 1 where the target's logit is the highest (a tie included).

    Args:
      hidden: `(rows, features)`.
      kernel: `(features, outputs)`.
      bias: `(outputs,)`.
      target: `(rows,)`, the outputs that should have been; 0 for rows that are padding, whose results are 0.
      moved: `(rows,)`, false for rows that depend on nothing but `held`.
      where_moved: `(rows, features)`: `hidden` where it is moved, anything elsewhere. It has the gradient, and `hidden`
        none, where neither the weights nor `held` are differentiated.
      held: not used but to know whether it is differentiated.
    """
    del moved, where_moved, held
    return _losses((hidden, target), (kernel, bias))


def _forward(
    hidden: CustomVJPPrimal,
    kernel: CustomVJPPrimal,
    bias: CustomVJPPrimal,
    target: CustomVJPPrimal,
    moved: CustomVJPPrimal,
    where_moved: CustomVJPPrimal,
    held: tuple[CustomVJPPrimal, ...],
) -> tuple[tuple[Array, Array], Any]:
    weights, values = (kernel.value, bias.value), (hidden.value, kernel.value, target.value)
    if kernel.perturbed or bias.perturbed:
        compared = _compare(hidden.value @ kernel.value + bias.value, target.value)
        return compared[:2], (values, compared[2:], None, None)
    # With the weights frozen, as in reconstruction, all that remains of the logits is the slope in the rows. It is
    # found apart from the losses, in which reconstruction takes no interest: the compiler can leave those out.
    losses = _losses((hidden.value, target.value), weights)
    if any(leaf.perturbed for leaf in held):
        return losses, (None, None, _slopes((hidden.value, target.value), weights), None)
    wanted = jnp.where(moved.value, target.value, 0)
    return losses, (None, None, None, _slopes((where_moved.value, wanted), weights))


def _backward(saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    values, softmax, slope, slope_where_moved = saved
    d_losses = cotangents[0]
    if isinstance(d_losses, SymbolicZero):
        return (None,) * 7
    if slope_where_moved is not None:
        return *(None,) * 5, slope_where_moved * d_losses[:, None], None
    if slope is not None:
        return slope * d_losses[:, None], *(None,) * 6
    hidden, kernel, target = values
    exponentials, total = softmax
    d_losses = jnp.where(target != 0, d_losses, 0)
    d_logits = exponentials * (d_losses / total)[:, None]
    d_logits = d_logits.at[jnp.arange(len(target)), target].add(-d_losses)
    return d_logits @ kernel.T, hidden.T @ d_logits, jnp.sum(d_logits, 0), *(None,) * 4


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _compare(logits: Array, target: Array) -> tuple[Array, Array, Array, Array]:
    """Return cross-entropies, whether the target is best, and the softmax as exponentials and their total."""
    highest = jnp.max(logits, -1)
    exponentials = jnp.exp(logits - lax.stop_gradient(highest)[:, None])
    total = jnp.sum(exponentials, -1)
    at_target = jnp.take_along_axis(logits, target[:, None], -1)[:, 0]
    losses = jnp.log(total) + lax.stop_gradient(highest) - at_target
    real = target != 0
    return jnp.where(real, losses, 0), (real & (at_target >= highest)).astype(logits.dtype), exponentials, total


def _losses_at_once(rows: Rows, weights: Weights) -> tuple[Array, Array]:
    """Return the cross-entropies, and whether the target is best."""
    return _compare(rows[0] @ weights[0] + weights[1], rows[1])[:2]


def _slopes_at_once(rows: Rows, weights: Weights) -> Array:
    """Return the gradient of each cross-entropy in its row."""
    (hidden, target), (kernel, bias) = rows, weights
    *_, exponentials, total = _compare(hidden @ kernel + bias, target)
    slope = (exponentials @ kernel.T) / total[:, None] - kernel[:, target].T
    return jnp.where((target != 0)[:, None], slope, 0)


def _in_parts(at_once: Callable[[Rows, Weights], Any], rows: Rows, weights: Weights) -> Any:
    """Do something for as many rows at a time as `LOGITS_BYTES` allows, and for no padding.

    A third of the places in a batch of sentences is padding. Put last, it is in parts that are never reached.
    """
    count, kernel = len(rows[1]), weights[0]
    parts = -(-count * kernel.shape[1] * kernel.dtype.itemsize // LOGITS_BYTES)
    if parts <= 1:
        return at_once(rows, weights)
    length = -(-count // parts)
    order = jnp.argsort(rows[1] == 0, stable=True)
    order = jnp.pad(order, (0, parts * length - count), mode="edge")
    sorted_rows = jax.tree.map(lambda x: x[order], rows)

    def one(part: Array, found: Any) -> Any:
        here = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part * length, length), sorted_rows)
        new = at_once(here, weights)
        return jax.tree.map(lambda all_, x: lax.dynamic_update_slice_in_dim(all_, x, part * length, 0), found, new)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(at_once, sorted_rows, weights))
    found = lax.fori_loop(0, -(-jnp.sum(rows[1] != 0) // length), one, nothing)
    back = jnp.zeros(count, order.dtype).at[order[:count]].set(jnp.arange(count, dtype=order.dtype))
    return jax.tree.map(lambda x: x[back], found)


_losses = merging(axis=0, plain=_losses_at_once)(functools.partial(_in_parts, _losses_at_once))
_slopes = merging(axis=0, plain=_slopes_at_once)(functools.partial(_in_parts, _slopes_at_once))
