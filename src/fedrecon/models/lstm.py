"""A long short-term memory over time, with a derivative written for speed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrecon.models.merging import merging


@jax.custom_vjp
def lstm(x: Array, kernel: Array, recurrent: Array, bias: Array) -> Array:
    """Run an LSTM from a zero state over time.

    The gates are input, forget, cell and output, in this order, one after another in the last dimension of the
    weights.

    Args:
      x: inputs of `(time, batch, features)`.
      kernel: `(features, 4 * hidden)`.
      recurrent: `(hidden, 4 * hidden)`.
      bias: `(4 * hidden,)`.

    Returns:
      The outputs of `(time, batch, hidden)`.

    References:
      Hochreiter, Schmidhuber, Long Short-Term Memory, 1997; Gers et al., Learning to Forget, 2000.
    """
    return _over_time((x,), (kernel, recurrent, bias))[0]


# What makes it fast on a CPU:
# - The product with the inputs is one for all times, and so are the products that form the weights' gradients, after
#   the backward scan instead of in it.
# - In the recurrent products one side is a large matrix and the other only as wide as the batch. They take little more
#   than half the time when the narrow side has the batch last going in (forward) or coming out (backward), with the
#   large one as it is stored in both. Hence the transposes below, each of a narrow matrix.
# - Clients side by side that share the weights are one batch (see `merging`).


@merging(axis=1)
def _over_time(batches: tuple[Array], weights: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Return outputs, cells and gates, each `(time, batch, ...)`."""
    (x,), (kernel, recurrent, bias) = batches, weights
    hidden, batch = recurrent.shape[0], x.shape[1]
    driven = (_flat(x) @ kernel).reshape(*x.shape[:2], -1)  # (time, batch, 4 * hidden)

    def step(state: tuple[Array, Array], driven: Array) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        output, cell = state  # (hidden, batch), (batch, hidden)
        kept = lax.dot_general(output, recurrent, (((0,), (0,)), ((), ())))  # (batch, 4 * hidden)
        i, f, g, o = jnp.split(driven + kept + bias, 4, -1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        cell = f * cell + i * g
        new = o * jnp.tanh(cell)
        return (new.T, cell), (new, cell, jnp.concatenate([i, f, g, o], -1))

    start = (jnp.zeros((hidden, batch), x.dtype), jnp.zeros((batch, hidden), x.dtype))
    return lax.scan(step, start, driven)[1]


@merging(axis=1)
def _back_in_time(batches: tuple[Array, Array, Array], weights: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the gradients of the inputs and of the gates before their nonlinearity, from those of the outputs."""
    (d_outputs, cells, gates), (kernel, recurrent) = batches, weights

    def step(carry: tuple[Array, Array], now: Any) -> tuple[tuple[Array, Array], Array]:
        d_later, d_cell = carry  # of the gates one step later, and of the cell through that step
        d_output, gate, cell, cell_before = now
        # Hidden from the compiler, which would rather have this product the other way round, transpose and all.
        d_before = lax.optimization_barrier(lax.dot_general(recurrent, d_later, (((1,), (1,)), ((), ()))))
        d_output += d_before.T  # from (hidden, batch)
        i, f, g, o = jnp.split(gate, 4, -1)
        out = jnp.tanh(cell)
        d_cell += d_output * o * (1 - out * out)
        d_i, d_f = d_cell * g * i * (1 - i), d_cell * cell_before * f * (1 - f)
        d_g, d_o = d_cell * i * (1 - g * g), d_output * out * o * (1 - o)
        d_gates = jnp.concatenate([d_i, d_f, d_g, d_o], -1)
        return (d_gates, d_cell * f), d_gates

    start = (jnp.zeros_like(gates[0]), jnp.zeros_like(cells[0]))
    _, d_gates = lax.scan(step, start, (d_outputs, gates, cells, _one_later(cells)), reverse=True)
    return (_flat(d_gates) @ kernel.T).reshape(*d_gates.shape[:2], -1), d_gates


def _forward(x: Array, kernel: Array, recurrent: Array, bias: Array) -> tuple[Array, Any]:
    outputs, cells, gates = _over_time((x,), (kernel, recurrent, bias))
    return outputs, (x, kernel, recurrent, outputs, cells, gates)


def _backward(saved: Any, d_outputs: Array) -> tuple[Array, Array, Array, Array]:
    x, kernel, recurrent, outputs, cells, gates = saved
    d_x, d_gates = _back_in_time((d_outputs, cells, gates), (kernel, recurrent))
    flat = _flat(d_gates)  # (time * batch, 4 * hidden)
    return d_x, _flat(x).T @ flat, _flat(_one_later(outputs)).T @ flat, jnp.sum(flat, 0)


lstm.defvjp(_forward, _backward)


def _flat(values: Array) -> Array:
    """Put the time and the batch into one dimension, so that a product over both is a plain one."""
    return values.reshape(-1, values.shape[-1])


def _one_later(values: Array) -> Array:
    """Move values one step later, with zeros first."""
    return jnp.concatenate([jnp.zeros_like(values[:1]), values[:-1]])
