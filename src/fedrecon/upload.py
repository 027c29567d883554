"""What leaves clients: named changes, whole or by rows, a count, sums of metrics; and what they add up to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

ROW_CHUNK = 32  # lists of rows have a multiple of this length, so that they can be gone through in chunks
DELTA = "delta"  # the part of an upload that holds the change of the global parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowChanges:
    """Changes of some rows of a table, for several clients.

    Attributes:
      ids: `(clients, rows)` which rows; 0 beyond a client's own.
      values: `(clients, rows, ...)` how they change; zeros beyond a client's own.
      count: `(clients,)` how many rows are a client's own.
      table: how many rows the whole table has.
    """

    ids: Array
    values: Array
    count: Array
    table: int = dataclasses.field(metadata={"static": True})

    def whole(self) -> Array:
        """Return the changes as whole tables, `(clients, table, ...)`."""
        empty = jnp.zeros((self.values.shape[0], self.table, *self.values.shape[2:]), self.values.dtype)
        return jax.vmap(lambda table, ids, values: table.at[ids].add(values))(empty, self.ids, self.values)


Change = Array | RowChanges
Parts = dict[str, dict[str, Any]]  # part -> path -> Change


class Upload(NamedTuple):
    """All that leaves several clients, clients first in every leaf. One client is a block of one.

    Attributes:
      parts: named changes, each `{path: change}`. Every method has `delta`, the change of the global parameters; some
        have more (SCAFFOLD sends the change of its control variates).
      examples: `(clients,)` how many query examples were processed; 0 for a client that has nothing to say.
      sums: `(clients, metrics, 2)` of loss and metrics: totals and weights.
    """

    parts: Parts
    examples: Array
    sums: Array

    @property
    def delta(self) -> dict[str, Any]:
        """The change of the global parameters, by path."""
        return self.parts[DELTA]


class Summand(NamedTuple):
    """What several clients add to the sum, clients first in every leaf.

    Attributes:
      parts: as in the upload, or in another number format.
      scale: `(clients,)` what parts of floats are multiplied by as they are added; 0 leaves a client out, whatever its
        parts hold. Parts of integers are added as they are.
      examples: `(clients,)` of the upload; not added.
      metrics: `(clients, metrics, 2)` of the upload; not added.
      scalars: small things that are added, by name; zero for a client that is left out.
      flags: counts that are added even for a client that is left out.
    """

    parts: Parts
    scale: Array
    examples: Array
    metrics: Array
    scalars: dict[str, Array]
    flags: dict[str, Array]


class Total(NamedTuple):
    """A sum over clients: whole parts, and scalars (those of summands and their flags)."""

    parts: Parts
    scalars: dict[str, Array]


def summand_of(upload: Upload) -> Summand:
    """Return what uploads add to the sum as long as no aggregator has a say: everything once."""
    takes_part = jnp.asarray(upload.examples) > 0
    told = takes_part & jnp.isfinite(upload.sums).all((1, 2))
    scalars = {
        "clients": takes_part.astype(jnp.float32),
        "sums": jnp.where(against(told, upload.sums), upload.sums, 0),
    }
    return Summand(upload.parts, takes_part.astype(jnp.float32), upload.examples, upload.sums, scalars, {})


def leave_out(summand: Summand, out: Array, flag: str | None = None) -> Summand:
    """Leave clients out of the sum, and count those that were still in it under `flag`."""
    flags = dict(summand.flags)
    if flag is not None:
        flags[flag] = flags.get(flag, jnp.zeros(())) + (out & (summand.scale > 0)).astype(jnp.float32)
    scalars = {name: jnp.where(against(out, value), 0, value) for name, value in summand.scalars.items()}
    return summand._replace(scale=jnp.where(out, 0.0, summand.scale), scalars=scalars, flags=flags)


def no_total(summand: Any) -> Total:
    """Return the sum over nobody, given a summand or the shapes of one."""

    def empty(change: Any) -> Array:
        if isinstance(change, RowChanges):
            return jnp.zeros((change.table, *change.values.shape[2:]), change.values.dtype)
        return jnp.zeros(change.shape[1:], change.dtype)

    parts = {name: {path: empty(change) for path, change in part.items()} for name, part in summand.parts.items()}
    return Total(parts, {name: empty(value) for name, value in {**summand.scalars, **summand.flags}.items()})


def add(total: Total, summand: Summand) -> Total:
    """Add several clients to a sum."""
    parts = {
        name: {path: _add_change(total.parts[name][path], change, summand.scale) for path, change in part.items()}
        for name, part in summand.parts.items()
    }
    small = {**summand.scalars, **summand.flags}
    return Total(parts, {name: total.scalars[name] + jnp.sum(value, 0) for name, value in small.items()})


def _add_change(total: Array, change: Change, scale: Array) -> Array:
    if isinstance(change, RowChanges):
        return _add_rows(total, change, scale)
    kept = jnp.where(against(scale > 0, change), change, 0)
    if jnp.issubdtype(total.dtype, jnp.integer):
        return total + jnp.sum(kept, 0, dtype=total.dtype)
    return total + jnp.tensordot(scale, kept, 1)


def _add_rows(total: Array, change: RowChanges, scale: Array) -> Array:
    """Add the rows of several clients to a table, a chunk at a time, as far as any client has rows."""
    chunks = -(-jnp.max(change.count) // ROW_CHUNK)

    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        k, total = state
        ids = jax.lax.dynamic_slice_in_dim(change.ids, k * ROW_CHUNK, ROW_CHUNK, 1)  # (clients, chunk)
        part = jax.lax.dynamic_slice_in_dim(change.values, k * ROW_CHUNK, ROW_CHUNK, 1)
        part = jnp.where(against(scale > 0, part), part, 0)
        if not jnp.issubdtype(total.dtype, jnp.integer):
            part = part * against(scale, part)
        # Beyond a client's rows the changes are zeros and the ids are 0: they add nothing to row 0.
        return k + 1, total.at[ids.reshape(-1)].add(part.reshape(-1, *part.shape[2:]), mode="promise_in_bounds")

    return jax.lax.while_loop(lambda state: state[0] < chunks, body, (jnp.int32(0), total))[1]


def against(flags: Array, values: Array) -> Array:
    """Give `(clients,)` flags the dimensions of values that have the clients first."""
    return flags.reshape(-1, *([1] * (values.ndim - 1)))


def values_of(parts: Mapping[str, Mapping[str, Any]]) -> list[Array]:
    """List the arrays of numbers that parts hold, clients first: of rows, their values."""
    changes = [change for part in parts.values() for change in part.values()]
    return [change.values if isinstance(change, RowChanges) else change for change in changes]


def map_values(function: Callable[[Array], Array], parts: Mapping[str, Mapping[str, Any]]) -> Parts:
    """Apply a function to the numbers of all parts, whole or by rows."""

    def one(change: Any) -> Any:
        if isinstance(change, RowChanges):
            return dataclasses.replace(change, values=function(change.values))
        return function(change)

    return {name: {path: one(change) for path, change in part.items()} for name, part in parts.items()}
