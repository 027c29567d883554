"""Baselines for ratings: by hand, and on the query that `evaluate` measures on."""

import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.model import Model
from fedrecon._src.core.split import at_most
from fedrecon._src.recommend import baselines
from fedrecon._src.recommend.cold_start import rating_baselines_after
from fedrecon._src.recommend.round_zero import estimate_ratings
from fedrecon.models import matrix_factorization

TRAIN = Clients.from_columns(
    {"item": np.array([0, 1, 0, 2], np.int32), "rating": np.array([1.0, 3.0, 5.0, 5.0], np.float32)},
    client=np.array([7, 7, 8, 8]),
)
TEST = Clients.from_columns(
    {"item": np.array([0, 1, 3, 0], np.int32), "rating": np.array([4.0, 2.0, 1.0, 5.0], np.float32)},
    client=np.array([1, 1, 2, 2]),
)


def planted(users=300, items=60, seed=0):
    """Return ratings of users with tastes in two dimensions."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(users), 20)
    item = np.concatenate([rng.choice(items, 20, replace=False) for _ in range(users)])
    tastes, kinds = rng.normal(size=(users, 2)), rng.normal(size=(items, 2))
    rating = 3 + (tastes[owner] * kinds[item]).sum(1) + rng.normal(0, 0.3, len(item))
    clients = Clients.from_columns({"item": item.astype(np.int32), "rating": rating.astype(np.float32)}, client=owner)
    return clients.split_clients(0.8, 0.2, seed=0)


def test_means_by_hand():
    # Query: client 1 rates item 1 with 2, client 2 item 0 with 5. Means: all 3.5, item 0 and 1 both 3.
    found = baselines.rating_baselines(TRAIN, TEST)
    assert (found.clients, found.examples) == (2, 2)
    assert found.table["global mean"]["rmse"] == pytest.approx(1.5)
    assert found.table["item mean"]["mae"] == pytest.approx((1 + 2) / 2)
    assert found.table["item mean"]["accuracy"] == 0
    assert baselines.rating_baselines(TRAIN, TEST, tolerance=1).table["item mean"]["accuracy"] == 0.5


def test_after_so_many_ratings_baselines_are_as_if_measured_alone():
    train, test = planted()
    found = rating_baselines_after(baselines.fit_baselines(train, 60), test, fr.split.half())
    few = baselines.rating_baselines(train, test, split=at_most(2, fr.split.half()), num_items=60).table
    assert {name: row["after 2"] for name, row in found.items()} == {name: row["rmse"] for name, row in few.items()}


def test_means_are_over_these_clients_alone():
    np.testing.assert_allclose(baselines.item_means(TRAIN.take([0]), 4), [1.0, 3.0, 2.0, 2.0])


def test_biases_are_those_of_round_zero_and_a_damped_mean():
    prepared = estimate_ratings(TRAIN, 4, trait_passes=0)
    support = np.array([prepared.standardize(4.0) - prepared.item_bias[0], prepared.standardize(1.0)])
    mine = support / (1 + prepared.user_ridge)
    guess = prepared.restore(prepared.item_bias[[1, 0]] + mine)
    found = baselines.rating_baselines(TRAIN, TEST).table["item + user bias"]
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((guess - [2, 5]) ** 2)))


@pytest.mark.parametrize("split", [fr.split.half(), fr.split.fraction(0.8), fr.split.redrawn(fr.split.half())])
def test_the_query_is_that_of_evaluate(split):
    train, test = planted()
    means = baselines.item_means(train, 60).astype(np.float32)
    ratings = matrix_factorization(60, 1)
    model = Model(
        init_global=lambda key: means,
        init_local=lambda key: (),
        predict=lambda means, local, batch: means[batch["item"]],
        loss=ratings.loss,
        metrics=ratings.metrics,
    )
    update = fr.gradient_descent(optax.sgd(0.0), batch_size=1)
    algorithm = fr.federated_averaging(model, update=update, server=optax.sgd(0.0))
    evaluated = fr.evaluate(algorithm, means, test, split=split).micro
    found = baselines.rating_baselines(train, test, split=split).table["item mean"]
    assert found["rmse"] == pytest.approx(evaluated["rmse"], rel=1e-5)
    assert found["accuracy"] == pytest.approx(evaluated["accuracy"], rel=1e-5)


def test_clients_without_query_examples_are_an_error():
    with pytest.raises(ValueError, match="query"):
        baselines.rating_baselines(TRAIN, TEST, split=fr.split.support_only())
