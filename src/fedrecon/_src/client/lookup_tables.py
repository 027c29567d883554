"""Lookup tables: global tables that are read only by rows, so that a client works on its own rows only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Shaped

from fedrecon._src.client.lookup_reach import map_labelled
from fedrecon._src.core.checks import check_column, check_known
from fedrecon._src.core.cohort import row_capacity
from fedrecon._src.core.model import AUTO, Batch, Model
from fedrecon._src.core.pytrees import Params, flatten, unflatten

ORIGINAL = "\0"  # prefix of a feature's name for its original ids; the name itself then has renumbered ids


class BatchRows:
    """Only the rows of a table that one batch reads, in the order of that batch's ids.

    A model writes `table[batch["item"]]` and gets its rows, whether `table` is a whole table or this. If the index is
    the same array object that these rows were fetched for, no second gather is needed. Any other index goes to the
    array of rows, which the batch's ids (already renumbered) match.
    """

    def __init__(self, values: Array, ids: Mapping[str, Array]):
        """Hold the rows of a batch.

        Args:
          values: `(rows, ...)`, those of one feature after another.
          ids: renumbered ids, by feature.
        """
        self.values, self.ids = values, ids
        self.shape, self.dtype = values.shape, values.dtype
        self.places = dict(zip(ids, _slices(ids.values()), strict=True))  # of each feature's rows

    def __getitem__(self, index: Any) -> Array:
        """Return rows by renumbered ids."""
        for feature, rows in self.places.items():
            if index is self.ids[feature]:
                return self.values[rows].reshape(index.shape + self.values.shape[1:])
        return self.values[index]

    def __jax_array__(self) -> Array:
        """Return the rows, wherever jax.numpy takes an array."""
        return self.values


def lookup_groups(model: Model) -> dict[str, tuple[str, ...]]:
    """Return, for every lookup table, the features that index it. Tables with the same features form a group.

    The result is empty while lookups are "auto".

    Args:
      model: its lookups are returned.

    Raises:
      ValueError: if two tables share some features but not all, since both must use the same numbering of rows.
    """
    if model.lookups == AUTO:
        return {}
    groups = {path: (ids,) if isinstance(ids, str) else tuple(ids) for path, ids in model.lookups.items()}
    for (path, features), (other, other_features) in itertools.combinations(groups.items(), 2):
        if set(features) & set(other_features) and features != other_features:
            raise ValueError(
                f"`lookups` of {path!r} and {other!r} share features but differ: {features} and {other_features}; "
                "give both the same features, or leave one out"
            )
    return groups


def renumber(batch: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ids by renumbered ones, and keep the original ones under another name.

    Args:
      batch: by feature.
      ids: renumbered ids, by feature.
    """
    return {**batch, **{ORIGINAL + feature: batch[feature] for feature in ids}, **ids}


def original_batch(batch: Batch) -> Batch:
    """Undo `renumber`, for the loss and the metrics, which need the original ids.

    Args:
      batch: renumbered or not.
    """
    before = {name.removeprefix(ORIGINAL): column for name, column in batch.items() if name.startswith(ORIGINAL)}
    return {**{name: batch[name] for name in batch if not name.startswith(ORIGINAL)}, **before} if before else batch


def group_name(features: Sequence[str]) -> str:
    """Return the name of the group of lookup tables that these features index.

    Args:
      features: in order.
    """
    return ",".join(features)


