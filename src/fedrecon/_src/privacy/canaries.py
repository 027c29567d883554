"""An audit of a small run: canaries among real clients, through the same encoding, sum and server as everybody."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedrecon._src.algorithms.algorithm import Algorithm, encode
from fedrecon._src.algorithms.federated_reconstruction import federated_reconstruction
from fedrecon._src.algorithms.rounds import client_update, server_update
from fedrecon._src.client.gradient_descent import gradient_descent
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.keys import round_key
from fedrecon._src.core.model import metric_names
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.core.upload import DELTA, Total, Upload, add, no_total
from fedrecon._src.data.synthetic import synthetic_ratings
from fedrecon._src.models.factorization import matrix_factorization
from fedrecon._src.privacy.accounting import epsilon_of
from fedrecon._src.privacy.audit import Audit, Canaries, audit
from fedrecon._src.recommend.round_zero import ANSWER, RoundZero
from fedrecon._src.server.aggregator import Aggregator
from fedrecon._src.server.fixed_point import add_noise, secure
from fedrecon._src.server.gaussian import private

Sabotage = Literal["none", "half-noise", "no-clipping", "twice"]
By = Literal["server", "clients", "round-zero"]
TOO_LONG = 10.0  # canaries upload this many times the clipping norm: only clipping cuts them to it
PER_ROUND = 50
REAL = 40  # clients beside the canaries
RATED = 4  # items of a canary in round zero, which nobody else has


def audit_run(
    *,
    noise_multiplier: float = 2.0,
    clip: float = 1.0,
    rounds: int = 4,
    canaries: int = 1000,
    delta: float = 1e-5,
    seed: int = 0,
    sabotage: Sabotage = "none",
    noise_by: By = "server",
) -> Audit:
    """Train a small recommender with canaries among its clients, and audit what it released.

    The promise is that of a client who takes part in every round, since canaries do.

    Args:
      noise_multiplier: of the promise; all of round zero costs as much as `rounds` rounds of it.
      clip: the clipping norm.
      rounds: how many.
      canaries: how many; a coin for each decides whether it takes part.
      delta: of the promise.
      seed: of data, canaries, noise.
      sabotage: what to break on purpose: half the noise, no clipping, everybody twice. An audit must notice.
      noise_by: whose noise is audited: that of the `server`; that of the `clients`, in integers of a secure sum; or
        that of `round-zero`, whose questions canaries answer as clients do.
    """
    if noise_by == "round-zero":
        return _audit_round_zero(noise_multiplier / math.sqrt(rounds), canaries, delta, seed, sabotage)
    clients = synthetic_ratings(num_users=REAL, num_items=200, mean_ratings=20, seed=seed)
    noise, norm = noise_multiplier, clip
    if sabotage == "half-noise":
        noise /= 2
    if sabotage == "no-clipping":  # clip to a norm that nobody reaches, with noise for the norm that was promised
        noise, norm = noise / (2 * TOO_LONG), 2 * TOO_LONG * clip
    items, dim = 200, max(2, -(-2 * canaries // 200))
    drawn = Canaries(canaries, items * dim, seed)
    times = 2 if sabotage == "twice" else 1
    there = REAL + int(drawn.inside.sum())

    def aggregator(norm: float, noise: float) -> Aggregator:
        if noise_by == "server":
            return private(norm, noise, per_round=PER_ROUND)
        options: dict[str, Any] = {"per_round": PER_ROUND, "least": there, "simulated_noise": False}
        return secure(norm, clients=times * there, noise_multiplier=noise, **options)

    algorithm = _recommender(items, dim, aggregator(norm, noise))
    released = _train(algorithm, clients, drawn, clip, rounds, seed, times)
    promised = aggregator(clip, noise_multiplier).release
    assert promised is not None
    parts = algorithm.method.parts(jax.eval_shape(algorithm.method.init, jax.random.key(0)))
    epsilon = epsilon_of([promised(parts)._replace(rounds=rounds)], delta)
    scores = drawn.scores(released)
    return audit(scores[drawn.inside], scores[~drawn.inside], claimed=epsilon, delta=delta)


def _recommender(items: int, dim: int, aggregator: Aggregator) -> Algorithm:
    return federated_reconstruction(
        matrix_factorization(items, dim=dim),
        reconstruct=gradient_descent(optax.sgd(0.1), batch_size=5, steps=10),
        update=gradient_descent(optax.sgd(0.1), batch_size=5, steps=10),
        server=optax.sgd(1.0),  # so that the change of the model is what was released
        aggregate=aggregator,
    )


def _train(
    algorithm: Algorithm, clients: Clients, canaries: Canaries, clip: float, rounds: int, seed: int, times: int
) -> np.ndarray:
    """Return the sum of all that was released, in one row."""
    state = algorithm.init(jax.random.key(seed))
    first = _row(algorithm.params(state))
    theirs = _canary_uploads(algorithm, algorithm.params(state), canaries, TOO_LONG * clip)
    share, rng = algorithm.aggregator.share, np.random.default_rng([seed, 1])
    for number in range(rounds):
        key, message = round_key(seed, number), algorithm.message(state)
        real = client_update(algorithm, message, clients, key)
        totals = [_total(algorithm, message, upload, key) for upload in (real, *[theirs] * times)]
        if share is not None:  # clients add it; drawn at once, which is the same
            parts = algorithm.method.parts(state.method)
            totals[0] = add_noise(share(parts), totals[0], rng, REAL + int(canaries.inside.sum()))
        state = server_update(algorithm, state, totals, key)
    return (_row(algorithm.params(state)) - first) * PER_ROUND


def _total(algorithm: Algorithm, message: Any, upload: Upload, key: Any) -> Total:
    summand = encode(algorithm, message, jax.tree.map(jnp.asarray, upload), jax.random.split(key, len(upload.examples)))
    return add(no_total(summand), summand)


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


# ---- round zero ----


def _audit_round_zero(noise: float, canaries: int, delta: float, seed: int, sabotage: Sabotage) -> Audit:
    """Ask canaries the questions of round zero, each with items that nobody else has; look for their answers."""
    if sabotage == "no-clipping":
        raise ValueError("answers of round zero have norm 1 by construction; there is no clipping to leave out")
    rng = np.random.default_rng([seed, 2])
    items = canaries * RATED
    item = rng.permutation(items)
    rating = _extremes(rng, canaries)
    owner = np.repeat(np.arange(canaries), RATED)
    inside = rng.random(canaries) < 0.5
    took_part = inside[owner]
    round_zero = RoundZero(num_items=items, noise_multiplier=noise, clients=int(inside.sum()), scale=(1.0, 5.0))
    state, scores = round_zero.start(), np.zeros(canaries)
    while not state.done:
        wanted = round_zero.noise_of(state)
        used = wanted / 2 if sabotage == "half-noise" else wanted
        total = round_zero.answer_each(state, item[took_part], rating[took_part], owner[took_part]).total()
        total = total * (2 if sabotage == "twice" else 1) + rng.normal(0.0, used, len(total))
        answers = round_zero.answer_each(state, item, rating, owner)  # what each would have answered
        unique = np.bincount(answers.index, minlength=len(total))[answers.index] == 1  # others would be in the way
        values = np.where(unique, answers.value * total[answers.index], 0.0) / wanted**2
        scores += np.bincount(answers.client, values, canaries)
        state = round_zero.advance(state, {ANSWER: total}, used)
    claimed = epsilon_of(round_zero.releases(), delta)
    return audit(scores[inside], scores[~inside], claimed=claimed, delta=delta)


def _extremes(rng: np.random.Generator, canaries: int) -> np.ndarray:
    """Return ratings of 1 and 5, half of each for every canary, in random order: the longest possible answers."""
    half = np.tile(np.repeat([1.0, 5.0], RATED // 2), (canaries, 1))
    return rng.permuted(half, axis=1).reshape(-1)
