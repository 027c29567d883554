"""Changes in other units while they are clipped, summed and noised: what matters more gets less of the noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.pytrees import by_pattern
from fedrecon._src.core.upload import DELTA, Parts, RowChanges, Summand, Total
from fedrecon._src.server.aggregator import Aggregator, Report

Scale = float | np.ndarray  # one for all entries, or one for each row of a table
Scales = Mapping[str, Scale]


def rescale(scales: Scales) -> Aggregator:
    """Multiply changes of the global parameters before they are clipped, and divide their sum afterwards.

    A change that is multiplied by 0 is not sent: it uses none of the clipping norm, and its sum is 0 without any
    noise. That is for parameters, or rows of a table, that the server leaves as they are.

    Args:
      scales: from patterns on the parameters' paths to what they are multiplied by: a number, or one for every row of
        a table. They must not depend on anything that is not public, such as counts without noise. What no pattern
        matches is left as it is.

    Example:
      >>> from fedrecon import aggregators
      >>> halved = aggregators.rescale({"item_embedding": 0.5})
      >>> aggregate = aggregators.chain(aggregators.finite(), halved, aggregators.clip(1.0), aggregators.by_weight())
    """
    for pattern, scale in scales.items():
        values = np.asarray(scale)
        if not (np.isfinite(values).all() and (values >= 0).all() and values.ndim <= 1):
            raise ValueError(f"the scale of {pattern!r} must be a number of at least 0, or one for each row")

    def of(parts: Parts) -> dict[str, Any]:
        return by_pattern(scales, "scales", dict.fromkeys(parts[DELTA], 0))

    def encode(message: Any, summand: Summand, keys: Array) -> Summand:
        factors = of(summand.parts)
        changes = {path: _multiplied(change, factors.get(path)) for path, change in summand.parts[DELTA].items()}
        return summand._replace(parts={**summand.parts, DELTA: changes})

    def decode(state: Any, total: Total, key: Array) -> tuple[Total, Any, Report]:
        factors = of(total.parts)
        changes = {path: _divided(values, factors.get(path)) for path, values in total.parts[DELTA].items()}
        return total._replace(parts={**total.parts, DELTA: changes}), state, {}

    return Aggregator(lambda parts: (), lambda state: (), encode, decode)


def _multiplied(change: Any, scale: Scale | None) -> Any:
    if scale is None:
        return change
    factor = jnp.asarray(scale, jnp.float32)
    if isinstance(change, RowChanges):
        of_rows = factor if factor.ndim == 0 else factor[change.ids]
        values = change.values * of_rows.reshape(*of_rows.shape, *[1] * (change.values.ndim - of_rows.ndim))
        return dataclasses.replace(change, values=values)
    return change * _of_rows(factor, change.ndim - 1)


def _divided(values: Array, scale: Scale | None) -> Array:
    if scale is None:
        return values
    factor = _of_rows(jnp.asarray(scale, jnp.float32), values.ndim)
    return jnp.where(factor > 0, values / jnp.where(factor > 0, factor, 1.0), 0.0)


def _of_rows(factor: Array, dimensions: int) -> Array:
    """Give one number, or one for each row, the dimensions of a table."""
    return factor if factor.ndim == 0 else factor.reshape(-1, *[1] * (dimensions - 1))
