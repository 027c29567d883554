"""What leaves a client: what is in it, what is not, and that second-order gradients are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.algorithms.validation import features_used
from fedrecon._src.core.cohort import Packer
from fedrecon._src.core.pytrees import flatten, path_name
from toy_models import (
    assert_close,
    assert_same_bits,
    clients_of,
    descend,
    linear,
    lookup_clients,
    lookup_model,
    one_round,
    squared_error,
    xy,
)


def uploads(algorithm, params, clients):
    """What every client of a population returns, and the cohort it was packed in."""
    needs = algorithm.method.needs._replace(columns=features_used(algorithm.model, clients))
    cohort = Packer(clients, needs).pack(np.arange(len(clients)))
    upload, _ = jax.jit(algorithm.method.client)(params, (), cohort, jax.random.key(7))
    return jax.tree.map(np.asarray, upload), cohort


def recon(model, reconstruct=None, update=None, **options):
    return fr.federated_reconstruction(
        model,
        reconstruct=reconstruct or descend(0.1, 2),
        update=update or descend(0.1, 2),
        server=optax.sgd(1.0),
        **options,
    )


def with_support_of(clients, other, sides=2):
    """Clients with the first half of their examples, the support, taken from other clients of the same sizes."""
    columns = {name: column.copy() for name, column in clients.columns.items()}
    for start, end in zip(clients.starts, clients.ends, strict=True):
        half = start + (end - start + 1) // sides
        for name in columns:
            columns[name][start:half] = other.columns[name][start:half]
    return fr.Clients(columns, clients.starts, clients.ends)


@pytest.mark.parametrize("joint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_leaf_that_leaves_is_a_delta_of_a_global_parameter_or_a_sum(joint):
    model, clients = lookup_model(), lookup_clients([6, 9, 4])
    params = model.init_global(jax.random.key(0))
    upload, cohort = uploads(recon(model, joint=joint), params, clients)
    shapes = {path_name(p): leaf.shape for p, leaf in jax.tree_util.tree_flatten_with_path(upload)[0]}
    items, tags = cohort.rows["item"].shape[1], cohort.rows["main_tag,tags"].shape[1]
    assert shapes == {
        "parts/delta/item/ids": (3, items),
        "parts/delta/item/values": (3, items, 2),
        "parts/delta/item/count": (3,),
        "parts/delta/item_bias/ids": (3, items),
        "parts/delta/item_bias/values": (3, items),
        "parts/delta/item_bias/count": (3,),
        "parts/delta/tag/ids": (3, tags),
        "parts/delta/tag/values": (3, tags, 2),
        "parts/delta/tag/count": (3,),
        "parts/delta/mix/dense": (3, 2),
        "examples": (3,),
        "sums": (3, 2, 2),  # loss and one metric: total and weight
    }
    assert set(upload.delta) == set(flatten(params)[0])
    assert not set(upload.delta) & set(flatten(model.init_local(jax.random.key(0)))[0])


def test_a_client_without_lookups_returns_deltas_in_the_shapes_of_the_global_parameters():
    model, clients = lookup_model(lookups=False), lookup_clients([6, 9, 4])
    params = model.init_global(jax.random.key(0))
    upload, _ = uploads(recon(model), params, clients)
    assert {path: delta.shape[1:] for path, delta in upload.delta.items()} == {
        path: leaf.shape for path, leaf in flatten(params)[0].items()
    }


@pytest.mark.parametrize("joint", [False, True])
def test_another_support_with_the_same_reconstruction_returns_the_same_bits(joint):
    """One full-batch step of R depends on mean(y - w * x) alone, and all numbers here are exact in binary."""
    algorithm = recon(linear(), descend(0.25, 2), descend(0.25, 1), joint=joint)
    params = {"w": jnp.float32(2)}
    one = xy(([1, 3, 2, 4], [5, 8, 6, 1]))
    same = xy(([10, -4, 2, 4], [22, -5, 6, 1]))
    other = xy(([10, -4, 2, 4], [22, -4, 6, 1]))
    expected = uploads(algorithm, params, one)[0]
    assert_same_bits(uploads(algorithm, params, same)[0], expected)
    assert (uploads(algorithm, params, other)[0].delta["w"] != expected.delta["w"]).all()


def test_a_support_that_reconstruction_does_not_read_leaves_no_trace():
    """With no steps of R, anything in the upload that still followed the support would have leaked."""
    clients, other = lookup_clients([6, 9, 4], seed=1), lookup_clients([6, 9, 4], seed=2)
    algorithm = recon(lookup_model(), descend(0.1, 2, steps=0))
    params = algorithm.model.init_global(jax.random.key(0))
    one, cohort = uploads(algorithm, params, clients)
    two, replaced = uploads(algorithm, params, with_support_of(clients, other))
    assert not np.array_equal(cohort.support.columns["item"], replaced.support.columns["item"])
    assert_same_bits(two, one)
    assert_same_bits((replaced.rows, replaced.num_rows), (cohort.rows, cohort.num_rows))


def test_least_squares_on_the_same_support_in_another_order_returns_the_same():
    model = fr.models.matrix_factorization(8, dim=2, init_scale=1.0)
    model = model._replace(init_local=lambda key: {"user_embedding": jnp.zeros(2)})
    algorithm = recon(model, fr.least_squares(0.1))
    item = np.array([0, 1, 2, 3, 4, 5], np.int32)
    rating = np.array([1, 5, 3, 2, 4, 4], np.float32)
    params = model.init_global(jax.random.key(0))
    turned = [2, 0, 1, 3, 4, 5]
    one, _ = uploads(algorithm, params, clients_of({"item": item, "rating": rating}))
    two, _ = uploads(algorithm, params, clients_of({"item": item[turned], "rating": rating[turned]}))
    assert_close(two, one, 1e-4)


def items_then(query):
    support = {"item": np.array([0, 1, 0], np.int32), "rating": np.array([5, 3, 4], np.float32)}
    return clients_of({name: np.concatenate([support[name], query[name]]) for name in support})


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)], ids=["rows", "copy"])
def test_items_rated_in_support_alone_do_not_move_in_first_order(optimizer):
    model = fr.models.matrix_factorization(6, dim=2, init_scale=0.5)
    algorithm = recon(model, update=fr.gradient_descent(optimizer, batch_size=2))
    clients = items_then({"item": np.array([1, 4, 5], np.int32), "rating": np.array([2, 2, 5], np.float32)})
    start = one_round(algorithm, clients, rounds=0).params["item_embedding"]
    moved = (one_round(algorithm, clients).params["item_embedding"] != start).any(1)
    assert moved.tolist() == [False, True, False, False, True, True]


@pytest.mark.slow
def test_items_rated_in_support_alone_do_move_in_second_order():
    model = fr.models.matrix_factorization(6, dim=2, init_scale=0.5)
    clients = items_then({"item": np.array([1, 4, 5], np.int32), "rating": np.array([2, 2, 5], np.float32)})
    algorithm = recon(model, second_order=True)
    start = one_round(algorithm, clients, rounds=0).params["item_embedding"]
    moved = (one_round(algorithm, clients).params["item_embedding"] != start).any(1)
    assert moved.tolist() == [True, True, False, False, True, True]


CURVED_SUPPORT = (np.array([0.5, -1.0, 1.5, 0.3, 0.9]), np.array([1.0, 0.2, -0.5, 0.8, 0.4]))
CURVED_QUERY = (np.array([0.7, -0.4, 1.1]), np.array([0.1, 0.9, 0.6]))
START = 0.2


def curved():
    """prediction = tanh(w * x) * b + w * b**2: nothing about R's dependence on w is simple."""
    return fr.Model(
        init_global=lambda key: {"w": jnp.float32(0.8)},
        init_local=lambda key: {"b": jnp.float32(START)},
        predict=lambda shared, local, batch: (
            jnp.tanh(shared["w"] * batch["x"]) * local["b"] + shared["w"] * local["b"] ** 2
        ),
        loss=squared_error,
    )


