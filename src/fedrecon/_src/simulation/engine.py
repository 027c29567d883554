"""The simulator's rounds: every device runs its clients in blocks, side by side within a block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedrecon._src.algorithms.algorithm import (
    Algorithm,
    Client,
    ServerState,
    empty_total,
    encode,
    finish_round,
)
from fedrecon._src.client.lookup_tables import lookup_groups
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.cohort import Cohort, Drawn, arrange
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Model, shapes_of
from fedrecon._src.core.pytrees import flatten, nbytes
from fedrecon._src.core.upload import Total, add
from fedrecon._src.server.aggregator import Report
from fedrecon._src.simulation.multihost import AXIS, gather, make_global

BLOCK_BYTES = 2**20  # for a block's copies of global parameters by default: about a core's cache
MOST_IN_BLOCK = 10
SMALL_ACCELERATOR = 2**32  # bytes, of one that does not say how many it has
MOST_ON_ACCELERATOR = 128  # clients side by side where memory decides
COPIES = 8  # of the global parameters that a client needs: values, gradients, an optimizer's state, intermediates
SHARING_BYTES = 2**24  # for the local parameters of a block that shares the global ones
MOST_SHARING = 16
SMALL_ARRAY = 2**10  # numbers: arrays up to this size are summed over devices together


class Layout(NamedTuple):
    """On which JAX devices and in what blocks clients run.

    Attributes:
      mesh: the devices, along one axis.
      block: how many clients run side by side on a device, each with its own copy of the global parameters.
      sharing: at most how many run side by side while they share the global parameters; a multiple of `block`.
    """

    mesh: Mesh
    block: int
    sharing: int

    @property
    def jax_devices(self) -> int:
        """The number of devices, of all processes together."""
        return int(self.mesh.devices.size)

    def local(self, order: np.ndarray) -> np.ndarray:
        """Return those clients of a cohort in this layout's order that run in this process."""
        return order.reshape(self.processes, -1)[jax.process_index()] if self.processes > 1 else order

    @property
    def processes(self) -> int:
        """The number of processes that have these devices."""
        return len({device.process_index for device in self.mesh.devices.flat})

    def arrange(self, indices: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Put clients in the order in which this layout runs them best (see `cohort.arrange`).

        Args:
          indices: of the clients, `ABSENT` allowed.
          sizes: how much work each client is.
        """
        on_device = -(-len(indices) // (self.jax_devices * self.block)) * self.block
        return arrange(indices, sizes, self.jax_devices, self.sharing_block(on_device))

    def sharing_block(self, clients: int) -> int:
        """Return how many of a device's clients run side by side while they share the global parameters.

        They form as few blocks as `sharing` allows, all of the same size, so that the last one is not mostly padding.

        Args:
          clients: how many the device has.
        """
        blocks = -(-clients // self.sharing)
        return -(-clients // (blocks * self.block)) * self.block if blocks else self.block


def layout(
    block: int | None = None,
    jax_devices: int | None = None,
    *,
    sharing: int | None = None,
    model: Model | None = None,
    alone: bool = False,
) -> Layout:
    """Choose on which JAX devices and in what blocks clients run.

    Clients of a large model train one by one, since each needs its own copy of the global parameters. They still
    reconstruct side by side, since reconstruction shares the global parameters among clients.

    Args:
      block: clients side by side, each with its own copy. By default as many as fit their copies of the model's dense
        global parameters into a core's cache, at most `MOST_IN_BLOCK`; on an accelerator, into a quarter of its memory.
      jax_devices: how many of the devices that JAX sees in this process (in each, if there are several); all by
        default.
      sharing: clients side by side that share the global parameters, a multiple of `block`. By default the same as
        `block` if that is given; else up to `MOST_SHARING`, as long as their local parameters are small.
      model: its size decides the defaults.
      alone: of several processes (`start_hosts`), use the devices of this one only, so that it need not wait for the
        others. Reconstruction for serving does.

    Example:
      >>> import fedrecon as fr
      >>> layout = fr.layout(block=2, jax_devices=1)
      >>> layout.block, layout.jax_devices
      (2, 1)
    """
    mesh = _mesh(jax_devices, alone)
    chosen = _default_blocks(model) if block is None and model is not None else (block, block)
    block = MOST_IN_BLOCK if chosen[0] is None else chosen[0]
    check_number("block", block, least=1)
    sharing = (chosen[1] or block) if sharing is None else sharing
    if sharing < 1 or sharing % block:
        raise ValueError(f"`sharing` must be a multiple of `block` (got sharing={sharing}, block={block})")
    return Layout(mesh, block, sharing)


def _mesh(jax_devices: int | None, alone: bool) -> Mesh:
    """Return devices along one axis, those of a process next to each other."""
    devices = sorted(jax.local_devices() if alone else jax.devices(), key=lambda d: (d.process_index, d.id))
    by_process = np.array(devices).reshape(1 if alone else jax.process_count(), -1)
    most = by_process.shape[1]
    if jax_devices is not None and not 1 <= jax_devices <= most:
        raise ValueError(
            f"`jax_devices` must be between 1 and {most} (got {jax_devices}); on a CPU, call "
            "fedrecon.start_jax_devices(n) before anything else uses JAX"
        )
    return Mesh(by_process[:, :jax_devices].reshape(-1), (AXIS,), axis_types=(AxisType.Auto,))


def _default_blocks(model: Model) -> tuple[int, int]:
    """Return `block` and `sharing` for a model's size and the devices that there are."""
    shapes, lookups = flatten(shapes_of(model.init_global))[0], lookup_groups(model)
    dense = nbytes({path: leaf for path, leaf in shapes.items() if path not in lookups})
    device, memory = jax.local_devices()[0], None
    if device.platform != "cpu":
        memory = (device.memory_stats() or {}).get("bytes_limit", SMALL_ACCELERATOR)  # that JAX may use
    return blocks_for(dense, nbytes(shapes_of(model.init_local)), memory)


def blocks_for(dense: int, local: int, memory: int | None) -> tuple[int, int]:
    """Return `block` and `sharing`: both the same unless copies are what keeps blocks small.

    Args:
      dense: bytes of the global parameters that every client copies.
      local: bytes of a client's local parameters.
      memory: bytes of an accelerator's memory, of which a quarter is for blocks; None on a CPU, where its cache
        decides, since wider blocks win empty there.
    """
    if memory is None:
        copies, shared, most, most_sharing = BLOCK_BYTES, SHARING_BYTES, MOST_IN_BLOCK, MOST_SHARING
    else:
        copies, shared = memory // 4 // COPIES, memory // 4
        most = most_sharing = MOST_ON_ACCELERATOR
    block = int(np.clip(copies // max(dense, 1), 1, most))
    if block == most:
        return block, block
    sharing = min(shared // max(local, 1), most_sharing)
    return block, max(sharing // block, 1) * block


# (state, client_state, cohorts, key, first, number) -> (state, client_state, report with rounds first)
Rounds = Callable[[ServerState, Any, Cohort | Drawn, Array, int, int], tuple[ServerState, Any, Report]]
Pick = Callable[[Any], Cohort]  # clients of a block, as they are given to a call -> the same, packed


@functools.lru_cache(maxsize=4)
def compile_rounds(algorithm: Algorithm, layout: Layout) -> Rounds:
    """Compile the rounds of an algorithm, once for each algorithm (by identity) and layout.

    Args:
      algorithm: what is trained.
      layout: on which JAX devices and in what blocks clients run.

    Returns:
      `(state, client_state, cohorts, key, first, number) -> (state, client_state, report)`, which runs `number` rounds
      from round `first` on. Their cohorts are packed together, in every leaf the first dimension the round, the
      second the client; or they are drawn from a population that is on the devices. Any `number` up to how many there
      are runs the same compiled code. Randomness depends on the key and the round's number only, so the results do
      not depend on how rounds are grouped into calls. Each of several processes gives its own clients
      (`Layout.local`), and gets what all of them keep.
    """

    def rounds(state: ServerState, client_state: Any, cohorts: Any, key: Array, first: Array, number: Array) -> Any:
        drawn = isinstance(cohorts, Drawn)
        indices = cohorts.places if drawn else cohorts  # (rounds, clients, ...)
        most = jax.tree.leaves(indices)[0].shape[0]
        shapes = jax.eval_shape(lambda: finish_round(algorithm, state, empty_total(algorithm, state), key)[1])
        reports = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), shapes)

        def pick(block: Any) -> Cohort:
            if not drawn:
                return block
            return jax.tree.map(lambda leaf: leaf.at[block].get(mode="promise_in_bounds"), cohorts.population)

        def body(carry: Any) -> Any:
            r, state, client_state, reports = carry
            cohort = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, r, keepdims=False), indices)
            round_key = jax.random.fold_in(key, first + r)
            total, client_state = _run_blocks(algorithm, state, (cohort, client_state), pick, round_key, layout)
            state, report = finish_round(algorithm, state, sum_over_devices(total), round_key)
            reports = jax.tree.map(lambda rows, row: rows.at[r].set(row), reports, report)
            return r + 1, state, client_state, reports

        start = (jnp.int32(0), state, client_state, reports)
        return jax.lax.while_loop(lambda carry: carry[0] < number, body, start)[1:]

    whole, by_client = PartitionSpec(), PartitionSpec(AXIS)

    @jax.jit
    def compiled(state: ServerState, client_state: Any, cohorts: Cohort | Drawn, *arguments: Any) -> Any:
        packed = PartitionSpec(None, AXIS)
        spec = Drawn(whole, packed) if isinstance(cohorts, Drawn) else packed
        on_devices = _on_devices(rounds, layout, (whole, by_client, spec, *[whole] * 3), (whole, by_client, whole))
        return on_devices(state, client_state, cohorts, *arguments)

    if layout.processes == 1:
        return compiled

    def run_in_processes(state: ServerState, client_state: Any, cohorts: Cohort | Drawn, *arguments: Any) -> Any:
        local = make_global(client_state, layout.mesh, AXIS), make_global(cohorts, layout.mesh, None, AXIS)
        state, client_state, report = compiled(state, *local, *arguments)
        return state, gather(client_state), report

    return run_in_processes


def _on_devices(function: Callable[..., Any], layout: Layout, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return a function that runs on every device of a layout, with the device's part of the arguments."""
    # Values that vary over devices are not checked: blocks start from zeros that do not vary yet.
    return jax.shard_map(function, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _run_blocks(
    algorithm: Algorithm, state: ServerState, clients: tuple[Any, Any], pick: Pick, key: Array, layout: Layout
) -> tuple[Total, Any]:
    """Run this device's clients a block at a time, adding uploads as they come so that few are in memory at once."""
    message, stages = algorithm.message(state), algorithm.method.stages

    def add_block(client: Client, total: Total, block: tuple[Cohort, Any]) -> tuple[Total, Any]:
        cohort, client_state = block
        upload, client_state = client(message.method, client_state, cohort, key)
        summand = encode(algorithm, message, upload, client_keys(key, cohort.identity))
        return add(total, summand), client_state

    def run(total: Total, block: tuple[Any, Any]) -> tuple[Total, Any]:
        return add_block(algorithm.method.client, total, (pick(block[0]), block[1]))

    empty, wide = empty_total(algorithm, state), layout.sharing_block(jax.tree.leaves(clients)[0].shape[0])
    if stages is None or wide == layout.block:
        return _scan_blocks(run, empty, clients, layout.block)

    def run_stages(total: Total, block: tuple[Any, Any]) -> tuple[Total, Any]:
        cohort, client_state = pick(block[0]), block[1]
        prepared = stages.prepare(message.method, client_state, cohort, key)
        return _scan_blocks(functools.partial(add_block, stages.finish), total, (cohort, prepared), layout.block)

    return _scan_blocks(run_stages, empty, clients, wide)


def _scan_blocks(function: Callable[..., Any], carry: Any, clients: Any, block: int) -> tuple[Any, Any]:
    """Scan over blocks of clients, which are first in every leaf, also of what is returned besides the carry."""
    blocks = jax.tree.map(lambda x: x.reshape(x.shape[0] // block, block, *x.shape[1:]), clients)
    carry, results = jax.lax.scan(function, carry, blocks)
    return carry, jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), results)


def sum_over_devices(total: Total) -> Total:
    """Add up the sums of all devices; every device gets the same bits.

    Devices wait for each other as long for one number as for a hundred kilobytes, so small arrays of one type are
    summed as one array.
    """
    leaves, structure = jax.tree.flatten(total)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):  # in the same order in every process
        if small := [k for k, leaf in enumerate(leaves) if leaf.dtype == dtype and leaf.size <= SMALL_ARRAY]:
            flat, unravel = jax.flatten_util.ravel_pytree([leaves[k] for k in small])
            for k, leaf in zip(small, unravel(jax.lax.psum(flat, AXIS)), strict=True):
                leaves[k] = leaf
    large = [leaf if leaf.size <= SMALL_ARRAY else jax.lax.psum(leaf, AXIS) for leaf in leaves]
    return jax.tree.unflatten(structure, large)


def compile_each(function: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Compile a function of clients so that every device runs its clients a block at a time.

    Args:
      function: `(what all clients share, clients) -> result`; `clients` and the result have the clients first in every
        leaf. Each of several processes gives its own clients (`Layout.local`), and gets the results of all.
      layout: on which JAX devices and in what blocks clients run.
    """

    def run(shared: Any, clients: Any) -> Any:
        wide = layout.sharing_block(jax.tree.leaves(clients)[0].shape[0])
        return _scan_blocks(lambda carry, block: (carry, function(shared, block)), (), clients, wide)[1]

    by_client = PartitionSpec(AXIS)
    compiled = jax.jit(_on_devices(run, layout, (PartitionSpec(), by_client), by_client))
    if layout.processes == 1:
        return compiled
    return lambda shared, clients: gather(compiled(shared, make_global(clients, layout.mesh, AXIS)))


def put_on_devices(tree: Any, layout: Layout) -> Any:
    """Copy arrays to all devices of a layout.

    Args:
      tree: the arrays.
      layout: on which JAX devices and in what blocks clients run.
    """
    if layout.processes > 1:
        return make_global(tree, layout.mesh)
    return jax.device_put(tree, NamedSharding(layout.mesh, PartitionSpec()))
