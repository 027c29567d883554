"""Corpus writing: posts from any source become a corpus in a folder, in memory that does not grow with the text.

This is an external merge sort. Posts are written to sorted runs on disk as they come; each run fits in memory and
numbers its words by itself, in alphabetical order. Then clients are assigned to splits, the words of training clients
are counted, and the runs are merged client by client, with every word replaced by its code (see `corpus`). What is
stored depends on no vocabulary size and no number of buckets.
"""

import heapq
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.formatting import listed_counts
from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.data.corpus import Corpus, write_corpus_manifest
from fedrecon._src.data.sources import DataError
from fedrecon._src.data.vocabulary import word_hash
from fedrecon._src.storage.atomic import atomic_folder
from fedrecon._src.storage.client_files import ArrayFile, map_array
from fedrecon._src.storage.lock import file_lock

KEPT_WORDS = 50_000
MAX_SENTENCES = 1_000
LONGEST_NAME = 200  # of a client
WORDS_IN_MEMORY = 1 << 22  # before they are written to a run
RUN_CHARACTERS = 1 << 25  # of different words in a run: a bound for long words
WORDS = "words.txt"
WORDS_CHUNK = 1 << 12  # bytes of words in memory for each run when all are merged
COUNTS_CHUNK = 1 << 10
FRACTIONS = (0.8, 0.1, 0.1)
SPLITS = ("train", "valid", "test")


class CorpusOptions(TypedDict, total=False):
    """Options of `prepare_text`, `prepare_posts` and `prepare_stackoverflow`.

    Attributes:
      fractions: the share of clients for training, validation and test (not for Stack Overflow, which has its own).
      seed: decides which clients are drawn or which split each goes to.
      kept_words: how many of the most used words of training clients are kept: the largest possible vocabulary.
      max_sentences: at most this many of a client's sentences are kept, the first in the source.
      words_in_memory: how many words are in memory at a time.

    Example:
      >>> import fedrecon as fr
      >>> options = fr.data.CorpusOptions(fractions=(0.9, 0.05, 0.05), kept_words=10_000)
      >>> options["kept_words"]
      10000
    """

    fractions: Sequence[float]
    seed: int
    kept_words: int
    max_sentences: int
    words_in_memory: int


