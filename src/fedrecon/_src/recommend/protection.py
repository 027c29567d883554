"""What settings promise the clients of a run: how a budget is divided, an aggregator, a ledger of what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src import server as aggregators
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.model import Model
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.core.upload import DELTA
from fedrecon._src.privacy.accounting import Release, default_delta, epsilon_of, noise_for, sampling_rate
from fedrecon._src.privacy.ledger import NOT_COVERED, Ledger
from fedrecon._src.recommend.config import Config, change_settings, get_setting
from fedrecon._src.recommend.recipe import build_aggregator, build_split, build_weights
from fedrecon._src.recommend.round_zero import PURPOSE
from fedrecon._src.recommend.settings import FOUND
from fedrecon._src.recommend.task import Ready

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


def round_zero_noise(
    config: Config, population: Population, release: Callable[[float], Release] | None = None
) -> float:
    """Return the noise multiplier of one release that costs as much as all of round zero may.

    Args:
      config: the settings.
      population: who it is computed for.
      release: that one release, as a function of the noise multiplier; Gaussian noise by default.
    """
    settings = config.privacy
    if settings.epsilon is None:
        assert settings.noise_multiplier is not None
        return 2 * settings.noise_multiplier
    everything = noise_for(
        settings.epsilon * (1 - SLACK),
        clients=population.clients,
        per_round=population.clients,
        rounds=1,
        delta=settings.delta,
        release=release,
    )
    # With few clients, item biases need most of the budget; with many, a little makes them exact.
    usual = min(FIRM, max(0.05, SMALL_POPULATION * population.clients**-0.3))
    return everything / math.sqrt(usual if settings.round_zero is None else settings.round_zero)


def _rounds_noise(
    config: Config, model: Model, actual: Population, target: Population, before: Sequence[Release]
) -> float:
    """Return the noise multiplier of the rounds, with what round zero leaves of the budget."""
    assert config.privacy.epsilon is not None
    per_round = target.per_round if config.sampling.poisson else target.clients
    parts = {DELTA: flatten(jax.eval_shape(model.init_global, jax.random.key(0)))[0]}

    def release(noise: float) -> Release:
        """Return what all rounds release."""
        if not config.aggregate.secure:
            return Release(noise, per_round / target.clients, config.rounds, apart=config.sampling.apart)
        promise = _build_noisy(config, actual, noise).release
        assert promise is not None
        return promise(parts)._replace(rate=config.sampling.rate(actual.clients), rounds=config.rounds)

    return noise_for(
        config.privacy.epsilon * (1 - SLACK),
        clients=target.clients,
        per_round=per_round,
        rounds=config.rounds,
        delta=config.privacy.delta,
        before=before,
        release=release,
    )


# ---- the recipe with noise ----

MEDIAN = 25.0  # about the median norm of what a client adds in the recipe: a sum of gradients, standardised
SHORT = 8.0  # where noise outweighs everything, a small norm is better
USUAL = 60.0  # the noise in the summed gradient of everybody that the priors of the recipe can take as they are


# ---- what a run does about it ----


class Protection(NamedTuple):
    """What protects the clients of a run.

    Attributes:
      config: the settings, with what follows from the noise.
      aggregator: how updates become one.
      examples: for priors, how many examples or updates the server's sum over everybody stands for.
      ledger: the ledger before the first round; None if nothing is promised.
      noise_multiplier: of all that a round releases; None without noise.
    """

    config: Config
    aggregator: aggregators.Aggregator
    examples: float
    ledger: Ledger | None = None
    noise_multiplier: float | None = None


def protect(ready: Ready, earlier: Mapping[str, Any] | None = None, population: Population | None = None) -> Protection:
    """Return what protects the clients of a run.

    Args:
      ready: the settings, the model, who trains, and what round zero gave away.
      earlier: `run.json` of the run to resume: its noise stays the same, however many rounds are planned now.
      population: compute the noise for these clients, and give the mean upload as much of it as theirs; None for those
        who train. For studies: it protects nobody who trains.
    """
    clients, examples = len(ready.users.train), ready.users.train.num_examples
    if not ready.config.privacy.on:
        return Protection(ready.config, _without_noise(ready.config, ready.model, clients), examples)
    config = drawn_privately(ready.config)
    actual = Population(clients, _per_round(config, clients))
    target = population or actual
    sampling_rate(*target)
    delta, randomness = config.privacy.delta or default_delta(target.clients), f"seed {config.seed}"
    ledger = Ledger(target.clients, delta, config.privacy.epsilon, ready.releases, randomness=randomness)
    noise = ((earlier or {}).get("privacy") or {}).get("noise_multiplier") or config.privacy.noise_multiplier
    if noise is None:
        noise = _rounds_noise(config, ready.model, actual, target, ready.releases)
    config, updates = with_rule(config, clients, noise / target.per_round)
    aggregator = _build_noisy(config, actual, noise * actual.per_round / target.per_round)
    return Protection(config, aggregator, updates or examples, ledger, noise)


def drawn_privately(config: Config) -> Config:
    """Draw clients as the noise assumes: independently or in turns, unless settings invite more than needed."""
    if config.privacy.correlated is not None:
        return change_settings(config, {"sampling.apart": config.privacy.correlated})
    independent = config.sampling.oversample == 1 and config.sampling.apart is None
    return change_settings(config, {"sampling.poisson": True} if independent else {})


def _per_round(config: Config, clients: int) -> int:
    """Return how many take part in a round; if clients take turns, no more than each group has."""
    apart = config.sampling.apart
    check_number("correlated", apart, least=1, most=clients)
    return min(config.sampling.cohort_size(clients), clients // (apart or 1))


def is_recipe(config: Config) -> bool:
    """Say whether a run begins with round zero and adds up gradients, as the recipe does."""
    return bool(getattr(config.model, "round_zero", False))


def with_rule(config: Config, clients: int, noise_in_mean: float) -> tuple[Config, float | None]:
    """Return the settings of the recipe for this much noise, and what its priors are weighed against.

    Args:
      config: the settings.
      clients: how many clients train here.
      noise_in_mean: the noise multiplier divided by the number of clients in a round.
    """
    if not is_recipe(config):
        return config, None
    query = int(build_split(config.split.train, config.split).counts(np.array([1000]))[1][0])
    scaling = 1000 / max(query, 1)  # the ratio of the sum over everybody to the sum over their query examples
    clip = MEDIAN if noise_in_mean < 1e-3 else SHORT
    noise = scaling * clients * clip * noise_in_mean  # in one entry of the gradient summed over everybody
    stronger, priors = max(1.0, noise / USUAL) ** 2, ("model.prior", "model.implicit_prior")
    changes = {path: get_setting(config, path) * stronger for path in priors}
    changes |= {"privacy.clip_norm": clip} if config.privacy.clip_norm is None else {}
    return change_settings(config, changes), scaling * clients


def fixed_scales(config: Config) -> dict[str, float] | None:
    """Return what clients do not send: the server does not change what round zero found."""
    if not is_recipe(config):
        return None
    return dict.fromkeys(FOUND[: None if config.model.item_traits else -1], 0.0)


def _without_noise(config: Config, model: Model, clients: int) -> aggregators.Aggregator:
    if not config.aggregate.secure:
        return build_aggregator(config, model)
    assert config.aggregate.clip_norm is not None
    most = config.sampling.capacity(clients)
    return aggregators.secure(config.aggregate.clip_norm, clients=most, weigh=build_weights(config, model))


def _build_noisy(config: Config, actual: Population, noise: float) -> aggregators.Aggregator:
    """Return the aggregator of a simulation with noise: of the clients if sums are secure, else of the server."""
    sampling, (clients, per_round) = config.sampling, actual
    if not config.aggregate.secure:
        return build_private(config, noise, per_round, correlated=config.privacy.correlated, rounds=config.rounds)
    least = sampling.fewest(clients) if sampling.poisson else int(per_round)
    return build_secure(config, aggregators.ClientNoise(noise, per_round, least), sampling.capacity(clients))


def build_private(config: Config, noise: float, per_round: float, **correlation: Any) -> aggregators.Aggregator:
    """Return an aggregator to which the server adds noise; `correlation` has options of `aggregators.private`."""
    assert config.privacy.clip_norm is not None
    return aggregators.private(
        config.privacy.clip_norm,
        noise,
        per_round=per_round,
        weigh="examples" if is_recipe(config) else "uniform",
        scales=fixed_scales(config),
        quantile=config.privacy.clip_quantile,
        **correlation,
    )


def build_secure(config: Config, noise: aggregators.ClientNoise, clients: int) -> aggregators.Aggregator:
    """Return an aggregator of at most so many clients, who add noise themselves."""
    clip_norm = config.privacy.clip_norm or 1.0  # while noise is computed for a norm that is not chosen yet
    weigh: aggregators.Weigh = "examples" if is_recipe(config) else "uniform"
    noise = noise._replace(scales=fixed_scales(config))
    return aggregators.secure(clip_norm, clients=clients, noise=noise, weigh=weigh)


def say_promise(protection: Protection) -> list[str]:
    """Return remarks on what is promised, before training."""
    config, ledger = protection.config, protection.ledger
    if ledger is None:
        return []
    remarks = [f"noise multiplier {protection.noise_multiplier:.4g}, clipping norm {config.privacy.clip_norm:g}"]
    if ledger.releases:
        alone = epsilon_of([release for release in ledger.releases if release.purpose == PURPOSE], ledger.delta)
        of = "" if ledger.budget is None else f" of {ledger.budget:g}"
        remarks.append(
            f"round zero asks every client {len(ledger.releases)} times, with noise that alone costs epsilon "
            f"{alone:.3g}{of}; the rounds get what is left"
        )
    if config.sampling.apart is not None:
        remarks.append(
            f"clients take turns, each at most once in {config.sampling.apart} rounds; the promise holds as long as "
            "they do, and relies on nothing else"
        )
    elif config.sampling.poisson:
        remarks.append("every client is drawn independently in every round (Poisson sampling)")
    else:
        remarks.append(
            "clients are not drawn by Poisson sampling, so random sampling adds no protection; without "
            "--sampling.oversample the same noise promises far more"
        )
    return [f"privacy: {remark}" for remark in (*remarks, NOT_COVERED)]
