"""Resume a run: it must be the same run, on the same data, laid out on devices in the same way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
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
    values = {field.name: getattr(reading, field.name) for field in dataclasses.fields(Reading)}
    resolved = Reading(**{name: value for name, value in values.items() if name not in roles})
    if isinstance(config.data, Data) and (Path(run) / RUN).exists():
        with contextlib.suppress(StorageError):  # the model is all that is needed
            data = read_run(run)[0].data
            columns = {role: getattr(data, role) for role in roles}
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, **columns))
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
        raise StorageError(
            f"{folder.path} holds a run: continue it with --resume {folder.path}, or replace it with --overwrite"
        )
    done = folder.rounds_done()
    settings, facts = read_run(folder.path)
    changed = differences(to_json(settings), to_json(config))
    if settings.rounds != config.rounds and config.server.decay_rounds == "all":  # rates would have been others
        changed["rounds"] = settings.rounds, config.rounds
    for setting, (before, after) in changed.items():
        raise ConfigError(setting, after, f"must stay {before!r} to continue the run in {folder.path}")
    began = facts.get("layout")
    numbers = [began.get(name) for name in ("jax_devices", "block", "sharing")] if isinstance(began, dict) else [None]
    obstacles = {
        "it has no checkpoint any more, only its model": done is None
        and bool(facts.get("ended") or find_complete(folder.model_path).exists()),
        f"it is past round {config.most_rounds}: it has done {done}": (done or 0) > config.most_rounds,
        f"{RUN} does not say where it began": not all(type(number) is int for number in numbers)
        or not isinstance(facts.get("resumed"), list),
    }
    for obstacle, stands in obstacles.items():
        if stands:
            raise StorageError(f"the run in {folder.path} cannot be resumed: {obstacle}. Start over with --overwrite.")
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
            "restore the data, or start over with --overwrite"
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


@contextlib.contextmanager
def _as_it_began(folder: RunFolder, began: dict[str, Any]) -> Iterator[None]:
    """Explain a layout error: with another layout, the last bits of the run's results would change."""
    try:
        yield
    except ValueError as problem:
        of = f" of {began['processes']} processes" if "processes" in began else ""
        raise StorageError(
            f"the run in {folder.path} began on {began['jax_devices']} devices{of} ({began.get('platform')}); here the "
            f"last bits of its results would change: {problem}. Resume it on the original machine, or start over with "
            "--overwrite."
        ) from None


def start_same_devices(config: Config, folder: RunFolder, earlier: dict[str, Any] | None, say: Say) -> None:
    """Start as many devices as the run began with, whatever this machine has: the last bits depend on their number."""
    if earlier is None or config.jax_devices is not None:
        start_jax_devices(config.jax_devices)
        return
    began = _devices_per_process(earlier["layout"])
    with _as_it_began(folder, earlier["layout"]):
        start_jax_devices(began)
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
    with _as_it_began(folder, began):
        jax_layout = layout(began["block"], _devices_per_process(began), sharing=began["sharing"])
        if (now := layout_facts(jax_layout)) != began:
            raise ValueError(f"the layout would be {now}, not {began} (XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r})")
    return jax_layout
