"""An LSTM over sentences, with a custom derivative for speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal as Primal
from jax.custom_derivatives import SymbolicZero

from fedrecon._src.models.text.shared_weights import merging

TILE = 32  # at most this many sentences run together, so that their data stays in a core's cache


@jax.custom_vjp
def lstm(
    x: Array, kernel: Array, recurrent: Array, bias: Array, lengths: Array, moved: Array, held: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Run an LSTM from a zero state over sentences of different lengths.

    The gates are input, forget, cell and output, in this order, one after another in the last dimension of the
    weights.

    Args:
      x: inputs of `(batch, time, features)`.
      kernel: `(features, 4 * hidden)`.
      recurrent: `(hidden, 4 * hidden)`.
      bias: `(4 * hidden,)`.
      lengths: `(batch,)` how many inputs of each sentence are not padding.
      moved: `(batch,)`, false for sentences whose inputs depend only on `held`.
      held: only tells whether it is differentiated.

    Returns:
      Two arrays of `(batch, time, hidden)` whose sum is the outputs, zero after the end of a sentence. If neither the
      weights nor `held` are differentiated, as in reconstruction, the second array has the sentences that are not
      moved: it has no gradient, and is not computed unless it is used. Otherwise it is zero.

    References:
      Hochreiter, Schmidhuber, Long Short-Term Memory, 1997; Gers et al., Learning to Forget, 2000.
    """
    del moved, held
    outputs = _over_time((x, lengths), (kernel, recurrent, bias))[0]
    return outputs, jnp.zeros_like(outputs)


# What makes it fast on a CPU:
# - The product with the inputs is a single one for all times. So are the products for the weights' gradients, which
#   come after the backward loop instead of inside it.
# - In the recurrent products one side is a large matrix and the other only as wide as the batch. They take little more
#   than half the time if the narrow side has the batch last as input (forward) or as output (backward), with the large
#   one as it is stored. Hence the transposes in `_advance` and `_retreat`, each of a narrow matrix.
# - A step has as few operations as possible: one nonlinearity for all gates, and none in the backward pass.
# - Clients with the same weights form one batch (see `shared_weights`). It is divided into tiles of sentences of
#   similar length, and a tile takes as many steps as its longest sentence. In the backward pass, a sentence is as
#   long as the last of its outputs that has a gradient.
# - In reconstruction only the client's own words are differentiated. Sentences without one are computed separately,
#   and the compiler drops them if the loss is not used.


