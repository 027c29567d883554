"""Attacks of a curious server on what clients upload: which rows, which local parameters, which ratings, whose."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm, RoundMessage
from fedrecon._src.algorithms.rounds import client_update
from fedrecon._src.algorithms.validation import features_of
from fedrecon._src.client.lookups.lookup_tables import lookup_groups
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import Cohort, Examples, Packer
from fedrecon._src.core.keys import as_number, client_keys, words_of
from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.core.split import query_only
from fedrecon._src.core.upload import RowChanges


class Victims(NamedTuple):
    """People whose uploads are attacked, and the truth about them.

    Attributes:
      uploads: `(people, entries)` what each uploads, whole, in one row.
      places: `{path: (begin, end, shape)}` where a leaf is in a row of `uploads`.
      rows: for the attacked table, `(people, rows)` which rows a person's upload may change: those of its query, and of
        its support where the method learns from that too; None without a table.
      table: path of that table.
      local: `(people, numbers)` the local parameters of the round.
      vector: `(people, width)` the local vector that multiplies rows of the table; None if there is none.
      vector_path: its path among the local parameters.
      ratings: `(people, rows)` what the query says about each row; NaN elsewhere. None if there are no ratings.
    """

    uploads: np.ndarray
    places: dict[str, tuple[int, int, tuple[int, ...]]]
    rows: np.ndarray | None
    table: str | None
    local: np.ndarray
    vector: np.ndarray | None
    vector_path: str | None
    ratings: np.ndarray | None


def observe(
    algorithm: Algorithm, message: RoundMessage, clients: Clients, key: Any, *, rating: str
) -> tuple[Victims, Cohort]:
    """Run a round on clients, and record what each uploads and the truth about it.

    Args:
      algorithm: what is trained.
      message: of the round.
      clients: whose uploads are attacked.
      key: of the round.
      rating: the feature that the attacker wants to know of each row.
    """
    upload = client_update(algorithm, message, clients, key)
    flat, places, begin = [], {}, 0
    for path, change in upload.delta.items():
        whole = np.asarray(change.whole() if isinstance(change, RowChanges) else change)
        flat.append(whole.reshape(len(whole), -1))
        places[path] = (begin, begin + flat[-1].shape[1], whole.shape[1:])
        begin += flat[-1].shape[1]
    cohort = _cohort(algorithm, clients, key)
    keys = client_keys(key, jnp.asarray(cohort.identity))
    local = jax.jit(algorithm.method.reconstruct)(message.method, (), cohort.support, keys)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(local)[0].items()}
    table, vector = _pair(algorithm, places, leaves)
    rows = ratings = None
    if table is not None:
        feature = lookup_groups(algorithm.model)[table]
        size = places[table][2][0]
        sides = (cohort.query, cohort.support) if algorithm.method.needs.support_rows else (cohort.query,)
        rows = _rows(sides, feature, size)
        ratings = _ratings(cohort, feature, size, rating)
    width = [leaf.reshape(len(clients), -1) for leaf in leaves.values()]
    return Victims(
        np.concatenate(flat, 1),
        places,
        rows,
        table,
        np.concatenate(width, 1) if width else np.zeros((len(clients), 0)),
        None if vector is None else leaves[vector],
        vector,
        ratings,
    ), cohort


def _cohort(algorithm: Algorithm, clients: Clients, key: Any) -> Cohort:
    """Pack clients as `client_update` does, so that a split that is drawn anew in every round is that of the round."""
    needs = algorithm.method.needs._replace(columns=features_of(algorithm, clients))
    draws = np.full(len(clients), as_number(words_of(key)))
    return Packer(clients, needs).pack(np.arange(len(clients)), draws)


def _pair(algorithm: Algorithm, places: dict[str, Any], local: dict[str, Any]) -> tuple[str | None, str | None]:
    """Choose the table to attack: one whose rows are as wide as a local vector if there is any, else the largest."""
    tables = [path for path in lookup_groups(algorithm.model) if path in places]
    for table in tables:
        for path, leaf in local.items():
            if leaf.ndim == 2 and leaf.shape[1] > 1 and places[table][2][1:] == leaf.shape[1:]:
                return table, path
    return max(tables, key=lambda path: places[path][1] - places[path][0], default=None), None


def _by_client(side: Examples, feature: str) -> list[np.ndarray]:
    column = np.asarray(side.columns[feature])
    return [column[i, :count] for i, count in enumerate(np.asarray(side.count))]


def _rows(sides: Sequence[Examples], features: tuple[str, ...], size: int) -> np.ndarray:
    result = np.zeros((len(sides[0].count), size), bool)
    for side, feature in itertools.product(sides, features):
        for i, ids in enumerate(_by_client(side, feature)):
            result[i, ids.reshape(-1)] = True
    return result


def _ratings(cohort: Cohort, features: tuple[str, ...], size: int, rating: str) -> np.ndarray | None:
    if len(features) != 1 or rating not in cohort.query.columns:
        return None
    if np.ndim(cohort.query.columns[features[0]]) != 2 or np.ndim(cohort.query.columns[rating]) != 2:
        return None
    result = np.full((len(cohort.client), size), np.nan)
    sides = _by_client(cohort.query, features[0]), _by_client(cohort.query, rating)
    for i, (ids, values) in enumerate(zip(*sides, strict=True)):
        result[i, ids] = values
    return result


def _distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values other than 0, up to the rounding of single precision."""
    close = np.round(values, 4)
    return np.array([np.median(values[close == level]) for level in np.unique(close) if level])


