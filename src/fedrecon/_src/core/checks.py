"""Checks of arguments: numbers within bounds, choices, and names that must exist."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # slow to import
    from pydantic import ValidationError

MOST_FLOAT = 3.4e38  # beyond it, numbers are infinite in 32 bits
MOST_ROUNDS = 2**31 - 1  # the number of a round has 32 bits


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


def explain_validation(problem: ValidationError) -> str:
    """Return the field, the value and the rule of the first error that pydantic found.

    Args:
      problem: what pydantic raised.
    """
    first, *more = problem.errors(include_url=False)
    field = ".".join(map(str, first["loc"][:1]))
    if first["type"] == "missing":
        return f"{field!r} is missing"
    # of all types of a union
    rules = [error["msg"] for error in (first, *more) if error["loc"][:1] == first["loc"][:1]]
    return f"{field} {first['input']!r:.50}: {', or '.join(dict.fromkeys(rules))}".strip()
