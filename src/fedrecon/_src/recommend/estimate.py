"""What round zero estimates, the state that a server sends, the user effects that clients fit to it, and outliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

Transform = Literal["none", "log1p"]
Question = Literal["moments", "range", "scale", "first biases", "biases", "traits", "counts", "product"]
Sums = dict[str, np.ndarray]

TRAITS = ("bias", "popularity")
LEAST_VARIANCE = 1e-4  # of standardised ratings, so that no ridge is infinite
MAX_SKEWNESS = 2.0  # ratings have a skewness between -1 and 0; plays and clicks of 10 or more
FAR = 8.0  # in interquartile ranges; eleven standard deviations of a normal distribution, and no scale is that wide
FAR_EXTREMES = 2.0  # the same for the clients' highest and lowest ratings, which are far out already
TAILS = (0.25, 0.1, 0.05)  # quartiles; where half of all ratings are equal, quantiles further out
POWERS = ("count", "sum", "square", "cube", "log_sum", "log_square")


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
        return {name: float(np.sum(np.asarray(total[name])[self.first : self.last + 1])) for name in POWERS}


class Estimate(NamedTuple):
    """The scale of ratings, item biases and variances, estimated from sums over clients.

    Attributes:
      item_bias: `(items,)` of standardised ratings; 0 for items without ratings.
      item_count: `(items,)` the number of ratings of each item; weighted if answers were bounded.
      transform: `log1p` for counts, which are fitted as log(1 + x); else `none`.
      mean: of the transformed ratings.
      deviation: of the transformed ratings; 1 if all are equal.
      low: the lowest rating, transformed; predictions are clipped to it.
      high: the highest rating, in the same way.
      noise: the variance that neither bias explains.
      item_variance: of the item biases.
      user_variance: of the user biases.
      item_bias_ridge: the ridge that `item_bias` was fitted with.
      user_bias_ridge: the ridge on a user's bias in a model without traits.
      trait_variance: `(traits,)` of the users' coefficients of item traits.
      outliers: the number of ratings that were dropped because they are far outside the usual range.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> estimate = fr.recommend.Estimate(np.zeros(2), np.zeros(2), mean=3.0, deviation=2.0)
      >>> estimate.standardize([1.0, 5.0]).tolist()
      [-1.0, 1.0]
    """

    item_bias: np.ndarray
    item_count: np.ndarray
    transform: Transform = "none"
    mean: float = 0.0
    deviation: float = 1.0
    low: float = -np.inf
    high: float = np.inf
    noise: float = 0.7
    item_variance: float = 0.15
    user_variance: float = 0.15
    item_bias_ridge: float = 0.7 / 0.15
    user_bias_ridge: float = 0.7 / 0.15
    trait_variance: np.ndarray = np.full(len(TRAITS), 0.02)
    outliers: int = 0

    @property
    def user_ridge(self) -> float:
        """The ridge on a user's bias: the prior weighs as much as this many ratings."""
        return self.noise / self.user_variance

    @property
    def item_ridge(self) -> float:
        """The ridge on an item's bias."""
        return self.noise / self.item_variance

    @property
    def trait_ridge(self) -> np.ndarray:
        """The ridges on a user's coefficients of item traits."""
        return self.noise / self.trait_variance

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest rating, as they are in the data."""
        ends = np.array([self.low, self.high])
        low, high = np.expm1(ends) if self.transform == "log1p" else ends
        return float(low), float(high)

    def traits(self) -> np.ndarray:
        """Return the traits of every item, `(items, traits)`: its bias and the logarithm of its popularity.

        Both have mean 0 and deviation 1 over ratings, and are 0 before any rating has been counted.
        """
        return self.scale_traits(self.item_bias, self.item_count)

    def scale_traits(self, bias: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Standardise traits by the mean and deviation of the estimated ones over all ratings."""
        weight = self.item_count / max(self.item_count.sum(), 1.0)
        traits = np.stack([self.item_bias, np.log1p(self.item_count)], 1)
        mean = weight @ traits
        deviation = np.sqrt(weight @ (traits - mean) ** 2)
        return (np.stack([bias, np.log1p(count)], 1) - mean) / np.where(deviation > 1e-6, deviation, 1.0)

    def standardize(self, rating: Any) -> np.ndarray:
        """Return ratings with mean 0 and deviation 1."""
        return (transform_ratings(rating, self.transform) - self.mean) / self.deviation

    def restore(self, standardized: Any) -> np.ndarray:
        """Undo `standardize`, and clip to the scale."""
        values = np.clip(self.mean + self.deviation * np.asarray(standardized), self.low, self.high)
        return np.expm1(values) if self.transform == "log1p" else values


class StateError(ValueError):
    """A state of round zero that no server of this round zero sends."""


