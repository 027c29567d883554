"""Federated averaging of whole models; for models with local parameters, which stay on the clients, it is FedPer.

References:
  McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
  Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import Array

from fedrecon._src.algorithms.algorithm import Algorithm, Method, averaging_method, keep_finite, update_keys
from fedrecon._src.client.batches import set_local_state
from fedrecon._src.client.objectives import Solver
from fedrecon._src.client.reconstruction import reconstruction
from fedrecon._src.client.update import Updater, first_order_predict
from fedrecon._src.core.cohort import Cohort
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Model, shapes_of
from fedrecon._src.core.pytrees import Params
from fedrecon._src.core.upload import Upload
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
            "federated averaging initializes local parameters only once, so it cannot train their initial values; "
            "use a model without a learned default or implicit feedback"
        )

    def define(model: Model) -> Method:
        updater, recon = Updater(model, update), reconstruction(model, reconstruct)
        if not jax.tree.leaves(shapes_of(model.init_local)):
            return averaging_method(server, updater, recon)

        def client(params: Params, client_state: Any, cohort: Cohort, key: Array) -> tuple[Upload, Any]:
            of_steps = update_keys(model, key, cohort)
            updated = updater.run(params, cohort, first_order_predict(model), (), solved=client_state, keys=of_steps)
            local = set_local_state(model, params, updated.local, cohort.query)
            return updated.upload, keep_finite(local, client_state)

        def init_client(params: Params, keys: Array) -> Params:
            return jax.vmap(model.init_local)(keys)

        return averaging_method(server, updater, recon, client=client, init_client=init_client)

    return Algorithm(model, define, aggregate or mean_of_uploads())
