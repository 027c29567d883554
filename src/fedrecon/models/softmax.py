"""Cross-entropy over many outputs, where all logits of a block of clients would not fit into a cache, or memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal

from fedrecon.models.merging import merging

LOGITS_BYTES = 2**22  # of logits that are there at once where they need not all be: they are to stay in a cache


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["hidden", "kernel", "bias"], meta_fields=[], drop_fields=["found"]
)
@dataclasses.dataclass
class Logits:
    """Logits as the product that they come from: as an array only when it is asked for, by `np.asarray`.

    Attributes:
      hidden: `(..., features)`.
      kernel: `(features, outputs)`.
      bias: `(outputs,)`.
      found: what `against` returned last, and for what.
    """

    hidden: Array
    kernel: Array
    bias: Array
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
            rows = self.hidden.reshape(-1, self.hidden.shape[-1])
            losses, best = cross_entropy(rows, self.kernel, self.bias, target.reshape(-1))
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
def cross_entropy(hidden: Array, kernel: Array, bias: Array, target: Array) -> tuple[Array, Array]:
    """Return the cross-entropy of each row, and 1 where the target's logit is the highest (a tie included).

    Args:
      hidden: `(rows, features)`.
      kernel: `(features, outputs)`.
      bias: `(outputs,)`.
      target: `(rows,)`, the outputs that should have been; 0 for rows that are padding, whose results are 0.
    """
    return _in_parts((hidden, target), (kernel, bias))[:2]


def _forward(
    hidden: CustomVJPPrimal, kernel: CustomVJPPrimal, bias: CustomVJPPrimal, target: CustomVJPPrimal
) -> tuple[tuple[Array, Array], Any]:
    values = hidden.value, kernel.value, bias.value, target.value
    if kernel.perturbed or bias.perturbed:
        compared = _compare(hidden.value @ kernel.value + bias.value, target.value)
        return compared[:2], (values, compared[2:], None)
    # With the weights frozen, as in reconstruction, all that remains of the logits is the slope in the rows.
    losses, best, slope = _in_parts((hidden.value, target.value), (kernel.value, bias.value))
    return (losses, best), (values, None, slope)


def _backward(saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, Any, Any, None]:
    (hidden, kernel, bias, target), softmax, slope = saved
    d_losses = cotangents[0]
    if isinstance(d_losses, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros_like(hidden), jnp.zeros_like(kernel), jnp.zeros_like(bias), None
    if slope is not None:
        return slope * d_losses[:, None], jnp.zeros_like(kernel), jnp.zeros_like(bias), None
    exponentials, total = softmax
    d_losses = jnp.where(target != 0, d_losses, 0)
    d_logits = exponentials * (d_losses / total)[:, None]
    d_logits = d_logits.at[jnp.arange(len(target)), target].add(-d_losses)
    return d_logits @ kernel.T, hidden.T @ d_logits, jnp.sum(d_logits, 0), None


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


def _at_once(rows: tuple[Array, Array], weights: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Return the cross-entropies, whether the target is best, and the gradient of each cross-entropy in its row."""
    (hidden, target), (kernel, bias) = rows, weights
    losses, best, exponentials, total = _compare(hidden @ kernel + bias, target)
    slope = (exponentials @ kernel.T) / total[:, None] - kernel[:, target].T
    return losses, best, jnp.where((target != 0)[:, None], slope, 0)


@merging(axis=0, plain=_at_once)
def _in_parts(rows: tuple[Array, Array], weights: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Do what `_at_once` does for as many rows at a time as `LOGITS_BYTES` allows, and for no padding.

    A third of the places in a batch of sentences is padding. Put last, it is in parts that are never reached.
    """
    count, kernel = len(rows[1]), weights[0]
    parts = -(-count * kernel.shape[1] * kernel.dtype.itemsize // LOGITS_BYTES)
    if parts <= 1:
        return _at_once(rows, weights)
    length = -(-count // parts)
    order = jnp.argsort(rows[1] == 0, stable=True)
    order = jnp.pad(order, (0, parts * length - count), mode="edge")
    sorted_rows = jax.tree.map(lambda x: x[order], rows)

    def one(part: Array, found: Any) -> Any:
        here = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part * length, length), sorted_rows)
        new = _at_once(here, weights)
        return jax.tree.map(lambda all_, x: lax.dynamic_update_slice_in_dim(all_, x, part * length, 0), found, new)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(_at_once, sorted_rows, weights))
    found = lax.fori_loop(0, -(-jnp.sum(rows[1] != 0) // length), one, nothing)
    back = jnp.zeros(count, order.dtype).at[order[:count]].set(jnp.arange(count, dtype=order.dtype))
    return jax.tree.map(lambda x: x[back], found)
