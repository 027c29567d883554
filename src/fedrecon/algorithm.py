"""The (init, client, server) triple, and Federated Reconstruction as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon import aggregate as aggregation_rules
from fedrecon.aggregate import Aggregation, Upload
from fedrecon.cohort import Cohort, Examples, Needs
from fedrecon.model import Batch, Model
from fedrecon.solvers.problem import Solver, local_objective, solve_local
from fedrecon.solvers.statistics import settle
from fedrecon.solvers.update import Updater, differentiate_through, hold, start_local
from fedrecon.split import Split
from fedrecon.split import half as half_split
from fedrecon.trees import Params, divide, flatten, unflatten


class ServerState(NamedTuple):
    """All that the server knows: the global parameters and its optimizer's state."""

    params: Params
    optimizer: Any


# (global, kept or held, cohort, key) -> (Upload, kept)
Client = Callable[[Params, Any, Cohort, Array], tuple[Upload, Any]]


class Stages(NamedTuple):
    """A client function in two, where the first part pays in larger blocks than the second.

    Attributes:
      prepare: `(global, kept, cohort, key) -> held`, clients first: what needs no copies of the global parameters.
      finish: `(global, held, cohort, key) -> (Upload, kept)`: the rest.
    """

    prepare: Callable[[Params, Any, Cohort, Array], Any]
    finish: Client


class Algorithm(NamedTuple):
    """A federated algorithm. All functions are pure and can be compiled.

    Attributes:
      model: what it trains.
      init: `key -> ServerState`.
      client: `(global, kept, cohort, key) -> (Upload, kept)` for a block of clients at once, clients first in every
        leaf of all but the global parameters. One client alone is a block of one.
      server: `(state, mean delta by path, whether to take it) -> state`.
      reconstruct: `(global, kept, support, keys) -> local` for a block of clients, for use after training.
      needs: what `client` must be given of a client's data.
      aggregation: how uploads become the mean.
      keep: `keys -> kept` what an owner keeps across rounds before its first; None for stateless clients.
      check: `(global, local, batch, mask)` of one client; raises if the model does not fit the algorithm.
      groups: which deltas in an upload are by rows, as `{path: group of lookup tables}`.
      support_limit: how many support examples `reconstruct` can use; None for no limit.
      remake: `model -> Algorithm`, the same algorithm for another model with the same parameters.
      stages: the two parts of `client`, `finish` after `prepare`; None where it cannot be divided.
    """

    model: Model
    init: Callable[[Array], ServerState]
    client: Client
    server: Callable[[ServerState, dict[str, Array], Array], ServerState]
    reconstruct: Callable[[Params, Any, Examples, Array], Params]
    needs: Needs
    aggregation: Aggregation
    keep: Callable[[Array], Any] | None
    check: Callable[[Params, Params, Batch, Array], None]
    groups: Mapping[str, str]
    support_limit: int | None
    remake: Callable[[Model], Algorithm]
    stages: Stages | None = None


class Same(NamedTuple):
    """An algorithm that equals none but itself: its functions cannot be compared."""

    algorithm: Algorithm

    def __eq__(self, other: object) -> bool:
        """Compare by identity."""
        return isinstance(other, Same) and self.algorithm is other.algorithm

    def __hash__(self) -> int:
        """Hash by identity."""
        return id(self.algorithm)


def federated_reconstruction(
    model: Model,
    *,
    reconstruct: Solver,
    update: Solver,
    server: optax.GradientTransformation,
    split: Split | None = None,
    joint: bool = False,
    second_order: bool = False,
    aggregate: Aggregation | None = None,
) -> Algorithm:
    """Train the global part of a model so that the local part is quick to rebuild.

    In every round each client rebuilds its local parameters on its support examples with the global ones frozen,
    updates the global ones on its query examples, returns that change alone and forgets the rest.

    Args:
      model: a partially local model.
      reconstruct: R, how local parameters are rebuilt.
      update: U, how global parameters are updated.
      server: the optimizer that takes the negative mean change as a gradient; `optax.sgd(1.0)` is plain averaging.
      split: S; half and half by default.
      joint: let U move the local parameters too (they are still forgotten).
      second_order: let U differentiate through R. R is then run again in every step of U, so U wants few steps.
      aggregate: weights, clipping; see `aggregate.mean`.

    Returns:
      An `Algorithm`.

    References:
      Singhal et al., Federated Reconstruction: Partially Local Federated Learning, NeurIPS 2021.
    """
    if joint and second_order:
        raise ValueError("`joint` and `second_order` exclude each other: one moves what the other differentiates")
    if second_order and model.state is not None and model.state.shared:
        raise ValueError(
            "`second_order` has no rebuilt local parameters to take averaged statistics with; "
            "give the model state='local' or state='frozen'"
        )
    updater = Updater(model, update, through_support=second_order)
    rebuild = rebuilder(model, reconstruct)

    def rebuild_first(params: Params, kept: Any, cohort: Cohort, key: Array) -> Any:
        keys = client_keys(key, cohort.client)
        of_r, of_u = step_keys(model, keys)
        return rebuild.run(params, kept, cohort.support, keys, of_r), of_u, kept

    def then_update(params: Params, held: Any, cohort: Cohort, key: Array) -> tuple[Upload, Any]:
        del key
        local, of_u, kept = held
        if joint:
            return updater.run(params, cohort, hold(model), (), solved=local, keys=of_u).upload, kept
        return updater.run(params, cohort, hold(model), local, keys=of_u).upload, kept

    def client(params: Params, kept: Any, cohort: Cohort, key: Array) -> tuple[Upload, Any]:
        if second_order:
            keys = client_keys(key, cohort.client)
            of_r, of_u = step_keys(model, keys)
            start = jax.vmap(model.init_local)(keys), of_r
            predict = differentiate_through(model, reconstruct)
            return updater.run(params, cohort, predict, start, keys=of_u).upload, kept
        return then_update(params, rebuild_first(params, kept, cohort, key), cohort, key)

    return Algorithm(
        model=model,
        init=lambda key: init_server(model, server, key),
        client=client,
        server=lambda state, mean, take: step_server(server, state, mean, take, averaged(model)),
        reconstruct=rebuild.run,
        needs=updater.needs(half_split() if split is None else split, reconstruct.limit),
        aggregation=aggregate or aggregation_rules.mean(),
        keep=None,
        check=rebuild.check,
        groups=updater.groups,
        support_limit=reconstruct.limit,
        remake=lambda other: federated_reconstruction(
            other,
            reconstruct=reconstruct,
            update=update,
            server=server,
            split=split,
            joint=joint,
            second_order=second_order,
            aggregate=aggregate,
        ),
        stages=None if second_order else Stages(rebuild_first, then_update),
    )


