"""What a study is: jobs that train and measure, rows of a table, figures."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedrecon.config import Factorization, Reconstruct, Server, Update, to_json

Result = Mapping[str, Any]  # what a finished job left: see `jobs.run_job`
Results = Mapping[str, Sequence[Result]]  # by job, one a seed


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained and what is measured of it.

    Attributes:
      train: `fedrecon`; `fedavg`, user rows kept by their owners; `fedavg-dense`, a table of all user rows averaged
        like the rest; `centralized`, all examples in one place, in one round.
      users: `unseen` tests on users that took no part; `seen` tests on the last tenth of everybody's ratings.
      measures: `recon` (rebuild on support, measure on query), `kept` (StandardEval with local parameters from
        training), `random` (StandardEval with local parameters as they are initialised).
      split: support and query in training.
      rounds: how many rounds the row reports.
      on_to: run on to this many rounds and report that too.
      every: evaluate after every so many rounds; divides `rounds`.
      few: measure also with only so many support examples.
    """

    train: Literal["fedrecon", "fedavg", "fedavg-dense", "centralized"] = "fedrecon"
    users: Literal["unseen", "seen"] = "unseen"
    measures: tuple[Literal["recon", "kept", "random"], ...] = ("recon",)
    model: Factorization = field(default_factory=Factorization)
    split: str = "half"
    reconstruct: Reconstruct = field(default_factory=Reconstruct)
    update: Update = field(default_factory=Update)
    server: Server = field(default_factory=Server)
    clients_per_round: int = 100
    rounds: int = 500
    on_to: int | None = None
    every: int = 500
    few: tuple[int, ...] = ()

    @property
    def last_round(self) -> int:
        """How many rounds are run."""
        return self.on_to or self.rounds


Grid = Mapping[str, tuple[Any, ...]]  # values to choose from on validation data, by path: `server.learning_rate`


@dataclass(frozen=True)
class Job:
    """Something to train; its name is its file's."""

    name: str
    title: str
    setting: Setting
    grid: Grid = field(default_factory=dict)


def changed(setting: Any, path: str, value: Any) -> Any:
    """Return a setting with another value at a path such as `server.learning_rate`."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(setting, **{name: changed(getattr(setting, name), rest, value) if rest else value})


@dataclass(frozen=True)
class Row:
    """A line of the table: one measure of a job, and the paper's numbers for it if it has any."""

    title: str
    job: str
    measure: str
    paper: tuple[float, float] | None = None


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


@dataclass(frozen=True)
class Study:
    """A study: everything in the order of the paper."""

    name: str
    title: str
    jobs: tuple[Job, ...]
    rows: tuple[Row, ...]
    beyond: tuple[Row, ...]
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...]
    max_examples: int = 300

    def __post_init__(self) -> None:
        """Check that rows, figures and claims speak of jobs that there are."""
        names = [job.name for job in self.jobs]
        asked = [row.job for row in (*self.rows, *self.beyond)]
        asked += [name for figure in self.figures for name in figure.jobs]
        asked += [name for claim in self.claims for name in claim.jobs]
        unknown = sorted(set(asked) - set(names))
        if unknown or len(set(names)) < len(names):
            raise ValueError(f"a study needs one job of each name; unknown: {unknown}, there are: {names}")

    def choose(self, only: Sequence[str]) -> tuple[Job, ...]:
        """Return the jobs that some jobs' or figures' names ask for, in the study's order; all for no names."""
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


def digest(setting: Setting, seed: int, fingerprint: str) -> str:
    """Return a digest of everything that a job's result depends on."""
    facts = {"setting": to_json(setting), "seed": seed, "data": fingerprint}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def shortened(job: Job, rounds: int, epochs: int) -> Job:
    """Return a job that runs for fewer rounds, and not beyond them, or fewer epochs if it is centralized."""
    setting = job.setting
    if setting.train == "centralized":
        update = dataclasses.replace(setting.update, epochs=min(setting.update.epochs, epochs))
        return dataclasses.replace(job, setting=dataclasses.replace(setting, update=update))
    done = min(setting.rounds, rounds)
    every = max(1, min(setting.every, done // 5) if setting.every < setting.rounds else done)
    few = setting.few[:1]  # each is compiled by itself
    while done % every:
        every -= 1
    return dataclasses.replace(job, setting=dataclasses.replace(setting, rounds=done, on_to=None, every=every, few=few))
