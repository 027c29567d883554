"""Random draws in plain operations: Threefry-2x32 and what `jax.random` makes of its bits.

A graph then draws what JAX draws from the same key. Sums wrap around in int32, since ONNX Runtime adds no uint32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.keys import ROTATIONS

Rule = Callable[[Any, Sequence[Any]], Sequence[Any]]  # (equation, values) -> values

# Of the polynomials for the inverse of the error function, highest power first (Giles, 2010).
CENTRAL: tuple[float, ...] = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
CENTRAL += (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
TAIL: tuple[float, ...] = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
TAIL += (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682)


class ExportError(ValueError):
    """A function that cannot be translated to ONNX; the message names the operation and the parameter."""


class Words:
    """A key, or an array of keys, as its words: `(..., 2)` of uint32."""

    def __init__(self, words: Array):
        """Hold the words."""
        self.words = words

    def typed(self) -> Array:
        """Return the keys as JAX types them."""
        return jax.random.wrap_key_data(self.words)


def threefry(words: Array, low: Array) -> tuple[Array, Array]:
    """Encrypt counters below 2**32 with one key.

    Args:
      words: `(2,)` of uint32.
      low: the counters, of int32.

    Returns:
      Both words of each, of int32.
    """
    first, second = words.astype(jnp.int32)
    keys = (first, second, first ^ second ^ jnp.int32(0x1BD11BDA))
    x, y = jnp.zeros_like(low) + keys[0], low + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            bits = y.astype(jnp.uint32)
            y = x ^ ((bits << np.uint32(rotation)) | (bits >> np.uint32(32 - rotation))).astype(jnp.int32)
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.int32(group + 1)
    return x, y


def _words(keys: Any) -> Array:
    return keys.words if isinstance(keys, Words) else jax.random.key_data(keys)


def _one(keys: Any) -> Array:
    """Return the words of a single key; of several, every one would need its own draw."""
    words = _words(keys)
    if words.size != 2:
        raise ExportError(f"random draws with {words.size // 2} keys at once have no translation to ONNX")
    return words.reshape(2)


def fold_in(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Derive a key from a key and a number."""
    low = jnp.asarray(values[1]).astype(jnp.int32).reshape(1)
    both = jnp.concatenate(threefry(_one(values[0]), low)).astype(jnp.uint32)
    return [Words(both.reshape(_words(values[0]).shape))]


def split(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Derive several keys from one."""
    shape = equation.outvars[0].aval.shape
    words = threefry(_one(values[0]), jnp.arange(math.prod(shape), dtype=jnp.int32))
    columns = [word.astype(jnp.uint32)[:, None] for word in words]
    return [Words(jnp.concatenate(columns, 1).reshape(*shape, 2))]


def random_bits(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Draw bits."""
    shape, width = equation.outvars[0].aval.shape, equation.params["bit_width"]
    if width != 32:
        raise ExportError(f"random draws of {width} bits have no translation to ONNX")
    x, y = threefry(_one(values[0]), jnp.arange(math.prod(shape), dtype=jnp.int32))
    return [(x ^ y).astype(jnp.uint32).reshape(shape)]


def bitcast(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Read bits as floats from 1 to 2, which uniform draws begin with."""
    (bits,) = values
    if bits.dtype != jnp.uint32 or equation.params["new_dtype"] != jnp.float32:
        return [jax.lax.bitcast_convert_type(bits, equation.params["new_dtype"])]
    mantissa = (bits & np.uint32(0x7FFFFF)).astype(jnp.int32).astype(jnp.float32)
    return [1 + mantissa * np.float32(2.0**-23)]


def erf_inv(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Invert the error function by the polynomials that XLA has."""
    (x,) = values
    w = -jnp.log1p(-x * x)
    central = w < 5
    t = jnp.where(central, w - 2.5, jnp.sqrt(w) - 3)
    result = jnp.where(central, np.float32(CENTRAL[0]), np.float32(TAIL[0]))
    for a, b in zip(CENTRAL[1:], TAIL[1:], strict=True):
        result = jnp.where(central, np.float32(a), np.float32(b)) + result * t
    return [result * x]


RULES: dict[str, Rule] = {
    "random_wrap": lambda equation, values: [Words(values[0])],
    "random_unwrap": lambda equation, values: [_words(values[0])],
    "random_fold_in": fold_in,
    "random_split": split,
    "random_bits": random_bits,
}
