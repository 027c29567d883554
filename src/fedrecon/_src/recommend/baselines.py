"""Baselines that a model of ratings should beat, on the query examples that `evaluate` measures on.

Like the model under test, a baseline sees only a new user's support examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.cohort import Needs, Packer
from fedrecon._src.core.display import lay_out
from fedrecon._src.core.split import Split, half
from fedrecon._src.recommend.estimate import Estimate
from fedrecon._src.recommend.round_zero import estimate_ratings
from fedrecon._src.recommend.task import Measure, metric_cells

ACCURATE_WITHIN = 0.5
PADDED_ENTRIES = 2**20  # examples that are split together


Columns = Mapping[str, np.ndarray]  # of examples one after another: `client`, `item` and a number of each
Predict = Callable[[Columns, Columns], dict[str, np.ndarray]]  # {baseline: ratings of the query} from support and query


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
        measures = (Measure("rmse", "RMSE"), Measure("mae", "MAE"), Measure("accuracy", "accuracy"))
        return "\n".join(lay_out(metric_cells(measures, self.table, "baseline"), right=True))


def rating_baselines(
    train: Clients,
    test: Clients,
    *,
    split: Split | None = None,
    num_items: int | None = None,
    tolerance: float = ACCURATE_WITHIN,
) -> BaselineResults:
    """Measure baselines for ratings on the query examples of clients that took no part in training.

    Predictions are clipped to the scale of the training clients' ratings.

    Args:
      train: what the baselines learn from; columns `item` and `rating`.
      test: clients to measure on.
      split: support and query, as given to `evaluate`; half and half by default.
      num_items: item ids are 0 to `num_items - 1`; by default as many as the columns of `train` and `test` have.
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
    if not len(train) or not len(test):
        raise ValueError(f"`train` and `test` must not be empty (got {len(train)} and {len(test)} clients)")
    if num_items is None:
        num_items = 1 + max(int(part.columns["item"].max()) for part in (train, test))
    support, query = split_examples(test, split or half(), "rating")
    if not len(query["rating"]):
        raise ValueError("no client has query examples; use another split")
    guesses = fit_baselines(train, num_items)(support, query)
    table = {name: rating_errors(guess, query["rating"], tolerance) for name, guess in guesses.items()}
    return BaselineResults(len(np.unique(query["client"])), len(query["rating"]), table)


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


def split_examples(clients: Clients, split: Split, *numbers: str) -> list[Columns]:
    """Divide clients' examples into support and query just as `evaluate` does.

    Args:
      clients: with a column `item`.
      split: how examples become support and query.
      *numbers: other columns to return, in double precision.
    """
    names = ("item", *numbers)
    packer = Packer(clients, Needs(split, columns=names))
    sides: tuple[list[Columns], list[Columns]] = ([], [])
    many = max(1, PADDED_ENTRIES // sum(packer.lengths))
    for begin in range(0, len(clients), many):
        indices = np.arange(begin, min(begin + many, len(clients)))
        cohort = packer.pack(indices)
        for side, examples in zip(sides, (cohort.support, cohort.query), strict=True):
            mask = np.arange(examples.columns["item"].shape[1]) < examples.count[:, None]
            item, *extra = (np.asarray(examples.columns[name])[mask] for name in names)
            values = (np.repeat(indices, examples.count), item, *(column.astype(np.float64) for column in extra))
            side.append(dict(zip(("client", *names), values, strict=True)))
    return [{name: np.concatenate([part[name] for part in side]) for name in ("client", *names)} for side in sides]


# ---- means and biases ----


def fit_baselines(train: Clients, num_items: int) -> Predict:
    """Fit the baselines, and return what predicts ratings of a query by each of them from a support.

    Args:
      train: with columns `item` and `rating`.
      num_items: item ids are 0 to `num_items - 1`.
    """
    estimate = estimate_ratings(train, num_items, trait_passes=0, transform="none")
    means = np.clip(item_means(train, num_items), estimate.low, estimate.high)
    return lambda support, query: {
        "global mean": np.full(len(query["item"]), estimate.mean),
        "item mean": means[query["item"]],
        "item + user bias": estimate.restore(predict_by_biases(estimate, support, query)),
    }


def item_means(train: Clients, num_items: int) -> np.ndarray:
    """Return each item's mean rating over these clients, and the mean of all ratings for items they have not rated.

    Args:
      train: with columns `item` and `rating`.
      num_items: item ids are 0 to `num_items - 1`.
    """
    rows = rows_of(train.starts, train.ends)
    item, rating = train.columns["item"][rows], train.columns["rating"][rows].astype(np.float64)
    count = np.bincount(item, minlength=num_items)
    return np.where(count > 0, np.bincount(item, rating, num_items) / np.maximum(count, 1), rating.mean())


def predict_by_biases(estimate: Estimate, support: Columns, query: Columns) -> np.ndarray:
    """Predict standardised ratings of the query by the biases of items and, from the support, of clients.

    A client's bias is the mean residual of its standardised ratings, damped by the ridge.
    """
    residual = estimate.standardize(support["rating"]) - estimate.item_bias[support["item"]]
    clients = 1 + max(int(side["client"].max(initial=-1)) for side in (support, query))
    count = np.bincount(support["client"], minlength=clients)
    user_bias = np.bincount(support["client"], residual, clients) / (count + estimate.user_ridge)
    return estimate.item_bias[query["item"]] + user_bias[query["client"]]
