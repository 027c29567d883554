"""Round zero over nodes: questions to all of them before the first round, each answered by a sum, open or secure."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from fedrecon._src.core.clients import Clients
from fedrecon._src.core.model import Model

Sums = dict[str, np.ndarray]


class Found(bytes):
    """What round zero found, as it is sent to nodes and kept in the run's folder."""

    @functools.cached_property
    def values(self) -> dict[str, np.ndarray]:
        """Return the arrays."""
        from safetensors.numpy import load

        return load(bytes(self))

    @property
    def examples(self) -> int:
        """How many examples all training users have."""
        return round(float(self.values["item_count"].sum()))


class Question(Protocol):
    """What the server asks next."""

    @property
    def number(self) -> int:
        """How many questions there were before."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to ask."""

    def to_bytes(self) -> bytes:
        """Write it."""


Q = TypeVar("Q", bound=Question)


@dataclass(frozen=True, eq=False)
class RoundZero(abc.ABC, Generic[Q]):
    """The questions of a plan, and what their answers come to. It reads bytes that may be anything.

    Attributes:
      config: the plan's settings.
      legend: the plan's items.
    """

    config: Any
    legend: Any

    sends: ClassVar[str]  # what nodes send, in words

    @abc.abstractmethod
    def first(self) -> Q:
        """Return the first question."""

    @abc.abstractmethod
    def numbered(self, number: int) -> Q:
        """Return the question with a number, before anything is known: its answers have the shapes of all others.

        Raises:
          ValueError: there is no question of this number.
        """

    @abc.abstractmethod
    def read_question(self, data: bytes) -> Q:
        """Read a question.

        Raises:
          ValueError: the bytes are not a question.
        """

    @abc.abstractmethod
    def answer(self, question: Q, clients: Clients) -> Sums:
        """Return the sum of clients' answers."""

    @abc.abstractmethod
    def nothing(self, question: Q) -> Sums:
        """Return the sum over no users, in the shapes of all others."""

    @abc.abstractmethod
    def following(self, question: Q, total: Mapping[str, Any]) -> Q:
        """Return the next question, with the sum of all answers to the last one."""

    @abc.abstractmethod
    def found_by(self, question: Q) -> Found:
        """Return what the last question's answer completed."""

    @abc.abstractmethod
    def read_found(self, data: bytes) -> Found:
        """Check what a server says round zero found.

        Raises:
          ValueError: the bytes are nothing that round zero can find.
        """

    @abc.abstractmethod
    def settle(self, found: Found) -> tuple[Any, Any]:
        """Return settings and items with what was found, as the simulation has them."""

    @abc.abstractmethod
    def build_model(self, found: Found) -> Model:
        """Return the model that begins with what was found."""

    @abc.abstractmethod
    def remark(self, found: Found) -> str:
        """Say what was found."""
