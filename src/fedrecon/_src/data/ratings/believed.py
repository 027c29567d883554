"""Which ratings round zero believes: all but those far outside what most clients have, found from sums alone.

One client can move a mean as far as it likes: ten ratings of 1,000 among 2,000 from 1 to 5 raise it from 3.5 to 8.5. So
clients add up their moments by bins of magnitude, and a histogram in which every client counts once, whatever it sends.
Quartiles of that histogram tell where most ratings are; bins far beyond them are left out, unless many clients have
such ratings, as where items are measured in different units. Histograms of the clients' highest and lowest ratings tell
that. Fewer than a quarter of the clients cannot move the quartiles far (a tenth, where half of all ratings are the
same).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

PER_DOUBLING = 8  # bins for each doubling of a magnitude
LOWEST, HIGHEST = -20, 44  # powers of two between which magnitudes are told apart; what is below counts as zero
SIDE = (HIGHEST - LOWEST) * PER_DOUBLING  # bins of each sign
BINS = 2 * SIDE + 1
FAR = 8.0  # in distances between the quartiles; of a normal distribution eleven deviations, and no scale is so wide
BEYOND = 2.0  # the same for the highest and the lowest ratings of clients, which are far out already
TAILS = (0.25, 0.1, 0.05)  # quartiles; where half of all ratings are the same, what is further out
MOMENTS = ("count", "sum", "square", "cube", "log_sum", "log_square")


class Believed(NamedTuple):
    """The first and the last bin of the ratings that are believed."""

    first: int = 0
    last: int = BINS - 1

    def has(self, rating: np.ndarray) -> np.ndarray:
        """Return for every rating whether it is believed."""
        found = bins(rating)
        return (found >= self.first) & (found <= self.last)

    def sums(self, total: Mapping[str, Any]) -> dict[str, float]:
        """Return the moments of the ratings that are believed."""
        here = slice(self.first, self.last + 1)
        return {name: float(np.sum(np.asarray(total[name])[here])) for name in MOMENTS}


def bins(rating: np.ndarray) -> np.ndarray:
    """Return the bin of every rating, from the most negative to the greatest."""
    size = np.abs(rating)
    with np.errstate(divide="ignore"):
        place = np.floor((np.log2(size) - LOWEST) * PER_DOUBLING)
    place = np.clip(place, -1, SIDE - 1).astype(np.int64) + 1  # 0 for what counts as zero
    return SIDE + np.where(rating < 0, -place, place)


def _edges() -> np.ndarray:
    positive = 2.0 ** (LOWEST + np.arange(SIDE + 1) / PER_DOUBLING)
    return np.concatenate([-positive[::-1], positive])  # bin k is from edge k to edge k + 1


EDGES = _edges()


def moments(rating: np.ndarray, owner: np.ndarray) -> dict[str, np.ndarray]:
    """Sum powers of ratings and of log(1 + x) by bins, the clients' shares of ratings, and where their ends are.

    Args:
      rating: `(ratings,)` in double precision.
      owner: `(ratings,)` the number of each rating's client.
    """
    place, logs = bins(rating), np.log1p(np.maximum(rating, 0))
    size = np.bincount(owner)
    powers = {"count": None, "sum": rating, "square": rating**2, "cube": rating**3}
    powers |= {"log_sum": logs, "log_square": logs**2, "share": 1.0 / size[owner]}
    sums = {name: np.bincount(place, values, BINS).astype(np.float64) for name, values in powers.items()}
    highest, lowest = np.full(len(size), -1), np.full(len(size), BINS)
    np.maximum.at(highest, owner, place)
    np.minimum.at(lowest, owner, place)
    ends = {"highest": highest[size > 0], "lowest": lowest[size > 0]}
    return sums | {name: np.bincount(at, minlength=BINS).astype(np.float64) for name, at in ends.items()}


def negative_share(total: Mapping[str, Any]) -> float:
    """Return the share of ratings below zero, every client counting once."""
    share = np.asarray(total["share"])
    return float(share[:SIDE].sum() / max(share.sum(), 1e-300))


def believe(total: Mapping[str, Any], logarithm: bool) -> Believed:
    """Return which ratings are not far outside.

    Args:
      total: the sum of all clients' `moments`.
      logarithm: whether distances are those of log(1 + x), in which nothing below zero is believed.
    """
    if not np.sum(total["share"]) > 0:
        return Believed()
    for tail in TAILS:
        lower, upper = _quartiles(total["share"], tail)
        if lower < upper:
            break
    else:  # nearly all are the same: nothing is known of how the others are spread
        return Believed()
    low, high = _fence(lower, upper, FAR, logarithm)
    low = min(low, _fence(*_quartiles(total["lowest"]), BEYOND, logarithm)[0])
    high = max(high, _fence(*_quartiles(total["highest"]), BEYOND, logarithm)[1])
    if logarithm:
        low, high = 0.0, np.expm1(min(high, 700.0))
    first = SIDE if logarithm else int(np.searchsorted(EDGES, low, "right")) - 1
    last = int(np.searchsorted(EDGES, high, "left")) - 1
    return Believed(max(first, 0), min(last, BINS - 1))


def _quartiles(histogram: Any, tail: float = TAILS[0]) -> tuple[int, int]:
    """Return the bins below and above which a share `tail` of the histogram lies."""
    below = np.cumsum(np.asarray(histogram, np.float64))
    lower, upper = (int(np.searchsorted(below, part * below[-1])) for part in (tail, 1 - tail))
    return lower, upper


def _fence(lower: int, upper: int, times: float, logarithm: bool) -> tuple[float, float]:
    """Return the ends of a range of bins, moved apart by `times` its width."""
    low, high = EDGES[lower], EDGES[upper + 1]
    if logarithm:
        low, high = np.log1p(np.maximum([low, high], 0.0))
    return low - times * (high - low), high + times * (high - low)
