"""Round zero with exact sums: what clients answer, and what the server estimates from the totals.

The first total gives the scale: mean, deviation, and whether the ratings are counts. Outliers are left out of it and of
everything that follows, so that no single client decides. The following totals fit `y = item bias + user bias + noise`
to the standardised ratings, and the variances of all three, by expectation maximisation. The last ones show how
differently users respond to two traits of an item, its bias and its popularity: some users follow the majority and some
do not. Users' biases and coefficients never leave the clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedrecon._src.recommend.estimate import (
    BINS,
    LEAST_VARIANCE,
    MAX_SKEWNESS,
    MOMENTS,
    Estimate,
    State,
    Sums,
    Transform,
    bin_moments,
    find_range,
    fit_user_biases,
    fit_user_traits,
    negative_share,
)

MAX_NEGATIVE_SHARE = 0.05  # of counts; they are taken as 0
SCALE_BINS, SCALE_BIN = 200, 0.1  # to find the ends of the scale: 200 bins, each a tenth of a deviation wide
END_DIGITS = 9  # of the ends of the scale, relative to the deviation: more than ratings have in 32 bits


def answer(state: State, item: np.ndarray, rating: np.ndarray, owner: np.ndarray) -> Sums:
    """Return the sum of clients' answers to the next question."""
    if state.question == "moments":
        return bin_moments(rating, owner)
    if state.estimate.outliers:
        inside = state.kept.contains(rating)
        item, rating, owner = item[inside], rating[inside], owner[inside]
    y = state.estimate.standardize(rating)
    if state.question == "traits":
        return _sum_traits(state.estimate, item, y, owner)
    sums = _sum_biases(state.estimate, item, y, owner)
    return sums | _bin_scale(y) if state.question == "first biases" else sums


def advance(state: State, total: Mapping[str, Any], transform: Transform | None) -> State:
    """Return the next state, from the sum of all clients' answers."""
    estimate = state.estimate
    sums = [np.sum(total[name]) for name in ("count", "item_count", "users") if name in total]
    if not all(value > 0 for value in sums):
        raise ValueError(f"the clients have no ratings, so {state.question} cannot be estimated")
    if state.question == "moments":
        state = _estimate_scale(state, total, transform)
        estimate = state.estimate
    elif state.question == "traits":
        estimate = _estimate_traits(estimate, total)
    else:
        first = state.question == "first biases"
        estimate = _estimate_biases(_estimate_ends(estimate, total) if first else estimate, total, first)
    return state._replace(asked=state.asked + 1, estimate=estimate)


# ---- the scale ----


def _estimate_scale(state: State, total: Mapping[str, Any], transform: Transform | None) -> State:
    count = float(np.sum(total["count"]))
    mostly_positive = negative_share(total) <= MAX_NEGATIVE_SHARE
    if transform == "log1p" and not mostly_positive:
        negative = int(np.sum(np.asarray(total["count"])[: BINS.side]))
        raise ValueError(f"`transform` 'log1p' needs ratings of at least 0, but {negative} are negative")
    if transform is None:
        skewed = skewness(find_range(total, logarithm=False).sum_moments(total)) > MAX_SKEWNESS
        transform = "log1p" if mostly_positive and skewed else "none"
    kept = find_range(total, logarithm=transform == "log1p")
    sums = kept.sum_moments(total)
    first, second = ("log_sum", "log_square") if transform == "log1p" else ("sum", "square")
    mean = sums[first] / sums["count"]
    variance = sums[second] / sums["count"] - mean**2
    estimate = state.estimate._replace(
        transform=transform,
        mean=mean,
        deviation=variance**0.5 if variance > 1e-12 * (1 + mean**2) else 1.0,
        outliers=round(count - sums["count"]),
    )
    return state._replace(estimate=estimate, kept=kept)


def skewness(total: Mapping[str, Any]) -> float:
    """Return the skewness of ratings from the sums of their powers; 0 if all are equal."""
    sums = {name: float(np.sum(total[name])) for name in MOMENTS}
    mean, square, cube = (sums[name] / sums["count"] for name in ("sum", "square", "cube"))
    variance = square - mean**2
    if not variance > 1e-12 * (1 + mean**2):
        return 0.0
    return (cube - 3 * mean * square + 2 * mean**3) / variance**1.5


