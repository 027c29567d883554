"""A whole run: data, training, evaluation on unseen users, the folder that it writes, and how to resume it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.checks import check_rules
from fedrecon._src.core.display import Progress, Say, silent
from fedrecon._src.data.sources import DataError
from fedrecon._src.privacy.ledger import spending
from fedrecon._src.recommend.config import (
    Config,
    ConfigError,
    by_path,
    change_settings,
    check_config,
    config_from_json,
    differences,
    get_setting,
    to_json,
)
from fedrecon._src.recommend.default_training import prepare_training, train_model
from fedrecon._src.recommend.evaluation_table import EvaluationTable, measure_model
from fedrecon._src.recommend.protection import Protection, protect, say_promise
from fedrecon._src.recommend.recipe import build_layout, make_evaluator
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.settings import AS_TRAINED, COLUMNS, Data, OtherReading, Reading
from fedrecon._src.recommend.stopping import rounds_of, updates_of, warn_of_divergence, why_failed
from fedrecon._src.recommend.task import Ready, Table
from fedrecon._src.recommend.tasks import Task, Users, build_algorithm, task_of
from fedrecon._src.simulation.engine import Layout, layout
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.simulation.multihost import (
    broadcast,
    check_same,
    count_cores,
    is_first_process,
    share_folder,
    small_loops,
    start_jax_devices,
)
from fedrecon._src.simulation.training import Callback, ProgressBar, RecordCallback, Run
from fedrecon._src.storage.atomic import StorageError, find_complete, timestamp
from fedrecon._src.storage.ownership import RUN
from fedrecon._src.storage.run_folder import RunFolder, keyed_fingerprint, package_versions


def read_run(path: str | Path) -> tuple[Config, dict[str, Any]]:
    """Read the settings of a run and everything else in its `run.json`."""
    if not Path(path).is_dir():
        raise StorageError(f"{path} is not a folder; expected the folder of a run")
    file = Path(path) / RUN
    facts = RunFolder(path).description()
    try:
        config = config_from_json(facts["config"], str(file))
        facts["data"]["fingerprint"]
    except (KeyError, TypeError, AttributeError, ConfigError) as problem:
        raise StorageError(f"{file} is damaged: {problem!r}") from None
    return config, facts


def with_columns(config: Config, run: str | Path, reading: OtherReading) -> tuple[Config, Reading]:
    """Return the settings of a saved model and how another file is read, with columns called as in training.

    Args:
      config: of the model.
      run: the folder of the run; that of a model alone does not know.
      reading: how the other file is read, where options say so.
    """
    roles = [role for role in COLUMNS if getattr(reading, role) == AS_TRAINED]
    resolved = Reading(**{f.name: getattr(reading, f.name) for f in dataclasses.fields(Reading) if f.name not in roles})
    if isinstance(config.data, Data) and (Path(run) / RUN).exists():
        with contextlib.suppress(StorageError):  # the model is all that is needed
            data = read_run(run)[0].data
            config = change_settings(config, {f"data.{role}": getattr(data, role) for role in roles})
    return config, resolved


def run_to_resume(config: Config, folder: RunFolder, resume: bool) -> dict[str, Any] | None:
    """Return the `run.json` of the run to resume; None if there is none yet.

    Raises:
      ConfigError: a setting differs from those that the run began with.
      StorageError: the run cannot be resumed.
    """
    if not folder.has_run():
        return None
    if not resume:
        advice = f"continue it with --resume {folder.path}, or replace it with --overwrite"
        raise StorageError(f"{folder.path} holds a run: {advice}")
    done = folder.rounds_done()
    settings, facts = read_run(folder.path)
    changed = differences(to_json(settings), to_json(config))
    if settings.rounds != config.rounds and config.server.decay_rounds == "all":  # rates would have been others
        changed["rounds"] = settings.rounds, config.rounds
    for setting, (before, after) in changed.items():
        raise ConfigError(setting, after, f"must stay {before!r} to continue the run in {folder.path}")
    began = facts.get("layout")
    numbers = [began.get(name) for name in ("jax_devices", "block", "sharing")] if isinstance(began, dict) else [None]
    is_layout = all(type(number) is int for number in numbers)
    is_over = bool(facts.get("ended")) or find_complete(folder.model_path).exists()
    conditions = {
        "it has no checkpoint any more, only its model": done is not None or not is_over,
        f"it is past round {config.most_rounds}: it has done {done}": (done or 0) <= config.most_rounds,
        f"{RUN} does not say where it began": is_layout and isinstance(facts.get("resumed"), list),
    }
    rules = {
        f"the run in {folder.path} cannot be resumed: {obstacle}. Start over with --overwrite.": holds
        for obstacle, holds in conditions.items()
    }
    check_rules(rules, StorageError)
    return facts


def fingerprint_of(config: Config, run: Path, fingerprint: str, *, create: bool = False) -> str:
    """Return the fingerprint of the data for `run.json`; in a private run, under a key that stays with its owner."""
    return keyed_fingerprint(run, fingerprint, create=create) if config.privacy.on else fingerprint


def rounded_counts(config: Config, counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts for `run.json`; in a private run to one significant digit and to tens, since one example counts."""
    if not config.privacy.on:
        return dict(counts)
    return {name: round(count, -max(1, len(str(abs(count))) - 1)) for name, count in counts.items()}


