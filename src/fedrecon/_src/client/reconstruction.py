"""R for a block of clients: solve for local parameters on support, with the global ones frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from fedrecon._src.client.batches import set_local_state
from fedrecon._src.client.objectives import Solver, check_solver, local_objective, solve_local, start_local
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.model import Batch, Model
from fedrecon._src.core.pytrees import Params, split_params


class Reconstruction(NamedTuple):
    """R, its check and its limit.

    Attributes:
      run: `(global, client state, support, keys, keys of its steps) -> local`. Without keys of its steps, nothing in
        them is random, as outside training.
      check: `(global, local, batch, mask)` of one client; raises if the solver cannot reconstruct this model.
      limit: how many support examples it uses at most; None for no limit.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> kit.reconstruction(fr.models.matrix_factorization(3), fr.least_squares(1.0, limit=20)).limit
      20
    """

    run: Callable[..., Params]
    check: Callable[[Params, Params, Batch, Array], None]
    limit: int | None


def reconstruction(model: Model, solver: Solver | None) -> Reconstruction:
    """Make R from a solver.

    Args:
      model: a partially local model.
      solver: how local parameters are reconstructed; None for models without local parameters to solve for.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedrecon import kit
      >>> model = fr.models.matrix_factorization(num_items=2, dim=1)
      >>> run = kit.reconstruction(model, fr.least_squares(1.0)).run
      >>> support = kit.Examples({"item": jnp.array([[1]]), "rating": jnp.array([[4.0]])}, jnp.array([1]))
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> jax.eval_shape(run, {"item_embedding": jnp.ones((2, 1))}, (), support, keys)["user_embedding"].shape
      (1, 1)
    """
    if solver is not None:
        check_solver("reconstruct", solver)

    def run(params: Params, client_state: Any, support: Examples, keys: Array, of_steps: Array | None = None) -> Params:
        fresh = jax.vmap(model.init_local)(keys)
        local = jax.vmap(lambda start, examples: start_local(model, params, start, examples))(fresh, support)
        if jax.tree.leaves(split_params(local, model.local_state)[0]):
            if solver is None:
                raise ValueError("the model has local parameters; give `reconstruct`, a solver that reconstructs them")
            local = solve_local(model, solver, params, local, support, keys=of_steps)
        return set_local_state(model, params, local, support)

    def check(params: Params, local: Params, batch: Batch, mask: Array) -> None:
        free, fixed, merge = split_params(local, model.local_state)
        if solver is not None and jax.tree.leaves(free):
            solver.check(local_objective(model, params, merge), free, fixed, batch, mask)

    return Reconstruction(run, check, None if solver is None else solver.limit)
