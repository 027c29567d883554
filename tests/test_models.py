import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.model import finish, measure
from fedrecon._src.recommend.cold_start import shrink_evidence
from toy_models import a_and_b, assert_close, assert_same_bits, clients_of, descend, linear, one_by_one, one_round, xy

ITEMS = np.array([2, 0, 2])


def parameters(biases):
    shared = {"item_embedding": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}
    local = {"user_embedding": np.array([0.5, -1.0])}
    if biases:
        shared |= {"item_bias": np.array([0.1, 0.2, 0.3]), "mean": np.float32(3.5)}
        local |= {"user_bias": np.float32(0.01)}
    return jax.tree.map(jnp.float32, (shared, local))


@pytest.mark.parametrize(
    ("biases", "expected"), [(False, [-3.5, -1.5, -3.5]), (True, [0.31, 2.11, 0.31])], ids=["plain", "biases"]
)
def test_a_prediction_is_the_product_of_embeddings_and_the_biases(biases, expected):
    model = fr.models.matrix_factorization(3, dim=2, biases=biases)
    np.testing.assert_allclose(fr.predict(model, *parameters(biases), {"item": ITEMS}), expected, 1e-5)


def test_the_paper_s_model_has_as_many_parameters_as_the_paper_says():
    model = fr.models.matrix_factorization(3706)
    shared, local = (jax.tree.leaves(init(jax.random.key(0))) for init in (model.init_global, model.init_local))
    assert sum(x.size for x in shared) == 185_300
    assert sum(x.size for x in local) == 50
    for leaf in shared + local:
        assert float(jnp.abs(leaf).max()) <= 0.05
    assert float(shared[0].std()) == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert model.lookups == {"item_embedding": "item"}


def test_biases_start_at_zero_and_the_mean_at_its_initial_value():
    model = fr.models.matrix_factorization(4, dim=2, biases=True, init_mean=3.2)
    shared = model.init_global(jax.random.key(0))
    assert shared["mean"] == np.float32(3.2)
    assert (shared["item_bias"] == 0).all()
    assert model.init_local(jax.random.key(0))["user_bias"] == 0
    assert model.lookups == {"item_embedding": "item", "item_bias": "item"}


def test_a_prediction_within_half_a_star_is_accurate():
    model = fr.models.matrix_factorization(3)
    batch = {"rating": jnp.array([1.0, 3.0, 5.0, 4.0])}
    predictions = jnp.array([1.5, 2.4, 5.4, 4.0])
    _, sums = measure(model, predictions, batch, jnp.ones(4, bool))
    found = finish(model, sums)
    assert found["accuracy"] == 0.75
    assert found["rmse"] ** 2 == pytest.approx(found["loss"]) == pytest.approx((0.25 + 0.36 + 0.16) / 4)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_a_model_without_size_is_refused(sizes):
    with pytest.raises(ValueError, match=r"`num_items`|`dim`"):
        fr.models.matrix_factorization(*sizes)


def defaulting(rate=0.1, **update):
    return fr.federated_reconstruction(
        fr.models.learned_default(linear()),
        reconstruct=descend(rate),
        update=descend(0.1, **update),
        server=optax.sgd(1.0),
        split=fr.split.alternate(),
    )


@pytest.mark.parametrize(
    ("epochs", "w", "default"),
    [(1, 1.2, (0.72 + 0.48) / 2), (2, 1.44, (0.72 + 0.144 + 0.48 + 0.096) / 2)],
)
def test_the_default_receives_the_gradient_of_the_rebuilt_parameters(epochs, w, default):
    """Errors on query are -3.6 and -2.4, then -.72 and -.48; the gradient in b is twice that."""
    run = one_round(defaulting(epochs=epochs), a_and_b())
    assert run.params["shared"]["w"] == pytest.approx(w, rel=1e-5)
    assert run.params["default_local"]["b"] == pytest.approx(default, rel=1e-5)


