"""The types of a federated algorithm (model, method, aggregator), and how the server finishes a round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedrecon._src.client.reconstruction import Reconstruction
from fedrecon._src.client.update import Predict, Updater, first_order_predict
from fedrecon._src.core.cohort import Cohort, Examples, Needs
from fedrecon._src.core.keys import client_keys, fold_keys
from fedrecon._src.core.model import Batch, Model, metric_names, shapes_of
from fedrecon._src.core.pytrees import Params, flatten, unflatten
from fedrecon._src.core.split import query_only
from fedrecon._src.core.upload import DELTA, Parts, Summand, Total, Upload, broadcast_clients, no_total, summand_of
from fedrecon._src.server.aggregator import Aggregator, Report
from fedrecon._src.server.averaging import all_finite

ENCODING = 3  # folded into a client's key for what the aggregator draws; R and U fold in 1 and 2


class TrainState(NamedTuple):
    """The state of a method whose server has an optimizer: the global parameters and the optimizer's state.

    Example:
      >>> from fedrecon import kit
      >>> kit.TrainState(params={"w": 1.0}, optimizer=()).params
      {'w': 1.0}
    """

    params: Params
    optimizer: Any


class ServerState(NamedTuple):
    """All that the server keeps from round to round: the method's state (any pytree) and the aggregator's.

    Example:
      >>> import fedrecon as fr
      >>> fr.kit.ServerState._fields
      ('method', 'aggregator')
    """

    method: Any
    aggregator: Any


class RoundMessage(NamedTuple):
    """All that the server sends in a round. Every client gets the same message.

    Example:
      >>> import fedrecon as fr
      >>> fr.kit.RoundMessage._fields
      ('method', 'aggregator')
    """

    method: Any
    aggregator: Any


# (message, client state or what `Stages.prepare` returned, cohort, key) -> (Upload, client state)
Client = Callable[[Any, Any, Cohort, Array], tuple[Upload, Any]]


class Stages(NamedTuple):
    """A client function in two stages. The first can run on larger blocks of clients.

    Attributes:
      prepare: `(message, client state, cohort, key) -> prepared`, clients first: the work for which all clients
        share the global parameters.
      finish: `(message, prepared, cohort, key) -> (Upload, client state)`: the work for which each client has its
        own copy.

    Example:
      >>> from fedrecon import kit
      >>> kit.Stages._fields
      ('prepare', 'finish')
    """

    prepare: Callable[[Any, Any, Cohort, Array], Any]
    finish: Client


class Method(NamedTuple):
    """A training method, defined for one model. All functions are pure and can be compiled.

    Functions that run on clients take a block of clients: every leaf has the clients in its first dimension, except in
    the message, which is the same for all. A single client is a block of one.

    Attributes:
      init: `key -> state`, any pytree.
      client: `(message, client state, cohort, key) -> (Upload, client state)`; `key` is the round's, from which
        `client_keys` derives those of clients.
      server: `(state, mean, report) -> state`; `mean` holds the decoded parts of the uploads, `{part: {path: array}}`.
      reconstruct: `(global, client state, support, keys) -> local`, for use after training.
      needs: which parts of a client's data `client` needs.
      message: `state -> message`, any pytree; the global parameters by default.
      params: `state -> global parameters`.
      parts: `state -> parts`, arrays in the shapes that uploads add up to. By default one part, `delta`, in the shapes
        of the global parameters.
      init_client: `(initial global parameters, keys) -> client state`, what clients keep before their first round; None
        if they keep nothing.
      check: `(global, local, batch, mask)` of one client; raises if the model does not fit the method.
      support_limit: how many support examples `reconstruct` can use; None for no limit.
      stages: `client` as two stages, `prepare` and then `finish`; None if it cannot be divided.
      steps: `(support examples, query examples) -> steps` that a client with so many examples takes in a round, for
        comparisons; None if that is not known.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> algorithm = fr.federated_averaging(
      ...     fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5),
      ...     update=fr.gradient_descent(optax.sgd(0.1), batch_size=5),
      ...     server=optax.sgd(1.0),
      ... )
      >>> algorithm.method.init_client is None  # clients keep nothing between rounds
      True
    """

    init: Callable[[Array], Any]
    client: Client
    server: Callable[[Any, Parts, Report], Any]
    reconstruct: Callable[[Params, Any, Examples, Array], Params]
    needs: Needs
    message: Callable[[Any], Any] = lambda state: state.params
    params: Callable[[Any], Params] = lambda state: state.params
    parts: Callable[[Any], Parts] = lambda state: {DELTA: flatten(state.params)[0]}
    init_client: Callable[[Params, Array], Any] | None = None
    check: Callable[[Params, Params, Batch, Array], None] = lambda *args: None
    support_limit: int | None = None
    stages: Stages | None = None
    steps: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Algorithm:
    """A federated algorithm: a model, a training method and an aggregator.

    Nothing is computed or compiled before first use. Algorithms are compared by identity.

    Attributes:
      model: what is trained.
      define: `model -> Method`. It is also called with the same model once the model's lookups are decided.
      aggregator: turns uploads into the mean that the method's server takes.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.matrix_factorization(num_items=10, dim=2)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=descend, update=descend, server=optax.sgd(1.0))
      >>> state = algorithm.init(jax.random.key(0))
      >>> algorithm.params(state)["item_embedding"].shape
      (10, 2)
    """

    model: Model
    define: Callable[[Model], Method]
    aggregator: Aggregator

    @functools.cached_property
    def method(self) -> Method:
        """The method for this model."""
        return self.define(self.model)

    def init(self, key: Array) -> ServerState:
        """Return the server's state before the first round.

        Args:
          key: a JAX key, for the initial global parameters.
        """
        state = self.method.init(key)
        return ServerState(state, self.aggregator.init(self.method.parts(state)))

    def message(self, state: ServerState) -> RoundMessage:
        """Return what the server sends to the clients of a round.

        Args:
          state: the server's state.
        """
        return RoundMessage(self.method.message(state.method), self.aggregator.message(state.aggregator))

    def params(self, state: ServerState) -> Params:
        """Return the global parameters.

        Args:
          state: the server's state.
        """
        return self.method.params(state.method)

    def init_clients(self, state: ServerState, keys: Array) -> Any:
        """Return what clients keep before their first round, clients first; an empty tuple if they keep nothing.

        Args:
          state: the server's, before the first round.
          keys: of the clients.
        """
        init_client = self.method.init_client
        return () if init_client is None else init_client(self.params(state), keys)

    def has_local(self) -> bool:
        """Return whether clients have local parameters."""
        return bool(jax.tree.leaves(shapes_of(self.model.init_local)))


def with_params(state: ServerState, params: Params) -> ServerState:
    """Return a server's state with other global parameters, to continue from a trained model.

    Args:
      state: of a method whose state has `params`, as all methods here.
      params: the global parameters.
    """
    return state._replace(method=state.method._replace(params=jax.tree.map(jnp.asarray, params)))


def encode(algorithm: Algorithm, message: RoundMessage, upload: Upload, keys: Array) -> Summand:
    """Encode uploads as summands, ready to be added.

    Args:
      algorithm: its aggregator does the encoding.
      message: the round's message.
      upload: the uploads of several clients.
      keys: the clients' keys.
    """
    return algorithm.aggregator.encode(message.aggregator, summand_of(upload), fold_keys(keys, ENCODING))


def empty_total(algorithm: Algorithm, state: ServerState) -> Total:
    """Return the sum of no clients' summands.

    Args:
      algorithm: what is trained.
      state: the server's state.
    """

    def encode_one(state: ServerState) -> Summand:
        parts = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), algorithm.method.parts(state.method))
        upload = Upload(parts, jnp.zeros(1), jnp.zeros((1, len(metric_names(algorithm.model)), 2)))
        return encode(algorithm, algorithm.message(state), upload, jax.random.split(jax.random.key(0), 1))

    return no_total(jax.eval_shape(encode_one, state))


def finish_round(algorithm: Algorithm, state: ServerState, total: Total, key: Array) -> tuple[ServerState, Report]:
    """Finish a round on the server: decode the sum and take a step. A skipped round leaves the method's state alone.

    Args:
      algorithm: what is trained.
      state: the server's state before the round.
      total: the sum of the clients' summands.
      key: for what the aggregator draws on the server.

    Returns:
      The new state, and a report on the round: counts, sums of metrics, whether it was `skipped`.
    """
    scalars = dict(total.scalars)
    mean, aggregator, decoded = algorithm.aggregator.decode(state.aggregator, total, key)
    skipped = decoded.get("skipped", ~all_finite(mean.parts))
    report = {**scalars, **decoded, "skipped": skipped}
    new = algorithm.method.server(state.method, mean.parts, report)
    method = jax.tree.map(lambda a, b: jnp.where(skipped, b, a), new, state.method)
    return ServerState(method, aggregator), report


def step_keys(model: Model, keys: Array) -> tuple[Array | None, Array | None]:
    """Derive clients' keys for the steps of R and for those of U; None for a model whose steps are not random.

    Args:
      model: only models with a `predict_train` have random steps.
      keys: the clients' keys.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> from fedrecon import kit
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> kit.step_keys(fr.models.matrix_factorization(10), keys)  # nothing in its steps is random
      (None, None)
    """
    return (None, None) if model.predict_train is None else (fold_keys(keys, 1), fold_keys(keys, 2))


def update_keys(model: Model, key: Array, cohort: Cohort) -> Array | None:
    """Derive a cohort's keys for the steps of U; None for a model whose steps are not random.

    Args:
      model: only models with a `predict_train` have random steps.
      key: of the round.
      cohort: the block of clients.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> kit.update_keys(fr.models.matrix_factorization(10), None, None) is None  # nothing in its steps is random
      True
    """
    return None if model.predict_train is None else step_keys(model, client_keys(key, cohort.identity))[1]


def stateless_client(updater: Updater, predict: Predict | None = None) -> Client:
    """Return the client function of a method whose clients run U on the whole model and keep nothing.

    Args:
      updater: runs U, on a model with everything global.
      predict: as `Updater.run` takes it; as the model predicts by default.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> from fedrecon import kit
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> updater = kit.Updater(model, fr.gradient_descent(optax.sgd(0.1), batch_size=5))
      >>> client = kit.stateless_client(updater)  # for `Method.client`
    """

    def client(params: Params, _: Any, cohort: Cohort, key: Array) -> tuple[Upload, Any]:
        keys = update_keys(updater.model, key, cohort)
        return updater.run(params, cohort, predict or first_order_predict(updater.model), (), keys=keys).upload, ()

    return client


def averaged_paths(model: Model) -> tuple[str, ...]:
    """Return the paths of the global state: leaves that the server averages without its optimizer.

    Args:
      model: what is trained.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> kit.averaged_paths(fr.models.matrix_factorization(10))
      ()
    """
    return () if model.state is None else model.state.shared


def init_server(model: Model, server: optax.GradientTransformation, key: Array) -> TrainState:
    """Initialise the global parameters and the server's optimizer.

    Args:
      model: what is trained.
      server: the optimizer.
      key: for the initial parameters.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> import optax
      >>> from fedrecon import kit
      >>> state = kit.init_server(fr.models.matrix_factorization(10, 2), optax.adam(0.1), jax.random.key(0))
      >>> state.params["item_embedding"].shape
      (10, 2)
    """
    params = model.init_global(key)
    return TrainState(params, server.init(params))


def step_server(
    server: optax.GradientTransformation, state: TrainState, mean: Mapping[str, Array], as_is: Collection[str] = ()
) -> TrainState:
    """Take a server step, with the negative mean change as the optimizer's gradient.

    Args:
      server: the optimizer.
      state: parameters and the optimizer's state.
      mean: the mean change by path.
      as_is: paths of leaves to which the mean change is added without the optimizer. An optimizer could make a running
        variance negative.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from fedrecon import kit
      >>> server, params = optax.sgd(1.0), {"w": jnp.array([1.0])}
      >>> state = kit.TrainState(params, server.init(params))
      >>> kit.step_server(server, state, {"w": jnp.array([0.5])}).params["w"].tolist()
      [1.5]
    """
    structure = flatten(state.params)[1]
    gradient = {path: jnp.zeros_like(delta) if path in as_is else -delta for path, delta in mean.items()}
    updates, optimizer = server.update(unflatten(structure, gradient), state.optimizer, state.params)
    if as_is:
        updates = unflatten(structure, flatten(updates)[0] | {path: mean[path] for path in as_is})
    return TrainState(optax.apply_updates(state.params, updates), optimizer)


def averaging_method(
    server: optax.GradientTransformation,
    updater: Updater,
    recon: Reconstruction | None = None,
    *,
    needs: Needs | None = None,
    **fields: Any,
) -> Method:
    """Return a method whose server averages the clients' changes and takes a step with an optax optimizer.

    Args:
      server: the optimizer that takes the negative mean change as a gradient.
      updater: runs U. Unless `fields` say otherwise, clients do nothing else, and keep nothing.
      recon: R, for use after training; None if `fields` have `reconstruct`.
      needs: which parts of a client's data are needed; by default all its examples, as query.
      **fields: other fields of `Method`, also in place of those that follow from `updater` and `recon`.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> from fedrecon import kit
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> updater = kit.Updater(model, fr.gradient_descent(optax.sgd(0.1), batch_size=5))
      >>> method = kit.averaging_method(optax.sgd(1.0), updater, kit.reconstruction(model, None))
    """
    model = updater.model
    defaults: dict[str, Any] = {
        "init": lambda key: init_server(model, server, key),
        "client": stateless_client(updater),
        "server": lambda state, mean, report: step_server(server, state, mean[DELTA], averaged_paths(model)),
        "steps": lambda support, query: updater.solver.steps(query),
    }
    if recon is not None:
        defaults |= {"reconstruct": recon.run, "check": recon.check, "support_limit": recon.limit}
    return Method(needs=needs or updater.needs(query_only(), 1), **(defaults | fields))


def personal_model(model: Model) -> Model:
    """Return the model as it predicts with a client's own copy of all parameters, which is then its local part.

    Args:
      model: a model without local parameters.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10, 2), num_clients=5)
      >>> kit.shapes_of(kit.personal_model(model).init_local)["shared"]["item_embedding"].shape
      (10, 2)
    """
    return model._replace(
        init_local=model.init_global,
        predict=lambda _, personal, batch: model.predict(personal, (), batch),
        predict_train=None,
        state=None,
        lookups={},
    )


def check_whole_model(model: Model, method: str) -> None:
    """Fail if a model has local parameters, for methods that train whole models.

    Args:
      model: what is trained.
      method: its name, for the error message.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> kit.check_whole_model(fr.models.client_table(fr.models.matrix_factorization(10), 5), "SCAFFOLD")
    """
    if local := flatten(shapes_of(model.init_local))[0]:
        raise ValueError(
            f"{method} trains whole models, but `model` has local parameters ({', '.join(local)}); "
            "make it with everything global"
        )


def keep_finite(new: Params, old: Params) -> Params:
    """Return what clients keep after a round. A client whose training diverged keeps its old value.

    Args:
      new: local parameters after the round, clients first.
      old: those before it.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedrecon import kit
      >>> kit.keep_finite({"b": jnp.array([2.0, jnp.nan])}, {"b": jnp.array([1.0, 1.0])})["b"].tolist()
      [2.0, 1.0]
    """
    finite = [jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(1) for leaf in jax.tree.leaves(new)]
    fine = functools.reduce(jnp.logical_and, finite, jnp.bool_(True))  # a model may have nothing local
    return jax.tree.map(lambda a, b: jnp.where(broadcast_clients(fine, a), a, b), new, old)
