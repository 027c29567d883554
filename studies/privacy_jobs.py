"""Jobs of the study of privacy: training with noise, measured on users who took no part, and attacked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

import fedrecon as fr
from fedrecon._src.app.budget import Population
from fedrecon._src.app.build import build_algorithm, build_reconstruction, build_server, build_update
from fedrecon._src.app.config import Privacy, RatingsConfig, Update
from fedrecon._src.app.presets import DEFAULT
from fedrecon._src.app.protection import Protection, protect
from fedrecon._src.app.tasks.factors import FOUND, Items, prepare_privately, prepare_ratings, ridges_of
from fedrecon._src.app.tasks.task import Ready, Users
from fedrecon._src.client.optimizers import keep_constant, with_prior
from fedrecon._src.core.progress import Progress, silent
from studies.numbers import number
from studies.rating_jobs import MOST_EXAMPLES, Divided, count, open_ratings
from studies.study import Job, Kind

ATTACKED = 100
TOGETHER = 50
BIASES = "item + user bias"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained with noise.

    Attributes:
      train: `fedrecon`; or `everything global`, where users' embeddings and biases are rows of tables on the server.
      dim: length of the embeddings.
      epsilon: the budget of round zero and all rounds; None trains without clipping and noise.
      population: compute the noise for this many clients, of whom `cohort` take part in a round, and scale it so that
        sums and mean uploads have as much of it as theirs; None for those that there are.
      cohort: how many of that population take part in a round.
      rounds: how many rounds.
    """

    train: Literal["fedrecon", "everything global"] = "fedrecon"
    dim: int = 16
    epsilon: float | None = None
    population: int | None = None
    cohort: int | None = None
    rounds: int = 200
    on_to: int | None = None
    every: int = 200
    measures: tuple[str, ...] = ("recon",)

    @property
    def last_round(self) -> int:
        """How many rounds are run."""
        return self.rounds

    @property
    def noise_of(self) -> Population | None:
        """The population that noise is computed for; None for those who train."""
        return None if self.population is None else Population(self.population, self.cohort or self.population / 10)


def _config(setting: Setting, seed: int) -> RatingsConfig:
    """Return the recipe's settings."""
    private = setting.train == "fedrecon"
    model = dataclasses.replace(DEFAULT.model, dim=setting.dim, implicit_feedback=private)
    split = DEFAULT.split if private else dataclasses.replace(DEFAULT.split, train="none")
    return dataclasses.replace(
        DEFAULT,
        model=model,
        split=split,
        privacy=Privacy(epsilon=setting.epsilon),
        sampling=fr.Sampling(None, poisson=True),
        rounds=setting.rounds,
        seed=seed,
    )


def _prepared(setting: Setting, divided: Divided, seed: int) -> tuple[Ready, Protection]:
    """Run round zero, and compute the noise of the rounds."""
    config, ratings = _config(setting, seed), divided.ratings
    users, items = Users(*divided.of("unseen", seed)), Items(np.asarray(ratings.item_ids))
    if setting.epsilon is None:
        ready = prepare_ratings(config, ratings, users, items)
    else:
        ready = prepare_privately(config, ratings, users, items, setting.noise_of)
    return ready, protect(
        ready.config, ready.model, len(users.train), released=ready.releases, population=setting.noise_of
    )


