"""Text on a device: sentences, words, their ids, and suggestions, exactly as in training.

Training has this in fedrecon, which needs JAX; the page has it in JavaScript.
Tests compare the three on shared vectors.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

URL = "<URL>"
HASH_BITS = 31
PAIR_ROWS, PAIR_FACTOR = 32_749, 1_000_003
DISCOUNT, BIGRAM_WEIGHT, TRIGRAM_WEIGHT = 0.7, 200.0, 5.0
PRIOR, HALF_LIFE = 5.0, 100.0
LEAST_OWN, RESERVED_FROM = 0.01, 5
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
        """Return sentences as the columns `word`, `oov`, `pair` and `target`."""
        ids = np.zeros((len(sentences), self.max_words + 1), np.int32)
        for row, sentence in zip(ids, sentences, strict=True):
            numbers = [self.bos, *map(self.id_of, sentence[: self.max_words]), self.eos][: self.max_words + 1]
            row[: len(numbers)] = numbers
        return self._split(ids)

    def prompt(self, text: str) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return the beginning of a sentence as `word`, `oov` and `pair`, and its words that are read."""
        words = (split_text(text) or [[]])[-1]
        words = words[max(0, len(words) - self.max_words + 1) :]
        ids = np.zeros((1, self.max_words + 1), np.int32)
        ids[0, : len(words) + 1] = [self.bos, *map(self.id_of, words)]
        columns = self._split(ids)
        return {name: columns[name] for name in ("word", "oov", "pair")}, words

    def _split(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        inputs = ids[:, :-1]
        in_vocabulary = inputs <= self.eos
        oov = np.where(in_vocabulary, 0, inputs - self.eos).astype(np.int16 if self.buckets < 2**15 else np.int32)
        before = np.pad(inputs[:, :-1], [(0, 0), (1, 0)]).astype(np.int64)
        pair = np.where(inputs == 0, 0, (before * PAIR_FACTOR + inputs) % PAIR_ROWS).astype(np.int32)
        word, target = np.where(in_vocabulary, inputs, 0).astype(np.int32), ids[:, 1:].astype(np.int32)
        return {"word": word, "oov": oov, "pair": pair, "target": target}


class PersonalWords:
    """What one person's sentences say about their next words, on top of a model's: own and recent words, n-grams."""

    def __init__(self, vocabulary: Vocabulary, sentences: Iterable[Sequence[str]] = ()):
        """Learn sentences."""
        self.vocabulary = vocabulary
        self._count, self._recent = np.zeros((2, vocabulary.first_oov + 1))  # uses of each id, all buckets last
        self.uses: dict[str, int] = {}  # of the person's own words, outside the vocabulary, in the order of first use
        self._followers: dict[tuple[int, ...], Counter[int]] = {}
        for words in sentences:
            self.learn(words)

    def learn(self, words: Sequence[str]) -> None:
        """Learn a sentence."""
        vocabulary = self.vocabulary
        words = words[: vocabulary.max_words]
        for word in words:
            if vocabulary.id_of(word) >= vocabulary.first_oov:
                self.uses[word] = self.uses.get(word, 0) + 1
        ids = [*self._inputs(words), vocabulary.eos][: vocabulary.max_words + 1]
        used = np.bincount(np.minimum(ids[1:], vocabulary.first_oov), minlength=vocabulary.first_oov + 1)
        self._count += used
        self._recent = self._recent * 0.5 ** (used.sum() / HALF_LIFE) + used
        for t, target in enumerate(ids[1:], 1):
            for context in (ids[t - 1 : t], ids[t - 2 : t] if t > 1 else [-1, ids[0]]):
                self._followers.setdefault(tuple(context), Counter())[target] += 1

    def _inputs(self, words: Sequence[str]) -> list[int]:
        """Return the ids of a sentence's beginning and words; -1 for words that the person has not used."""
        first_oov, own_ids = self.vocabulary.first_oov, {word: k for k, word in enumerate(self.uses)}
        ids = [self.vocabulary.id_of(word) for word in words]
        extended = [
            k if k < first_oov else first_oov + own_ids.get(w, -1 - first_oov) for k, w in zip(ids, words, strict=True)
        ]
        return [self.vocabulary.bos, *extended]

    def suggest(self, logits: np.ndarray, words: Sequence[str], n: int, prefix: str = "") -> list[Suggestion]:
        """Return the `n` most probable next words; of five or more, the last is kept for a word of the person's own.

        Args:
          logits: of everything that may come next, for this person.
          words: the beginning of the sentence.
          n: how many.
          prefix: the letters of the next word that are typed already.
        """
        vocabulary, first_oov = self.vocabulary, self.vocabulary.first_oov
        shares = np.exp(logits.astype(np.float64) - logits.max())
        usual = self._count * (self._recent.sum() / max(self._count.sum(), 1))
        ratio = (self._recent + PRIOR) / (usual + PRIOR)  # above 1 for what the person writes about now
        shares *= ratio[np.minimum(np.arange(len(shares)), first_oov)]
        shares /= shares.sum()
        uses = np.array([*self.uses.values()], np.float64)
        own_shares = shares[first_oov:].sum() * (uses - DISCOUNT) / (uses.sum() + 1)
        shares = np.append(shares[:first_oov], own_shares)
        before, last = ([-1, *self._inputs(words)])[-2:]
        for context, weight in (((last,), BIGRAM_WEIGHT), ((before, last), TRIGRAM_WEIGHT)):
            if followers := self._followers.get(context):
                seen = followers.total()
                shares *= (weight + DISCOUNT * len(followers)) / (seen + weight)
                for target, count in followers.items():
                    shares[target] += (count - DISCOUNT) / (seen + weight)
        everything = [
            *zip(vocabulary.words, shares[1:], strict=False),
            *zip(self.uses, shares[first_oov:], strict=True),
        ]
        suggestions = [
            Suggestion(word, float(share), k >= len(vocabulary.words))
            for k, (word, share) in enumerate(everything)
            if word.startswith(prefix)
        ]
        suggestions.sort(key=lambda suggestion: (-suggestion.probability, suggestion.word))
        likeliest = next((suggestion for suggestion in suggestions if suggestion.personal), None)
        if n >= RESERVED_FROM and likeliest in suggestions[n:] and likeliest.probability >= LEAST_OWN:
            return [*suggestions[: n - 1], likeliest]
        return suggestions[:n]