# ---- one observed sum ----


def changed_rows(victims: Victims, seen: np.ndarray) -> np.ndarray:
    """Return the change of each row of the table in what was seen, `(rows, width)`."""
    assert victims.table is not None
    begin, end, shape = victims.places[victims.table]
    return seen[begin:end].reshape(shape[0], -1)


def most_changed(victims: Victims, seen: np.ndarray, count: int) -> np.ndarray:
    """Guess which `count` rows a person has: those that changed most."""
    norms = np.linalg.norm(changed_rows(victims, seen), axis=1)
    return np.argsort(-norms, kind="stable")[:count]


def direction(victims: Victims, seen: np.ndarray) -> np.ndarray:
    """Guess the direction of a person's local vector: the first singular vector of the changes."""
    change = changed_rows(victims, seen).astype(np.float64)
    return np.linalg.eigh(change.T @ change)[1][:, -1]


def cosine(first: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors, without its sign."""
    scale = np.linalg.norm(first) * np.linalg.norm(other)
    return float(abs(first @ other) / scale) if scale > 0 else 0.0


class RatingAttack:
    """Solves for ratings: given the local vector, a change is a linear function of the rating.

    The server knows its own settings, so it runs its own client function on a made-up person who has the guessed
    vector and the rows that changed, with ratings of 0 and of 1. The slope is one number for all rows of full batches
    and another for those of the last, shorter one; of two possible ratings it takes the one nearer to a rating that
    people give.
    """

    def __init__(
        self, algorithm: Algorithm, message: RoundMessage, clients: Clients, victims: Victims, rating: str, feature: str
    ):
        """Prepare to attack ratings of rows that `feature` names."""
        self._algorithm, self._message, self._victims = algorithm, message, victims
        self._rating, self._feature = rating, feature
        self._levels = np.unique(clients.columns[rating])
        self._clients = clients
        needs = algorithm.method.needs
        self._needs = needs._replace(split=query_only(), columns=features_of(algorithm, clients))
        self._packer = Packer(clients, self._needs)

    @property
    def possible(self) -> bool:
        """Whether a made-up person needs no more than rows and ratings."""
        return set(self._needs.columns or ()) <= {self._feature, self._rating}

    def solve(self, seen: np.ndarray, rows: np.ndarray, guess: np.ndarray) -> np.ndarray:
        """Return the ratings of rows, given a guess of the local vector with its length and sign."""
        unit = guess / max(np.linalg.norm(guess), 1e-30)
        order = np.sort(rows)
        none, first = (self._simulate(order, guess, level) for level in (0.0, 1.0))
        slopes = _distinct((first - none) @ unit)
        if not len(slopes):
            return np.full(len(rows), np.nan)
        change = changed_rows(self._victims, seen)[rows] @ unit
        base = self._predict(rows, guess)
        options = base[None] + change[None] / slopes[:, None]  # (slopes, rows)
        far = np.abs(options[..., None] - self._levels).min(-1)
        return np.clip(options[far.argmin(0), np.arange(len(rows))], self._levels[0], self._levels[-1])

    def _simulate(self, rows: np.ndarray, guess: np.ndarray, level: float) -> np.ndarray:
        rows = rows[: self._packer.lengths.query]
        columns = {self._feature: rows.astype(self._clients.columns[self._feature].dtype)}
        columns[self._rating] = np.full(len(rows), level, self._clients.columns[self._rating].dtype)
        made_up = Clients(columns, np.array([0]), np.array([len(rows)]), np.array(["made up"]))
        cohort = Packer(made_up, self._needs, self._packer.lengths).pack(np.array([0]))
        change = self._client(self._message.method, jnp.asarray(guess, jnp.float32), cohort)
        return np.asarray(change).reshape(len(change), -1)[rows]

    @functools.cached_property
    def _client(self) -> Any:
        algorithm, table, vector = self._algorithm, self._victims.table, self._victims.vector_path
        assert table is not None
        assert vector is not None
        structure = flatten(jax.eval_shape(lambda: algorithm.model.init_local(jax.random.key(0))))[1]

        def run(params: Any, guess: Any, cohort: Cohort) -> Any:
            def local(key: Any) -> Any:
                leaves = flatten(algorithm.model.init_local(key))[0]
                return unflatten(structure, {**leaves, vector: guess})

            # With no support nothing is reconstructed: local parameters stay as they begin.
            model = algorithm.model._replace(init_local=local, default_local=None, evidence=None)
            method = algorithm.define(model)
            change = method.client(params, (), cohort, jax.random.key(0))[0].delta[table]
            return (change.whole() if isinstance(change, RowChanges) else change)[0]

        return jax.jit(run)

    def _predict(self, rows: np.ndarray, guess: np.ndarray) -> np.ndarray:
        return np.asarray(self._predictions(self._message.method, jnp.asarray(guess, jnp.float32)))[rows]

    @functools.cached_property
    def _predictions(self) -> Any:
        """Compile predictions of all rows: for some rows, each number of rows would be compiled separately."""
        model, vector, table = self._algorithm.model, self._victims.vector_path, self._victims.table
        assert vector is not None
        assert table is not None
        size = self._victims.places[table][2][0]

        def run(params: Any, guess: Any) -> Any:
            leaves, structure = flatten(model.init_local(jax.random.key(0)))
            local = unflatten(structure, {**leaves, vector: guess})
            return model.predict(params, local, {self._feature: jnp.arange(size)})

        return jax.jit(run)