class Rebuilder(NamedTuple):
    """R for a block of clients: `run(global, kept, support, keys, keys of its steps) -> local`, its check and limit.

    Without keys of steps nothing in the steps is random: so it is wherever `run` is not part of training.
    """

    run: Callable[..., Params]
    check: Callable[[Params, Params, Batch, Array], None]
    limit: int | None


def rebuilder(model: Model, reconstruct: Solver | None) -> Rebuilder:
    """Rebuild local parameters with a solver; without one, only models that train none can be rebuilt."""

    def run(params: Params, kept: Any, support: Examples, keys: Array, of_steps: Array | None = None) -> Params:
        del kept
        fresh = jax.vmap(model.init_local)(keys)
        local = jax.vmap(lambda mine, examples: start_local(model, params, mine, examples))(fresh, support)
        if jax.tree.leaves(divide(local, _held(model)).solved):
            if reconstruct is None:
                raise ValueError("the model has local parameters; give `reconstruct`, a way to rebuild them")
            local = solve_local(model, reconstruct, params, local, support, keys=of_steps)
        return settle(model, params, local, support)

    def check(params: Params, local: Params, batch: Batch, mask: Array) -> None:
        solved, held, join = divide(local, _held(model))
        if reconstruct is not None and jax.tree.leaves(solved):
            reconstruct.check(local_objective(model, params, join), solved, held, batch, mask)

    return Rebuilder(run, check, None if reconstruct is None else reconstruct.limit)


def _held(model: Model) -> tuple[str, ...]:
    return () if model.state is None else model.state.local


def averaged(model: Model) -> tuple[str, ...]:
    """Return the paths of global leaves that the server averages as they are: the global state."""
    return () if model.state is None else model.state.shared


def step_keys(model: Model, keys: Array) -> tuple[Array | None, Array | None]:
    """Derive from clients' keys those of the steps of R and of U; None for a model whose steps are not random."""
    if model.fit is None:
        return None, None
    fold = jax.vmap(jax.random.fold_in, (0, None))
    return fold(keys, 1), fold(keys, 2)


def client_keys(key: Array, client: Array) -> Array:
    """Derive every client's key from the round's: by who it is, never by where it was packed."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, client)


def init_server(model: Model, server: optax.GradientTransformation, key: Array) -> ServerState:
    """Initialise the global parameters and the server's optimizer."""
    params = model.init_global(key)
    return ServerState(params, server.init(params))


def step_server(
    server: optax.GradientTransformation,
    state: ServerState,
    mean: Mapping[str, Array],
    take: Array,
    as_is: Collection[str] = (),
) -> ServerState:
    """Give the negative mean delta to the server's optimizer; where `take` is false, change nothing.

    Leaves at the paths `as_is` change by the mean delta itself: an optimizer made for gradients could make a variance
    negative.
    """
    structure = flatten(state.params)[1]
    gradient = {path: jnp.zeros_like(delta) if path in as_is else -delta for path, delta in mean.items()}
    updates, optimizer = server.update(unflatten(structure, gradient), state.optimizer, state.params)
    if as_is:
        updates = unflatten(structure, flatten(updates)[0] | {path: mean[path] for path in as_is})
    new = ServerState(optax.apply_updates(state.params, updates), optimizer)
    return jax.tree.map(lambda a, b: jnp.where(take, a, b), new, state)
