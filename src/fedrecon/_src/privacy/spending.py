"""What rounds of training spend: a ledger, and what each round adds to it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.privacy.accounting import MOST_ROUNDS, Release
from fedrecon._src.privacy.ledger import Ledger


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
        if rounds == 0:
            return self.before
        # Whether they fit was decided before they were run.
        open_ended = dataclasses.replace(self.before, budget=None)
        return dataclasses.replace(open_ended.add(self.each._replace(rounds=rounds)), budget=self.before.budget)

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
    if algorithm.aggregator.release is None:
        raise ValueError("a ledger was given, but the aggregator promises nothing: use aggregators.private")
    if ledger.clients != clients:
        raise ValueError(f"the ledger is for {ledger.clients} clients, and there are {clients}")
    parts = algorithm.method.parts(jax.eval_shape(algorithm.method.init, jax.random.key(0)))
    each = algorithm.aggregator.release(parts)
    if each.apart is not None and (sampling.apart or 0) < each.apart:
        raise ValueError(
            f"correlated noise of {each.apart} bands holds for clients that are {each.apart} rounds apart or more; use "
            f"Sampling(apart={each.apart}), not {sampling}"
        )
    each = each._replace(rate=sampling.rate(clients), rounds=1, apart=sampling.apart)
    # For more rounds than anybody plans, so that the same rounds cost the same to the digit when more are planned.
    left = ledger.delta - sampling.overflow_delta(max(rounds, MOST_ROUNDS))
    return Spending(dataclasses.replace(ledger, delta=left), each)
