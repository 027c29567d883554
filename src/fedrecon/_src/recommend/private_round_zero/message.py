"""What round zero asks, in what order, with how much of its budget; and what the server sends."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from fedrecon._src.recommend.round_zero import BINS, TRAITS, Plan, Preparation, Transform
from fedrecon._src.recommend.round_zero import start as plain_start

Question = Literal["range", "scale", "first biases", "biases", "traits"]
PURPOSE = "round zero"
# How round zero's budget is divided: shares of the sum of 1 / noise^2.
SHARES: dict[Question, float] = {"range": 0.02, "scale": 0.05, "first biases": 0.4, "biases": 0.48, "traits": 0.05}

PER_DOUBLING, LOWEST, HIGHEST = 4, -6, 24  # powers of two between which ratings are told apart, on either side of 0
SIDE = PER_DOUBLING * (HIGHEST - LOWEST)
SIZES = 40  # bins of how many ratings a client has, two for each doubling
SMALL = 0.25  # clients with more ratings than this share of clients have weigh each rating less
SPREAD, LATER = 0.9, 0.75  # root mean square of a client's standardised ratings that is expected: at first, then
COUNT = 0.8  # what a count weighs beside a rating in a client's answer
SCALARS = 0.05  # share of the squared norm that the variances may take
LEAST_SPREAD = 0.05  # of ratings, in units of their range: noise must not make it 0
UNSURE = 0.1  # how far off item biases are, standardised, as long as users do not take them into account
MOST_SQUARE, MOST_ERROR = 1.0, 2.0  # of a client's squared bias and its mean squared error, standardised


class Entries(NamedTuple):
    """Answers of several clients, as the entries that are not zero.

    Attributes:
      client: whose entry it is.
      place: where in the answer.
      value: what it is. A client's values have a norm of 1 at most.
      length: of an answer.
    """

    client: np.ndarray
    place: np.ndarray
    value: np.ndarray
    length: int

    def total(self) -> np.ndarray:
        """Return the sum over clients, without noise."""
        return np.bincount(self.place, self.value, self.length)


class Message(NamedTuple):
    """What the server knows so far, and sends to every client.

    Attributes:
      questions: what is asked, in order.
      asked: how many of them were.
      clients: how many are asked, which is public.
      wanted: the transform of the ratings, None to decide from their skewness.
      low: no rating counts as lower than this, transformed; known after `range`.
      high: no rating counts as higher.
      declared: whether both were declared.
      found: what is known, for the model.
      size: clients with more ratings than this weigh each of them less.
      deviation: of the noise in the weighted counts.
      sums: of the weighted ratings of every item, as far as known.
      uncertain: the variance of the noise in them.
    """

    questions: tuple[Question, ...]
    asked: int
    clients: int
    wanted: Transform | None
    low: float
    high: float
    declared: bool
    found: Preparation
    size: float = 1.0
    deviation: float = 0.0
    sums: np.ndarray | float = 0.0
    uncertain: np.ndarray | float = 0.0

    @property
    def question(self) -> Question:
        """What is asked now."""
        return self.questions[self.asked]

    @property
    def length(self) -> int:
        """How many entries an answer has."""
        items = len(self.found.item_bias)
        lengths = {
            "range": 2 * SIDE + 1,
            "scale": BINS + SIZES + 2,
            "first biases": 2 * items + 2,
            "biases": items + 2,
            "traits": len(TRAITS) + 2,
        }
        return lengths[self.question]


def start(
    num_items: int,
    *,
    clients: int,
    scale: tuple[float, float] | None = None,
    transform: Transform | None = None,
    plan: Plan | None = None,
) -> Message:
    """Return what the server sends before it knows anything.

    Args:
      num_items: item ids are 0 to `num_items - 1`.
      clients: how many are asked.
      scale: the lowest and the highest rating, where that is known from elsewhere; None finds out privately.
      transform: of the ratings, where it should not be decided from their skewness; `none` with a `scale`.
      plan: how often clients are asked for biases and traits; twice and once by default.
    """
    plan = Plan(2, 1) if plan is None else plan
    questions: list[Question] = ["range"] if scale is None else []
    questions += ["scale"]
    questions += ["first biases", *["biases"] * (plan.biases - 1)] if plan.biases else []  # type: ignore[list-item]
    questions += ["traits"] * plan.traits
    if scale is not None and not (math.isfinite(scale[0]) and math.isfinite(scale[1]) and scale[0] < scale[1]):
        raise ValueError(f"the scale of ratings is {scale}; give the lowest and the highest, such as 1 and 5")
    found = plain_start(num_items, Plan(max(plan.biases, 1), plan.traits))
    if scale is None:
        return Message(tuple(questions), 0, clients, transform, -math.inf, math.inf, False, found)
    transform = transform or "none"
    low, high = transformed(np.asarray(scale), transform)
    found = found._replace(transform=transform)
    return Message(tuple(questions), 0, clients, transform, float(low), float(high), True, found)


def done(message: Message) -> bool:
    """Return whether nothing is left to ask.

    Args:
      message: what the server would send next.
    """
    return message.asked >= len(message.questions)


def noise_of(message: Message, noise_multiplier: float) -> float:
    """Return the noise in the sum of the next answers, if all of round zero should count as `noise_multiplier`.

    Args:
      message: what the server sends.
      noise_multiplier: of one release that costs as much as all of round zero.
    """
    weights = [SHARES[question] for question in message.questions]
    return noise_multiplier * math.sqrt(sum(weights) / SHARES[message.question])


def transformed(rating: np.ndarray, transform: Transform) -> np.ndarray:
    """Return ratings, or log(1 + rating), where ratings below 0 are taken as 0."""
    return np.log1p(np.maximum(rating, 0)) if transform == "log1p" else rating


def norm_of(message: Message) -> float:
    """Return the largest norm of a client's weighted ratings, and counts if they are asked for."""
    with_counts = message.question == "first biases"
    return math.sqrt(message.size * (SPREAD**2 + COUNT**2 if with_counts else LATER**2))
