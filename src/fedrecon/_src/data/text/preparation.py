"""Preparation: posts from any source become a corpus in a folder, in memory that does not grow with the text.

The posts are written into sorted runs as they come. Then the clients are divided, the words of training clients are
counted, and the runs are merged, client after client, with every word replaced by its code (see `corpus`). So what is
stored depends on no vocabulary size and no number of buckets.
"""

import shutil
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.formatting import listed_counts
from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.data.errors import DataError
from fedrecon._src.data.text.corpus import Corpus, write_manifest
from fedrecon._src.data.text.runs import WORDS_IN_MEMORY, Post, Run, RunWriter
from fedrecon._src.data.text.word_counts import most_used, number_words
from fedrecon._src.storage.client_files import ArrayFile
from fedrecon._src.storage.folders import whole_folder
from fedrecon._src.storage.locks import hold

KEPT_WORDS = 50_000
MAX_SENTENCES = 1_000
FRACTIONS = (0.8, 0.1, 0.1)
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Plan:
    """What goes into a corpus.

    Attributes:
      splits: names of the splits; the first is the training split, whose words are counted.
      fractions: the share of clients of each split; None if the posts themselves name their split.
      seed: decides the division.
      words: the vocabulary, most used first; None counts the words.
      kept_words: how many of them are kept.
      max_sentences: at most this many of a client's sentences are kept, the first in the source.
      words_in_memory: how many words are in memory at a time.
    """

    splits: Sequence[str] = SPLITS
    fractions: Sequence[float] | None = FRACTIONS
    seed: int = 0
    words: Sequence[str] | None = field(default=None, repr=False)
    kept_words: int = KEPT_WORDS
    max_sentences: int = MAX_SENTENCES
    words_in_memory: int = WORDS_IN_MEMORY

    def __post_init__(self) -> None:
        """Check the settings before anything is read."""
        shares = self.fractions
        if shares is not None and (len(shares) != len(self.splits) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6):
            names = ", ".join(self.splits)
            raise ValueError(f"`fractions` are {shares}: give one for each of {names}, and let them add up to 1.")
        for name in ("kept_words", "max_sentences", "words_in_memory"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")


def prepare_corpus(
    posts: Iterable[Post],
    folder: str | Path,
    plan: Plan,
    source: str,
    skipped: MutableMapping[str, int],
    progress: Progress = silent,
) -> Corpus:
    """Write a corpus to a folder and open it.

    Args:
      posts: in any order; a client's posts with equal times stay in this order.
      folder: must not exist yet. It appears under this name only when it is complete.
      plan: what is kept.
      source: where the posts come from, for messages.
      skipped: counts of what was left out, which `posts` adds to while it is read.
      progress: a display of what follows reading.

    Raises:
      DataError: there is not a single sentence, or nobody is in the training split.
      LockedError: another process is preparing the same folder.
    """
    lock = Path(folder).with_name(f".{Path(folder).name}.lock")
    with hold(lock, str(folder)), whole_folder(folder) as temporary:
        writer = RunWriter(temporary, plan.max_sentences, plan.words_in_memory)
        for post in posts:
            if post.sentences:
                writer.add(post)
        writer.close_run()
        if not writer.runs:
            reasons = listed_counts(skipped)
            raise DataError(f"{source} has no sentences{f' left after leaving out {reasons}' if reasons else ''}.")
        keys = _all_clients(writer.runs)
        split_of = _divide(keys, plan)
        if not (split_of == 0).any():
            raise DataError(f"{source}: none of its {len(keys)} clients is in {plan.splits[0]}, whose words we count.")
        tally = _count(writer.runs, split_of, plan.max_sentences, progress)
        words = most_used(writer.runs, plan.kept_words) if plan.words is None else plan.words[: plan.kept_words]
        np.save(temporary / "counts.npy", number_words(writer.runs, words))
        (temporary / "words.txt").write_text("".join(f"{word}\n" for word in words), "utf-8", newline="\n")
        np.save(temporary / "names.npy", _without_split(keys), allow_pickle=False)
        np.save(temporary / "split.npy", split_of)
        _merge(writer.runs, temporary, tally.client_words, plan, progress)
        for run in writer.runs:
            shutil.rmtree(run.folder)
        skipped["sentences_over_maximum"] = skipped.get("sentences_over_maximum", 0) + writer.over + tally.over
        write_manifest(temporary, plan.splits, source, tally.train_words, skipped)
    return Corpus.open(folder)


# ---- clients ----


def _all_clients(runs: Sequence[Run]) -> np.ndarray:
    """List the clients of all runs in alphabetical order, and tell every run where its own are in it."""
    keys, waiting, many = np.empty(0, "U1"), [], 0
    for run in runs:
        waiting.append(np.array(run.array("clients")))  # a copy, so that its file is closed
        many += len(waiting[-1])
        if many > max(len(keys), 1 << 20):  # not after every run, which would sort all clients each time
            keys, waiting, many = np.unique(np.concatenate([keys, *waiting])), [], 0
    keys = np.unique(np.concatenate([keys, *waiting]))
    for run in runs:
        run.keep("ranks", np.searchsorted(keys, run.array("clients")))
    return keys


def _letters(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys).view(np.uint32).reshape(len(keys), -1)


def _without_split(keys: np.ndarray) -> np.ndarray:
    """Return the names of clients, which follow the number of their split."""
    names = np.ascontiguousarray(_letters(keys)[:, 1:])
    return names.view(f"U{names.shape[1]}").reshape(-1)


def _divide(keys: np.ndarray, plan: Plan) -> np.ndarray:
    """Return the number of each client's split: as its posts say, or at random as `Clients.split_clients` does."""
    if plan.fractions is None:
        return (_letters(keys)[:, 0] - ord("0")).astype(np.int8)
    everyone = np.arange(len(keys))
    clients = Clients({"client": everyone}, everyone, everyone + 1, _without_split(keys))
    parts = clients.split_clients(*plan.fractions, seed=plan.seed)
    split_of = np.empty(len(keys), np.int8)
    for number, part in enumerate(parts):
        split_of[part.starts] = number
    return split_of


# ---- runs into one ----


class _Tally(NamedTuple):
    """What counting found: words of each client, words of training clients, sentences over the maximum."""

    client_words: np.ndarray
    train_words: int
    over: int


def _count(runs: Sequence[Run], split_of: np.ndarray, max_sentences: int, progress: Progress) -> _Tally:
    """Count in each run how often training clients use its words, in the sentences that are kept."""
    seen, client_words = np.zeros((2, len(split_of)), np.int64)
    train_words = 0
    with progress("counting words", len(runs)) as advance:
        for run in runs:
            ranks, ends, lengths, tokens = map(run.array, ("ranks", "sentence_ends", "lengths", "tokens"))
            sizes = np.diff(ends)
            place = np.arange(len(lengths)) + np.repeat(seen[ranks] - ends[:-1], sizes)
            counted = (place < max_sentences) & np.repeat(split_of[ranks] == 0, sizes)
            used = tokens[np.repeat(counted, lengths)]
            run.keep("counts", np.bincount(used, minlength=run.num_words))
            train_words += len(used)
            seen[ranks] += sizes
            client_words[ranks] += np.diff(run.array("token_ends"))
            advance()
    return _Tally(client_words, train_words, int(np.maximum(seen - max_sentences, 0).sum()))


def _merge(runs: Sequence[Run], folder: Path, client_words: np.ndarray, plan: Plan, progress: Progress) -> None:
    """Write all clients' sentences, a block of clients at a time."""
    kinds = {"tokens": np.int32, "begins": np.int64, "times": np.float64, "offsets": np.int64}
    with ExitStack() as stack, progress("writing clients", len(client_words)) as advance:
        files = {name: stack.enter_context(ArrayFile(folder / f"{name}.npy", kind)) for name, kind in kinds.items()}
        words = sentences = 0
        for name in ("begins", "offsets"):
            files[name].append(np.zeros(1, np.int64))
        reach = [run.array("ranks")[[0, -1]].tolist() for run in runs]
        for first, last in _blocks(client_words, plan.words_in_memory):
            there = [run for run, (low, high) in zip(runs, reach, strict=True) if low < last and first <= high]
            block = _gather(there, first, last, plan.max_sentences)
            files["tokens"].append(block.tokens)
            files["begins"].append(words + np.cumsum(block.lengths))
            files["times"].append(block.times)
            files["offsets"].append(sentences + np.cumsum(block.sizes))
            words, sentences = words + len(block.tokens), sentences + len(block.lengths)
            advance(last - first)


def _blocks(client_words: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Divide clients into ranges of about `most` words; a client with more is a range by itself or ends one."""
    numbers = (np.cumsum(client_words) - 1) // most
    edges = np.flatnonzero(np.diff(numbers)) + 1
    yield from pairwise([0, *edges.tolist(), len(client_words)])


class _Block(NamedTuple):
    """A range of clients: how many sentences each has, their lengths, times and codes."""

    sizes: np.ndarray
    lengths: np.ndarray
    times: np.ndarray
    tokens: np.ndarray


def _gather(runs: Sequence[Run], first: int, last: int, max_sentences: int) -> _Block:
    """Bring together the sentences of clients `first` to `last - 1`: the first of the source, in order of time."""
    owners, lengths, times, tokens = [], [], [], []
    for run in runs:
        ranks = run.array("ranks")
        start, end = np.searchsorted(ranks, [first, last])
        if start == end:
            continue
        ends, token_ends = (run.array(name)[start : end + 1] for name in ("sentence_ends", "token_ends"))
        owners.append(np.repeat(ranks[start:end], np.diff(ends)))
        lengths.append(np.array(run.array("lengths")[ends[0] : ends[-1]]))
        times.append(np.array(run.array("times")[ends[0] : ends[-1]]))
        tokens.append(np.array(run.array("codes")[run.array("tokens")[token_ends[0] : token_ends[-1]]]))
    owner, length, time = np.concatenate(owners) - first, np.concatenate(lengths), np.concatenate(times)
    order = np.argsort(owner, kind="stable")
    sizes = np.bincount(owner, minlength=last - first)
    place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = order[place < max_sentences]
    order = order[np.lexsort((time[order], owner[order]))]
    ends = np.cumsum(length)
    rows = rows_of((ends - length)[order], ends[order])
    return _Block(np.minimum(sizes, max_sentences), length[order], time[order], np.concatenate(tokens)[rows])
