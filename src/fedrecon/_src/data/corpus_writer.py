"""Corpus writing: posts from any source become a corpus in a folder, in memory that does not grow with the text.

Posts are written to a temporary SQLite database as they come. Then clients are assigned to splits, the words of
training clients are counted there, and the posts are read back client by client in order of time, with every word
replaced by its code (see `corpus`). What is stored depends on no vocabulary size and no number of buckets.
"""

import sqlite3
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from xml.etree import ElementTree

import numpy as np
from pydantic import ValidationError

from fedrecon._src.core.checks import check_numbers, explain_validation
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.data.corpus import FORMAT, MANIFEST, Corpus
from fedrecon._src.data.sentences import word_hash
from fedrecon._src.data.sources import DataError, RowErrors, check_left
from fedrecon._src.storage.arrays import ArrayFile
from fedrecon._src.storage.atomic import StorageError, atomic_folder
from fedrecon._src.storage.manifest import write_folder_manifest
from fedrecon._src.storage.ownership import file_lock

KEPT_WORDS = 50_000
MOST_SPELLED = 1 << 20  # if clients use more words in all, the spelling of those that are not kept is not stored
MAX_SENTENCES = 1_000
LONGEST_NAME = 200  # of a client
WORDS_IN_MEMORY = 1 << 22
CHARACTERS_PER_WORD = 8  # at most so many characters of `words_in_memory` are in memory, however long words are
FRACTIONS = (0.8, 0.1, 0.1)
SPLITS = ("train", "valid", "test")
ADD_WORD = "INSERT INTO words VALUES (?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count"


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
            raise ValueError(f"`fractions` must have one share for each of {names} and sum to 1 (got {shares}).")
        sizes = {"kept_words": self.kept_words, "max_sentences": self.max_sentences}
        check_numbers({**sizes, "words_in_memory": self.words_in_memory}, least=1)


class Post(NamedTuple):
    """What a client wrote at one time: sentences of words. `split` is the number of the split it belongs to."""

    client: str
    time: float
    sentences: list[list[str]]
    split: int = 0


def check_client_name(value: str | int) -> str:
    """Return a client's name, or raise ValueError if it cannot be one."""
    name = str(value)
    if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
        raise ValueError(f"client {name[:50]!r} is not 1 to {LONGEST_NAME} printable characters")
    return name


def parse_posts(
    records: Generator[tuple[str, Any]], parse: Callable[[Any], Post | None], errors: RowErrors, unit: str = "posts"
) -> Iterator[Post]:
    """Parse records, each of which comes with its location; None is a record that is left out."""
    with closing(records):  # at once, also after an error: it may show its progress
        for location, record in records:
            try:
                post = parse(record)
            except ValidationError as error:
                errors.add(location, explain_validation(error))
            except KeyError as error:
                errors.add(location, f"no {error}")
            except (ValueError, OverflowError, RecursionError, ElementTree.ParseError) as error:
                errors.add(location, error)
            else:
                if post is not None:
                    if not post.sentences:
                        errors.skipped[f"{unit}_without_words"] += 1
                    yield post


def prepare_corpus(
    posts: Iterable[Post],
    folder: str | Path,
    settings: CorpusSettings,
    source: str,
    skipped: Counter[str],
    progress: Progress = silent,
) -> Corpus:
    """Write a corpus to a folder, which appears under its name when it is complete, and open it.

    Posts may come in any order; those of a client with equal times stay in it. `skipped` counts what was left out,
    and may grow while `posts` is read.
    """
    lock = Path(folder).with_name(f".{Path(folder).name}.lock")
    with file_lock(lock, str(folder)), atomic_folder(folder) as temporary:
        with _PostStore(temporary / "posts.sqlite", settings) as store:
            for post in posts:
                store.add(post)
            clients = sorted(store.sizes)
            check_left(len(clients), source, "sentences", skipped)
            split_of = _divide(clients, settings)
            if not (split_of == 0).any():
                none = f"none of its {len(clients)} clients is in {settings.splits[0]}"
                raise DataError(f"{source}: {none}: no words to count.")
            is_train = dict(zip(clients, (split_of == 0).tolist(), strict=True))
            train_words = store.count_words(is_train, progress)
            words = store.most_used(settings.kept_words) if settings.words is None else settings.words
            words = words[: settings.kept_words]
            rank = {word: k for k, word in enumerate(words, 1)}
            _write_sentences(store, temporary, rank, progress)
            _write_words(temporary / "words.txt", words)
            _write_words(temporary / "others.txt", (word for word in store.all_words() if word not in rank))
            np.save(temporary / "counts.npy", store.counts(words))
        np.save(temporary / "offsets.npy", np.cumsum([0, *(store.sizes[client] for client in clients)]))
        np.save(temporary / "names.npy", _names(clients), allow_pickle=False)
        np.save(temporary / "split.npy", split_of)
        skipped["sentences_over_maximum"] = store.over
        facts = {"source": source, "splits": list(settings.splits), "train_tokens": train_words}
        write_folder_manifest(temporary / MANIFEST, FORMAT, {**facts, "skipped": dict(skipped)})
    return Corpus.open(folder)


