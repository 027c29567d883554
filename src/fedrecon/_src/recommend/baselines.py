"""Baselines that a model of ratings or of next words should beat, on the query examples that `evaluate` measures on.

Means and biases come first; the factor models are trained centrally, on all data in one place. Like the model under
test, a baseline sees only a new user's support examples.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.cohort import Needs, Packer
from fedrecon._src.core.formatting import lay_out
from fedrecon._src.core.split import Split, half
from fedrecon._src.data import Sentences
from fedrecon._src.recommend.estimate import Estimate
from fedrecon._src.recommend.round_zero import estimate_ratings

ACCURATE_WITHIN = 0.5
HELD_OUT = 0.1  # share of the training clients on which a central baseline's ridge is chosen
DIM = 16  # of the central factor models
SVD_RIDGES = (1.0, 3.0, 10.0, 30.0, 100.0)
ALS_RIDGES = (2.0, 5.0, 10.0, 20.0, 40.0)
SIMPLE = ("global mean", "item mean", "item + user bias")
CENTRAL = ("biases + SVD + ridge", "ALS + ridge")
MOST_SENTENCES = 2**18  # of the training clients that words are counted in: more hardly change what is counted
WORD_ENTRIES = 2**22  # words of sentences that are looked at together
WORD_COLUMNS = ("word", "oov", "target")
MOST_USED, FOLLOWING = "most used word", "most frequent next word"
PADDED_ENTRIES = 2**20  # in a block of groups that is solved at once


class RatingRows(NamedTuple):
    """Ratings one after another: the client, the item and the rating of each."""

    client: np.ndarray
    item: np.ndarray
    rating: np.ndarray


class RatingHoldout(NamedTuple):
    """Clients' examples split into support, which a baseline may use, and query, which it must predict."""

    clients: int
    support: RatingRows
    query: RatingRows


@dataclasses.dataclass(frozen=True)
class BaselineResults:
    """Results of the baselines on the query examples of clients.

    Attributes:
      clients: how many clients were measured.
      examples: how many query examples.
      table: `{baseline: {"rmse", "mae", "accuracy"}}`.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(num_users=60, num_items=20, seed=0)
      >>> train, test = ratings.split_clients(0.8, 0.2, seed=0)
      >>> results = fr.recommend.rating_baselines(train, test)
      >>> list(results.table)
      ['global mean', 'item mean', 'item + user bias']
    """

    clients: int
    examples: int
    table: Mapping[str, Mapping[str, float]]

    @property
    def best(self) -> str:
        """The name of the baseline with the smallest RMSE."""
        return min(self.table, key=lambda name: self.table[name]["rmse"])

    def __str__(self) -> str:
        """Lay the table out as text."""
        cells = [[name, *(f"{row[m]:.4f}" for m in ("rmse", "mae", "accuracy"))] for name, row in self.table.items()]
        return "\n".join(lay_out([["baseline", "RMSE", "MAE", "accuracy"], *cells], right=True))


def rating_baselines(
    train: Clients,
    test: Clients,
    *,
    split: Split | None = None,
    num_items: int | None = None,
    which: Sequence[str] = SIMPLE,
    tolerance: float = ACCURATE_WITHIN,
) -> BaselineResults:
    """Measure baselines for ratings on the query examples of clients that took no part in training.

    Predictions are clipped to the scale of the training clients' ratings.

    Args:
      train: what the baselines learn from; columns `item` and `rating`.
      test: clients to measure on.
      split: support and query, as given to `evaluate`; half and half by default.
      num_items: item ids are 0 to `num_items - 1`; by default as many as the columns of `train` and `test` have.
      which: names out of `SIMPLE` and `CENTRAL`. Central ones choose their ridge on a tenth of the training clients.
      tolerance: a prediction this close to the rating counts as accurate.

    Returns:
      A `BaselineResults`, to print or to look numbers up in.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(num_users=60, num_items=20, seed=0)
      >>> train, test = ratings.split_clients(0.8, 0.2, seed=0)
      >>> results = fr.recommend.rating_baselines(train, test)
      >>> list(results.table)
      ['global mean', 'item mean', 'item + user bias']
    """
    if unknown := set(which) - set(FITS):
        raise ValueError(f"unknown baseline {sorted(unknown)[0]!r}; use some of: {', '.join(FITS)}")
    if not len(train) or not len(test):
        raise ValueError(f"baselines need clients to learn from and to measure on, not {len(train)} and {len(test)}")
    if num_items is None:
        num_items = 1 + max(int(part.columns["item"].max()) for part in (train, test))
    split = split or half()
    holdout = split_ratings(test, split)
    if not len(holdout.query.rating):
        raise ValueError("none of the clients has query examples to measure on; use another split")
    estimate = estimate_ratings(train, num_items, trait_passes=0, transform="none")
    table = {}
    for name in which:
        guess = np.clip(FITS[name](estimate, train, split)(holdout), estimate.low, estimate.high)
        table[name] = rating_errors(guess, holdout.query.rating, tolerance)
    return BaselineResults(len(np.unique(holdout.query.client)), len(holdout.query.rating), table)


