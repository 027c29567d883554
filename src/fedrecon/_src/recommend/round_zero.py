"""Round zero: before the first round, a server asks its clients a few questions and sees only the sums of the answers.

    state = round_zero.start()
    while not state.done:
        state = round_zero.advance(state, sum of round_zero.answer(state, clients) over clients)

Who adds the answers does not matter: the simulator, nodes that each hold many clients, or a secure sum. The sums give
the scale of ratings, item biases and ridges; `spectral_start` asks about clicks. With noise, `answers` are bounded and
totals are noised; what is asked for differs a little, what is estimated (`estimators`) does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator

from fedrecon._src.core.checks import check_number, check_rules
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.wire import from_bytes, to_bytes
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.privacy.noise import ShareOfNoise, draw, share_of_noise
from fedrecon._src.privacy.ring import restore
from fedrecon._src.recommend import answers, estimators
from fedrecon._src.recommend.answers import Entries
from fedrecon._src.recommend.estimate import (
    BINS,
    Bounds,
    Estimate,
    Question,
    RatingRange,
    State,
    StateError,
    Sums,
    Transform,
    transform_ratings,
)

PURPOSE = "round zero"
TRANSFORMS: tuple[Transform, ...] = ("none", "log1p")
EXACT_PASSES, BOUNDED_PASSES = (10, 5), (2, 1)  # how often biases and traits are asked for
OVERFLOW_ROOM = 4  # sums do not overflow even with this many times the clients that were announced
ANSWER = "answer"  # the only array of an answer
# How the budget of noise is divided: shares of the sum of 1 / noise^2.
SHARES: dict[Question, float] = {"range": 0.02, "scale": 0.05, "first biases": 0.4, "biases": 0.48, "traits": 0.05}
POSITIVE = ("deviation", "noise", "item_variance", "user_variance", "item_bias_ridge", "user_bias_ridge")


@dataclass(frozen=True, kw_only=True)
class RoundZero:
    """The questions of round zero, and how a server and its clients ask and answer them.

    Attributes:
      num_items: item ids are 0 to `num_items - 1`.
      bias_passes: how often biases are fitted; by default 10 times, with noise twice.
      trait_passes: how often the variances of trait coefficients are; by default 5 times, with noise once.
      transform: `log1p` or `none`; by default the skewness of the ratings decides.
      noise_multiplier: of one release that costs as much as all of round zero; None for exact sums.
      clients: how many clients are asked, which is public; only needed with noise.
      approximate: whether `clients` is a rough number, to be corrected by what clients answer.
      hosts: how many hosts of clients answer at least, if each adds its share of discrete noise to its answer, which is
        in integers then; 0 if the server adds Gaussian noise.
      scale: the lowest and the highest rating, if they are public; only with noise, which otherwise estimates them.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(seed=0)
      >>> round_zero = fr.recommend.RoundZero(num_items=ratings.num_items)
      >>> state = round_zero.start()
      >>> while not state.done:
      ...     state = round_zero.advance(state, round_zero.answer(state, ratings))
      >>> state.answered
      16
    """

    num_items: int
    bias_passes: int | None = None
    trait_passes: int | None = None
    transform: Transform | None = None
    noise_multiplier: float | None = None
    clients: int = 0
    approximate: bool = False
    hosts: int = 0
    scale: tuple[float, float] | None = None

    description: ClassVar[str] = "sums of ratings (counts, means, item biases)"  # what clients send

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_number("num_items", self.num_items, least=1)
        low, high = self.scale or (0, 1)
        rules = {
            "`scale` must be the lowest and the highest rating, such as (1, 5)": -math.inf < low < high < math.inf,
            "`scale` is estimated from exact sums": self.noised or self.scale is None,
            "`bias_passes` must be at least 1 for exact sums": self.noised or self.bias_passes != 0,
            "`noise_multiplier` needs `clients`, the number of clients": not self.noised or self.clients >= 1,
        }
        check_rules({f"{rule} (got {self})": holds for rule, holds in rules.items()})

    @property
    def noised(self) -> bool:
        """Whether answers are bounded, and totals have noise."""
        return self.noise_multiplier is not None

    @property
    def questions(self) -> tuple[Question, ...]:
        """All questions, in order."""
        biases, traits = BOUNDED_PASSES if self.noised else EXACT_PASSES
        biases = biases if self.bias_passes is None else self.bias_passes
        traits = traits if self.trait_passes is None else self.trait_passes
        scale: list[Question] = ["range", "scale"] if self.scale is None else ["scale"]
        first: list[Question] = ["first biases"] if biases else []
        return (*(scale if self.noised else ["moments"]), *first, *["biases"] * (biases - 1), *["traits"] * traits)

    @property
    def numbers_per_item(self) -> int:
        """How many numbers for each item the largest message has."""
        return 3

    def start(self) -> State:
        """Return the state before anything is asked."""
        zeros = np.zeros(self.num_items)
        estimate, bounds = Estimate(zeros, zeros), None
        if self.noised:
            low, high = (-math.inf, math.inf)
            if self.scale is not None:
                estimate = estimate._replace(transform=self.transform or "none")
                low, high = map(float, transform_ratings(self.scale, estimate.transform))
            bounds = Bounds(low, high, 1.0, 0.0, zeros, zeros, float(self.clients))
        return State(self.questions, 0, estimate, bounds=bounds)

    def answer(self, state: State, clients: Clients) -> Sums:
        """Return the sum of clients' answers to the next question, without noise.

        Args:
          state: what the server sent.
          clients: with columns `item` and `rating`.
        """
        return self.answer_rows(state, *_rows(clients))

    def answer_rows(self, state: State, item: Any, rating: Any, owner: Any = None) -> Sums:
        """Return the sum of the answers of the clients `owner` (from 0; by default a single one) who gave ratings."""
        entries, share = self.answer_each(state, item, rating, owner), self.share_of_noise(state)
        if state.bounds is not None:
            entries.check()
        return {ANSWER: entries.total() if share is None else entries.integer_total(share.grid)}

    def answer_each(self, state: State, item: Any, rating: Any, owner: Any = None) -> Entries:
        """Return the answers of single clients, to noise or audit them."""
        item, rating = np.asarray(item, np.int64), np.asarray(rating, np.float64)
        if not np.isfinite(rating).all():
            raise ValueError("`rating` must be finite")
        owner = np.zeros(len(item), np.int64) if owner is None else np.asarray(owner)
        return Entries(tuple(answers.answer(state, item, rating, owner)), answers.answer_length(state))

    def zeros(self, answered: int) -> Sums:
        """Return the sum over no clients after some questions, in the shapes of all others."""
        check_number("answered", answered, most=len(self.questions) - 1)
        length = answers.answer_length(self.start()._replace(answered=answered))
        return {ANSWER: np.zeros(length, np.uint64 if self.hosts else np.float64)}

    def noise_of(self, state: State) -> float:
        """Return the standard deviation of the noise in the next total; 0 if sums are exact."""
        if not self.noise_multiplier:
            return 0.0
        shares = [SHARES[question] for question in state.questions]
        return self.noise_multiplier * math.sqrt(sum(shares) / SHARES[state.question])

    def share_of_noise(self, state: State) -> ShareOfNoise | None:
        """Return what each host adds to its next answer; None if hosts add no noise."""
        if not self.hosts:
            return None
        length, most = answers.answer_length(state), max(OVERFLOW_ROOM * self.clients, self.hosts)
        return share_of_noise(1.0, length, self.noise_of(state), clients=most, least=self.hosts, bits=64)

    def releases(self) -> tuple[Release, ...]:
        """Return what all questions give away, for a ledger; nothing if sums are exact."""
        if not self.noised:
            return ()
        releases = []
        for answered in range(len(self.questions)):
            state = self.start()._replace(answered=answered)
            share = self.share_of_noise(state)
            release = Release(self.noise_of(state), 1.0, 1) if share is None else share.release(1.0)
            releases.append(release._replace(purpose=PURPOSE))
        return tuple(releases)

    def advance(self, state: State, total: Mapping[str, Any], noise: float | None = None) -> State:
        """Return the next state.

        Args:
          state: the last one.
          total: the sum of all clients' answers to it, with noise if there is any.
          noise: the standard deviation of the noise in every entry; by default `noise_of(state)`.
        """
        noise, share = self.noise_of(state) if noise is None else noise, self.share_of_noise(state)
        values = total[ANSWER] if share is None else restore(share.grid, total[ANSWER])
        return estimators.advance(state, values, noise, self.transform, approximate=self.approximate)

    def to_bytes(self, state: State) -> bytes:
        """Write a state for clients; before the first question, there is nothing to tell them."""
        return to_bytes(self.to_tree(state)) if state.answered else b""

    def from_bytes(self, data: bytes) -> State:
        """Read a state from bytes that may be anything.

        Raises:
          StateError, WireError: they are no state of this round zero.
        """
        start = self.start()
        return self.from_tree(from_bytes(data, self.to_tree(start)), start) if data else start

    def to_tree(self, state: State) -> dict[str, np.ndarray]:
        """Return a state as named arrays."""
        values = {**state.estimate._asdict(), "answered": state.answered, "inliers": state.inliers}
        values["transform"] = TRANSFORMS.index(state.estimate.transform)
        if state.bounds is not None:
            values |= {f"bounds_{name}": value for name, value in state.bounds._asdict().items()}
        tree = {name: np.asarray(value, np.float64) for name, value in values.items()}
        for name in ("low", "high"):  # not known before the scale is, and no answer depends on them
            tree[name] = np.where(np.isfinite(tree[name]), tree[name], 0.0)
        return tree

    def from_tree(self, tree: Mapping[str, np.ndarray], start: State) -> State:
        """Undo `to_tree`, for arrays that have its shapes."""
        _check_fields({name: np.isfinite(leaf).all() for name, leaf in tree.items()})
        numbers: dict[str, Any] = {name: leaf if leaf.ndim else float(leaf) for name, leaf in tree.items()}
        answered, first, last, outliers = map(int, (tree["answered"], *tree["inliers"], tree["outliers"]))
        checks = {
            "answered": 0 < answered <= len(start.questions),
            "inliers": 0 <= first <= last < BINS.count,
            "transform": numbers["transform"] in (0.0, 1.0),
            "outliers": outliers >= 0,
            "item_count": (tree["item_count"] >= 0).all(),
            "trait_variance": (tree["trait_variance"] > 0).all(),
            "high": tree["low"] <= tree["high"],
            **{name: tree[name] > 0 for name in POSITIVE},
        }
        bounds = None
        if start.bounds is not None:
            bounds = Bounds(*(numbers[f"bounds_{name}"] for name in Bounds._fields))
            checks |= {
                "bounds_size": bounds.size > 0,
                "bounds_high": bounds.low < bounds.high,
                "bounds_deviation": bounds.deviation >= 0,
                "bounds_variance": (bounds.variance >= 0).all(),
                "bounds_clients": bounds.clients >= 1,
            }
        _check_fields(checks)
        numbers |= {"transform": TRANSFORMS[int(tree["transform"])], "outliers": outliers}
        estimate = Estimate(*(numbers[name] for name in Estimate._fields))
        return State(start.questions, answered, estimate, RatingRange(first, last), bounds)

    def read_result(self, data: bytes) -> State:
        """Read the last state, when all questions were answered: the result.

        Raises:
          StateError, WireError: the bytes are nothing that this round zero can end with.
        """
        state = self.from_bytes(data)
        if not state.done or state.num_examples < 1:
            raise StateError("round zero is not over, or nobody has an example")
        return state

    def describe(self, result: State) -> str:
        """Return a sentence about a result."""
        estimate, examples = result.estimate, result.num_examples
        text = f"round zero: {examples:,} ratings, mean {estimate.mean:.4g}, deviation {estimate.deviation:.4g}"
        text += "; ratings look like counts, so the model learns log(1+x)" if estimate.transform == "log1p" else ""
        return text + (f"; ignored {estimate.outliers:,} outliers" if estimate.outliers else "")


def _rows(clients: Clients) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return item, rating (0 for clicks) and client of every example."""
    rows = rows_of(clients.starts, clients.ends)
    item = np.asarray(clients.columns["item"])[rows]
    rating = np.asarray(clients.columns["rating"])[rows] if "rating" in clients.columns else np.zeros(len(item))
    return item, rating, np.repeat(np.arange(len(clients)), clients.sizes)


