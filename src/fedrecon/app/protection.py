"""What settings promise the clients of a run: an aggregator, and a ledger of what it costs."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedrecon import aggregate
from fedrecon.app.build import build_aggregator, build_weights
from fedrecon.app.config import Config
from fedrecon.model import Model
from fedrecon.privacy.accounting import default_delta, noise_for, sampling_rate, update_noise_for
from fedrecon.privacy.ledger import NOT_COVERED, Ledger

RARE = 1e-12  # the probability with which fewer clients take part than are counted on for noise


class Protection(NamedTuple):
    """What protects the clients of a run.

    Attributes:
      aggregator: how updates become one.
      ledger: before the first round; None where nothing is promised.
      noise_multiplier: of all that a round releases; None without noise.
    """

    aggregator: aggregate.Aggregator
    ledger: Ledger | None = None
    noise_multiplier: float | None = None

    def facts(self) -> dict[str, Any] | None:
        """Return what `run.json` says before the first round."""
        if self.ledger is None:
            return None
        return {**self.ledger.to_dict(), "noise_multiplier": self.noise_multiplier}


def protect(config: Config, model: Model, clients: int, earlier: dict[str, Any] | None = None) -> Protection:
    """Return what protects the clients of a run.

    Args:
      config: the settings.
      model: what is trained.
      clients: how many train.
      earlier: `run.json` of the run that goes on: its noise stays as it was, however many rounds are planned now.
    """
    settings, sampling = config.privacy, config.sampling
    per_round = min(sampling.wanted(clients), clients)
    if not settings.on:
        if not config.aggregate.secure:
            return Protection(build_aggregator(config, model))
        assert config.aggregate.clip_norm is not None
        most = sampling.capacity(clients)
        weigh = build_weights(config, model)
        return Protection(aggregate.secure(config.aggregate.clip_norm, clients=most, weigh=weigh))
    assert settings.clip_norm is not None
    if getattr(config.model, "round_zero", False):
        raise ValueError(
            "round zero reads sums over everybody's ratings, and those get no noise; with --privacy options use "
            "--preset paper, which has no round zero"
        )
    try:
        sampling_rate(clients, per_round)
        delta = default_delta(clients) if settings.delta is None else settings.delta
        ledger = Ledger(clients, delta, settings.epsilon, randomness=f"seed {config.seed}")
        noise = ((earlier or {}).get("privacy") or {}).get("noise_multiplier") or settings.noise_multiplier
        if noise is None:
            noise = _noise(config, clients, per_round, delta)
    except ImportError as problem:
        raise ValueError(str(problem)) from problem
    if config.aggregate.secure:
        return Protection(_secure(config, clients, per_round, noise), ledger, noise)
    if settings.clip_quantile is not None:
        update_noise_for(noise, per_round / 20)  # says what to do where so few clients cannot hide a count
    aggregator = aggregate.private(settings.clip_norm, noise, per_round=per_round, quantile=settings.clip_quantile)
    return Protection(aggregator, ledger, noise)


def _noise(config: Config, clients: int, per_round: int, delta: float) -> float:
    assert config.privacy.epsilon is not None
    if config.rounds < 1:
        raise ValueError("there are no rounds to spend a privacy budget on")
    drawn = per_round if config.sampling.poisson else clients
    # A little below, so that what too few places cost (`Sampling.overflow_delta`) fits, too.
    epsilon = config.privacy.epsilon * (1 - 1e-4)
    return noise_for(epsilon, clients=clients, per_round=drawn, rounds=config.rounds, delta=delta)


def _secure(config: Config, clients: int, per_round: int, noise: float) -> aggregate.Aggregator:
    assert config.privacy.clip_norm is not None
    least = per_round
    if config.sampling.poisson:
        from scipy.stats import binom

        least = max(1, int(binom.ppf(RARE, clients, config.sampling.rate(clients))))
    most = config.sampling.capacity(clients)
    return aggregate.secure(
        config.privacy.clip_norm, clients=most, noise_multiplier=noise, per_round=per_round, least=least
    )


def say_promise(config: Config, protection: Protection) -> list[str]:
    """Return remarks on what is promised, before training."""
    if protection.ledger is None:
        return []
    remarks = [
        f"privacy: noise multiplier {protection.noise_multiplier:.4g}, clipping norm {config.privacy.clip_norm:g}"
    ]
    if not config.sampling.poisson:
        remarks.append(
            "privacy: clients are not drawn by Poisson sampling, so no protection by chance is counted; with "
            "--sampling.poisson the same noise promises far more"
        )
    return [*remarks, f"privacy: {NOT_COVERED}"]
