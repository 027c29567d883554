"""Rank items for users that training never saw: metrics and baselines.

The protocol is strong generalization: a share of a held-out user's items is known (usually 80 %), the rest is hidden
among all other items, and a model that sees the support ones ranks all items. The definitions:

- Support items are excluded from the ranking.
- Equal scores are in random order, and metrics are expectations over that order. A model that gives every item the
  same score is as good as chance, whatever ids the items have.
- Recall at k is the number of hidden items among the first k, divided by the number of hidden items or by k, whichever
  is less. NDCG at k has gain 1 for a hidden item and discount 1 / log2(1 + rank). Hit rate at k is the share of users
  with a hidden item among the first k.
- Coverage at k is the share of all items that are among the first k of any user; equal scores are in order of id.
- Means are over users with hidden items; other users are not measured.

References:
  Liang et al., Variational Autoencoders for Collaborative Filtering, WWW 2018 (protocol, recall, NDCG).
  Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019 (EASE).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.federated_ials import BLEND_AFTER
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.model import Model
from fedrecon._src.core.split import Split
from fedrecon._src.recommend.baselines import split_examples
from fedrecon._src.simulation.evaluation import predict, reconstruct

RECALL_AT, NDCG_AT, HIT_AT = (20, 50), (100,), (20,)
SCORES_AT_ONCE = 2**22  # numbers in a block of users by items


class ItemSets(NamedTuple):
    """A set of items for each of some users: pairs of user (from 0) and item, users ascending, and maybe weights.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> fr.recommend.item_sets(clients).matrix(3).tolist()
      [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """

    users: int
    user: np.ndarray
    item: np.ndarray
    weight: np.ndarray | None = None

    def rows(self, begin: int, end: int) -> ItemSets:
        """Return the users from `begin` to `end`, numbered from 0.

        Args:
          begin: the first user.
          end: one past the last user; the last of all if there are fewer.
        """
        end = min(end, self.users)
        first, last = np.searchsorted(self.user, [begin, end])
        weight = None if self.weight is None else self.weight[first:last]
        return ItemSets(end - begin, self.user[first:last] - begin, self.item[first:last], weight)

    def matrix(self, num_items: int) -> np.ndarray:
        """Return `(users, items)` with 1 for every item in a set, 0 elsewhere.

        Args:
          num_items: item ids are 0 to `num_items - 1`.
        """
        matrix = np.zeros((self.users, num_items), np.float32)
        matrix[self.user, self.item] = 1
        return matrix


Scorer = Callable[[ItemSets], np.ndarray]  # support items of users -> scores of (users, items)


class Holdout(NamedTuple):
    """The items of held-out users, split into support, which a model sees, and hidden ones, which it must find.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> holdout = fr.recommend.split_items(clients, fr.split.half())
      >>> holdout.support.item.tolist(), holdout.hidden.item.tolist()
      ([0, 0, 0], [1, 2])
    """

    support: ItemSets
    hidden: ItemSets


def split_items(clients: Clients, split: Split) -> Holdout:
    """Divide the items of users as `split` divides examples: the query is hidden.

    Args:
      clients: held-out users, with a column `item` in which no item is repeated, and maybe a column `weight`.
      split: how examples become support and query.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> fr.recommend.split_items(clients, fr.split.half()).hidden.item.tolist()
      [1, 2]
    """
    sides = split_examples(clients, split, *(["weight"] if "weight" in clients.columns else []))
    return Holdout(*(ItemSets(len(clients), side["client"], side["item"], side.get("weight")) for side in sides))


def item_sets(clients: Clients) -> ItemSets:
    """Return the items of each client.

    Args:
      clients: with a column `item`; a repeated item counts once.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> fr.recommend.item_sets(clients).item.tolist()
      [0, 1, 0, 2, 0]
    """
    rows = rows_of(clients.starts, clients.ends)
    owner, item = np.repeat(np.arange(len(clients)), clients.sizes), clients.columns["item"][rows]
    pairs = np.unique(np.stack([owner, item], 1), axis=0)
    return ItemSets(len(clients), pairs[:, 0], pairs[:, 1].astype(item.dtype))


# ---- the best items ----


def top_items(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the `n` highest scores, best first; of equal ones, those with the lower index.

    Args:
      scores: `(items,)`; items with a score of NaN or infinity are left out.
      n: how many; fewer if not enough are left.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> fr.recommend.top_items(np.array([0.5, 2.0, -np.inf, 0.5]), 2).tolist()
      [1, 0]
    """
    check_number("n", n, least=1)
    items = np.flatnonzero(np.isfinite(scores))
    if n < len(items):
        values = scores[items]
        items = items[values >= -np.partition(-values, n - 1)[n - 1]]
    return items[np.lexsort((items, -scores[items]))][:n]


class Recommendation(NamedTuple):
    """Items for one client, best first, and the predictions for them.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> fr.recommend.Recommendation(items=np.array([4, 2]), scores=np.array([4.5, 4.1])).items.tolist()
      [4, 2]
    """

    items: np.ndarray
    scores: np.ndarray


def recommend_items(
    model: Model, params: Any, local: Any, *, num_items: int, exclude: Any = (), n: int = 10, feature: str = "item"
) -> Recommendation:
    """Recommend the `n` items with the highest predictions for one client.

    Args:
      model: a model whose predictions read `feature` and nothing else.
      params: global parameters.
      local: the client's local parameters, as `fr.reconstruct` returns them.
      num_items: items are 0 to `num_items - 1`.
      exclude: items to leave out, such as those that the client has rated.
      n: how many items; fewer if not enough are left.
      feature: the feature that holds item ids.

    Returns:
      Items and their predictions, best first; of equal ones, the item with the lower number comes first.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> model = fr.models.matrix_factorization(3, 2)
      >>> params = {"item_embedding": np.float32([[1, 0], [0, 1], [2, 0]])}
      >>> local = {"user_embedding": np.float32([1, 1])}
      >>> fr.recommend.recommend_items(model, params, local, num_items=3, exclude=[2], n=2).items.tolist()
      [0, 1]
    """
    exclude = np.asarray(exclude, np.int64)
    if exclude.size and not 0 <= exclude.min() <= exclude.max() < num_items:
        raise ValueError(f"`exclude` must be items from 0 to {num_items - 1} (got {exclude.min()} to {exclude.max()})")
    scores = predict(model, params, local, {feature: np.arange(num_items, dtype=np.int32)}).astype(np.float64)
    if scores.size != num_items:
        raise ValueError(f"predictions for {num_items} items must have shape ({num_items},) (got {scores.shape})")
    scores = scores.reshape(num_items)  # a layer with one output returns (items, 1)
    scores[exclude] = -np.inf
    items = top_items(scores, n)
    return Recommendation(items, scores[items])


# ---- metrics ----


@dataclasses.dataclass(frozen=True)
class RankingResult:
    """How well items are ranked for held-out users.

    Attributes:
      users: how many users have hidden items, and are measured.
      metrics: means over them, as `{"recall@20": ...}`, and coverage.
      errors: the standard error of each mean.
      per_client: each metric of each user, NaN for those that are not measured.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> holdout = fr.recommend.split_items(clients, fr.split.half())
      >>> score = fr.recommend.popularity(fr.recommend.item_sets(clients), 3)
      >>> result = fr.recommend.rank(score, holdout, 3, recall_at=[1])
      >>> result.users, result.metrics["recall@1"]
      (2, 0.5)
    """

    users: int
    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    per_client: Mapping[str, np.ndarray] = dataclasses.field(repr=False)


def rank(
    score: Scorer,
    holdout: Holdout,
    num_items: int,
    *,
    recall_at: Sequence[int] = RECALL_AT,
    ndcg_at: Sequence[int] = NDCG_AT,
    hit_at: Sequence[int] = HIT_AT,
    coverage_at: int | None = 20,
) -> RankingResult:
    """Measure how a scorer ranks the hidden items of users.

    Args:
      score: returns scores of `(users, items)` from the users' support items; higher is better.
      holdout: support and hidden items.
      num_items: item ids are 0 to `num_items - 1`.
      recall_at: values of k for recall.
      ndcg_at: values of k for NDCG.
      hit_at: values of k for the hit rate.
      coverage_at: k for coverage; None to leave it out.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> holdout = fr.recommend.split_items(clients, fr.split.half())
      >>> score = fr.recommend.popularity(fr.recommend.item_sets(clients), 3)
      >>> result = fr.recommend.rank(score, holdout, 3, recall_at=[1])
      >>> result.users, result.metrics["recall@1"]
      (2, 0.5)
    """
    metrics = ((recall, "recall", recall_at), (ndcg, "ndcg", ndcg_at), (hit_rate, "hit", hit_at))
    measures = {f"{name}@{k}": functools.partial(measure, k=k) for measure, name, at in metrics for k in at}
    values = {name: np.full(holdout.support.users, np.nan) for name in measures}
    recommended = np.zeros(num_items, bool)
    many = max(1, SCORES_AT_ONCE // num_items)
    for begin in range(0, holdout.support.users, many):
        support, hidden = (part.rows(begin, begin + many) for part in holdout)
        scores = np.array(score(support), np.float64)
        if scores.shape != (support.users, num_items) or np.isnan(scores).any():
            raise ValueError(f"scores must have shape ({support.users}, {num_items}), without NaN (got {scores.shape})")
        scores[support.user, support.item] = -np.inf
        ranks = rank_hidden(scores, support, hidden)
        for name, measure in measures.items():
            values[name][begin : begin + many] = measure(ranks)
        if coverage_at is not None:
            for user in np.unique(hidden.user):
                recommended[top_items(scores[user], coverage_at)] = True
    measured = ~np.isnan(next(iter(values.values())))
    users = int(measured.sum())
    if not users:
        raise ValueError("none of the users has hidden items to rank")
    spread = {name: float(v[measured].std() / max(users - 1, 1) ** 0.5) for name, v in values.items()}
    means = {name: float(v[measured].mean()) for name, v in values.items()}
    covered = {} if coverage_at is None else {f"coverage@{coverage_at}": float(recommended.mean())}
    return RankingResult(users, means | covered, spread, values)


class HiddenRanks(NamedTuple):
    """Ranks of hidden items: each comes after `better` items, and `tied` items have its score, itself included.

    `sizes` has how many hidden items each user has.
    """

    sizes: np.ndarray
    user: np.ndarray
    better: np.ndarray
    tied: np.ndarray


def rank_hidden(scores: np.ndarray, support: ItemSets, hidden: ItemSets) -> HiddenRanks:
    """Return the ranks of hidden items.

    Args:
      scores: `(users, items)`, higher is better; minus infinity for support items.
      support: the users' support items.
      hidden: their hidden items.
    """
    ordered = np.sort(scores, 1)  # (users, items), the best last
    num_items = scores.shape[1]
    support_count = np.bincount(support.user, minlength=support.users)
    values = scores[hidden.user, hidden.item]
    repeated = np.isin(hidden.user * num_items + hidden.item, support.user * num_items + support.item)
    if repeated.any():
        user, item = hidden.user[repeated][0], hidden.item[repeated][0]
        raise ValueError(f"item {item} of user {user} is both in the support and hidden")
    bounds = np.searchsorted(hidden.user, np.arange(hidden.users + 1))
    low, high = np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
    for u, (a, b) in enumerate(itertools.pairwise(bounds)):
        low[a:b] = np.maximum(np.searchsorted(ordered[u], values[a:b], "left"), support_count[u])
        high[a:b] = np.searchsorted(ordered[u], values[a:b], "right")
    return HiddenRanks(np.diff(bounds), hidden.user, num_items - high, high - low)


def recall(ranks: HiddenRanks, k: int) -> np.ndarray:
    """Return each user's recall among the first `k`; NaN without hidden items.

    Args:
      ranks: the ranks of the hidden items.
      k: how many items are shown.
    """
    chance = np.clip((k - ranks.better) / ranks.tied, 0, 1)  # of each hidden item to be among the first k
    hits = np.bincount(ranks.user, chance, len(ranks.sizes))
    return np.where(ranks.sizes > 0, hits / np.clip(ranks.sizes, 1, k), np.nan)


def ndcg(ranks: HiddenRanks, k: int) -> np.ndarray:
    """Return each user's normalised discounted cumulative gain among the first `k`; NaN without hidden items.

    Args:
      ranks: the ranks of the hidden items.
      k: how many items are shown.
    """
    gains = np.append(0, np.cumsum(1 / np.log2(np.arange(2, k + 2))))  # of the first 0, 1, ... ranks in total
    expected = (gains[np.minimum(ranks.better + ranks.tied, k)] - gains[np.minimum(ranks.better, k)]) / ranks.tied
    total = np.bincount(ranks.user, expected, len(ranks.sizes))
    return np.where(ranks.sizes > 0, total / gains[np.clip(ranks.sizes, 1, k)], np.nan)


def hit_rate(ranks: HiddenRanks, k: int) -> np.ndarray:
    """Return each user's chance of a hidden item among the first `k`; NaN without hidden items.

    If a group of equal scores lies across rank `k`, some of it is drawn. The chance that no hidden item is among those
    is a product with one factor per hidden item.

    Args:
      ranks: the ranks of the hidden items.
      k: how many items are shown.
    """
    certain = np.bincount(ranks.user, ranks.better + ranks.tied <= k, len(ranks.sizes)) > 0
    across = (ranks.better < k) & (ranks.better + ranks.tied > k)
    user, better, tied = (part[across] for part in ranks[1:])
    first = np.r_[True, user[1:] != user[:-1]]  # of each user; only one group of equal scores lies across k
    nth = np.arange(len(user)) - np.flatnonzero(first)[np.cumsum(first) - 1] if len(user) else user
    out = np.maximum(1 - (k - better) / (tied - nth), 0)  # the nth hidden item is not drawn if none before it was
    miss = np.ones(len(ranks.sizes))
    np.multiply.at(miss, user, out)
    return np.where(ranks.sizes > 0, np.where(certain, 1.0, 1 - miss), np.nan)


# ---- baselines ----


def popularity(train: ItemSets, num_items: int) -> Scorer:
    """Rank items by how many users have them.

    Args:
      train: what the training users have.
      num_items: item ids are 0 to `num_items - 1`.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> score = fr.recommend.popularity(fr.recommend.item_sets(clients), 3)
      >>> score(fr.recommend.item_sets(clients))[0].tolist()
      [3.0, 1.0, 1.0]
    """
    return score_by_count(np.bincount(train.item, minlength=num_items))


def score_by_count(counts: np.ndarray) -> Scorer:
    """Rank items by counts, the same for every user.

    Args:
      counts: one for each item.
    """
    scores = np.asarray(counts, np.float64)
    return lambda support: np.broadcast_to(scores, (support.users, len(scores)))


def item_knn(
    train: ItemSets,
    num_items: int,
    *,
    neighbours: int = 100,
    shrink: float = 20.0,
    pair_counts: np.ndarray | None = None,
) -> Scorer:
    """Rank items by how similar they are to those that a user has: cosines, shrunk if few users have both.

    Args:
      train: what the training users have.
      num_items: item ids are 0 to `num_items - 1`.
      neighbours: use only this many of the items most similar to each item.
      shrink: added to the denominator of the cosine.
      pair_counts: from `count_pairs`, if it is already computed.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> score = fr.recommend.item_knn(fr.recommend.item_sets(clients), 3)
      >>> score(fr.recommend.item_sets(clients)).shape
      (3, 3)
    """
    pairs = count_pairs(train, num_items) if pair_counts is None else pair_counts
    count = np.diag(pairs).copy()
    similar = pairs / (np.sqrt(np.outer(count, count)) + shrink + 1e-12)
    np.fill_diagonal(similar, 0)
    if neighbours < num_items:
        least = np.partition(similar, num_items - neighbours, 0)[num_items - neighbours]
        similar[similar < least] = 0
    return lambda support: support.matrix(num_items) @ similar


def ease(train: ItemSets, num_items: int, *, ridge: float = 300.0, pair_counts: np.ndarray | None = None) -> Scorer:
    """Rank items by a linear autoencoder without a diagonal, in closed form.

    Args:
      train: what the training users have.
      num_items: item ids are 0 to `num_items - 1`.
      ridge: on all weights.
      pair_counts: from `count_pairs`, if it is already computed.

    References:
      Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> score = fr.recommend.ease(fr.recommend.item_sets(clients), 3)
      >>> score(fr.recommend.item_sets(clients)).shape
      (3, 3)
    """
    check_number("ridge", ridge, above=True)
    pairs = count_pairs(train, num_items) if pair_counts is None else pair_counts
    system = pairs.astype(np.float64)
    system[np.diag_indices(num_items)] += ridge
    inverse = np.linalg.inv(system)
    weights = (-inverse / np.diag(inverse)).astype(np.float32)
    np.fill_diagonal(weights, 0)
    return lambda support: support.matrix(num_items) @ weights


def count_pairs(sets: ItemSets, num_items: int) -> np.ndarray:
    """Return how many users have both of two items, `(items, items)`.

    Args:
      sets: of the users.
      num_items: item ids are 0 to `num_items - 1`.
    """
    counts = np.zeros((num_items, num_items), np.float32)
    many = max(1, SCORES_AT_ONCE // num_items)
    for begin in range(0, sets.users, many):
        block = sets.rows(begin, begin + many).matrix(num_items)
        counts += block.T @ block
    return counts


# ---- models ----


def score_by_factors(params: Any, unobserved: float, ridge: float) -> Scorer:
    """Rank items by global parameters of `models.ranking_factorization`, in numpy: no program is compiled.

    Args:
      params: global parameters.
      unobserved: as for `federated_ials`.
      ridge: the same.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> params = fr.models.ranking_params(np.float32([[1], [2]]))
      >>> clients = fr.Clients.from_columns({"item": np.array([0])}, client=np.array([0]))
      >>> score = fr.recommend.score_by_factors(params, unobserved=0.2, ridge=1.0)
      >>> np.round(9 * score(fr.recommend.item_sets(clients))).tolist()  # 1/3 and 2/3
      [[3.0, 6.0]]
    """
    items, history = (np.asarray(params[name]) for name in ("item_embedding", "history_offset"))
    shared = unobserved * np.asarray(params["gram"], np.float64) + ridge * np.eye(items.shape[1])
    inverse = np.linalg.inv(shared).astype(np.float32)
    popularity, weights = (np.asarray(params[name]) for name in ("item_popularity", "popularity_weight"))

    def embed(item: np.ndarray, weight: np.ndarray) -> np.ndarray:
        rows, moment = np.sqrt(weight)[:, None] * items[item], weight @ (items[item] + history[item])
        if len(item) >= items.shape[1]:
            return np.linalg.solve(rows.T @ rows + shared, moment)
        corrected, first = rows @ inverse, inverse @ moment
        return first - corrected.T @ np.linalg.solve(np.eye(len(item)) + corrected @ rows.T, rows @ first)

    def scores(support: ItemSets) -> np.ndarray:
        bounds = np.searchsorted(support.user, np.arange(support.users + 1))
        weight = np.ones(len(support.item), np.float32) if support.weight is None else support.weight
        users = [embed(support.item[a:b], weight[a:b]) for a, b in itertools.pairwise(bounds)]
        blend = weights[np.searchsorted(BLEND_AFTER, np.diff(bounds), side="right") - 1]
        return (1 - blend[:, None]) * np.asarray(users, np.float32) @ items.T + blend[:, None] * popularity

    return scores


def score_by_model(algorithm: Algorithm, params: Any) -> Scorer:
    """Rank items by a trained model: reconstruct a user from the support items, and score all items.

    Args:
      algorithm: one whose model reads items from the column `item`, as `models.ranking_factorization` does.
      params: its global parameters, with a row of `item_embedding` for each item.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.score_by_model(algorithm, run.params)  # doctest: +SKIP
    """
    every = {"item": jnp.arange(len(params["item_embedding"]), dtype=jnp.int32)}
    score = jax.jit(jax.vmap(lambda params, local: algorithm.model.predict(params, local, every), (None, 0)))

    def scores(support: ItemSets) -> np.ndarray:
        bounds = np.searchsorted(support.user, np.arange(support.users + 1))
        columns = {"item": support.item.astype(np.int32)}
        if support.weight is not None:
            columns["weight"] = support.weight.astype(np.float32)
        return np.asarray(score(params, reconstruct(algorithm, params, Clients(columns, bounds[:-1], bounds[1:]))))

    return scores
