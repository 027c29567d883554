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
from fedrecon.local import Objective, Problem, Solver
from fedrecon.lookups import Tables, group_name, lookup_groups
from fedrecon.model import Batch, Model, Params, flatten, unflatten
from fedrecon.split import Split

_LOCAL = "\0"  # marks local parameters that are solved for beside global ones; no path begins with it

# (global, local that is solved for too, what else the client holds, its support, batch) -> predictions
Predict = Callable[[Params, Params, Any, Examples, Batch], Any]


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
        reach = update.reach() if model.lookups else "whole"
        self._by_steps = reach in ("each", "rows") and not through_support
        self._features = {} if reach == "whole" else lookup_groups(model)
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

    def run(self, params: Params, cohort: Cohort, predict: Predict, context: Any, solved: Params = ()) -> Updated:
        """Run U.

        Args:
          params: the global parameters as sent.
          cohort: the block of clients.
          predict: predictions from the global parameters, `solved`, `context` and the client's support.
          context: what each client holds fixed, clients first.
          solved: local parameters to solve for beside the global ones, clients first.
        """
        leaves, structure = flatten(params)
        clients = cohort.query.count.shape[0]
        tables, copies, cohort = self._tables(leaves, cohort)
        sent = {
            path: copies[path] if path in copies else jnp.broadcast_to(leaf, (clients, *leaf.shape))
            for path, leaf in leaves.items()
            if tables is None or path not in tables.values
        }
        local_leaves, local_structure = flatten(solved)

        def local_of(both: dict[str, Any]) -> Params:
            return unflatten(local_structure, {path: both[_LOCAL + path] for path in local_leaves})

        def whole_predict(both: dict[str, Any], held: Any, batch: Batch) -> Any:
            return predict(unflatten(structure, both), local_of(both), held[0], held[1], batch)

        solution = self._update.solve(
            Problem(
                Objective(self.model, whole_predict),
                sent | {_LOCAL + path: leaf for path, leaf in local_leaves.items()},
                (context, cohort.support if self._through_support else ()),
                cohort.query,
                tables,
                grows={} if self._through_support else {path: self._ids(path, cohort) for path in copies},
            )
        )
        delta = {path: solution.params[path] - sent[path] for path in sent} | solution.changes
        upload = Upload({path: delta[path] for path in leaves}, solution.examples, solution.sums)
        return Updated(upload, local_of(solution.params))

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
        query = Examples({**cohort.query.columns, **cohort.slots}, cohort.query.count)
        support = Examples({**cohort.support.columns, **cohort.support_slots}, cohort.support.count)
        return None, copies, cohort._replace(query=query, support=support)


def start_local(model: Model, params: Params, fresh: Params, support: Examples) -> Params:
    """Return where a client's reconstruction starts: the learned default or else `fresh`, and what its support adds."""
    start = fresh if model.default_local is None else model.default_local(params)
    if model.evidence is None:
        return start
    mask = jnp.arange(next(iter(support.columns.values())).shape[0]) < support.count
    return jax.tree.map(jnp.add, start, model.evidence(params, support.columns, mask))


def hold(model: Model) -> Predict:
    """Predict with local parameters that do not follow the global ones: the first-order method."""

    def predict(params: Params, solved: Params, context: Any, support: Examples, batch: Batch) -> Any:
        local = solved if jax.tree.leaves(solved) else context
        if model.default_local is not None or model.evidence is not None:
            # What was learned of the start gets the gradient of the local parameters that were rebuilt from it, as if
            # rebuilding had only added something; their value stays what it is.
            start = start_local(model, params, jax.tree.map(jnp.zeros_like, local), support)
            local = jax.tree.map(lambda x, d: x + d - jax.lax.stop_gradient(d), local, start)
        return model.predict(params, local, batch)

    return predict


def differentiate_through(model: Model, reconstruct: Solver) -> Predict:
    """Predict with local parameters rebuilt from the very global ones at hand, so that gradients see R too."""

    def predict(params: Params, solved: Params, context: Any, support: Examples, batch: Batch) -> Any:
        del solved
        start = start_local(model, params, context, support)
        if not jax.tree.leaves(start):
            return model.predict(params, start, batch)
        one = Examples({name: column[None] for name, column in support.columns.items()}, support.count[None])
        objective = Objective(model, lambda local, _, batch: model.predict(params, local, batch))
        alone = jax.tree.map(lambda leaf: leaf[None], start)
        solution = reconstruct.solve(Problem(objective, alone, (), one, measured=False, differentiable=True))
        return model.predict(params, jax.tree.map(lambda leaf: leaf[0], solution.params), batch)

    return predict
