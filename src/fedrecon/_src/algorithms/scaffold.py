"""SCAFFOLD (Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, ICML 2020)."""

from typing import Any

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
      model: with everything global. Clients keep a control variate as large as the model.
      learning_rate: for the clients' steps, which are plain SGD.
      batch_size: examples per step.
      num_clients: the size of the population.
      server: the optimizer that takes the negative mean change as a gradient.
      epochs: how often a client goes through its examples.

    Example:
      >>> import fedrecon as fr
      >>> model, sgd = fr.models.client_table(fr.models.matrix_factorization(10), 5), fr.optimizers.sgd(1.0)
      >>> scaffold = fr.algorithms.scaffold(model, learning_rate=0.1, batch_size=5, num_clients=5, server=sgd)
    """
    kit.check_whole_model(model, "SCAFFOLD")
    update = kit.gradient_descent(optax.sgd(learning_rate), batch_size=batch_size, epochs=epochs)

    def correct(measure: Any, point: kit.Point, start: kit.Params, pull: kit.Params) -> tuple[Array, Array]:
        loss, sums = measure(point)  # the gradient of <control - own control, parameters> corrects every step
        return loss + optax.tree.vdot(pull, point.params), sums

    def define(model: kit.Model) -> kit.Method:
        updater = kit.Updater(model, update, surrogate=correct, whole_tables=True)

        def client(message: Any, own_control: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            (params, control), keys = message, kit.update_keys(model, key, cohort)
            pull = optax.tree.sub(control, own_control)  # (clients, ...)
            updated = updater.run(params, cohort, kit.first_order_predict(model), (), keys=keys, pull=pull)

            def change(c: Array, delta: Array) -> Array:
                steps = kit.broadcast_clients(updated.steps, delta)
                return jnp.where(steps > 0, -c - delta / (learning_rate * jnp.maximum(steps, 1)), 0)

            changes = {path: change(c, updated.upload.delta[path]) for path, c in kit.flatten(control)[0].items()}
            own_control = optax.tree.add(own_control, kit.unflatten(kit.flatten(own_control)[1], changes))
            return updated.upload._replace(parts={**updated.upload.parts, CONTROL: changes}), own_control

        def take(state: Any, mean: kit.Parts, report: dict[str, Array]) -> Any:
            (trained, control), change = state, kit.unflatten(kit.flatten(state[1])[1], mean[CONTROL])
            control = optax.tree.add_scale(control, report["clients"] / num_clients, change)
            return kit.step_server(server, trained, mean[kit.DELTA], kit.averaged_paths(model)), control

        return kit.Method(
            init=lambda key: (kit.init_server(model, server, key), optax.tree.zeros_like(model.init_global(key))),
            client=client,
            server=take,
            reconstruct=kit.reconstruction(model, None).run,
            needs=updater.needs(kit.query_only(), 1),
            message=lambda state: (state[0].params, state[1]),
            params=lambda state: state[0].params,
            parts=lambda state: dict.fromkeys((kit.DELTA, CONTROL), kit.flatten(state[1])[0]),
            init_client=lambda params, keys: kit.copy_params(optax.tree.zeros_like(params), keys),
            steps=lambda _, query: update.steps(query),
        )

    return kit.Algorithm(model, define, kit.mean("uniform"))
