"""The evaluation table of a model: its metrics next to those of baselines on the same query examples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.formatting import how_many, lay_out
from fedrecon._src.data import Sentences
from fedrecon._src.recommend import baselines, ranking
from fedrecon._src.recommend.config import ClicksConfig, Config, RatingsConfig, Reconstruct, TextConfig, is_default
from fedrecon._src.recommend.estimate import Estimate
from fedrecon._src.recommend.recipe import build_algorithm, build_model, build_split, make_evaluator
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.stopping import JUDGES
from fedrecon._src.recommend.task import Measure, Users
from fedrecon._src.simulation.evaluation import Evaluation

Table = Mapping[str, Mapping[str, float]]  # {baseline: {metric: value}}
MARGIN = 1e-6  # relative: what counts as equal
MOST_ITEMS = 5000  # beyond this, baselines that hold a number for every pair of items are left out
EASE_RIDGE = 500.0
NDCG, COVERAGE = "ndcg@100", "coverage@20"


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluationTable:
    """How a model does on users that took no part in training, next to baselines; print it to see the table.

    Attributes:
      evaluation: of the model, with its metrics by client.
      rows: `{"model" or baseline: {metric: value}}`, over all query examples.
      measures: the metrics that are printed.
      people: what clients are called.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(num_users=60, num_items=20, seed=0)  # doctest: +SKIP
      >>> table = fr.recommend.train(ratings, rounds=1).evaluate()  # doctest: +SKIP
      >>> list(table.rows)  # doctest: +SKIP
      ['model', 'global mean', 'item mean', 'item + user bias']
      >>> table.reliable  # doctest: +SKIP
      False
    """

    evaluation: Evaluation
    rows: Table
    measures: tuple[Measure, ...]
    people: str

    @property
    def reliable(self) -> bool:
        """Whether at least 10 clients were measured; the results of fewer are mostly chance."""
        return self.evaluation.clients - self.evaluation.diverged >= JUDGES

    def __str__(self) -> str:
        """Lay the table out as text."""
        cells = [[name, *(measure.text(row) for measure in self.measures)] for name, row in self.rows.items()]
        lines = lay_out([["", *(measure.title for measure in self.measures)], *cells], right=True)
        measured = how_many(self.evaluation.clients - self.evaluation.diverged, self.people)
        note = "" if self.reliable else ", too few to be reliable"
        return "\n".join([*lines, f"{measured}, {self.evaluation.examples:,} query examples{note}"])


def evaluate_saved(
    saved: SavedModel[Any], algorithm: Algorithm, users: Users | None, clients: Clients | None
) -> EvaluationTable:
    """Evaluate a model on the test users of its training or on other clients, as the model sees them."""
    config, task = saved.config, saved.task
    assert users is not None or clients is not None
    measured = clients if clients is not None else users.test  # type: ignore[union-attr]
    everyone = Users(measured, measured, measured) if users is None else users._replace(test=measured)
    evaluator = make_evaluator(config, algorithm, everyone, part="test")
    if evaluator is None:
        raise ValueError(f"there are no {task.people} to evaluate on")
    evaluation = add_coverage(config, algorithm, saved.params, measured, evaluator(saved.params))
    table = measure_known_baselines(config, saved, everyone, "test", trained=users is not None)
    return EvaluationTable(evaluation, {"model": evaluation.micro, **table}, task.measures, task.people)


def measure_baselines(config: Config, users: Users, part: str, legend: Any) -> Table:
    """Measure the baselines on the query of a run's users, from its training users.

    Args:
      config: settings of the run.
      users: of the run, as the model sees them.
      part: which of them are measured: valid or test.
      legend: the items.
    """
    measured = getattr(users, part)
    if not len(measured):
        return {}
    split = build_split(config.split.evaluate, config.split)
    if isinstance(config, TextConfig):
        return baselines.word_baselines(cast(Sentences, users.train), measured, split)
    if isinstance(config, ClicksConfig):
        return _rank_baselines(ranking.item_sets(users.train), ranking.split_items(measured, split), len(legend))
    if not len(baselines.split_ratings(measured, split).query.rating):
        return {}
    return baselines.rating_baselines(users.train, measured, split=split, num_items=len(legend)).table


def measure_known_baselines(
    config: Config, saved: SavedModel[Any], users: Users, part: str, *, trained: bool = True
) -> Table:
    """Measure baselines from the training users if `users` has them, else from what the model knows.

    Baselines of training users are exact sums of theirs, so those of a private run know only what it released.
    """
    if trained and not config.privacy.on:
        return measure_baselines(config, users, part, saved.legend)
    return measure_saved_baselines(saved, getattr(users, part))


def measure_saved_baselines(model: SavedModel[Any], clients: Clients) -> Table:
    """Measure the baselines that a saved model knows enough for, on the query of other clients.

    Args:
      model: of ratings, with its items' biases.
      clients: as the model sees them.
    """
    config, items = model.config, model.legend
    if isinstance(config, ClicksConfig) and items.counts is not None:
        division = ranking.split_items(clients, build_split(config.split.evaluate, config.split))
        metrics = _metrics(ranking.score_by_count(items.counts), division, len(items))
        return {"popularity": metrics} if metrics else {}
    if not isinstance(config, RatingsConfig) or config.model.scale is None or items.liking is None:
        return {}
    known = baselines.split_ratings(clients, build_split(config.split.evaluate, config.split))
    if not len(known.query.rating):
        return {}
    zero = _estimate(model)
    own = baselines.fit_biases(zero, known.support, known.clients)
    found = zero.item_bias[known.query.item] + own[known.query.client]
    guesses = {"global mean": np.zeros(len(found)), "item + user bias": found}
    return {name: baselines.rating_errors(zero.restore(guess), known.query.rating) for name, guess in guesses.items()}


def _rank_baselines(train: ranking.ItemSets, division: ranking.Holdout, num_items: int) -> Table:
    """Rank the items of held-out users by each baseline that these items are few enough for."""
    if not len(division.hidden.item):
        return {}
    scorers = {"popularity": ranking.popularity(train, num_items)}
    if num_items <= MOST_ITEMS:
        pairs = ranking.count_pairs(train, num_items)
        scorers["item kNN"] = ranking.item_knn(train, num_items, pair_counts=pairs)
        scorers["EASE"] = ranking.ease(train, num_items, ridge=EASE_RIDGE, pair_counts=pairs)
    return {name: _metrics(score, division, num_items) for name, score in scorers.items()}


def _metrics(score: ranking.Scorer, division: ranking.Holdout, num_items: int) -> Mapping[str, float]:
    return ranking.rank(score, division, num_items).metrics if len(division.hidden.item) else {}


def add_coverage(config: Config, algorithm: Algorithm, params: Any, clients: Clients, found: Evaluation) -> Evaluation:
    """Return an evaluation of ranking with the share of items that are recommended to anybody; any other as it is.

    Args:
      config: settings of the run.
      algorithm: what was trained.
      params: its global parameters.
      clients: who was measured.
      found: how the model serves them.
    """
    if not isinstance(config, ClicksConfig) or not found.clients:
        return found
    if found.diverged:  # whoever diverged is recommended nothing, and who that is, sums do not say
        return dataclasses.replace(found, micro=found.micro | {COVERAGE: math.nan})
    division = ranking.split_items(clients, build_split(config.split.evaluate, config.split))
    metrics = _metrics(ranking.score_by_model(algorithm, params), division, len(params["item_embedding"]))
    covered = {name: value for name, value in metrics.items() if name.startswith("coverage")}
    return dataclasses.replace(found, micro=found.micro | covered)


def _estimate(model: SavedModel[Any]) -> Estimate:
    """Return what round zero knew of biases, from what is saved; ratings are transformed already."""
    scale, liking = model.config.model.scale, model.legend.liking
    return Estimate(
        item_bias=liking.bias,
        item_count=np.zeros(len(model.legend)),
        mean=scale.mean,
        deviation=scale.deviation,
        low=scale.low,
        high=scale.high,
        noise=liking.user_ridge,
        user_variance=1.0,
    )


def summarize(found: Evaluation, table: Table) -> dict[str, Any]:
    """Return the summary of an evaluation with the baselines in it, if there are any."""
    return found.summary() | ({"baselines": {name: dict(row) for name, row in table.items()}} if table else {})


def compare_with_baselines(found: Evaluation, table: Table, config: Config | None = None) -> str | None:
    """Say that the model loses against a baseline and what to try, or that too few were measured to tell; None if it
    does not lose.

    Args:
      found: how the model does.
      table: how the baselines do on the same query.
      config: the settings of the model, if they are known.
    """
    if not table:
        return None
    if NDCG in found.micro:
        metric, title, sign, advice = NDCG, "NDCG@100", -1, _try_ranking
    elif baselines.MOST_USED in table:
        metric, title, sign, advice = "accuracy", "accuracy", -1, _try_text
    else:
        metric, title, sign, advice = "rmse", "RMSE", 1, _try_ratings
    best = min(table, key=lambda name: sign * table[name][metric])
    ours, theirs = found.micro[metric], table[best][metric]
    if sign * ours <= sign * theirs * (1 + sign * MARGIN):
        return None
    figures = f"{best!r} has {title} {theirs:.4f}, the model {ours:.4f}"
    measured = found.clients - found.diverged
    if measured < JUDGES:
        return f"{figures}. With {how_many(measured, 'users')} measured, this difference is within chance."
    return f"the model loses to a baseline: {figures}. {advice(best, config)}"


def _try_ratings(best: str, config: Config | None) -> str:
    del best
    other = config is not None and not config.privacy.on and not is_default(config)
    return (
        "With few ratings per user, there may be nothing to learn beyond biases. Try "
        f"{'--preset default, ' if other else ''}more --rounds, fewer dimensions (--model.dim 4), a larger "
        "--model.prior, or fedrecon tune."
    )


def _try_ranking(best: str, config: Config | None) -> str:
    del config
    central = "" if best == "popularity" else "It needs everybody's data in one place; popularity does not. "
    return f"{central}Try more --rounds, another --model.dim, --model.unobserved or --model.prior, or fedrecon tune."


def _try_text(best: str, config: Config | None) -> str:
    del best, config
    return (
        "Counting words needs everybody's text in one place. Try more --rounds, a larger "
        "--sampling.clients-per-round, or a smaller --model.vocabulary."
    )


def without_reconstruction(config: Config, num_items: int) -> Algorithm:
    """Return the same algorithm, but that local parameters stay as they were initialised."""
    model = build_model(config.model, num_items)
    return build_algorithm(dataclasses.replace(config, reconstruct=Reconstruct(steps=0)), model)
