"""What a study is: jobs that train and measure, tables, claims and figures of what they found, in one report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedrecon._src.app.config import to_json
from fedrecon._src.core.progress import Progress

Result = Mapping[str, Any]  # what a finished job left; all have evaluations, losses, sent and seconds
Results = Mapping[str, Sequence[Result]]  # by job, one per seed
Grid = Mapping[str, tuple[Any, ...]]  # values to choose from on validation data, by path: `server.learning_rate`


class Table(NamedTuple):
    """Lines of cells under a head."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]


class Picture(NamedTuple):
    """A PNG file and its caption."""

    path: Path
    caption: str


Part = str | Table | Picture | list[str]  # a paragraph (or a heading that begins with #), a table, a picture, a list


@dataclass(frozen=True)
class Job:
    """Something to train.

    Attributes:
      name: the name of its file.
      title: what a reader calls it.
      setting: a dataclass of how it is trained and measured. All have `rounds` (how many the row reports), `on_to`
        (continue to this many and report that too, or None), `every` (evaluate every n rounds; n divides `rounds`),
        `measures` (names of what is measured, the main one first).
      grid: what `--tune` tries.
    """

    name: str
    title: str
    setting: Any
    grid: Grid = field(default_factory=dict)


def changed(setting: Any, path: str, value: Any) -> Any:
    """Return a setting with another value at a path such as `server.learning_rate`."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(setting, **{name: changed(getattr(setting, name), rest, value) if rest else value})


@dataclass(frozen=True)
class Section:
    """A part of the report, of the results of some jobs.

    Attributes:
      compose: `results -> parts`; the parts say what is missing.
    """

    title: str
    jobs: tuple[str, ...]
    compose: Callable[[Results], list[Part]]


@dataclass(frozen=True)
class Figure:
    """A picture: the jobs it needs, the numbers it shows, how it is drawn.

    Attributes:
      data: `results -> what the JSON file holds`.
      draw: `(what the JSON file holds, matplotlib figure) -> None`.
    """

    name: str
    title: str
    caption: str
    jobs: tuple[str, ...]
    data: Callable[[Results], dict[str, Any]]
    draw: Callable[[dict[str, Any], Any], None]


@dataclass(frozen=True)
class Claim:
    """Something the paper says, and how to tell from results whether it holds here.

    Attributes:
      check: `results -> (whether it held, the numbers it rests on in words)`.
    """

    text: str
    jobs: tuple[str, ...]
    check: Callable[[Results], tuple[bool, str]]


class Data(Protocol):
    """Data of a study, divided."""

    def fingerprint(self) -> str:
        """Return a digest of the content."""

    def facts(self) -> list[str]:
        """Say what the data is and how it is divided."""


class Kind(NamedTuple):
    """What studies of one kind of data have in common.

    Attributes:
      open: `(source, folder for what is prepared, progress) -> data`.
      run: `(setting, data, seed, part, progress) -> result`; part is `test`, or `valid` to choose settings on.
      shorten: `job -> a job that is done quickly`.
      tell: `metrics over all examples -> the main ones in words`.
      loss: `metrics over all examples -> what tuning brings down`.
      heads: of the table of settings.
      describe: `setting -> one cell under each head`.
    """

    open: Callable[[str, Path, Progress], Data]
    run: Callable[[Any, Any, int, str, Progress], dict[str, Any]]
    shorten: Callable[[Job], Job]
    tell: Callable[[Mapping[str, Any]], str]
    loss: Callable[[Mapping[str, Any]], float]
    heads: tuple[str, ...]
    describe: Callable[[Any], tuple[str, ...]]


@dataclass(frozen=True)
class Study:
    """A study: everything in the order of the paper, with `seeds` seeds by default; `claimed` heads its claims."""

    name: str
    title: str
    kind: Kind
    jobs: tuple[Job, ...]
    sections: tuple[Section, ...]
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...]
    seeds: int = 3
    claimed: str = "The paper's claims"

    def __post_init__(self) -> None:
        """Check that the jobs of sections, figures and claims exist."""
        names = [job.name for job in self.jobs]
        parts: tuple[Section | Figure | Claim, ...] = (*self.sections, *self.figures, *self.claims)
        unknown = sorted({name for part in parts for name in part.jobs} - set(names))
        if unknown or len(set(names)) < len(names):
            raise ValueError(f"a study needs one job of each name; unknown: {unknown}, there are: {names}")

    def choose(self, only: Sequence[str]) -> tuple[Job, ...]:
        """Return the jobs that names of jobs or figures select, in the study's order; all if there are no names."""
        wanted: set[str] = set()
        figures = {figure.name: figure for figure in self.figures}
        for name in only:
            if name in figures:
                wanted.update(figures[name].jobs)
            elif name in {job.name for job in self.jobs}:
                wanted.add(name)
            else:
                known = ", ".join([*(job.name for job in self.jobs), *figures])
                raise ValueError(f"the study has no row or figure {name!r}; it has: {known}")
        return tuple(job for job in self.jobs if not only or job.name in wanted)


def digest(setting: Any, seed: int, fingerprint: str) -> str:
    """Return a digest of everything that a job's result depends on."""
    facts = {"setting": to_json(setting), "seed": seed, "data": fingerprint}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
