"""Tables as plain text, for reports that are printed."""

from __future__ import annotations

from collections.abc import Sequence


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
