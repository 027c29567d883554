"""Round zero: sums over clients are all the server sees, and what it makes of them is right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrecon._src.core.clients import Clients
from fedrecon._src.recommend import round_zero as preparation
from fedrecon._src.recommend.round_zero import Plan


def generated(users=200, items=30, noise=0.5, item=0.6, user=0.4, seed=0):
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(users), rng.integers(1, 40, users))
    which = rng.integers(0, items, len(owner))
    of_items, of_users = rng.normal(0, item, items), rng.normal(0, user, users)
    rating = 3 + of_items[which] + of_users[owner] + rng.normal(0, noise, len(owner))
    return Clients.from_columns({"item": which.astype(np.int32), "rating": rating.astype(np.float32)}, client=owner)


def one_by_one(message, clients):
    answers = [preparation.answer(message, c["item"], c["rating"]) for c in clients]
    return {name: sum(answer[name] for answer in answers) for name in answers[0]}


def test_answers_of_single_clients_add_up_to_the_answer_of_all():
    clients = generated(users=20)
    message = preparation.start(30, Plan(biases=3, traits=2))
    while not preparation.done(message):
        total = one_by_one(message, clients)
        together = preparation.answer(
            message, clients.columns["item"], clients.columns["rating"], np.repeat(np.arange(20), clients.sizes)
        )
        assert total.keys() == together.keys()
        for name in total:
            np.testing.assert_allclose(total[name], together[name], rtol=1e-9, atol=1e-9)
        message = preparation.advance(message, total)


def test_asking_clients_one_by_one_prepares_the_same():
    clients = generated(users=20)
    message = preparation.start(30, Plan(biases=3))
    while not preparation.done(message):
        message = preparation.advance(message, one_by_one(message, clients))
    together = preparation.prepare(clients, 30, plan=Plan(biases=3))
    np.testing.assert_allclose(message.item_bias, together.item_bias, rtol=1e-9, atol=1e-12)
    assert message.noise == pytest.approx(together.noise, rel=1e-9)


def test_mean_and_deviation_by_hand():
    message = preparation.advance(preparation.start(2), preparation.answer(preparation.start(2), [0, 1], [1.0, 5.0]))
    assert (message.mean, message.deviation, message.transform) == (3.0, 2.0, "none")
    np.testing.assert_allclose(message.standardize([1.0, 3.0, 5.0]), [-1, 0, 1])


def test_first_biases_by_hand():
    # Standardised ratings are -1 and 1 of item 0, and 1, -1 of items 0 and 1. Ridges are .7 / .15.
    ridge = 0.7 / 0.15
    columns = {"item": np.array([0, 0, 0, 1]), "rating": np.array([1.0, 5.0, 5.0, 1.0])}
    found = preparation.prepare(Clients.from_columns(columns, client=np.array([0, 0, 1, 1])), 3, plan=Plan(1, 0))
    np.testing.assert_allclose(found.item_bias, [1 / (3 + ridge), -1 / (1 + ridge), 0])
    np.testing.assert_array_equal(found.item_count, [3, 1, 0])
    assert found.user_variance == pytest.approx(0.7 / (2 + ridge))  # both users' biases are 0
    squares = [(1 / (3 + ridge)) ** 2 + 0.7 / (3 + ridge), (1 / (1 + ridge)) ** 2 + 0.7 / (1 + ridge)]
    assert found.item_variance == pytest.approx(np.mean(squares))


def test_variances_are_those_that_made_the_ratings():
    clients = generated(users=3000, items=300, seed=1)
    found = preparation.prepare(clients, 300, plan=Plan(40, 0))
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
    one, two = (preparation.prepare(c, 30, plan=Plan(3, 0), transform="none") for c in (clients, other))
    np.testing.assert_allclose(one.item_bias, two.item_bias, rtol=1e-4, atol=1e-6)
    assert one.noise == pytest.approx(two.noise, rel=1e-4)


def test_the_ends_of_the_scale_are_found_by_sums():
    columns = {"item": np.zeros(6, int), "rating": np.array([0.5, 2.0, 4.0, 4.0, 3.5, 0.5])}
    found = preparation.prepare(Clients.from_columns(columns, client=np.array([0, 0, 1, 1, 2, 2])), 1)
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(4.0))
    np.testing.assert_allclose(found.restore([-9.0, 9.0]), [0.5, 4.0])


@pytest.mark.parametrize("scale", [(0, 10), (1, 5), (-10, 0), (0, 7e-5), (0, 3e9), (0.5, 4.5)])
def test_the_ends_of_a_scale_of_a_few_steps_are_exact(scale):
    rating = np.random.default_rng(0).choice(np.linspace(*scale, 9), 700)
    rating[:2] = scale
    columns = {"item": np.arange(700) % 7, "rating": rating}
    found = preparation.prepare(Clients.from_columns(columns, client=np.arange(700) % 50), 7, transform="none")
    assert (found.low, found.high) == (pytest.approx(scale[0], rel=1e-15), pytest.approx(scale[1], rel=1e-15))
    assert "-" not in str(found.low) or scale[0] < 0


def test_counts_are_recognised_and_predicted_as_counts():
    rng = np.random.default_rng(0)
    counts = np.floor(np.exp(rng.normal(1, 1.5, 400)))
    columns = {"item": rng.integers(0, 5, 400), "rating": counts}
    clients = Clients.from_columns(columns, client=np.repeat(np.arange(40), 10))
    found = preparation.prepare(clients, 5)
    assert found.transform == "log1p"
    assert found.mean == pytest.approx(np.log1p(counts).mean())
    np.testing.assert_allclose(found.restore(found.standardize(counts)), counts, atol=1e-6)
    assert preparation.prepare(clients, 5, transform="none").transform == "none"


def test_skewness_by_hand():
    total = preparation.answer(preparation.start(1), [0, 0, 0, 0], [0.0, 0.0, 0.0, 4.0])
    assert preparation.skewness(total) == pytest.approx(2 / 3**0.5)  # of a coin with chance 1/4: (1 - 2p) / sqrt(pq)


def test_ratings_below_zero_are_never_counts():
    rating = np.append(np.zeros(99), 1000.0) - 1
    total = preparation.answer(preparation.start(1), np.zeros(100, int), rating)
    assert preparation.skewness(total) > preparation.SKEWED
    assert preparation.advance(preparation.start(1), total).transform == "none"
    with pytest.raises(ValueError, match="99 are negative"):
        preparation.advance(preparation.start(1), total, transform="log1p")


def test_ratings_that_are_all_the_same_are_no_trouble():
    columns = {"item": np.array([0, 1, 1]), "rating": np.full(3, 4.0)}
    found = preparation.prepare(Clients.from_columns(columns, client=np.array([0, 0, 1])), 2)
    np.testing.assert_array_equal(found.restore(found.item_bias), [4.0, 4.0])
    assert np.isfinite([found.noise, found.user_ridge, found.item_ridge]).all()


def test_clients_without_ratings_change_nothing():
    clients = generated(users=5)
    empty = Clients(clients.columns, np.append(clients.starts, 0), np.append(clients.ends, 0))
    one, two = (preparation.prepare(c, 30) for c in (clients, empty))
    np.testing.assert_allclose(one.item_bias, two.item_bias)
    assert one.user_variance == pytest.approx(two.user_variance)


def test_no_ratings_at_all_is_an_error():
    with pytest.raises(ValueError, match="no ratings"):
        preparation.advance(preparation.start(1), preparation.answer(preparation.start(1), [], []))


def test_a_rating_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match="not finite"):
        preparation.answer(preparation.start(1), [0], [np.nan])


def test_traits_have_mean_0_and_deviation_1_over_ratings():
    clients = generated(users=50)
    found = preparation.prepare(clients, 31)
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
    found = preparation.prepare(clients, items, plan=Plan(traits=20))
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
    found = preparation.prepare(with_strangers(count, rating), 30)
    honest = preparation.prepare(with_strangers(0, rating).take(np.arange(count, 61)), 30)
    assert (found.transform, found.mean) == ("none", pytest.approx(honest.mean))
    assert found.deviation == pytest.approx(honest.deviation)
    assert (found.low, found.high) == (pytest.approx(honest.low), pytest.approx(honest.high))
    np.testing.assert_allclose(found.item_bias, honest.item_bias)
    assert found.outside == with_strangers(count, rating).sizes[:count].sum()


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
    found = preparation.prepare(clients, 1, plan=Plan(1, 0), transform="none")
    assert found.outside == 0
    assert (found.low, found.high) == (pytest.approx(min(scale), abs=1e-6), pytest.approx(max(scale)))


@pytest.mark.parametrize("sign", [1, -1])
def test_items_in_other_units_count_if_many_clients_have_them(sign):
    """Nine answers from 1 to 5 and one weight in grams: no value is a mistake, though most are far from it."""
    rng = np.random.default_rng(0)
    rating = rng.integers(1, 6, (200, 10)).astype(float)
    rating[:, 9] = sign * rng.normal(70_000, 8_000, 200)
    columns = {"item": np.tile(np.arange(10), 200), "rating": rating.ravel()}
    clients = Clients.from_columns(columns, client=np.repeat(np.arange(200), 10))
    found = preparation.prepare(clients, 10, plan=Plan(1, 0), transform="none")
    assert found.outside == 0
    few = {name: column[: 10 * 40] for name, column in columns.items()}
    few["rating"] = np.where((few["item"] == 9) & (np.repeat(np.arange(40), 10) > 7), 3.0, few["rating"])
    clients = Clients.from_columns(few, client=np.repeat(np.arange(40), 10))
    assert preparation.prepare(clients, 10, plan=Plan(1, 0), transform="none").outside == 8


def test_one_stranger_makes_neither_counts_of_ratings_nor_ratings_of_counts():
    assert preparation.prepare(with_strangers(1, 1000.0), 30).transform == "none"
    rng = np.random.default_rng(0)
    counts = np.floor(np.exp(rng.normal(1, 1.5, 610)))
    counts[:3] = -1
    clients = Clients.from_columns({"item": rng.integers(0, 5, 610), "rating": counts}, client=np.arange(610) // 10)
    found = preparation.prepare(clients, 5)
    assert found.transform == "log1p"
    assert np.isfinite(found.item_bias).all()
