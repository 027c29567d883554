"""Differential privacy of a deployed training: what a plan promises, and who adds which noise.

The unit is one user of a node, never the node: every user's change is clipped by itself before a node adds them up. If
sums are open, the server adds Gaussian noise, and the promise holds against everybody but the server. If they are
secure, every node adds its share of integer noise before it masks its sum. The plan's least number of nodes together
add all of the noise, and the server never sees a sum without it.

All noise is drawn from the system's entropy. So are the users of a node that take part in a round: only the node knows
who they are, and the accounting takes the plan's share of users as their probability. A node counts its answers over
all runs of a plan, and stops answering when the promise is used up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedrecon._src import server as aggregators
from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.model import Model
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.core.upload import DELTA, Total
from fedrecon._src.privacy.accounting import Release, default_delta, noise_for
from fedrecon._src.privacy.ledger import Ledger
from fedrecon._src.privacy.noise import system_generator
from fedrecon._src.recommend.config import ClicksConfig, Config
from fedrecon._src.recommend.protection import is_recipe
from fedrecon._src.server.fixed_point import add_noise

if TYPE_CHECKING:
    from fedrecon._src.deploy.plan import Plan

ROOM = 4  # sums do not overflow even with this many times the users that the plan says


def parts_of(algorithm: Algorithm) -> Any:
    """Return the shapes of what uploads add up to."""
    return algorithm.method.parts(jax.eval_shape(algorithm.method.init, jax.random.key(0)))


def answers_of(rounds: int) -> int:
    """Return how often a node answers at most: once per round, with some rounds repeated."""
    return rounds + rounds // 10 + 1


def release_of(plan: Plan) -> Release | None:
    """Return what a round of a plan releases; None for a plan that promises nothing."""
    release = plan.algorithm.aggregator.release
    return None if release is None else release(parts_of(plan.algorithm))._replace(rate=float(plan.share))


def spent(plan: Plan, rounds: int) -> Ledger | None:
    """Return what was spent after this many rounds; None for a plan that promises nothing."""
    if plan.release is None:
        return None
    delta = default_delta(plan.users) if plan.delta is None else plan.delta
    return Ledger(plan.users, delta, None, (plan.release._replace(rounds=rounds),) if rounds else ())


def problem_of(plan: Plan) -> str | None:
    """Say why a plan cannot keep its promise; None if it can, or promises nothing."""
    release, share = plan.algorithm.aggregator.release, plan.algorithm.aggregator.share
    if release is None:
        return None
    each = release(parts_of(plan.algorithm))
    if plan.users < 2:
        return "noise hides a user among others: give --users N, the number of users of all nodes together"
    if plan.least_users > 1:
        return "with noise, set `least_users` to 1: leaving out small nodes would reveal that they are small"
    if each.apart is not None:
        return "correlated noise needs clients that take turns, which nodes do not promise; leave out `correlated`"
    if each.mechanism == "gaussian":
        return None
    if not plan.secure:
        return "noise of the nodes protects nobody if the server sees single nodes' sums; use secure sums"
    if share is None:
        return "noise of the nodes would be simulated; use aggregators.secure(..., simulated_noise=False)"
    if share(parts_of(plan.algorithm)).least > plan.least_nodes:
        return (
            f"{share(parts_of(plan.algorithm)).least} nodes are needed to add the promised noise, and the plan "
            f"allows sums of {plan.least_nodes}: raise least_nodes"
        )
    return None


# ---- plans of settings ----


def with_noise(config: Config, model: Model, users: int, options: dict[str, Any]) -> Config:
    """Return settings that say how much noise there is, also if they give only an epsilon.

    Raises:
      ValueError: a deployment cannot keep what the settings promise.
    """
    privacy = config.privacy
    if not privacy.on:
        return config
    if isinstance(config, ClicksConfig):
        raise ValueError("for clicks, nodes count the users of each item without noise: leave out --privacy options")
    if is_recipe(config):
        raise ValueError(
            "round zero of a deployment has no noise, so nothing could be promised: with --privacy options use "
            "--preset paper, which has no round zero"
        )
    if privacy.correlated is not None or (privacy.clip_quantile is not None and options.get("secure")):
        raise ValueError("nodes add independent noise for one clipping norm: leave out correlated and clip_quantile")
    if users < 2:
        raise ValueError("with --privacy options, give --users, the number of users of all nodes together")
    if privacy.noise_multiplier is not None:
        return config
    assert privacy.epsilon is not None
    share, rounds = float(options.get("share", 1.0)), answers_of(config.rounds)
    parts = {DELTA: flatten(jax.eval_shape(model.init_global, jax.random.key(0)))[0]}

    def release(noise: float) -> Release:
        chosen = dataclasses.replace(config, privacy=dataclasses.replace(privacy, noise_multiplier=noise))
        found = aggregator_of(chosen, users, options)
        assert found is not None
        assert found.release is not None
        return found.release(parts)._replace(rate=share, rounds=rounds)

    noise = noise_for(
        privacy.epsilon, clients=users, per_round=share * users, rounds=rounds, delta=privacy.delta, release=release
    )
    return dataclasses.replace(config, privacy=dataclasses.replace(privacy, noise_multiplier=noise))


def aggregator_of(config: Config, users: int, options: dict[str, Any]) -> aggregators.Aggregator | None:
    """Return the aggregator of a plan's updates; None for the one of the settings."""
    settings = config.privacy
    if settings.noise_multiplier is None:
        return None
    assert settings.clip_norm is not None
    per_round = float(options.get("share", 1.0)) * users
    if not options.get("secure"):
        return aggregators.private(
            settings.clip_norm, settings.noise_multiplier, per_round=per_round, quantile=settings.clip_quantile
        )
    least = int(options.get("least_nodes", 1))
    return aggregators.secure(
        settings.clip_norm,
        clients=max(ROOM * users, least),
        noise_multiplier=settings.noise_multiplier,
        per_round=per_round,
        least=least,
        simulated_noise=False,
    )


# ---- on a node ----


def taking_part(users: Any, share: float) -> Any:
    """Return the users of a node that train in a round, each drawn by itself; nobody else knows who they are."""
    return users.take(system_generator().random(len(users)) < share)


def noised(
    algorithm: Algorithm, total: Total, generator: Callable[[], np.random.Generator] = system_generator
) -> Total:
    """Add a node's share of the noise to its sum, if nodes add any."""
    if algorithm.aggregator.share is None:
        return total
    return add_noise(algorithm.aggregator.share(parts_of(algorithm)), total, generator())
