"""Factorization: item embeddings are global, the embedding of a person is local; of ratings, rankings and clicks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.algorithms.federated_ials import BLEND_AFTER
from fedrecon._src.core.checks import check_numbers
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch, ClientMetrics, Metric, Model, Weighted
from fedrecon._src.core.pytrees import Params
from fedrecon._src.models.losses import make_loss, make_metrics


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
    check_numbers({"num_items": num_items, "dim": dim}, least=1)
    of_items = {"init_item_bias": (init_item_bias, 1), "item_traits": (item_traits, 2)}
    for name, (values, dimensions) in of_items.items():
        if values is not None and (np.ndim(values) != dimensions or len(values) != num_items):
            expected = f"{dimensions} dimensions, and {num_items} entries in the first"
            raise ValueError(f"`{name}` must have {expected} (got shape {np.shape(values)})")
    bias_start = np.zeros(num_items) if init_item_bias is None else np.asarray(init_item_bias)
    local_scale = init_scale if init_local_scale is None else init_local_scale
    traits = None if item_traits is None else np.asarray(item_traits, np.float32)

    def init_global(key: Array) -> Params:
        params = {"item_embedding": draw_uniform(key, (num_items, dim), init_scale)}
        if traits is not None:
            params |= {"item_traits": jnp.asarray(traits)}
        if biases:
            params |= {"item_bias": jnp.asarray(bias_start, jnp.float32), "mean": jnp.asarray(init_mean, jnp.float32)}
        return params

    def init_local(key: Array) -> Params:
        params = {"user_embedding": draw_uniform(key, (dim,), local_scale)}
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
        loss=make_loss("mse", "rating", None),
        metrics=make_metrics({"rmse": "rmse", "accuracy": Metric(is_close)}, "rating", None),
        lookups=dict.fromkeys(tables, "item"),
    )


def draw_uniform(key: Array, shape: tuple[int, ...], scale: float) -> Array:
    """Draw embeddings between `-scale` and `scale`; zeros if that is 0."""
    return jax.random.uniform(key, shape, minval=-scale, maxval=scale) if scale else jnp.zeros(shape)


# ---- ranking, from the items that a person has ----


RECALL_AT, NDCG_AT, HIT_AT = (20, 50), (100,), (20,)


@register_factory
def ranking_factorization(
    num_items: int, dim: int = 64, *, init_scale: float = 0.1, weight: str | None = None
) -> Model:
    """Score an item for a person as the product of both embeddings; what a person has should score 1, all else 0.

    A batch has `item` (ids below `num_items`): an example says that the person has the item. The global parameters are
    the item embeddings V and their Gram matrix V'V, from which a client computes the cost of its embedding on all items
    without having them, and an offset for each item: having it says embedding plus offset about a person.
    `fr.federated_ials` trains them and keeps the matrix up to date.

    Scores of items can be blended with their popularity, with a weight from 0 to 1 (popularity alone) that depends on
    how many items a person has: `popularity_weight` has one for persons with 0, 1, 2, 5, 10 and 20 items or more. At
    first, all but the first are 0.

    `fr.evaluate` reports `score` (the mean score of hidden items), and recall, NDCG and hit rate as `fr.recommend.rank`
    defines them, with support as known and query as hidden items.

    Args:
      num_items: rows of the global table.
      dim: length of the embeddings.
      init_scale: item embeddings start normal, with lengths of about this.
      weight: the feature with the weight of each example, for example computed from counts; by default all weigh 1.

    Example:
      >>> import fedrecon as fr
      >>> model = fr.models.ranking_factorization(num_items=1000, dim=32)
      >>> model.client_metrics.names
      ('recall@20', 'recall@50', 'ndcg@100', 'hit@20')
    """
    check_numbers({"num_items": num_items, "dim": dim}, least=1)

    def init_global(key: Array) -> Params:
        items = jax.random.normal(key, (num_items, dim)) * (init_scale / dim**0.5)
        return ranking_params(items)

    def predict(shared: Params, local: Params, batch: Batch) -> Array:
        personal = shared["item_embedding"][batch["item"]] @ local["user_embedding"]
        blend = local["popularity_weight"]
        return (1 - blend) * personal + blend * shared["item_popularity"][batch["item"]]

    def squared_error(predictions: Array, batch: Batch) -> Weighted:
        return (predictions - 1) ** 2, jnp.ones_like(predictions) if weight is None else batch[weight]

    def score(predictions: Array, batch: Batch) -> Weighted:
        return predictions, jnp.ones_like(predictions)

    def scores(shared: Params, local: Params) -> Array:
        return predict(shared, local, {"item": jnp.arange(num_items, dtype=jnp.int32)})

    return Model(
        init_global=init_global,
        init_local=lambda key: {"popularity_weight": jnp.zeros(()), "user_embedding": jnp.zeros(dim)},
        predict=predict,
        loss=squared_error,
        metrics={"score": Metric(score)},
        lookups=dict.fromkeys(("history_offset", "item_embedding", "item_popularity"), "item"),
        client_metrics=ranking_metrics(scores),
    )


def ranking_params(items: Any, counts: Any = None) -> Params:
    """Return global parameters of `ranking_factorization` as training starts with them.

    Args:
      items: `(items, dim)` embeddings.
      counts: `(items,)` how many people have each item; None where that is not known.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> params = fr.models.ranking_params(np.float32([[1], [2]]), counts=np.array([4, 1]))
      >>> params["gram"].tolist(), params["item_popularity"].tolist()
      ([[5.0]], [1.0, 0.25])
    """
    popularity = np.zeros(len(items)) if counts is None else counts / max(np.max(counts, initial=0), 1)
    return {
        "gram": items.T @ items,
        "history_offset": 0 * items,
        "item_embedding": items,
        "item_popularity": np.asarray(popularity, np.float32),
        "popularity_weight": np.eye(1, len(BLEND_AFTER), dtype=np.float32)[0],
    }


def ranking_metrics(
    scores: Any,
    *,
    recall_at: tuple[int, ...] = RECALL_AT,
    ndcg_at: tuple[int, ...] = NDCG_AT,
    hit_at: tuple[int, ...] = HIT_AT,
) -> ClientMetrics:
    """Measure how the query's items rank among all that are not in the support, as `fr.recommend.rank` defines it.

    Args:
      scores: `(global, local) -> (items,)`, higher is better.
      recall_at: values of k for recall.
      ndcg_at: the same for NDCG.
      hit_at: the same for the hit rate.

    Example:
      >>> import fedrecon as fr
      >>> metrics = fr.models.ranking_metrics(lambda params, local: params["item"] @ local["user"], hit_at=(1, 10))
      >>> metrics.names
      ('recall@20', 'recall@50', 'ndcg@100', 'hit@1', 'hit@10')
    """
    names = [f"recall@{k}" for k in recall_at] + [f"ndcg@{k}" for k in ndcg_at] + [f"hit@{k}" for k in hit_at]

    def measure(shared: Params, local: Params, support: Any, query: Any) -> Array:
        item_scores = scores(shared, local)
        better, tied, real = _ranks(item_scores, support, query)
        count = jnp.maximum(query.count, 1)
        chances = {k: jnp.clip((k - better) / tied, 0, 1) for k in recall_at}  # to be among the first k
        values = [jnp.sum(chance * real) / jnp.minimum(count, k) for k, chance in chances.items()]
        for k in ndcg_at:
            gains = jnp.asarray(np.append(0, np.cumsum(1 / np.log2(np.arange(2, k + 2)))), jnp.float32)
            gain = (gains[jnp.minimum(better + tied, k)] - gains[jnp.minimum(better, k)]) / tied
            values.append(jnp.sum(gain * real) / gains[jnp.minimum(count, k)])
        values += [_hit(better, tied, real, k) for k in hit_at]
        broken = jnp.isnan(item_scores).any() | (query.count == 0)
        return jnp.where(broken, jnp.nan, jnp.stack(values))

    return ClientMetrics(tuple(names), measure)


def _ranks(scores: Array, support: Any, query: Any) -> tuple[Array, Array, Array]:
    """Return for each query item how many are better, how many share its score (itself included), and if it is real."""
    items = scores.shape[0]
    counts = jnp.arange(support.columns["item"].shape[0]) < support.count
    in_support = jnp.zeros(items, bool).at[support.columns["item"]].max(counts)
    free = jnp.where(in_support, -jnp.inf, scores)
    ordered = jnp.sort(free)
    query_scores = free[query.columns["item"]]
    low = jnp.maximum(jnp.searchsorted(ordered, query_scores, side="left"), in_support.sum())
    high = jnp.searchsorted(ordered, query_scores, side="right")
    real = jnp.arange(query_scores.shape[0]) < query.count
    return items - high, jnp.maximum(high - low, 1), real


def _hit(better: Array, tied: Array, real: Array, k: int) -> Array:
    """Return the chance that any of the items is among the first `k`; `ranking.hit_rate` says why it is a product."""
    certain = jnp.any(real & (better + tied <= k))
    across = real & (better < k) & (better + tied > k)
    nth = jnp.cumsum(across) - 1
    out = jnp.maximum(1 - (k - better) / jnp.maximum(tied - nth, 1), 0)
    return jnp.where(certain, 1.0, 1 - jnp.prod(jnp.where(across, out, 1.0)))


# ---- clicks: logistic, with or without hidden layers (neural collaborative filtering) ----


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
    check_numbers({"num_items": num_items, "dim": dim}, least=1)
    widths = [2 * dim, *hidden, 1]

    def init_global(key: Array) -> Params:
        items, *keys = jax.random.split(key, len(widths))
        params: Params = {"item_embedding": draw_uniform(items, (num_items, dim), init_scale)}
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

    return Model(
        init_global=init_global,
        init_local=lambda key: {"user_bias": jnp.zeros(()), "user_embedding": draw_uniform(key, (dim,), init_scale)},
        predict=predict,
        loss=make_loss("binary_cross_entropy", label, None),
        metrics=make_metrics(["accuracy"], label, None),
        lookups={"item_embedding": "item"},
        class_label=label,
    )
