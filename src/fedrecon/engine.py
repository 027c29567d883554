"""The simulator's rounds: every device runs its clients in blocks, side by side within a block."""

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

from fedrecon.aggregate.aggregator import Report
from fedrecon.algorithm import Algorithm, Client, Message, ServerState, encode, finish_round, shapes_of, summand_shapes
from fedrecon.cohort import Cohort, arrange
from fedrecon.keys import client_keys
from fedrecon.lookups.tables import lookup_groups
from fedrecon.model import Model, metric_names
from fedrecon.trees import flatten
from fedrecon.upload import Total, add, no_total

AXIS = "clients"
BLOCK_BYTES = 2**20  # for a block's copies of global parameters by default: about a core's cache
MOST_IN_BLOCK = 10
SHARING_BYTES = 2**24  # for the local parameters of a block that shares the global ones
MOST_SHARING = 16
MOST_DEVICES = 64  # on a CPU, unless it has more cores


def start_devices(devices: int | None = None) -> None:
    """Start JAX with several devices on a CPU.

    The number is fixed at the first use of JAX in a process, so call this before anything else. If JAX has already
    started, nothing changes, and `layout` refuses more devices than there are.

    Args:
      devices: how many; None for one per core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = cores if devices is None else devices
    if not 1 <= number <= max(MOST_DEVICES, cores):
        raise ValueError(f"`devices` is {number}; it must be between 1 and {max(MOST_DEVICES, cores)} on this machine")
    # Once JAX has started this raises an error, and it is too late to change the number.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", number)


class Layout(NamedTuple):
    """On which devices and in what blocks clients run.

    Attributes:
      mesh: the devices, along one axis.
      block: how many clients run side by side on a device, each with its own copy of the global parameters.
      sharing: at most how many run side by side while they share the global parameters; a multiple of `block`.
    """

    mesh: Mesh
    block: int
    sharing: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return int(self.mesh.devices.size)

    def arrange(self, indices: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Put clients in the order in which this layout runs them best (see `cohort.arrange`).

        Args:
          indices: of the clients, `ABSENT` allowed.
          sizes: how much work each client is.
        """
        on_device = -(-len(indices) // (self.devices * self.block)) * self.block
        return arrange(indices, sizes, self.devices, self.wide(on_device))

    def wide(self, clients: int) -> int:
        """Return how many of a device's clients run side by side while they share the global parameters.

        They form as few blocks as `sharing` allows, all of the same size, so that the last one is not mostly padding.

        Args:
          clients: how many the device has.
        """
        blocks = -(-clients // self.sharing)
        return -(-clients // (blocks * self.block)) * self.block if blocks else self.block


def layout(
    block: int | None = None, devices: int | None = None, *, sharing: int | None = None, model: Model | None = None
) -> Layout:
    """Choose on which devices and in what blocks clients run.

    Clients of a large model train one by one, since each needs its own copy of the global parameters. They still
    reconstruct side by side, since reconstruction shares the global parameters among clients.

    Args:
      block: clients side by side, each with its own copy. By default as many as fit their copies of the model's dense
        global parameters into a core's cache, at most `MOST_IN_BLOCK`.
      devices: how many of the devices that JAX sees; all by default.
      sharing: clients side by side that share the global parameters, a multiple of `block`. By default the same as
        `block` if that is given; else up to `MOST_SHARING`, as long as their local parameters are small.
      model: its size decides the defaults.
    """
    available = jax.devices()
    if devices is not None and not 1 <= devices <= len(available):
        raise ValueError(
            f"`devices` is {devices}; JAX sees {len(available)}. On a CPU, call fedrecon.start_devices(n) before "
            "anything else uses JAX"
        )
    chosen = _default_blocks(model) if block is None and model is not None else (block, block)
    block = MOST_IN_BLOCK if chosen[0] is None else chosen[0]
    if block < 1:
        raise ValueError(f"`block` is {block}; it must be at least 1")
    sharing = (chosen[1] or block) if sharing is None else sharing
    if sharing < 1 or sharing % block:
        raise ValueError(f"`sharing` is {sharing}; it must be a multiple of `block`, which is {block}")
    mesh = jax.make_mesh(
        (devices or len(available),), (AXIS,), axis_types=(AxisType.Auto,), devices=available[:devices]
    )
    return Layout(mesh, block, sharing)


def _default_blocks(model: Model) -> tuple[int, int]:
    """Return `block` and `sharing` for a model's size. They differ only if copies keep `block` small."""
    shapes = flatten(shapes_of(model.init_global))[0]
    lookups = lookup_groups(model)
    dense = _bytes({path: leaf for path, leaf in shapes.items() if path not in lookups})
    block = int(np.clip(BLOCK_BYTES // max(dense, 1), 1, MOST_IN_BLOCK))
    if block == MOST_IN_BLOCK:
        return block, block
    local = _bytes(shapes_of(model.init_local))
    sharing = min(SHARING_BYTES // max(local, 1), MOST_SHARING)
    return block, max(sharing // block, 1) * block


def _bytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


# (state, kept, cohorts, key, first, number) -> (state, kept, report with rounds first)
Rounds = Callable[[ServerState, Any, Cohort, Array, int, int], tuple[ServerState, Any, Report]]


@functools.lru_cache(maxsize=4)
def compile_rounds(algorithm: Algorithm, layout: Layout) -> Rounds:
    """Compile the rounds of an algorithm, once for each algorithm (by identity) and layout.

    Args:
      algorithm: what is trained.
      layout: on which devices and in what blocks clients run.

    Returns:
      `(state, kept, cohorts, key, first, number) -> (state, kept, report)`, which runs `number` rounds from round
      `first` on. Their cohorts are packed together: in every leaf the first dimension is the round, the second the
      client. Any `number` up to how many are packed runs the same compiled code. Randomness depends on the key and the
      round's number only, so the results do not depend on how rounds are grouped into calls.
    """
    metrics = len(metric_names(algorithm.model))

    def one_round(state: ServerState, kept: Any, cohort: Cohort, key: Array) -> tuple[ServerState, Any, Report]:
        message = algorithm.message(state)
        nothing = no_total(summand_shapes(algorithm, state, metrics))
        total, kept = _run_blocks(algorithm, message, nothing, kept, cohort, key, layout)
        total = jax.lax.psum(total, AXIS)
        state, report = finish_round(algorithm, state, total, key)
        return state, kept, report

    def rounds(state: ServerState, kept: Any, cohorts: Cohort, key: Array, first: Array, number: Array) -> Any:
        most = cohorts.client.shape[0]
        nothing = no_total(summand_shapes(algorithm, state, metrics))
        shapes = jax.eval_shape(lambda: finish_round(algorithm, state, nothing, key)[1])
        reports = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), shapes)

        def body(carry: Any) -> Any:
            r, state, kept, reports = carry
            cohort = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, r, keepdims=False), cohorts)
            state, kept, report = one_round(state, kept, cohort, jax.random.fold_in(key, first + r))
            reports = jax.tree.map(lambda all_, one: all_.at[r].set(one), reports, report)
            return r + 1, state, kept, reports

        start = (jnp.int32(0), state, kept, reports)
        return jax.lax.while_loop(lambda carry: carry[0] < number, body, start)[1:]

    whole, by_client = PartitionSpec(), PartitionSpec(AXIS)
    sharded = jax.shard_map(
        rounds,
        mesh=layout.mesh,
        in_specs=(whole, by_client, PartitionSpec(None, AXIS), whole, whole, whole),
        out_specs=(whole, by_client, whole),
        check_vma=False,  # blocks start from zeros that do not vary over devices yet
    )
    return jax.jit(sharded)


def _run_blocks(
    algorithm: Algorithm, message: Message, nothing: Total, kept: Any, cohort: Cohort, key: Array, layout: Layout
) -> tuple[Total, Any]:
    """Run this device's clients a block at a time, adding uploads as they come so that few are in memory at once."""

    def run(client: Client) -> Callable[[Total, tuple[Cohort, Any]], tuple[Total, Any]]:
        def block(total: Total, part: tuple[Cohort, Any]) -> tuple[Total, Any]:
            cohort, kept = part
            upload, kept = client(message.method, kept, cohort, key)
            summand = encode(algorithm, message, upload, client_keys(key, cohort.identity))
            return add(total, summand), kept

        return block

    wide, stages = layout.wide(cohort.client.shape[0]), algorithm.method.stages
    if stages is None or wide == layout.block:
        total, kept = jax.lax.scan(run(algorithm.method.client), nothing, _blocks((cohort, kept), layout.block))
        return total, _unblock(kept)

    def prepare_together(total: Total, part: tuple[Cohort, Any]) -> tuple[Total, Any]:
        cohort, kept = part
        prepared = stages.prepare(message.method, kept, cohort, key)
        total, kept = jax.lax.scan(run(stages.finish), total, _blocks((cohort, prepared), layout.block))
        return total, _unblock(kept)

    total, kept = jax.lax.scan(prepare_together, nothing, _blocks((cohort, kept), wide))
    return total, _unblock(kept)


def _blocks(tree: Any, block: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // block, block, *x.shape[1:]), tree)


def _unblock(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def compile_each(function: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Compile a function of clients so that every device runs its clients a block at a time.

    Args:
      function: `(what all clients share, clients) -> result`; `clients` and the result have the clients first in every
        leaf.
      layout: on which devices and in what blocks clients run.
    """

    def run(shared: Any, clients: Any) -> Any:
        wide = layout.wide(jax.tree.leaves(clients)[0].shape[0])
        return _unblock(jax.lax.map(lambda part: function(shared, part), _blocks(clients, wide)))

    by_client = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            run, mesh=layout.mesh, in_specs=(PartitionSpec(), by_client), out_specs=by_client, check_vma=False
        )
    )


def everywhere(tree: Any, layout: Layout) -> Any:
    """Copy arrays to all devices of a layout.

    Args:
      tree: the arrays.
      layout: on which devices and in what blocks clients run.
    """
    return jax.device_put(tree, NamedSharding(layout.mesh, PartitionSpec()))
