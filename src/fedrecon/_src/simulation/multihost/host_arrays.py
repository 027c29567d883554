"""Arrays that span processes: each brings the clients it has packed, and gets what belongs to all."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "clients"


@functools.cache
def all_devices() -> Mesh:
    """Return all devices of all processes in one axis, those of a process side by side."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def share(clients: int) -> slice:
    """Return this process's part of `clients`, which are in the order of a layout and a multiple of the devices."""
    each = clients // jax.process_count()
    return slice(each * jax.process_index(), each * (jax.process_index() + 1))


def spread(tree: Any, axis: int = 0) -> Any:
    """Make arrays that all processes' clients are in, `axis` in every leaf, from those of this process's clients."""
    if jax.process_count() == 1:
        return tree
    sharding = NamedSharding(all_devices(), PartitionSpec(*[None] * axis, AXIS))

    def one(leaf: Any) -> jax.Array:
        shape = list(leaf.shape)
        shape[axis] *= jax.process_count()
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), tuple(shape))

    return jax.tree.map(one, tree)


def replicate(tree: Any) -> Any:
    """Copy arrays, the same in every process, to all devices of all processes."""
    sharding = NamedSharding(all_devices(), PartitionSpec())

    def one(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                return leaf  # it spans the processes already
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(one(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(one, tree)


def gather(tree: Any) -> Any:
    """Return arrays with all processes' clients in every process."""
    if jax.process_count() > 1 and jax.tree.leaves(tree):
        tree = _everywhere()(tree)
    return jax.tree.map(np.asarray, tree)


def from_first(tree: Any) -> Any:
    """Return the first process's arrays, bit by bit, in every process; the others give some of the same shapes."""
    return jax.tree.map(_from_first, tree)


def _from_first(leaf: Any) -> np.ndarray:
    value = np.ascontiguousarray(leaf)
    words = np.zeros(-(-value.nbytes // 4), np.uint32)  # of the bits: a sum would lose the sign of a zero
    if jax.process_index() == 0:
        words.view(np.uint8)[: value.nbytes] = value.reshape(-1).view(np.uint8)
    mine = np.zeros((len(jax.local_devices()), words.size), np.uint32)
    mine[0] = words
    found = np.asarray(_sum()(spread(mine)))[0]
    return found.view(np.uint8)[: value.nbytes].view(value.dtype).reshape(np.shape(leaf))


@functools.cache
def _everywhere() -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(all_devices(), PartitionSpec()))


@functools.cache
def _sum() -> Any:
    return jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, AXIS),
            mesh=all_devices(),
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
