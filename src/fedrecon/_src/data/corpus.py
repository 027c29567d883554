"""A corpus: many clients' sentences, prepared once and mapped, from which examples for any vocabulary size come.

Words are stored as codes: the rank of a word among the kept ones, counted from 1, or -1 - hash for any other word. The
folder holds tokens.npy (the codes), begins.npy (where each sentence begins in it, and the end), times.npy,
offsets.npy (where each client's sentences begin), names.npy, split.npy, words.txt, others.txt (how the words that are
not kept are spelled, if they are not too many), counts.npy, and corpus.json.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fedrecon._src.core.checks import check_choice, check_number
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.display import Advance, Progress, silent
from fedrecon._src.data.sentences import HASH_BITS, MAX_WORDS, PAD, Sentences, Vocabulary, next_word_columns, word_hash
from fedrecon._src.data.sources import DataError
from fedrecon._src.storage.arrays import map_array
from fedrecon._src.storage.manifest import Format, read_folder_manifest

FORMAT, MANIFEST = Format("fedrecon-corpus", 2), "corpus.json"
ARRAYS = ("tokens", "begins", "times", "offsets", "names", "split", "counts")
FILES = (*(f"{name}.npy" for name in ARRAYS), "words.txt", "others.txt")
QUICK_BYTES = 1 << 28  # of a file that is read whenever a corpus is opened
Check = Literal["quick", "full"]
SENTENCES_PER_BLOCK = 1 << 16
HASHED_TOKENS, HASHED_BLOCKS = 1 << 16, 256  # tokens in a block, and blocks that a fingerprint reads


@dataclass(frozen=True, eq=False, repr=False)
class Corpus:
    """Sentences of many clients, divided into splits.

    Attributes:
      clients: everyone, in alphabetical order. Columns: `begin` and `end` of each sentence in `tokens`, and `time`.
        A client's sentences are in order of time.
      tokens: the codes of all words.
      words: the kept words, most used by training clients first.
      counts: how often training clients use each of them.
      spellings: the text of others.txt as bytes; see `other_words`.
      splits: names of the splits, training first.
      split_of: the number of each client's split.
      train_tokens: how many words training clients have in all.
      source: what the corpus was prepared from.
      skipped: counts of what was left out.

    Example:
      >>> import fedrecon as fr
      >>> corpus = fr.data.synthetic_text(num_clients=10, sentences=4)
      >>> corpus
      Corpus(10 clients (10 train, 0 valid, 0 test), 40 sentences, 240 words)
      >>> corpus.next_words("train", vocab_size=20, buckets=5)
      Sentences(10 clients, 40 examples: word int32, oov int16, pair int32, target int32, time float64)
    """

    clients: Clients
    tokens: np.ndarray
    words: tuple[str, ...]
    counts: np.ndarray
    spellings: np.ndarray
    splits: tuple[str, ...]
    split_of: np.ndarray
    train_tokens: int
    source: str
    skipped: Mapping[str, int]

    def __repr__(self) -> str:
        """Describe in one line."""
        sizes = np.bincount(self.split_of, minlength=len(self.splits))
        parts = ", ".join(f"{size} {name}" for size, name in zip(sizes, self.splits, strict=True))
        sentences = self.clients.num_examples
        return f"Corpus({len(self.clients)} clients ({parts}), {sentences} sentences, {len(self.tokens)} words)"

    @classmethod
    def open(cls, path: str | Path, mapped: bool = True, check: Check = "quick") -> "Corpus":
        """Open a prepared folder.

        Every file has its size and sha256 in the manifest. By default files up to 256 MB are read and compared, which
        takes a fraction of a second each. Of larger files only the size is compared: reading tens of gigabytes would
        defeat the purpose of mapping, that a corpus opens at once.

        Args:
          path: the folder.
          mapped: map the files; otherwise read them into memory.
          check: "quick" as above, or "full" to read every file, however large.

        Raises:
          DataError: there is no corpus, or it is damaged.
        """
        check_choice("check", check, get_args(Check))
        folder = Path(path)
        try:
            max_hashed = QUICK_BYTES if check == "quick" else None
            manifest = read_folder_manifest(folder / MANIFEST, FORMAT, *FILES, max_hashed=max_hashed)
            read = map_array if mapped else partial(np.load, allow_pickle=False)
            tokens, begins, times, offsets, names, split_of, counts = (read(folder / f"{name}.npy") for name in ARRAYS)
            words = _words_of((folder / "words.txt").read_bytes())
            spelling_file = folder / "others.txt"
            is_mapped = mapped and spelling_file.stat().st_size > 0  # an empty file cannot be mapped
            spellings = np.memmap(spelling_file, np.uint8, "r") if is_mapped else np.fromfile(spelling_file, np.uint8)
            sentences_fit = len(begins) - 1 == len(times) == offsets[-1] and begins[-1] == len(tokens)
            clients_fit = len(offsets) - 1 == len(names) == len(split_of) and len(counts) == len(words)
            if not (sentences_fit and clients_fit):
                raise ValueError("its arrays do not fit together")
            columns = {"begin": begins[:-1], "end": begins[1:], "time": times}
            clients, splits = Clients(columns, offsets[:-1], offsets[1:], names), tuple(manifest["splits"])
            facts = {name: manifest[name] for name in ("train_tokens", "source", "skipped")}
            return cls(clients, tokens, words, counts, spellings, splits, split_of, **facts)
        except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, SyntaxError) as problem:
            raise DataError(f"{folder} is not a complete corpus: {problem}. Prepare it again.") from problem

    # ---- clients ----

    def split(self, name: str) -> Clients:
        """Return the clients of a split.

        Raises:
          DataError: this corpus has no such split.
        """
        if name not in self.splits:
            raise DataError(f"the corpus has no split {name!r}; it has: {', '.join(self.splits)}.")
        return self.clients.take(np.flatnonzero(np.asarray(self.split_of) == self.splits.index(name)))

    @property
    def train(self) -> Clients:
        """The clients to train on, whose words were counted."""
        return self.split("train")

    @property
    def valid(self) -> Clients:
        """The clients to choose settings on."""
        return self.split("valid")

    @property
    def test(self) -> Clients:
        """The clients to measure on."""
        return self.split("test")

    # ---- words ----

    def vocabulary(self, vocab_size: int, buckets: int) -> Vocabulary:
        """Return the vocabulary of the `vocab_size` most used words."""
        check_number("vocab_size", vocab_size, least=1, most=len(self.words))  # kept_words of the corpus
        return Vocabulary(self.words[:vocab_size], buckets)

    @property
    def other_words(self) -> tuple[str, ...]:
        """The words that are not kept, in alphabetical order; none if the clients use too many words.

        They are read whenever they are asked for, so that an open corpus does not hold them in memory.
        """
        return _words_of(self.spellings.tobytes())

    def coverage(self, vocab_size: int) -> float:
        """Return the share of the training clients' words that is among the `vocab_size` most used."""
        return float(self.counts[:vocab_size].sum() / max(1, self.train_tokens))

    def fingerprint(self) -> str:
        """Return a short digest of the content, or of a sample of a large one (see `Clients.fingerprint`)."""
        digest = hashlib.blake2b(self.clients.fingerprint().encode(), digest_size=8)
        digest.update(f"{len(self.tokens)} {' '.join(self.splits)} ".encode())
        digest.update("\n".join(self.words).encode())
        digest.update(np.ascontiguousarray(self.split_of).tobytes())
        starts = np.arange(0, len(self.tokens), HASHED_TOKENS)
        if len(starts) > HASHED_BLOCKS:
            starts = np.linspace(0, len(self.tokens) - HASHED_TOKENS, HASHED_BLOCKS).astype(np.int64)
        for start in starts:
            digest.update(np.asarray(self.tokens[start : start + HASHED_TOKENS], "<i4").tobytes())
        return digest.hexdigest()

    # ---- examples ----

    def next_words(
        self,
        clients: str | Clients,
        vocab_size: int,
        buckets: int,
        max_words: int = MAX_WORDS,
        folder: str | Path | None = None,
    ) -> Sentences:
        """Return clients' sentences as examples of the next word.

        Args:
          clients: the name of a split, or clients of this corpus such as `corpus.train.at_least(10)`.
          vocab_size: V, at most the number of kept words.
          buckets: for words outside the vocabulary.
          max_words: L, how many words of a sentence count.
          folder: where to write the examples, to be mapped from there; must not exist yet. None keeps them in
            memory: 14 bytes per word.
        """
        return self.in_words_of(self.vocabulary(vocab_size, buckets), clients, max_words, folder)

    def in_words_of(
        self,
        vocabulary: Vocabulary,
        clients: str | Clients,
        max_words: int = MAX_WORDS,
        folder: str | Path | None = None,
        progress: Progress = silent,
        spelled: bool = False,
    ) -> Sentences:
        """Return clients' sentences as examples of the next word in any vocabulary, such as that of a saved model.

        A word of the vocabulary that this corpus does not keep is known here only by its hash of 31 bits: another word
        with the same hash would be taken for it.

        Args:
          vocabulary: the words and buckets.
          clients: as for `next_words`.
          max_words: L.
          folder: where to write the examples.
          spelled: whether to say which words outside the vocabulary they are, as column `other`; only in memory.
          progress: a display of how much is written.
        """
        chosen = self.split(clients) if isinstance(clients, str) else clients
        check_number("max_words", max_words, least=1)
        fields: dict[str, Any] = {"words": np.array(vocabulary.words), "buckets": vocabulary.buckets}
        encode = _encoder(self, chosen, vocabulary, max_words, spelled and folder is None)
        if folder is not None:
            with progress("writing examples of clients", len(chosen)) as advance:
                return Sentences.from_generator(folder, _iterate_clients(chosen, encode, advance), **fields)
        rows = rows_of(chosen.starts, chosen.ends)
        blocks = [encode(rows[k : k + SENTENCES_PER_BLOCK]) for k in range(0, max(1, len(rows)), SENTENCES_PER_BLOCK)]
        # one by one, so that not all are in memory twice
        columns = {name: np.concatenate([block.pop(name) for block in blocks]) for name in tuple(blocks[0])}
        if spelled:
            outside = columns["target"] >= vocabulary.first_oov
            codes, columns["other"][outside] = np.unique(columns["other"][outside], return_inverse=True)
            columns["other"] = np.where(outside, columns["other"] + 1, 0).astype(np.int32)
            by_hash = {-1 - word_hash(word): word for word in self.other_words}
            spellings = (self.words[code - 1] if code > 0 else by_hash.get(code, "") for code in codes.tolist())
            fields["other_words"] = np.array(list(spellings), str)  # empty where the spelling is not known
        ends = np.cumsum(chosen.sizes)
        return Sentences(columns, ends - chosen.sizes, ends, chosen.names, **fields)


