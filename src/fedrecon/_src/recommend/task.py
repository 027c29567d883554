"""The `Task` protocol: everything that differs between training on ratings, clicks and text."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import optax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Progress
from fedrecon._src.core.model import Model
from fedrecon._src.data.ratings import RatingLimits
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.recommend.config import Config, Reading
from fedrecon._src.recommend.round_zero import Result, RoundZero
from fedrecon._src.recommend.settings import Source
from fedrecon._src.server import Aggregator
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.simulation.training import Score, loss_of

Table = Mapping[str, Mapping[str, float]]  # {baseline: {metric: value}}


class Measure(NamedTuple):
    """A metric as tables and pictures show it.

    Attributes:
      name: in a model's metrics.
      title: for people.
      digits: how many are shown after the point.
      percent: whether it is a share.
      sign: 1 if less is better, -1 if more is.
    """

    name: str
    title: str
    digits: int = 4
    percent: bool = False
    sign: int = 1

    def text(self, metrics: Mapping[str, Any]) -> str:
        """Write the metric of an evaluation; nothing if it has none."""
        value = metrics.get(self.name)
        if value is None:  # not everything is measured everywhere
            return ""
        return f"{100 * value:.{self.digits}f} %" if self.percent else f"{value:.{self.digits}f}"


ACCURACY = Measure("accuracy", "accuracy", 1, percent=True, sign=-1)


class Users(NamedTuple):
    """Clients divided: those that train, those that settings may be chosen on, those that neither touches."""

    train: Clients
    valid: Clients
    test: Clients


def split_users(clients: Clients, data: Source) -> Users:
    """Split clients by their names into those that train, validate and test, in simulations and on nodes alike."""
    order, most = getattr(data, "shuffle_seed", None), getattr(data, "max_examples", None)
    clients = clients if order is None else clients.shuffle(order)
    clients = clients.cap(most) if most is not None and data.caps_everyone else clients
    users = Users(*clients.split_clients(*data.fractions, seed=data.split_seed))
    return users if most is None else users._replace(train=users.train.cap(most))


class Ready(NamedTuple):
    """All that training needs, after a look at the training clients.

    Attributes:
      config: the settings, with what was found in the data; inference needs them as well.
      users: the clients as the model sees them.
      legend: what ids stand for.
      model: as it starts.
      remarks: what was read and what was decided from it, for people.
      releases: what that look gave away about the training clients, with noise; for the ledger of a private run.
      fallback: global parameters of something simple that validation clients may prefer; None if there are none.
    """

    config: Any
    users: Users
    legend: Any
    model: Model
    remarks: tuple[str, ...] = ()
    releases: tuple[Release, ...] = ()
    fallback: Any = None


class AlgorithmParts(NamedTuple):
    """What the algorithm of any task is built from, besides its settings and model.

    Attributes:
      server: the server's optimizer.
      aggregator: how updates become one.
      examples: how many examples all training clients have, which a prior is weighed against.
    """

    server: optax.GradientTransformation
    aggregator: Aggregator
    examples: float


class Dataset(Protocol):
    """Data as loaded, before it is divided."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """Counts of what was left out."""

    def fingerprint(self) -> str:
        """Return a short digest of the content."""


class Read(NamedTuple):
    """Clients of another file, and counts of what was left out of it."""

    clients: Clients
    skipped: Mapping[str, int]


C = TypeVar("C", bound=Config)
D = TypeVar("D", bound=Dataset)
L = TypeVar("L")


@dataclass(frozen=True)
class Task(Generic[C, D, L]):
    """A task. Its legend is what the ids in its data stand for, items or words: inference needs it with the parameters.

    Attributes:
      name: as settings call it.
      config: the type of its settings.
      people: what its clients are called.
      examples: what metrics are means over.
      measures: what tables show; progress shows the first.
      goal: what models and baselines are compared by.
      curve: the two of them that pictures show.
      omit: `config -> names of measures that mean nothing for these settings`.
      untrained: settings for what training alone needs, where nothing is trained.
      load: `(config, progress) -> data`.
      legend: `(config, data) -> legend`.
      divide: `(config, data, progress) -> users`.
      facts: `(config, data) -> what run.json says about the data`.
      build_model: `(config, legend) -> model`.
      build_algorithm: `(config, model, parts) -> algorithm`.
      prepare: `(config, data, users, legend) -> Ready`, by sums over the training clients.
      view: `(config, clients) -> clients` as the model sees them; `config` is that of a `Ready`.
      read: `(config, legend, path, reading, progress) -> the clients of another file`, with the same ids.
      describe: `legend -> JSON`.
      recall: `JSON -> legend`; raises KeyError, TypeError or ValueError if it is not one.
      baselines: `(config, legend, training clients, measured clients) -> figures of baselines on their query`.
      saved_baselines: `(config, legend, measured clients) -> the same`, from what a saved model knows.
      advice: `(best baseline, config) -> what to try` if the model loses to it.
      serve: the command that a trained model is for, with its options.
      unit: what support and query are made of, if that is not what metrics are means over.
      page_needs_onnx: whether a web page of a model runs its ONNX graphs.
      are_counts: `(config, data) -> whether these are counts that are learned as they are`.
      by_client: whether metrics are of clients as a whole, so that there is one mean only.
      items_alone: whether a person can be given as items without ratings.
      ends: `(config, legend) -> the lowest and the highest rating` that is shown, in the data's scale, if known.
      limits: `(config, legend) -> which ratings of new users the model takes`; None for all.
      restore: `(config, legend, scores) -> predictions` as they are shown.
      add_metrics: `(config, algorithm, params, clients, evaluation) -> evaluation` with what sums cannot tell.
      score: what validation clients compare models by, from metrics over all examples; less is better.
      finish: `(config, users, algorithm, params) -> global parameters` as they are served, after the last round.
      pin: `(config, legend) -> config` for a plan, without what is found in the data of one place.
      round_zero: `(config, number of items, options of a plan) -> round zero over nodes`; None if there is none.
      start_model: `(config, legend, state or result of round zero) -> config and model` as training starts.
      apply_result: `(config, legend, result of round zero) -> config and legend` with it.
      read_node: `(config, legend, path, reading, progress) -> the clients of a node's file`, in the order of the file.
    """

    name: str
    config: type[C]
    people: str
    examples: str
    measures: tuple[Measure, ...]
    curve: tuple[Measure, Measure]
    goal: Measure
    untrained: C
    load: Callable[[C, Progress], D]
    legend: Callable[[C, D], L]
    divide: Callable[[C, D, Progress], Users]
    facts: Callable[[C, D], dict[str, Any]]
    build_model: Callable[[C, L], Model]
    start_model: Callable[[C, L, Any], tuple[C, Model]]
    build_algorithm: Callable[[C, Model, AlgorithmParts], Algorithm]
    prepare: Callable[[C, D, Users, L], Ready]
    view: Callable[[C, Clients], Clients]
    read: Callable[[C, L, Path, Reading, Progress], Read]
    read_node: Callable[[C, L, Path, Reading, Progress], Read]
    describe: Callable[[L], dict[str, Any]]
    recall: Callable[[Mapping[str, Any]], L]
    baselines: Callable[[C, L, Any, Any], Table]
    advice: Callable[[str, C], str]
    serve: str
    saved_baselines: Callable[[C, L, Clients], Table] = lambda config, legend, clients: MappingProxyType({})
    items_alone: bool = False
    ends: Callable[[C, L], tuple[float, float] | None] = lambda config, legend: None
    limits: Callable[[C, L], RatingLimits | None] = lambda config, legend: None
    restore: Callable[[C, L, np.ndarray], np.ndarray] = lambda config, legend, scores: scores.copy()
    add_metrics: Callable[[C, Algorithm, Any, Clients, Evaluation], Evaluation] = (
        lambda config, algorithm, params, clients, evaluation: evaluation
    )
    by_client: bool = False
    unit: str = ""
    page_needs_onnx: bool = False
    are_counts: Callable[[C, D], bool] = lambda config, data: False
    omit: Callable[[C], Container[str]] = lambda config: ()
    score: Score = loss_of
    finish: Callable[[C, Users, Algorithm, Any], Any] = lambda config, users, algorithm, params: params

    pin: Callable[[C, L], C] = lambda config, legend: config
    round_zero: Callable[[C, int, Mapping[str, Any]], RoundZero | None] = lambda config, num_items, options: None
    apply_result: Callable[[C, L, Result], tuple[C, L]] = lambda config, legend, result: (config, legend)

    def shown(self, measures: tuple[Measure, ...], config: C) -> tuple[Measure, ...]:
        """Return those of some measures that mean something for these settings."""
        return tuple(measure for measure in measures if measure.name not in self.omit(config))
