import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrecon._src.models.text import lstm as lstm_module
from fedrecon._src.models.text.lstm import lstm as lstm_in_two
from fedrecon._src.models.text.shared_weights import merging
from toy_models import plain_lstm

BATCH, TIME, FEATURES, HIDDEN, CLIENTS = 3, 4, 2, 5, 3
EACH, SHARED, SOME = (0, 0, 0, 0, 0), (0, None, None, None, 0), (0, None, 0, None, 0)  # what clients are mapped over
ALONE = (None,) * 5
LENGTHS = np.array([[4, 2, 3], [1, 4, 0], [2, 2, 4]], np.int32)


def lstm(x, kernel, recurrent, bias, lengths):
    """All outputs, with all inputs differentiated."""
    return sum(lstm_in_two(x, kernel, recurrent, bias, lengths, jnp.ones(len(x), bool), ()))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@functools.cache
def arguments():
    """Inputs and weights of several clients, and what their outputs are multiplied with."""
    shapes = [(BATCH, TIME, FEATURES), (FEATURES, 4 * HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN,)]
    keys = jax.random.split(jax.random.key(0), 5)
    found = [jax.random.normal(key, (CLIENTS, *shape)) for key, shape in zip(keys, shapes, strict=False)]
    factors = jax.random.normal(keys[4], (BATCH, TIME, HIDDEN)).at[1].set(0)  # one sentence is of no interest
    return [*found, jnp.asarray(LENGTHS)], factors


def of(axes):
    return [x if axis == 0 else x[0] for x, axis in zip(arguments()[0], axes, strict=True)]


def loss(layer):
    return lambda *args: jnp.sum(layer(*args) * arguments()[1])


def gradients(layer):
    return jax.grad(loss(layer), (0, 1, 2, 3))


def second_derivatives(layer):
    def length(*args):
        return sum(jnp.sum(leaf**2) for leaf in gradients(layer)(*args))

    return jax.grad(length, (0, 1, 2, 3))


def assert_like_plain(derive, axes):
    args = of(axes)
    found, expected = (
        jax.jit(derive(layer) if axes == ALONE else jax.vmap(derive(layer), axes))(*args)
        for layer in (lstm, plain_lstm)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), found, expected)


def test_outputs_are_those_of_a_loop_by_hand():
    x, kernel, recurrent, bias, lengths = (np.asarray(a, np.float64) for a in of(ALONE))
    expected = np.zeros((BATCH, TIME, HIDDEN))
    for b in range(BATCH):
        output, cell = np.zeros(HIDDEN), np.zeros(HIDDEN)
        for t in range(int(lengths[b])):
            gates = x[b, t] @ kernel + output @ recurrent + bias
            i, f, g, o = (gates[k * HIDDEN : (k + 1) * HIDDEN] for k in range(4))
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            output = expected[b, t] = sigmoid(o) * np.tanh(cell)
    np.testing.assert_allclose(lstm(*of(ALONE)), expected, 1e-5, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [ALONE, EACH, SHARED, SOME])
def test_gradients_are_those_of_a_plain_lstm(axes):
    assert_like_plain(gradients, axes)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("axes", [ALONE, SHARED])
def test_sentences_in_tiles_have_the_gradients_they_have_together(monkeypatch, tile, axes):
    """Nine sentences of three clients, or three of one, in tiles that they fill or not."""
    monkeypatch.setattr(lstm_module, "TILE", tile)
    assert_like_plain(gradients, axes)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [ALONE, SHARED])
def test_second_derivatives_are_those_of_a_plain_lstm(axes):
    assert_like_plain(second_derivatives, axes)


@pytest.mark.slow
def test_a_single_client_in_a_block_has_the_gradients_it_has_alone():
    args = of(ALONE)
    alone = jax.jit(gradients(lstm))(*args)
    for axes in (EACH, SHARED):
        block = [a[None] if axis == 0 else a for a, axis in zip(args, axes, strict=True)]
        found = jax.jit(jax.vmap(gradients(lstm), axes))(*block)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, 1e-6, 1e-6), found, alone)


@pytest.mark.slow
def test_gradients_of_frozen_weights_are_not_computed():
    def products(wanted):
        compiled = jax.jit(jax.grad(loss(lstm), wanted)).lower(*of(ALONE)).compile()
        return sum(line.count(" dot(") for line in compiled.as_text().splitlines())

    assert products((0,)) == 4  # with the inputs and with the recurrent weights, there and back
    assert products((0, 1, 2, 3)) == 6


def test_clients_that_share_the_weights_are_one_batch():
    def shapes_of_products(axes):
        text = jax.jit(jax.vmap(lstm, axes)).lower(*of(axes)).as_text()
        return [line.split("->")[-1] for line in text.splitlines() if "stablehlo.dot_general" in line]

    # All but the one with the inputs, which may come anywhere.
    for axes, rows in ((SHARED, f"{CLIENTS * BATCH}x"), (EACH, f"{CLIENTS}x{BATCH}x")):
        shapes = shapes_of_products(axes)
        assert sum(rows in shape for shape in shapes) >= len(shapes) - 1 > 0


def test_a_merged_layer_treats_an_argument_that_is_not_mapped_like_any_other():
    @merging(axis=0)
    def add(batches, weights):
        return batches[0] * weights + batches[1]

    x, y = jnp.arange(6.0).reshape(3, 2), jnp.array([10.0, 20.0])
    found = jax.vmap(lambda x: add((x, y), 2.0))(x)
    np.testing.assert_array_equal(found, 2 * x + y)
