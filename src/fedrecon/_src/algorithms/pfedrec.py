"""PFedRec (Zhang et al., Dual Personalization on Federated Recommendation, IJCAI 2023)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon import kit


@kit.register_factory
def pfedrec(
    model: kit.Model,
    *,
    personal: kit.Solver,
    update: kit.Solver,
    server: optax.GradientTransformation,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Train the user's score function, then its own copy of the item vectors; average how the copies changed.

    In every round the copy starts from the server's item vectors. A user keeps both, and is served with both.

    Args:
      model: item vectors global, the score function local: `models.logistic_factorization` without hidden layers.
      personal: how a client trains its score function.
      update: how it then trains the item vectors.
      server: the optimizer that takes the negative mean change as a gradient.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm`. Its local parameters are `{"score": ..., "items": ...}`; unseen users train both on support.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.logistic_factorization(num_items=10, dim=4)
      >>> pfedrec = fr.algorithms.pfedrec(model, personal=descend, update=descend, server=optax.sgd(1.0))
    """
    objective = kit.Objective(model, model.predict)

    def start(params: kit.Params, keys: Array) -> kit.Params:
        return {"score": jax.vmap(model.init_local)(keys), "items": kit.copy_params(params, keys)}

    def reconstruct(params: kit.Params, _: Any, support: kit.Examples, keys: Array) -> kit.Params:
        first = start(params, keys)
        score = kit.solve_local(model, personal, params, first["score"], support)
        items = update.solve(kit.Problem(objective, first["items"], score, support, measured=False)).params
        return {"score": score, "items": items}

    def define(_: kit.Model) -> kit.Method:
        updater = kit.Updater(model, update)

        def client(params: kit.Params, state: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            of_score, of_items = kit.step_keys(model, kit.client_keys(key, cohort.identity))
            score = kit.solve_local(model, personal, params, state["score"], cohort.query, keys=of_score)
            upload = updater.run(params, cohort, kit.first_order_predict(model), score, keys=of_items).upload
            items = jax.tree.map(jnp.add, params, kit.unflatten(kit.flatten(params)[1], upload.whole_delta()))
            return upload, kit.keep_finite({"score": score, "items": items}, state)

        return kit.averaging_method(
            server,
            updater,
            client=client,
            reconstruct=reconstruct,
            init_client=start,
            steps=lambda support, query: personal.steps(query) + update.steps(query),
        )

    serving = kit.personal_model(model)._replace(
        init_local=lambda key: {"score": model.init_local(key), "items": model.init_global(key)},
        predict=lambda _, local, batch: model.predict(local["items"], local["score"], batch),
    )
    return kit.Algorithm(serving, define, aggregate or kit.mean())
