"""Expressions: suggest emoji as the paper's deployment suggests GIFs and stickers, to people who took no part.

python -m studies expressions --data emoji.csv.gz --out study

The file has how often each person used each expression. Training has the deployment's tricks: people with few examples
are left out, the others are drawn more often the more examples they have, and all of a person's examples are support
and query (no split). Of the people who are tested, 80 % of the uses are known; five suggestions are made for the rest,
and the hit rate is the share of these uses that are among the five, averaged over people.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import numpy as np

import fedrecon as fr
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.recommend import ranking
from fedrecon._src.recommend.config import ClickData, ClicksConfig
from fedrecon._src.recommend.ranking import ItemSets
from fedrecon._src.recommend.settings import Ranking
from fedrecon._src.recommend.tasks import CLICKS, Users
from fedrecon._src.recommend.tasks.clicks import click_weight
from fedrecon.data import Ratings
from studies.ranking import train_federated
from studies.study import Block, Claim, Job, Kind, Results, Section, Study, Table, as_float, missing_jobs, spread
from studies.training import baseline_result

LEAST = 5  # examples of a person who trains
OFTEN = 20  # examples for which a person is drawn once more
SUGGESTIONS = 5
HIT, NEW = f"hit@{SUGGESTIONS}", f"new hit@{SUGGESTIONS}"


class Uses(NamedTuple):
    """Uses of people: how often each expression was used before, and the uses that are hidden.

    Attributes:
      counts: `(people, expressions)` of known uses.
      hidden: `(people, expressions)` of hidden ones.
    """

    counts: np.ndarray
    hidden: np.ndarray

    @property
    def support(self) -> ItemSets:
        """What is known, with the weights of a model of clicks."""
        user, item = np.nonzero(self.counts)
        return ItemSets(len(self.counts), user, item, click_weight(self.counts[user, item].astype(np.float32)))


def hide_uses(clients: fr.Clients, num_items: int, seed: int = 0) -> Uses:
    """Hide a fifth of every person's uses at random, and at least one; people with one use are left out."""
    rng = np.random.default_rng(seed)
    tables = []
    for start, end in zip(clients.starts, clients.ends, strict=True):
        count = np.rint(clients.columns["rating"][start:end]).astype(int)
        uses = rng.permutation(np.repeat(clients.columns["item"][start:end], count))
        if len(uses) >= 2:
            first = min(len(uses) - 1, round(0.8 * len(uses)))
            tables.append([np.bincount(part, minlength=num_items) for part in (uses[:first], uses[first:])])
    known, hidden = np.array(tables).transpose(1, 0, 2)
    return Uses(known, hidden)


