"""Progress bars for long work, and warnings that point at the caller's own code."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

Advance = Callable[..., None]
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
