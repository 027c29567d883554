"""FedProx: federated averaging with clients that stay near what the server sent.

References:
  Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from typing import Any

import optax
from jax import Array

from fedrecon import kit


@kit.register_factory
def fedprox(
    model: kit.Model,
    *,
    update: kit.Solver,
    strength: float,
    server: optax.GradientTransformation,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Average what clients learn from the loss plus `strength / 2` times the squared distance from the server's model.

    Args:
      model: with everything global.
      update: how a client trains.
      strength: strength of the pull (mu in the paper); 0 is federated averaging.
      server: the optimizer that takes the negative mean change as a gradient.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm` whose clients keep nothing. Serve unseen clients with the global model, or `with_finetuning`.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> fedprox = fr.algorithms.fedprox(model, update=descend, strength=0.1, server=optax.sgd(1.0))
    """
    kit.check_whole_model(model, "FedProx")
    kit.check_number("strength", strength)

    def proximal(measure: Any, point: kit.Point, start: kit.Params, pull: Any) -> tuple[Array, Array]:
        return kit.add_proximal(measure(point), point.params, start, strength)

    def define(model: kit.Model) -> kit.Method:
        updater = kit.Updater(model, update, surrogate=proximal)
        return kit.averaging_method(server, updater, kit.reconstruction(model, None))

    return kit.Algorithm(model, define, aggregate or kit.mean())
