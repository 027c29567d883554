"""Runs the jobs of a study, in several processes, and writes its report. Finished jobs are read from their files.

Most of a study's time goes into compiling, which uses one core, and into small rounds, which gain little from a second
one: two processes with one core each do almost twice as much as one process with two.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedrecon as fr
from fedrecon._src.core.display import Progress, silent
from studies.report import compose, to_html, to_markdown, write_page
from studies.study import Data, Job, Kind, Result, Results, Study, evaluation_at, with_value

Log = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to run of a study.

    Attributes:
      data: a data set's name or path.
      folder: for results and reports.
      seeds: how many seeds.
      quick: one seed and fewer rounds.
      only: names of jobs or figures; all if empty.
      tune: first try the grids of settings on validation data.
      page: also write the report to this file, its pictures to a folder next to it.
      workers: jobs to run at a time, each in a process with one core; by default one per core, or a single one if there
        is an accelerator.
    """

    data: str
    folder: Path
    seeds: int = 3
    quick: bool = False
    only: tuple[str, ...] = ()
    tune: bool = False
    page: Path | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.seeds < 1 or (self.workers is not None and self.workers < 1):
            raise ValueError(f"`seeds` and `workers` must be at least 1 (got {self.seeds} and {self.workers})")


def reproduce(study: Study, plan: Plan, *, log: Log, progress: Progress = silent) -> Path:
    """Run what is not finished of a study and return the path of its report, also written after an interruption."""
    names = {job.name for job in study.select(plan.only)}
    claim_folder(plan.folder, study.name)
    if plan.page is not None and plan.page.exists() and not plan.page.read_text().startswith(f"# {study.title}"):
        raise ValueError(f"`page` must be a new file or a page of this study (got {plan.page})")
    data = start(study.kind, plan.data, plan.folder, progress)
    if plan.quick:
        shorten = functools.partial(Job.shorten, rounds=study.kind.quick_rounds, changes=study.kind.quick_changes)
        study = dataclasses.replace(study, jobs=tuple(map(shorten, study.jobs)))
    jobs = [job for job in study.jobs if job.name in names]
    seeds = range(1 if plan.quick else plan.seeds)
    store = Store(plan.folder, data.fingerprint(), quick=plan.quick)
    try:
        if plan.tune:
            tune(study.kind, jobs, data, plan.folder, log=log, progress=progress)
        tasks = [(job, seed) for job in jobs for seed in seeds if store.load(job, seed) is None]
        run_tasks(study.kind, store, data, tasks, plan, log, progress)
    finally:
        path = write_report(study, store.load_all(study.jobs, seeds), data, plan)
    return path


def claim_folder(folder: Path, name: str) -> None:
    """Make a folder a study's own; refuse one that has other files."""
    marker = folder / "study.txt"
    if folder.exists() and any(folder.iterdir()) and not (marker.exists() and marker.read_text() == name):
        raise ValueError(f"`out` must be a new or empty folder, or one of the study {name} (got {folder})")
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(name)


def start(kind: Kind, source: str, folder: Path, progress: Progress = silent) -> Data:
    """Load the data, and let JAX keep what it compiles in the study's folder unless it has one already."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str((folder / "compiled").resolve()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    warnings.simplefilter("ignore", fr.DivergenceWarning)  # the tables count diverged clients
    return kind.load(source, progress)


class Store:
    """The results of a study: one file per job and seed in `folder/rows`."""

    def __init__(self, folder: Path, fingerprint: str, *, quick: bool = False):
        """Use `folder` for results on data with this fingerprint; quick runs have their own files."""
        self.folder, self._fingerprint, self._suffix = folder / "rows", fingerprint, "-quick" if quick else ""

    def save(self, job: Job, seed: int, result: Result) -> None:
        """Write a result, whole or not at all."""
        facts = {"job": job.name, "title": job.title, "seed": seed, "settings": job.settings}
        facts["digest"] = job.digest(seed, self._fingerprint)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(job, seed), facts | dict(result))

    def load(self, job: Job, seed: int) -> Result | None:
        """Return the result of a job, if it was run with the same settings on the same data."""
        try:
            result = json.loads(self._path(job, seed).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return result if result.get("digest") == job.digest(seed, self._fingerprint) else None

    def load_all(self, jobs: Sequence[Job], seeds: Sequence[int]) -> dict[str, list[Result]]:
        """Return all results there are, by job."""
        loaded = {job.name: [self.load(job, seed) for seed in seeds] for job in jobs}
        return {name: [r for r in results if r is not None] for name, results in loaded.items() if any(results)}

    def _path(self, job: Job, seed: int) -> Path:
        return self.folder / f"{job.name}-{seed}{self._suffix}.json"


def write_json(path: Path, value: Any) -> None:
    """Write JSON with NaN as null, replacing the file at once."""

    def without_nan(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: without_nan(entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [without_nan(entry) for entry in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(without_nan(value), default=float))
    partial.replace(path)


# ---- processes ----


def run_tasks(
    kind: Kind,
    store: Store,
    data: Data,
    tasks: Sequence[tuple[Job, int]],
    plan: Plan,
    log: Log,
    progress: Progress = silent,
) -> None:
    """Run jobs with seeds, all seeds of a job in one process, and log each when it is finished."""
    by_job = [list(group) for _, group in itertools.groupby(tasks, key=lambda task: task[0].name)]
    workers = min(plan.workers or default_workers(), len(by_job))
    report = _Reporter(len(tasks), log)
    if workers <= 1:
        for job, seed in tasks:
            report(run_task(kind, store, data, job, seed, progress))
        return
    context = multiprocessing.get_context("spawn")
    setup = (kind, plan.data, plan.folder, plan.quick)
    with ProcessPoolExecutor(workers, context, _start_worker, setup) as pool:
        futures = [pool.submit(_run_in_worker, group) for group in by_job]
        try:
            for future in as_completed(futures):
                for line in future.result():
                    report(line)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def default_workers() -> int:
    """Return one process per core, or a single one if there is an accelerator."""
    return len(os.sched_getaffinity(0)) if jax.default_backend() == "cpu" else 1


def run_task(kind: Kind, store: Store, data: Data, job: Job, seed: int, progress: Progress = silent) -> str:
    """Run one job with one seed, save its result, and return a line about it."""
    result = kind.run(job, data, seed, "test", progress)
    store.save(job, seed, result)
    entry = evaluation_at(result, job.config.rounds)
    return f"{job.title}, seed {seed}: " + "; ".join(f"{m}: {kind.summarize(entry[m]['micro'])}" for m in job.measures)


class _Reporter:
    """Logs finished jobs, how many there are, and how long the others will take."""

    def __init__(self, total: int, log: Log):
        self._total, self._log, self._done, self._start = total, log, 0, time.perf_counter()

    def __call__(self, line: str) -> None:
        self._done += 1
        minutes = (time.perf_counter() - self._start) / self._done * (self._total - self._done) / 60
        self._log(f"[{self._done} of {self._total}, about {minutes:.0f} min left] {line}")


_worker: list[Any] = []  # in a worker process: the kind of study, its store and its data


def _start_worker(kind: Kind, source: str, folder: Path, quick: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # results are written whole or not at all
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["NPROC"] = "1"  # threads of XLA
    data = start(kind, source, folder)
    _worker[:] = [kind, Store(folder, data.fingerprint(), quick=quick), data]


def _exit_with_parent() -> None:
    """End this process when its parent is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(tasks: Sequence[tuple[Job, int]]) -> list[str]:
    kind, store, data = _worker
    return [run_task(kind, store, data, job, seed) for job, seed in tasks]


