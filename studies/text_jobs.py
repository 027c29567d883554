"""Jobs of studies of text: their settings, their data, and how one is run."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import fedrecon as fr
from fedrecon._src.app import word_baselines
from fedrecon._src.app.build import build_reconstruction, build_server, build_update
from fedrecon._src.app.config import Reconstruct, Server, Update
from fedrecon._src.core.progress import Progress, silent
from fedrecon.data import Corpus, Sentences, load_text
from studies.study import Job

Measure = Literal[
    "plain",
    "recon",
    "recon-finetune",
    "oov-finetune",
    "full-finetune",
    "most used word",
    "most frequent next word",
]
PUBLISHED = 16  # sentences per batch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a language model is trained and what is measured of it.

    Attributes:
      train: `fedrecon`, whose embeddings of words outside the vocabulary are local; `fedyogi`, averaging of everything;
        `counting`, no model: words of the training clients are counted (`fedrecon._src.app.word_baselines`), and each
        baseline is a measure.
      measures: the first is taken at every evaluation, all of them after the last round. Each works on the support
        sentences of an unseen client and is measured on its query sentences: `plain` does nothing; `recon` reconstructs
        the local embeddings; `recon-finetune` then finetunes everything else too; `oov-finetune` and `full-finetune`
        finetune what was trained globally, the embeddings of words outside the vocabulary or everything.
      vocabulary: V, how many words the model knows.
      buckets: for the words that it does not know.
      embedding: length of the embeddings.
      hidden: width of the LSTM.
      projection: width of the projection that is compared with the outputs.
      split: support and query in training; by time.
      finetune: how finetuning descends.
      max_sentences: at most this many of a client's first sentences are used, in training and in evaluation.
      rounds: how many rounds the row reports.
      on_to: always None: no job is continued.
      every: evaluate every n rounds; n divides `rounds`.
    """

    train: Literal["fedrecon", "fedyogi", "counting"] = "fedrecon"
    measures: tuple[Measure, ...] = ("recon",)
    vocabulary: int = 1000
    buckets: int = 500
    embedding: int = 96
    hidden: int = 670
    projection: int = 96
    split: str = "half"
    reconstruct: Reconstruct = field(
        default_factory=lambda: Reconstruct(learning_rate=0.1, steps=100, epochs=1, batch_size=PUBLISHED)
    )
    update: Update = field(default_factory=lambda: Update(learning_rate=0.3, steps=100, batch_size=PUBLISHED))
    finetune: Update = field(default_factory=lambda: Update(learning_rate=0.1, steps=100, batch_size=PUBLISHED))
    server: Server = field(default_factory=lambda: Server(optimizer="fedyogi", learning_rate=0.1))
    clients_per_round: int = 200
    rounds: int = 2500
    on_to: int | None = None
    every: int = 2500
    max_sentences: int = 1000


class TextData:
    """A corpus, and its sentences as examples for one vocabulary after another, the newest kept."""

    def __init__(self, corpus: Corpus):
        """Make examples of `corpus`."""
        self.corpus = corpus
        self._examples = functools.lru_cache(maxsize=4)(self._make)

    def examples(self, part: str, vocabulary: int, buckets: int) -> Sentences:
        """Return the examples of the clients of a part: `train`, `valid` or `test`."""
        return self._examples(part, vocabulary, buckets)

    def _make(self, part: str, vocabulary: int, buckets: int) -> Sentences:
        unseen = "heldout" if part != "train" and "heldout" in self.corpus.splits else part
        return self.corpus.next_words(unseen, vocabulary, buckets)

    def fingerprint(self) -> str:
        """Return a digest of the sentences."""
        return self.corpus.clients.fingerprint()

    def facts(self) -> list[str]:
        """Say what the data is and how it is divided."""
        corpus = self.corpus
        sizes = np.bincount(corpus.split_of, minlength=len(corpus.splits))
        parts = ", ".join(f"{size:,} {name}" for size, name in zip(sizes, corpus.splits, strict=True))
        covered = ", ".join(f"{corpus.coverage(v):.1%} of {v:,}" for v in (1000, 5000, 10000) if v <= len(corpus.words))
        return [
            f"Data: {corpus.clients.num_examples:,} sentences of {len(corpus.clients):,} clients ({parts}), "
            f"{len(corpus.tokens):,} words (fingerprint {self.fingerprint()}). Vocabularies are of the words that "
            f"training clients use most; their share of the words in use: {covered}.",
            "All measurements are on clients that took no part in training, all of them: the first half of a client's "
            "sentences by time is support, the second half query.",
        ]


def open_text(source: str, folder: Path, progress: Progress = silent) -> TextData:
    """Open a prepared corpus, or prepare one."""
    del folder
    return TextData(load_text(source, progress=progress))


class Trainer(NamedTuple):
    """A setting made ready: what trains, and for every measure what serves unseen clients."""

    algorithm: fr.Algorithm
    serving: dict[str, fr.Algorithm]