def check_fingerprint(run: Path, source: str, before: str, now: str, error: type[ValueError], advice: str) -> None:
    """Check that the data is the same as when a run began."""
    if now != before:
        changed = f"{source} is no longer what the run in {run} was trained on (fingerprint {now}, was {before})"
        raise error(f"{changed}{advice}")


def layout_facts(jax_layout: Layout) -> dict[str, Any]:
    """Return the layout for `run.json`."""
    return {
        "platform": jax.default_backend(),
        "jax_devices": jax_layout.jax_devices,
        "block": jax_layout.block,
        "sharing": jax_layout.sharing,
        "small_loops": small_loops(),
        **({"processes": jax_layout.processes} if jax_layout.processes > 1 else {}),
    }


@contextlib.contextmanager
def _as_it_began(folder: RunFolder, earlier: dict[str, Any] | None) -> Iterator[None]:
    """Explain a layout error of a resumed run: with another layout, the last bits of its results would change."""
    try:
        yield
    except ValueError as problem:
        if earlier is None:
            raise
        began = earlier["layout"]
        of = f" of {began['processes']} processes" if "processes" in began else ""
        devices = f"{began['jax_devices']} devices{of} ({began.get('platform')})"
        advice = "Resume it on the original machine, or start over with --overwrite."
        change = f"here the last bits of its results would change: {problem}"
        raise StorageError(f"the run in {folder.path} began on {devices}; {change}. {advice}") from None


def start_same_devices(config: Config, folder: RunFolder, earlier: dict[str, Any] | None, say: Say) -> None:
    """Start as many devices as the run began with, whatever this machine has: the last bits depend on their number."""
    resumed = None if config.jax_devices is not None else earlier
    devices = _devices_per_process(resumed["layout"]) if resumed else config.jax_devices
    with _as_it_began(folder, resumed):
        start_jax_devices(devices, small_loops=config.small_loops)
    on_cpu = resumed is not None and resumed["layout"].get("platform") == "cpu"
    if on_cpu and devices != (cores := count_cores()) and not jax.distributed.is_initialized():
        reason = "the last bits of its results depend on it"
        say(f"continues with {devices} devices, as it began, although this machine has {cores} cores: {reason}")


