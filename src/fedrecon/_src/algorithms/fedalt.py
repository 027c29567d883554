"""FedAlt: clients keep their local parameters, and train them and the global ones in turn.

References:
  Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022.
"""

from typing import Any

import jax
import optax
from jax import Array

from fedrecon import kit


@kit.register_factory
def fedalt(
    model: kit.Model,
    *,
    personal: kit.Solver,
    update: kit.Solver,
    server: optax.GradientTransformation,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Let every client train its local parameters, then the global ones at the new local ones.

    A client continues from the local parameters of its last round. If it forgot them and started afresh in every round,
    this would be Federated Reconstruction without a split.

    Args:
      model: with local parameters, which clients keep.
      personal: how a client trains its local parameters, with the global ones frozen; also how unseen clients get
        theirs, on support.
      update: how it then trains the global ones, with the local ones frozen, on the same examples.
      server: the optimizer that takes the negative mean change as a gradient.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.matrix_factorization(num_items=10)
      >>> fedalt = fr.algorithms.fedalt(model, personal=descend, update=descend, server=optax.sgd(1.0))
    """

    def define(model: kit.Model) -> kit.Method:
        updater, recon = kit.Updater(model, update), kit.reconstruction(model, personal)

        def client(params: kit.Params, state: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            of_personal, of_update = kit.step_keys(model, kit.client_keys(key, cohort.identity))
            local = kit.solve_local(model, personal, params, state, cohort.query, keys=of_personal)
            local = kit.keep_finite(kit.set_local_state(model, params, local, cohort.query), state)
            return updater.run(params, cohort, kit.first_order_predict(model), local, keys=of_update).upload, local

        return kit.averaging_method(
            server,
            updater,
            recon,
            client=client,
            init_client=lambda _, keys: jax.vmap(model.init_local)(keys),
            steps=lambda support, query: personal.steps(query) + update.steps(query),
        )

    return kit.Algorithm(model, define, aggregate or kit.mean())
