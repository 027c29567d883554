"""Rank items for users that training never saw: metrics and baselines.

The protocol is strong generalization: a share of a held-out user's items is known (usually 80 %), the rest is hidden
among all other items, and a model that sees the known ones ranks all items. The definitions:

- Known items are excluded from the ranking.
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
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.formatting import lay_out
from fedrecon._src.core.split import Split, fraction
from fedrecon._src.recommend.baselines import divided
from fedrecon._src.simulation.personalization import reconstruct

KNOWN = 0.8
RECALL_AT, NDCG_AT, HIT_AT = (20, 50), (100,), (20,)
SCORES_AT_ONCE = 2**22  # numbers in a block of users by items


class Sets(NamedTuple):
    """A set of items for each of some users: pairs of user (from 0) and item, users ascending, and maybe weights."""

    users: int
    user: np.ndarray
    item: np.ndarray
    weight: np.ndarray | None = None

    def rows(self, begin: int, end: int) -> Sets:
        """Return the users from `begin` to `end`, numbered from 0.

        Args:
          begin: the first user.
          end: one past the last user.
        """
        first, last = np.searchsorted(self.user, [begin, end])
        weight = None if self.weight is None else self.weight[first:last]
        return Sets(end - begin, self.user[first:last] - begin, self.item[first:last], weight)

    def matrix(self, num_items: int) -> np.ndarray:
        """Return `(users, items)` with 1 for every item in a set, 0 elsewhere.

        Args:
          num_items: item ids are 0 to `num_items - 1`.
        """
        found = np.zeros((self.users, num_items), np.float32)
        found[self.user, self.item] = 1
        return found


Scorer = Callable[[Sets], np.ndarray]  # known items of users -> scores of (users, items)


class Division(NamedTuple):
    """The items of held-out users, divided into known and hidden ones."""

    known: Sets
    hidden: Sets


def strong_generalization(clients: Clients, known: float = KNOWN, *, seed: int = 0) -> Division:
    """Divide the items of held-out users at random into known and hidden ones.

    Users with a single item keep it, and are not measured.

    Args:
      clients: held-out users, with a column `item`; a repeated item counts once.
      known: the share of a user's items that is known.
      seed: decides which items are known.
    """
    once = _without_repeats(clients)
    return divide(once.shuffle(seed), fraction(known))


def divide(clients: Clients, split: Split) -> Division:
    """Divide the items of users as `split` divides examples: support is known, query is hidden.

    Args:
      clients: held-out users, with a column `item` in which no item is repeated, and maybe a column `weight`.
      split: how examples become support and query.
    """
    weighted = "weight" in clients.columns
    weight = clients.columns["weight"] if weighted else np.ones(len(clients.columns["item"]), np.float32)
    renamed = dataclasses.replace(clients, columns={**clients.columns, "rating": weight})
    sides = divided(renamed, split)[1:]
    return Division(*(Sets(len(clients), side.client, side.item, side.rating if weighted else None) for side in sides))


def sets_of(clients: Clients) -> Sets:
    """Return the items of each client.

    Args:
      clients: with a column `item`; a repeated item counts once.
    """
    once = _without_repeats(clients)
    owner = np.repeat(np.arange(len(once)), once.sizes)
    return Sets(len(once), owner, once.columns["item"][rows_of(once.starts, once.ends)])


def _without_repeats(clients: Clients) -> Clients:
    rows = rows_of(clients.starts, clients.ends)
    owner, item = np.repeat(np.arange(len(clients)), clients.sizes), clients.columns["item"][rows]
    pairs = np.unique(np.stack([owner, item], 1), axis=0)
    ends = np.cumsum(np.bincount(pairs[:, 0], minlength=len(clients)))
    return Clients({"item": pairs[:, 1].astype(item.dtype)}, np.append(0, ends[:-1])[: len(ends)], ends)


# ---- metrics ----


@dataclasses.dataclass(frozen=True)
class Ranked:
    """How well items are ranked for held-out users.

    Attributes:
      users: how many users have hidden items, and are measured.
      metrics: means over them, as `{"recall@20": ...}`, and coverage.
      errors: the standard error of each mean.
      per_client: each metric of each user, NaN for those that are not measured.
    """

    users: int
    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    per_client: Mapping[str, np.ndarray] = dataclasses.field(repr=False)


def rank(
    score: Scorer,
    division: Division,
    num_items: int,
    *,
    recall_at: Sequence[int] = RECALL_AT,
    ndcg_at: Sequence[int] = NDCG_AT,
    hit_at: Sequence[int] = HIT_AT,
    coverage_at: int = 20,
) -> Ranked:
    """Measure how a scorer ranks the hidden items of users.

    Args:
      score: returns scores of `(users, items)` from the users' known items; higher is better.
      division: known and hidden items.
      num_items: item ids are 0 to `num_items - 1`.
      recall_at: values of k for recall.
      ndcg_at: values of k for NDCG.
      hit_at: values of k for the hit rate.
      coverage_at: k for coverage.
    """
    names = [f"recall@{k}" for k in recall_at] + [f"ndcg@{k}" for k in ndcg_at] + [f"hit@{k}" for k in hit_at]
    values = {name: np.full(division.known.users, np.nan) for name in names}
    recommended = np.zeros(num_items, bool)
    many = max(1, SCORES_AT_ONCE // num_items)
    for begin in range(0, division.known.users, many):
        end = min(begin + many, division.known.users)
        known, hidden = (part.rows(begin, end) for part in division)
        scores = np.array(score(known), np.float64)
        if scores.shape != (end - begin, num_items) or np.isnan(scores).any():
            raise ValueError(f"scores must be of shape ({end - begin}, {num_items}), without NaN, not {scores.shape}")
        scores[known.user, known.item] = -np.inf
        places = hidden_places(scores, known, hidden)
        for k in recall_at:
            values[f"recall@{k}"][begin:end] = recall(places, k)
        for k in ndcg_at:
            values[f"ndcg@{k}"][begin:end] = ndcg(places, k)
        for k in hit_at:
            values[f"hit@{k}"][begin:end] = hit_rate(places, k)
        recommended[_first(scores, np.bincount(hidden.user, minlength=hidden.users) > 0, coverage_at)] = True
    return _summed_up(values, float(recommended.mean()), coverage_at)


def _summed_up(values: Mapping[str, np.ndarray], coverage: float, coverage_at: int) -> Ranked:
    there = ~np.isnan(next(iter(values.values())))
    users = int(there.sum())
    if not users:
        raise ValueError("none of the users has hidden items to rank")
    spread = {name: float(v[there].std() / max(users - 1, 1) ** 0.5) for name, v in values.items()}
    means = {name: float(v[there].mean()) for name, v in values.items()}
    return Ranked(users, means | {f"coverage@{coverage_at}": coverage}, spread, values)


class Places(NamedTuple):
    """Ranks of hidden items: each comes after `better` items, and `tied` items have its score, itself included."""

    users: int
    user: np.ndarray
    better: np.ndarray
    tied: np.ndarray


def hidden_places(scores: np.ndarray, known: Sets, hidden: Sets) -> Places:
    """Return the ranks of hidden items.

    Args:
      scores: `(users, items)`, higher is better; minus infinity for known items.
      known: known items of the users.
      hidden: hidden items of the users.
    """
    ordered = np.sort(scores, 1)  # (users, items), the best last
    num_items = scores.shape[1]
    known_count = np.bincount(known.user, minlength=known.users)
    mine = scores[hidden.user, hidden.item]
    twice = np.isin(hidden.user * num_items + hidden.item, known.user * num_items + known.item)
    if twice.any():
        user, item = hidden.user[twice][0], hidden.item[twice][0]
        raise ValueError(f"item {item} of user {user} is both known and hidden; an item can only be one of them")
    bounds = np.searchsorted(hidden.user, np.arange(hidden.users + 1))
    low, high = np.zeros(len(mine), np.int64), np.zeros(len(mine), np.int64)
    for u, (a, b) in enumerate(itertools.pairwise(bounds)):
        low[a:b] = np.maximum(np.searchsorted(ordered[u], mine[a:b], "left"), known_count[u])
        high[a:b] = np.searchsorted(ordered[u], mine[a:b], "right")
    return Places(hidden.users, hidden.user, num_items - high, high - low)


def recall(places: Places, k: int) -> np.ndarray:
    """Return each user's recall among the first `k`; NaN without hidden items.

    Args:
      places: the ranks of the hidden items.
      k: how many items are shown.
    """
    count = np.bincount(places.user, minlength=places.users)
    found = np.bincount(places.user, _chance(places, k), places.users)
    return np.where(count > 0, found / np.clip(count, 1, k), np.nan)


def ndcg(places: Places, k: int) -> np.ndarray:
    """Return each user's normalised discounted cumulative gain among the first `k`; NaN without hidden items.

    Args:
      places: the ranks of the hidden items.
      k: how many items are shown.
    """
    gains = np.append(0, np.cumsum(1 / np.log2(np.arange(2, k + 2))))  # of the first 0, 1, ... places together
    count = np.bincount(places.user, minlength=places.users)
    last = np.minimum(places.better + places.tied, k)
    expected = (gains[last] - gains[np.minimum(places.better, k)]) / places.tied
    return np.where(count > 0, np.bincount(places.user, expected, places.users) / gains[np.clip(count, 1, k)], np.nan)


def hit_rate(places: Places, k: int) -> np.ndarray:
    """Return each user's chance of a hidden item among the first `k`; NaN without hidden items.

    If a group of equal scores lies across rank `k`, some of it is drawn. The chance that no hidden item is among those
    is a product with one factor per hidden item.

    Args:
      places: the ranks of the hidden items.
      k: how many items are shown.
    """
    count = np.bincount(places.user, minlength=places.users)
    certain = np.bincount(places.user, places.better + places.tied <= k, places.users) > 0
    across = (places.better < k) & (places.better + places.tied > k)
    user, better, tied = (part[across] for part in places[1:])
    first = np.r_[True, user[1:] != user[:-1]]  # of each user; only one group of equal scores lies across k
    nth = np.arange(len(user)) - np.flatnonzero(first)[np.cumsum(first) - 1] if len(user) else user
    out = np.maximum(1 - (k - better) / (tied - nth), 0)  # the nth hidden item is not drawn if none before it was
    miss = np.ones(places.users)
    np.multiply.at(miss, user, out)
    return np.where(count > 0, np.where(certain, 1.0, 1 - miss), np.nan)


def _chance(places: Places, k: int) -> np.ndarray:
    """Return each hidden item's chance of being among the first `k`."""
    return np.clip((k - places.better) / places.tied, 0, 1)


