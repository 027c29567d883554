"""Outlier bounds for ratings, computed from sums over clients only.

A single client could move a mean arbitrarily far: ten ratings of 1,000 among 2,000 ratings from 1 to 5 raise it from
3.5 to 8.5. So clients sum their moments by bins of magnitude and add a histogram in which every client has weight 1.
The quartiles of that histogram show where most ratings are, and bins far beyond them are dropped. Histograms of the
clients' highest and lowest ratings prevent dropping values that many clients have, as where items are measured in
different units. Fewer than a quarter of the clients cannot move the quartiles far (a tenth, where half of all ratings
are equal).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

FAR = 8.0  # in interquartile ranges; eleven standard deviations of a normal distribution, and no scale is that wide
FAR_EXTREMES = 2.0  # the same for the clients' highest and lowest ratings, which are far out already
TAILS = (0.25, 0.1, 0.05)  # quartiles; where half of all ratings are equal, quantiles further out
MOMENTS = ("count", "sum", "square", "cube", "log_sum", "log_square")


@dataclass(frozen=True)
class MagnitudeBins:
    """Bins of signed magnitudes: `per_doubling` bins between powers of two; smaller magnitudes share the zero bin."""

    per_doubling: int
    lowest: int
    highest: int

    @property
    def side(self) -> int:
        """The number of bins of each sign."""
        return (self.highest - self.lowest) * self.per_doubling

    @property
    def count(self) -> int:
        """The number of all bins."""
        return 2 * self.side + 1

    def index(self, rating: np.ndarray) -> np.ndarray:
        """Return the bin of every rating, from the most negative to the greatest."""
        with np.errstate(divide="ignore"):
            level = np.floor((np.log2(np.abs(rating)) - self.lowest) * self.per_doubling)
        level = np.clip(level, -1, self.side - 1).astype(np.int64) + 1
        return self.side + np.where(rating < 0, -level, level)

    def edges(self) -> np.ndarray:
        """Return the edges: bin k reaches from edge k to edge k + 1."""
        positive = 2.0 ** (self.lowest + np.arange(self.side + 1) / self.per_doubling)
        return np.concatenate([-positive[::-1], positive])


BINS = MagnitudeBins(8, -20, 44)
EDGES = BINS.edges()


class RatingRange(NamedTuple):
    """The first and the last bin of the ratings that are not outliers."""

    first: int = 0
    last: int = BINS.count - 1

    def contains(self, rating: np.ndarray) -> np.ndarray:
        """Return for every rating whether it is in the range."""
        index = BINS.index(rating)
        return (index >= self.first) & (index <= self.last)

    def sum_moments(self, total: Mapping[str, Any]) -> dict[str, float]:
        """Return the moments of the ratings in the range."""
        return {name: float(np.sum(np.asarray(total[name])[self.first : self.last + 1])) for name in MOMENTS}


def bin_moments(rating: np.ndarray, owner: np.ndarray) -> dict[str, np.ndarray]:
    """Sum powers of ratings and of log(1 + x) by bin, the clients' shares of ratings, and their extreme bins.

    Args:
      rating: `(ratings,)` in double precision.
      owner: `(ratings,)` the client of each rating.
    """
    index, logs = BINS.index(rating), np.log1p(np.maximum(rating, 0))
    size = np.bincount(owner)
    powers = {"count": None, "sum": rating, "square": rating**2, "cube": rating**3}
    powers |= {"log_sum": logs, "log_square": logs**2, "share": 1.0 / size[owner]}
    sums = {name: np.bincount(index, values, BINS.count).astype(np.float64) for name, values in powers.items()}
    highest, lowest = np.full(len(size), -1), np.full(len(size), BINS.count)
    np.maximum.at(highest, owner, index)
    np.minimum.at(lowest, owner, index)
    extremes = {"highest": highest[size > 0], "lowest": lowest[size > 0]}
    return sums | {name: np.bincount(at, minlength=BINS.count).astype(np.float64) for name, at in extremes.items()}


def negative_share(total: Mapping[str, Any]) -> float:
    """Return the share of ratings below zero, with weight 1 for every client."""
    share = np.asarray(total["share"])
    return float(share[: BINS.side].sum() / max(share.sum(), 1e-300))


def find_range(total: Mapping[str, Any], logarithm: bool) -> RatingRange:
    """Return the range of the ratings that are not outliers.

    Args:
      total: the sum of all clients' `bin_moments`.
      logarithm: whether distances are those of log(1 + x), where everything below zero is out of range.
    """
    if not np.sum(total["share"]) > 0:
        return RatingRange()
    for tail in TAILS:
        lower, upper = _quantile_bins(total["share"], tail)
        if lower < upper:
            break
    else:  # nearly all are equal: the spread of the others is unknown
        return RatingRange()
    low, high = _fence(lower, upper, FAR, logarithm)
    low = min(low, _fence(*_quantile_bins(total["lowest"]), FAR_EXTREMES, logarithm)[0])
    high = max(high, _fence(*_quantile_bins(total["highest"]), FAR_EXTREMES, logarithm)[1])
    if logarithm:
        low, high = 0.0, np.expm1(min(high, 700.0))
    first = BINS.side if logarithm else int(np.searchsorted(EDGES, low, "right")) - 1
    last = int(np.searchsorted(EDGES, high, "left")) - 1
    return RatingRange(max(first, 0), min(last, BINS.count - 1))


def _quantile_bins(histogram: Any, tail: float = TAILS[0]) -> tuple[int, int]:
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
