"""Cold-start metrics: results of models and baselines after 0, 1, 2, 5, 10 and 20 examples of a person.

Support is limited to its first k examples, query stays the same, so all columns are over the same people and examples;
whoever has fewer than k examples is measured with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.federated_ials import BLEND_AFTER
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.core.split import Split, at_most
from fedrecon._src.recommend import baselines, ranking
from fedrecon._src.recommend.protocols import score_seen
from fedrecon._src.recommend.stopping import JUDGES
from fedrecon._src.simulation.evaluation import reconstruct

AFTER = BLEND_AFTER
BLENDS = (0.0, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0)  # the last is popularity alone
MOST_USERS = 1000  # that these are measured on
LEAST_USERS = 50  # that choose how much ratings say of a bias: fewer choose by chance
EVIDENCE = "evidence/user_bias"
PERSONAL = ("item_embedding", "item_traits")  # tables that a person's parameters beside the bias are multiplied by
SHRINKS = (1.0, 0.5, 0.0)

AfterExamples = dict[str, float]  # {"after 5": metric}


def name_after(examples: int) -> str:
    """Return the name of a metric after so many examples."""
    return f"after {examples}"


def rank_after(score: ranking.Scorer, clients: Clients, split: Split, num_items: int) -> AfterExamples:
    """Return NDCG@100 of a scorer by how many items it sees of a person.

    Args:
      score: of items, from those that a person has.
      clients: held-out users; the first 1,000 are measured.
      split: which of their items are known and which hidden.
      num_items: item ids are 0 to `num_items - 1`.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 1, 0, 2, 0])}, client=np.array([0, 0, 1, 1, 2]))
      >>> score = fr.recommend.popularity(fr.recommend.item_sets(clients), 3)
      >>> list(fr.recommend.rank_after(score, clients, fr.split.half(), 3))
      ['after 0', 'after 1', 'after 2', 'after 5', 'after 10', 'after 20']
    """
    chosen = first_users(clients)
    after = AFTER if len(ranking.split_items(chosen, split).hidden.item) else ()

    def measure(k: int) -> float:
        return float(np.nanmean(ndcg_of_each(score, ranking.split_items(chosen, at_most(k, split)), num_items)))

    return {name_after(k): measure(k) for k in after}


def rate_after(
    algorithm: Algorithm, params: Any, clients: Clients, split: Split, after: Sequence[int] = AFTER
) -> AfterExamples:
    """Return the RMSE of a model of ratings by how many ratings it sees of a person.

    Args:
      algorithm: its model and reconstruction are used.
      params: global parameters.
      clients: held-out users; the first 1,000 are measured.
      split: support and query.
      after: how many.

    Example:
      >>> import jax
      >>> import optax
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(num_users=4, seed=0)
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(ratings.num_items),
      ...     reconstruct=fr.least_squares(1.0),
      ...     update=fr.gradient_descent(optax.sgd(0.1), batch_size=5),
      ...     server=optax.sgd(1.0),
      ... )
      >>> params = algorithm.model.init_global(jax.random.key(0))
      >>> list(fr.recommend.rate_after(algorithm, params, ratings, fr.split.half()))[:3]
      ['after 0', 'after 1', 'after 2']
    """
    chosen = first_users(clients)
    _, query = baselines.split_examples(chosen, split, "rating")
    if not len(query["rating"]):
        return {}
    supports = [baselines.split_examples(chosen, at_most(k, split), "rating")[0] for k in after]
    item = np.concatenate([support["item"] for support in supports]).astype(np.int32)
    rating = np.concatenate([support["rating"] for support in supports]).astype(np.float32)
    ends = np.cumsum([np.bincount(support["client"], minlength=len(chosen)) for support in supports])
    local = reconstruct(algorithm, params, Clients({"item": item, "rating": rating}, np.append(0, ends[:-1]), ends))
    model, items = algorithm.model, query["item"].astype(np.int32)[:, None]  # one at a time
    # Parameters are arguments: those of a saved round are numpy arrays, which no tracer indexes.
    predict = jax.jit(jax.vmap(lambda params, local, item: model.predict(params, local, {"item": item}), (None, 0, 0)))

    def measure(number: int) -> float:
        people = jax.tree.map(lambda leaf: leaf[number * len(chosen) + query["client"]], local)
        guess = np.asarray(predict(params, people, items))[:, 0]
        return baselines.rating_errors(guess, query["rating"])["rmse"]

    return {name_after(k): measure(number) for number, k in enumerate(after)}


def rating_baselines_after(predict: baselines.Predict, clients: Clients, split: Split) -> dict[str, AfterExamples]:
    """Return the RMSE of the simple baselines of ratings, as they were fitted, by how many ratings they see."""
    chosen = first_users(clients)
    rows: dict[str, AfterExamples] = {}
    for k in AFTER:
        support, query = baselines.split_examples(chosen, at_most(k, split), "rating")
        if not len(query["rating"]):
            return {}
        for name, guess in predict(support, query).items():
            rows.setdefault(name, {})[name_after(k)] = baselines.rating_errors(guess, query["rating"])["rmse"]
    return rows


def shrink_evidence(algorithm: Algorithm, params: Any, clients: Clients, split: Split) -> Any:
    """Return global parameters of ratings in which what a person rates says no more of their bias than it helps.

    Of somebody with few ratings, this may say less than nothing. The table `evidence/user_bias` is multiplied by the
    largest of `SHRINKS` that has the least excess for validation users: of the RMSE after any number of ratings over
    that of biases alone, and of the RMSE with all ratings over that of the table as it is.

    Args:
      algorithm: of ratings, with implicit feedback.
      params: its global parameters.
      clients: validation users; with fewer than 50, nothing changes.
      split: support and query.
    """
    leaves, structure = flatten(params)
    if len(clients) < LEAST_USERS or EVIDENCE not in leaves:
        return params

    def measure(changes: Mapping[str, Any]) -> np.ndarray:
        changed = unflatten(structure, {**leaves, **changes})
        # The last number of examples is more than anybody has.
        return np.array(list(rate_after(algorithm, changed, clients, split, (*AFTER, 2**30)).values()))

    personal = [path for path in leaves if path.startswith("evidence/") or path.endswith(PERSONAL)]
    limits = measure({path: 0 * leaves[path] for path in personal})
    trials = {shrink: measure({EVIDENCE: np.float32(shrink) * leaves[EVIDENCE]}) for shrink in SHRINKS}
    limits[-1:] = trials[1.0][-1:]
    best = min(SHRINKS, key=lambda shrink: (round(np.maximum(trials[shrink] - limits, 0).sum(), 6), -shrink))
    return unflatten(structure, {**leaves, EVIDENCE: np.float32(best) * leaves[EVIDENCE]})


def blend_popularity(
    params: Mapping[str, Any], clients: Clients, split: Split, unobserved: float, ridge: float, divisions: int = 1
) -> dict[str, Any]:
    """Return global parameters of clicks with the weights of popularity that rank best for validation users.

    A person of one or two items is known so little that what is popular says more. Each weight is chosen by people
    whose items are limited to that many, the last one by those with as many or more; where fewer than 10 have as many,
    the weight is that of fewer items. Popularity alone is used for everybody unless the model beats it with all known
    items by two standard errors.

    Args:
      params: of `models.ranking_factorization`.
      clients: validation users.
      split: which of their items are known and which hidden.
      unobserved: as for `federated_ials`.
      ridge: the same.
      divisions: how often each user is divided, every time with the items in another order.
    """
    chosen, weights = first_users(repeat_shuffled(clients, divisions)), np.array(params["popularity_weight"])
    plain = {**params, "popularity_weight": np.zeros_like(weights)}
    score, popular = ranking.score_by_factors(plain, unobserved, ridge), np.asarray(params["item_popularity"])
    whole = ranking.split_items(chosen, split)
    num_support, num_hidden = (np.bincount(part.user, minlength=part.users) for part in whole)

    def choose(people: np.ndarray, split: Split) -> float:
        holdout = ranking.split_items(chosen.take(people), split)
        scores = np.asarray(score(holdout.support))
        ndcg = [ndcg_of_each(_blend(scores, popular, weight), holdout, len(popular)).mean() for weight in BLENDS]
        return BLENDS[int(np.argmax(ndcg))]

    for number, k in enumerate(AFTER[1:], 1):
        people = np.flatnonzero((num_hidden > 0) & (num_support >= k))
        enough = len(np.unique(people % len(clients))) >= JUDGES
        limited = split if k == AFTER[-1] else at_most(k, split)
        weights[number] = choose(people, limited) if enough else weights[max(number - 1, 1)]
    blended = {**params, "popularity_weight": weights}
    scorers = (ranking.score_by_factors(blended, unobserved, ridge), _blend(np.zeros((len(chosen), 1)), popular, 1))
    with_model, alone = (ndcg_of_each(scorer, whole, len(popular)) for scorer in scorers)
    if not exceeds_chance(mean_by_person(with_model - alone, np.arange(len(chosen)) % len(clients))):
        weights[1:] = BLENDS[-1]
    return blended


def mean_by_person(values: np.ndarray, person: np.ndarray) -> np.ndarray:
    """Return the mean of each person's values that are not NaN, of persons with any."""
    measured = np.isfinite(values)
    count, total = np.bincount(person[measured]), np.bincount(person[measured], values[measured])
    return total[count > 0] / count[count > 0]


