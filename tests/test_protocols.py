"""Leave one out by time, sampled candidates, and what negatives alone tell about the test."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.recommend.protocols import summarize_ranks


def clients_of(items, times):
    owner = np.repeat(np.arange(len(items)), [len(x) for x in items])
    return fr.Clients.from_columns({"item": np.concatenate(items), "time": np.concatenate(times)}, client=owner)


def test_the_last_item_by_time_is_the_test_and_short_histories_train():
    clients = clients_of([[1, 2, 3, 4], [5, 6], [7]], [[4, 1, 3, 2], [9, 8], [0]])
    parts = fr.recommend.leave_one_out(clients)
    assert parts.train.item.tolist() == [2, 4, 6, 7]
    assert (parts.valid.user.tolist(), parts.valid.item.tolist()) == ([0], [3])
    assert (parts.test.user.tolist(), parts.test.item.tolist()) == ([0, 1], [1, 5])
    assert fr.recommend.leave_one_out(clients, valid=False).train.item.tolist() == [2, 4, 3, 6, 7]


@given(st.integers(0, 1000))
def test_candidates_are_other_items_without_repeats(seed):
    rng = np.random.default_rng(seed)
    have = [rng.permutation(20)[:size] for size in rng.integers(1, 10, 5)]
    clients = fr.recommend.item_sets(clients_of(have, have))
    test = fr.recommend.ItemSets(5, np.arange(5), np.array([x[0] for x in have]))
    drawn = fr.recommend.sample_candidates(test, [clients], 20, number=8, seed=seed)
    for user in range(5):
        assert len(set(drawn[user].tolist())) == 8
        assert not set(drawn[user].tolist()) & set(have[user].tolist())
        assert drawn[user].min() >= 0
        assert drawn[user].max() < 20


def test_every_other_item_is_drawn_where_just_enough_are_left():
    test = fr.recommend.ItemSets(1, np.array([0]), np.array([3]))
    own = fr.recommend.ItemSets(1, np.array([0, 0]), np.array([0, 3]))
    assert fr.recommend.sample_candidates(test, [own], 6, number=4)[0].tolist() == [1, 2, 4, 5]


def test_hit_rate_and_ndcg_by_hand():
    found = summarize_ranks(np.array([0, 2, 10]), (1, 10)).metrics
    assert found == {"hr@1": 1 / 3, "hr@10": 2 / 3, "ndcg@1": 1 / 3, "ndcg@10": (1 + 1 / 2) / 3}


def test_ties_count_against_the_test_item():
    test = fr.recommend.ItemSets(2, np.array([0, 1]), np.array([2, 3]))
    candidates = np.array([[0, 1], [0, 1]])
    found = fr.recommend.rank_candidates(lambda support: np.zeros((2, 4)), test, test, candidates, at=(2,))
    assert found.ranks.tolist() == [2, 2]
    scores = np.array([[3.0, 1, 2, 0], [0, 0, 0, 1]])
    found = fr.recommend.rank_candidates(fr.recommend.score_seen(lambda a, b: scores[a:b]), test, test, candidates)
    assert found.ranks.tolist() == [1, 0]


def draw_negatives(exclude, rng, rounds):
    for _ in range(rounds):
        user = np.repeat(np.arange(len(exclude)), 10)
        yield user, np.array([rng.choice(np.setdiff1d(np.arange(60), exclude[u])) for u in user])


def test_negatives_that_avoid_the_test_give_it_away():
    rng = np.random.default_rng(0)
    have = [rng.permutation(60)[:10] for _ in range(40)]
    test = fr.recommend.ItemSets(40, np.arange(40), np.array([x[0] for x in have]))
    everything = fr.recommend.item_sets(clients_of(have, have))
    candidates = fr.recommend.sample_candidates(test, [everything], 60, number=30)
    leak = fr.recommend.check_negatives(draw_negatives(have, rng, 30), test, candidates)
    assert leak.leaks
    assert leak.metrics["hr@10"] > 0.95
    assert leak.never == 1
    clean = fr.recommend.check_negatives(draw_negatives([x[1:] for x in have], rng, 30), test, candidates)
    assert not clean.leaks
    assert clean.metrics["hr@10"] < 0.6
