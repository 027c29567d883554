"""Run the client and server sides of a round outside the simulator: on a node, in a test, anywhere.

Rounds built from these functions match the simulator's to about 1e-6; only the order of sums differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.algorithms.algorithm import (
    Algorithm,
    RoundMessage,
    ServerState,
    empty_total,
    encode,
    finish_round,
)
from fedrecon._src.algorithms.validation import features_of
from fedrecon._src.core.clients import Clients, check_clients
from fedrecon._src.core.cohort import ABSENT, Cohort, Lengths, Packer
from fedrecon._src.core.keys import as_number, client_keys, fresh_key, run_keys, words_of
from fedrecon._src.core.upload import Parts, Total, Upload, add, no_total
from fedrecon._src.server.aggregator import Report

AT_ONCE = 16  # clients of a gateway that run side by side


class ClientRound(NamedTuple):
    """The result of a round on clients: their upload, and what they keep (empty for methods that keep nothing)."""

    upload: Upload
    client_state: Any


class ClientTotal(NamedTuple):
    """The result of a round on a gateway's clients: the sum of their encoded uploads, and what they keep."""

    total: Total
    client_state: Any


def client_update(
    algorithm: Algorithm,
    message: RoundMessage,
    examples: Clients | Mapping[str, Any],
    key: Array,
    *,
    client: Any = 0,
    lengths: Lengths | None = None,
) -> Upload:
    """Run a round on a client, or on the several clients of a gateway.

    Args:
      algorithm: what is trained. If its clients keep something between rounds, use `client_round`.
      message: what the server sent: `algorithm.message(state)`, as numpy or JAX arrays.
      examples: the columns of one client, or `Clients` for several.
      key: the round's key: `round_key(seed, number)`.
      client: the name of the one client; `Clients` have their own names. Everything random for a client follows from
        its name.
      lengths: room for support and query examples, so that hosts with different clients run the same program; by
        default as much as these clients need.

    Returns:
      All that leaves the clients, clients first in every leaf.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> import optax
      >>> model = fr.models.matrix_factorization(num_items=10, dim=2)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=2)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=descend, update=descend, server=optax.sgd(1.0))
      >>> state = algorithm.init(fr.kit.run_keys(0).init)
      >>> examples = {"item": np.array([3, 5]), "rating": np.float32([4, 1])}
      >>> message, key = algorithm.message(state), fr.kit.round_key(0, 0)
      >>> upload = fr.kit.client_update(algorithm, message, examples, key, client="ann")
      >>> upload.delta["item_embedding"].ids[0, :1].tolist()  # the one item of ann's query
      [5]
    """
    return client_round(algorithm, message, examples, key, client=client, lengths=lengths).upload


def client_round(
    algorithm: Algorithm,
    message: RoundMessage,
    examples: Clients | Mapping[str, Any],
    key: Array,
    client_state: Any = None,
    *,
    client: Any = 0,
    lengths: Lengths | None = None,
) -> ClientRound:
    """Run a round on clients that keep something from round to round.

    Args:
      algorithm: what is trained.
      message: what the server sent.
      examples: the columns of one client, or `Clients` for several.
      key: the round's key.
      client_state: what the clients kept from their last round, clients first; None before their first, or if they keep
        nothing.
      client: the name of the one client.
      lengths: room for support and query examples.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> import optax
      >>> model = fr.models.matrix_factorization(num_items=10, dim=2)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=2)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=descend, update=descend, server=optax.sgd(1.0))
      >>> state = algorithm.init(fr.kit.run_keys(0).init)
      >>> examples = {"item": np.array([3, 5]), "rating": np.float32([4, 1])}
      >>> key = fr.kit.round_key(0, 0)
      >>> result = fr.kit.client_round(algorithm, algorithm.message(state), examples, key, client="ann")
      >>> result.client_state  # this method keeps nothing
      ()
    """
    clients, run = as_clients(examples, client), _compiled(_run_clients, algorithm)
    blocks = _blocks(algorithm, clients, key, client_state, lengths)
    return ClientRound(*concatenate([jax.device_get(run(message, *block)) for block in blocks], len(clients)))


