"""Uploads: all that leaves a client (named changes, a count, sums of metrics), and how uploads are added."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Num, Shaped

ROW_CHUNK = 32  # lists of rows are padded to a multiple of this, to be processed in chunks
DELTA = "delta"  # the part of an upload that holds the change of the global parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowChanges:
    """Changes of some rows of a table, for several clients.

    Attributes:
      ids: of the rows; padded with 0.
      values: their changes; padded with zeros.
      count: how many rows of each client are not padding.
      table: how many rows the whole table has.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> changes = fr.kit.RowChanges(ids=jnp.array([[2]]), values=jnp.array([[0.5]]), count=jnp.array([1]), table=4)
      >>> changes.whole().tolist()
      [[0.0, 0.0, 0.5, 0.0]]
    """

    ids: Int[Array, "clients rows"]
    values: Num[Array, "clients rows ..."]
    count: Int[Array, " clients"]
    table: int = dataclasses.field(metadata={"static": True})

    def whole(self) -> Num[Array, "clients table ..."]:
        """Return the changes as whole tables."""
        empty = jnp.zeros((self.values.shape[0], self.table, *self.values.shape[2:]), self.values.dtype)
        return jax.vmap(lambda table, ids, values: table.at[ids].add(values))(empty, self.ids, self.values)


Change = Array | RowChanges
Parts = dict[str, dict[str, Any]]  # part -> path -> Change


class Upload(NamedTuple):
    """All that leaves several clients, clients first in every leaf. A single client is a block of one.

    Attributes:
      parts: named changes, each `{path: change}`. Every method has `delta`, the change of the global parameters; some
        have more (SCAFFOLD sends the change of its control variates).
      examples: how many query examples were processed; 0 for a client that contributes nothing.
      sums: of loss and metrics: totals and weights.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> upload = fr.kit.Upload({"delta": {"w": jnp.array([0.5])}}, examples=jnp.array([3]), sums=jnp.zeros((1, 1, 2)))
      >>> list(upload.delta)
      ['w']
    """

    parts: Parts
    examples: Num[Array, " clients"]
    sums: Float[Array, "clients metrics 2"]

    @property
    def delta(self) -> dict[str, Any]:
        """The change of the global parameters, by path."""
        return self.parts[DELTA]

    def whole_delta(self) -> dict[str, Array]:
        """Return the change of the global parameters, by path, with whole tables."""
        return whole_changes(self.delta)


class Summand(NamedTuple):
    """What several clients add to the sum, clients first in every leaf.

    Attributes:
      parts: as in the upload, or in another number format.
      scale: factor for float parts as they are added; 0 leaves a client out, even if its parts are not
        finite. Integer parts are added without it.
      examples: of the upload; not added.
      metrics: sums of the upload; not added.
      scalars: other sums, by name; zero for a client that is left out.
      flags: counts that include clients that are left out.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedrecon.aggregators import Summand, stateless
      >>> def halve(summand: Summand) -> Summand:
      ...     return summand._replace(scale=summand.scale / 2)
      >>> summand = Summand({"delta": {"w": jnp.ones(1)}}, jnp.ones(1), jnp.ones(1), jnp.zeros((1, 1, 2)), {}, {})
      >>> halve(summand).scale.tolist()
      [0.5]
    """

    parts: Parts
    scale: Float[Array, " clients"]
    examples: Num[Array, " clients"]
    metrics: Float[Array, "clients metrics 2"]
    scalars: dict[str, Array]
    flags: dict[str, Array]


class Total(NamedTuple):
    """A sum over clients: its parts, which are whole arrays, and its scalars (those of summands, and their flags).

    Example:
      >>> from fedrecon.aggregators import Total
      >>> Total({"delta": {"w": 6.0}}, {"clients": 3.0}).scalars["clients"]
      3.0
    """

    parts: Parts
    scalars: dict[str, Array]


def summand_of(upload: Upload) -> Summand:
    """Return what uploads add to the sum before any aggregator changes it: every client with scale 1.

    Args:
      upload: of several clients.
    """
    takes_part = jnp.asarray(upload.examples) > 0
    finite = takes_part & jnp.isfinite(upload.sums).all((1, 2))
    scalars = {
        "clients": takes_part.astype(jnp.float32),
        "sums": jnp.where(broadcast_clients(finite, upload.sums), upload.sums, 0),
    }
    return Summand(upload.parts, takes_part.astype(jnp.float32), upload.examples, upload.sums, scalars, {})


def leave_out(summand: Summand, out: Array, flag: str | None = None) -> Summand:
    """Leave clients out of the sum.

    Args:
      summand: of several clients.
      out: `(clients,)` true for those to leave out.
      flag: the name under which to count those that were not left out before; None to count nothing.
    """
    flags = dict(summand.flags)
    if flag is not None:
        flags[flag] = flags.get(flag, jnp.zeros(())) + (out & (summand.scale > 0)).astype(jnp.float32)
    scalars = {name: jnp.where(broadcast_clients(out, value), 0, value) for name, value in summand.scalars.items()}
    return summand._replace(scale=jnp.where(out, 0.0, summand.scale), scalars=scalars, flags=flags)


def no_total(summand: Any) -> Total:
    """Return the sum over no clients.

    Args:
      summand: a summand, or the shapes of one.
    """

    def empty(change: Any) -> Array:
        if isinstance(change, RowChanges):
            return jnp.zeros((change.table, *change.values.shape[2:]), change.values.dtype)
        return jnp.zeros(change.shape[1:], change.dtype)

    return Total(*map_changes(empty, (summand.parts, {**summand.scalars, **summand.flags})))


def add(total: Total, summand: Summand) -> Total:
    """Add the summands of several clients to a sum.

    Args:
      total: the sum so far.
      summand: of several clients.
    """
    scale = summand.scale

    def add_change(change: Change, total: Array) -> Array:
        if isinstance(change, RowChanges):
            return _add_rows(total, change, scale)
        included = jnp.where(broadcast_clients(scale > 0, change), change, 0)
        integers = jnp.issubdtype(total.dtype, jnp.integer)
        return total + (jnp.sum(included, 0, dtype=total.dtype) if integers else jnp.tensordot(scale, included, 1))

    small = {**summand.scalars, **summand.flags}
    scalars = jax.tree.map(lambda value, total: total + jnp.sum(value, 0), small, total.scalars)
    return Total(map_changes(add_change, summand.parts, total.parts), scalars)


def _add_rows(total: Array, change: RowChanges, scale: Array) -> Array:
    """Add the rows of several clients to a table, a chunk at a time, up to the largest number of rows."""
    chunks = -(-jnp.max(change.count) // ROW_CHUNK)

    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        k, total = state
        ids = jax.lax.dynamic_slice_in_dim(change.ids, k * ROW_CHUNK, ROW_CHUNK, 1)  # (clients, chunk)
        part = jax.lax.dynamic_slice_in_dim(change.values, k * ROW_CHUNK, ROW_CHUNK, 1)
        part = jnp.where(broadcast_clients(scale > 0, part), part, 0)
        if not jnp.issubdtype(total.dtype, jnp.integer):
            part = part * broadcast_clients(scale, part)
        # Padding has id 0 and zero changes, so it adds nothing to row 0.
        return k + 1, total.at[ids.reshape(-1)].add(part.reshape(-1, *part.shape[2:]), mode="promise_in_bounds")

    return jax.lax.while_loop(lambda state: state[0] < chunks, body, (jnp.int32(0), total))[1]


def broadcast_clients(
    flags: Shaped[Array, " clients"], values: Shaped[Array, "clients ..."]
) -> Shaped[Array, "clients ..."]:
    """Reshape `(clients,)` to `(clients, 1, ...)`, so that it broadcasts against values.

    Args:
      flags: one for each client.
      values: of the shape to broadcast to.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedrecon import kit
      >>> kit.broadcast_clients(jnp.array([1, 2]), jnp.zeros((2, 5, 3))).shape
      (2, 1, 1)
    """
    return flags.reshape(-1, *([1] * (values.ndim - 1)))


def is_rows(change: Any) -> bool:
    """Say whether a change is of some rows of a table."""
    return isinstance(change, RowChanges)


def whole_changes(changes: Any) -> Any:
    """Return changes, of one part or of all parts, as whole arrays."""
    return map_changes(lambda change: change.whole() if is_rows(change) else change, changes)


def map_changes(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the changes, whole or by rows, of several trees of one structure."""
    return jax.tree.map(function, *trees, is_leaf=is_rows)


def values_of(parts: Mapping[str, Mapping[str, Any]]) -> list[Array]:
    """List the arrays of changes in parts, clients first; for changes of rows, their values.

    Args:
      parts: of an upload or a summand.
    """
    return [change.values if is_rows(change) else change for change in jax.tree.leaves(parts, is_leaf=is_rows)]


def map_values(function: Callable[[Array], Array], parts: Mapping[str, Mapping[str, Any]]) -> Parts:
    """Apply a function to the changes in all parts, whole or by rows.

    Args:
      function: of one array.
      parts: of an upload or a summand.
    """

    def map_change(change: Any) -> Any:
        return dataclasses.replace(change, values=function(change.values)) if is_rows(change) else function(change)

    return map_changes(map_change, parts)
