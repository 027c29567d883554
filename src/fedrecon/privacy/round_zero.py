"""Round zero with user-level differential privacy: few questions, bounded answers, noised sums.

It finds what `fedrecon.preparation` finds, and differs where privacy asks for it. Clients are asked four or five times
rather than sixteen. Each answer is a vector of norm 1 at most, whatever a client has rated, so that noise of a known
size hides any client in the sum. The server works with the noised sums alone:

    message = round_zero.start(num_items, clients=1000)
    while not round_zero.done(message):
        total = noised sum of round_zero.answer(message, item, rating) over clients
        message = round_zero.advance(message, total, noise)

1. `range`: which powers of two the ratings lie between, and whether they look like counts. Left out where the range is
   declared.
2. `scale`: mean and deviation, a histogram for the ends, and how many ratings clients have, for the weights.
3. `biases`, twice: by item, the weighted sum and number of ratings; beside them the variances of biases and noise.
4. `traits`: how much users differ in what they make of an item's bias and popularity.

A client with many ratings weighs each of them less, so that all have an answer of about the same norm. Item biases are
shrunk for the ratings that are missing and for the noise that was added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from fedrecon.clients import Clients, rows_of
from fedrecon.preparation import (
    BINS,
    LEAST_VARIANCE,
    SKEWED,
    TRAITS,
    Plan,
    Preparation,
    Transform,
    user_biases,
    user_tastes,
)
from fedrecon.preparation import start as plain_start
from fedrecon.privacy.accounting import Release
from fedrecon.privacy.noise import draw, share_of_noise
from fedrecon.privacy.ring import quantise, restore

Question = Literal["range", "scale", "first biases", "biases", "traits"]
PURPOSE = "round zero"
# How round zero's budget is divided: shares of the sum of 1 / noise^2.
SHARES: dict[Question, float] = {"range": 0.02, "scale": 0.05, "first biases": 0.4, "biases": 0.48, "traits": 0.05}

PER_DOUBLING, LOWEST, HIGHEST = 4, -6, 24  # powers of two between which ratings are told apart, on either side of 0
SIDE = PER_DOUBLING * (HIGHEST - LOWEST)
SIZES = 40  # bins of how many ratings a client has, two for each doubling
SMALL = 0.25  # clients with more ratings than this share of them has weigh each rating less
SPREAD, LATER = 0.9, 0.75  # root mean square of a client's standardised ratings that is expected: at first, then
COUNT = 0.8  # what a count weighs beside a rating in a client's answer
SCALARS = 0.05  # share of the squared norm that the variances may take
LEAST_SPREAD = 0.05  # of ratings, in units of their range: noise must not make it nothing
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
      clients: how many are asked; that is known.
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
    questions += ["traits"] * plan.traits  # type: ignore[list-item]
    if scale is not None and not (math.isfinite(scale[0]) and math.isfinite(scale[1]) and scale[0] < scale[1]):
        raise ValueError(f"the scale of ratings is {scale}; give the lowest and the highest, such as 1 and 5")
    found = plain_start(num_items, Plan(max(plan.biases, 1), plan.traits))
    if scale is None:
        return Message(tuple(questions), 0, clients, transform, -math.inf, math.inf, False, found)
    transform = transform or "none"
    low, high = _transformed(np.asarray(scale), transform)
    found = found._replace(transform=transform)
    return Message(tuple(questions), 0, clients, transform, float(low), float(high), True, found)


def done(message: Message) -> bool:
    """Return whether nothing is left to ask.

    Args:
      message: what the server would send next.
    """
    return message.asked >= len(message.questions)


def noise_of(message: Message, noise_multiplier: float) -> float:
    """Return the noise of the next answer's sum if all of round zero is to count as `noise_multiplier`.

    Args:
      message: what the server sends.
      noise_multiplier: of one release that costs as much as all of round zero.
    """
    weights = [SHARES[question] for question in message.questions]
    return noise_multiplier * math.sqrt(sum(weights) / SHARES[message.question])


def answer(message: Message, item: Any, rating: Any, client: Any | None = None) -> Entries:
    """Return clients' answers: for each a vector of norm 1 at most.

    Args:
      message: what the server sent.
      item: `(ratings,)` which items were rated.
      rating: `(ratings,)` how.
      client: `(ratings,)` by which client, from 0; None if all are one client's.
    """
    item, rating = np.asarray(item), np.asarray(rating, np.float64)
    if not np.isfinite(rating).all():
        raise ValueError("some ratings are not finite numbers; leave them out")
    owner = np.zeros(len(item), np.int64) if client is None else np.asarray(client)
    if message.question == "range":
        return _shares(owner, _power(rating), message.length)
    y = np.clip(_transformed(rating, message.found.transform), message.low, message.high)
    if message.question == "scale":
        return _histograms(message, y, owner)
    y = (y - message.found.mean) / message.found.deviation
    if message.question == "traits":
        return _squares(message, item, y, owner)
    return _weighted(message, item, y, owner)


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


# ---- answers ----


def _transformed(rating: np.ndarray, transform: Transform) -> np.ndarray:
    return np.log1p(np.maximum(rating, 0)) if transform == "log1p" else rating


def _counts(owner: np.ndarray) -> np.ndarray:
    return np.bincount(owner, minlength=int(owner.max(initial=-1)) + 1)


def _shares(owner: np.ndarray, place: np.ndarray, length: int) -> Entries:
    """Say which share of a client's ratings is where: shares sum to 1, so their norm is 1 at most."""
    pairs, count = np.unique(owner * length + place, return_counts=True)
    return Entries(pairs // length, pairs % length, count / _counts(owner)[pairs // length], length)


def _power(rating: np.ndarray) -> np.ndarray:
    """Return the bin of a rating: quarters of powers of two, with their sign."""
    size = np.maximum(np.abs(rating), 2.0 ** (LOWEST - 1))
    power = np.floor((np.log2(size) - LOWEST) * PER_DOUBLING).astype(np.int64) + 1
    return SIDE + np.sign(rating).astype(np.int64) * np.clip(power, 0, SIDE)


def _edges() -> np.ndarray:
    """Return the outer edge of every bin of `range`."""
    above = 2.0 ** (LOWEST + np.arange(1, SIDE + 1) / PER_DOUBLING)
    return np.concatenate([-above[::-1], [0.0], above])


def _histograms(message: Message, y: np.ndarray, owner: np.ndarray) -> Entries:
    width = (message.high - message.low) / BINS
    place = np.clip(np.floor((y - message.low) / width).astype(np.int64), 0, BINS - 1)
    ratings = _shares(owner, place, BINS)
    count = _counts(owner)
    who = np.flatnonzero(count)
    sizes = np.clip(np.floor(2 * np.log2(np.maximum(count[who], 1))).astype(np.int64), 0, SIZES - 1)
    unit = 2 * (y - message.low) / (message.high - message.low) - 1
    moments = [(np.bincount(owner, unit**power)[who] / count[who]) for power in (1, 2)]
    return Entries(
        np.concatenate([ratings.client, who, who, who]),
        np.concatenate([ratings.place, BINS + sizes, *(np.full(len(who), message.length - 2 + k) for k in (0, 1))]),
        np.concatenate([ratings.value, np.ones(len(who)), *moments]) / 2,  # four parts of norm 1 at most
        message.length,
    )


def _norm(message: Message) -> float:
    """Return the largest norm of a client's weighted ratings, and counts if they are asked for."""
    with_counts = message.question == "first biases"
    return math.sqrt(message.size * (SPREAD**2 + COUNT**2 if with_counts else LATER**2))


def _weighted(message: Message, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Entries:
    items = len(message.found.item_bias)
    found = user_biases(message.found, item, y, owner)
    pairs, inverse, times = np.unique(owner * items + item, return_inverse=True, return_counts=True)
    who, which = pairs // items, pairs % items
    first = message.question == "first biases"
    # Later, what is sent is what the item biases miss, which is shorter.
    sums = np.bincount(inverse, y - found.bias[owner] - (0.0 if first else message.found.item_bias[item]))
    users = len(found.size)
    # Ratings of one item count once each; what decides is how long the client's vector of counts is.
    weight = np.minimum(1.0, np.sqrt(message.size / np.maximum(np.bincount(who, times**2.0, users), 1e-30)))
    length = np.sqrt(np.bincount(who, sums**2, users)) * weight
    shorter = np.minimum(1.0, (SPREAD if first else LATER) * math.sqrt(message.size) / np.maximum(length, 1e-30))
    unit = math.sqrt(1 - SCALARS) / _norm(message)
    client, place, value = [who], [which], [sums * (weight * shorter)[who] * unit]
    if first:
        client, place = [*client, who], [*place, items + which]
        value.append(COUNT * times * weight[who] * unit)
    rated = np.flatnonzero(found.size)
    scalars = (
        np.minimum(found.square, MOST_SQUARE) / MOST_SQUARE,
        np.minimum(found.error / np.maximum(found.size, 1), MOST_ERROR) / MOST_ERROR,
    )
    for number, scalar in enumerate(scalars):
        client, place = [*client, rated], [*place, np.full(len(rated), message.length - 2 + number)]
        value.append(scalar[rated] * math.sqrt(SCALARS / 2))
    return Entries(np.concatenate(client), np.concatenate(place), np.concatenate(value), message.length)


def _squares(message: Message, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Entries:
    zero = message.found
    found = user_tastes(zero, zero.traits()[item], y - zero.item_bias[item], owner)
    rated = np.flatnonzero(found.size)
    error = np.minimum(found.error / np.maximum(found.size, 1), MOST_ERROR) / MOST_ERROR
    values = np.concatenate([np.minimum(found.square, MOST_SQUARE) / MOST_SQUARE, error[:, None]], 1)[rated]
    values /= math.sqrt(values.shape[1])
    place = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    return Entries(np.repeat(rated, values.shape[1]), place.reshape(-1), values.reshape(-1), message.length)


# ---- what the server makes of noised sums ----


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
    edges = _edges()
    inner = edges * 2.0 ** (-1 / PER_DOUBLING)
    ends = np.minimum(edges, inner)[kept[0]], np.maximum(edges, inner)[kept[-1]]
    share, middle = there[kept] / there.sum(), (edges + inner)[kept] / 2
    mean = share @ middle
    variance = share @ (middle - mean) ** 2
    skewed = variance > 0 and share @ (middle - mean) ** 3 / variance**1.5 > SKEWED
    transform = message.wanted or ("log1p" if kept[0] >= SIDE and skewed else "none")
    low, high = _transformed(np.asarray(ends), transform)
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
    unit = _norm(message) / math.sqrt(1 - SCALARS)
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
    """Return a variance that noise cannot have made senseless."""
    return float(np.clip(value, 10 * LEAST_VARIANCE, most))


# ---- all clients at once ----

Add = Callable[[Entries, int, float], tuple[np.ndarray, Release]]


def gaussian(rng: np.random.Generator) -> Add:
    """Return how sums are noised by a server that sees them: `(answers, clients, noise multiplier) -> sum, release`.

    Args:
      rng: of the noise.
    """

    def add(entries: Entries, clients: int, noise: float) -> tuple[np.ndarray, Release]:
        del clients
        return entries.total() + rng.normal(0.0, noise, entries.length), Release(noise, 1.0, 1)

    return add


def integers(rng: np.random.Generator) -> Add:
    """Return how sums are made of integers with the clients' own noise, as a secure sum makes them.

    Args:
      rng: of all clients' noise; a deployment draws each client's from the system's entropy.
    """

    def add(entries: Entries, clients: int, noise: float) -> tuple[np.ndarray, Release]:
        share = share_of_noise(1.0, entries.length, noise, clients=clients, least=clients, bits=64)
        total = np.zeros(entries.length, np.uint64)
        np.add.at(total, entries.place, quantise(share.grid, entries.value))
        total += draw(share, rng, clients)
        return restore(share.grid, total), share.release(1.0)

    return add


class Found(NamedTuple):
    """What round zero found, and what it gave away.

    Attributes:
      preparation: as `fedrecon.preparation` has it; item counts are weighted and noised.
      counts: the same counts, 0 for items that noise hides.
      releases: one for each question.
    """

    preparation: Preparation
    counts: np.ndarray
    releases: tuple[Release, ...]


def prepare(
    clients: Clients,
    num_items: int,
    *,
    noise_multiplier: float,
    add: Add,
    noise_scale: float = 1.0,
    scale: tuple[float, float] | None = None,
    transform: Transform | None = None,
    plan: Plan | None = None,
) -> Found:
    """Run round zero over all clients at once.

    Args:
      clients: with columns `item` and `rating`.
      num_items: item ids are 0 to `num_items - 1`.
      noise_multiplier: of one release that costs as much as all of round zero.
      add: how answers are added up and noised: `gaussian(...)` or `integers(...)`.
      noise_scale: multiply the noise by this; below 1 to see what a larger population would have, which protects none
        of these clients.
      scale: the lowest and the highest rating, where that is known from elsewhere.
      transform: of the ratings, where it should not be decided from their skewness.
      plan: how often clients are asked for biases and traits.
    """
    rows = rows_of(clients.starts, clients.ends)
    item, rating = clients.columns["item"][rows], clients.columns["rating"][rows]
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    message, releases = start(num_items, clients=len(clients), scale=scale, transform=transform, plan=plan), []
    while not done(message):
        noise = noise_of(message, noise_multiplier)
        total, release = add(answer(message, item, rating, owner), len(clients), noise * noise_scale)
        releases.append(release._replace(noise_multiplier=noise, purpose=PURPOSE))
        message = advance(message, total, noise * noise_scale)
    count = message.found.item_count
    return Found(message.found, np.where(count > message.deviation, count, 0.0), tuple(releases))
