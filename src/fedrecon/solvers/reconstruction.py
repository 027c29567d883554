"""R for a block of clients: local parameters from their support, with the global ones frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from fedrecon.cohort import Examples
from fedrecon.model import Batch, Model
from fedrecon.solvers.problem import Solver, local_objective, solve_local, start_local
from fedrecon.solvers.statistics import settle
from fedrecon.trees import Params, divide


class Reconstruction(NamedTuple):
    """R: `run(global, kept, support, keys, keys of its steps) -> local`, its check and its limit.

    Without keys of steps nothing in the steps is random: so it is wherever `run` is not part of training.
    """

    run: Callable[..., Params]
    check: Callable[[Params, Params, Batch, Array], None]
    limit: int | None


def reconstruction(model: Model, solver: Solver | None) -> Reconstruction:
    """Reconstruct local parameters with a solver; without one, only models that solve for none can be."""

    def run(params: Params, kept: Any, support: Examples, keys: Array, of_steps: Array | None = None) -> Params:
        del kept
        fresh = jax.vmap(model.init_local)(keys)
        local = jax.vmap(lambda mine, examples: start_local(model, params, mine, examples))(fresh, support)
        if jax.tree.leaves(divide(local, model.local_state).solved):
            if solver is None:
                raise ValueError("the model has local parameters; give `reconstruct`, a way to reconstruct them")
            local = solve_local(model, solver, params, local, support, keys=of_steps)
        return settle(model, params, local, support)

    def check(params: Params, local: Params, batch: Batch, mask: Array) -> None:
        solved, held, join = divide(local, model.local_state)
        if solver is not None and jax.tree.leaves(solved):
            solver.check(local_objective(model, params, join), solved, held, batch, mask)

    return Reconstruction(run, check, None if solver is None else solver.limit)