def query_loss(w, start, steps_rate=0.1, epochs=2, batch=2, through=None):
    """The loss of the curved model on query after R on support, in float64; with `through`, R is run at that w."""
    x, y = CURVED_SUPPORT
    b, v = start, w if through is None else through
    for _ in range(epochs):
        for at in range(0, len(x), batch):
            here = slice(at, at + batch)
            slope = np.tanh(v * x[here])
            error = slope * b + v * b**2 - y[here]
            b = b - steps_rate * np.mean(2 * error * (slope + 2 * v * b))
    x, y = CURVED_QUERY
    return np.mean((np.tanh(w * x) * b + w * b**2 - y) ** 2)


def difference(function, at, step=1e-5):
    return (function(at + step) - function(at - step)) / (2 * step)


def curved_clients():
    (xs, ys), (xq, yq) = CURVED_SUPPORT, CURVED_QUERY
    return xy((np.concatenate([xs, xq]), np.concatenate([ys, yq])))


def curved_delta(model, second_order, steps=1):
    algorithm = recon(
        model,
        descend(0.1, 2, epochs=2),
        descend(0.3, 3, epochs=steps),
        split=fr.split.fraction(5 / 8),
        second_order=second_order,
    )
    params = model.init_global(jax.random.key(0))
    return uploads(algorithm, params, curved_clients())[0]


