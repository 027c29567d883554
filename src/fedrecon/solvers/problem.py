"""What a client solves in R and U: objectives, problems, solutions. `descent` and `least_squares` solve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon.cohort import Examples
from fedrecon.lookups.reach import Reach
from fedrecon.lookups.tables import Tables, original_batch
from fedrecon.model import Batch, Model, Step, measure, metric_names, predict_in
from fedrecon.solvers.batches import fold_batches
from fedrecon.trees import Params, divide


class Objective(NamedTuple):
    """What one client minimises: the model's loss, seen as a function of what is solved for.

    Attributes:
      model: whose loss and metrics are taken.
      predict: `(what is solved for, what else this client has, batch) -> predictions`.
      fit: the same in a step of training, `(..., batch, step) -> predictions`; None where there is no difference.
      penalty: `(what is solved for, what else this client has) -> number`, added to the mean loss of every batch: a
        pull towards the server's parameters, say. None for nothing.
    """

    model: Model
    predict: Callable[[Params, Any, Batch], Any]
    fit: Callable[[Params, Any, Batch, Step], Any] | None = None
    penalty: Callable[[Params, Any], Array] | None = None

    def measure(
        self, params: Params, context: Any, batch: Batch, mask: Array, step: Step | None = None
    ) -> tuple[Array, Array]:
        """Return what is minimised on a batch, and the sums of loss and metrics; with `step`, as training sees them."""
        if self.fit is None or step is None:
            predictions = self.predict(params, context, batch)
        else:
            predictions = self.fit(params, context, batch, step)
        loss, sums = measure(self.model, predictions, original_batch(batch), mask)
        return loss if self.penalty is None else loss + self.penalty(params, context), sums


class Solution(NamedTuple):
    """What several clients found, clients first in every leaf.

    Attributes:
      params: the solution, without lookup tables.
      changes: for every lookup table, the change of each row in the client's list.
      sums: `(clients, metrics, 2)` over the examples, each measured before the step that used it.
      examples: `(clients,)` how many examples were processed, counting every epoch.
      steps: `(clients,)` how many steps were taken.
    """

    params: Params
    changes: dict[str, Array]
    sums: Array
    examples: Array
    steps: Array


class Problem(NamedTuple):
    """What several clients solve, each on its own examples.

    Attributes:
      objective: what is minimised.
      params: where it starts, clients first.
      context: what else each client has, clients first.
      examples: what it is minimised on.
      tables: lookup tables to be changed by rows, beside `params`; None for none.
      grows: those of `params` that are copies of rows numbered in the order of the examples, and how many ids an
        example has: a step need not look at rows that no step so far has touched.
      measured: whether sums of metrics are wanted.
      differentiable: whether gradients must be able to flow back through the solution.
      keys: of each client, for what is random in its steps; None where nothing is to be random.
    """

    objective: Objective
    params: Params
    context: Any
    examples: Examples
    tables: Tables | None = None
    grows: Mapping[str, int] = {}
    measured: bool = True
    differentiable: bool = False
    keys: Array | None = None


class Solver(NamedTuple):
    """A way to solve for parameters.

    Attributes:
      solve: `Problem -> Solution`.
      limit: no more than this many examples of a client are ever used; None for no limit.
      reach: how much of a lookup table it must hold (see `lookups.reach`); "whole" if it cannot use them.
      check: `(objective, params, context, batch, mask)` of one client; raises if this solver cannot solve that.
      batch_size: how many examples a step sees; None for all.
    """

    solve: Callable[[Problem], Solution]
    limit: int | None
    reach: Callable[[], Reach]
    check: Callable[[Objective, Params, Any, Batch, Array], None]
    batch_size: int | None = None


def solve_local(
    model: Model,
    solver: Solver,
    params: Params,
    start: Params,
    support: Examples,
    *,
    keys: Array | None = None,
    differentiable: bool = False,
) -> Params:
    """Solve for the local parameters of several clients, the global ones frozen; local state stays as it started.

    Args:
      model: a partially local model.
      solver: R.
      params: the global parameters, shared by all clients.
      start: where the local parameters start, clients first.
      support: what they are solved on.
      keys: of each client, for what is random in its steps; None where nothing is to be random.
      differentiable: whether gradients must be able to flow back.
    """
    solved, held, join = divide(start, model.local_state)
    if not jax.tree.leaves(solved):
        return start
    objective = local_objective(model, params, join)
    problem = Problem(objective, solved, held, support, measured=False, differentiable=differentiable, keys=keys)
    return join(solver.solve(problem).params, held)


def local_objective(model: Model, params: Params, join: Callable[[Params, Params], Params]) -> Objective:
    """Return what R minimises: the loss as a function of local parameters, `join(what is solved for, what is held)`."""

    def predict(solved: Params, held: Params, batch: Batch) -> Any:
        return model.predict(params, join(solved, held), batch)

    def fit(solved: Params, held: Params, batch: Batch, step: Step) -> Any:
        return predict_in(model, params, join(solved, held), batch, step)

    return Objective(model, predict, None if model.fit is None else fit)


def start_local(model: Model, params: Params, fresh: Params, support: Examples) -> Params:
    """Return where a client's reconstruction starts: the learned default or else `fresh`, and what its support adds."""
    start = fresh if model.default_local is None else model.default_local(params)
    if model.evidence is None:
        return start
    mask = jnp.arange(next(iter(support.columns.values())).shape[0]) < support.count
    return jax.tree.map(jnp.add, start, model.evidence(params, support.columns, mask))


def measure_all(objective: Objective, params: Params, context: Any, examples: Examples, *, batch_size: int) -> Array:
    """Measure several clients on all their examples, without solving: sums of `(clients, metrics, 2)`."""

    def step(total: Array, batch: Batch, mask: Array, mine: tuple[Params, Any]) -> Array:
        return total + jnp.where(jnp.any(mask), objective.measure(mine[0], mine[1], batch, mask)[1], 0)

    return fold_batches(step, no_sums(objective.model, examples), (params, context), examples, batch_size)


def no_sums(model: Model, examples: Examples) -> Array:
    """Return the sums of loss and metrics over nothing."""
    return jnp.zeros((examples.count.shape[0], len(metric_names(model)), 2))
