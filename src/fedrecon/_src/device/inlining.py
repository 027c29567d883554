"""Functions rewritten in plain operations that an exporter can translate, by evaluating their traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from fedrecon._src.core.keys import threefry

Rule = Callable[[Any, Sequence[Any]], Sequence[Any]]  # (equation, values) -> values


class ExportError(ValueError):
    """A function that cannot be translated to ONNX; the message names the operation and the parameter."""


def inlined(function: Callable[..., Any], *like: Any) -> Callable[..., Any]:
    """Return a function of flat arrays that does what `function` does, without calls, custom rules or barriers.

    jax2onnx replaces functions of jax.numpy while it traces, which breaks under `jax.grad`; so we trace first, and give
    it a function that only evaluates the trace.

    Args:
      function: of pytrees of arrays.
      *like: arguments, or their shapes.
    """
    traced = _without_unused(jax.make_jaxpr(function)(*like))
    leaves = jax.tree.leaves(like)
    with jax.disable_jit():  # functions of jax.numpy are calls otherwise
        plain = _without_unused(jax.make_jaxpr(lambda *values: evaluate(traced.jaxpr, traced.consts, values))(*leaves))
    return core.jaxpr_as_fun(plain)


def used_inputs(function: Callable[..., Any], shapes: Mapping[str, Any]) -> list[str]:
    """Return the names of those inputs that the results of a function of a mapping depend on."""
    from jax.interpreters import partial_eval

    closed = jax.make_jaxpr(lambda values: function(dict(zip(shapes, values, strict=True))))(list(shapes.values()))
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return [name for name, is_used in zip(shapes, used, strict=True) if is_used]


def _without_unused(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Leave out what no result depends on: sums of metrics, say."""
    from jax.interpreters import partial_eval

    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return core.ClosedJaxpr(jaxpr, closed.consts)


def evaluate(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, replacing what `RULES` has a rule for."""
    bound_values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else bound_values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        rule = RULES.get(equation.primitive.name, _as_it_is)
        if equation.primitive.name not in (*CALLS, *DRAWS):
            inputs = [value.typed() if isinstance(value, Words) else value for value in inputs]
        bound_values.update(zip(equation.outvars, rule(equation, inputs), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _as_it_is(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    result = equation.primitive.bind(*values, **equation.params)
    return result if equation.primitive.multiple_results else [result]


def _closed(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr without what its results do not need, such as keys of steps that draw nothing."""
    needed = _without_unused(jaxpr)
    return evaluate(needed.jaxpr, needed.consts, values)


def _call(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Inline a call."""
    jaxpr = next(equation.params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in equation.params)
    return _closed(jaxpr, values) if hasattr(jaxpr, "consts") else evaluate(jaxpr, (), values)


def _while(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    cond, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
    split = equation.params["cond_nconsts"]
    of_cond, of_body = values[:split], values[split : split + equation.params["body_nconsts"]]
    return lax.while_loop(
        lambda carry: _closed(cond, (*of_cond, *carry))[0],
        lambda carry: tuple(_closed(body, (*of_body, *carry))),
        tuple(values[split + len(of_body) :]),
    )


# A runtime copies what a loop carries and all that is stacked in every step, so that short scans have no loop.
MOST_UNROLLED = 32


def _scan(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Write a scan as its steps, or a long one as a loop over indices: of any direction, with no stacked inputs."""
    params = equation.params
    body, length = params["jaxpr"].jaxpr, params["length"]
    # What is stacked has one dimension more than in the body (JAX has renamed the parameters that say how many are).
    carries = sum(x.aval.ndim == y.aval.ndim for x, y in zip(equation.outvars, body.outvars, strict=True))
    consts = sum(x.aval.ndim == y.aval.ndim for x, y in zip(equation.invars, body.invars, strict=True)) - carries
    held, start, stacked = values[:consts], values[consts : consts + carries], values[consts + carries :]

    def step(done: Array, carry: Any) -> Any:
        state, outputs = carry
        t = length - 1 - done if params["reverse"] else done
        now = [lax.dynamic_index_in_dim(x, t, 0, keepdims=False) for x in stacked]
        result = _closed(params["jaxpr"], (*held, *state, *now))
        # Rows are replaced by a mask: exporters translate that everywhere, inside loops too.
        at_step = [(jnp.arange(length) == t).reshape(-1, *[1] * x.ndim) for x in result[carries:]]
        return result[:carries], list(map(_choose, at_step, result[carries:], outputs))

    if 0 < length <= MOST_UNROLLED:
        state, rows = list(start), {}
        for t in sorted(range(length), reverse=params["reverse"]):
            result = _closed(params["jaxpr"], (*held, *state, *(x[t] for x in stacked)))
            state, rows[t] = result[:carries], result[carries:]
        return [*state, *(jnp.stack(column) for column in zip(*(rows[t] for t in range(length)), strict=True))]
    outputs = [jnp.zeros(atom.aval.shape, atom.aval.dtype) for atom in equation.outvars[carries:]]
    if not length:
        return [*start, *outputs]
    state, outputs = _loop(length, step, (list(start), outputs))
    return [*state, *outputs]


def _loop(steps: int, step: Callable[[Array, Any], Any], carry: Any) -> Any:
    """Do what `lax.fori_loop` does, but always as a loop with a condition: the one kind that exporters know well."""
    return lax.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, step(c[0], c[1])), (jnp.int32(0), carry))[1]