def hit_rate(scores: np.ndarray, hidden: np.ndarray) -> float:
    """Return the mean over people of the share of hidden uses among the best five; people without any do not count."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :SUGGESTIONS]
    total = hidden.sum(1)
    hits = np.take_along_axis(hidden, best, 1).sum(1)
    return float((hits[total > 0] / total[total > 0]).mean())


class ExpressionsData:
    """Uses of expressions, by people who train, validate and test."""

    def __init__(self, uses: Ratings, config: ClicksConfig):
        """Divide people, and hide uses of those who are tested."""
        self.uses, self.config = uses, config
        self.users: Users = CLICKS.divide(config, uses, silent)
        self.test = hide_uses(self.users.test, uses.num_items)

    def fingerprint(self) -> str:
        """Return a digest of the data."""
        return self.uses.fingerprint()

    def facts(self) -> list[str]:
        """Describe the data and how it is divided."""
        train, valid, _ = map(len, self.users)
        return [
            f"Data: {self.uses.num_examples:,} pairs of {len(self.uses):,} people and {self.uses.num_items:,} "
            f"expressions (fingerprint {self.fingerprint()}).",
            f"{train:,} people train and {valid:,} validate. {len(self.test.counts):,} are tested, of whom "
            f"{int(self.test.counts.sum()):,} uses are known and {int(self.test.hidden.sum()):,} hidden.",
        ]


def load(source: str, progress: Progress = silent) -> ExpressionsData:
    """Load how often people used expressions."""
    config = ClicksConfig(data=ClickData(source=source), model=Ranking(counts="log"))
    return ExpressionsData(CLICKS.load(config, progress), config)


def oversample(clients: fr.Clients) -> fr.Clients:
    """Return people with at least `LEAST` examples, once more for every `OFTEN` examples."""
    times = np.where(clients.sizes >= LEAST, 1 + clients.sizes // OFTEN, 0)
    return dataclasses.replace(clients.take(np.repeat(np.arange(len(clients)), times)), names=None)


def train(method: str, data: ExpressionsData, seed: int, progress: Progress = silent) -> ranking.Scorer:
    """Train on the people who train; return how expressions are ranked."""
    config, users = dataclasses.replace(data.config, seed=seed), data.users
    if method == "deployment":
        users = users._replace(train=oversample(users.train))
        no_split = dataclasses.replace(config.split, train="none")
        config = dataclasses.replace(config, split=no_split, model=dataclasses.replace(config.model, both_ways=False))
    _, params = train_federated(config, data.uses, users, progress)
    return ranking.score_by_factors(params, config.model.unobserved, config.model.ridge)


def run_job(
    job: Job, data: ExpressionsData, seed: int, part: str = "test", progress: Progress = silent
) -> dict[str, Any]:
    """Train or count with one seed, and suggest expressions to people who were not in training."""
    del part
    start, counts = time.perf_counter(), data.test.counts
    popularity = np.bincount(ranking.item_sets(data.users.train).item, minlength=data.uses.num_items)
    scores = np.broadcast_to(popularity, counts.shape)
    if job.method in ("deployment", "default"):
        scores = train(job.method, data, seed, progress)(data.test.support)
    # People use again what they used before: its count comes first, and scores decide among what is used equally often.
    squeezed = np.argsort(np.argsort(scores, 1), 1) / scores.shape[1]
    own_first = counts + squeezed
    metrics = {
        "alone": hit_rate(scores, data.test.hidden),
        HIT: hit_rate(own_first, data.test.hidden),
        NEW: hit_rate(np.where(counts > 0, -1.0, squeezed), np.where(counts > 0, 0, data.test.hidden)),
    }
    unseen = {"micro": metrics, "clients": len(counts), "diverged": 0}
    result = baseline_result(job, {"unseen": unseen}, len(data.users.train))
    return result | {"seconds": round(time.perf_counter() - start, 2)}


CONFIG = ClicksConfig(data=ClickData(source=""), rounds=1, evaluate_every=1)
KIND = Kind(load, run_job, metrics=(HIT, NEW), maximize=True)
JOBS = (
    Job("popularity", "Popularity", CONFIG, "popularity", ("unseen",)),
    Job("deployment", "Federated, with the deployment's tricks", CONFIG, "deployment", ("unseen",)),
    Job("default", "Federated, default recipe", CONFIG, "default", ("unseen",)),
)
METRICS = {"alone": "suggestions alone", HIT: "own most used first", NEW: "expressions new to a person"}


def _mean(results: Results, job: str, name: str) -> float:
    return spread([as_float(result["evaluations"][-1]["unseen"]["micro"][name]) for result in results[job]]).mean


def _table(results: Results) -> list[Block]:
    finished = [job for job in JOBS if job.name in results]
    rows = [[job.title, *(f"{_mean(results, job.name, name):.1%}" for name in METRICS)] for job in finished]
    note = (
        f"Share of hidden uses among {SUGGESTIONS} suggestions, mean over people who took no part in training. "
        "'Own most used first' suggests what a person used most often, and lets the row decide among the rest; for "
        "popularity this is the person's own most used. The last column suggests and counts only what they never used."
    )
    return [Table(["", *METRICS.values()], rows), note, *missing_jobs({job.title: job.name for job in JOBS}, results)]


def _beats(results: Results) -> tuple[bool, str]:
    ours, theirs = (_mean(results, name, NEW) for name in ("deployment", "popularity"))
    return ours > theirs, f"expressions new to a person: {ours:.1%} against {theirs:.1%} by popularity."


STUDY = Study(
    name="expressions",
    title="Expressions for people who took no part",
    kind=KIND,
    jobs=JOBS,
    sections=(Section("Five suggestions", tuple(job.name for job in JOBS), _table),),
    figures=(),
    claims=(Claim("The model's suggestions are used more than popular ones.", ("deployment", "popularity"), _beats),),
    claims_title="Claims",
)
