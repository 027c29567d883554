"""U for a block of clients: update copies of the global parameters on query, whole or by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon._src.client.batches import fold_batches
from fedrecon._src.client.lookup_tables import (
    LookupTables,
    group_name,
    lookup_groups,
    renumber,
    row_groups,
    rows_in_order,
    slots_in_order,
)
from fedrecon._src.client.objectives import (
    Objective,
    Problem,
    Solver,
    check_solver,
    solve_local,
    start_local,
)
from fedrecon._src.core.checks import check_known
from fedrecon._src.core.cohort import Cohort, Examples, Needs
from fedrecon._src.core.model import Batch, Model, Step, predict_in, shapes_of
from fedrecon._src.core.pytrees import Params, copy_params, flatten, unflatten
from fedrecon._src.core.split import Split
from fedrecon._src.core.upload import DELTA, RowChanges, Upload

# (global, local parameters that are solved for too, context, support, batch, step) -> predictions
Predict = Callable[[Params, Params, Any, Examples, Batch, Step | None], Any]

GLOBAL, LOCAL = "global/", "local/"  # prefixes of the paths of what is solved for


class Point(NamedTuple):
    """What one client solves for in U.

    Attributes:
      params: the global parameters, as the client has them; of lookup tables, only its rows.
      local: local parameters that are solved for too; empty if there are none.

    Example:
      >>> from fedrecon import kit
      >>> kit.Point(params={"w": 1.0}, local=()).params
      {'w': 1.0}
    """

    params: Params
    local: Params


# (measure of a point, point, global parameters at the start of the round, pull) -> (number, sums)
PointSurrogate = Callable[[Callable[[Point], tuple[Array, Array]], Point, Params, Any], tuple[Array, Array]]


class UpdateResult(NamedTuple):
    """The result of U for a block of clients.

    Attributes:
      upload: what leaves the clients.
      local: the local parameters, which stay.
      steps: `(clients,)` how many steps were taken.

    Example:
      >>> from fedrecon import kit
      >>> kit.UpdateResult._fields
      ('upload', 'local', 'steps')
    """

    upload: Upload
    local: Params
    steps: Array


class Held(NamedTuple):
    """What a client holds fixed in U, clients first in every leaf.

    Attributes:
      context: what predictions need besides what is solved for.
      support: its support examples, if gradients flow through them; else empty.
      fixed: state, global and local, which no step changes; by path.
      start: the global parameters as the server sent them, if there is a surrogate; else empty.
      pull: the last argument of the surrogate.
    """

    context: Any
    support: Any
    fixed: dict[str, Array]
    start: Params
    pull: Any


class Updater:
    """Runs U for blocks of clients.

    How much of a lookup table a client works on depends on the reach of its optimizer (see `lookups.reach`): changes of
    the rows of each batch, a copy of all rows that the client touches, or a copy of the whole table. The results are
    the same.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> from fedrecon import kit
      >>> model = fr.models.matrix_factorization(num_items=100)
      >>> updater = kit.Updater(model, fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=10))
      >>> updater.needs(kit.half(), support_limit=None).query_limit
      50
    """

    def __init__(
        self,
        model: Model,
        update: Solver,
        *,
        through_support: bool = False,
        surrogate: PointSurrogate | None = None,
        whole_tables: bool = False,
    ):
        """Prepare to run U.

        Args:
          model: its global parameters are updated.
          update: the solver.
          through_support: whether gradients also reach rows that only support examples touch. They always do if the
            model takes evidence from support.
          surrogate: `(measure, point, start, pull) -> (number, sums)`, what a step minimises instead of the mean loss
            of its batch. `measure(point)` returns that loss and the sums of loss and metrics at any `Point`; `start`
            holds the global parameters as the server sent them; `run` takes `pull`.
          whole_tables: whether the surrogate moves rows that no example of the client touches, so that clients must
            work on whole tables.
        """
        check_solver("update", update)
        through_support = through_support or model.evidence is not None
        self.model, self.solver, self._through_support = model, update, through_support
        self._surrogate = surrogate
        features = {} if whole_tables else lookup_groups(model)
        reach = update.reach() if features else "whole"
        self._by_steps = reach in ("each", "rows") and not through_support and surrogate is None
        self._features = {} if reach == "whole" else features
        self.groups = {path: group_name(features) for path, features in self._features.items()}

    def needs(self, split: Split, support_limit: int | None) -> Needs:
        """Return which parts of a client's data to pack.

        Args:
          split: how examples become support and query.
          support_limit: how many support examples are used at most; None for no limit.
        """
        shapes = flatten(shapes_of(self.model.init_global))[0]
        check_known("lookups", self._features, shapes, "the global parameters are")
        groups = row_groups(self._features, shapes)
        return Needs(split, support_limit, self.solver.limit, groups, self._through_support)

    def run(
        self,
        params: Params,
        cohort: Cohort,
        predict: Predict,
        context: Any,
        solved: Params = (),
        keys: Array | None = None,
        pull: Any = (),
    ) -> UpdateResult:
        """Run U.

        Args:
          params: the global parameters that the server sent.
          cohort: the block of clients.
          predict: `(global, solved, context, support, batch, step) -> predictions` of one client; `step` is None
            outside training.
          context: what each client holds fixed, clients first.
          solved: local parameters to solve for besides the global ones, clients first.
          keys: the clients' keys, for what is random in their steps.
          pull: the last argument of the surrogate, clients first.
        """
        leaves, structure = flatten(params)
        cohort = self._with_rows(cohort, leaves)
        copies, tables, block = self._working_copy(leaves, cohort)
        params = unflatten(structure, {**leaves, **copies})
        start, point_of = _flatten_point(Point(params, solved))
        shared = () if self.model.state is None else self.model.state.shared
        state = [*(GLOBAL + path for path in shared), *(LOCAL + path for path in self.model.local_state)]
        fixed = {path: start[path] for path in state if path in start}
        sees_all_rows = self._through_support or self._surrogate is not None  # of a client, in every step
        growing = () if sees_all_rows or self._by_steps else self._features
        support, sent = block.support if self._through_support else (), () if self._surrogate is None else params
        problem = Problem(
            objective=self._objective(predict, point_of),
            params={path: leaf for path, leaf in start.items() if path not in fixed and path not in tables.values},
            context=Held(context, support, fixed, sent, pull),
            examples=block.query,
            tables=tables,
            grows={GLOBAL + path: self._ids(path, cohort) for path in growing},
            keys=keys,
        )
        solution = self.solver.solve(problem)
        after = start | solution.params
        if shared:
            if tables.values:  # clients have rows of them only, so ids must be renumbered to match
                rows = {GLOBAL + path: cohort.rows[group] for path, group in self.groups.items()}
                after |= {path: tables.values[path][rows[path]] + change for path, change in solution.changes.items()}
                block = self._renumbered(cohort)
            after |= self._advance_statistics(block.query, after, point_of, context)
        delta = {path: after[GLOBAL + path] - copy for path, copy in copies.items()}
        delta |= _under(GLOBAL, solution.changes)
        changes: dict[str, Any] = {path: delta[path] for path in leaves}
        for path, group in self.groups.items():  # the ids and the changes of a client's rows
            changes[path] = RowChanges(cohort.rows[group], delta[path], cohort.num_rows[group], len(leaves[path]))
        upload = Upload({DELTA: changes}, solution.examples, solution.sums)
        return UpdateResult(upload, point_of(after).local, solution.steps)

    def _objective(self, predict: Predict, point_of: Callable[[Mapping[str, Any]], Point]) -> Objective:
        """Return what U minimises, as a function of what is solved for and of what is held fixed."""

        def predict_trained(trained: dict[str, Any], held: Held, batch: Batch, step: Step | None = None) -> Any:
            point = point_of(trained | held.fixed)
            return predict(point.params, point.local, held.context, held.support, batch, step)

        surrogate = self._surrogate

        def in_points(measure: Any, trained: dict[str, Any], held: Held) -> tuple[Array, Array]:
            assert surrogate is not None

            def measure_point(point: Point) -> tuple[Array, Array]:
                leaves = _flatten_point(point)[0]
                return measure({path: leaf for path, leaf in leaves.items() if path not in held.fixed})

            return surrogate(measure_point, point_of(trained | held.fixed), held.start, held.pull)

        in_training = None if self.model.predict_train is None else predict_trained
        return Objective(self.model, predict_trained, in_training, None if surrogate is None else in_points)

    def _with_rows(self, cohort: Cohort, leaves: Mapping[str, Any]) -> Cohort:
        """Add the lists of rows that packing left out, since they follow from the examples."""
        in_order = {
            group: rows_in_order(*cohort.query, features, fewest)
            for group, (fewest, features) in row_groups(self._features, leaves).items()
            if group not in cohort.rows
        }
        return cohort._replace(rows={**cohort.rows, **in_order})

    def _ids(self, path: str, cohort: Cohort) -> int:
        """Return how many ids of a table one example has."""
        return sum(math.prod(cohort.query.columns[feature].shape[2:]) for feature in self._features[path])

    def _working_copy(self, leaves: dict[str, Array], cohort: Cohort) -> tuple[dict[str, Array], LookupTables, Cohort]:
        """Copy the global parameters for every client, except lookup tables that are changed by rows.

        Returns:
          Every client's copies, by path, clients first, of lookup tables only the client's rows; lookup tables that are
          changed by rows instead; and the block, with ids renumbered if tables were copied by rows.
        """
        rows = {path: cohort.rows[group] for path, group in self.groups.items()}
        dense = copy_params({path: leaf for path, leaf in leaves.items() if path not in rows}, cohort.query.count)
        if not rows:
            return dense, LookupTables(), cohort
        if self._by_steps:
            tables = LookupTables(
                {GLOBAL + path: jnp.asarray(leaves[path]) for path in rows},
                {GLOBAL + path: features for path, features in self._features.items()},
                cohort.slots,
                {GLOBAL + path: ids.shape[1] for path, ids in rows.items()},
            )
            return dense, tables, cohort
        copies = {path: jnp.asarray(leaves[path]).at[ids].get(mode="promise_in_bounds") for path, ids in rows.items()}
        return {**dense, **copies}, LookupTables(), self._renumbered(cohort)

    def _advance_statistics(
        self, query: Examples, after: Mapping[str, Array], point_of: Callable[[Mapping[str, Any]], Point], context: Any
    ) -> dict[str, Array]:
        """Advance the global state over query, batch by batch as the layers do, with all else as it is after U."""
        state = self.model.state
        assert state is not None

        def step(shared: dict[str, Array], batch: Batch, mask: Array, held: Any) -> dict[str, Array]:
            point = point_of({**held[0], **shared})
            local = point.local if jax.tree.leaves(point.local) else held[1]
            new = state.advance(point.params, local, batch, mask)[0]
            advanced = {path: new[path.removeprefix(GLOBAL)].astype(old.dtype) for path, old in shared.items()}
            return jax.tree.map(lambda new, old: jnp.where(jnp.any(mask), new, old), advanced, shared)

        shared = {GLOBAL + path: after[GLOBAL + path] for path in state.shared}
        return fold_batches(step, shared, (after, context), query, self.solver.batch_size, cyclic=True)

    def _renumbered(self, cohort: Cohort) -> Cohort:
        """Replace ids by positions in the client's list of rows."""
        slots = dict(cohort.slots)
        for features in set(self._features.values()):
            if features[0] not in slots:
                slots |= slots_in_order(cohort.query.columns, features)
        query = Examples(renumber(cohort.query.columns, slots), cohort.query.count)
        support = Examples(renumber(cohort.support.columns, cohort.support_slots), cohort.support.count)
        return cohort._replace(query=query, support=support)


