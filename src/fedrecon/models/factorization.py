"""Matrix factorization for ratings: item embeddings are global, the user's own embedding is local."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon.model import Batch, Metric, Model, Weighted
from fedrecon.trees import Params


def matrix_factorization(
    num_items: int,
    dim: int = 50,
    *,
    biases: bool = False,
    init_scale: float = 0.05,
    init_mean: float = 0.0,
    accuracy_within: float = 0.5,
) -> Model:
    """Predict a rating as the product of a user's and an item's embedding.

    A batch has `item` (ids below `num_items`) and, for the loss and the metrics, `rating`.

    Args:
      num_items: rows of the global table.
      dim: length of the embeddings.
      biases: add a global mean, a bias of the item (global) and a bias of the user (local).
      init_scale: embeddings start uniform between minus and plus this.
      init_mean: where the global mean starts; only with `biases`.
      accuracy_within: a prediction this close to the rating counts as accurate.

    References:
      Koren, Bell, Volinsky, Matrix Factorization Techniques for Recommender Systems, 2009.
    """
    if num_items < 1 or dim < 1:
        raise ValueError(f"`num_items` and `dim` must be at least 1, not {num_items} and {dim}")

    def uniform(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.uniform(key, shape, minval=-init_scale, maxval=init_scale)

    def init_global(key: Array) -> Params:
        params = {"item_embedding": uniform(key, (num_items, dim))}
        if biases:
            params |= {"item_bias": jnp.zeros(num_items), "mean": jnp.asarray(init_mean, jnp.float32)}
        return params

    def init_local(key: Array) -> Params:
        params = {"user_embedding": uniform(key, (dim,))}
        return params | {"user_bias": jnp.zeros(())} if biases else params

    def predict(shared: Params, local: Params, batch: Batch) -> Array:
        item = batch["item"]
        rating = shared["item_embedding"][item] @ local["user_embedding"]
        if biases:
            rating += shared["item_bias"][item] + shared["mean"] + local["user_bias"]
        return rating

    def squared_error(predictions: Array, batch: Batch) -> Weighted:
        return (predictions - batch["rating"]) ** 2, jnp.ones_like(predictions)

    def accurate(predictions: Array, batch: Batch) -> Weighted:
        close = jnp.abs(predictions - batch["rating"]) <= accuracy_within
        return close.astype(jnp.float32), jnp.ones_like(predictions)

    tables = ["item_embedding", "item_bias"] if biases else ["item_embedding"]
    return Model(
        init_global=init_global,
        init_local=init_local,
        predict=predict,
        loss=squared_error,
        metrics={"rmse": Metric(squared_error, lambda mean: mean**0.5), "accuracy": Metric(accurate)},
        lookups=dict.fromkeys(tables, "item"),
    )
