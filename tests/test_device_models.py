"""Models of other frameworks in bundles: what they reconstruct and predict on a device is what JAX does."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr

pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")

from device_models import algorithm_of, trained
from fedrecon.device import bundle
from fedrecon_device import Bundle, Personal, check

ITEMS, DIM = 12, 3
RATINGS = {"local": "user", "inputs": "item", "label": "rating", "loss": "mse"}


def from_function():
    params = {"items": jnp.ones((ITEMS, DIM)) / 3, "user": jnp.zeros(DIM) + 0.1}
    return fr.models.from_function(lambda params, item: params["items"][item] @ params["user"], params, **RATINGS)


def from_flax():
    nnx = pytest.importorskip("flax.nnx")

    class Factors(nnx.Module):
        def __init__(self, rngs):
            self.items = nnx.Embed(ITEMS, DIM, rngs=rngs)
            self.user = nnx.Linear(DIM, 1, rngs=rngs)

        def __call__(self, item):
            return self.user(self.items(item))

    return fr.models.from_flax(Factors, **RATINGS)


def from_keras():
    keras = pytest.importorskip("keras")
    item = keras.Input((), dtype="int32", name="item")
    embedding = keras.layers.Embedding(ITEMS, DIM, name="items")(item)
    network = keras.Model(item, keras.layers.Dense(1, name="user")(embedding))
    return fr.models.from_keras(network, **RATINGS)


def from_equinox():
    eqx = pytest.importorskip("equinox")

    class Towers(eqx.Module):
        items: eqx.nn.Embedding
        user: eqx.nn.MLP

        def __init__(self, key):
            one, other = jax.random.split(key)
            self.items = eqx.nn.Embedding(ITEMS, DIM, key=one)
            self.user = eqx.nn.MLP(DIM, "scalar", 4, 1, key=other)

        def __call__(self, item):
            return self.user(self.items(item))

    return fr.models.from_equinox(Towers, **RATINGS)


@pytest.mark.slow
@pytest.mark.parametrize("make", [from_function, from_flax, from_keras, from_equinox])
@pytest.mark.parametrize("optimizer", [optax.adam(0.1)], ids=["adam"])
def test_a_model_of_another_framework_does_on_a_device_what_it_does_in_jax(tmp_path, make, optimizer):
    model = make()
    algorithm = algorithm_of(model, fr.gradient_descent(optimizer, batch_size=2, epochs=2))
    params = trained(model)
    draw = np.random.default_rng(0)
    like = {"item": draw.integers(0, ITEMS, 6).astype(np.int32), "rating": draw.integers(1, 6, 6).astype(np.float32)}
    bundle(algorithm, params, tmp_path / "b", like=like, most=8)
    assert check(tmp_path / "b").difference < 1e-5
    person = Personal(tmp_path / "b", tmp_path / "me.json")
    person.add(like)
    local = person.refresh()
    expected = fr.reconstruct(algorithm, params, like, seed=0)
    from fedrecon._src.core.pytrees import flatten

    for path, leaf in flatten(expected)[0].items():
        assert local[path] == pytest.approx(leaf, abs=1e-5)
    asked = {"item": like["item"][: len(like["item"])]}
    found = Bundle(tmp_path / "b").predict(local, asked)
    assert found == pytest.approx(fr.predict(model, params, expected, asked), abs=1e-5)
