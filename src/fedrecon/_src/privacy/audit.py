"""Audit: what an attacker finds out about canaries, against what was promised.

A canary is a client whose upload is a random direction at the clipping norm (`Canaries`). A coin decides whether it
takes part. The attacker looks for each canary's direction in everything that was released; if those inside can be told
from those outside better than epsilon allows, the promise is broken. If the attacker fails, that proves nothing: the
result is a lower bound. Canaries take part among real clients and are clipped and noised like them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedrecon._src.privacy.accounting import check_delta
from fedrecon._src.privacy.extra import require


class Audit(NamedTuple):
    """What an audit found.

    Attributes:
      claimed: the epsilon that was promised.
      measured: with the confidence given, epsilon is above this. Assumes that the noise is Gaussian in shape, or a sum
        of many rounds, and that scores are independent.
      any_noise: the same without that assumption, for all canaries in one run; much weaker.
      confidence: of each of the two bounds.
      delta: of the guarantee.
      inside: how many canaries took part.
      outside: how many did not.
      auc: how well scores tell them apart: .5 not at all, 1 always.
    """

    claimed: float
    measured: float
    any_noise: float
    confidence: float
    delta: float
    inside: int
    outside: int
    auc: float

    @property
    def broken(self) -> bool:
        """Whether the promise is refuted."""
        return max(self.measured, self.any_noise) > self.claimed

    def summary(self) -> str:
        """Say in a sentence what was found."""
        measured = max(self.measured, self.any_noise)
        verdict = "the promise is broken" if self.broken else "nothing speaks against the promise"
        return (
            f"claimed epsilon {self.claimed:.3g}, measured at least {measured:.3g} ({self.confidence:.0%} confidence, "
            f"delta {self.delta:.2g}, {self.inside} canaries inside and {self.outside} outside): {verdict}"
        )


def audit(inside: np.ndarray, outside: np.ndarray, *, claimed: float, delta: float, confidence: float = 0.95) -> Audit:
    """Turn scores of canaries into a lower bound on epsilon.

    Args:
      inside: scores of canaries that took part; higher means more likely inside.
      outside: scores of those that did not.
      claimed: the epsilon that was promised.
      delta: of the guarantee.
      confidence: with which the true epsilon is above the bound.

    References: Nasr et al., Tight auditing of differentially private machine learning, 2023 (`measured`).
    Steinke, Nasr and Jagielski, Privacy auditing with one (1) training run, 2023 (`any_noise`).
    """
    check_delta(delta)
    if not 0.5 < confidence < 1:
        raise ValueError(f"`confidence` is {confidence}; it must be above 0.5 and below 1")
    if not claimed > 0:
        raise ValueError(f"`claimed` is {claimed}; it must be an epsilon above 0")
    inside, outside = _checked("inside", inside), _checked("outside", outside)
    auditor = require("jax_privacy.auditing").CanaryScoreAuditor(inside, outside)
    return Audit(
        claimed,
        epsilon_of_shift(least_shift(inside, outside, confidence), delta),
        float(auditor.epsilon_one_run(1 - confidence, delta)),
        confidence,
        delta,
        len(inside),
        len(outside),
        float(auditor.attack_auroc()),
    )


def least_shift(inside: np.ndarray, outside: np.ndarray, confidence: float) -> float:
    """Return the least distance, in standard deviations, between two normal distributions that such scores allow.

    Every other score chooses the threshold; the rest are counted at it, with upper bounds on both kinds of error
    (Clopper and Pearson). `CanaryScoreAuditor.epsilon_from_gdp` of jax-privacy 2.0 goes over all thresholds and takes
    the absolute value of negative distances. Those come from loose upper bounds where nearly all scores are on one side
    of the threshold, and it then reports an epsilon for scores of pure noise. Hence this function.

    Args:
      inside: scores of canaries that took part.
      outside: scores of those that did not.
      confidence: with which the true distance is no less.
    """
    doubt = (1 - confidence) / 2
    thresholds = np.unique(np.concatenate([inside[::2], outside[::2]]))
    best = thresholds[np.argmax(_shift_at(thresholds, inside[::2], outside[::2], doubt))]
    return max(float(_shift_at(best, inside[1::2], outside[1::2], doubt)), 0.0)


def _shift_at(threshold: np.ndarray, inside: np.ndarray, outside: np.ndarray, doubt: float) -> np.ndarray:
    missed = np.searchsorted(np.sort(inside), threshold, side="left")  # inside, and taken for outside
    false = len(outside) - np.searchsorted(np.sort(outside), threshold, side="left")
    return stats.norm.isf(_upper(false, len(outside), doubt)) - stats.norm.ppf(_upper(missed, len(inside), doubt))


def epsilon_of_shift(shift: float, delta: float) -> float:
    """Return epsilon of a Gaussian mechanism whose two outcomes are `shift` standard deviations apart.

    Args:
      shift: the distance.
      delta: of the guarantee.
    """
    return float(require("dp_accounting").get_epsilon_gaussian(1 / shift, delta)) if shift > 0 else 0.0


def _upper(count: np.ndarray, of: int, doubt: float) -> np.ndarray:
    return np.where(count < of, stats.beta.ppf(1 - doubt, count + 1, np.maximum(of - count, 1)), 1.0)


def _checked(name: str, scores: np.ndarray) -> np.ndarray:
    array = np.asarray(scores, np.float64)
    if array.ndim != 1 or len(array) < 10:
        raise ValueError(f"`{name}` has the shape {array.shape}; an audit needs one dimension with ten or more scores")
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` has scores that are not finite; without finite models there is nothing to audit")
    return array


class Canaries:
    """Clients whose uploads are random directions, each at a right angle to all others.

    Each canary has some entries of its own, chosen at random, with random signs. So one canary is never mistaken for
    another, and uploads and scores cost no more than one pass over the entries.

    Attributes:
      inside: `(count,)` which of them take part: a coin for each.
    """

    def __init__(self, count: int, length: int, seed: int) -> None:
        """Draw canaries.

        Args:
          count: how many; half of them take part, on average.
          length: how many entries an upload has.
          seed: of the audit.
        """
        if not 20 <= count <= length:
            raise ValueError(f"{count} canaries for uploads of {length} entries; expected from 20 to one per entry")
        rng = np.random.default_rng(seed)
        entries = length // count  # of each canary
        self._length = length
        self._entries = rng.permutation(length)[: count * entries].reshape(count, entries)
        self._signs = rng.choice([-1.0, 1.0], (count, entries))
        self.inside = rng.random(count) < 0.5

    def upload(self, number: int, norm: float) -> np.ndarray:
        """Return what a canary uploads.

        Args:
          number: which canary.
          norm: the clipping norm.
        """
        upload = np.zeros(self._length)
        upload[self._entries[number]] = self._signs[number] * (norm / math.sqrt(self._signs.shape[1]))
        return upload

    def scores(self, released: np.ndarray) -> np.ndarray:
        """Return how far the sum of everything released goes in the direction of each canary.

        Args:
          released: `(length,)` the sum, over rounds, of what was released.
        """
        return (released[self._entries] * self._signs).sum(1) / math.sqrt(self._signs.shape[1])
