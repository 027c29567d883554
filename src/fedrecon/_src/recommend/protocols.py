"""Protocols that papers on recommendation measure by: leave one out by time, sampled candidates, published splits.

Under **protocol A** (NCF, and most papers on federated recommendation) every user trains. A user's last item by time is
the test, the last but one may be for validation, and the test item is ranked among 99 items drawn from those that the
user does not have. HR@k is the share of users whose test item is among the first k, NDCG@k weighs it by
1 / log2(1 + rank); ties count against the test item. Under **unseen users** nobody who is measured has trained: the
model sees a user's other items.

Sampled candidates flatter every method and may reverse their order (Krichene and Rendle, On Sampled Metrics for Item
Recommendation, KDD 2020). They are here to compare with published figures; `rank` ranks all items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.recommend.ranking import Holdout, ItemSets, Scorer

USERS_AT_ONCE = 256


class LeaveOneOut(NamedTuple):
    """Users' items by time: all but the last two, the last but one, and the last.

    Attributes:
      train: what models learn from, and see of a user.
      valid: one item of each user with three items or more.
      test: one item of each user with two items or more.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> columns = {"item": np.array([5, 6, 7]), "time": np.array([3, 1, 2])}
      >>> parts = fr.recommend.leave_one_out(fr.Clients.from_columns(columns, client=np.zeros(3, int)))
      >>> parts.train.item.tolist(), parts.valid.item.tolist(), parts.test.item.tolist()
      ([6], [7], [5])
    """

    train: ItemSets
    valid: ItemSets
    test: ItemSets

    @property
    def holdout(self) -> Holdout:
        """What is known and what is hidden in the test: validation items are neither."""
        return Holdout(self.train, self.test)


def leave_one_out(clients: Clients, *, time: str | None = "time", valid: bool = True) -> LeaveOneOut:
    """Keep each user's last item by time for the test, and the last but one for validation.

    Of equal times, the item that is stored last counts as the last.

    Args:
      clients: with a column `item`, in which a user has no item twice.
      time: the column to sort by; None for stored order.
      valid: whether the last but one is kept for validation; otherwise it trains.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> columns = {"item": np.array([5, 6, 7]), "time": np.array([3, 1, 2])}
      >>> clients = fr.Clients.from_columns(columns, client=np.zeros(3, int))
      >>> fr.recommend.leave_one_out(clients, valid=False).train.item.tolist()
      [6, 7]
    """
    rows = rows_of(clients.starts, clients.ends)
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    when = np.arange(len(rows)) if time is None else np.asarray(clients.columns[time])[rows]
    order = np.lexsort((np.arange(len(rows)), when, owner))
    owner, item = owner[order], np.asarray(clients.columns["item"])[rows][order]
    left = np.repeat(np.cumsum(clients.sizes), clients.sizes) - np.arange(len(owner))  # 1 for a user's last
    size = clients.sizes[owner]
    is_test = (left == 1) & (size >= 2)
    is_valid = (left == 2) & (size >= 3) & valid
    parts = (~is_test & ~is_valid, is_valid, is_test)
    return LeaveOneOut(*(ItemSets(len(clients), owner[part], item[part]) for part in parts))


def sample_candidates(
    test: ItemSets, exclude: Sequence[ItemSets], num_items: int, *, number: int = 99, seed: int = 0
) -> np.ndarray:
    """Draw items for each test item to be ranked against: `(test items, number)`, without repeats.

    Args:
      test: one or more items of each user.
      exclude: items of the users that are not drawn, usually all that they have.
      num_items: item ids are 0 to `num_items - 1`.
      number: how many are drawn for each.
      seed: of the draw.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> test = fr.recommend.ItemSets(1, np.array([0]), np.array([2]))
      >>> sorted(fr.recommend.sample_candidates(test, [test], 4, number=3)[0].tolist())
      [0, 1, 3]
    """
    rng = np.random.default_rng(seed)
    taken = np.unique(np.concatenate([part.user.astype(np.int64) * num_items + part.item for part in (*exclude, test)]))
    bounds = np.searchsorted(taken, np.arange(test.users + 1, dtype=np.int64) * num_items)
    result = np.zeros((len(test.item), number), np.int64)
    for row, user in enumerate(test.user):
        user_items = taken[bounds[user] : bounds[user + 1]] - user * num_items
        if num_items - len(user_items) < number:
            raise ValueError(f"`number` must be at most {num_items - len(user_items)} for user {user} (got {number})")
        # Ranks among the items that the user does not have become ids by counting the user's own that come before.
        ranks = np.sort(rng.choice(num_items - len(user_items), number, replace=False))
        result[row] = ranks + np.searchsorted(user_items - np.arange(len(user_items)), ranks, side="right")
    return result


class CandidateResult(NamedTuple):
    """HR and NDCG among sampled candidates.

    Attributes:
      metrics: `{"hr@10": ..., "ndcg@10": ...}`, means over test items.
      ranks: of each test item, from 0; ties count against it.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> test = fr.recommend.ItemSets(1, np.array([0]), np.array([2]))
      >>> score = fr.recommend.score_seen(lambda begin, end: np.array([[0.1, 0.9, 0.5]]))
      >>> fr.recommend.rank_candidates(score, test, test, np.array([[0, 1]])).ranks.tolist()
      [1]
    """

    metrics: dict[str, float]
    ranks: np.ndarray


def rank_candidates(
    score: Scorer, support: ItemSets, test: ItemSets, candidates: np.ndarray, *, at: Sequence[int] = (10,)
) -> CandidateResult:
    """Rank each test item among its candidates.

    Args:
      score: returns scores of `(users, items)` from the users' support items. A method whose users keep something, and
        so has scores for those who trained only, is given by `score_seen`.
      support: what models see of the users.
      test: the test items.
      candidates: `(test items, number)` from `sample_candidates`, or as published.
      at: values of k.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> sets = fr.recommend.ItemSets(1, np.array([0]), np.array([2]))
      >>> score = fr.recommend.popularity(sets, 4)
      >>> none = sets._replace(user=sets.user[:0], item=sets.item[:0])
      >>> fr.recommend.rank_candidates(score, none, sets, np.array([[0, 1]]), at=(1,)).metrics
      {'hr@1': 1.0, 'ndcg@1': 1.0}
    """
    ranks = np.zeros(len(test.item), np.int64)
    for begin in range(0, test.users, USERS_AT_ONCE):
        first, last = np.searchsorted(test.user, [begin, begin + USERS_AT_ONCE])
        scores = np.asarray(score(support.rows(begin, begin + USERS_AT_ONCE)), np.float64)
        user, item = test.user[first:last] - begin, test.item[first:last]
        candidate_scores = scores[user[:, None], candidates[first:last]]
        ranks[first:last] = (candidate_scores >= scores[user, item][:, None]).sum(1)
    return summarize_ranks(ranks, at)


def summarize_ranks(ranks: np.ndarray, at: Sequence[int] = (10,)) -> CandidateResult:
    """Return HR and NDCG of single test items from their ranks, which start from 0."""
    metrics = {f"hr@{k}": float(np.mean(ranks < k)) for k in at}
    gain = 1 / np.log2(2 + ranks)
    return CandidateResult(metrics | {f"ndcg@{k}": float(np.mean(np.where(ranks < k, gain, 0))) for k in at}, ranks)


def score_seen(scores: Callable[[int, int], np.ndarray]) -> Scorer:
    """Return a scorer of users who trained, whose scores do not follow from support: they are asked for in order.

    Args:
      scores: `(begin, end) -> (users, items)`.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> table = np.array([[0.1, 0.9], [0.8, 0.2]])  # one row for each user who trained
      >>> score = fr.recommend.score_seen(lambda begin, end: table[begin:end])
      >>> score(fr.recommend.ItemSets(2, np.array([0, 1]), np.array([0, 1]))).argmax(1).tolist()
      [1, 0]
    """
    done = 0

    def score(support: ItemSets) -> np.ndarray:
        nonlocal done
        done += support.users
        return scores(done - support.users, done)

    return score


class NegativesCheck(NamedTuple):
    """What the negatives of a data loader alone tell about its test items.

    Attributes:
      metrics: HR and NDCG of a ranking by "how often was I told 0", the fewest first.
      chance: HR@k of a ranking by chance.
      never: the share of test items that never were a negative of their user.
      expected_never: that share if test items were drawn as often as the candidates are.
      users: how many test items there are.

    Example:
      >>> import fedrecon as fr
      >>> check = fr.recommend.NegativesCheck({}, {}, never=0.9, expected_never=0.3, users=100)
      >>> check.leaks
      True
    """

    metrics: dict[str, float]
    chance: dict[str, float]
    never: float
    expected_never: float
    users: int

    @property
    def leaks(self) -> bool:
        """Whether test items are drawn less often than others, by more than three standard errors."""
        error = (self.expected_never * (1 - self.expected_never) / self.users) ** 0.5
        return self.never > self.expected_never + 3 * error


def check_negatives(
    negatives: Iterable[tuple[Any, Any]],
    test: ItemSets,
    candidates: np.ndarray,
    *,
    at: Sequence[int] = (10,),
) -> NegativesCheck:
    """Measure how well counts of negative labels alone rank the test items, without any learning.

    Negatives must be drawn without looking at the test. If they are drawn from "all items minus everything that the
    user has", test items included, the test item is the one item without a label of 0 that the user might have, and
    after enough rounds this rule finds it. Run a data loader for as many rounds as a training would, and give what it
    yields.

    Args:
      negatives: `(user, item)` arrays of pairs with label 0, such as one of each batch or round.
      test: one test item for each user.
      candidates: `(test items, number)`, what they are ranked against.
      at: values of k.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> test = fr.recommend.ItemSets(1, np.array([0]), np.array([2]))
      >>> found = fr.recommend.check_negatives([([0, 0], [0, 1])], test, np.array([[0, 1]]), at=(1,))
      >>> found.metrics["hr@1"], found.never  # items 0 and 1 were negatives, so it must be 2
      (1.0, 1.0)
    """
    columns = np.column_stack([test.item, candidates])
    stride = int(columns.max()) + 1
    keys, places = np.unique(test.user[:, None].astype(np.int64) * stride + columns, return_inverse=True)
    zero_labels = np.zeros(len(keys))
    for user, item in negatives:
        user, item = np.asarray(user, np.int64), np.asarray(item, np.int64)
        pairs = (user * stride + item)[item < stride]
        slot = np.minimum(np.searchsorted(keys, pairs), len(keys) - 1)
        np.add.at(zero_labels, slot[keys[slot] == pairs], 1)
    counts = zero_labels[places].reshape(columns.shape)
    ranks = (counts[:, 1:] <= counts[:, :1]).sum(1)
    share = {f"hr@{k}": min(1.0, k / columns.shape[1]) for k in at}
    never, expected = float(np.mean(counts[:, 0] == 0)), float(np.mean(counts[:, 1:] == 0))
    return NegativesCheck(summarize_ranks(ranks, at).metrics, share, never, expected, len(test.item))
