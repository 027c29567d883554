"""Flax modules, NNX and Linen, as models."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fedrecon as fr
from fedrecon._src.core.model import Step
from toy_frameworks import DIM, ITEMS, RATINGS, assert_a_round_equals_ours, batch_of, features, rating_clients, recon
from toy_models import clients_of, descend, one_round

KEY = jax.random.key(0)
MASK = jnp.array([True] * 4 + [False] * 2)
CLASSES = {"inputs": "x", "loss": "cross_entropy", "metrics": ["accuracy"]}


class Factors(nnx.Module):
    def __init__(self, rngs):
        self.items = nnx.Embed(ITEMS, DIM, rngs=rngs)
        self.user = nnx.Linear(DIM, 1, use_bias=False, rngs=rngs)

    def __call__(self, item):
        return self.user(self.items(item))


class LinenFactors(nn.Module):
    @nn.compact
    def __call__(self, item):
        return nn.Dense(1, use_bias=False, name="user")(nn.Embed(ITEMS, DIM, name="items")(item))


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.body = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(self.norm(self.body(x))))


class LinenNet(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(3, name="body")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(2, name="head")(x)


def nnx_net(rate=0.0, **options):
    return fr.models.from_flax(lambda rngs: Net(rngs, rate), **{"local": "head", **CLASSES, **options})


def linen_net(rate=0.0, **options):
    return fr.models.from_flax(LinenNet(rate), example=batch_of(2), **{"local": "head", **CLASSES, **options})


NETS = pytest.mark.parametrize("net", [nnx_net, linen_net], ids=["nnx", "linen"])


def started(model):
    return model.init_global(jax.random.key(1)), model.init_local(jax.random.key(2))


def statistics(tree):
    """The mean and the variance among the leaves of a model."""
    return next(v for k, v in tree.items() if k.endswith("mean")), next(v for k, v in tree.items() if k.endswith("var"))


def hidden(shared, x):
    return np.asarray(x @ shared["body/kernel"] + shared["body/bias"])


def test_a_round_of_nnx_matrix_factorization_equals_ours():
    assert_a_round_equals_ours(fr.models.from_flax(Factors, **RATINGS), "items/embedding", "user/kernel")


@pytest.mark.slow
def test_a_round_of_linen_matrix_factorization_equals_ours():
    model = fr.models.from_flax(LinenFactors(), example=rating_clients(), **RATINGS)
    assert_a_round_equals_ours(model, "items/embedding", "user/kernel", optimizer=optax.adam(0.05))


@NETS
def test_parameters_are_drawn_from_the_key_and_divided(net):
    model = net()
    assert set(model.init_global(KEY)) == {"body/kernel", "body/bias", "norm/scale", "norm/bias"}
    one, other = (model.init_local(jax.random.key(n)) for n in (1, 2))
    assert {"head/kernel", "head/bias"} < set(one)
    assert (one["head/kernel"] != other["head/kernel"]).all()


def test_clients_start_from_the_weights_of_an_nnx_module_and_layers_select_parameters():
    module = Net(nnx.Rngs(5))
    model = fr.models.from_flax(module, local=[module.head, module.norm], **CLASSES)
    for n in (1, 2):
        np.testing.assert_array_equal(model.init_local(jax.random.key(n))["head/kernel"], module.head.kernel[...])
    assert {"head/kernel", "head/bias", "norm/scale", "norm/bias"} < set(model.init_local(KEY))


def test_a_linen_layer_is_known_by_its_name():
    model = fr.models.from_flax(LinenNet(), local=nn.Dense(2, name="head"), example=batch_of(2), **CLASSES)
    assert {"head/kernel", "head/bias"} < set(model.init_local(KEY))
    with pytest.raises(ValueError, match="`local` is a Linen module without a name"):
        fr.models.from_flax(LinenNet(), local=nn.Dense(2), example=batch_of(2), **CLASSES)


def test_a_layer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="selects no parameter; the parameters are"):
        fr.models.from_flax(Net(nnx.Rngs(0)), local=Net(nnx.Rngs(0)).head, **CLASSES)


def test_a_linen_module_without_an_example_is_named():
    with pytest.raises(ValueError, match="`example` is missing: a Linen module infers its shapes from it"):
        fr.models.from_flax(LinenNet(), local="head", **CLASSES)


def test_an_example_of_large_clients_reads_only_its_first_rows():
    large = {"x": np.broadcast_to(np.float32(0), (2**40, 3)), "y": np.broadcast_to(np.int32(0), 2**40)}
    clients = fr.Clients(large, np.array([0]), np.array([4]))
    model = fr.models.from_flax(LinenNet(), local="head/*", example=clients, **CLASSES)
    assert {"head/kernel", "head/bias"} < set(model.init_local(KEY))


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="`module` must be a Flax module"):
        fr.models.from_flax(3, local="head", **CLASSES)


@NETS
def test_predictions_are_the_module_s_own_in_evaluation(net):
    model = net(0.5)
    shared, own = started(model)
    x = batch_of(6)["x"]
    normal = hidden(shared, x) / np.sqrt(1 + 1e-5)  # running statistics start at 0 and 1
    expected = normal @ own["head/kernel"] + own["head/bias"]
    np.testing.assert_allclose(model.predict(shared, own, {"x": x}), expected, 1e-4, 1e-5)


@NETS
def test_statistics_leave_out_what_fills_a_batch_up(net):
    model = net()
    shared, own = started(model)
    batch = batch_of(6)
    real = hidden(shared, batch["x"])[:4]
    mean, var = statistics(model.state.advance(shared, own, batch, MASK)[1])
    np.testing.assert_allclose(mean, 0.01 * real.mean(0), 1e-4)
    np.testing.assert_allclose(var, 0.99 + 0.01 * real.var(0), 1e-4)
    found = model.predict_train(shared, own, batch, Step(MASK, KEY))[:4]
    normal = (real - real.mean(0)) / np.sqrt(real.var(0) + 1e-5)
    np.testing.assert_allclose(found, normal @ own["head/kernel"] + own["head/bias"], 1e-3, 1e-4)


@pytest.mark.slow
@NETS
def test_local_statistics_are_rebuilt_from_the_support(net):
    model = net()
    data = features(7)
    shared, _ = started(model)
    local = fr.reconstruct(recon(model), shared, data)
    mean, var = statistics(local)
    real = hidden(shared, data["x"])
    np.testing.assert_allclose(mean, real.mean(0), 1e-4, 1e-5)
    np.testing.assert_allclose(var, real.var(0), 1e-4)


@pytest.mark.slow
@NETS
def test_averaged_statistics_travel_with_the_global_parameters(net):
    model = net(state="averaged", local=())
    clients = clients_of(features(4, 1), features(4, 2))
    algorithm = fr.federated_averaging(model, update=descend(0.0, 4), server=optax.adam(0.1))
    start = algorithm.params(algorithm.init(fr.kit.run_keys(0).init))
    run = one_round(algorithm, clients)
    means = [hidden(start, features(4, seed)["x"]).mean(0) for seed in (1, 2)]
    np.testing.assert_allclose(statistics(run.params)[0], 0.01 * np.mean(means, 0), 1e-4, 1e-6)


@NETS
def test_frozen_statistics_are_used_in_training_while_dropout_is_on(net):
    model, dropped = net(state="frozen"), net(0.5, state="frozen")
    shared, own = started(model)
    batch = batch_of(6)
    assert model.state is None
    np.testing.assert_allclose(
        model.predict_train(shared, own, batch, Step(MASK, KEY)), model.predict(shared, own, batch), 1e-5
    )
    assert not np.allclose(
        dropped.predict_train(shared, own, batch, Step(MASK, KEY)), dropped.predict(shared, own, batch)
    )


@NETS
def test_dropout_follows_the_key_and_is_off_without_one(net):
    model, plain = net(0.5), net()
    shared, own = started(model)
    batch = batch_of(6)
    one, again, other, none = (
        model.predict_train(shared, own, batch, Step(MASK, key)) for key in (KEY, KEY, jax.random.key(1), None)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
    np.testing.assert_allclose(none, plain.predict_train(shared, own, batch, Step(MASK, None)), 1e-5)


class BareNet(nn.Module):
    """Layers that are told nothing of training, by the constructor or by the call."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(name="norm")(nn.Dense(3, name="body")(x))
        return nn.Dense(2, name="head")(nn.Dropout(0.5)(x))


