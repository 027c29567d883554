"""Next word prediction with personal vocabularies, as the paper studied it.

fedrecon reproduce text --data blogs.jsonl.gz --out study
fedrecon reproduce text --data stackoverflow.sqlite --out study --scale paper
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fedrecon._src.app.config import Reconstruct, Server, Update
from studies import figures
from studies.study import Claim, Figure, Grid, Job, Study
from studies.text_jobs import Measure, Setting
from studies.text_tables import (
    TEXT,
    Row,
    accuracy_section,
    comes_close,
    keeps_most,
    order_by_size,
    raises,
)

SIZES = (1000, 5000, 10000)
BUCKETS = (50, 200, 1000)  # besides 1 and 500
STEPS = (0, 1, 2)  # of reconstruction, besides all
COUNTED: tuple[Measure, ...] = ("most used word", "most frequent next word")

# The paper's sizes and numbers of rounds, for an accelerator.
PAPER = Setting()
# What two cores finish: a smaller model, fewer rounds and clients, fewer sentences per client; hence larger client
# steps, which need clipping, and a server whose rate falls. `--tune` tries the grids below.
TWO_CORES = Setting(
    embedding=48,
    hidden=96,
    projection=48,
    reconstruct=Reconstruct(learning_rate=1.0, steps=100, epochs=1, batch_size=16),
    update=Update(learning_rate=3.0, steps=100, batch_size=16, clip_norm=1.0),
    finetune=Update(learning_rate=0.3, steps=100, batch_size=16, clip_norm=1.0),
    server=Server(optimizer="fedyogi", learning_rate=0.02, decay_rounds=800),
    clients_per_round=5,
    rounds=800,
    every=200,
    max_sentences=128,
)


class Grids(NamedTuple):
    """What `--tune` tries for one vocabulary: where everything is global, and where embeddings are local."""

    shared: Grid
    local: Grid


PAPER_GRIDS = Grids(
    {"server.learning_rate": (0.03, 0.1, 0.3), "update.learning_rate": (0.1, 0.3, 1.0)},
    {"server.learning_rate": (0.03, 0.1, 0.3), "reconstruct.learning_rate": (0.03, 0.1, 0.3)},
)
TWO_CORES_GRIDS = Grids(
    {"server.learning_rate": (0.01, 0.02, 0.04), "update.learning_rate": (1.0, 3.0)},
    {"server.learning_rate": (0.01, 0.02, 0.04), "reconstruct.learning_rate": (0.3, 1.0, 3.0)},
)


def name_of(kind: str, vocabulary: int) -> str:
    """Name a job of one kind for a size of the vocabulary."""
    return f"{kind}-{vocabulary // 1000}k" if vocabulary >= 1000 else f"{kind}-{vocabulary}"


def jobs(base: Setting, grids: Grids, sizes: tuple[int, ...], variants: tuple[int, ...]) -> tuple[Job, ...]:
    """Return the jobs of a study, those of one vocabulary after those of another.

    Args:
      base: how everything is trained and measured.
      grids: what is tried for the first size.
      sizes: sizes of the vocabulary.
      variants: those sizes for which training without a split and joint training are tried too.
    """
    all_jobs = []
    for size in sizes:
        recon = replace(base, vocabulary=size, measures=("recon", "recon-finetune"))
        yogi = replace(base, vocabulary=size, train="fedyogi", measures=("plain",))
        title = f"V = {size:,}"
        shared, local = grids if size == sizes[0] else Grids({}, {})
        counting = Setting(train="counting", vocabulary=size, buckets=1, rounds=1, every=1, measures=COUNTED)
        counting = replace(counting, max_sentences=base.max_sentences)
        all_jobs += [
            Job(name_of("counting", size), f"Counting words, {title}", counting),
            Job(name_of("fedyogi", size), f"FedYogi, {title}", replace(yogi, buckets=1), shared),
            Job(
                name_of("recon-1", size), f"FedRecon, 1 bucket, {title}", replace(recon, buckets=1, measures=("recon",))
            ),
            Job(name_of("recon", size), f"FedRecon, 500 buckets, {title}", recon, local),
            Job(
                name_of("finetuning", size),
                f"FedYogi to be finetuned, 500 buckets, {title}",
                replace(yogi, measures=("plain", "oov-finetune", "full-finetune")),
            ),
        ]
        if size in variants:
            alone = replace(recon, measures=("recon",))
            joint = replace(alone, update=replace(base.update, joint=True))
            all_jobs += [
                Job(name_of("no-split", size), f"FedRecon, no split, {title}", replace(alone, split="none")),
                Job(name_of("joint", size), f"FedRecon, joint training, {title}", joint),
            ]
    small = replace(base, vocabulary=sizes[0])
    all_jobs += [
        Job(f"buckets-{n}", f"FedRecon, {n} buckets, V = {sizes[0]:,}", replace(small, buckets=n)) for n in BUCKETS
    ]
    all_jobs += [
        Job(
            f"reconstruct-{n}",
            f"FedRecon, {n} reconstruction steps, V = {sizes[0]:,}",
            replace(small, reconstruct=replace(base.reconstruct, steps=n)),
        )
        for n in STEPS
    ]
    return tuple(all_jobs)


def rows(sizes: tuple[int, ...], variants: tuple[int, ...]) -> tuple[Row, ...]:
    """Return the rows of the paper's table."""

    def row(title: str, kind: str, measure: str, paper: tuple[float, ...], of: tuple[int, ...] = sizes) -> Row:
        return Row(title, {v: name_of(kind, v) for v in of}, measure, dict(zip(SIZES, paper, strict=True)))

    return (
        row("FedYogi (all global)", "fedyogi", "plain", (24.3, 26.3, 26.7)),
        row("FedRecon, 1 OOV", "recon-1", "recon", (24.1, 26.2, 26.4)),
        row("FedRecon, 500 OOV", "recon", "recon", (29.6, 28.1, 27.7)),
        row("FedRecon, 500 OOV, no split", "no-split", "recon", (28.8, 28.1, 27.7), variants),
        row("FedRecon, 500 OOV, joint", "joint", "recon", (29.3, 27.9, 27.7), variants),
        row("OOV finetuning (500)", "finetuning", "oov-finetune", (30.0, 28.1, 27.9)),
        row("Full finetuning (500)", "finetuning", "full-finetune", (30.8, 29.2, 28.8)),
        row("FedRecon + finetune (500)", "recon", "recon-finetune", (30.7, 28.9, 28.6)),
    )