@pytest.mark.slow
def test_second_order_gradients_equal_finite_differences():
    found = curved_delta(curved(), second_order=True)
    expected = -0.3 * difference(lambda w: query_loss(w, START), 0.8)
    np.testing.assert_allclose(found.delta["w"], [expected], 1e-4)
    np.testing.assert_allclose(found.sums[0, 0, 0] / 3, query_loss(0.8, START), 1e-5)


def test_first_order_gradients_hold_the_reconstruction_fixed():
    found = curved_delta(curved(), second_order=False)
    expected = -0.3 * difference(lambda w: query_loss(w, START, through=0.8), 0.8)
    second = -0.3 * difference(lambda w: query_loss(w, START), 0.8)
    np.testing.assert_allclose(found.delta["w"], [expected], 1e-4)
    assert abs(expected - second) > 0.1 * abs(second)


@pytest.mark.slow
def test_second_order_reconstructs_anew_at_every_step_of_the_update():
    w = 0.8
    for _ in range(3):
        w -= 0.3 * difference(lambda v: query_loss(v, START), w)
    np.testing.assert_allclose(curved_delta(curved(), True, steps=3).delta["w"], [w - 0.8], 1e-4)


@pytest.mark.slow
def test_second_order_gradients_of_a_learned_default_equal_finite_differences():
    found = curved_delta(fr.models.learned_default(curved()), second_order=True)
    by_w = -0.3 * difference(lambda w: query_loss(w, START), 0.8)
    by_start = -0.3 * difference(lambda start: query_loss(0.8, start), START)
    np.testing.assert_allclose(found.delta["shared/w"], [by_w], 1e-4)
    np.testing.assert_allclose(found.delta["default_local/b"], [by_start], 1e-4)


@pytest.mark.slow
def test_second_order_of_least_squares_is_differentiated_too():
    """b = s / (n + ridge) * ... is known in closed form for the linear model."""
    algorithm = recon(linear(), fr.least_squares(1.0), descend(0.1, 2), second_order=True)
    clients = xy(([1, 3, 2, 4], [5, 8, 6, 1]))
    found, _ = uploads(algorithm, {"w": jnp.float32(0.5)}, clients)

    def loss(w):
        b = ((5 - w * 1) + (8 - w * 3)) / (2 + 1.0)
        return ((w * 2 + b - 6) ** 2 + (w * 4 + b - 1) ** 2) / 2

    np.testing.assert_allclose(found.delta["w"], [-0.1 * difference(loss, 0.5)], 1e-4)


@pytest.mark.slow
def test_second_order_with_lookups_equals_second_order_without():
    clients = lookup_clients([6, 3, 1, 8], seed=4)
    sparse, dense = (
        one_round(recon(lookup_model(lookups), descend(0.1, 2), descend(0.1, 2), second_order=True), clients)
        for lookups in (True, False)
    )
    assert_close(sparse.params, dense.params)
    assert sparse.history[0]["loss"] == pytest.approx(dense.history[0]["loss"], rel=1e-5)
