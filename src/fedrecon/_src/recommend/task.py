"""What a task is: all that differs between training on ratings and training on text."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fedrecon._src.core.clients import Clients
from fedrecon._src.core.model import Model
from fedrecon._src.core.progress import Progress
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.recommend.config import Config, Reading
from fedrecon._src.recommend.settings import ClickData, Data, Source
from fedrecon._src.simulation.training import Score, loss_of


class Measure(NamedTuple):
    """A metric as tables and pictures show it.

    Attributes:
      name: in a model's metrics.
      title: for people.
      digits: how many are shown after the point.
      percent: whether it is a share.
    """

    name: str
    title: str
    digits: int = 4
    percent: bool = False

    def text(self, metrics: Mapping[str, Any]) -> str:
        """Write the metric of an evaluation; nothing if it has none."""
        value = metrics.get(self.name)
        if value is None:  # not everything is measured everywhere
            return ""
        return f"{100 * value:.{self.digits}f} %" if self.percent else f"{value:.{self.digits}f}"


ACCURACY = Measure("accuracy", "accuracy", 1, percent=True)


class Users(NamedTuple):
    """Clients divided: those that train, those that settings may be chosen on, those that neither touches."""

    train: Clients
    valid: Clients
    test: Clients


def split_users(clients: Clients, data: Source) -> Users:
    """Split clients by their names into those that train, validate and test, in simulations and on nodes alike.

    Examples are shuffled and capped first; of clicks, only those of training users are capped.
    """
    if isinstance(data, Data) and data.shuffle_seed is not None:
        clients = clients.shuffle(data.shuffle_seed)
    limit = data.max_examples if isinstance(data, Data) else None
    if limit is not None and not isinstance(data, ClickData):
        clients = clients.cap(limit)
    users = Users(*clients.split_clients(*data.fractions, seed=data.split_seed))
    return users._replace(train=users.train.cap(limit)) if limit is not None and isinstance(data, ClickData) else users


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
      curve: the two of them that pictures show.
      omit: `config -> names of measures that mean nothing for these settings`.
      untrained: settings for what training alone needs, where nothing is trained.
      load: `(config, progress) -> data`.
      legend: `(config, data) -> legend`.
      divide: `(config, data, progress) -> users`.
      facts: `(config, data) -> what run.json says about the data`.
      build_model: `(config, legend) -> model`.
      prepare: `(config, data, users, legend) -> Ready`, by sums over the training clients.
      view: `(config, clients) -> clients` as the model sees them; `config` is that of a `Ready`.
      read: `(config, legend, path, reading, progress) -> the clients of another file`, with the same ids.
      describe: `legend -> JSON`.
      recall: `JSON -> legend`; raises KeyError, TypeError or ValueError if it is not one.
      serve: the command that a trained model is for, with its options.
      unit: what support and query are made of, if that is not what metrics are means over.
      page_needs_onnx: whether a web page of a model runs its ONNX graphs.
      looks_like_counts: `(config, data) -> whether these are counts that are learned as they are`.
      by_client: whether metrics are of clients as a whole, so that there is one mean only.
      score: what validation clients compare models by, from metrics over all examples; less is better.
    """

    name: str
    config: type[C]
    people: str
    examples: str
    measures: tuple[Measure, ...]
    curve: tuple[Measure, Measure]
    untrained: C
    load: Callable[[C, Progress], D]
    legend: Callable[[C, D], L]
    divide: Callable[[C, D, Progress], Users]
    facts: Callable[[C, D], dict[str, Any]]
    build_model: Callable[[C, L], Model]
    prepare: Callable[[C, D, Users, L], Ready]
    view: Callable[[C, Clients], Clients]
    read: Callable[[C, L, Path, Reading, Progress], Read]
    describe: Callable[[L], dict[str, Any]]
    recall: Callable[[Mapping[str, Any]], L]
    serve: str
    by_client: bool = False
    unit: str = ""
    page_needs_onnx: bool = False
    looks_like_counts: Callable[[C, D], bool] = lambda config, data: False
    omit: Callable[[C], Container[str]] = lambda config: ()
    score: Score = loss_of
