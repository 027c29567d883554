"""Round zero with user-level differential privacy: bounded answers, and estimates from noised totals.

It estimates what `exact_answers` does, and differs where privacy requires it. Clients are asked four or five times
rather than sixteen. Each answer is a vector of norm 1 at most, whatever a client has rated, so that noise of a fixed
size hides any client in the sum.

1. `range`: which powers of two the ratings lie between, and whether they look like counts. Left out if the range is
   declared.
2. `scale`: mean and deviation, a histogram for the ends, and how many ratings clients have, for the weights.
3. `biases`, twice: by item, the weighted sum and number of ratings; also the variances of biases and noise.
4. `traits`: how much users differ in how they follow an item's bias and popularity.

A client with many ratings weighs each of them less, so that all answers have about the same norm. Item biases are
shrunk for the ratings that are missing and for the noise that was added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedrecon._src.privacy.ring import WIDTHS, Grid, quantise
from fedrecon._src.recommend.estimate import (
    LEAST_VARIANCE,
    MAX_SKEWNESS,
    TRAITS,
    Bounds,
    Estimate,
    MagnitudeBins,
    Question,
    State,
    StateError,
    Transform,
    fit_user_biases,
    fit_user_traits,
    transform_ratings,
)

# How round zero's budget is divided: shares of the sum of 1 / noise^2.
SHARES: dict[Question, float] = {"range": 0.02, "scale": 0.05, "first biases": 0.4, "biases": 0.48, "traits": 0.05}

RANGE = MagnitudeBins(4, -6, 24)
SCALE_BINS = 200
SIZES = 40  # bins of the number of ratings of a client, two for each doubling
SMALL = 0.25  # clients with more ratings than this share of clients have weigh each rating less
FIRST_SPREAD, SPREAD = 0.9, 0.75  # expected root mean square of a client's standardised ratings: at first, then
COUNT = 0.8  # weight of a count relative to a rating in a client's answer
SCALARS = 0.05  # share of the squared norm that the variances may take
APPROXIMATE = 0.25  # how far a rough number of clients may be off, relative to it
LEAST_SPREAD = 0.05  # of ratings, in units of their range: noise must not make it 0
FIRST_ERROR = 0.1  # error of standardised item biases as long as users do not take them into account
MAX_SQUARE, MAX_ERROR = 1.0, 2.0  # of a client's squared bias and its mean squared error, standardised


@dataclass(frozen=True, eq=False)
class Entries:
    """Answers of several clients, as the entries that are not zero.

    Attributes:
      client: the client of each entry.
      index: its index in the answer.
      value: its value. A client's values have a norm of 1 at most.
      length: of an answer.
    """

    client: np.ndarray
    index: np.ndarray
    value: np.ndarray
    length: int

    def total(self) -> np.ndarray:
        """Return the sum over clients, without noise."""
        return np.bincount(self.index, self.value, self.length)

    def integer_total(self, grid: Grid) -> np.ndarray:
        """Return the sum over clients as integers of a ring, without noise; each client's values are rounded."""
        total = np.zeros(self.length, WIDTHS[grid.bits][1])
        np.add.at(total, self.index, quantise(grid, self.value))
        return total

    def check(self) -> Entries:
        """Return the same entries; raise `StateError` if a client's norm exceeds 1, which a forged state could ask."""
        norms = np.bincount(self.client, self.value**2, 1)
        if not (norms <= 1 + 1e-9).all():
            raise StateError("the state of round zero asks for unbounded answers")
        return self


def answer_length(state: State) -> int:
    """Return how many entries an answer to the next question has."""
    items = len(state.estimate.item_bias)
    lengths: dict[Question, int] = {
        "range": RANGE.count,
        "scale": SCALE_BINS + SIZES + 2,
        "first biases": 2 * items + 2,
        "biases": items + 2,
        "traits": len(TRAITS) + 2,
    }
    return lengths[state.question]


def noise_multiplier_of(state: State, noise_multiplier: float) -> float:
    """Return the noise in the total of the next answers, if all of round zero is to cost as `noise_multiplier` does."""
    weights = [SHARES[question] for question in state.questions]
    return noise_multiplier * math.sqrt(sum(weights) / SHARES[state.question])


# ---- what a client answers ----