def client_total(
    algorithm: Algorithm,
    message: RoundMessage,
    examples: Clients | Mapping[str, Any],
    key: Array,
    client_state: Any = None,
    *,
    client: Any = 0,
    lengths: Lengths | None = None,
    secret: Array | None = None,
) -> ClientTotal:
    """Run a round on clients, encode their uploads, and add them up before anything is sent.

    Args:
      algorithm: what is trained.
      message: what the server sent.
      examples: the columns of one client, or `Clients` for several.
      key: the round's key.
      client_state: what the clients kept from their last round; see `client_round`.
      client: the name of the one client.
      lengths: room for support and query examples.
      secret: a key that the server does not know, for what the aggregator draws on clients (noise, masks). By default
        the round's key is used, as in the simulator; the server knows that key too.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> import optax
      >>> model = fr.models.matrix_factorization(num_items=10, dim=2)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=2)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=descend, update=descend, server=optax.sgd(1.0))
      >>> state = algorithm.init(fr.kit.run_keys(0).init)
      >>> examples = {"item": np.array([3, 5]), "rating": np.float32([4, 1])}
      >>> key = fr.kit.round_key(0, 0)
      >>> result = fr.kit.client_total(algorithm, algorithm.message(state), examples, key, client="ann")
      >>> float(result.total.scalars["clients"])
      1.0
    """
    clients, run = as_clients(examples, client), _compiled(_add_clients, algorithm)
    total, states = None, []
    for block in _blocks(algorithm, clients, key, client_state, lengths):
        part, state = run(message, key if secret is None else secret, *block)
        total = part if total is None else jax.tree.map(jnp.add, total, part)
        states.append(jax.device_get(state))
    return ClientTotal(jax.device_get(total), concatenate(states, len(clients)))


def init_client_state(algorithm: Algorithm, clients: Clients, seed: int) -> Any:
    """Return the state of clients before their first round, clients first; an empty tuple if they keep nothing.

    Args:
      algorithm: what is trained.
      clients: the population.
      seed: the run's seed.

    Example:
      >>> import optax
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": [0, 1], "rating": [5.0, 3.0]}, client=["ada", "bob"])
      >>> steps = fr.gradient_descent(optax.sgd(0.1), batch_size=1)
      >>> algorithm = fr.federated_averaging(
      ...     fr.models.matrix_factorization(2, 3), update=steps, server=optax.sgd(1.0)
      ... )
      >>> fr.kit.init_client_state(algorithm, clients, seed=0)["user_embedding"].shape
      (2, 3)
    """
    if algorithm.method.init_client is None:
        return ()
    keys = client_keys(jax.random.key(seed), clients.identities())
    return jax.tree.map(np.array, algorithm.init_clients(algorithm.init(run_keys(seed).init), keys))


def server_update(
    algorithm: Algorithm, state: ServerState, uploads: Iterable[Upload | Total], key: Array | None = None
) -> ServerState:
    """Aggregate the uploads of a round and take a server step.

    Args:
      algorithm: what is trained.
      state: the server's state before the round, as numpy or JAX arrays.
      uploads: clients' uploads, which are encoded here; or totals that gateways have already encoded and added up.
      key: for what the aggregator draws on the server; from the system's entropy by default.

    Returns:
      The state after the round. If the round is skipped, its parameters are unchanged.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> import optax
      >>> model = fr.models.matrix_factorization(num_items=10, dim=2)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=2)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=descend, update=descend, server=optax.sgd(1.0))
      >>> state = algorithm.init(fr.kit.run_keys(0).init)
      >>> examples = {"item": np.array([3, 5]), "rating": np.float32([4, 1])}
      >>> message, key = algorithm.message(state), fr.kit.round_key(0, 0)
      >>> upload = fr.kit.client_update(algorithm, message, examples, key, client="ann")
      >>> state = fr.kit.server_update(algorithm, state, [upload])
    """
    return server_round(algorithm, state, uploads, key)[0]


def server_round(
    algorithm: Algorithm, state: ServerState, uploads: Iterable[Upload | Total], key: Array | None = None
) -> tuple[ServerState, Report]:
    """Aggregate the uploads of a round, take a server step, and report on the round.

    Args:
      algorithm: what is trained.
      state: the server's state before the round.
      uploads: clients' uploads, or gateways' totals.
      key: for what the aggregator draws on the server; from the system's entropy by default.

    Returns:
      The state after the round, and a report: counts, sums of metrics, whether the round was `skipped`.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> import optax
      >>> model = fr.models.matrix_factorization(num_items=10, dim=2)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=2)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=descend, update=descend, server=optax.sgd(1.0))
      >>> state = algorithm.init(fr.kit.run_keys(0).init)
      >>> examples = {"item": np.array([3, 5]), "rating": np.float32([4, 1])}
      >>> message, key = algorithm.message(state), fr.kit.round_key(0, 0)
      >>> upload = fr.kit.client_update(algorithm, message, examples, key, client="ann")
      >>> state, report = fr.kit.server_round(algorithm, state, [upload])
      >>> float(report["clients"])
      1.0
    """
    key = fresh_key() if key is None else key
    state = jax.tree.map(jnp.asarray, state)
    message = algorithm.message(state)
    total = None
    for upload in uploads:
        part = upload if isinstance(upload, Total) else _compiled(_add_uploads, algorithm)(message, upload, key)
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    if total is None:
        raise ValueError("`uploads` is empty; a round needs at least one upload")
    return _compiled(finish_round, algorithm)(state, jax.tree.map(jnp.asarray, total), key)


