"""Next word prediction with personal vocabularies, as the paper studied it.

python -m studies text --data blogs.jsonl.gz --out study
python -m studies text --data stackoverflow.sqlite --out study --scale paper
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import fedrecon as fr
from fedrecon._src.recommend.config import (
    TEXT_DEFAULT,
    TEXT_PAPER,
    Reconstruct,
    Server,
    SplitSettings,
    TextConfig,
    Update,
)
from fedrecon._src.recommend.config import TextData as DataConfig
from studies import figures
from studies.study import Claim, Figure, Grid, Job, Study
from studies.text_jobs import (
    KIND,
    MASKED,
    SizeRow,
    accuracy_section,
    comes_close,
    explains_gain,
    order_by_size,
    raises,
    retains_most,
)
from studies.text_people import personal_section

SIZES = (1000, 5000, 10000)
BUCKETS = (50, 200, 1000)  # besides 1 and 500
STEPS = (0, 1, 2)  # of reconstruction, besides all
KNOWN = (10, 50, 200, 1000)  # sentences of a person that are known
COUNTING = ("most used word", "counted bigrams", "counted trigrams")

# The paper's sizes and numbers of rounds, for an accelerator.
PAPER = TextConfig(
    data=DataConfig(source="", max_sentences=1000),
    model=replace(TEXT_PAPER.model, vocabulary=1000, embedding=96, hidden=670, projection=96),
    split=SplitSettings(),
    reconstruct=Reconstruct(learning_rate=0.1, steps=100, epochs=1, batch_size=16),
    update=Update(learning_rate=0.3, steps=100, batch_size=16),
    server=Server(optimizer="fedyogi", learning_rate=0.1),
    sampling=fr.Sampling(200),
    rounds=2500,
    evaluate_every=2500,
)
PAPER_FINETUNE = Update(learning_rate=0.1, steps=100, batch_size=16)
# What two cores finish: a smaller model, fewer rounds and clients, fewer sentences per client; hence larger client
# steps, which need clipping, and a server whose rate falls. `--tune` tries the grids below.
TWO_CORES = replace(
    PAPER,
    data=DataConfig(source="", max_sentences=128),
    model=replace(TEXT_PAPER.model, vocabulary=1000),
    reconstruct=Reconstruct(learning_rate=1.0, steps=100, epochs=1, batch_size=16),
    update=Update(learning_rate=3.0, steps=100, batch_size=16, clip_norm=1.0),
    server=Server(optimizer="fedyogi", learning_rate=0.04, decay_rounds=800),
    sampling=fr.Sampling(5),
    rounds=800,
    evaluate_every=200,
)
TWO_CORES_FINETUNE = Update(learning_rate=0.3, steps=100, batch_size=16, clip_norm=1.0)


class Grids(NamedTuple):
    """What `--tune` tries for one vocabulary: where everything is global, and where embeddings are local."""

    shared: Grid
    local: Grid


PAPER_GRIDS = Grids(
    {"server.learning_rate": (0.03, 0.1, 0.3), "update.learning_rate": (0.1, 0.3, 1.0)},
    {"server.learning_rate": (0.03, 0.1, 0.3), "reconstruct.learning_rate": (0.03, 0.1, 0.3)},
)
# The same for both: the rate of reconstruction hardly matters.
RATES: Grid = {"server.learning_rate": (0.01, 0.02, 0.04, 0.08), "update.learning_rate": (1.0, 3.0)}
TWO_CORES_GRIDS = Grids(RATES, RATES)


def job_name(kind: str, vocabulary: int) -> str:
    """Name a job of one kind for a size of the vocabulary."""
    return f"{kind}-{vocabulary // 1000}k" if vocabulary >= 1000 else f"{kind}-{vocabulary}"


class Scale(NamedTuple):
    """The size of a study: how everything is trained, what is tuned for the first size, and which sizes there are.

    Training without a split and joint training are run for `variants`, and personal next words for `personal` rounds;
    they are measured when at most so many sentences of a person are `known`.
    """

    config: TextConfig
    finetune: Update
    grids: Grids
    sizes: tuple[int, ...] = SIZES
    variants: tuple[int, ...] = SIZES
    personal: int = TEXT_DEFAULT.rounds
    known: tuple[int, ...] = KNOWN


def make_jobs(scale: Scale) -> tuple[Job, ...]:
    """Return the jobs of a study, one vocabulary after another."""
    jobs = []
    for size in scale.sizes:
        jobs += _jobs_of_size(scale, size)
    for size in scale.sizes:
        data = replace(scale.config.data, max_sentences=2 * max(scale.known))  # half of them are known
        config = replace(TEXT_DEFAULT, data=data, sampling=fr.Sampling(8))
        config = sized(replace(config, rounds=scale.personal, evaluate_every=scale.personal), size)
        name, title = job_name("personal", size), f"Personal next words, V = {size:,}"
        jobs.append(Job(name, title, config, method="personal", few=scale.known))
    small = scale.sizes[0]
    for buckets in BUCKETS:
        title = f"FedRecon, {buckets} buckets, V = {small:,}"
        jobs.append(Job(f"buckets-{buckets}", title, sized(scale.config, small, buckets), finetune=scale.finetune))
    for steps in STEPS:
        config = sized(scale.config, small)
        config = replace(config, reconstruct=replace(config.reconstruct, steps=steps))
        title = f"FedRecon, {steps} reconstruction steps, V = {small:,}"
        jobs.append(Job(f"reconstruct-{steps}", title, config, finetune=scale.finetune))
    return tuple(jobs)


def sized(config: TextConfig, vocabulary: int, buckets: int | None = None) -> TextConfig:
    """Return a config with another vocabulary, and another number of buckets if given."""
    buckets = config.model.oov_buckets if buckets is None else buckets
    return replace(config, model=replace(config.model, vocabulary=vocabulary, oov_buckets=buckets))


def _jobs_of_size(scale: Scale, size: int) -> list[Job]:
    full, one_bucket = sized(scale.config, size), sized(scale.config, size, 1)
    shared, local = scale.grids if size == scale.sizes[0] else Grids({}, {})

    def job(kind: str, title: str, config: TextConfig, *measures: str, **options: Any) -> Job:
        name, title = job_name(kind, size), f"{title}, V = {size:,}"
        return Job(name, title, config, measures=measures, finetune=scale.finetune, **options)

    finetuned = ("plain", "oov-finetune", "full-finetune")
    jobs = [
        job(
            "counting", "Counting words", replace(one_bucket, rounds=1, evaluate_every=1), *COUNTING, method="counting"
        ),
        job("fedyogi", "FedYogi", one_bucket, "plain", MASKED, method="fedyogi", grid=shared),
        job("recon-1", "FedRecon, 1 bucket", one_bucket, "recon", MASKED),
        job("recon", "FedRecon, 500 buckets", full, "recon", MASKED, "recon-finetune", grid=local),
        job("finetuning", "FedYogi to be fine-tuned, 500 buckets", full, *finetuned, method="fedyogi"),
    ]
    if size in scale.variants:
        joint = replace(full, update=replace(full.update, joint=True))
        jobs += [
            job("no-split", "FedRecon, no split", replace(full, split=SplitSettings(train="none")), "recon"),
            job("joint", "FedRecon, joint training", joint, "recon"),
        ]
    return jobs


def make_rows(scale: Scale) -> tuple[SizeRow, ...]:
    """Return the rows of the paper's table."""

    def row(title: str, kind: str, measure: str, *paper: float, sizes: tuple[int, ...] = scale.sizes) -> SizeRow:
        return SizeRow(title, {v: job_name(kind, v) for v in sizes}, measure, dict(zip(SIZES, paper, strict=False)))

    return (
        row("FedYogi (all global)", "fedyogi", "plain", 24.3, 26.3, 26.7),
        row("FedRecon, 1 OOV", "recon-1", "recon", 24.1, 26.2, 26.4),
        row("FedRecon, 1 OOV, that output masked", "recon-1", MASKED),
        row("FedRecon, 500 OOV", "recon", "recon", 29.6, 28.1, 27.7),
        row("FedRecon, 500 OOV, no split", "no-split", "recon", 28.8, 28.1, 27.7, sizes=scale.variants),
        row("FedRecon, 500 OOV, joint", "joint", "recon", 29.3, 27.9, 27.7, sizes=scale.variants),
        row("OOV finetuning (500)", "finetuning", "oov-finetune", 30.0, 28.1, 27.9),
        row("Full finetuning (500)", "finetuning", "full-finetune", 30.8, 29.2, 28.8),
        row("FedRecon + finetune (500)", "recon", "recon-finetune", 30.7, 28.9, 28.6),
    )


