"""Sentences: clients whose examples are sentences, as the columns that a model of the next word reads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.core.clients import Clients
from fedrecon._src.data.vocabulary import MAX_WORDS, PAD, PAIR_FACTOR, PAIR_ROWS, Vocabulary, split_text


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
    ids = np.zeros((len(sentences), max_words + 1), np.int32)
    for row, sentence in zip(ids, sentences, strict=True):
        row[:] = vocabulary.encode(sentence, max_words)
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
