"""Round zero: before the first round, a server asks its clients a few questions and sees only the sums of the answers.

    state = round_zero.start()
    while not state.done:
        state = round_zero.advance(state, sum of round_zero.answer(state, clients) over clients)

Who adds the answers does not matter: the simulator, nodes that each hold many clients, or a secure sum. For ratings,
the sums give the scale, item biases and ridges; for clicks, how many clients have each item. With noise, answers are
bounded and totals are noised; what is asked differs (`bounded_answers`), what is estimated does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.wire import from_bytes, to_bytes
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.privacy.noise import draw, share_of_noise
from fedrecon._src.privacy.ring import quantise, restore
from fedrecon._src.recommend import bounded_answers, exact_answers
from fedrecon._src.recommend.bounded_answers import Entries
from fedrecon._src.recommend.estimate import (
    BINS,
    Bounds,
    Estimate,
    Question,
    RatingRange,
    State,
    Sums,
    Transform,
    transform_ratings,
)

PURPOSE = "round zero"
TRANSFORMS: tuple[Transform, ...] = ("none", "log1p")
BIAS_PASSES, TRAIT_PASSES = 10, 5
BOUNDED_BIAS_PASSES, BOUNDED_TRAIT_PASSES = 2, 1
ANSWER = "answer"  # the only array of a bounded answer
POSITIVE = ("deviation", "noise", "item_variance", "user_variance", "item_bias_ridge", "user_bias_ridge")

Add = Callable[[Entries, int, float], tuple[np.ndarray, Release]]


@dataclass(frozen=True, kw_only=True)
class RoundZero:
    """The questions of round zero, and how a server and its clients ask and answer them.

    Attributes:
      num_items: item ids are 0 to `num_items - 1`.
      clicks: count the clients of each item, and nothing else; clients need no ratings.
      bias_passes: how often biases are fitted; by default 10 times, with noise twice.
      trait_passes: how often the variances of trait coefficients are; by default 5 times, with noise once.
      transform: `log1p` or `none`; by default the skewness of the ratings decides.
      noise_multiplier: of one release that costs as much as all of round zero; None for exact sums.
      clients: how many clients are asked, which is public; only needed with noise.
      scale: the lowest and the highest rating, if they are public; only with noise, which otherwise estimates them.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(seed=0)
      >>> round_zero = fr.recommend.RoundZero(num_items=ratings.num_items)
      >>> state = round_zero.start()
      >>> while not state.done:
      ...     state = round_zero.advance(state, round_zero.answer(state, ratings))
      >>> state.asked
      16
    """

    num_items: int
    clicks: bool = False
    bias_passes: int | None = None
    trait_passes: int | None = None
    transform: Transform | None = None
    noise_multiplier: float | None = None
    clients: int = 0
    scale: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.num_items < 1:
            raise ValueError(f"`num_items` must be at least 1 (got {self.num_items})")
        if not self.noised and (self.scale is not None or self.bias_passes == 0):
            raise ValueError("exact sums estimate `scale` and need `bias_passes` of at least 1")
        if self.scale is not None and not (-math.inf < self.scale[0] < self.scale[1] < math.inf):
            raise ValueError(f"`scale` must be the lowest and the highest rating, such as (1, 5) (got {self.scale})")
        if self.noised and (self.clicks or self.clients < 1):
            raise ValueError("`noise_multiplier` is for ratings and needs `clients`, the number of clients")

    @property
    def noised(self) -> bool:
        """Whether answers are bounded, and totals have noise."""
        return self.noise_multiplier is not None

    @property
    def questions(self) -> tuple[Question, ...]:
        """All questions, in order."""
        if self.clicks:
            return ("counts",)
        biases, traits = BIAS_PASSES, TRAIT_PASSES
        if self.noised:
            biases, traits = BOUNDED_BIAS_PASSES, BOUNDED_TRAIT_PASSES
        biases = biases if self.bias_passes is None else self.bias_passes
        traits = traits if self.trait_passes is None else self.trait_passes
        questions: list[Question] = ["moments"]
        if self.noised:
            questions = ["range", "scale"] if self.scale is None else ["scale"]
        first: tuple[Question, ...] = ("first biases",) if biases else ()
        repeated: tuple[Question, ...] = ("biases",) * (biases - 1) + ("traits",) * traits  # type: ignore[assignment]
        return (*questions, *first, *repeated)

    @property
    def description(self) -> str:
        """What clients send, in words."""
        return "how many users have each item" if self.clicks else "sums of ratings (counts, means, item biases)"

    def start(self) -> State:
        """Return the state before anything is asked."""
        zeros = np.zeros(self.num_items)
        estimate, bounds = Estimate(zeros, zeros), None
        if self.noised:
            low, high = (-math.inf, math.inf)
            if self.scale is not None:
                estimate = estimate._replace(transform=self.transform or "none")
                low, high = map(float, transform_ratings(self.scale, estimate.transform))
            bounds = Bounds(low, high, 1.0, 0.0, zeros, zeros)
        return State(self.questions, 0, estimate, bounds=bounds)

    def answer(self, state: State, clients: Clients) -> Sums:
        """Return the sum of clients' answers to the next question, without noise.

        Args:
          state: what the server sent.
          clients: with columns `item` and, unless they are clicks, `rating`.
        """
        rows = rows_of(clients.starts, clients.ends)
        item = np.asarray(clients.columns["item"])[rows]
        rating = np.zeros(len(item)) if self.clicks else np.asarray(clients.columns["rating"])[rows]
        return self.answer_rows(state, item, rating, np.repeat(np.arange(len(clients)), clients.sizes))

    def answer_rows(self, state: State, item: Any, rating: Any, owner: Any = None) -> Sums:
        """Return the sum of the answers of the clients `owner` (from 0; by default a single one) who gave ratings."""
        rows = _check_rows(item, rating, owner)
        if state.bounds is None:
            return exact_answers.answer(state, *rows)
        return {ANSWER: bounded_answers.answer(state, *rows).total()}

    def answer_each(self, state: State, item: Any, rating: Any, owner: Any = None) -> Entries:
        """Return the bounded answers of single clients, to noise or audit them."""
        return bounded_answers.answer(state, *_check_rows(item, rating, owner))

    def zeros(self, asked: int) -> Sums:
        """Return the sum over no clients after `asked` questions, in the shapes of all others."""
        if not 0 <= asked < len(self.questions):
            raise ValueError(f"`asked` must be from 0 to {len(self.questions) - 1} (got {asked})")
        state = self.start()._replace(asked=asked)
        if state.bounds is not None:
            return {ANSWER: np.zeros(bounded_answers.answer_length(state))}
        return self.answer_rows(state, np.zeros(0, np.int64), np.zeros(0))

    def noise_of(self, state: State) -> float:
        """Return the standard deviation of the noise in the next total; 0 if sums are exact."""
        return 0.0 if not self.noise_multiplier else bounded_answers.noise_multiplier_of(state, self.noise_multiplier)

    def releases(self) -> tuple[Release, ...]:
        """Return what all questions give away with Gaussian noise, for a ledger; nothing if sums are exact."""
        if not self.noised:
            return ()
        states = [self.start()._replace(asked=asked) for asked in range(len(self.questions))]
        return tuple(Release(self.noise_of(state), 1.0, 1, purpose=PURPOSE) for state in states)

    def advance(self, state: State, total: Mapping[str, Any], noise: float | None = None) -> State:
        """Return the next state.

        Args:
          state: the last one.
          total: the sum of all clients' answers to it, with noise if there is any.
          noise: the standard deviation of the noise in every entry; by default `noise_of(state)`.
        """
        if state.bounds is None:
            return exact_answers.advance(state, total, self.transform)
        noise = self.noise_of(state) if noise is None else noise
        return bounded_answers.advance(state, total[ANSWER], noise, self.clients, self.transform)

    def to_bytes(self, state: State) -> bytes:
        """Write a state for clients; before the first question, there is nothing to tell them."""
        return to_bytes(_to_tree(state)) if state.asked else b""

    def from_bytes(self, data: bytes) -> State:
        """Read a state from bytes that may be anything.

        Raises:
          ValueError: they are no state of this round zero.
        """
        start = self.start()
        if not data:
            return start
        tree = from_bytes(data, _to_tree(start))
        if not all(np.isfinite(leaf).all() for leaf in tree.values()):
            raise ValueError("a state of round zero has numbers that are not finite")
        return _from_tree(tree, start)

    def read_result(self, data: bytes) -> Result:
        """Read the last state, when all questions were answered.

        Raises:
          ValueError: the bytes are nothing that this round zero can end with.
        """
        state = self.from_bytes(data)
        if not state.done:
            raise ValueError("round zero is not over")
        if not state.estimate.item_count.sum() >= 1:
            raise ValueError("a state of round zero has an impossible `item_count`")
        return Result(data, state.estimate)

    def describe(self, result: Result) -> str:
        """Return a sentence about a result."""
        estimate, examples = result.estimate, result.num_examples
        if self.clicks:
            occupied = int((estimate.item_count > 0).sum())
            return f"round zero: {examples:,} clicks on {occupied:,} of {self.num_items:,} items"
        text = f"round zero: {examples:,} ratings, mean {estimate.mean:.4g}, deviation {estimate.deviation:.4g}"
        text += "; ratings look like counts, so the model learns log(1+x)" if estimate.transform == "log1p" else ""
        return text + (f"; ignored {estimate.outliers:,} outliers" if estimate.outliers else "")


@dataclass(frozen=True)
class Result:
    """What round zero estimated, as bytes and as numbers.

    Attributes:
      data: the last state as bytes.
      estimate: what they say.
    """

    data: bytes
    estimate: Estimate = field(compare=False)

    @property
    def num_examples(self) -> int:
        """How many examples all clients have."""
        return round(float(self.estimate.item_count.sum()))


def _check_rows(item: Any, rating: Any, owner: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    item, rating = np.asarray(item, np.int64), np.asarray(rating, np.float64)
    if not np.isfinite(rating).all():
        raise ValueError("`rating` must be finite numbers")
    return item, rating, np.zeros(len(item), np.int64) if owner is None else np.asarray(owner)


def _to_tree(state: State) -> dict[str, np.ndarray]:
    values: dict[str, Any] = state.estimate._asdict()
    values |= {"asked": state.asked, "kept": state.kept, "transform": TRANSFORMS.index(state.estimate.transform)}
    if state.bounds is not None:
        values |= {f"bounds_{name}": value for name, value in state.bounds._asdict().items()}
    tree = {name: np.asarray(value, np.float64) for name, value in values.items()}
    for name in ("low", "high"):  # not known before the scale is, and no answer depends on them
        tree[name] = np.where(np.isfinite(tree[name]), tree[name], 0.0)
    return tree


def _from_tree(tree: Mapping[str, np.ndarray], start: State) -> State:
    """Undo `_to_tree`, for arrays that are finite and have its shapes."""
    asked, first, last = (int(number) for number in (tree["asked"], *tree["kept"]))
    code, outliers = float(tree["transform"]), int(tree["outliers"])
    checks = {
        "asked": 0 < asked <= len(start.questions),
        "kept": 0 <= first <= last < BINS.count,
        "transform": code in (0.0, 1.0),
        "outliers": outliers >= 0,
        "item_count": (tree["item_count"] >= 0).all(),
        "trait_variance": (tree["trait_variance"] > 0).all(),
        "high": tree["low"] <= tree["high"],
        **{name: tree[name] > 0 for name in POSITIVE},
    }
    if start.bounds is not None:
        names = Bounds._fields
        checks |= {"bounds_size": tree["bounds_size"] > 0, "bounds_high": tree["bounds_low"] < tree["bounds_high"]}
        checks |= {f"bounds_{name}": (tree[f"bounds_{name}"] >= 0).all() for name in ("deviation", "variance")}
    if wrong := [name for name, passed in checks.items() if not passed]:
        raise ValueError(f"a state of round zero has an impossible `{wrong[0]}`")
    values = {name: _number(tree[name]) for name in Estimate._fields}
    estimate = Estimate(**values | {"transform": TRANSFORMS[int(code)], "outliers": outliers})
    bounds = None
    if start.bounds is not None:
        bounds = Bounds(**{name: _number(tree[f"bounds_{name}"]) for name in names})
    return State(start.questions, asked, estimate, RatingRange(first, last), bounds)


def _number(array: np.ndarray) -> Any:
    return array if array.ndim else float(array)


# ---- all clients in one process ----


def estimate_ratings(clients: Clients, num_items: int, **options: Any) -> Estimate:
    """Run round zero over all clients in this process, with exact sums.

    Args:
      clients: with columns `item` and `rating`.
      num_items: item ids are 0 to `num_items - 1`.
      **options: other fields of `RoundZero`.

    Returns:
      The scale of the ratings, item biases and variances.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(seed=0)
      >>> estimate = fr.recommend.estimate_ratings(ratings, ratings.num_items)
      >>> estimate.transform, estimate.item_bias.shape == (ratings.num_items,)
      ('none', True)
    """
    round_zero = RoundZero(num_items=num_items, **options)
    state = round_zero.start()
    while not state.done:
        state = round_zero.advance(state, round_zero.answer(state, clients))
    return state.estimate


def add_gaussian_noise(rng: np.random.Generator) -> Add:
    """Return how a server that sees the sums noises them: `(answers, clients, noise multiplier) -> sum, release`."""

    def add(entries: Entries, clients: int, noise: float) -> tuple[np.ndarray, Release]:
        del clients
        return entries.total() + rng.normal(0.0, noise, entries.length), Release(noise, 1.0, 1)

    return add


def add_discrete_noise(rng: np.random.Generator) -> Add:
    """Return how integer sums are made with the clients' own discrete noise, as in a secure sum.

    Args:
      rng: of all clients' noise; a deployment draws each client's from the system's entropy.
    """

    def add(entries: Entries, clients: int, noise: float) -> tuple[np.ndarray, Release]:
        share = share_of_noise(1.0, entries.length, noise, clients=clients, least=clients, bits=64)
        total = np.zeros(entries.length, np.uint64)
        np.add.at(total, entries.index, quantise(share.grid, entries.value))
        total += draw(share, rng, clients)
        return restore(share.grid, total), share.release(1.0)

    return add


class NoisedEstimate(NamedTuple):
    """An estimate from noised sums, and what it gave away.

    Attributes:
      estimate: item counts are weighted and noised.
      counts: the same counts, 0 for items that noise hides.
      releases: one for each question.
    """

    estimate: Estimate
    counts: np.ndarray
    releases: tuple[Release, ...]


def estimate_with_noise(round_zero: RoundZero, clients: Clients, add: Add, noise_scale: float = 1.0) -> NoisedEstimate:
    """Run round zero over all clients in this process, with noise.

    Args:
      round_zero: with a noise multiplier.
      clients: with columns `item` and `rating`.
      add: how answers are added up and noised: `add_gaussian_noise(...)` or `add_discrete_noise(...)`.
      noise_scale: multiply the noise by this; below 1 to see what a larger population would have, which protects none
        of these clients.
    """
    rows = rows_of(clients.starts, clients.ends)
    item, rating = clients.columns["item"][rows], clients.columns["rating"][rows]
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    state, releases = round_zero.start(), []
    while not state.done:
        noise = round_zero.noise_of(state)
        entries = round_zero.answer_each(state, item, rating, owner)
        total, release = add(entries, len(clients), noise * noise_scale)
        releases.append(release._replace(noise_multiplier=noise, purpose=PURPOSE))
        state = round_zero.advance(state, {ANSWER: total}, noise * noise_scale)
    assert state.bounds is not None
    count = state.estimate.item_count
    return NoisedEstimate(state.estimate, np.where(count > state.bounds.deviation, count, 0.0), tuple(releases))
