"""Tables of studies of ratings: rows next to the paper's, rows beyond it, users with few ratings, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedrecon._src.app.config import Factorization, Reconstruct, Server, Update
from studies.numbers import Measured, Spread, measured, number, with_few
from studies.rating_jobs import Setting, open_ratings, run_job, shortened
from studies.study import Job, Kind, Part, Results, Section, Table


@dataclass(frozen=True)
class Row:
    """A line of the table: one measure of a job, and the paper's numbers for it if it has any."""

    title: str
    job: str
    measure: str
    paper: tuple[float, float] | None = None


def paper_section(rows: Sequence[Row]) -> Section:
    """Return the section of the paper's rows."""

    def compose(results: Results) -> list[Part]:
        words = (
            "RMSE and accuracy (a prediction within half a star) are over all query examples of all users of the split "
            "together, mean ± standard deviation over seeds. Diverged users are in no mean and are counted."
        )
        return [_paper_table(rows, results), words, *_missing(rows, results)]

    return Section("The paper's rows", tuple(row.job for row in rows), compose)


def beyond_section(rows: Sequence[Row]) -> Section:
    """Return the section of rows that the paper does not have."""
    return Section(
        "Beyond the paper",
        tuple(row.job for row in rows),
        lambda results: [_beyond_table(rows, results), *_missing(rows, results)],
    )


def few_section(jobs: Sequence[Job]) -> Section:
    """Return the section of users with few ratings, of those jobs that measured them."""
    chosen = [job for job in jobs if job.setting.few]
    words = "The same query examples, whatever the number of support ratings."
    return Section(
        "Users with few ratings",
        tuple(job.name for job in chosen),
        lambda results: [_few_table(chosen, results), words],
    )


def _paper_table(rows: Sequence[Row], results: Results) -> Table:
    head = ("", "RMSE", "paper", "difference", "accuracy %", "paper", "difference", "rounds", "users", "diverged")
    lines = []
    for row in rows:
        for title, found in _measurements(row, results):
            rmse, accuracy = row.paper or (None, None)
            lines.append(
                (
                    title,
                    write_spread(found.rmse, 3),
                    *_compared(found.rmse.mean, rmse, 3),
                    write_spread(found.accuracy, 1),
                    *_compared(found.accuracy.mean, accuracy, 1),
                    _rounds(row, results, found),
                    str(found.users),
                    f"{found.diverged:.1f}".removesuffix(".0"),
                )
            )
    return Table(head, lines)


def _beyond_table(rows: Sequence[Row], results: Results) -> Table:
    lines = [
        (title, write_spread(found.rmse, 3), write_spread(found.accuracy, 1), str(found.rounds), str(found.users))
        for row in rows
        for title, found in _measurements(row, results)
    ]
    return Table(("", "RMSE", "accuracy %", "rounds", "users"), lines)


def _measurements(row: Row, results: Results) -> list[tuple[str, Measured]]:
    """Return a row's measurement, and that of its continuation where there is one."""
    if row.job not in results:
        return []
    found = results[row.job]
    lines = [(row.title, measured(found, row.measure))]
    on_to = found[0]["setting"]["on_to"]
    if on_to:
        lines.append((f"{row.title}, run on", measured(found, row.measure, on_to)))
    return lines


def _rounds(row: Row, results: Results, found: Measured) -> str:
    setting = results[row.job][0]["setting"]
    if setting["train"] == "baselines":
        return "none"
    return f"{setting['update']['epochs']} epochs" if setting["train"] == "centralized" else str(found.rounds)


def write_spread(value: Spread, digits: int) -> str:
    """Write a mean and, over several seeds, the deviation."""
    return f"{value.mean:.{digits}f}" + (f" ± {value.deviation:.{digits}f}" if value.seeds > 1 else "")


def _compared(value: float, paper: float | None, digits: int) -> tuple[str, str]:
    return ("", "") if paper is None else (f"{paper:.{digits}f}", f"{value - paper:+.{digits}f}")


def _missing(rows: Sequence[Row], results: Results) -> list[Part]:
    gone = [row.title for row in rows if row.job not in results]
    return [f"Missing, not run: {'; '.join(gone)}."] if gone else []


def _few_table(jobs: Sequence[Job], results: Results) -> Table:
    lines = []
    for job in jobs:
        if job.name not in results:
            continue
        for n in map(int, results[job.name][0]["few"]):
            found = with_few(results[job.name], n)
            lines.append(
                (job.title, str(n), write_spread(found.rmse, 3), write_spread(found.accuracy, 1), str(found.rounds))
            )
    return Table(("", "support ratings", "RMSE", "accuracy %", "rounds"), lines)


def describe(setting: Setting) -> tuple[str, str, str, str, str]:
    """Write a setting in words: training, model, reconstruction, update, server."""
    if setting.train == "baselines":
        return ("sums over the training users", "means and biases", "damped mean of the support", "none", "none")
    trained = setting.train if setting.train != "fedrecon" else f"fedrecon, split {setting.split}"
    per_round = "" if setting.train == "centralized" else f", {setting.clients_per_round} clients a round"
    return (
        f"{trained}{per_round}",
        _describe_model(setting.model),
        _describe_reconstruction(setting.reconstruct),
        write_update(setting.update),
        "none" if setting.train == "centralized" else write_server(setting.server),
    )


def _describe_model(model: Factorization) -> str:
    words = [f"{model.dim} dimensions"]
    words += [f"biases, mean from {model.init_mean:g}"] * model.biases
    words += ["learned default"] * model.learned_default + ["implicit feedback"] * model.implicit_feedback
    return ", ".join(words)


def _describe_reconstruction(rebuild: Reconstruct) -> str:
    if rebuild.solver == "least-squares":
        return f"least squares, ridge {rebuild.ridge:g}"
    return (
        f"{rebuild.optimizer} {rebuild.learning_rate:g}, {rebuild.steps} steps, {rebuild.epochs} epochs, "
        f"batches of {rebuild.batch_size}"
    )


def write_update(update: Update) -> str:
    """Write how U descends."""
    steps = "all" if update.steps is None else str(update.steps)
    clipped = "" if update.clip_norm is None else f", clipped to {update.clip_norm:g}"
    extra = clipped + ", joint" * update.joint + ", second order" * update.second_order
    epochs = f"{update.epochs} epochs, " if update.epochs > 1 else ""
    return f"{update.optimizer} {update.learning_rate:g}, {epochs}{steps} steps, batches of {update.batch_size}{extra}"


def write_server(server: Server) -> str:
    """Write what the server does."""
    decay = "" if server.decay_rounds is None else f", falling over {server.decay_rounds} rounds"
    return f"{server.optimizer} {server.learning_rate:g}{decay}"


def _tell(micro: Mapping[str, Any]) -> str:
    return f"RMSE {number(micro['rmse']):.4f}, accuracy {100 * number(micro['accuracy']):.2f} %"


def _loss(micro: Mapping[str, Any]) -> float:
    return number(micro["rmse"])


RATINGS = Kind(
    open=open_ratings,
    run=run_job,
    shorten=shortened,
    tell=_tell,
    loss=_loss,
    heads=("training", "model", "reconstruction", "update", "server"),
    describe=describe,
)
