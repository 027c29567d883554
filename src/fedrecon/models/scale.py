"""A model of ratings in their own scale: it works with mean 0 and deviation 1 inside, and predicts within the scale."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedrecon.model import Batch, Model, Step, Weighted, predict_in
from fedrecon.recipes import recorded
from fedrecon.trees import Params


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
    """Let a model predict ratings of mean 0 and deviation 1, and turn what it predicts into ratings as they are given.

    The loss is the squared error divided by the variance, so that no learning rate, ridge or prior depends on the unit
    of the ratings. What is predicted in use and measured stays between `low` and `high`; what is trained and
    reconstructed does not, since a clipped prediction has no slope. Metrics see ratings as they are given.

    Args:
      model: one with the squared error as its loss, and one prediction an example.
      mean: of the ratings.
      deviation: of the ratings, above 0.
      low: no prediction is below.
      high: no prediction is above.
      feature: the feature that holds the ratings.
    """
    if not (deviation > 0 and math.isfinite(deviation) and math.isfinite(mean)):
        raise ValueError(f"`mean` is {mean}, `deviation` is {deviation}; they must be finite, the deviation above 0")
    if not low <= high:
        raise ValueError(f"`low` is {low}, `high` is {high}; the scale must not end before it begins")

    def fit(params: Params, local: Params, batch: Batch, step: Step) -> Any:
        return mean + deviation * predict_in(model, params, local, batch, step)

    def predict(params: Params, local: Params, batch: Batch) -> Any:
        return jnp.clip(mean + deviation * model.predict(params, local, batch), low, high)

    def loss(predictions: Array, batch: Batch) -> Weighted:
        return ((predictions - batch[feature]) / deviation) ** 2, jnp.ones_like(predictions)

    return model._replace(predict=predict, fit=fit, loss=loss)
