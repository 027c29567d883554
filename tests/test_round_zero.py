"""Round zero: the server sees only sums, estimates the right thing from them, and with noise bounds every answer."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from fedrecon._src.core.clients import Clients
from fedrecon._src.core.wire import to_bytes
from fedrecon._src.privacy.accounting import Release, epsilon_of
from fedrecon._src.recommend.answers import MOMENTS
from fedrecon._src.recommend.estimate import MAX_SKEWNESS
from fedrecon._src.recommend.estimators import skewness
from fedrecon._src.recommend.round_zero import (
    RoundZero,
    estimate_ratings,
    run_round_zero,
)

ITEMS = 30
ALMOST_NOTHING = 1e-6


def generated(users=200, items=30, noise=0.5, item=0.6, user=0.4, seed=0):
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(users), rng.integers(1, 40, users))
    which = rng.integers(0, items, len(owner))
    of_items, of_users = rng.normal(0, item, items), rng.normal(0, user, users)
    rating = 3 + of_items[which] + of_users[owner] + rng.normal(0, noise, len(owner))
    return Clients.from_columns({"item": which.astype(np.int32), "rating": rating.astype(np.float32)}, client=owner)


def answer_one_by_one(zero, state, clients):
    answers = [zero.answer_rows(state, c["item"], c["rating"]) for c in clients]
    return {name: sum(answer[name] for answer in answers) for name in answers[0]}


@pytest.mark.parametrize("noise", [None, ALMOST_NOTHING])
def test_answers_of_single_clients_add_up_to_the_answer_of_all(noise):
    clients = generated(users=20)
    zero = RoundZero(num_items=30, bias_passes=3, trait_passes=2, noise_multiplier=noise, clients=20)
    state = zero.start()
    while not state.done:
        total, expected = answer_one_by_one(zero, state, clients), zero.answer(state, clients)
        assert total.keys() == expected.keys() == zero.zeros(state.answered).keys()
        for name in total:
            np.testing.assert_allclose(total[name], expected[name], rtol=1e-9, atol=1e-9)
            assert zero.zeros(state.answered)[name].shape == expected[name].shape
        state = zero.advance(state, total)


def test_asking_clients_one_by_one_estimates_the_same():
    clients, zero = generated(users=20), RoundZero(num_items=30, bias_passes=3)
    state = zero.start()
    while not state.done:
        state = zero.advance(state, answer_one_by_one(zero, state, clients))
    expected = estimate_ratings(clients, 30, bias_passes=3)
    np.testing.assert_allclose(state.estimate.item_bias, expected.item_bias, rtol=1e-9, atol=1e-12)
    assert state.estimate.noise == pytest.approx(expected.noise, rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"noise_multiplier": ALMOST_NOTHING, "clients": 20}])
def test_a_state_survives_as_bytes(options):
    clients, zero = generated(users=20), RoundZero(num_items=30, **options)
    state = zero.start()
    while not state.done:
        assert zero.from_bytes(zero.to_bytes(state)).answered == state.answered
        state = zero.advance(zero.from_bytes(zero.to_bytes(state)), zero.answer(state, clients))
    result = zero.read_result(zero.to_bytes(state))
    np.testing.assert_array_equal(result.estimate.item_count, state.estimate.item_count)
    assert (result.num_examples == clients.num_examples) == ("noise_multiplier" not in options)
    assert "round zero" in zero.describe(result)
    with pytest.raises(ValueError, match="not over"):
        zero.read_result(b"")


@pytest.mark.parametrize(
    ("name", "value"),
    [("noise", -1.0), ("answered", 99.0), ("transform", 2.0), ("item_count", -1.0), ("mean", np.nan), ("inliers", 1e9)],
)
def test_a_state_that_makes_no_sense_is_refused(name, value):
    zero = RoundZero(num_items=2)
    data = zero.to_bytes(zero.advance(zero.start(), zero.answer_rows(zero.start(), [0, 1], [1.0, 5.0])))
    tree = load(data)
    with pytest.raises(ValueError, match=name):
        zero.from_bytes(to_bytes(tree | {name: np.full_like(tree[name], value)}))


def first_total(item, rating):
    zero = RoundZero(num_items=2)
    return zero.answer_rows(zero.start(), item, rating)


def skewness_of(total):
    sums = total["answer"].reshape(len(MOMENTS), -1).sum(1)
    return skewness(dict(zip(MOMENTS, sums, strict=True)))


def after_first(total, **options):
    zero = RoundZero(num_items=2, **options)
    return zero.advance(zero.start(), total).estimate


def test_mean_and_deviation_by_hand():
    estimate = after_first(first_total([0, 1], [1.0, 5.0]))
    assert (estimate.mean, estimate.deviation, estimate.transform) == (3.0, 2.0, "none")
    np.testing.assert_allclose(estimate.standardize([1.0, 3.0, 5.0]), [-1, 0, 1])


def test_first_biases_by_hand():
    # Standardised ratings are -1 and 1 of item 0, and 1, -1 of items 0 and 1. Ridges are .7 / .15.
    ridge = 0.7 / 0.15
    columns = {"item": np.array([0, 0, 0, 1]), "rating": np.array([1.0, 5.0, 5.0, 1.0])}
    found = estimate_ratings(
        Clients.from_columns(columns, client=np.array([0, 0, 1, 1])), 3, bias_passes=1, trait_passes=0
    )
    np.testing.assert_allclose(found.item_bias, [1 / (3 + ridge), -1 / (1 + ridge), 0])
    np.testing.assert_array_equal(found.item_count, [3, 1, 0])
    assert found.user_variance == pytest.approx(0.7 / (2 + ridge))  # both users' biases are 0
    squares = [(1 / (3 + ridge)) ** 2 + 0.7 / (3 + ridge), (1 / (1 + ridge)) ** 2 + 0.7 / (1 + ridge)]
    assert found.item_variance == pytest.approx(np.mean(squares))


def test_variances_are_those_that_made_the_ratings():
    clients = generated(users=3000, items=300, seed=1)
    found = estimate_ratings(clients, 300, bias_passes=40, trait_passes=0)
    scale = found.deviation**2
    assert found.noise * scale == pytest.approx(0.25, rel=0.05)
    assert found.user_variance * scale == pytest.approx(0.16, rel=0.1)
    assert found.item_variance * scale == pytest.approx(0.36, rel=0.2)


@given(st.floats(0.01, 100), st.floats(-50, 50))
def test_the_unit_of_ratings_does_not_matter(unit, zero):
    clients = generated(users=30)
    other = Clients(
        {**clients.columns, "rating": zero + unit * clients.columns["rating"].astype(np.float64)},
        clients.starts,
        clients.ends,
    )
    one, two = (estimate_ratings(c, 30, bias_passes=3, trait_passes=0, transform="none") for c in (clients, other))
    np.testing.assert_allclose(one.item_bias, two.item_bias, rtol=1e-4, atol=1e-6)
    assert one.noise == pytest.approx(two.noise, rel=1e-4)


def test_the_ends_of_the_scale_are_found_by_sums():
    columns = {"item": np.zeros(6, int), "rating": np.array([0.5, 2.0, 4.0, 4.0, 3.5, 0.5])}
    found = estimate_ratings(Clients.from_columns(columns, client=np.array([0, 0, 1, 1, 2, 2])), 1)
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(4.0))
    np.testing.assert_allclose(found.restore([-9.0, 9.0]), [0.5, 4.0])


@pytest.mark.parametrize("scale", [(0, 10), (1, 5), (-10, 0), (0, 7e-5), (0, 3e9), (0.5, 4.5)])
def test_the_ends_of_a_scale_of_a_few_steps_are_exact(scale):
    rating = np.random.default_rng(0).choice(np.linspace(*scale, 9), 700)
    rating[:2] = scale
    columns = {"item": np.arange(700) % 7, "rating": rating}
    found = estimate_ratings(Clients.from_columns(columns, client=np.arange(700) % 50), 7, transform="none")
    assert (found.low, found.high) == (pytest.approx(scale[0], rel=1e-15), pytest.approx(scale[1], rel=1e-15))
    assert "-" not in str(found.low) or scale[0] < 0


def test_counts_are_recognised_and_predicted_as_counts():
    rng = np.random.default_rng(0)
    counts = np.floor(np.exp(rng.normal(1, 1.5, 400)))
    columns = {"item": rng.integers(0, 5, 400), "rating": counts}
    clients = Clients.from_columns(columns, client=np.repeat(np.arange(40), 10))
    found = estimate_ratings(clients, 5)
    assert found.transform == "log1p"
    assert found.mean == pytest.approx(np.log1p(counts).mean())
    np.testing.assert_allclose(found.restore(found.standardize(counts)), counts, atol=1e-6)
    assert estimate_ratings(clients, 5, transform="none").transform == "none"


def test_skewness_by_hand():
    total = first_total([0, 0, 0, 0], [0.0, 0.0, 0.0, 4.0])
    assert skewness_of(total) == pytest.approx(2 / 3**0.5)  # of a coin with chance 1/4: (1 - 2p) / sqrt(pq)


def test_ratings_below_zero_are_never_counts():
    rating = np.append(np.zeros(99), 1000.0) - 1
    total = first_total(np.zeros(100, int), rating)
    assert skewness_of(total) > MAX_SKEWNESS
    assert after_first(total).transform == "none"
    with pytest.raises(ValueError, match="99 are negative"):
        after_first(total, transform="log1p")


def test_ratings_that_are_all_the_same_are_no_trouble():
    columns = {"item": np.array([0, 1, 1]), "rating": np.full(3, 4.0)}
    found = estimate_ratings(Clients.from_columns(columns, client=np.array([0, 0, 1])), 2)
    np.testing.assert_array_equal(found.restore(found.item_bias), [4.0, 4.0])
    assert np.isfinite([found.noise, found.user_ridge, found.item_ridge]).all()


def test_clients_without_ratings_change_nothing():
    clients = generated(users=5)
    empty = Clients(clients.columns, np.append(clients.starts, 0), np.append(clients.ends, 0))
    one, two = (estimate_ratings(c, 30) for c in (clients, empty))
    np.testing.assert_allclose(one.item_bias, two.item_bias)
    assert one.user_variance == pytest.approx(two.user_variance)


def test_no_ratings_at_all_is_an_error():
    with pytest.raises(ValueError, match="no ratings"):
        after_first(first_total([], []))


def test_a_rating_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match="`rating`"):
        first_total([0], [np.nan])


def test_traits_have_mean_0_and_deviation_1_over_ratings():
    clients = generated(users=50)
    found = estimate_ratings(clients, 31)
    over_ratings = found.traits()[clients.columns["item"]]
    np.testing.assert_allclose(over_ratings.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(over_ratings.std(0), 1, rtol=1e-9)
    assert np.isfinite(found.traits()).all()  # of the item that nobody has rated, too


@pytest.mark.parametrize("deviation", [0.0, 0.4])
def test_how_much_users_differ_about_popularity_is_found(deviation):
    rng = np.random.default_rng(0)
    users, items = 2000, 200
    chance = 1 / np.arange(1, items + 1)
    owner = np.repeat(np.arange(users), 30)
    item = rng.choice(items, len(owner), p=chance / chance.sum())
    trait = np.log1p(np.bincount(item, minlength=items))
    trait = (trait - trait[item].mean()) / trait[item].std()
    rating = rng.normal(0, 1, len(owner)) + rng.normal(0, deviation, users)[owner] * trait[item]
    clients = Clients.from_columns({"item": item.astype(np.int32), "rating": rating}, client=owner)
    found = estimate_ratings(clients, items, trait_passes=20)
    bias, popularity = found.trait_variance * found.deviation**2
    assert popularity == pytest.approx(deviation**2, abs=0.015)
    assert bias < 0.02


# ---- ratings far outside ----


def with_strangers(count, rating, rated=10, users=61):
    clients = generated(users=users)
    columns = {name: column.copy() for name, column in clients.columns.items()}
    ends = clients.ends.copy()
    for user in range(count):
        ends[user] = min(ends[user], clients.starts[user] + rated)
        columns["rating"][clients.starts[user] : ends[user]] = rating
    return Clients(columns, clients.starts, ends)


@pytest.mark.parametrize("rating", [1000.0, -1000.0, 1e30])
@pytest.mark.parametrize("count", [1, 12])
def test_ratings_far_outside_of_what_most_have_count_for_nothing(rating, count):
    found = estimate_ratings(with_strangers(count, rating), 30)
    honest = estimate_ratings(with_strangers(0, rating).take(np.arange(count, 61)), 30)
    assert (found.transform, found.mean) == ("none", pytest.approx(honest.mean))
    assert found.deviation == pytest.approx(honest.deviation)
    assert (found.low, found.high) == (pytest.approx(honest.low), pytest.approx(honest.high))
    np.testing.assert_allclose(found.item_bias, honest.item_bias)
    assert found.outliers == with_strangers(count, rating).sizes[:count].sum()


@pytest.mark.parametrize(
    "scale",
    [
        {1: 0.05, 2: 0.1, 3: 0.2, 4: 0.35, 5: 0.3},
        {1: 0.03, 5: 0.97},
        {0: 0.97, 1: 0.01, 100: 0.02},
        {-10: 0.3, -0.5: 0.1, 0: 0.2, 10: 0.4},
        {1000: 0.5, 1000.5: 0.5},
        {0.5: 0.01, 4.5: 0.49, 5: 0.5},
    ],
    ids=str,
)
def test_every_rating_of_a_scale_counts(scale):
    rating = np.random.default_rng(0).choice(list(scale), 5000, p=list(scale.values()))
    clients = Clients.from_columns({"item": np.zeros(5000, int), "rating": rating}, client=np.arange(5000) // 10)
    found = estimate_ratings(clients, 1, bias_passes=1, trait_passes=0, transform="none")
    assert found.outliers == 0
    assert (found.low, found.high) == (pytest.approx(min(scale), abs=1e-6), pytest.approx(max(scale)))


@pytest.mark.parametrize("sign", [1, -1])
def test_items_in_other_units_count_if_many_clients_have_them(sign):
    """Nine answers from 1 to 5 and one weight in grams: no value is a mistake, though most are far from it."""
    rng = np.random.default_rng(0)
    rating = rng.integers(1, 6, (200, 10)).astype(float)
    rating[:, 9] = sign * rng.normal(70_000, 8_000, 200)
    columns = {"item": np.tile(np.arange(10), 200), "rating": rating.ravel()}
    clients = Clients.from_columns(columns, client=np.repeat(np.arange(200), 10))
    found = estimate_ratings(clients, 10, bias_passes=1, trait_passes=0, transform="none")
    assert found.outliers == 0
    few = {name: column[: 10 * 40] for name, column in columns.items()}
    few["rating"] = np.where((few["item"] == 9) & (np.repeat(np.arange(40), 10) > 7), 3.0, few["rating"])
    clients = Clients.from_columns(few, client=np.repeat(np.arange(40), 10))
    assert estimate_ratings(clients, 10, bias_passes=1, trait_passes=0, transform="none").outliers == 8


def test_one_stranger_makes_neither_counts_of_ratings_nor_ratings_of_counts():
    assert estimate_ratings(with_strangers(1, 1000.0), 30).transform == "none"
    rng = np.random.default_rng(0)
    counts = np.floor(np.exp(rng.normal(1, 1.5, 610)))
    counts[:3] = -1
    clients = Clients.from_columns({"item": rng.integers(0, 5, 610), "rating": counts}, client=np.arange(610) // 10)
    found = estimate_ratings(clients, 5)
    assert found.transform == "log1p"
    assert np.isfinite(found.item_bias).all()


# ---- with noise ----


def noised(clients, noise_multiplier=ALMOST_NOTHING, secure=False, num_items=ITEMS, **options):
    zero = RoundZero(num_items=num_items, noise_multiplier=noise_multiplier, clients=len(clients), **options)
    state, releases = run_round_zero(zero, clients, np.random.default_rng(0), secure=secure)
    return SimpleNamespace(estimate=state.estimate, releases=releases)


BOUNDED = RoundZero(num_items=ITEMS, noise_multiplier=ALMOST_NOTHING, clients=200)


def bounded_states():
    """Yield what the server sends, one question after another."""
    state, clients = BOUNDED.start(), generated()
    while not state.done:
        yield state
        state = BOUNDED.advance(state, BOUNDED.answer(state, clients))


STATES = list(bounded_states())


@given(st.lists(st.tuples(st.integers(0, ITEMS - 1), st.floats(-1e9, 1e9)), min_size=1, max_size=60))
def test_no_answer_is_longer_than_1(ratings):
    """Also of somebody who rated one item many times, or with numbers that nobody expects."""
    item, rating = map(np.array, zip(*ratings, strict=True))
    for state in STATES:
        assert np.linalg.norm(BOUNDED.answer_rows(state, item, rating)["answer"]) <= 1 + 1e-9, state.question


def test_with_hardly_any_noise_it_finds_what_exact_sums_find():
    clients = generated(users=2000)
    exact = estimate_ratings(clients, ITEMS)
    found = noised(clients).estimate
    assert found.mean == pytest.approx(exact.mean, abs=0.03)
    assert found.deviation == pytest.approx(exact.deviation, rel=0.03)
    assert found.noise == pytest.approx(exact.noise, rel=0.15)
    assert found.user_variance == pytest.approx(exact.user_variance, rel=0.15)
    assert np.corrcoef(found.item_bias, exact.item_bias)[0, 1] > 0.995
    assert np.corrcoef(found.traits()[:, 1], exact.traits()[:, 1])[0, 1] > 0.9


def test_noise_shrinks_biases_rather_than_to_blow_them_up():
    clients, spreads = generated(users=300), []
    for noise in (ALMOST_NOTHING, 3.0, 100.0):
        found = noised(clients, noise, scale=(0, 6))
        spreads.append(found.estimate.item_bias.std())
        assert np.isfinite([*found.estimate.item_bias, found.estimate.user_ridge, found.estimate.noise]).all()
    assert spreads[0] > 2 * spreads[2]
    assert max(spreads) < 2 * spreads[0]


def test_sums_of_integers_find_the_same():
    clients = generated(users=100)
    options = {"noise_multiplier": 0.05, "scale": (0.0, 6.0)}
    one = noised(clients, **options)
    two = noised(clients, secure=True, **options)
    np.testing.assert_allclose(one.estimate.item_bias, two.estimate.item_bias, atol=0.1)
    assert {release.mechanism for release in two.releases} == {"skellam"}
    # The accountant of noise in integers is coarser, and never claims less than is spent.
    spent = [epsilon_of(found.releases, 1e-5) for found in (one, two)]
    assert spent[0] <= spent[1]


def test_all_questions_together_cost_what_was_said():
    found = noised(generated(users=1000), 2.0)
    assert len(found.releases) == 5
    assert {release.purpose for release in found.releases} == {"round zero"}
    assert sum(release.noise_multiplier**-2 for release in found.releases) == pytest.approx(2.0**-2)
    assert epsilon_of(found.releases, 1e-5) == pytest.approx(epsilon_of([Release(2.0, 1.0, 1)], 1e-5), rel=0.01)


def test_a_declared_scale_is_not_asked_for_and_is_kept():
    found = noised(generated(), 1.0, scale=(0.0, 6.0))
    assert len(found.releases) == 4
    assert (found.estimate.low, found.estimate.high) == (0.0, 6.0)
    with pytest.raises(ValueError, match="`scale`"):
        RoundZero(num_items=3, noise_multiplier=1.0, clients=5, scale=(5.0, 1.0))


def test_counts_are_recognised_with_noise():
    rng = np.random.default_rng(0)
    columns = {"item": rng.integers(0, 5, 4000), "rating": np.floor(np.exp(rng.normal(1, 1.5, 4000)))}
    clients = Clients.from_columns(columns, client=np.repeat(np.arange(400), 10))
    found = noised(clients, 0.3, num_items=5).estimate
    assert found.transform == "log1p"
    assert found.mean == pytest.approx(np.log1p(columns["rating"]).mean(), abs=0.1)


def test_too_much_noise_for_a_range_says_what_to_do():
    with pytest.raises(ValueError, match="`rating_range`"):
        noised(generated(users=5), 50.0)


def test_a_sum_of_another_length_is_refused():
    zero = RoundZero(num_items=3, noise_multiplier=1.0, clients=5, bias_passes=1, trait_passes=0)
    with pytest.raises(ValueError, match="shape"):
        zero.advance(zero.start(), {"answer": np.zeros(3)})
    assert math.isclose(zero.noise_of(zero.start()), math.sqrt(0.47 / 0.02))
    assert zero.releases()[0].noise_multiplier == zero.noise_of(zero.start())
