"""Numbers from results: means and spreads over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from studies.study import Result


class Spread(NamedTuple):
    """A mean over seeds, the standard deviation over them, and how many seeds there are."""

    mean: float
    deviation: float
    seeds: int


class Measured(NamedTuple):
    """RMSE and accuracy (in percent) over all examples together, after `rounds` rounds (1 for centralized training)."""

    rmse: Spread
    accuracy: Spread
    rounds: int
    users: int
    diverged: float


def spread(values: Sequence[float]) -> Spread:
    """Average over seeds; the deviation is that of a sample, and 0 for a single seed."""
    array = np.array(values, float)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else 0.0, len(array))


def measured(results: Sequence[Result], measure: str = "recon", rounds: int | None = None) -> Measured:
    """Sum up what the seeds of a job found after `rounds`, by default as many as its setting reports."""
    rounds = rounds or int(results[0]["setting"]["rounds"])
    return _sum_up([at(result, rounds)[measure] for result in results], rounds)


def with_few(results: Sequence[Result], support: int) -> Measured:
    """Sum up what was found with only `support` support examples."""
    return _sum_up([result["few"][str(support)] for result in results], int(results[0]["setting"]["rounds"]))


def _sum_up(found: Sequence[Any], rounds: int) -> Measured:
    return Measured(
        spread([number(one["micro"]["rmse"]) for one in found]),
        spread([100 * number(one["micro"]["accuracy"]) for one in found]),
        rounds,
        int(found[0]["clients"]),
        spread([one["diverged"] for one in found]).mean,
    )


def at(result: Result, rounds: int) -> Any:
    """Return a result's evaluation after `rounds` rounds."""
    return next(entry for entry in result["evaluations"] if entry["round"] == rounds)


def number(value: float | None) -> float:
    """Return a number as JSON holds it: null is NaN."""
    return float("nan") if value is None else value
