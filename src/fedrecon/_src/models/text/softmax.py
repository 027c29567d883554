"""Cross-entropy over many outputs, which computes only the logits that are needed, in parts that fit into a cache."""

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

from fedrecon._src.models.text.shared_weights import merging

Rows = tuple[Array, Array]  # hidden, and the targets
Weights = tuple[Array, Array]  # kernel and bias

LOGITS_BYTES = 2**22  # logits are computed in parts of at most this size, to stay in a cache


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "kernel", "bias", "moved", "where_moved", "held"],
    meta_fields=[],
    drop_fields=["scored"],
)
@dataclasses.dataclass
class Logits:
    """Logits as a product that is not computed yet; `np.asarray` computes it.

    Attributes:
      hidden: `(..., features)`.
      kernel: `(features, outputs)`.
      bias: `(outputs,)`.
      moved: `(...)`, true where `hidden` depends on anything besides `held`.
      where_moved: the same as `hidden` where `moved` is true; elsewhere it may be anything, to be cheaper to compute.
      held: what `hidden` depends on where `moved` is false. In reconstruction none of this is differentiated, and only
        rows that are moved have a gradient.
      scored: the last argument and result of `score`.
    """

    hidden: Array
    kernel: Array
    bias: Array
    moved: Array
    where_moved: Array
    held: tuple[Array, ...]
    scored: tuple[Any, Any] = dataclasses.field(default=(None, None), repr=False)

    def score(self, target: Array) -> tuple[Array, Array]:
        """Compare with the targets.

        Args:
          target: `(...)`; 0 is padding.

        Returns:
          The cross-entropies, and 1 where no output has a higher logit than the target (0 elsewhere), both `(...)` and
          0 for padding.
        """
        if self.scored[0] is not target:  # the loss and each metric need the same result
            rows, moved_rows = (h.reshape(-1, h.shape[-1]) for h in (self.hidden, self.where_moved))
            losses, best = cross_entropy(
                rows, self.kernel, self.bias, target.reshape(-1), self.moved.reshape(-1), moved_rows, self.held
            )
            self.scored = (target, (losses.reshape(target.shape), best.reshape(target.shape)))
        return self.scored[1]

    def expected(self, target: Array) -> Array:
        """Return how often each output is expected where the target is not padding, `(outputs,)`.

        Args:
          target: `(...)`; 0 is padding.
        """
        rows, real = self.hidden.reshape(-1, self.hidden.shape[-1]), target.reshape(-1) != 0
        probabilities = jax.nn.softmax(rows @ self.kernel + self.bias)
        return jnp.where(real, 1.0, 0.0) @ probabilities

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
      target: `(rows,)`; 0 for padding, whose results are 0.
      moved: `(rows,)`, false for rows that depend only on `held`.
      where_moved: `(rows, features)`: the same as `hidden` where `moved` is true. If neither the weights nor `held` are
        differentiated, it gets the gradient instead of `hidden`.
      held: only tells whether it is differentiated.
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
    # With the weights frozen, as in reconstruction, only the gradient by the rows is needed. It is computed separately
    # from the losses, which reconstruction does not use, so that the compiler can drop them.
    losses = _losses((hidden.value, target.value), weights)
    if any(leaf.perturbed for leaf in held):
        return losses, (None, None, _slopes((hidden.value, target.value), weights), None)
    moved_target = jnp.where(moved.value, target.value, 0)
    return losses, (None, None, None, _slopes((where_moved.value, moved_target), weights))


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
    """Return cross-entropies, whether the target has the highest logit, and the softmax as exponentials and a total."""
    highest = jnp.max(logits, -1)
    exponentials = jnp.exp(logits - lax.stop_gradient(highest)[:, None])
    total = jnp.sum(exponentials, -1)
    at_target = jnp.take_along_axis(logits, target[:, None], -1)[:, 0]
    losses = jnp.log(total) + lax.stop_gradient(highest) - at_target
    real = target != 0
    return jnp.where(real, losses, 0), (real & (at_target >= highest)).astype(logits.dtype), exponentials, total


def _losses_at_once(rows: Rows, weights: Weights) -> tuple[Array, Array]:
    """Return the cross-entropies, and whether the target has the highest logit."""
    return _compare(rows[0] @ weights[0] + weights[1], rows[1])[:2]


def _slopes_at_once(rows: Rows, weights: Weights) -> Array:
    """Return the gradient of each cross-entropy by its row."""
    (hidden, target), (kernel, bias) = rows, weights
    *_, exponentials, total = _compare(hidden @ kernel + bias, target)
    slope = (exponentials @ kernel.T) / total[:, None] - kernel[:, target].T
    return jnp.where((target != 0)[:, None], slope, 0)


def _in_parts(at_once: Callable[[Rows, Weights], Any], rows: Rows, weights: Weights) -> Any:
    """Apply a function to as many rows at a time as `LOGITS_BYTES` allows, without padding.

    A third of the positions in a batch of sentences is padding. It is sorted to the end, in parts that are never run.
    """
    count, kernel = len(rows[1]), weights[0]
    parts = -(-count * kernel.shape[1] * kernel.dtype.itemsize // LOGITS_BYTES)
    if parts <= 1:
        return at_once(rows, weights)
    length = -(-count // parts)
    order = jnp.argsort(rows[1] == 0, stable=True)
    order = jnp.pad(order, (0, parts * length - count), mode="edge")
    sorted_rows = jax.tree.map(lambda x: x[order], rows)

    def run_part(part: Array, results: Any) -> Any:
        part_rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part * length, length), sorted_rows)
        new = at_once(part_rows, weights)
        return jax.tree.map(lambda all_, x: lax.dynamic_update_slice_in_dim(all_, x, part * length, 0), results, new)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(at_once, sorted_rows, weights))
    results = lax.fori_loop(0, -(-jnp.sum(rows[1] != 0) // length), run_part, nothing)
    back = jnp.zeros(count, order.dtype).at[order[:count]].set(jnp.arange(count, dtype=order.dtype))
    return jax.tree.map(lambda x: x[back], results)


_losses = merging(axis=0, plain=_losses_at_once)(functools.partial(_in_parts, _losses_at_once))
_slopes = merging(axis=0, plain=_slopes_at_once)(functools.partial(_in_parts, _slopes_at_once))