def _flatten_point(point: Point) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Point]]:
    """Return the leaves of a point by path, and how to make a point of such leaves."""
    (params, structure), (local, local_structure) = flatten(point.params), flatten(point.local)
    leaves = {GLOBAL + path: leaf for path, leaf in params.items()}
    leaves |= {LOCAL + path: leaf for path, leaf in local.items()}

    def restore(leaves: Mapping[str, Any]) -> Point:
        return Point(unflatten(structure, _under(GLOBAL, leaves)), unflatten(local_structure, _under(LOCAL, leaves)))

    return leaves, restore


def _under(prefix: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves whose paths have a prefix, without the prefix."""
    return {path.removeprefix(prefix): leaf for path, leaf in leaves.items() if path.startswith(prefix)}


def first_order_predict(model: Model) -> Predict:
    """Predict with local parameters that are held fixed while the global ones change: the first-order method.

    Args:
      model: a partially local model.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> predict = kit.first_order_predict(fr.models.matrix_factorization(num_items=100))  # for `Updater.run`
    """

    def predict(
        params: Params, solved: Params, context: Any, support: Examples, batch: Batch, step: Step | None
    ) -> Any:
        local = solved if jax.tree.leaves(solved) else context
        if model.default_local is not None or model.evidence is not None:
            # The learned start gets the gradient of the local parameters that were reconstructed from it, as if
            # reconstruction had only added a constant. The value of the local parameters does not change.
            start = start_local(model, params, jax.tree.map(jnp.zeros_like, local), support)
            local = jax.tree.map(lambda x, d: x + d - jax.lax.stop_gradient(d), local, start)
        return predict_in(model, params, local, batch, step)

    return predict


def second_order_predict(model: Model, reconstruct: Solver) -> Predict:
    """Predict with local parameters that are reconstructed in every step, so that gradients flow through R.

    A client's context is then a pair: where its local parameters start, and the key of R's steps (None if these are
    not random).

    Args:
      model: a partially local model.
      reconstruct: the solver of R.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> predict = kit.second_order_predict(fr.models.matrix_factorization(num_items=100), fr.least_squares(1.0))
    """

    def predict(params: Params, _: Params, context: Any, support: Examples, batch: Batch, step: Step | None) -> Any:
        fresh, key = context
        start = start_local(model, params, fresh, support)
        if jax.tree.leaves(start):
            alone, single, keys = jax.tree.map(lambda leaf: leaf[None], (start, support, key))  # a block of one client
            solution = solve_local(model, reconstruct, params, alone, single, keys=keys, differentiable=True)
            start = jax.tree.map(lambda leaf: leaf[0], solution)
        return predict_in(model, params, start, batch, step)

    return predict
