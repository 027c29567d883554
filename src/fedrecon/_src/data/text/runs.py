"""Runs: what has been read of a corpus so far, on disk in pieces that fit in memory, each sorted by client.

A run numbers its words by itself, in alphabetical order, so that nothing in memory grows with the corpus. Posts of a
client may be anywhere in the source: merging the runs, client after client, brings them together.
"""

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedrecon._src.core.clients import rows_of
from fedrecon._src.storage.client_files import map_array

WORDS_IN_MEMORY = 1 << 22  # before they are written
RUN_CHARACTERS = 1 << 25  # of different words: a bound for long words
WORDS = "words.txt"
WORDS_PIECE = 1 << 12  # bytes of words in memory for each run when all are merged


class Post(NamedTuple):
    """What a client wrote at one time: sentences of words. `split` is the number of the split it belongs to."""

    client: str
    time: float
    sentences: list[list[str]]
    split: int = 0


class _Numbers(dict[str, int]):
    """Number every word in the order in which they are first asked for."""

    characters = 0

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        self.characters += len(word)
        return number


class RunWriter:
    """Writes posts into runs in a folder."""

    def __init__(self, folder: Path, max_sentences: int, words_in_memory: int = WORDS_IN_MEMORY) -> None:
        """Begin with no runs; of each client, at most `max_sentences` sentences are written to a run."""
        self.folder, self.max_sentences, self.words_in_memory = folder, max_sentences, words_in_memory
        self.runs: list[Run] = []
        self.over = 0  # sentences not written
        self._start()

    def _start(self) -> None:
        self._clients, self._words = _Numbers(), _Numbers()
        self._owners, self._times = array("i"), array("d")
        self._lengths, self._tokens = array("i"), array("i")

    def add(self, post: Post) -> None:
        """Add a post; its sentences must not be empty."""
        number, many = self._words.__getitem__, len(post.sentences)
        owner = self._clients[f"{post.split}{post.client}"]
        self._owners.extend([owner] * many)
        self._times.extend([post.time] * many)
        self._lengths.extend(map(len, post.sentences))
        for words in post.sentences:
            self._tokens.extend(map(number, words))
        if len(self._tokens) >= self.words_in_memory or self._words.characters >= RUN_CHARACTERS:
            self.close_run()

    def close_run(self) -> None:
        """Write what is in memory as one run."""
        if not self._lengths:
            return
        clients, place = np.unique(np.array(list(self._clients)), return_inverse=True)
        owners = place[np.frombuffer(self._owners, np.int32)]
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
        run = Run(self.folder / f"run-{len(self.runs)}", len(words))
        run.folder.mkdir()
        for name, values in arrays.items():
            run.keep(name, values)
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


class Run(NamedTuple):
    """A run on disk: clients in alphabetical order, each one's sentences in the order of the source.

    Its arrays are `clients` (the number of the split, and the name); `sentence_ends` and `token_ends`, one past the
    last sentence and the last word of each client, with a 0 in front; `lengths` and `times` of sentences; `tokens`,
    the words by their numbers. Files are open only while they are used: there may be more runs than a process may
    have open files.

    Attributes:
      folder: where it is.
      num_words: how many different words it has.
    """

    folder: Path
    num_words: int

    def array(self, name: str) -> np.ndarray:
        """Map an array of this run."""
        return map_array(self.folder / f"{name}.npy")

    def keep(self, name: str, values: np.ndarray) -> None:
        """Add an array to this run."""
        np.save(self.folder / f"{name}.npy", values, allow_pickle=False)

    def words(self) -> Iterator[str]:
        """Yield the words in alphabetical order, which is the order of their numbers."""
        rest, offset = b"", 0
        while True:
            with (self.folder / WORDS).open("rb") as file:
                file.seek(offset)
                piece = file.read(WORDS_PIECE)
            if not piece:
                return
            offset += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            yield from (line.decode("utf-8") for line in lines)
