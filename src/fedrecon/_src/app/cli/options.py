"""Options: typed dataclasses parsed by tyro, with errors of use as one sentence."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

try:  # tyro says what was wrong only here, and only as long as it likes
    from tyro import _errors as rejections
except ImportError:
    rejections = None  # type: ignore[assignment]

T = TypeVar("T")


class UsageError(ValueError):
    """A command line that cannot be understood."""


def parse(kind: type[T], command: str, argv: Sequence[str], *, default: T | None = None) -> T:
    """Parse a command's options into a dataclass."""
    try:
        with _one_sentence(kind, command):
            if default is None:
                return tyro.cli(kind, prog=f"fedrecon {command}", args=list(argv))
            return tyro.cli(kind, prog=f"fedrecon {command}", args=list(argv), default=default)
    except UsageError:
        raise
    except ValueError as problem:  # of options that do not fit together
        raise UsageError(f"{_spelled(str(problem), _flags(kind))} (see fedrecon {command} --help)") from None


def given(option: str, argv: Sequence[str]) -> str | None:
    """Return the value of an option that must be known before the others can be parsed; None if it is not there."""
    for k, here in enumerate(argv):
        if here == option and k + 1 < len(argv):
            return argv[k + 1]
        if here.startswith(f"{option}="):
            return here.removeprefix(f"{option}=")
    return None


def all_given(prefix: str, names: Sequence[str], argv: Sequence[str]) -> tuple[str, ...]:
    """Return those names whose options are there, whatever their values."""
    return tuple(name for name in names if given(prefix + name, argv) is not None)


@contextlib.contextmanager
def _one_sentence(kind: type, command: str) -> Iterator[None]:
    """Raise `UsageError` for whatever tyro rejects; if tyro has changed, its own message is shown instead."""
    if rejections is None or not hasattr(rejections, "on_parse_error"):
        yield
        return

    def explain(event: Any) -> None:
        with contextlib.suppress(AttributeError, IndexError):
            sentence = _explain(event, _flags(kind))
            if sentence:
                raise UsageError(f"{_spelled(sentence, _flags(kind))} (see fedrecon {command} --help)")

    with rejections.on_parse_error(explain):
        yield


def _explain(event: Any, flags: Sequence[str]) -> str | None:
    what = type(event).__name__
    if what == "UnrecognizedArgs":
        return _unknown(event.tokens, flags)
    if what == "MissingArgs":
        if event.unrecognized_tokens:
            return _unknown(event.unrecognized_tokens, flags)
        names = [_called(missing.arg) for missing in event.missing_arguments]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
    if what == "InvalidChoice":
        name = _called(event.argument)
        return f"{name} is {event.value!r}; it must be one of {', '.join(event.choices)}"
    if what == "BadValue":
        return f"{_called(event.argument)} needs a value"
    if what == "InstantiationFailure":
        message = str(event.message)
        if event.argument is None:
            return message
        number = re.match(r"(invalid literal for int|could not convert string to float).*?('.*')$", message)
        if number:
            kind = "whole number" if number[1].endswith("int") else "number"
            return f"{_called(event.argument)} is {number[2]}; it must be a {kind}"
        return f"{_called(event.argument)}: {message}"
    return None


def _called(argument: Any) -> str:
    return str(argument.lowered.metavar) if argument.is_positional() else argument.display_name()


def _unknown(tokens: Sequence[str], flags: Sequence[str]) -> str:
    option = next((token for token in tokens if token.startswith("-")), None)
    if option is None:
        return f"{tokens[0]!r} was not expected"
    name = option.split("=")[0]
    near = difflib.get_close_matches(name.replace("_", "-"), flags, 1)
    return f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "")


def _spelled(message: str, flags: Sequence[str]) -> str:
    """Spell settings in a message as the command line does: `--server.learning-rate` for `server.learning_rate`."""
    ends = collections.Counter(flag.rpartition(".")[2].removeprefix("--") for flag in flags)
    for flag in flags:
        end = flag.rpartition(".")[2].removeprefix("--")
        names = [flag.removeprefix("--").replace("-", "_")]
        names += [end.replace("-", "_")] if ends[end] == 1 and "-" in end else []  # without its group
        for name in names:
            if "." in name or "_" in name:
                message = re.sub(rf"(?<![\w.'/-]){re.escape(name)}(?![\w'/]|\.\w)", flag, message)
    return message


def _flags(kind: Any, prefix: str = "--") -> list[str]:
    """List the options of a dataclass."""
    found = []
    hints = typing.get_type_hints(kind)
    called = {"settings": "", "processes": "distributed"} if prefix == "--" else {}
    for field in dataclasses.fields(kind):
        name = called.get(field.name, field.name.replace("_", "-"))
        if dataclasses.is_dataclass(hints[field.name]):
            found += _flags(hints[field.name], f"{prefix}{name}." if name else prefix)
        else:
            found.append(prefix + name)
    return found
