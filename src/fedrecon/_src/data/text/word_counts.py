"""Word counts over runs: which words are used most, and the codes of all words of a run."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from fedrecon._src.data.text.runs import Run
from fedrecon._src.data.text.words import word_hash

COUNTS_PIECE = 1 << 10


def most_used(runs: Sequence[Run], most: int) -> list[str]:
    """List the words that are counted most often in all runs together; equal counts in alphabetical order."""
    everything = heapq.merge(*map(_counted, runs), key=itemgetter(0))
    totals = ((-sum(count for _, count in group), word) for word, group in groupby(everything, itemgetter(0)))
    return [word for _, word in heapq.nsmallest(most, (entry for entry in totals if entry[0]))]


def _counted(run: Run) -> Iterator[tuple[str, int]]:
    """Yield the words of a run in alphabetical order with their counts, a few in memory at a time."""
    starts = range(0, run.num_words, COUNTS_PIECE)
    counts = (count for start in starts for count in run.array("counts")[start : start + COUNTS_PIECE].tolist())
    return zip(run.words(), counts, strict=True)


def number_words(runs: Sequence[Run], words: Sequence[str]) -> np.ndarray:
    """Give every run the codes of its words: the rank among `words`, from 1, or -1 - hash.

    Returns:
      How often each of `words` is counted in all runs together.
    """
    rank = {word: k for k, word in enumerate(words, 1)}
    totals = np.zeros(len(words) + 1, np.int64)
    for run in runs:
        counts = run.array("counts")
        codes = (rank.get(word) or -1 - word_hash(word) for word in run.words())
        coded = np.fromiter(codes, np.int32, len(counts))
        totals[np.maximum(coded, 0)] += counts
        run.keep("codes", coded)
    return totals[1:]
