"""Rank items for a person from the items that they have: item embeddings are global, the person's is local."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.algorithms.federated_ials import BLEND_AFTER
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch, ClientMetrics, Metric, Model, Weighted
from fedrecon._src.core.pytrees import Params

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

    Scores of items can be blended with their popularity, with a weight that depends on how many items a person has:
    `popularity_weight` has one for persons with 0, 1, 2, 5, 10 and 20 items or more. At first, all but the first are 0.

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
    check_number("num_items", num_items, least=1)
    check_number("dim", dim, least=1)

    def init_global(key: Array) -> Params:
        items = jax.random.normal(key, (num_items, dim)) * (init_scale / dim**0.5)
        return ranking_params(items)

    def predict(shared: Params, local: Params, batch: Batch) -> Array:
        personal = shared["item_embedding"][batch["item"]] @ local["user_embedding"]
        return personal + local["popularity_weight"] * shared["item_popularity"][batch["item"]]

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


def popularity_factors(counts: np.ndarray, dim: int) -> Params:
    """Return global parameters of `ranking_factorization` that rank items by popularity, for everybody.

    Args:
      counts: `(items,)` how many people have each item.
      dim: length of the embeddings.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> fr.models.popularity_factors(np.array([4, 1]), dim=2)["item_popularity"].tolist()
      [1.0, 0.25]
    """
    params = ranking_params(np.zeros((len(counts), dim), np.float32), counts)
    return {**params, "popularity_weight": np.ones(len(BLEND_AFTER), np.float32)}


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
        values = [jnp.sum(_chance(better, tied, k) * real) / jnp.minimum(count, k) for k in recall_at]
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


def _chance(better: Array, tied: Array, k: int) -> Array:
    """Return the chance of each item to be among the first `k`."""
    return jnp.clip((k - better) / tied, 0, 1)


def _hit(better: Array, tied: Array, real: Array, k: int) -> Array:
    """Return the chance that any of the items is among the first `k`; `ranking.hit_rate` says why it is a product."""
    certain = jnp.any(real & (better + tied <= k))
    across = real & (better < k) & (better + tied > k)
    nth = jnp.cumsum(across) - 1
    out = jnp.maximum(1 - (k - better) / jnp.maximum(tied - nth, 1), 0)
    return jnp.where(certain, 1.0, 1 - jnp.prod(jnp.where(across, out, 1.0)))
