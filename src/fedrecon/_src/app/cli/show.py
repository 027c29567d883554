"""What commands print: tables on standard output, remarks on standard error."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedrecon._src.core.formatting import how_many, listed_counts, plain

if TYPE_CHECKING:
    from fedrecon._src.recommend.config import Config
    from fedrecon._src.recommend.evaluation_table import Table
    from fedrecon._src.recommend.tasks import Measure, Task
    from fedrecon._src.simulation.evaluation import Evaluation


FIRST = (1, 10, 50)  # rounds whose loss is shown before the first evaluation


def remark(text: str) -> None:
    """Say something that is not a result."""
    print(plain(text), file=sys.stderr, flush=True)


def alarm(text: str) -> None:
    """Say that something has gone wrong: in red where there is a terminal."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[int] = (0,)) -> None:
    """Print a table; all columns but those of `texts`, the first by default, hold numbers.

    Cells may be anything: what comes from data is printed as it is and neither obeyed nor taken for markup.
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


def evaluation(
    title: str,
    found: Evaluation,
    task: Task[Any, Any, Any],
    baselines: Table = MappingProxyType({}),
    config: Config | None = None,
    advice: str = "",
) -> None:
    """Print an evaluation: figures beside those of baselines, and of whom they are. No figures if too many others
    diverged, and no quantiles of few.

    Args:
      title: of the table.
      found: what to print.
      task: what was trained.
      baselines: figures of theirs on the same query.
      config: the settings of the model, for what to try if it loses.
      advice: what to do if few were measured.
    """
    from fedrecon._src.recommend.evaluation_table import compare_with_baselines
    from fedrecon._src.recommend.stopping import JUDGES, evaluation_failed, say_few

    measured, failed = found.clients - found.diverged, evaluation_failed(found, task.people)
    if failed:
        print(title)
        rest = f": figures of the other {measured} would say nothing about the model" if found.clients else ""
        alarm(f"{failed}{rest}")
        return
    measures = [measure for measure in task.measures if config is None or measure.name not in task.omit(config)]
    rows = _rows(found, task, measures, baselines, measured >= JUDGES)
    table(title, ("", *(measure.title for measure in measures)), rows)
    print(_whom(found, task))
    if measured < JUDGES:
        print(f"{say_few(measured, task.people)} {advice}".strip())
    if loses := compare_with_baselines(found, baselines, config):
        print(loses)


def _rows(
    found: Evaluation, task: Task[Any, Any, Any], measures: Sequence[Measure], baselines: Table, quantiles: bool
) -> list[tuple[str, ...]]:
    """Return the rows of an evaluation's table."""

    def figures(metrics: Mapping[str, float]) -> list[str]:
        return [measure.text(metrics) for measure in measures]

    rows = [
        (f"mean over {task.people}" if task.by_client else f"over all {task.examples} (micro)", *figures(found.micro)),
        *((f"  baseline: {name}", *figures(row)) for name, row in baselines.items()),
    ]
    rows += [] if task.by_client else [(f"mean over {task.people} (macro)", *figures(found.macro))]
    rows += [
        (f"{float(q):.0%} of {task.people} are below", *figures({name: of[q] for name, of in found.quantiles.items()}))
        for q in (found.quantiles["loss"] if quantiles else ())
    ]
    return rows


def _whom(found: Evaluation, task: Task[Any, Any, Any]) -> str:
    """Say how many were measured, on how much, and who was not."""
    measured = found.clients - found.diverged
    people = how_many(found.clients, task.people)
    notes = ["none diverged"]
    if found.diverged:
        people = f"{measured} of {people}"
        notes = [f"{how_many(found.diverged, 'others')} diverged and {'is' if found.diverged == 1 else 'are'} excluded"]
    if small := len(found.per_client.get("loss", ())) - found.clients:
        notes.append(f"{small} {'has' if small == 1 else 'have'} too few {task.examples} to be measured")
    return f"{people}, {how_many(found.examples, f'query {task.examples}')}, {'; '.join(notes)}"


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
    simple = "popularity" if record.get("fallback") else "before the first round"
    when = f"round {record['round']}" if record["round"] else simple
    remark(f"{when}: validation {figures}{spent}")


def recommendations(title: str, items: Sequence[dict[str, Any]]) -> None:
    """Print recommended items and the ratings or scores predicted for them."""
    rows = [(f"{rank}. {item['title']}", f"{item['rating']:.2f}") for rank, item in enumerate(items, 1)]
    table(title, ("title", "predicted"), rows)


def following(*commands: str) -> None:
    """Print what to do next: commands of this program, without its name."""
    for number, command in enumerate(commands):
        print(f"{'' if number else 'next:':<7}fedrecon {command}")


def left_out(skipped: Mapping[str, int]) -> None:
    """Remark on what was not read of a file."""
    if counts := listed_counts(skipped):
        remark(f"left out of the data: {counts}")
