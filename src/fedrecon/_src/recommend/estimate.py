"""What round zero estimates, the state that a server sends, and the user effects that clients fit to it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from fedrecon._src.recommend.outliers import RatingRange

Transform = Literal["none", "log1p"]
Question = Literal["moments", "range", "scale", "first biases", "biases", "traits", "counts"]
Sums = dict[str, np.ndarray]

TRAITS = ("bias", "popularity")
LEAST_VARIANCE = 1e-4  # of standardised ratings, so that no ridge is infinite
MAX_SKEWNESS = 2.0  # ratings have a skewness between -1 and 0; plays and clicks of 10 or more


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


class Bounds(NamedTuple):
    """What bounded answers need in addition.

    Attributes:
      low: lower ratings are clipped to this, transformed.
      high: higher ratings are clipped to this.
      size: clients with more ratings than this weigh each of them less.
      deviation: of the noise in the weighted counts.
      sums: `(items,)` of the weighted ratings of every item, as far as estimated.
      variance: `(items,)` of the noise in them.
    """

    low: float
    high: float
    size: float
    deviation: float
    sums: np.ndarray
    variance: np.ndarray


class State(NamedTuple):
    """What the server has estimated so far, and sends to every client with its next question.

    Attributes:
      questions: all of them, in order.
      asked: how many of them were answered.
      estimate: from the answers so far.
      kept: the ratings that are not outliers; with bounded answers, none are dropped.
      bounds: of the answers; None if they are exact.
    """

    questions: tuple[Question, ...]
    asked: int
    estimate: Estimate
    kept: RatingRange = RatingRange()
    bounds: Bounds | None = None

    @property
    def question(self) -> Question:
        """The next question."""
        return self.questions[self.asked]

    @property
    def done(self) -> bool:
        """Whether all questions were answered."""
        return self.asked >= len(self.questions)


def transform_ratings(rating: Any, transform: str) -> np.ndarray:
    """Return ratings in double precision, or log(1 + rating), where ratings below 0 are taken as 0."""
    values = np.asarray(rating, np.float64)
    return np.log1p(np.maximum(values, 0)) if transform == "log1p" else values


class UserBiases(NamedTuple):
    """User biases, given the item biases; each field is `(users,)`.

    Attributes:
      size: the number of ratings.
      bias: the bias.
      square: the expected square of the bias.
      error: the expected sum of squared errors.
    """

    size: np.ndarray
    bias: np.ndarray
    square: np.ndarray
    error: np.ndarray


def fit_user_biases(estimate: Estimate, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> UserBiases:
    """Fit every user's bias to standardised ratings `y`; `owner` is the user of each rating, from 0."""
    users = int(owner.max(initial=-1)) + 1
    residual = y - estimate.item_bias[item]
    size = np.bincount(owner, minlength=users)
    bias = np.bincount(owner, residual, users) / (size + estimate.user_ridge)
    variance = estimate.noise / (size + estimate.user_ridge)  # of a user's bias given the ratings
    error = np.bincount(owner, (residual - bias[owner]) ** 2, users) + size * variance
    return UserBiases(size, bias, bias**2 + variance, error)


class UserTraits(NamedTuple):
    """How users respond to item traits.

    Attributes:
      size: `(users,)` the number of ratings.
      square: `(users, traits + 1)` the expected squares of the coefficients, the bias last.
      error: `(users,)` the expected sum of squared errors.
    """

    size: np.ndarray
    square: np.ndarray
    error: np.ndarray


def fit_user_traits(estimate: Estimate, traits: np.ndarray, residual: np.ndarray, owner: np.ndarray) -> UserTraits:
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
    return UserTraits(np.bincount(owner, minlength=users), square, error)
