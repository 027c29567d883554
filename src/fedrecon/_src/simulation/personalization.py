"""Personal models: reconstruct a client's local parameters, predict with them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import as_clients
from fedrecon._src.algorithms.validation import check_reconstruction, features_of
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import ABSENT, Needs, Packer, lengths_for
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Model
from fedrecon._src.core.split import support_only
from fedrecon._src.simulation.engine import compile_each, layout, put_on_devices

SHORTEST = 16  # the least number of support examples that arrays have room for
MOST_AT_ONCE = 4096  # clients that are packed together


def reconstruct(algorithm: Algorithm, params: Any, examples: Clients | Mapping[str, Any], *, seed: int = 0) -> Any:
    """Reconstruct a client's local parameters, with all of its examples as support.

    The first call compiles. Later calls with the same algorithm object and about as much data do not.

    Args:
      algorithm: its reconstruction is run.
      params: global parameters.
      examples: one client's columns, or `Clients` for many at once.
      seed: for the initial local parameters. They also depend on the client's name, just as in `evaluate`.

    Returns:
      The client's local parameters; for `Clients`, with the clients first in every leaf.
    """
    if not isinstance(examples, Clients):
        alone = as_clients(examples)
        return jax.tree.map(lambda leaf: leaf[0], reconstruct(algorithm, params, alone, seed=seed))
    ready = _ready(algorithm)
    check_reconstruction(algorithm, examples)
    needs = Needs(support_only(), algorithm.method.support_limit, columns=features_of(algorithm, examples))
    lengths = lengths_for(examples.max_size, needs)
    if algorithm.model.state is None:  # statistics of layers that take no mask would depend on the padding
        lengths = lengths._replace(support=_rounded_up(lengths.support, needs.support_limit))
    packer = Packer(examples, needs, lengths)
    shared = put_on_devices((params, jax.random.key(seed)), ready.layout)
    parts = [
        _some(ready, packer, examples, np.arange(begin, min(begin + MOST_AT_ONCE, len(examples))), shared)
        for begin in range(0, max(1, len(examples)), MOST_AT_ONCE)
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _rounded_up(number: int, most: int | None = None) -> int:
    """Return the next power of two, at least 16 and at most `most`, so that few lengths are compiled."""
    rounded = max(SHORTEST, 1 << max(0, number - 1).bit_length())
    return rounded if most is None else max(number, min(rounded, most))


def _some(ready: _Ready, packer: Packer, examples: Clients, who: np.ndarray, shared: Any) -> Any:
    """Reconstruct the local parameters of the clients `who`, in that order."""
    indices = np.full(_rounded_up(len(who)), ABSENT)
    indices[: len(who)] = who
    sizes = np.zeros(len(indices), np.int64)
    sizes[: len(who)] = examples.sizes[who]
    order = ready.layout.arrange(indices, sizes)
    local = ready.run(shared, packer.pack(order))
    back = np.empty(len(who), np.int64)
    back[order[order >= 0] - (who[0] if len(who) else 0)] = np.flatnonzero(order >= 0)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[back], local)


class _Ready:
    """An algorithm's reconstruction, compiled once for every shape."""

    def __init__(self, algorithm: Algorithm):
        self.layout = layout(model=algorithm.model, alone=True)

        def block(shared: Any, part: Any) -> Any:
            keys = client_keys(shared[1], part.identity)
            return algorithm.method.reconstruct(shared[0], (), part.support, keys)

        self.run = compile_each(block, self.layout)


_ready = functools.lru_cache(maxsize=8)(_Ready)


def predict(model: Model, params: Any, local: Any, batch: Mapping[str, Any]) -> np.ndarray:
    """Predict for one client, with its local parameters.

    Args:
      model: what predicts; after `then_finetune`, the `model` of the algorithm that it returned.
      params: global parameters.
      local: the client's local parameters, as `reconstruct` returns them.
      batch: columns of examples; only those that the model's predictions read are needed.

    Returns:
      The predictions, as an array.
    """
    columns = {name: jnp.asarray(column) for name, column in batch.items()}
    return np.asarray(model.predict(jax.tree.map(jnp.asarray, params), local, columns))
