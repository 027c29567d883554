"""Jobs of studies of ratings: their settings, their data, and how one is run."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import fedrecon as fr
from fedrecon._src.app.build import build_model, build_reconstruction, build_server, build_update, load_ratings
from fedrecon._src.app.config import Data, Factorization, Reconstruct, Server, Update
from fedrecon._src.core.progress import Progress, silent
from fedrecon.data import Ratings
from studies.study import Job

DIVISION = 0  # who trains, validates and tests: the same for all seeds, or one would test where another chose settings
MOST_EXAMPLES = 300
KEPT_PER_CLIENT = "rmse"  # the metric whose value for every single client is stored


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained and what is measured of it.

    Attributes:
      train: `fedrecon`; `fedavg`, user rows kept by their owners; `fedavg-dense`, a table of all user rows averaged
        like the rest; `centralized`, all examples in one place, in one round; `baselines`, means and biases of
        `fr.recommend.rating_baselines`, each of which is a measure.
      users: `unseen` tests on users that took no part; `seen` tests on the last tenth of everybody's ratings.
      measures: `recon` (reconstruct on support, measure on query), `kept` (StandardEval with local parameters from
        training), `random` (StandardEval with local parameters as they are initialised).
      split: support and query in training.
      rounds: how many rounds the row reports.
      on_to: continue to this many rounds and report that too.
      every: evaluate every n rounds; n divides `rounds`.
      few: also measure with only these numbers of support examples.
    """

    train: Literal["fedrecon", "fedavg", "fedavg-dense", "centralized", "baselines"] = "fedrecon"
    users: Literal["unseen", "seen"] = "unseen"
    measures: tuple[str, ...] = ("recon",)
    model: Factorization = field(default_factory=Factorization)
    split: str = "half"
    reconstruct: Reconstruct = field(default_factory=Reconstruct)
    update: Update = field(default_factory=Update)
    server: Server = field(default_factory=Server)
    clients_per_round: int = 100
    rounds: int = 500
    on_to: int | None = None
    every: int = 500
    few: tuple[int, ...] = ()

    @property
    def last_round(self) -> int:
        """How many rounds are run."""
        return self.on_to or self.rounds


class Parts(NamedTuple):
    """Ratings of one seed: to train on, to choose settings on, to report."""

    train: fr.Clients
    valid: fr.Clients
    test: fr.Clients


class Divided:
    """The ratings divided for one seed after another, the newest kept."""

    def __init__(self, ratings: Ratings, max_examples: int):
        """Divide `ratings`, using at most `max_examples` of a user to train."""
        self.ratings, self._most = ratings, max_examples
        self._made: dict[tuple[str, int], Parts] = {}

    def fingerprint(self) -> str:
        """Return a digest of the ratings."""
        return self.ratings.fingerprint()

    def facts(self) -> list[str]:
        """Say what the data is and how it is divided."""
        return [
            f"Data: {self.ratings.num_examples:,} ratings of {self.ratings.num_items:,} items by "
            f"{len(self.ratings):,} users (fingerprint {self.fingerprint()}).",
            "Unseen users: users divided at random 80/10/10, half of a user's ratings support, half query. "
            f"Seen users: every user's ratings divided 80/10/10 by time. At most {self._most} ratings of a user are "
            "used to train, after a shuffle.",
        ]

    def of(self, users: str, seed: int) -> Parts:
        """Return the parts of a seed, which shuffles everybody's ratings; who is in which part is always the same."""
        if (users, seed) not in self._made:
            if users == "seen":
                train, valid, test = self.ratings.split_time(0.8, 0.1, 0.1)
                parts = Parts(train.shuffle(seed).cap(self._most), valid, test)
            else:
                capped = self.ratings.shuffle(seed).cap(self._most)
                parts = Parts(*capped.split_clients(0.8, 0.1, 0.1, seed=DIVISION))
            self._made[users, seed] = parts
        return self._made[users, seed]


