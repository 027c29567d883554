"""Run the jobs of a study in order, each once: finished ones are read from their files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from fedrecon.config import to_json
from fedrecon.engine import start_devices
from fedrecon.progress import Progress, silent
from fedrecon.storage import StorageError, read_json, write_json
from fedrecon.studies.study import Data, Job, Kind, Result, digest

Say = Callable[[str], None]


def keep_compiled(folder: Path) -> None:
    """Let JAX keep what it compiles in a folder, if it keeps it nowhere yet: a second seed or run compiles nothing."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start_compiling_quickly() -> None:
    """Start devices such that XLA compiles in half the time, code that is slower by half: worth it for short runs.

    XLA reads its flags when JAX starts; where JAX has started already nothing changes.
    """
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} --xla_backend_optimization_level=1"
    try:
        start_devices(None)
    finally:
        del os.environ["XLA_FLAGS"]
        if before is not None:
            os.environ["XLA_FLAGS"] = before


class Runner:
    """Runs jobs and keeps their results in `folder/rows`, one file a job and seed."""

    def __init__(
        self, kind: Kind, folder: Path, data: Data, *, suffix: str = "", say: Say, progress: Progress = silent
    ):
        """Keep results in `folder`, in files that end with `suffix`; `say` is told what is running and what is left."""
        self.folder, self._suffix = folder / "rows", suffix
        self._kind, self._data, self._say, self._progress = kind, data, say, progress
        self._fingerprint = data.fingerprint()

    def run(self, jobs: Sequence[Job], seeds: Sequence[int]) -> None:
        """Run what is not finished, in order, all seeds of a job one after another."""
        todo = [(job, seed) for job in jobs for seed in seeds if self.finished(job, seed) is None]
        total = len(jobs) * len(seeds)
        if total > len(todo):
            self._say(f"{total - len(todo)} of {total} are finished already")
        self.folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        for place, (job, seed) in enumerate(todo):
            left = (
                f", about {_minutes((time.perf_counter() - began) / place * (len(todo) - place))} left" if place else ""
            )
            self._say(f"[{place + 1} of {len(todo)}{left}] {job.title}, seed {seed}")
            self._run_one(job, seed)

    def _run_one(self, job: Job, seed: int) -> None:
        found = self._kind.run(job.setting, self._data, seed, "test", self._progress)
        facts = {
            "job": job.name,
            "title": job.title,
            "seed": seed,
            "digest": digest(job.setting, seed, self._fingerprint),
            "setting": to_json(job.setting),
        }
        write_json(self._path(job, seed), facts | found)
        at = next(entry for entry in found["evaluations"] if entry["round"] == job.setting.rounds)
        for measure in job.setting.measures:
            self._say(f"    {measure}: {self._kind.tell(at[measure]['micro'])}")

    def finished(self, job: Job, seed: int) -> Result | None:
        """Return the result of a job, if it was run with the same settings on the same data."""
        path = self._path(job, seed)
        if not path.exists():
            return None
        try:
            found: dict[str, Any] = read_json(path)
        except StorageError:
            return None
        return found if found.get("digest") == digest(job.setting, seed, self._fingerprint) else None

    def results(self, jobs: Sequence[Job], seeds: Sequence[int]) -> dict[str, list[Result]]:
        """Return all results there are, by job."""
        found = {job.name: [self.finished(job, seed) for seed in seeds] for job in jobs}
        return {name: [one for one in some if one is not None] for name, some in found.items() if any(some)}

    def _path(self, job: Job, seed: int) -> Path:
        return self.folder / f"{job.name}-{seed}{self._suffix}.json"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
