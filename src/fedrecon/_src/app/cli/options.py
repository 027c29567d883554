"""Options of commands: dataclasses, parsed by tyro and validated with the rest of the settings."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from fedrecon._src.app.cli import show
from fedrecon._src.recommend.config import (
    PRESETS,
    ClicksConfig,
    Config,
    ConfigError,
    Preset,
    check_choice,
    check_config,
    config_from_json,
    preset_of,
    read_config,
)
from fedrecon._src.recommend.settings import ClickData, Data, Factorization, Ranking, Source

RUN = "run.json"  # fedrecon._src.storage.ownership.RUN, without its imports


class UsageError(ValueError):
    """A command line that cannot be understood."""


Marks = dict[tuple[type, str], tuple[Any, ...]]
Settings = Annotated[Any, tyro.conf.arg(name="")]  # the config of a task; options are those of the default's type


def parse(kind: Any, command: str, argv: Sequence[str], *, default: Any = None, marks: Marks | None = None) -> Any:
    """Parse a command's options into a dataclass, and check them; `marks` are in place of some of `MARKS`."""
    start: Any = tyro.MISSING_NONPROP if default is None else default
    registry = tyro.constructors.ConstructorRegistry()
    registry.struct_rule(partial(mark_settings, MARKS | (marks or {})))
    args = tyro.cli(kind, prog=f"fedrecon {command}", args=list(argv), default=start, registry=registry)
    if hasattr(args, "settings"):
        check_config(args.settings)
    return check_config(args)


# ---- how settings appear as options, where that differs from their name and type ----

MARKS: Marks = {
    (Config, "task"): (tyro.conf.arg(metavar="{ratings,clicks,text}"),),
    (Source, "source"): (tyro.conf.Positional, tyro.conf.arg(name="DATA", metavar="DATA", help_behavior_hint="")),
    (Data, "titles"): (tyro.conf.arg(prefix_name=False),),
    (ClickData, "transform"): (tyro.conf.Suppress,),
    (Factorization, "scale"): (tyro.conf.Suppress,),  # what round zero found
    (Ranking, "at_least"): (tyro.conf.Suppress,),  # copied from the data's
    (ClicksConfig, "reconstruct"): (tyro.conf.Suppress,),
    (ClicksConfig, "update"): (tyro.conf.Suppress,),
}


MARKED = "marked"  # a marker of a group whose options are asked for without marks


def mark_settings(
    every: Marks, info: tyro.constructors.StructTypeInfo
) -> tyro.constructors.StructConstructorSpec | None:
    """Return the options of a group of settings, with their marks."""
    marks = {name: mark for (kind, name), mark in every.items() if isinstance(info.default, kind)}
    if not marks or MARKED in info.markers:
        return None
    info = dataclasses.replace(info, markers=(*info.markers, MARKED))
    spec = tyro.constructors.ConstructorRegistry.get_struct_spec(info)
    assert isinstance(spec, tyro.constructors.StructConstructorSpec)
    types: dict[str, Any] = {field.name: field.type for field in spec.fields}
    types |= {name: Annotated[(types[name], *mark)] for name, mark in marks.items()}
    fields = tuple(dataclasses.replace(field, type=types[field.name]) for field in spec.fields)
    return dataclasses.replace(spec, fields=fields)


def flag_of(field: str) -> str:
    """Return the option that sets a field."""
    field = field.removeprefix("settings.")
    short = {"data.source": "DATA", "top": "-n (--top)"}
    return short.get(field) or (f"--{field.replace('_', '-')}" if field else "")


def describe_error(problem: ValueError) -> str:
    """Return the message of an error, with the options that may help if it is a `DataError`.

    That class is not imported: it would wait for JAX.
    """
    remedies = getattr(problem, "remedies", {})
    if changes := " or ".join(f"{flag_of(f'data.{name}')} {value}" for name, value in remedies.items()):
        return f"{problem.message} {changes}."  # type: ignore[attr-defined]
    flags = ", ".join(flag_of(f"data.{name}") for name in getattr(problem, "fields", ()))
    return f"{problem} (options: {flags})" if flags else str(problem)