def _bin_scale(y: np.ndarray) -> Sums:
    bins = np.clip(np.floor(y / SCALE_BIN).astype(np.int64) + SCALE_BINS // 2, 0, SCALE_BINS - 1)
    return {
        "bin_count": np.bincount(bins, minlength=SCALE_BINS).astype(np.float64),
        "bin_sum": np.bincount(bins, y, SCALE_BINS).astype(np.float64),
    }


def _estimate_ends(estimate: Estimate, total: Mapping[str, Any]) -> Estimate:
    """Set the ends of the scale to the means of the outermost bins with ratings. For star ratings this is exact: the
    rounding errors of sums are rounded away.
    """
    count, values = np.asarray(total["bin_count"]), np.asarray(total["bin_sum"])
    occupied = np.flatnonzero(count > 0)
    digits = END_DIGITS - math.floor(math.log10(estimate.deviation))
    low, high = (estimate.mean + estimate.deviation * values[i] / count[i] for i in (occupied[0], occupied[-1]))
    return estimate._replace(low=round(float(low), digits) + 0.0, high=round(float(high), digits) + 0.0)  # never -0.0


# ---- biases and variances ----


def _sum_biases(estimate: Estimate, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Sums:
    items = len(estimate.item_bias)
    users = fit_user_biases(estimate, item, y, owner)
    active = users.size > 0
    sums = {
        "item_count": np.bincount(item, minlength=items),
        "item_sum": np.bincount(item, y - users.bias[owner], items),
        "users": active.sum(),
        "user_square": users.square[active].sum(),
        "error": users.error.sum(),
    }
    return {name: np.asarray(value, np.float64) for name, value in sums.items()}


def _estimate_biases(estimate: Estimate, total: Mapping[str, Any], first: bool) -> Estimate:
    count, users = np.asarray(total["item_count"], np.float64), float(total["users"])
    ratings = count.sum()
    noise, ridge, rated = estimate.noise, estimate.item_ridge, count > 0
    if not first:  # the errors belong to the item biases that were sent; at first there were none
        before = estimate.item_count
        noise = (float(total["error"]) + (before * noise / (before + ridge)).sum()) / ratings
    bias = np.where(rated, np.asarray(total["item_sum"]) / (count + ridge), 0.0)
    item_variance = (bias**2 + estimate.noise / (count + ridge))[rated].mean()
    estimate = estimate._replace(
        item_bias=bias,
        item_count=count,
        noise=max(noise, LEAST_VARIANCE),
        item_variance=max(float(item_variance), LEAST_VARIANCE),
        user_variance=max(float(total["user_square"]) / users, LEAST_VARIANCE),
        item_bias_ridge=ridge,
    )
    return estimate._replace(user_bias_ridge=estimate.user_ridge)


# ---- how users respond to an item's traits ----


def _sum_traits(estimate: Estimate, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Sums:
    """Sum the squares of users' coefficients, each fitted to item traits without that user's own rating.

    Otherwise the bias of an item with two ratings would mostly be each user's own opinion.
    """
    user_bias = fit_user_biases(estimate, item, y, owner).bias
    count, ridge = estimate.item_count[item], estimate.item_bias_ridge
    rest = np.maximum(count - 1, 0)
    rest_sum = estimate.item_bias[item] * (count + ridge) - (y - user_bias[owner])
    bias = np.where(rest > 0, rest_sum / (rest + ridge), 0.0)
    users = fit_user_traits(estimate, estimate.scale_traits(bias, rest), y - bias, owner)
    active = users.size > 0
    sums = {
        "users": active.sum(),
        "ratings": len(y),
        "trait_square": users.square[active].sum(0),
        "error": users.error.sum(),
    }
    return {name: np.asarray(value, np.float64) for name, value in sums.items()}


def _estimate_traits(estimate: Estimate, total: Mapping[str, Any]) -> Estimate:
    variance = np.maximum(np.asarray(total["trait_square"]) / float(total["users"]), LEAST_VARIANCE)
    return estimate._replace(
        noise=max(float(total["error"]) / float(total["ratings"]), LEAST_VARIANCE),
        trait_variance=variance[:-1],
        user_variance=float(variance[-1]),
    )
