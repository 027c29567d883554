"""Ranking: metrics by hand, ties and exclusions, the division of held-out users, and baselines in closed form."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrecon._src.core.clients import Clients
from fedrecon._src.core.split import fraction
from fedrecon._src.recommend import ranking
from fedrecon._src.recommend.ranking import Holdout, ItemSets


def sets(*items):
    user = np.repeat(np.arange(len(items)), [len(each) for each in items])
    return ItemSets(len(items), user, np.array([i for each in items for i in each], int))


def ranked(scores, known, hidden, **options):
    scores = np.asarray(scores, float)
    return ranking.rank(lambda _: scores, Holdout(sets(*known), sets(*hidden)), scores.shape[1], **options)


def test_metrics_by_hand():
    # Without the known item 0 the order is 3, 1, 2, 4; hidden are 1 and 4, at places 2 and 4.
    found = ranked([[9, 3, 2, 5, 1]], [[0]], [[1, 4]], recall_at=(1, 2, 3, 4), ndcg_at=(3, 4), hit_at=(1, 2)).metrics
    assert found["recall@1"] == 0
    assert found["recall@2"] == 0.5
    assert found["recall@3"] == 0.5
    assert found["recall@4"] == 1
    ideal = 1 + 1 / np.log2(3)
    assert found["ndcg@3"] == pytest.approx(1 / np.log2(3) / ideal)
    assert found["ndcg@4"] == pytest.approx((1 / np.log2(3) + 1 / np.log2(5)) / ideal)
    assert (found["hit@1"], found["hit@2"]) == (0, 1)


def test_recall_is_of_what_fits_into_the_list():
    found = ranked([[3, 2, 1]], [[]], [[0, 1, 2]], recall_at=(2,), ndcg_at=(2,)).metrics
    assert found["recall@2"] == 1
    assert found["ndcg@2"] == 1


def test_means_are_over_users_with_hidden_items():
    found = ranked([[3, 2, 1], [3, 2, 1], [1, 2, 3]], [[], [0], []], [[0], [], [0]], recall_at=(1,))
    assert found.users == 2
    assert found.metrics["recall@1"] == 0.5
    np.testing.assert_array_equal(found.per_client["recall@1"], [1, np.nan, 0])
    assert found.errors["recall@1"] == pytest.approx(0.5)  # deviation 1/2 ** .5 of two, over their root


def test_coverage_is_of_what_is_recommended_and_not_known():
    found = ranked([[3, 2, 1, 0], [3, 2, 1, 0]], [[0], []], [[1], [1]], coverage_at=1)
    assert found.metrics["coverage@1"] == 0.5  # items 1 and 0
    # Nobody is recommended what they know, even if there is nothing else.
    found = ranked([[3, 2, 1, 0]], [[0, 1]], [[2]], coverage_at=4)
    assert found.metrics["coverage@4"] == 0.5


def exact(scores, known, hidden, k):
    """Average metrics over every order of equal scores, one user."""
    free = [i for i in range(len(scores)) if i not in known]
    found = []
    for order in itertools.permutations(free):
        if any(scores[a] < scores[b] for a, b in itertools.pairwise(order)):
            continue
        hits = [i in hidden for i in order[:k]]
        gain = sum(1 / np.log2(place + 2) for place, hit in enumerate(hits) if hit)
        ideal = sum(1 / np.log2(place + 2) for place in range(min(k, len(hidden))))
        found.append((sum(hits) / min(k, len(hidden)), gain / ideal, float(any(hits))))
    return np.mean(found, 0)


@given(st.data())
def test_equal_scores_count_as_if_in_random_order(data):
    items = data.draw(st.integers(2, 6))
    scores = data.draw(st.lists(st.integers(0, 2), min_size=items, max_size=items))
    kinds = data.draw(st.lists(st.sampled_from("khn"), min_size=items, max_size=items).filter(lambda x: "h" in x))
    known, hidden = ([i for i, kind in enumerate(kinds) if kind == which] for which in "kh")
    k = data.draw(st.integers(1, 6))
    found = ranked([scores], [known], [hidden], recall_at=(k,), ndcg_at=(k,), hit_at=(k,)).metrics
    expected = exact(scores, known, hidden, k)
    np.testing.assert_allclose([found[f"recall@{k}"], found[f"ndcg@{k}"], found[f"hit@{k}"]], expected, atol=1e-12)


def test_the_size_of_blocks_does_not_matter(monkeypatch):
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 4, (9, 12)).astype(float)
    order = rng.permuted(np.tile(np.arange(12), (9, 1)), axis=1)
    division = Holdout(sets(*order[:, :3]), sets(*order[:, 3:6]))
    rows = iter(range(9))
    once = ranking.rank(lambda known: matrix, division, 12)
    monkeypatch.setattr(ranking, "SCORES_AT_ONCE", 12)
    one_by_one = ranking.rank(lambda known: matrix[[next(rows)]], division, 12)
    assert once.metrics == pytest.approx(one_by_one.metrics)


def clients_of(*items):
    user = np.repeat(np.arange(len(items)), [len(each) for each in items])
    return Clients.from_columns({"item": np.array([i for each in items for i in each], np.int32)}, client=user)


def test_four_fifths_of_a_held_out_users_items_are_known():
    clients = clients_of(range(10), range(5), [7], [3, 4])
    division = ranking.split_items(clients.shuffle(1), fraction(0.8))
    known, hidden = (np.bincount(part.user, minlength=4) for part in division)
    np.testing.assert_array_equal(known, [8, 4, 1, 1])
    np.testing.assert_array_equal(hidden, [2, 1, 0, 1])
    for user in range(4):
        mine = [set(part.item[part.user == user]) for part in division]
        assert not mine[0] & mine[1]
    assert mine[0] | mine[1] == {3, 4}
    again = ranking.split_items(clients.shuffle(2), fraction(0.8))
    assert not np.array_equal(division.hidden.item[:2], again.hidden.item[:2])


TRAIN = ranking.item_sets(clients_of([0, 1], [0, 1, 2], [0], [2, 3]))


def test_popularity_counts_users():
    np.testing.assert_array_equal(ranking.popularity(TRAIN, 5)(sets([1], [])), [[3, 2, 2, 1, 0]] * 2)


def test_how_many_users_have_two_items():
    both = ranking.count_pairs(TRAIN, 4)
    np.testing.assert_array_equal(both, [[3, 2, 1, 0], [2, 2, 1, 0], [1, 1, 2, 1], [0, 0, 1, 1]])


def test_neighbours_by_hand():
    score = ranking.item_knn(TRAIN, 4, neighbours=4, shrink=1)(sets([1], [0, 3]))
    cosines = [2 / (6**0.5 + 1), 0, 1 / (4**0.5 + 1), 0]
    np.testing.assert_allclose(score[0], cosines, atol=1e-6)
    np.testing.assert_allclose(score[1], [0, 2 / (6**0.5 + 1), 1 / (6**0.5 + 1) + 1 / (2**0.5 + 1), 0], atol=1e-6)
    nearest = ranking.item_knn(TRAIN, 4, neighbours=1, shrink=1)(sets([1]))
    np.testing.assert_allclose(nearest[0], [cosines[0], 0, 0, 0], atol=1e-6)  # item 2 is nearer to item 3


def test_ease_minimises_its_loss_under_a_zero_diagonal():
    # Column by column it is a ridge regression of the item on all others.
    rng = np.random.default_rng(0)
    X = (rng.random((30, 6)) < 0.4).astype(float)
    train = ItemSets(30, *np.nonzero(X))
    found = ranking.ease(train, 6, ridge=2.0)(sets(*[[i] for i in range(6)]))  # rows of the weights
    for item in range(6):
        others = [i for i in range(6) if i != item]
        A = X[:, others]
        np.testing.assert_allclose(
            found[others, item], np.linalg.solve(A.T @ A + 2 * np.eye(5), A.T @ X[:, item]), atol=1e-5
        )
        assert found[item, item] == 0


def test_scores_of_another_shape_are_an_error():
    with pytest.raises(ValueError, match=r"shape \(1, 3\), without NaN"):
        ranking.rank(lambda known: np.zeros((1, 2)), Holdout(sets([0]), sets([1])), 3)


def test_nobody_with_hidden_items_is_an_error():
    with pytest.raises(ValueError, match="hidden"):
        ranked([[1.0, 2.0]], [[0]], [[]])


def test_an_item_that_is_known_and_hidden_is_an_error():
    with pytest.raises(ValueError, match="item 1 of user 0"):
        ranked([[1.0, 2.0]], [[0, 1]], [[1]])