def _first(scores: np.ndarray, counted: np.ndarray, k: int) -> np.ndarray:
    """Return the ids of items among the first `k` of users where `counted` is true, without known items."""
    scores = scores[counted]
    best = np.argsort(-scores, 1, kind="stable")[:, :k]
    return np.unique(best[np.take_along_axis(scores, best, 1) > -np.inf])


# ---- baselines ----


def popularity(train: Sets, num_items: int) -> Scorer:
    """Rank items by how many users have them.

    Args:
      train: what the training users have.
      num_items: item ids are 0 to `num_items - 1`.
    """
    return by_count(np.bincount(train.item, minlength=num_items))


def by_count(counts: np.ndarray) -> Scorer:
    """Rank items by counts, the same for every user.

    Args:
      counts: one for each item.
    """
    scores = np.asarray(counts, np.float64)
    return lambda known: np.broadcast_to(scores, (known.users, len(scores)))


def item_knn(
    train: Sets, num_items: int, *, neighbours: int = 100, shrink: float = 20.0, both: np.ndarray | None = None
) -> Scorer:
    """Rank items by how similar they are to those that a user has: cosines, shrunk if few users have both.

    Args:
      train: what the training users have.
      num_items: item ids are 0 to `num_items - 1`.
      neighbours: use only this many of the items most similar to each item.
      shrink: added to the denominator of the cosine.
      both: what `together` returns for these users, if it is already computed.
    """
    both = together(train, num_items) if both is None else both
    count = np.diag(both).copy()
    similar = both / (np.sqrt(np.outer(count, count)) + shrink + 1e-12)
    np.fill_diagonal(similar, 0)
    if neighbours < num_items:
        least = np.partition(similar, num_items - neighbours, 0)[num_items - neighbours]
        similar[similar < least] = 0
    return lambda known: known.matrix(num_items) @ similar