def exceeds_chance(gains: np.ndarray) -> bool:
    """Return whether the mean gain of people is more than two standard errors."""
    return bool(gains.mean() > 2 * gains.std() / max(len(gains) - 1, 1) ** 0.5)


def _blend(scores: np.ndarray, popular: np.ndarray, weight: float) -> ranking.Scorer:
    """Return a scorer of given users, which is asked for them a block at a time, in order."""
    return score_seen(lambda begin, end: (1 - weight) * scores[begin:end] + weight * popular)


def ndcg_of_each(score: ranking.Scorer, holdout: ranking.Holdout, num_items: int) -> np.ndarray:
    """Return the NDCG@100 of each user, NaN without hidden items."""
    result = ranking.rank(score, holdout, num_items, recall_at=(), hit_at=(), coverage_at=None)
    return result.per_client["ndcg@100"]


def repeat_shuffled(clients: Clients, times: int) -> Clients:
    """Return the items of clients in their order, then again in other orders, so that a split divides them anew.

    Args:
      clients: of any kind.
      times: how often each client is in the result.
    """
    parts = [clients, *(clients.shuffle(number) for number in range(1, times))]
    columns = {
        name: np.concatenate([np.asarray(part.columns[name])[rows_of(part.starts, part.ends)] for part in parts])
        for name in clients.columns
    }
    ends = np.cumsum(np.tile(clients.sizes, times))
    return Clients(columns, np.append(0, ends[:-1]), ends)


def first_users(clients: Clients) -> Clients:
    """Return the first 1,000."""
    return clients.take(np.arange(min(len(clients), MOST_USERS)))
