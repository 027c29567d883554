"""U on global parameters: what a block of clients does to its copies of them, whole or by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon.cohort import Cohort, Examples, Needs
from fedrecon.lookups.tables import Tables, group_name, lookup_groups, renumber
from fedrecon.model import Batch, Model, Step, predict_in
from fedrecon.solvers.problem import Objective, Problem, Solution, Solver, solve_local, start_local
from fedrecon.solvers.statistics import advance_shared
from fedrecon.split import Split
from fedrecon.trees import Params, Structure, divide, flatten, unflatten
from fedrecon.upload import DELTA, RowChanges, Upload

# (global, local that is solved for too, what else the client holds, its support, batch, step) -> predictions
Predict = Callable[[Params, Params, Any, Examples, Batch, Step | None], Any]
# (global, what it is given) -> number that is added to the mean loss of every batch
Penalty = Callable[[Params, Any], Array]

GLOBAL, LOCAL = "global/", "local/"  # before the paths of what is solved for


class Updated(NamedTuple):
    """What a block of clients has after U.

    Attributes:
      upload: what leaves.
      local: the local parameters, which do not.
      steps: `(clients,)` how many steps were taken.
    """

    upload: Upload
    local: Params
    steps: Array


class Held(NamedTuple):
    """What a client holds fixed in U, clients first in every leaf.

    Attributes:
      context: what predictions need beside what is solved for.
      support: its support examples, where gradients flow through them; else empty.
      statistics: global state by path, which no step changes.
      local_state: local leaves that no step changes.
      pull: what the penalty is given.
    """

    context: Any
    support: Any
    statistics: dict[str, Array]
    local_state: Params
    pull: Any


class _Sent(NamedTuple):
    """The global parameters as a block of clients works on them.

    Attributes:
      copies: of what every client has a copy, by path, clients first; of lookup tables, copies of its rows.
      tables: lookup tables that are changed by rows instead; None for none.
      growing: the copies that are rows of lookup tables.
      cohort: the block, with ids renumbered where tables were copied by rows.
    """

    copies: dict[str, Array]
    tables: Tables | None
    growing: tuple[str, ...]
    cohort: Cohort


class Updater:
    """Runs U for blocks of clients.

    How much of a lookup table a client works on depends on how far its optimizer reaches (see `lookups.reach`):
    changes of the rows of each batch, a copy of the rows the client ever touches, or a copy of the whole table.
    Either way the same numbers come out.
    """

    def __init__(self, model: Model, update: Solver, *, through_support: bool = False, penalty: Penalty | None = None):
        """Prepare.

        Args:
          model: whose global parameters are updated.
          update: the solver.
          through_support: whether gradients also reach rows that only support examples touch. They do in any case
            where the model takes evidence from support.
          penalty: added to the mean loss of every batch, given the global parameters and what `run` is given as `pull`.
            It may move rows that no example touches, so clients then work on whole tables.
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
        """Say what must be packed of a client's data."""
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
    ) -> Updated:
        """Run U.

        Args:
          params: the global parameters as sent.
          cohort: the block of clients.
          predict: predictions from the global parameters, `solved`, `context`, the client's support, a batch and,
            while training, the step.
          context: what each client holds fixed, clients first.
          solved: local parameters to solve for beside the global ones, clients first.
          keys: of each client, for what is random in its steps.
          pull: what the penalty is given, clients first.
        """
        leaves, structure = flatten(params)
        sent = self._send(leaves, cohort)
        state = self.model.state
        statistics = {path: sent.copies[path] for path in (state.shared if state else ())}
        local = divide(solved, self.model.local_state if jax.tree.leaves(solved) else ())
        local_leaves, local_structure = flatten(local.solved)
        trained = {GLOBAL + path: leaf for path, leaf in sent.copies.items() if path not in statistics}
        trained |= {LOCAL + path: leaf for path, leaf in local_leaves.items()}
        support = sent.cohort.support if self._through_support else ()
        held = Held(context, support, statistics, local.held, pull)

        def local_of(trained: Mapping[str, Any], local_state: Params) -> Params:
            return local.join(unflatten(local_structure, _under(LOCAL, trained)), local_state)

        solution = self._update.solve(
            Problem(
                self._objective(predict, structure, local_of),
                trained,
                held,
                sent.cohort.query,
                sent.tables,
                grows={} if self._through_support else {GLOBAL + p: self._ids(p, cohort) for p in sent.growing},
                keys=keys,
            )
        )
        mine = local_of(solution.params, local.held)
        after = _under(GLOBAL, solution.params)
        if statistics:
            others = after | self._changed(sent, solution, cohort)
            rest = (others, mine if jax.tree.leaves(mine) else context)
            after |= self._advance_statistics(statistics, rest, sent, structure)
        delta = {path: after[path] - copy for path, copy in sent.copies.items()} | _under(GLOBAL, solution.changes)
        upload = self._upload({path: delta[path] for path in leaves}, leaves, cohort, solution)
        return Updated(upload, mine, solution.steps)

    def _objective(self, predict: Predict, structure: Structure, local_of: Callable[..., Params]) -> Objective:
        """Return what U minimises, as a function of what is solved for and of what a client holds."""

        def params_of(trained: Mapping[str, Any], held: Held) -> Params:
            return unflatten(structure, {**_under(GLOBAL, trained), **held.statistics})

        def whole(trained: dict[str, Any], held: Held, batch: Batch, step: Step | None = None) -> Any:
            local = local_of(trained, held.local_state)
            return predict(params_of(trained, held), local, held.context, held.support, batch, step)

        penalty = self._penalty
        return Objective(
            self.model,
            whole,
            None if self.model.fit is None else whole,
            None if penalty is None else lambda trained, held: penalty(params_of(trained, held), held.pull),
        )

    def _ids(self, path: str, cohort: Cohort) -> int:
        """Count the ids that one example has of a table."""
        return sum(math.prod(cohort.slots[feature].shape[2:]) for feature in self._features[path])

    def _send(self, leaves: dict[str, Array], cohort: Cohort) -> _Sent:
        """Lay out the global parameters: copies for every client, and lookup tables that are changed by rows."""
        clients = cohort.query.count.shape[0]
        rows = {path: cohort.rows[group] for path, group in self.groups.items()}
        dense = {
            path: jnp.broadcast_to(leaf, (clients, *jnp.shape(leaf)))
            for path, leaf in leaves.items()
            if path not in rows
        }
        if not rows:
            return _Sent(dense, None, (), cohort)
        if self._by_steps:
            tables = Tables(
                {GLOBAL + path: jnp.asarray(leaves[path]) for path in rows},
                {GLOBAL + path: features for path, features in self._features.items()},
                cohort.slots,
                {GLOBAL + path: ids.shape[1] for path, ids in rows.items()},
            )
            return _Sent(dense, tables, (), cohort)
        copies = {path: jnp.asarray(leaves[path]).at[ids].get(mode="promise_in_bounds") for path, ids in rows.items()}
        return _Sent({**dense, **copies}, None, tuple(copies), self._renumbered(cohort))

    def _upload(self, delta: dict[str, Array], leaves: Mapping[str, Any], cohort: Cohort, solution: Solution) -> Upload:
        """Put together what leaves: of lookup tables, the changes of a client's rows and which rows these are."""

        def change(path: str) -> Any:
            group = self.groups.get(path)
            if group is None:
                return delta[path]
            return RowChanges(cohort.rows[group], delta[path], cohort.num_rows[group], jnp.shape(leaves[path])[0])

        return Upload({DELTA: {path: change(path) for path in delta}}, solution.examples, solution.sums)

    def _changed(self, sent: _Sent, solution: Solution, cohort: Cohort) -> dict[str, Array]:
        """Copy each client's rows of the lookup tables that it changed by rows, as they are now."""
        if sent.tables is None:
            return {}
        changes = _under(GLOBAL, solution.changes)
        values = _under(GLOBAL, sent.tables.values)
        return {path: values[path][cohort.rows[self.groups[path]]] + changes[path] for path in changes}

    def _advance_statistics(
        self, statistics: dict[str, Array], rest: Any, sent: _Sent, structure: Structure
    ) -> dict[str, Array]:
        """Advance the global state over the query, with everything else as it is after U."""
        assert self.model.state is not None
        # Rows that were changed by rows are copies by now, so ids must be renumbered to match them.
        cohort = sent.cohort if sent.tables is None else self._renumbered(sent.cohort)
        return advance_shared(
            self.model.state,
            statistics,
            rest,
            cohort.query,
            self._update.batch_size,
            lambda shared, rest: (unflatten(structure, {**rest[0], **shared}), rest[1]),
        )

    def _renumbered(self, cohort: Cohort) -> Cohort:
        """Replace ids by places in the client's list of rows."""
        query = Examples(renumber(cohort.query.columns, cohort.slots), cohort.query.count)
        support = Examples(renumber(cohort.support.columns, cohort.support_slots), cohort.support.count)
        return cohort._replace(query=query, support=support)


