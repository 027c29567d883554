"""Run the jobs of a study, each once: finished ones are read from their files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from fedrecon._src.app.config import to_json
from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.simulation.multihost import start_jax_devices
from fedrecon._src.storage.arrays import StorageError
from fedrecon._src.storage.sealed import read_sealed, write_sealed
from studies.study import Data, Job, Kind, Result, digest

Say = Callable[[str], None]


def start(devices: int | None, *, quick: bool) -> None:
    """Start devices; with `quick`, XLA compiles in half the time, but the code is slower by half.

    XLA reads its flags when JAX starts; if JAX has already started, nothing changes.
    """
    with _compiling_quickly() if quick else contextlib.nullcontext():
        start_jax_devices(devices)
        jax.devices()


@contextlib.contextmanager
def _compiling_quickly() -> Iterator[None]:
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} --xla_backend_optimization_level=1"
    try:
        yield
    finally:
        del os.environ["XLA_FLAGS"]
        if before is not None:
            os.environ["XLA_FLAGS"] = before


def keep_compiled(folder: Path, *, quick: bool) -> None:
    """Let JAX keep what it compiles in a folder, unless it has one already: a second seed or run compiles nothing."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    kept = folder / ("compiled-quickly" if quick else "compiled")
    kept.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(kept.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Task(NamedTuple):
    """A job to run with one seed."""

    job: Job
    seed: int

    @property
    def title(self) -> str:
        """What a reader calls it."""
        return f"{self.job.title}, seed {self.seed}"


class Runner:
    """Runs jobs and keeps their results in `folder/rows`, one file per job and seed."""

    def __init__(self, kind: Kind, folder: Path, data: Data, *, quick: bool = False, progress: Progress = silent):
        """Keep results in `folder`, those of quick runs in files of their own."""
        self.folder, self._suffix = folder / "rows", "-quick" if quick else ""
        self._kind, self._data, self._progress = kind, data, progress
        self._fingerprint = data.fingerprint()

    def unfinished(self, jobs: Sequence[Job], seeds: Sequence[int]) -> list[Task]:
        """List what is not finished, in order, all seeds of a job one after another."""
        return [Task(job, seed) for job in jobs for seed in seeds if self.finished(job, seed) is None]

    def run(self, task: Task) -> str:
        """Run one task, keep its result, and say what it was."""
        job, seed = task
        found = self._kind.run(job.setting, self._data, seed, "test", self._progress)
        facts = {
            "job": job.name,
            "title": job.title,
            "seed": seed,
            "digest": digest(job.setting, seed, self._fingerprint),
            "setting": to_json(job.setting),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_sealed(self._path(job, seed), facts | found)
        at = next(entry for entry in found["evaluations"] if entry["round"] == job.setting.rounds)
        told = [f"{measure}: {self._kind.tell(at[measure]['micro'])}" for measure in job.setting.measures]
        return f"    {task.title}: {'; '.join(told)}"

    def finished(self, job: Job, seed: int) -> Result | None:
        """Return the result of a job, if it was run with the same settings on the same data."""
        path = self._path(job, seed)
        if not path.exists():
            return None
        try:
            found = read_sealed(path, unsealed={})
        except StorageError:
            return None
        return found if found.get("digest") == digest(job.setting, seed, self._fingerprint) else None

    def results(self, jobs: Sequence[Job], seeds: Sequence[int]) -> dict[str, list[Result]]:
        """Return all results there are, by job."""
        found = {job.name: [self.finished(job, seed) for seed in seeds] for job in jobs}
        return {name: [one for one in some if one is not None] for name, some in found.items() if any(some)}

    def _path(self, job: Job, seed: int) -> Path:
        return self.folder / f"{job.name}-{seed}{self._suffix}.json"
