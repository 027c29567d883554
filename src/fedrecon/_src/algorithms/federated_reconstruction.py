"""Federated Reconstruction: the server learns the global part, every client reconstructs its local part.

Local training is the case without a global part.

References:
  Singhal et al., Federated Reconstruction: Partially Local Federated Learning, NeurIPS 2021.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon._src.algorithms.algorithm import (
    Algorithm,
    Method,
    Stages,
    averaged_paths,
    averaging_method,
    step_keys,
)
from fedrecon._src.client.objectives import Solver
from fedrecon._src.client.reconstruction import reconstruction
from fedrecon._src.client.update import Updater, first_order_predict, second_order_predict
from fedrecon._src.core.checks import check_rules
from fedrecon._src.core.cohort import Cohort
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Model, shapes_of
from fedrecon._src.core.pytrees import Params, flatten
from fedrecon._src.core.split import Split
from fedrecon._src.core.split import half as half_split
from fedrecon._src.core.upload import RowChanges, Upload, broadcast_clients, map_changes
from fedrecon._src.server import Aggregator
from fedrecon._src.server import mean as mean_of_uploads


@register_factory
def federated_reconstruction(
    model: Model,
    *,
    reconstruct: Solver,
    update: Solver,
    server: optax.GradientTransformation,
    split: Split | None = None,
    joint: bool = False,
    second_order: bool = False,
    both_ways: bool = False,
    aggregate: Aggregator | None = None,
) -> Algorithm:
    """Train the global part of a model so that the local part is quick to reconstruct.

    In every round each client reconstructs its local parameters on its support examples with the global ones frozen,
    updates the global ones on its query examples, uploads only that change and discards the local parameters.

    Args:
      model: a partially local model.
      reconstruct: R, how local parameters are reconstructed.
      update: U, how global parameters are updated.
      server: the optimizer that takes the negative mean change as a gradient; `optax.sgd(1.0)` is plain averaging.
      split: S; half and half by default.
      joint: let U change the local parameters too (they are still discarded).
      second_order: let U differentiate through R. R then runs again in every step of U, so use few steps.
      both_ways: run every client twice, the second time with support and query exchanged, and upload the mean of both
        changes, weighted by examples. Clients learn from all examples in every round, at twice the cost.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm`.

    References:
      Singhal et al., Federated Reconstruction: Partially Local Federated Learning, NeurIPS 2021.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(num_items=1000, dim=50),
      ...     reconstruct=fr.least_squares(1.0),
      ...     update=fr.gradient_descent(optax.sgd(0.5), batch_size=5),
      ...     server=optax.sgd(1.0),
      ... )
      >>> algorithm.has_local()
      True
    """
    rules = {
        "`joint` and `second_order` cannot be combined: one changes the local parameters, the other differentiates "
        "through them": not (joint and second_order),
        "`second_order` cannot advance averaged statistics, since it keeps no reconstructed local parameters; "
        "give the model state='local' or state='frozen'": not (second_order and averaged_paths(model)),
    }
    check_rules(rules)

    def define(model: Model) -> Method:
        updater = Updater(model, update, through_support=second_order or both_ways)
        recon = reconstruction(model, reconstruct)
        predict = second_order_predict(model, reconstruct) if second_order else first_order_predict(model)

        def prepare(params: Params, client_state: Any, cohort: Cohort, key: Array) -> Any:
            keys = client_keys(key, cohort.identity)
            of_r, of_u = step_keys(model, keys)
            if second_order:  # R is part of every prediction of U
                return (jax.vmap(model.init_local)(keys), of_r), of_u, client_state
            return recon.run(params, client_state, cohort.support, keys, of_r), of_u, client_state

        def finish(params: Params, prepared: Any, cohort: Cohort, key: Array) -> tuple[Upload, Any]:
            local, of_u, client_state = prepared
            context, solved = ((), local) if joint else (local, ())
            return updater.run(params, cohort, predict, context, solved=solved, keys=of_u).upload, client_state

        def client(params: Params, client_state: Any, cohort: Cohort, key: Array) -> tuple[Upload, Any]:
            ways = [cohort, swap_support_query(cohort)] if both_ways else [cohort]
            uploads = [finish(params, prepare(params, client_state, way, key), way, key)[0] for way in ways]
            return average_uploads(*uploads) if both_ways else uploads[0], client_state

        passes = 2 if both_ways else 1
        return averaging_method(
            server,
            updater,
            recon,
            client=client,
            needs=updater.needs(half_split() if split is None else split, reconstruct.limit),
            stages=None if second_order or both_ways else Stages(prepare, finish),
            steps=lambda support, query: passes * (reconstruct.steps(support) + update.steps(query)),
        )

    return Algorithm(model, define, aggregate or mean_of_uploads())


@register_factory
def local_training(model: Model, *, train: Solver) -> Algorithm:
    """Train a whole model on every client's own support examples, and send nothing.

    There are no rounds to run. Evaluate the algorithm as it is, on any clients, with the empty global parameters that
    `init` returns. A client trains when its local parameters are reconstructed, so dropout is off.

    Args:
      model: one with nothing global, such as `from_flax(module, local="*", ...)`.
      train: how a client trains, from a fresh start.

    Returns:
      An `Algorithm` that does nothing but reconstruct.

    Raises:
      ValueError: if the model has global parameters.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> import optax
      >>> model = fr.models.from_function(
      ...     lambda params, x: params["w"] * x, {"w": jnp.zeros(())}, local="*", inputs="x", label="y", loss="mse"
      ... )
      >>> alone = fr.local_training(model, train=fr.gradient_descent(optax.sgd(0.1), batch_size=5, epochs=20))
      >>> alone.has_local()  # evaluate it as it is, with the empty global parameters that `init` returns
      True
    """
    if shared := flatten(shapes_of(model.init_global))[0]:
        raise ValueError(f"local training needs local='*', no global parameters (got {', '.join(shared)})")
    return federated_reconstruction(model, reconstruct=train, update=train, server=optax.identity())


def swap_support_query(cohort: Cohort) -> Cohort:
    """Exchange support and query of a cohort.

    Args:
      cohort: packed with `Needs.support_rows`, so that rows of both are listed.
    """
    return cohort._replace(
        support=cohort.query, query=cohort.support, slots=cohort.support_slots, support_slots=cohort.slots
    )


def average_uploads(first: Upload, second: Upload) -> Upload:
    """Join two uploads of the same clients into one: the mean of their changes, weighted by examples.

    Args:
      first: an upload.
      second: another, of the same clients and rows.
    """
    examples = first.examples + second.examples
    share = first.examples / jnp.maximum(examples, 1)  # (clients,)

    def mean(a: Any, b: Any) -> Any:
        if isinstance(a, RowChanges):  # both have the same rows, since rows of both sides are listed
            return dataclasses.replace(a, values=mean(a.values, b.values))
        weight = broadcast_clients(share, a)
        return weight * a + (1 - weight) * b

    return Upload(map_changes(mean, first.parts, second.parts), examples, first.sums + second.sums)
