"""Lookup tables: global tables that are read only by rows, so that a client works on its own rows only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon.model import AUTO, Batch, Model
from fedrecon.trees import Params, flatten, unflatten

ORIGINAL = "\0"  # prefix of a feature's name for its original ids; the name itself then has renumbered ids


class Rows:
    """Only the rows of a table that one batch reads, in the order of that batch's ids.

    A model writes `table[batch["item"]]` and gets its rows, whether `table` is a whole table or this. If the index is
    the same array object that these rows were fetched for, no second gather is needed. Any other index goes to the
    array of rows, which the batch's ids (already renumbered) match.
    """

    def __init__(self, values: Array, ids: Mapping[str, Array], places: Mapping[str, slice]):
        """Hold the rows of a batch.

        Args:
          values: `(rows, ...)`.
          ids: renumbered ids, by feature.
          places: where in `values` the rows of each feature are.
        """
        self.values, self.ids, self.places = values, ids, places

    def __getitem__(self, index: Any) -> Array:
        """Return rows by renumbered ids."""
        for feature, place in self.places.items():
            if index is self.ids[feature]:
                return self.values[place].reshape(index.shape + self.values.shape[1:])
        return self.values[index]

    def __jax_array__(self) -> Array:
        """Return the rows, wherever jax.numpy takes an array."""
        return self.values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The type of the rows."""
        return self.values.dtype


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
    groups = {
        path: (features,) if isinstance(features, str) else tuple(features) for path, features in model.lookups.items()
    }
    for one, mine in groups.items():
        for other, theirs in groups.items():
            if set(mine) & set(theirs) and mine != theirs:
                raise ValueError(
                    f"`lookups` of {one!r} and {other!r} share features but differ: {mine} and {theirs}; "
                    "give both the same features, or leave one out"
                )
    return groups


def prefixed(prefix: str, lookups: Mapping[str, Any] | Literal["auto"]) -> Any:
    """Return the lookups of a model whose global parameters were put under a prefix.

    Args:
      prefix: of the paths.
      lookups: of the model before.
    """
    return AUTO if lookups == AUTO else {f"{prefix}/{path}": features for path, features in lookups.items()}


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
    for path, features in lookup_groups(model).items():
        if path not in leaves:
            raise ValueError(f"`lookups` names {path!r}; the global parameters are: {', '.join(leaves)}")
        for feature in features:
            if feature not in batch:
                raise ValueError(
                    f"`lookups` says {path!r} is read at feature {feature!r}; a batch has: {', '.join(batch)}"
                )
    noise, local = noise_like(leaves), noise_like(local)
    whole = jax.jit(lambda leaves, local, batch: _use(model, unflatten(structure, leaves), local, batch))
    groups = lookup_groups(model)
    for features in dict.fromkeys(groups.values()):
        # Ids are renumbered for all tables that they index, so these tables must be narrowed together.
        paths = [path for path, group in groups.items() if group == features]
        batch = _other_ids(batch, features, min(noise[path].shape[0] for path in paths))

        def narrow(leaves: Any, local: Any, batch: Any, paths: Any = paths, features: Any = features) -> Any:
            fetched = {path: fetch_rows(leaves[path], batch, features) for path in paths}
            narrowed = {**leaves, **{path: rows for path, (_, rows) in fetched.items()}}
            return _use(model, unflatten(structure, narrowed), local, renumber(batch, fetched[paths[0]][0]))

        try:
            pairs = zip(
                jax.tree.leaves(whole(noise, local, batch)),
                jax.tree.leaves(jax.jit(narrow)(noise, local, batch)),
                strict=True,
            )
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
    generator, start, found = np.random.default_rng(0), 0, dict(batch)
    for feature in features:
        old = batch[feature]
        position = start + np.arange(old.size)
        start += old.size
        ids = (position + generator.integers(1, max(rows, 2), old.size)) % rows
        found[feature] = jnp.asarray(ids.reshape(old.shape), old.dtype)
    return found


def noise_like(tree: Any) -> Any:
    """Return noise in the shapes of a pytree: parameters for which no term of a model vanishes by chance.

    Args:
      tree: of arrays or of shapes.
    """
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(generator.standard_normal(x.shape, np.float32), x.dtype), tree)


def fetch_rows(table: Array, batch: Batch, features: Sequence[str]) -> tuple[dict[str, Array], Rows]:
    """Fetch the rows of a batch from a table, and the batch's ids renumbered to match.

    Args:
      table: `(rows, ...)`.
      batch: by feature.
      features: those that index the table.
    """
    renumbered, places = _lay_out({feature: batch[feature].shape for feature in features})
    values = table[_flat(batch, features)]
    return renumbered, Rows(values, renumbered, places)


