"""Round zero of ratings: their scale, item biases and ridges, from sums that nodes send.

The passes are those of `recommend.round_zero`, with one before them that decides whether ratings are counts. Every
pass is a question to all nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fedrecon._src.app.tasks.factors import Liking, build_model, scale_of, transformed
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.model import Model
from fedrecon._src.core.wire import from_bytes, to_bytes
from fedrecon._src.data.ratings.believed import BINS, Believed
from fedrecon._src.deploy.round_zero import Found, RoundZero, Sums
from fedrecon._src.recommend.round_zero import DEFAULT, Plan, Preparation, Transform, advance, answer, done, start

UNDECIDED = -1.0
TRANSFORMS: tuple[Transform, ...] = ("none", "log1p")
NUMBERS = ("mean", "deviation", "noise", "item_variance", "user_variance", "fitted_ridge")
WHOLE = ("passes", "outside")
ARRAYS = ("item_bias", "item_count", "trait_variance")


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """What the server asks next.

    Attributes:
      transform: of the ratings; None until it is decided.
      message: what is known so far.
      biases: what was known when the biases were fitted, before traits; None until then.
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


def _tree(transform: Transform | None, message: Preparation) -> dict[str, np.ndarray]:
    """Return what is sent: not the ends of the scale, since no answer depends on them."""
    values = {name: getattr(message, name) for name in (*NUMBERS, *ARRAYS, *WHOLE)}
    values["believed"] = message.believed
    values["transform"] = UNDECIDED if transform is None else TRANSFORMS.index(transform)
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def _message(tree: Mapping[str, np.ndarray], begun: Preparation) -> Preparation:
    """Undo `_tree`, of arrays that are finite and have its shapes.

    Raises:
      ValueError: the numbers make no sense.
    """
    values: dict[str, Any] = {name: float(tree[name]) for name in NUMBERS}
    if not min(values[name] for name in NUMBERS[1:]) > 0 or not (tree["trait_variance"] > 0).all():
        raise ValueError("round zero has variances that are not above 0")
    passes, outside, first, last = (int(n) for n in (tree["passes"], tree["outside"], *tree["believed"]))
    if not 0 <= passes <= sum(begun.plan) + 1 or outside < 0 or not 0 <= first <= last < BINS:
        raise ValueError("round zero has numbers that make no sense")
    if not (tree["item_count"] >= 0).all():
        raise ValueError("round zero has counts below 0")
    arrays: dict[str, Any] = {name: tree[name] for name in ARRAYS}
    return begun._replace(passes=passes, outside=outside, believed=Believed(first, last), **values, **arrays)


