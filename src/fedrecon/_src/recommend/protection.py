"""What settings promise the clients of a run: how a budget is divided, an aggregator, a ledger of what it costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src import server as aggregators
from fedrecon._src.core.model import Model
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.core.upload import DELTA
from fedrecon._src.privacy.accounting import Release, default_delta, noise_for, sampling_rate, update_noise_for
from fedrecon._src.privacy.ledger import NOT_COVERED, Ledger
from fedrecon._src.recommend.config import Config
from fedrecon._src.recommend.recipe import build_aggregator, build_split, build_weights
from fedrecon._src.recommend.round_zero import PURPOSE
from fedrecon._src.recommend.settings import FOUND

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
        delta=delta_of(config, population),
        release=release,
    )
    # With few clients, item biases need most of the budget; with many, a little makes them exact.
    usual = min(FIRM, max(0.05, SMALL_POPULATION * population.clients**-0.3))
    return everything / math.sqrt(usual if settings.round_zero is None else settings.round_zero)


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
    per_round = population.per_round if config.sampling.poisson else population.clients

    def sampled(noise: float) -> Release:
        return Release(noise, per_round / population.clients, config.rounds, apart=config.sampling.apart)

    return noise_for(
        config.privacy.epsilon * (1 - SLACK),
        clients=population.clients,
        per_round=per_round,
        rounds=config.rounds,
        delta=delta_of(config, population),
        before=before,
        release=release or sampled,
    )


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


# ---- what a run does about it ----


class Protection(NamedTuple):
    """What protects the clients of a run.

    Attributes:
      config: the settings, with what follows from the noise.
      aggregator: how updates become one.
      examples: for priors, how many updates the server's sum over everybody stands for; None to count examples.
      ledger: the ledger before the first round; None if nothing is promised.
      noise_multiplier: of all that a round releases; None without noise.
    """

    config: Config
    aggregator: aggregators.Aggregator
    examples: float | None = None
    ledger: Ledger | None = None
    noise_multiplier: float | None = None

    def facts(self) -> dict[str, Any] | None:
        """Return what `run.json` says before the first round."""
        if self.ledger is None:
            return None
        return {
            **self.ledger.to_dict(),
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.config.privacy.clip_norm,
        }


def protect(
    config: Config,
    model: Model,
    clients: int,
    earlier: Mapping[str, Any] | None = None,
    released: Sequence[Release] = (),
    population: Population | None = None,
) -> Protection:
    """Return what protects the clients of a run.

    Args:
      config: the settings.
      model: what is trained.
      clients: how many train.
      earlier: `run.json` of the run to resume: its noise stays the same, however many rounds are planned now.
      released: what round zero gave away.
      population: compute the noise for these clients, and give the mean upload as much of it as theirs; None for those
        who train. For studies: it protects nobody who trains.
    """
    if not config.privacy.on:
        return Protection(config, _without_noise(config, model, clients))
    config = drawn_privately(config)
    actual = Population(clients, _per_round(config, clients))
    target = population or actual
    sampling_rate(*target)
    delta, randomness = delta_of(config, target), f"seed {config.seed}"
    ledger = Ledger(target.clients, delta, config.privacy.epsilon, tuple(released), randomness=randomness)
    noise = ((earlier or {}).get("privacy") or {}).get("noise_multiplier") or config.privacy.noise_multiplier
    if noise is None:
        release = _release(config, model, clients, actual.per_round) if config.aggregate.secure else None
        noise = rounds_noise(config, target, released, release)
    config, examples = with_rule(config, clients, noise / target.per_round)
    used = noise * actual.per_round / target.per_round
    if config.aggregate.secure:
        return Protection(config, _secure(config, clients, actual.per_round, used), examples, ledger, noise)
    return Protection(config, _private(config, actual.per_round, used), examples, ledger, noise)


def drawn_privately(config: Config) -> Config:
    """Draw clients as the noise assumes: independently or in turns, unless settings invite more than needed."""
    sampling = config.sampling
    if config.privacy.correlated is not None:
        sampling = dataclasses.replace(sampling, apart=config.privacy.correlated)
    elif sampling.oversample == 1 and sampling.apart is None:
        sampling = dataclasses.replace(sampling, poisson=True)
    return dataclasses.replace(config, sampling=sampling)


def _per_round(config: Config, clients: int) -> int:
    """Return how many take part in a round; if clients take turns, no more than each group has."""
    sampling = config.sampling
    most = clients // (sampling.apart or 1)
    if most < 1:
        raise ValueError(f"`correlated` must be at most {clients}, the number of clients (got {sampling.apart})")
    return min(sampling.cohort_size(clients), most)


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
    clip, model = MEDIAN if noise_in_mean < 1e-3 else SHORT, config.model
    noise = scaling * clients * clip * noise_in_mean  # in one entry of the gradient summed over everybody
    stronger = max(1.0, noise / USUAL) ** 2
    model = dataclasses.replace(model, prior=model.prior * stronger, implicit_prior=model.implicit_prior * stronger)
    if config.privacy.clip_norm is None:
        config = dataclasses.replace(config, privacy=dataclasses.replace(config.privacy, clip_norm=clip))
    return dataclasses.replace(config, model=model), scaling * clients


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


def _private(config: Config, per_round: float, noise: float) -> aggregators.Aggregator:
    settings = config.privacy
    assert settings.clip_norm is not None
    if settings.clip_quantile is not None:
        update_noise_for(noise, per_round / 20)  # its error says what to do if too few clients hide a count
    return aggregators.private(
        settings.clip_norm,
        noise,
        per_round=per_round,
        weigh="examples" if is_recipe(config) else "uniform",
        scales=fixed_scales(config),
        quantile=settings.clip_quantile,
        correlated=settings.correlated,
        rounds=config.rounds,
    )


def _secure(config: Config, clients: int, per_round: float, noise: float) -> aggregators.Aggregator:
    least = config.sampling.fewest(clients) if config.sampling.poisson else int(per_round)
    return aggregators.secure(
        config.privacy.clip_norm or 1.0,  # while noise is computed for a norm that is not chosen yet
        clients=config.sampling.capacity(clients),
        noise=aggregators.ClientNoise(noise, per_round, least, fixed_scales(config)),
        weigh="examples" if is_recipe(config) else "uniform",
    )


def _release(config: Config, model: Model, clients: int, per_round: float) -> Callable[[float], Release]:
    """Return what all rounds release with noise of the clients, as a function of the noise multiplier."""
    parts = {DELTA: flatten(jax.eval_shape(model.init_global, jax.random.key(0)))[0]}
    rate = config.sampling.rate(clients)

    def release(noise: float) -> Release:
        promise = _secure(config, clients, per_round, noise).release
        assert promise is not None
        return promise(parts)._replace(rate=rate, rounds=config.rounds)

    return release


def say_promise(protection: Protection) -> list[str]:
    """Return remarks on what is promised, before training."""
    config, ledger = protection.config, protection.ledger
    if ledger is None:
        return []
    remarks = [
        f"privacy: noise multiplier {protection.noise_multiplier:.4g}, clipping norm {config.privacy.clip_norm:g}"
    ]
    if ledger.releases:
        remarks.append(f"privacy: {budget_sentence(ledger.releases, ledger.delta, ledger.budget)}")
    if config.sampling.apart is not None:
        remarks.append(
            f"privacy: clients take turns, each at most once in {config.sampling.apart} rounds; the promise holds "
            "as long as they do, and relies on nothing else"
        )
    elif config.sampling.poisson:
        remarks.append("privacy: every client is drawn independently in every round (Poisson sampling)")
    else:
        remarks.append(
            "privacy: clients are not drawn by Poisson sampling, so random sampling adds no protection; without "
            "--sampling.oversample the same noise promises far more"
        )
    return [*remarks, f"privacy: {NOT_COVERED}"]
