"""Resume a run: it must be the same run, on the same data, laid out on devices in the same way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.recommend.config import Config, ConfigError, config_from_json, differences, to_json
from fedrecon._src.recommend.recipe import build_layout
from fedrecon._src.recommend.settings import AS_TRAINED, COLUMNS, Data, OtherReading, Reading
from fedrecon._src.simulation.engine import Layout, layout
from fedrecon._src.simulation.multihost import small_loops, start_jax_devices
from fedrecon._src.storage.atomic import StorageError, find_complete
from fedrecon._src.storage.ownership import RUN
from fedrecon._src.storage.run_folder import RunFolder, keyed_fingerprint, read_description

Say = Callable[[str], None]


def read_run(path: str | Path) -> tuple[Config, dict[str, Any]]:
    """Read the settings of a run and everything else in its `run.json`."""
    if not Path(path).is_dir():
        raise StorageError(f"{path} is not a folder; expected the folder of a run")
    file = Path(path) / RUN
    facts = read_description(Path(path))
    try:
        config = config_from_json(facts["config"], str(file))
        facts["data"]["fingerprint"]
    except ConfigError as problem:
        raise StorageError(str(problem)) from None
    except (KeyError, TypeError, AttributeError) as problem:
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
    values = {field.name: getattr(reading, field.name) for field in dataclasses.fields(Reading)}
    resolved = Reading(**{name: value for name, value in values.items() if name not in roles})
    if isinstance(config.data, Data) and (Path(run) / RUN).exists():
        with contextlib.suppress(StorageError):  # the model is all that is needed
            data = read_run(run)[0].data
            columns = {role: getattr(data, role) for role in roles}
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, **columns))
    return config, resolved


def run_to_resume(config: Config, folder: RunFolder, resume: bool) -> dict[str, Any] | None:
    """Return the `run.json` of the run to resume; None if there is none yet."""
    if not folder.has_run():
        return None
    if not resume:
        raise StorageError(
            f"{folder.path} holds a run: continue it with --resume {folder.path}, or replace it with --overwrite"
        )
    done = folder.rounds_done()
    settings, facts = read_run(folder.path)
    if done is None and (facts.get("ended") or find_complete(folder.model_path).exists()):
        raise StorageError(
            f"the run in {folder.path} has no checkpoint any more, so it cannot be resumed; its model is still there. "
            "Begin anew in another folder, or with --overwrite."
        )
    if settings.task != config.task:
        raise StorageError(f"the run in {folder.path} is on {settings.task}, not on {config.task}; use another folder")
    changed = differences(to_json(settings), to_json(config))
    if changed:
        raise StorageError(
            f"the run in {folder.path} has other settings: {', '.join(changed)}; "
            "resume it with its own, or begin anew with --overwrite"
        )
    if settings.rounds != config.rounds and config.server.decay_rounds == "all":
        raise StorageError(
            f"the run in {folder.path} lowers its learning rate over all of its {settings.rounds} rounds, so "
            f"it cannot continue to {config.rounds}: resume it with --rounds {settings.rounds}, or begin anew "
            "with --overwrite"
        )
    if done is not None and done > config.most_rounds:
        raise StorageError(f"the run in {folder.path} is past round {config.most_rounds}: it has done {done}")
    began = facts.get("layout")
    numbers = [began.get(name) for name in ("jax_devices", "block", "sharing")] if isinstance(began, dict) else [None]
    if not all(type(number) is int for number in numbers) or not isinstance(facts.get("resumed"), list):
        raise StorageError(f"{folder.path / RUN} does not say where the run began, so it cannot be resumed")
    return facts


def fingerprint_of(config: Config, run: Path, fingerprint: str, *, create: bool = False) -> str:
    """Return the fingerprint of the data for `run.json`; in a private run, under a key that stays with its owner."""
    return keyed_fingerprint(run, fingerprint, create=create) if config.privacy.on else fingerprint


def rounded_counts(config: Config, counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts for `run.json`; in a private run to one significant digit and to tens, since one example counts."""
    if not config.privacy.on:
        return dict(counts)
    return {name: round(count, -max(1, len(str(abs(count))) - 1)) for name, count in counts.items()}


def check_fingerprint(folder: RunFolder, facts: dict[str, Any], earlier: dict[str, Any] | None) -> None:
    """Check that the data is the same as when the run began."""
    now = facts["data"]["fingerprint"]
    if earlier and earlier["data"]["fingerprint"] != now:
        raise StorageError(
            f"{facts['data']['source']} is no longer what the run in {folder.path} was trained on "
            f"(fingerprint {now}, was {earlier['data']['fingerprint']}); "
            "it cannot be resumed: bring the data back, or begin anew with --overwrite"
        )


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


def start_same_devices(config: Config, folder: RunFolder, earlier: dict[str, Any] | None, say: Say) -> None:
    """Start as many devices as the run began with, whatever this machine has: the last bits depend on their number."""
    if earlier is None or config.jax_devices is not None:
        start_jax_devices(config.jax_devices)
        return
    began = _devices_per_process(earlier["layout"])
    try:
        start_jax_devices(began)
    except ValueError:
        raise _other_machine(folder, earlier) from None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if earlier["layout"].get("platform") == "cpu" and began != cores and not jax.distributed.is_initialized():
        say(
            f"continues with {began} devices, as it began, although this machine has {cores} cores: "
            "the last bits of its results depend on it"
        )


def _devices_per_process(began: dict[str, Any]) -> int:
    return int(began["jax_devices"] // began.get("processes", 1))


def same_layout(config: Config, algorithm: Algorithm, folder: RunFolder, earlier: dict[str, Any] | None) -> Layout:
    """Return the layout; a resumed run keeps the one that it began with."""
    if earlier is None:
        return build_layout(config, algorithm.model)
    began = earlier["layout"]
    try:
        jax_layout = layout(began["block"], _devices_per_process(began), sharing=began["sharing"])
    except ValueError:
        raise _other_machine(folder, earlier) from None
    now = layout_facts(jax_layout)
    if now | {"small_loops": None} != began | {"small_loops": None}:
        raise _other_machine(folder, earlier)
    if now["small_loops"] != began.get("small_loops"):
        raise StorageError(
            f"the run in {folder.path} began with other options of XLA for loops (XLA_FLAGS is "
            f"{os.environ.get('XLA_FLAGS')!r} now): its bits would change. Set them as they were, or begin anew with "
            "--overwrite."
        )
    return jax_layout


def _other_machine(folder: RunFolder, earlier: dict[str, Any]) -> StorageError:
    began = earlier["layout"]
    of = f" of {began['processes']} processes" if "processes" in began else ""
    return StorageError(
        f"the run in {folder.path} began on {began['jax_devices']} devices{of} ({began.get('platform')}), which this "
        "machine does not have; on others the last bits of its results would change. Resume it where it began, or "
        "begin anew with --overwrite."
    )
