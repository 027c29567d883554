"""Learning rates over the paper's grids, on validation data; never on what a study reports."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedrecon.config import to_json
from fedrecon.progress import Progress, silent
from fedrecon.storage import read_json, write_json
from fedrecon.studies.jobs import Divided, run_job
from fedrecon.studies.runner import Say
from fedrecon.studies.study import Job, Setting, digest

KINDS = ("server", "reconstruct", "update")


def candidates(job: Job) -> Iterator[Setting]:
    """Yield the settings of a job's grid, trained no further than the row reports."""
    assert job.grid is not None
    now = dataclasses.replace(job.setting, on_to=None, every=job.setting.rounds, few=())
    choices = [getattr(job.grid, kind) or (getattr(now, kind).learning_rate,) for kind in KINDS]
    for rates in itertools.product(*choices):
        parts = {
            kind: dataclasses.replace(getattr(now, kind), learning_rate=rate)
            for kind, rate in zip(KINDS, rates, strict=True)
        }
        yield dataclasses.replace(now, **parts)


def tune(jobs: Sequence[Job], divided: Divided, folder: Path, *, say: Say, progress: Progress = silent) -> Any:
    """Train every candidate of every job that has a grid with the first seed, and store what it had on validation data.

    Results are in `folder/tune.json`; candidates that are in it already are not trained again.
    """
    path = folder / "tune.json"
    fingerprint = divided.ratings.fingerprint()
    known = {one["digest"]: one for one in read_json(path)["tried"]} if path.exists() else {}
    todo = [(job, setting) for job in jobs if job.grid is not None for setting in candidates(job)]
    say(f"tuning: {len(todo)} candidates, measured on validation data")
    for place, (job, setting) in enumerate(todo):
        key = digest(setting, 0, fingerprint) + job.name
        if key in known:
            continue
        found = run_job(setting, divided, 0, part="valid", progress=progress)
        micro = found["evaluations"][-1][setting.measures[-1]]["micro"]
        known[key] = _entry(job, setting, micro) | {"digest": key}
        say(f"[{place + 1} of {len(todo)}] {job.title}, {_rates(job, setting)}: RMSE {micro['rmse']:.4f}")
        write_json(path, {"seed": 0, "tried": _ranked(list(known.values()))})
    return read_json(path)


def _entry(job: Job, setting: Setting, micro: dict[str, float]) -> dict[str, Any]:
    rates = {kind: getattr(setting, kind).learning_rate if getattr(job.grid, kind) else None for kind in KINDS}
    return {
        "job": job.name,
        **rates,
        "rmse": micro["rmse"],
        "accuracy": micro["accuracy"],
        "rounds": setting.rounds,
        "best": False,
        "setting": to_json(setting),
    }


def _ranked(tried: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the best candidate of each job: the lowest finite RMSE."""
    best: dict[str, float] = {}
    for one in tried:
        rmse = one["rmse"]
        if rmse is not None and rmse == rmse:
            best[one["job"]] = min(best.get(one["job"], rmse), rmse)
    return [one | {"best": one["rmse"] == best.get(one["job"])} for one in tried]


def _rates(job: Job, setting: Setting) -> str:
    return ", ".join(f"{kind} {getattr(setting, kind).learning_rate:g}" for kind in KINDS if getattr(job.grid, kind))
