"""Checks of arguments: numbers within bounds, choices, names that must exist, and packages that are installed."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # slow to import
    from pydantic import ValidationError

MOST_FLOAT = 3.4e38  # beyond it, numbers are infinite in 32 bits
MOST_INT = 2**31 - 1  # the largest integer of 32 bits, which counts and numbers of rounds have


def check_number(
    name: str,
    value: float | None,
    *,
    least: float = 0,
    most: float = MOST_FLOAT,
    above: bool = False,
    below: bool = False,
) -> None:
    """Check a number; None passes.

    Args:
      name: of the argument.
      value: what was given.
      least: the smallest number that is allowed.
      most: the largest.
      above: whether `least` itself is too small.
      below: whether `most` itself is too large.

    Raises:
      ValueError: it is not finite, too small or too large.

    Example:
      >>> from fedrecon import kit
      >>> kit.check_number("strength", 0.5, least=0, most=1)
    """
    if value is None:
        return
    finite = isinstance(value, int) or math.isfinite(value)  # `isfinite` fails for an int of 400 digits
    inside = finite and least <= value <= most
    if not inside or (above and value == least) or (below and value == most):
        bounds = f"{'above' if above else 'at least'} {least}"
        bounds += "" if most == MOST_FLOAT else f" and {'below' if below else 'at most'} {most}"
        raise ValueError(f"`{name}` must be a finite number {bounds} (got {value!r:.30})")


def check_numbers(numbers: Mapping[str, float | None], **bounds: Any) -> None:
    """Check several numbers with the same bounds.

    Args:
      numbers: by the names of the arguments; None passes.
      **bounds: as for `check_number`.
    """
    for name, value in numbers.items():
        check_number(name, value, **bounds)


def check_rules(rules: Mapping[str, Any], error: type[ValueError] = ValueError) -> None:
    """Check several rules.

    Args:
      rules: `{what must hold, in words: whether it does}`.
      error: what to raise with the first that does not hold.
    """
    if broken := [rule for rule, holds in rules.items() if not holds]:
        raise error(broken[0])


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Check that an argument is one of several choices.

    Args:
      name: of the argument.
      value: what was given.
      choices: what is allowed.

    Raises:
      ValueError: it is none of them.
    """
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))} (got {value!r})")


def check_column(name: str, columns: Collection[str], what: str = "the clients") -> None:
    """Check that there is a column.

    Args:
      name: of the column.
      columns: the names of those that there are.
      what: has the columns.

    Raises:
      ValueError: there is no such column.
    """
    if name not in columns:
        raise ValueError(f"no column {name!r}: {what} have {', '.join(map(str, columns))}")


def near_miss(name: str, names: Collection[str]) -> str:
    """Return " (did you mean ...?)" for a name that is close to a known path or to a prefix of one.

    Args:
      name: a name that is not known.
      names: the known names or paths.
    """
    prefixes = {"/".join(parts[:n]) for parts in (path.split("/") for path in names) for n in range(1, len(parts) + 1)}
    close = difflib.get_close_matches(name.strip("*/"), sorted(prefixes | set(names)), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


MOST_LISTED = 20  # names in a message


def check_known(argument: str, names: Collection[str], known: Collection[str], owner: str) -> None:
    """Check that an argument names only what there is.

    Args:
      argument: its name.
      names: what it names.
      known: the names of all that there is.
      owner: and a verb, such as "a batch has".

    Raises:
      ValueError: there is nothing of such a name.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"`{argument}` names {name!r}{near_miss(name, known)}; {owner}: {', '.join(known)}")


def check_selection(argument: str, which: Any, selected: Collection[str], known: Collection[str]) -> None:
    """Check that an argument selects at least one parameter.

    Args:
      argument: its name.
      which: a pattern, or anything else that selects parameters.
      selected: the paths of those that it selects.
      known: the paths of all parameters.

    Raises:
      ValueError: it selects none.
    """
    if not selected:
        hint = near_miss(which, known) if isinstance(which, str) else ""
        more = f" and {len(known) - MOST_LISTED} more" if len(known) > MOST_LISTED else ""
        listed = f"{', '.join(list(known)[:MOST_LISTED])}{more}"
        raise ValueError(f"`{argument}`: {which!r:.60} selects no parameter{hint}; the parameters are: {listed}")


def explain_validation(problem: ValidationError) -> str:
    """Return the field, the value and the rule of the first error that pydantic found.

    Args:
      problem: what pydantic raised.
    """
    first, *more = problem.errors(include_url=False)
    if first["type"] == "missing":
        return f"{'.'.join(map(str, first['loc']))!r} is missing"
    field = ".".join(map(str, first["loc"][:1]))
    # of all types of a union
    rules = [error["msg"] for error in (first, *more) if error["loc"][:1] == first["loc"][:1]]
    return f"{field} {first['input']!r:.50}: {', or '.join(dict.fromkeys(rules))}".strip()


# ---- packages of extras ----


EXTRAS = {  # by package, the extra that installs it
    **{name: name for name in ("keras", "flax", "equinox")},
    **dict.fromkeys(("dp_accounting", "jax_privacy"), "privacy"),
    **dict.fromkeys(("starlette", "uvicorn", "httpx", "cryptography"), "deploy"),
    **dict.fromkeys(("fedrecon_device", "jax2onnx", "onnx", "onnxruntime", "flatbuffers"), "device"),
    "optuna": "tune",
}


def install_hint(module: str | None) -> str | None:
    """Return how to install a module that could not be imported, or None if no extra has it."""
    package = (module or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    extra = EXTRAS[package]
    source = " (in a copy of the repository: pip install ./src-device '.[device]')" if extra == "device" else ""
    return f"{package} cannot be imported; run: pip install 'fedrecon[{extra}]'{source}"


def require(module: str) -> Any:
    """Import a module of an extra; the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{install_hint(module)} ({error})", name=module) from error
