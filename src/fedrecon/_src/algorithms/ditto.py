"""Ditto: every client has its own model, kept near the global one.

References:
  Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.
"""

from typing import Any

import optax
from jax import Array

from fedrecon import kit


@kit.register_factory
def ditto(
    model: kit.Model,
    *,
    update: kit.Solver,
    personal: kit.Solver,
    strength: float,
    server: optax.GradientTransformation,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Train a global model by averaging, and on every client a model of its own that is pulled towards it.

    Args:
      model: with everything global.
      update: how a client trains the global model.
      personal: how a client trains its own model, on the loss plus `strength / 2` times the squared distance from the
        global model.
      strength: strength of the pull (lambda in the paper); 0 means local training that starts from the global model.
      server: the optimizer that takes the negative mean change as a gradient.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm`. Its local parameters are a client's own model. After training, `Run.client_state` has those of all
      clients; unseen clients train theirs on support, starting from the global model.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> ditto = fr.algorithms.ditto(model, update=descend, personal=descend, strength=0.1, server=optax.sgd(1.0))
    """
    kit.check_whole_model(model, "Ditto")
    kit.check_number("strength", strength)
    serving = kit.personal_model(model)

    def train_personal(params: kit.Params, start: kit.Params, examples: kit.Examples) -> kit.Params:
        def pulled(measure: Any, trained: kit.Params, context: Any) -> tuple[Array, Array]:
            return kit.add_proximal(measure(trained), trained, params, strength)

        return kit.solve_local(serving, personal, params, start, examples, surrogate=pulled)

    def define(_: kit.Model) -> kit.Method:
        updater = kit.Updater(model, update)
        train_global = kit.stateless_client(updater)

        def client(params: kit.Params, state: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            upload, _ = train_global(params, (), cohort, key)
            return upload, kit.keep_finite(train_personal(params, state, cohort.query), state)

        return kit.averaging_method(
            server,
            updater,
            client=client,
            reconstruct=lambda params, _, support, keys: train_personal(params, kit.copy_params(params, keys), support),
            init_client=kit.copy_params,
            support_limit=personal.limit,
            steps=lambda support, query: update.steps(query) + personal.steps(query),
        )

    return kit.Algorithm(serving, define, aggregate or kit.mean())
