"""What commands print: tables on standard output, remarks on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from fedrecon.data import Ratings
from fedrecon.evaluate import Evaluation


def remark(text: str) -> None:
    """Say something that is not a result."""
    print(text, file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all columns but the first hold numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, name in enumerate(columns):
        shown.add_column(name, justify="right" if k else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    print(title)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100).print(shown)


def figures(metrics: dict[str, float]) -> tuple[str, str]:
    """Write RMSE and accuracy for a table."""
    return f"{metrics['rmse']:.4f}", f"{100 * metrics['accuracy']:.1f} %"


def evaluation(title: str, found: Evaluation) -> None:
    """Print an evaluation."""
    rows = [
        ("over all ratings (micro)", *figures(found.micro)),
        ("mean over users (macro)", *figures(found.macro)),
    ]
    rows += [
        (f"{float(q):.0%} of users are below", *figures({name: found.quantiles[name][q] for name in found.quantiles}))
        for q in found.quantiles["rmse"]
    ]
    table(title, ("", "RMSE", "accuracy"), rows)
    print(f"{found.clients} users, {found.examples} query ratings, {found.diverged} users diverged (in no mean)")


def progress_of(record: dict[str, Any]) -> None:
    """Remark on an evaluation during training; rounds are on the progress bar."""
    if record["kind"] == "evaluation":
        rmse, accuracy = figures(record["micro"])
        remark(f"round {record['round']}: validation RMSE {rmse}, accuracy {accuracy}")


def recommendations(title: str, items: Sequence[dict[str, Any]]) -> None:
    """Print recommended items and the ratings predicted for them."""
    rows = [(f"{place}. {item['title']}", f"{item['rating']:.2f}") for place, item in enumerate(items, 1)]
    table(title, ("title", "predicted"), rows)


def left_out(ratings: Ratings) -> None:
    """Remark on what was not read of a ratings file."""
    counts = [f"{count} {what.replace('_', ' ')}" for what, count in ratings.skipped.items() if count]
    if counts:
        remark(f"left out of the ratings: {', '.join(counts)}")