def counted(sizes: tuple[int, ...]) -> tuple[Row, ...]:
    """Return the rows of what counting gives, without a model."""
    return tuple(
        Row(f"Baseline: {measure}", {v: name_of("counting", v) for v in sizes}, measure, {}) for measure in COUNTED
    )


def make(base: Setting, grids: Grids, sizes: tuple[int, ...], variants: tuple[int, ...]) -> Study:
    """Return the study at one scale."""
    smallest, table = sizes[0], rows(sizes, variants)
    without, having, finetuning = ({v: name_of(kind, v) for v in sizes} for kind in ("recon-1", "recon", "finetuning"))
    buckets = {1: without[smallest], **{n: f"buckets-{n}" for n in BUCKETS}, 500: having[smallest]}
    steps = {**{n: f"reconstruct-{n}" for n in STEPS}, base.reconstruct.steps or 100: having[smallest]}
    small = f"V = {smallest:,}"
    series = {
        "FedRecon, 500 OOV": (having[smallest], "recon"),
        "FedRecon, 1 OOV": (without[smallest], "recon"),
        "FedYogi, 1 OOV": (name_of("fedyogi", smallest), "plain"),
        "FedYogi, 500 OOV": (finetuning[smallest], "plain"),
    }
    everything = (*without.values(), *having.values())
    return Study(
        name="text",
        title="Federated Reconstruction for next word prediction",
        kind=TEXT,
        seeds=1,
        jobs=jobs(base, grids, sizes, variants),
        sections=(
            accuracy_section(
                (*counted(sizes), *table),
                "The paper's rows",
                note="Accuracy in percent of the first choice among all outputs, at targets that are words of the "
                "vocabulary, over all query examples of all unseen clients. The paper's numbers are of Stack Overflow "
                "and of a larger model trained for longer: orders can be compared, not values. Bytes are to and from "
                "one client in one round, counted from the arrays, for each V. The baselines count words of training "
                "clients. They guess only words of the vocabulary, while a model may choose a word outside of it or "
                "the end of the sentence; with one bucket for all words outside a small vocabulary, it often does.",
            ),
            accuracy_section(
                table,
                "Accuracy with words outside the vocabulary and ends of sentences counted",
                "accuracy_with_oov_eos",
            ),
        ),
        figures=(
            Figure(
                "oov-buckets",
                "Accuracy against OOV buckets",
                f"FedRecon, {small}; each point trained with its number of buckets.",
                tuple(buckets.values()),
                figures.accuracy_against({"FedRecon": dict(sorted(buckets.items()))}),
                figures.draw_accuracy_against("OOV buckets, each with a local embedding"),
            ),
            Figure(
                "loss",
                "Loss over rounds for each vocabulary",
                "Query loss of the clients of each round, a running mean over 10 rounds.",
                tuple(having.values()),
                figures.losses({f"V = {v:,}": job for v, job in having.items()}),
                figures.draw_losses("cross-entropy", "FedRecon, 500 OOV"),
            ),
            Figure(
                "communication",
                "Accuracy against parameters communicated",
                f"{small}. To and from all clients of all rounds so far, counted from the arrays.",
                tuple(job for job, _ in series.values()),
                figures.communication(series),
                figures.draw_communication,
            ),
            Figure(
                "reconstruction-steps",
                "Accuracy against reconstruction steps",
                f"{small}, 500 OOV; each point trained and evaluated with its number of steps.",
                tuple(steps.values()),
                figures.relative_accuracy(steps, having[smallest]),
                figures.draw_relative_accuracy("reconstruction"),
            ),
        ),
        claims=(
            Claim(
                "500 local OOV embeddings raise accuracy for every V, most for the smallest",
                everything,
                lambda found: raises(found, without, having),
            ),
            Claim(
                "With them a smaller vocabulary is better, without them worse",
                everything,
                lambda found: order_by_size(found, without, having),
            ),
            Claim(
                "FedRecon comes close to OOV finetuning while sending less",
                (*having.values(), *finetuning.values()),
                lambda found: comes_close(found, (having, "recon"), (finetuning, "oov-finetune")),
            ),
            Claim(
                "FedRecon + finetune comes close to full finetuning",
                (*having.values(), *finetuning.values()),
                lambda found: comes_close(found, (having, "recon-finetune"), (finetuning, "full-finetune")),
            ),
            Claim(
                "Zero reconstruction steps keep over 90% of the accuracy",
                ("reconstruct-0", having[smallest]),
                lambda found: keeps_most(found, "reconstruct-0", having[smallest]),
            ),
        ),
    )


STUDY = make(TWO_CORES, TWO_CORES_GRIDS, SIZES, SIZES[:1])
PAPER_STUDY = make(PAPER, PAPER_GRIDS, SIZES, SIZES)
