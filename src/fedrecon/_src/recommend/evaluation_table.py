"""The evaluation table of a model: its metrics next to those of baselines on the same query examples."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Progress, lay_out, silent
from fedrecon._src.data import Sentences
from fedrecon._src.recommend import cold_start, word_evaluation
from fedrecon._src.recommend.config import Config, Reconstruct, TextConfig
from fedrecon._src.recommend.rating_model import build_model
from fedrecon._src.recommend.recipe import evaluation_split, make_evaluator
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.stopping import JUDGES
from fedrecon._src.recommend.task import Measure, Table, Users, metric_cells
from fedrecon._src.recommend.tasks import build_algorithm, task_of
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator, reconstruct
from fedrecon._src.simulation.multihost import is_first_process


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluationTable:
    """How a model does on users that took no part in training, next to baselines; print it to see the table.

    Attributes:
      evaluation: of the model, with its metrics by client.
      baselines: `{baseline: {metric: value}}`, over the same query examples.
      measures: the metrics that are printed.
      people: what clients are called.
      personal: what people get from a model of the next word; None for other models.

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
    baselines: Table
    measures: tuple[Measure, ...]
    people: str
    personal: word_evaluation.PersonalResults | None = None

    @property
    def rows(self) -> Table:
        """Return `{"model" or baseline: {metric: value}}`, over all query examples."""
        return {"model": self.evaluation.micro, **self.baselines}

    @property
    def reliable(self) -> bool:
        """Whether at least 10 clients were measured; the results of fewer are mostly chance."""
        return self.evaluation.clients - self.evaluation.diverged >= JUDGES

    def summary(self) -> dict[str, Any]:
        """Return the evaluation ready for JSON, with the baselines and what people get, if they were measured."""
        rows = {"baselines": {name: dict(row) for name, row in self.baselines.items()}} if self.baselines else {}
        return self.evaluation.summary() | rows | ({} if self.personal is None else self.personal.summary())

    def __str__(self) -> str:
        """Lay the table out as text."""
        lines = lay_out(metric_cells(self.measures, self.rows), right=True)
        measured = f"{self.evaluation.clients - self.evaluation.diverged:,} {self.people}"
        note = "" if self.reliable else ", too few to be reliable"
        if rows := measured_after(self.rows):
            corner = f"{self.measures[0].title} after"
            lines += ["", *lay_out(metric_cells(after_measures(self.measures[0]), rows, corner), right=True)]
        personal = [] if self.personal is None else ["", str(self.personal)]
        return "\n".join([*lines, f"{measured}, {self.evaluation.examples:,} query examples{note}", *personal])


def after_measures(measure: Measure) -> list[Measure]:
    """Return a measure after so many examples of a person."""
    return [measure._replace(name=cold_start.name_after(k), title=str(k)) for k in cold_start.AFTER]


def measured_after(rows: Table) -> Table:
    """Return the rows that were measured after so many examples of a person."""
    return {name: row for name, row in rows.items() if cold_start.name_after(0) in row}


def evaluate_saved(saved: SavedModel[Any], users: Users | None, clients: Clients | None) -> EvaluationTable:
    """Evaluate a model on the test users of its training, or on other clients."""
    config, task = saved.config, saved.task
    test = users.test if clients is None and users is not None else clients
    if test is None:
        raise ValueError("`clients` must be given: a model that was loaded has no test users")
    test = test if clients is None else task.view(config, clients)
    everyone = Users(test, test, test) if users is None else users._replace(test=test)
    return measure_model(config, saved, everyone, "test", trained=users is not None)