def ease(train: Sets, num_items: int, *, ridge: float = 300.0, both: np.ndarray | None = None) -> Scorer:
    """Rank items by a linear autoencoder without a diagonal, in closed form.

    Args:
      train: what the training users have.
      num_items: item ids are 0 to `num_items - 1`.
      ridge: on all weights.
      both: what `together` returns for these users, if it is already computed.

    References:
      Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019.
    """
    if not ridge > 0:
        raise ValueError(f"`ridge` is {ridge}; it must be above 0")
    both = together(train, num_items) if both is None else both
    inverse = np.linalg.inv(both.astype(np.float64) + ridge * np.eye(num_items))
    weights = (-inverse / np.diag(inverse)).astype(np.float32)
    np.fill_diagonal(weights, 0)
    return lambda known: known.matrix(num_items) @ weights


def together(sets: Sets, num_items: int) -> np.ndarray:
    """Return how many users have both of two items, `(items, items)`.

    Args:
      sets: of the users.
      num_items: item ids are 0 to `num_items - 1`.
    """
    found = np.zeros((num_items, num_items), np.float32)
    many = max(1, SCORES_AT_ONCE // num_items)
    for begin in range(0, sets.users, many):
        block = sets.rows(begin, min(begin + many, sets.users)).matrix(num_items)
        found += block.T @ block
    return found


# ---- models ----


def by_model(algorithm: Algorithm, params: Any) -> Scorer:
    """Rank items by a trained model: reconstruct a user from the known items, and score all items.

    Args:
      algorithm: one whose model reads items from the column `item`, as `models.ranking_factorization` does.
      params: its global parameters, with a row of `item_embedding` for each item.
    """
    num_items = len(params["item_embedding"])
    every = {"item": jnp.arange(num_items, dtype=jnp.int32)}
    score = jax.jit(jax.vmap(lambda params, local: algorithm.model.predict(params, local, every), (None, 0)))

    def scores(known: Sets) -> np.ndarray:
        ends = np.searchsorted(known.user, np.arange(known.users), side="right")
        columns = {"item": known.item.astype(np.int32)}
        if known.weight is not None:
            columns["weight"] = known.weight.astype(np.float32)
        clients = Clients(columns, np.append(0, ends[:-1])[: known.users], ends)
        return np.asarray(score(params, reconstruct(algorithm, params, clients)))

    return scores


def table(results: Mapping[str, Ranked]) -> str:
    """Return results as a text table, one line each.

    Args:
      results: the results, by name.
    """
    names = list(next(iter(results.values())).metrics)
    cells = [[name, *(f"{result.metrics[m]:.4f}" for m in names)] for name, result in results.items()]
    return "\n".join(lay_out([["", *names], *cells], right=True))