# ---- tuning ----


def candidates(job: Job) -> Iterator[tuple[dict[str, Any], Job]]:
    """Yield the values of a job's grid, and the job with them, trained no further than the row reports."""
    once = dataclasses.replace(job.config, evaluate_every=job.config.rounds)
    for values in itertools.product(*job.grid.values()):
        chosen = dict(zip(job.grid, values, strict=True))
        config = once
        for path, value in chosen.items():
            config = with_value(config, path, value)
        yield chosen, dataclasses.replace(job, config=config, continue_to=None, measures=job.measures[:1])


def tune(kind: Kind, jobs: Sequence[Job], data: Data, folder: Path, *, log: Log, progress: Progress = silent) -> None:
    """Train every candidate of every job with a grid, with seed 0; write metrics on validation data to tune.json."""
    path = folder / "tune.json"
    trials = {trial["digest"]: trial for trial in json.loads(path.read_text())} if path.exists() else {}
    for job in jobs:
        for values, candidate in candidates(job) if job.grid else ():
            digest = candidate.digest(0, data.fingerprint())
            if digest in trials:
                continue
            micro = kind.run(candidate, data, 0, "valid", progress)["evaluations"][-1][job.measures[0]]["micro"]
            facts = {"digest": digest, "job": job.name, "rounds": candidate.config.rounds, "values": values}
            trials[digest] = facts | {"loss": kind.loss(micro), "metrics": kind.summarize(micro)}
            log(f"{job.title}, {values}: {kind.summarize(micro)}")
            write_json(path, list(trials.values()))


# ---- report ----


def write_report(study: Study, results: Results, data: Data, plan: Plan) -> Path:
    """Write the report of the results there are."""
    tuned = plan.folder / "tune.json"
    trials = json.loads(tuned.read_text()) if tuned.exists() else []
    blocks = compose(study, results, _facts(study, results, data, plan), plan.folder, trials, quick=plan.quick)
    path = plan.folder / "report.md"
    path.write_text(to_markdown(blocks, plan.folder), encoding="utf-8")
    path.with_suffix(".html").write_text(to_html(blocks), encoding="utf-8")
    if plan.page is not None:
        write_page(plan.page, blocks, study.name)
    return path


def _facts(study: Study, results: Results, data: Data, plan: Plan) -> list[str]:
    finished = [result for group in results.values() for result in group]
    seeds = sorted({result["seed"] for result in finished})
    minutes = sum(result["seconds"] for result in finished) / 60
    versions = {"fedrecon": fr.__version__, "python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (jax, np, optax)}
    options = f"--data {Path(plan.data).name} --out FOLDER{' --quick' * plan.quick}"
    return [
        f"Command: `python -m studies {study.name} {options}`.",
        *data.facts(),
        f"Seeds: {', '.join(map(str, seeds)) or 'none'}; all have the same training, validation and test clients. "
        "Settings were chosen on validation data.",
        f"Finished: {len(results)} of {len(study.jobs)} jobs, {len(finished)} trainings, {minutes:.1f} minutes in all, "
        f"on {os.cpu_count()} cores, one job on each.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
    ]
