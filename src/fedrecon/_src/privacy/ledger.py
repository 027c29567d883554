"""A ledger: how much privacy was spent, on what, how much is allowed, and what each round of training adds."""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.privacy.accounting import MOST_ROUNDS, Release, check_delta, epsilon_of

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

    Example:
      >>> import fedrecon as fr
      >>> ledger = fr.privacy.Ledger(clients=1000, delta=1e-5, budget=4.0)
      >>> ledger = ledger.add(fr.privacy.Release(noise_multiplier=2.0, rate=0.1, rounds=50))
      >>> ledger.rounds, ledger.epsilon < 4.0
      (50, True)
    """

    clients: int
    delta: float
    budget: float | None = None
    releases: tuple[Release, ...] = ()
    randomness: str = "system"

    def __post_init__(self) -> None:
        """Refuse what promises nothing."""
        check_delta(self.delta)
        check_number("clients", self.clients, least=2)  # among fewer nobody can hide
        check_number("budget", self.budget, above=True)  # None for no limit

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
        after = replace(self, releases=_append_release(self.releases, release.check()))
        if self.budget is not None and after.epsilon > self.budget:
            raise BudgetError(
                f"`rounds`: {release.rounds} more would spend epsilon {after.epsilon:.4g} of {self.budget:g} (so far "
                f"{self.epsilon:.4g}); at most {self.rounds_left(release)} more fit; use more noise, fewer rounds, or "
                "a larger budget"
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

        def spent(rounds: int) -> float:
            return epsilon_of(_append_release(self.releases, release._replace(rounds=rounds)), self.delta)

        high = 1
        while high <= most and spent(high) <= self.budget:
            high *= 2
        low = high // 2  # so many fit
        return low + bisect.bisect(range(low + 1, min(high, most + 1)), self.budget, key=spent)

    def and_then(self, other: Ledger) -> Ledger:
        """Return the ledger of two runs on the same clients, one after the other.

        Args:
          other: of the later run, with the same delta. Its budget is dropped; this one's applies.
        """
        if other.delta != self.delta:
            raise ValueError(f"epsilons add up only at the same delta (got {self.delta:g} and {other.delta:g})")
        releases = functools.reduce(_append_release, other.releases, self.releases)
        words = dict.fromkeys([*self.randomness.split(", "), *other.randomness.split(", ")])
        return replace(self, releases=releases, randomness=", ".join(words))

    def summary(self) -> str:
        """Say in a sentence what was spent."""
        allowed = "" if self.budget is None else f" of {self.budget:g}"
        sentence = f"epsilon {self.epsilon:.3g}{allowed} at delta {self.delta:.2g} after {self.rounds} rounds"
        return sentence if self.randomness == "system" else f"{sentence} (simulated: noise from {self.randomness})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, epsilon so far among them."""
        facts = ("clients", "delta", "budget", "epsilon", "rounds", "randomness")
        releases = [{k: v for k, v in release._asdict().items() if v is not None} for release in self.releases]
        return {name: getattr(self, name) for name in facts} | {"releases": releases, "not_covered": NOT_COVERED}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """Return the ledger that `to_dict` wrote, such as `privacy` in the `run.json` of a run.

        Args:
          values: as read from JSON.
        """
        try:
            releases = tuple(Release(**release).check() for release in values["releases"])
            return cls(values["clients"], values["delta"], values["budget"], releases, values["randomness"])
        except (KeyError, TypeError) as problem:
            raise ValueError(f"this is not a ledger of privacy: {problem}") from problem


def _append_release(releases: tuple[Release, ...], more: Release) -> tuple[Release, ...]:
    """Add a release; rounds of the same kind are counted together, so that the order of rounds stays readable.

    Not if clients are promised to be rounds apart: that holds within one run, not between the last round of one and the
    first of another.
    """
    if more.apart is None and releases and releases[-1]._replace(rounds=0) == more._replace(rounds=0):
        return (*releases[:-1], more._replace(rounds=releases[-1].rounds + more.rounds))
    return (*releases, more)


class Spending(NamedTuple):
    """What rounds spend. It follows from the number of rounds alone, so a resumed run agrees.

    Attributes:
      before: the ledger before the first round.
      each: what a round releases.
    """

    before: Ledger
    each: Release

    def after(self, rounds: int) -> Ledger:
        """Return the ledger after this many rounds; skipped rounds count, too."""
        each = self.each._replace(rounds=rounds).check()
        # Whether they fit into the budget was decided before they were run.
        return replace(self.before, releases=_append_release(self.before.releases, each)) if rounds else self.before

    def allowed(self, rounds: int) -> int:
        """Return how many of the planned rounds fit into the budget."""
        if self.before.budget is None or rounds == 0 or self.after(rounds).epsilon <= self.before.budget:
            return rounds
        return min(self.before.rounds_left(self.each, rounds), rounds)

    def why_stopped(self, rounds: int) -> str:
        """Say why training stops after this many rounds."""
        spent, budget = self.after(rounds).epsilon, self.before.budget
        return (
            f"the privacy budget is spent: epsilon {spent:.4g} of {budget:g} after {rounds} rounds; one more exceeds it"
        )


def spending(algorithm: Algorithm, clients: int, sampling: Sampling, rounds: int, ledger: Ledger) -> Spending:
    """Return what rounds of an algorithm spend.

    Args:
      algorithm: whose aggregator adds noise.
      clients: how many there are in the population.
      sampling: who takes part. The ledger relies on Poisson sampling only.
      rounds: how many are planned at most.
      ledger: of the population, with what was spent before. What rounds with more clients than places add to delta is
        taken off its delta beforehand.
    """
    parts = algorithm.method.parts(jax.eval_shape(algorithm.method.init, jax.random.key(0)))
    each, problem = algorithm.aggregator.release and algorithm.aggregator.release(parts), None
    if each is None:
        problem = "`ledger` needs an aggregator that adds noise: use aggregators.private"
    elif ledger.clients != clients:
        problem = f"`ledger` must be for {clients} clients (got one for {ledger.clients})"
    elif each.apart is not None and (sampling.apart or 0) < each.apart:
        problem = f"correlated noise of {each.apart} bands needs Sampling(apart={each.apart}) or more (got {sampling})"
    if each is None or problem is not None:
        raise ValueError(problem)
    each = each._replace(rate=sampling.rate(clients), rounds=1, apart=sampling.apart)
    # For more rounds than anybody plans, so that the same rounds cost the same to the digit when more are planned.
    left = ledger.delta - sampling.overflow_delta(max(rounds, MOST_ROUNDS))
    return Spending(replace(ledger, delta=left), each)