NOTE = (
    "Accuracy in percent of the first choice among all outputs, at targets that are words of the vocabulary, over all "
    "query examples of all unseen clients. The paper's numbers are of Stack Overflow and of a larger model trained for "
    "longer: orders can be compared, not values. Bytes are to and from one client in one round, counted from the "
    "arrays, for each V. The baselines count words of training clients. They guess only words of the vocabulary, while "
    "a model may choose a word outside of it or the end of the sentence; with one bucket for all words outside a small "
    "vocabulary, it often does."
)


def make_study(scale: Scale) -> Study:
    """Return the study at one scale."""
    kinds = ("counting", "recon-1", "recon", "finetuning")
    counting, without, local, finetuning = ({v: job_name(kind, v) for v in scale.sizes} for kind in kinds)
    table = make_rows(scale)
    baselines = [SizeRow(f"Baseline: {measure}", counting, measure, {}) for measure in COUNTING]
    title = "Accuracy with words outside the vocabulary and ends of sentences counted"
    recon, finetuned = (*without.values(), *local.values()), (*local.values(), *finetuning.values())
    none, base = "reconstruct-0", local[scale.sizes[0]]
    return Study(
        name="text",
        title="Federated Reconstruction for next word prediction",
        kind=KIND,
        seeds=1,
        jobs=make_jobs(scale),
        sections=(
            accuracy_section((*baselines, *table), "The paper's rows", note=NOTE),
            accuracy_section(table, title, "accuracy_with_oov_eos"),
            personal_section({v: job_name("personal", v) for v in scale.sizes}, "What people get"),
        ),
        figures=make_figures(scale, without, local, finetuning),
        claims=(
            Claim(
                "500 local OOV embeddings raise accuracy for every V, most for the smallest",
                recon,
                lambda results: raises(results, without, local),
            ),
            Claim(
                "Most of that is only that the single OOV output no longer wins (not a claim of the paper)",
                recon,
                lambda results: explains_gain(results, without, local),
            ),
            Claim(
                "With them a smaller vocabulary is better, without them worse",
                recon,
                lambda results: order_by_size(results, without, local),
            ),
            Claim(
                "FedRecon comes close to OOV finetuning while sending less",
                finetuned,
                lambda results: comes_close(results, (local, "recon"), (finetuning, "oov-finetune")),
            ),
            Claim(
                "FedRecon + finetune comes close to full finetuning",
                finetuned,
                lambda results: comes_close(results, (local, "recon-finetune"), (finetuning, "full-finetune")),
            ),
            Claim(
                "Zero reconstruction steps keep over 90% of the accuracy",
                (none, base),
                lambda results: retains_most(results, none, base),
            ),
        ),
    )


