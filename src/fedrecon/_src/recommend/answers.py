"""What clients answer in round zero: exactly, or so that noise of a fixed size hides any of them in the sum.

The first totals give the scale: mean, deviation, and whether the ratings are counts. The following ones fit
`y = item bias + user bias + noise` to the standardised ratings, and the variances of all three, by expectation
maximisation. The last ones show how differently users respond to two traits of an item, its bias and its popularity:
some users follow the majority and some do not. Users' biases and coefficients never leave the clients.

Without noise, `moments` asks for the scale, and outliers are left out of it and of everything that follows, so that no
single client decides. With noise, each answer is a vector of norm 1 at most, whatever a client has rated, and clients
are asked four or five times rather than sixteen:

1. `range`: which powers of two the ratings lie between, and whether they look like counts. Left out if the range is
   declared.
2. `scale`: mean and deviation, a histogram for the ends, and how many ratings clients have, for the weights.
3. `biases`, twice: by item, the weighted sum and number of ratings; also the variances of biases and noise.
4. `traits`.

A client with many ratings weighs each of them less then, so that all answers have about the same norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedrecon._src.privacy.ring import WIDTHS, IntegerGrid, quantise
from fedrecon._src.recommend.estimate import (
    BINS,
    POWERS,
    TRAITS,
    Bounds,
    Estimate,
    MagnitudeBins,
    Question,
    State,
    StateError,
    UserEffects,
    fit_user_biases,
    fit_user_traits,
    transform_ratings,
)

RANGE = MagnitudeBins(4, -6, 24)
SCALE_BINS = 200
END_BIN = 0.1  # without noise, the ends of the scale are found in bins that are a tenth of a deviation wide
SIZES = 40  # bins of the number of ratings of a client, two for each doubling
FIRST_SPREAD, SPREAD = 0.9, 0.75  # expected root mean square of a client's standardised ratings: at first, then
COUNT = 0.8  # weight of a count relative to a rating in a client's answer
SCALARS = 0.05  # share of the squared norm that the variances may take
MAX_SQUARE, MAX_ERROR = 1.0, 2.0  # of a client's squared bias and its mean squared error, standardised
MOMENTS = (*POWERS, "share", "highest", "lowest")

Part = tuple[np.ndarray, np.ndarray, np.ndarray]  # client, index and value of each entry


@dataclass(frozen=True, eq=False)
class Entries:
    """Answers of several clients, as the entries that are not zero.

    Attributes:
      parts: the client of each entry, its index in the answer, and its value. If answers are bounded, a client's values
        have a norm of 1 at most.
      length: of an answer.
    """

    parts: tuple[Part, ...]
    length: int

    def total(self) -> np.ndarray:
        """Return the sum over clients, without noise."""
        total = np.zeros(self.length)
        for _, index, value in self.parts:
            total += np.bincount(index, value, self.length)
        return total

    def integer_total(self, grid: IntegerGrid) -> np.ndarray:
        """Return the sum over clients as integers of a ring, without noise; each client's values are rounded."""
        total = np.zeros(self.length, WIDTHS[grid.bits][1])
        for _, index, value in self.parts:
            np.add.at(total, index, quantise(grid, value))
        return total

    def check(self) -> None:
        """Raise `StateError` if a client's norm exceeds 1, which a forged state could ask."""
        client, value = (np.concatenate([part[k] for part in self.parts]) for k in (0, 2))
        if not (np.bincount(client, value**2, 1) <= 1 + 1e-9).all():
            raise StateError("the state of round zero asks for unbounded answers")


def answer_length(state: State) -> int:
    """Return how many entries an answer to the next question has."""
    items, bounded = len(state.estimate.item_bias), state.bounds is not None
    lengths: dict[Question, int] = {
        "moments": len(MOMENTS) * BINS.count,
        "range": RANGE.count,
        "scale": SCALE_BINS + SIZES + 2,
        "first biases": 2 * items + (2 if bounded else 2 * SCALE_BINS + 3),
        "biases": items + (2 if bounded else 3),
        "traits": len(TRAITS) + (2 if bounded else 3),
    }
    return lengths[state.question]


