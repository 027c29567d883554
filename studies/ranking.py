"""Ranking: a federated model next to central ones that see everybody's data.

python -m studies ranking --data ml-1m.zip --out study
python -m studies ranking --data clicks.csv --out study --only popularity ease federated

For MovieLens, items with a rating of 4 or 5 count; for a file of clicks, all items.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedrecon as fr
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.recommend import ranking
from fedrecon._src.recommend.config import ClickData, ClicksConfig
from fedrecon._src.recommend.default_training import train_model
from fedrecon._src.recommend.ranking import ItemSets, RankingResult, Scorer
from fedrecon._src.recommend.recipe import build_layout, make_evaluator
from fedrecon._src.recommend.tasks import CLICKS, Users, build_algorithm
from fedrecon.data import Ratings
from studies.study import (
    Block,
    Claim,
    Figure,
    Job,
    Kind,
    Results,
    Section,
    Spread,
    Study,
    Table,
    as_float,
    missing_jobs,
    spread,
)
from studies.training import baseline_result

AT_LEAST = 4.0  # ratings of 4 and 5 say that a person likes an item
SWEEPS = 15  # of alternating least squares
NEAR = 0.02
NDCG = "ndcg@100"
METRICS = {
    NDCG: "NDCG@100",
    "recall@20": "recall@20",
    "recall@50": "recall@50",
    "hit@20": "hit rate@20",
    "coverage@20": "coverage@20",
}


class ClicksData:
    """Items that users like, divided as `fedrecon train --task clicks` does."""

    def __init__(self, clicks: Ratings, config: ClicksConfig):
        """Divide users, and hide some items of those who are not in training."""
        self.clicks, self.config = clicks, config
        self.users: Users = CLICKS.divide(config, clicks, silent)
        everything = dataclasses.replace(config, data=dataclasses.replace(config.data, max_examples=None))
        self.train = ranking.item_sets(CLICKS.divide(everything, clicks, silent).train)
        split = fr.split.named(config.split.evaluate)
        self.hidden = {part: ranking.split_items(getattr(self.users, part), split) for part in ("valid", "test")}

    def fingerprint(self) -> str:
        """Return a digest of the data."""
        return self.clicks.fingerprint()

    def facts(self) -> list[str]:
        """Describe the data and how it is divided."""
        train, valid, test = map(len, self.users)
        at_least = self.config.data.at_least
        kind = "clicks on" if at_least is None else f"ratings of at least {at_least:g}, of"
        return [
            f"Data: {self.clicks.num_examples:,} {kind} {self.clicks.num_items:,} items, "
            f"by {len(self.clicks):,} users (fingerprint {self.fingerprint()}).",
            f"Strong generalization: {train:,} users train, settings are chosen on {valid:,} others, and {test:,} more "
            "are tested. Of users who are not in training, 80 % of the items are known; the others are to be ranked "
            f"first among all items. The federated model trains on at most {self.config.data.max_examples} items of a "
            "user, the others on all.",
        ]

    @functools.cached_property
    def cooccurrences(self) -> np.ndarray:
        """How many training users have both of two items."""
        return ranking.count_pairs(self.train, self.clicks.num_items)

    def rank(self, score: Scorer, part: str) -> RankingResult:
        """Measure a scorer on the users of a part."""
        return ranking.rank(score, self.hidden[part], self.clicks.num_items)


def load(source: str, progress: Progress = silent) -> ClicksData:
    """Load what people like: by ratings of MovieLens, or by any file of clicks."""
    rated = Path(source).name.startswith(("movielens", "ml-"))
    config = ClicksConfig(data=ClickData(source=source, at_least=AT_LEAST if rated else None))
    return ClicksData(CLICKS.load(config, progress), config)


# ---- central methods ----


def ials(
    train: ItemSets, num_items: int, *, alpha: float, regularization: float, factors: int, seed: int = 0
) -> Scorer:
    """Rank items by alternating least squares of the `implicit` package, fitted on all training users together.

    Args:
      train: what the training users have.
      num_items: item ids are 0 to `num_items - 1`.
      alpha: the weight of an item that a user has; any other weighs 1.
      regularization: the ridge on users and items.
      factors: length of the embeddings.
      seed: decides where it starts.
    """
    try:
        from implicit.cpu.als import AlternatingLeastSquares
        from scipy.sparse import csr_matrix
        from threadpoolctl import threadpool_limits
    except ImportError as problem:
        raise ImportError(f"iALS needs implicit ({problem}); run: pip install 'fedrecon[ranking]'") from problem
    ones = np.ones(len(train.item), np.float32)
    matrix = csr_matrix((ones, (train.user, train.item)), (train.users, num_items))
    with threadpool_limits(1, "blas"):  # as the package recommends: it has threads of its own
        model = AlternatingLeastSquares(
            factors=factors,
            regularization=regularization,
            alpha=alpha,
            iterations=SWEEPS,
            num_threads=1,
            random_state=seed,
            dtype=np.float32,
        )
        model.fit(matrix, show_progress=False)
    return by_embeddings(np.asarray(model.item_factors, np.float64), alpha, regularization)


def by_embeddings(items: np.ndarray, alpha: float, regularization: float) -> Scorer:
    """Rank items by their embeddings; that of a newcomer is solved for exactly.

    Args:
      items: `(items, factors)`.
      alpha: the weight of a known item; any other weighs 1.
      regularization: the ridge.
    """
    gram = items.T @ items + regularization * np.eye(items.shape[1])

    def score(known: ItemSets) -> np.ndarray:
        bounds = np.searchsorted(known.user, np.arange(known.users + 1))
        rows = [items[known.item[start:end]] for start, end in itertools.pairwise(bounds)]
        users = [np.linalg.solve(gram + (alpha - 1) * liked.T @ liked, alpha * liked.sum(0)) for liked in rows]
        return np.stack(users) @ items.T

    return score


def fit(method: str, data: ClicksData, values: Mapping[str, float], seed: int) -> Scorer:
    """Fit a central method on all training users."""
    train, num_items = data.train, data.clicks.num_items
    if method == "popularity":
        return ranking.popularity(train, num_items)
    if method == "item kNN":
        neighbours, shrink = int(values["neighbours"]), values["shrink"]
        return ranking.item_knn(train, num_items, neighbours=neighbours, shrink=shrink, pair_counts=data.cooccurrences)
    if method == "EASE":
        return ranking.ease(train, num_items, ridge=values["ridge"], pair_counts=data.cooccurrences)
    settings = {"alpha": values["alpha"], "regularization": values["regularization"]}
    return ials(train, num_items, factors=int(values["factors"]), seed=seed, **settings)


def fit_best(job: Job, data: ClicksData, seed: int) -> tuple[Scorer, list[dict[str, Any]]]:
    """Fit every combination of a job's candidates; return the best on validation users, and how each did there."""
    trials: list[dict[str, Any]] = []
    best: tuple[float, Scorer] | None = None
    for values in itertools.product(*job.candidates.values()):
        chosen = dict(zip(job.candidates, values, strict=True))
        score = fit(job.method, data, chosen, seed)
        ndcg = data.rank(score, "valid").metrics[NDCG] if chosen else 0.0
        trials += [{**chosen, "valid": ndcg}] if chosen else []
        if best is None or ndcg > best[0]:
            best = ndcg, score
    assert best is not None
    return best[1], trials


