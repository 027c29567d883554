"""U on global parameters: what a block of clients does to its copies of them, whole or by rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon.aggregate import Upload
from fedrecon.cohort import Cohort, Examples, Needs
from fedrecon.lookups.tables import Tables, group_name, lookup_groups, renumber
from fedrecon.model import Batch, Model, Step, predict_in
from fedrecon.solvers.problem import Objective, Problem, Solver, solve_local
from fedrecon.solvers.statistics import advance_shared
from fedrecon.split import Split
from fedrecon.trees import Params, divide, flatten, unflatten

_LOCAL = "\0"  # marks local parameters that are solved for beside global ones; no path begins with it

# (global, local that is solved for too, what else the client holds, its support, batch, step) -> predictions
Predict = Callable[[Params, Params, Any, Examples, Batch, Step | None], Any]


class Updated(NamedTuple):
    """What a block of clients has after U: what leaves, and the local parameters, which do not."""

    upload: Upload
    local: Params


class Updater:
    """Runs U for blocks of clients.

    How much of a lookup table a client works on depends on how far its optimizer reaches (see `lookups.reach`):
    changes of the rows of each batch, a copy of the rows the client ever touches, or a copy of the whole table.
    Either way the same numbers come out.
    """

    def __init__(self, model: Model, update: Solver, *, through_support: bool = False):
        """Prepare; with `through_support`, gradients also reach rows that only support examples touch.

        So they do where the model takes evidence from support.
        """
        through_support = through_support or model.evidence is not None
        self.model, self._update, self._through_support = model, update, through_support
        features = lookup_groups(model)
        reach = update.reach() if features else "whole"
        self._by_steps = reach in ("each", "rows") and not through_support
        self._features = {} if reach == "whole" else features
        self.groups = {path: group_name(features) for path, features in self._features.items()}

    def needs(self, split: Split, support_limit: int | None) -> Needs:
        """Say what must be packed of a client's data."""
        shapes = flatten(jax.eval_shape(self.model.init_global, jax.random.key(0)))[0]
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
        """
        leaves, structure = flatten(params)
        clients = cohort.query.count.shape[0]
        tables, copies, cohort = self._tables(leaves, cohort)
        sent = {
            path: copies[path] if path in copies else jnp.broadcast_to(leaf, (clients, *leaf.shape))
            for path, leaf in leaves.items()
            if tables is None or path not in tables.values
        }
        state = self.model.state
        averaged = {path: sent[path] for path in (state.shared if state else ())}
        local = divide(solved, state.local if state and jax.tree.leaves(solved) else ())
        local_leaves, local_structure = flatten(local.solved)

        def local_of(both: dict[str, Any], kept: Any) -> Params:
            found = unflatten(local_structure, {path: both[_LOCAL + path] for path in local_leaves})
            return local.join(found, kept)

        def whole_predict(both: dict[str, Any], held: Any, batch: Batch, step: Step | None = None) -> Any:
            mine = unflatten(structure, {**both, **held[2]})
            return predict(mine, local_of(both, held[3]), held[0], held[1], batch, step)

        solution = self._update.solve(
            Problem(
                Objective(self.model, whole_predict, None if self.model.fit is None else whole_predict),
                {path: leaf for path, leaf in sent.items() if path not in averaged}
                | {_LOCAL + path: leaf for path, leaf in local_leaves.items()},
                (context, cohort.support if self._through_support else (), averaged, local.held),
                cohort.query,
                tables,
                grows={} if self._through_support else {path: self._ids(path, cohort) for path in copies},
                keys=keys,
            )
        )
        found = {**solution.params, **averaged}
        mine = local_of(found, local.held)
        if state and averaged:
            theirs = {path: solution.params[path] for path in sent if path not in averaged}
            if tables is not None:
                theirs |= self._changed(tables, solution.changes, cohort)
                cohort = self._renumbered(cohort)
            found |= advance_shared(
                state,
                averaged,
                (theirs, mine if jax.tree.leaves(mine) else context),
                cohort.query,
                self._update.batch_size,
                lambda shared, rest: (unflatten(structure, {**rest[0], **shared}), rest[1]),
            )
        delta = {path: found[path] - sent[path] for path in sent} | solution.changes
        upload = Upload({path: delta[path] for path in leaves}, solution.examples, solution.sums)
        return Updated(upload, mine)

    def _ids(self, path: str, cohort: Cohort) -> int:
        """Count the ids that one example has of a table."""
        return sum(math.prod(cohort.slots[feature].shape[2:]) for feature in self._features[path])

    def _tables(self, leaves: dict[str, Array], cohort: Cohort) -> tuple[Tables | None, dict[str, Array], Cohort]:
        """Lay out the lookup tables: to be changed by rows, or copied with the clients' ids renumbered to match."""
        rows = {path: cohort.rows[group] for path, group in self.groups.items()}
        if not rows:
            return None, {}, cohort
        if self._by_steps:
            values = {path: leaves[path] for path in rows}
            capacity = {path: ids.shape[1] for path, ids in rows.items()}
            return Tables(values, self._features, cohort.slots, capacity), {}, cohort
        copies = {path: leaves[path].at[ids].get(mode="promise_in_bounds") for path, ids in rows.items()}
        return None, copies, self._renumbered(cohort)

    def _changed(self, tables: Tables, changes: dict[str, Array], cohort: Cohort) -> dict[str, Array]:
        """Copy each client's rows of the lookup tables, as it has changed them."""
        rows = {path: cohort.rows[self.groups[path]] for path in tables.values}
        return {path: tables.values[path][rows[path]] + changes[path] for path in rows}

    def _renumbered(self, cohort: Cohort) -> Cohort:
        """Replace ids by places in the client's list of rows."""
        query = Examples(renumber(cohort.query.columns, cohort.slots), cohort.query.count)
        support = Examples(renumber(cohort.support.columns, cohort.support_slots), cohort.support.count)
        return cohort._replace(query=query, support=support)


def start_local(model: Model, params: Params, fresh: Params, support: Examples) -> Params:
    """Return where a client's reconstruction starts: the learned default or else `fresh`, and what its support adds."""
    start = fresh if model.default_local is None else model.default_local(params)
    if model.evidence is None:
        return start
    mask = jnp.arange(next(iter(support.columns.values())).shape[0]) < support.count
    return jax.tree.map(jnp.add, start, model.evidence(params, support.columns, mask))


def hold(model: Model) -> Predict:
    """Predict with local parameters that do not follow the global ones: the first-order method."""

    def predict(
        params: Params, solved: Params, context: Any, support: Examples, batch: Batch, step: Step | None
    ) -> Any:
        local = solved if jax.tree.leaves(solved) else context
        if model.default_local is not None or model.evidence is not None:
            # What was learned of the start gets the gradient of the local parameters that were rebuilt from it, as if
            # rebuilding had only added something; their value stays what it is.
            start = start_local(model, params, jax.tree.map(jnp.zeros_like, local), support)
            local = jax.tree.map(lambda x, d: x + d - jax.lax.stop_gradient(d), local, start)
        return predict_in(model, params, local, batch, step)

    return predict


def differentiate_through(model: Model, reconstruct: Solver) -> Predict:
    """Predict with local parameters rebuilt from the very global ones at hand, so that gradients see R too.

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