class RatingScale(RoundZero[Pass]):
    """The scale of ratings, item biases, ridges."""

    sends: ClassVar[str] = "first sums of ratings (counts, means, item biases)"

    def first(self) -> Pass:
        """Return the question that decides whether ratings are counts."""
        passes = Plan(DEFAULT.biases, DEFAULT.traits if self.config.model.item_traits else 0)
        return Pass(None, start(len(self.legend), passes))

    def numbered(self, number: int) -> Pass:
        """Return the question with a number, before anything is known."""
        begun = self.first()
        if not 0 <= number <= sum(begun.message.plan) + 1:
            raise ValueError(f"there is no question {number} in round zero of ratings")
        return begun if number == 0 else Pass("none", begun.message._replace(passes=number - 1))

    def read_question(self, data: bytes) -> Pass:
        """Read a question; a `WireError` is a ValueError."""
        begun = self.first()
        tree = from_bytes(data, _tree(None, begun.message))
        if not all(np.isfinite(leaf).all() for leaf in tree.values()):
            raise ValueError("a question of round zero has numbers that are not finite")
        transform = float(tree["transform"])
        if transform == UNDECIDED:
            return begun
        found = Pass(TRANSFORMS[int(transform)], _message(tree, begun.message)) if transform in (0.0, 1.0) else None
        if found is None or found.over:
            raise ValueError("there is no such question in round zero")
        return found

    def answer(self, question: Pass, clients: Clients) -> Sums:
        """Return the sum of clients' answers."""
        if question.transform is not None:
            clients = transformed(clients, question.transform)
        rows = rows_of(clients.starts, clients.ends)
        item, rating = clients.columns["item"][rows], clients.columns["rating"][rows]
        owner = np.repeat(np.arange(len(clients)), clients.sizes)
        return answer(question.message, item, rating, owner)

    def nothing(self, question: Pass) -> Sums:
        """Return the sum over nobody."""
        none = np.zeros(0, np.int64)
        sums = answer(question.message, none, np.zeros(0), none)
        return {name: np.asarray(value, np.float64) for name, value in sums.items()}  # empty sums are integers

    def following(self, question: Pass, total: Mapping[str, Any]) -> Pass:
        """Return the next question: the first total decides the transform, the others are those of a preparation."""
        if question.transform is None:
            wanted = self.config.data.transform
            asked: Transform | None = None if wanted == "auto" else "log1p" if wanted == "log1p" else "none"
            return dataclasses.replace(question, transform=advance(question.message, total, transform=asked).transform)
        message = advance(question.message, total, transform="none")
        fitted = message.passes == message.plan.biases + 1
        return dataclasses.replace(question, message=message, biases=message if fitted else question.biases)

    def found_by(self, question: Pass) -> Found:
        """Return what the last question's answer completed."""
        assert question.biases is not None
        last, ridge = question.message, question.biases.user_ridge
        more = {"low": last.low, "high": last.high, "bias_ridge": ridge}
        return Found(to_bytes(_tree(question.transform, last) | {name: np.asarray(v) for name, v in more.items()}))

    def read_found(self, data: bytes) -> Found:
        """Check what a server says round zero found."""
        begun = self.first().message
        like = _tree(None, begun) | dict.fromkeys(("low", "high", "bias_ridge"), np.zeros(()))
        tree = from_bytes(data, like)
        if not all(np.isfinite(leaf).all() for leaf in tree.values()) or not tree["bias_ridge"] > 0:
            raise ValueError("the numbers that round zero found make no sense")
        if float(tree["transform"]) not in (0.0, 1.0) or not tree["low"] <= tree["high"]:
            raise ValueError("the scale that round zero found makes no sense")
        if not done(_message(tree, begun)):
            raise ValueError("round zero is not over")
        return Found(data)

    def settle(self, found: Found) -> tuple[Any, Any]:
        """Put what was found into settings and items."""
        zero, transform = self._preparation(found), self._transform(found)
        scale = scale_of(self.config.model, transform, zero)
        ends = (zero.low, zero.high)
        if transform == "log1p":
            ends = (float(np.expm1(zero.low)), float(np.expm1(zero.high)))
        items = dataclasses.replace(
            self.legend,
            counts=np.rint(zero.item_count).astype(np.int64),
            scale=ends,
            liking=Liking(zero.item_bias, float(found.values["bias_ridge"])),
        )
        return dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, scale=scale)), items

    def build_model(self, found: Found) -> Model:
        """Return the model that begins with what was found."""
        return build_model(self.settle(found)[0].model, len(self.legend), self._preparation(found))

    def remark(self, found: Found) -> str:
        """Say what the scale is."""
        zero = self._preparation(found)
        said = f"round zero: {found.examples:,} ratings, mean {zero.mean:.4g}, deviation {zero.deviation:.4g}"
        if self._transform(found) == "log1p":
            said += ", which look like counts: log(1+x) is taken"
        return said + (f"; {zero.outside:,} far outside the usual range are ignored" if zero.outside else "")

    def _preparation(self, found: Found) -> Preparation:
        """Return what was found as `fedrecon._src.recommend.round_zero` has it."""
        values = found.values
        ends: dict[str, Any] = {name: float(values[name]) for name in ("low", "high")}
        return _message(values, self.first().message)._replace(**ends)

    def _transform(self, found: Found) -> Transform:
        return TRANSFORMS[int(found.values["transform"])]
