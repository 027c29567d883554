import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from toy_models import a_and_b, clients_of, descend, linear, one_by_one, one_round, xy

NEVER = fr.split.none()


def recon(rate=0.1, update_rate=0.1, split=None, server=None, model=None, update=None, **options):
    return fr.federated_reconstruction(
        model or linear(),
        reconstruct=descend(rate),
        update=update or descend(update_rate),
        server=server or optax.sgd(1.0),
        split=split or fr.split.alternate(),
        **options,
    )


@pytest.mark.parametrize(
    ("w", "rate", "split", "losses", "mean"),
    [
        (5.0, 0.1, fr.split.alternate(), [6.76, 14.44], 10.6),
        (5.0, 0.1, NEVER, None, 10.267466),
        (1.0, 0.0, NEVER, None, 59 / 3),
    ],
    ids=["alternate", "no split", "rate 0"],
)
def test_evaluation_gives_the_results_by_hand(w, rate, split, losses, mean):
    found = fr.evaluate(recon(rate), {"w": np.float32(w)}, a_and_b(), split=split, layout=one_by_one())
    assert found.micro["loss"] == pytest.approx(mean, rel=1e-5)
    assert found.macro["loss"] == pytest.approx(mean, rel=1e-5)
    if losses:
        np.testing.assert_allclose(found.per_client["loss"], losses, 1e-5)


def test_reconstruction_gives_the_local_parameters_by_hand():
    support = xy(([1, 3], [5, 8]), ([1, 3], [5, 9]))
    local = fr.reconstruct(recon(), {"w": np.float32(5)}, support)
    np.testing.assert_allclose(local["b"], [-1.4, -1.2], 1e-5)


@pytest.mark.parametrize(
    ("algorithm", "w", "loss"),
    [
        (lambda: recon(), 1.2, 9.36),
        (lambda: recon(update=descend(0.1, epochs=2)), 1.44, 4.8672),
        (lambda: recon(update=descend(0.1, epochs=2), joint=True), 1.2, 4.68),
        (lambda: recon(0.01, 0.01, NEVER), 0.72550715, 33.0080408),
        (lambda: recon(0.01, 0.01, NEVER, joint=True), 0.71110269, 31.8575890),
    ],
    ids=["one epoch", "two epochs", "two epochs jointly", "no split", "no split jointly"],
)
def test_a_round_gives_the_results_by_hand(algorithm, w, loss):
    run = one_round(algorithm(), a_and_b())
    assert run.params["w"] == pytest.approx(w, rel=1e-6)
    assert run.history[0]["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("server", "w"),
    [
        (optax.sgd(0.5), 0.6),
        (optax.adam(0.1, eps=0.0), 0.1),  # the first step of Adam has the length of its rate
        (optax.adagrad(0.5, initial_accumulator_value=0.0, eps=0.0), 0.5),
    ],
    ids=["sgd", "adam", "adagrad"],
)
def test_the_server_takes_the_negative_mean_as_a_gradient(server, w):
    assert one_round(recon(server=server), a_and_b()).params["w"] == pytest.approx(w, rel=1e-5)


def test_the_weight_of_a_client_is_its_query_examples_processed():
    """A has one query example, B (its data twice, support unchanged in R's eyes) has two: 1/3 and 2/3."""
    clients = xy(([1, 2, 3], [5, 6, 8]), ([1, 2, 3, 2], [5, 5, 9, 5]))
    run = one_round(recon(), clients)
    # B: support {1, 3}: b = 2.6; query (2, 5) twice: w = .96, then the error is 2*.96 + 2.6 - 5 = -.48: w = 1.152
    assert run.params["w"] == pytest.approx((1.44 + 2 * 1.152) / 3, rel=1e-5)
    assert run.history[0]["weight"] == 3
    assert run.history[0]["loss"] == pytest.approx((3.6**2 + 2.4**2 + 0.48**2) / 3, rel=1e-5)


def test_steps_are_capped_over_all_epochs():
    capped = recon(update=descend(0.1, epochs=5, steps=2))
    twice = recon(update=descend(0.1, epochs=2))
    found, expected = one_round(capped, a_and_b()), one_round(twice, a_and_b())
    assert found.params["w"] == expected.params["w"]
    assert found.history[0]["weight"] == expected.history[0]["weight"] == 4


def test_no_reconstruction_steps_leave_the_local_parameters_as_they_started():
    algorithm = fr.federated_reconstruction(
        linear(b=7.0),
        reconstruct=descend(0.1, steps=0),
        update=descend(0.1),
        server=optax.sgd(1.0),
        split=fr.split.alternate(),
    )
    run = one_round(algorithm, a_and_b())  # errors at x=2 are 1 and 2
    assert run.params["w"] == pytest.approx((-0.4 - 0.8) / 2, rel=1e-5)


def test_an_update_without_steps_is_a_skipped_round():
    run = one_round(recon(update=descend(0.1, steps=0)), a_and_b())
    assert run.params["w"] == 0
    assert run.history[0]["skipped"]


def test_one_query_epoch_is_the_closed_form_of_matrix_factorization():
    """delta_Q_j = -lr * (2/B) * (u.Q_j - y_j) * u, with B the size of that row's batch."""
    model = fr.models.matrix_factorization(12, dim=3)
    model = model._replace(init_local=lambda key: {"user_embedding": jnp.array([0.3, -0.2, 0.1])})
    generator = np.random.default_rng(3)
    clients = clients_of(
        *(
            {
                "item": generator.permutation(12)[:size].astype(np.int32),
                "rating": generator.integers(1, 6, size).astype(np.float32),
            }
            for size in (11, 7, 4)
        )
    )
    rate, batch = 0.5, 2
    algorithm = fr.federated_reconstruction(
        model,
        reconstruct=descend(0.1, batch, epochs=3),
        update=descend(rate, batch),
        server=optax.sgd(1.0),
    )
    start = one_round(algorithm, clients, rounds=0).params["item_embedding"]
    found = one_round(algorithm, clients).params["item_embedding"] - start

    expected, weight = np.zeros_like(start), 0
    for client in clients:
        item, rating = client["item"], client["rating"]
        support = (len(item) + 1) // 2
        u = np.array([0.3, -0.2, 0.1])
        for _ in range(3):
            for at in range(0, support, batch):
                here = slice(at, min(at + batch, support))
                error = start[item[here]] @ u - rating[here]
                u = u - 0.1 * 2 * (error[:, None] * start[item[here]]).mean(0)
        query = len(item) - support
        for at in range(0, query, batch):
            rows = item[support:][at : at + batch]
            error = start[rows] @ u - rating[support:][at : at + batch]
            expected[rows] -= query * rate * (2 / len(rows)) * error[:, None] * u
        weight += query
    np.testing.assert_allclose(found, expected / weight, 1e-4, 1e-6)


def test_joint_and_second_order_exclude_each_other():
    with pytest.raises(ValueError, match="`joint` and `second_order` cannot be combined"):
        recon(joint=True, second_order=True)


def test_a_model_with_local_parameters_wants_a_way_to_rebuild_them():
    algorithm = fr.federated_averaging(linear(), update=descend(0.1), server=optax.sgd(1.0))
    with pytest.raises(ValueError, match="give `reconstruct`, a solver that reconstructs them"):
        fr.reconstruct(algorithm, {"w": np.float32(0)}, {"x": np.ones(2), "y": np.ones(2)})