def _devices_per_process(began: dict[str, Any]) -> int:
    return int(began["jax_devices"] // began.get("processes", 1))


def same_layout(config: Config, algorithm: Algorithm, folder: RunFolder, earlier: dict[str, Any] | None) -> Layout:
    """Return the layout; a resumed run keeps the one that it began with."""
    if earlier is None:
        return build_layout(config, algorithm.model)
    began = earlier["layout"]
    with _as_it_began(folder, earlier):
        jax_layout = layout(began["block"], _devices_per_process(began), sharing=began["sharing"])
        if (now := layout_facts(jax_layout)) != began:
            raise ValueError(f"the layout would be {now}, not {began} (XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r})")
    return jax_layout


@dataclass(frozen=True)
class ExperimentResult:
    """What a run leaves in memory.

    Attributes:
      run: parameters and history.
      users: who trained, validated and tested.
      model: as saved; it knows why the run failed, if it did.
      test: how the model serves the test users; None after an interruption or without any.
      most_rounds: how many rounds it could have had.
      baselines: how the baselines do on the query of the test users; empty if there are none.
    """

    run: Run
    users: Users
    model: SavedModel[Any]
    test: Evaluation | None
    most_rounds: int
    baselines: Table


def run_experiment(
    config: Config,
    folder: RunFolder,
    *,
    resume: bool = False,
    overwrite: bool = False,
    made_by: str = "train",
    progress: Progress = silent,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda text: None,
) -> ExperimentResult:
    """Train with some settings, evaluate on the test users, and write everything to a folder.

    Nothing in the folder changes before the data is read and the run can start. A run that is replaced is put aside
    until the new one is complete. With several processes (`fr.start_hosts`), all read the data and only the first
    reads and writes the folder.

    Args:
      config: the settings.
      folder: where everything goes.
      resume: continue from the folder's newest checkpoint; begin anew if it has none.
      overwrite: replace the run that the folder holds.
      made_by: the command, for `run.json`.
      progress: a progress display.
      callbacks: called after every round and evaluation, and at the end of training.
      say: called with remarks and warnings.

    Raises:
      ValueError: `resume` and `overwrite` are both given.
      StorageError: the folder holds another run, and neither option is given; another process writes to it; or it
        holds something else.
    """
    check_config(config)
    if resume and overwrite:
        raise ValueError("`resume` and `overwrite` cannot be combined")
    folder = share_folder(folder)
    folder.checkpoint_every = config.checkpoint_every
    with folder.lock():
        earlier = broadcast(lambda: None if overwrite else run_to_resume(config, folder, resume))
        settings = by_path(to_json(config)) | {"data.source": ""}  # where the data is may differ between hosts
        check_same(settings | package_versions(jax, np, optax))
        start_same_devices(config, folder, earlier, say)
        task = task_of(config)
        data = task.load(config, progress)
        check_same({"the data's fingerprint": data.fingerprint()})
        fingerprint = broadcast(lambda: fingerprint_of(config, folder.path, data.fingerprint(), create=earlier is None))
        facts = _facts(config, fingerprint, earlier, made_by)
        if earlier:
            before, advice = earlier["data"]["fingerprint"], "; restore the data, or train again with --overwrite"
            check_fingerprint(folder.path, config.data.source, before, fingerprint, StorageError, advice)
        chosen_before = earlier.get("found_by_training", {}) if earlier else {}
        prepared = prepare_training(change_settings(config, chosen_before), data, progress)
        facts["found_by_training"] = {path: get_setting(prepared.config, path) for path in task.found_by_training}
        users = prepared.users
        protection = protect(prepared, earlier)
        algorithm = build_algorithm(protection.config, prepared.model, protection.examples, protection.aggregator)
        jax_layout = same_layout(config, algorithm, folder, earlier)
        facts["data"] |= {"users": [len(part) for part in users], **rounded_counts(config, task.facts(config, data))}
        facts["data"] |= {"left_out": rounded_counts(config, data.skipped)}
        facts["layout"] = layout_facts(jax_layout)
        facts["privacy"] = _promise(protection, algorithm, protection.config, len(users.train))
        for remark in (*prepared.remarks, *say_promise(protection)):
            say(remark)
        _say_who_cannot_learn(config, task, users, say)
        if overwrite:
            folder.replace()
        folder.describe(facts)
        watch = RecordCallback(warn_of_divergence(protection.config, task, say, task.are_counts(config, data)))
        every = [watch, *callbacks, ProgressBar(progress)]
        options = {"layout": jax_layout, "ledger": protection.ledger, "callbacks": every}
        return _run(prepared._replace(config=protection.config), algorithm, facts, folder, progress, **options)


def _run(
    ready: Ready, algorithm: Algorithm, facts: dict[str, Any], folder: RunFolder, progress: Progress, **options: Any
) -> ExperimentResult:
    """Train, save, evaluate and report; `options` are for `train_model`."""
    config, users, task = ready.config, ready.users, task_of(ready.config)
    evaluator = make_evaluator(config, algorithm, users, options["layout"])
    run, model = train_model(ready, algorithm, evaluator, folder=folder, **options)
    _save(folder, model)
    test: EvaluationTable | None = None
    if not run.interrupted and len(users.test):
        on_test = evaluator or make_evaluator(config, algorithm, users, options["layout"], "test")
        test = measure_model(config, model, users, "test", evaluator=on_test, personal=False, progress=progress)
        if (failed := why_failed(run.history, task, test.evaluation)) != model.failed:
            model = dataclasses.replace(model, failed=failed)
            _save(folder, model)
    ending = {
        "ended": timestamp(),
        "rounds": run.rounds,
        "interrupted": run.interrupted,
        "failed": model.failed,
        "updates": updates_of(run.history),
        "privacy": None if run.ledger is None else facts["privacy"] | run.ledger.to_dict(),
        "stopped": run.stopped,
        "best_round": run.best,
        "remark": task.remark(run.params),
        "test": None if test is None else test.summary(),
    }
    folder.describe(facts | ending)
    if not run.interrupted:
        folder.complete()
    evaluation, baselines = (None, {}) if test is None else (test.evaluation, test.baselines)
    return ExperimentResult(run, users, model, evaluation, rounds_of(config, users), baselines)


def _save(folder: RunFolder, model: SavedModel[Any]) -> None:
    if is_first_process():
        model.save(folder.model_path)


def users_of_run(path: str | Path, progress: Progress = silent) -> tuple[Config, Users]:
    """Load the data of a finished run again, divided as it was.

    Args:
      path: the folder of the run.
      progress: a progress display.

    Raises:
      StorageError: the folder holds no run, or is damaged.
      DataError: the data is gone, or has changed.
    """
    config, facts = read_run(path)
    task = task_of(config)
    advice = f"To evaluate on other {task.people}, give their data with --{task.name} FILE."
    if facts.get("deployment"):
        where = f"How it serves their test {task.people} is in its run.json."
        raise DataError(f"the run in {path} was trained over nodes, which keep their data. {where} {advice}")
    try:
        data = task.load(_located(config, facts), progress)
    except DataError as problem:
        raise DataError(f"the data of the run in {path} cannot be loaded again: {problem} {advice}") from None
    before, now = facts["data"]["fingerprint"], fingerprint_of(config, Path(path), data.fingerprint())
    advice = f", so its test {task.people} are not known. Restore the data. {advice}"
    check_fingerprint(Path(path), config.data.source, before, now, DataError, advice)
    return config, task.divide(config, data, progress)


def _say_who_cannot_learn(config: Config, task: Task[Any, Any, Any], users: Users, say: Say) -> None:
    alone = int((users.train.sizes < 2).sum())
    if alone and config.split.train != "none":
        reason = "nothing is learned from them, since one example cannot be both support and query"
        say(f"training {task.people} with a single example: {alone:,} of {len(users.train):,}; {reason}")


# ---- run.json ----


def _promise(protection: Protection, algorithm: Algorithm, config: Config, clients: int) -> dict[str, Any] | None:
    """Say what all planned rounds will have spent; the run never spends more."""
    if protection.ledger is None:
        return None
    spent = spending(algorithm, clients, config.sampling, config.rounds, protection.ledger)
    rounds = spent.allowed(config.rounds)
    return {
        **protection.ledger.to_dict(),
        "noise_multiplier": protection.noise_multiplier,
        "clip_norm": config.privacy.clip_norm,
        "planned": {"rounds": rounds, "epsilon": spent.after(rounds).epsilon},
    }


def _facts(config: Config, fingerprint: str, earlier: dict[str, Any] | None, made_by: str) -> dict[str, Any]:
    """Return what `run.json` says from the beginning."""
    source = Path(config.data.source)
    return {
        "made_by": (earlier or {}).get("made_by", made_by),
        "config": to_json(config),
        "seed": config.seed,
        "versions": package_versions(jax, np, optax),
        "data": {
            "source": config.data.source,
            "path": str(source.resolve()) if source.exists() else None,
            "fingerprint": fingerprint,
        },
        "started": earlier.get("started") if earlier else timestamp(),
        "resumed": [*earlier["resumed"], timestamp()] if earlier else [],
        **dict.fromkeys(
            ("ended", "rounds", "interrupted", "failed", "updates", "privacy", "stopped", "best_round", "test")
        ),
    }


def _located(config: Config, facts: dict[str, Any]) -> Config:
    """Use the absolute paths that run.json records, where they still exist."""
    recorded = {"data.source": facts["data"].get("path"), "data.word_count": facts["data"].get("word_count")}
    paths = {name: path for name, path in recorded.items() if isinstance(path, str) and os.path.exists(path)}
    return change_settings(config, paths)
