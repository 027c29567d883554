"""Round zero over nodes: the scale of ratings, item biases and ridges, from sums that nodes send.

The passes are those of `fedrecon.preparation`, with one before them that decides whether ratings are counts. Every
pass is a question to all nodes; its answer is a sum, open or secure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedrecon.app.config import RatingsConfig
from fedrecon.app.tasks.factors import Items, Liking, scale_of, transformed
from fedrecon.app.tasks.factors import build_model as factorization
from fedrecon.clients import Clients, rows_of
from fedrecon.model import Model
from fedrecon.preparation import DEFAULT, Plan, Preparation, Sums, Transform, advance, answer, done, start
from fedrecon.travel.wire import from_bytes, to_bytes

UNDECIDED = -1.0
TRANSFORMS: tuple[Transform, ...] = ("none", "log1p")
NUMBERS = ("mean", "deviation", "noise", "item_variance", "user_variance", "fitted_ridge")
ARRAYS = ("item_bias", "item_count", "trait_variance")


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """What the server asks next.

    Attributes:
      transform: of the ratings; None while that is not decided.
      message: what is known so far.
      biases: what was known when the biases were fitted, before traits; None as long as they are not.
    """

    transform: Transform | None
    message: Preparation
    biases: Preparation | None = None

    @property
    def number(self) -> int:
        """How many questions there were before."""
        return 0 if self.transform is None else self.message.passes + 1

    @property
    def over(self) -> bool:
        """Whether nothing is left to ask."""
        return self.transform is not None and done(self.message)

    def to_bytes(self) -> bytes:
        """Write it."""
        return to_bytes(_tree(self.transform, self.message))


def first(config: RatingsConfig, items: int) -> Question:
    """Return the first question."""
    passes = Plan(DEFAULT.biases, DEFAULT.traits if config.model.item_traits else 0)
    return Question(None, start(items, passes))


def numbered(config: RatingsConfig, items: int, number: int) -> Question:
    """Return a question of a number that knows nothing: its answers have the shapes of all answers to that number.

    Raises:
      ValueError: there is no question of this number.
    """
    begun = first(config, items)
    if not 0 <= number <= sum(begun.message.plan) + 1:
        raise ValueError(f"there is no question {number} in round zero")
    return begun if number == 0 else Question("none", begun.message._replace(passes=number - 1))


def read_question(data: bytes, config: RatingsConfig, items: int) -> Question:
    """Read a question that may be anything.

    Raises:
      ValueError: it is none (`WireError`), or has numbers that make no sense.
    """
    begun = first(config, items)
    tree = from_bytes(data, _tree(None, begun.message))
    if not all(np.isfinite(leaf).all() for leaf in tree.values()):
        raise ValueError("a question of round zero has numbers that are not finite")
    transform, passes = float(tree["transform"]), int(tree["passes"])
    if transform == UNDECIDED:
        return begun
    if transform not in (0.0, 1.0) or not 0 <= passes <= sum(begun.message.plan):
        raise ValueError("there is no such question in round zero")
    values: dict[str, Any] = {name: float(tree[name]) for name in NUMBERS}
    if not min(values[name] for name in NUMBERS[1:]) > 0 or not (tree["trait_variance"] > 0).all():
        raise ValueError("a question of round zero has variances that are not above 0")
    arrays: dict[str, Any] = {name: tree[name] for name in ARRAYS}
    message = begun.message._replace(passes=passes, **values, **arrays)
    return Question(TRANSFORMS[int(transform)], message)


def _tree(transform: Transform | None, message: Preparation) -> dict[str, np.ndarray]:
    """Return what travels: the ends of the scale do not, since no answer depends on them."""
    values = {name: getattr(message, name) for name in (*NUMBERS, *ARRAYS, "passes")}
    values["transform"] = UNDECIDED if transform is None else TRANSFORMS.index(transform)
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def answer_of(question: Question, clients: Clients) -> Sums:
    """Return the sum of clients' answers."""
    if question.transform is not None:
        clients = transformed(clients, question.transform)
    rows = rows_of(clients.starts, clients.ends)
    item, rating = clients.columns["item"][rows], clients.columns["rating"][rows]
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    return answer(question.message, item, rating, owner)


