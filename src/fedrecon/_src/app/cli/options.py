"""Options of commands: dataclasses, parsed by tyro and validated with the rest of the settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from fedrecon._src.recommend.config import (
    PRESETS,
    Config,
    ConfigError,
    Preset,
    TaskName,
    check_config,
    config_from_json,
    preset_of,
    read_config,
)
from fedrecon._src.recommend.settings import ClickData, TextData

RUN = "run.json"  # fedrecon._src.storage.ownership.RUN, without its imports


class UsageError(ValueError):
    """A command line that cannot be understood."""


def parse(kind: Any, command: str, argv: Sequence[str], *, default: Any = None) -> Any:
    """Parse a command's options into a dataclass, and check them."""
    start: Any = tyro.MISSING_NONPROP if default is None else default
    try:
        return check_config(tyro.cli(kind, prog=f"fedrecon {command}", args=list(argv), default=start))
    except ConfigError as problem:
        raise UsageError(f"{problem.describe(flag_of(problem.field))} (see fedrecon {command} --help)") from None


def flag_of(field: str) -> str:
    """Return the option that sets a field."""
    return f"--{field.removeprefix('settings.').replace('_', '-')}"


def reading_flags(message: str) -> str:
    """Return a list of the options that set the arguments of readers named in a message, as in `user=...`."""
    fields = dict.fromkeys(field.name for kind in (ClickData, TextData) for field in dataclasses.fields(kind))
    flags = [flag_of(f"data.{name}") for name in fields if re.search(rf"\b{name}=", message)]
    return f" (options: {', '.join(flags)})" if flags else ""


@dataclass(frozen=True, kw_only=True)
class Common:
    """The options that every command has."""

    debug: bool = False
    compilation_cache: bool = True


def parse_common(argv: Sequence[str]) -> tuple[Common, list[str]]:
    """Parse the options that every command has, and return the other arguments."""
    return tyro.cli(Common, prog="fedrecon", args=list(argv), return_unknown_args=True, add_help=False)


@dataclass(frozen=True, kw_only=True)
class Base:
    """The options that decide on the defaults of the others."""

    task: TaskName | None = None
    config: Path | None = None
    preset: Preset | None = None
    resume: Path | None = None


def default_config(command: str, argv: Sequence[str], tasks: Sequence[str] = tuple(PRESETS)) -> Config:
    """Return the settings that the options of a command build on.

    They are those of the run to `--resume`, or those of `--config` on top of those of `--preset`, for a `--task`.

    Args:
      command: its name.
      argv: its arguments.
      tasks: what it is for.
    """
    base, _ = tyro.cli(Base, prog=f"fedrecon {command}", args=list(argv), return_unknown_args=True, add_help=False)
    file = base.config
    if base.resume is not None and (base.resume / RUN).exists():
        file = base.resume / RUN
    values = {} if file is None else read_config(file)
    task = values.get("task", base.task or "ratings")
    if base.task not in (None, task):
        raise UsageError(f"--task is {base.task!r}, but the settings in {file} are for {task!r}")
    if not isinstance(task, str) or task not in PRESETS:
        return config_from_json(values, str(file))  # which names the rule that it breaks
    if task not in tasks:
        raise UsageError(f"fedrecon {command} has no task {task!r}: it must be {' or '.join(tasks)}")
    try:
        preset = preset_of(task, base.preset or "default")
    except ConfigError as problem:
        raise UsageError(problem.describe("--preset")) from None
    return config_from_json(values, str(file), task, preset) if values else preset  # pydantic is slow to import
