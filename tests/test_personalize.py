import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from toy_models import clients_of, descend, linear, one_by_one, xy

ITEMS = 8


def factorizing(**options):
    return fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS, dim=2, init_scale=0.7, **options),
        reconstruct=descend(0.2, 2, epochs=3),
        update=descend(0.1, 2),
        server=optax.sgd(1.0),
    )


def rated(sizes, seed=0):
    generator = np.random.default_rng(seed)
    return clients_of(
        *(
            {
                "item": generator.permutation(ITEMS)[:n].astype(np.int32),
                "rating": generator.integers(1, 6, n).astype(np.float32),
            }
            for n in sizes
        )
    )


def starting_alike(algorithm):
    """The same algorithm with everybody's local parameters starting from one value."""
    start = {"user_embedding": jnp.array([0.1, -0.2])}
    return fr.federated_reconstruction(
        algorithm.model._replace(init_local=lambda key: start),
        reconstruct=descend(0.2, 2, epochs=3),
        update=descend(0.1, 2),
        server=optax.sgd(1.0),
    )


@pytest.fixture(scope="module")
def params():
    return factorizing().model.init_global(jax.random.key(1))


def test_one_client_gets_what_it_gets_among_many(params):
    algorithm, clients = starting_alike(factorizing()), rated([5, 3, 7])
    together = fr.reconstruct(algorithm, params, clients)["user_embedding"]
    assert together.shape == (3, 2)
    for client, mine in zip(clients, together, strict=True):
        alone = fr.reconstruct(algorithm, params, client)
        np.testing.assert_allclose(alone["user_embedding"], mine, 1e-5)


def test_clients_come_back_in_the_order_they_went_in(params):
    algorithm, clients = starting_alike(factorizing()), rated([2, 7, 0, 5, 3, 6, 1])
    straight = fr.reconstruct(algorithm, params, clients)["user_embedding"]
    order = np.array([6, 2, 0, 5, 1, 4, 3])
    turned = fr.reconstruct(algorithm, params, clients.take(order))["user_embedding"]
    np.testing.assert_allclose(turned, straight[order], 1e-5)


def test_predictions_with_reconstructed_parameters_have_the_loss_that_evaluation_reports(params):
    algorithm, clients = factorizing(), rated([6, 4, 7])
    found = fr.evaluate(algorithm, params, clients, seed=4, layout=one_by_one())
    support = fr.Clients(clients.columns, clients.starts, clients.starts + (clients.sizes + 1) // 2)
    local = fr.reconstruct(algorithm, params, support, seed=4)
    for i, client in enumerate(clients):
        query = slice((len(client["item"]) + 1) // 2, None)
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], local)
        predictions = fr.predict(algorithm.model, params, mine, {"item": client["item"][query]})
        loss = np.mean((predictions - client["rating"][query]) ** 2)
        assert found.per_client["loss"][i] == pytest.approx(loss, rel=1e-4)


def test_the_seed_is_that_of_the_initialisation(params):
    one, same, other = (
        fr.reconstruct(factorizing(), params, rated([2])[0], seed=seed)["user_embedding"] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).all()


def test_features_that_the_model_does_not_read_do_no_harm():
    algorithm = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    columns = {"x": np.ones(2), "y": np.full(2, 3.0), "title": np.array(["a", "b"]), "time": np.array([2**40, 1])}
    found = fr.reconstruct(algorithm, {"w": np.float32(1)}, columns)
    assert found["b"] == pytest.approx(0.4 + 0.32, rel=1e-5)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="`columns` must have the same number of rows"):
        fr.reconstruct(factorizing(), {}, {"item": np.zeros(2, np.int32), "rating": np.zeros(1)})


SCORES = np.array([0.1, 0.9, 0.5, 0.9, np.nan, -1.0])


def scoring():
    """A model whose prediction for an item is that item's global score."""
    return fr.Model(
        init_global=lambda key: {"score": jnp.asarray(SCORES, jnp.float32)},
        init_local=lambda key: (),
        predict=lambda g, local, batch: g["score"][batch["item"]],
        loss=lambda p, batch: (p, jnp.ones_like(p)),
    )


def recommend(**options):
    params = {"score": np.asarray(SCORES, np.float32)}
    return fr.recommend.recommend_items(scoring(), params, (), num_items=len(SCORES), **options)


@pytest.mark.parametrize(
    ("options", "items"),
    [
        ({"n": 3}, [1, 3, 2]),
        ({"n": 10}, [1, 3, 2, 0, 5]),
        ({"n": 2, "exclude": [1]}, [3, 2]),
        ({"n": 10, "exclude": np.array([3, 1, 1, 5])}, [2, 0]),
        ({"n": 1, "exclude": range(6)}, []),
    ],
    ids=["best first", "fewer than n", "without the rated", "few left", "none left"],
)
def test_the_best_items_not_rated_are_recommended(options, items):
    found = recommend(**options)
    assert found.items.tolist() == items
    np.testing.assert_allclose(found.scores, SCORES[items], 1e-6)


def test_recommending_nothing_is_refused():
    with pytest.raises(ValueError, match="`n`"):
        recommend(n=0)


@pytest.mark.parametrize("items", [[6], [-1]])
def test_an_item_that_does_not_exist_is_refused(items):
    with pytest.raises(ValueError, match="`exclude`"):
        recommend(exclude=items)


def test_recommendations_follow_the_users_own_parameters(params):
    table = np.asarray(params["item_embedding"])
    for user in ([1.0, 0.0], [0.0, -1.0]):
        local = {"user_embedding": jnp.array(user)}
        found = fr.recommend.recommend_items(factorizing().model, params, local, num_items=ITEMS, n=ITEMS)
        assert found.items.tolist() == np.argsort(-table @ user, kind="stable").tolist()


def test_a_prediction_is_an_array_of_numpy():
    found = fr.predict(linear(), {"w": np.float32(2)}, {"b": np.float32(1)}, {"x": [1.0, 2.0]})
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, [3, 5])


def test_nobody_s_parameters_depend_on_who_else_is_there(params):
    algorithm = factorizing()
    clients = rated([4, 6])
    more = fr.reconstruct(algorithm, params, rated([4, 6, 2, 3]))["user_embedding"]
    np.testing.assert_allclose(fr.reconstruct(algorithm, params, clients)["user_embedding"], more[:2], 1e-5)


def test_reconstruction_uses_no_more_examples_than_its_steps_allow():
    limited = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.5, 1, steps=2), update=descend(0.1), server=optax.sgd(1.0)
    )
    found = fr.reconstruct(limited, {"w": np.float32(0)}, xy(([0, 0, 0], [1, 7, 100])))
    assert found["b"][0] == pytest.approx(7)
