"""What a model of next words must beat: the word used most, and the word that most often follows the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedrecon._src.core.clients import rows_of
from fedrecon._src.core.cohort import Needs, Packer
from fedrecon._src.core.split import Split
from fedrecon._src.data import Sentences

MOST_SENTENCES = 2**18  # of the training clients that words are counted in: more hardly change what is counted
ENTRIES = 2**22  # words of sentences that are looked at together
COLUMNS = ("word", "oov", "target")
MOST_USED, FOLLOWING = "most used word", "most frequent next word"


class Words(NamedTuple):
    """Pairs of neighbouring words, of targets that are words of the vocabulary.

    Attributes:
      before: `(pairs,)` ids of inputs; one id stands for all words outside the vocabulary.
      target: `(pairs,)` ids from 1 to V.
    """

    before: np.ndarray
    target: np.ndarray


def measure(train: Sentences, measured: Sentences, split: Split) -> dict[str, dict[str, float]]:
    """Count words of training clients, and return how often they tell the next word of other clients' query sentences.

    Args:
      train: who words are counted of.
      measured: who they are measured on.
      split: how sentences become support and query.

    Returns:
      The accuracy of each baseline, over targets that are words of the vocabulary; nothing if there are none.
    """
    rows = rows_of(train.starts, train.ends)[:MOST_SENTENCES]
    seen = _pairs({name: train.columns[name][rows] for name in COLUMNS}, train.vocab_size)
    query = _query(measured, split)
    if not len(seen.target) or not len(query.target):
        return {}
    most_used = int(np.bincount(seen.target).argmax())
    following = _most_frequent(seen, train.vocab_size)[query.before]
    guesses = {MOST_USED: most_used, FOLLOWING: np.where(following > 0, following, most_used)}
    return {name: {"accuracy": float(np.mean(guess == query.target))} for name, guess in guesses.items()}


def _pairs(columns: Mapping[str, np.ndarray], vocabulary: int) -> Words:
    target = columns["target"]
    there = (target > 0) & (target <= vocabulary)
    before = np.where(columns["oov"] > 0, vocabulary + 3, columns["word"])  # ids up to V + 2: words, beginning and end
    return Words(before[there], target[there])


def _query(clients: Sentences, split: Split) -> Words:
    """Return the pairs of clients' query sentences, as evaluation divides them."""
    packer = Packer(clients, Needs(split, columns=COLUMNS))
    many = max(1, ENTRIES // (sum(packer.lengths) * clients.max_words))
    found = [Words(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for begin in range(0, len(clients), many):
        query = packer.pack(np.arange(begin, min(begin + many, len(clients)))).query
        there = np.arange(query.columns["word"].shape[1]) < query.count[:, None]
        found.append(_pairs({name: query.columns[name][there] for name in COLUMNS}, clients.vocab_size))
    return Words(*map(np.concatenate, zip(*found, strict=True)))


def _most_frequent(seen: Words, vocabulary: int) -> np.ndarray:
    """Return for each id which word follows it most often; 0 if nothing ever did. Of equals, the more used one."""
    pairs, count = np.unique(seen.before.astype(np.int64) * (vocabulary + 1) + seen.target, return_counts=True)
    before, target = np.divmod(pairs, vocabulary + 1)
    order = np.lexsort((-target, count, before))  # ids are in order of use
    found = np.zeros(vocabulary + 4, np.int64)
    found[before[order]] = target[order]  # the last of each is the most frequent
    return found