def test_reconstruction_starts_from_the_default():
    """From b=2 at w=0: support (1, 5) then (3, 8) gives 2.6, then 3.68; query (2, 6)."""
    params = {"shared": {"w": np.float32(0)}, "default_local": {"b": np.float32(2)}}
    found = fr.evaluate(
        defaulting(), params, xy(([1, 2, 3], [5, 6, 8])), split=fr.split.alternate(), layout=one_by_one()
    )
    assert found.micro["loss"] == pytest.approx((3.68 - 6) ** 2, rel=1e-5)


DEFAULT = {"shared": {"w": np.float32(1)}, "default_local": {"b": np.float32(2.5)}}


def test_clients_with_no_data_are_served_by_the_default():
    found = fr.reconstruct(defaulting(), DEFAULT, xy(([], []), ([1], [5]), ([], [])))
    assert found["b"][0] == found["b"][2] == 2.5
    assert found["b"][1] != 2.5


def test_one_client_with_no_data_is_served_by_the_default():
    nothing = np.zeros(0, np.float32)
    found = fr.reconstruct(defaulting(), DEFAULT, {"x": nothing, "y": nothing})
    assert found["b"] == 2.5


def test_a_learned_default_keeps_lookups_sparse_and_exact():
    model = fr.models.matrix_factorization(6, dim=2, init_scale=0.5)
    assert fr.models.learned_default(model).lookups == {"shared/item_embedding": "item"}
    clients = fr.Clients(
        {"item": np.array([0, 1, 2, 3, 1, 0, 2], np.int32), "rating": np.arange(7, dtype=np.float32)},
        np.array([0, 4]),
        np.array([4, 7]),
    )
    sparse, dense = (
        one_round(
            fr.federated_reconstruction(
                fr.models.learned_default(m), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
            ),
            clients,
        ).params
        for m in (model, model._replace(lookups={}))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), sparse, dense)
    assert (sparse["default_local"]["user_embedding"] != 0).all()


def test_a_default_is_learned_once():
    with pytest.raises(ValueError, match="the model already has a learned default"):
        fr.models.learned_default(fr.models.learned_default(linear()))


def test_one_seed_initialises_one_model():
    model = fr.models.learned_default(fr.models.matrix_factorization(4, dim=3))
    assert_same_bits(model.init_global(jax.random.key(3)), model.init_global(jax.random.key(3)))


def rated(*clients):
    """Clients of (item, rating) lists."""
    return clients_of(
        *({"item": np.array(i, np.int32), "rating": np.array(r, np.float32)} for i, r in clients),
    )


def counting(num_items=4):
    """A model whose prediction is its one local number, with implicit feedback of items."""
    model = fr.Model(
        init_global=lambda key: {"zero": jnp.float32(0)},
        init_local=lambda key: {"b": jnp.float32(1)},
        predict=lambda shared, local, batch: shared["zero"] + local["b"] + 0.0 * batch["rating"],
        loss=lambda p, batch: ((p - batch["rating"]) ** 2, jnp.ones_like(p)),
    )
    return fr.models.implicit_feedback(model, num_items)


def test_implicit_feedback_adds_the_rows_of_support_over_the_root_of_their_number():
    params = {"shared": {"zero": jnp.float32(0)}, "evidence": {"b": jnp.array([1.0, 10.0, 100.0, 1000.0])}}
    still = fr.federated_reconstruction(
        counting(), reconstruct=descend(0.0), update=descend(0.1), server=optax.sgd(1.0)
    )
    found = fr.reconstruct(still, params, rated(([0, 2, 0], [1, 2, 3]), ([3], [5]), ([], [])))
    np.testing.assert_allclose(found["b"], [1 + 102 / 2, 1 + 1000 / 2**0.5, 1], 1e-6)


