"""Audit: what an attacker finds out about canaries, against what was promised.

python -m studies.audit --noise-multiplier 1 --rounds 8

A canary is a client whose upload is a random direction at the clipping norm (`Canaries`). A coin decides whether it
takes part. The attacker looks for each canary's direction in everything that was released; if those inside can be told
from those outside better than epsilon allows, the promise is broken. If the attacker fails, that proves nothing: the
result is a lower bound. Canaries take part among real clients and are clipped and noised like them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from fedrecon._src.algorithms.algorithm import Algorithm, encode
from fedrecon._src.algorithms.federated_reconstruction import federated_reconstruction
from fedrecon._src.algorithms.rounds import client_update, server_update
from fedrecon._src.client.gradient_descent import gradient_descent
from fedrecon._src.core.checks import check_number, require
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.keys import round_key
from fedrecon._src.core.model import metric_names
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.core.upload import DELTA, Total, Upload, add, no_total
from fedrecon._src.data.synthetic import synthetic_ratings
from fedrecon._src.models.factorization import matrix_factorization
from fedrecon._src.privacy.accounting import check_delta, epsilon_of
from fedrecon._src.recommend.round_zero import ANSWER, RoundZero
from fedrecon._src.server.aggregator import Aggregator
from fedrecon._src.server.fixed_point import ClientNoise, add_noise, secure
from fedrecon._src.server.gaussian import private


class Audit(NamedTuple):
    """What an audit found.

    Attributes:
      claimed: the epsilon that was promised.
      measured: with the confidence given, epsilon is above this. Assumes that the noise is Gaussian in shape, or a sum
        of many rounds, and that scores are independent.
      any_noise: the same without that assumption, for all canaries in one run; much weaker.
      confidence: of each of the two bounds.
      delta: of the guarantee.
      inside: how many canaries took part.
      outside: how many did not.
      auc: how well scores tell them apart: .5 not at all, 1 always.
    """

    claimed: float
    measured: float
    any_noise: float
    confidence: float
    delta: float
    inside: int
    outside: int
    auc: float

    @property
    def broken(self) -> bool:
        """Whether the promise is refuted."""
        return max(self.measured, self.any_noise) > self.claimed

    def summary(self) -> str:
        """Say in a sentence what was found."""
        measured = max(self.measured, self.any_noise)
        verdict = "the promise is broken" if self.broken else "nothing speaks against the promise"
        return (
            f"claimed epsilon {self.claimed:.3g}, measured at least {measured:.3g} ({self.confidence:.0%} confidence, "
            f"delta {self.delta:.2g}, {self.inside} canaries inside and {self.outside} outside): {verdict}"
        )


def audit(inside: np.ndarray, outside: np.ndarray, *, claimed: float, delta: float, confidence: float = 0.95) -> Audit:
    """Turn scores of canaries into a lower bound on epsilon.

    Args:
      inside: scores of canaries that took part; higher means more likely inside.
      outside: scores of those that did not.
      claimed: the epsilon that was promised.
      delta: of the guarantee.
      confidence: with which the true epsilon is above the bound.

    References: Nasr et al., Tight auditing of differentially private machine learning, 2023 (`measured`).
    Steinke, Nasr and Jagielski, Privacy auditing with one (1) training run, 2023 (`any_noise`).
    """
    check_delta(delta)
    check_number("confidence", confidence, least=0.5, most=1, above=True, below=True)
    if not claimed > 0:
        raise ValueError(f"`claimed` must be an epsilon above 0 (got {claimed})")
    inside, outside = _checked("inside", inside), _checked("outside", outside)
    auditor = require("jax_privacy.auditing").CanaryScoreAuditor(inside, outside)
    return Audit(
        claimed,
        epsilon_of_shift(least_shift(inside, outside, confidence), delta),
        float(auditor.epsilon_one_run(1 - confidence, delta)),
        confidence,
        delta,
        len(inside),
        len(outside),
        float(auditor.attack_auroc()),
    )


def least_shift(inside: np.ndarray, outside: np.ndarray, confidence: float) -> float:
    """Return the least distance, in standard deviations, between two normal distributions that such scores allow.

    Every other score chooses the threshold; the rest are counted at it, with upper bounds on both kinds of error
    (Clopper and Pearson). `CanaryScoreAuditor.epsilon_from_gdp` of jax-privacy 2.0 goes over all thresholds and takes
    the absolute value of negative distances. Those come from loose upper bounds where nearly all scores are on one side
    of the threshold, and it then reports an epsilon for scores of pure noise. Hence this function.

    Args:
      inside: scores of canaries that took part.
      outside: scores of those that did not.
      confidence: with which the true distance is no less.
    """
    doubt = (1 - confidence) / 2
    thresholds = np.unique(np.concatenate([inside[::2], outside[::2]]))
    best = thresholds[np.argmax(_shift_at(thresholds, inside[::2], outside[::2], doubt))]
    return max(float(_shift_at(best, inside[1::2], outside[1::2], doubt)), 0.0)


def _shift_at(threshold: np.ndarray, inside: np.ndarray, outside: np.ndarray, doubt: float) -> np.ndarray:
    missed = np.searchsorted(np.sort(inside), threshold, side="left")  # inside, and taken for outside
    false = len(outside) - np.searchsorted(np.sort(outside), threshold, side="left")
    return stats.norm.isf(_upper(false, len(outside), doubt)) - stats.norm.ppf(_upper(missed, len(inside), doubt))


def epsilon_of_shift(shift: float, delta: float) -> float:
    """Return epsilon of a Gaussian mechanism whose two outcomes are `shift` standard deviations apart.

    Args:
      shift: the distance.
      delta: of the guarantee.
    """
    return float(require("dp_accounting").get_epsilon_gaussian(1 / shift, delta)) if shift > 0 else 0.0


def _upper(count: np.ndarray, of: int, doubt: float) -> np.ndarray:
    return np.where(count < of, stats.beta.ppf(1 - doubt, count + 1, np.maximum(of - count, 1)), 1.0)


def _checked(name: str, scores: np.ndarray) -> np.ndarray:
    array = np.asarray(scores, np.float64)
    if array.ndim != 1 or len(array) < 10 or not np.isfinite(array).all():
        raise ValueError(f"`{name}` must be one dimension of ten or more finite scores (got shape {array.shape})")
    return array


class Canaries:
    """Clients whose uploads are random directions, each at a right angle to all others.

    Each canary has some entries of its own, chosen at random, with random signs. So one canary is never mistaken for
    another, and uploads and scores cost no more than one pass over the entries.

    Attributes:
      inside: `(count,)` which of them take part: a coin for each.
    """

    def __init__(self, count: int, length: int, seed: int) -> None:
        """Draw canaries.

        Args:
          count: how many; half of them take part, on average.
          length: how many entries an upload has.
          seed: of the audit.
        """
        if not 20 <= count <= length:
            raise ValueError(f"`canaries` must be from 20 to {length}, the length of an upload (got {count})")
        rng = np.random.default_rng(seed)
        entries = length // count  # of each canary
        self._length = length
        self._entries = rng.permutation(length)[: count * entries].reshape(count, entries)
        self._signs = rng.choice([-1.0, 1.0], (count, entries))
        self.inside = rng.random(count) < 0.5

    def upload(self, number: int, norm: float) -> np.ndarray:
        """Return what a canary uploads.

        Args:
          number: which canary.
          norm: the clipping norm.
        """
        upload = np.zeros(self._length)
        upload[self._entries[number]] = self._signs[number] * (norm / math.sqrt(self._signs.shape[1]))
        return upload

    def scores(self, released: np.ndarray) -> np.ndarray:
        """Return how far the sum of everything released goes in the direction of each canary.

        Args:
          released: `(length,)` the sum, over rounds, of what was released.
        """
        return (released[self._entries] * self._signs).sum(1) / math.sqrt(self._signs.shape[1])


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
    check_number("noise_multiplier", noise_multiplier, least=0.05, most=1e6)
    check_number("rounds", rounds, least=1, most=10**6)
    check_number("canaries", canaries, least=20, most=10**5)
    check_number("seed", seed, most=2**32 - 1)
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
    participants = REAL + int(drawn.inside.sum())

    def aggregator(norm: float, noise: float) -> Aggregator:
        if noise_by == "server":
            return private(norm, noise, per_round=PER_ROUND)
        by_clients = ClientNoise(noise, PER_ROUND, participants, simulated=False)
        return secure(norm, clients=times * participants, noise=by_clients)

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
        raise ValueError("round zero does not clip: its answers have norm 1 by construction")
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
        noise_scale = round_zero.noise_of(state)
        used = noise_scale / 2 if sabotage == "half-noise" else noise_scale
        total = round_zero.answer_each(state, item[took_part], rating[took_part], owner[took_part]).total()
        total = total * (2 if sabotage == "twice" else 1) + rng.normal(0.0, used, len(total))
        answers = round_zero.answer_each(state, item, rating, owner)  # what each would have answered
        client, index, value = (np.concatenate(arrays) for arrays in zip(*answers.parts, strict=True))
        unique = np.bincount(index, minlength=len(total))[index] == 1  # others would be in the way
        scores += np.bincount(client, np.where(unique, value * total[index], 0.0) / noise_scale**2, canaries)
        state = round_zero.advance(state, {ANSWER: total}, used)
    claimed = epsilon_of(round_zero.releases(), delta)
    return audit(scores[inside], scores[~inside], claimed=claimed, delta=delta)


def _extremes(rng: np.random.Generator, canaries: int) -> np.ndarray:
    """Return ratings of 1 and 5, half of each for every canary, in random order: the longest possible answers."""
    half = np.tile(np.repeat([1.0, 5.0], RATED // 2), (canaries, 1))
    return rng.permuted(half, axis=1).reshape(-1)


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
    """Train a small recommender with canaries among its clients, and try to detect them. Fails if it can."""
    parser = argparse.ArgumentParser("python -m studies.audit", description=main.__doc__)
    parser.add_argument(
        "--noise-multiplier", type=float, default=2.0, help="noise in the sum of updates, in units of the clipping norm"
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds of training; canaries take part in all of them")
    parser.add_argument("--canaries", type=int, default=1000, help="how many")
    parser.add_argument("--delta", type=float, default=1e-5, help="of the promise")
    parser.add_argument(
        "--noise-by",
        choices=get_args(By),
        default="server",
        help="whose noise: the server's, the clients' own in integers of a secure sum, or round zero's",
    )
    parser.add_argument(
        "--sabotage", choices=get_args(Sabotage), default="none", help="break something, to check that it is detected"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = vars(parser.parse_args(argv))
    as_json = options.pop("json")
    try:
        result = audit_run(**options)
    except ValueError as error:
        print(f"studies.audit: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**result._asdict(), "broken": result.broken}) if as_json else result.summary())
    return int(result.broken)


if __name__ == "__main__":
    sys.exit(main())
