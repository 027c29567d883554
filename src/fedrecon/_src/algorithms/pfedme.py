"""pFedMe (Dinh, Tran, Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020)."""

from typing import Any

import jax
import optax
from jax import Array

from fedrecon import kit


@kit.register_factory
def pfedme(
    model: kit.Model,
    *,
    update: kit.Solver,
    personal: optax.GradientTransformation,
    steps: int,
    strength: float,
    server: optax.GradientTransformation,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Minimise the Moreau envelope of every client's loss, `min over v of f(v) + strength / 2 |v - w|^2`.

    For every batch a client finds such a `v`, and moves `w` along the envelope's negative gradient, `strength (v - w)`.

    Args:
      model: with everything global.
      update: how a client moves `w`; SGD in the paper.
      personal: the optimizer that finds `v` for a batch, started afresh every time.
      steps: how many steps it takes (K in the paper).
      strength: strength of the pull (lambda in the paper).
      server: the optimizer that takes the negative mean change as a gradient; SGD at the paper's rate beta.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm` whose clients keep nothing. A client's local parameters are its `v`, found on support.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> descend, sgd = fr.gradient_descent(optax.sgd(0.1), batch_size=5), optax.sgd(0.1)
      >>> pfedme = fr.algorithms.pfedme(model, update=descend, personal=sgd, steps=5, strength=1.0, server=sgd)
    """
    kit.check_whole_model(model, "pFedMe")
    kit.check_number("strength", strength)
    serving = kit.personal_model(model)
    adapt = kit.gradient_descent(personal, batch_size=update.batch_size or 1, epochs=steps)

    def envelope(measure: Any, point: kit.Point, start: kit.Params, pull: Any) -> tuple[Array, Array]:
        w = jax.lax.stop_gradient(point.params)

        def step(_: Any, carry: Any) -> Any:
            v, state = carry
            gradient = jax.grad(lambda v: kit.add_proximal(measure(kit.Point(v, ())), v, w, strength)[0])(v)
            updates, state = personal.update(gradient, state, v)
            return optax.apply_updates(v, updates), state

        v = jax.lax.fori_loop(0, steps, step, (w, personal.init(w)))[0]
        return kit.add_proximal(measure(kit.Point(v, ())), point.params, v, strength)

    def find_personal(params: kit.Params, _: Any, support: kit.Examples, keys: Array) -> kit.Params:
        def near(measure: Any, v: kit.Params, context: Any) -> tuple[Array, Array]:
            return kit.add_proximal(measure(v), v, params, strength)

        return kit.solve_local(serving, adapt, params, kit.copy_params(params, keys), support, surrogate=near)

    def define(_: kit.Model) -> kit.Method:
        updater = kit.Updater(model, update, surrogate=envelope, whole_tables=adapt.reach() == "whole")
        return kit.averaging_method(
            server,
            updater,
            reconstruct=find_personal,
            steps=lambda support, query: update.steps(query) * (1 + steps),
        )

    return kit.Algorithm(serving, define, aggregate or kit.mean())
