"""The `Task` protocol: everything that differs between training on ratings, clicks and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.core.model import Model
from fedrecon._src.data.ratings import RatingLimits
from fedrecon._src.data.sources import DataError
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.recommend.config import Config, Reading
from fedrecon._src.recommend.round_zero import RoundZero
from fedrecon._src.recommend.settings import Source
from fedrecon._src.server import Aggregator
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.simulation.training import loss_of

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


def metric_cells(measures: Sequence[Measure], rows: Table, corner: str = "") -> list[list[str]]:
    """Return the cells of a table of metrics, the header first; `corner` is above the names of the rows."""
    header = [corner, *(measure.title for measure in measures)]
    return [header, *([name, *(measure.text(row) for measure in measures)] for name, row in rows.items())]


ACCURACY = Measure("accuracy", "accuracy", 1, percent=True, sign=-1)


def check_source(data: Source) -> None:
    """Raise a `DataError` if settings name no data."""
    if not data.source:
        raise DataError(f"the data source is empty; give {data.expected}.")


def refuse_settings(names: Sequence[str], source: str | Path, kind: str) -> None:
    """Raise a `DataError` if settings were given that have no use for this kind of data."""
    if names:
        raise DataError(f"{', '.join(f'data.{name}' for name in names)} cannot be used: {source} is {kind}.")


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
    """

    config: Any
    users: Users
    legend: Any
    model: Model
    remarks: tuple[str, ...] = ()
    releases: tuple[Release, ...] = ()


class Read(NamedTuple):
    """Clients of another file, and counts of what was left out of it."""

    clients: Clients
    skipped: Mapping[str, int]


C = TypeVar("C", bound=Config)
D = TypeVar("D")
L = TypeVar("L")


class Task(Protocol[C, D, L]):
    """A task. Its legend is what the ids in its data stand for, items or words: inference needs it with the parameters.
    Its data, as loaded, has counts of what was left out (`skipped`) and a digest of the content (`fingerprint`).

    Attributes:
      name: as settings call it.
      people: what its clients are called.
      examples: what metrics are means over.
      unit: what support and query are made of, if that is not what metrics are means over.
      measures: what tables show; progress shows the first.
      curve: the two of them that pictures show.
      goal: what models and baselines are compared by.
      serve: the command that a trained model is for, with its options.
      items_alone: whether a person can be given as items without ratings.
      by_client: whether metrics are of clients as a whole, so that there is one mean only.
      page_needs_onnx: whether a web page of a model runs its ONNX graphs.
      found_by_training: settings for which several values are trained with; a resumed run keeps the one it began with.
    """

    name: str
    people: str = "users"
    examples: str
    unit: str = ""
    measures: tuple[Measure, ...]
    curve: tuple[Measure, Measure]
    goal: Measure
    serve: str
    items_alone: bool = False
    by_client: bool = False
    page_needs_onnx: bool = False
    found_by_training: tuple[str, ...] = ()

    # ---- data ----

    def load(self, config: C, progress: Progress) -> D:
        """Load the data that settings name."""

    def legend(self, config: C, data: D, users: Users | None = None) -> L:
        """Return what the ids in the data stand for; `users` are the data's clients if they are divided already."""

    def divide(self, config: C, data: D, progress: Progress) -> Users:
        """Split the clients into those that train, validate and test."""

    def facts(self, config: C, data: D) -> dict[str, Any]:
        """Return what run.json says about the data."""

    def are_counts(self, config: C, data: D) -> bool:
        """Return whether these are counts that are learned as they are."""
        return False

    def view(self, config: C, clients: Clients) -> Clients:
        """Return clients as the model sees them; `config` is that of a `Ready`."""
        return clients

    def read(self, config: C, legend: L, path: Path, reading: Reading, progress: Progress) -> Read:
        """Read the clients of another file, with the same ids."""

    def read_node(self, config: C, legend: L, path: Path, reading: Reading, progress: Progress) -> Read:
        """Read the clients of a node's file, in the order of the file."""

    def describe(self, legend: L) -> dict[str, Any]:
        """Return a legend as JSON."""

    def recall(self, description: Mapping[str, Any]) -> L:
        """Undo `describe`; raises KeyError, TypeError or ValueError if it is nothing of the kind."""

    # ---- training ----

    def build_model(self, config: C, legend: L) -> Model:
        """Return the model."""

    def build_algorithm(self, config: C, model: Model, examples: float, aggregator: Aggregator) -> Algorithm:
        """Return the algorithm.

        Args:
          config: the settings.
          model: what is trained.
          examples: how many examples all training clients have, which a prior is weighed against.
          aggregator: how updates become one.
        """

    def prepare(self, config: C, data: D, users: Users, legend: L, *, progress: Progress = silent) -> Ready:
        """Return all that training needs, by sums over the training clients."""

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return what validation clients compare models by, from metrics over all examples; less is better."""
        return loss_of(metrics)

    def finish(self, config: C, users: Users, algorithm: Algorithm, params: Any) -> Any:
        """Return global parameters as they are served, after the last round."""
        return params

    def remark(self, params: Any) -> str | None:
        """Say what is unusual about a finished model, if anything is."""
        return None

    # ---- evaluation and inference ----

    def shown(self, measures: tuple[Measure, ...], config: C) -> tuple[Measure, ...]:
        """Return those of some measures that mean something for these settings."""
        return measures

    def add_metrics(
        self, config: C, algorithm: Algorithm, params: Any, clients: Clients, evaluation: Evaluation
    ) -> Evaluation:
        """Return an evaluation with what sums cannot tell."""
        return evaluation

    def baselines(self, config: C, legend: L, users: Users | None, measured: Any) -> Table:
        """Return figures of baselines on the query of clients.

        Args:
          config: the settings.
          legend: what ids stand for.
          users: who trains and validates; None for the baselines that a model knows by itself.
          measured: the clients.
        """

    def advice(self, best: str, config: C) -> str:
        """Say what to try if the model loses to this baseline."""

    def ends(self, config: C, legend: L) -> tuple[float, float] | None:
        """Return the lowest and the highest rating that is shown, in the data's scale, if known."""
        return None

    def limits(self, config: C, legend: L) -> RatingLimits | None:
        """Return which ratings of new users the model takes; None for all."""
        return None

    def restore(self, config: C, legend: L, scores: np.ndarray) -> np.ndarray:
        """Return predictions as they are shown."""
        return scores.copy()

    # ---- over nodes ----

    def pin(self, config: C, legend: L) -> C:
        """Return settings for a plan, without what is found in the data of one place."""
        return config

    def round_zero(self, config: C, num_items: int, options: Any) -> RoundZero | None:
        """Return round zero over nodes, from the options of a plan; None if there is none."""
        return None

    def start(self, config: C, legend: L, zero: Any) -> tuple[C, L, Model]:
        """Return settings, legend and model as training starts.

        Args:
          config: the settings.
          legend: what ids stand for.
          zero: the last state of round zero; before it, the first one; None if there is none.
        """
        return config, legend, self.build_model(config, legend)