# ---- the federated method ----


def train_federated(
    config: ClicksConfig, clicks: Ratings, users: Users, progress: Progress = silent
) -> tuple[fr.Algorithm, Any]:
    """Train as `fedrecon train --task clicks` does; return the algorithm and the parameters.

    Args:
      config: the settings.
      clicks: of all users.
      users: who trains, and who chooses settings.
      progress: a progress display.
    """
    ready = CLICKS.prepare(config, clicks, users, CLICKS.legend(config, clicks, users), progress=progress)
    algorithm = build_algorithm(ready.config, ready.model, ready.users.train.num_examples)
    layout = build_layout(ready.config, ready.model)
    evaluator = make_evaluator(ready.config, algorithm, ready.users, layout)
    run, _ = train_model(ready, algorithm, evaluator, layout=layout, callbacks=[fr.ProgressBar(progress)])
    if run.interrupted:
        raise KeyboardInterrupt
    return algorithm, run.params


def run_job(job: Job, data: ClicksData, seed: int, part: str = "test", progress: Progress = silent) -> dict[str, Any]:
    """Fit or train a job with one seed, and rank items for users who were not in training."""
    start = time.perf_counter()
    trials: list[dict[str, Any]] = []
    sent = 0
    if job.method == "federated":
        config = dataclasses.replace(data.config, model=job.config.model, rounds=job.config.rounds, seed=seed)
        algorithm, params = train_federated(config, data.clicks, data.users, progress)
        score = ranking.score_by_model(algorithm, params)
        items_per_client = data.users.train.num_examples / max(1, len(data.users.train))
        sent = round(2 * items_per_client * params["item_embedding"].shape[1] + params["gram"].size)
    else:
        score, trials = fit_best(job, data, seed)
    ranked = data.rank(score, part)
    unseen = {"micro": dict(ranked.metrics), "errors": dict(ranked.errors), "clients": ranked.users, "diverged": 0}
    result = baseline_result(job, {"unseen": unseen}, len(data.users.train))
    return result | {"sent": sent, "trials": trials, "seconds": round(time.perf_counter() - start, 2)}


KIND = Kind(load, run_job, metrics=(NDCG, "recall@20"), maximize=True, quick_rounds=20, quick_changes={"model.dim": 16})
DEFAULT = ClicksConfig(data=ClickData(source="", at_least=AT_LEAST))
CENTRAL = dataclasses.replace(DEFAULT, rounds=1, evaluate_every=1)


def central(name: str, title: str, method: str, **candidates: tuple[float, ...]) -> Job:
    """Return the job of a central method."""
    return Job(name, title, CENTRAL, method, ("unseen",), candidates=candidates)


