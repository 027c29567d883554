"""Functions in plain operations: each rewriting gives the numbers of what it replaces, and leaves none of it behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedrecon._src.client.closed_form import solve_positive
from fedrecon._src.device.inlining import eliminated, inlined, used_inputs

DRAW = np.random.default_rng(0)
TABLE = DRAW.normal(size=(7, 3)).astype(np.float32)
IDS = np.array([[1, 3, 3], [0, 6, 1]], np.int32)


def gather_of_whole_rows(table, ids):
    """Read rows as slices that keep their first dimension, as some frameworks do."""
    return jax.vmap(lambda k: lax.dynamic_slice(table, (k, 0), (1, 3)))(ids.reshape(-1))


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, slope: (slope / 2,))

FUNCTIONS = {
    "a call": (lambda x: jax.jit(jnp.tanh)(x), (TABLE,), {"jit", "pjit"}),
    "custom derivatives": (
        lambda x: jax.grad(lambda y: jnp.sum(doubled(y) * halved(y)))(x),
        (TABLE,),
        {"custom_jvp_call", "custom_vjp_call"},
    ),
    "a barrier": (lambda x: lax.optimization_barrier(x) + 1, (TABLE,), {"optimization_barrier"}),
    "a scan": (lambda x: lax.scan(lambda c, y: (c + y, c * y), jnp.zeros(3), x), (TABLE,), {"scan"}),
    "a scan backwards": (
        lambda x: lax.scan(lambda c, y: (c + y, c * y), jnp.ones(3), x, reverse=True),
        (TABLE,),
        {"scan"},
    ),
    "a scan over nothing": (lambda x: lax.scan(lambda c, y: (c + y, c), jnp.ones(3), x), (TABLE[:0],), {"scan"}),
    "a loop": (
        lambda x: lax.while_loop(lambda c: jnp.sum(c) < 90, lambda c: jax.jit(jnp.add)(c, 1.0), x),
        (TABLE,),
        {"jit", "pjit"},
    ),
    "a choice": (lambda x: lax.cond(x[0, 0] > 9, jnp.sin, lambda y: jax.jit(jnp.cos)(y), x), (TABLE,), {"jit", "pjit"}),
    "the gradient of a lookup": (
        lambda table, ids: jax.grad(lambda t: jnp.sum(t[ids] ** 2))(table),
        (TABLE, IDS),
        {"scatter-add", "scatter_add"},
    ),
    "the gradient of a lookup in columns": (
        lambda table, ids: jax.grad(lambda t: jnp.sum(t[:, ids] ** 3))(table.T),
        (TABLE, IDS),
        {"scatter-add", "scatter_add"},
    ),
    "the gradient of a lookup of one client": (
        lambda table, ids: jax.vmap(jax.grad(lambda t, k: jnp.sum(t[k] ** 2)))(table[None], ids[None]),
        (TABLE, IDS),
        {"scatter-add", "scatter_add"},
    ),
    "rows read as slices": (gather_of_whole_rows, (TABLE, IDS), set()),
    "running maxima": (lambda x: lax.cummax(x, axis=1), (IDS,), {"cummax"}),
    "running maxima backwards": (lambda x: lax.cummax(x, axis=0, reverse=True), (IDS,), {"cummax"}),
    "a product of columns": (
        lambda x: (
            lax.dot_general(x, x, (((0,), (0,)), ((), ()))) + lax.dot_general(x[:3], x[:3], (((1,), (1,)), ((), ())))
        ),
        (TABLE,),
        set(),
    ),
    "products of batches without a common dimension": (
        lambda x: lax.dot_general(x, x, (((), ()), ((0,), (0,)))),
        (TABLE,),
        {"dot_general"},
    ),
    "a product of batches over two dimensions": (
        lambda x: lax.dot_general(x, x, (((1, 3), (3, 1)), ((0,), (0,)))),
        (DRAW.normal(size=(2, 3, 4, 3)).astype(np.float32),),
        set(),
    ),
    "the gradient of entries chosen in each row": (
        lambda x, ids: jax.grad(lambda y: jnp.sum(jnp.take_along_axis(y, ids, 1) ** 2))(x),
        (TABLE[:2].repeat(3, 1), IDS),
        {"scatter-add", "scatter_add"},
    ),
    "the gradient of entries at pairs": (
        lambda x: jax.grad(lambda y: jnp.sum(y[np.arange(3), np.array([2, 0, 2])] ** 2))(x),
        (TABLE,),
        {"scatter-add", "scatter_add"},
    ),
    "a choice between booleans": (lambda x: jnp.where(x[0] > 0, x[1] > 0, x[2] > 0), (TABLE,), {"select_n"}),
    "draws from a key": (
        lambda words: [
            jax.random.uniform(jax.random.split(words)[1], (5,), minval=-2.0, maxval=3.0),
            jax.random.normal(jax.random.fold_in(words, 77), (4, 3)),
            jax.random.truncated_normal(words, -2.0, 2.0, (6,)),
        ],
        (np.array([3, 4_000_000_000], np.uint32),),
        {"random_bits", "random_split", "random_fold_in", "random_wrap", "random_unwrap", "erf_inv"},
    ),
    "least squares": (
        lambda x: jax.vmap(lambda y: solve_positive(y.T @ y + jnp.eye(3), y[0]))(x[None]),
        (TABLE,),
        {"custom_linear_solve"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rewritten_function_gives_the_same_numbers(name):
    function, arguments, gone = FUNCTIONS[name]
    flat = inlined(function, *arguments)
    for found, expected in zip(flat(*arguments), jax.tree.leaves(function(*arguments)), strict=True):
        assert found.shape == expected.shape
        assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=2e-6)
    # Calls must be gone from loops and choices, too: jax2onnx cannot translate them with the newest JAX.
    assert not ({"jit", "pjit"} | gone) & operations_in(jax.make_jaxpr(flat)(*arguments).jaxpr)


def operations_in(jaxpr):
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(getattr(inner, "jaxpr", None), "eqns"):
                found |= operations_in(inner.jaxpr)
    return found


@pytest.mark.parametrize("size", [1, 2, 9])
def test_elimination_by_masks_solves_positive_definite_systems(size):
    root = DRAW.normal(size=(4, size, size))
    matrices, right = root @ np.swapaxes(root, 1, 2) + np.eye(size), DRAW.normal(size=(4, size))
    expected = np.linalg.solve(matrices, right[..., None])[..., 0]
    found = eliminated(jnp.asarray(matrices, jnp.float32), jnp.asarray(right, jnp.float32))
    assert np.asarray(found) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_inputs_that_nothing_depends_on_are_found():
    shapes = {name: jax.ShapeDtypeStruct((2,), jnp.float32) for name in ("a", "b", "c")}
    assert used_inputs(lambda given: [given["a"] + given["c"]], shapes) == ["a", "c"]
