"""A node's numbers as integers for a secure sum, and the sum as numbers again."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from fedrecon.deploy.messages import Failure
from fedrecon.deploy.plan import Plan
from fedrecon.privacy import ring
from fedrecon.trees import flatten, unflatten

T = TypeVar("T")
BITS = 64


def grid_of(plan: Plan) -> ring.Grid:
    """Return what integers stand for in the secure sums of a plan."""
    return ring.grid(plan.limit, plan.most_nodes, bits=BITS)


def length_of(like: Any) -> int:
    """Return how many integers a tree of arrays becomes."""
    return sum(int(np.prod(leaf.shape)) for leaf in flatten(like)[0].values())


def to_integers(plan: Plan, tree: Any) -> np.ndarray:
    """Write a tree of arrays as integers, leaf after leaf.

    Raises:
      Failure: a number is not finite, or beyond the plan's limit: it would be changed without notice.
    """
    leaves = flatten(tree)[0]
    values = np.concatenate([np.asarray(leaves[path], np.float64).reshape(-1) for path in sorted(leaves)])
    if not np.isfinite(values).all() or np.abs(values).max(initial=0) > plan.limit:
        raise Failure("beyond_limit", f"a sum of this node has a number beyond the plan's limit of {plan.limit:g}")
    return ring.quantise(grid_of(plan), values).astype("<u8")


def from_integers(plan: Plan, total: np.ndarray, like: T) -> T:
    """Read a sum of integers as a tree of arrays."""
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