def as_clients(examples: Clients | Mapping[str, Any], client: Any = 0) -> Clients:
    """Return one client's columns as `Clients`; `Clients` are returned unchanged.

    Args:
      examples: the columns of one client, or `Clients`.
      client: the name of the one client.
    """
    if isinstance(examples, Clients):
        return examples
    arrays = {name: np.asarray(column) for name, column in examples.items()}
    examples_of_client = max(map(len, arrays.values()), default=0)
    return Clients(arrays, np.array([0]), np.array([examples_of_client]), np.array([client]))


def _blocks(
    algorithm: Algorithm, clients: Clients, key: Array, client_state: Any, lengths: Lengths | None
) -> Iterator[tuple[Any, Cohort, Array]]:
    """Yield the arguments of a client function, for blocks of one size; clients that the last one lacks are absent."""
    check_clients(clients, "run")
    if algorithm.method.init_client is None:
        client_state = ()
    elif client_state is None:
        raise ValueError(
            "`client_state` is missing: clients of this method keep state between rounds; before the first round, pass "
            "`init_client_state(algorithm, clients, seed)`"
        )
    packer, draw = _packer(algorithm, clients, lengths), as_number(words_of(key))
    block = 1 if len(clients) == 1 else AT_ONCE
    for begin in range(0, len(clients), block):
        numbers = np.arange(begin, begin + block)
        indices = np.where(numbers < len(clients), numbers, ABSENT)
        state = jax.tree.map(lambda leaf, at=indices: np.asarray(leaf)[np.maximum(at, 0)], client_state)
        yield state, packer.pack(indices, np.full(block, draw)), key


def concatenate(trees: Sequence[Any], clients: int | None = None) -> Any:
    """Concatenate the arrays of several pytrees of one structure.

    Args:
      trees: of clients, clients first in every leaf.
      clients: how many there are, without those that are absent; None for all.
    """
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:clients], *trees)


def _packer(algorithm: Algorithm, clients: Clients, lengths: Lengths | None = None) -> Packer:
    return Packer(clients, algorithm.method.needs._replace(columns=features_of(algorithm, clients)), lengths)


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], algorithm: Algorithm) -> Callable[..., Any]:
    """Compile a function of an algorithm and arrays, once for each algorithm."""
    return jax.jit(functools.partial(function, algorithm))


def _run_clients(algorithm: Algorithm, message: RoundMessage, *arguments: Any) -> tuple[Upload, Any]:
    return algorithm.method.client(message.method, *arguments)


def _add_clients(
    algorithm: Algorithm, message: RoundMessage, secret: Array, client_state: Any, cohort: Cohort, key: Array
) -> tuple[Total, Any]:
    upload, client_state = algorithm.method.client(message.method, client_state, cohort, key)
    return _encoded_total(algorithm, message, upload, client_keys(secret, cohort.identity)), client_state


def _add_uploads(algorithm: Algorithm, message: RoundMessage, upload: Upload, key: Array) -> Total:
    return _encoded_total(algorithm, message, upload, jax.random.split(key, upload.examples.shape[0]))


def _encoded_total(algorithm: Algorithm, message: RoundMessage, upload: Upload, keys: Array) -> Total:
    summand = encode(algorithm, message, upload, keys)
    return add(no_total(summand), summand)


def upload_groups(algorithm: Algorithm, clients: Clients) -> tuple[dict[tuple[str, str], str], list[tuple]]:
    """Find which changes a client uploads by rows, by tracing one upload.

    Args:
      algorithm: what is trained, with decided lookups.
      clients: the data.

    Returns:
      The group of lookup tables by part and path, for changes by rows; and all changes as `(part, path, whole shape)`.
    """
    groups: dict[tuple[str, str], str] = {}
    method, key = algorithm.method, jax.random.key(0)

    def trace(cohort: Cohort) -> Parts:
        state = algorithm.init(key)
        client_state = algorithm.init_clients(state, client_keys(key, cohort.identity))
        upload = method.client(algorithm.message(state).method, client_state, cohort, key)[0]
        for part, changes in upload.parts.items():
            for path, change in changes.items():
                # A table's change counts its rows with the very list that its group was packed with.
                same = [name for name, count in cohort.num_rows.items() if getattr(change, "count", None) is count]
                groups.update(dict.fromkeys([(part, path)], *same) if same else {})
        return method.parts(state.method)

    parts = jax.eval_shape(trace, _packer(algorithm, clients).pack(np.array([ABSENT])))
    return groups, [(part, path, leaf) for part, leaves in parts.items() for path, leaf in leaves.items()]


def total_shapes(algorithm: Algorithm) -> Total:
    """Return what a gateway's total looks like on the wire, with shapes instead of arrays.

    Args:
      algorithm: what is trained.
    """
    return jax.eval_shape(lambda: empty_total(algorithm, algorithm.init(jax.random.key(0))))
