"""A ledger: how much privacy was spent, on what, and how much is allowed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from fedrecon._src.privacy.accounting import Release, check_delta, epsilon_of

NOT_COVERED = (
    "not covered: metrics of validation and test clients, settings that were tuned on the same clients, and which "
    "items or words there are"
)


class BudgetError(ValueError):
    """More privacy would be spent than was allowed."""


@dataclass(frozen=True)
class Ledger:
    """What was released about one population of clients. Adding returns a new ledger.

    Attributes:
      clients: how many there are in the population.
      delta: of the guarantee.
      budget: the largest epsilon that is allowed; None for no limit.
      releases: what was released, in order.
      randomness: where the noise came from: `system`, or the seed of a simulation, which protects nobody.
    """

    clients: int
    delta: float
    budget: float | None = None
    releases: tuple[Release, ...] = ()
    randomness: str = "system"

    def __post_init__(self) -> None:
        """Refuse what promises nothing."""
        check_delta(self.delta)
        if self.clients < 2:
            raise ValueError(f"`clients` is {self.clients}; nobody can hide among fewer than 2")
        if self.budget is not None and not self.budget > 0:
            raise ValueError(f"`budget` is {self.budget}; give an epsilon above 0, or None for no limit")

    @property
    def epsilon(self) -> float:
        """Epsilon so far."""
        return epsilon_of(self.releases, self.delta)

    @property
    def rounds(self) -> int:
        """How many rounds of training were released so far, without round zero."""
        return sum(release.rounds for release in self.releases if release.purpose is None)

    def add(self, release: Release) -> Ledger:
        """Return the ledger with one more release, or raise `BudgetError` and leave it as it is.

        With a budget this takes a tenth of a second or more: in a loop over rounds, ask `rounds_left` once.

        Args:
          release: such as `Release(noise_multiplier, rate, rounds)`. Rounds of the same kind as the last are joined.
        """
        after = replace(self, releases=_joined(self.releases, release.check()))
        if self.budget is not None and after.epsilon > self.budget:
            left = self.rounds_left(release)
            raise BudgetError(
                f"{release.rounds} more {'round' if release.rounds == 1 else 'rounds'} would spend epsilon "
                f"{after.epsilon:.4g} of {self.budget:g} (so far {self.epsilon:.4g}); {left} "
                f"{'is' if left == 1 else 'are'} left; use more noise, fewer rounds, or a larger budget"
            )
        return after

    def rounds_left(self, release: Release, most: int = 1_000_000) -> int:
        """Return how many rounds of a kind still fit into the budget.

        Args:
          release: what a round releases; its own number of rounds does not matter.
          most: where to stop counting.
        """
        if self.budget is None:
            return most

        def fits(rounds: int) -> bool:
            more = _joined(self.releases, release._replace(rounds=rounds))
            return epsilon_of(more, self.delta) <= (self.budget or 0.0)

        low, high = 0, 1
        while high < most and fits(high):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def and_then(self, other: Ledger) -> Ledger:
        """Return the ledger of two runs on the same clients, one after the other.

        Args:
          other: of the later run, with the same delta. Its budget is dropped; this one's applies.
        """
        if other.delta != self.delta:
            raise ValueError(f"the ledgers have delta {self.delta:g} and {other.delta:g}; epsilons do not add up")
        releases = self.releases
        for release in other.releases:
            releases = _joined(releases, release)
        words = dict.fromkeys([*self.randomness.split(", "), *other.randomness.split(", ")])
        return replace(self, releases=releases, randomness=", ".join(words))

    def summary(self) -> str:
        """Say in a sentence what was spent."""
        allowed = "" if self.budget is None else f" of {self.budget:g}"
        sentence = f"epsilon {self.epsilon:.3g}{allowed} at delta {self.delta:.2g} after {self.rounds} rounds"
        return sentence if self.randomness == "system" else f"{sentence} (simulated: noise from {self.randomness})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, epsilon so far among them."""
        return {
            "clients": self.clients,
            "delta": self.delta,
            "budget": self.budget,
            "epsilon": self.epsilon,
            "rounds": self.rounds,
            "randomness": self.randomness,
            "releases": [{k: v for k, v in release._asdict().items() if v is not None} for release in self.releases],
            "not_covered": NOT_COVERED,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """Return the ledger that `to_dict` wrote.

        Args:
          values: as read from JSON.
        """
        try:
            releases = tuple(Release(**release).check() for release in values["releases"])
            return cls(values["clients"], values["delta"], values["budget"], releases, values["randomness"])
        except (KeyError, TypeError) as problem:
            raise ValueError(f"this is not a ledger of privacy: {problem}") from problem

    def to_json(self) -> str:
        """Write the ledger as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Read a ledger from JSON.

        Args:
          text: of `to_json`.
        """
        return cls.from_dict(json.loads(text))


def _joined(releases: tuple[Release, ...], more: Release) -> tuple[Release, ...]:
    """Add a release; rounds of the same kind are counted together, so that the order of rounds stays readable.

    Not if clients are promised to be rounds apart: that holds within one run, not between the last round of one and the
    first of another.
    """
    if more.apart is None and releases and releases[-1]._replace(rounds=0) == more._replace(rounds=0):
        return (*releases[:-1], more._replace(rounds=releases[-1].rounds + more.rounds))
    return (*releases, more)