def _check_fields(checks: Mapping[str, Any]) -> None:
    rules = {f"the state of round zero has an invalid `{name}`": holds for name, holds in checks.items()}
    check_rules(rules, StateError)


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
    return run_round_zero(RoundZero(num_items=num_items, **options), clients)[0].estimate


def run_round_zero(
    zero: RoundZero, clients: Clients, rng: Generator | None = None, *, secure: bool = False, noise_scale: float = 1.0
) -> tuple[State, tuple[Release, ...]]:
    """Run round zero over all clients in this process; return its last state, and with noise what each question gave
    away.

    Args:
      zero: round zero, with a noise multiplier if there is to be noise.
      clients: with columns `item` and `rating`.
      rng: draws the noise of the server, or of all clients; a deployment uses the system's entropy. None adds none.
      secure: add integers with the clients' own discrete noise, as in a secure sum; else the server adds Gaussian
        noise.
      noise_scale: multiply the noise by this; below 1 to see what a larger population would have, which protects none
        of these clients.
    """
    rows, state, releases = _rows(clients), zero.start(), list(zero.releases())
    while not state.done:
        noise, entries = zero.noise_of(state) * noise_scale, zero.answer_each(state, *rows)
        if rng is None:
            total = entries.total()
        elif not secure:
            total = entries.total() + rng.normal(0.0, noise, entries.length)
        else:
            share = share_of_noise(1.0, entries.length, noise, clients=len(clients), least=len(clients), bits=64)
            total = restore(share.grid, entries.integer_total(share.grid) + draw(share, rng, len(clients)))
            release = share.release(1.0)._replace(noise_multiplier=zero.noise_of(state), purpose=PURPOSE)
            releases[state.answered] = release
        state = zero.advance(state, {ANSWER: total}, noise)
    return state, tuple(releases)