def open_ratings(source: str, folder: Path, progress: Progress = silent) -> Divided:
    """Open ratings by name or path."""
    del folder, progress
    return Divided(load_ratings(Data(source=source)), MOST_EXAMPLES)


class Trainer(NamedTuple):
    """A setting made ready: what trains, on what, and what evaluates the outcome.

    Attributes:
      algorithm: what trains.
      clients: `(clients, seed) -> the clients it trains on`.
      serving: the algorithm whose reconstruction and model serve users after training.
      shared: `trained global parameters -> those that serving has`.
      kept: `(trained global parameters, what clients kept) -> local parameters of the training clients`.
      evaluators: those made so far, by measure and number of support examples, to be used with other clients.
    """

    algorithm: fr.Algorithm
    clients: Any
    serving: fr.Algorithm
    shared: Any
    kept: Any
    evaluators: dict[tuple[str, int | None], fr.Evaluator]

    def evaluator(self, measure: str, clients: fr.Clients, support: int | None = None) -> fr.Evaluator:
        """Return an evaluator of some clients, with at most `support` support examples."""
        if (measure, support) in self.evaluators:
            return self.evaluators[measure, support].on(clients)
        split = fr.split.half() if support is None else fr.split.at_most(support, fr.split.half())
        protocol = "recon" if measure == "recon" else "standard"
        made = fr.Evaluator(self.serving, clients, protocol=protocol, split=split)
        self.evaluators[measure, support] = made
        return made


@functools.lru_cache(maxsize=2)
def make_trainer(setting: Setting, num_items: int, num_clients: int) -> Trainer:
    """Return the trainer of a setting, the same for all seeds, so that nothing is compiled for each of them."""
    model = build_model(setting.model, num_items)
    update = build_update(setting.update)
    server = build_server(setting.server)
    rebuild = build_reconstruction(setting.reconstruct)
    if setting.train == "fedrecon":
        algorithm = fr.federated_reconstruction(
            model,
            split=fr.split.named(setting.split),
            reconstruct=rebuild,
            update=update,
            server=server,
            joint=setting.update.joint,
            second_order=setting.update.second_order,
        )
        return Trainer(algorithm, _as_they_are, algorithm, lambda params: params, lambda params, kept: kept, {})
    serving = fr.federated_averaging(model, update=update, server=server, reconstruct=rebuild)
    if setting.train == "fedavg":
        return Trainer(serving, _as_they_are, serving, lambda params: params, lambda params, kept: kept, {})
    table = fr.models.client_table(model, num_clients)
    algorithm = fr.federated_averaging(table, update=update, server=server)

    def gather(clients: fr.Clients, seed: int) -> fr.Clients:
        return fr.with_owner(clients) if setting.train == "fedavg-dense" else fr.pooled(clients, seed=seed)

    return Trainer(
        algorithm, gather, serving, lambda params: params["shared"], lambda params, kept: params["locals"], {}
    )


def _as_they_are(clients: fr.Clients, seed: int) -> fr.Clients:
    del seed
    return clients


class Observer:
    """Evaluates during training, and remembers."""

    def __init__(self, setting: Setting, trainer: Trainer, clients: fr.Clients, seed: int):
        """Prepare to measure `clients`."""
        self._setting, self._trainer = setting, trainer
        self._clients, self._seed = clients, seed
        self._evaluators = {measure: trainer.evaluator(measure, clients) for measure in setting.measures}
        self.found: list[dict[str, Any]] = []
        self.per_client: dict[str, list[float | None]] = {}
        self.few: dict[str, Any] = {}

    def __call__(self, params: Any, kept: Any) -> fr.Evaluation:
        """Measure, in all the ways that the setting asks for; return the main one."""
        done = (len(self.found) + 1) * self._setting.every
        shared = self._trainer.shared(params)
        entry: dict[str, Any] = {"round": done}
        found = {
            measure: evaluator(shared, self._local(measure, params, kept))
            for measure, evaluator in self._evaluators.items()
        }
        for measure, one in found.items():
            entry[measure] = one.summary()
            if done == self._setting.rounds:
                values = one.per_client[KEPT_PER_CLIENT]
                self.per_client[measure] = [None if np.isnan(x) else round(float(x), 4) for x in values]
        self.found.append(entry)
        if done == self._setting.rounds:
            for n in self._setting.few:
                self.few[str(n)] = self._trainer.evaluator("recon", self._clients, n)(shared).summary()
        return found[self._setting.measures[0]]

    def _local(self, measure: str, params: Any, kept: Any) -> Any:
        if measure == "recon":
            return ()
        if measure == "kept":
            return self._trainer.kept(params, kept)
        keys = jax.random.split(jax.random.key(self._seed), len(self._clients))
        return jax.vmap(self._trainer.serving.model.init_local)(keys)


