"""Words and vocabularies: text into sentences and words, and the ids that models have for words.

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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedrecon._src.core.checks import check_number
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest

PAD = 0
MAX_WORDS = 20  # of a sentence
FORMAT = Format("fedrecon-vocabulary", 1)
URL = "<URL>"  # upper case, so that no lower-cased word can be the same
HASH_BITS = 31
PAIR_ROWS, PAIR_FACTOR = (
    32_749,
    1_000_003,
)  # rows of a table of trigrams; both prime, so that pairs spread over all rows

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
