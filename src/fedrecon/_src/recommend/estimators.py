"""What the server of round zero estimates from the sum of clients' answers, with noise or without."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedrecon._src.recommend.answers import (
    COUNT,
    MAX_ERROR,
    MAX_SQUARE,
    MOMENTS,
    RANGE,
    SCALARS,
    SCALE_BINS,
    SIZES,
    answer_length,
    bias_norm,
)
from fedrecon._src.recommend.estimate import (
    BINS,
    LEAST_VARIANCE,
    MAX_SKEWNESS,
    Estimate,
    State,
    Transform,
    find_range,
    transform_ratings,
)

MAX_NEGATIVE_SHARE = 0.05  # of counts; they are taken as 0
END_DIGITS = 9  # of the ends of the scale, relative to the deviation: more than ratings have in 32 bits
SMALL = 0.25  # clients with more ratings than this share of clients have weigh each rating less
APPROXIMATE = 0.25  # how far a rough number of clients may be off, relative to it
LEAST_SPREAD = 0.05  # of ratings, in units of their range: noise must not make it 0
FIRST_ERROR = 0.1  # error of standardised item biases as long as users do not take them into account


def advance(state: State, total: Any, noise: float, transform: Transform | None, *, approximate: bool = False) -> State:
    """Return the next state.

    Args:
      state: the last one.
      total: the sum of all clients' answers to it, noised if they are bounded.
      noise: the standard deviation of the noise in every entry of it.
      transform: of the ratings; None to decide from their skewness.
      approximate: estimate how many clients there are from their answers, starting from what `state` says.
    """
    total = np.asarray(total, np.float64)
    if total.shape != (answer_length(state),):
        raise ValueError(f"`total` must have shape ({answer_length(state)},) (got {total.shape})")
    ratings = total[: BINS.count].sum() if state.question == "moments" else total[-1]
    if state.bounds is None and not ratings > 0:
        raise ValueError(f"the clients have no ratings, so {state.question} cannot be estimated")
    if state.question == "moments":
        state = _estimate_moments(state, dict(zip(MOMENTS, total.reshape(len(MOMENTS), -1), strict=True)), transform)
    elif state.question == "range":
        state = _estimate_range(state, total, noise, transform)
    elif state.question == "scale":
        state = _estimate_scale(_count_clients(state, total, noise) if approximate else state, total, noise)
    elif state.question == "traits":
        state = state._replace(estimate=_estimate_traits(state, total))
    else:
        state = _estimate_biases(state, total, noise)
    return state._replace(answered=state.answered + 1)


# ---- the scale, from exact sums ----


def _estimate_moments(state: State, total: Mapping[str, np.ndarray], transform: Transform | None) -> State:
    share = total["share"]  # of ratings by bin, with weight 1 for every client
    mostly_positive = share[: BINS.side].sum() / max(share.sum(), 1e-300) <= MAX_NEGATIVE_SHARE
    if transform == "log1p" and not mostly_positive:
        negative = int(total["count"][: BINS.side].sum())
        raise ValueError(f"`transform` 'log1p' needs ratings of at least 0, but {negative} are negative")
    if transform is None:
        skewed = skewness(find_range(total, logarithm=False).sum_moments(total)) > MAX_SKEWNESS
        transform = "log1p" if mostly_positive and skewed else "none"
    inliers = find_range(total, logarithm=transform == "log1p")
    sums = inliers.sum_moments(total)
    first, second = ("log_sum", "log_square") if transform == "log1p" else ("sum", "square")
    mean = sums[first] / sums["count"]
    variance = sums[second] / sums["count"] - mean**2
    estimate = state.estimate._replace(
        transform=transform,
        mean=mean,
        deviation=variance**0.5 if variance > 1e-12 * (1 + mean**2) else 1.0,
        outliers=round(float(total["count"].sum()) - sums["count"]),
    )
    return state._replace(estimate=estimate, inliers=inliers)


def skewness(sums: Mapping[str, float]) -> float:
    """Return the skewness of ratings from the sums of their powers; 0 if all are equal."""
    mean, square, cube = (sums[name] / sums["count"] for name in ("sum", "square", "cube"))
    variance = square - mean**2
    if not variance > 1e-12 * (1 + mean**2):
        return 0.0
    return (cube - 3 * mean * square + 2 * mean**3) / variance**1.5


def _estimate_ends(estimate: Estimate, total: np.ndarray) -> Estimate:
    """Set the ends of the scale to the means of the outermost bins with ratings. For star ratings this is exact: the
    rounding errors of sums are rounded away.
    """
    items = len(estimate.item_bias)
    count, values = total[2 * items : -3].reshape(2, SCALE_BINS)
    occupied = np.flatnonzero(count > 0)
    digits = END_DIGITS - math.floor(math.log10(estimate.deviation))
    low, high = (estimate.mean + estimate.deviation * values[i] / count[i] for i in (occupied[0], occupied[-1]))
    return estimate._replace(low=round(float(low), digits) + 0.0, high=round(float(high), digits) + 0.0)  # never -0.0


# ---- the scale, from noised sums ----


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


# ---- biases and traits ----


def _estimate_biases(state: State, total: np.ndarray, noise: float) -> State:
    estimate, bounds, first = state.estimate, state.bounds, state.question == "first biases"
    items, unit, count_unit, deviation = len(estimate.item_bias), 1.0, 1.0, 0.0
    if bounds is not None:
        unit, deviation = bias_norm(bounds, first) / math.sqrt(1 - SCALARS), bounds.deviation
        count_unit = unit / COUNT
    sums, variance, count = total[:items] * unit, np.full(items, (noise * unit) ** 2), estimate.item_count
    if first:
        # Counts that noise hides weigh as little as the noise does.
        deviation = noise * count_unit
        count = np.maximum(total[items : 2 * items] * count_unit, deviation)
    else:
        sums = sums + estimate.item_bias * count
        if bounds is not None:
            # The first sums, from before users had any item bias, are less exact, and have noise of their own.
            before = bounds.variance + (FIRST_ERROR * count) ** 2
            sums = (sums * before + bounds.sums * variance) / (before + variance)
            variance = before * variance / (before + variance)
    if first and bounds is None:
        estimate = _estimate_ends(estimate, total)
    bias, remainder = _shrink_biases(estimate, sums, count, variance, deviation)
    (square,), error = _mean_scalars(state, total[items * (2 if first else 1) :], count.sum(), math.sqrt(SCALARS / 2))
    weight, visible = count / count.sum(), count > 2 * deviation
    item_variance = (bias**2 + remainder)[visible].mean() if visible.any() else estimate.item_variance
    estimate = estimate._replace(
        item_bias=bias,
        item_count=count,
        # The errors belong to the item biases that were sent; at first there were none.
        noise=estimate.noise if first else _limit(state, error + weight @ remainder, MAX_ERROR),
        item_variance=_limit(state, item_variance, MAX_SQUARE),
        user_variance=_limit(state, square, MAX_SQUARE),
        item_bias_ridge=estimate.item_ridge,
    )
    return state._replace(
        estimate=estimate._replace(user_bias_ridge=estimate.user_ridge),
        bounds=bounds and bounds._replace(deviation=deviation, sums=sums, variance=variance),
    )


def _shrink_biases(
    estimate: Estimate, sums: np.ndarray, count: np.ndarray, variance: np.ndarray, deviation: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return item biases shrunk towards 0, with noise towards those of items of similar popularity, and the variance
    that remains.
    """
    visible, popularity, rated = count > 3 * deviation, np.log1p(count), np.maximum(count, 1e-30)
    target = np.zeros(len(count))
    if deviation and visible.sum() > 20:
        slope, level = np.polyfit(popularity[visible], (sums / rated)[visible], 1, w=count[visible] ** 0.5)
        target = level + slope * np.clip(popularity, popularity[visible].min(), None)
    prior = max(estimate.item_variance, LEAST_VARIANCE)
    trust = count * prior / (count * prior + estimate.noise + variance / rated)
    return target + trust * (sums / rated - target), prior * (1 - trust)


def _estimate_traits(state: State, total: np.ndarray) -> Estimate:
    squares, error = _mean_scalars(state, total, state.estimate.item_count.sum(), 1 / math.sqrt(len(total)))
    variances = np.array([_limit(state, square, MAX_SQUARE) for square in squares])
    return state.estimate._replace(
        noise=_limit(state, error, MAX_ERROR), trait_variance=variances[:-1], user_variance=float(variances[-1])
    )


def _mean_scalars(state: State, total: np.ndarray, ratings: float, unit: float) -> tuple[np.ndarray, float]:
    """Return the means of the clients' expected squares, and of their errors: over ratings, if sums are exact."""
    if state.bounds is None:
        *_, error, users = total
        width = 1 if state.question != "traits" else len(total) - 2
        return total[-2 - width : -2] / users, float(error / ratings)
    means = total / unit / state.bounds.clients
    return means[:-1] * MAX_SQUARE, float(means[-1] * MAX_ERROR)


def _limit(state: State, value: Any, most: float) -> float:
    """Return a variance within sensible bounds, whatever the noise."""
    if state.bounds is None:
        return max(float(value), LEAST_VARIANCE)
    return float(np.clip(value, 10 * LEAST_VARIANCE, most))