def measure_model(
    config: Config,
    saved: SavedModel[Any],
    users: Users,
    part: str,
    *,
    trained: bool = True,
    personal: bool = True,
    evaluator: Evaluator | None = None,
    progress: Progress = silent,
) -> EvaluationTable:
    """Measure a model and baselines on users, and for text what people get from it.

    Args:
      config: settings of the run.
      saved: the model.
      users: as the model sees them.
      part: which of them are measured: valid or test.
      trained: whether `users` has the training users. Baselines that are made of these are exact sums, so those of a
        private run know only what it released.
      personal: whether it is measured what people get from a model of the next word.
      evaluator: of any clients, with what is compiled for them; by default one is made.
      progress: a progress display.
    """
    task, clients = saved.task, getattr(users, part)
    evaluator = evaluator or make_evaluator(config, saved.algorithm, users, part=part)
    if evaluator is None:
        raise ValueError(f"there are no {task.people} to evaluate on")
    evaluator = evaluator if evaluator.clients is clients else evaluator.on(clients)
    evaluation = evaluator(saved.params, progress=progress)
    evaluation = task.add_metrics(config, evaluator.algorithm, saved.params, clients, evaluation)
    releasable = users if trained and not config.privacy.on else None
    baselines = task.baselines(saved.config, saved.legend, releasable, clients) if is_first_process() else {}
    # Only sentences have this column, if it is known how words outside the vocabulary are spelled.
    spelled = personal and "other" in clients.columns
    results = (
        _measure_personal(saved, None if releasable is None else releasable.train, clients, progress)
        if spelled
        else None
    )
    return EvaluationTable(evaluation, baselines, task.shown(task.measures, config), task.people, results)


def _measure_personal(
    saved: SavedModel[Any], train: Clients | None, clients: Sentences, progress: Progress
) -> word_evaluation.PersonalResults:
    """Measure what people get from a model of the next word, next to counted n-grams of the training clients."""
    config, anybody = cast(TextConfig, saved.config), personal_predictions(saved, {})
    counted = {} if train is None else word_evaluation.CountedWords(cast(Sentences, train)).models()

    def models_of(support: word_evaluation.Columns) -> word_evaluation.Models:
        examples = {name: column for name, column in support.items() if name != "other"}
        personal = personal_predictions(saved, examples) if config.model.local == "oov_embedding" else anybody
        return word_evaluation.Models(anybody, personal, counted)

    split, biased = evaluation_split(config), config.model.local == "output_bias"
    return word_evaluation.measure_people(clients, split, models_of, biased=biased, progress=progress)


def personal_predictions(saved: SavedModel[Any], examples: word_evaluation.Columns) -> word_evaluation.Predict:
    """Return what predicts next words for a person; embeddings of their own words, if any, are from their sentences."""
    algorithm, config = saved.algorithm, saved.config
    if config.model.local == "oov_embedding" and len(examples.get("target", ())):
        local = reconstruct(algorithm, saved.params, examples, seed=config.seed)
    else:
        local = algorithm.model.init_local(jax.random.key(config.seed))
    return word_evaluation.model_predictions(algorithm, saved.params, local)


def compare_with_baselines(found: Evaluation, table: Table, config: Config) -> str | None:
    """Say that the model loses to a baseline, with advice, or that too few clients were measured; None otherwise.

    Args:
      found: the evaluation of the model.
      table: metrics of the baselines on the same query examples.
      config: the settings of the model.
    """
    task = task_of(config)
    metric, title, sign = task.goal.name, task.goal.title, task.goal.sign
    table = {name: row for name, row in table.items() if metric in row}
    if not table:
        return None
    best = min(table, key=lambda name: sign * table[name][metric])
    ours, theirs = found.micro[metric], table[best][metric]
    if sign * ours <= sign * theirs * (1 + sign * 1e-6):  # nearly equal counts as equal
        return None
    figures = f"{best!r} has {title} {theirs:.4f}, the model {ours:.4f}"
    measured = found.clients - found.diverged
    if measured < JUDGES:
        return f"{figures}. For so few {task.people} ({measured}), this difference is within chance."
    return f"the model loses to a baseline: {figures}. {task.advice(best, config)}"


def without_reconstruction(config: Config, num_items: int) -> Algorithm:
    """Return the same algorithm, but that local parameters stay as they were initialised."""
    model = build_model(config.model, num_items)
    return build_algorithm(dataclasses.replace(config, reconstruct=Reconstruct(steps=0)), model)
