"""A cohort through the client function: blocks of clients side by side, one after another, on every device."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedrecon.aggregate import COUNTS, Totals, add, no_totals
from fedrecon.algorithm import Algorithm, Same, ServerState
from fedrecon.cohort import Cohort, arrange
from fedrecon.lookups import lookup_groups
from fedrecon.model import Model, flatten, metric_names

AXIS = "clients"
BLOCK_BYTES = 2**20  # what a block's copies of global parameters may take by default: about a core's cache
MOST_IN_BLOCK = 10
MOST_DEVICES = 64  # that a CPU may be divided into, unless it has more cores


def start_devices(devices: int | None = None) -> None:
    """Start JAX with so many devices on a CPU, by default one for every core.

    Only the first use of JAX in a process decides: call this before anything else. Where JAX has started already
    nothing changes, and `layout` refuses more devices than there are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = cores if devices is None else devices
    if not 1 <= number <= max(MOST_DEVICES, cores):
        raise ValueError(f"devices is {number}; from 1 to {max(MOST_DEVICES, cores)} are possible here")
    # Where JAX has started, this is an error, and too late.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", number)


class Layout(NamedTuple):
    """Where clients run.

    Attributes:
      mesh: the devices, in one axis.
      block: how many clients run side by side on a device.
    """

    mesh: Mesh
    block: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return int(self.mesh.devices.size)

    def arrange(self, indices: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Put clients in the order in which this layout runs them best (see `cohort.arrange`)."""
        return arrange(indices, sizes, self.devices, self.block)


def layout(block: int | None = None, devices: int | None = None, *, model: Model | None = None) -> Layout:
    """Choose where clients run.

    Args:
      block: clients side by side; by default as many as keep their copies of the model's dense global parameters
        in a core's cache, at most `MOST_IN_BLOCK`.
      devices: how many of the devices that JAX sees; all by default.
      model: the model whose size decides the default block.
    """
    available = jax.devices()
    if devices is not None and not 1 <= devices <= len(available):
        raise ValueError(
            f"`devices` is {devices}; JAX sees {len(available)}. On a CPU, call fedrecon.start_devices(n) before "
            "anything else uses JAX"
        )
    if block is None:
        block = MOST_IN_BLOCK if model is None else _default_block(model)
    if block < 1:
        raise ValueError(f"`block` is {block}; it must be at least 1")
    mesh = jax.make_mesh(
        (devices or len(available),), (AXIS,), axis_types=(AxisType.Auto,), devices=available[:devices]
    )
    return Layout(mesh, block)


def _default_block(model: Model) -> int:
    shapes = flatten(jax.eval_shape(model.init_global, jax.random.key(0)))[0]
    lookups = lookup_groups(model)
    dense = sum(x.size * x.dtype.itemsize for path, x in shapes.items() if path not in lookups)
    return int(np.clip(BLOCK_BYTES // max(dense, 1), 1, MOST_IN_BLOCK))


class RoundMetrics(NamedTuple):
    """What is known of rounds afterwards, rounds first in every leaf."""

    sums: Any  # (rounds, metrics, 2)
    weight: Any  # (rounds,)
    counts: dict[str, Any]
    skipped: Any  # (rounds,) whether the server left the model as it was


Rounds = Callable[[ServerState, Any, Cohort, Array, int, int], tuple[ServerState, Any, RoundMetrics]]


def compile_rounds(algorithm: Algorithm, place: Layout) -> Rounds:
    """Compile the rounds of an algorithm, once for the same algorithm (the very same value) and place.

    Returns:
      `(state, kept, cohorts, key, first, number) -> (state, kept, metrics)`: runs `number` rounds from round `first`
      on, whose cohorts are packed together, rounds first in every leaf, clients second. Any `number` up to how many are
      packed runs the same compiled code, and rounds come out the same however they are grouped into calls: what is
      random in a round depends on the key and on the round's number.
    """
    return _compile_rounds(Same(algorithm), place)


@functools.lru_cache(maxsize=4)
def _compile_rounds(same: Same, place: Layout) -> Rounds:
    algorithm = same.algorithm
    names = metric_names(algorithm.model)

    def one_round(state: ServerState, kept: Any, cohort: Cohort, key: Array) -> tuple[ServerState, Any, RoundMetrics]:
        totals, kept = _run_blocks(algorithm, state.params, kept, cohort, key, place.block)
        totals = jax.lax.psum(totals, AXIS)
        weight = jnp.where(totals.weight > 0, totals.weight, 1.0)
        mean = {path: total / weight for path, total in totals.delta.items()}
        tainted = sum(jnp.sum(jnp.ravel(leaf * 0)) for leaf in mean.values())
        take = (totals.weight > 0) & (tainted == 0)
        state = algorithm.server(state, mean, take)
        counts = {name: count.astype(jnp.int32) for name, count in totals.counts.items()}
        return state, kept, RoundMetrics(totals.sums, totals.weight, counts, ~take)

    def rounds(state: ServerState, kept: Any, cohorts: Cohort, key: Array, first: Array, number: Array) -> Any:
        most = cohorts.client.shape[0]
        metrics = RoundMetrics(
            jnp.zeros((most, len(names), 2)),
            jnp.zeros(most),
            {name: jnp.zeros(most, jnp.int32) for name in COUNTS},
            jnp.zeros(most, bool),
        )

        def body(carry: Any) -> Any:
            r, state, kept, metrics = carry
            cohort = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, r, keepdims=False), cohorts)
            state, kept, found = one_round(state, kept, cohort, jax.random.fold_in(key, first + r))
            metrics = jax.tree.map(lambda all_, one: all_.at[r].set(one), metrics, found)
            return r + 1, state, kept, metrics

        start = (jnp.int32(0), state, kept, metrics)
        return jax.lax.while_loop(lambda carry: carry[0] < number, body, start)[1:]

    whole, by_client = PartitionSpec(), PartitionSpec(AXIS)
    sharded = jax.shard_map(
        rounds,
        mesh=place.mesh,
        in_specs=(whole, by_client, PartitionSpec(None, AXIS), whole, whole, whole),
        out_specs=(whole, by_client, whole),
        check_vma=False,  # blocks begin from zeros that belong to no device yet
    )
    return jax.jit(sharded)


def _run_blocks(
    algorithm: Algorithm, params: Any, kept: Any, cohort: Cohort, key: Array, block: int
) -> tuple[Totals, Any]:
    """Run this device's clients, a block at a time, summing as they come so that few deltas are alive at once."""

    def body(totals: Totals, part: tuple[Cohort, Any]) -> tuple[Totals, Any]:
        upload, kept = algorithm.client(params, part[1], part[0], key)
        return add(algorithm.aggregation, totals, upload, part[0], algorithm.groups), kept

    start = no_totals(params, len(metric_names(algorithm.model)))
    totals, kept = jax.lax.scan(body, start, _blocks((cohort, kept), block))
    return totals, _unblock(kept)


def _blocks(tree: Any, block: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // block, block, *x.shape[1:]), tree)


def _unblock(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def compile_each(function: Callable[..., Any], place: Layout) -> Callable[..., Any]:
    """Compile `function(shared, clients)` so that every device runs its clients a block at a time.

    `clients` and the result have the clients first in every leaf.
    """

    def run(shared: Any, clients: Any) -> Any:
        return _unblock(jax.lax.map(lambda part: function(shared, part), _blocks(clients, place.block)))

    by_client = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(run, mesh=place.mesh, in_specs=(PartitionSpec(), by_client), out_specs=by_client, check_vma=False)
    )


def everywhere(tree: Any, place: Layout) -> Any:
    """Copy arrays to all devices of a layout."""
    return jax.device_put(tree, NamedSharding(place.mesh, PartitionSpec()))
