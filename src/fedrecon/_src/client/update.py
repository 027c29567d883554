"""U for a block of clients: update copies of the global parameters on query, whole or by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon._src.client.batch_statistics import advance_shared
from fedrecon._src.client.lookups.lookup_tables import (
    LookupTables,
    group_name,
    lookup_groups,
    renumber,
    rows_in_order,
    slots_in_order,
)
from fedrecon._src.client.objectives import Objective, Problem, Solution, Solver, solve_local, start_local
from fedrecon._src.core.cohort import Cohort, Examples, Needs
from fedrecon._src.core.model import Batch, Model, Step, predict_in
from fedrecon._src.core.pytrees import Params, Structure, flatten, split_params, unflatten
from fedrecon._src.core.split import Split
from fedrecon._src.core.upload import DELTA, RowChanges, Upload

# (global, local parameters that are solved for too, context, support, batch, step) -> predictions
Predict = Callable[[Params, Params, Any, Examples, Batch, Step | None], Any]
# (global, pull) -> number that is added to the mean loss of every batch
Penalty = Callable[[Params, Any], Array]

GLOBAL, LOCAL = "global/", "local/"  # prefixes of the paths of what is solved for


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
      statistics: global state by path, which no step changes.
      local_state: local leaves that no step changes.
      pull: the second argument of the penalty.
    """

    context: Any
    support: Any
    statistics: dict[str, Array]
    local_state: Params
    pull: Any


