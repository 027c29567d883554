"""Growing tables: rows are numbered in the order of first use, so early steps touch only the first rows of a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedrecon._src.core.pytrees import Params

PHASES = 4


class Phase(NamedTuple):
    """Consecutive steps that touch only the first rows of growing tables.

    Attributes:
      stop: the step before which the phase ends; None for the last phase.
      rows: for each growing table, how many rows can have been touched by the end of the phase; empty if none grows.
    """

    stop: int | None
    rows: dict[str, int]


def phases(params: Params, grows: Mapping[str, int], batch_size: int) -> list[Phase]:
    """Divide the steps into phases, each with twice the rows of the one before.

    Args:
      params: what is solved for, clients first.
      grows: those of `params` that grow, and how many ids an example has.
      batch_size: examples per step.
    """
    if not grows:
        return [Phase(None, {})]
    capacity = {path: params[path].shape[1] for path in grows}  # of (clients, rows, ...)
    earlier = []
    for halvings in reversed(range(1, PHASES)):
        rows = {path: capacity[path] >> halvings for path in grows}
        stop = min(rows[path] // (ids * batch_size) for path, ids in grows.items())
        if stop > 0:
            earlier.append(Phase(stop, rows))
    return [*earlier, Phase(None, capacity)]


def cut(carry: Any, rows: Mapping[str, int], labels: Sequence[Any]) -> Any:
    """Keep the first rows of growing tables, and of the optimizer's state for them.

    Args:
      carry: with `params` and `state`, clients first.
      rows: how many rows of each table; empty to keep all.
      labels: for each leaf of the state, the table that it belongs to.
    """
    if not rows:
        return carry
    params = {path: leaf[:, : rows[path]] if path in rows else leaf for path, leaf in carry.params.items()}
    leaves, structure = jax.tree.flatten(carry.state)
    state = [leaf[:, : rows[at]] if at in rows else leaf for leaf, at in zip(leaves, labels, strict=True)]
    return carry._replace(params=params, state=jax.tree.unflatten(structure, state))


def put_back(carry: Any, part: Any, rows: Mapping[str, int], labels: Sequence[Any]) -> Any:
    """Undo `cut`: put the changed first rows back into the whole tables.

    Args:
      carry: as it was given to `cut`.
      part: what `cut` returned, changed.
      rows: as given to `cut`.
      labels: as given to `cut`.
    """
    if not rows:
        return part
    params = {
        path: carry.params[path].at[:, : rows[path]].set(new) if path in rows else new
        for path, new in part.params.items()
    }
    leaves, structure = jax.tree.flatten(carry.state)
    pairs = zip(leaves, jax.tree.leaves(part.state), labels, strict=True)
    state = [old.at[:, : rows[at]].set(new) if at in rows else new for old, new, at in pairs]
    return part._replace(params=params, state=jax.tree.unflatten(structure, state))