JOBS = (
    central("popularity", "Popularity", "popularity"),
    central("item-knn", "Item kNN", "item kNN", neighbours=(50.0, 200.0), shrink=(0.0, 20.0, 100.0)),
    central("ease", "EASE", "EASE", ridge=(10.0, 100.0, 200.0, 300.0, 500.0, 800.0)),
    central(
        "ials", "iALS, 128 factors", "iALS", factors=(128.0,), alpha=(3.0, 5.0, 8.0), regularization=(40.0, 60.0, 80.0)
    ),
    Job(
        "federated",
        "Federated",
        dataclasses.replace(DEFAULT, evaluate_every=DEFAULT.rounds),
        "federated",
        ("unseen",),
        grid={"model.unobserved": (0.2, 0.4, 0.8), "model.prior": (5.0, 10.0, 20.0)},
    ),
)
TITLES = {job.title: job.name for job in JOBS}


# ---- tables ----


def score_of(results: Results, job: str, name: str = NDCG) -> Spread:
    """Return a metric of a job on unseen users, mean and deviation over seeds."""
    return spread([as_float(result["evaluations"][-1]["unseen"]["micro"][name]) for result in results[job]])


def _main_table(results: Results) -> list[Block]:
    finished = [job for job in JOBS if job.name in results]
    if not finished:
        return ["None of these is finished."]
    rows = [[job.title, *(score_of(results, job.name, name).format(4) for name in METRICS)] for job in finished]
    first = results[finished[0].name][0]["evaluations"][-1]["unseen"]
    note = (
        f"Means over {first['clients']} users who were not in training, whose known items are excluded; the standard "
        f"error of an NDCG is about {as_float(first['errors'][NDCG]):.3f}, of differences between rows less, since all "
        "rows rank for the same users. Only the federated row leaves everybody's items where they are."
    )
    return [Table(["", *METRICS.values()], rows), note, *missing_jobs(TITLES, results)]


def _trials_table(results: Results) -> list[Block]:
    rows = []
    for job in JOBS:
        for trial in results[job.name][0].get("trials", []) if job.name in results else []:
            values = ", ".join(f"{name} {value:g}" for name, value in trial.items() if name != "valid")
            rows.append([job.title, values, f"{as_float(trial['valid']):.4f}"])
    note = (
        "Central models choose among these on validation users, whose NDCG@100 is shown; the best is measured on test "
        "users. The federated model's dimensions, their length and its prior are chosen by the run on the same users."
    )
    return [note, Table(["", "settings", "NDCG@100, validation users"], rows)] if rows else [note]


def _near_best(results: Results) -> tuple[bool, str]:
    ours = score_of(results, "federated").mean
    best = max(("ease", "ials"), key=lambda name: score_of(results, name).mean)
    theirs = score_of(results, best).mean
    text = (
        f"federated: NDCG@100 {ours:.4f}; the better of EASE and iALS, {best}: {theirs:.4f}. That is "
        f"{ours / theirs:.1%} of it; near is at least {1 - NEAR:.0%}."
    )
    return ours >= (1 - NEAR) * theirs, text


def _beats_popularity(results: Results) -> tuple[bool, str]:
    ours, theirs = score_of(results, "federated").mean, score_of(results, "popularity").mean
    return ours > theirs, f"federated: NDCG@100 {ours:.4f}; popularity: {theirs:.4f}."


def _bars(results: Results) -> dict[str, Any]:
    names = (NDCG, "recall@20", "recall@50")
    rows = [[job.title, [score_of(results, job.name, name).mean for name in names]] for job in JOBS]
    return {"metrics": [METRICS[name] for name in names], "rows": rows}


def _draw(numbers: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    width = 0.8 / len(numbers["rows"])
    for k, (title, values) in enumerate(numbers["rows"]):
        xs = [x + (k - (len(numbers["rows"]) - 1) / 2) * width for x in range(len(values))]
        color = "tab:red" if title == "Federated" else f"{0.85 - 0.15 * k:.2f}"
        axes.bar(xs, values, width, label=title, color=color)
    axes.set_xticks(range(len(numbers["metrics"])), numbers["metrics"])
    axes.set_ylabel("mean over unseen users")
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    axes.legend(ncols=3, loc="upper center")


_ALL = tuple(job.name for job in JOBS)
STUDY = Study(
    name="ranking",
    title="Ranking for unseen users",
    kind=KIND,
    jobs=JOBS,
    sections=(
        Section("On users who took no part in training", _ALL, _main_table),
        Section("How settings were chosen", _ALL, _trials_table),
    ),
    figures=(
        Figure(
            "ranking",
            "Ranking for unseen users",
            "The federated model (red) and models that are fitted where everybody's data is.",
            _ALL,
            _bars,
            _draw,
        ),
    ),
    claims=(
        Claim("Federated ranks better than popularity", ("popularity", "federated"), _beats_popularity),
        Claim("Federated is within 2 % of the better of EASE and iALS", ("ease", "ials", "federated"), _near_best),
    ),
    seeds=1,
    claims_title="Aims",
)
