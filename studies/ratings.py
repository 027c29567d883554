"""Studies of ratings: their data, how a job is run, and their tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

import fedrecon as fr
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.recommend.config import Config, Data, RatingsConfig
from fedrecon._src.recommend.rating_model import build_model
from fedrecon._src.recommend.recipe import build_descent, build_reconstruction, build_server
from fedrecon._src.recommend.tasks import build_algorithm
from fedrecon._src.recommend.tasks.ratings import load_ratings
from fedrecon.data import Ratings
from studies.study import (
    Block,
    Job,
    Kind,
    Result,
    Results,
    Section,
    Spread,
    Table,
    as_float,
    evaluation_at,
    missing_jobs,
    reported_rounds,
    spread,
)
from studies.training import baseline_result, train

DIVISION_SEED = 0  # one division for all seeds, or one would test where another chose settings
MAX_EXAMPLES = 300


class Division(NamedTuple):
    """Clients to train on, to choose settings on, and to report."""

    train: fr.Clients
    valid: fr.Clients
    test: fr.Clients


class RatingsData:
    """Ratings, divided for each seed."""

    def __init__(self, ratings: Ratings, max_examples: int = MAX_EXAMPLES):
        """Use at most `max_examples` of a user's ratings to train."""
        self.ratings, self._max_examples = ratings, max_examples
        self.divide = functools.lru_cache(maxsize=8)(self._divide)

    def fingerprint(self) -> str:
        """Return a digest of the ratings."""
        return self.ratings.fingerprint()

    def facts(self) -> list[str]:
        """Describe the data and how it is divided."""
        return [
            f"Data: {self.ratings.num_examples:,} ratings of {self.ratings.num_items:,} items by "
            f"{len(self.ratings):,} users (fingerprint {self.fingerprint()}).",
            "Unseen users: users divided at random 80/10/10, half of a user's ratings support, half query. Seen users: "
            f"every user's ratings divided 80/10/10 by time. Training uses at most {self._max_examples} ratings of a "
            "user, after a shuffle.",
        ]

    def _divide(self, users: str, seed: int) -> Division:
        """Shuffle everybody's ratings with a seed, and divide users (`unseen`) or their ratings (`seen`)."""
        if users == "seen":
            train, valid, test = self.ratings.split_time(0.8, 0.1, 0.1)
            return Division(train.shuffle(seed).cap(self._max_examples), valid, test)
        capped = self.ratings.shuffle(seed).cap(self._max_examples)
        return Division(*capped.split_clients(0.8, 0.1, 0.1, seed=DIVISION_SEED))


def load(source: str, progress: Progress = silent) -> RatingsData:
    """Load ratings by name or path."""
    del progress
    return RatingsData(load_ratings(Data(source=source)))


@dataclass(frozen=True)
class Method:
    """A job made ready for all seeds, so that nothing is compiled for each of them.

    Attributes:
      algorithm: trains.
      serving: reconstructs for users after training.
      clients: `(clients, seed) -> the clients to train on`.
      shared: `trained parameters -> the global parameters of serving`.
      local: `(trained parameters, local state) -> local parameters of the training clients`.
    """

    algorithm: fr.Algorithm
    serving: fr.Algorithm
    clients: Callable[[fr.Clients, int], fr.Clients] = lambda clients, seed: clients
    shared: Callable[[Any], Any] = lambda params: params
    local: Callable[[Any, Any], Any] = lambda params, local_state: local_state

    @functools.cached_property
    def _evaluators(self) -> dict[tuple[str, int | None], fr.Evaluator]:
        return {}

    def evaluator(self, measure: str, clients: fr.Clients, support: int | None = None) -> fr.Evaluator:
        """Return an evaluator for some clients, with at most `support` support examples."""
        key = (measure, support)
        if key in self._evaluators:
            return self._evaluators[key].on(clients)
        split = fr.split.half() if support is None else fr.split.at_most(support, fr.split.half())
        protocol = "recon" if measure == "recon" else "standard"
        self._evaluators[key] = fr.Evaluator(self.serving, clients, protocol=protocol, split=split)
        return self._evaluators[key]


