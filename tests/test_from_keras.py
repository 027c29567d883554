"""Keras 3 models on JAX as models."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.model import Step
from toy_frameworks import DIM, ITEMS, RATINGS, assert_a_round_equals_ours, batch_of, features, rating_clients, recon
from toy_models import clients_of, descend, one_round

KEY = jax.random.key(0)
MASK = jnp.array([True] * 4 + [False] * 2)
CLASSES = {"inputs": "x", "loss": "cross_entropy", "metrics": ["accuracy"]}


def functional():
    item = keras.Input((), dtype="int32", name="item")
    row = keras.layers.Embedding(ITEMS, DIM, name="items")(item)
    return keras.Model(item, keras.layers.Dense(1, use_bias=False, name="user")(row))


def sequential():
    layers = [keras.layers.Embedding(ITEMS, DIM, name="items"), keras.layers.Dense(1, use_bias=False, name="user")]
    return keras.Sequential([keras.Input((), dtype="int32"), *layers])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.items = keras.layers.Embedding(ITEMS, DIM, name="items")
        self.user = self.add_weight(shape=(DIM,), initializer="random_uniform", name="user")

    def call(self, item):
        return self.items(item) @ self.user


def net(rate=0.0, **options):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, name="body"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(rate, name="drop"),
            layers.Dense(2, name="head"),
        ]
    )
    return fr.models.from_keras(model, **{"local": "head", **CLASSES, **options})


def hidden(shared, x):
    return np.asarray(x @ shared["body/kernel"] + shared["body/bias"])


def started(model):
    return model.init_global(jax.random.key(1)), model.init_local(jax.random.key(2))


@pytest.mark.slow
def test_a_round_of_a_functional_model_equals_ours():
    assert_a_round_equals_ours(fr.models.from_keras(functional(), **RATINGS), "items/embeddings", "user/kernel")


@pytest.mark.slow
def test_a_round_of_a_sequential_model_equals_ours():
    model = fr.models.from_keras(sequential(), **RATINGS)
    assert_a_round_equals_ours(model, "items/embeddings", "user/kernel", optimizer=optax.sgd(0.1, momentum=0.9))


@pytest.mark.slow
def test_a_round_of_a_subclassed_model_equals_ours():
    model = fr.models.from_keras(Subclassed(), example=rating_clients(), **RATINGS)
    assert_a_round_equals_ours(model, "items/embeddings", "user", (DIM,))


def test_weights_are_drawn_anew_from_the_key():
    model = fr.models.from_keras(functional(), **RATINGS)
    one, other = (model.init_local(jax.random.key(n))["user/kernel"] for n in (1, 2))
    assert (one != other).all()
    np.testing.assert_array_equal(model.init_local(jax.random.key(1))["user/kernel"], one)
    # Keras's own initialiser is uniform within this bound.
    assert float(jnp.abs(one).max()) <= (6 / (DIM + 1)) ** 0.5
    assert (
        model.init_global(KEY)["items/embeddings"] != model.init_global(jax.random.key(1))["items/embeddings"]
    ).all()


def test_weights_that_were_trained_or_loaded_are_kept():
    network = functional()
    table = np.arange(ITEMS * DIM, dtype=np.float32).reshape(ITEMS, DIM)
    network.get_layer("items").set_weights([table])
    model = fr.models.from_keras(network, **RATINGS)
    np.testing.assert_array_equal(model.init_global(KEY)["items/embeddings"], table)
    one, other = (model.init_local(jax.random.key(n))["user/kernel"] for n in (1, 2))
    assert (one != other).all()


def test_weights_made_without_a_layer_s_initialiser_are_where_everybody_starts():
    network = Subclassed()
    model = fr.models.from_keras(network, example=rating_clients(), **RATINGS)
    for n in (1, 2):
        np.testing.assert_array_equal(model.init_local(jax.random.key(n))["user"], network.user.value)


class Own(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.start = keras.initializers.RandomNormal()

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 1), initializer=self.start, name="weights")

    def call(self, x):
        return x @ self.kernel


def test_weights_of_custom_layers_are_redrawn_if_the_initialiser_is_an_attribute():
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), Own(name="own")])
    options = {"local": "own", "inputs": "x", "loss": "mse"}
    one, other = (fr.models.from_keras(network, **options).init_local(jax.random.key(n)) for n in (1, 2))
    assert (one["own/weights"] != other["own/weights"]).all()
    network.get_layer("own").set_weights([np.ones((2, 1), np.float32)])
    kept = fr.models.from_keras(network, **options).init_local(KEY)
    assert kept["own/weights"].tolist() == [[1], [1]]


def test_a_recurrent_layer_keeps_the_biases_that_its_initialiser_did_not_make():
    network = keras.Sequential([keras.Input((5, 4)), keras.layers.LSTM(3, name="lstm"), keras.layers.Dense(1)])
    model = fr.models.from_keras(network, local="lstm", inputs="x", loss="mse")
    (bias,) = (leaf for path, leaf in model.init_local(KEY).items() if path.endswith("bias"))
    assert bias.tolist() == [0] * 3 + [1] * 3 + [0] * 6  # of the forget gate 1


def test_a_layer_itself_can_be_named():
    network = functional()
    model = fr.models.from_keras(network, **{**RATINGS, "local": network.get_layer("user")})
    assert set(model.init_local(KEY)) == {"user/kernel"}


def test_layers_that_are_not_trainable_are_frozen():
    network = functional()
    network.get_layer("items").trainable = False
    model = fr.models.from_keras(network, **RATINGS)
    assert model.init_global(KEY) == {}
    found = model.predict({}, {"user/kernel": jnp.ones((DIM, 1))}, {"item": jnp.arange(ITEMS)})
    np.testing.assert_allclose(found[:, 0], np.asarray(network.get_layer("items").embeddings.value).sum(1), 1e-5)


def test_a_weight_that_is_not_trainable_is_frozen_and_no_state():
    network = functional()
    items = network.get_layer("items").embeddings
    items.trainable = False
    items.assign(jnp.ones(items.shape))  # as if it had been trained before
    model = fr.models.from_keras(network, **RATINGS)
    assert (model.state, set(model.init_local(KEY)), model.init_global(KEY)) == (None, {"user/kernel"}, {})


@pytest.mark.parametrize("inputs", [["a", "b"], {"first": "a", "second": "b"}], ids=["list", "mapping"])
def test_a_model_of_several_inputs_is_fed_by_order_or_name(inputs):
    first, second = keras.Input((2,), name="first"), keras.Input((2,), name="second")
    joined = keras.layers.Concatenate()([first, keras.layers.Dense(2, name="own")(second)])
    named = {"first": first, "second": second} if isinstance(inputs, dict) else [first, second]
    network = keras.Model(named, joined)
    model = fr.models.from_keras(network, local="own/bias", inputs=inputs, loss="mse")
    batch = {"a": jnp.ones((3, 2)), "b": jnp.zeros((3, 2))}
    found = model.predict(model.init_global(KEY), {"own/bias": jnp.array([5.0, 6.0])}, batch)
    assert found.tolist() == [[1, 1, 5, 6]] * 3


@pytest.mark.parametrize("mapping", [False, True], ids=["list", "mapping"])
def test_inputs_follow_from_their_names(mapping):
    first, second = keras.Input((2,), name="b"), keras.Input((2,), name="a")
    joined = keras.layers.Concatenate()([first, keras.layers.Dense(2, name="own")(second)])
    network = keras.Model({"b": first, "a": second} if mapping else [first, second], joined)
    model = fr.models.from_keras(network, local="own/bias", loss="mse")
    batch = {"b": jnp.ones((3, 2)), "a": jnp.zeros((3, 2))}
    found = model.predict(model.init_global(KEY), {"own/bias": jnp.array([5.0, 6.0])}, batch)
    assert found.tolist() == [[1, 1, 5, 6]] * 3
    with pytest.raises(TypeError, match="`inputs` is missing"):
        fr.models.from_keras(sequential(), local="user", loss="mse")


class Pair(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, name="dense")

    def call(self, a, b):
        return self.dense(a) + b


@pytest.mark.parametrize("inputs", [["a", "b"], {"a": "a", "b": "b"}], ids=["in order", "by name"])
def test_a_subclassed_model_of_several_arguments_is_fed_by_order_or_name(inputs):
    batch = {"a": jnp.zeros((3, 2)), "b": jnp.full((3, 1), 2.0)}
    model = fr.models.from_keras(Pair(), example=batch, local="dense/bias", inputs=inputs, loss="mse")
    assert model.predict(model.init_global(KEY), {"dense/bias": jnp.ones(1)}, batch).tolist() == [[3]] * 3


def test_an_unbuilt_model_is_named():
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="the Keras model has no weights yet; build it, call it on a batch, or give"):
        fr.models.from_keras(unbuilt, local="dense", **CLASSES)


def test_another_backend_is_named(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(RuntimeError, match="Keras runs on torch; set the environment variable KERAS_BACKEND=jax"):
        fr.models.from_keras(functional(), **RATINGS)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "keras", None)
    with pytest.raises(ImportError, match=r"pip install 'fedrecon\[keras\]'"):
        fr.models.from_keras(None, **RATINGS)


def test_a_keras_loss_gives_one_value_for_every_example():
    model = net(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ours = net()
    batch = batch_of(5)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32))
    np.testing.assert_allclose(model.loss(logits, batch)[0], ours.loss(logits, batch)[0], 1e-5)


def test_statistics_leave_out_what_fills_a_batch_up():
    model = net()
    shared, own = started(model)
    batch = batch_of(6)
    real = hidden(shared, batch["x"])[:4]
    new = model.state.advance(shared, own, batch, MASK)[1]
    np.testing.assert_allclose(new["norm/moving_mean"], 0.01 * real.mean(0), 1e-4)
    np.testing.assert_allclose(new["norm/moving_variance"], 0.99 + 0.01 * real.var(0), 1e-4)
    found = model.predict_train(shared, own, batch, Step(MASK, KEY))[:4]
    normal = (real - real.mean(0)) / np.sqrt(real.var(0) + 1e-3)
    np.testing.assert_allclose(found, normal @ own["head/kernel"] + own["head/bias"], 1e-3, 1e-4)


def test_statistics_of_images_leave_out_what_fills_a_batch_up():
    layers = [keras.Input((5, 5, 2)), keras.layers.BatchNormalization(name="norm"), keras.layers.Flatten()]
    network = keras.Sequential([*layers, keras.layers.Dense(2, name="head")])
    model = fr.models.from_keras(network, local="head", **CLASSES)
    x = np.random.default_rng(0).normal(2, 3, (6, 5, 5, 2)).astype(np.float32)
    new = model.state.advance(*started(model), {"x": jnp.asarray(x)}, MASK)[1]
    np.testing.assert_allclose(new["norm/moving_mean"], 0.01 * x[:4].mean((0, 1, 2)), 1e-4)


@pytest.mark.slow
def test_local_statistics_are_rebuilt_from_the_support():
    model = net()
    data = features(7)
    shared, _ = started(model)
    local = fr.reconstruct(recon(model), shared, data)
    real = hidden(shared, data["x"])
    np.testing.assert_allclose(local["norm/moving_mean"], real.mean(0), 1e-4, 1e-5)
    np.testing.assert_allclose(local["norm/moving_variance"], real.var(0), 1e-4)


@pytest.mark.slow
def test_averaged_statistics_travel_with_the_global_parameters():
    model = net(state="averaged", local=())
    clients = clients_of(features(4, 1), features(4, 2))
    algorithm = fr.federated_averaging(model, update=descend(0.0, 4), server=optax.adam(0.1))
    start = algorithm.params(algorithm.init(fr.kit.run_keys(0).init))
    run = one_round(algorithm, clients)
    means = [hidden(start, features(4, seed)["x"]).mean(0) for seed in (1, 2)]
    np.testing.assert_allclose(run.params["norm/moving_mean"], 0.01 * np.mean(means, 0), 1e-4, 1e-6)


def test_frozen_statistics_are_used_in_training_while_dropout_is_on():
    """Where a row of the hidden layer is dropped whole, only the bias of the head is left."""
    model = net(0.999999, state="frozen")
    shared, own = started(model)
    own["head/bias"] = jnp.array([3.0, 4.0])
    batch = batch_of(6)
    assert model.state is None
    assert net(state="frozen").predict_train is None  # then training does nothing else than predict
    np.testing.assert_allclose(model.predict_train(shared, own, batch, Step(MASK, KEY)), [[3, 4]] * 6)
    half = net(0.5, state="frozen").predict_train(shared, own, batch, Step(MASK, KEY))
    normal = hidden(shared, batch["x"]) / np.sqrt(1 + 1e-3)  # by running statistics, which start at 0 and 1
    kept = [2 * normal * np.array(keep) @ own["head/kernel"] + own["head/bias"] for keep in np.ndindex(2, 2, 2)]
    assert np.abs(np.stack(kept) - half).max(-1).min(0).max() < 1e-4


def test_dropout_follows_the_key_and_is_off_without_one():
    model, plain = net(0.5), net()
    shared, own = started(model)
    batch = batch_of(6)
    one, again, other, none = (
        model.predict_train(shared, own, batch, Step(MASK, key)) for key in (KEY, KEY, jax.random.key(1), None)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
    np.testing.assert_allclose(none, plain.predict_train(shared, own, batch, Step(MASK, None)), 1e-5)


def test_the_user_s_model_is_left_as_it_was():
    network = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    )
    before = [np.asarray(variable.value) for variable in network.variables]
    model = fr.models.from_keras(network, local="dense*", **CLASSES)
    model.predict_train(*started(model), batch_of(6), Step(MASK, KEY))
    for variable, value in zip(network.variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)
    assert not any("call" in layer.__dict__ for layer in network.layers)


def test_lookups_are_found_without_a_word():
    batch = {name: column[:3] for name, column in rating_clients().columns.items()}
    for network in (functional(), sequential()):
        model = fr.models.from_keras(network, **RATINGS)
        assert fr.kit.find_lookups(model, batch) == {"items/embeddings": ("item",)}


@pytest.mark.slow
def test_an_embedding_that_masks_an_id_is_still_read_by_rows():
    """Keras compares ids with 0 for the mask: ids are values there, and only indices of the table are renumbered."""
    words = keras.Input((5,), dtype="int32")
    rows = keras.layers.Embedding(30, 3, mask_zero=True, name="words")(words)
    pooled = keras.layers.GlobalAveragePooling1D()(rows)
    network = keras.Model(words, keras.layers.Dense(1, name="head")(pooled))
    model = fr.models.from_keras(network, local="head", inputs="t", loss="mse", label="y")
    generator = np.random.default_rng(0)
    clients = clients_of(
        *({"t": generator.integers(0, 30, (n, 5)).astype(np.int32) % 9, "y": generator.normal(size=n)} for n in (4, 5))
    )
    batch = {name: jnp.asarray(column[:2]) for name, column in clients.columns.items()}
    assert fr.kit.find_lookups(model, batch) == {"words/embeddings": ("t",)}
    sparse, dense = (one_round(recon(model._replace(lookups=lookups)), clients) for lookups in ("auto", {}))
    np.testing.assert_allclose(sparse.params["words/embeddings"], dense.params["words/embeddings"], 1e-5, 1e-6)
