"""The report of a study: its tables, its figures, and which claims held, in Markdown and in one HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedrecon.config import Factorization, Reconstruct, Server, Update
from fedrecon.storage import write_json
from fedrecon.studies.figures import draw_to
from fedrecon.studies.numbers import Measured, Spread, measured, with_few
from fedrecon.studies.study import Results, Row, Setting, Study
from fedrecon.studies.tune import in_words


class Table(NamedTuple):
    """Lines of cells under a head."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]


class Picture(NamedTuple):
    """A PNG file and what is said below it."""

    path: Path
    caption: str


Part = str | Table | Picture | list[str]  # a paragraph (or a heading that begins with #), a table, a picture, a list


def compose(study: Study, results: Results, facts: Sequence[str], folder: Path, tuned: Any = None) -> list[Part]:
    """Put a report together from what results there are; what is missing is said to be missing."""
    parts: list[Part] = [f"# {study.title}", "## What was run", list(facts)]
    parts += ["## The paper's rows", _paper_table(study.rows, results)]
    parts += [
        "RMSE and accuracy (a prediction within half a star) are over all query examples of all users of the split "
        "together, mean ± standard deviation over seeds. Diverged users are in no mean and are counted."
    ]
    parts += _missing(study.rows, results)
    parts += ["## Beyond the paper", _beyond_table(study.beyond, results), *_missing(study.beyond, results)]
    few = _few_table(study, results)
    if few.lines:
        parts += ["### Users with few ratings", few, "The same query examples, whatever the number of support ratings."]
    parts += ["## The paper's claims", _claims(study, results), "## Figures"]
    for figure in study.figures:
        if all(job in results for job in figure.jobs):
            path = folder / "figures" / f"{figure.name}.png"
            data = figure.data(results)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path.with_suffix(".json"), {"title": figure.title, **data})
            draw_to(path, figure.draw, data, figure.title)
            parts += [f"### {figure.title}", Picture(path, figure.caption)]
        else:
            gone = [job for job in figure.jobs if job not in results]
            parts += [f"### {figure.title}", f"Missing: {', '.join(gone)} not run."]
    if tuned:
        parts += ["## Settings tried on validation data", _tune_table(tuned)]
    parts += ["## Settings", _settings_table(study, results)]
    return parts


def to_markdown(parts: Sequence[Part], folder: Path | None) -> str:
    """Write parts as Markdown, pictures linked relative to `folder`, or left out without one."""
    blocks = []
    for part in parts:
        if isinstance(part, Table):
            head = [_row(part.head), _row(["---", *["---:"] * (len(part.head) - 1)])]
            blocks.append("\n".join([*head, *map(_row, part.lines)]))
        elif isinstance(part, Picture):
            link = f"![{part.caption}]({part.path.relative_to(folder)})\n\n" if folder else ""
            where = "" if folder else f" The picture and its numbers are `figures/{part.path.stem}.png` and `.json`."
            blocks.append(f"{link}{part.caption}{where}")
        elif isinstance(part, list):
            blocks.append("\n".join(f"- {line}" for line in part))
        else:
            blocks.append(part)
    return "\n\n".join(blocks) + "\n"


STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;font-size:.92rem}th,td{padding:.3rem .6rem;border-bottom:1px solid #ddd;
text-align:right;vertical-align:top}th:first-child,td:first-child{text-align:left}th{border-bottom:2px solid #888}
img{max-width:100%}figure{margin:1rem 0}figcaption{color:#555;font-size:.92rem}"""


def to_html(parts: Sequence[Part]) -> str:
    """Write parts as one HTML page that needs no other file."""
    title = str(parts[0]).removeprefix("# ")
    blocks = [_html_block(part) for part in parts]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(blocks) + "\n</body></html>\n"


def _html_block(part: Part) -> str:
    if isinstance(part, Table):
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in part.head)
        lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in part.lines]
        return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
    if isinstance(part, Picture):
        data = base64.b64encode(part.path.read_bytes()).decode()
        caption = html.escape(part.caption)
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
    if isinstance(part, list):
        return "<ul>" + "".join(f"<li>{_bold(line)}</li>" for line in part) + "</ul>"
    level = len(part) - len(part.lstrip("#"))
    text = _bold(part.lstrip("# "))
    return f"<h{level}>{text}</h{level}>" if level else f"<p>{text}</p>"


