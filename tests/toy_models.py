"""Small models and clients whose results are known by hand, or that use lookups in every allowed way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.cohort import Packer


def squared_error(predictions, batch):
    return (predictions - batch["y"]) ** 2, jnp.ones_like(predictions)


def linear(w=0.0, b=0.0):
    """The model of the spec: prediction = w * x + b, w global, b local."""
    return fr.Model(
        init_global=lambda key: {"w": jnp.float32(w)},
        init_local=lambda key: {"b": jnp.float32(b)},
        predict=lambda shared, local, batch: shared["w"] * batch["x"] + local["b"],
        loss=squared_error,
    )


def clients_of(*columns, **more):
    """Clients from one dict of columns each."""
    sizes = np.array([len(next(iter(c.values()))) for c in columns])
    together = {name: np.concatenate([np.asarray(c[name]) for c in columns]) for name in columns[0]}
    together = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in together.items()}
    ends = np.cumsum(sizes)
    return fr.Clients(together, ends - sizes, ends, **more)


def xy(*pairs):
    """Clients of the linear model from (x, y) lists."""
    return clients_of(*({"x": np.array(x, np.float32), "y": np.array(y, np.float32)} for x, y in pairs))


def a_and_b():
    """The two clients of the spec."""
    return xy(([1, 2, 3], [5, 6, 8]), ([1, 2, 3], [5, 5, 9]))


def descend(rate, batch_size=1, **options):
    return fr.gradient_descent(optax.sgd(rate), batch_size=batch_size, **options)


def one_by_one():
    """The cheapest layout to compile: one device, one client at a time."""
    return fr.layout(block=1, jax_devices=1)


def one_round(algorithm, clients, rounds=1, **options):
    """Train with every client in every round."""
    options = {"layout": one_by_one(), "clients_per_round": len(clients), **options}
    return fr.train(algorithm, clients, rounds=rounds, **options)


def run_cohort(rounds, algorithm, state, clients, order, seed=5):
    """Run one round of compiled rounds with these clients, in this order, on a state."""
    cohort = Packer(clients, algorithm.method.needs).pack(np.asarray(order))
    state, _, metrics = rounds(state, (), jax.tree.map(lambda x: x[None], cohort), jax.random.key(seed), 0, 1)
    return state, metrics


ITEMS, TAGS, DIM = 9, 6, 2


def lookup_model(lookups=True, tags=TAGS):
    """A model that reads tables in every way that may be declared.

    Two tables share the feature `item`; one table is read at a single id and at three ids an example; one parameter
    is dense; the local part multiplies rows, so gradients depend on it.
    """

    def init_global(key):
        keys = jax.random.split(key, 4)
        return {
            "item": 0.3 * jax.random.normal(keys[0], (ITEMS, DIM)),
            "item_bias": 0.3 * jax.random.normal(keys[1], (ITEMS,)),
            "tag": 0.3 * jax.random.normal(keys[2], (tags, DIM)),
            "mix": {"dense": 0.3 * jax.random.normal(keys[3], (DIM,))},
        }

    def predict(shared, local, batch):
        tagged = shared["tag"][batch["tags"]].mean(1) + shared["tag"][batch["main_tag"]]
        rows = shared["item"][batch["item"]] * (local["u"] + shared["mix"]["dense"])
        return rows.sum(-1) + tagged @ local["u"] + shared["item_bias"][batch["item"]] + local["v"]

    return fr.Model(
        init_global=init_global,
        init_local=lambda key: {"u": 0.5 * jax.random.normal(key, (DIM,)), "v": jnp.zeros(())},
        predict=predict,
        loss=squared_error,
        metrics={"absolute": fr.Metric(lambda p, b: (abs(p - b["y"]), jnp.ones_like(p)))},
        lookups={"item": "item", "item_bias": "item", "tag": ("main_tag", "tags")} if lookups else {},
    )


def lookup_clients(sizes, seed=0):
    """Clients of the lookup model, with few ids so that they repeat within batches and over them."""
    generator = np.random.default_rng(seed)

    def one(size):
        return {
            "item": generator.integers(0, ITEMS, size).astype(np.int32),
            "tags": generator.integers(0, TAGS, (size, 3)).astype(np.int32),
            "main_tag": generator.integers(0, TAGS, size).astype(np.int32),
            "y": generator.normal(size=size).astype(np.float32),
        }

    return clients_of(*map(one, sizes))


def leaves_of(tree):
    """All numbers of a pytree in one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def assert_close(found, expected, tolerance=1e-5):
    """Compare two pytrees of arrays."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, tolerance, tolerance)


def assert_same_bits(found, expected):
    """Compare two pytrees of arrays to the last bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


def assert_same_history(found, expected, tolerance=1e-5):
    """Compare the records of two runs."""
    for one, other in zip(found.history, expected.history, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == (other[name] if isinstance(value, str) else pytest.approx(other[name], tolerance))


def plain_lstm(x, kernel, recurrent, bias, lengths):
    """Run an LSTM as a textbook writes it, for its derivatives."""

    def step(state, x):
        output, cell = state
        i, f, g, o = jnp.split(x @ kernel + output @ recurrent + bias, 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        output = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (output, cell), output

    start = jnp.zeros((x.shape[0], recurrent.shape[0]))
    outputs = jnp.swapaxes(jax.lax.scan(step, (start, start), jnp.swapaxes(x, 0, 1))[1], 0, 1)
    return jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[..., None], outputs, 0)
