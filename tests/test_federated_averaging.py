import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.cohort import Packer
from toy_models import a_and_b, assert_same_bits, descend, linear, one_round, squared_error, xy


def slope_only():
    """prediction = w * x, with nothing local."""
    return fr.Model(
        init_global=lambda key: {"w": jnp.float32(0)},
        init_local=lambda key: (),
        predict=lambda shared, local, batch: shared["w"] * batch["x"],
        loss=squared_error,
    )


def averaging(model, rate=0.1, **options):
    return fr.federated_averaging(model, update=descend(rate), server=optax.sgd(1.0), **options)


def test_a_round_without_local_parameters_is_the_one_by_hand():
    """First client: 0 -> .4 -> .88 on two examples; second: 0 -> 1.8 on one."""
    run = one_round(averaging(slope_only()), xy(([1, 2], [2, 2]), ([3], [3])))
    assert run.params["w"] == pytest.approx((2 * 0.88 + 1.8) / 3, rel=1e-5)
    assert run.history[0]["loss"] == pytest.approx((4 + 1.2**2 + 9) / 3, rel=1e-5)
    assert run.client_state == ()


def test_a_model_without_local_parameters_is_evaluated_without_reconstruction():
    clients = xy(([1, 2], [2, 2]), ([3, 1], [3, 4]))
    found = fr.evaluate(averaging(slope_only()), {"w": np.float32(1)}, clients)
    np.testing.assert_allclose(found.per_client["loss"], [0, 9], 1e-5)


def fedper_by_hand(clients, rounds, rate=0.1):
    """All clients in every round: w is averaged by examples, b stays with its owner."""
    w, kept = 0.0, np.zeros(len(clients))
    for _ in range(rounds):
        total = weight = 0.0
        for i, client in enumerate(clients):
            mine, b = w, kept[i]
            for x, y in zip(client["x"], client["y"], strict=True):
                error = mine * x + b - y
                mine, b = mine - rate * 2 * error * x, b - rate * 2 * error
            total, weight, kept[i] = total + len(client["x"]) * (mine - w), weight + len(client["x"]), b
        w += total / weight
    return w, kept


@pytest.mark.parametrize("rounds", [1, 3])
def test_owners_keep_and_train_their_local_parameters(rounds):
    clients = xy(([1, 2], [3, 4]), ([1, -1, 0.5], [0, 1, 2]), ([], []))
    w, kept = fedper_by_hand(clients, rounds)
    run = one_round(averaging(linear()), clients, rounds=rounds)
    assert run.params["w"] == pytest.approx(w, rel=1e-4)
    np.testing.assert_allclose(run.client_state["b"], kept, 1e-4)
    assert run.client_state["b"][2] == 0


@pytest.mark.slow
def test_kept_parameters_change_only_in_rounds_their_owner_takes_part_in():
    clients = xy(*(([1, 2], [i, 3]) for i in range(1, 7)))
    kept = [
        one_round(averaging(linear()), clients, rounds=r, clients_per_round=2, seed=5).client_state["b"]
        for r in range(5)
    ]
    changed = [np.flatnonzero(after != before).tolist() for before, after in itertools.pairwise(kept)]
    assert [len(who) for who in changed] == [2, 2, 2, 2]
    assert len({tuple(who) for who in changed}) > 1


def test_every_owner_starts_from_its_own_initialisation():
    model = linear()._replace(init_local=lambda key: {"b": jax.random.normal(key)})
    start = one_round(averaging(model), a_and_b(), rounds=0, seed=1).client_state["b"]
    other = one_round(averaging(model), a_and_b(), rounds=0, seed=2).client_state["b"]
    assert start[0] != start[1]
    assert (start != other).all()


def test_kept_parameters_are_not_in_what_leaves():
    algorithm = averaging(linear())
    cohort = Packer(a_and_b(), algorithm.method.needs).pack(np.arange(2))
    kept = {"b": jnp.array([0.5, 1.5])}
    params = {"w": jnp.float32(0)}
    upload, new = jax.jit(algorithm.method.client)(params, kept, cohort, jax.random.key(0))
    assert {path: delta.shape for path, delta in upload.delta.items()} == {"w": (2,)}
    assert upload.examples.shape == (2,)
    assert upload.sums.shape == (2, 1, 2)
    assert (new["b"] != kept["b"]).all()


def test_a_client_whose_training_blew_up_keeps_what_it_had():
    clients = xy(([1, 2], [3, 4]), ([1, 2], [3, 3e38]))
    run = one_round(averaging(linear(b=0.25)), clients)
    alone = one_round(averaging(linear(b=0.25)), xy(([1, 2], [3, 4])))
    assert run.client_state["b"][1] == 0.25
    assert run.history[0]["non_finite"] == 1
    assert_same_bits(run.params, alone.params)
    assert run.client_state["b"][0] == alone.client_state["b"][0]


@pytest.mark.slow
def test_lookups_change_nothing_in_averaging():
    generator = np.random.default_rng(0)
    columns = {
        "item": generator.integers(0, 6, 20).astype(np.int32),
        "rating": generator.normal(size=20).astype(np.float32),
    }
    clients = fr.Clients(columns, np.array([0, 8, 11]), np.array([8, 11, 20]))
    model = fr.models.matrix_factorization(6, dim=2, biases=True, init_scale=0.5)
    update = descend(0.1, 3)
    sparse, dense = (
        one_round(
            fr.federated_averaging(m, update=update, server=optax.sgd(1.0)), clients, rounds=2, clients_per_round=2
        )
        for m in (model, model._replace(lookups={}))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), sparse.params, dense.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), sparse.client_state, dense.client_state)


def test_a_default_cannot_be_learned_where_parameters_are_kept():
    with pytest.raises(ValueError, match="it cannot train their initial values"):
        averaging(fr.models.learned_default(linear()))