def _under(prefix: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is below a prefix, under the paths without it."""
    return {path.removeprefix(prefix): leaf for path, leaf in leaves.items() if path.startswith(prefix)}


def hold(model: Model) -> Predict:
    """Predict with local parameters that do not follow the global ones: the first-order method."""

    def predict(
        params: Params, solved: Params, context: Any, support: Examples, batch: Batch, step: Step | None
    ) -> Any:
        local = solved if jax.tree.leaves(solved) else context
        if model.default_local is not None or model.evidence is not None:
            # What was learned of the start gets the gradient of the local parameters that were reconstructed from it,
            # as if reconstruction had only added something; their value stays what it is.
            start = start_local(model, params, jax.tree.map(jnp.zeros_like, local), support)
            local = jax.tree.map(lambda x, d: x + d - jax.lax.stop_gradient(d), local, start)
        return predict_in(model, params, local, batch, step)

    return predict


def differentiate_through(model: Model, reconstruct: Solver) -> Predict:
    """Predict with local parameters reconstructed from the very global ones at hand, so that gradients see R too.

    What a client holds is where its local parameters start and the key of R's steps, if these are random.
    """

    def predict(
        params: Params, solved: Params, context: Any, support: Examples, batch: Batch, step: Step | None
    ) -> Any:
        del solved
        fresh, key = context
        start = start_local(model, params, fresh, support)
        if jax.tree.leaves(start):
            one = Examples({name: column[None] for name, column in support.columns.items()}, support.count[None])
            alone = jax.tree.map(lambda leaf: leaf[None], start)
            keys = None if key is None else key[None]
            found = solve_local(model, reconstruct, params, alone, one, keys=keys, differentiable=True)
            start = jax.tree.map(lambda leaf: leaf[0], found)
        return predict_in(model, params, start, batch, step)

    return predict
