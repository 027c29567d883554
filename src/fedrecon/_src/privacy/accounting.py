"""The privacy that noise buys: the epsilon of given noise, and the noise for a given epsilon.

One unit of privacy is one client: whether it ever took part at all. A round adds Gaussian noise of standard deviation
`noise_multiplier` times the clipping norm to the sum of clipped uploads. Each client takes part in a round with
probability `per_round / clients`, independently and without the observer knowing (Poisson sampling). Against
an observer who sees who takes part, such as the server, this does not hold: use `per_round = clients`.

Computed with the privacy loss distributions of dp-accounting, which comes with jax-privacy. It always rounds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

from fedrecon._src.core.checks import check_choice, check_number, check_rules, require

MOST_ROUNDS = 10**6  # beyond this, rounding up takes over: losses of a round are smaller than its steps
MOST_EPSILON = 1e4
ORDERS = (*range(2, 65), *range(68, 129, 4), *range(144, 257, 16), 512)  # of Rényi divergences
Divergence = Callable[[int], float]  # of an order
LEAST_NOISE, MOST_NOISE = 0.05, 1e6  # multipliers: less promises nothing, and cannot be counted in reasonable memory


class Release(NamedTuple):
    """Something noised that was published, as often as `rounds` says.

    Attributes:
      noise_multiplier: standard deviation of the noise in the sum, in units of the most that one client can add to it.
      rate: the probability with which a client took part, unseen; 1 if no sampling can be claimed.
      rounds: how often.
      mechanism: `gaussian`, or `skellam` for noise that clients added in integers.
      count_noise: with adaptive clipping, the standard deviation of the noise in the count of clients below the norm.
      steps: with skellam, the most that one client can add to the sum, its norm in integers.
      length: with skellam, how many entries a client sends.
      apart: a promise that a client takes part at most once in this many rounds; None if it may be in every round.
      purpose: what was released, where it is not a round of training, such as `round zero`.

    Example:
      >>> import fedrecon as fr
      >>> fr.privacy.Release(noise_multiplier=1.0, rate=1.0, rounds=200, apart=10).times
      20
    """

    noise_multiplier: float
    rate: float
    rounds: int
    mechanism: str = "gaussian"
    count_noise: float | None = None
    steps: float | None = None
    length: int | None = None
    apart: int | None = None
    purpose: str | None = None

    @property
    def times(self) -> int:
        """How many of the rounds one client can be in."""
        return self.rounds if self.apart is None else -(-self.rounds // self.apart)

    def effective(self) -> float:
        """Return the noise multiplier of all that a round releases, the count of adaptive clipping included.

        That is a count of values of one half up or down: a client changes it by one half at most.

        References: Andrew et al., Differentially private learning with adaptive clipping, NeurIPS 2021, theorem 1.
        """
        if self.count_noise is None:
            return self.noise_multiplier
        return (self.noise_multiplier**-2 + (2 * self.count_noise) ** -2) ** -0.5

    def divergence(self) -> Divergence:
        """Return the Rényi divergence of one round."""
        if self.mechanism == "gaussian":
            return sampled_divergence(gaussian_divergence(self.effective()), self.rate, gaussian=True)
        steps = self.steps or 0.0
        noise = skellam_divergence((self.effective() * steps) ** 2, steps, self.length or 0)
        return sampled_divergence(noise, self.rate)

    def check(self) -> Release:
        """Return the release unchanged; raise if a field is invalid."""
        check_number("noise_multiplier", self.noise_multiplier, above=True)
        check_number("rate", self.rate, most=1, above=True)
        check_number("rounds", self.rounds, most=MOST_ROUNDS)
        check_choice("mechanism", self.mechanism, ("gaussian", "skellam"))
        rules = {
            f"`apart` must be at least 1, with `rate` 1 (got apart={self.apart}, rate={self.rate})": (
                self.apart is None or (self.apart >= 1 and self.rate >= 1)
            ),
            "Skellam noise needs `steps` and `length`": self.mechanism != "skellam" or (self.steps and self.length),
        }
        check_rules(rules)
        return self


def default_delta(clients: int) -> float:
    """Return the usual delta: a little below one over the number of clients.

    Args:
      clients: how many there are in the population.
    """
    check_number("clients", clients, least=2)
    return clients**-1.1


def epsilon_of(releases: Sequence[Release], delta: float) -> float:
    """Return epsilon of everything that was released.

    Args:
      releases: of one run or several, on the same clients.
      delta: of the guarantee.

    Example:
      >>> import fedrecon as fr
      >>> release = fr.privacy.Release(noise_multiplier=1.0, rate=0.1, rounds=200)
      >>> round(fr.privacy.epsilon_of([release], delta=1e-5), 2)
      9.97
    """
    check_delta(delta)
    return _epsilon(tuple(release.check() for release in releases if release.rounds), delta)


@lru_cache(maxsize=512)
def _epsilon(releases: tuple[Release, ...], delta: float) -> float:
    if not releases:
        return 0.0
    if any(release.mechanism == "skellam" for release in releases):
        return renyi_epsilon([(release.divergence(), release.times) for release in releases], delta)
    library, losses = require("dp_accounting"), require("dp_accounting.pld")
    bound = math.inf
    # Rounding is upwards, and costs about a thousandth with these steps. Small epsilons need fine ones.
    for step, enough in ((3e-3, 2.0), (1e-3, 0.5), (2.5e-4, 0.0)):
        accountant = losses.PLDAccountant(value_discretization_interval=step)
        for release in releases:
            event = library.GaussianDpEvent(release.effective())
            event = library.PoissonSampledDpEvent(release.rate, event) if release.rate < 1 else event
            accountant.compose(event, release.times)
        bound = min(bound, float(accountant.get_epsilon(delta)))
        if bound >= enough:
            break
    return bound


def epsilon_after(
    noise_multiplier: float, *, clients: int, per_round: float, rounds: int, delta: float | None = None
) -> float:
    """Return epsilon after some rounds of Gaussian noise.

    Args:
      noise_multiplier: standard deviation of the noise in the sum, in units of the clipping norm.
      clients: how many there are in the population.
      per_round: how many take part in a round, on average.
      rounds: how many.
      delta: of the guarantee; `clients ** -1.1` by default.
    """
    rate = sampling_rate(clients, per_round)
    chosen = default_delta(clients) if delta is None else delta
    release = Release(noise_multiplier, rate, rounds).check()
    check_number("noise_multiplier", noise_multiplier, least=LEAST_NOISE, most=MOST_NOISE)
    return epsilon_of([release], chosen)


def noise_for(
    epsilon: float,
    *,
    clients: int,
    per_round: float,
    rounds: int,
    delta: float | None = None,
    before: Sequence[Release] = (),
    release: Callable[[float], Release] | None = None,
) -> float:
    """Return the least noise multiplier with which `rounds` rounds stay within epsilon.

    Args:
      epsilon: of the guarantee.
      clients: how many there are in the population.
      per_round: how many take part in a round, on average.
      rounds: how many.
      delta: of the guarantee; `clients ** -1.1` by default.
      before: what was released before, which counts too.
      release: what all rounds release, as a function of the noise multiplier, such as
        `lambda z: share_of_noise(clip, length, z, ...).release(rate, rounds)`; Gaussian noise by default.

    Returns:
      The multiplier, at most a thousandth too large, never too small.

    Example:
      >>> import fedrecon as fr
      >>> round(fr.privacy.noise_for(4.0, clients=4832, per_round=483, rounds=200), 2)
      1.59
    """
    rate = sampling_rate(clients, per_round)
    chosen = default_delta(clients) if delta is None else delta
    check_delta(chosen)
    check_number("epsilon", epsilon, most=MOST_EPSILON, above=True)
    check_number("rounds", rounds, least=1, most=MOST_ROUNDS)
    spent = epsilon_of(before, chosen)
    if spent >= epsilon:
        raise ValueError(f"`epsilon` must be above {spent:.3g}, spent before the first round (got {epsilon:g})")

    def excess(noise: float) -> float:
        now = Release(noise, rate, rounds) if release is None else release(noise)
        return math.log(max(epsilon_of([*before, now], chosen), 1e-12) / epsilon)

    return _least(excess, _start(epsilon, rate, rounds, chosen), epsilon)


def _start(epsilon: float, rate: float, rounds: int, delta: float) -> float:
    """Guess the noise, from Rényi divergences, which are quick and a little high."""
    low, high = 0.05, 1e4
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        divergence = Release(middle, rate, rounds).divergence()
        low, high = (middle, high) if renyi_epsilon([(divergence, rounds)], delta) > epsilon else (low, middle)
    return high


def _least(excess: Callable[[float], float], guess: float, epsilon: float) -> float:
    """Find the least noise with no excess, to a thousandth."""
    from scipy.optimize import brentq

    high = guess
    while excess(high) > 0:
        high *= 1.5
        if high > 1e6:
            raise ValueError(f"no amount of noise gives epsilon {epsilon:.3g}; use a larger epsilon or fewer rounds")
    low = 0.7 * high
    while excess(low) <= 0:
        low, high = 0.7 * low, low
        if low < 1e-3:
            return high
    root = float(brentq(excess, low, high, xtol=2e-4 * high))
    return next((noise for noise in (root, 1.0005 * root, 1.001 * root) if excess(noise) <= 0), high)


def update_noise_for(noise_multiplier: float, count_noise: float) -> float:
    """Return how much noise updates need so that together with a noised count they count as `noise_multiplier`.

    Args:
      noise_multiplier: of both together.
      count_noise: standard deviation of the noise in the count; a twentieth of the clients in a round is usual.
    """
    if not 2 * count_noise > noise_multiplier:
        raise ValueError(f"`count_noise` must be above half of {noise_multiplier:g} (got {count_noise:g})")
    return (noise_multiplier**-2 - (2 * count_noise) ** -2) ** -0.5


def sampling_rate(clients: int, per_round: float) -> float:
    """Return the probability with which a client takes part in a round.

    Args:
      clients: how many there are in the population.
      per_round: how many take part, on average.
    """
    check_number("clients", clients, least=2)  # among fewer nobody can hide
    check_number("per_round", per_round, most=clients, above=True)
    return per_round / clients


def check_delta(delta: float) -> None:
    """Refuse a delta that promises nothing.

    Args:
      delta: of a guarantee.
    """
    check_number("delta", delta, most=1, above=True, below=True)


# ---- Rényi divergences, of whole orders only: that is what the bounds are proven for ----


def gaussian_divergence(noise_multiplier: float) -> Divergence:
    """Return the divergence of Gaussian noise of `noise_multiplier` times the sensitivity."""
    return lambda order: order / (2 * noise_multiplier**2)


def skellam_divergence(variance: float, l2: float, length: int) -> Divergence:
    """Return a bound on the divergence of Skellam noise of a variance, on integer vectors.

    Args:
      variance: of the noise in the sum, in steps squared.
      l2: the largest norm of what a client adds to the sum, in steps.
      length: how many entries it has.

    References: Agarwal, Kairouz and Liu, The Skellam mechanism for differentially private federated learning, NeurIPS
    2021, theorem 3.5.
    """
    l1 = l2 * min(math.sqrt(length), l2)  # of integers no sum of absolute values exceeds the sum of squares

    def divergence(order: int) -> float:
        more = min(((2 * order - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
        return order * l2**2 / (2 * variance) + more

    return divergence


def sampled_divergence(divergence: Divergence, rate: float, *, gaussian: bool = False) -> Divergence:
    """Return the divergence if each client takes part with probability `rate`, independently and unseen.

    Args:
      divergence: without sampling.
      rate: above 0, at most 1.
      gaussian: whether the noise is Gaussian, for which the bound is exact and without the factor of three.

    References: Zhu and Wang, Poisson subsampled Rényi differential privacy, ICML 2019, theorems 5 and 6.
    Mironov, Talwar and Zhang, Rényi differential privacy of the sampled Gaussian mechanism, 2019.
    """
    if rate == 1:
        return divergence

    def amplified(order: int) -> float:
        k = np.arange(2, order + 1)
        choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        loss = np.array([(j - 1) * divergence(int(j)) for j in k])
        terms = choose + (order - k) * math.log1p(-rate) + k * math.log(rate) + loss
        if not gaussian:
            terms = terms + np.where(k > 2, math.log(3), 0.0)
        first = (order - 1) * math.log1p(-rate) + math.log1p((order - 1) * rate)
        return min(float(logsumexp([first, *terms])) / (order - 1), divergence(order))

    return amplified


def renyi_epsilon(divergences: list[tuple[Divergence, int]], delta: float) -> float:
    """Return epsilon of several mechanisms, each used some number of times.

    Args:
      divergences: `(divergence, times)` of each.
      delta: of the guarantee.
    """
    total = [sum(times * divergence(order) for divergence, times in divergences) for order in ORDERS]
    return float(require("dp_accounting.rdp").compute_epsilon(ORDERS, total, delta)[0])
