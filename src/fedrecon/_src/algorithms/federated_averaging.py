"""Federated averaging of whole models; for models with local parameters, which stay on the clients, it is FedPer.

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

from fedrecon._src.algorithms.algorithm import Algorithm, Method, averaged_paths, init_server, step_keys, step_server
from fedrecon._src.client.batch_statistics import set_local_state
from fedrecon._src.client.objectives import Solver
from fedrecon._src.client.reconstruction import reconstruction
from fedrecon._src.client.update import Updater, first_order_predict
from fedrecon._src.core.cohort import Cohort
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Model
from fedrecon._src.core.pytrees import Params
from fedrecon._src.core.split import query_only
from fedrecon._src.core.upload import DELTA, Upload, broadcast_clients
from fedrecon._src.server import Aggregator
from fedrecon._src.server import mean as mean_of_uploads


@register_factory
def federated_averaging(
    model: Model,
    *,
    update: Solver,
    server: optax.GradientTransformation,
    reconstruct: Solver | None = None,
    aggregate: Aggregator | None = None,
) -> Algorithm:
    """Average what clients learn on all their examples.

    If the model has local parameters, each client keeps its own from round to round and trains them together with the
    global ones. Only the global ones are averaged.

    Args:
      model: with or without local parameters.
      update: how a client trains.
      server: the optimizer that takes the negative mean change as a gradient.
      reconstruct: how clients that took no part in training get local parameters, for ReconEval; not needed for
        models without local parameters.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm`. If the model has local parameters, `Run.client_state` has those of all clients after training.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> algorithm = fr.federated_averaging(
      ...     fr.models.matrix_factorization(num_items=1000, dim=50),
      ...     update=fr.gradient_descent(optax.sgd(0.5), batch_size=5),
      ...     server=fr.optimizers.fedyogi(0.01),
      ...     reconstruct=fr.least_squares(1.0),
      ... )
      >>> algorithm.has_local()  # every client keeps its own, as in FedPer
      True
    """
    if model.default_local is not None or model.evidence is not None:
        raise ValueError(
            "federated averaging starts local parameters once and keeps them, so it cannot learn where they start; "
            "use a model without a learned default or implicit feedback"
        )

    def define(model: Model) -> Method:
        updater, recon = Updater(model, update), reconstruction(model, reconstruct)
        has_local = bool(jax.tree.leaves(jax.eval_shape(lambda: model.init_local(jax.random.key(0)))))

        def client(params: Params, client_state: Any, cohort: Cohort, key: Array) -> tuple[Upload, Any]:
            of_steps = step_keys(model, client_keys(key, cohort.identity))[1]
            updated = updater.run(params, cohort, first_order_predict(model), (), solved=client_state, keys=of_steps)
            if not has_local:
                return updated.upload, client_state
            return updated.upload, keep_finite(
                set_local_state(model, params, updated.local, cohort.query), client_state
            )

        return Method(
            init=lambda key: init_server(model, server, key),
            client=client,
            server=lambda state, mean, report: step_server(server, state, mean[DELTA], averaged_paths(model)),
            reconstruct=recon.run,
            needs=updater.needs(query_only(), 1),
            init_client=jax.vmap(model.init_local) if has_local else None,
            check=recon.check,
            support_limit=recon.limit,
        )

    return Algorithm(model, define, aggregate or mean_of_uploads())


def keep_finite(new: Params, old: Params) -> Params:
    """Return what clients keep after a round. A client whose training diverged keeps its old value.

    Args:
      new: local parameters after the round, clients first.
      old: those before it.
    """
    finite = [jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(1) for leaf in jax.tree.leaves(new)]
    fine = jnp.stack(finite).all(0)
    return jax.tree.map(lambda a, b: jnp.where(broadcast_clients(fine, a), a, b), new, old)
