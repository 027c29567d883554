"""Jobs of the study of privacy: training with noise, measured on users who took no part, and attacked."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import optax

import fedrecon as fr
from fedrecon.privacy.accounting import default_delta, noise_for
from fedrecon.progress import Progress, silent
from fedrecon.studies.numbers import number
from fedrecon.studies.rating_jobs import Divided, count, open_ratings
from fedrecon.studies.study import Job, Kind

MIDDLE = 3.5  # where the global mean starts: about the middle of the scale, which is public, and no mean of ratings
ATTACKED = 100
TOGETHER = 50


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained with noise.

    Attributes:
      train: `fedrecon`; or `everything global`, where the rows of users are in a table that the server averages, too.
      dim: length of the embeddings.
      epsilon: the budget of all rounds; None trains without clipping and noise.
      clip: the clipping norm.
      population: compute the noise for so many clients, of whom `cohort` take part in a round, and scale it so that the
        mean upload has as much of it; None for those that there are.
      cohort: of that population.
      clients_per_round: how many take part here, on average.
      learning_rate: of the server.
      rounds: how many.
    """

    train: Literal["fedrecon", "everything global"] = "fedrecon"
    dim: int = 8
    epsilon: float | None = None
    clip: float = 0.4  # the median norm of uploads after 100 rounds without noise
    population: int | None = None
    cohort: int | None = None
    clients_per_round: int = 200
    learning_rate: float = 3.0
    rounds: int = 300
    on_to: int | None = None
    every: int = 300
    measures: tuple[str, ...] = ("recon",)

    @property
    def last_round(self) -> int:
        """How many rounds are run."""
        return self.rounds


class Noise:
    """The noise of a setting, given how many clients there are.

    Attributes:
      here: noise multiplier in this training; None for none.
      there: noise multiplier of the population that is meant.
      delta: of the promise.
    """

    def __init__(self, setting: Setting, clients: int):
        """Compute it."""
        self.here = self.there = self.delta = None
        if setting.epsilon is None:
            return
        population, cohort = setting.population or clients, setting.cohort or setting.clients_per_round
        self.delta = default_delta(population)
        self.there = noise_for(setting.epsilon, clients=population, per_round=cohort, rounds=setting.rounds)
        self.here = self.there * setting.clients_per_round / cohort


@functools.lru_cache(maxsize=2)
def _algorithms(setting: Setting, noise: float | None, items: int, clients: int) -> tuple[fr.Algorithm, fr.Algorithm]:
    """Return what trains, and what serves users after training."""
    model = fr.models.matrix_factorization(items, setting.dim, biases=True, init_mean=MIDDLE, init_scale=0.1)
    rebuild = fr.least_squares(2.0)
    update = fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=60)
    server = optax.sgd(setting.learning_rate, momentum=0.9)
    aggregate = fr.aggregate.mean("uniform")
    if noise is not None:
        aggregate = fr.aggregate.private(setting.clip, noise, per_round=setting.clients_per_round)
    if setting.train == "fedrecon":
        algorithm = fr.federated_reconstruction(
            model,
            split=fr.split.redrawn(fr.split.half()),
            reconstruct=rebuild,
            update=update,
            server=server,
            aggregate=aggregate,
        )
        return algorithm, algorithm
    serving = fr.federated_averaging(model, update=update, server=server, reconstruct=rebuild)
    table = fr.models.client_table(model, clients)
    return fr.federated_averaging(table, update=update, server=server, aggregate=aggregate), serving


def run_job(
    setting: Setting, divided: Divided, seed: int, part: str = "test", progress: Progress = silent
) -> dict[str, Any]:
    """Train one setting with one seed, measure it on users who took no part, and attack its uploads."""
    began = time.perf_counter()
    parts = divided.of("unseen", seed)
    noise = Noise(setting, len(parts.train))
    algorithm, serving = _algorithms(setting, noise.here, divided.ratings.num_items, len(parts.train))
    everything = setting.train != "fedrecon"
    evaluator = fr.Evaluator(serving, getattr(parts, part), split=fr.split.half())
    found: list[dict[str, Any]] = []

    def observe(params: Any, kept: Any) -> fr.Evaluation:
        del kept
        one = evaluator(params["shared"] if everything else params)
        found.append({"round": (len(found) + 1) * setting.every, "recon": one.summary()})
        return one

    run = fr.train(
        algorithm,
        fr.with_owner(parts.train) if everything else parts.train,
        rounds=setting.rounds,
        sampling=fr.Sampling(setting.clients_per_round, poisson=True),
        valid=observe,
        evaluate_every=setting.every,
        seed=seed,
        progress=progress,
    )
    if run.interrupted:
        raise KeyboardInterrupt
    return {
        "evaluations": found,
        "losses": [],
        "sent": 2 * count(run.params),
        "global": count(run.params),
        "noise": noise.there,
        "delta": noise.delta,
        "trained_on": len(parts.train),
        "leakage": _attack(setting, algorithm, run.params, parts.train, noise, everything),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _attack(
    setting: Setting, algorithm: fr.Algorithm, params: Any, train: fr.Clients, noise: Noise, everything: bool
) -> dict[str, Any] | None:
    """Attack a plain upload without privacy, and the noised sum of a few dozen people with it."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        return None
    people = (fr.with_owner(train) if everything else train).take(np.arange(ATTACKED))
    multiplier = 1.0 if noise.there is None else noise.there
    found = fr.leakage(
        algorithm, params, people, groups=(TOGETHER,), clip=setting.clip, noise_multiplier=multiplier, most=ATTACKED
    )
    chosen = found.exposures[0 if noise.there is None else -2]
    return {name: None if value != value else value for name, value in chosen._asdict().items()}


def shortened(job: Job, rounds: int = 20) -> Job:
    """Return a job that runs for fewer rounds."""
    done = min(job.setting.rounds, rounds)
    return dataclasses.replace(job, setting=dataclasses.replace(job.setting, rounds=done, every=done))


def describe(setting: Setting) -> tuple[str, ...]:
    """Return one cell under each head of the table of settings."""
    budget = "none" if setting.epsilon is None else f"{setting.epsilon:g}"
    of = f"{setting.population:,}, {setting.cohort:,} a round" if setting.population else "those there are"
    return setting.train, str(setting.dim), budget, of, f"{setting.clip:g}", f"{setting.rounds}"


def _tell(micro: Mapping[str, Any]) -> str:
    return f"RMSE {number(micro['rmse']):.4f}"


def _loss(micro: Mapping[str, Any]) -> float:
    return number(micro["rmse"])


PRIVACY = Kind(
    open=open_ratings,
    run=run_job,
    shorten=shortened,
    tell=_tell,
    loss=_loss,
    heads=("training", "dim", "epsilon", "noise of so many clients", "clipping norm", "rounds"),
    describe=describe,
)
