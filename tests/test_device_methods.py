"""Models and methods on a device: for each kind, a round on ONNX Runtime adds to the sum what the simulator adds."""

import json
import os
import subprocess
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrecon as fr

pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")
pytest.importorskip("onnxruntime", reason="needs fedrecon[device]")

from device_models import clicks_model, text_algorithm
from fedrecon._src.algorithms.algorithm import with_params
from fedrecon._src.core.keys import words_of
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.data.sentences import next_word_columns
from fedrecon._src.device.export import wide
from fedrecon._src.device.update_graph import DevicePlan, UpdateGraph
from fedrecon._src.recommend.tasks.clicks import click_weight
from fedrecon.device import ExportError
from fedrecon_device import check
from fedrecon_device.graphs import Graph
from fedrecon_device.keys import client_key
from fedrecon_device.training import lay_out, pack_examples

WEB = Path(__file__).parent / "web"
SIZES = {"ann": 1, "bo": 2, "cy": 7, "dee": 12}
SEED, MOST, ITEMS = 3, 12, 30


def descend(rate=0.1, **limits):
    return fr.gradient_descent(fr.optimizers.sgd(rate), batch_size=3, **limits)


def recon(model, reconstruct=None, update=None, **options):
    return fr.federated_reconstruction(
        model,
        reconstruct=reconstruct or descend(epochs=2),
        update=update or descend(),
        server=fr.optimizers.sgd(1.0),
        **options,
    )


def ratings(draw, size):
    items = draw.permutation(ITEMS)[:size].astype(np.int32)
    return {"item": items, "rating": draw.integers(1, 6, size).astype(np.float32)}


def classes(draw, size):
    x = draw.normal(size=(size, 4)).astype(np.float32)
    return {"x": x, "label": draw.integers(0, 3, size).astype(np.int32)}


def sentences(draw, size):
    ids = draw.integers(1, 24, (size, 8))
    ids = np.where(draw.random((size, 8)) < 0.2, draw.integers(27, 32, (size, 8)), ids)
    return next_word_columns(ids.astype(np.int32), 24, 5)


# ---- models ----

NET = {"inputs": "x", "loss": "cross_entropy", "metrics": ["accuracy"]}


def flax_net(local="head", rate=0.0):
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.body, self.head = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)
            self.drop = nnx.Dropout(rate, rngs=rngs)

        def __call__(self, x):
            return self.head(self.drop(nnx.relu(self.body(x))))

    return fr.models.from_flax(Net, local=local, **NET)


def keras_net():
    keras = pytest.importorskip("keras")
    layers = keras.layers
    stack = [layers.Dense(5, "relu", name="body"), layers.LayerNormalization(name="norm"), layers.Dense(3, name="head")]
    return fr.models.from_keras(keras.Sequential([layers.Input((4,)), *stack]), local="head/*", **NET)


def equinox_net():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        body: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.body, self.head = eqx.nn.Linear(4, 5, key=first), eqx.nn.Linear(5, 3, key=second)

        def __call__(self, x):
            return self.head(jax.nn.tanh(self.body(x)))

    return fr.models.from_equinox(Net, local="head", **NET)


def factorization(**options):
    return fr.models.matrix_factorization(ITEMS, 4, **options)


def adam_both_ways():
    model = fr.models.learned_default(factorization(biases=True))
    momentum = fr.gradient_descent(fr.optimizers.sgd(0.02, momentum=0.9), batch_size=3, epochs=2)
    return recon(model, momentum, fr.gradient_descent(fr.optimizers.adam(0.01), batch_size=3), both_ways=True)


def averaging(model, **options):
    return fr.federated_averaging(model, update=descend(), server=fr.optimizers.sgd(1.0), **options)


def ditto():
    return fr.algorithms.ditto(
        flax_net(local=()), update=descend(), personal=descend(0.2), strength=0.3, server=fr.optimizers.sgd(1.0)
    )


