"""A study from beginning to end: read the data, run what is not finished, write the report."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.storage.arrays import read_json
from fedrecon._src.storage.parts import check_file
from fedrecon._version import __version__
from studies.report import compose, to_html, to_markdown, write_page
from studies.runner import Runner, Say, Task, keep_compiled, start
from studies.study import Data, Results, Study
from studies.tune import tune
from studies.workers import Assignment, minutes, most_workers, run_side_by_side

MOST_SEEDS, MOST_WORKERS = 1000, 1000


@dataclass(frozen=True)
class Plan:
    """What to run of a study.

    Attributes:
      data: a name or path that `fedrecon.data.load` knows.
      folder: where everything goes.
      seeds: how many seeds; each is one split, one shuffle and one training seed.
      quick: one seed and fewer rounds.
      only: names of jobs or figures; all if empty.
      tuning: try the grids of learning rates on validation data first.
      page: also write the report to this file, its pictures to a folder figures/ beside it.
      workers: run this many jobs at a time, each in a process with one device; None for as many as suit the machine. 1
        runs one job at a time, on all devices.
    """

    data: str
    folder: Path
    seeds: int = 3
    quick: bool = False
    only: tuple[str, ...] = ()
    tuning: bool = False
    page: Path | None = None
    workers: int | None = None


def reproduce(study: Study, plan: Plan, *, say: Say, progress: Progress = silent) -> Path:
    """Run a study and return the path of its report.

    What is finished is not run again. After an interruption there is a report of what is finished, and the study can be
    continued.
    """
    if not 1 <= plan.seeds <= MOST_SEEDS or (plan.workers is not None and not 1 <= plan.workers <= MOST_WORKERS):
        raise ValueError(
            f"a study needs from 1 to {MOST_SEEDS} seeds and from 1 to {MOST_WORKERS} workers, not {plan.seeds} and "
            f"{plan.workers}"
        )
    chosen = study.choose(plan.only)
    if plan.page is not None:
        check_file(plan.page, f"# {study.title}".encode(), f"a page of the study {study.name}")
    plan.folder.mkdir(parents=True, exist_ok=True)
    start(None, quick=plan.quick)
    keep_compiled(plan.folder, quick=plan.quick)
    data = study.kind.open(plan.data, plan.folder, progress)
    if plan.quick:
        study = dataclasses.replace(study, jobs=tuple(map(study.kind.shorten, study.jobs)))
    seeds = range(1 if plan.quick else plan.seeds)
    runner = Runner(study.kind, plan.folder, data, quick=plan.quick, progress=progress)
    wanted = [job for job in study.jobs if job.name in {one.name for one in chosen}]
    try:
        if plan.tuning:
            tune(study.kind, wanted, data, plan.folder, say=say, progress=progress)
        _run(study, runner, runner.unfinished(wanted, seeds), plan, say)
    finally:
        path = write_report(study, runner.results(study.jobs, seeds), data, plan)
    return path


def _run(study: Study, runner: Runner, tasks: Sequence[Task], plan: Plan, say: Say) -> None:
    """Run tasks one after another, or in processes side by side."""
    workers = most_workers() if plan.workers is None else plan.workers
    if workers > 1 and tasks:
        run_side_by_side(Assignment(study.kind, plan.data, plan.folder, plan.quick), tasks, workers, say)
        return
    began = time.perf_counter()
    for place, task in enumerate(tasks):
        left = (time.perf_counter() - began) / place * (len(tasks) - place) if place else None
        say(f"[{place + 1} of {len(tasks)}{'' if left is None else f', about {minutes(left)} left'}] {task.title}")
        say(runner.run(task))


def write_report(study: Study, results: Results, data: Data, plan: Plan) -> Path:
    """Write the report of the results there are."""
    tuned_path = plan.folder / "tune.json"
    tuned: Any = read_json(tuned_path) if tuned_path.exists() else None
    parts = compose(study, results, _facts(study, results, data, plan), plan.folder, tuned, quick=plan.quick)
    path = plan.folder / "report.md"
    path.write_text(to_markdown(parts, plan.folder), encoding="utf-8")
    path.with_suffix(".html").write_text(to_html(parts), encoding="utf-8")
    if plan.page is not None:
        write_page(plan.page, parts, study.name)
    return path


def _facts(study: Study, results: Results, data: Data, plan: Plan) -> list[str]:
    """Say what was run, from what is there."""
    finished = [result for some in results.values() for result in some]
    seeds = sorted({result["seed"] for result in finished})
    seconds = sum(result["seconds"] for result in finished)
    versions = {"fedrecon": __version__, "python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (jax, np, optax)}
    source = Path(plan.data).name
    return [
        f"Command: `fedrecon reproduce {study.name} --data {source}{' --quick' if plan.quick else ''}`.",
        *data.facts(),
        f"Seeds: {', '.join(map(str, seeds)) or 'none'}. Who is in which part is the same for all seeds. Settings were "
        "chosen on validation data.",
        f"Finished: {len(results)} of {len(study.jobs)} jobs, {len(finished)} trainings, {seconds / 60:.1f} minutes "
        f"of training and evaluation added up, on {os.cpu_count()} cores, where several run side by side.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
    ]
