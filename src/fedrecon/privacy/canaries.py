"""An audit of a small run: canaries among real clients, through the same encoding, sum and server as everybody."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedrecon.aggregate.noised import private
from fedrecon.algorithm import Algorithm
from fedrecon.algorithms.federated_reconstruction import federated_reconstruction
from fedrecon.clients import Clients
from fedrecon.data.ratings.synthetic import synthetic_ratings
from fedrecon.hosts import client_update, server_update
from fedrecon.keys import round_key
from fedrecon.model import metric_names
from fedrecon.models.factorization import matrix_factorization
from fedrecon.privacy.accounting import epsilon_of
from fedrecon.privacy.audit import Audit, Canaries, audit
from fedrecon.solvers.descent import gradient_descent
from fedrecon.trees import flatten
from fedrecon.upload import DELTA, Upload

Sabotage = Literal["none", "half-noise", "no-clipping", "twice"]
TOO_LONG = 10.0  # canaries upload so many times the clipping norm: only clipping keeps them to it
PER_ROUND = 50


def audit_run(
    *,
    noise_multiplier: float = 2.0,
    clip: float = 1.0,
    rounds: int = 4,
    canaries: int = 1000,
    delta: float = 1e-5,
    seed: int = 0,
    sabotage: Sabotage = "none",
) -> Audit:
    """Train a small recommender with canaries among its clients, and audit what it released.

    The promise is that of a client who takes part in every round, since canaries do.

    Args:
      noise_multiplier: of the promise.
      clip: the clipping norm.
      rounds: how many.
      canaries: how many; a coin for each decides whether it takes part.
      delta: of the promise.
      seed: of data, canaries, noise.
      sabotage: what to break on purpose: half the noise, no clipping, everybody twice. An audit must notice.
    """
    clients = synthetic_ratings(num_users=40, num_items=200, mean_ratings=20, seed=seed)
    noise, norm = noise_multiplier, clip
    if sabotage == "half-noise":
        noise /= 2
    if sabotage == "no-clipping":  # to a norm that nobody reaches, with noise as if there were none such
        noise, norm = noise / (2 * TOO_LONG), 2 * TOO_LONG * clip
    algorithm = _recommender(200, max(2, -(-2 * canaries // 200)), norm, noise)
    drawn = Canaries(canaries, _length(algorithm), seed)
    released = _train(algorithm, clients, drawn, clip, rounds, seed, 2 if sabotage == "twice" else 1)
    claimed = private(clip, noise_multiplier, per_round=PER_ROUND).release
    assert claimed is not None
    epsilon = epsilon_of([claimed({})._replace(rounds=rounds)], delta)
    scores = drawn.scores(released)
    return audit(scores[drawn.inside], scores[~drawn.inside], claimed=epsilon, delta=delta)


def _recommender(items: int, dim: int, clip: float, noise: float) -> Algorithm:
    return federated_reconstruction(
        matrix_factorization(items, dim=dim),
        reconstruct=gradient_descent(optax.sgd(0.1), batch_size=5, steps=10),
        update=gradient_descent(optax.sgd(0.1), batch_size=5, steps=10),
        server=optax.sgd(1.0),  # so that the change of the model is what was released
        aggregate=private(clip, noise, per_round=PER_ROUND),
    )


def _length(algorithm: Algorithm) -> int:
    shapes = jax.eval_shape(lambda: algorithm.params(algorithm.init(jax.random.key(0))))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _train(
    algorithm: Algorithm, clients: Clients, canaries: Canaries, clip: float, rounds: int, seed: int, times: int
) -> np.ndarray:
    """Return the sum of all that was released, in one row."""
    state = algorithm.init(jax.random.key(seed))
    first = _row(algorithm.params(state))
    theirs = _canary_uploads(algorithm, algorithm.params(state), canaries, TOO_LONG * clip)
    for number in range(rounds):
        key = round_key(seed, number)
        real = client_update(algorithm, algorithm.message(state), clients, key)
        state = server_update(algorithm, state, [real, *[theirs] * times], key)
    return (_row(algorithm.params(state)) - first) * PER_ROUND


def _canary_uploads(algorithm: Algorithm, params: Any, canaries: Canaries, norm: float) -> Upload:
    flat = np.stack([canaries.upload(int(k), norm) for k in np.flatnonzero(canaries.inside)]).astype(np.float32)
    parts, begin = {}, 0
    for path, leaf in flatten(params)[0].items():
        parts[path] = flat[:, begin : begin + leaf.size].reshape(-1, *leaf.shape)
        begin += leaf.size
    count = len(flat)
    sums = jnp.zeros((count, len(metric_names(algorithm.model)), 2))
    return Upload({DELTA: parts}, jnp.ones(count), sums)


def _row(params: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in flatten(params)[0].values()])
