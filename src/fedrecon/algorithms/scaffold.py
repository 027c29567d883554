"""SCAFFOLD: clients correct their steps by how their gradients differ from everybody's.

References:
  Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon import kit

CONTROL = "control"


class Scaffold(NamedTuple):
    """The server's state, parameters and optimizer, or what it sends, parameters; and the mean control variate."""

    trained: Any
    control: kit.Params


def scaffold(
    model: kit.Model,
    *,
    learning_rate: float,
    batch_size: int,
    num_clients: int,
    server: optax.GradientTransformation,
    epochs: int = 1,
) -> kit.Algorithm:
    """Average what clients learn, with control variates against the drift of clients whose data differs.

    Args:
      model: with everything global. Every client keeps a control variate of its own, as large as that.
      learning_rate: of the clients' steps, which are plain SGD.
      batch_size: examples of a step.
      num_clients: how many clients there are in all.
      server: the optimizer that takes the negative mean change as a gradient.
      epochs: how often a client goes through its examples.
    """
    if jax.tree.leaves(kit.shapes_of(model.init_local)):
        raise ValueError("SCAFFOLD trains global parameters; the model has local ones: make it with everything global")
    update = kit.gradient_descent(optax.sgd(learning_rate), batch_size=batch_size, epochs=epochs)

    def define(model: kit.Model) -> kit.Method:
        def no_control(key: Array) -> kit.Params:
            return optax.tree.zeros_like(model.init_global(key))

        # The gradient of <control - own control, parameters> corrects every step.
        updater = kit.Updater(model, update, penalty=lambda params, pull: optax.tree.vdot(pull, params))

        def client(message: Scaffold, own: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            pull = jax.tree.map(lambda c, mine: c - mine, message.control, own)  # (clients, ...)
            updated = updater.run(message.trained, cohort, kit.hold(model), (), pull=pull)

            def change(c: Array, delta: Array) -> Array:
                steps = kit.against(updated.steps, delta)
                return jnp.where(steps > 0, -c - delta / (learning_rate * jnp.maximum(steps, 1)), 0)

            changes = jax.tree.map(change, kit.flatten(message.control)[0], updated.upload.delta)
            own = jax.tree.map(jnp.add, own, kit.unflatten(kit.flatten(own)[1], changes))
            return updated.upload._replace(parts={**updated.upload.parts, CONTROL: changes}), own

        def take(state: Scaffold, mean: kit.Parts, report: dict[str, Array]) -> Scaffold:
            share = report["clients"] / num_clients
            moved = kit.unflatten(kit.flatten(state.control)[1], mean[CONTROL])
            control = jax.tree.map(lambda c, change: c + share * change, state.control, moved)
            return Scaffold(kit.step_server(server, state.trained, mean[kit.DELTA]), control)

        return kit.Method(
            init=lambda key: Scaffold(kit.init_server(model, server, key), no_control(key)),
            client=client,
            server=take,
            reconstruct=kit.reconstruction(model, None).run,
            needs=updater.needs(kit.query_only(), 1),
            message=lambda state: Scaffold(state.trained.params, state.control),
            params=lambda state: state.trained.params,
            parts=lambda state: dict.fromkeys((kit.DELTA, CONTROL), kit.flatten(state.control)[0]),
            keep=jax.vmap(no_control),
        )

    return kit.Algorithm(model, define, kit.mean_of_uploads("uniform"))