def answer(state: State, item: np.ndarray, rating: np.ndarray, owner: np.ndarray) -> list[Part]:
    """Return clients' answers to the next question, as `Entries` have them."""
    estimate, bounds = state.estimate, state.bounds
    if state.question == "moments":
        return _sum_moments(rating, owner)
    if state.question == "range":
        return [_share_bins(owner, RANGE.index(rating), RANGE.count)]
    if bounds is not None:
        rating = np.clip(transform_ratings(rating, estimate.transform), bounds.low, bounds.high)
        if state.question == "scale":
            return _answer_scale(bounds, rating, owner)
        y = (rating - estimate.mean) / estimate.deviation
    else:
        if estimate.outliers:
            inside = state.inliers.contains(rating)
            item, rating, owner = item[inside], rating[inside], owner[inside]
        y = estimate.standardize(rating)
    if state.question == "traits":
        return _answer_traits(state, item, y, owner)
    return _answer_biases(state, item, y, owner)


# ---- the scale ----


def _sum_moments(rating: np.ndarray, owner: np.ndarray) -> list[Part]:
    """Sum powers of ratings and of log(1 + x) by bin, the clients' shares of ratings, and their extreme bins."""
    bins, logs = BINS.index(rating), np.log1p(np.maximum(rating, 0))
    size = np.bincount(owner)
    powers = (np.ones(len(rating)), rating, rating**2, rating**3, logs, logs**2, 1.0 / size[owner])
    parts = [(owner, k * BINS.count + bins, power) for k, power in enumerate(powers)]
    active = np.flatnonzero(size)
    highest, lowest = np.full(len(size), -1), np.full(len(size), BINS.count)
    np.maximum.at(highest, owner, bins)
    np.minimum.at(lowest, owner, bins)
    for k, extreme in enumerate((highest, lowest), len(powers)):
        parts.append((active, k * BINS.count + extreme[active], np.ones(len(active))))
    return parts


def _share_bins(owner: np.ndarray, index: np.ndarray, length: int) -> Part:
    """Return the share of each client's ratings in each bin: shares sum to 1, so their norm is 1 at most."""
    pairs, count = np.unique(owner * length + index, return_counts=True)
    size = np.bincount(owner, minlength=1)
    return pairs // length, pairs % length, count / size[pairs // length]


def _answer_scale(bounds: Bounds, y: np.ndarray, owner: np.ndarray) -> list[Part]:
    width = bounds.high - bounds.low
    index = np.clip(np.floor((y - bounds.low) * SCALE_BINS / width).astype(np.int64), 0, SCALE_BINS - 1)
    count = np.bincount(owner, minlength=1)
    active = np.flatnonzero(count)
    sizes = np.clip(np.floor(2 * np.log2(count[active])).astype(np.int64), 0, SIZES - 1)
    unit = 2 * (y - bounds.low) / width - 1
    parts = [_share_bins(owner, index, SCALE_BINS), (active, SCALE_BINS + sizes, np.ones(len(active)))]
    for k, power in enumerate((unit, unit**2), SCALE_BINS + SIZES):
        parts.append((active, np.full(len(active), k), np.bincount(owner, power, 1)[active] / count[active]))
    return [(client, index, value / 2) for client, index, value in parts]  # four parts of norm 1 at most


# ---- biases and traits ----


def bias_norm(bounds: Bounds, first: bool) -> float:
    """Return the largest norm of a client's weighted ratings, with the counts that belong to the first biases."""
    return math.sqrt(bounds.size * (FIRST_SPREAD**2 + COUNT**2 if first else SPREAD**2))


