"""FedBABU: clients train the body under a fixed random head; to serve a client, its head is fine-tuned.

References:
  Oh, Kim, Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.
"""

from typing import Any

import jax
import optax
from jax import Array

from fedrecon import kit


@kit.register_factory
def fedbabu(
    model: kit.Model,
    *,
    head: kit.Solver,
    update: kit.Solver,
    server: optax.GradientTransformation,
    seed: int = 0,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Average the body, trained under a head that is drawn once for everybody and never changes.

    Args:
      model: with the head local. Unlike other methods, this one draws the same head for every client.
      head: how a client fits its head on support, to be served.
      update: how a client trains the body.
      server: the optimizer that takes the negative mean change as a gradient.
      seed: for the head.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm` whose clients keep nothing.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.matrix_factorization(num_items=10)
      >>> fedbabu = fr.algorithms.fedbabu(model, head=descend, update=descend, server=optax.sgd(1.0))
    """

    def define(model: kit.Model) -> kit.Method:
        updater = kit.Updater(model, update)

        def client(params: kit.Params, _: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            keys = kit.client_keys(key, cohort.identity)
            drawn = kit.set_local_state(model, params, jax.vmap(model.init_local)(keys), cohort.query)
            of_steps = kit.step_keys(model, keys)[1]
            return updater.run(params, cohort, kit.first_order_predict(model), drawn, keys=of_steps).upload, ()

        return kit.averaging_method(server, updater, kit.reconstruction(model, head), client=client)

    same_head = model._replace(init_local=lambda key: model.init_local(jax.random.key(seed)))
    return kit.Algorithm(same_head, define, aggregate or kit.mean())
