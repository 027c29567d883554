"""Recommendations that people can trust: which items, in which order, with scores within the scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def rank(
    scores: np.ndarray,
    n: int,
    *,
    left_out: Iterable[int] = (),
    counts: np.ndarray | None = None,
    least: int = 0,
) -> np.ndarray:
    """Return the `n` items with the highest scores, best first; among equal ones the lower number comes first.

    Args:
      scores: one for each item.
      n: how many; fewer come back if fewer are left.
      left_out: items that are not wanted, such as those rated already.
      counts: how many ratings each item was learned from; None if that is not known.
      least: items with fewer ratings are left out.
    """
    # The order of `fr.recommend.top_items`, written again because this distribution imports neither fedrecon nor JAX.
    allowed = np.isfinite(scores)
    allowed[np.fromiter(left_out, np.int64)] = False
    if counts is not None:
        allowed &= counts >= least
    items = np.flatnonzero(allowed)
    return items[np.argsort(-scores[items].astype(np.float64), kind="stable")[:n]]


def clipped(scores: np.ndarray, scale: Sequence[float] | None) -> np.ndarray:
    """Return scores within the scale of the ratings; unchanged where no scale is known."""
    return scores if scale is None else np.clip(scores, scale[0], scale[1])


def nearest(table: np.ndarray, item: int, among: Sequence[int], n: int = 2) -> list[int]:
    """Return the items whose embeddings are closest in direction to that of `item`, closest first.

    Args:
      table: embeddings, one row per item.
      item: the item to compare with.
      among: the items to choose from.
      n: how many at most; only items with a positive cosine come back.
    """
    if not len(among):
        return []
    rows, row = table[np.asarray(among)].astype(np.float64), table[item].astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(row)
    cosines = np.divide(rows @ row, lengths, out=np.zeros(len(rows)), where=lengths > 0)
    order = np.argsort(-cosines, kind="stable")[:n]
    return [int(among[k]) for k in order if cosines[k] > 0]
