"""Text on a device: sentences, words, their ids, and suggestions, exactly as in training.

Training has this in fedrecon, which needs JAX; the page has it in JavaScript.
Tests compare the three on shared vectors.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

URL = "<URL>"
HASH_BITS = 31
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
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f\x80-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_STRAIGHT = str.maketrans("‘’‛ʼ“”„‟", "''''\"\"\"\"")


def split_text(text: str) -> list[list[str]]:
    """Split text into sentences, and those into words in lower case; sentences without words are left out."""
    text = _INVISIBLE.sub("", text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).translate(_STRAIGHT)
    text = _END.sub(r"\1\n", _DOTS.sub("...", text)).lower()
    if "http" in text or "www." in text:
        text = _WEB.sub(f" {URL} ", text)
    text = _REPEATED.sub(r" \1 ", text)
    return [words for line in text.splitlines() if (words := _WORD.findall(line))]


def word_hash(word: str) -> int:
    """Return 31 bits that depend on the word alone."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (1 << HASH_BITS)


class Suggestion(NamedTuple):
    """A word that may come next, its probability, and whether it is one of the person's own."""

    word: str
    probability: float
    personal: bool


class Vocabulary:
    """The words that a model knows, the buckets for all others, and what a sentence looks like to it."""

    def __init__(self, words: Sequence[str], buckets: int, max_words: int):
        """Number the words: 0 is padding, then the words, the beginning and the end of a sentence, the buckets."""
        if buckets < 1 or max_words < 1 or not all(isinstance(word, str) for word in words):
            raise ValueError(
                f"{len(words)} words, {buckets} buckets and {max_words} words per sentence are not a vocabulary"
            )
        self.words, self.buckets, self.max_words = list(words), buckets, max_words
        self._ids = {word: k for k, word in enumerate(self.words, 1)}
        self.bos, self.eos, self.first_oov = len(self.words) + 1, len(self.words) + 2, len(self.words) + 3

    def bucket(self, word: str) -> int:
        """Return the bucket of a word outside the vocabulary."""
        return word_hash(word) % self.buckets

    def id_of(self, word: str) -> int:
        """Return the id of a word."""
        return self._ids.get(word) or self.first_oov + self.bucket(word)

    def columns(self, sentences: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
        """Return sentences as the columns `word`, `oov` and `target`."""
        ids = np.zeros((len(sentences), self.max_words + 1), np.int32)
        for row, sentence in zip(ids, sentences, strict=True):
            numbers = [self.bos, *map(self.id_of, sentence[: self.max_words]), self.eos][: self.max_words + 1]
            row[: len(numbers)] = numbers
        return self._split(ids)

    def prompt(self, text: str) -> tuple[dict[str, np.ndarray], int]:
        """Return the beginning of a sentence as `word` and `oov`, and the place that predicts the next word."""
        words = (split_text(text) or [[]])[-1]
        words = words[max(0, len(words) - self.max_words + 1) :]
        ids = np.zeros((1, self.max_words + 1), np.int32)
        ids[0, : len(words) + 1] = [self.bos, *map(self.id_of, words)]
        columns = self._split(ids)
        return {name: columns[name] for name in ("word", "oov")}, len(words)

    def _split(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        inputs = ids[:, :-1]
        known = inputs <= self.eos
        oov = np.where(known, 0, inputs - self.eos).astype(np.int16 if self.buckets < 2**15 else np.int32)
        return {"word": np.where(known, inputs, 0).astype(np.int32), "oov": oov, "target": ids[:, 1:].astype(np.int32)}

    def own_words(self, sentences: Sequence[Sequence[str]]) -> dict[int, dict[str, int]]:
        """Return, by bucket, how often a person uses each word of theirs that is outside the vocabulary."""
        own: dict[int, dict[str, int]] = {}
        used = Counter(word for sentence in sentences for word in sentence[: self.max_words])
        for word, count in sorted(used.items(), key=lambda item: (-item[1], item[0])):
            if word not in self._ids:
                own.setdefault(self.bucket(word), {})[word] = count
        return own

    def suggest(self, logits: np.ndarray, own: Mapping[int, Mapping[str, int]], n: int) -> list[Suggestion]:
        """Return the `n` most probable next words; a bucket's share goes to the person's words in it.

        Args:
          logits: of everything that may come next.
          own: the person's own words, as `own_words` finds them.
          n: how many.
        """
        shares = np.exp(logits.astype(np.float64) - logits.max())
        shares /= shares.sum()
        known = shares[1 : len(self.words) + 1]
        found = [Suggestion(self.words[k], float(known[k]), False) for k in np.argsort(-known, kind="stable")[:n]]
        for bucket, words in own.items():
            total, share = sum(words.values()), float(shares[self.first_oov + bucket])
            found += [Suggestion(word, share * count / total, True) for word, count in words.items()]
        return sorted(found, key=lambda one: (-one.probability, one.word))[:n]
