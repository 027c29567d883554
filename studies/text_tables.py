"""Tables and claims of studies of text: accuracy for every size of the vocabulary, and what a round sends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from studies.numbers import Spread, at, number, spread
from studies.rating_tables import write_server, write_spread, write_update
from studies.study import Kind, Part, Result, Results, Section, Table
from studies.text_jobs import Setting, open_text, run_job, shortened

CLOSE = 0.02  # the paper prints results within 2 % of each other in bold together
MOST = 0.9


@dataclass(frozen=True)
class Row:
    """A line of the table: one measure of one job for each size of the vocabulary, and the paper's accuracies."""

    title: str
    jobs: Mapping[int, str]
    measure: str
    paper: Mapping[int, float]


def accuracy(results: Sequence[Result], measure: str, metric: str = "accuracy") -> Spread:
    """Sum up accuracy in percent over the seeds of a job, after the rounds that it reports."""
    rounds = int(results[0]["setting"]["rounds"])
    return spread([100 * number(at(result, rounds)[measure]["micro"][metric]) for result in results])


def accuracy_section(rows: Sequence[Row], title: str, metric: str = "accuracy", note: str = "") -> Section:
    """Return the section of a table of accuracies, next to the paper's."""
    sizes = sorted({size for row in rows for size in row.jobs})

    def compose(results: Results) -> list[Part]:
        head = ["", *(cell for size in sizes for cell in (f"V = {size:,}", "paper")), "bytes per round and client"]
        lines, gone = [], []
        for row in rows:
            there = {size: job for size, job in row.jobs.items() if job in results}
            gone += [f"{row.title} (V = {size:,})" for size in row.jobs if size not in there]
            cells = [row.title]
            for size in sizes:
                paper = row.paper.get(size) if metric == "accuracy" else None
                cells.append(
                    write_spread(accuracy(results[there[size]], row.measure, metric), 2) if size in there else ""
                )
                cells.append("" if paper is None else f"{paper:.1f}")
            sent = [results[there[size]][0]["sent_bytes"] / 1e6 for size in sizes if size in there]
            nothing = bool(sent) and not any(sent)
            lines.append((*cells, "none" if nothing else " / ".join(f"{megabytes:.2f} MB" for megabytes in sent)))
        parts: list[Part] = [Table(head, lines)]
        parts += [note] if note else []
        parts += [f"Not run at this scale: {'; '.join(gone)}."] if gone else []
        return parts

    jobs = tuple(dict.fromkeys(job for row in rows for job in row.jobs.values()))
    return Section(title, jobs, compose)


Verdict = tuple[bool, str]


def raises(results: Results, without: Mapping[int, str], having: Mapping[int, str]) -> Verdict:
    """Tell whether local embeddings raise accuracy for every size, most for the smallest."""
    gains = {v: _of(results, having[v]) - _of(results, without[v]) for v in sorted(having)}
    words = ", ".join(f"{gain:+.2f} points for V = {v:,}" for v, gain in gains.items())
    first, *others = gains.values()
    return min(gains.values()) > 0 and all(first > other for other in others), f"{words}."


def order_by_size(results: Results, without: Mapping[int, str], having: Mapping[int, str]) -> Verdict:
    """Tell whether a smaller vocabulary is better with local embeddings, and worse without them."""
    sizes = sorted(having)
    mine, theirs = ([_of(results, jobs[v]) for v in sizes] for jobs in (having, without))
    falls = all(a > b for a, b in itertools.pairwise(mine))
    rises = all(a < b for a, b in itertools.pairwise(theirs))
    written = [", ".join(f"{x:.2f} %" for x in xs) for xs in (mine, theirs)]
    names = ", ".join(f"{v:,}" for v in sizes)
    return falls and rises, f"For V = {names}: with them {written[0]}; without {written[1]}."


def comes_close(
    results: Results, mine: tuple[Mapping[int, str], str], theirs: tuple[Mapping[int, str], str]
) -> Verdict:
    """Tell whether one's accuracy is at most 2 % (of it) below another's for every size, and what each sends."""
    held, words = True, []
    for v in sorted(mine[0]):
        one, other = _of(results, mine[0][v], mine[1]), _of(results, theirs[0][v], theirs[1])
        held = held and one >= (1 - CLOSE) * other
        sent = [results[jobs[0][v]][0]["sent_bytes"] / 1e6 for jobs in (mine, theirs)]
        words.append(f"V = {v:,}: {one:.2f} % with {sent[0]:.2f} MB, against {other:.2f} % with {sent[1]:.2f} MB")
    return held, f"{'; '.join(words)}. Close is at most {CLOSE:.0%} less."


def keeps_most(results: Results, none: str, base: str) -> Verdict:
    """Tell whether a model trained and used without reconstruction steps keeps over 90 % of the accuracy."""
    share = _of(results, none) / _of(results, base)
    words = f"{_of(results, none):.2f} % without steps, {_of(results, base):.2f} % with all: {share:.1%} of it."
    return share > MOST, words


def _of(results: Results, job: str, measure: str = "recon") -> float:
    return accuracy(results[job], measure).mean


def describe(setting: Setting) -> tuple[str, ...]:
    """Write a setting in words, one cell under each of the heads of `TEXT`."""
    if setting.train == "counting":
        return (
            f"counts of at most {setting.max_sentences} sentences a client",
            f"V {setting.vocabulary}",
            *["none"] * 4,
        )
    rebuild = setting.reconstruct
    joint = ", joint" if setting.update.joint else ""
    steps = f"sgd {rebuild.learning_rate:g}, {rebuild.steps} steps" if setting.train == "fedrecon" else "none"
    return (
        f"{setting.train}, split {setting.split}{joint}, {setting.rounds} rounds of {setting.clients_per_round} "
        f"clients, at most {setting.max_sentences} sentences a client",
        f"V {setting.vocabulary}, {setting.buckets} buckets, embedding {setting.embedding}, LSTM {setting.hidden}, "
        f"projection {setting.projection}",
        steps,
        write_update(setting.update),
        write_server(setting.server),
        write_update(setting.finetune) if any("finetune" in measure for measure in setting.measures) else "none",
    )


def _tell(micro: Mapping[str, Any]) -> str:
    loss = f"loss {number(micro['loss']):.4f}, " if "loss" in micro else ""
    return f"{loss}accuracy {100 * number(micro['accuracy']):.2f} %"


def _loss(micro: Mapping[str, Any]) -> float:
    return -number(micro["accuracy"])


TEXT = Kind(
    open=open_text,
    run=run_job,
    shorten=shortened,
    tell=_tell,
    loss=_loss,
    heads=("training", "model", "reconstruction", "update", "server", "finetuning"),
    describe=describe,
)
