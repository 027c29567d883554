"""A node's numbers as integers for a secure sum, and the sum as numbers again."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.deploy.messages import Failure
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.privacy import ring

T = TypeVar("T")
BITS = 64


WIDE, UNIT = 2.0**60, 2.0**16  # the largest number of a wide sum, and the unit of its first half


def grid_of(plan: Plan, limit: float | None = None) -> ring.Grid:
    """Return what integers stand for in the secure sums of a plan."""
    return ring.grid(plan.limit if limit is None else limit, plan.most_nodes, bits=BITS)


def bits_of(like: Any) -> int:
    """Return how wide the integers of a secure sum are: a tree of integers of a ring stays in that ring."""
    return 32 if _in_ring(like) else BITS


def _in_ring(tree: Any) -> bool:
    """Say whether a tree is of integers already, as `aggregators.secure` makes them."""
    return all(leaf.dtype == np.uint32 for leaf in flatten(tree)[0].values())


def length_of(like: Any, wide: bool = False) -> int:
    """Return how many integers a tree of arrays becomes."""
    return (2 if wide else 1) * sum(int(np.prod(leaf.shape)) for leaf in flatten(like)[0].values())


def to_integers(plan: Plan, tree: Any, wide: bool = False) -> np.ndarray:
    """Write a tree of arrays as integers, leaf after leaf.

    Args:
      plan: whose secure sums these are for.
      tree: the arrays.
      wide: write every number as two integers, whole multiples of `UNIT` and the rest: for sums of very different size.

    Raises:
      Failure: a number is not finite, or is beyond the limit, where it would change silently.
    """
    leaves, limit = flatten(tree)[0], WIDE if wide else plan.limit
    if _in_ring(tree):
        return np.concatenate([np.asarray(leaves[path]).reshape(-1) for path in sorted(leaves)]).astype("<u4")
    values = np.concatenate([np.asarray(leaves[path], np.float64).reshape(-1) for path in sorted(leaves)])
    if not np.isfinite(values).all() or np.abs(values).max(initial=0) > limit:
        raise Failure("beyond_limit", f"a sum of this node has a number beyond the plan's limit of {limit:g}")
    if not wide:
        return ring.quantise(grid_of(plan), values).astype("<u8")
    high = np.rint(values / UNIT)
    halves = (ring.quantise(grid, half) for grid, half in zip(_wide(plan), (high, values - UNIT * high), strict=True))
    return np.concatenate([half.astype("<u8") for half in halves])


def from_integers(plan: Plan, total: np.ndarray, like: T, wide: bool = False) -> T:
    """Read a sum of integers as a tree of arrays."""
    if _in_ring(like):
        values = total
    elif wide:
        high, low = (
            np.asarray(ring.restore(grid, half), np.float64)
            for grid, half in zip(_wide(plan), np.split(total, 2), strict=True)
        )
        values = UNIT * high + low
    else:
        values = np.asarray(ring.restore(grid_of(plan), total), np.float64)
    leaves, structure = flatten(like)
    found: dict[str, Any] = {}
    begin = 0
    for path in sorted(leaves):
        shape, dtype = leaves[path].shape, leaves[path].dtype
        end = begin + int(np.prod(shape))
        found[path] = values[begin:end].reshape(shape).astype(dtype)
        begin = end
    return unflatten(structure, found)


def _wide(plan: Plan) -> tuple[ring.Grid, ring.Grid]:
    return grid_of(plan, WIDE / UNIT), grid_of(plan, UNIT)
