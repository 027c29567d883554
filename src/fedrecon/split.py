"""S: which of a client's examples are support and which are query."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedrecon.recipes import recorded

Sizes = np.ndarray  # (clients,) how many examples each has
Pair = tuple[np.ndarray, np.ndarray]  # for support and for query


class Split(NamedTuple):
    """How clients divide their examples: the j-th support example of a client is at `begin + pattern(j)`.

    Attributes:
      counts: `sizes -> (support counts, query counts)`.
      begins: `sizes -> (where support begins, where query begins)`.
      pattern: `j -> position` from there; None for one after another.
      by: a column to put the examples in order by before splitting (a time, say), or None for stored order.
      redrawn: whether a client's examples are put in a new random order each time that it takes part.
    """

    counts: Callable[[Sizes], Pair]
    begins: Callable[[Sizes], Pair]
    pattern: Callable[[np.ndarray], np.ndarray] | None = None
    by: str | None = None
    redrawn: bool = False


@recorded
def fraction(support: float, *, by: str | None = None, min_support: int = 1, min_query: int = 1) -> Split:
    """Give the first `support` share of a client's examples to support, the rest to query.

    The share is rounded to the nearest whole example (a half goes to support), then moved as little as needed to
    leave `min_query` to query and, after that, `min_support` to support. A client with fewer than the two minima
    together gives all it has to support: it can be served, but it neither trains nor is measured.

    Args:
      support: between 0 and 1.
      by: the column to order by first; None keeps the stored order.
      min_support: the least number of support examples.
      min_query: the least number of query examples.
    """
    if not 0 <= support <= 1:
        raise ValueError(f"`support` is {support}; a fraction lies between 0 and 1")
    if min_support < 0 or min_query < 0:
        raise ValueError(f"minimum sizes cannot be negative: min_support={min_support}, min_query={min_query}")

    def counts(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        share = np.floor(sizes * support + 0.5 + 1e-9).astype(np.int64)
        share = np.maximum(np.minimum(share, sizes - min_query), min_support)
        share = np.where(sizes < min_support + min_query, sizes, share)
        return share, sizes - share

    return Split(counts, lambda sizes: (np.zeros_like(sizes), counts(sizes)[0]), None, by)


@recorded
def half(*, by: str | None = None, min_support: int = 1, min_query: int = 1) -> Split:
    """Give the first half of a client's examples to support, the second half to query (see `fraction`).

    Args:
      by: the column to order by first, such as a time; None keeps the stored order.
      min_support: the least number of support examples.
      min_query: the least number of query examples.
    """
    return fraction(0.5, by=by, min_support=min_support, min_query=min_query)


@recorded
def at_most(support: int, split: Split) -> Split:
    """Split alike, but leave a client only the first `support` of its support examples; the query stays the same.

    Args:
      support: how many support examples are left at most; 0 leaves none.
      split: the split that is alike.
    """
    if support < 0:
        raise ValueError(f"`support` is {support}; it cannot be negative")

    def counts(sizes: Sizes) -> Pair:
        before, query = split.counts(sizes)
        return np.minimum(before, support), query

    return split._replace(counts=counts)


@recorded
def redrawn(split: Split) -> Split:
    """Split alike, but in training put a client's examples in a new random order in every round it takes part in.

    So an example is support in one round and query in another, and the global parameters cannot come to rely on one
    division. The order depends on the run's seed, the round and the client; anywhere else it is drawn once.

    Args:
      split: how the examples are divided once they are in order; it must not order them itself.
    """
    if split.by is not None:
        raise ValueError(f"the split orders examples by {split.by!r}; it cannot draw their order too")
    return split._replace(redrawn=True)


@recorded
def alternate(chunk: int = 1, *, by: str | None = None) -> Split:
    """Deal chunks of examples in turn: the first `chunk` to support, the next `chunk` to query, and so on.

    Args:
      chunk: how many examples are dealt at a time.
      by: the column to order by first; None keeps the stored order.
    """
    if chunk < 1:
        raise ValueError(f"`chunk` is {chunk}; it must be at least 1")

    def counts(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        whole, rest = np.divmod(sizes, 2 * chunk)
        support = whole * chunk + np.minimum(rest, chunk)
        return support, sizes - support

    def pattern(j: np.ndarray) -> np.ndarray:
        return (j // chunk) * 2 * chunk + j % chunk

    return Split(counts, lambda sizes: (np.zeros_like(sizes), np.full_like(sizes, chunk)), pattern, by)


@recorded
def none(*, by: str | None = None) -> Split:
    """Let support and query both be all of a client's examples.

    Args:
      by: the column to order by first; None keeps the stored order.
    """
    return Split(lambda sizes: (sizes, sizes), _both_from_start, None, by)


@recorded
def query_only() -> Split:
    """Give every example to query: for algorithms that reconstruct nothing."""
    return Split(lambda sizes: (np.zeros_like(sizes), sizes), _both_from_start)


@recorded
def support_only() -> Split:
    """Give every example to support: for serving a client rather than measuring on it."""
    return Split(lambda sizes: (sizes, np.zeros_like(sizes)), _both_from_start)


def _both_from_start(sizes: Sizes) -> Pair:
    return np.zeros_like(sizes), np.zeros_like(sizes)


REDRAWN = "redrawn-"
NAMED: dict[str, Callable[[], Split]] = {"half": half, "alternate": alternate, "none": none}


def named(name: str) -> Split:
    """Return the split of a name.

    Args:
      name: `half`, `alternate`, `none`, or a number such as `0.8` for `fraction`. With `redrawn-` before it, the one
        that draws the order of examples anew in every round.
    """
    if name.startswith(REDRAWN):
        return redrawn(named(name.removeprefix(REDRAWN)))
    if name in NAMED:
        return NAMED[name]()
    try:
        return fraction(float(name))
    except ValueError:
        known = ", ".join(NAMED)
        raise ValueError(f"unknown split {name!r}; use {known}, or a fraction such as 0.8") from None