def _flat(batch: Batch, features: Sequence[str]) -> Array:
    return jnp.concatenate([batch[feature].reshape(-1) for feature in features])


def _lay_out(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Array], dict[str, slice]]:
    """Number the ids of several features one after another, and return where each feature's rows are."""
    renumbered, places, start = {}, {}, 0
    for feature, shape in shapes.items():
        stop = start + math.prod(shape)
        renumbered[feature] = jnp.arange(start, stop, dtype=jnp.int32).reshape(shape)
        places[feature] = slice(start, stop)
        start = stop
    return renumbered, places


class Tables(NamedTuple):
    """The lookup tables that several clients change by rows.

    Attributes:
      values: each table as the server sent it, `(table rows, ...)`, the same for all clients.
      features: the features that index each table.
      slots: for each of those features, `(clients, examples, ...)` positions in the client's own list of rows.
      capacity: for each table, the length of that list.
    """

    values: Mapping[str, Array]
    features: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, Array]
    capacity: Mapping[str, int]

    def unchanged(self, clients: int) -> dict[str, Array]:
        """Return zero changes of every client's rows, `(clients, capacity, ...)` of each table.

        Args:
          clients: how many there are.
        """
        return {
            path: jnp.zeros((clients, self.capacity[path], *table.shape[1:]), table.dtype)
            for path, table in self.values.items()
        }

    def fetch(self, changes: Mapping[str, Array], batch: Batch, slots: Batch) -> Fetched:
        """Fetch one client's rows for a batch: the server's values plus the client's changes so far.

        Args:
          changes: of the client's rows, by table.
          batch: by feature.
          slots: the batch's positions in the client's list of rows, by feature.
        """
        laid_out = {group: _lay_out({f: batch[f].shape for f in group}) for group in set(self.features.values())}
        rows, slot = {}, {}
        for path, table in self.values.items():
            group = self.features[path]
            slot[path] = _flat(slots, group)
            # Packing has checked that ids and slots are in range.
            rows[path] = table.at[_flat(batch, group)].get(mode="promise_in_bounds")
            rows[path] += changes[path].at[slot[path]].get(mode="promise_in_bounds")
        renumbered = {feature: ids for numbered, _ in laid_out.values() for feature, ids in numbered.items()}
        places = {path: laid_out[group][1] for path, group in self.features.items()}
        return Fetched(rows, slot, renumber(batch, renumbered), places)


class Fetched(NamedTuple):
    """The rows of one batch of one client."""

    rows: dict[str, Array]  # table -> (ids, ...)
    slot: dict[str, Array]  # table -> (ids,) positions in the client's list of rows
    batch: Batch  # with ids renumbered to match
    places: dict[str, dict[str, slice]]  # table -> feature -> where its rows are in `rows`

    def as_tables(self, rows: Mapping[str, Array]) -> dict[str, Rows]:
        """Return values of these rows as the tables that a model expects.

        Args:
          rows: table -> (ids, ...).
        """
        return {path: Rows(values, self.batch, self.places[path]) for path, values in rows.items()}


def merge_repeats(slot: Array, grads: Array) -> tuple[Array, Array]:
    """Sum the gradients of rows that occur more than once into their first occurrence.

    Args:
      slot: `(ids,)` positions in the client's list of rows.
      grads: `(ids, ...)`.

    Returns:
      The gradients, zero at repeats, and the slots, past the end at repeats so that these are dropped when written.
    """
    same = slot[:, None] == slot[None, :]
    first = jnp.argmax(same, axis=1) == jnp.arange(len(slot))
    summed = jnp.tensordot(same.astype(grads.dtype), grads, 1)
    keep = first.reshape(-1, *([1] * (grads.ndim - 1)))
    return jnp.where(keep, summed, 0), jnp.where(first, slot, jnp.iinfo(jnp.int32).max)


def change_rows(lists: Array, slot: Array, values: Array, *, replace: bool = False) -> Array:
    """Add values to rows of several clients' lists, or replace the rows; slots past the end are dropped.

    Args:
      lists: `(clients, rows, ...)`.
      slot: `(clients, ids)`.
      values: `(clients, ids, ...)`.
      replace: whether values replace the rows.
    """
    clients, rows = lists.shape[:2]
    # One scatter into one long list takes half the time of a batched one.
    beyond = clients * rows
    at = jnp.where(slot < rows, slot + jnp.arange(clients, dtype=slot.dtype)[:, None] * rows, beyond).reshape(-1)
    flat, new = lists.reshape(beyond, *lists.shape[2:]), values.reshape(-1, *lists.shape[2:])
    changed = flat.at[at].set(new, mode="drop") if replace else flat.at[at].add(new, mode="drop")
    return changed.reshape(lists.shape)
