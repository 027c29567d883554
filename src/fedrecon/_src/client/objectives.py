"""What a client solves in R and U: objectives, problems, solutions and solvers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float

from fedrecon._src.client.batches import fold_batches
from fedrecon._src.client.lookup_reach import Reach
from fedrecon._src.client.lookup_tables import LookupTables, original_batch
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.model import Batch, Model, Step, measure, metric_names, predict_in
from fedrecon._src.core.pytrees import Params, split_params

# (measure, what is solved for, context) -> (number to minimise, sums of loss and metrics), where `measure` returns the
# mean loss of the batch and the sums of loss and metrics at any parameters
Surrogate = Callable[[Callable[[Params], tuple[Array, Array]], Params, Any], tuple[Array, Array]]


class Objective(NamedTuple):
    """What one client minimises: the model's loss as a function of what is solved for.

    Attributes:
      model: its loss is minimised, and its metrics are measured.
      predict: `(params, context, batch) -> predictions`, where `params` is solved for and `context` is held fixed.
      predict_train: the same in a training step, `(params, context, batch, step) -> predictions`; None if there is no
        difference.
      surrogate: `(measure, params, context) -> (number, sums)`, what a step minimises instead of the mean loss of its
        batch, such as the loss plus a pull towards the server's parameters. `measure(params)` returns that mean loss
        and the sums of loss and metrics. None for the loss itself.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> model = fr.models.matrix_factorization(num_items=3, dim=2)
      >>> objective = kit.Objective(model, lambda local, params, batch: model.predict(params, local, batch))
    """

    model: Model
    predict: Callable[[Params, Any, Batch], Any]
    predict_train: Callable[[Params, Any, Batch, Step], Any] | None = None
    surrogate: Surrogate | None = None

    def measure(
        self, params: Params, context: Any, batch: Batch, mask: Array, step: Step | None = None
    ) -> tuple[Array, Array]:
        """Return the objective on a batch, and the sums of loss and metrics, `(metrics, 2)`.

        Args:
          params: what is solved for.
          context: what the client holds fixed.
          batch: features of `(examples, ...)`.
          mask: `(examples,)`, false for padding.
          step: the training step, to predict as in training; None to predict as in use.
        """

        def measure_at(params: Params) -> tuple[Array, Array]:
            predictions = predict_in(self, params, context, batch, step)
            return measure(self.model, predictions, original_batch(batch), mask, training=step is not None)

        return measure_at(params) if self.surrogate is None else self.surrogate(measure_at, params, context)


class Solution(NamedTuple):
    """The solutions of several clients, clients first in every leaf.

    Attributes:
      params: the solution, without lookup tables.
      changes: for every lookup table, `(clients, rows, ...)` the change of each row in the client's list.
      sums: `(clients, metrics, 2)` over the examples, each measured before the step that used it.
      examples: `(clients,)` how many examples were processed, counting every epoch.
      steps: `(clients,)` how many steps were taken.

    Example:
      >>> from fedrecon import kit
      >>> kit.Solution._fields
      ('params', 'changes', 'sums', 'examples', 'steps')
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
      params: the starting point, clients first.
      context: what each client holds fixed, clients first.
      examples: each client's examples.
      tables: lookup tables that are changed by rows, besides `params`.
      grows: paths of `params` that are copies of table rows numbered in the order of the examples, and how many ids an
        example has. Early steps can skip rows that no step has touched yet.
      measured: whether to sum the loss and the metrics.
      differentiable: whether gradients must flow back through the solution.
      keys: the clients' keys, for what is random in their steps; None if nothing should be random.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> from fedrecon import kit
      >>> model = fr.models.from_function(
      ...     lambda params, x: params["b"] * x, {"b": jnp.zeros(())}, local="*", inputs="x", label="y", loss="mse"
      ... )
      >>> objective = kit.Objective(model, lambda local, context, batch: model.predict({}, local, batch))
      >>> examples = kit.Examples({"x": jnp.ones((1, 2)), "y": jnp.full((1, 2), 3.0)}, jnp.array([2]))
      >>> problem = kit.Problem(objective, {"b": jnp.zeros(1)}, (), examples)  # for `Solver.solve`
    """

    objective: Objective
    params: Params
    context: Any
    examples: Examples
    tables: LookupTables = LookupTables()
    grows: Mapping[str, int] = {}
    measured: bool = True
    differentiable: bool = False
    keys: Array | None = None


class Solver(NamedTuple):
    """A way to solve for parameters, such as `gradient_descent`, `least_squares` or `closed_form`.

    Attributes:
      solve: `Problem -> Solution`.
      limit: how many examples of a client it uses at most; None for no limit.
      reach: returns how much of a lookup table it needs (see `lookups.reach`); "whole" if it cannot work on rows.
      check: `(objective, params, context, batch, mask)` of one client; raises if this solver cannot solve it.
      batch_size: how many examples a step uses; None for all.
      steps: `examples -> steps`, how many steps a client with so many examples takes; a direct solution is one step.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> solver = fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=20)
      >>> solver.limit, solver.reach()  # examples per client; plain SGD can work on single rows of a table
      (100, 'each')
    """

    solve: Callable[[Problem], Solution]
    limit: int | None
    reach: Callable[[], Reach]
    check: Callable[[Objective, Params, Any, Batch, Array], None]
    batch_size: int | None = None
    steps: Callable[[np.ndarray], np.ndarray] = lambda examples: np.minimum(examples, 1)


def check_solver(name: str, solver: Any) -> None:
    """Raise an error if an argument is no solver; an optimizer is easily taken for one.

    Args:
      name: the argument.
      solver: its value.
    """
    if not isinstance(solver, Solver):
        rule = "must be a solver, such as fr.gradient_descent(optax.sgd(0.1), batch_size=5)"
        raise TypeError(f"`{name}` {rule} (got {type(solver).__name__})")


def solve_local(
    model: Model,
    solver: Solver,
    params: Params,
    start: Params,
    support: Examples,
    *,
    keys: Array | None = None,
    surrogate: Surrogate | None = None,
    differentiable: bool = False,
) -> Params:
    """Solve for the local parameters of several clients, with the global ones frozen. Local state stays unchanged.

    Args:
      model: a partially local model.
      solver: R.
      params: the global parameters, the same for all clients.
      start: where the local parameters start, clients first.
      support: each client's support examples.
      keys: the clients' keys, for what is random in their steps; None if nothing should be random.
      surrogate: what a step minimises instead of the loss; see `Objective`.
      differentiable: whether gradients must flow back through the solution.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> from fedrecon import kit
      >>> model = fr.models.matrix_factorization(num_items=2, dim=1)
      >>> support = kit.Examples({"item": jnp.array([[1]]), "rating": jnp.array([[4.0]])}, jnp.array([1]))
      >>> params, start = {"item_embedding": jnp.array([[1.0], [2.0]])}, {"user_embedding": jnp.zeros((1, 1))}
      >>> local = kit.solve_local(model, fr.least_squares(1e-6), params, start, support)
      >>> print(f"{local['user_embedding'][0, 0]:.3f}")
      2.000
    """
    free, fixed, merge = split_params(start, model.local_state)
    if not jax.tree.leaves(free):
        return start
    objective = local_objective(model, params, merge)._replace(surrogate=surrogate)
    problem = Problem(objective, free, fixed, support, measured=False, differentiable=differentiable, keys=keys)
    return merge(solver.solve(problem).params, fixed)


def add_proximal(measured: tuple[Array, Array], params: Params, center: Params, strength: float) -> tuple[Array, Array]:
    """Add `strength / 2` times the squared distance between parameters and a center to a loss, for a surrogate.

    Args:
      measured: a loss, and sums of loss and metrics, which stay as they are.
      params: what is solved for.
      center: what it is pulled towards.
      strength: strength of the pull.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedrecon import kit
      >>> float(kit.add_proximal((jnp.float32(1), jnp.zeros(2)), {"w": jnp.float32(5)}, {"w": jnp.float32(3)}, 0.5)[0])
      2.0
    """
    loss, sums = measured
    return loss + strength / 2 * optax.tree.norm(optax.tree.sub(params, center), squared=True), sums


def local_objective(model: Model, params: Params, merge: Callable[[Params, Params], Params]) -> Objective:
    """Return what R minimises: the loss as a function of the local parameters that are solved for.

    Args:
      model: a partially local model.
      params: the global parameters.
      merge: `(what is solved for, what is held fixed) -> local parameters`.
    """

    def predict(free: Params, fixed: Params, batch: Batch, step: Step | None = None) -> Any:
        return predict_in(model, params, merge(free, fixed), batch, step)

    return Objective(model, predict, None if model.predict_train is None else predict)


def start_local(model: Model, params: Params, fresh: Params, support: Examples) -> Params:
    """Return where a client's reconstruction starts.

    Args:
      model: a partially local model.
      params: the global parameters.
      fresh: where it starts if no default is learned.
      support: the client's support; a model with `evidence` adds what it computes from it.
    """
    start = fresh if model.default_local is None else model.default_local(params)
    if model.evidence is None:
        return start
    mask = jnp.arange(next(iter(support.columns.values())).shape[0]) < support.count
    return jax.tree.map(jnp.add, start, model.evidence(params, support.columns, mask))


def measure_all(
    objective: Objective, params: Params, context: Any, examples: Examples, *, batch_size: int
) -> Float[Array, "clients metrics 2"]:
    """Measure several clients on all their examples, without solving.

    Args:
      objective: what to measure.
      params: each client's parameters, clients first.
      context: what each client holds fixed, clients first.
      examples: each client's examples.
      batch_size: how many examples are measured at once.

    Returns:
      Sums of loss and metrics.
    """

    def step(total: Array, batch: Batch, mask: Array, inputs: tuple[Params, Any]) -> Array:
        return total + jnp.where(jnp.any(mask), objective.measure(inputs[0], inputs[1], batch, mask)[1], 0)

    return fold_batches(step, zero_sums(objective.model, examples), (params, context), examples, batch_size)


def zero_sums(model: Model, examples: Examples) -> Float[Array, "clients metrics 2"]:
    """Return zero sums of loss and metrics.

    Args:
      model: its metrics are summed.
      examples: the clients' examples.
    """
    return jnp.zeros((examples.count.shape[0], len(metric_names(model)), 2))
