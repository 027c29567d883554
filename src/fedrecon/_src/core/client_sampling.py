"""How the clients of a round are chosen: settings, and the counts that follow from them; imports no JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

from fedrecon._src.core.checks import check_number, check_numbers

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
        at_least_one = ("clients_per_round", "oversample", "least", "apart")
        check_numbers({name: getattr(self, name) for name in at_least_one}, least=1)
        check_number("min_examples", self.min_examples)
        check_number("drop_out", self.drop_out, most=1, below=True)
        if self.poisson and (self.apart is not None or self.oversample != 1):
            other = f"`apart` or `oversample` (got {self.apart}, {self.oversample})"
            raise ValueError(f"`poisson` cannot be combined with {other}")

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
        """Return which invited clients reply, as indices into `drawn`, in the order of their replies.

        A subclass may have a model of devices instead, such as which of them are slow.

        Args:
          generator: draws what is random in this round.
          drawn: `(invited,)` indices of clients.
          sizes: `(invited,)` how many examples they have.
        """
        import numpy as np

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
        if not self.poisson:
            return self.cohort_size(clients)
        return max(1, clients - _fewest(clients, 1 - self.rate(clients)))  # as few as possible are left out

    def fewest(self, clients: int) -> int:
        """Return how many clients a round has at least, for noise that clients add together.

        With `poisson`, fewer are drawn with probability at most `OVERFLOW`, as long as this is above 1.

        Args:
          clients: in the population.
        """
        return max(1, _fewest(clients, self.rate(clients))) if self.poisson else self.cohort_size(clients)

    def overflow_delta(self, rounds: int) -> float:
        """Return what rounds that draw too many or too few clients add to delta, for any epsilon up to 13.

        A failure of probability p adds p (1 + e^epsilon).

        Args:
          rounds: how many rounds there are.
        """
        return 2 * rounds * OVERFLOW * (1 + math.exp(13)) if self.poisson else 0.0


@functools.lru_cache(maxsize=64)
def _fewest(clients: int, rate: float) -> int:
    """Return the largest number that sampling stays below with probability at most `OVERFLOW`."""
    from scipy.stats import binom  # slow to import, and rarely needed

    return int(binom.ppf(OVERFLOW, clients, rate))
