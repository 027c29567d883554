"""A person's own next words: an output bias, n-grams and words of their own, which grow with every sentence."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedrecon._src.data import Vocabulary
from fedrecon._src.models.text.next_word import PRIOR

DISCOUNT = 0.7  # taken from every count, for what has not been seen
BIGRAM_WEIGHT, TRIGRAM_WEIGHT = 200.0, 5.0  # how many words the shorter context counts as
HALF_LIFE = 100.0  # words after which a word counts half in what the person wrote lately
LEAST_OWN = 0.01  # probability from which a word of the person's own has a place among the suggestions
RESERVED_FROM = 5  # suggestions; of fewer, none is reserved


class Suggestion(NamedTuple):
    """A word that may come next.

    Attributes:
      word: the word.
      probability: that it comes next. The end of the sentence and unknown words have their share too.
      personal: whether it is one of the person's own words, outside the vocabulary.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.Suggestion("soon", probability=0.25, personal=False).word
      'soon'
    """

    word: str
    probability: float
    personal: bool


class NextWords(NamedTuple):
    """Probabilities of what comes next.

    Attributes:
      shares: `(positions, ids)`: ids of the vocabulary up to the end of a sentence, then the person's own words.
      new: `(positions,)`: that a word comes next which neither the vocabulary has nor the person has used.
    """

    shares: np.ndarray
    new: np.ndarray


class PersonalWords:
    """What one person's text says about their next words, on top of a model of everybody's.

    - An output bias, as `models.next_word(local="output_bias")` has it: words that the person uses more often than the
      model expects become more probable.
    - A second one for what they write about now: words used lately more often than the person usually does.
    - Words of their own, outside the vocabulary, share the probability of all words outside it.
    - n-grams: how often a word followed the last word and the last two, with absolute discounting.

    All of it is counted, so that every sentence can be learned when it is written. The weights are fixed.

    Attributes:
      vocabulary: the model's.
      own: the person's own words, each with its place among them, in the order of first use.
      count: how often the person used each id, all words outside the vocabulary last.
      expected: how often the model expected it.
      recent: how often the person used it lately.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> person = fr.recommend.PersonalWords(fr.data.Vocabulary(("see", "you"), buckets=1))
      >>> model = np.full((1, 6), 1 / 6)  # probabilities of padding, see, you, beginning, end and the only bucket
      >>> for _ in range(2):
      ...     person.learn(["see", "zorro"], expected=3 * np.full(6, 1 / 6))
      >>> [word.word for word in person.suggest(model, ["see"], n=1, prefix="z")]
      ['zorro']
    """

    def __init__(self, vocabulary: Vocabulary, *, biased: bool = True):
        """Know nothing about the person yet; without the output bias if not `biased`."""
        self.vocabulary, self._biased = vocabulary, biased
        self.own: dict[str, int] = {}
        self.count, self.expected, self.recent = np.zeros((3, vocabulary.first_oov + 1))
        self._uses: Counter[str] = Counter()  # of the person's own words, in the same order
        self._followers: dict[tuple[int, ...], Counter[int]] = {}

    def freeze(self) -> PersonalWords:
        """Return a copy that stays as it is when more is learned; without what was used lately, which would age."""
        other = copy.copy(self)
        other.own, other._uses = dict(self.own), self._uses.copy()
        other.count, other.expected, other.recent = self.count.copy(), self.expected.copy(), np.zeros_like(self.recent)
        other._followers = {context: Counter(followers) for context, followers in self._followers.items()}
        return other

    def id_of(self, word: str) -> int:
        """Return the id of a word; -1 if neither the vocabulary has it nor the person has used it."""
        number, first_oov = self.vocabulary.id_of(word), self.vocabulary.first_oov
        if number < first_oov:
            return number
        return first_oov + self.own[word] if word in self.own else -1

    def inputs(self, words: Sequence[str]) -> list[int]:
        """Return the ids after which something comes next: the beginning of a sentence, and each of its words."""
        return [self.vocabulary.bos, *map(self.id_of, words)]

    def learn(self, words: Sequence[str], expected: np.ndarray, *, ended: bool = True) -> None:
        """Learn a sentence.

        Args:
          words: as many of it as the model reads.
          expected: how often the model expected each id in it, all buckets together last; see `expected_counts`.
          ended: whether the end of the sentence belongs to it; not if it was too long.
        """
        first_oov = self.vocabulary.first_oov
        for word in words:
            if self.vocabulary.id_of(word) >= first_oov:
                self.own.setdefault(word, len(self.own))
                self._uses[word] += 1
        ids = [*self.inputs(words), *([self.vocabulary.eos] if ended else [])]
        used = np.bincount(np.minimum(ids[1:], first_oov).astype(int), minlength=first_oov + 1)
        self.count += used
        self.recent = self.recent * 0.5 ** (used.sum() / HALF_LIFE) + used
        for t, target in enumerate(ids[1:], 1):
            for context in (ids[t - 1 : t], ids[t - 2 : t] if t > 1 else [-1, ids[0]]):
                self._followers.setdefault(tuple(context), Counter())[target] += 1
        self.expected += expected

    def predict(self, probabilities: np.ndarray, inputs: Sequence[int]) -> NextWords:
        """Turn the model's probabilities into this person's.

        Args:
          probabilities: `(positions, outputs)` of the model, buckets last, after each of `inputs`.
          inputs: as `inputs` returns them.
        """
        first_oov = self.vocabulary.first_oov
        usual = self.count * (self.recent.sum() / max(self.count.sum(), 1))
        ratio = (self.recent + PRIOR) / (usual + PRIOR)  # above 1 for what the person writes about now
        if self._biased:
            ratio *= (self.count + PRIOR) / (self.expected + PRIOR)
        uses = np.fromiter(self._uses.values(), float)
        own_shares = (uses - DISCOUNT) / (uses.sum() + 1)
        shares = np.empty((len(probabilities), first_oov + len(uses)))
        np.multiply(probabilities[:, :first_oov], ratio[:-1], out=shares[:, :first_oov])
        outside = probabilities[:, first_oov:].sum(1) * ratio[-1]
        scale = 1 / (shares[:, :first_oov].sum(1) + outside)
        np.multiply(outside[:, None], own_shares, out=shares[:, first_oov:])
        added: list[tuple[int, list[int], np.ndarray]] = []  # position, ids and what n-grams add to their shares
        for t, last in enumerate(inputs):
            before = inputs[t - 1] if t else -1
            shorter = len(added)
            for context, weight in (((last,), BIGRAM_WEIGHT), ((before, last), TRIGRAM_WEIGHT)):
                if followers := self._followers.get(context):
                    seen = followers.total()
                    factor = (weight + DISCOUNT * len(followers)) / (seen + weight)
                    scale[t] *= factor
                    for _, _, more in added[shorter:]:
                        more *= factor
                    counts = np.fromiter(followers.values(), float, len(followers))
                    added.append((t, [*followers], (counts - DISCOUNT) / (seen + weight)))
        shares *= scale[:, None]  # once for all: most of the time goes into reading and writing these
        for t, ids, more in added:
            shares[t, ids] += more
        new = outside * (1 - own_shares.sum()) * scale
        return NextWords(shares, new)

    def suggest(self, probabilities: np.ndarray, words: Sequence[str], n: int, prefix: str = "") -> list[Suggestion]:
        """Suggest the `n` most probable next words.

        Of five or more suggestions, the last is kept for the most probable word of the person's own, if it has at
        least one percent.

        Args:
          probabilities: `(1, outputs)` of the model after the words.
          words: the beginning of the sentence.
          n: how many.
          prefix: the letters of the next word that are typed already.
        """
        context = [-1, *self.inputs(words)][-2:]
        repeated = np.repeat(probabilities, 2, 0)  # the second row has the context of both
        shares = self.predict(repeated, context).shares[1]
        first_own = self.vocabulary.first_oov
        words_by_id = {**dict(enumerate(self.vocabulary.words, 1)), **dict(enumerate(self.own, first_own))}
        ids = np.array([k for k, word in words_by_id.items() if word.startswith(prefix)], int)

        def rank(k: int) -> tuple[float, str]:
            """Order by probability; of equally probable words, the first in the alphabet comes first, as on devices."""
            return -shares[k], words_by_id[k]

        least = np.partition(shares[ids], -n)[-n] if len(ids) > n else 0.0  # only some of many words are sorted
        best = sorted(ids[shares[ids] >= least].tolist(), key=rank)[:n]
        likeliest = min(ids[ids >= first_own].tolist(), key=rank, default=None)
        if n >= RESERVED_FROM and likeliest not in (None, *best) and shares[likeliest] >= LEAST_OWN:
            best[-1] = likeliest
        return [Suggestion(words_by_id[k], float(shares[k]), k >= first_own) for k in best]


def expected_counts(probabilities: np.ndarray, first_oov: int) -> np.ndarray:
    """Return how often each id is expected over the positions of a sentence, all buckets together last.

    Args:
      probabilities: `(positions, outputs)` of the model, buckets last.
      first_oov: the id of the first bucket.
    """
    sums = probabilities.sum(0)
    return np.append(sums[:first_oov], sums[first_oov:].sum())
