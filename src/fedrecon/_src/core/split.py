"""S: which of a client's examples are support and which are query."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedrecon._src.core.checks import check_number, check_numbers
from fedrecon._src.core.factories import register_factory

Sizes = np.ndarray  # (clients,) how many examples each has
Pair = tuple[np.ndarray, np.ndarray]  # for support and for query


class Split(NamedTuple):
    """How clients divide their examples: the j-th support example of a client is at `begin + pattern(j)`.

    Attributes:
      counts: `sizes -> (support counts, query counts)`.
      begins: `sizes -> (where support begins, where query begins)`.
      pattern: `j -> position` from there; None for one after another.
      by: the column to sort examples by before splitting, such as a time; None for stored order.
      redrawn: whether a client's examples are shuffled anew each time it takes part.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> support, query = fr.split.half().counts(np.array([4, 5]))
      >>> support.tolist(), query.tolist()
      ([2, 3], [2, 2])
    """

    counts: Callable[[Sizes], Pair]
    begins: Callable[[Sizes], Pair]
    pattern: Callable[[np.ndarray], np.ndarray] | None = None
    by: str | None = None
    redrawn: bool = False


@register_factory
def fraction(support: float, *, by: str | None = None, min_support: int = 1, min_query: int = 1) -> Split:
    """Give the first `support` share of a client's examples to support, the rest to query.

    The share is rounded to the nearest whole example (a half goes to support), then changed as little as needed to
    leave `min_query` to query and, after that, `min_support` to support. If a client has fewer examples than both
    minima together, all of them are support: it can be served, but it neither trains nor is measured.

    Args:
      support: between 0 and 1.
      by: the column to sort by first; None keeps the stored order.
      min_support: the least number of support examples.
      min_query: the least number of query examples.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> support, query = fr.split.fraction(0.8).counts(np.array([10, 3, 1]))
      >>> support.tolist(), query.tolist()
      ([8, 2, 1], [2, 1, 0])
    """
    check_number("support", support, most=1)
    check_numbers({"min_support": min_support, "min_query": min_query})

    def counts(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        share = np.floor(sizes * support + 0.5 + 1e-9).astype(np.int64)
        share = np.maximum(np.minimum(share, sizes - min_query), min_support)
        share = np.where(sizes < min_support + min_query, sizes, share)
        return share, sizes - share

    return Split(counts, lambda sizes: (np.zeros_like(sizes), counts(sizes)[0]), None, by)


@register_factory
def half(*, by: str | None = None, min_support: int = 1, min_query: int = 1) -> Split:
    """Give the first half of a client's examples to support, the second half to query (see `fraction`).

    Args:
      by: the column to sort by first, such as a time; None keeps the stored order.
      min_support: the least number of support examples.
      min_query: the least number of query examples.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> support, query = fr.split.half(by="time").counts(np.array([10, 3]))
      >>> support.tolist(), query.tolist()
      ([5, 2], [5, 1])
    """
    return fraction(0.5, by=by, min_support=min_support, min_query=min_query)


@register_factory
def at_most(support: int, split: Split) -> Split:
    """Limit another split to the first `support` support examples of a client; query stays the same.

    Args:
      support: the largest number of support examples; 0 leaves none.
      split: the split to limit.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> support, query = fr.split.at_most(2, fr.split.half()).counts(np.array([10]))
      >>> support.tolist(), query.tolist()
      ([2], [5])
    """
    check_number("support", support)

    def counts(sizes: Sizes) -> Pair:
        before, query = split.counts(sizes)
        return np.minimum(before, support), query

    return split._replace(counts=counts)


@register_factory
def redrawn(split: Split) -> Split:
    """Shuffle a client's examples before another split; in training, anew in every round that the client takes part in.

    An example is then support in one round and query in another, and the global parameters cannot adapt to a single
    division. The order depends on the run's seed, the round and the client. Outside training it is drawn once.

    Args:
      split: how to divide the shuffled examples; it must not sort them itself.

    Example:
      >>> import fedrecon as fr
      >>> fr.split.redrawn(fr.split.half()).redrawn
      True
    """
    if split.by is not None:
        raise ValueError(f"`split` sorts examples by {split.by!r}, and cannot shuffle them; use one without `by`")
    return split._replace(redrawn=True)


@register_factory
def alternate(chunk: int = 1, *, by: str | None = None) -> Split:
    """Alternate between support and query: the first `chunk` examples are support, the next `chunk` query, and so on.

    Args:
      chunk: how many examples in a row go to the same side.
      by: the column to sort by first; None keeps the stored order.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> fr.split.alternate(2).pattern(np.arange(4)).tolist()
      [0, 1, 4, 5]
    """
    check_number("chunk", chunk, least=1)

    def counts(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        whole, rest = np.divmod(sizes, 2 * chunk)
        support = whole * chunk + np.minimum(rest, chunk)
        return support, sizes - support

    def pattern(j: np.ndarray) -> np.ndarray:
        return (j // chunk) * 2 * chunk + j % chunk

    return Split(counts, lambda sizes: (np.zeros_like(sizes), np.full_like(sizes, chunk)), pattern, by)


@register_factory
def none(*, by: str | None = None) -> Split:
    """Use all of a client's examples both as support and as query.

    Args:
      by: the column to sort by first; None keeps the stored order.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> support, query = fr.split.none().counts(np.array([4]))
      >>> support.tolist(), query.tolist()
      ([4], [4])
    """
    return Split(lambda sizes: (sizes, sizes), _both_from_start, None, by)


@register_factory
def query_only() -> Split:
    """Use every example as query: for algorithms that reconstruct nothing.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> support, query = fr.split.query_only().counts(np.array([4]))
      >>> support.tolist(), query.tolist()
      ([0], [4])
    """
    return Split(lambda sizes: (np.zeros_like(sizes), sizes), _both_from_start)


@register_factory
def support_only() -> Split:
    """Use every example as support: to serve a client rather than measure on it.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> support, query = fr.split.support_only().counts(np.array([4]))
      >>> support.tolist(), query.tolist()
      ([4], [0])
    """
    return Split(lambda sizes: (sizes, np.zeros_like(sizes)), _both_from_start)


def _both_from_start(sizes: Sizes) -> Pair:
    return np.zeros_like(sizes), np.zeros_like(sizes)


REDRAWN = "redrawn-"
NAMED: dict[str, Callable[[], Split]] = {"half": half, "alternate": alternate, "none": none}


def named(name: str) -> Split:
    """Return a split by name.

    Args:
      name: `half`, `alternate`, `none`, or a number such as `0.8` for `fraction`. The prefix `redrawn-` stands for
        `redrawn`.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> support, query = fr.split.named("0.8").counts(np.array([10]))
      >>> support.tolist(), query.tolist()
      ([8], [2])
    """
    if name.startswith(REDRAWN):
        return redrawn(named(name.removeprefix(REDRAWN)))
    if name in NAMED:
        return NAMED[name]()
    try:
        return fraction(float(name))
    except ValueError:
        raise ValueError(f"unknown split {name!r}; use {', '.join(NAMED)}, or a fraction such as 0.8") from None
