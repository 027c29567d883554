"""From what clients return to one mean: weights, guards, clipping, sums by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon.cohort import ROW_CHUNK, Cohort
from fedrecon.model import Model, metric_names
from fedrecon.trees import flatten

Weigh = Literal["examples", "uniform"] | Callable[[Array, Array], Array]


class Upload(NamedTuple):
    """What leaves several clients, clients first in every leaf.

    Attributes:
      delta: the change of the global parameters by path; of lookup tables, the changes of the client's rows.
      examples: how many query examples were processed.
      sums: of loss and metrics, `(clients, metrics, 2)`.
    """

    delta: dict[str, Array]
    examples: Array
    sums: Array


class Totals(NamedTuple):
    """Sums over clients: weighted deltas, weights, metrics, and how often each guard acted.

    All of one type, so that devices add them up in one exchange.
    """

    delta: dict[str, Array]
    weight: Array
    sums: Array
    counts: dict[str, Array]


class Aggregation(NamedTuple):
    """How uploads become a mean.

    Attributes:
      weigh: `examples` (query examples processed), `uniform`, or a function of `(examples, sums)`, both clients
        first, that returns `(clients,)` weights, such as `weight_of` makes.
      clip_norm: scale a delta down to this norm over all its entries.
      zero_norm: drop a client whose delta has a norm above this.
    """

    weigh: Weigh = "examples"
    clip_norm: float | None = None
    zero_norm: float | None = None


def mean(weigh: Weigh = "examples", *, clip_norm: float | None = None, zero_norm: float | None = None) -> Aggregation:
    """Average deltas. Clients with any non-finite entry never count, and are counted.

    Args:
      weigh: `examples` weighs a client by the query examples it processed, `uniform` weighs all alike; or a function
        of `(examples, sums)`, both clients first, that returns `(clients,)` weights, such as `weight_of` makes.
      clip_norm: scale a delta down to this norm over all its entries; None for no limit.
      zero_norm: drop a client whose delta has a norm above this; None for no limit.

    Returns:
      An `Aggregation`, to be given to an algorithm as `aggregate`.
    """
    for name, value in (("clip_norm", clip_norm), ("zero_norm", zero_norm)):
        if value is not None and not value > 0:
            raise ValueError(f"`{name}` is {value}; it must be above 0, or None for no limit")
    if not callable(weigh) and weigh not in ("examples", "uniform"):
        raise ValueError(f"`weigh` is {weigh!r}; use 'examples', 'uniform' or a function of (examples, sums)")
    return Aggregation(weigh, clip_norm, zero_norm)


def weight_of(model: Model, metric: str = "loss") -> Callable[[Array, Array], Array]:
    """Weigh clients by the weight that one of the model's metrics gives their query examples, such as tokens.

    Args:
      model: whose metrics are meant.
      metric: the name of one of them, or `loss`.

    Returns:
      A function for `mean(weigh=...)`.
    """
    names = metric_names(model)
    if metric not in names:
        raise ValueError(f"`metric` is {metric!r}; the model has: {', '.join(names)}")
    place = names.index(metric)
    return lambda examples, sums: sums[:, place, 1]


COUNTS = ("clients", "non_finite", "clipped", "zeroed")


def no_totals(params: Any, num_metrics: int) -> Totals:
    """Return the totals of no clients.

    Args:
      params: the global parameters.
      num_metrics: how many metrics there are, the loss among them.
    """
    return Totals(
        {path: jnp.zeros_like(leaf) for path, leaf in flatten(params)[0].items()},
        jnp.zeros(()),
        jnp.zeros((num_metrics, 2)),
        {name: jnp.zeros(()) for name in COUNTS},
    )


def add(aggregation: Aggregation, totals: Totals, upload: Upload, cohort: Cohort, groups: Mapping[str, str]) -> Totals:
    """Add the uploads of a block of clients to the totals.

    Args:
      aggregation: weights and limits.
      totals: over the clients so far.
      upload: of the block.
      cohort: the block itself, for the rows that its clients touch.
      groups: which deltas are by rows, as `{path: group of lookup tables}`.
    """
    by_rows = {path: delta for path, delta in upload.delta.items() if path in groups}
    whole = {path: delta for path, delta in upload.delta.items() if path not in groups}
    rows = {path: (cohort.rows[groups[path]], cohort.num_rows[groups[path]]) for path in by_rows}
    finite, norm = _inspect(aggregation, upload.delta, len(upload.examples))
    weighed = upload.examples > 0
    weight = jnp.where(weighed, _weigh(aggregation, upload), 0.0).astype(jnp.float32)
    finite &= jnp.isfinite(weight)
    zeroed = finite & (norm > (aggregation.zero_norm or math.inf))
    counted = finite & ~zeroed & (weight > 0)
    limit = aggregation.clip_norm or math.inf
    scale = jnp.where(norm > limit, limit / jnp.maximum(norm, 1e-30), 1.0)
    weight = jnp.where(counted, weight, 0.0)
    factor = jnp.where(counted, weight * scale, 0.0)

    total = dict(totals.delta)
    for path, delta in whole.items():
        kept = jnp.where(_against(counted, delta), delta, 0)
        total[path] += jnp.tensordot(factor, kept, 1)
    for path, change in by_rows.items():
        total[path] = _add_rows(total[path], change, *rows[path], counted, factor)
    told = counted & jnp.isfinite(upload.sums).all((1, 2))
    sums = jnp.where(_against(told, upload.sums), upload.sums, 0)
    here = {
        "clients": counted,
        "non_finite": weighed & ~finite,
        "clipped": counted & (norm > limit),
        "zeroed": weighed & zeroed,
    }
    counts = {name: totals.counts[name] + jnp.sum(here[name], dtype=jnp.float32) for name in COUNTS}
    return Totals(total, totals.weight + jnp.sum(weight), totals.sums + jnp.sum(sums, 0), counts)


def _weigh(aggregation: Aggregation, upload: Upload) -> Array:
    if callable(aggregation.weigh):
        return aggregation.weigh(upload.examples, upload.sums)
    return upload.examples if aggregation.weigh == "examples" else jnp.ones(upload.examples.shape)


def _inspect(aggregation: Aggregation, deltas: Mapping[str, Array], clients: int) -> tuple[Array, Array]:
    """Find which deltas are finite throughout, and their norms (zero where no limit asks for them)."""
    wanted = aggregation.clip_norm is not None or aggregation.zero_norm is not None
    taint, squares = jnp.zeros(clients), jnp.zeros(clients)
    for delta in deltas.values():
        flat = delta.reshape(clients, -1)
        # A finite number times zero is zero, anything else is not. As a product with a vector of zeros, hidden from
        # the compiler so that it is not left out, this is many times faster than a reduction of isfinite.
        taint += flat @ jax.lax.optimization_barrier(jnp.zeros(flat.shape[1], flat.dtype))
        if wanted:
            squares += jax.vmap(jnp.vdot)(flat, flat)
    return taint == 0, jnp.sqrt(squares)


def _add_rows(total: Array, change: Array, rows: Array, num_rows: Array, counted: Array, factor: Array) -> Array:
    """Add `factor` times the changes of `(clients, rows, ...)` to the rows of a table."""

    def step(total: Array, part: Array, at: Array) -> Array:
        ids = jax.lax.dynamic_slice_in_dim(rows, at, ROW_CHUNK, 1)  # (clients, chunk)
        part = jnp.where(_against(counted, part), part, 0) * _against(factor, part)
        # Beyond a client's rows the changes are zeros and the ids are 0: they add nothing to row 0.
        return total.at[ids.reshape(-1)].add(part.reshape(-1, *part.shape[2:]), mode="promise_in_bounds")

    return _over_chunks(step, total, change, num_rows)


def _over_chunks(step: Callable[[Any, Array, Array], Any], carry: Any, change: Array, num_rows: Array) -> Any:
    """Fold `step(carry, chunk of rows, where it begins)` over the rows that any client uses."""
    chunks = -(-jnp.max(num_rows) // ROW_CHUNK)

    def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
        k, carry = state
        part = jax.lax.dynamic_slice_in_dim(change, k * ROW_CHUNK, ROW_CHUNK, 1)
        return k + 1, step(carry, part, k * ROW_CHUNK)

    return jax.lax.while_loop(lambda state: state[0] < chunks, body, (jnp.int32(0), carry))[1]


def _against(flags: Array, delta: Array) -> Array:
    return flags.reshape(-1, *([1] * (delta.ndim - 1)))
