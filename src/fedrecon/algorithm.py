"""What a federated algorithm is: a model, a method of training it, an aggregator; and one round's end at the server."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon.aggregate.aggregator import Aggregator, Report
from fedrecon.aggregate.averaging import all_finite
from fedrecon.cohort import Cohort, Examples, Needs
from fedrecon.keys import client_keys
from fedrecon.model import Batch, Model
from fedrecon.trees import Params, flatten, unflatten
from fedrecon.upload import DELTA, Parts, Summand, Total, Upload, summand_of

ENCODING = 3  # what a client's key is folded with for the aggregator; R and U have 1 and 2


class Trained(NamedTuple):
    """What a server with an optimizer keeps: the global parameters and the optimizer's state."""

    params: Params
    optimizer: Any


class ServerState(NamedTuple):
    """All that the server keeps from round to round: of the method, any pytree, and of the aggregator."""

    method: Any
    aggregator: Any


class Message(NamedTuple):
    """All that goes down to the clients of a round, to every client the same."""

    method: Any
    aggregator: Any


# (message, kept or held, cohort, key) -> (Upload, kept)
Client = Callable[[Any, Any, Cohort, Array], tuple[Upload, Any]]


class Stages(NamedTuple):
    """A client function in two parts, where the first pays in larger blocks than the second.

    Attributes:
      prepare: `(message, kept, cohort, key) -> held`, clients first: what needs no copies of the global parameters.
      finish: `(message, held, cohort, key) -> (Upload, kept)`: the rest.
    """

    prepare: Callable[[Any, Any, Cohort, Array], Any]
    finish: Client


class Method(NamedTuple):
    """What a method does with one model. All functions are pure and can be compiled.

    Functions of clients work on a block of clients at once, clients first in every leaf of all but the message. One
    client alone is a block of one.

    Attributes:
      init: `key -> state`, any pytree.
      client: `(message, kept, cohort, key) -> (Upload, kept)`; `key` is the round's (see `keys.client_keys`).
      server: `(state, mean, report) -> state`, given the decoded parts of the uploads, `{part: {path: array}}`.
      reconstruct: `(global, kept, support, keys) -> local`, for use after training.
      needs: what `client` must be given of a client's data.
      message: `state -> message`, any pytree; the global parameters by default.
      params: `state -> global parameters`.
      parts: `state -> parts`, the shapes of what uploads add up to; `delta`, like the parameters, by default.
      keep: `keys -> kept`, what clients keep from round to round before their first one; None if they keep nothing.
      check: `(global, local, batch, mask)` of one client; raises if the model does not fit the method.
      support_limit: how many support examples `reconstruct` can use; None for no limit.
      stages: the two parts of `client`, `finish` after `prepare`; None where it cannot be divided.
    """

    init: Callable[[Array], Any]
    client: Client
    server: Callable[[Any, Parts, Report], Any]
    reconstruct: Callable[[Params, Any, Examples, Array], Params]
    needs: Needs
    message: Callable[[Any], Any] = lambda state: state.params
    params: Callable[[Any], Params] = lambda state: state.params
    parts: Callable[[Any], Parts] = lambda state: {DELTA: flatten(state.params)[0]}
    keep: Callable[[Array], Any] | None = None
    check: Callable[[Params, Params, Batch, Array], None] = lambda *args: None
    support_limit: int | None = None
    stages: Stages | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Algorithm:
    """A federated algorithm: what is trained, how, and how uploads become one.

    Nothing is computed or compiled before it is first used. Algorithms are compared by identity.

    Attributes:
      model: what is trained.
      define: `model -> Method`, the method for this model or for the same one with its lookups decided.
      aggregator: from uploads to what the method's server takes.
    """

    model: Model
    define: Callable[[Model], Method]
    aggregator: Aggregator

    @functools.cached_property
    def method(self) -> Method:
        """The method for this model."""
        return self.define(self.model)

    def init(self, key: Array) -> ServerState:
        """Return the server's state before the first round."""
        state = self.method.init(key)
        return ServerState(state, self.aggregator.init(self.method.parts(state)))

    def message(self, state: ServerState) -> Message:
        """Return what goes down to the clients of a round."""
        return Message(self.method.message(state.method), self.aggregator.message(state.aggregator))

    def params(self, state: ServerState) -> Params:
        """Return the global parameters of a state."""
        return self.method.params(state.method)

    def has_local(self) -> bool:
        """Say whether clients have any local parameters."""
        return bool(jax.tree.leaves(shapes_of(self.model.init_local)))


