"""Studies of text: their data, how a job is run, their tables and the paper's claims."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import fedrecon as fr
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.recommend.config import TextConfig, Update
from fedrecon._src.recommend.recipe import build_descent
from fedrecon._src.recommend.tasks import build_algorithm
from fedrecon._src.recommend.tasks.text import build_next_word
from fedrecon._src.recommend.word_evaluation import word_baselines
from fedrecon.data import Corpus, Sentences, load_text
from studies.study import Block, Job, Kind, Result, Results, Section, Spread, Table, metric
from studies.text_people import measure_sample
from studies.training import baseline_result, train

MASKED = "masked"
CLOSE = 0.02  # the paper prints results within 2 % of each other in bold together
MOST = 0.9


class TextData:
    """A corpus, and its sentences as examples for each vocabulary."""

    def __init__(self, corpus: Corpus):
        """Make examples of `corpus`."""
        self.corpus = corpus
        self.examples = functools.lru_cache(maxsize=4)(self._examples)

    def _examples(self, part: str, vocabulary: int, buckets: int) -> Sentences:
        """Return the examples of the clients of a part: `train`, `valid` or `test`."""
        unseen = "heldout" if part != "train" and "heldout" in self.corpus.splits else part
        words = self.corpus.vocabulary(vocabulary, buckets)
        return self.corpus.in_words_of(words, unseen, spelled=part != "train")

    def fingerprint(self) -> str:
        """Return a digest of the sentences."""
        return self.corpus.clients.fingerprint()

    def facts(self) -> list[str]:
        """Describe the data and how it is divided."""
        corpus = self.corpus
        sizes = np.bincount(corpus.split_of, minlength=len(corpus.splits))
        parts = ", ".join(f"{size:,} {name}" for size, name in zip(sizes, corpus.splits, strict=True))
        coverage = ", ".join(
            f"{corpus.coverage(v):.1%} of {v:,}" for v in (1000, 5000, 10000) if v <= len(corpus.words)
        )
        return [
            f"Data: {corpus.clients.num_examples:,} sentences of {len(corpus.clients):,} clients ({parts}), "
            f"{len(corpus.tokens):,} words (fingerprint {self.fingerprint()}). Vocabularies are of the words that "
            f"training clients use most; their share of the words in use: {coverage}.",
            "All measurements are on clients that took no part in training, all of them: the first half of a client's "
            "sentences by time is support, the second half query.",
        ]


def load(source: str, progress: Progress = silent) -> TextData:
    """Open a prepared corpus, or prepare one."""
    return TextData(load_text(source, progress=progress))


@functools.lru_cache(maxsize=2)
def make_algorithms(
    method: str, config: TextConfig, finetuning: Update, measures: tuple[str, ...]
) -> tuple[fr.Algorithm, dict[str, fr.Algorithm]]:
    """Return what trains, and for every measure what serves unseen clients; the same for all seeds of a job.

    `fedrecon` keeps the embeddings of words outside the vocabulary local; `fedyogi` averages everything. Both learn
    from the query half of a client's sentences, so that a round has the same number of examples.
    """
    settings = config.model
    model = fr.models.next_word(
        settings.vocabulary,
        settings.oov_buckets,
        embedding=settings.embedding,
        hidden=settings.hidden,
        projection=settings.projection,
        local="oov_embedding" if method == "fedrecon" else "nothing",
    )
    finetune, algorithm = build_descent(finetuning), build_algorithm(config, model)
    serving: dict[str, Callable[[], fr.Algorithm]] = {
        "plain": lambda: algorithm,
        "recon": lambda: algorithm,
        MASKED: lambda: algorithm,
        "recon-finetune": lambda: fr.with_finetuning(algorithm, finetune),
        "oov-finetune": lambda: fr.with_finetuning(algorithm, finetune, which="oov_embedding"),
        "full-finetune": lambda: fr.with_finetuning(algorithm, finetune),
    }
    return algorithm, {measure: serving[measure]() for measure in measures}


def run_job(job: Job, data: TextData, seed: int, part: str = "test", progress: Progress = silent) -> dict[str, Any]:
    """Train a job with one seed and measure it on the unseen clients of a part.

    Each measure works on a client's support sentences and is taken on its query sentences: `plain` does nothing;
    `recon` reconstructs the local embeddings; `recon-finetune` then fine-tunes everything else too; `oov-finetune` and
    `full-finetune` fine-tune what was trained globally, the embeddings of words outside the vocabulary or everything;
    `masked` is `recon` without the outputs of words outside the vocabulary, which then cannot be the first choice.
    The first measure is taken at every evaluation, all of them after the last round.
    """
    config = job.config
    assert isinstance(config, TextConfig)
    if job.method == "personal":
        return run_personal(job, data, seed, part, progress)
    train_clients, unseen = (
        data.examples(name, config.model.vocabulary, config.model.oov_buckets).cap(config.data.max_sentences)
        for name in ("train", part)
    )
    if job.method == "counting":
        table = word_baselines(train_clients, unseen, fr.split.half())
        absent = {"accuracy": float("nan")}  # of clients without a word of the vocabulary
        facts = {"clients": len(unseen), "diverged": 0}
        measured = {name: {"micro": table.get(name, absent), **facts} for name in job.measures}
        return baseline_result(job, measured, len(train_clients)) | {"sent_bytes": 0}
    assert job.finetune is not None
    algorithm, serving = make_algorithms(job.method, config, job.finetune, job.measures)
    evaluators = {measure: fr.Evaluator(server, unseen, seed=seed) for measure, server in serving.items()}

    def measure_all(rounds: int, params: Any, local_state: Any) -> Mapping[str, fr.Evaluation]:
        measures = job.measures if rounds >= config.rounds else job.measures[:1]
        return {
            measure: evaluators[measure](_masked(params, config) if measure == MASKED else params)
            for measure in measures
        }

    params, result = train(job, algorithm, train_clients, measure_all, seed=seed, progress=progress)
    return result | {"sent_bytes": 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))}


def run_personal(job: Job, data: TextData, seed: int, part: str, progress: Progress) -> dict[str, Any]:
    """Train with the default settings of text, and measure what people get by how much of their text is known."""
    config = job.config
    assert isinstance(config, TextConfig)
    names = ("train", "valid", part)
    train_clients, valid, unseen = (data.examples(n, config.model.vocabulary, config.model.oov_buckets) for n in names)
    train_clients = train_clients.cap(config.data.max_sentences)
    algorithm = build_algorithm(config, build_next_word(config.model, unseen.vocabulary))
    evaluator = fr.Evaluator(algorithm, unseen.cap(config.data.max_sentences), seed=seed)
    params, result = train(
        job, algorithm, train_clients, lambda *state: {"recon": evaluator(state[1])}, seed=seed, progress=progress
    )
    people = measure_sample(config, params, (train_clients, valid, unseen), job.few, progress)
    return result | {"sent_bytes": 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(params)), "people": people}


def _masked(params: Any, config: TextConfig) -> Any:
    """Return parameters with which no word outside the vocabulary is ever the most probable."""
    bias = params["output"]["bias"].at[-config.model.oov_buckets :].set(-1e9)
    return {**params, "output": {**params["output"], "bias": bias}}


KIND = Kind(
    load,
    run_job,
    metrics=("accuracy", "loss"),
    maximize=True,
    quick_rounds=4,
    quick_changes={"data.max_sentences": 32},
)


# ---- tables ----


@dataclass(frozen=True)
class SizeRow:
    """A row of the table: one measure of one job for each size of the vocabulary, and the paper's accuracies."""

    title: str
    jobs: Mapping[int, str]
    measure: str
    paper: Mapping[int, float]