def rating_errors(guess: np.ndarray, rating: np.ndarray, tolerance: float = ACCURATE_WITHIN) -> dict[str, float]:
    """Return root mean squared error, mean absolute error and the share of accurate predictions.

    Args:
      guess: `(examples,)` predictions.
      rating: `(examples,)` the true ratings.
      tolerance: a prediction this close to the rating counts as accurate.
    """
    error = np.abs(guess - rating)
    return {
        "rmse": float(np.sqrt(np.mean(error**2))),
        "mae": float(error.mean()),
        "accuracy": float(np.mean(error <= tolerance)),
    }


def split_ratings(clients: Clients, split: Split) -> RatingHoldout:
    """Divide clients' examples into support and query just as `evaluate` does.

    Args:
      clients: with columns `item` and `rating`.
      split: how examples become support and query.
    """
    packer = Packer(clients, Needs(split, columns=("item", "rating")))
    sides: tuple[list[RatingRows], list[RatingRows]] = ([], [])
    many = max(1, PADDED_ENTRIES // sum(packer.lengths))
    for begin in range(0, len(clients), many):
        indices = np.arange(begin, min(begin + many, len(clients)))
        cohort = packer.pack(indices)
        for side, examples in zip(sides, (cohort.support, cohort.query), strict=True):
            mask = np.arange(examples.columns["item"].shape[1]) < examples.count[:, None]
            item, rating = (np.asarray(examples.columns[name])[mask] for name in ("item", "rating"))
            side.append(RatingRows(np.repeat(indices, examples.count), item, rating.astype(np.float64)))
    joined = [RatingRows(*map(np.concatenate, zip(*side, strict=True))) for side in sides]
    return RatingHoldout(len(clients), *joined)


# ---- means and biases ----

Predict = Callable[[RatingHoldout], np.ndarray]  # clients' examples -> predictions for the query ones
Fit = Callable[[Estimate, Clients, Split], Predict]


def _all_rows(clients: Clients) -> RatingRows:
    """Return all examples of clients, one after another."""
    rows = rows_of(clients.starts, clients.ends)
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    return RatingRows(owner, clients.columns["item"][rows], clients.columns["rating"][rows].astype(np.float64))


def _global_mean(estimate: Estimate, train: Clients, split: Split) -> Predict:
    del train, split
    return lambda holdout: np.full(len(holdout.query.rating), estimate.mean)


def item_means(train: Clients, num_items: int) -> np.ndarray:
    """Return each item's mean rating over these clients, and the mean of all ratings for items they have not rated.

    Args:
      train: with columns `item` and `rating`.
      num_items: item ids are 0 to `num_items - 1`.
    """
    rated = _all_rows(train)
    count = np.bincount(rated.item, minlength=num_items)
    total = np.bincount(rated.item, rated.rating, num_items)
    return np.where(count > 0, total / np.maximum(count, 1), rated.rating.mean())


def _item_mean(estimate: Estimate, train: Clients, split: Split) -> Predict:
    del split
    means = item_means(train, len(estimate.item_bias))
    return lambda holdout: means[holdout.query.item]


def _biases(estimate: Estimate, train: Clients, split: Split) -> Predict:
    del train, split

    def predict(holdout: RatingHoldout) -> np.ndarray:
        biases = fit_biases(estimate, holdout.support, holdout.clients)
        standardized = estimate.item_bias[holdout.query.item] + biases[holdout.query.client]
        return estimate.mean + estimate.deviation * standardized

    return predict


def fit_biases(estimate: Estimate, examples: RatingRows, clients: int) -> np.ndarray:
    """Return every client's bias: the mean residual of its standardised ratings, damped by the ridge.

    Args:
      estimate: the result of round zero.
      examples: the clients' ratings.
      clients: how many there are.
    """
    residual = estimate.standardize(examples.rating) - estimate.item_bias[examples.item]
    count = np.bincount(examples.client, minlength=clients)
    return np.bincount(examples.client, residual, clients) / (count + estimate.user_ridge)


# ---- factor models, trained centrally ----


def _svd(estimate: Estimate, train: Clients, split: Split) -> Predict:
    """Fit item factors as singular vectors of the residuals of the biases, and new users by ridge regression."""

    def candidates(part: Clients) -> Iterator[_Factors]:
        items = _singular_items(estimate, part, DIM)
        return (_Factors(items[:, :dim], ridge) for dim in (DIM // 4, DIM) for ridge in SVD_RIDGES)

    return _choose_best(candidates, estimate, train, split)


def _als(estimate: Estimate, train: Clients, split: Split) -> Predict:
    """Fit the residuals of the item biases by alternating least squares; a user's bias is one of its factors."""

    def candidates(part: Clients) -> Iterator[_Factors]:
        return (_Factors(_alternate(estimate, part, ridge, DIM), ridge) for ridge in ALS_RIDGES)

    return _choose_best(candidates, estimate, train, split)


class _Factors(NamedTuple):
    """Item factors `(items, dim)` and the ridge that new users are fitted with."""

    items: np.ndarray
    ridge: float


def _choose_best(
    candidates: Callable[[Clients], Iterator[_Factors]], estimate: Estimate, train: Clients, split: Split
) -> Predict:
    """Choose the candidate that is best on held-out training clients, and fit it again to all training clients."""
    part, rest = train.split_clients(1 - HELD_OUT, HELD_OUT, seed=0)
    if not len(part) or not len(rest):
        part, rest = train, train
    holdout = split_ratings(rest, split)
    losses = [
        float(np.sum((_predict_users(estimate, factors, holdout) - holdout.query.rating) ** 2))
        for factors in candidates(part)
    ]
    best = next(itertools.islice(candidates(train), int(np.argmin(losses)), None))
    return lambda holdout: _predict_users(estimate, best, holdout)


def _predict_users(estimate: Estimate, factors: _Factors, holdout: RatingHoldout) -> np.ndarray:
    """Predict for new users: a ridge regression on support gives each client's bias and factors."""
    users = _fit_users(estimate, factors, holdout.support, holdout.clients)
    product = np.einsum("nd,nd->n", _append_one(factors.items, holdout.query.item), users[holdout.query.client])
    return estimate.mean + estimate.deviation * (estimate.item_bias[holdout.query.item] + product)


def _fit_users(estimate: Estimate, factors: _Factors, examples: RatingRows, clients: int) -> np.ndarray:
    """Return every client's factors, followed by its bias."""
    items, ridge = factors
    residual = estimate.standardize(examples.rating) - estimate.item_bias[examples.item]
    ridges = np.append(np.full(items.shape[1], ridge), estimate.user_ridge)
    return ridge_by_group(_append_one(items, examples.item), residual, examples.client, clients, ridges)


def _append_one(items: np.ndarray, item: np.ndarray) -> np.ndarray:
    return np.concatenate([items[item], np.ones((len(item), 1))], 1)


def _alternate(estimate: Estimate, train: Clients, ridge: float, dim: int, sweeps: int = 8) -> np.ndarray:
    rated = _all_rows(train)
    items = np.random.default_rng(0).normal(0, 0.1, (len(estimate.item_bias), dim))
    y = estimate.standardize(rated.rating) - estimate.item_bias[rated.item]
    for _ in range(sweeps):
        users = _fit_users(estimate, _Factors(items, ridge), rated, len(train))
        left = y - users[rated.client, -1]
        items = ridge_by_group(users[rated.client, :-1], left, rated.item, len(items), np.full(dim, ridge))
    return items


def _singular_items(estimate: Estimate, train: Clients, dim: int, sweeps: int = 6) -> np.ndarray:
    """Return the leading right singular vectors times the root of their values, by subspace iteration."""
    rated = _all_rows(train)
    biases = fit_biases(estimate, rated, len(train))
    left = estimate.standardize(rated.rating) - estimate.item_bias[rated.item] - biases[rated.client]
    num_items = len(estimate.item_bias)
    items = np.random.default_rng(0).normal(size=(num_items, min(dim, len(train), num_items)))
    for _ in range(sweeps):
        items, _ = np.linalg.qr(items)
        users = _sum_by_group(left[:, None] * items[rated.item], rated.client, len(train))
        items = _sum_by_group(left[:, None] * users[rated.client], rated.item, num_items)
    vectors, squares, _ = np.linalg.svd(items, full_matrices=False)
    return vectors * squares**0.25


def _sum_by_group(values: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """Sum rows `(examples, columns)` by group."""
    return np.stack([np.bincount(group, column, groups) for column in values.T], 1)


def ridge_by_group(
    features: np.ndarray, target: np.ndarray, group: np.ndarray, groups: int, ridge: np.ndarray
) -> np.ndarray:
    """Solve a ridge regression for each group of examples: `(groups, columns)`, zero for groups without any.

    Groups of similar size are solved side by side, padded with zeros, which changes neither matrix nor moment.

    Args:
      features: `(examples, columns)`.
      target: `(examples,)`.
      group: `(examples,)` the group of each, in any order.
      groups: how many there are.
      ridge: `(columns,)` the penalty on each coefficient.
    """
    dim = features.shape[1]
    order = np.argsort(group, kind="stable")
    features, target = features[order], target[order]
    size = np.bincount(group, minlength=groups)
    begin = np.cumsum(size) - size
    ranked = np.argsort(-size, kind="stable")
    ranked = ranked[size[ranked] > 0]
    solved = np.zeros((groups, dim))
    at = 0
    while at < len(ranked):
        length = size[ranked[at]]
        block = ranked[at : at + max(1, PADDED_ENTRIES // (int(length) * dim))]
        j = np.arange(length)
        mask = j < size[block][:, None]
        rows = np.where(mask, begin[block][:, None] + j, begin[block][:, None])
        x = features[rows] * mask[..., None]  # (groups, examples, columns)
        gram = x.transpose(0, 2, 1) @ x + np.diag(ridge)
        solved[block] = np.linalg.solve(gram, x.transpose(0, 2, 1) @ target[rows][..., None])[..., 0]
        at += len(block)
    return solved


FITS: dict[str, Fit] = {
    "global mean": _global_mean,
    "item mean": _item_mean,
    "item + user bias": _biases,
    "biases + SVD + ridge": _svd,
    "ALS + ridge": _als,
}


# ---- the next word: the word used most, and the word that most often follows the one before ----


class WordPairs(NamedTuple):
    """Pairs of neighbouring words, of targets that are words of the vocabulary.

    Attributes:
      before: `(pairs,)` ids of inputs; one id stands for all words outside the vocabulary.
      target: `(pairs,)` ids from 1 to V.
    """

    before: np.ndarray
    target: np.ndarray


def word_baselines(train: Sentences, measured: Sentences, split: Split) -> dict[str, dict[str, float]]:
    """Count words of training clients, and return how often they tell the next word of other clients' query sentences.

    Args:
      train: who words are counted of.
      measured: who they are measured on.
      split: how sentences become support and query.

    Returns:
      The accuracy of each baseline, over targets that are words of the vocabulary; nothing if there are none.
    """
    rows = rows_of(train.starts, train.ends)[:MOST_SENTENCES]
    seen = _pairs({name: train.columns[name][rows] for name in WORD_COLUMNS}, train.vocab_size)
    query = _query(measured, split)
    if not len(seen.target) or not len(query.target):
        return {}
    most_used = int(np.bincount(seen.target).argmax())
    following = _most_frequent(seen, train.vocab_size)[query.before]
    guesses = {MOST_USED: most_used, FOLLOWING: np.where(following > 0, following, most_used)}
    return {name: {"accuracy": float(np.mean(guess == query.target))} for name, guess in guesses.items()}


def _pairs(columns: Mapping[str, np.ndarray], vocabulary: int) -> WordPairs:
    target = columns["target"]
    there = (target > 0) & (target <= vocabulary)
    before = np.where(columns["oov"] > 0, vocabulary + 3, columns["word"])  # ids up to V + 2: words, beginning and end
    return WordPairs(before[there], target[there])


def _query(clients: Sentences, split: Split) -> WordPairs:
    """Return the pairs of clients' query sentences, as evaluation divides them."""
    packer = Packer(clients, Needs(split, columns=WORD_COLUMNS))
    many = max(1, WORD_ENTRIES // (sum(packer.lengths) * clients.max_words))
    found = [WordPairs(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for begin in range(0, len(clients), many):
        query = packer.pack(np.arange(begin, min(begin + many, len(clients)))).query
        there = np.arange(query.columns["word"].shape[1]) < query.count[:, None]
        found.append(_pairs({name: query.columns[name][there] for name in WORD_COLUMNS}, clients.vocab_size))
    return WordPairs(*map(np.concatenate, zip(*found, strict=True)))


def _most_frequent(seen: WordPairs, vocabulary: int) -> np.ndarray:
    """Return for each id which word follows it most often; 0 if nothing ever did. Of equals, the more used one."""
    pairs, count = np.unique(seen.before.astype(np.int64) * (vocabulary + 1) + seen.target, return_counts=True)
    before, target = np.divmod(pairs, vocabulary + 1)
    order = np.lexsort((-target, count, before))  # ids are in order of use
    found = np.zeros(vocabulary + 4, np.int64)
    found[before[order]] = target[order]  # the last of each is the most frequent
    return found