def _answer_biases(state: State, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> list[Part]:
    estimate, first = state.estimate, state.question == "first biases"
    items, users = len(estimate.item_bias), fit_user_biases(estimate, item, y, owner)
    # Later, clients send what the item biases miss, which is shorter.
    residual = y - users.effects[owner, 0] - (0.0 if first else estimate.item_bias[item])
    client, index, sums, counts = owner, item, residual, np.ones(len(item))
    if state.bounds is not None:
        client, index, sums, counts = _weigh(state.bounds, first, items, item, residual, owner)
    parts = [(client, index, sums), *([(client, items + index, counts)] if first else [])]
    if first and state.bounds is None:
        bins = np.clip(np.floor(y / END_BIN).astype(np.int64) + SCALE_BINS // 2, 0, SCALE_BINS - 1)
        parts += [(owner, 2 * items + bins, np.ones(len(y))), (owner, 2 * items + SCALE_BINS + bins, y)]
    return [*parts, _user_scalars(state, users, math.sqrt(SCALARS / 2))]


def _weigh(
    bounds: Bounds, first: bool, items: int, item: np.ndarray, residual: np.ndarray, owner: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return client, item, sum and count of what clients have rated, so that no client's are longer than a bound."""
    pairs, inverse, times = np.unique(owner * items + item, return_inverse=True, return_counts=True)
    client, index = pairs // items, pairs % items
    sums, clients = np.bincount(inverse, residual), int(owner.max(initial=-1)) + 1
    # Ratings of one item count once each; what matters is the length of the client's vector of counts.
    weight = np.minimum(1.0, np.sqrt(bounds.size / np.maximum(np.bincount(client, times**2.0, clients), 1e-30)))
    norm = np.sqrt(np.bincount(client, sums**2, clients)) * weight
    clip = np.minimum(1.0, (FIRST_SPREAD if first else SPREAD) * math.sqrt(bounds.size) / np.maximum(norm, 1e-30))
    unit = math.sqrt(1 - SCALARS) / bias_norm(bounds, first)
    return client, index, sums * (weight * clip)[client] * unit, COUNT * times * weight[client] * unit


def _answer_traits(state: State, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> list[Part]:
    estimate = state.estimate
    if state.bounds is None:
        bias, traits = _without_own(estimate, item, y, owner)
    else:
        bias, traits = estimate.item_bias[item], estimate.traits()[item]
    users = fit_user_traits(estimate, traits, y - bias, owner)
    return [_user_scalars(state, users, 1 / math.sqrt(answer_length(state)))]


def _without_own(
    estimate: Estimate, item: np.ndarray, y: np.ndarray, owner: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bias and the traits of each rated item without that user's own rating.

    Otherwise the bias of an item with two ratings would mostly be each user's own opinion.
    """
    user_bias = fit_user_biases(estimate, item, y, owner).effects[:, 0]
    count, ridge = estimate.item_count[item], estimate.item_bias_ridge
    rest = np.maximum(count - 1, 0)
    rest_sum = estimate.item_bias[item] * (count + ridge) - (y - user_bias[owner])
    bias = np.where(rest > 0, rest_sum / (rest + ridge), 0.0)
    return bias, estimate.scale_traits(bias, rest)


def _user_scalars(state: State, users: UserEffects, unit: float) -> Part:
    """Return the expected squares and the error of each client; without bounds, also a 1 to count clients."""
    if state.bounds is None:
        columns = [users.square, users.error[:, None], np.ones((len(users.size), 1))]
    else:
        error = np.minimum(users.error / np.maximum(users.size, 1), MAX_ERROR) / MAX_ERROR
        columns = [np.minimum(users.square, MAX_SQUARE) / MAX_SQUARE * unit, error[:, None] * unit]
    active = np.flatnonzero(users.size)
    values = np.concatenate(columns, 1)[active]
    width = values.shape[1]
    index = np.tile(np.arange(answer_length(state) - width, answer_length(state)), len(active))
    return np.repeat(active, width), index, values.reshape(-1)