def noised():
    """Return a method whose devices add noise to what the graph gives; the simulator adds none."""
    settings = {"noise": fr.aggregators.ClientNoise(1.0, per_round=20, least=10, simulated=False)}
    aggregate = fr.aggregators.secure(1.0, clients=100, protocol="two-servers", **settings)
    return recon(factorization(), descend(steps=4), descend(steps=4), aggregate=aggregate)


KINDS = {
    "noise of devices": (noised, ratings),
    "paper": (lambda: recon(factorization(), descend(steps=4), descend(steps=4)), ratings),
    "Adam, momentum, both ways, learned default": (adam_both_ways, ratings),
    "second order through SGD": (lambda: recon(factorization(), descend(steps=3), second_order=True), ratings),
    "text, embeddings of buckets": (lambda: text_algorithm()[0], sentences),
    "text, output bias": (lambda: text_algorithm(local="output_bias")[0], sentences),
    "text, two levels": (lambda: text_algorithm(local="output_bias", head=4)[0], sentences),
    "Flax": (lambda: recon(flax_net()), classes),
    "Keras": (lambda: recon(keras_net()), classes),
    "Equinox": (lambda: recon(equinox_net()), classes),
    "FedAvg": (lambda: averaging(flax_net(local=())), classes),
    "fine-tuning": (lambda: fr.with_finetuning(averaging(flax_net(local=())), descend()), classes),
    "fine-tuning after reconstruction": (
        lambda: fr.with_finetuning(recon(factorization()), descend(), which="item_embedding"),
        ratings,
    ),
    "FedPer": (lambda: averaging(factorization(), reconstruct=descend()), ratings),
    "Ditto": (ditto, classes),
}


class Device:
    """A graph that runs as on a device, with the state of each person."""

    def __init__(self, update):
        graph, first = update.graph(), update.state_graph()
        self.plan = update.plan(DevicePlan(), graph, SEED)
        self._graph = Graph("update.onnx", graph.data, graph._asdict())
        self._first = None if first is None else Graph("state.onnx", first.data, first._asdict())

    def first_state(self, params, name):
        if self._first is None:
            return {}
        tables = {f"global/{path}": leaf for path, leaf in flatten(params)[0].items()}
        return self._first.run({**tables, "key": words(client_key(tuple(self.plan["state_key"]), name))})

    def run(self, message, key, name, columns, state):
        inputs = pack_examples(self.plan, columns, key, name)
        outputs = self._graph.run({**message, "key": words(client_key(key, name)), **inputs, **state})
        state = {f"state/{path}": outputs[f"new_state/{path}"] for path in self.plan["state"]}
        return lay_out(self.plan["vector"], outputs), state


def words(key):
    return np.array(key, np.uint32).view(np.int32)


def trained(algorithm):
    draw = np.random.default_rng(1)
    start = algorithm.params(algorithm.init(jax.random.key(0)))
    return jax.tree.map(lambda leaf: np.asarray(leaf + 0.1 * draw.normal(size=leaf.shape), np.float32), start)


def assert_same_on_a_device(algorithm, examples, prepare=lambda columns: columns):
    """Run two rounds for people with few and many examples, on a device and in JAX."""
    draw = np.random.default_rng(0)
    update = UpdateGraph(algorithm, wide(examples(draw, 5)), MOST, prepare)
    algorithm, device = fr.kit.decide_lookups(algorithm, clients_of(prepare(examples(draw, 5)))), Device(update)
    params = trained(algorithm)
    message = algorithm.message(with_params(algorithm.init(jax.random.key(0)), params))
    arrays = {f"message/{path}": np.asarray(leaf) for path, leaf in flatten(message)[0].items()}
    largest = 0.0
    for name, size in SIZES.items():
        columns = wide(examples(draw, size))
        seen = {feature: np.asarray(column) for feature, column in prepare(columns).items()}
        state, kept = device.first_state(params, name), None
        if algorithm.method.init_client is not None:
            keys = fr.kit.client_keys(jax.random.key(SEED), clients_of(seen, name).identities())
            kept = algorithm.method.init_client(params, keys)
        for number in (0, 1):
            key = fr.kit.round_key(SEED, number)
            vector, state = device.run(arrays, tuple(words_of(key).tolist()), name, columns, state)
            total, kept = fr.kit.client_total(algorithm, message, seen, key, kept, client=name, lengths=update.lengths)
            expected = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(total)])
            if vector.dtype == np.uint32:  # a number halfway between two may be rounded either way
                assert np.abs((vector - expected).view(np.int32)).max() <= 1
            else:
                np.testing.assert_allclose(vector, expected, rtol=1e-5, atol=1e-5)
            for path, leaf in flatten(kept)[0].items():
                np.testing.assert_allclose(state[f"state/{path}"], leaf[0], atol=1e-5)
            largest = max(largest, np.abs(expected[:-8]).max())
    assert largest > 1e-3


