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
          target: `(...)`.

        Returns:
          The cross-entropies, and 1 where no output has a higher logit than the target (0 elsewhere), both `(...)`.
        """
        if self.found[0] is not target:  # the loss and each metric ask for the same
            losses, best = cross_entropy(
                self.hidden.reshape(-1, self.hidden.shape[-1]), self.kernel, self.bias, target.reshape(-1)
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
def cross_entropy(hidden: Array, kernel: Array, bias: Array, target: Array) -> tuple[Array, Array]:
    """Return the cross-entropy of each row, and 1 where the target's logit is the highest (a tie included).

    Args:
      hidden: `(rows, features)`.
      kernel: `(features, outputs)`.
      bias: `(outputs,)`.
      target: `(rows,)`, the outputs that should have been.
    """
    return _by_rows((hidden, target), (kernel, bias))[:2]


def _forward(
    hidden: CustomVJPPrimal, kernel: CustomVJPPrimal, bias: CustomVJPPrimal, target: CustomVJPPrimal
) -> tuple[tuple[Array, Array], Any]:
    values = hidden.value, kernel.value, bias.value, target.value
    if kernel.perturbed or bias.perturbed:
        logits = hidden.value @ kernel.value + bias.value
        losses, best, exponentials, total = _compare(logits, target.value)
        return (losses, best), (values, exponentials, total, None)
    # With the weights frozen, as in reconstruction, all that remains of the logits is the slope in the rows.
    losses, best, slope = _by_rows((hidden.value, target.value), (kernel.value, bias.value))
    return (losses, best), (values, None, None, slope)


def _backward(saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, Any, Any, None]:
    (hidden, kernel, bias, target), exponentials, total, slope = saved
    d_losses = cotangents[0]
    if isinstance(d_losses, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros_like(hidden), jnp.zeros_like(kernel), jnp.zeros_like(bias), None
    if slope is not None:
        return slope * d_losses[:, None], jnp.zeros_like(kernel), jnp.zeros_like(bias), None
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
    return losses, (at_target >= highest).astype(logits.dtype), exponentials, total


@merging(axis=0)
def _by_rows(rows: tuple[Array, Array], weights: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Return the cross-entropies, whether the target is best, and the gradient of each cross-entropy in its row."""
    kernel, bias = weights

    def some(rows: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, target = rows
        losses, best, exponentials, total = _compare(hidden @ kernel + bias, target)
        return losses, best, (exponentials @ kernel.T) / total[:, None] - kernel[:, target].T

    count = len(rows[1])
    parts = -(-count * kernel.shape[1] * kernel.dtype.itemsize // LOGITS_BYTES)
    if parts <= 1:
        return some(rows)
    length = -(-count // parts)
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, parts * length - count)] + [(0, 0)] * (x.ndim - 1)), rows)
    found = lax.map(some, jax.tree.map(lambda x: x.reshape(parts, length, *x.shape[1:]), padded))
    return jax.tree.map(lambda x: x.reshape(parts * length, *x.shape[2:])[:count], found)
