"""Round zero: the scale of the ratings, item biases and variances, from nothing but sums over clients.

Before the first round the server queries its clients a few times. Each time a client answers with sums over its own
ratings, the answers are added up (by a simulator, a server or a secure sum), and the server works with the total:

    message = preparation.start(num_items)
    while not preparation.done(message):
        message = preparation.advance(message, sum of preparation.answer(message, item, rating) over clients)

The first total gives the scale: mean, deviation, and whether the ratings are counts. Ratings far outside of what most
clients have are left out of it and of all that follows, so that no single client decides. The following totals fit
`y = item bias + user bias + noise` to the standardised ratings, and the variances of all three, by expectation
maximisation. The last ones show how differently users respond to two traits of an item, its bias and its popularity:
some users follow the majority and some do not. Users' biases and coefficients never leave the clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.data.ratings.believed import BINS as MAGNITUDES
from fedrecon._src.data.ratings.believed import MOMENTS, Believed, believe, moments, negative_share

Transform = Literal["none", "log1p"]
Sums = dict[str, np.ndarray]

TRAITS = ("bias", "popularity")
SKEWED = 2.0  # ratings have a skewness between -1 and 0; plays and clicks of 10 or more
FEW = 0.05  # counts have no more than this share of ratings below 0, which then count as 0
BINS, BIN = 200, 0.1  # to find the ends of the scale: 200 bins, each a tenth of a deviation wide
ENDS = 9  # digits of the ends of the scale, those of the deviation: more than ratings have in 32 bits
LEAST_VARIANCE = 1e-4  # of standardised ratings, so that no ridge is infinite


class Plan(NamedTuple):
    """How many passes over clients follow the first: to fit biases, then the variances of trait coefficients."""

    biases: int = 10
    traits: int = 5


DEFAULT = Plan()


class Preparation(NamedTuple):
    """What the server knows so far, and sends to every client.

    Attributes:
      plan: how many passes there are.
      passes: how many totals the server has seen.
      transform: `log1p` for counts, which are fitted as log(1 + x); else `none`.
      mean: of the transformed ratings.
      deviation: of the transformed ratings; 1 if all are the same.
      low: the lowest rating, transformed; predictions are clipped to it.
      high: the highest rating, in the same way.
      item_bias: `(items,)` of standardised ratings; 0 for items without ratings.
      item_count: `(items,)` how many ratings each item has.
      noise: the variance that neither bias explains.
      item_variance: of the item biases.
      user_variance: of the user biases.
      fitted_ridge: the ridge that `item_bias` was fitted with.
      trait_variance: `(traits,)` of the users' coefficients of item traits.
      believed: which ratings count; those far outside do not.
      outside: how many ratings do not count.
    """

    plan: Plan
    passes: int
    transform: Transform
    mean: float
    deviation: float
    low: float
    high: float
    item_bias: np.ndarray
    item_count: np.ndarray
    noise: float = 0.7
    item_variance: float = 0.15
    user_variance: float = 0.15
    fitted_ridge: float = 0.7 / 0.15
    trait_variance: np.ndarray = np.full(len(TRAITS), 0.02)
    believed: Believed = Believed()
    outside: int = 0

    @property
    def user_ridge(self) -> float:
        """The ridge on a user's bias: the prior counts as much as this many ratings."""
        return self.noise / self.user_variance

    @property
    def item_ridge(self) -> float:
        """The ridge on an item's bias."""
        return self.noise / self.item_variance

    @property
    def trait_ridge(self) -> np.ndarray:
        """The ridges on a user's coefficients of item traits."""
        return self.noise / self.trait_variance

    def traits(self) -> np.ndarray:
        """Return the traits of every item, `(items, traits)`: its bias and the logarithm of its popularity.

        Both have mean 0 and deviation 1 over ratings, and are 0 before any rating has been counted.
        """
        return _scaled_traits(self, self.item_bias, self.item_count)

    def standardize(self, rating: Any) -> np.ndarray:
        """Return ratings with mean 0 and deviation 1.

        Args:
          rating: ratings as they are given.
        """
        return (_transformed(rating, self.transform) - self.mean) / self.deviation

    def restore(self, standardized: Any) -> np.ndarray:
        """Undo `standardize`, and clip to the scale.

        Args:
          standardized: ratings or predictions with mean 0 and deviation 1.
        """
        values = np.clip(self.mean + self.deviation * np.asarray(standardized), self.low, self.high)
        return np.expm1(values) if self.transform == "log1p" else values


