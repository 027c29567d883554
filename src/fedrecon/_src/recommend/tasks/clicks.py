"""Clicks, plays, purchases: which items come first for a person, from those the person has."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.federated_ials import federated_ials
from fedrecon._src.client.optimizers import with_prior
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Progress, say_left_out, silent
from fedrecon._src.core.model import Model
from fedrecon._src.core.pytrees import Params
from fedrecon._src.data import Ratings
from fedrecon._src.data.columns import describe_columns
from fedrecon._src.data.sources import DataError
from fedrecon._src.models import ranking_factorization
from fedrecon._src.models.factorization import ranking_params
from fedrecon._src.recommend import cold_start, ranking
from fedrecon._src.recommend.cold_start import exceeds_chance
from fedrecon._src.recommend.config import ClicksConfig, Reading, change_settings
from fedrecon._src.recommend.rating_model import Items
from fedrecon._src.recommend.recipe import (
    build_aggregator,
    build_layout,
    build_split,
    evaluation_split,
    server_optimizer,
)
from fedrecon._src.recommend.round_zero import RoundZero
from fedrecon._src.recommend.settings import Ranking
from fedrecon._src.recommend.spectral_start import SpectralStart, estimate_clicks
from fedrecon._src.recommend.stopping import JUDGES, divisions_of, judges_of, say_rounds
from fedrecon._src.recommend.task import Measure, Read, Ready, Table, Task, Users
from fedrecon._src.recommend.tasks.ratings import ItemsTask
from fedrecon._src.server import Aggregator
from fedrecon._src.simulation.divergence import DivergenceWarning
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.simulation.multihost import broadcast
from fedrecon._src.simulation.training import ProgressBar, train

DIMS = (32, 64, 128, 256, 512, 1024)
DEPLOYED_DIM, LEAST_DIM = 64, 128
ALMOST = 0.98
PRIORS = (10.0, 1.0)  # the usual one, and a weaker one that is tried
LENGTHS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  # of embeddings at the start, as multiples of the spectral start's
USUAL = LENGTHS.index(1.0)
TABLES, MOST_MEMORY = 8, 2**31  # of the server: embeddings, offsets, their start and Adam's moments, in bytes
EASE_BYTES, EASE_FLOPS = 45, 5e10  # at once for each pair of items; in a second
NDCG, RECALL = Measure("ndcg@100", "NDCG@100", sign=-1), Measure("recall@20", "recall@20", sign=-1)
COVERAGE = Measure("coverage@20", "coverage@20", 1, percent=True, sign=-1)
MOST_ITEMS = 10_000  # beyond this, what baselines of all pairs of items would cost is said instead
EASE_RIDGE, EASE_RIDGES = 300.0, (10.0, 100.0, 300.0, 1000.0)


def click_weight(count: Any) -> Any:
    """Return item weights, 1 + log(count), as numpy or JAX arrays."""
    return 1 + (np if isinstance(count, np.ndarray) else jnp).log(count)


def dim_of(settings: Ranking, num_items: int) -> int:
    """Return the length of embeddings where validation users do not choose it; no more than there are items."""
    return min(DEPLOYED_DIM if settings.dim == "auto" else settings.dim, num_items)


def start_from(model: Model, params: Params) -> Model:
    """Return a model that training starts from these global parameters."""
    return model._replace(init_global=lambda key: jax.tree.map(jnp.asarray, params))


def prior_of(settings: Ranking) -> float:
    """Return the prior where validation users do not choose it."""
    return PRIORS[0] if settings.prior == "auto" else settings.prior


def rank_for_judges(config: ClicksConfig, users: Users, num_items: int) -> Callable[[ranking.Scorer], np.ndarray]:
    """Return a function of a scorer: its NDCG@100 for each validation user, always the same users."""
    judges = cold_start.first_users(cold_start.repeat_shuffled(users.valid, divisions_of(config, users)))
    holdout = ranking.split_items(judges, evaluation_split(config))
    person = np.arange(len(judges)) % len(users.valid)
    return lambda score: cold_start.mean_by_person(cold_start.ndcg_of_each(score, holdout, num_items), person)


def _scorer(config: ClicksConfig, params: Any) -> ranking.Scorer:
    return ranking.score_by_factors(params, config.model.unobserved, config.model.ridge)


def choose_start(
    config: ClicksConfig, users: Users, item_embedding: np.ndarray, counts: np.ndarray
) -> tuple[int, float]:
    """Return how many dimensions of the spectral start suit validation users, and what to multiply its length by.

    The longer embeddings are, the more a few items say about a person, because the ridge stays the same. The usual
    length is changed, step by step, while that ranks clearly better, untrained. Of 128 dimensions and more, the least
    are taken that rank almost as well as the best; fewer, only if they rank clearly better, because there the untrained
    start says too little about what training makes of it.

    Args:
      config: the settings.
      users: divided.
      item_embedding: the spectral start in as many dimensions as there may be.
      counts: how many people have each item.
    """
    most = item_embedding.shape[1]
    dims = [dim for dim in DIMS if dim < most] if config.model.dim == "auto" else []
    if judges_of(users) < JUDGES:
        return min(LEAST_DIM, most) if dims else most, 1.0
    measure = rank_for_judges(config, users, len(counts))

    @cache
    def rank_start(dim: int, index: int) -> np.ndarray:
        params = ranking_params(np.float32(LENGTHS[index]) * item_embedding[:, :dim], counts)
        return measure(_scorer(config, params))

    def climb(dim: int, index: int) -> int:
        for other in range(len(LENGTHS))[max(index - 1, 0) : index + 2]:
            if exceeds_chance(rank_start(dim, other) - rank_start(dim, index)):
                return climb(dim, other)
        return index

    lengths = {dim: climb(dim, USUAL) for dim in [*dims, most]}
    ndcg = {dim: rank_start(dim, index) for dim, index in lengths.items()}
    means, least = {dim: values.mean() for dim, values in ndcg.items()}, min(LEAST_DIM, most)
    enough = ALMOST * max(mean for dim, mean in means.items() if dim >= least)
    usual = min(dim for dim, mean in means.items() if dim >= least and mean >= enough)
    fewer = [dim for dim in lengths if dim < least and exceeds_chance(ndcg[dim] - ndcg[usual])]
    dim = max(fewer, key=lambda dim: means[dim], default=usual)
    return dim, LENGTHS[lengths[dim]]


def largest_dim(config: ClicksConfig, train: Clients, num_items: int) -> int:
    """Return the most dimensions for which an upload (a matrix, and two rows for each item) stays within its budget."""
    affordable = [
        dim
        for dim in DIMS
        if upload_bytes(dim, train) <= config.model.upload_bytes and TABLES * 4 * num_items * dim <= MOST_MEMORY
    ]
    return min(max(affordable, default=DIMS[0]), num_items, max(1, len(train)))


def upload_bytes(dim: int, train: Clients) -> float:
    """Return how much a user sends in a round, on average."""
    return 4 * (dim**2 + 2 * dim * train.num_examples / max(1, len(train)))


def _remarks(config: ClicksConfig, clicks: Ratings, users: Users, length: float | None = None) -> list[str]:
    """Summarize the data, the client groups, the metrics and what was chosen."""
    density = 100 * clicks.num_examples / max(1, len(clicks) * clicks.num_items)
    dim = dim_of(config.model, 2**16)
    sent = upload_bytes(dim, users.train) / 1e3
    start = "" if length is None else f" Embeddings start at {length:.0%} of the usual length."
    return [
        f"users: {len(clicks):,}; items: {clicks.num_items:,}; clicks: {clicks.num_examples:,}, "
        f"{clicks.num_examples / max(1, len(clicks)):.1f} per user, {density:.3g} % of all pairs. "
        f"{say_left_out(clicks.skipped)} {describe_columns(clicks.recognised)}",
        say_rounds(config, users),
        f"dimensions: {dim}; a user sends {sent:,.0f} kB in a round, on average (--model.dim, --model.upload-bytes)."
        f"{start} Prior: {prior_of(config.model):g} (--model.prior).",
        f"A share of each measured user's items is known ({config.split.evaluate}); the model must find the others "
        "among all items that are not known.",
    ]


def say_cost(num_items: int) -> str:
    """Say what EASE would cost for so many items."""
    memory, minutes = EASE_BYTES * num_items**2 / 1e9, len(EASE_RIDGES) * 2 * num_items**3 / EASE_FLOPS / 60
    return f"EASE (needs {memory:,.0f} GB, {minutes:,.0f} min)"


class _ClicksTask(ItemsTask[ClicksConfig]):
    """Clicks: which items people have."""

    name, examples = "clicks", "clicks"
    measures = (
        NDCG,
        RECALL,
        Measure("recall@50", "recall@50", sign=-1),
        Measure("hit@20", "hit rate@20", 1, percent=True, sign=-1),
        COVERAGE,
    )
    curve = (NDCG, RECALL)
    goal = NDCG
    serve = "recommend {run} --clicks FILE"
    items_alone = by_client = True
    found_by_training = ("model.prior",)

    def view(self, config: ClicksConfig, clients: Clients) -> Clients:
        """Return clients with a weight for each item, if counts are used."""
        if config.model.counts == "ignore" or "rating" not in clients.columns:
            return clients
        count = np.asarray(clients.columns["rating"], np.float32)
        if len(count) and not count.min() >= 1:
            raise DataError(
                f"there is a count of {count.min():g}; --model.counts log is for counts of 1 and more: "
                "leave out smaller ones with --data.at-least 1, or ignore counts"
            )
        return dataclasses.replace(clients, columns={**clients.columns, "weight": click_weight(count)})

    def read(self, config: ClicksConfig, items: Items, path: Path, reading: Reading, progress: Progress) -> Read:
        """Read the users of another file; which of their items are hidden is drawn, in a file of any order."""
        clicks, skipped = super().read(config, items, path, reading, progress)
        return Read(clicks.shuffle(config.data.shuffle_seed or 0), skipped)

    # ---- training ----

    def build_model(self, config: ClicksConfig, items: Items) -> Model:
        settings, weight = config.model, None if config.model.counts == "ignore" else "weight"
        dim = dim_of(settings, len(items))
        return ranking_factorization(len(items), dim, init_scale=settings.init_scale, weight=weight)

    def build_algorithm(self, config: ClicksConfig, model: Model, examples: float, aggregator: Aggregator) -> Algorithm:
        """Return least squares over all items, by clients in rounds."""
        settings, server, around_start = config.model, server_optimizer(config), not config.privacy.on
        names = ("unobserved", "ridge", "second_order", "both_ways")
        return federated_ials(
            model,
            server=with_prior(server, prior_of(settings), examples=examples, around_start=around_start),
            split=build_split(config.split.train, config.split),
            aggregate=aggregator,
            **{name: getattr(settings, name) for name in names},
        )

    def prepare(
        self, config: ClicksConfig, clicks: Ratings, users: Users, items: Items, *, progress: Progress = silent
    ) -> Ready:
        config = change_settings(config, {"model.at_least": config.data.at_least})
        users = Users(*(self.view(config, part) for part in users))
        if config.privacy.on:
            items = dataclasses.replace(items, counts=None, scale=None)  # they are exact, and not paid for
            resolved = {"model.dim": dim_of(config.model, len(items)), "model.prior": prior_of(config.model)}
            config = change_settings(config, resolved)
            model = self.build_model(config, items)
            return Ready(config, users, items, model, tuple(_remarks(config, clicks, users)))
        dim = config.model.dim
        most = largest_dim(config, users.train, len(items)) if dim == "auto" else min(dim, len(items))
        result = estimate_clicks(users.train, len(items), most)
        start = result.item_embedding
        dim, length = broadcast(partial(choose_start, config, users, start, result.item_count))
        config = change_settings(config, {"model.dim": dim})
        params = ranking_params(np.float32(length) * start[:, :dim], items.counts)
        model = start_from(self.build_model(config, items), params)
        config = self._choose_prior(config, users, len(items), model, progress)
        return Ready(config, users, items, model, tuple(_remarks(config, clicks, users, length)))

    def _choose_prior(
        self, config: ClicksConfig, users: Users, num_items: int, model: Model, progress: Progress
    ) -> ClicksConfig:
        """Return the settings with the weaker prior if it ranks clearly better after a third of the rounds."""
        rounds = config.rounds // 3
        if config.model.prior != "auto" or config.patience is None or judges_of(users) < JUDGES or not rounds:
            return change_settings(config, {"model.prior": prior_of(config.model)})
        trained = {}
        for prior in PRIORS:
            trial = change_settings(config, {"model.prior": prior, "rounds": rounds})
            aggregator = build_aggregator(trial, model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DivergenceWarning)  # the other prior may do better
                run = train(
                    self.build_algorithm(trial, model, users.train.num_examples, aggregator),
                    users.train,
                    rounds=rounds,
                    clients_per_round=config.sampling,
                    seed=config.seed,
                    layout=build_layout(config, model),
                    callbacks=[ProgressBar(progress, f"trying prior {prior:g}")],
                )
            if run.interrupted:
                raise KeyboardInterrupt
            trained[prior] = run.params
        measure = rank_for_judges(config, users, num_items)

        def ndcg(prior: float) -> np.ndarray:
            diverged = not np.isfinite(trained[prior]["gram"]).all()
            return np.zeros(1) if diverged else measure(_scorer(config, trained[prior]))

        def choose() -> float:
            usual, weaker = map(ndcg, PRIORS)
            return PRIORS[exceeds_chance(weaker - usual)]

        return change_settings(config, {"model.prior": broadcast(choose)})

    def score(self, metrics: Mapping[str, float]) -> float:
        return -metrics.get(NDCG.name, np.nan)

    def finish(self, config: ClicksConfig, users: Users, algorithm: Algorithm, params: Any) -> Any:
        """Choose how much popularity counts for people with few items, if there are enough to judge it by."""
        judged = config.patience is not None and judges_of(users) >= JUDGES
        if config.privacy.on or not judged or not np.isfinite(params["item_embedding"]).all():
            return params
        unobserved, ridge = config.model.unobserved, config.model.ridge
        split, divisions = evaluation_split(config), divisions_of(config, users)
        return cold_start.blend_popularity(params, users.valid, split, unobserved, ridge, divisions)

    def remark(self, params: Any) -> str | None:
        popularity_alone = (np.asarray(params["popularity_weight"][1:]) == 1).all()
        text = "kept popularity: the trained model is not clearly better for validation users"
        return text if popularity_alone else None

    # ---- evaluation ----

    def add_metrics(
        self, config: ClicksConfig, algorithm: Algorithm, params: Any, clients: Clients, evaluation: Evaluation
    ) -> Evaluation:
        """Add the share of items that are recommended to anybody, and metrics after so many examples of a person."""
        if not evaluation.clients:
            return evaluation
        if evaluation.diverged:  # whoever diverged is recommended nothing, and who that is, sums do not say
            more = {COVERAGE.name: np.nan}
        else:
            table = _measure({"model": _scorer(config, params)}, config, clients, len(params["item_embedding"]))
            more = {name: value for name, value in table.get("model", {}).items() if name not in evaluation.micro}
        return dataclasses.replace(evaluation, micro={**evaluation.micro, **more})

    def baselines(self, config: ClicksConfig, items: Items, users: Users | None, measured: Clients) -> Table:
        if users is None:
            popularity = {} if items.counts is None else {"popularity": ranking.score_by_count(items.counts)}
            return _measure(popularity, config, measured, len(items))
        sets = ranking.item_sets(users.train)
        scorers = {"popularity": ranking.popularity(sets, len(items))}
        if len(items) <= MOST_ITEMS:
            pairs = ranking.count_pairs(sets, len(items))
            scorers["item kNN"] = ranking.item_knn(sets, len(items), pair_counts=pairs)
            scorers["EASE"] = _tune_ease(config, sets, pairs, users)
        table = _measure(scorers, config, measured, len(items))
        return {**table, say_cost(len(items)): {}} if table and "EASE" not in table else table

    def advice(self, best: str, config: ClicksConfig) -> str:
        central = "" if best == "popularity" else "It needs everybody's data in one place; popularity does not. "
        return (
            f"{central}Try more --rounds, another --model.dim, --model.unobserved or --model.prior, or fedrecon tune."
        )

    # ---- over nodes ----

    def pin(self, config: ClicksConfig, items: Items) -> ClicksConfig:
        """Fix what is open, and what counts as a click: a node's file may leave out less."""
        resolved = {"model.dim": dim_of(config.model, len(items)), "model.prior": prior_of(config.model)}
        return change_settings(config, {**resolved, "model.at_least": config.data.at_least})

    def round_zero(self, config: ClicksConfig, num_items: int, options: Any) -> RoundZero:
        return SpectralStart(num_items=num_items, dim=dim_of(config.model, num_items))

    def start(self, config: ClicksConfig, items: Items, zero: Any) -> tuple[ClicksConfig, Items, Model]:
        model = self.build_model(config, items)
        if zero is not None and zero.done:
            model = start_from(model, ranking_params(zero.item_embedding, zero.item_count))
            items = dataclasses.replace(items, counts=np.rint(zero.item_count).astype(np.int64))
        return config, items, model


def _tune_ease(config: ClicksConfig, sets: ranking.ItemSets, pairs: np.ndarray, users: Users) -> ranking.Scorer:
    """Return EASE with the ridge that ranks best for validation users, if there are enough."""
    fit = partial(ranking.ease, sets, len(pairs), pair_counts=pairs)
    if judges_of(users) < JUDGES:
        return fit(ridge=EASE_RIDGE)
    measure = rank_for_judges(config, users, len(pairs))
    scorers = (fit(ridge=ridge) for ridge in EASE_RIDGES)
    return max(((measure(scorer).mean(), scorer) for scorer in scorers), key=lambda pair: pair[0])[1]


def _measure(scorers: Mapping[str, ranking.Scorer], config: ClicksConfig, clients: Clients, num_items: int) -> Table:
    """Rank the items of measured users by each scorer; nothing if no item is hidden."""
    split = evaluation_split(config)
    holdout = ranking.split_items(clients, split)
    if not len(holdout.hidden.item):
        return {}
    return {
        name: {
            **ranking.rank(score, holdout, num_items).metrics,
            **cold_start.rank_after(score, clients, split, num_items),
        }
        for name, score in scorers.items()
    }


CLICKS: Task[ClicksConfig, Ratings, Items] = _ClicksTask()
