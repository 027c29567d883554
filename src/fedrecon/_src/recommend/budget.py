"""How a run's privacy budget is divided between round zero and the rounds, and which settings its noise calls for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedrecon._src.privacy.accounting import Release, default_delta, noise_for
from fedrecon._src.recommend.config import Config
from fedrecon._src.recommend.round_zero import PURPOSE

SLACK = 1e-4  # a little below the budget, so that the cost of too few places (`Sampling.overflow_delta`) fits too
FIRM, SMALL_POPULATION = 0.85, 11.0  # round zero's share: at most, and what it falls with


class Population(NamedTuple):
    """Who noise is computed for.

    Attributes:
      clients: how many there are.
      per_round: how many of them take part in a round, on average.
    """

    clients: int
    per_round: float


def delta_of(config: Config, population: Population) -> float:
    """Return the delta of a run's promise."""
    return default_delta(population.clients) if config.privacy.delta is None else config.privacy.delta


def share_of_round_zero(config: Config, population: Population) -> float:
    """Return round zero's share of the budget, in terms of 1 / noise^2.

    With few clients, item biases need most of it; with many, a little makes them exact.
    """
    if config.privacy.round_zero is not None:
        return config.privacy.round_zero
    return min(FIRM, max(0.05, SMALL_POPULATION * population.clients**-0.3))


def round_zero_noise(
    config: Config, population: Population, release: Callable[[float], Release] | None = None
) -> float:
    """Return the noise multiplier of one release that costs as much as all of round zero may.

    Args:
      config: the settings.
      population: who it is computed for.
      release: that one release, as a function of the noise multiplier; Gaussian noise by default.
    """
    settings, share = config.privacy, share_of_round_zero(config, population)
    if settings.epsilon is None:
        assert settings.noise_multiplier is not None
        return 2 * settings.noise_multiplier
    everything = noise_for(
        settings.epsilon * (1 - SLACK),
        clients=population.clients,
        per_round=population.clients,
        rounds=1,
        delta=delta_of(config, population),
        release=release,
    )
    return everything / math.sqrt(share)


def rounds_noise(
    config: Config,
    population: Population,
    before: Sequence[Release] = (),
    release: Callable[[float], Release] | None = None,
) -> float:
    """Return the noise multiplier of the rounds, with what round zero leaves of the budget.

    Args:
      config: the settings, with epsilon.
      population: who it is computed for.
      before: what has already been released.
      release: what all rounds release, as a function of the noise multiplier; sampled Gaussian noise by default.
    """
    assert config.privacy.epsilon is not None
    if config.rounds < 1:
        raise ValueError("`rounds` must be at least 1 with a privacy budget (got 0)")
    return noise_for(
        config.privacy.epsilon * (1 - SLACK),
        clients=population.clients,
        per_round=population.per_round if config.sampling.poisson else population.clients,
        rounds=config.rounds,
        delta=delta_of(config, population),
        before=before,
        release=release or functools.partial(_sampled, config, population),
    )


def _sampled(config: Config, population: Population, noise: float) -> Release:
    """Return what all rounds release with Gaussian noise, as clients are drawn."""
    sampling = config.sampling
    rate = population.per_round / population.clients if sampling.poisson else 1.0
    return Release(noise, rate, config.rounds, apart=sampling.apart)


def budget_sentence(before: Sequence[Release], delta: float, budget: float | None) -> str:
    """Say what round zero spends of the budget."""
    from fedrecon._src.privacy.accounting import epsilon_of

    alone = epsilon_of([release for release in before if release.purpose == PURPOSE], delta)
    of = "" if budget is None else f" of {budget:g}"
    return (
        f"round zero asks every client {len(before)} times, with noise that alone costs epsilon {alone:.3g}{of}; "
        "the rounds get what is left"
    )


# ---- the recipe with noise ----

MEDIAN = 25.0  # about the median norm of what a client adds in the recipe: a sum of gradients, standardised
SHORT = 8.0  # where noise outweighs everything, a small norm is better
USUAL = 60.0  # the noise in the summed gradient of everybody that the priors of the recipe can take as they are


class NoiseRule(NamedTuple):
    """What the recipe changes because of noise.

    Attributes:
      clip: the clipping norm.
      prior: what priors are multiplied by.
    """

    clip: float
    prior: float


def rule(noise_in_mean: float, clients: int, scaling: float = 2.0) -> NoiseRule:
    """Choose the clipping norm and the priors for this much noise.

    Args:
      noise_in_mean: the noise multiplier divided by the number of clients in a round.
      clients: how many clients train here.
      scaling: the ratio of the sum over everybody to the sum over their query examples.
    """
    clip = MEDIAN if noise_in_mean < 1e-3 else SHORT
    noise = scaling * clients * clip * noise_in_mean  # in one entry of the gradient summed over everybody
    return NoiseRule(clip, max(1.0, noise / USUAL) ** 2)