@dataclass(frozen=True)
class CorpusSettings:
    """What goes into a corpus: `CorpusOptions`, and what depends on the source.

    Attributes:
      splits: names of the splits; the first is the training split, whose words are counted.
      fractions: the share of clients of each split; None if the posts themselves name their split.
      words: the vocabulary, most used first; None counts the words.
    """

    splits: Sequence[str] = SPLITS
    fractions: Sequence[float] | None = FRACTIONS
    seed: int = 0
    words: Sequence[str] | None = field(default=None, repr=False)
    kept_words: int = KEPT_WORDS
    max_sentences: int = MAX_SENTENCES
    words_in_memory: int = WORDS_IN_MEMORY

    def __post_init__(self) -> None:
        shares = self.fractions
        if shares is not None and (len(shares) != len(self.splits) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6):
            names = ", ".join(self.splits)
            raise ValueError(f"`fractions` must be one share for each of {names} that sum to 1 (got {shares}).")
        for name in ("kept_words", "max_sentences", "words_in_memory"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1 (got {getattr(self, name)}).")


class Post(NamedTuple):
    """What a client wrote at one time: sentences of words. `split` is the number of the split it belongs to."""

    client: str
    time: float
    sentences: list[list[str]]
    split: int = 0


def check_client_name(value: Any) -> str:
    """Return a client's name, or raise ValueError if it cannot be one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"client {repr(value)[:50]} is neither text nor a whole number")
    name = str(value)
    if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
        raise ValueError(f"client {name[:50]!r} is not 1 to {LONGEST_NAME} printable characters")
    return name


# ---- sorted runs ----


class _Index(dict[str, int]):
    """Numbers words in the order of their first lookup."""

    characters = 0

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        self.characters += len(word)
        return number


class TokenRun(NamedTuple):
    """A run on disk: clients in alphabetical order, with their sentences in the order of the source.

    Its arrays are `clients` (the number of the split, and the name); `sentence_ends` and `token_ends`, one past the
    last sentence and the last word of each client, with a 0 in front; `lengths` and `times` of sentences; `tokens`,
    the words by their numbers. Files are open only while they are used: there may be more runs than a process may
    have open files.
    """

    folder: Path
    num_words: int

    def array(self, name: str) -> np.ndarray:
        """Map an array of this run."""
        return map_array(self.folder / f"{name}.npy")

    def save(self, name: str, values: np.ndarray) -> None:
        """Add an array to this run."""
        np.save(self.folder / f"{name}.npy", values, allow_pickle=False)

    def words(self) -> Iterator[str]:
        """Yield the words in alphabetical order, which is the order of their numbers."""
        rest, offset = b"", 0
        while True:
            with (self.folder / WORDS).open("rb") as file:
                file.seek(offset)
                piece = file.read(WORDS_CHUNK)
            if not piece:
                return
            offset += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            yield from (line.decode("utf-8") for line in lines)


class TokenRunWriter:
    """Writes posts into runs in a folder."""

    def __init__(self, folder: Path, max_sentences: int, words_in_memory: int = WORDS_IN_MEMORY) -> None:
        self.folder, self.max_sentences, self.words_in_memory = folder, max_sentences, words_in_memory
        self.runs: list[TokenRun] = []
        self.over = 0  # sentences not written
        self._start()

    def _start(self) -> None:
        self._clients, self._words = _Index(), _Index()
        self._owners, self._times = array("i"), array("d")
        self._lengths, self._tokens = array("i"), array("i")

    def add(self, post: Post) -> None:
        """Add a post; its sentences must not be empty."""
        number, count = self._words.__getitem__, len(post.sentences)
        owner = self._clients[f"{post.split}{post.client}"]
        self._owners.extend([owner] * count)
        self._times.extend([post.time] * count)
        self._lengths.extend(map(len, post.sentences))
        for words in post.sentences:
            self._tokens.extend(map(number, words))
        if len(self._tokens) >= self.words_in_memory or self._words.characters >= RUN_CHARACTERS:
            self.close_run()

    def close_run(self) -> None:
        """Write what is in memory as one run."""
        if not self._lengths:
            return
        clients, ranks = np.unique(np.array(list(self._clients)), return_inverse=True)
        owners = ranks[np.frombuffer(self._owners, np.int32)]
        order = np.argsort(owners, kind="stable")
        sizes = np.bincount(owners)
        first = np.arange(len(order)) < np.repeat(np.cumsum(sizes) - sizes + self.max_sentences, sizes)
        self.over += len(order) - int(first.sum())
        order, sizes = order[first], np.minimum(sizes, self.max_sentences)
        lengths = np.frombuffer(self._lengths, np.int32).astype(np.int64)
        ends = np.cumsum(lengths)
        sentence_ends = np.append(0, np.cumsum(sizes))
        words, number = _in_alphabetical_order(self._words)
        arrays = {
            "clients": clients,
            "sentence_ends": sentence_ends,
            "token_ends": np.append(0, np.cumsum(lengths[order]))[sentence_ends],
            "lengths": lengths[order],
            "times": np.frombuffer(self._times)[order],
            "tokens": number[np.frombuffer(self._tokens, np.int32)[rows_of((ends - lengths)[order], ends[order])]],
        }
        run = TokenRun(self.folder / f"run-{len(self.runs)}", len(words))
        run.folder.mkdir()
        for name, values in arrays.items():
            run.save(name, values)
        with (run.folder / WORDS).open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{word}\n" for word in words)
        self.runs.append(run)
        self._start()


def _in_alphabetical_order(numbers: Mapping[str, int]) -> tuple[list[str], np.ndarray]:
    """Return the words in alphabetical order, and their new numbers by the old ones."""
    words = sorted(numbers)
    order = np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))
    number = np.empty(len(words), np.int32)
    number[order] = np.arange(len(words), dtype=np.int32)
    return words, number


# ---- word counts ----


def most_used(runs: Sequence[TokenRun], most: int) -> list[str]:
    """List the words that are counted most often in all runs together; equal counts in alphabetical order."""
    everything = heapq.merge(*map(_counted, runs), key=itemgetter(0))
    totals = ((-sum(count for _, count in group), word) for word, group in groupby(everything, itemgetter(0)))
    return [word for _, word in heapq.nsmallest(most, (entry for entry in totals if entry[0]))]


def _counted(run: TokenRun) -> Iterator[tuple[str, int]]:
    """Yield the words of a run in alphabetical order with their counts, a few in memory at a time."""
    starts = range(0, run.num_words, COUNTS_CHUNK)
    counts = (count for start in starts for count in run.array("counts")[start : start + COUNTS_CHUNK].tolist())
    return zip(run.words(), counts, strict=True)


def number_words(runs: Sequence[TokenRun], words: Sequence[str]) -> np.ndarray:
    """Give every run the codes of its words: the rank among `words`, from 1, or -1 - hash.

    Returns:
      How often each of `words` is counted in all runs together.
    """
    rank = {word: k for k, word in enumerate(words, 1)}
    totals = np.zeros(len(words) + 1, np.int64)
    for run in runs:
        counts = run.array("counts")
        codes = (rank.get(word) or -1 - word_hash(word) for word in run.words())
        coded = np.fromiter(codes, np.int32, len(counts))
        totals[np.maximum(coded, 0)] += counts
        run.save("codes", coded)
    return totals[1:]


# ---- the corpus ----


def prepare_corpus(
    posts: Iterable[Post],
    folder: str | Path,
    settings: CorpusSettings,
    source: str,
    skipped: MutableMapping[str, int],
    progress: Progress = silent,
) -> Corpus:
    """Write a corpus to a folder, which appears under its name when it is complete, and open it.

    Posts may come in any order; those of a client with equal times stay in it. `skipped` counts what was left out,
    and may grow while `posts` is read.
    """
    lock = Path(folder).with_name(f".{Path(folder).name}.lock")
    with file_lock(lock, str(folder)), atomic_folder(folder) as temporary:
        writer = TokenRunWriter(temporary, settings.max_sentences, settings.words_in_memory)
        for post in posts:
            if post.sentences:
                writer.add(post)
        writer.close_run()
        if not writer.runs:
            reasons = listed_counts(skipped)
            raise DataError(f"{source} has no sentences{f' left after leaving out {reasons}' if reasons else ''}.")
        keys = _all_clients(writer.runs)
        split_of = _divide(keys, settings)
        if not (split_of == 0).any():
            raise DataError(
                f"{source}: none of its {len(keys)} clients is in {settings.splits[0]}, whose words we count."
            )
        tally = _count(writer.runs, split_of, settings.max_sentences, progress)
        words = (
            most_used(writer.runs, settings.kept_words)
            if settings.words is None
            else settings.words[: settings.kept_words]
        )
        np.save(temporary / "counts.npy", number_words(writer.runs, words))
        (temporary / "words.txt").write_text("".join(f"{word}\n" for word in words), "utf-8", newline="\n")
        np.save(temporary / "names.npy", _without_split(keys), allow_pickle=False)
        np.save(temporary / "split.npy", split_of)
        _merge(writer.runs, temporary, tally.client_words, settings, progress)
        for run in writer.runs:
            shutil.rmtree(run.folder)
        skipped["sentences_over_maximum"] = skipped.get("sentences_over_maximum", 0) + writer.over + tally.over
        write_corpus_manifest(temporary, settings.splits, source, tally.train_words, skipped)
    return Corpus.open(folder)


# ---- clients ----


def _all_clients(runs: Sequence[TokenRun]) -> np.ndarray:
    """List the clients of all runs in alphabetical order, and save in every run the ranks of its clients."""
    keys, pending, count = np.empty(0, "U1"), [], 0
    for run in runs:
        pending.append(np.array(run.array("clients")))  # a copy, so that its file is closed
        count += len(pending[-1])
        if count > max(len(keys), 1 << 20):  # not after every run, which would sort all clients each time
            keys, pending, count = np.unique(np.concatenate([keys, *pending])), [], 0
    keys = np.unique(np.concatenate([keys, *pending]))
    for run in runs:
        run.save("ranks", np.searchsorted(keys, run.array("clients")))
    return keys


def _letters(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys).view(np.uint32).reshape(len(keys), -1)


def _without_split(keys: np.ndarray) -> np.ndarray:
    """Return the names of clients, which follow the number of their split."""
    names = np.ascontiguousarray(_letters(keys)[:, 1:])
    return names.view(f"U{names.shape[1]}").reshape(-1)


def _divide(keys: np.ndarray, settings: CorpusSettings) -> np.ndarray:
    """Return the number of each client's split: as its posts say, or at random as `Clients.split_clients` does."""
    if settings.fractions is None:
        return (_letters(keys)[:, 0] - ord("0")).astype(np.int8)
    everyone = np.arange(len(keys))
    clients = Clients({"client": everyone}, everyone, everyone + 1, _without_split(keys))
    parts = clients.split_clients(*settings.fractions, seed=settings.seed)
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


def _count(runs: Sequence[TokenRun], split_of: np.ndarray, max_sentences: int, progress: Progress) -> _Tally:
    """Count in each run how often training clients use its words, in the sentences that are kept."""
    seen, client_words = np.zeros((2, len(split_of)), np.int64)
    train_words = 0
    with progress("counting words", len(runs)) as advance:
        for run in runs:
            ranks, ends, lengths, tokens = map(run.array, ("ranks", "sentence_ends", "lengths", "tokens"))
            sizes = np.diff(ends)
            position = np.arange(len(lengths)) + np.repeat(seen[ranks] - ends[:-1], sizes)
            counted = (position < max_sentences) & np.repeat(split_of[ranks] == 0, sizes)
            used = tokens[np.repeat(counted, lengths)]
            run.save("counts", np.bincount(used, minlength=run.num_words))
            train_words += len(used)
            seen[ranks] += sizes
            client_words[ranks] += np.diff(run.array("token_ends"))
            advance()
    return _Tally(client_words, train_words, int(np.maximum(seen - max_sentences, 0).sum()))


def _merge(
    runs: Sequence[TokenRun], folder: Path, client_words: np.ndarray, settings: CorpusSettings, progress: Progress
) -> None:
    """Write all clients' sentences, a block of clients at a time."""
    kinds = {"tokens": np.int32, "begins": np.int64, "times": np.float64, "offsets": np.int64}
    with ExitStack() as stack, progress("writing clients", len(client_words)) as advance:
        files = {name: stack.enter_context(ArrayFile(folder / f"{name}.npy", kind)) for name, kind in kinds.items()}
        words = sentences = 0
        for name in ("begins", "offsets"):
            files[name].append(np.zeros(1, np.int64))
        reach = [run.array("ranks")[[0, -1]].tolist() for run in runs]
        for first, last in _blocks(client_words, settings.words_in_memory):
            block_runs = [run for run, (low, high) in zip(runs, reach, strict=True) if low < last and first <= high]
            block = _gather(block_runs, first, last, settings.max_sentences)
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


def _gather(runs: Sequence[TokenRun], first: int, last: int, max_sentences: int) -> _Block:
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
    position = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = order[position < max_sentences]
    order = order[np.lexsort((time[order], owner[order]))]
    ends = np.cumsum(length)
    rows = rows_of((ends - length)[order], ends[order])
    return _Block(np.minimum(sizes, max_sentences), length[order], time[order], np.concatenate(tokens)[rows])
