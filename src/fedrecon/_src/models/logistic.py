"""Logistic factorization for clicks, with or without hidden layers (neural collaborative filtering)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch, Metric, Model, Weighted
from fedrecon._src.core.pytrees import Params


@register_factory
def logistic_factorization(
    num_items: int, dim: int = 16, *, hidden: Sequence[int] = (), init_scale: float = 0.05, label: str = "label"
) -> Model:
    """Predict the log-odds that a person chooses an item, from an embedding of each.

    A batch has `item` (ids below `num_items`) and `label`: 1 for items that the person chose, 0 for others. Without
    hidden layers, the log-odds are the product of the embeddings plus the person's bias; that is also a linear layer of
    the person's own on the item's embedding. With hidden layers, they are the output of a network on both embeddings.

    Args:
      num_items: rows of the global table.
      dim: length of the embeddings.
      hidden: widths of the hidden layers, which are global; empty for none.
      init_scale: embeddings start uniform between minus and plus this.
      label: the feature with the labels.

    References:
      He et al., Neural Collaborative Filtering, WWW 2017.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> model = fr.models.logistic_factorization(num_items=2, dim=1)
      >>> params = {"item_embedding": jnp.array([[1.0], [2.0]])}
      >>> local = {"user_bias": jnp.float32(0.5), "user_embedding": jnp.array([1.5])}
      >>> model.predict(params, local, {"item": jnp.array([1])}).tolist()
      [3.5]
    """
    check_number("num_items", num_items, least=1)
    check_number("dim", dim, least=1)
    widths = [2 * dim, *hidden, 1]

    def init_embedding(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.uniform(key, shape, minval=-init_scale, maxval=init_scale)

    def init_global(key: Array) -> Params:
        items, *keys = jax.random.split(key, len(widths))
        params: Params = {"item_embedding": init_embedding(items, (num_items, dim))}
        if hidden:
            kernels = map(jax.nn.initializers.he_normal(), keys, itertools.pairwise(widths))
            params["layers"] = [{"kernel": kernel, "bias": jnp.zeros(kernel.shape[1])} for kernel in kernels]
        return params

    def predict(shared: Params, local: Params, batch: Batch) -> Array:
        items = shared["item_embedding"][batch["item"]]  # (batch, dim)
        if not hidden:
            return items @ local["user_embedding"] + local["user_bias"]
        x = jnp.concatenate([jnp.broadcast_to(local["user_embedding"], items.shape), items], -1)
        for layer in shared["layers"][:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return (x @ shared["layers"][-1]["kernel"] + shared["layers"][-1]["bias"])[:, 0] + local["user_bias"]

    def cross_entropy(logits: Array, batch: Batch) -> Weighted:
        return optax.sigmoid_binary_cross_entropy(logits, batch[label]), jnp.ones_like(logits)

    def is_right(logits: Array, batch: Batch) -> Weighted:
        return ((logits > 0) == (batch[label] > 0.5)).astype(jnp.float32), jnp.ones_like(logits)

    return Model(
        init_global=init_global,
        init_local=lambda key: {"user_bias": jnp.zeros(()), "user_embedding": init_embedding(key, (dim,))},
        predict=predict,
        loss=cross_entropy,
        metrics={"accuracy": Metric(is_right)},
        lookups={"item_embedding": "item"},
    )