class _WorkingCopy(NamedTuple):
    """The global parameters as a block of clients works on them.

    Attributes:
      copies: every client's copies, by path, clients first; of lookup tables, copies of the client's rows.
      tables: lookup tables that are changed by rows instead; None for none.
      growing: paths of the copies that are rows of lookup tables.
      cohort: the block, with ids renumbered if tables were copied by rows.
    """

    copies: dict[str, Array]
    tables: LookupTables | None
    growing: tuple[str, ...]
    cohort: Cohort


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

    def __init__(self, model: Model, update: Solver, *, through_support: bool = False, penalty: Penalty | None = None):
        """Prepare to run U.

        Args:
          model: its global parameters are updated.
          update: the solver.
          through_support: whether gradients also reach rows that only support examples touch. They always do if the
            model takes evidence from support.
          penalty: `(global, pull) -> number`, added to the mean loss of every batch; `run` takes `pull`. A penalty may
            move rows that no example touches, so clients then work on whole tables.
        """
        through_support = through_support or model.evidence is not None
        self.model, self._update, self._through_support = model, update, through_support
        self._penalty = penalty
        features = {} if penalty is not None else lookup_groups(model)
        reach = update.reach() if features else "whole"
        self._by_steps = reach in ("each", "rows") and not through_support
        self._features = {} if reach == "whole" else features
        self.groups = {path: group_name(features) for path, features in self._features.items()}

    def needs(self, split: Split, support_limit: int | None) -> Needs:
        """Return which parts of a client's data to pack.

        Args:
          split: how examples become support and query.
          support_limit: how many support examples are used at most; None for no limit.
        """
        shapes = flatten(jax.eval_shape(lambda: self.model.init_global(jax.random.key(0))))[0]
        groups: dict[str, tuple[int, tuple[str, ...]]] = {}
        for path, features in self._features.items():
            if path not in shapes:
                raise ValueError(f"`lookups` names {path!r}; the global parameters are: {', '.join(shapes)}")
            name = group_name(features)
            rows = min(shapes[path].shape[0], groups.get(name, (shapes[path].shape[0],))[0])
            groups[name] = (rows, features)
        return Needs(split, support_limit, self._update.limit, groups, self._through_support)

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
          pull: the second argument of the penalty, clients first.
        """
        leaves, structure = flatten(params)
        cohort = self._with_rows(cohort, leaves)
        working = self._working_copy(leaves, cohort)
        state = self.model.state
        statistics = {path: working.copies[path] for path in (state.shared if state else ())}
        local = split_params(solved, self.model.local_state if jax.tree.leaves(solved) else ())
        local_leaves, local_structure = flatten(local.free)
        trained = {GLOBAL + path: leaf for path, leaf in working.copies.items() if path not in statistics}
        trained |= {LOCAL + path: leaf for path, leaf in local_leaves.items()}
        support = working.cohort.support if self._through_support else ()
        held = Held(context, support, statistics, local.fixed, pull)

        def local_of(trained: Mapping[str, Any], local_state: Params) -> Params:
            return local.merge(unflatten(local_structure, _under(LOCAL, trained)), local_state)

        solution = self._update.solve(
            Problem(
                objective=self._objective(predict, structure, local_of),
                params=trained,
                context=held,
                examples=working.cohort.query,
                tables=working.tables,
                grows={} if self._through_support else {GLOBAL + p: self._ids(p, cohort) for p in working.growing},
                keys=keys,
            )
        )
        local_after = local_of(solution.params, local.fixed)
        after = _under(GLOBAL, solution.params)
        if statistics:
            other_leaves = after | self._changed(working, solution, cohort)
            rest = (other_leaves, local_after if jax.tree.leaves(local_after) else context)
            after |= self._advance_statistics(statistics, rest, working, structure)
        # (clients, ...) of whole parameters, (clients, rows, ...) of lookup tables
        delta = {path: after[path] - copy for path, copy in working.copies.items()} | _under(GLOBAL, solution.changes)
        upload = self._upload({path: delta[path] for path in leaves}, leaves, cohort, solution)
        return UpdateResult(upload, local_after, solution.steps)

    def _objective(self, predict: Predict, structure: Structure, local_of: Callable[..., Params]) -> Objective:
        """Return what U minimises, as a function of what is solved for and of what is held fixed."""

        def params_of(trained: Mapping[str, Any], held: Held) -> Params:
            return unflatten(structure, {**_under(GLOBAL, trained), **held.statistics})

        def whole(trained: dict[str, Any], held: Held, batch: Batch, step: Step | None = None) -> Any:
            local = local_of(trained, held.local_state)
            return predict(params_of(trained, held), local, held.context, held.support, batch, step)

        penalty = self._penalty
        return Objective(
            self.model,
            whole,
            None if self.model.predict_train is None else whole,
            None if penalty is None else lambda trained, held: penalty(params_of(trained, held), held.pull),
        )

    def _with_rows(self, cohort: Cohort, leaves: Mapping[str, Any]) -> Cohort:
        """Add the lists of rows that packing left out, since they follow from the examples."""
        rows, query = dict(cohort.rows), cohort.query
        for path, group in self.groups.items():
            if group not in rows:
                fewest = min(jnp.shape(leaves[other])[0] for other, same in self.groups.items() if same == group)
                rows[group] = rows_in_order(query.columns, query.count, self._features[path], fewest)
        return cohort._replace(rows=rows)

    def _ids(self, path: str, cohort: Cohort) -> int:
        """Return how many ids of a table one example has."""
        return sum(math.prod(cohort.query.columns[feature].shape[2:]) for feature in self._features[path])

    def _working_copy(self, leaves: dict[str, Array], cohort: Cohort) -> _WorkingCopy:
        """Copy the global parameters for every client, except lookup tables that are changed by rows."""
        clients = cohort.query.count.shape[0]
        rows = {path: cohort.rows[group] for path, group in self.groups.items()}
        dense = {
            path: jnp.broadcast_to(leaf, (clients, *jnp.shape(leaf)))
            for path, leaf in leaves.items()
            if path not in rows
        }
        if not rows:
            return _WorkingCopy(dense, None, (), cohort)
        if self._by_steps:
            tables = LookupTables(
                {GLOBAL + path: jnp.asarray(leaves[path]) for path in rows},
                {GLOBAL + path: features for path, features in self._features.items()},
                cohort.slots,
                {GLOBAL + path: ids.shape[1] for path, ids in rows.items()},
            )
            return _WorkingCopy(dense, tables, (), cohort)
        copies = {path: jnp.asarray(leaves[path]).at[ids].get(mode="promise_in_bounds") for path, ids in rows.items()}
        return _WorkingCopy({**dense, **copies}, None, tuple(copies), self._renumbered(cohort))

    def _upload(self, delta: dict[str, Array], leaves: Mapping[str, Any], cohort: Cohort, solution: Solution) -> Upload:
        """Make the upload; of lookup tables, it has the ids and the changes of a client's rows."""

        def change(path: str) -> Any:
            group = self.groups.get(path)
            if group is None:
                return delta[path]
            return RowChanges(cohort.rows[group], delta[path], cohort.num_rows[group], jnp.shape(leaves[path])[0])

        return Upload({DELTA: {path: change(path) for path in delta}}, solution.examples, solution.sums)

    def _changed(self, working: _WorkingCopy, solution: Solution, cohort: Cohort) -> dict[str, Array]:
        """Return each client's rows, after U, of the lookup tables that were changed by rows."""
        if working.tables is None:
            return {}
        changes = _under(GLOBAL, solution.changes)
        values = _under(GLOBAL, working.tables.values)
        return {path: values[path][cohort.rows[self.groups[path]]] + changes[path] for path in changes}

    def _advance_statistics(
        self, statistics: dict[str, Array], rest: Any, working: _WorkingCopy, structure: Structure
    ) -> dict[str, Array]:
        """Advance the global state over query, with everything else as it is after U."""
        assert self.model.state is not None
        # `rest` holds copies of the changed rows only, so ids must be renumbered to match them.
        cohort = working.cohort if working.tables is None else self._renumbered(working.cohort)
        return advance_shared(
            self.model.state,
            statistics,
            rest,
            cohort.query,
            self._update.batch_size,
            lambda shared, rest: (unflatten(structure, {**rest[0], **shared}), rest[1]),
        )

    def _renumbered(self, cohort: Cohort) -> Cohort:
        """Replace ids by positions in the client's list of rows."""
        slots = dict(cohort.slots)
        for features in set(self._features.values()):
            if features[0] not in slots:
                slots |= slots_in_order(cohort.query.columns, features)
        query = Examples(renumber(cohort.query.columns, slots), cohort.query.count)
        support = Examples(renumber(cohort.support.columns, cohort.support_slots), cohort.support.count)
        return cohort._replace(query=query, support=support)


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

    def predict(
        params: Params, solved: Params, context: Any, support: Examples, batch: Batch, step: Step | None
    ) -> Any:
        del solved
        fresh, key = context
        start = start_local(model, params, fresh, support)
        if jax.tree.leaves(start):
            single = Examples({name: column[None] for name, column in support.columns.items()}, support.count[None])
            alone = jax.tree.map(lambda leaf: leaf[None], start)
            keys = None if key is None else key[None]
            solution = solve_local(model, reconstruct, params, alone, single, keys=keys, differentiable=True)
            start = jax.tree.map(lambda leaf: leaf[0], solution)
        return predict_in(model, params, start, batch, step)

    return predict