def _transformed(rating: Any, transform: Transform) -> np.ndarray:
    """Return ratings, or log(1 + ratings) with those below 0 as 0, in double precision."""
    values = np.asarray(rating, np.float64)
    return np.log1p(np.maximum(values, 0)) if transform == "log1p" else values


def start(num_items: int, plan: Plan = DEFAULT) -> Preparation:
    """Return the first message of the server.

    Args:
      num_items: item ids are 0 to `num_items - 1`.
      plan: how many passes there are.
    """
    if num_items < 1:
        raise ValueError(f"`num_items` is {num_items}; it must be at least 1")
    nothing = np.zeros(num_items)
    if min(plan) < 0 or plan.biases < 1:
        raise ValueError(f"`plan` is {plan}; biases must be fitted at least once")
    return Preparation(plan, 0, "none", 0.0, 1.0, -np.inf, np.inf, nothing, nothing)


def done(message: Preparation) -> bool:
    """Return whether round zero is complete.

    Args:
      message: what the server would send next.
    """
    return message.passes > sum(message.plan)


def answer(message: Preparation, item: Any, rating: Any, client: Any | None = None) -> Sums:
    """Return a client's answer to a message: sums by item, by bin of the scale, and over everything.

    Args:
      message: what the server sent.
      item: `(ratings,)` the items that the client has rated.
      rating: `(ratings,)` their ratings.
      client: `(ratings,)` the number of each rating's client, from 0, to answer for several clients at once. The
        result is the sum of their answers.
    """
    item, rating = np.asarray(item), np.asarray(rating, np.float64)
    if not np.isfinite(rating).all():
        raise ValueError("some ratings are not finite numbers; leave them out")
    owner = np.zeros(len(item), np.int64) if client is None else np.asarray(client)
    if message.passes == 0:
        return moments(rating, owner)
    if message.outside:
        here = message.believed.has(rating)
        item, rating, owner = item[here], rating[here], owner[here]
    if message.passes > message.plan.biases:
        return _trait_sums(message, item, message.standardize(rating), owner)
    sums = _bias_sums(message, item, message.standardize(rating), owner)
    return sums | _bins(message.standardize(rating)) if message.passes == 1 else sums


def advance(message: Preparation, total: Mapping[str, Any], *, transform: Transform | None = None) -> Preparation:
    """Return the next message of the server.

    Args:
      message: the last message.
      total: the sum of all clients' answers to it.
      transform: `log1p` or `none`; by default the skewness of the ratings decides.
    """
    if message.passes == 0:
        return _scale(message, total, transform)
    if message.passes > message.plan.biases:
        return _fit_traits(message, total)
    message = _ends(message, total) if message.passes == 1 else message
    return _fit(message, total)


def prepare(
    clients: Clients, num_items: int, *, plan: Plan = DEFAULT, transform: Transform | None = None
) -> Preparation:
    """Run round zero over all clients at once.

    Args:
      clients: with columns `item` and `rating`.
      num_items: item ids are 0 to `num_items - 1`.
      plan: how many passes there are.
      transform: `log1p` or `none`; by default the skewness of the ratings decides.
    """
    rows = rows_of(clients.starts, clients.ends)
    item, rating = clients.columns["item"][rows], clients.columns["rating"][rows]
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    message = start(num_items, plan)
    while not done(message):
        message = advance(message, answer(message, item, rating, owner), transform=transform)
    return message


# ---- the scale ----