def accuracy_section(rows: Sequence[SizeRow], title: str, name: str = "accuracy", note: str = "") -> Section:
    """Return the section of a table of accuracies, next to the paper's."""
    sizes = sorted({size for row in rows for size in row.jobs})
    header = ["", *(cell for size in sizes for cell in (f"V = {size:,}", "paper")), "bytes per round and client"]

    def cells(row: SizeRow, results: Results) -> tuple[str, ...]:
        finished = {size: results[job] for size, job in row.jobs.items() if job in results}
        sent = [finished[size][0]["sent_bytes"] / 1e6 for size in sizes if size in finished]
        values = []
        for size in sizes:
            paper = row.paper.get(size) if name == "accuracy" else None
            values.append(percent(finished[size], row.measure, name).format(2) if size in finished else "")
            values.append("" if paper is None else f"{paper:.1f}")
        nothing = bool(sent) and not any(sent)
        return (row.title, *values, "none" if nothing else " / ".join(f"{megabytes:.2f} MB" for megabytes in sent))

    def compose(results: Results) -> list[Block]:
        missing = [f"{row.title} (V = {v:,})" for row in rows for v, job in row.jobs.items() if job not in results]
        blocks: list[Block] = [Table(header, [cells(row, results) for row in rows])]
        blocks += [note] if note else []
        return [*blocks, f"Not run at this scale: {'; '.join(missing)}."] if missing else blocks

    return Section(title, tuple(dict.fromkeys(job for row in rows for job in row.jobs.values())), compose)