def test_linen_layers_get_the_training_flag():
    batch = batch_of(6)
    bare = fr.models.from_flax(BareNet(), example=batch, local="head", **CLASSES)
    told = linen_net(0.5)
    shared, own = started(told)
    np.testing.assert_allclose(bare.predict(shared, own, batch), told.predict(shared, own, batch), 1e-5)
    one, again, other, none = (
        bare.predict_train(shared, own, batch, Step(MASK, key)) for key in (KEY, KEY, jax.random.key(1), None)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
    np.testing.assert_allclose(none, told.predict_train(shared, own, batch, Step(MASK, None)), 1e-5)


def test_dropout_alone_makes_a_linen_module_random():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(nn.Dropout(0.5)(nn.Dense(3)(x)))

    batch = batch_of(6)
    model = fr.models.from_flax(Dropped(), example=batch, local="head", **CLASSES)
    shared, own = started(model)
    assert not np.allclose(model.predict_train(shared, own, batch, Step(MASK, KEY)), model.predict(shared, own, batch))


@pytest.mark.slow
@pytest.mark.parametrize("said", [None, False])
def test_attention_in_linen_drops_in_training_alone(said):
    class Attending(nn.Module):
        @nn.compact
        def __call__(self, x):
            attention = nn.MultiHeadDotProductAttention(1, dropout_rate=0.5, deterministic=said)
            return nn.Dense(2, name="head")(attention(x[:, :, None])[..., 0])

    batch = batch_of(6)
    model = fr.models.from_flax(Attending(), example=batch, local="head", **CLASSES)
    shared, own = started(model)
    served = model.predict(shared, own, batch)
    np.testing.assert_array_equal(served, model.predict(shared, own, batch))
    assert not np.allclose(model.predict_train(shared, own, batch, Step(MASK, KEY)), served)


def test_lookups_are_found_without_a_word():
    model = fr.models.from_flax(Factors, **RATINGS)
    batch = {name: column[:3] for name, column in rating_clients().columns.items()}
    assert fr.kit.find_lookups(model, batch) == {"items/embedding": ("item",)}


@pytest.mark.slow
def test_a_network_trains_and_learns():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 4)).astype(np.float32)
    data = {"x": x, "label": (x[:, 0] > 0).astype(np.int32)}
    clients = clients_of(*({name: column[k : k + 20] for name, column in data.items()} for k in (0, 20, 40)))
    algorithm = fr.federated_reconstruction(
        nnx_net(0.1),
        reconstruct=descend(0.3, 10, epochs=5),
        update=descend(0.3, 10, epochs=3),
        server=optax.sgd(1.0),
    )
    run = one_round(algorithm, clients, rounds=15)
    assert fr.evaluate(algorithm, run.params, clients).micro["accuracy"] > 0.8