def _scale(message: Preparation, total: Mapping[str, Any], transform: Transform | None) -> Preparation:
    count = float(np.sum(total["count"]))
    if not count > 0:
        raise ValueError("the clients have no ratings to learn a scale from")
    few = negative_share(total) <= FEW
    if transform == "log1p" and not few:
        below = int(np.sum(np.asarray(total["count"])[: MAGNITUDES // 2]))
        raise ValueError(f"log(1 + x) needs ratings of at least 0, but {below} are negative")
    if transform is None:
        skewed = skewness(believe(total, logarithm=False).sums(total)) > SKEWED
        transform = "log1p" if few and skewed else "none"
    believed = believe(total, logarithm=transform == "log1p")
    sums = believed.sums(total)
    first, second = ("log_sum", "log_square") if transform == "log1p" else ("sum", "square")
    mean = sums[first] / sums["count"]
    variance = sums[second] / sums["count"] - mean**2
    deviation = variance**0.5 if variance > 1e-12 * (1 + mean**2) else 1.0
    return message._replace(
        passes=1,
        transform=transform,
        mean=mean,
        deviation=deviation,
        believed=believed,
        outside=round(count - sums["count"]),
    )


def skewness(total: Mapping[str, Any]) -> float:
    """Return the skewness of ratings from the sums of their powers; 0 if all are the same.

    Args:
      total: the sum of the clients' first answers.
    """
    summed = {name: float(np.sum(total[name])) for name in MOMENTS}
    mean, square, cube = (summed[name] / summed["count"] for name in ("sum", "square", "cube"))
    variance = square - mean**2
    if not variance > 1e-12 * (1 + mean**2):
        return 0.0
    return (cube - 3 * mean * square + 2 * mean**3) / variance**1.5


def _bins(standardized: np.ndarray) -> Sums:
    bins = np.clip(np.floor(standardized / BIN).astype(np.int64) + BINS // 2, 0, BINS - 1)
    return {"bin_count": np.bincount(bins, minlength=BINS) + 0.0, "bin_sum": np.bincount(bins, standardized, BINS)}


def _ends(message: Preparation, total: Mapping[str, Any]) -> Preparation:
    """Set the ends of the scale to the means of the outermost bins with ratings. For star ratings this is exact: what
    sums add in rounding errors is rounded away.
    """
    count, values = np.asarray(total["bin_count"]), np.asarray(total["bin_sum"])
    there = np.flatnonzero(count > 0)
    digits = ENDS - math.floor(math.log10(message.deviation))
    low, high = (message.mean + message.deviation * values[i] / count[i] for i in (there[0], there[-1]))
    return message._replace(low=round(float(low), digits) + 0.0, high=round(float(high), digits) + 0.0)  # never -0.0


# ---- biases and variances ----


class Biases(NamedTuple):
    """Users' biases, given the item biases; users first.

    Attributes:
      size: `(users,)` how many ratings each has.
      bias: `(users,)` each user's bias.
      square: `(users,)` the expected square of the bias.
      error: `(users,)` the expected sum of squared errors.
    """

    size: np.ndarray
    bias: np.ndarray
    square: np.ndarray
    error: np.ndarray


def user_biases(message: Preparation, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Biases:
    """Return every user's bias, and the remaining errors.

    Args:
      message: what the server sent.
      item: `(ratings,)` the rated items.
      y: `(ratings,)` the standardised ratings.
      owner: `(ratings,)` the user of each rating, from 0.
    """
    users = int(owner.max(initial=-1)) + 1
    without = y - message.item_bias[item]
    size = np.bincount(owner, minlength=users)
    bias = np.bincount(owner, without, users) / (size + message.user_ridge)
    spread = message.noise / (size + message.user_ridge)  # the variance of a user's bias given the ratings
    error = np.bincount(owner, (without - bias[owner]) ** 2, users) + size * spread
    return Biases(size, bias, bias**2 + spread, error)


def _bias_sums(message: Preparation, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Sums:
    items = len(message.item_bias)
    found = user_biases(message, item, y, owner)
    rated = found.size > 0
    return {
        "item_count": np.bincount(item, minlength=items) + 0.0,
        "item_sum": np.bincount(item, y - found.bias[owner], items),
        "users": np.asarray(rated.sum(), np.float64),
        "user_square": np.asarray(found.square[rated].sum()),
        "error": np.asarray(found.error.sum()),
    }


def _fit(message: Preparation, total: Mapping[str, Any]) -> Preparation:
    count, users = np.asarray(total["item_count"], np.float64), float(total["users"])
    ratings = count.sum()
    if not ratings > 0 or not users > 0:
        raise ValueError("the clients have no ratings to fit biases to")
    noise, ridge, seen = message.noise, message.item_ridge, count > 0
    if message.passes > 1:  # the errors belong to the item biases that were sent; in the first pass there were none
        known = message.item_count
        noise = (float(total["error"]) + (known * noise / (known + ridge)).sum()) / ratings
    bias = np.where(seen, np.asarray(total["item_sum"]) / (count + ridge), 0.0)
    item_variance = (bias**2 + message.noise / (count + ridge))[seen].mean()
    return message._replace(
        passes=message.passes + 1,
        item_bias=bias,
        item_count=count,
        noise=max(noise, LEAST_VARIANCE),
        item_variance=max(float(item_variance), LEAST_VARIANCE),
        user_variance=max(float(total["user_square"]) / users, LEAST_VARIANCE),
        fitted_ridge=ridge,
    )


# ---- how users respond to an item's traits ----


def _scaled_traits(message: Preparation, bias: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Standardise traits by their mean and deviation over all ratings."""
    weight = message.item_count / max(message.item_count.sum(), 1.0)
    known = np.stack([message.item_bias, np.log1p(message.item_count)], 1)
    mean = weight @ known
    deviation = np.sqrt(weight @ (known - mean) ** 2)
    return (np.stack([bias, np.log1p(count)], 1) - mean) / np.where(deviation > 1e-6, deviation, 1.0)


class Tastes(NamedTuple):
    """How users respond to items' traits; users first.

    Attributes:
      size: `(users,)` how many ratings each has.
      square: `(users, traits + 1)` the expected squares of its coefficients, the bias last.
      error: `(users,)` the expected sum of squared errors.
    """

    size: np.ndarray
    square: np.ndarray
    error: np.ndarray


def user_tastes(message: Preparation, traits: np.ndarray, without: np.ndarray, owner: np.ndarray) -> Tastes:
    """Fit every user's bias and coefficients of traits.

    Args:
      message: what the server sent.
      traits: `(ratings, traits)` of the rated items.
      without: `(ratings,)` standardised ratings without the item biases.
      owner: `(ratings,)` the user of each rating, from 0.
    """
    users = int(owner.max(initial=-1)) + 1
    x = np.concatenate([traits, np.ones((len(without), 1))], 1)  # (ratings, traits + 1)
    columns = range(x.shape[1])
    gram = np.stack([np.stack([np.bincount(owner, x[:, a] * x[:, b], users) for a in columns], 1) for b in columns], 1)
    moment = np.stack([np.bincount(owner, x[:, a] * without, users) for a in columns], 1)
    inverse = np.linalg.inv(gram + np.diag([*message.trait_ridge, message.user_ridge]))
    solved = np.einsum("uab,ub->ua", inverse, moment)
    square = solved**2 + message.noise * np.einsum("uaa->ua", inverse)
    left = without - np.einsum("na,na->n", x, solved[owner])
    error = np.bincount(owner, left**2, users) + message.noise * np.einsum("uab,uab->u", inverse, gram)
    return Tastes(np.bincount(owner, minlength=users), square, error)


def _trait_sums(message: Preparation, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Sums:
    """Sum the squares of users' coefficients, each fitted to item traits without that user's own rating.

    Otherwise the bias of an item with two ratings would mostly be each user's own opinion.
    """
    mine = user_biases(message, item, y, owner).bias
    count = message.item_count[item]
    total = message.item_bias[item] * (count + message.fitted_ridge) - (y - mine[owner])
    others = np.maximum(count - 1, 0)
    bias = np.where(others > 0, total / (others + message.fitted_ridge), 0.0)
    found = user_tastes(message, _scaled_traits(message, bias, others), y - bias, owner)
    rated = found.size > 0
    return {
        "users": np.asarray(rated.sum(), np.float64),
        "ratings": np.asarray(len(y), np.float64),
        "trait_square": found.square[rated].sum(0),
        "error": np.asarray(found.error.sum()),
    }


def _fit_traits(message: Preparation, total: Mapping[str, Any]) -> Preparation:
    variance = np.maximum(np.asarray(total["trait_square"]) / float(total["users"]), LEAST_VARIANCE)
    return message._replace(
        passes=message.passes + 1,
        noise=max(float(total["error"]) / float(total["ratings"]), LEAST_VARIANCE),
        trait_variance=variance[:-1],
        user_variance=float(variance[-1]),
    )
