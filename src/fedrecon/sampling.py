"""Who takes part in a round, and their cohorts made ready to run."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import numpy as np

from fedrecon.algorithm import Algorithm
from fedrecon.clients import Clients
from fedrecon.cohort import ABSENT, Cohort, Packer, redraw
from fedrecon.engine import Layout
from fedrecon.fitting import features_of
from fedrecon.keys import RunKeys, as_number, fold_words, words_of

FEWEST = 50  # clients of a round where the population decides: fewer make noisy steps
OVERFLOW = 1e-24  # the probability that Poisson sampling draws more clients than a round has places for


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Who takes part in a round.

    Attributes:
      clients_per_round: how many clients' updates a round takes; None for a tenth of the population, 50 at least.
      oversample: invite this many times as many, and take the first that answer.
      drop_out: the share of invited clients that never answer.
      min_examples: clients with fewer examples do not answer either.
      poisson: draw every client by itself, with the same probability, so that a round has `clients_per_round` on
        average only. Differential privacy counts on this. How many take part is itself private and not reported.
      apart: let a client take part once in so many rounds at most: clients take turns in so many groups, and a round
        draws from its group. Correlated noise counts on this. None draws from everybody in every round.
    """

    clients_per_round: int | None = 100
    oversample: float = 1.0
    drop_out: float = 0.0
    min_examples: int = 1
    poisson: bool = False
    apart: int | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        number = 1 if self.clients_per_round is None else self.clients_per_round
        if number < 1 or self.oversample < 1 or not 0 <= self.drop_out < 1:
            raise ValueError(
                "sampling needs clients_per_round >= 1, oversample >= 1 and 0 <= drop_out < 1, not "
                f"{self.clients_per_round}, {self.oversample} and {self.drop_out}"
            )
        if self.apart is not None and (self.apart < 1 or self.poisson):
            raise ValueError(
                f"sampling has apart {self.apart} and poisson {self.poisson}; rounds apart are 1 or more, and who is "
                "drawn by chance alone may be drawn twice in a row"
            )
        if self.poisson and self.oversample != 1:
            raise ValueError(
                f"sampling has oversample {self.oversample} with poisson; who answers first would decide who takes part"
            )

    def wanted(self, population: int) -> int:
        """Return how many clients' updates a round takes of a population of this size."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        most = population // (self.apart or 1)
        return max(1, min(most, max(FEWEST, round(population / 10))))

    def rate(self, clients: int) -> float:
        """Return the probability with which a client is drawn, unseen; 1 where none can be claimed.

        Args:
          clients: in the population.
        """
        return min(self.wanted(clients) / clients, 1.0) if self.poisson else 1.0

    def capacity(self, clients: int) -> int:
        """Return how many places a round has.

        With `poisson` so many that more are drawn with a probability of `OVERFLOW` at most. Then some of them, chosen
        at random, are left out. That is no longer Poisson sampling: `overflow_delta` is what it adds to delta.

        Args:
          clients: in the population.
        """
        return _places(clients, self.rate(clients)) if self.poisson else self.wanted(clients)

    def overflow_delta(self, rounds: int) -> float:
        """Return what rounds with more clients than places add to delta, for any epsilon up to 13.

        A failure of probability p adds p (1 + e^epsilon).

        Args:
          rounds: how many.
        """
        return rounds * OVERFLOW * (1 + math.exp(13)) if self.poisson else 0.0


@functools.lru_cache(maxsize=64)
def _places(clients: int, rate: float) -> int:
    """Return the least number that independent coins exceed with a probability of `OVERFLOW` at most."""
    from scipy.stats import binom  # takes its time, and few need it

    low, high = 0, clients
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if binom.sf(middle, clients, rate) <= OVERFLOW else (middle + 1, high)
    return max(low, 1)


class Sample(NamedTuple):
    """The clients of one round, and what became of the others that were invited."""

    clients: np.ndarray  # (places of a round,) indices, ABSENT where too few answered
    counts: dict[str, int]


def sample(key: np.ndarray, number: int, clients: Clients, sampling: Sampling) -> Sample:
    """Draw the clients of a round without replacement, in time that does not grow with the population.

    This runs beside compiled rounds and must not wait for their devices, so it draws with numpy.

    Args:
      key: the words of a JAX key (`jax.random.key_data`).
      number: of the round; the same key and number draw the same clients.
      clients: the population.
      sampling: how many, and who does not answer.
    """
    every = sampling.apart or 1
    here = len(range(number % every, len(clients), every))  # whose turn it is: each so many clients of them all
    generator = np.random.Generator(np.random.Philox(key=np.array([as_number(key), number], np.uint64)))
    wanted = sampling.capacity(len(clients))
    if sampling.poisson:
        # As many as independent coins would give, and then any so many: the same as a coin for each, in less time.
        invited = min(int(generator.binomial(len(clients), sampling.rate(len(clients)))), wanted)
    else:
        invited = min(here, int(np.ceil(wanted * sampling.oversample)))
    drawn = number % every + every * generator.choice(here, invited, replace=False)
    large = clients.ends[drawn] - clients.starts[drawn] >= sampling.min_examples
    answered = generator.random(invited) >= sampling.drop_out
    taken = drawn[large & answered][:wanted]
    chosen = np.full(wanted, ABSENT, np.int64)
    chosen[: len(taken)] = taken
    if sampling.poisson:
        return Sample(chosen, {})
    counts = {"invited": invited, "too_small": int((~large).sum()), "dropped": int((large & ~answered).sum())}
    return Sample(chosen, counts)


class Prepared(NamedTuple):
    """Several rounds ready to run in one call, rounds first in every leaf of the cohorts."""

    first: int
    number: int
    cohorts: Cohort
    samples: list[Sample]


class Cohorts:
    """Draws and packs the cohorts of rounds: round r's depend on the keys and on r alone."""

    def __init__(
        self, algorithm: Algorithm, clients: Clients, sampling: Sampling, place: Layout, keys: RunKeys, at_once: int
    ):
        """Prepare `at_once` rounds at a time, always that many so that nothing is compiled twice."""
        self._clients, self._sampling, self._place, self._at_once = clients, sampling, place, at_once
        self._sampling_words, self._client_words = words_of(keys.sampling), words_of(keys.clients)
        needs = algorithm.method.needs._replace(columns=features_of(algorithm, clients))
        self._packer = Packer(clients, needs)

    def prepare(self, first: int, number: int) -> Prepared:
        """Prepare `number` rounds from `first` on; places beyond them are filled with absent clients."""
        number = min(number, self._at_once)
        samples = [sample(self._sampling_words, first + r, self._clients, self._sampling) for r in range(number)]
        orders = [self._arrange(s.clients) for s in samples]
        orders += [np.full_like(orders[0], ABSENT)] * (self._at_once - number)
        draws = np.stack([redraw(fold_words(self._client_words, first + r)) for r in range(self._at_once)])
        packed = self._packer.pack(np.concatenate(orders), np.repeat(draws, len(orders[0])))
        cohorts = jax.tree.map(lambda x: x.reshape(self._at_once, -1, *x.shape[1:]), packed)
        return Prepared(first, number, cohorts, samples)

    def _arrange(self, chosen: np.ndarray) -> np.ndarray:
        safe = np.maximum(chosen, 0)
        sizes = np.where(chosen >= 0, self._clients.ends[safe] - self._clients.starts[safe], 0)
        return self._place.arrange(chosen, sizes)
