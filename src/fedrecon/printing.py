"""What is printed: tables as plain text, and names from data without what a terminal would obey."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What a terminal takes for a command: colours and cursor (CSI), titles and links (OSC and its like), other escapes.
_COMMANDS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_BREAKS = re.compile(r"[\t\n\v\f\r\x85\u2028\u2029]+")
# Other controls, marks that turn the direction of writing, halves of characters that cannot be written.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Return text that a terminal shows and does not obey: no escape sequences, no control characters, one line.

    Use it for whatever comes from data: titles, names of users, words. What it leaves is printed as it is, so with
    `rich` it belongs into a `Text`, which knows no markup.
    """
    return _CONTROLS.sub("", _BREAKS.sub(" ", _COMMANDS.sub("", text)))


def lay_out(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Align the cells of rows, with a line below the first one.

    Args:
      rows: cells; the first row is the header, and cells beyond its last one follow as they are.
      right: align all columns but the first to the right.

    Returns:
      A line for each row, and the one below the header.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sides = ["<", *(">" if right else "<") * (len(widths) - 1)]
    lines = [
        "  ".join(
            [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)]
            + [*row[len(widths) :]]
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
