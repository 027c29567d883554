"""Text for people: plain tables, numbers, names from data without control sequences, progress bars, warnings."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

Advance = Callable[..., None]
Say = Callable[[str], None]  # is called with remarks for people
PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Progress(Protocol):
    """Opens a display of `total` units of work. Inside, call the result with the number of units done and a note."""

    def __call__(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Open a display."""


@contextlib.contextmanager
def silent(title: str, total: int) -> Iterator[Advance]:
    """Show nothing.

    Args:
      title: of the work.
      total: units of work.
    """
    yield lambda done=1, note="": None


@contextlib.contextmanager
def bars(title: str, total: int) -> Iterator[Advance]:
    """Show a bar with the time left on standard error, if that is a terminal.

    Args:
      title: of the work.
      total: units of work.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Display

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),  # it may contain a file name
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Display(*columns, console=console, transient=True, disable=not console.is_terminal) as display:
        task = display.add_task(title, total=total, note="")

        def advance(done: int = 1, note: str = "") -> None:
            display.update(task, advance=done, note=note)

        yield advance


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller outside the package.

    Args:
      message: what happened and what to do.
      category: of the warning.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


# Sequences that a terminal executes: colours and cursor (CSI), titles and links (OSC and the like), other escapes.
_COMMANDS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_BREAKS = re.compile(r"[\t\n\v\f\r\x85\u2028\u2029]+")
# Other control characters, marks that change the direction of text, lone surrogates that cannot be encoded.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Return text that is safe to print on a terminal: no escape sequences, no control characters, one line.

    Use it for everything that comes from data: titles, names of users, words. It does not remove `rich` markup: with
    `rich`, print the result as a `Text`.

    Args:
      text: any text.
    """
    return _CONTROLS.sub("", _BREAKS.sub(" ", _COMMANDS.sub("", text)))


def listed_counts(counts: Mapping[str, int]) -> str:
    """Return what was counted, such as `bad rows (1), duplicates (3)`; nothing if all counts are 0.

    Args:
      counts: `{what was counted: how often}`, with underscores for blanks.
    """
    return ", ".join(f"{what.replace('_', ' ')} ({count:,})" for what, count in counts.items() if count)


def say_left_out(counts: Mapping[str, int]) -> str:
    """Say what was left out of data.

    Args:
      counts: as for `listed_counts`.
    """
    left_out = listed_counts(counts)
    return f"Left out: {left_out}." if left_out else "Nothing was left out."


def readable(value: float, digits: int = 4) -> str:
    """Return a number as a person would write it: `0`, `3.3`, `0.9128`, `160`, `12,346`.

    Args:
      value: any number.
      digits: how many significant digits there are at most; those before the point are always there.
    """
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e15:  # tiny, huge or not finite
        return f"{value:.{digits}g}"
    before = math.floor(math.log10(abs(value))) + 1
    text = f"{value:,.{max(0, digits - before)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def lay_out(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Align the cells of a table, with a rule below the header.

    Args:
      rows: cells; the first row is the header, and cells beyond its last column are not aligned.
      right: whether to align all columns but the first to the right.

    Returns:
      The lines of the table.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sides = ["<", *(">" if right else "<") * (len(widths) - 1)]
    lines = []
    for row in rows:
        aligned = [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)]
        lines.append("  ".join([*aligned, *row[len(widths) :]]).rstrip())
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
