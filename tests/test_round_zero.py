"""Round zero with privacy: answers are bounded whatever a client has, and noised sums still tell what is wanted."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrecon._src.core.clients import Clients
from fedrecon._src.privacy.accounting import Release, epsilon_of
from fedrecon._src.recommend import private_round_zero as round_zero
from fedrecon._src.recommend import round_zero as preparation
from fedrecon._src.recommend.private_round_zero import Message, answer, gaussian, integers, prepare, start
from fedrecon._src.recommend.round_zero import Plan
from test_preparation import generated

ITEMS = 30
ALMOST_NOTHING = 1e-6


def messages(clients, noise=ALMOST_NOTHING, **options):
    """Yield what the server sends, one question after another."""
    rng, message = np.random.default_rng(0), start(ITEMS, clients=len(clients), **options)
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    while not round_zero.done(message):
        yield message
        entries = answer(message, clients.columns["item"], clients.columns["rating"], owner)
        message = round_zero.advance(message, entries.total() + rng.normal(0, noise, entries.length), noise)


QUESTIONS = list(messages(generated()))


@given(st.lists(st.tuples(st.integers(0, ITEMS - 1), st.floats(-1e9, 1e9)), min_size=1, max_size=60))
def test_no_answer_is_longer_than_1(ratings):
    """Also of somebody who rated one item many times, or with numbers that nobody expects."""
    item, rating = map(np.array, zip(*ratings, strict=True))
    for message in QUESTIONS:
        found = answer(message, item, rating)
        dense = np.bincount(found.place, found.value, found.length)
        assert np.linalg.norm(dense) <= 1 + 1e-9, message.question


def test_answers_of_single_clients_are_those_of_all():
    clients = generated(users=20)
    owner = np.repeat(np.arange(20), clients.sizes)
    for message in QUESTIONS:
        together = answer(message, clients.columns["item"], clients.columns["rating"], owner).total()
        alone = sum(answer(message, c["item"], c["rating"]).total() for c in clients)
        np.testing.assert_allclose(together, alone, atol=1e-9)


def test_with_hardly_any_noise_it_finds_what_exact_sums_find():
    clients = generated(users=2000)
    exact = preparation.prepare(clients, ITEMS)
    found = prepare(clients, ITEMS, noise_multiplier=ALMOST_NOTHING, add=gaussian(np.random.default_rng(0))).preparation
    assert found.mean == pytest.approx(exact.mean, abs=0.03)
    assert found.deviation == pytest.approx(exact.deviation, rel=0.03)
    assert found.noise == pytest.approx(exact.noise, rel=0.15)
    assert found.user_variance == pytest.approx(exact.user_variance, rel=0.15)
    assert np.corrcoef(found.item_bias, exact.item_bias)[0, 1] > 0.995
    assert np.corrcoef(found.traits()[:, 1], exact.traits()[:, 1])[0, 1] > 0.9


def test_noise_shrinks_biases_rather_than_to_blow_them_up():
    clients, spreads = generated(users=300), []
    for noise in (ALMOST_NOTHING, 3.0, 100.0):
        found = prepare(clients, ITEMS, noise_multiplier=noise, add=gaussian(np.random.default_rng(0)), scale=(0, 6))
        spreads.append(found.preparation.item_bias.std())
        assert np.isfinite([*found.preparation.item_bias, found.preparation.user_ridge, found.preparation.noise]).all()
    assert spreads[0] > 2 * spreads[2]
    assert max(spreads) < 2 * spreads[0]


def test_sums_of_integers_find_the_same():
    clients = generated(users=100)
    options = {"noise_multiplier": 0.05, "scale": (0.0, 6.0)}
    one = prepare(clients, ITEMS, add=gaussian(np.random.default_rng(0)), **options)
    two = prepare(clients, ITEMS, add=integers(np.random.default_rng(0)), **options)
    np.testing.assert_allclose(one.preparation.item_bias, two.preparation.item_bias, atol=0.1)
    assert {release.mechanism for release in two.releases} == {"skellam"}
    # The accountant of noise in integers is coarser, and never claims less than is spent.
    spent = [epsilon_of(found.releases, 1e-5) for found in (one, two)]
    assert spent[0] <= spent[1]


def test_all_questions_together_cost_what_was_said():
    found = prepare(generated(users=1000), ITEMS, noise_multiplier=2.0, add=gaussian(np.random.default_rng(0)))
    assert len(found.releases) == 5
    assert {release.purpose for release in found.releases} == {"round zero"}
    assert sum(release.noise_multiplier**-2 for release in found.releases) == pytest.approx(2.0**-2)
    assert epsilon_of(found.releases, 1e-5) == pytest.approx(epsilon_of([Release(2.0, 1.0, 1)], 1e-5), rel=0.01)


def test_a_declared_scale_is_not_asked_for_and_is_kept():
    found = prepare(generated(), ITEMS, noise_multiplier=1.0, add=gaussian(np.random.default_rng(0)), scale=(0.0, 6.0))
    assert len(found.releases) == 4
    assert (found.preparation.low, found.preparation.high) == (0.0, 6.0)
    with pytest.raises(ValueError, match="the lowest and the highest"):
        start(3, clients=5, scale=(5.0, 1.0))


def test_counts_are_recognised():
    rng = np.random.default_rng(0)
    columns = {"item": rng.integers(0, 5, 4000), "rating": np.floor(np.exp(rng.normal(1, 1.5, 4000)))}
    clients = Clients.from_columns(columns, client=np.repeat(np.arange(400), 10))
    found = prepare(clients, 5, noise_multiplier=0.3, add=gaussian(np.random.default_rng(0))).preparation
    assert found.transform == "log1p"
    assert found.mean == pytest.approx(np.log1p(columns["rating"]).mean(), abs=0.1)


def test_too_much_noise_for_a_range_says_what_to_do():
    with pytest.raises(ValueError, match="declare their range"):
        prepare(generated(users=5), ITEMS, noise_multiplier=50.0, add=gaussian(np.random.default_rng(0)))


def test_a_sum_of_another_length_is_refused():
    message: Message = start(3, clients=5, plan=Plan(1, 0))
    with pytest.raises(ValueError, match="shape"):
        round_zero.advance(message, np.zeros(3), 1.0)
    assert math.isclose(round_zero.noise_of(message, 1.0), math.sqrt(0.47 / 0.02))
