"""Settings as JSON: config files, the `run.json` of a run, and how two of them differ."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

HARMLESS = ("rounds", "evaluate_every", "checkpoint_every")  # may differ between a run and its continuation

T = TypeVar("T")


class ConfigError(ValueError):
    """A config file that is not what it should be."""


def to_json(config: Any) -> dict[str, Any]:
    """Return settings as a JSON value."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(kind: type[T], values: Any, source: str, *, within: str = "", default: T | None = None) -> T:
    """Make settings from JSON; a setting that is missing takes its default.

    Args:
      kind: a dataclass of settings.
      values: an object as `to_json` returns, or part of one.
      source: where it comes from, for messages.
      within: the group these settings are in, for messages.
      default: the group if nothing is given; None for the defaults of `kind`.

    Raises:
      ConfigError: a setting is unknown, missing or of the wrong type; the message names it.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: {within or 'the config'} must be an object of settings, not {str(values)[:100]}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{within}.{name}" if within else name
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(fields)}"
            raise ConfigError(f"{source}: unknown setting {where!r}; {hint}")
        if dataclasses.is_dataclass(hints[name]):
            make = fields[name].default_factory
            group = None if make is dataclasses.MISSING else make()
            group = group if default is None else getattr(default, name)
            found[name] = from_json(typing.cast(type, hints[name]), value, source, within=where, default=group)
        else:
            found[name] = _typed(hints[name], value, where, source)
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in found:
            raise ConfigError(f"{source}: the setting {within + '.' if within else ''}{name} is missing")
    try:
        return kind(**found) if default is None else dataclasses.replace(default, **found)  # type: ignore[type-var]
    except ConfigError:
        raise
    except ValueError as problem:
        raise ConfigError(f"{source}: {problem}") from None


def _typed(hint: Any, value: Any, where: str, source: str) -> Any:
    """Return a JSON value as the type that is asked for, or fail naming it."""
    for kind in typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        origin, choices = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal and isinstance(value, str) and value in choices:
            return value
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            return from_json(typing.cast(type, kind), value, source, within=where)
        if origin is tuple and choices[-1] is Ellipsis and isinstance(value, list | tuple):
            return tuple(_typed(choices[0], x, where, source) for x in value)
        if origin is tuple and isinstance(value, list | tuple) and len(value) == len(choices):
            return tuple(_typed(one, x, where, source) for one, x in zip(choices, value, strict=True))
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # a whole number of 400 digits
                return float(value)
        if kind in (int, str, bool, type(None)) and type(value) is kind:
            return value
    raise ConfigError(f"{source}: {where} is {json.dumps(value)[:100]}; expected {_name(hint)}")


def _name(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(kind) for kind in inner)
    if origin is tuple:
        return "a list of numbers" if inner[-1] is Ellipsis else f"a list of {len(inner)} numbers"
    if dataclasses.is_dataclass(hint):
        return "an object of settings"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names[hint]


def changed(settings: Any, kind: type) -> list[str]:
    """Name the settings of `kind`, or of what `kind` extends, that have another value than their default."""
    names = {f.name for f in dataclasses.fields(kind)}
    fields = [f for f in dataclasses.fields(settings) if f.name in names and f.default is not dataclasses.MISSING]
    return [f.name for f in fields if getattr(settings, f.name) != f.default]


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings of a config file, or of the `run.json` of a run."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"the config file {path} cannot be read: {problem.strerror}") from None
    except RecursionError:
        raise ConfigError(f"the config file {path} is nested too deeply") from None
    except ValueError as problem:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ConfigError(f"the config file {path} is not valid JSON: {problem}") from None
    if isinstance(values, dict) and "config" in values:
        values = values["config"]
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold an object of settings")
    return values


def differences(old: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> list[str]:
    """List the settings that differ between two configs as JSON, except those that cannot change the parameters."""
    found = []
    for name in dict.fromkeys([*old, *new]):
        if not within and name in HARMLESS:
            continue
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{within}{name}.")
        elif before != after:
            found.append(f"{within}{name} (was {json.dumps(before)}, now {json.dumps(after)})")
    return found
