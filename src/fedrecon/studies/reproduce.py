"""A study from beginning to end: read the data, run what is not finished, write the report."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fedrecon._version import __version__
from fedrecon.engine import start_devices
from fedrecon.progress import Progress, silent
from fedrecon.storage import read_json
from fedrecon.studies.report import compose, to_html, to_markdown
from fedrecon.studies.runner import Runner, Say, keep_compiled, start_compiling_quickly
from fedrecon.studies.study import Data, Results, Study
from fedrecon.studies.tune import tune


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
    data = study.kind.open(plan.data, plan.folder, progress)
    if plan.quick:
        study = dataclasses.replace(study, jobs=tuple(map(study.kind.shorten, study.jobs)))
    seeds = range(1 if plan.quick else plan.seeds)
    suffix = "-quick" if plan.quick else ""
    runner = Runner(study.kind, plan.folder, data, suffix=suffix, say=say, progress=progress)
    wanted = [job for job in study.jobs if job.name in {one.name for one in chosen}]
    try:
        if plan.tuning:
            tune(study.kind, wanted, data, plan.folder, say=say, progress=progress)
        runner.run(wanted, seeds)
    finally:
        path = write_report(study, runner.results(study.jobs, seeds), data, plan)
    return path


def write_report(study: Study, results: Results, data: Data, plan: Plan) -> Path:
    """Write the report of what results there are."""
    tuned_path = plan.folder / "tune.json"
    tuned: Any = read_json(tuned_path) if tuned_path.exists() else None
    parts = compose(study, results, _facts(study, results, data, plan), plan.folder, tuned)
    path = plan.folder / "report.md"
    path.write_text(to_markdown(parts, plan.folder), encoding="utf-8")
    path.with_suffix(".html").write_text(to_html(parts), encoding="utf-8")
    if plan.page is not None:
        plan.page.write_text(to_markdown(parts, None), encoding="utf-8")
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
        f"Finished: {len(results)} of {len(study.jobs)} jobs, {len(finished)} trainings, {seconds / 60:.1f} minutes of "
        f"training and evaluation on {os.cpu_count()} cores ({len(jax.devices())} JAX devices).",
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
    ]