@functools.lru_cache(maxsize=2)
def make_method(name: str, config: RatingsConfig, num_items: int, num_clients: int) -> Method:
    """Return `fedrecon`; `fedavg` (clients keep their rows); `fedavg-dense` (rows averaged); or `centralized`."""
    model = build_model(config.model, num_items)
    if name == "fedrecon":
        algorithm = build_algorithm(config, model)
        return Method(algorithm, algorithm)
    update, server = build_descent(config.update), build_server(config.server)
    rebuild = build_reconstruction(config.reconstruct)
    serving = fr.federated_averaging(model, update=update, server=server, reconstruct=rebuild)
    if name == "fedavg":
        return Method(serving, serving)
    table = fr.models.client_table(model, num_clients)
    return Method(
        fr.federated_averaging(table, update=update, server=server),
        serving,
        lambda clients, seed: (
            fr.data.with_owner(clients) if name == "fedavg-dense" else fr.data.pooled(clients, seed=seed)
        ),
        lambda params: params["shared"],
        lambda params, local_state: params["locals"],
    )


def run_job(job: Job, data: RatingsData, seed: int, part: str = "test", progress: Progress = silent) -> dict[str, Any]:
    """Train a job with one seed and measure it on the users or ratings of a part.

    Measures are `recon` (reconstruct on support, measure on query), `trained` (StandardEval with local parameters from
    training), `random` (StandardEval with initial local parameters), or names of baselines. The result also has
    `per_client` (RMSE) and `few` (by number of support examples), at the number of rounds that the row reports.
    """
    division = data.divide(job.users, seed)
    clients = getattr(division, part)
    if job.method == "baselines":
        table = fr.recommend.rating_baselines(division.train, clients, num_items=data.ratings.num_items)
        if unknown := set(job.measures) - set(table.table):
            raise ValueError(f"`measures` must be among {list(table.table)} (got {sorted(unknown)})")
        facts = {"clients": table.clients, "diverged": 0, "examples": table.examples}
        measured = {name: {"micro": dict(table.table[name]), **facts} for name in job.measures}
        return baseline_result(job, measured, len(division.train))
    assert isinstance(job.config, RatingsConfig)
    method = make_method(job.method, job.config, data.ratings.num_items, len(division.train))
    evaluators = {measure: method.evaluator(measure, clients) for measure in job.measures}
    per_client: dict[str, list[float | None]] = {}
    few: dict[str, Any] = {}

    def local_params(measure: str, params: Any, local_state: Any) -> Any:
        if measure == "trained":
            return method.local(params, local_state)
        keys = jax.random.split(jax.random.key(seed), len(clients))
        return jax.vmap(method.serving.model.init_local)(keys) if measure == "random" else ()

    def measure_all(rounds: int, params: Any, local_state: Any) -> Mapping[str, fr.Evaluation]:
        shared = method.shared(params)
        measured = {name: run(shared, local_params(name, params, local_state)) for name, run in evaluators.items()}
        if rounds == job.config.rounds:
            for name, evaluation in measured.items():
                rmse = evaluation.per_client["rmse"]
                per_client[name] = [None if np.isnan(value) else round(float(value), 4) for value in rmse]
            for number in job.few:
                few[str(number)] = method.evaluator("recon", clients, number)(shared).summary()
        return measured

    train_clients = method.clients(division.train, seed)
    _, result = train(job, method.algorithm, train_clients, measure_all, seed=seed, progress=progress)
    return result | {"per_client": per_client, "few": few, "clients": len(division.train)}


KIND = Kind(load, run_job, metrics=("rmse", "accuracy"))


# ---- tables ----


class Scores(NamedTuple):
    """RMSE and accuracy (in percent) over all examples, after `rounds` rounds (1 for centralized training)."""

    rmse: Spread
    accuracy: Spread
    rounds: int
    users: int
    diverged: float

    def describe(self, name: str) -> str:
        """Write the scores in a phrase."""
        diverged = f", {self.diverged:.1f} of {self.users} users diverged" if self.diverged else ""
        rounds = f" after {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{name}: RMSE {self.rmse.mean:.3f}, accuracy {self.accuracy.mean:.1f} %{rounds}{diverged}"


def scores(results: Sequence[Result], measure: str = "recon", rounds: int | None = None) -> Scores:
    """Average what the seeds of a job scored after `rounds`, by default as many as its row reports."""
    rounds = rounds or reported_rounds(results[0])
    return _average([evaluation_at(result, rounds)[measure] for result in results], rounds)


