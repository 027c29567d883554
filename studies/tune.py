"""Try settings over grids, on validation data; never on what a study reports."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrecon._src.app.config import to_json
from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.storage.arrays import read_json, write_json
from studies.runner import Say
from studies.study import Data, Job, Kind, changed, digest


def candidates(job: Job) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the values and settings of a job's grid, trained no further than the row reports, with its main measure."""
    now = dataclasses.replace(
        job.setting, on_to=None, every=job.setting.rounds, measures=tuple(job.setting.measures[:1])
    )
    for values in itertools.product(*job.grid.values()):
        chosen = dict(zip(job.grid, values, strict=True))
        setting = now
        for path, value in chosen.items():
            setting = changed(setting, path, value)
        yield chosen, setting


def tune(kind: Kind, jobs: Sequence[Job], data: Data, folder: Path, *, say: Say, progress: Progress = silent) -> Any:
    """Train every candidate of every job that has a grid with the first seed, and store its results on validation data.

    Results are in `folder/tune.json`; candidates that are in it already are not trained again.
    """
    path = folder / "tune.json"
    fingerprint = data.fingerprint()
    known = {one["digest"]: one for one in read_json(path)["tried"]} if path.exists() else {}
    todo = [(job, *candidate) for job in jobs if job.grid for candidate in candidates(job)]
    say(f"tuning: {len(todo)} candidates, measured on validation data")
    for place, (job, values, setting) in enumerate(todo):
        key = digest(setting, 0, fingerprint) + job.name
        if key in known:
            continue
        found = kind.run(setting, data, 0, "valid", progress)
        micro = found["evaluations"][-1][setting.measures[0]]["micro"]
        known[key] = {
            "digest": key,
            "job": job.name,
            "values": values,
            "loss": kind.loss(micro),
            "told": kind.tell(micro),
            "rounds": setting.rounds,
            "setting": to_json(setting),
        }
        say(f"[{place + 1} of {len(todo)}] {job.title}, {in_words(values)}: {kind.tell(micro)}")
        write_json(path, {"seed": 0, "tried": _ranked(list(known.values()))})
    return read_json(path)


def _ranked(tried: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the best candidate of each job: the lowest finite loss."""
    best: dict[str, float] = {}
    for one in tried:
        loss = one["loss"]
        if loss is not None and loss == loss:
            best[one["job"]] = min(best.get(one["job"], loss), loss)
    return [one | {"best": one["loss"] == best.get(one["job"])} for one in tried]


def in_words(values: Mapping[str, Any]) -> str:
    """Write chosen values, each after the name of what has it: `server 0.1, ridge 5`."""
    return ", ".join(f"{_name(path)} {value:g}" for path, value in values.items())


def _name(path: str) -> str:
    owner, _, name = path.rpartition(".")
    return owner if name == "learning_rate" else name.replace("_", " ")
