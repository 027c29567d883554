"""Standardised ratings: a model works with mean 0 and deviation 1 inside, and predicts in the ratings' own scale."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedrecon._src.core.factories import recorded
from fedrecon._src.core.model import Batch, Model, Step, Weighted, predict_in
from fedrecon._src.core.pytrees import Params


@recorded
def standardized(
    model: Model,
    mean: float,
    deviation: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    feature: str = "rating",
) -> Model:
    """Standardise ratings: the model predicts with mean 0 and deviation 1, and its predictions are scaled back.

    The loss is the squared error divided by the variance, so learning rates, ridges and priors do not depend on the
    unit of the ratings. Predictions are clipped to `low` and `high` in use and in evaluation, but not in training and
    reconstruction, since a clipped prediction has no gradient. Metrics see ratings in their own scale.

    Args:
      model: one with the squared error as its loss, and one prediction per example.
      mean: the mean of the ratings.
      deviation: their standard deviation, above 0.
      low: the lowest prediction.
      high: the highest prediction.
      feature: the feature that holds the ratings.
    """
    if not (deviation > 0 and math.isfinite(deviation) and math.isfinite(mean)):
        raise ValueError(f"`mean` is {mean}, `deviation` is {deviation}; they must be finite, the deviation above 0")
    if not low <= high:
        raise ValueError(f"`low` is {low}, `high` is {high}; `low` must not be above `high`")

    def fit(params: Params, local: Params, batch: Batch, step: Step) -> Any:
        return mean + deviation * predict_in(model, params, local, batch, step)

    def predict(params: Params, local: Params, batch: Batch) -> Any:
        return jnp.clip(mean + deviation * model.predict(params, local, batch), low, high)

    def loss(predictions: Array, batch: Batch) -> Weighted:
        return ((predictions - batch[feature]) / deviation) ** 2, jnp.ones_like(predictions)

    return model._replace(predict=predict, fit=fit, loss=loss)
