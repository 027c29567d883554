"""The client's part of a round as a graph for devices: what is drawn before it runs, and what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedrecon._src.core.cohort import Lengths, Needs, row_capacity


def describe_split(needs: Needs, most: int, lengths: Lengths) -> dict[str, Any]:
    """Return a split as a device plan says it: how many examples go where, for every number of examples up to `most`.

    Args:
      needs: of the algorithm.
      most: how many examples of a person a device uses.
      lengths: room for support and query examples.
    """
    split, sizes = needs.split, np.arange(most + 1)
    counts, begins = (
        {side: values.tolist() for side, values in zip(("support", "query"), pair, strict=True)}
        for pair in (split.counts(sizes), split.begins(sizes))
    )
    pattern = None if split.pattern is None else split.pattern(np.arange(max(lengths))).tolist()
    return {"counts": counts, "begins": begins, "pattern": pattern, "by": split.by, "redrawn": split.redrawn}


def describe_rows(needs: Needs, like: Mapping[str, np.ndarray], lengths: Lengths) -> dict[str, Any]:
    """Return the groups of lookup tables as a device plan says them.

    Args:
      needs: of the algorithm.
      like: made-up examples, one array per feature.
      lengths: room for support and query examples.
    """
    examples = lengths.query + (lengths.support if needs.support_rows else 0)
    return {
        group: {
            "features": list(features),
            "table": rows,
            "capacity": row_capacity(examples * sum(like[feature][:1].size for feature in features), rows),
            "support": needs.support_rows,
        }
        for group, (rows, features) in needs.groups.items()
    }