def _advance(state: tuple[Array, Array], driven: Array, recurrent: Array, bias: Array) -> Any:
    """Take a step forward in time.

    The state is the last output, `(hidden, batch)`, and the cell, `(batch, hidden)`. Returns the new state, and the
    output, the cell and the gates, batch first.
    """
    output, cell = state
    from_output = lax.dot_general(output, recurrent, (((0,), (0,)), ((), ())))  # (batch, 4 * hidden)
    twice = jnp.repeat(jnp.array([1, 1, 2, 1], from_output.dtype), from_output.shape[-1] // 4)
    gates = twice * jax.nn.sigmoid(twice * (driven + from_output + bias)) + (1 - twice)  # tanh(x) = 2 sigmoid(2 x) - 1
    i, f, g, o = jnp.split(gates, 4, -1)
    cell = f * cell + i * g
    output = o * jnp.tanh(cell)
    return (output.T, cell), (output, cell, gates)


def _slopes(gates: Array, cells: Array) -> tuple[Array, Array, Array]:
    """Return the derivatives that the backward pass needs, for all times: `(batch, time, ...)`.

    These are of the cell by the first three gates before their nonlinearity, and of the output by the last gate; of
    the output by the cell; and of the cell by the previous cell.
    """
    i, f, g, o = jnp.split(gates, 4, -1)
    out = jnp.tanh(cells)
    of_gates = [g * i * (1 - i), _one_later(cells) * f * (1 - f), i * (1 - g * g), out * o * (1 - o)]
    return jnp.concatenate(of_gates, -1), o * (1 - out * out), f


def _retreat(carry: tuple[Array, Array], d_output: Array, slopes: Sequence[Array], recurrent: Array) -> Any:
    """Take a step back: from the gradients of the gates and the cell one step later to those of this one."""
    d_later, d_cell = carry
    of_gates, of_output, of_cell = slopes
    # The barrier keeps the compiler from turning this product around, which is slower.
    d_before = lax.optimization_barrier(lax.dot_general(recurrent, d_later, (((1,), (1,)), ((), ()))))
    d_output += d_before.T  # from (hidden, batch)
    d_cell += d_output * of_output
    d_gates = jnp.concatenate([d_cell, d_cell, d_cell, d_output], -1) * of_gates
    return (d_gates, d_cell * of_cell), d_gates


# ---- as scans, which can be differentiated again ----


def _scan_over_time(batches: tuple[Array, Array], weights: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Return outputs, cells and gates, each `(batch, time, ...)`."""
    (x, lengths), (kernel, recurrent, bias) = batches, weights
    hidden, batch, time = recurrent.shape[0], *x.shape[:2]
    start = jnp.zeros((hidden, batch), x.dtype), jnp.zeros((batch, hidden), x.dtype)
    driven = jnp.swapaxes(_product(x, kernel), 0, 1)
    steps = lax.scan(lambda state, driven: _advance(state, driven, recurrent, bias), start, driven)[1]
    outputs, cells, gates = (jnp.swapaxes(values, 0, 1) for values in steps)
    return jnp.where(_inside(lengths, time), outputs, 0), cells, gates


def _scan_back(batches: tuple[Array, Array, Array, Array], weights: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the gradients of the inputs and of the gates before their nonlinearity, given those of the outputs."""
    (d_outputs, cells, gates, lengths), (kernel, recurrent) = batches, weights
    d_outputs = jnp.where(_inside(lengths, d_outputs.shape[1]), d_outputs, 0)
    start = jnp.zeros_like(gates[:, 0]), jnp.zeros_like(cells[:, 0])
    now = jax.tree.map(lambda values: jnp.swapaxes(values, 0, 1), (d_outputs, _slopes(gates, cells)))
    steps = lax.scan(lambda carry, now: _retreat(carry, now[0], now[1], recurrent), start, now, reverse=True)[1]
    d_gates = jnp.swapaxes(steps, 0, 1)
    return _product(d_gates, kernel.T), d_gates


# ---- as loops, which stop after the longest sentence ----


@merging(axis=0, plain=_scan_over_time)
def _over_time(batches: tuple[Array, Array], weights: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Do what `_scan_over_time` does."""
    if jax.default_backend() != "cpu":  # on other devices a loop of unknown length costs more than it saves
        return _scan_over_time(batches, weights)
    (x, lengths), (kernel, recurrent, bias) = batches, weights
    hidden, batch, time = recurrent.shape[0], *x.shape[:2]

    def tile(rows: _Sentences, steps: Array, results: Any) -> Any:
        driven, ends = _product(rows.all_of(x), kernel), rows.all_of(lengths)
        state = jnp.zeros((hidden, len(ends)), x.dtype), jnp.zeros((len(ends), hidden), x.dtype)

        def step(t: Array, carry: Any) -> Any:
            state, results = carry
            state, (output, *rest) = _advance(state, _at(driven, t), recurrent, bias)
            new = (jnp.where((t < ends)[:, None], output, 0), *rest)
            return state, tuple(rows.put(values, t, at_t) for values, at_t in zip(results, new, strict=True))

        return lax.fori_loop(0, steps, step, (state, results))[1]

    nothing = tuple(jnp.zeros((batch, time, width), x.dtype) for width in (hidden, hidden, 4 * hidden))
    return _by_tiles(tile, lengths, nothing)


@merging(axis=0, plain=_scan_back)
def _back_in_time(batches: tuple[Array, Array, Array, Array], weights: tuple[Array, Array]) -> tuple[Array, Array]:
    """Do what `_scan_back` does."""
    if jax.default_backend() != "cpu":
        return _scan_back(batches, weights)
    (d_outputs, cells, gates, lengths), (kernel, recurrent) = batches, weights
    batch, time = d_outputs.shape[:2]
    reached = jnp.any(d_outputs != 0, -1) & _inside(lengths, time)[..., 0]
    reach = jnp.max(jnp.where(reached, jnp.arange(1, time + 1), 0), 1)

    def tile(rows: _Sentences, steps: Array, results: Any) -> Any:
        inside = _inside(rows.all_of(lengths), time)
        d_inside = jnp.where(inside, rows.all_of(d_outputs), 0)
        slopes = _slopes(rows.all_of(gates), rows.all_of(cells))
        start = tuple(jnp.zeros_like(values[:, 0]) for values in (slopes[0], d_inside))

        def step(done: Array, carry: Any) -> Any:
            t = steps - 1 - done
            state, (d_x, d_gates) = carry
            state, new = _retreat(state, _at(d_inside, t), [_at(values, t) for values in slopes], recurrent)
            d_x = d_x if rows.are_all else rows.put(d_x, t, new @ kernel.T)
            return state, (d_x, rows.put(d_gates, t, new))

        d_x, d_gates = lax.fori_loop(0, steps, step, (start, results))[1]
        return (_product(d_gates, kernel.T) if rows.are_all else d_x), d_gates

    nothing = tuple(jnp.zeros((batch, time, width), gates.dtype) for width in (kernel.shape[0], gates.shape[-1]))
    return _by_tiles(tile, reach, nothing)


class _Sentences:
    """Some sentences of a batch, and how to read and write their values."""

    def __init__(self, index: Array | None):
        """Select the sentences at `index`, where an index past the end is padding; None selects all."""
        self._index, self.are_all = index, index is None

    def all_of(self, values: Array) -> Array:
        """Return the values of these sentences."""
        return values if self._index is None else values.at[self._index].get(mode="clip")

    def put(self, values: Array, t: Array, new: Array) -> Array:
        """Replace the values of these sentences at time `t`."""
        if self._index is None:
            return lax.dynamic_update_index_in_dim(values, new, t, 1)
        return values.at[self._index, t].set(new, mode="drop", unique_indices=True)


def _by_tiles(tile: Callable[[_Sentences, Array, Any], Any], lengths: Array, results: Any) -> Any:
    """Fold `tile(sentences, longest length, results) -> results` over tiles of sentences of similar length."""
    batch = len(lengths)
    if batch <= TILE:
        return tile(_Sentences(None), jnp.max(lengths), results)
    tiles = -(-batch // TILE)
    size = -(-batch // tiles)
    order = jnp.pad(jnp.argsort(-lengths), (0, tiles * size - batch), constant_values=batch)

    def run_tile(number: Array, results: Any) -> Any:
        index = lax.dynamic_slice_in_dim(order, number * size, size)
        return tile(_Sentences(index), lengths[index[0]], results)

    return lax.fori_loop(0, -(-jnp.sum(lengths > 0) // size), run_tile, results)


# ---- the derivative ----


def _forward(
    x: Primal, kernel: Primal, recurrent: Primal, bias: Primal, lengths: Primal, moved: Primal, held: tuple[Primal, ...]
) -> tuple[tuple[Array, Array], Any]:
    weights = kernel.value, recurrent.value, bias.value
    frozen = not any(leaf.perturbed for leaf in (kernel, recurrent, bias, *held))
    moved_lengths = jnp.where(moved.value, lengths.value, 0) if frozen else lengths.value
    outputs, cells, gates = _over_time((x.value, moved_lengths), weights)
    # Computed separately, so that the compiler can drop the sentences that reconstruction does not use.
    frozen_outputs = (
        _over_time((x.value, lengths.value - moved_lengths), weights)[0] if frozen else jnp.zeros_like(outputs)
    )
    return (outputs, frozen_outputs), (weights[:2], moved_lengths, cells, gates, None if frozen else (x.value, outputs))


def _backward(saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    weights, lengths, cells, gates, driving = saved
    d_outputs = cotangents[0]
    if isinstance(d_outputs, SymbolicZero):
        return (None,) * 7
    d_x, d_gates = _back_in_time((d_outputs, cells, gates, lengths), weights)
    if driving is None:
        return d_x, *(None,) * 6
    x, outputs = driving
    flat = _flat(d_gates)  # (batch * time, 4 * hidden)
    return d_x, _flat(x).T @ flat, _flat(_one_later(outputs)).T @ flat, jnp.sum(flat, 0), None, None, None


lstm.defvjp(_forward, _backward, symbolic_zeros=True)


def _at(values: Array, t: Array) -> Array:
    return lax.dynamic_index_in_dim(values, t, 1, keepdims=False)


def _flat(values: Array) -> Array:
    """Merge the batch and the time into one dimension, so that a product over both is a plain one."""
    return values.reshape(-1, values.shape[-1])


def _product(values: Array, kernel: Array) -> Array:
    return (_flat(values) @ kernel).reshape(*values.shape[:2], -1)


def _one_later(values: Array) -> Array:
    """Move values one step later in time, with zeros first."""
    return jnp.concatenate([jnp.zeros_like(values[:, :1]), values[:, :-1]], 1)


def _inside(lengths: Array, time: int) -> Array:
    """Return `(batch, time, 1)`, true before the end of each sentence."""
    return (jnp.arange(time) < lengths[:, None])[..., None]