def run_job(
    setting: Setting, divided: Divided, seed: int, part: str = "test", progress: Progress = silent
) -> dict[str, Any]:
    """Train one setting with one seed and measure it on the users or ratings of a part.

    Returns:
      `evaluations` (one per measured round, by measure), `per_client` and `few` at the setting's number of rounds,
      `losses` of all rounds, `sent` (parameters to and from a client in a round), `global` and `local` (numbers of
      parameters), `trained_on` (how many users), `seconds`.
    """
    began = time.perf_counter()
    parts = divided.of(setting.users, seed)
    if setting.train == "baselines":
        return _measure_baselines(setting, parts, divided.ratings.num_items, part, began)
    trainer = make_trainer(setting, divided.ratings.num_items, len(parts.train))
    observer = Observer(setting, trainer, getattr(parts, part), seed)
    central = setting.train == "centralized"
    run = fr.train(
        trainer.algorithm,
        trainer.clients(parts.train, seed),
        rounds=setting.last_round,
        clients_per_round=1 if central else setting.clients_per_round,
        valid=observer,
        evaluate_every=setting.every,
        seed=seed,
        layout=fr.layout(1, 1) if central else None,
        progress=progress,
    )
    if run.interrupted:
        raise KeyboardInterrupt
    shared = count(run.params)
    return {
        "evaluations": observer.found,
        "per_client": observer.per_client,
        "few": observer.few,
        "losses": [round(entry["loss"], 5) for entry in run.history if entry["kind"] == "round"],
        "sent": 0 if central else 2 * shared,  # down and up
        "global": shared,
        "local": count(jax.eval_shape(trainer.algorithm.model.init_local, jax.random.key(0))),
        "trained_on": len(parts.train),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _measure_baselines(setting: Setting, parts: Parts, num_items: int, part: str, began: float) -> dict[str, Any]:
    """Measure baselines as `run_job` measures a training, on the same query examples."""
    found = fr.recommend.rating_baselines(
        parts.train, getattr(parts, part), num_items=num_items, which=setting.measures
    )
    measured = {
        name: {"micro": dict(row), "clients": found.clients, "diverged": 0, "examples": found.examples}
        for name, row in found.table.items()
    }
    return {
        "evaluations": [{"round": setting.rounds, **measured}],
        "per_client": {},
        "few": {},
        "losses": [],
        "sent": 0,
        "global": num_items,
        "local": 1,
        "trained_on": len(parts.train),
        "seconds": round(time.perf_counter() - began, 2),
    }


def count(tree: Any) -> int:
    """Count the numbers in a tree of arrays."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def shortened(job: Job, rounds: int = 40, epochs: int = 3) -> Job:
    """Return a job that runs for fewer rounds, and not beyond them, or fewer epochs if it is centralized."""
    setting = job.setting
    if setting.train == "centralized":
        update = dataclasses.replace(setting.update, epochs=min(setting.update.epochs, epochs))
        return dataclasses.replace(job, setting=dataclasses.replace(setting, update=update))
    done = min(setting.rounds, rounds)
    every = max(1, min(setting.every, done // 5) if setting.every < setting.rounds else done)
    few = setting.few[:1]  # each is compiled separately
    while done % every:
        every -= 1
    return dataclasses.replace(job, setting=dataclasses.replace(setting, rounds=done, on_to=None, every=every, few=few))
