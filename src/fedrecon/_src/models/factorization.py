"""Matrix factorization for ratings: item embeddings are global, the user's embedding is local."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch, Metric, Model, Weighted
from fedrecon._src.core.pytrees import Params


@register_factory
def matrix_factorization(
    num_items: int,
    dim: int = 50,
    *,
    biases: bool = False,
    init_scale: float = 0.05,
    init_mean: float = 0.0,
    init_item_bias: np.ndarray | None = None,
    init_local_scale: float | None = None,
    item_traits: np.ndarray | None = None,
    accuracy_within: float = 0.5,
) -> Model:
    """Predict a rating as the product of a user's and an item's embedding.

    A batch has `item` (ids below `num_items`) and, for the loss and the metrics, `rating`.

    Args:
      num_items: rows of the global table.
      dim: length of the embeddings.
      biases: add a mean (global), a bias of the item (global) and a bias of the user (local).
      init_scale: embeddings start uniform between minus and plus this.
      init_mean: where the mean starts; only with `biases`.
      init_item_bias: `(num_items,)` where the items' biases start, zeros by default; only with `biases`.
      init_local_scale: `init_scale` for the user's embedding, if it should differ; 0 starts at zero.
      item_traits: `(num_items, traits)` known features of every item, such as its popularity. They are sent with the
        global parameters and never change; a user has a coefficient for each (local, `user_traits`).
      accuracy_within: a prediction this close to the rating counts as accurate.

    References:
      Koren, Bell, Volinsky, Matrix Factorization Techniques for Recommender Systems, 2009.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> model = fr.models.matrix_factorization(num_items=2, dim=1)
      >>> params, local = {"item_embedding": jnp.array([[1.0], [2.0]])}, {"user_embedding": jnp.array([1.5])}
      >>> model.predict(params, local, {"item": jnp.array([1])}).tolist()
      [3.0]
    """
    check_number("num_items", num_items, least=1)
    check_number("dim", dim, least=1)
    of_items = {"init_item_bias": (init_item_bias, 1), "item_traits": (item_traits, 2)}
    for name, (values, dimensions) in of_items.items():
        if values is not None and (np.ndim(values) != dimensions or len(values) != num_items):
            expected = f"{dimensions} dimensions, and {num_items} entries in the first"
            raise ValueError(f"`{name}` must have {expected} (got shape {np.shape(values)})")
    bias_start = np.zeros(num_items) if init_item_bias is None else np.asarray(init_item_bias)
    local_scale = init_scale if init_local_scale is None else init_local_scale
    traits = None if item_traits is None else np.asarray(item_traits, np.float32)

    def init_global(key: Array) -> Params:
        params = {"item_embedding": _uniform(key, (num_items, dim), init_scale)}
        if traits is not None:
            params |= {"item_traits": jnp.asarray(traits)}
        if biases:
            params |= {"item_bias": jnp.asarray(bias_start, jnp.float32), "mean": jnp.asarray(init_mean, jnp.float32)}
        return params

    def init_local(key: Array) -> Params:
        params = {"user_embedding": _uniform(key, (dim,), local_scale)}
        if traits is not None:
            params |= {"user_traits": jnp.zeros(traits.shape[1])}
        return params | {"user_bias": jnp.zeros(())} if biases else params

    def predict(shared: Params, local: Params, batch: Batch) -> Array:
        item = batch["item"]
        rating = shared["item_embedding"][item] @ local["user_embedding"]
        if traits is not None:
            rating += jax.lax.stop_gradient(shared["item_traits"][item]) @ local["user_traits"]
        if biases:
            rating += shared["item_bias"][item] + shared["mean"] + local["user_bias"]
        return rating

    def is_close(predictions: Array, batch: Batch) -> Weighted:
        close = jnp.abs(predictions - batch["rating"]) <= accuracy_within
        return close.astype(jnp.float32), jnp.ones_like(predictions)

    tables = ["item_embedding", *(["item_bias"] if biases else []), *(["item_traits"] if traits is not None else [])]
    return Model(
        init_global=init_global,
        init_local=init_local,
        predict=predict,
        loss=_squared_error,
        metrics={"rmse": Metric(_squared_error, lambda mean: mean**0.5), "accuracy": Metric(is_close)},
        lookups=dict.fromkeys(tables, "item"),
    )


def _uniform(key: Array, shape: tuple[int, ...], scale: float) -> Array:
    return jax.random.uniform(key, shape, minval=-scale, maxval=scale)


def _squared_error(predictions: Array, batch: Batch) -> Weighted:
    return (predictions - batch["rating"]) ** 2, jnp.ones_like(predictions)
