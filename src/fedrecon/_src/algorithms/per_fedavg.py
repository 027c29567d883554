"""Per-FedAvg: train a model that is good after a client has adapted it.

References:
  Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
  Meta-Learning Approach, NeurIPS 2020.
"""

from typing import Any

import jax
import optax

from fedrecon import kit


@kit.register_factory
def per_fedavg(
    model: kit.Model,
    *,
    adapt: kit.Solver,
    update: kit.Solver,
    server: optax.GradientTransformation,
    first_order: bool = False,
    split: kit.Split | None = None,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Train on the query loss of the model as each client adapts it on its support.

    Every step of `update` adapts the current model, `w' = w - a grad f(w; support)`, and takes the gradient of
    `f(w'; query batch)`. The exact one is `(I - a H) grad f(w')` with the Hessian `H` of the support loss at `w`; it is
    computed by differentiating through `adapt`, as a product of `H` with a vector. In first order, `H` counts as zero.

    Args:
      model: with everything global.
      adapt: how a client adapts the model on its support; in the paper, one step of SGD on a batch (`steps=1`).
      update: how a client then trains the model, on query.
      server: the optimizer that takes the negative mean change as a gradient.
      first_order: leave out the Hessian (Per-FedAvg (FO) in the paper).
      split: support and query; half and half by default.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm` whose clients keep nothing. A client's local parameters are the model as adapted on its support.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> once = fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=1)
      >>> per_fedavg = fr.algorithms.per_fedavg(model, adapt=once, update=once, server=optax.sgd(1.0))
    """
    kit.check_whole_model(model, "Per-FedAvg")
    serving = kit.personal_model(model)

    def predict(params: kit.Params, _: Any, context: Any, support: kit.Examples, batch: kit.Batch, step: Any) -> Any:
        start, alone = jax.tree.map(lambda leaf: leaf[None], (params, support))  # a block of one client
        adapted = kit.solve_local(serving, adapt, params, start, alone, differentiable=not first_order)
        change = jax.tree.map(lambda new, old: new[0] - old, adapted, params)
        change = jax.lax.stop_gradient(change) if first_order else change
        return kit.first_order_predict(model)(optax.tree.add(params, change), (), (), support, batch, step)

    def define(_: kit.Model) -> kit.Method:
        updater = kit.Updater(model, update, through_support=True)
        return kit.averaging_method(
            server,
            updater,
            client=kit.stateless_client(updater, predict),
            reconstruct=lambda w, _, data, keys: kit.solve_local(serving, adapt, w, kit.copy_params(w, keys), data),
            needs=updater.needs(kit.half() if split is None else split, adapt.limit),
            support_limit=adapt.limit,
            steps=lambda support, query: update.steps(query) * (1 + adapt.steps(support)),
        )

    return kit.Algorithm(serving, define, aggregate or kit.mean())
