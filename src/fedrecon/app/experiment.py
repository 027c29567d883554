"""A whole run: data, training, evaluation on users never met, and the folder that it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fedrecon._version import __version__
from fedrecon.algorithm import Algorithm
from fedrecon.app.build import build_algorithm, build_layout, build_split
from fedrecon.app.config import Config, ConfigError, config_from_json, differences, to_json
from fedrecon.app.saved import SavedModel, save_model
from fedrecon.app.tasks import Users, task_of
from fedrecon.data.errors import DataError
from fedrecon.disk.arrays import StorageError, read_json
from fedrecon.disk.runs import RunFolder
from fedrecon.engine import Layout, start_devices
from fedrecon.evaluation import Evaluation, Evaluator
from fedrecon.progress import Progress, silent
from fedrecon.training import OnRecord, Run, train


@dataclass(frozen=True)
class Outcome:
    """What a run leaves in memory.

    Attributes:
      run: parameters and history.
      algorithm: what was run.
      users: who trained, validated and tested.
      model: as saved.
      evaluator: of the validation users; `evaluator.on(users)` measures others with the same compiled code.
      test: how the model serves the test users; None after an interruption or without any.
      left_out: counts of what was not read of the data.
    """

    run: Run
    algorithm: Algorithm
    users: Users
    model: SavedModel[Any]
    evaluator: Evaluator | None
    test: Evaluation | None
    left_out: Mapping[str, int]


def run_experiment(
    config: Config,
    folder: RunFolder,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    on_record: OnRecord | None = None,
) -> Outcome:
    """Train as settings say, evaluate on the test users, and write everything to a folder.

    Args:
      config: the settings.
      folder: where everything goes.
      resume: go on from the folder's newest checkpoint; begin if it has none.
      overwrite: replace a run that the folder holds.
      progress: a progress display.
      on_record: called with every round's and evaluation's record.

    Raises:
      StorageError: the folder holds another run, and neither option allows for that.
    """
    start_devices(config.devices)
    task = task_of(config)
    try:
        earlier = _prepare(config, folder, resume, overwrite)
        data = task.load(config, progress)
        facts = _facts(config, data.fingerprint(), earlier)
        if earlier and earlier["data"]["fingerprint"] != facts["data"]["fingerprint"]:
            raise StorageError(
                f"{config.data.source} is no longer what the run in {folder.path} was trained on "
                f"(fingerprint {facts['data']['fingerprint']}, was {earlier['data']['fingerprint']}); "
                "it cannot be resumed: bring the data back, or begin anew with --overwrite"
            )
        users, legend = task.divide(config, data, progress), task.legend(config, data)
    except BaseException:
        with contextlib.suppress(OSError):  # leave no empty folder behind for a name that was mistyped
            folder.path.rmdir()
        raise
    algorithm = build_algorithm(config, task.build_model(config, legend))
    place = build_layout(config, algorithm.model)
    facts["data"] |= {"users": [len(part) for part in users], **task.facts(config, data), "left_out": {**data.skipped}}
    facts["layout"] = {"devices": place.devices, "block": place.block}
    folder.describe(facts)
    evaluator = make_evaluator(config, algorithm, users, place)
    run = train(
        algorithm,
        users.train,
        rounds=config.rounds,
        sampling=config.sampling,
        valid=evaluator,
        evaluate_every=config.evaluate_every,
        seed=config.seed,
        folder=folder,
        checkpoint_every=config.checkpoint_every,
        place=place,
        progress=progress,
        on_record=on_record,
    )
    model = save_model(folder.model_path, config, run.params, legend)
    test = None
    if not run.interrupted and len(users.test):
        on_test = evaluator.on(users.test) if evaluator else make_evaluator(config, algorithm, users, place, "test")
        test = on_test(run.params, progress=progress) if on_test else None
    folder.describe(
        facts
        | {
            "ended": _now(),
            "rounds": run.rounds,
            "interrupted": run.interrupted,
            "test": test.summary() if test else None,
        }
    )
    return Outcome(run, algorithm, users, model, evaluator, test, data.skipped)


def make_evaluator(
    config: Config, algorithm: Algorithm, users: Users, place: Layout | None = None, part: str = "valid"
) -> Evaluator | None:
    """Return an evaluator of the users of a part, split as settings say; None if there are none."""
    chosen = getattr(users, part)
    if not len(chosen):
        return None
    split = build_split(config.split.evaluate, config.split)
    return Evaluator(algorithm, chosen, split=split, seed=config.seed, place=place)


def users_of_run(path: str | Path, progress: Progress = silent) -> tuple[Config, Users]:
    """Load the data of a finished run again, divided as it was.

    Args:
      path: the folder of the run.
      progress: a progress display.

    Raises:
      StorageError: the folder holds no run, or is damaged.
      DataError: the data is not there any more, or is not what it was.
    """
    config, facts = read_run(path)
    task = task_of(config)
    try:
        data = task.load(_located(config, facts), progress)
    except DataError as problem:
        raise DataError(
            f"the data of the run in {path} cannot be loaded again: {problem} "
            f"To evaluate on other {task.people}, give their data with --{task.name} FILE."
        ) from None
    found = data.fingerprint()
    if found != facts["data"]["fingerprint"]:
        raise DataError(
            f"{config.data.source} is no longer what the run in {path} was trained on "
            f"(fingerprint {found}, was {facts['data']['fingerprint']}), so its test {task.people} are not known"
        )
    return config, task.divide(config, data, progress)


def read_run(path: str | Path) -> tuple[Config, dict[str, Any]]:
    """Read the settings of a run and everything else in its `run.json`."""
    file = Path(path) / "run.json"
    if not Path(path).is_dir():
        raise StorageError(f"{path} is not a folder; expected the folder of a run")
    facts = read_json(file)
    try:
        config = config_from_json(facts["config"], str(file))
        facts["data"]["fingerprint"]
    except ConfigError as problem:
        raise StorageError(str(problem)) from None
    except (KeyError, TypeError) as problem:
        raise StorageError(f"{file} is damaged: {problem!r}") from None
    return config, facts


def _prepare(config: Config, folder: RunFolder, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Make room in the folder, or return the `run.json` of the run to go on with."""
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: one keeps what the other removes")
    done = folder.rounds_done()
    if done is None or overwrite:
        folder.forget()
        return None
    if not resume:
        raise StorageError(
            f"{folder.path} holds a run after {done} rounds; continue it with --resume, or replace it with --overwrite"
        )
    settings, facts = read_run(folder.path)
    if settings.task != config.task:
        raise StorageError(f"the run in {folder.path} is on {settings.task}, not on {config.task}; use another folder")
    changed = differences(to_json(settings), to_json(config))
    if changed:
        raise StorageError(
            f"the run in {folder.path} has other settings: {', '.join(changed)}; "
            "resume it with its own, or begin anew with --overwrite"
        )
    if done > config.rounds:
        raise StorageError(f"the run in {folder.path} is past round {config.rounds}: it has done {done}")
    return facts


def _facts(config: Config, fingerprint: str, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Say what `run.json` says from the beginning."""
    source = Path(config.data.source)
    return {
        "config": to_json(config),
        "seed": config.seed,
        "versions": {
            "python": platform.python_version(),
            "fedrecon": __version__,
            **{module.__name__: module.__version__ for module in (jax, np, optax)},
        },
        "data": {
            "source": config.data.source,
            "path": str(source.resolve()) if source.exists() else None,
            "fingerprint": fingerprint,
        },
        "started": earlier["started"] if earlier else _now(),
        "resumed": [*earlier["resumed"], _now()] if earlier else [],
        "ended": None,
        "rounds": None,
        "interrupted": None,
        "test": None,
    }


def _located(config: Config, facts: dict[str, Any]) -> Config:
    """Find files by the places they were at, wherever the command is run from now."""
    places = {"source": facts["data"].get("path"), "word_count": facts["data"].get("word_count")}
    there = {name: path for name, path in places.items() if path and Path(path).exists()}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **there))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