def row_groups(features: Mapping[str, tuple[str, ...]], tables: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    """Return the groups of lookup tables, by name: the rows of their smallest table, and their features.

    Args:
      features: those that index each table, by its path.
      tables: the tables, or their shapes, by path.
    """
    groups: dict[str, tuple[int, Any]] = {}
    for path, group in features.items():
        rows, name = tables[path].shape[0], group_name(group)
        groups[name] = (min(rows, groups.get(name, (rows,))[0]), group)
    return groups


def check_lookups(model: Model, params: Params, local: Params, batch: Batch) -> None:
    """Raise an error if a declared lookup table is not only read by rows.

    This compares predictions on one batch, from whole tables and from tables that have only the batch's rows. All
    parameters are replaced by noise first: a dense use that is multiplied by zero would not show.

    Args:
      model: its lookups are checked.
      params: global parameters; only their shapes matter.
      local: local parameters; only their shapes matter.
      batch: features in the shapes that the model will see.

    Raises:
      ValueError: naming the table, if it does not exist, a feature is missing, or the predictions differ.
    """
    leaves, structure = flatten(params)
    groups = lookup_groups(model)
    check_known("lookups", groups, leaves, "the global parameters are")
    for feature in itertools.chain(*groups.values()):
        check_column(feature, batch, "`lookups` names it; the clients")
    noise, local = random_params(leaves), random_params(local)
    whole = jax.jit(lambda leaves, local, batch: _use(model, unflatten(structure, leaves), local, batch))
    for features in dict.fromkeys(groups.values()):
        # Ids are renumbered for all tables that they index, so these tables must be narrowed together.
        paths = [path for path, group in groups.items() if group == features]
        batch = _other_ids(batch, features, min(noise[path].shape[0] for path in paths))

        def narrow(leaves: Any, local: Any, batch: Any, paths: Any = paths, features: Any = features) -> Any:
            tables = LookupTables({path: leaves[path] for path in paths}, dict.fromkeys(paths, features))
            rows, renumbered = tables.fetch(dict.fromkeys(paths, jnp.float32(0)), batch)
            narrowed = {**leaves, **tables.as_tables(rows, renumbered)}
            return _use(model, unflatten(structure, narrowed), local, renumbered)

        try:
            results = whole(noise, local, batch), jax.jit(narrow)(noise, local, batch)
            pairs = zip(*map(jax.tree.leaves, results), strict=True)
            honest = all(a.shape == b.shape and np.allclose(a, b, 1e-4, 1e-5) for a, b in pairs)
        except (TypeError, ValueError, IndexError, AttributeError):
            honest = False
        if not honest:
            raise ValueError(
                f"`lookups` says the table {' and '.join(map(repr, paths))} is only read by rows at "
                f"{', '.join(features)}, but predictions change without its other rows; read it as "
                "table[ids], or take it out of `lookups`"
            )


def _use(model: Model, params: Params, local: Params, batch: Batch) -> Any:
    """Use global parameters in every way that a model does: in predictions, and in evidence if it has any."""
    if model.evidence is not None:
        mask = jnp.ones(next(iter(batch.values())).shape[0], bool)
        local = jax.tree.map(jnp.add, local, model.evidence(params, batch, mask))
    return model.predict(params, local, batch)


def _other_ids(batch: Batch, features: Sequence[str], rows: int) -> Batch:
    """Replace ids by random ones, the k-th never k. With real ids, a fixed row could be correct by chance."""
    generator, start, replaced = np.random.default_rng(0), 0, dict(batch)
    for feature in features:
        old = batch[feature]
        position = start + np.arange(old.size)
        start += old.size
        ids = (position + generator.integers(1, max(rows, 2), old.size)) % rows
        replaced[feature] = jnp.asarray(ids.reshape(old.shape), old.dtype)
    return replaced


def random_params(tree: Any) -> Any:
    """Return noise in the shapes of a pytree: parameters for which no term of a model vanishes by chance.

    Args:
      tree: of arrays or of shapes.
    """
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(generator.standard_normal(x.shape, np.float32), x.dtype), tree)


def _flat(batch: Batch, features: Sequence[str]) -> Array:
    return jnp.concatenate([batch[feature].reshape(-1) for feature in features])


def _slices(arrays: Iterable[Array]) -> list[slice]:
    """Return where the entries of several arrays are if they are laid out one after another."""
    ends = itertools.accumulate((array.size for array in arrays), initial=0)
    return list(itertools.starmap(slice, itertools.pairwise(ends)))


class RowPosition(NamedTuple):
    """Where the rows of a batch's ids are in the clients' lists of rows.

    Attributes:
      slot: `(clients, ids)` positions; None if they are next to each other, at the same place for all clients.
      start: the first of them, in that case.
      number: how many ids there are.
    """

    slot: Array | None
    start: Array
    number: int