def percent(results: Sequence[Result], measure: str, name: str = "accuracy") -> Spread:
    """Return an accuracy in percent, mean and deviation over the seeds of a job."""
    return metric(results, measure, name, scale=100)


# ---- claims ----

Verdict = tuple[bool, str]
Jobs = Mapping[int, str]  # by size of the vocabulary


def raises(results: Results, without: Jobs, local: Jobs) -> Verdict:
    """Check that local embeddings raise accuracy for every size, most for the smallest."""
    gains = {v: _accuracy(results, local[v]) - _accuracy(results, without[v]) for v in sorted(local)}
    text = ", ".join(f"{gain:+.2f} points for V = {v:,}" for v, gain in gains.items())
    first, *rest = gains.values()
    return min(gains.values()) > 0 and all(first > gain for gain in rest), f"{text}."


def order_by_size(results: Results, without: Jobs, local: Jobs) -> Verdict:
    """Check that a smaller vocabulary is better with local embeddings, and worse without them."""
    sizes = sorted(local)
    falling, rising = ([_accuracy(results, jobs[v]) for v in sizes] for jobs in (local, without))
    falls = all(a > b for a, b in itertools.pairwise(falling))
    rises = all(a < b for a, b in itertools.pairwise(rising))
    texts = [", ".join(f"{value:.2f} %" for value in values) for values in (falling, rising)]
    return falls and rises, f"For V = {', '.join(f'{v:,}' for v in sizes)}: with them {texts[0]}; without {texts[1]}."


def comes_close(results: Results, challenger: tuple[Jobs, str], other: tuple[Jobs, str]) -> Verdict:
    """Check that accuracy is at most 2 % (of it) below another's for every size, and say what each sends."""
    holds, parts = True, []
    for v in sorted(challenger[0]):
        values = [_accuracy(results, jobs[v], measure) for jobs, measure in (challenger, other)]
        sent = [results[jobs[v]][0]["sent_bytes"] / 1e6 for jobs, _ in (challenger, other)]
        holds = holds and values[0] >= (1 - CLOSE) * values[1]
        parts.append(
            f"V = {v:,}: {values[0]:.2f} % with {sent[0]:.2f} MB, against {values[1]:.2f} % with {sent[1]:.2f} MB"
        )
    return holds, f"{'; '.join(parts)}. Close is at most {CLOSE:.0%} less."


def retains_most(results: Results, none: str, base: str) -> Verdict:
    """Check that a model trained and used without reconstruction steps has over 90 % of the accuracy."""
    low, high = _accuracy(results, none), _accuracy(results, base)
    return low / high > MOST, f"{low:.2f} % without steps, {high:.2f} % with all: {low / high:.1%} of it."


def explains_gain(results: Results, without: Jobs, local: Jobs) -> Verdict:
    """Check that most of the gain from more buckets is there if one bucket may not be the first choice."""
    holds, parts = True, []
    for v in sorted(without):
        one, many = _accuracy(results, without[v]), _accuracy(results, local[v])
        masked, many_masked = (_accuracy(results, jobs[v], MASKED) for jobs in (without, local))
        holds = holds and masked - one > (many - one) / 2
        parts.append(
            f"V = {v:,}: {one:.2f} to {many:.2f} %; without these outputs {masked:.2f} and {many_masked:.2f} %"
        )
    return holds, f"{'; '.join(parts)}."


def _accuracy(results: Results, job: str, measure: str = "recon") -> float:
    return percent(results[job], measure).mean