def _algorithms(setting: Setting, ready: Ready, protection: Protection) -> tuple[fr.Algorithm, fr.Algorithm]:
    """Return what trains, and what serves users after training."""
    config, train = protection.config, ready.users.train
    assert isinstance(config, RatingsConfig)
    examples = train.num_examples if protection.examples is None else protection.examples
    if setting.train == "fedrecon":
        algorithm = build_algorithm(config, ready.model, examples, protection.aggregator)
        return algorithm, algorithm
    ridges: Any = ridges_of(config)
    priors = {"*item_embedding": config.model.prior, "*user_embedding": 2 * ridges["*"]}
    priors |= {f"*{name}": 2 * float(np.mean(ridges[name])) for name in ("user_bias", "user_traits")}
    server = with_prior(build_server(config.server, config.rounds), priors, examples=examples)
    update = build_update(Update(learning_rate=1.0, steps=1, batch_size=MOST_EXAMPLES))
    serving = build_reconstruction(config.reconstruct, ridges)
    return (
        fr.federated_averaging(
            fr.models.client_table(ready.model, len(train)),
            update=update,
            server=keep_constant(server, FOUND),
            aggregate=protection.aggregator,
        ),
        fr.federated_averaging(ready.model, update=update, server=server, reconstruct=serving),
    )


def run_job(
    setting: Setting, divided: Divided, seed: int, part: str = "test", progress: Progress = silent
) -> dict[str, Any]:
    """Train one setting with one seed, measure it on users who took no part, and attack its uploads."""
    began = time.perf_counter()
    ready, protection = _prepared(setting, divided, seed)
    algorithm, serving = _algorithms(setting, ready, protection)
    everything = setting.train != "fedrecon"
    measured, train = getattr(ready.users, part), ready.users.train
    evaluator = fr.Evaluator(serving, measured, split=fr.split.half())
    found: list[dict[str, Any]] = []

    def observe(params: Any, kept: Any) -> fr.Evaluation:
        del kept
        one = evaluator(params["shared"] if everything else params)
        found.append({"round": (len(found) + 1) * setting.every, "recon": one.summary()})
        return one

    run = fr.train(
        algorithm,
        fr.with_owner(train) if everything else train,
        rounds=setting.rounds,
        sampling=protection.config.sampling,
        valid=observe,
        evaluate_every=setting.every,
        seed=seed,
        progress=progress,
    )
    if run.interrupted:
        raise KeyboardInterrupt
    table = fr.recommend.rating_baselines(
        train, measured, split=fr.split.half(), num_items=divided.ratings.num_items, which=(BIASES,)
    ).table
    ledger = protection.ledger
    return {
        "evaluations": found,
        "losses": [],
        "sent": 2 * count(run.params),
        "global": count(run.params),
        "biases": table[BIASES]["rmse"],
        "noise": protection.noise_multiplier,
        "clip": protection.config.privacy.clip_norm,
        "delta": None if ledger is None else ledger.delta,
        "round_zero": None if ledger is None else ledger.epsilon,
        "trained_on": len(train),
        "leakage": _attack(algorithm, run.params, train, protection.noise_multiplier, everything),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _attack(
    algorithm: fr.Algorithm, params: Any, train: fr.Clients, noise: float | None, everything: bool
) -> dict[str, Any] | None:
    """Attack a plain upload without privacy, and the noised sum of a few dozen people with it."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        return None
    people = (fr.with_owner(train) if everything else train).take(np.arange(ATTACKED))
    multiplier = 1.0 if noise is None else noise
    found = fr.leakage(algorithm, params, people, groups=(TOGETHER,), noise_multiplier=multiplier, most=ATTACKED)
    chosen = found.exposures[0 if noise is None else -2]
    return {name: None if value != value else value for name, value in chosen._asdict().items()}


def shortened(job: Job, rounds: int = 20) -> Job:
    """Return a job that runs for fewer rounds."""
    done = min(job.setting.rounds, rounds)
    return dataclasses.replace(job, setting=dataclasses.replace(job.setting, rounds=done, every=done))


def describe(setting: Setting) -> tuple[str, ...]:
    """Return one cell under each head of the table of settings."""
    budget = "none" if setting.epsilon is None else f"{setting.epsilon:g}"
    of = f"{setting.population:,}, {setting.cohort:,} a round" if setting.population else "those there are"
    return setting.train, str(setting.dim), budget, of, f"{setting.rounds}"


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
    heads=("training", "dim", "epsilon", "noise of so many clients", "rounds"),
    describe=describe,
)
