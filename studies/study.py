"""What a study is: jobs to train and measure, and the tables, figures and claims made from their results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedrecon._src.core.display import Progress
from fedrecon._src.recommend.config import Config, Update

Result = Mapping[str, Any]  # of one job and seed; see `training.train`
Results = Mapping[str, Sequence[Result]]  # by job, one per seed
Grid = Mapping[str, tuple[Any, ...]]  # values to try, by path in the config: `server.learning_rate`


class Table(NamedTuple):
    """Rows of cells under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Picture(NamedTuple):
    """A PNG file and its caption."""

    path: Path
    caption: str


Block = str | Table | Picture | list[str]  # of a report: a paragraph or `# heading`, a table, a picture, a list


@dataclass(frozen=True)
class Job:
    """One row of a study: a config of the command line, and what a study does with it beyond training.

    Attributes:
      name: the name of its file of results.
      title: its name in reports.
      config: how it is trained. `config.rounds` is the number of rounds that the row reports, and
        `config.evaluate_every` divides it.
      method: what trains; each kind of study lists its methods.
      measures: what is evaluated, the main measure first.
      continue_to: train on to this many rounds, and report that too.
      users: `unseen` evaluates users that took no part in training; `seen`, later examples of those that did.
      few: also evaluate with only these numbers of support examples.
      finetune: how text models are fine-tuned.
      population: for privacy, the number of clients, and of clients per round, that the noise is computed for.
      candidates: for central ranking methods, the settings to choose from on validation users.
      grid: what `--tune` tries.
    """

    name: str
    title: str
    config: Config
    method: str = "fedrecon"
    measures: tuple[str, ...] = ("recon",)
    continue_to: int | None = None
    users: str = "unseen"
    few: tuple[int, ...] = ()
    finetune: Update | None = None
    population: tuple[int, int] | None = None
    candidates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    grid: Grid = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that a result depends on, as JSON has it."""
        values = dataclasses.asdict(self)
        return json.loads(json.dumps({name: values[name] for name in values if name not in ("title", "grid")}))

    def digest(self, seed: int, fingerprint: str) -> str:
        """Return a digest of everything that the result with one seed depends on."""
        text = json.dumps([self.settings, seed, fingerprint], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def shorten(self, rounds: int, changes: Mapping[str, Any]) -> Job:
        """Return a job that finishes quickly: fewer rounds and epochs, the first of each list of settings."""
        rounds = min(self.config.rounds, rounds)
        points = 5 if self.config.evaluate_every < self.config.rounds else 1
        every = next(n for n in range(max(1, rounds // points), 0, -1) if rounds % n == 0)
        config = dataclasses.replace(
            self.config,
            rounds=rounds,
            evaluate_every=every,
            update=dataclasses.replace(self.config.update, epochs=min(self.config.update.epochs, 3)),
        )
        for path, value in changes.items():
            config = with_value(config, path, value)
        first = {name: values[:1] for name, values in self.candidates.items()}
        return dataclasses.replace(self, config=config, continue_to=None, few=self.few[:1], candidates=first)


def with_value(config: Any, path: str, value: Any) -> Any:
    """Return a config with another value at a path such as `server.learning_rate`."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(config, **{name: with_value(getattr(config, name), rest, value) if rest else value})


@dataclass(frozen=True)
class Section:
    """A part of the report; `compose` makes its blocks from the results there are, and says what is missing."""

    title: str
    jobs: tuple[str, ...]
    compose: Callable[[Results], list[Block]]