def nothing(question: Question) -> Sums:
    """Return the sum over nobody, which has the shapes of all others."""
    none = np.zeros(0, np.int64)
    sums = answer(question.message, none, np.zeros(0), none)
    return {name: np.asarray(value, np.float64) for name, value in sums.items()}  # numpy counts nothing in integers


def following(question: Question, total: Mapping[str, Any], wanted: str) -> Question:
    """Return the next question.

    Args:
      question: the last one.
      total: the sum of all answers to it.
      wanted: the transform that the settings name, or `auto`.
    """
    if question.transform is None:
        asked: Transform | None = None if wanted == "auto" else "log1p" if wanted == "log1p" else "none"
        return dataclasses.replace(question, transform=advance(question.message, total, transform=asked).transform)
    message = advance(question.message, total, transform="none")
    fitted = message.passes == message.plan.biases + 1
    return dataclasses.replace(question, message=message, biases=message if fitted else question.biases)


# ---- what it found ----


class Found(bytes):
    """What round zero found, as it is sent to nodes and kept in the run's folder."""

    @functools.cached_property
    def _values(self) -> dict[str, np.ndarray]:
        from safetensors.numpy import load

        return load(bytes(self))

    @property
    def examples(self) -> int:
        """How many examples all training users have."""
        return round(float(self._values["item_count"].sum()))


def found_by(question: Question) -> Found:
    """Return what the last question's answer completed."""
    assert question.biases is not None
    last, fitted = question.message, question.biases
    return Found(
        to_bytes(
            {
                **_tree(question.transform, last),
                "low": np.asarray(last.low),
                "high": np.asarray(last.high),
                "bias_ridge": np.asarray(fitted.user_ridge),
            }
        )
    )


def read_found(data: bytes, config: RatingsConfig, items: int) -> Found:
    """Check what a server says that round zero found.

    Raises:
      ValueError: it is nothing of the kind.
    """
    like = _tree(None, first(config, items).message) | dict.fromkeys(("low", "high", "bias_ridge"), np.zeros(()))
    tree = from_bytes(data, like)
    positive = ("deviation", "noise", "item_variance", "user_variance", "bias_ridge")
    if not all(np.isfinite(leaf).all() for leaf in tree.values()) or not all(tree[name] > 0 for name in positive):
        raise ValueError("what round zero found has numbers that make no sense")
    if float(tree["transform"]) not in (0.0, 1.0) or not tree["low"] <= tree["high"]:
        raise ValueError("what round zero found has a scale that makes no sense")
    if not (tree["item_count"] >= 0).all() or not (tree["trait_variance"] > 0).all():
        raise ValueError("what round zero found has counts or variances that make no sense")
    return Found(data)


def settle(found: Found, config: Any, items: Items) -> tuple[RatingsConfig, Items]:
    """Put what was found into settings and items, as the simulation does."""
    zero, transform = preparation_of(found, config), TRANSFORMS[int(found._values["transform"])]
    scale = scale_of(config.model, transform, zero)
    ends = (float(np.expm1(zero.low)), float(np.expm1(zero.high))) if transform == "log1p" else (zero.low, zero.high)
    items = dataclasses.replace(
        items,
        counts=np.rint(zero.item_count).astype(np.int64),
        scale=ends,
        liking=Liking(zero.item_bias, float(found._values["bias_ridge"])),
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, scale=scale)), items


def build_model(found: Found, config: Any, items: int) -> Model:
    """Return the model that begins with what was found."""
    return factorization(config.model, items, preparation_of(found, config))


def preparation_of(found: Found, config: RatingsConfig) -> Preparation:
    """Return what was found as `fedrecon.preparation` has it."""
    values = found._values
    numbers: dict[str, Any] = {name: float(values[name]) for name in (*NUMBERS, "low", "high")}
    arrays: dict[str, Any] = {name: values[name] for name in ARRAYS}
    begun = first(config, len(values["item_bias"])).message
    return begun._replace(passes=int(values["passes"]), **numbers, **arrays)