def clients_of(columns, name="ann"):
    columns = {feature: np.asarray(column) for feature, column in columns.items()}
    return fr.Clients.from_columns(columns, client=[name] * len(next(iter(columns.values()))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_on_a_device_adds_what_the_simulator_adds(kind):
    make, examples = KINDS[kind]
    assert_same_on_a_device(make(), examples)


@pytest.mark.slow
@pytest.mark.parametrize("counts", ["ignore", "log"])
def test_clicks_train_on_a_device(counts):
    saved = clicks_model(counts)
    algorithm = saved.trainable(rounds=5)

    def clicks(draw, size):
        columns = {"item": draw.permutation(ITEMS)[:size].astype(np.int32)}
        return columns if counts == "ignore" else columns | {"rating": draw.integers(1, 9, size).astype(np.float32)}

    def prepare(columns):
        if counts == "ignore":
            return columns
        return {"item": columns["item"], "weight": click_weight(columns["rating"])}

    assert_same_on_a_device(algorithm, clicks, prepare)


def test_dropout_is_refused():
    algorithm = recon(flax_net(rate=0.5))
    update = UpdateGraph(algorithm, wide(classes(np.random.default_rng(0), 5)), MOST, lambda columns: columns)
    with pytest.raises(ExportError, match="dropout"):
        update.graph()


@pytest.mark.slow
def test_an_operation_without_translation_is_named():
    model = factorization()

    def predict(params, local, batch):
        user = local["user_embedding"]
        return model.predict(params, local, batch) + jnp.linalg.eigh(jnp.outer(user, user) + jnp.eye(4))[0][0]

    algorithm = recon(model._replace(predict=predict))
    update = UpdateGraph(algorithm, wide(ratings(np.random.default_rng(0), 5)), MOST, lambda columns: columns)
    with pytest.raises(ExportError, match="'eigh'"):
        update.graph()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text, embeddings of buckets", "text, output bias", "FedPer", "Ditto"])
def test_the_training_vectors_of_a_bundle_are_computed_in_python_and_in_node(kind, tmp_path):
    """Of methods that keep something on the client, over two rounds."""
    make, examples = KINDS[kind]
    algorithm, like = make(), wide(examples(np.random.default_rng(0), 20))
    folder = fr.device.bundle(algorithm, trained(algorithm), tmp_path / "b", like=like, most=MOST, train=True)
    rounds = 2 if kind in ("FedPer", "Ditto") else 1
    assert check(folder).vectors == 12
    plan = json.loads((folder / "plan.json").read_text())
    assert bool(plan["state"]) == (rounds == 2)
    if not (WEB / "node_modules").is_dir():
        pytest.skip("needs node and its packages: make test-web")
    command = ["node", "training_vectors.mjs", str(folder)]
    result = json.loads(subprocess.run(command, cwd=WEB, capture_output=True, text=True, check=True).stdout)
    assert (result["cases"], result["rounds"]) == (6, 6 * rounds)
    assert max(result["worst"], result["worstState"]) <= 1e-5
