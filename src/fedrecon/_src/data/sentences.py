"""Sentences: text into words, vocabularies with ids for words, and the columns that a model of the next word reads.

The words look like those of federated Stack Overflow: lower-cased, every punctuation mark a word of its own, but
apostrophes and hyphens inside a word part of it, and web addresses replaced by one word. Unlike there, letters of all
scripts are kept. Emphasis is simplified: a repeated mark counts once ("!!!" is "!"), and any row of dots is one
word "...".

A sentence ends at the end of a line, and after ".", "!", "?" or "..." (with the quotes and brackets that close
there) before white space, except that "..." before a lower-case letter does not end it. Abbreviations are not known:
"Mr. Smith" is two sentences.

Ids: 0 is padding, 1 to V are the words, most used first; then come one id that begins and one that ends a sentence,
and the buckets. A word outside the vocabulary has the bucket of its hash: the ids from `first_oov` on, and only those,
have embeddings that belong to a client.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.clients import Clients
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest

PAD = 0
MAX_WORDS = 20  # of a sentence
FORMAT = Format("fedrecon-vocabulary", 1)
URL = "<URL>"  # upper case, so that no lower-cased word can be the same
HASH_BITS = 31
PAIR_ROWS, PAIR_FACTOR = 32_749, 1_000_003  # a table of trigrams; both prime, so that pairs spread over all rows

# Marks stand alone; everything else that is not white space makes up words. Listed by code point rather than by
# Unicode's categories, so that combining marks stay in their words and all versions of Python agree.
_MARKS = (
    "!-/:-@\\[-^`{-~\xa1-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u2010-\u2027\u2030-\u205e\u20a0-\u20cf"
    "\u2100-\u2bff\u2e00-\u2e7f\u3001-\u3004\u3008-\u3020\u3030\ufe10-\ufe19\ufe30-\ufe6f\uff01-\uff0f\uff1a-\uff20"
    "\uff3b-\uff40\uff5b-\uff65\ufffc\ufffd\U0001f000-\U0001faff"
)
_LETTERS = f"[^\\s{_MARKS}]+"
_WORD = re.compile(f"{URL}|{_LETTERS}(?:['-]{_LETTERS})*|\\.\\.\\.|[{_MARKS}]")
_DOTS = re.compile(r"\.{2,}|…")
_REPEATED = re.compile(f"([{_MARKS}])(?<!\\.)\\1+")
_WEB = re.compile(r"""(?:https?://|www\.)\S*[^\s.,;:!?"')\]>]""")
_END = re.compile(r"""([.!?]["')\]]*)(?!(?<=\.\.\.)\s+[a-z])\s+""")
# What is invisible or cannot be written to a file: controls, soft hyphens, zero widths, halves of surrogate pairs.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f\x80-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_STRAIGHT = str.maketrans("‘’‛ʼ“”„‟", "''''\"\"\"\"")


def split_text(text: str) -> list[list[str]]:
    """Split text into sentences, and those into words; sentences without words are left out.

    Args:
      text: of any length; its words come back in lower case.

    Example:
      >>> import fedrecon as fr
      >>> fr.data.split_text("It's a cat. See https://cats.org!")
      [["it's", 'a', 'cat', '.'], ['see', '<URL>', '!']]
    """
    text = _INVISIBLE.sub("", text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).translate(_STRAIGHT)
    text = _END.sub(r"\1\n", _DOTS.sub("...", text)).lower()
    if "http" in text or "www." in text:
        text = _WEB.sub(f" {URL} ", text)
    text = _REPEATED.sub(r" \1 ", text)
    return [words for line in text.splitlines() if (words := _WORD.findall(line))]


def word_hash(word: str) -> int:
    """Return 31 bits that depend on the word alone: the same on every machine and with every Python."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (1 << HASH_BITS)


@dataclass(frozen=True)
class Vocabulary:
    """The V most used words, and buckets for all others.

    Attributes:
      words: word k has id k + 1.
      buckets: how many ids the words outside share, at least 1.

    Example:
      >>> import fedrecon as fr
      >>> vocabulary = fr.data.Vocabulary(("the", "cat"), buckets=3)
      >>> vocabulary.id_of("cat"), vocabulary.bos, vocabulary.eos, vocabulary.num_ids
      (2, 3, 4, 8)
      >>> vocabulary.encode(["the", "cat"], max_words=4).tolist()
      [3, 1, 2, 4, 0]
    """

    words: tuple[str, ...]
    buckets: int

    def __post_init__(self) -> None:
        """Check that there is an id for every word, and one word for every id."""
        object.__setattr__(self, "words", tuple(map(str, self.words)))
        check_number("buckets", self.buckets, least=1)
        if len(self._ids) < len(self.words):
            twice = next(word for k, word in enumerate(self.words, 1) if self._ids[word] != k)
            raise ValueError(f"{twice!r} is in the vocabulary twice.")

    def __repr__(self) -> str:
        """Describe in one line; never print all words."""
        return f"Vocabulary({len(self)} words, {self.buckets} buckets)"

    def __len__(self) -> int:
        """Return V, the number of words, buckets not counted."""
        return len(self.words)

    @property
    def bos(self) -> int:
        """The id that begins a sentence."""
        return len(self) + 1

    @property
    def eos(self) -> int:
        """The id that ends a sentence."""
        return len(self) + 2

    @property
    def first_oov(self) -> int:
        """The id of bucket 0."""
        return len(self) + 3

    @property
    def num_ids(self) -> int:
        """How many ids there are, of padding, words, marks and buckets together."""
        return self.first_oov + self.buckets

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: k for k, word in enumerate(self.words, 1)}

    def bucket(self, word: str) -> int:
        """Return the bucket that a word has if it is outside the vocabulary."""
        return word_hash(word) % self.buckets

    def id_of(self, word: str) -> int:
        """Return the id of a word."""
        return self._ids.get(word) or self.first_oov + self.bucket(word)

    def word_of(self, number: int) -> str | None:
        """Return the word with this id; None for padding, for the marks of a sentence and for buckets."""
        return self.words[number - 1] if 1 <= number <= len(self) else None

    def encode(self, sentence: Sequence[str], max_words: int = MAX_WORDS) -> np.ndarray:
        """Return the `max_words + 1` ids of a sentence.

        They are the beginning, the first `max_words` words, the end if there are fewer, and padding.
        """
        ids = np.full(max_words + 1, PAD, np.int32)
        row = [self.bos, *map(self.id_of, sentence[:max_words]), self.eos][: max_words + 1]
        ids[: len(row)] = row
        return ids

    def save(self, path: str | Path) -> None:
        """Write a JSON file that `load` reads."""
        write_manifest(Path(path), FORMAT, {"buckets": self.buckets, "words": self.words})

    @classmethod
    def load(cls, path: str | Path) -> "Vocabulary":
        """Read a file that `save` wrote.

        Raises:
          StorageError: it is missing, damaged or not a vocabulary.
        """
        facts = read_manifest(Path(path), FORMAT)
        try:
            words, buckets = facts["words"], facts["buckets"]
            if not all(isinstance(word, str) for word in words):
                raise TypeError("`words` must be strings")
            return cls(tuple(words), int(buckets))
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            raise StorageError(f"{path} is not a saved vocabulary: {problem!r}") from None


# ---- clients whose examples are sentences ----


@dataclass(frozen=True, eq=False, repr=False)
class Sentences(Clients):
    """Clients whose examples are sentences of up to L words.

    Columns: `word` (int32, L), the rows of the global table to read: ids up to that of the end, 0 for padding and
    for words outside the vocabulary; `oov` (L), the rows of the local table counted from 1: bucket + 1 for words
    outside the vocabulary, else 0; `pair` (int32, L), a hash of the last two ids, which are
    rows of a table of trigrams; `target` (int32, L), the ids that come next, 0 for padding; `time` (float64),
    seconds. A client's sentences are in order of time.

    Attributes:
      words: the words of the vocabulary; word k has id k + 1.
      buckets: how many ids the words outside share.
      other_words: words outside the vocabulary, if their spelling is known. The column `other` then has 1 + the
        index of each target outside the vocabulary, and 0 for all others.

    Example:
      >>> import fedrecon as fr
      >>> sentences = fr.data.synthetic_text(10, 4).next_words("train", vocab_size=20, buckets=5)
      >>> sentences.vocab_size, sentences.max_words
      (20, 20)
    """

    words: np.ndarray = field(kw_only=True)
    buckets: int = field(kw_only=True)
    other_words: np.ndarray = field(kw_only=True, default_factory=lambda: np.zeros(0, str))

    @property
    def vocab_size(self) -> int:
        """V, the number of words in the vocabulary."""
        return len(self.words)

    @property
    def max_words(self) -> int:
        """L, the number of words of a sentence that are kept."""
        return self.columns["word"].shape[1]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The words and buckets behind the ids."""
        return Vocabulary(tuple(self.words.tolist()), self.buckets)


def next_word_columns(ids: np.ndarray, vocab_size: int, buckets: int) -> dict[str, np.ndarray]:
    """Return the columns `word`, `oov`, `pair` and `target` of sentences.

    Args:
      ids: as `Vocabulary.encode` gives them, (sentences, L + 1).
      vocab_size: V.
      buckets: how many buckets words outside the vocabulary share.
    """
    inputs, last = ids[:, :-1], vocab_size + 2
    is_global = inputs <= last
    before = np.pad(inputs[:, :-1], [(0, 0), (1, 0)]).astype(np.int64)
    return {
        "word": np.where(is_global, inputs, PAD).astype(np.int32),
        "oov": np.where(is_global, 0, inputs - last).astype(np.int16 if buckets < 2**15 else np.int32),
        "pair": np.where(inputs == PAD, 0, (before * PAIR_FACTOR + inputs) % PAIR_ROWS).astype(np.int32),
        "target": ids[:, 1:].astype(np.int32),
    }


def input_ids(columns: Mapping[str, Any], vocab_size: int) -> np.ndarray:
    """Return the ids that `word` and `oov` stand for together.

    Args:
      columns: with `word` and `oov`, as `Sentences` have them.
      vocab_size: the number of words in the vocabulary.

    Example:
      >>> import fedrecon as fr
      >>> fr.data.input_ids({"word": [[3, 1, 0]], "oov": [[0, 0, 2]]}, vocab_size=2).tolist()
      [[3, 1, 6]]
    """
    oov = np.asarray(columns["oov"], np.int32)
    return np.where(oov > 0, vocab_size + 2 + oov, np.asarray(columns["word"], np.int32))


class PersonalText(NamedTuple):
    """One person's text as examples, and the words of theirs that each bucket stands for.

    Attributes:
      columns: `word`, `oov`, `pair` and `target`, like a client's.
      words: by bucket, how often the person's own words in it occur in the examples, most used first.

    Example:
      >>> import fedrecon as fr
      >>> text = fr.data.personal_text("Schnurrli sat.", fr.data.Vocabulary(("sat", "."), buckets=1))
      >>> text.words
      {0: {'schnurrli': 1}}
    """

    columns: dict[str, np.ndarray]
    words: dict[int, dict[str, int]]


def personal_text(text: str, vocabulary: Vocabulary, max_words: int = MAX_WORDS) -> PersonalText:
    """Turn one person's text into examples of the next word.

    Args:
      text: anything; it is split into sentences and words as a corpus is.
      vocabulary: the model's vocabulary.
      max_words: words per sentence, as the model was trained.

    Example:
      >>> import fedrecon as fr
      >>> text = fr.data.personal_text("The cat sat.", fr.data.Vocabulary(("the", "cat", "."), buckets=2), max_words=5)
      >>> text.columns["word"].tolist()
      [[4, 1, 2, 0, 3]]
    """
    sentences = split_text(text)
    rows = [vocabulary.encode(sentence, max_words) for sentence in sentences]
    ids = np.array(rows, np.int32).reshape(-1, max_words + 1)
    personal: dict[int, dict[str, int]] = {}
    used = Counter(word for sentence in sentences for word in sentence[:max_words])
    for word, count in sorted(used.items(), key=lambda item: (-item[1], item[0])):
        if vocabulary.id_of(word) >= vocabulary.first_oov:
            personal.setdefault(vocabulary.bucket(word), {})[word] = count
    return PersonalText(next_word_columns(ids, len(vocabulary), vocabulary.buckets), personal)


def prompt_columns(
    text: str | Sequence[str], vocabulary: Vocabulary, max_words: int = MAX_WORDS
) -> tuple[dict[str, np.ndarray], int]:
    """Turn the beginning of a sentence into one example, to ask a model what comes next.

    Args:
      text: the beginning, as text or as words; if it has several sentences, the last counts.
      vocabulary: the model's vocabulary.
      max_words: words per sentence, as the model was trained. Of a longer prompt, only the last words are used.

    Returns:
      `word`, `oov` and `pair` of shape (1, L), and the position whose prediction is the next word. No `target`:
      it is not known.

    Example:
      >>> import fedrecon as fr
      >>> columns, position = fr.data.prompt_columns("The cat", fr.data.Vocabulary(("the", "cat"), buckets=2), 4)
      >>> columns["word"].tolist(), position
      ([[3, 1, 2, 0]], 2)
    """
    words = (split_text(text) or [[]])[-1] if isinstance(text, str) else text
    words = words[max(0, len(words) - max_words + 1) :]
    ids = np.full((1, max_words + 1), PAD, np.int32)
    ids[0, : len(words) + 1] = [vocabulary.bos, *map(vocabulary.id_of, words)]
    columns = next_word_columns(ids, len(vocabulary), vocabulary.buckets)
    return {name: columns[name] for name in ("word", "oov", "pair")}, len(words)