def _words_of(content: bytes) -> tuple[str, ...]:
    """Return the words in the content of a file that has one per line."""
    return tuple(content.decode("utf-8").split("\n")[:-1])


def _encoder(
    corpus: Corpus, clients: Clients, vocabulary: Vocabulary, max_words: int, spelled: bool
) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Return what turns sentences, given by their rows, into columns; if `spelled`, with their codes as `other`."""
    # the id of every code that is not negative: padding and the kept words
    table = np.array([PAD, *map(vocabulary.id_of, corpus.words)], np.int32)
    # words of the vocabulary that are not kept, by hash; none has the last
    missing = set(vocabulary.words).difference(corpus.words)
    pairs = sorted((word_hash(word), vocabulary.id_of(word)) for word in missing)
    hashes, ids_by_hash = np.array([*pairs, (1 << HASH_BITS, 0)], np.int64).T
    position = np.arange(max_words)

    def encode(rows: np.ndarray) -> dict[str, np.ndarray]:
        begin, end, time = (np.asarray(clients.columns[name][rows]) for name in ("begin", "end", "time"))
        real = position < (end - begin)[:, None]
        codes = np.zeros(real.shape, np.int32)
        codes[real] = corpus.tokens[(begin[:, None] + position)[real]]
        lengths, is_kept = np.count_nonzero(codes, 1), codes >= 0
        words = table[np.where(is_kept, codes, 0)]
        other = -1 - codes[~is_kept].astype(np.int64)
        index = np.searchsorted(hashes, other)
        buckets = vocabulary.first_oov + other % vocabulary.buckets
        words[~is_kept] = np.where(hashes[index] == other, ids_by_hash[index], buckets)
        ids = np.pad(words, [(0, 0), (1, 0)], constant_values=vocabulary.bos)
        short = np.flatnonzero(lengths < max_words)
        ids[short, lengths[short] + 1] = vocabulary.eos
        columns = next_word_columns(ids, len(vocabulary), vocabulary.buckets) | {"time": time}
        return columns | {"other": codes} if spelled else columns

    return encode


def _iterate_clients(
    clients: Clients, encode: Callable[[np.ndarray], dict[str, np.ndarray]], advance: Advance
) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    """Yield the name and the columns of every client."""
    names = range(len(clients)) if clients.names is None else map(str, clients.names)
    for name, start, end in zip(names, clients.starts.tolist(), clients.ends.tolist(), strict=True):
        yield name, encode(np.arange(start, end))
        advance(1)