class LookupTables(NamedTuple):
    """The lookup tables that several clients change by rows.

    Attributes:
      values: each table as the server sent it, `(table rows, ...)`, the same for all clients.
      features: the features that index each table.
      slots: for each of those features, `(clients, examples, ...)` positions in the client's own list of rows. A
        feature that is not here has its rows in the order of the examples, each once.
      capacity: for each table, the length of that list.
    """

    values: Mapping[str, Array] = {}
    features: Mapping[str, tuple[str, ...]] = {}
    slots: Mapping[str, Array] = {}
    capacity: Mapping[str, int] = {}

    def in_batches(self, columns: Mapping[str, Array], in_step: bool, size: int) -> LookupTables:
        """Prepare for going through the examples in batches.

        Rows in the order of the examples are read and written as slices if a single feature has them and all clients
        take their batches in step. Slices are faster than gathers and scatters, but need room for whole batches.

        Args:
          columns: the examples, `(clients, examples, ...)` by feature.
          in_step: whether all clients take the same batch at the same time.
          size: examples per batch.
        """
        slots, capacity = dict(self.slots), dict(self.capacity)
        for path, features in self.features.items():
            if features[0] in self.slots:
                continue
            if in_step and len(features) == 1:
                shape = columns[features[0]].shape
                capacity[path] = max(capacity[path], -(-shape[1] // size) * size * math.prod(shape[2:]))
            else:
                slots |= slots_in_order(columns, features)
        return self._replace(slots=slots, capacity=capacity)

    def unchanged(self, clients: int) -> dict[str, Array]:
        """Return zero changes of every client's rows, `(clients, capacity, ...)` of each table.

        Args:
          clients: how many there are.
        """
        return {
            path: jnp.zeros((clients, self.capacity[path], *table.shape[1:]), table.dtype)
            for path, table in self.values.items()
        }

    def without_padding(self, changes: Mapping[str, Array]) -> dict[str, Array]:
        """Return changes without the rows that only padding of the last batch needs (`in_batches`).

        Args:
          changes: `(clients, rows, ...)` by table.
        """
        return {path: lists[:, : self.capacity[path]] for path, lists in changes.items()}

    def places(self, number: Array, batch: Batch, slots: Batch) -> dict[str, RowPosition]:
        """Return where the rows of a batch are in the lists, by table.

        Args:
          number: which batch.
          batch: `(clients, batch, ...)` by feature.
          slots: the same batch of `slots`.
        """
        places = {}
        for path, features in self.features.items():
            ids = sum(math.prod(batch[feature].shape[1:]) for feature in features)
            by_client = features[0] in slots
            at = jax.vmap(lambda slots, group=features: _flat(slots, group))(slots) if by_client else None
            places[path] = RowPosition(at, number * ids, ids)
        return places

    def fetch(self, changes: Mapping[str, Array], batch: Batch) -> tuple[dict[str, Array], Batch]:
        """Fetch one client's rows for a batch: the server's values plus the client's changes so far.

        Args:
          changes: of these rows, `(ids, ...)` by table.
          batch: by feature.

        Returns:
          The rows, `(ids, ...)` by table, and the batch with ids renumbered to match.
        """
        rows, renumbered = {}, {}
        for group in set(self.features.values()):
            for feature, span in zip(group, _slices(batch[feature] for feature in group), strict=True):
                numbers = jnp.arange(span.start, span.stop, dtype=jnp.int32)
                renumbered[feature] = numbers.reshape(batch[feature].shape)
        for path, table in self.values.items():
            # Packing has checked that ids are in range.
            ids = _flat(batch, self.features[path])
            rows[path] = table.at[ids].get(mode="promise_in_bounds") + changes[path]
        return rows, renumber(batch, renumbered)

    def as_tables(self, rows: Mapping[str, Array], batch: Batch) -> dict[str, BatchRows]:
        """Return values of fetched rows as the tables that a model expects.

        Args:
          rows: table -> (ids, ...).
          batch: with ids renumbered to match.
        """
        ids = {path: {feature: batch[feature] for feature in group} for path, group in self.features.items()}
        return {path: BatchRows(values, ids[path]) for path, values in rows.items()}


def merge_repeats(
    slot: Int[Array, " ids"], grads: Float[Array, "ids ..."]
) -> tuple[Float[Array, "ids ..."], Int[Array, " ids"]]:
    """Sum the gradients of rows that occur more than once into their first occurrence.

    Args:
      slot: positions in the client's list of rows.
      grads: of each of them.

    Returns:
      The gradients, zero at repeats, and the slots, past the end at repeats so that these are dropped when written.
    """
    same = slot[:, None] == slot[None, :]
    first = jnp.argmax(same, axis=1) == jnp.arange(len(slot))
    summed = jnp.tensordot(same.astype(grads.dtype), grads, 1)
    keep = first.reshape(-1, *([1] * (grads.ndim - 1)))
    return jnp.where(keep, summed, 0), jnp.where(first, slot, jnp.iinfo(jnp.int32).max)


def rows_in_order(
    columns: Mapping[str, Array], count: Int[Array, " clients"], features: Sequence[str], rows: int
) -> Int[Array, "clients rows"]:
    """List the rows of clients that have no id twice: the ids of their examples, in order.

    Args:
      columns: of `(clients, examples, ...)`.
      count: how many of the examples are a client's own.
      features: those that index the table.
      rows: how many rows the table has.
    """
    ids = jnp.concatenate([columns[f].reshape(*columns[f].shape[:2], -1) for f in features], axis=2)
    ids = ids.astype(jnp.int32)  # as in lists that are packed, whatever the type of the columns
    clients, examples, width = ids.shape
    capacity = row_capacity(examples * width, rows)
    flat = ids.reshape(clients, -1)[:, :capacity]
    real = jnp.arange(flat.shape[1]) < width * count[:, None]
    return jnp.pad(jnp.where(real, flat, 0), ((0, 0), (0, capacity - flat.shape[1])))


def slots_in_order(columns: Mapping[str, Array], features: Sequence[str]) -> dict[str, Array]:
    """Number the ids of examples one after another, those of an example together: slots of lists without repeats.

    Args:
      columns: of `(clients, examples, ...)`.
      features: those that index the table.
    """
    widths = [math.prod(columns[feature].shape[2:]) for feature in features]
    slots = {}
    for feature, begin, width in zip(features, np.cumsum([0, *widths]), widths, strict=False):
        shape = columns[feature].shape
        of_example = np.arange(shape[1])[:, None] * sum(widths) + begin + np.arange(width)  # (examples, ids)
        slots[feature] = jnp.broadcast_to(of_example.astype(np.int32).reshape(shape[1:]), shape)
    return slots


def read_rows(lists: Shaped[Array, "clients rows ..."], at: RowPosition) -> Shaped[Array, "clients ids ..."]:
    """Read the rows of a batch from several clients' lists.

    Args:
      lists: `(clients, rows, ...)`.
      at: where they are.
    """
    if at.slot is None:
        return jax.lax.dynamic_slice_in_dim(lists, at.start, at.number, 1)
    return jax.vmap(lambda rows, slot: rows.at[slot].get(mode="promise_in_bounds"))(lists, at.slot)


def change_rows(
    lists: Shaped[Array, "clients rows ..."],
    at: RowPosition,
    values: Shaped[Array, "clients ids ..."],
    *,
    replace: bool = False,
) -> Shaped[Array, "clients rows ..."]:
    """Add values to rows of several clients' lists, or replace the rows; slots past the end are dropped.

    Args:
      lists: `(clients, rows, ...)`.
      at: where the rows are.
      values: `(clients, ids, ...)`.
      replace: whether values replace the rows.
    """
    if at.slot is None:
        new = values if replace else read_rows(lists, at) + values
        return jax.lax.dynamic_update_slice_in_dim(lists, new, at.start, 1)
    clients, rows = lists.shape[:2]
    # One scatter into one long list takes half the time of a batched one.
    beyond, slot = clients * rows, at.slot
    flat_slot = jnp.where(slot < rows, slot + jnp.arange(clients, dtype=slot.dtype)[:, None] * rows, beyond).reshape(-1)
    flat, new = lists.reshape(beyond, *lists.shape[2:]), values.reshape(-1, *lists.shape[2:])
    changed = flat.at[flat_slot].set(new, mode="drop") if replace else flat.at[flat_slot].add(new, mode="drop")
    return changed.reshape(lists.shape)


PHASES = 4


def phases(params: Params, grows: Mapping[str, int], batch_size: int) -> list[tuple[int | None, dict[str, int]]]:
    """Divide the steps into phases that touch only the first rows of growing tables, each twice as many as before.

    Args:
      params: what is solved for, clients first.
      grows: those of `params` that grow, and how many ids an example has.
      batch_size: examples per step.

    Returns:
      For each phase, the step before which it ends, None for the last phase; and for each growing table, how many rows
      can have been touched by then.
    """
    if not grows:
        return [(None, {})]
    capacity = {path: params[path].shape[1] for path in grows}  # of (clients, rows, ...)
    earlier: list[tuple[int | None, dict[str, int]]] = []
    for halvings in reversed(range(1, PHASES)):
        rows = {path: capacity[path] >> halvings for path in grows}
        stop = min(rows[path] // (ids * batch_size) for path, ids in grows.items())
        if stop > 0:
            earlier.append((stop, rows))
    return [*earlier, (None, capacity)]


def map_growing(
    function: Callable[..., Array], rows: Mapping[str, int], labels: Mapping[int, str], *carries: Any
) -> Any:
    """Apply a function to growing tables and the optimizer's state for them; take all else from the last carry.

    Args:
      function: `(number of rows, a table of each carry) -> table`, clients first.
      rows: how many rows of each table there are in a phase.
      labels: which leaves of the state belong to which table (`state_labels`).
      *carries: with `params` and `state`.
    """
    last = carries[-1]
    if not rows:
        return last
    params = {path: function(count, *(carry.params[path] for carry in carries)) for path, count in rows.items()}
    states = [carry.state for carry in carries]
    state = map_labelled(lambda path, *leaves: function(rows[path], *leaves), labels, *states)
    return last._replace(params=last.params | params, state=state)
