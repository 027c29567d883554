"""Fit an algorithm to data: decide its lookups, and check everything before a long run starts."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.client.lookups.tables import check_lookups
from fedrecon._src.client.lookups.tracing import by_rows
from fedrecon._src.client.lookups.validation import PROBED, features_used, known_lookups, stand_ins
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.model import AUTO


def decide_lookups(algorithm: Algorithm, clients: Clients) -> Algorithm:
    """Decide the lookups of an algorithm's model, the same for all hosts that will run it.

    A model whose lookups are "auto" is traced with the shapes of the data; tables that it reads only by rows are then
    handled by rows. Without this it runs on whole tables, with the same results. `train` does this by itself.

    Args:
      algorithm: any algorithm.
      clients: data with the features that the model will see on every host.
    """
    if algorithm.model.lookups != AUTO:
        return algorithm
    reads = known_lookups(algorithm.model, clients)
    return _with_lookups(algorithm, tuple((path, read.features) for path, read in reads.items() if read.features))


@functools.lru_cache(maxsize=8)
def _with_lookups(algorithm: Algorithm, lookups: tuple[tuple[str, tuple[str, ...]], ...]) -> Algorithm:
    """Put lookups into an algorithm's model. Cached, so that code for the result is compiled once."""
    return dataclasses.replace(algorithm, model=by_rows(algorithm.model, dict(lookups)))


def check_fit(algorithm: Algorithm, clients: Clients) -> None:
    """Raise an error if the model, the algorithm and the data do not fit together.

    Args:
      algorithm: the algorithm to run.
      clients: the data.
    """
    if clients.num_examples == 0:
        raise ValueError("the clients have no examples")
    inputs = stand_ins(algorithm.model, clients, features_of(algorithm, clients))
    check_lookups(algorithm.model, *inputs)
    algorithm.method.check(*inputs, jnp.ones(PROBED, bool))
    _facts_of(algorithm).reconstructs.add(_kind(clients))


def check_reconstruction(algorithm: Algorithm, clients: Clients) -> None:
    """Raise an error if the algorithm cannot reconstruct its model's local parameters.

    Args:
      algorithm: the algorithm to run.
      clients: the data.
    """
    facts = _facts_of(algorithm)
    if _kind(clients) not in facts.reconstructs:
        inputs = stand_ins(algorithm.model, clients, features_of(algorithm, clients))
        algorithm.method.check(*inputs, jnp.ones(PROBED, bool))
        facts.reconstructs.add(_kind(clients))


def features_of(algorithm: Algorithm, clients: Clients) -> list[str]:
    """List the features that the algorithm's model reads; see `features_used`.

    Args:
      algorithm: the algorithm to run.
      clients: the data.
    """
    features, kind = _facts_of(algorithm).features, _kind(clients)
    if kind not in features:
        features[kind] = features_used(algorithm.model, clients)
    return features[kind]


_Kind = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type and shape of each column


class _ColumnFacts(NamedTuple):
    """What is known about an algorithm for each kind of columns; cached, since finding out traces the model."""

    features: dict[_Kind, list[str]]
    reconstructs: set[_Kind]


@functools.lru_cache(maxsize=64)
def _facts_of(algorithm: Algorithm) -> _ColumnFacts:
    return _ColumnFacts({}, set())


def _kind(clients: Clients) -> _Kind:
    return tuple((name, column.dtype.str, column.shape[1:]) for name, column in clients.columns.items())