@pytest.mark.parametrize("second_order", [False, True])
def test_implicit_feedback_receives_the_gradient_of_what_it_moved(second_order):
    """Support items 0 and 1 move the start by (e0 + e1) / sqrt(3); R takes one step of .1 towards a mean of 2."""
    algorithm = fr.federated_reconstruction(
        counting(),
        reconstruct=descend(0.1, 2),
        update=descend(0.5, 2),
        server=optax.sgd(1.0),
        second_order=second_order,
    )
    run = one_round(algorithm, rated(([0, 1, 2, 3], [1, 3, 4, 6])))
    rebuilt = 1 + 0.2 * (2 - 1)
    slope = 2 * (rebuilt - 5)  # of the query loss in b
    by_row = slope / 3**0.5 * (0.8 if second_order else 1.0)  # a fifth of the start is forgotten by R's step
    np.testing.assert_allclose(run.params["evidence"]["b"], [-0.5 * by_row] * 2 + [0, 0], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("second_order", [False, True])
def test_implicit_feedback_keeps_lookups_sparse_and_exact(second_order):
    model = fr.models.matrix_factorization(6, dim=2, init_scale=0.5, biases=True)
    clients = rated(([0, 1, 2, 3, 5], [1, 2, 3, 4, 5]), ([1, 0, 2], [5, 4, 1]))

    def params(lookups):
        wrapped = fr.models.implicit_feedback(fr.models.learned_default(model), 6)
        assert wrapped.lookups["evidence/user_embedding"] == "item"
        algorithm = fr.federated_reconstruction(
            wrapped if lookups else wrapped._replace(lookups={}),
            reconstruct=fr.least_squares(1.0),
            update=descend(0.1, 2),
            server=optax.sgd(1.0),
            split=fr.split.redrawn(fr.split.half()),
            second_order=second_order,
        )
        return one_round(algorithm, clients, rounds=2).params

    sparse, dense = params(True), params(False)
    assert_close(sparse, dense)
    assert (sparse["evidence"]["user_embedding"][4] == 0).all(), "a row that nobody has"
    assert (sparse["evidence"]["user_embedding"][[0, 1, 2]] != 0).all()


def test_evidence_that_reads_a_table_whole_is_found_out():
    model = fr.models.implicit_feedback(fr.models.matrix_factorization(6, dim=2), 6)
    dishonest = model._replace(
        evidence=lambda params, support, mask: {"user_embedding": params["evidence"]["user_embedding"][3] * 2.0}
    )
    algorithm = fr.federated_reconstruction(
        dishonest, reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    with pytest.raises(ValueError, match="is only read by rows at item"):
        one_round(algorithm, rated(([0, 1, 2], [1, 2, 3])))


def test_evidence_needs_local_parameters_and_is_taken_once():
    with pytest.raises(ValueError, match="must not use implicit feedback already"):
        fr.models.implicit_feedback(counting(), 4)
    with pytest.raises(ValueError, match="must have local parameters"):
        fr.models.implicit_feedback(linear()._replace(init_local=lambda key: {}), 4)


@pytest.mark.parametrize(("rating", "left"), [(0.0, 0.0), (1.0, 1.0)], ids=["misleads", "helps"])
def test_implicit_feedback_of_the_bias_counts_only_where_it_helps_validation_users(rating, left):
    """Evidence says that everybody rates .5 higher; the mean is 0, and all ratings are the same."""
    model = fr.models.implicit_feedback(fr.models.matrix_factorization(4, dim=1, biases=True), 4)
    solver, server = fr.least_squares(1.0), optax.sgd(1.0)
    algorithm = fr.federated_reconstruction(model, reconstruct=solver, update=descend(0.1), server=server)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), model.init_global(jax.random.key(0)))
    params["evidence"]["user_bias"] += 0.5
    columns = {"item": np.tile(np.arange(4, dtype=np.int32), 60), "rating": np.full(240, rating, np.float32)}
    clients = fr.Clients.from_columns(columns, client=np.repeat(np.arange(60), 4))
    shrunk = shrink_evidence(algorithm, params, clients, fr.split.half())
    assert shrunk["evidence"]["user_bias"].tolist() == [0.5 * left] * 4
    few = shrink_evidence(algorithm, params, clients.take(np.arange(40)), fr.split.half())
    assert few is params
