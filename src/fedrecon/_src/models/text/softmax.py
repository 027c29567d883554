"""Cross-entropy over many outputs, which computes only the logits that are needed, in parts that fit into a cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal as Primal
from jax.custom_derivatives import SymbolicZero

from fedrecon._src.models.text.shared_weights import Layer, merging

Rows = tuple[Array, Array]  # hidden, and the targets
Weights = tuple[Array, Array]  # kernel and bias

PART = 64  # rows whose logits are computed together, to stay in a cache


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Which outputs are scored together.

    The groups are scored only where the target is one of theirs: there are two levels, and the first has all other
    outputs and one for every group. Since words of a group are rare, most rows need the first level alone.

    Attributes:
      count: how many outputs there are.
      groups: of neighbours, `(first, one after the last)`, in ascending order; none for a single softmax.

    References:
      Goodman, Classes for Fast Maximum Entropy Training, 2001; Grave et al., Efficient Softmax Approximation for GPUs,
      ICML 2017.
    """

    count: int
    groups: tuple[tuple[int, int], ...] = ()

    @property
    def ungrouped(self) -> int:
        """How many outputs no group has."""
        return self.count - sum(after - first for first, after in self.groups)

    def levels_of(self, target: Array) -> list[Array]:
        """Return a target's place at the first level and in each group; -1 where it is in none, as 0 (padding) is."""
        before = sum(((target >= after) * (after - first) for first, after in self.groups), jnp.zeros_like(target))
        top, places = jnp.where(target > 0, target - before, -1), []
        for number, (first, after) in enumerate(self.groups):
            inside = (target >= first) & (target < after)
            top = jnp.where(inside, self.ungrouped + number, top)
            places.append(jnp.where(inside, target - first, -1))
        return [top, *places]

    def divide(self, per_output: Array, per_group: Sequence[Array]) -> list[Array]:
        """Divide values of `(outputs,)`, and one of `(1,)` for each group, among the levels."""
        ends = [0, *(end for group in self.groups for end in group), self.count]
        pieces = [per_output[begin:end] for begin, end in itertools.pairwise(ends)]  # ungrouped ones and groups in turn
        top = [piece for piece in pieces[::2] if len(piece)]  # ONNX has no empty ones
        return [jnp.concatenate([*top, *per_group]), *pieces[1::2]]

    def log_shares(self, levels: list[Array]) -> Array:
        """Return the logarithm of each output's probability, `(..., outputs)`, from the logits of all levels.

        Of a single softmax, its logits are returned as they are.
        """
        if not self.groups:
            return levels[0]
        top, *groups = map(jax.nn.log_softmax, levels)
        shares = [top[..., self.ungrouped + number, None] for number in range(len(groups))]
        return self.join([top, *(share + group for share, group in zip(shares, groups, strict=True))])

    def join(self, levels: list[Array]) -> Array:
        """Put values of `(..., logits)` of all levels in the order of the outputs; those of groups are left out."""
        pieces, at, begin = [], 0, 0
        for members, (first, after) in zip(levels[1:], self.groups, strict=True):
            pieces += [levels[0][..., at : at + first - begin], members]
            at, begin = at + first - begin, after
        pieces.append(levels[0][..., at : self.ungrouped])
        return jnp.concatenate([piece for piece in pieces if piece.shape[-1]], -1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "weights", "moved", "where_moved", "held"],
    meta_fields=["outputs"],
    drop_fields=["scored"],
)
@dataclasses.dataclass
class Logits:
    """Logits as a product that is not computed yet; `np.asarray` computes it.

    Attributes:
      hidden: `(..., features)`.
      weights: a kernel `(features, logits)` and a bias `(logits,)` for each level of `outputs`.
      moved: `(...)`, true where `hidden` depends on anything besides `held`.
      where_moved: the same as `hidden` where `moved` is true; elsewhere it may be anything, to be cheaper to compute.
      held: what `hidden` depends on where `moved` is false. In reconstruction none of this is differentiated, and only
        rows that are moved have a gradient.
      outputs: which of them are scored together.
      scored: the last argument and result of `losses`.
    """

    hidden: Array
    weights: list[Weights]
    moved: Array
    where_moved: Array
    held: tuple[Array, ...]
    outputs: Outputs
    scored: tuple[Any, Any] = dataclasses.field(default=(None, None), repr=False)

    def losses(self, target: Array) -> Array:
        """Return the cross-entropies with the targets, `(...)`; 0 where the target is 0, which is padding."""
        return self._score(target)[0]

    def hits(self, target: Array) -> Array:
        """Return 1 where no output is more probable than the target, else 0, `(...)`; 0 for padding."""
        if not self.outputs.groups:
            return self._score(target)[1]
        rows = lax.stop_gradient(self.hidden.reshape(-1, self.hidden.shape[-1])), _places(target)
        return _compare_levels(self.outputs)(rows, lax.stop_gradient(self.weights)).reshape(target.shape)

    def _score(self, target: Array) -> tuple[Array, Array]:
        if self.scored[0] is not target:  # the loss and each metric need the same result
            rows, moved_rows = (h.reshape(-1, h.shape[-1]) for h in (self.hidden, self.where_moved))
            levels = zip(self.weights, self.outputs.levels_of(target.reshape(-1)), strict=True)
            scores = [
                cross_entropy(rows, *weights, places, self.moved.reshape(-1), moved_rows, self.held)
                for weights, places in levels
            ]
            losses = sum((losses for losses, _ in scores[1:]), scores[0][0])
            self.scored = (target, (losses.reshape(target.shape), scores[0][1].reshape(target.shape)))
        return self.scored[1]

    def expected(self, target: Array) -> Array:
        """Return how often each output is expected where the target is not padding, `(outputs,)`.

        Args:
          target: `(...)`; 0 is padding.
        """
        rows = self.hidden.reshape(-1, self.hidden.shape[-1]), _places(target)
        return _expect(self.outputs)(rows, self.weights)[1]

    def values(self) -> Array:
        """Return the logits, `(..., outputs)`."""
        return _log_shares(self.outputs, self.hidden, self.weights)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the logits for NumPy."""
        del copy
        return np.asarray(self.values(), dtype)


@jax.custom_vjp
def cross_entropy(
    hidden: Array, kernel: Array, bias: Array, target: Array, moved: Array, where_moved: Array, held: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Return the cross-entropy of each row, and 1 where the target's logit is the highest (a tie included).

    Args:
      hidden: `(rows, features)`.
      kernel: `(features, outputs)`.
      bias: `(outputs,)`.
      target: `(rows,)`; -1 for rows that have none, whose results are 0.
      moved: `(rows,)`, false for rows that depend only on `held`.
      where_moved: `(rows, features)`: the same as `hidden` where `moved` is true. If neither the weights nor `held` are
        differentiated, it gets the gradient instead of `hidden`.
      held: only tells whether it is differentiated.
    """
    del moved, where_moved, held
    return _losses((hidden, target), (kernel, bias))


