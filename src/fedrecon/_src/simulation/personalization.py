"""Personal models: reconstruct a client's local parameters, predict with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import as_clients
from fedrecon._src.algorithms.validation import check_reconstruction, check_values, features_of
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import ABSENT, Needs, Packer, lengths_for
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Model
from fedrecon._src.core.split import support_only
from fedrecon._src.simulation.engine import Layout, compile_each, layout, put_on_devices

SHORTEST = 16  # the least number of support examples that arrays have room for
PART = 4096  # clients that are packed and run together


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

    Example:
      >>> import jax
      >>> import optax
      >>> import fedrecon as fr
      >>> ratings = fr.Clients.from_columns({"item": [0, 1, 0, 1], "rating": [5.0, 3.0, 4.0, 2.0]}, client=[0, 0, 1, 1])
      >>> steps = fr.gradient_descent(optax.sgd(0.1), batch_size=2, steps=2)
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(2, 3), reconstruct=steps, update=steps, server=optax.sgd(1.0)
      ... )
      >>> params = algorithm.params(algorithm.init(jax.random.key(0)))
      >>> fr.reconstruct(algorithm, params, {"item": [0, 1], "rating": [5.0, 3.0]})["user_embedding"].shape
      (3,)
      >>> fr.reconstruct(algorithm, params, ratings)["user_embedding"].shape
      (2, 3)
    """
    if not isinstance(examples, Clients):
        local = reconstruct(algorithm, params, as_clients(examples), seed=seed)
        return jax.tree.map(lambda leaf: leaf[0], local)
    compiled_layout, run = _compile(algorithm)
    check_reconstruction(algorithm, examples)
    check_values(algorithm, examples)
    needs = Needs(support_only(), algorithm.method.support_limit, columns=features_of(algorithm, examples))
    lengths = lengths_for(examples.max_size, needs)
    if algorithm.model.state is None:  # statistics of layers that take no mask would depend on the padding
        lengths = lengths._replace(support=_round_up(lengths.support, needs.support_limit))
    packer = Packer(examples, needs, lengths)
    run_packed = functools.partial(run, put_on_devices((params, jax.random.key(seed)), compiled_layout))
    parts = [
        _reconstruct_part(run_packed, compiled_layout, packer, examples.sizes, chosen)
        for chosen in np.split(np.arange(len(examples)), range(PART, len(examples), PART))
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _round_up(number: int, most: int | None = None, least: int = SHORTEST) -> int:
    """Return the next power of two, at least `least` and at most `most`, so that few lengths are compiled."""
    rounded = max(least, 1 << max(0, number - 1).bit_length())
    return rounded if most is None else max(number, min(rounded, most))


def _reconstruct_part(
    run: Callable[..., Any], order_by: Layout, packer: Packer, sizes_of: np.ndarray, chosen: np.ndarray
) -> Any:
    """Reconstruct the local parameters of the chosen clients, in that order."""
    indices = np.full(_round_up(len(chosen), least=1), ABSENT)  # absent clients would be computed too
    indices[: len(chosen)] = chosen
    sizes = np.zeros(len(indices), np.int64)
    sizes[: len(chosen)] = sizes_of[chosen]
    order = order_by.arrange(indices, sizes)
    local = run(packer.pack(order))
    back = np.empty(len(chosen), np.int64)
    back[order[order >= 0] - (chosen[0] if len(chosen) else 0)] = np.flatnonzero(order >= 0)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[back], local)


@functools.lru_cache(maxsize=8)
def _compile(algorithm: Algorithm) -> tuple[Layout, Callable[..., Any]]:
    """Return the layout of an algorithm's reconstruction, and how to run it, compiled once for every shape."""
    chosen = layout(model=algorithm.model, alone=True)

    def block(shared: Any, part: Any) -> Any:
        keys = client_keys(shared[1], part.identity)
        return algorithm.method.reconstruct(shared[0], (), part.support, keys)

    return chosen, compile_each(block, chosen)


def predict(model: Model, params: Any, local: Any, batch: Mapping[str, Any]) -> np.ndarray:
    """Predict for one client, with its local parameters.

    Args:
      model: what predicts; after `with_finetuning`, the `model` of the algorithm that it returned.
      params: global parameters.
      local: the client's local parameters, as `reconstruct` returns them.
      batch: columns of examples; only those that the model's predictions read are needed.

    Returns:
      The predictions, as an array.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> model = fr.models.matrix_factorization(num_items=2, dim=2)
      >>> params = {"item_embedding": np.array([[1.0, 0.0], [0.5, 2.0]])}
      >>> fr.predict(model, params, {"user_embedding": np.array([4.0, 1.0])}, {"item": [0, 1]}).tolist()
      [4.0, 4.0]
    """
    columns = {name: jnp.asarray(column) for name, column in batch.items()}
    return np.asarray(model.predict(jax.tree.map(jnp.asarray, params), local, columns))