@dataclass(frozen=True)
class Figure:
    """A picture. `data` computes what its JSON file holds, `draw` draws that on a matplotlib figure."""

    name: str
    title: str
    caption: str
    jobs: tuple[str, ...]
    data: Callable[[Results], dict[str, Any]]
    draw: Callable[[dict[str, Any], Any], None]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper; `check` returns whether it holds here, and the numbers that say so."""

    text: str
    jobs: tuple[str, ...]
    check: Callable[[Results], tuple[bool, str]]


class Data(Protocol):
    """The data of a study, divided."""

    def fingerprint(self) -> str:
        """Return a digest of the content."""

    def facts(self) -> list[str]:
        """Describe the data and how it is divided."""


class Kind(NamedTuple):
    """How studies of one kind of data load and run; picklable, for the processes that run jobs.

    Attributes:
      load: `(source, progress) -> data`.
      run: `(job, data, seed, part, progress) -> result`; part is `test`, or `valid` to choose settings on.
      metrics: reported while jobs run; `--tune` minimizes the first one.
      maximize: the first metric is better if higher.
      quick_rounds: rounds of a job with `--quick`.
      quick_changes: what else `--quick` changes, by path in the config.
    """

    load: Callable[[str, Progress], Data]
    run: Callable[[Job, Any, int, str, Progress], dict[str, Any]]
    metrics: tuple[str, ...]
    maximize: bool = False
    quick_rounds: int = 40
    quick_changes: Mapping[str, Any] = {}

    def loss(self, micro: Mapping[str, Any]) -> float:
        """Return what tuning minimizes."""
        return as_float(micro[self.metrics[0]]) * (-1 if self.maximize else 1)

    def summarize(self, micro: Mapping[str, Any]) -> str:
        """Write the main metrics in a line."""
        return ", ".join(f"{name} {as_float(micro[name]):.4f}" for name in self.metrics if name in micro)


@dataclass(frozen=True)
class Study:
    """A study: everything in the order of its report, with `seeds` seeds by default."""

    name: str
    title: str
    kind: Kind
    jobs: tuple[Job, ...]
    sections: tuple[Section, ...]
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...] = ()
    seeds: int = 3
    claims_title: str = "The paper's claims"

    def __post_init__(self) -> None:
        """Check that the jobs of sections, figures and claims exist."""
        names = [job.name for job in self.jobs]
        parts: tuple[Section | Figure | Claim, ...] = (*self.sections, *self.figures, *self.claims)
        unknown = sorted({name for part in parts for name in part.jobs} - set(names))
        if unknown or len(set(names)) < len(names):
            raise ValueError(f"job names must be unique and defined (got {names}, undefined: {unknown})")

    def select(self, only: Sequence[str]) -> tuple[Job, ...]:
        """Return the jobs that names of jobs or figures select, in the study's order; all of them without names."""
        needed = {job.name: (job.name,) for job in self.jobs} | {figure.name: figure.jobs for figure in self.figures}
        unknown = [name for name in only if name not in needed]
        if unknown:
            raise ValueError(f"`only` must name jobs or figures of the study: {', '.join(needed)} (got {unknown[0]!r})")
        names = {job for name in only or needed for job in needed[name]}
        return tuple(job for job in self.jobs if job.name in names)


# ---- numbers ----


class Spread(NamedTuple):
    """A mean over seeds, the standard deviation over them, and how many seeds there are."""

    mean: float
    deviation: float
    seeds: int

    def format(self, digits: int) -> str:
        """Write the mean and, over several seeds, the deviation."""
        return f"{self.mean:.{digits}f}" + (f" ± {self.deviation:.{digits}f}" if self.seeds > 1 else "")


def spread(values: Sequence[float]) -> Spread:
    """Average over seeds; the deviation is that of a sample, and 0 for a single seed."""
    array = np.array(values, float)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else 0.0, len(array))


def as_float(value: float | None) -> float:
    """Return a number from JSON, where null is NaN."""
    return float("nan") if value is None else value


def reported_rounds(result: Result) -> int:
    """Return the number of rounds that a result's row reports."""
    return int(result["settings"]["config"]["rounds"])


def evaluation_at(result: Result, rounds: int | None = None) -> Any:
    """Return a result's evaluation after `rounds` rounds, by default as many as its row reports."""
    rounds = rounds or reported_rounds(result)
    return next(entry for entry in result["evaluations"] if entry["round"] == rounds)


def metric(results: Sequence[Result], measure: str, name: str, rounds: int | None = None, scale: float = 1) -> Spread:
    """Return a metric over all examples, mean and deviation over the seeds of a job."""
    return spread([scale * as_float(evaluation_at(r, rounds)[measure]["micro"][name]) for r in results])


def missing_jobs(titles: Mapping[str, str], results: Results) -> list[Block]:
    """Return a sentence about the titles whose jobs have no result."""
    missing = [title for title, job in titles.items() if job not in results]
    return [f"Not run: {'; '.join(missing)}."] if missing else []


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings with their paths."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