def _forward(
    hidden: Primal, kernel: Primal, bias: Primal, target: Primal, moved: Primal, where_moved: Primal, held: Any
) -> tuple[tuple[Array, Array], Any]:
    rows, weights = (hidden.value, target.value), (kernel.value, bias.value)
    losses = _losses(rows, weights)
    if kernel.perturbed or bias.perturbed:
        return losses, ((rows, weights), None, None)
    # With the weights frozen, as in reconstruction, only the gradient by the rows is needed. It is computed separately
    # from the losses, which reconstruction does not use, so that the compiler can drop them.
    if any(leaf.perturbed for leaf in held):
        return losses, (None, _slopes(rows, weights), None)
    moved_target = jnp.where(moved.value, target.value, -1)
    return losses, (None, None, _slopes((where_moved.value, moved_target), weights))


def _backward(saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    differentiated, slope, slope_where_moved = saved
    d_losses = cotangents[0]
    if isinstance(d_losses, SymbolicZero):
        return (None,) * 7
    if slope_where_moved is not None:
        return *(None,) * 5, slope_where_moved * d_losses[:, None], None
    if slope is not None:
        return slope * d_losses[:, None], *(None,) * 6
    (hidden, target), weights = differentiated
    return *_gradients((hidden, target, d_losses), weights), *(None,) * 4


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _map_parts(at_once: Callable[[Any, Any], Any], rows: Any, weights: Any, *, sums: bool = False) -> Any:
    """Apply a function to some rows at a time, and only to rows that have a target.

    A third of the positions in a batch of sentences is padding, and few targets are in a group of rare words. The rows
    without a target are sorted to the end, in parts that are never run.

    Args:
      at_once: `(rows, weights) -> results`, each with a value for every row.
      rows: arrays of `(rows, ...)`, the second of which has the targets.
      weights: what `at_once` needs besides.
      sums: all results but the first are sums over rows instead.
    """
    count = len(rows[1])
    parts = -(-count // PART)
    order = jnp.argsort(rows[1] < 0, stable=True)[jnp.minimum(jnp.arange(parts * PART), count - 1)]
    real = jnp.sum(rows[1] >= 0)
    sorted_rows = [x[order] for x in rows]
    sorted_rows[1] = jnp.where(jnp.arange(parts * PART) < real, sorted_rows[1], -1)  # not what the edge repeats

    def is_sum(number: int) -> bool:
        return sums and number > 0

    def run_part(part: Array, results: list[Array]) -> list[Array]:
        part_rows = tuple(lax.dynamic_slice_in_dim(x, part * PART, PART) for x in sorted_rows)
        new = jax.tree.leaves(at_once(part_rows, weights))
        return [
            all_ + x if is_sum(number) else lax.dynamic_update_slice_in_dim(all_, x, part * PART, 0)
            for number, (all_, x) in enumerate(zip(results, new, strict=True))
        ]

    shapes, tree = jax.tree.flatten(jax.eval_shape(at_once, tuple(sorted_rows), weights))
    results = lax.fori_loop(0, -(-real // PART), run_part, [jnp.zeros(x.shape, x.dtype) for x in shapes])
    back = jnp.zeros(count, order.dtype).at[order[:count]].set(jnp.arange(count, dtype=order.dtype))
    return jax.tree.unflatten(tree, [x if is_sum(number) else x[back] for number, x in enumerate(results)])


def _by_rows(at_once: Layer, *, sums: bool = False, exported: bool = False) -> Layer:
    """Apply a function of rows in parts, and to the rows of all clients at once where they share their weights."""
    merge = merging(axis=None if sums else 0, plain=at_once, exported=exported)
    return merge(functools.partial(_map_parts, at_once, sums=sums))


def _compare(logits: Array, target: Array) -> tuple[Array, Array, Array, Array]:
    """Return cross-entropies, whether the target has the highest logit, and the softmax as exponentials and a total."""
    highest = jnp.max(logits, -1)
    exponentials = jnp.exp(logits - lax.stop_gradient(highest)[:, None])
    total = jnp.sum(exponentials, -1)
    at_target = jnp.take_along_axis(logits, target[:, None], -1)[:, 0]
    losses = jnp.log(total) + lax.stop_gradient(highest) - at_target
    real = target >= 0
    return jnp.where(real, losses, 0), (real & (at_target >= highest)).astype(logits.dtype), exponentials, total


@_by_rows
def _losses(rows: Rows, weights: Weights) -> tuple[Array, Array]:
    """Return the cross-entropies, and whether the target has the highest logit."""
    return _compare(rows[0] @ weights[0] + weights[1], rows[1])[:2]


@_by_rows
def _slopes(rows: Rows, weights: Weights) -> Array:
    """Return the gradient of each cross-entropy by its row."""
    (hidden, target), (kernel, bias) = rows, weights
    *_, exponentials, total = _compare(hidden @ kernel + bias, target)
    slope = (exponentials @ kernel.T) / total[:, None] - kernel[:, target].T
    return jnp.where((target >= 0)[:, None], slope, 0)


@functools.partial(_by_rows, sums=True)
def _gradients(rows: tuple[Array, Array, Array], weights: Weights) -> tuple[Array, Array, Array]:
    """Return the gradients of a sum of cross-entropies with given weights, by the rows, the kernel and the bias."""
    (hidden, target, d_losses), (kernel, bias) = rows, weights
    *_, exponentials, total = _compare(hidden @ kernel + bias, target)
    d_losses = jnp.where(target >= 0, d_losses, 0)
    d_logits = exponentials * (d_losses / total)[:, None]
    d_logits = d_logits.at[jnp.arange(len(target)), target].add(-d_losses)
    return d_logits @ kernel.T, hidden.T @ d_logits, jnp.sum(d_logits, 0)


@functools.lru_cache
def _compare_levels(outputs: Outputs) -> Callable[[Rows, list[Weights]], Array]:
    """Return a function that tells where no output is more probable than the target, over all levels."""

    def at_once(rows: Rows, weights: list[Weights]) -> Array:
        return _compare(_log_shares(outputs, rows[0], weights), rows[1])[1]

    return _by_rows(at_once)


@functools.lru_cache
def _expect(outputs: Outputs) -> Callable[[Rows, list[Weights]], tuple[Array, Array]]:
    """Return a function that tells which rows have a target, and how often each output is expected in these."""

    def at_once(rows: Rows, weights: list[Weights]) -> tuple[Array, Array]:
        real = (rows[1] >= 0).astype(rows[0].dtype)
        shares, sums = [real], []
        for number, (kernel, bias) in enumerate(weights):
            logits = rows[0] @ kernel + bias
            exponentials = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
            scale = shares[number] / jnp.sum(exponentials, -1)  # of each row: only the sums over rows are needed
            sums.append(scale @ exponentials)
            if not number:
                shares += [scale * exponentials[:, outputs.ungrouped + k] for k in range(len(outputs.groups))]
        return real, outputs.join(sums)

    return _by_rows(at_once, sums=True, exported=True)


def _log_shares(outputs: Outputs, hidden: Array, weights: list[Weights]) -> Array:
    return outputs.log_shares([hidden @ kernel + bias for kernel, bias in weights])


def _places(target: Array) -> Array:
    """Return targets in one dimension, -1 for padding."""
    return jnp.where(target > 0, target, -1).reshape(-1)
