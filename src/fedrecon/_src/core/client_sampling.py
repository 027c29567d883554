"""How the clients of a round are chosen: settings, and the counts that follow from them; imports no JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

OVERFLOW = 1e-24  # at most the probability that Poisson sampling draws more, or fewer, clients than a round counts on


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the clients of a round are chosen.

    Attributes:
      clients_per_round: how many clients' updates a round takes; None for a tenth of the population, at least `least`.
      oversample: invite this many times as many, and take the first that answer.
      drop_out: the share of invited clients that never answer.
      min_examples: clients with fewer examples do not answer either.
      poisson: draw every client independently, with the same probability, so that `clients_per_round` is the average.
        Differential privacy relies on this. The number of clients is then private too, and is not reported.
      apart: let a client take part at most once in this many rounds: clients take turns in this many groups, and a
        round draws from one group. Correlated noise relies on this. None draws from all clients in every round.
      least: if the population decides, no round takes fewer clients than this, as their steps would be noisy; those of
        a smaller population all take part.

    Example:
      >>> import fedrecon as fr
      >>> sampling = fr.Sampling(clients_per_round=100, oversample=1.1, drop_out=0.08)
      >>> sampling.capacity(5000)
      100
    """

    clients_per_round: int | None = 100
    oversample: float = 1.0
    drop_out: float = 0.0
    min_examples: int = 1
    poisson: bool = False
    apart: int | None = None
    least: int = 50

    def __post_init__(self) -> None:
        """Check the settings."""
        number = 1 if self.clients_per_round is None else self.clients_per_round
        if number < 1 or self.oversample < 1 or not 0 <= self.drop_out < 1:
            raise ValueError(
                "`clients_per_round` and `oversample` must be at least 1, and `drop_out` at least 0 and below 1 "
                f"(got {self.clients_per_round}, {self.oversample} and {self.drop_out})"
            )
        if self.least < 1:
            raise ValueError(f"`least` must be at least 1 (got {self.least})")
        if self.apart is not None and (self.apart < 1 or self.poisson):
            raise ValueError(
                "`apart` must be at least 1 and cannot be combined with `poisson` "
                f"(got apart={self.apart}, poisson={self.poisson})"
            )
        if self.poisson and self.oversample != 1:
            raise ValueError(
                f"`oversample` must be 1 with `poisson`, so that fast clients are not favoured (got {self.oversample})"
            )

    def cohort_size(self, population: int) -> int:
        """Return how many clients' updates a round takes.

        Args:
          population: how many clients there are.
        """
        if self.clients_per_round is not None:
            return self.clients_per_round
        most = population // (self.apart or 1)
        return max(1, min(most, max(self.least, round(population / 10))))

    def rate(self, clients: int) -> float:
        """Return the probability with which a client is drawn, for privacy accounting; 1 without `poisson`.

        Args:
          clients: in the population.
        """
        return min(self.cohort_size(clients) / clients, 1.0) if self.poisson else 1.0

    def replies(self, generator: np.random.Generator, drawn: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return who of the invited answers, as places in `drawn`, whoever answers first first.

        A subclass may have a model of devices instead, such as which of them are slow.

        Args:
          generator: draws what is random in this round.
          drawn: `(invited,)` indices of clients.
          sizes: `(invited,)` how many examples they have.
        """
        import numpy as np

        del drawn
        enough = sizes >= self.min_examples
        if self.drop_out:
            enough &= generator.random(len(sizes)) >= self.drop_out
        return np.flatnonzero(enough)

    def capacity(self, clients: int) -> int:
        """Return how many clients a round has room for.

        With `poisson`, more are drawn with probability at most `OVERFLOW`. In that case some of them, chosen at random,
        are left out. That is no longer Poisson sampling; `overflow_delta` is what it adds to delta.

        Args:
          clients: in the population.
        """
        return _places(clients, self.rate(clients)) if self.poisson else self.cohort_size(clients)

    def fewest(self, clients: int) -> int:
        """Return how many clients a round has at least, for noise that clients add together.

        With `poisson`, fewer are drawn with probability at most `OVERFLOW`, as long as this is above 1.

        Args:
          clients: in the population.
        """
        return _fewest(clients, self.rate(clients)) if self.poisson else self.cohort_size(clients)

    def overflow_delta(self, rounds: int) -> float:
        """Return what rounds that draw too many or too few clients add to delta, for any epsilon up to 13.

        A failure of probability p adds p (1 + e^epsilon).

        Args:
          rounds: how many rounds there are.
        """
        return 2 * rounds * OVERFLOW * (1 + math.exp(13)) if self.poisson else 0.0


@functools.lru_cache(maxsize=64)
def _places(clients: int, rate: float) -> int:
    """Return the least number of clients that sampling exceeds with probability at most `OVERFLOW`."""
    from scipy.stats import binom  # slow to import, and rarely needed

    low, high = 0, clients
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if binom.sf(middle, clients, rate) <= OVERFLOW else (middle + 1, high)
    return max(low, 1)


@functools.lru_cache(maxsize=64)
def _fewest(clients: int, rate: float) -> int:
    """Return the largest number that sampling stays below with probability at most `OVERFLOW`, 1 at least."""
    from scipy.stats import binom

    low, high = 1, clients
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if binom.cdf(middle - 1, clients, rate) <= OVERFLOW else (low, middle - 1)
    return low
