"""Ratings in their own scale: the unit does not matter, predictions stay inside, training does not see the ends."""

import jax
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon.models import matrix_factorization, standardize

pytestmark = pytest.mark.slow

ITEMS = 6


def clients_of(unit=1.0, zero=0.0, users=8):
    rng = np.random.default_rng(0)
    item = np.concatenate([rng.permutation(ITEMS) for _ in range(users)])
    rating = zero + unit * rng.integers(1, 6, len(item))
    columns = {"item": item.astype(np.int32), "rating": rating.astype(np.float32)}
    return fr.Clients.from_columns(columns, client=np.repeat(np.arange(users), ITEMS))


def algorithm_of(clients, **ends):
    rating = clients.columns["rating"].astype(np.float64)
    model = matrix_factorization(ITEMS, 2, biases=True, init_local_scale=0)
    model = standardize(model, rating.mean(), rating.std(), **ends)
    return fr.federated_reconstruction(
        model,
        reconstruct=fr.least_squares({"user_bias": 2.0, "*": 1.0}),
        update=fr.gradient_descent(optax.sgd(1.0), batch_size=ITEMS),
        server=fr.optimizers.with_prior(optax.adam(0.05), {"item_embedding": 1.0}, examples=len(rating)),
        second_order=True,
    )


def trained(clients, **ends):
    algorithm = algorithm_of(clients, **ends)
    return algorithm, fr.train(algorithm, clients, rounds=5, clients_per_round=8, seed=0).params


def test_the_unit_of_the_ratings_does_not_matter():
    one, other = clients_of(), clients_of(20.0, -7.0)
    (first, params), (second, others) = trained(one), trained(other)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    rmse = [fr.evaluate(a, p, c).micro["rmse"] for a, p, c in ((first, params, one), (second, others, other))]
    assert rmse[1] == pytest.approx(20 * rmse[0], rel=1e-3)


def test_predictions_stay_between_the_ends():
    clients = clients_of()
    algorithm = algorithm_of(clients, low=2.5, high=3.0)
    params = {
        **algorithm.params(algorithm.init(jax.random.key(0))),
        "item_bias": np.linspace(-3, 3, ITEMS).astype(np.float32),
    }
    local = fr.reconstruct(algorithm, params, clients)
    found = np.asarray(algorithm.model.predict(params, jax.tree.map(lambda x: x[0], local), clients[0]))
    assert found.min() == 2.5
    assert found.max() == 3.0


def test_training_and_reconstruction_do_not_see_the_ends():
    clients = clients_of()
    (wide, one), (narrow, other) = trained(clients), trained(clients, low=2.9, high=3.1)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*(jax.tree.leaves(fr.reconstruct(x, one, clients)) for x in (wide, narrow)), strict=True):
        np.testing.assert_array_equal(a, b)
    found = fr.evaluate(narrow, one, clients)
    rating = np.concatenate([c["rating"][3:] for c in clients])
    assert found.micro["rmse"] == pytest.approx(np.sqrt(np.mean((rating - 3.0) ** 2)), abs=0.1)
    assert found.micro["rmse"] != pytest.approx(fr.evaluate(wide, one, clients).micro["rmse"], abs=1e-3)


def test_item_biases_start_where_they_are_told():
    start = np.arange(ITEMS, dtype=np.float32)
    model = matrix_factorization(ITEMS, 2, biases=True, init_item_bias=start)
    np.testing.assert_array_equal(model.init_global(jax.random.key(0))["item_bias"], start)
    with pytest.raises(ValueError, match=r"`init_item_bias`.*got shape \(3,\)"):
        matrix_factorization(ITEMS, 2, biases=True, init_item_bias=start[:3])


@pytest.mark.parametrize(
    ("mean", "deviation", "ends"), [(0.0, 0.0, {}), (float("nan"), 1.0, {}), (0.0, 1.0, {"low": 2.0, "high": 1.0})]
)
def test_a_scale_that_is_none_is_an_error(mean, deviation, ends):
    with pytest.raises(ValueError, match="must"):
        standardize(matrix_factorization(ITEMS, 2), mean, deviation, **ends)
