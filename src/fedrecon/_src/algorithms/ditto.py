"""Ditto: every client has its own model, kept near the global one.

References:
  Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.
"""

from typing import Any

import jax
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
      strength: strength of the pull; 0 means local training that starts from the global model.
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
      >>> algorithm = fr.ditto(model, update=descend, personal=descend, strength=0.1, server=optax.sgd(1.0))
    """
    if jax.tree.leaves(kit.shapes_of(model.init_local)):
        raise ValueError("Ditto trains whole models; this one has local parameters: make it with everything global")
    if not strength >= 0:
        raise ValueError(f"`strength` is {strength}; it must be at least 0")

    def train_personal(params: kit.Params, personal_params: kit.Params, examples: kit.Examples) -> kit.Params:
        def pull(trained: kit.Params, context: Any) -> Array:
            return strength / 2 * optax.tree.norm(optax.tree.sub(trained, params), squared=True)

        objective = kit.Objective(model, lambda trained, _, batch: model.predict(trained, (), batch), penalty=pull)
        return personal.solve(kit.Problem(objective, personal_params, (), examples, measured=False)).params

    def define(_: kit.Model) -> kit.Method:
        updater = kit.Updater(model, update)

        def client(params: kit.Params, personal_params: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            of_steps = kit.step_keys(model, kit.client_keys(key, cohort.identity))[1]
            upload = updater.run(params, cohort, kit.first_order_predict(model), (), keys=of_steps).upload
            return upload, train_personal(params, personal_params, cohort.query)

        def reconstruct(params: kit.Params, client_state: Any, support: kit.Examples, keys: Array) -> kit.Params:
            start = jax.vmap(lambda key: params, out_axes=0)(keys)
            return train_personal(params, start, support)

        return kit.Method(
            init=lambda key: kit.init_server(model, server, key),
            client=client,
            server=lambda state, mean, _: kit.step_server(server, state, mean[kit.DELTA], kit.averaged_paths(model)),
            reconstruct=reconstruct,
            needs=updater.needs(kit.query_only(), 1),
            init_client=jax.vmap(model.init_global),
            support_limit=personal.limit,
        )

    serving = model._replace(
        init_local=model.init_global,
        predict=lambda _, personal_params, batch: model.predict(personal_params, (), batch),
        predict_train=None,
        state=None,
        lookups={},
    )
    return kit.Algorithm(serving, define, aggregate or kit.mean())
