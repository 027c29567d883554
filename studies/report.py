"""The report of a study, in Markdown and as one HTML file: tables, figures, and which claims hold."""

from __future__ import annotations

import base64
import html
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.figures import save_figure
from studies.study import Block, Picture, Results, Study, Table, flatten


def compose(
    study: Study,
    results: Results,
    facts: Sequence[str],
    folder: Path,
    trials: Sequence[Mapping[str, Any]] = (),
    *,
    quick: bool = False,
) -> list[Block]:
    """Compose a report from the results there are; it says what is missing.

    Args:
      study: what was run.
      results: the results of its jobs.
      facts: about the data and the machine.
      folder: where figures go.
      trials: what tuning tried.
      quick: jobs were cut short and cannot decide any claim.
    """
    blocks: list[Block] = [f"# {study.title}", "## What was run", list(facts)]
    for section in study.sections:
        blocks += [f"## {section.title}", *section.compose(results)]
    blocks += [f"## {study.claims_title}", _judge_claims(study, results, quick)] if study.claims else []
    blocks += ["## Figures"]
    for figure in study.figures:
        missing = [job for job in figure.jobs if job not in results]
        blocks += [f"### {figure.title}"]
        if missing:
            blocks += [f"Not run: {', '.join(missing)}."]
        else:
            path = folder / "figures" / f"{figure.name}.png"
            save_figure(path, figure.draw, figure.data(results), figure.title)
            blocks += [Picture(path, figure.caption)]
    if trials:
        blocks += ["## Settings tried on validation data", _tuning_table(trials)]
    return [*blocks, "## Settings", *_settings_table(study, results)]


def to_markdown(blocks: Sequence[Block], folder: Path) -> str:
    """Write blocks as Markdown, pictures linked relative to `folder`."""
    lines = []
    for block in blocks:
        if isinstance(block, Table):
            rule = ["---", *["---:"] * (len(block.header) - 1)]
            lines.append("\n".join(f"| {' | '.join(cells)} |" for cells in (block.header, rule, *block.rows)))
        elif isinstance(block, Picture):
            lines.append(f"![{block.caption}]({block.path.relative_to(folder).as_posix()})\n\n{block.caption}")
        else:
            lines.append("\n".join(f"- {line}" for line in block) if isinstance(block, list) else block)
    return "\n\n".join(lines) + "\n"


def write_page(path: Path, blocks: Sequence[Block], name: str) -> None:
    """Write blocks as a Markdown page among others, with copies of its pictures in a folder of the study's name."""
    pictures = path.parent / "figures" / name
    moved: list[Block] = []
    for block in blocks:
        if isinstance(block, Picture):
            pictures.mkdir(parents=True, exist_ok=True)
            block = block._replace(path=Path(shutil.copy(block.path, pictures)))
        moved.append(block)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_markdown(moved, path.parent), encoding="utf-8")


STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;font-size:.92rem}th,td{padding:.3rem .6rem;border-bottom:1px solid #ddd;
text-align:right;vertical-align:top}th:first-child,td:first-child{text-align:left}th{border-bottom:2px solid #888}
img{max-width:100%}figure{margin:1rem 0}figcaption{color:#555;font-size:.92rem}"""


def to_html(blocks: Sequence[Block]) -> str:
    """Write blocks as one HTML page that needs no other file."""
    title = str(blocks[0]).removeprefix("# ")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(map(_to_html, blocks))
        + "\n</body></html>\n"
    )


def _to_html(block: Block) -> str:
    if isinstance(block, Table):
        head = "".join(f"<th>{_inline_html(cell)}</th>" for cell in block.header)
        lines = ["".join(f"<td>{_inline_html(cell)}</td>" for cell in line) for line in block.rows]
        return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.path.read_bytes()).decode()
        image = f'<img alt="{html.escape(block.caption)}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{_inline_html(block.caption)}</figcaption></figure>"
    if isinstance(block, list):
        return "<ul>" + "".join(f"<li>{_inline_html(line)}</li>" for line in block) + "</ul>"
    level = len(block) - len(block.lstrip("#"))
    text = _inline_html(block.lstrip("# "))
    return f"<h{level}>{text}</h{level}>" if level else f"<p>{text}</p>"


def _inline_html(text: str) -> str:
    """Convert **bold** and `code` to HTML."""
    coded = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))
    pieces = coded.split("**")
    return "".join(f"<strong>{piece}</strong>" if k % 2 else piece for k, piece in enumerate(pieces))


def _judge_claims(study: Study, results: Results, quick: bool) -> list[str]:
    lines = ["**No claim is judged**: `--quick` ends training long before its results settle."] if quick else []
    for claim in study.claims:
        missing = [job for job in claim.jobs if job not in results]
        if missing:
            lines.append(f"**{claim.text}**: not measured; missing {', '.join(missing)}.")
        else:
            holds, numbers = claim.check(results)
            verdict = "not judged" if quick else "holds" if holds else "does not hold"
            lines.append(f"**{claim.text}**: {verdict}. {numbers}")
    return lines


def _settings_table(study: Study, results: Results) -> list[Block]:
    """Return what each job changes of the first job's settings."""
    settings = {job.name: dict(flatten(job.settings)) for job in study.jobs}
    base = settings[study.jobs[0].name]
    rows = [
        (name, "; ".join(f"{path} {value}" for path, value in settings[name].items() if value != base.get(path)))
        for name in settings
        if name in results
    ]
    return ["Differences from the first job, by path in the config.", Table(("job", "settings"), rows)]


def _tuning_table(trials: Sequence[Mapping[str, Any]]) -> Table:
    best: dict[str, float] = {}
    for trial in trials:
        if trial["loss"] is not None:
            best[trial["job"]] = min(best.get(trial["job"], trial["loss"]), trial["loss"])
    rows = [
        (
            f"{trial['job']}{' (best)' * (trial['loss'] == best.get(trial['job']))}",
            ", ".join(f"{path} {value:g}" for path, value in trial["values"].items()),
            "diverged" if trial["loss"] is None else trial["metrics"],
            str(trial["rounds"]),
        )
        for trial in trials
    ]
    return Table(("job", "values", "on validation data", "rounds"), rows)
