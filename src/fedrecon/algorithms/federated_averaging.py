"""Federated averaging, of whole models or, with local parts that stay with their owners, FedPer.

References:
  McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
  Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon import aggregate as aggregation_rules
from fedrecon.aggregate import Aggregation, Upload
from fedrecon.algorithm import Algorithm, averaged, client_keys, init_server, rebuilder, step_keys, step_server
from fedrecon.cohort import Cohort
from fedrecon.model import Model
from fedrecon.solvers.problem import Solver
from fedrecon.solvers.statistics import settle
from fedrecon.solvers.update import Updater, hold
from fedrecon.split import query_only
from fedrecon.trees import Params


def federated_averaging(
    model: Model,
    *,
    update: Solver,
    server: optax.GradientTransformation,
    reconstruct: Solver | None = None,
    aggregate: Aggregation | None = None,
) -> Algorithm:
    """Average what clients learn on all their examples.

    Where the model has local parameters, each client keeps its own from round to round and trains them together
    with the global ones; only the global ones are averaged.

    Args:
      model: with or without local parameters.
      update: how a client trains.
      server: the optimizer that takes the negative mean change as a gradient.
      reconstruct: how clients that took no part in training get local parameters, for ReconEval; not needed for
        models without any.
      aggregate: weights, clipping; see `aggregate.mean`.

    Returns:
      An `Algorithm`. Of a model with local parameters, `Run.kept` holds every client's own after training.
    """
    if model.default_local is not None or model.evidence is not None:
        raise ValueError("averaging starts local parameters once and keeps them; it cannot learn a default for them")
    updater = Updater(model, update)
    has_local = bool(jax.tree.leaves(jax.eval_shape(model.init_local, jax.random.key(0))))

    def client(params: Params, kept: Any, cohort: Cohort, key: Array) -> tuple[Upload, Any]:
        of_steps = step_keys(model, client_keys(key, cohort.client))[1]
        found = updater.run(params, cohort, hold(model), (), solved=kept, keys=of_steps)
        if not has_local:
            return found.upload, kept
        found = found._replace(local=settle(model, params, found.local, cohort.query))
        # A client whose training blew up keeps what it had, as the server does.
        finite = [jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(1) for leaf in jax.tree.leaves(found.local)]
        fine = jnp.stack(finite).all(0)
        local = jax.tree.map(
            lambda new, old: jnp.where(fine.reshape(-1, *([1] * (new.ndim - 1))), new, old), found.local, kept
        )
        return found.upload, local

    rebuild = rebuilder(model, reconstruct)

    return Algorithm(
        model=model,
        init=lambda key: init_server(model, server, key),
        client=client,
        server=lambda state, mean, take: step_server(server, state, mean, take, averaged(model)),
        reconstruct=rebuild.run,
        needs=updater.needs(query_only(), 1),
        aggregation=aggregate or aggregation_rules.mean(),
        keep=jax.vmap(model.init_local) if has_local else None,
        check=rebuild.check,
        groups=updater.groups,
        support_limit=rebuild.limit,
        remake=lambda other: federated_averaging(
            other, update=update, server=server, reconstruct=reconstruct, aggregate=aggregate
        ),
    )
