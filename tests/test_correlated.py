"""Correlated noise: the dense matrix form, what it costs, and what must be promised for it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.upload import Total
from fedrecon._src.privacy.accounting import Release, epsilon_of
from fedrecon._src.privacy.ledger import Ledger
from fedrecon._src.privacy.noise import coefficients, correlate, nothing_yet
from fedrecon._src.server.gaussian import draw_noise
from fedrecon._src.simulation.sampling import sample
from toy_models import descend, linear, one_by_one, xy

BANDS, ROUNDS = 3, 7


def matrix(bands, rounds):
    return sum(value * np.eye(rounds, k=-k) for k, value in enumerate(bands))


@pytest.fixture(scope="module")
def bands():
    return coefficients(BANDS, ROUNDS)


def test_noise_of_rounds_is_that_of_the_dense_matrix(bands):
    fresh = np.random.default_rng(0).normal(size=(ROUNDS, 2, 2)).astype(np.float32)
    past, rows = nothing_yet(BANDS, {"a": jnp.zeros((2, 2))}), []
    for noise in fresh:
        row, past = correlate(bands, {"a": jnp.asarray(noise)}, past)
        rows.append(row["a"])
    dense = np.linalg.solve(matrix(bands, ROUNDS), fresh.reshape(ROUNDS, -1)).reshape(fresh.shape)
    np.testing.assert_allclose(rows, dense, atol=1e-5)


def test_columns_of_a_client_that_is_apart_do_not_overlap(bands):
    """So k times cost k single releases: the norm of what it changes is the root of k."""
    strategy = matrix(bands, ROUNDS)
    assert np.linalg.norm(bands) == pytest.approx(1)
    changed = strategy[:, [0, BANDS, 2 * BANDS]].sum(1)
    assert np.linalg.norm(changed) <= math.sqrt(3) + 1e-9
    assert np.linalg.norm(strategy[:, [0, 1, 2]].sum(1)) > math.sqrt(3)  # three rounds in a row would cost more


def test_correlated_noise_adds_up_to_less(bands):
    sums = np.tril(np.ones((ROUNDS, ROUNDS)))
    correlated = np.linalg.norm(sums @ np.linalg.inv(matrix(bands, ROUNDS)))
    assert correlated < 0.9 * np.linalg.norm(sums)


def test_the_aggregator_adds_the_matrix_form_of_its_own_draws(bands):
    aggregate = fr.aggregators.private(2.0, 0.5, per_round=4, correlated=BANDS, rounds=ROUNDS)
    parts = {"delta": {"w": jnp.zeros(5)}}
    state, found, drawn = aggregate.init(parts), [], []
    for number in range(ROUNDS):
        key = jax.random.key(number)
        total, state, _ = aggregate.decode(state, Total(parts, {}), key)
        found.append(4 * np.asarray(total.parts["delta"]["w"]))
        mine = jax.random.fold_in(jax.random.fold_in(key, 1), 0)  # of the second stage, after `finite`
        drawn.append(np.asarray(draw_noise(parts, 2.0 * 0.5, mine)["delta"]["w"]))
    np.testing.assert_allclose(found, np.linalg.solve(matrix(bands, ROUNDS), np.array(drawn)), atol=1e-5)


def test_a_client_that_is_apart_is_counted_as_often_as_it_takes_part():
    ten = epsilon_of([Release(2.0, 1.0, 10, apart=3)], 1e-5)
    assert ten == epsilon_of([Release(2.0, 1.0, 4)], 1e-5)
    with pytest.raises(ValueError, match="`apart`"):
        epsilon_of([Release(2.0, 0.5, 10, apart=3)], 1e-5)


def test_two_runs_are_not_apart_from_each_other():
    one = Ledger(100, 1e-5).add(Release(2.0, 1.0, 4, apart=3))
    assert one.and_then(one).epsilon == pytest.approx(epsilon_of([Release(2.0, 1.0, 4)], 1e-5), rel=1e-4)


def test_clients_take_turns():
    clients = Clients.from_columns({"x": np.arange(11)}, client=np.arange(11))
    last = {}
    for number in range(30):
        drawn = sample(np.array([1, 2], np.uint32), number, clients, Sampling(3, apart=4)).clients
        for client in drawn[drawn >= 0].tolist():
            assert number - last.get(client, -100) >= 4
            last[client] = number
    assert len(last) == 11


def train(sampling, rounds=6, folder=None, callbacks=()):
    clients = xy(*[([1, 2, 3], [5, 6, 8])] * 12)
    aggregate = fr.aggregators.private(1.0, 2.0, per_round=4, correlated=BANDS, rounds=6)
    algorithm = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0), aggregate=aggregate
    )
    ledger = Ledger(12, 1e-4)
    return fr.train(
        algorithm,
        clients,
        rounds=rounds,
        clients_per_round=sampling,
        folder=None if folder is None else fr.RunFolder(folder, checkpoint_every=2),
        ledger=ledger,
        layout=one_by_one(),
        callbacks=callbacks,
    )


def test_training_counts_turns_and_refuses_correlated_noise_without_them():
    run = train(Sampling(4, apart=BANDS))
    assert run.ledger.epsilon == pytest.approx(epsilon_of([Release(2.0, 1.0, 2)], 1e-4), rel=1e-6)
    with pytest.raises(ValueError, match="apart=3"):
        train(Sampling(4))


def test_a_run_that_goes_on_has_the_noise_of_one_that_was_never_stopped(tmp_path):
    whole = train(Sampling(4, apart=BANDS))
    train(Sampling(4, apart=BANDS), rounds=4, folder=tmp_path / "run")
    parts = train(Sampling(4, apart=BANDS), rounds=6, folder=tmp_path / "run")
    for one, two in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_array_equal(one, two)
    assert parts.ledger.epsilon == whole.ledger.epsilon


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"correlated": 2}, "give `rounds`"),
        ({"correlated": 2, "rounds": 4, "quantile": 0.5}, "one clipping norm"),
        ({"correlated": 0, "rounds": 4}, "`correlated`"),
    ],
)
def test_correlated_noise_that_makes_no_sense_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        fr.aggregators.private(1.0, 1.0, per_round=4, **options)