class Bounds(NamedTuple):
    """What bounded answers need in addition.

    Attributes:
      low: lower ratings are clipped to this, transformed.
      high: higher ratings are clipped to this.
      size: clients with more ratings than this weigh each of them less.
      deviation: of the noise in the weighted counts.
      sums: `(items,)` of the weighted ratings of every item, as far as estimated.
      variance: `(items,)` of the noise in them.
      clients: how many clients answer.
    """

    low: float
    high: float
    size: float
    deviation: float
    sums: np.ndarray
    variance: np.ndarray
    clients: float


class State(NamedTuple):
    """What the server has estimated so far, and sends to every client with its next question.

    Attributes:
      questions: all of them, in order.
      answered: how many of them were.
      estimate: from the answers so far.
      inliers: the ratings that are not outliers; with bounded answers, none are dropped.
      bounds: of the answers; None if they are exact.
    """

    questions: tuple[Question, ...]
    answered: int
    estimate: Estimate
    inliers: RatingRange = RatingRange()
    bounds: Bounds | None = None

    @property
    def question(self) -> Question:
        """The next question."""
        return self.questions[self.answered]

    @property
    def done(self) -> bool:
        """Whether all questions were answered."""
        return self.answered >= len(self.questions)

    @property
    def num_examples(self) -> int:
        """How many examples all clients have."""
        return round(float(self.estimate.item_count.sum()))

    @property
    def visible_counts(self) -> np.ndarray:
        """The counts of items; with noise, 0 for items that it hides."""
        count = self.estimate.item_count
        return count if self.bounds is None else np.where(count > self.bounds.deviation, count, 0.0)


def transform_ratings(rating: Any, transform: str) -> np.ndarray:
    """Return ratings in double precision, or log(1 + rating), where ratings below 0 are taken as 0."""
    values = np.asarray(rating, np.float64)
    return np.log1p(np.maximum(values, 0)) if transform == "log1p" else values


class UserEffects(NamedTuple):
    """What users' standardised ratings say about them, given the items.

    Attributes:
      size: `(users,)` the number of ratings.
      effects: `(users, effects)` the coefficients of traits, if any, and the bias last.
      square: `(users, effects)` their expected squares.
      error: `(users,)` the expected sum of squared errors.
    """

    size: np.ndarray
    effects: np.ndarray
    square: np.ndarray
    error: np.ndarray


def fit_user_biases(estimate: Estimate, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> UserEffects:
    """Fit every user's bias to standardised ratings `y`; `owner` is the user of each rating, from 0."""
    users = int(owner.max(initial=-1)) + 1
    residual = y - estimate.item_bias[item]
    size = np.bincount(owner, minlength=users)
    bias = np.bincount(owner, residual, users) / (size + estimate.user_ridge)
    variance = estimate.noise / (size + estimate.user_ridge)  # of a user's bias given the ratings
    error = np.bincount(owner, (residual - bias[owner]) ** 2, users) + size * variance
    return UserEffects(size, bias[:, None], (bias**2 + variance)[:, None], error)


def fit_user_traits(estimate: Estimate, traits: np.ndarray, residual: np.ndarray, owner: np.ndarray) -> UserEffects:
    """Fit every user's bias and coefficients of traits to standardised ratings without the item biases.

    Args:
      estimate: what the server sent.
      traits: `(ratings, traits)` of the rated items.
      residual: `(ratings,)` standardised ratings without the item biases.
      owner: `(ratings,)` the user of each rating, from 0.
    """
    users = int(owner.max(initial=-1)) + 1
    x = np.concatenate([traits, np.ones((len(residual), 1))], 1)  # (ratings, traits + 1)
    columns = range(x.shape[1])
    gram = np.stack([np.stack([np.bincount(owner, x[:, a] * x[:, b], users) for a in columns], 1) for b in columns], 1)
    moment = np.stack([np.bincount(owner, x[:, a] * residual, users) for a in columns], 1)
    inverse = np.linalg.inv(gram + np.diag([*estimate.trait_ridge, estimate.user_ridge]))
    solution = np.einsum("uab,ub->ua", inverse, moment)
    square = solution**2 + estimate.noise * np.einsum("uaa->ua", inverse)
    remainder = residual - np.einsum("na,na->n", x, solution[owner])
    error = np.bincount(owner, remainder**2, users) + estimate.noise * np.einsum("uab,uab->u", inverse, gram)
    return UserEffects(np.bincount(owner, minlength=users), solution, square, error)


# ---- outliers ----
#
# A single client could move a mean arbitrarily far: ten ratings of 1,000 among 2,000 ratings from 1 to 5 raise it from
# 3.5 to 8.5. So clients sum their moments by bins of magnitude and add a histogram in which every client has weight 1.
# The quartiles of that histogram show where most ratings are, and bins far beyond them are dropped. Histograms of the
# clients' highest and lowest ratings prevent dropping values that many clients have, as where items are measured in
# different units. Fewer than a quarter of the clients cannot move the quartiles far (a tenth, where half of all ratings
# are equal).


def find_range(total: Mapping[str, Any], logarithm: bool) -> RatingRange:
    """Return the range of the ratings that are not outliers.

    Args:
      total: the sum of all clients' answers about moments, by name.
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