def answer(state: State, item: np.ndarray, rating: np.ndarray, owner: np.ndarray) -> Entries:
    """Return clients' answers to the next question: for each a vector of norm 1 at most."""
    assert state.bounds is not None
    if state.question == "range":
        return _share_bins(owner, RANGE.index(rating), RANGE.count)
    y = np.clip(transform_ratings(rating, state.estimate.transform), state.bounds.low, state.bounds.high)
    if state.question == "scale":
        return _answer_scale(state.bounds, y, owner)
    y = (y - state.estimate.mean) / state.estimate.deviation
    if state.question == "traits":
        return _answer_traits(state.estimate, item, y, owner)
    return _answer_biases(state, item, y, owner)


def _share_bins(owner: np.ndarray, index: np.ndarray, length: int) -> Entries:
    """Return the share of each client's ratings in each bin: shares sum to 1, so their norm is 1 at most."""
    pairs, count = np.unique(owner * length + index, return_counts=True)
    size = np.bincount(owner, minlength=1)
    return Entries(pairs // length, pairs % length, count / size[pairs // length], length)


def _answer_scale(bounds: Bounds, y: np.ndarray, owner: np.ndarray) -> Entries:
    width, length = bounds.high - bounds.low, SCALE_BINS + SIZES + 2
    index = np.clip(np.floor((y - bounds.low) * SCALE_BINS / width).astype(np.int64), 0, SCALE_BINS - 1)
    ratings = _share_bins(owner, index, SCALE_BINS)
    count = np.bincount(owner, minlength=1)
    active = np.flatnonzero(count)
    sizes = np.clip(np.floor(2 * np.log2(count[active])).astype(np.int64), 0, SIZES - 1)
    unit = 2 * (y - bounds.low) / width - 1
    moments = [np.bincount(owner, unit**power, 1)[active] / count[active] for power in (1, 2)]
    return Entries(
        np.concatenate([ratings.client, active, active, active]),
        np.concatenate([ratings.index, SCALE_BINS + sizes, *(np.full(len(active), length - 2 + k) for k in (0, 1))]),
        np.concatenate([ratings.value, np.ones(len(active)), *moments]) / 2,  # four parts of norm 1 at most
        length,
    )


def _bias_norm(state: State) -> float:
    """Return the largest norm of a client's weighted ratings, with the counts that belong to the first biases."""
    assert state.bounds is not None
    first = state.question == "first biases"
    return math.sqrt(state.bounds.size * (FIRST_SPREAD**2 + COUNT**2 if first else SPREAD**2))


def _answer_biases(state: State, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Entries:
    assert state.bounds is not None
    estimate, size, length = state.estimate, state.bounds.size, answer_length(state)
    items, first = len(estimate.item_bias), state.question == "first biases"
    users = fit_user_biases(estimate, item, y, owner)
    pairs, inverse, times = np.unique(owner * items + item, return_inverse=True, return_counts=True)
    client, index = pairs // items, pairs % items
    # Later, clients send what the item biases miss, which is shorter.
    sums = np.bincount(inverse, y - users.bias[owner] - (0.0 if first else estimate.item_bias[item]))
    number = len(users.size)
    # Ratings of one item count once each; what matters is the length of the client's vector of counts.
    weight = np.minimum(1.0, np.sqrt(size / np.maximum(np.bincount(client, times**2.0, number), 1e-30)))
    norm = np.sqrt(np.bincount(client, sums**2, number)) * weight
    clip = np.minimum(1.0, (FIRST_SPREAD if first else SPREAD) * math.sqrt(size) / np.maximum(norm, 1e-30))
    unit = math.sqrt(1 - SCALARS) / _bias_norm(state)
    parts = [(client, index, sums * (weight * clip)[client] * unit)]
    if first:
        parts.append((client, items + index, COUNT * times * weight[client] * unit))
    active = np.flatnonzero(users.size)
    scalars = (
        np.minimum(users.square, MAX_SQUARE) / MAX_SQUARE,
        np.minimum(users.error / np.maximum(users.size, 1), MAX_ERROR) / MAX_ERROR,
    )
    for k, scalar in enumerate(scalars):
        parts.append((active, np.full(len(active), length - 2 + k), scalar[active] * math.sqrt(SCALARS / 2)))
    client, index, value = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Entries(client, index, value, length)


def _answer_traits(estimate: Estimate, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Entries:
    users = fit_user_traits(estimate, estimate.traits()[item], y - estimate.item_bias[item], owner)
    active = np.flatnonzero(users.size)
    error = np.minimum(users.error / np.maximum(users.size, 1), MAX_ERROR) / MAX_ERROR
    values = np.concatenate([np.minimum(users.square, MAX_SQUARE) / MAX_SQUARE, error[:, None]], 1)[active]
    length = values.shape[1]
    index = np.broadcast_to(np.arange(length), values.shape)
    return Entries(np.repeat(active, length), index.reshape(-1), values.reshape(-1) / math.sqrt(length), length)


# ---- what the server estimates ----


def advance(state: State, total: Any, noise: float, transform: Transform | None, *, approximate: bool = False) -> State:
    """Return the next state.

    Args:
      state: the last one.
      total: the noised sum of all clients' answers to it.
      noise: the standard deviation of the noise in every entry of it.
      transform: of the ratings; None to decide from their skewness.
      approximate: estimate how many clients there are from their answers, starting from what `state` says.
    """
    total = np.asarray(total, np.float64)
    if total.shape != (answer_length(state),):
        raise ValueError(f"`total` must have shape ({answer_length(state)},) (got {total.shape})")
    if state.question == "range":
        state = _estimate_range(state, total, noise, transform)
    elif state.question == "scale":
        state = _estimate_scale(_count_clients(state, total, noise) if approximate else state, total, noise)
    elif state.question == "traits":
        state = state._replace(estimate=_estimate_traits(state, total))
    else:
        state = _estimate_biases(state, total, noise)
    return state._replace(asked=state.asked + 1)


def _drop_noise(histogram: np.ndarray, noise: float) -> np.ndarray:
    """Return a histogram without the bins that could be noise alone."""
    return np.where(histogram > noise * math.sqrt(2 * math.log(20 * len(histogram))), histogram, 0.0)


def _estimate_range(state: State, total: np.ndarray, noise: float, transform: Transform | None) -> State:
    assert state.bounds is not None
    histogram = _drop_noise(total, noise)
    occupied = np.flatnonzero(histogram)
    if not len(occupied):
        raise ValueError(
            "round zero found no ratings above its noise: declare `rating_range` (such as 1 5), allow a larger "
            "epsilon, or use more clients"
        )
    edges = RANGE.edges()
    outer = np.concatenate([edges[: RANGE.side], [0.0], edges[RANGE.side + 2 :]])
    inner = outer * 2.0 ** (-1 / RANGE.per_doubling)
    ends = np.minimum(outer, inner)[occupied[0]], np.maximum(outer, inner)[occupied[-1]]
    share, middle = histogram[occupied] / histogram.sum(), (outer + inner)[occupied] / 2
    mean = share @ middle
    variance = share @ (middle - mean) ** 2
    skewed = variance > 0 and share @ (middle - mean) ** 3 / variance**1.5 > MAX_SKEWNESS
    transform = transform or ("log1p" if occupied[0] >= RANGE.side and skewed else "none")
    low, high = transform_ratings(ends, transform)
    low, high = (low, high) if low < high else (low - 0.5, high + 0.5)
    return state._replace(
        estimate=state.estimate._replace(transform=transform),
        bounds=state.bounds._replace(low=float(low), high=float(high)),
    )


def _count_clients(state: State, total: np.ndarray, noise: float) -> State:
    """Estimate how many clients there are: each adds one half to one of the bins of sizes."""
    assert state.bounds is not None
    clients, variance = state.bounds.clients, 4 * SIZES * noise**2
    trust = (APPROXIMATE * clients) ** 2 / ((APPROXIMATE * clients) ** 2 + variance)
    clients += trust * (2 * float(total[SCALE_BINS:-2].sum()) - clients)
    return state._replace(bounds=state.bounds._replace(clients=max(clients, 1.0)))


def _estimate_scale(state: State, total: np.ndarray, noise: float) -> State:
    assert state.bounds is not None
    low, high = state.bounds.low, state.bounds.high
    width = high - low
    first, second = np.clip(2 * total[-2:] / state.bounds.clients, -1.0, 1.0)  # of ratings from -1 to 1
    mean = low + width * float(1 + first) / 2
    deviation = width * max(math.sqrt(max(float(second - first**2), 0.0)) / 2, LEAST_SPREAD)
    occupied, ends = np.flatnonzero(_drop_noise(total[:SCALE_BINS], noise)), (low, high)
    if len(occupied) and "range" in state.questions:  # a declared range stays as it is
        middle = low + (occupied + 0.5) * width / SCALE_BINS
        ends = float(middle[0]), float(middle[-1])
    if not ends[0] < mean < ends[1]:
        ends = low, high
    sizes = np.cumsum(np.maximum(total[SCALE_BINS:-2], 0.0))
    level = int(np.argmax(sizes >= SMALL * sizes[-1]))
    return state._replace(
        estimate=state.estimate._replace(mean=mean, deviation=deviation, low=ends[0], high=ends[1]),
        bounds=state.bounds._replace(size=2.0 ** ((level + 0.5) / 2)),
    )


def _estimate_biases(state: State, total: np.ndarray, noise: float) -> State:
    assert state.bounds is not None
    estimate, bounds, first = state.estimate, state.bounds, state.question == "first biases"
    items, unit = len(estimate.item_bias), _bias_norm(state) / math.sqrt(1 - SCALARS)
    sums, variance = total[:items] * unit, np.full(items, (noise * unit) ** 2)
    count, deviation = estimate.item_count, bounds.deviation
    if first:
        # Counts that noise hides weigh as little as the noise does.
        deviation = noise * unit / COUNT
        count = np.maximum(total[items : 2 * items] * unit / COUNT, deviation)
    else:
        # The first sums, from before users had any item bias, are less exact, and have noise of their own.
        sums = sums + estimate.item_bias * count
        before = bounds.variance + (FIRST_ERROR * count) ** 2
        sums = (sums * before + bounds.sums * variance) / (before + variance)
        variance = before * variance / (before + variance)
    bias, remainder = _shrink_biases(estimate, sums, count, variance, deviation)
    square, error = total[-2:] / math.sqrt(SCALARS / 2) / bounds.clients * np.array([MAX_SQUARE, MAX_ERROR])
    weight, visible = count / count.sum(), count > 2 * deviation
    item_variance = (bias**2 + remainder)[visible].mean() if visible.any() else estimate.item_variance
    estimate = estimate._replace(
        item_bias=bias,
        item_count=count,
        noise=estimate.noise if first else _clip_variance(error + weight @ remainder, MAX_ERROR),
        item_variance=_clip_variance(item_variance, MAX_SQUARE),
        user_variance=_clip_variance(square, MAX_SQUARE),
        item_bias_ridge=estimate.item_ridge,
    )
    return state._replace(
        estimate=estimate._replace(user_bias_ridge=estimate.user_ridge),
        bounds=bounds._replace(deviation=deviation, sums=sums, variance=variance),
    )


def _shrink_biases(
    estimate: Estimate, sums: np.ndarray, count: np.ndarray, variance: np.ndarray, deviation: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return item biases shrunk towards those of items of similar popularity, and the variance that remains."""
    visible, popularity = count > 3 * deviation, np.log1p(count)
    target = np.zeros(len(count))
    if visible.sum() > 20:
        slope, level = np.polyfit(popularity[visible], (sums / count)[visible], 1, w=count[visible] ** 0.5)
        target = level + slope * np.clip(popularity, popularity[visible].min(), None)
    prior = max(estimate.item_variance, LEAST_VARIANCE)
    trust = count * prior / (count * prior + estimate.noise + variance / count)
    return target + trust * (sums / count - target), prior * (1 - trust)


def _estimate_traits(state: State, total: np.ndarray) -> Estimate:
    assert state.bounds is not None
    values = total / state.bounds.clients * math.sqrt(len(total))
    squares = np.array([_clip_variance(value * MAX_SQUARE, MAX_SQUARE) for value in values[:-1]])
    return state.estimate._replace(
        noise=_clip_variance(values[-1] * MAX_ERROR, MAX_ERROR),
        trait_variance=squares[:-1],
        user_variance=float(squares[-1]),
    )


def _clip_variance(value: Any, most: float) -> float:
    """Return a variance within sensible bounds, whatever the noise."""
    return float(np.clip(value, 10 * LEAST_VARIANCE, most))
