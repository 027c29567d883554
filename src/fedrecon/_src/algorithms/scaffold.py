"""SCAFFOLD (Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, ICML 2020)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon import kit

CONTROL = "control"  # the part of an upload besides `delta`


@kit.register_factory
def scaffold(
    model: kit.Model,
    *,
    learning_rate: float,
    batch_size: int,
    num_clients: int,
    server: optax.GradientTransformation,
    epochs: int = 1,
) -> kit.Algorithm:
    """Average what clients learn, and correct each client's steps for how its gradients differ from the mean.

    Args:
      model: with everything global. Every client keeps a control variate as large as the model.
      learning_rate: for the clients' steps, which are plain SGD.
      batch_size: examples per step.
      num_clients: the size of the population.
      server: the optimizer that takes the negative mean change as a gradient.
      epochs: how often a client goes through its examples.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> algorithm = fr.scaffold(model, learning_rate=0.1, batch_size=5, num_clients=5, server=optax.sgd(1.0))
    """
    if jax.tree.leaves(kit.shapes_of(model.init_local)):
        raise ValueError("SCAFFOLD trains whole models; this one has local parameters: make it with everything global")
    update = kit.gradient_descent(optax.sgd(learning_rate), batch_size=batch_size, epochs=epochs)

    def nothing(key: Array) -> kit.Params:
        return optax.tree.zeros_like(model.init_global(key))

    def define(model: kit.Model) -> kit.Method:
        # The gradient of <control - own control, parameters> corrects every step.
        updater = kit.Updater(model, update, penalty=lambda params, pull: optax.tree.vdot(pull, params))

        def client(message: Any, own_control: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            params, control = message
            pull = jax.tree.map(jnp.subtract, control, own_control)  # (clients, ...)
            updated = updater.run(params, cohort, kit.first_order_predict(model), (), pull=pull)

            def change(c: Array, delta: Array) -> Array:
                steps = kit.broadcast_clients(updated.steps, delta)
                return jnp.where(steps > 0, -c - delta / (learning_rate * jnp.maximum(steps, 1)), 0)

            changes = jax.tree.map(change, kit.flatten(control)[0], updated.upload.delta)
            own_control = jax.tree.map(jnp.add, own_control, kit.unflatten(kit.flatten(own_control)[1], changes))
            return updated.upload._replace(parts={**updated.upload.parts, CONTROL: changes}), own_control

        def take(state: Any, mean: kit.Parts, report: dict[str, Array]) -> Any:
            moved = kit.unflatten(kit.flatten(state[1])[1], mean[CONTROL])
            control = jax.tree.map(lambda c, change: c + report["clients"] / num_clients * change, state[1], moved)
            return kit.step_server(server, state[0], mean[kit.DELTA]), control

        return kit.Method(
            init=lambda key: (kit.init_server(model, server, key), nothing(key)),
            client=client,
            server=take,
            reconstruct=kit.reconstruction(model, None).run,
            needs=updater.needs(kit.query_only(), 1),
            message=lambda state: (state[0].params, state[1]),
            params=lambda state: state[0].params,
            parts=lambda state: dict.fromkeys((kit.DELTA, CONTROL), kit.flatten(state[1])[0]),
            init_client=jax.vmap(nothing),
        )

    return kit.Algorithm(model, define, kit.mean("uniform"))
