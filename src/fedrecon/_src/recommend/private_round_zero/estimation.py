"""What the server makes of noised sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedrecon._src.recommend.private_round_zero.message import (
    COUNT,
    LEAST_SPREAD,
    LOWEST,
    MOST_ERROR,
    MOST_SQUARE,
    PER_DOUBLING,
    SCALARS,
    SIDE,
    SMALL,
    UNSURE,
    Message,
    norm_of,
    transformed,
)
from fedrecon._src.recommend.round_zero import BINS, LEAST_VARIANCE, SKEWED, Preparation


def advance(message: Message, total: np.ndarray, noise: float) -> Message:
    """Return what the server sends next.

    Args:
      message: what it sent last.
      total: the noised sum of all clients' answers to that.
      noise: the standard deviation of the noise in every entry of it.
    """
    total = np.asarray(total, np.float64)
    if total.shape != (message.length,):
        raise ValueError(f"the sum has the shape {total.shape}; for this question it is ({message.length},)")
    steps: dict[str, Callable[[Message, np.ndarray, float], Message]] = {
        "range": _find_range,
        "scale": _find_scale,
        "first biases": _find_biases,
        "biases": _find_biases,
        "traits": _find_traits,
    }
    return steps[message.question](message, total, noise)._replace(asked=message.asked + 1)


def edges_of_range() -> np.ndarray:
    """Return the outer edge of every bin of `range`."""
    above = 2.0 ** (LOWEST + np.arange(1, SIDE + 1) / PER_DOUBLING)
    return np.concatenate([-above[::-1], [0.0], above])


def _above(histogram: np.ndarray, noise: float) -> np.ndarray:
    """Return a histogram without the bins that could be noise alone."""
    return np.where(histogram > noise * math.sqrt(2 * math.log(20 * len(histogram))), histogram, 0.0)


def _find_range(message: Message, total: np.ndarray, noise: float) -> Message:
    there = _above(total, noise)
    kept = np.flatnonzero(there)
    if not len(kept):
        raise ValueError(
            "round zero found no ratings above its noise: declare their range (--privacy.rating-range 1 5), allow a "
            "larger epsilon, or find more clients"
        )
    edges = edges_of_range()
    inner = edges * 2.0 ** (-1 / PER_DOUBLING)
    ends = np.minimum(edges, inner)[kept[0]], np.maximum(edges, inner)[kept[-1]]
    share, middle = there[kept] / there.sum(), (edges + inner)[kept] / 2
    mean = share @ middle
    variance = share @ (middle - mean) ** 2
    skewed = variance > 0 and share @ (middle - mean) ** 3 / variance**1.5 > SKEWED
    transform = message.wanted or ("log1p" if kept[0] >= SIDE and skewed else "none")
    low, high = transformed(np.asarray(ends), transform)
    low, high = (low, high) if low < high else (low - 0.5, high + 0.5)
    return message._replace(low=float(low), high=float(high), found=message.found._replace(transform=transform))


def _find_scale(message: Message, total: np.ndarray, noise: float) -> Message:
    whole = message.high - message.low
    middle = message.low + (np.arange(BINS) + 0.5) * whole / BINS
    first, second = np.clip(2 * total[-2:] / message.clients, -1.0, 1.0)  # of ratings from -1 to 1
    mean = message.low + whole * float(1 + first) / 2
    deviation = whole * max(math.sqrt(max(float(second - first**2), 0.0)) / 2, LEAST_SPREAD)
    kept = np.flatnonzero(_above(total[:BINS], noise))
    found_ends = len(kept) > 0 and not message.declared
    ends = (float(middle[kept[0]]), float(middle[kept[-1]])) if found_ends else (message.low, message.high)
    if not ends[0] < mean < ends[1]:
        ends = message.low, message.high
    found = message.found._replace(passes=1, mean=mean, deviation=deviation, low=ends[0], high=ends[1])
    sizes = np.cumsum(np.maximum(total[BINS:-2], 0.0))
    place = int(np.argmax(sizes >= SMALL * sizes[-1]))
    return message._replace(found=found, size=2.0 ** ((place + 0.5) / 2))


def _find_biases(message: Message, total: np.ndarray, noise: float) -> Message:
    zero, items, first = message.found, len(message.found.item_bias), message.question == "first biases"
    unit = norm_of(message) / math.sqrt(1 - SCALARS)
    sums, uncertain = total[:items] * unit, np.full(items, (noise * unit) ** 2)
    count, deviation = zero.item_count, message.deviation
    if first:
        # What is hidden by noise counts as little as the noise does.
        deviation = noise * unit / COUNT
        count = np.maximum(total[items : 2 * items] * unit / COUNT, deviation)
    else:
        # What was asked first, before users knew any item bias, is less exact, and has noise of its own.
        sums = sums + zero.item_bias * count
        before = message.uncertain + (UNSURE * count) ** 2
        sums = (sums * before + message.sums * uncertain) / (before + uncertain)
        uncertain = before * uncertain / (before + uncertain)
    bias, left = _shrunk(zero, sums, count, uncertain, deviation)
    square, error = total[-2:] / math.sqrt(SCALARS / 2) / message.clients * np.array([MOST_SQUARE, MOST_ERROR])
    weight = count / count.sum()
    known = count > 2 * deviation
    found = zero._replace(
        passes=zero.passes + 1,
        item_bias=bias,
        item_count=count,
        noise=zero.noise if first else _variance(error + weight @ left, MOST_ERROR),
        item_variance=_variance((bias**2 + left)[known].mean() if known.any() else zero.item_variance, MOST_SQUARE),
        user_variance=_variance(square, MOST_SQUARE),
        fitted_ridge=zero.item_ridge,
    )
    return message._replace(found=found, deviation=deviation, sums=sums, uncertain=uncertain)


def _shrunk(
    zero: Preparation, sums: np.ndarray, count: np.ndarray, uncertain: np.ndarray, deviation: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return item biases, and the variance that is left: shrunk towards what items of their popularity have."""
    known, popular = count > 3 * deviation, np.log1p(count)
    towards = np.zeros(len(count))
    if known.sum() > 20:
        slope, level = np.polyfit(popular[known], (sums / count)[known], 1, w=count[known] ** 0.5)
        towards = level + slope * np.clip(popular, popular[known].min(), None)
    around = max(zero.item_variance, LEAST_VARIANCE)
    trust = count * around / (count * around + zero.noise + uncertain / count)
    return towards + trust * (sums / count - towards), around * (1 - trust)


def _find_traits(message: Message, total: np.ndarray, noise: float) -> Message:
    del noise
    values = total / message.clients * math.sqrt(len(total))
    squares = np.array([_variance(value * MOST_SQUARE, MOST_SQUARE) for value in values[:-1]])
    found = message.found._replace(
        passes=message.found.passes + 1,
        noise=_variance(values[-1] * MOST_ERROR, MOST_ERROR),
        trait_variance=squares[:-1],
        user_variance=float(squares[-1]),
    )
    return message._replace(found=found)


def _variance(value: Any, most: float) -> float:
    """Return a variance, within sensible bounds whatever the noise."""
    return float(np.clip(value, 10 * LEAST_VARIANCE, most))
