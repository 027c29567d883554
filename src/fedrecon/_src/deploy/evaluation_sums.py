"""Evaluation as sums: what nodes say about their held-out users, and what that adds up to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.core.model import Model, evaluated_names, finish
from fedrecon._src.simulation.evaluation import QUANTILES, Evaluation, summarize

PER_DECADE, LOWEST, HIGHEST = 100, -4, 5  # of the histograms: quantiles are right to 2.4 %
# A value v is in bin k where EDGES[k - 1] < v <= EDGES[k]; bin 0 has all that is 0 or less.
EDGES = np.concatenate([[0.0], 10.0 ** (np.arange(LOWEST * PER_DECADE, HIGHEST * PER_DECADE + 1) / PER_DECADE)])


class EvaluationSums(NamedTuple):
    """Sums over the users of a node, or of many.

    Attributes:
      sums: `(metrics, 2)` totals and weights.
      macro: `(metrics,)` sums of users' own metrics.
      histogram: `(metrics, bins)` how many users have which value.
      users: `(3,)` how many there are, were measured, and diverged.
    """

    sums: np.ndarray
    macro: np.ndarray
    histogram: np.ndarray
    users: np.ndarray


def no_users(model: Model) -> EvaluationSums:
    """Return the sum over nobody."""
    metrics = len(evaluated_names(model))
    sizes = ((metrics, 2), (metrics,), (metrics, len(EDGES) + 1), (3,))
    return EvaluationSums(*(np.zeros(size) for size in sizes))


def sum_users(model: Model, sums: np.ndarray) -> EvaluationSums:
    """Add up users.

    A user has diverged by the rule of `evaluation.summarize`, with the median of these users alone.

    Args:
      model: the model that has these metrics.
      sums: `(users, metrics, 2)`.
    """
    evaluation = summarize(model, "recon", sums)
    good = ~np.isnan(evaluation.per_client["loss"])
    names = evaluated_names(model)
    values = np.stack([evaluation.per_client[name][good] for name in names])  # (metrics, users)
    histogram = np.zeros((len(names), len(EDGES) + 1))
    for k, row in enumerate(values):
        np.add.at(histogram[k], np.searchsorted(EDGES, row[~np.isnan(row)]), 1)
    users = np.array([len(sums), evaluation.clients, evaluation.diverged], float)
    return EvaluationSums(sums[good].sum(0), np.nansum(values, 1), histogram, users)


def to_evaluation(model: Model, total: EvaluationSums) -> Evaluation:
    """Return an evaluation from sums. Nothing is known about single users: their metrics are NaN."""
    present, clients, diverged = (round(float(n)) for n in total.users)
    good = max(clients - diverged, 0)
    names = evaluated_names(model)
    macro = {name: float(total.macro[k] / good) if good else float("nan") for k, name in enumerate(names)}
    quantiles = {name: {f"{q:g}": _quantile(total.histogram[k], q) for q in QUANTILES} for k, name in enumerate(names)}
    unknown = {name: np.full(present, np.nan) for name in names}
    micro = finish(model, total.sums)
    if model.client_metrics is not None:  # some clients may have no value for these
        macro |= {name: micro[name] for name in model.client_metrics.names}
    return Evaluation("recon", clients, diverged, round(float(total.sums[0, 1])), micro, macro, quantiles, unknown)


def _quantile(histogram: np.ndarray, q: float) -> float:
    """Return a quantile as numpy does, as far as the histogram tells."""
    count = float(histogram.sum())
    if count < 1:
        return float("nan")
    rank = q * (count - 1)  # from 0, between two users if not whole
    low, high = (_of_rank(histogram, int(r)) for r in (np.floor(rank), np.ceil(rank)))
    return low + (high - low) * (rank - np.floor(rank))


def _of_rank(histogram: np.ndarray, rank: int) -> float:
    """Return the value of the user with a rank, as if users were spread evenly over their bin."""
    ends = np.cumsum(histogram)
    index = int(np.searchsorted(ends, rank, side="right"))
    if index == 0:
        return 0.0
    if index >= len(EDGES):
        return float(EDGES[-1])
    within = (rank - (ends[index] - histogram[index]) + 0.5) / histogram[index]
    return float(EDGES[index - 1] + (EDGES[index] - EDGES[index - 1]) * within)


def add_sums(parts: list[Any]) -> EvaluationSums:
    """Add up the sums of nodes."""
    return EvaluationSums(*(np.sum([np.asarray(part[k], float) for part in parts], 0) for k in range(4)))
