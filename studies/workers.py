"""Jobs of a study side by side: one process per core, each with one device of its own.

What takes long in a study is compiling, which uses one core, and small rounds, which gain little from a second device:
two processes do almost twice as much as one process with two devices.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedrecon._src.core.progress import silent
from fedrecon._src.simulation.evaluation import DivergenceWarning
from studies.runner import Runner, Say, Task, keep_compiled, start
from studies.study import Kind


class Assignment(NamedTuple):
    """What a process needs to know before its first job."""

    kind: Kind
    source: str
    folder: Path
    quick: bool


def most_workers() -> int:
    """Return how many processes suit this machine: one per core, or a single one if there is an accelerator."""
    if jax.default_backend() != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_side_by_side(assignment: Assignment, tasks: Sequence[Task], workers: int, say: Say) -> None:
    """Run tasks in processes, in order, those of one job in one process; results are in the study's folder."""
    by_job: dict[str, list[Task]] = {}
    for task in tasks:
        by_job.setdefault(task.job.name, []).append(task)
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(told, len(tasks), say))
    listener.start()
    try:
        with ProcessPoolExecutor(min(workers, len(by_job)), context, _begin, (assignment, told)) as pool:
            futures = [pool.submit(_run, some) for some in by_job.values()]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        told.put(None)
        listener.join()


def _listen(told: Any, total: int, say: Say) -> None:
    """Pass on what processes say; when one begins a job, say how many there are and how long they will take."""
    began, begun, done = time.perf_counter(), 0, 0
    for begins, line in iter(told.get, None):
        if not begins:
            done += 1
            say(line)
            continue
        begun += 1
        left = (time.perf_counter() - began) / done * (total - done) if done else None
        say(f"[{begun} of {total}{'' if left is None else f', about {minutes(left)} left'}] {line}")


def minutes(seconds: float) -> str:
    """Write a time in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


_here: list[Any] = []  # in a worker: its runner, and the queue of what it says


def _begin(assignment: Assignment, told: Any) -> None:
    """Make a process ready. An interruption ends it at once; results are written whole or not at all."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore", DivergenceWarning)  # the study's tables count who diverged
    os.environ["NPROC"] = "1"  # threads of XLA: as many as there are cores for this process
    start(1, quick=assignment.quick)
    keep_compiled(assignment.folder, quick=assignment.quick)
    data = assignment.kind.open(assignment.source, assignment.folder, silent)
    _here[:] = [Runner(assignment.kind, assignment.folder, data, quick=assignment.quick), told]


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(tasks: Sequence[Task]) -> None:
    runner, told = _here
    for task in tasks:
        told.put((True, task.title))
        told.put((False, runner.run(task)))