@dataclass(frozen=True, kw_only=True)
class Common:
    """The options that every command has."""

    debug: bool = False
    compilation_cache: bool = True


def parse_common(argv: Sequence[str]) -> tuple[Common, list[str]]:
    """Parse the options that every command has, and return the other arguments."""
    return tyro.cli(Common, prog="fedrecon", args=list(argv), return_unknown_args=True, add_help=False)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options of commands that take all settings of a task.

    Attributes:
      preset: settings to start from, which a config file and options override. default adapts to the data. quick, for
        ratings and clicks, is the same in fewer rounds. paper, for ratings, has the paper's settings for MovieLens 1M;
        for text, its local embeddings of words outside the vocabulary.
      config: a JSON file of settings, or the run.json of an earlier run; options given here override it.
    """

    settings: Settings
    preset: Preset | None = None
    config: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Base:
    """The options that choose the defaults of the others."""

    task: str | None = None
    config: Path | None = None
    preset: str | None = None
    resume: Path | None = None


def default_config(command: str, argv: Sequence[str], tasks: Sequence[str] = tuple(PRESETS)) -> Config:
    """Return the settings that the options of a command build on.

    They are those of `--config` on top of those of the run to `--resume`, or of `--preset`, for a `--task`.

    Args:
      command: its name.
      argv: its arguments.
      tasks: what it is for.
    """
    base = _parse_base(command, argv)
    file = base.config
    if base.resume is not None and (base.resume / RUN).exists():
        file = base.resume / RUN
    values = {} if file is None else read_config(file)
    task = values.get("task", base.task or "ratings")
    if base.task not in (None, task):
        raise ConfigError("task", base.task, f"must be {task}, as in {file}")
    check_choice("task", task, PRESETS, source=str(file) if "task" in values else "")
    check_choice("task", task, tasks, f" for fedrecon {command}")
    preset = preset_of(task, base.preset or "default")
    config = config_from_json(values, str(file), task, preset) if values else preset  # pydantic is slow to import
    if base.config in (None, file):
        return config
    return config_from_json(read_config(base.config), str(base.config), task, config)


def _parse_base(command: str, argv: Sequence[str]) -> Base:
    return tyro.cli(Base, prog=f"fedrecon {command}", args=list(argv), return_unknown_args=True, add_help=False)[0]


def file_of_task(run: Path, task: str, files: Mapping[str, Path | None]) -> Path | None:
    """Return the file that is given for the task of a run; those of other tasks must not be given."""
    for other, file in files.items():
        if file is not None and other != task:
            raise UsageError(f"{run} was trained on {task}: give --{task}, not --{other}")
    return files[task]


def parse_for_task(commands: Mapping[str, Any], command: str, argv: Sequence[str], **required: Any) -> Any:
    """Parse the options of a command for the task that they name, or that a file of settings or of data implies.

    Args:
      commands: the options of each task.
      command: its name.
      argv: its arguments.
      **required: what an option without a default begins with.
    """
    default = default_config(command, argv, tuple(commands))
    kind = commands[default.task]
    args = parse(kind, command, argv, default=kind(settings=default, **required))
    if not _means_clicks(command, argv, args.settings):
        return args
    show.remark(f"{args.settings.data.source} has two columns, users and items: read with --task clicks")
    return parse_for_task(commands, command, [*argv, "--task", "clicks"], **required)


def _means_clicks(command: str, argv: Sequence[str], settings: Config) -> bool:
    """Say whether the data has users and items alone, which are clicks, where nothing else says what it is."""
    base, data = _parse_base(command, argv), settings.data
    chosen = base.task or base.config or base.resume or base.preset not in (None, *PRESETS["clicks"])
    if chosen or not isinstance(data, Data) or data.rating != Data.rating:
        return False
    if not Path(data.source).is_file() or Path(data.source).suffix == ".zip":
        return False
    from fedrecon._src.data.sources import DataError
    from fedrecon._src.data.tables import TextOptions, open_table

    written = {name: getattr(data, name) for name in TextOptions.__annotations__}
    with contextlib.suppress(DataError), open_table(data.source, **written) as table:
        return table.width == 2
    return False  # loading says what is wrong with it
