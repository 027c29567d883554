"""The report of a study: its tables, its figures, and which claims held, in Markdown and in one HTML file."""

from __future__ import annotations

import base64
import html
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedrecon._src.storage.arrays import write_json
from studies.figures import draw_to
from studies.study import Part, Picture, Results, Study, Table
from studies.tune import in_words


def compose(
    study: Study, results: Results, facts: Sequence[str], folder: Path, tuned: Any = None, *, quick: bool = False
) -> list[Part]:
    """Put a report together from the results there are; it says what is missing.

    Args:
      study: what was run.
      results: the results of its jobs.
      facts: about the data and the machine.
      folder: where figures go.
      tuned: what tuning found, if there was any.
      quick: whether jobs were cut short, so that they cannot decide any claim.
    """
    parts: list[Part] = [f"# {study.title}", "## What was run", list(facts)]
    for section in study.sections:
        parts += [f"## {section.title}", *section.compose(results)]
    parts += [f"## {study.claimed}", _claims(study, results, quick)] if study.claims else []
    parts += ["## Figures"]
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


def to_markdown(parts: Sequence[Part], folder: Path) -> str:
    """Write parts as Markdown, pictures linked relative to `folder`."""
    blocks = []
    for part in parts:
        if isinstance(part, Table):
            head = [_row(part.head), _row(["---", *["---:"] * (len(part.head) - 1)])]
            blocks.append("\n".join([*head, *map(_row, part.lines)]))
        elif isinstance(part, Picture):
            blocks.append(f"![{part.caption}]({part.path.relative_to(folder).as_posix()})\n\n{part.caption}")
        elif isinstance(part, list):
            blocks.append("\n".join(f"- {line}" for line in part))
        else:
            blocks.append(part)
    return "\n\n".join(blocks) + "\n"


def write_page(path: Path, parts: Sequence[Part], name: str) -> None:
    """Write parts as a Markdown page among others, with copies of its pictures in a folder of the study's name."""
    pictures = path.parent / "figures" / name
    moved: list[Part] = []
    for part in parts:
        if isinstance(part, Picture):
            pictures.mkdir(parents=True, exist_ok=True)
            part = part._replace(path=Path(shutil.copy(part.path, pictures)))
        moved.append(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_markdown(moved, path.parent), encoding="utf-8")


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
        head = "".join(f"<th>{_marked(cell)}</th>" for cell in part.head)
        lines = ["".join(f"<td>{_marked(cell)}</td>" for cell in line) for line in part.lines]
        return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
    if isinstance(part, Picture):
        data = base64.b64encode(part.path.read_bytes()).decode()
        image = f'<img alt="{html.escape(part.caption)}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{_marked(part.caption)}</figcaption></figure>"
    if isinstance(part, list):
        return "<ul>" + "".join(f"<li>{_marked(line)}</li>" for line in part) + "</ul>"
    level = len(part) - len(part.lstrip("#"))
    text = _marked(part.lstrip("# "))
    return f"<h{level}>{text}</h{level}>" if level else f"<p>{text}</p>"


def _marked(text: str) -> str:
    """Write what Markdown has between two asterisks or backticks as HTML."""
    coded = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))
    pieces = coded.split("**")
    return "".join(f"<strong>{piece}</strong>" if k % 2 else piece for k, piece in enumerate(pieces))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _claims(study: Study, results: Results, quick: bool) -> list[str]:
    lines = ["**No claim is judged**: `--quick` ends training long before its results settle."] if quick else []
    for claim in study.claims:
        gone = [job for job in claim.jobs if job not in results]
        if gone:
            lines.append(f"**{claim.text}**: not measured; missing {', '.join(gone)}.")
        else:
            held, words = claim.check(results)
            verdict = "not judged" if quick else "held" if held else "did not hold"
            lines.append(f"**{claim.text}**: {verdict}. {words}")
    return lines


def _settings_table(study: Study, results: Results) -> Table:
    lines = [(job.name, *study.kind.describe(job.setting)) for job in study.jobs if job.name in results]
    return Table(("job", *study.kind.heads), lines)


def _tune_table(tuned: Any) -> Table:
    lines = [
        (
            f"{one['job']}{' (best)' if one['best'] else ''}",
            in_words(one["values"]),
            "diverged" if one["loss"] is None else one["told"],
            str(one["rounds"]),
        )
        for one in tuned["tried"]
    ]
    return Table(("job", "values", "on validation data", "rounds"), lines)
