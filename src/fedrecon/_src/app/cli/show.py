"""What commands print: tables on standard output, remarks on standard error."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedrecon._src.core.display import listed_counts, plain

if TYPE_CHECKING:
    from fedrecon._src.recommend.config import Config
    from fedrecon._src.recommend.task import Table
    from fedrecon._src.recommend.tasks import Measure, Task
    from fedrecon._src.simulation.evaluation import Evaluation


FIRST = (1, 10, 50)  # rounds whose loss is shown before the first evaluation


def remark(text: str) -> None:
    """Print a remark on standard error."""
    print(plain(text), file=sys.stderr, flush=True)


def alarm(text: str) -> None:
    """Print an error on standard error, in red on a terminal."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[int] = (0,)) -> None:
    """Print a table. Columns listed in `texts` (by default the first) are text; the others are numbers.

    Cells are printed literally: text from data is never interpreted as markup or control codes.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, name in enumerate(columns):
        shown.add_column(Text(plain(name)), justify="left" if k in texts else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(plain(cell)) for cell in row))
    print(plain(title))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100).print(shown)


def metrics(title: str, measures: Sequence[Measure], rows: Table) -> None:
    """Print metrics as a table, with a row for everything that has them."""
    from fedrecon._src.recommend.task import metric_cells

    header, *cells = metric_cells(measures, rows)
    table(title, header, cells)


def evaluation(
    title: str,
    found: Evaluation,
    task: Task[Any, Any, Any],
    baselines: Table = MappingProxyType({}),
    config: Config | None = None,
    advice: str = "",
) -> None:
    """Print an evaluation next to its baselines.

    No figures are shown if too many clients diverged, and no quantiles if few were measured.

    Args:
      title: the table's title.
      found: the evaluation.
      task: what was trained.
      baselines: their metrics on the same query examples.
      config: the model's settings, for advice if it loses to a baseline.
      advice: what to do if few clients were measured.
    """
    from fedrecon._src.recommend.evaluation_table import after_measures, compare_with_baselines, measured_after
    from fedrecon._src.recommend.stopping import JUDGES, evaluation_failed, say_few

    measured, failed = found.clients - found.diverged, evaluation_failed(found, task.people)
    if failed:
        print(title)
        rest = f": figures of the other {measured} would be misleading" if found.clients else ""
        alarm(f"{failed}{rest}")
        return
    mean = f"mean over {task.people}" if task.by_client else f"over all {task.examples} (micro)"
    rows: dict[str, Mapping[str, float]] = {mean: found.micro}
    rows |= {f"  baseline: {name}": row for name, row in baselines.items()}
    rows |= {} if task.by_client else {f"mean over {task.people} (macro)": found.macro}
    for q in found.quantiles["loss"] if measured >= JUDGES else ():
        rows[f"{float(q):.0%} of {task.people} are below"] = {name: of[q] for name, of in found.quantiles.items()}
    metrics(title, task.measures if config is None else task.shown(task.measures, config), rows)
    if after := measured_after({"the model": found.micro, **baselines}):
        first = task.measures[0]
        metrics(f"{first.title} after so many {task.examples} of a person", after_measures(first), after)
    small = max(len(found.per_client.get("loss", ())) - found.clients, 0)
    print(
        f"{task.people}: {measured:,} measured, {found.diverged:,} diverged and excluded, "
        f"{small:,} with too few {task.examples}; query {task.examples}: {found.examples:,}"
    )
    if measured < JUDGES:
        print(f"{say_few(measured, task.people)} {advice}".strip())
    if config is not None and (loses := compare_with_baselines(found, baselines, config)):
        print(loses)


def progress_of(record: dict[str, Any], measures: Sequence[Measure], first_evaluation: int = 0) -> None:
    """Remark on an evaluation during training, and on the loss of a few rounds before the first evaluation."""
    from fedrecon._src.simulation.divergence import find_divergence

    if record["kind"] == "round" and record["round"] in FIRST and record["round"] < first_evaluation:
        remark(f"round {record['round']}: training loss {record['loss']:.4f}")
    if record["kind"] != "evaluation":
        return
    clients, diverged = record["clients"], record["diverged"]
    figures = f"{measures[0].title} {measures[0].text(record['micro'])}"
    problem = find_divergence(record)
    if problem is not None and problem.kind == "diverged" and problem.failed:
        figures = f"failed: {diverged} of {clients} diverged"
    elif diverged:
        figures += f" (of {clients - diverged}; {diverged} diverged)"
    spent = f", epsilon {record['epsilon']:.3g}" if "epsilon" in record else ""
    when = f"round {record['round']}" if record["round"] else "before the first round"
    remark(f"{when}: validation {figures}{spent}")


def recommendations(title: str, items: Sequence[dict[str, Any]]) -> None:
    """Print recommended items and the ratings or scores predicted for them."""
    rows = [(f"{rank}. {item['title']}", f"{item['rating']:.2f}") for rank, item in enumerate(items, 1)]
    table(title, ("title", "predicted"), rows)


def following(*commands: str) -> None:
    """Print the commands to run next; `fedrecon` is added to each."""
    for number, command in enumerate(commands):
        print(f"{'' if number else 'next:':<7}fedrecon {command}")


def left_out(skipped: Mapping[str, int]) -> None:
    """Remark on the rows of a file that were left out."""
    if counts := listed_counts(skipped):
        remark(f"left out of the data: {counts}")