@functools.lru_cache(maxsize=2)
def make_trainer(setting: Setting) -> Trainer:
    """Return the trainer of a setting, the same for all seeds, so that nothing is compiled for each of them."""
    model = fr.models.next_word(
        setting.vocabulary,
        setting.buckets,
        embedding=setting.embedding,
        hidden=setting.hidden,
        projection=setting.projection,
        local_oov=setting.train == "fedrecon",
    )
    update, finetune = build_update(setting.update), build_update(setting.finetune)
    server = build_server(setting.server)
    by_tokens = fr.aggregators.mean(fr.aggregators.weight_of(model))
    if setting.train == "fedrecon":
        algorithm = fr.federated_reconstruction(
            model,
            split=fr.split.named(setting.split),
            reconstruct=build_reconstruction(setting.reconstruct),
            update=update,
            server=server,
            joint=setting.update.joint,
            aggregate=by_tokens,
        )
        ways = {"recon": lambda: algorithm, "recon-finetune": lambda: fr.with_finetuning(algorithm, finetune)}
    else:
        algorithm = fr.federated_averaging(model, update=update, server=server, aggregate=by_tokens)

        ways = {
            "plain": lambda: algorithm,
            "oov-finetune": lambda: fr.with_finetuning(algorithm, finetune, which="oov_embedding"),
            "full-finetune": lambda: fr.with_finetuning(algorithm, finetune),
        }
    return Trainer(algorithm, {measure: ways[measure]() for measure in setting.measures})


class Observer:
    """Evaluates during training, and remembers."""

    def __init__(self, setting: Setting, trainer: Trainer, clients: fr.Clients, seed: int):
        """Prepare to measure `clients`."""
        self._setting = setting
        self._evaluators = {
            measure: fr.Evaluator(algorithm, clients, seed=seed) for measure, algorithm in trainer.serving.items()
        }
        self.found: list[dict[str, Any]] = []

    def __call__(self, params: Any, kept: Any) -> fr.Evaluation:
        """Measure; return the first of the setting's measures."""
        done = (len(self.found) + 1) * self._setting.every
        entry: dict[str, Any] = {"round": done}
        last = done >= self._setting.rounds
        found = {
            measure: self._evaluators[measure](params)
            for measure in (self._setting.measures if last else self._setting.measures[:1])
        }
        self.found.append(entry | {measure: one.summary() for measure, one in found.items()})
        return found[self._setting.measures[0]]


def run_job(
    setting: Setting, data: TextData, seed: int, part: str = "test", progress: Progress = silent
) -> dict[str, Any]:
    """Train one setting with one seed and measure it on the unseen clients of a part.

    Returns:
      `evaluations` (one per measured round, by measure), `losses` of all rounds, `sent` (numbers to and from a client
      in a round), `sent_bytes`, `global` and `local` (numbers of parameters), `trained_on` (how many clients),
      `seconds`.
    """
    began = time.perf_counter()
    train, unseen = (
        data.examples(name, setting.vocabulary, setting.buckets).cap(setting.max_sentences) for name in ("train", part)
    )
    if setting.train == "counting":
        return _count_words(setting, train, unseen, began)
    trainer = make_trainer(setting)
    observer = Observer(setting, trainer, unseen, seed)
    run = fr.train(
        trainer.algorithm,
        train,
        rounds=setting.rounds,
        clients_per_round=setting.clients_per_round,
        valid=observer,
        evaluate_every=setting.every,
        seed=seed,
        progress=progress,
    )
    if run.interrupted:
        raise KeyboardInterrupt
    leaves = jax.tree.leaves(run.params)
    local = jax.tree.leaves(jax.eval_shape(trainer.algorithm.model.init_local, jax.random.key(0)))
    return {
        "evaluations": observer.found,
        "losses": [round(entry["loss"], 5) for entry in run.history if entry["kind"] == "round"],
        "sent": 2 * sum(leaf.size for leaf in leaves),  # down and up
        "sent_bytes": 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        "global": sum(leaf.size for leaf in leaves),
        "local": sum(leaf.size for leaf in local),
        "trained_on": len(train),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _count_words(setting: Setting, train: Sentences, unseen: Sentences, began: float) -> dict[str, Any]:
    """Measure baselines as `run_job` measures a training, on the same query sentences."""
    found = word_baselines.measure(train, unseen, fr.split.half())
    nothing = {"accuracy": float("nan")}  # of clients without a word of the vocabulary
    micro = {name: found.get(name, nothing) for name in setting.measures}
    measured = {name: {"micro": row, "clients": len(unseen), "diverged": 0} for name, row in micro.items()}
    return {
        "evaluations": [{"round": setting.rounds, **measured}],
        "losses": [],
        "sent": 0,
        "sent_bytes": 0,
        "global": 0,
        "local": 0,
        "trained_on": len(train),
        "seconds": round(time.perf_counter() - began, 2),
    }


def shortened(job: Job) -> Job:
    """Return a job that runs for a few rounds with few sentences per client."""
    setting = job.setting
    few = min(setting.rounds, 4)
    quick = dataclasses.replace(setting, rounds=few, every=few, max_sentences=min(setting.max_sentences, 32))
    return dataclasses.replace(job, setting=quick)