def _bold(text: str) -> str:
    pieces = html.escape(text).split("**")
    return "".join(f"<strong>{piece}</strong>" if k % 2 else piece for k, piece in enumerate(pieces))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _paper_table(rows: Sequence[Row], results: Results) -> Table:
    head = ("", "RMSE", "paper", "difference", "accuracy %", "paper", "difference", "rounds", "users", "diverged")
    lines = []
    for row in rows:
        for title, found in _measurements(row, results):
            rmse, accuracy = row.paper or (None, None)
            lines.append(
                (
                    title,
                    _write(found.rmse, 3),
                    *_compared(found.rmse.mean, rmse, 3),
                    _write(found.accuracy, 1),
                    *_compared(found.accuracy.mean, accuracy, 1),
                    _rounds(row, results, found),
                    str(found.users),
                    f"{found.diverged:.1f}".removesuffix(".0"),
                )
            )
    return Table(head, lines)


def _beyond_table(rows: Sequence[Row], results: Results) -> Table:
    lines = [
        (title, _write(found.rmse, 3), _write(found.accuracy, 1), str(found.rounds), str(found.users))
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
    return f"{setting['update']['epochs']} epochs" if setting["train"] == "centralized" else str(found.rounds)


def _write(value: Spread, digits: int) -> str:
    return f"{value.mean:.{digits}f}" + (f" ± {value.deviation:.{digits}f}" if value.seeds > 1 else "")


def _compared(value: float, paper: float | None, digits: int) -> tuple[str, str]:
    return ("", "") if paper is None else (f"{paper:.{digits}f}", f"{value - paper:+.{digits}f}")


def _missing(rows: Sequence[Row], results: Results) -> list[Part]:
    gone = [row.title for row in rows if row.job not in results]
    return [f"Missing, not run: {'; '.join(gone)}."] if gone else []


def _few_table(study: Study, results: Results) -> Table:
    jobs = [job for job in study.jobs if job.setting.few and job.name in results]
    lines = []
    for job in jobs:
        for n in job.setting.few:
            found = with_few(results[job.name], n)
            lines.append((job.title, str(n), _write(found.rmse, 3), _write(found.accuracy, 1), str(found.rounds)))
    return Table(("", "support ratings", "RMSE", "accuracy %", "rounds"), lines)


def _claims(study: Study, results: Results) -> list[str]:
    lines = []
    for claim in study.claims:
        gone = [job for job in claim.jobs if job not in results]
        if gone:
            lines.append(f"**{claim.text}**: not measured; missing {', '.join(gone)}.")
        else:
            held, words = claim.check(results)
            lines.append(f"**{claim.text}**: {'held' if held else 'did not hold'}. {words}")
    return lines


def _settings_table(study: Study, results: Results) -> Table:
    lines = [(job.name, *describe(job.setting)) for job in study.jobs if job.name in results]
    return Table(("job", "training", "model", "reconstruction", "update", "server"), lines)


def describe(setting: Setting) -> tuple[str, str, str, str, str]:
    """Write a setting in words: training, model, reconstruction, update, server."""
    trained = setting.train if setting.train != "fedrecon" else f"fedrecon, split {setting.split}"
    per_round = "" if setting.train == "centralized" else f", {setting.clients_per_round} clients a round"
    return (
        f"{trained}{per_round}",
        _describe_model(setting.model),
        _describe_reconstruction(setting.reconstruct),
        _describe_update(setting.update),
        "none" if setting.train == "centralized" else _describe_server(setting.server),
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


def _describe_update(update: Update) -> str:
    steps = "all" if update.steps is None else str(update.steps)
    extra = ", joint" * update.joint + ", second order" * update.second_order
    epochs = f"{update.epochs} epochs, " if update.epochs > 1 else ""
    return f"{update.optimizer} {update.learning_rate:g}, {epochs}{steps} steps, batches of {update.batch_size}{extra}"


def _describe_server(server: Server) -> str:
    decay = "" if server.decay_rounds is None else f", falling over {server.decay_rounds} rounds"
    return f"{server.optimizer} {server.learning_rate:g}{decay}"


def _tune_table(tuned: Any) -> Table:
    lines = [
        (
            f"{one['job']}{' (best)' if one['best'] else ''}",
            in_words(one["values"]),
            "diverged" if one["rmse"] is None else f"{one['rmse']:.4f}",
            "" if one["accuracy"] is None else f"{100 * one['accuracy']:.2f}",
            str(one["rounds"]),
        )
        for one in tuned["tried"]
    ]
    return Table(("job", "values", "RMSE", "accuracy %", "rounds"), lines)
