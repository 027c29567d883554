"""Round zero of clicks: how many training users have each item. The server weighs its prior against these counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedrecon._src.app.tasks import task_of
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.model import Model
from fedrecon._src.core.wire import from_bytes, to_bytes
from fedrecon._src.deploy.round_zero import Found, RoundZero, Sums

COUNTS = "item_count"


class HowMany(NamedTuple):
    """The only question, or the answer to it."""

    total: np.ndarray | None = None
    number: int = 0

    @property
    def over(self) -> bool:
        """Whether it is answered."""
        return self.total is not None

    def to_bytes(self) -> bytes:
        """Return no bytes: the question is empty."""
        return b""


class ClickCounts(RoundZero[HowMany]):
    """How many training users have each item."""

    sends: ClassVar[str] = "first how many users have each item"

    def first(self) -> HowMany:
        """Return the question."""
        return HowMany()

    def numbered(self, number: int) -> HowMany:
        """Return the question, if that is its number."""
        if number:
            raise ValueError(f"there is no question {number} in round zero of clicks")
        return HowMany()

    def read_question(self, data: bytes) -> HowMany:
        """Read the question, which is empty."""
        if data:
            raise ValueError(f"the question of round zero of clicks is empty; this one has {len(data)} bytes")
        return HowMany()

    def answer(self, question: HowMany, clients: Clients) -> Sums:
        """Count."""
        del question
        items = np.asarray(clients.columns["item"])[rows_of(clients.starts, clients.ends)]
        return {COUNTS: np.bincount(items, minlength=len(self.legend)).astype(np.float64)}

    def nothing(self, question: HowMany) -> Sums:
        """Return zeros."""
        del question
        return {COUNTS: np.zeros(len(self.legend))}

    def following(self, question: HowMany, total: Mapping[str, Any]) -> HowMany:
        """Take the answer."""
        return question._replace(total=np.rint(np.asarray(total[COUNTS], np.float64)))

    def found_by(self, question: HowMany) -> Found:
        """Return the counts."""
        assert question.total is not None
        return Found(to_bytes({COUNTS: question.total}))

    def read_found(self, data: bytes) -> Found:
        """Check counts."""
        counts = from_bytes(data, {COUNTS: np.zeros(len(self.legend))})[COUNTS]
        if not (np.isfinite(counts).all() and (counts >= 0).all() and counts.sum() >= 1):
            raise ValueError("the counts that round zero found make no sense")
        return Found(data)

    def settle(self, found: Found) -> tuple[Any, Any]:
        """Store with the items how many users have them."""
        counts = np.rint(found.values[COUNTS]).astype(np.int64)
        return self.config, dataclasses.replace(self.legend, counts=counts)

    def build_model(self, found: Found) -> Model:
        """Return the model, which does not depend on counts."""
        del found
        return task_of(self.config).build_model(self.config, self.legend)

    def remark(self, found: Found) -> str:
        """Say how many clicks there are."""
        there = int((found.values[COUNTS] > 0).sum())
        return f"round zero: training users have {found.examples:,} clicks, on {there:,} of {len(self.legend):,} items"
