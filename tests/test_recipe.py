"""The recipe for ratings, put together from parts of the library, against its gradients in closed form."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.recommend.round_zero import estimate_ratings

pytestmark = pytest.mark.slow

ITEMS, DIM = 12, 3


@pytest.fixture(scope="module")
def reference():
    path = Path(__file__).parent.parent / "benchmarks" / "recipe_reference.py"
    spec = importlib.util.spec_from_file_location("recipe_reference", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    sizes = [4, 6, 10, 2]
    item = np.concatenate([rng.permutation(ITEMS)[:n] for n in sizes]).astype(np.int32)
    rating = rng.integers(1, 6, len(item)).astype(np.float32)
    return fr.Clients.from_columns({"item": item, "rating": rating}, client=np.repeat(np.arange(4), sizes))


def test_round_zero_is_that_of_the_reference(reference, clients):
    prepared = estimate_ratings(clients, ITEMS, trait_passes=0)
    zero = reference.round_zero(reference.Table.of(clients), ITEMS, passes=10)
    assert (prepared.mean, prepared.deviation) == (pytest.approx(zero.mu), pytest.approx(zero.s))
    np.testing.assert_allclose(prepared.item_bias, zero.bias, atol=1e-9)
    assert (prepared.noise, prepared.user_ridge) == (pytest.approx(zero.noise), pytest.approx(zero.k_user))


def test_what_users_make_of_traits_is_that_of_the_reference(reference, clients):
    prepared = estimate_ratings(clients, ITEMS, trait_passes=1)
    table = reference.Table.of(clients)
    zero = reference.with_traits(table, reference.round_zero(table, ITEMS, passes=10), passes=1)
    np.testing.assert_allclose(prepared.traits(), zero.traits, atol=1e-9)
    np.testing.assert_allclose(prepared.trait_ridge, zero.k_traits, rtol=1e-6)
    assert (prepared.noise, prepared.user_ridge) == (pytest.approx(zero.noise), pytest.approx(zero.k_user))


def test_a_round_takes_the_gradient_of_the_reference(reference, clients):
    prepared = estimate_ratings(clients, ITEMS, trait_passes=0)
    model = fr.models.matrix_factorization(
        ITEMS, DIM, biases=True, init_scale=0.5, init_local_scale=0, init_item_bias=prepared.item_bias
    )
    model = fr.models.standardize(fr.models.implicit_feedback(model, ITEMS), prepared.mean, prepared.deviation)
    before = model.init_global(jax.random.key(0))
    rng = np.random.default_rng(1)
    before["evidence"]["user_embedding"] = rng.normal(0, 0.1, (ITEMS, DIM)).astype(np.float32)
    before["evidence"]["user_bias"] = rng.normal(0, 0.1, ITEMS).astype(np.float32)
    algorithm = fr.federated_reconstruction(
        model._replace(init_global=lambda key: before),
        reconstruct=fr.least_squares({"user_bias": prepared.user_ridge, "*": prepared.noise}),
        update=fr.gradient_descent(optax.sgd(1.0), batch_size=10),
        server=fr.optimizers.with_prior(optax.sgd(1e-2), {"shared/item_embedding": 5.0}, examples=11 / 2),
        second_order=True,
    )
    after = fr.train(algorithm, clients, rounds=1, clients_per_round=4).params

    table, zero = reference.Table.of(clients), reference.round_zero(reference.Table.of(clients), ITEMS, 10)
    settings = reference.Settings(dim=DIM, both=False)
    evidence = np.concatenate([before["evidence"]["user_embedding"], before["evidence"]["user_bias"][:, None]], 1)
    params = reference.Parameters(np.asarray(before["shared"]["item_embedding"]), evidence, zero.bias, zero.traits)
    ridge = np.append(np.full(DIM, zero.noise), zero.k_user)
    place = np.arange(len(table.item)) - np.repeat(table.begin[:-1], np.diff(table.begin))
    half = place < np.repeat(np.diff(table.begin) // 2, np.diff(table.begin))
    target = (table.rating - zero.mu) / zero.s
    sums = [np.zeros((ITEMS, DIM)), np.zeros((ITEMS, DIM + 1)), np.zeros(ITEMS), np.zeros(ITEMS)]
    for block in reference.blocks(table, np.arange(4), target, half, DIM, np.float64):
        reference.gradient(params, block, ridge, settings, sums)

    # Of e^2 / 2 over 11 query ratings; the library has the mean of e^2 times 11 / 2.
    moved = jax.tree.map(lambda a, b: (np.asarray(b) - np.asarray(a)) / -1e-2, before, after)
    expected = sums[0] + 5 * params.V
    np.testing.assert_allclose(moved["shared"]["item_embedding"], expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(moved["evidence"]["user_embedding"], sums[1][:, :DIM], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(moved["evidence"]["user_bias"], sums[1][:, DIM], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(moved["shared"]["item_bias"], sums[2], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("second_order", [False, True])
def test_going_both_ways_is_the_mean_of_going_each_way(clients, second_order):
    """All sizes are even, so with the examples in reverse order support and query are exchanged."""
    rows = np.concatenate([np.arange(a, b)[::-1] for a, b in zip(clients.starts, clients.ends, strict=True)])
    turned = fr.Clients({n: c[rows] for n, c in clients.columns.items()}, clients.starts, clients.ends, clients.names)
    model = fr.models.matrix_factorization(ITEMS, DIM, biases=True, init_scale=0.5, init_local_scale=0)
    model = fr.models.implicit_feedback(model, ITEMS)

    def learned(clients, **options):
        algorithm = fr.federated_reconstruction(
            model,
            reconstruct=fr.least_squares(1.0),
            update=fr.gradient_descent(optax.sgd(1.0), batch_size=10),
            server=optax.sgd(0.1),
            second_order=second_order,
            **options,
        )
        run = fr.train(algorithm, clients, rounds=1, clients_per_round=4)
        assert run.history[0]["clients"] == 4
        return run.params

    both, one, other = learned(clients, both_ways=True), learned(clients), learned(turned)
    expected = jax.tree.map(lambda a, b: (a + b) / 2, one, other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both, expected)
    assert not np.allclose(one["shared"]["item_embedding"], other["shared"]["item_embedding"])
