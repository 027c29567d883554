"""Jobs of the study of ranking: a federated model, and central ones that choose their settings on validation users."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fedrecon as fr
from fedrecon._src.app.build import build_algorithm
from fedrecon._src.app.config import ClickData, ClicksConfig, Ranking
from fedrecon._src.app.tasks import CLICKS, Users
from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.recommend import ranking
from fedrecon._src.recommend.ranking import ItemSets, RankingResult, Scorer
from fedrecon.data import Ratings
from studies.numbers import number
from studies.study import Job, Kind

AT_LEAST = 4.0  # ratings of 4 and 5 say that a person likes an item
NDCG = "ndcg@100"
SWEEPS = 15  # of alternating least squares

Method = Literal["popularity", "item kNN", "EASE", "iALS", "federated"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How items are ranked.

    Attributes:
      method: the method.
      tried: for a central method, values of its settings; those with the best NDCG@100 on validation users are taken.
      model: for the federated method.
      rounds: for the federated method.
    """

    method: Method
    tried: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    model: Ranking = field(default_factory=Ranking)
    rounds: int = 1
    on_to: int | None = None
    every: int = 1
    measures: tuple[str, ...] = ("unseen",)


class Divided:
    """What people like, who trains, and what is known of those who are measured."""

    def __init__(self, clicks: Ratings, config: ClicksConfig):
        """Divide users as `fedrecon train --task clicks` does."""
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
        """Say what the data is and how it is divided."""
        train, valid, test = map(len, self.users)
        return [
            f"Data: {self.clicks.num_examples:,} ratings of at least {AT_LEAST:g}, of {self.clicks.num_items:,} items, "
            f"by {len(self.clicks):,} users (fingerprint {self.fingerprint()}).",
            f"Strong generalization: {train:,} users train, settings are chosen on {valid:,} others, and {test:,} more "
            "are measured on. Of whoever is not in training 80 % of the items are known, the others are to be found "
            f"among all items. The federated model trains on at most {self.config.data.max_examples} items of a user, "
            "the others on all.",
        ]

    @functools.cached_property
    def together(self) -> np.ndarray:
        """How many training users have both of two items."""
        return ranking.count_pairs(self.train, self.clicks.num_items)

    def rank(self, score: Scorer, part: str) -> RankingResult:
        """Measure a scorer on the users of a part."""
        return ranking.rank(score, self.hidden[part], self.clicks.num_items)


def open_clicks(source: str, folder: Path, progress: Progress = silent) -> Divided:
    """Open what people like, from ratings by name or path."""
    del folder
    config = ClicksConfig(data=ClickData(source=source, at_least=AT_LEAST))
    return Divided(CLICKS.load(config, progress), config)


# ---- central ----


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
        own = [items[known.item[a:b]] for a, b in itertools.pairwise(bounds)]
        users = [np.linalg.solve(gram + (alpha - 1) * mine.T @ mine, alpha * mine.sum(0)) for mine in own]
        return np.stack(users) @ items.T

    return score


def _fit(setting: Setting, data: Divided, values: Mapping[str, float], seed: int) -> Scorer:
    train, items = data.train, data.clicks.num_items
    if setting.method == "popularity":
        return ranking.popularity(train, items)
    if setting.method == "item kNN":
        few = int(values["neighbours"])
        return ranking.item_knn(train, items, neighbours=few, shrink=values["shrink"], pair_counts=data.together)
    if setting.method == "EASE":
        return ranking.ease(train, items, ridge=values["ridge"], pair_counts=data.together)
    return ials(
        train,
        items,
        alpha=values["alpha"],
        regularization=values["regularization"],
        factors=int(values["factors"]),
        seed=seed,
    )


def _central(setting: Setting, data: Divided, seed: int) -> tuple[Scorer, list[dict[str, Any]]]:
    """Fit with every combination of settings, and return the best on validation users and how each one did there."""
    tried: list[dict[str, Any]] = []
    best: tuple[float, Scorer] | None = None
    for values in itertools.product(*setting.tried.values()):
        chosen = dict(zip(setting.tried, values, strict=True))
        score = _fit(setting, data, chosen, seed)
        if len(setting.tried) == 0:
            return score, []
        found = data.rank(score, "valid").metrics[NDCG]
        tried.append({**chosen, "valid": found})
        if best is None or found > best[0]:
            best = found, score
    assert best is not None
    return best[1], tried


# ---- federated ----


def _federated(setting: Setting, data: Divided, seed: int, progress: Progress) -> tuple[Scorer, Any]:
    """Train as `fedrecon train --task clicks` does, and return how items are ranked and the parameters."""
    config = dataclasses.replace(data.config, model=setting.model, rounds=setting.rounds, seed=seed)
    ready = CLICKS.prepare(config, data.clicks, data.users, CLICKS.legend(config, data.clicks))
    algorithm = build_algorithm(ready.config, ready.model, ready.users.train.num_examples)
    run = fr.train(
        algorithm,
        ready.users.train,
        rounds=config.rounds,
        sampling=config.sampling,
        seed=seed,
        progress=progress,
    )
    if run.interrupted:
        raise KeyboardInterrupt
    return ranking.score_by_model(algorithm, run.params), run.params


def run_job(
    setting: Setting, data: Divided, seed: int, part: str = "test", progress: Progress = silent
) -> dict[str, Any]:
    """Fit or train one setting with one seed, and look for what users who were not in training have."""
    began = time.perf_counter()
    tried: list[dict[str, Any]] = []
    sent = 0
    if setting.method == "federated":
        score, params = _federated(setting, data, seed, progress)
        mean = data.users.train.num_examples / max(1, len(data.users.train))
        sent = round(mean * params["item_embedding"].shape[1] + params["gram"].size)
    else:
        score, tried = _central(setting, data, seed)
    found = data.rank(score, part)
    measured = {"micro": dict(found.metrics), "errors": dict(found.errors), "clients": found.users, "diverged": 0}
    return {
        "evaluations": [{"round": setting.rounds, "unseen": measured}],
        "losses": [],
        "sent": sent,
        "tried": tried,
        "seconds": round(time.perf_counter() - began, 2),
    }


def shortened(job: Job, rounds: int = 20) -> Job:
    """Return a job that tries one setting, or runs for few rounds with short embeddings."""
    setting = job.setting
    few = {name: values[:1] for name, values in setting.tried.items()}
    small = dataclasses.replace(setting.model, dim=min(setting.model.dim, 16))
    done = min(setting.rounds, rounds)
    return dataclasses.replace(
        job, setting=dataclasses.replace(setting, tried=few, model=small, rounds=done, every=done)
    )


def describe(setting: Setting) -> tuple[str, ...]:
    """Return one cell under each head of the table of settings."""
    if setting.method == "federated":
        model = setting.model
        words = f"dim {model.dim}, unobserved {model.unobserved:g}, ridge {model.ridge:g}, prior {model.prior:g}"
        return setting.method, words, str(setting.rounds)
    tried = "; ".join(f"{name} {', '.join(f'{v:g}' for v in values)}" for name, values in setting.tried.items())
    return setting.method, f"best of {tried}" if tried else "none", "-"


def _tell(micro: Mapping[str, Any]) -> str:
    return f"NDCG@100 {number(micro[NDCG]):.4f}, recall@20 {number(micro['recall@20']):.4f}"


def _loss(micro: Mapping[str, Any]) -> float:
    return 1 - number(micro[NDCG])


RANKING: Kind = Kind(
    open=open_clicks,
    run=run_job,
    shorten=shortened,
    tell=_tell,
    loss=_loss,
    heads=("method", "settings", "rounds"),
    describe=describe,
)