def make_figures(
    scale: Scale, without: dict[int, str], local: dict[int, str], finetuning: dict[int, str]
) -> tuple[Figure, ...]:
    """Return the figures of a study."""
    size = scale.sizes[0]
    buckets = {1: without[size], **{n: f"buckets-{n}" for n in BUCKETS}, 500: local[size]}
    steps = {**{n: f"reconstruct-{n}" for n in STEPS}, scale.config.reconstruct.steps or 100: local[size]}
    series = {
        "FedRecon, 500 OOV": (local[size], "recon"),
        "FedRecon, 1 OOV": (without[size], "recon"),
        "FedYogi, 1 OOV": (job_name("fedyogi", size), "plain"),
        "FedYogi, 500 OOV": (finetuning[size], "plain"),
    }
    return (
        Figure(
            "oov-buckets",
            "Accuracy against OOV buckets",
            f"FedRecon, V = {size:,}; each point trained with its number of buckets.",
            tuple(buckets.values()),
            *figures.accuracy_curve(dict(sorted(buckets.items())), "OOV buckets, each with a local embedding"),
        ),
        Figure(
            "loss",
            "Loss over rounds for each vocabulary",
            "Query loss of the clients of each round, a running mean over 10 rounds.",
            tuple(local.values()),
            *figures.losses({f"V = {v:,}": job for v, job in local.items()}, "cross-entropy", "FedRecon, 500 OOV"),
        ),
        Figure(
            "communication",
            "Accuracy against parameters communicated",
            f"V = {size:,}. To and from all clients of all rounds so far, counted from the arrays.",
            tuple(job for job, _ in series.values()),
            *figures.communication(series),
        ),
        Figure(
            "reconstruction-steps",
            "Accuracy against reconstruction steps",
            f"V = {size:,}, 500 OOV; each point trained and evaluated with its number of steps.",
            tuple(steps.values()),
            *figures.relative_accuracy(steps, local[size], "reconstruction"),
        ),
    )


STUDY = make_study(Scale(TWO_CORES, TWO_CORES_FINETUNE, TWO_CORES_GRIDS, personal=500, known=KNOWN[:3]))
PAPER_STUDY = make_study(Scale(PAPER, PAPER_FINETUNE, PAPER_GRIDS))