def _choose(condition: Array, yes: Array, no: Array) -> Array:
    """Choose between values; between booleans by `and` and `or`, since ONNX Runtime has no `Where` of them."""
    if yes.dtype == bool:
        return (condition & yes) | (~condition & no)
    return jnp.where(condition, yes, no)


def _select(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    which, *choices = values
    if len(choices) != 2 or choices[0].dtype != bool or which.dtype != bool:
        return _as_it_is(equation, values)
    return [_choose(which, choices[1], choices[0])]


def _cond(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    branches = [lambda *args, jaxpr=jaxpr: tuple(_closed(jaxpr, args)) for jaxpr in equation.params["branches"]]
    return lax.switch(values[0].astype(jnp.int32), branches, *values[1:])


def _linear_solve(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Solve a linear system by elimination with masks in place of indices.

    The matrix is what the equation's product makes of unit vectors, which is exact. Without pivots this is right for
    positive definite matrices, which least squares has; the comparison with JAX finds any others.
    """
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    of_product, right = values[: lengths.matvec], values[sum(lengths) :]
    if len(right) != 1:
        raise ValueError(f"{equation.primitive.name} with {len(right)} right sides")
    vector = right[0]  # (..., size)

    def column(unit: Array) -> Array:
        return _closed(jaxprs.matvec, (*of_product, jnp.broadcast_to(unit, vector.shape)))[0]

    matrix = jax.vmap(column, out_axes=-1)(jnp.eye(vector.shape[-1], dtype=vector.dtype))
    return [eliminated(matrix, vector)]


def eliminated(matrix: Array, vector: Array) -> Array:
    """Solve positive definite systems of `(..., size, size)` by elimination, reading rows and columns by masks."""
    size = vector.shape[-1]
    system = jnp.concatenate([matrix, vector[..., None]], -1)

    def eliminate(k: Array, system: Array) -> Array:
        row_mask = (jnp.arange(size) == k).astype(system.dtype)
        column_mask = (jnp.arange(size + 1) == k).astype(system.dtype)
        row = jnp.sum(system * row_mask[:, None], -2)  # (..., size + 1)
        column = jnp.sum(system * column_mask, -1)  # (..., size)
        row = row / jnp.sum(row * column_mask, -1, keepdims=True)
        rest = system - column[..., None] * row[..., None, :]
        return rest * (1 - row_mask)[:, None] + row[..., None, :] * row_mask[:, None]

    return _loop(size, eliminate, system)[..., -1]


def _scatter_add(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Add at indices as a product with one-hot vectors: what the gradient of reading rows or entries comes to.

    Indices outside the table match no row, and add nothing, as in JAX's gradients.
    """
    operand, indices, updates = values
    numbers = equation.params["dimension_numbers"]
    axes, batching = tuple(numbers.scatter_dims_to_operand_dims), tuple(numbers.operand_batching_dims)
    window = [dim for dim in range(operand.ndim) if dim not in axes and dim not in batching]
    whole = [updates.shape[dim] for dim in numbers.update_window_dims] == [operand.shape[dim] for dim in window]
    if not axes or axes != tuple(numbers.inserted_window_dims) or not whole:
        return _as_it_is(equation, values)
    of_indices = tuple(numbers.scatter_indices_batching_dims)
    order = [*of_indices, *(dim for dim in range(indices.ndim - 1) if dim not in of_indices)]
    outer = [dim for dim in range(updates.ndim) if dim not in numbers.update_window_dims]
    batches = math.prod(operand.shape[dim] for dim in batching)
    places = jnp.transpose(indices, (*order, indices.ndim - 1)).reshape(batches, -1, len(axes))
    new = jnp.transpose(updates, (*(outer[dim] for dim in order), *numbers.update_window_dims))
    new = new.reshape(*places.shape[:2], -1)  # (batches, places, numbers)
    sizes = [operand.shape[axis] for axis in axes]
    if (
        len(sizes) == 1 and new.shape[-1] == 1
    ):  # of numbers, by quotient and remainder: shorter vectors, the same product
        side = math.isqrt(sizes[0]) + 1
        places, sizes = jnp.concatenate([places // side, places % side], -1), [-(-sizes[0] // side), side]
    first, *later = [jnp.arange(size, dtype=places.dtype) for size in sizes]
    for k in range(len(later), 0, -1):
        hot = (places[..., k, None] == later[k - 1]).astype(new.dtype)  # (batches, places, rows)
        new = (hot[..., None] * new[..., None, :]).reshape(*places.shape[:2], -1)
    hot = (places[:, None, :, 0] == first[:, None]).astype(new.dtype)  # (batches, rows, places)
    dims = [*batching, *axes, *window]
    shape = [operand.shape[dim] for dim in dims]
    summed = _matmul(hot, new).reshape(batches, -1)[:, : math.prod(shape) // batches].reshape(shape)
    return [operand + jnp.moveaxis(summed, range(operand.ndim), dims)]


def _gather(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Write a gather of slices that are whole in all dimensions but one as reading rows."""
    operand, indices = values
    params, numbers = equation.params, equation.params["dimension_numbers"]
    sizes, mapped = params["slice_sizes"], numbers.start_index_map
    single = [axis for axis in mapped if sizes[axis] == 1 != operand.shape[axis]]
    whole = all(sizes[axis] == operand.shape[axis] for axis in range(operand.ndim) if axis not in single)
    in_bounds = params["mode"] in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    if len(mapped) == 1 or len(single) != 1 or not whole or not in_bounds or numbers.operand_batching_dims:
        return _as_it_is(equation, values)
    axis = single[0]
    places = indices[..., mapped.index(axis)]
    read = jnp.take(jnp.moveaxis(operand, axis, 0), places, 0, mode="clip")
    read = read.reshape(*places.shape, *(sizes[d] for d in range(len(sizes)) if d not in numbers.collapsed_slice_dims))
    outer = [dim for dim in range(read.ndim) if dim not in numbers.offset_dims]
    return [jnp.moveaxis(read, range(read.ndim), [*outer, *numbers.offset_dims])]


def _dot(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Write any product as one of matrices: `(batches, rows, inner) x (batches, inner, columns)`.

    The exporter guesses which side is transposed from sizes, and guesses wrong where one of them is 1. Products with
    batches but without a common dimension it writes with a letter twice, which ONNX Runtime refuses.
    """
    left, right = values
    ((over_left, over_right), (of_left, of_right)) = equation.params["dimension_numbers"]
    free_left = [dim for dim in range(left.ndim) if dim not in over_left and dim not in of_left]
    free_right = [dim for dim in range(right.ndim) if dim not in over_right and dim not in of_right]
    batches, rows = [left.shape[dim] for dim in of_left], [left.shape[dim] for dim in free_left]
    columns, inner = [right.shape[dim] for dim in free_right], math.prod(left.shape[dim] for dim in over_left)
    batch = math.prod(batches)
    lhs = jnp.transpose(left, (*of_left, *free_left, *over_left)).reshape(batch, math.prod(rows), inner)
    rhs = jnp.transpose(right, (*of_right, *over_right, *free_right)).reshape(batch, inner, math.prod(columns))
    kind = equation.params.get("preferred_element_type")
    product = _matmul(lhs, rhs) if kind is None else _matmul(lhs, rhs).astype(kind)
    return [product.reshape(*batches, *rows, *columns)]


def _matmul(left: Array, right: Array) -> Array:
    """Multiply batches of matrices, without batches if there is one, and by numbers if they have one inner column."""
    if left.shape[2] == 1:
        return left * right
    if left.shape[0] == 1:
        return lax.dot_general(left[0], right[0], (((1,), (0,)), ((), ())))[None]
    return lax.dot_general(left, right, (((2,), (1,)), ((0,), (0,))))


def _cummax(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Take running maxima of whole numbers over all earlier places at once: ONNX Runtime pools floats only."""
    (x,) = values
    axis, length = equation.params["axis"], x.shape[equation.params["axis"]]
    if not jnp.issubdtype(x.dtype, jnp.integer) or length > 256:  # every pair of places is compared
        return _as_it_is(equation, values)
    at = jnp.arange(length)
    earlier = at[:, None] <= at if equation.params["reverse"] else at[:, None] >= at
    last = jnp.moveaxis(x, axis, -1)
    result = jnp.max(jnp.where(earlier, last[..., None, :], jnp.iinfo(x.dtype).min), -1)
    return [jnp.moveaxis(result, -1, axis)]


# ---- random draws ----

# Threefry-2x32 and what `jax.random` makes of its bits, so that a graph draws what JAX draws from the same key. Sums
# wrap around in int32, since ONNX Runtime adds no uint32.

# Of the polynomials for the inverse of the error function, highest power first (Giles, 2010).
CENTRAL: tuple[float, ...] = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
CENTRAL += (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
TAIL: tuple[float, ...] = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
TAIL += (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682)


class Words:
    """A key, or an array of keys, as its words: `(..., 2)` of uint32."""

    def __init__(self, words: Array):
        """Hold the words."""
        self.words = words

    def typed(self) -> Array:
        """Return the keys as JAX types them."""
        return jax.random.wrap_key_data(self.words)


def _words(keys: Any) -> Array:
    return keys.words if isinstance(keys, Words) else jax.random.key_data(keys)


def _one_key(keys: Any) -> Array:
    """Return the words of a single key; of several, every one would need its own draw."""
    words = _words(keys)
    if words.size != 2:
        raise ExportError(f"random draws with {words.size // 2} keys at once have no translation to ONNX")
    return words.reshape(2)


def _fold_in(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Derive a key from a key and a number."""
    low = jnp.asarray(values[1]).astype(jnp.int32).reshape(1)
    both = jnp.concatenate(threefry(_one_key(values[0]), low)).astype(jnp.uint32)
    return [Words(both.reshape(_words(values[0]).shape))]


def _split_key(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Derive several keys from one."""
    shape = equation.outvars[0].aval.shape
    words = threefry(_one_key(values[0]), jnp.arange(math.prod(shape), dtype=jnp.int32))
    return [Words(jnp.concatenate([word.astype(jnp.uint32)[:, None] for word in words], 1).reshape(*shape, 2))]


def _random_bits(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Draw bits."""
    shape, width = equation.outvars[0].aval.shape, equation.params["bit_width"]
    if width != 32:
        raise ExportError(f"random draws of {width} bits have no translation to ONNX")
    x, y = threefry(_one_key(values[0]), jnp.arange(math.prod(shape), dtype=jnp.int32))
    return [(x ^ y).astype(jnp.uint32).reshape(shape)]


def _bitcast(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Read bits as floats from 1 to 2, which uniform draws begin with."""
    (bits,) = values
    if bits.dtype != jnp.uint32 or equation.params["new_dtype"] != jnp.float32:
        return _as_it_is(equation, values)
    mantissa = (bits & np.uint32(0x7FFFFF)).astype(jnp.int32).astype(jnp.float32)
    return [1 + mantissa * np.float32(2.0**-23)]


def _erf_inv(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Invert the error function by the polynomials that XLA has."""
    (x,) = values
    w = -jnp.log1p(-x * x)
    central = w < 5
    t = jnp.where(central, w - 2.5, jnp.sqrt(w) - 3)
    result = jnp.where(central, np.float32(CENTRAL[0]), np.float32(TAIL[0]))
    for a, b in zip(CENTRAL[1:], TAIL[1:], strict=True):
        result = jnp.where(central, np.float32(a), np.float32(b)) + result * t
    return [result * x]


# ---- all rules ----

CALLS = ("jit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
DRAWS: dict[str, Rule] = {
    "random_wrap": lambda equation, values: [Words(values[0])],
    "random_unwrap": lambda equation, values: [_words(values[0])],
    "random_fold_in": _fold_in,
    "random_split": _split_key,
    "random_bits": _random_bits,
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(CALLS, _call),
    **DRAWS,
    **dict.fromkeys(("optimization_barrier", "stop_gradient", "copy"), lambda equation, values: values),
    "bitcast_convert_type": _bitcast,
    "cummax": _cummax,
    "dot_general": _dot,
    "erf_inv": _erf_inv,
    "gather": _gather,
    "scatter-add": _scatter_add,
    "select_n": _select,
    "custom_linear_solve": _linear_solve,
    "while": _while,
    "scan": _scan,
    "cond": _cond,
}
