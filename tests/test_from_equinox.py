"""Equinox modules as models."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.model import Step
from toy_frameworks import DIM, ITEMS, RATINGS, assert_a_round_equals_ours, batch_of, features, rating_clients, recon
from toy_models import clients_of, descend, one_round

KEY = jax.random.key(0)
ALL = jnp.ones(6, bool)
CLASSES = {"inputs": "x", "loss": "cross_entropy", "metrics": ["accuracy"]}


class Factors(eqx.Module):
    items: eqx.nn.Embedding
    user: eqx.nn.Linear

    def __init__(self, key):
        one, other = jax.random.split(key)
        self.items = eqx.nn.Embedding(ITEMS, DIM, key=one)
        self.user = eqx.nn.Linear(DIM, "scalar", use_bias=False, key=other)

    def __call__(self, item):
        return self.user(self.items(item))


class Net(eqx.Module):
    body: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key, rate=0.0, mode="batch"):
        one, other = jax.random.split(key)
        self.body = eqx.nn.Linear(4, 3, key=one)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode=mode)
        self.drop = eqx.nn.Dropout(rate)
        self.head = eqx.nn.Linear(3, 2, key=other)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.body(x), state)
        return self.head(self.drop(x, key=key)), state


def net(rate=0.0, mode="batch", **options):
    make = eqx.nn.make_with_state(lambda key: Net(key, rate, mode))
    return fr.models.from_equinox(make, **{"local": "head", **CLASSES, **options})


def hidden(shared, x):
    return np.asarray(x @ shared["body/weight"].T + shared["body/bias"])


def started(model):
    return model.init_global(jax.random.key(1)), model.init_local(jax.random.key(2))


def statistics(tree):
    return [tree[path] for path in sorted(tree) if path.startswith("state/")]


def test_a_round_of_matrix_factorization_equals_ours():
    model = fr.models.from_equinox(Factors, **RATINGS)
    assert_a_round_equals_ours(model, "items/weight", "user/weight", (1, DIM))


@pytest.mark.slow
def test_a_round_with_adam_equals_ours():
    model = fr.models.from_equinox(Factors, **RATINGS)
    assert_a_round_equals_ours(model, "items/weight", "user/weight", (1, DIM), optimizer=optax.adam(0.05))


def test_lookups_are_found_without_a_word():
    batch = {name: column[:3] for name, column in rating_clients().columns.items()}
    assert fr.kit.find_lookups(fr.models.from_equinox(Factors, **RATINGS), batch) == {"items/weight": ("item",)}


def test_a_module_is_where_everybody_starts_and_a_function_of_a_key_is_drawn():
    module = Factors(KEY)
    given = fr.models.from_equinox(module, **{**RATINGS, "local": module.user})
    drawn = fr.models.from_equinox(Factors, **RATINGS)
    for n in (1, 2):
        np.testing.assert_array_equal(given.init_local(jax.random.key(n))["user/weight"], module.user.weight)
    one, other = (drawn.init_local(jax.random.key(n))["user/weight"] for n in (1, 2))
    assert (one != other).all()


def test_a_layer_of_another_module_is_refused():
    with pytest.raises(ValueError, match="selects no parameter"):
        fr.models.from_equinox(Factors(KEY), **{**RATINGS, "local": Factors(KEY).user})


def test_a_module_may_take_whole_batches():
    class Batched(eqx.Module):
        weight: jax.Array
        bias: jax.Array

        def __call__(self, x):
            assert x.ndim == 2
            return x @ self.weight + self.bias

    model = fr.models.from_equinox(Batched(jnp.ones((4, 2)), jnp.zeros(2)), batched=True, local="bias", **CLASSES)
    found = model.predict({"weight": jnp.ones((4, 2))}, {"bias": jnp.array([0.0, 1.0])}, {"x": jnp.ones((3, 4))})
    assert found.tolist() == [[4, 5]] * 3


def test_several_features_feed_several_arguments():
    class Two(eqx.Module):
        w: jax.Array
        b: jax.Array

        def __call__(self, a, scale):
            return self.w * a * scale + self.b

    batch = {"p": jnp.array([1.0, 2.0]), "q": jnp.array([3.0, 5.0])}
    for inputs in (["p", "q"], {"a": "p", "scale": "q"}):
        model = fr.models.from_equinox(Two(jnp.float32(2), jnp.float32(1)), local="b", inputs=inputs, loss="mse")
        assert model.predict({"w": 2.0}, {"b": 1.0}, batch).tolist() == [7, 21]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_local_statistics_are_rebuilt_from_the_support(mode):
    model = net(mode=mode)
    data = features(7)
    shared, _ = started(model)
    local = fr.reconstruct(recon(model), shared, data)
    real = hidden(shared, data["x"])
    mean, var = statistics(local)
    np.testing.assert_allclose(mean, real.mean(0), 1e-4, 1e-5)
    np.testing.assert_allclose(var, real.var(0), 1e-4)


@pytest.mark.slow
def test_a_partial_batch_is_filled_up_from_the_client_s_first_examples():
    """Equinox takes no mask: of 70 examples, batches of 64 and of the last 6 with the first 58 make the statistics."""
    model = net()
    data = features(70)
    shared, _ = started(model)
    mean = statistics(fr.reconstruct(recon(model), shared, data))[0]
    real = hidden(shared, data["x"])
    last = np.concatenate([real[64:], real[:58]])
    np.testing.assert_allclose(mean, (64 * real[:64].mean(0) + 6 * last.mean(0)) / 70, 1e-4, 1e-5)


@pytest.mark.slow
def test_averaged_statistics_travel_with_the_global_parameters():
    model = net(state="averaged", local=())
    clients = clients_of(features(4, 1), features(4, 2))
    algorithm = fr.federated_averaging(model, update=descend(0.0, 4), server=optax.adam(0.1))
    start = algorithm.params(algorithm.init(fr.kit.run_keys(0).init))
    run = one_round(algorithm, clients)
    means = [hidden(start, features(4, seed)["x"]).mean(0) for seed in (1, 2)]
    np.testing.assert_allclose(statistics(run.params)[0], 0.01 * np.mean(means, 0), 1e-4, 1e-6)


@pytest.mark.slow
def test_frozen_statistics_are_used_in_training_while_dropout_is_on():
    model, dropped = net(state="frozen"), net(0.5, state="frozen")
    shared, own = started(model)
    batch = batch_of(6)
    np.testing.assert_allclose(
        model.predict_train(shared, own, batch, Step(ALL, KEY)), model.predict(shared, own, batch), 1e-5
    )
    assert not np.allclose(
        dropped.predict_train(shared, own, batch, Step(ALL, KEY)), dropped.predict(shared, own, batch)
    )


@pytest.mark.slow
def test_dropout_follows_the_key_and_is_off_without_one():
    model, plain = net(0.5), net()
    shared, own = started(model)
    batch = batch_of(6)
    one, again, other, none = (
        model.predict_train(shared, own, batch, Step(ALL, key)) for key in (KEY, KEY, jax.random.key(1), None)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
    np.testing.assert_allclose(none, plain.predict_train(shared, own, batch, Step(ALL, None)), 1e-5)
    assert len({tuple(row) for row in np.asarray(one - none).round(4).tolist()}) > 1  # each example its own
