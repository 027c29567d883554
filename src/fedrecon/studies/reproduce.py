"""A study from beginning to end: read the data, run what is not finished, write the report."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fedrecon._version import __version__
from fedrecon.build import load_ratings
from fedrecon.config import Data
from fedrecon.data import Ratings
from fedrecon.engine import start_devices
from fedrecon.progress import Progress, silent
from fedrecon.storage import read_json
from fedrecon.studies.jobs import Divided
from fedrecon.studies.report import compose, to_html, to_markdown
from fedrecon.studies.runner import Runner, Say, keep_compiled, start_compiling_quickly
from fedrecon.studies.study import Job, Results, Study, shortened
from fedrecon.studies.tune import tune

QUICK_ROUNDS, QUICK_EPOCHS = 40, 3


@dataclass(frozen=True)
class Plan:
    """What of a study to run.

    Attributes:
      data: a name or path that `fedrecon.data.load` knows.
      folder: where everything goes.
      seeds: how many seeds; each is one split, one shuffle and one training seed.
      quick: one seed and fewer rounds.
      only: names of jobs or figures; all for none.
      tuning: try the grids of learning rates on validation data first.
      page: also write the report without pictures here.
    """

    data: str
    folder: Path
    seeds: int = 3
    quick: bool = False
    only: tuple[str, ...] = ()
    tuning: bool = False
    page: Path | None = None


def reproduce(study: Study, plan: Plan, *, say: Say, progress: Progress = silent) -> Path:
    """Run a study and return the path of its report.

    What is finished is not run again; an interruption leaves a report of what is there, and can be continued.
    """
    if plan.seeds < 1:
        raise ValueError(f"there are {plan.seeds} seeds; a study needs at least 1")
    chosen = study.choose(plan.only)
    if plan.quick:
        start_compiling_quickly()
    else:
        start_devices(None)
    plan.folder.mkdir(parents=True, exist_ok=True)
    keep_compiled(plan.folder / ("compiled-quickly" if plan.quick else "compiled"))
    ratings = load_ratings(Data(source=plan.data))
    divided = Divided(ratings, study.max_examples)
    jobs = study.jobs
    if plan.quick:
        jobs = tuple(shortened(job, QUICK_ROUNDS, QUICK_EPOCHS) for job in jobs)
    seeds = range(1 if plan.quick else plan.seeds)
    runner = Runner(plan.folder, divided, suffix="-quick" if plan.quick else "", say=say, progress=progress)
    wanted = [job for job in jobs if job.name in {one.name for one in chosen}]
    try:
        if plan.tuning:
            tune(wanted, divided, plan.folder, say=say, progress=progress)
        runner.run(wanted, seeds)
    finally:
        path = write_report(study, jobs, runner.results(jobs, seeds), ratings, plan)
    return path


def write_report(study: Study, jobs: Sequence[Job], results: Results, ratings: Ratings, plan: Plan) -> Path:
    """Write the report of what results there are."""
    tuned_path = plan.folder / "tune.json"
    tuned: Any = read_json(tuned_path) if tuned_path.exists() else None
    now = Study(study.name, study.title, tuple(jobs), study.rows, study.beyond, study.figures, study.claims)
    parts = compose(now, results, _facts(results, jobs, ratings, plan), plan.folder, tuned)
    path = plan.folder / "report.md"
    path.write_text(to_markdown(parts, plan.folder), encoding="utf-8")
    path.with_suffix(".html").write_text(to_html(parts), encoding="utf-8")
    if plan.page is not None:
        plan.page.write_text(to_markdown(parts, None), encoding="utf-8")
    return path


def _facts(results: Results, jobs: Sequence[Job], ratings: Ratings, plan: Plan) -> list[str]:
    """Say what was run, from what is there."""
    finished = [result for some in results.values() for result in some]
    seeds = sorted({result["seed"] for result in finished})
    seconds = sum(result["seconds"] for result in finished)
    versions = {"fedrecon": __version__, "python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (jax, np, optax)}
    source = Path(plan.data).name
    return [
        f"Command: `fedrecon reproduce movielens --data {source}{' --quick' if plan.quick else ''}`.",
        f"Data: {source}, {ratings.num_examples:,} ratings of {ratings.num_items:,} items by {len(ratings):,} users "
        f"(fingerprint {ratings.fingerprint()}).",
        "Unseen users: users divided at random 80/10/10, half of a user's ratings support, half query. "
        "Seen users: every user's ratings divided 80/10/10 by time. "
        "At most 300 ratings of a user are used to train, after a shuffle.",
        f"Seeds: {', '.join(map(str, seeds)) or 'none'}; each is one shuffle of everybody's ratings and one training "
        "seed. The users of each part are the same for all seeds. Settings were chosen on validation users.",
        f"Finished: {len(results)} of {len(jobs)} jobs, {len(finished)} trainings, {seconds / 60:.1f} minutes of "
        f"training and evaluation on {os.cpu_count()} cores ({len(jax.devices())} JAX devices).",
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
    ]