def scores_with_few(results: Sequence[Result], support: int) -> Scores:
    """Average what was scored with only `support` support examples."""
    return _average([result["few"][str(support)] for result in results], reported_rounds(results[0]))


def _average(entries: Sequence[Any], rounds: int) -> Scores:
    return Scores(
        spread([as_float(entry["micro"]["rmse"]) for entry in entries]),
        spread([100 * as_float(entry["micro"]["accuracy"]) for entry in entries]),
        rounds,
        int(entries[0]["clients"]),
        spread([entry["diverged"] for entry in entries]).mean,
    )


@dataclass(frozen=True)
class Row:
    """A row of a table: one measure of a job, and the paper's RMSE and accuracy if it has them."""

    title: str
    job: str
    measure: str = "recon"
    paper: tuple[float, float] | None = None


def paper_section(rows: Sequence[Row]) -> Section:
    """Return the section of the paper's rows."""
    note = (
        "RMSE and accuracy (a prediction within half a star) are over all query examples of all users, mean ± standard "
        "deviation over seeds. Diverged users are counted, and are in no mean."
    )
    header = ("", "RMSE", "paper", "difference", "accuracy %", "paper", "difference", "rounds", "users", "diverged")

    def cells(row: Row, score: Scores, settings: Any) -> tuple[str, ...]:
        rounds = f"{settings['update']['epochs']} epochs" if row.job.startswith("centralized") else str(score.rounds)
        return (
            *_next_to_paper(score.rmse, row.paper and row.paper[0], 3),
            *_next_to_paper(score.accuracy, row.paper and row.paper[1], 1),
            "none" if row.job == "baselines" else rounds,
            str(score.users),
            f"{score.diverged:.1f}".removesuffix(".0"),
        )

    return _section("The paper's rows", rows, header, cells, note)


def beyond_section(rows: Sequence[Row]) -> Section:
    """Return the section of rows that the paper does not have."""
    header = ("", "RMSE", "accuracy %", "rounds", "users")
    return _section(
        "Beyond the paper",
        rows,
        header,
        lambda row, s, config: (s.rmse.format(3), s.accuracy.format(1), str(s.rounds), str(s.users)),
    )


def _section(title: str, rows: Sequence[Row], header: Sequence[str], cells: Any, note: str = "") -> Section:
    def compose(results: Results) -> list[Block]:
        lines = []
        for row in rows:
            for name, score in _row_scores(row, results):
                lines.append((name, *cells(row, score, results[row.job][0]["settings"]["config"])))
        notes = [note] if note else []
        return [Table(header, lines), *notes, *missing_jobs({row.title: row.job for row in rows}, results)]

    return Section(title, tuple(row.job for row in rows), compose)


def _row_scores(row: Row, results: Results) -> list[tuple[str, Scores]]:
    """Return a row's scores, and those of its continuation where there is one."""
    if row.job not in results:
        return []
    group = results[row.job]
    more = group[0]["settings"]["continue_to"]
    continued = [(f"{row.title}, continued", scores(group, row.measure, more))] if more else []
    return [(row.title, scores(group, row.measure)), *continued]


def _next_to_paper(value: Spread, paper: float | None, digits: int) -> tuple[str, str, str]:
    if paper is None:
        return value.format(digits), "", ""
    return value.format(digits), f"{paper:.{digits}f}", f"{value.mean - paper:+.{digits}f}"


def few_section(jobs: Sequence[Job]) -> Section:
    """Return the section of users with few ratings, of the jobs that measured them."""
    chosen = [job for job in jobs if job.few]

    def compose(results: Results) -> list[Block]:
        rows = []
        for job in chosen:
            for n in map(int, results[job.name][0]["few"]) if job.name in results else ():
                score = scores_with_few(results[job.name], n)
                rows.append((job.title, str(n), score.rmse.format(3), score.accuracy.format(1), str(score.rounds)))
        table = Table(("", "support ratings", "RMSE", "accuracy %", "rounds"), rows)
        return [table, "The query examples are the same for every number of support ratings."]

    return Section("Users with few ratings", tuple(job.name for job in chosen), compose)


def config_for(**changes: Any) -> Config:
    """Return the command line's settings for ratings, with changes; the data is given with the command."""
    return RatingsConfig(data=Data(source=""), **changes)
