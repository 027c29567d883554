"""APFL (Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, 2020)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon import kit


@kit.register_factory
def apfl(
    model: kit.Model,
    *,
    update: kit.Solver,
    server: optax.GradientTransformation,
    alpha: float = 0.5,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Average a global model `w`, and train on every client a model `v` that predicts as `alpha v + (1 - alpha) w`.

    In every step of a client, `w` follows the gradient of its own loss, and `v` and `alpha` that of the mixture's. The
    local parameters, `{"alpha": ..., "own": v}`, are kept; unseen clients train them on support.

    Args:
      model: with everything global.
      update: how a client trains all three.
      server: the optimizer that takes the negative mean change of `w` as a gradient.
      alpha: where every client's `alpha` starts; after its steps, it is projected to 0 to 1.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> apfl = fr.algorithms.apfl(model, update=descend, server=optax.sgd(1.0))
    """
    kit.check_whole_model(model, "APFL")
    kit.check_number("alpha", alpha, most=1)

    def mix(params: kit.Params, local: kit.Params) -> kit.Params:
        share = local["alpha"] + jax.lax.stop_gradient(jnp.clip(local["alpha"], 0, 1) - local["alpha"])
        return jax.tree.map(lambda v, w: share * v + (1 - share) * w, local["own"], params)

    def start(params: kit.Params, keys: Array) -> kit.Params:
        return {"alpha": jnp.full(len(keys), alpha), "own": kit.copy_params(params, keys)}

    def both(measure: Any, point: kit.Point, _: kit.Params, pull: Any) -> tuple[Array, Array]:
        mixture, sums = measure(point._replace(params=mix(jax.lax.stop_gradient(point.params), point.local)))
        return measure(point)[0] + mixture, sums

    serving = kit.personal_model(model)._replace(
        init_local=lambda key: {"alpha": jnp.float32(alpha), "own": model.init_global(key)},
        predict=lambda params, local, batch: model.predict(mix(params, local), (), batch),
    )

    def define(_: kit.Model) -> kit.Method:
        predict, updater = kit.first_order_predict(model), kit.Updater(model, update, surrogate=both, whole_tables=True)

        def client(params: kit.Params, state: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            updated = updater.run(params, cohort, predict, (), state, kit.update_keys(model, key, cohort))
            local = {**updated.local, "alpha": jnp.clip(updated.local["alpha"], 0, 1)}
            return updated.upload, kit.keep_finite(local, state)

        return kit.averaging_method(
            server,
            updater,
            client=client,
            reconstruct=lambda w, _, support, keys: kit.solve_local(serving, update, w, start(w, keys), support),
            init_client=start,
            support_limit=update.limit,
        )

    return kit.Algorithm(serving, define, aggregate or kit.mean())