class _PostStore(AbstractContextManager["_PostStore"]):
    """A temporary database, in which posts are sorted and words are counted on disk.

    A client is the number of its split and its name. SQLite sorts in the folder that SQLITE_TMPDIR or TMPDIR names, or
    in /var/tmp.
    """

    def __init__(self, path: Path, settings: CorpusSettings) -> None:
        self.path, self.max_sentences = path, settings.max_sentences
        self.batch_size = settings.words_in_memory * CHARACTERS_PER_WORD
        self.sizes: Counter[str] = Counter()  # sentences of each client
        self.over = self.num_posts = 0  # sentences that were not stored, and posts that were
        self.database = sqlite3.connect(path, isolation_level=None)
        self._run("PRAGMA journal_mode = OFF")
        self._run("PRAGMA synchronous = OFF")
        self._run("CREATE TABLE posts (client TEXT, time REAL, sentences TEXT)")
        self._run("CREATE TABLE words (word TEXT PRIMARY KEY, count INTEGER) WITHOUT ROWID")
        self._run("BEGIN")

    def __exit__(self, *error: object) -> None:
        self.database.close()
        self.path.unlink()

    def _run(self, command: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self.database.execute(command, values)
        except sqlite3.Error as problem:
            raise StorageError(f"{self.path} cannot be written: {problem}") from None

    def add(self, post: Post) -> None:
        """Store the sentences of a post, up to the maximum of its client; they must not be empty."""
        client = f"{post.split}{post.client}"
        sentences = post.sentences[: self.max_sentences - self.sizes[client]] if post.sentences else []
        self.over += len(post.sentences) - len(sentences)
        if sentences:
            self.sizes[client] += len(sentences)
            self.num_posts += 1
            text = "\n".join(map(" ".join, sentences))
            self._run("INSERT INTO posts VALUES (?, ?, ?)", (client, post.time, text))

    def batches(self, order: str) -> Iterator[list[tuple[str, float, str]]]:
        """Yield client, time and sentences of all posts, about as many characters at a time."""
        batch, size = [], 0
        for row in self._run(f"SELECT client, time, sentences FROM posts ORDER BY {order}"):
            batch.append(row)
            size += len(row[2])
            if size >= self.batch_size:
                yield batch
                batch, size = [], 0
        yield batch

    def count_words(self, is_train: Mapping[str, bool], progress: Progress) -> int:
        """Count how often training clients use each word; return how many words they have in all.

        Words that only other clients use are counted zero times.
        """
        total = 0
        with progress("counting words", self.num_posts) as advance:
            for batch in self.batches("rowid"):
                counts: Counter[str] = Counter()
                for client, _, text in batch:
                    words = text.split()
                    counts.update(words if is_train[client] else dict.fromkeys(words, 0))
                for entry in sorted(counts.items()):
                    self._run(ADD_WORD, entry)
                total += counts.total()
                advance(len(batch))
        return total

    def most_used(self, most: int) -> list[str]:
        """List the words that are counted most often; equal counts in alphabetical order."""
        query = "SELECT word FROM words WHERE count > 0 ORDER BY count DESC, word LIMIT ?"
        return [word for (word,) in self._run(query, (most,))]

    def all_words(self) -> Iterator[str]:
        """Yield the words of all clients in alphabetical order, or none if they are too many."""
        query = "SELECT word FROM words WHERE (SELECT COUNT(*) FROM words) <= ? ORDER BY word"
        return (word for (word,) in self._run(query, (MOST_SPELLED,)))

    def counts(self, words: Sequence[str]) -> np.ndarray:
        """Return how often each of the words is counted."""
        rows = (self._run("SELECT count FROM words WHERE word = ?", (word,)).fetchone() for word in words)
        return np.array([row[0] if row else 0 for row in rows], np.int64)


def _names(clients: Sequence[str]) -> np.ndarray:
    """Return the names of clients, which follow the number of their split."""
    return np.array([client[1:] for client in clients])


def _divide(clients: Sequence[str], settings: CorpusSettings) -> np.ndarray:
    """Return the number of each client's split: as its posts say, or at random as `Clients.split_clients` does."""
    if settings.fractions is None:
        return np.array([int(client[0]) for client in clients], np.int8)
    index, split_of = np.arange(len(clients)), np.empty(len(clients), np.int8)
    everyone = Clients({"client": index}, index, index + 1, _names(clients))
    for number, part in enumerate(everyone.split_clients(*settings.fractions, seed=settings.seed)):
        split_of[part.starts] = number
    return split_of


def _write_words(path: Path, words: Iterable[str]) -> None:
    """Write words, one per line."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{word}\n" for word in words)


def _write_sentences(store: _PostStore, folder: Path, rank: Mapping[str, int], progress: Progress) -> None:
    """Write the codes of all sentences, where each begins, and its time."""
    done = 0
    with (
        ArrayFile(folder / "tokens.npy", np.int32) as tokens,
        ArrayFile(folder / "begins.npy", np.int64) as begins,
        ArrayFile(folder / "times.npy", np.float64) as times,
        progress("writing posts", store.num_posts) as advance,
    ):
        begins.append(np.zeros(1, np.int64))
        for batch in store.batches("client, time, rowid"):
            codes, lengths, when = array("i"), array("q"), array("d")
            for _, time, text in batch:
                for sentence in map(str.split, text.split("\n")):
                    codes.extend([rank.get(word) or -1 - word_hash(word) for word in sentence])
                    lengths.append(len(sentence))
                    when.append(time)
            tokens.append(np.asarray(codes))
            begins.append(done + np.cumsum(lengths))
            times.append(np.asarray(when))
            done += len(codes)
            advance(len(batch))