def encode(algorithm: Algorithm, message: Message, upload: Upload, keys: Array) -> Summand:
    """Return what clients add to the sum.

    Args:
      algorithm: whose aggregator encodes.
      message: of the round.
      upload: of several clients.
      keys: of these clients.
    """
    mine = jax.vmap(jax.random.fold_in, (0, None))(keys, ENCODING)
    return algorithm.aggregator.encode(message.aggregator, summand_of(upload), mine)


def summand_shapes(algorithm: Algorithm, state: ServerState, metrics: int) -> Any:
    """Return the shapes of what one client adds to the sum, all parts whole."""
    parts = {
        name: {path: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype) for path, leaf in part.items()}
        for name, part in algorithm.method.parts(state.method).items()
    }
    examples, sums = jax.eval_shape(lambda: (jnp.zeros(1), jnp.zeros((1, metrics, 2))))
    upload = Upload(parts, examples, sums)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    message = jax.eval_shape(algorithm.message, state)
    return jax.eval_shape(functools.partial(encode, algorithm), message, upload, keys)


def finish_round(algorithm: Algorithm, state: ServerState, total: Total, key: Array) -> tuple[ServerState, Report]:
    """End a round at the server: decode the sum and take a step, or leave everything as it was.

    Args:
      algorithm: what is trained.
      state: of the server before the round.
      total: the sum of what clients added.
      key: for what the aggregator draws at the server.

    Returns:
      The new state, and what is known of the round: counts, sums of metrics, whether it was `skipped`.
    """
    scalars = dict(total.scalars)
    mean, aggregator, told = algorithm.aggregator.decode(state.aggregator, total, key)
    skipped = told.get("skipped", ~all_finite(mean.parts))
    report = {**scalars, **told, "skipped": skipped}
    new = algorithm.method.server(state.method, mean.parts, report)
    method = jax.tree.map(lambda a, b: jnp.where(skipped, b, a), new, state.method)
    return ServerState(method, aggregator), report


def shapes_of(init: Callable[[Array], Params]) -> Any:
    """Return the shapes of parameters without computing them, and without starting JAX's devices."""
    return jax.eval_shape(lambda: init(jax.random.key(0)))


def step_keys(model: Model, keys: Array) -> tuple[Array | None, Array | None]:
    """Derive from clients' keys those of the steps of R and of U; None for a model whose steps are not random."""
    if model.fit is None:
        return None, None
    fold = jax.vmap(jax.random.fold_in, (0, None))
    return fold(keys, 1), fold(keys, 2)


def averaged(model: Model) -> tuple[str, ...]:
    """Return the paths of global leaves that the server averages as they are: the global state."""
    return () if model.state is None else model.state.shared


def init_server(model: Model, server: optax.GradientTransformation, key: Array) -> Trained:
    """Initialise the global parameters and the server's optimizer."""
    params = model.init_global(key)
    return Trained(params, server.init(params))


def step_server(
    server: optax.GradientTransformation, state: Trained, mean: Mapping[str, Array], as_is: Collection[str] = ()
) -> Trained:
    """Give the negative mean change to the server's optimizer.

    Args:
      server: the optimizer.
      state: parameters and the optimizer's state.
      mean: the mean change by path.
      as_is: paths of leaves that change by the mean itself: an optimizer made for gradients could make a variance
        negative.
    """
    structure = flatten(state.params)[1]
    gradient = {path: jnp.zeros_like(delta) if path in as_is else -delta for path, delta in mean.items()}
    updates, optimizer = server.update(unflatten(structure, gradient), state.optimizer, state.params)
    if as_is:
        updates = unflatten(structure, flatten(updates)[0] | {path: mean[path] for path in as_is})
    return Trained(optax.apply_updates(state.params, updates), optimizer)


__all__ = [
    "Algorithm",
    "Client",
    "Message",
    "Method",
    "ServerState",
    "Stages",
    "Trained",
    "averaged",
    "client_keys",
    "encode",
    "finish_round",
    "init_server",
    "shapes_of",
    "step_keys",
    "step_server",
    "summand_shapes",
]
