"""Sums over all devices: one exchange per round, in which small arrays travel with the largest one."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon.cluster.arrays import AXIS
from fedrecon.upload import Total

SMALL = 2**10  # numbers: an array up to this size does not travel by itself


class Exchange:
    """How the devices of a round exchange their sums.

    Devices wait for each other at every array that they exchange: for a few numbers as long as for a hundred
    kilobytes. So the largest array has some rows more than it needs, and small arrays of its type travel there.
    """

    def __init__(self, total: Total, devices: int, processes: int):
        """Decide which arrays travel together.

        Args:
          total: a sum, or the shapes of one.
          devices: how many there are in all.
          processes: how many processes have them.
        """
        self._devices, self._processes = devices, processes
        leaves = jax.tree.leaves(total)
        self._shapes = [leaf.shape for leaf in leaves]
        self._groups = [_Group(leaves, dtype) for dtype in dict.fromkeys(leaf.dtype for leaf in leaves)]

    def with_room(self, total: Total) -> Total:
        """Return an empty sum whose largest arrays have room for the small ones; `upload.add` adds to it.

        Args:
          total: the empty sum.
        """
        if self._devices == 1:
            return total
        leaves, structure = jax.tree.flatten(total)
        for group in self._groups:
            if group.carrier is not None:
                room = [(0, group.rows)] + [(0, 0)] * (leaves[group.carrier].ndim - 1)
                leaves[group.carrier] = jnp.pad(leaves[group.carrier], room)
        return jax.tree.unflatten(structure, leaves)

    def add_up(self, total: Total) -> Total:
        """Add up the sums of all devices; all get the same bits.

        Args:
          total: this device's sum, with room.
        """
        if self._devices == 1:
            return total
        leaves, structure = jax.tree.flatten(total)
        for group in self._groups:
            group.load(leaves)
            for together in group.exchanged(self._processes):
                self._sum(leaves, together)
            group.unload(leaves, self._shapes)
        return jax.tree.unflatten(structure, leaves)

    def _sum(self, leaves: list[Any], places: list[int]) -> None:
        """Replace some arrays by their sums, exchanged as one array."""
        shapes = [leaves[k].shape for k in places]
        joined = jnp.concatenate([leaves[k].ravel() for k in places]) if len(places) > 1 else leaves[places[0]]
        summed = self._over_devices(joined)
        parts = jnp.split(summed, np.cumsum([math.prod(s) for s in shapes])[:-1]) if len(places) > 1 else [summed]
        for k, part, shape in zip(places, parts, shapes, strict=True):
            leaves[k] = part.reshape(shape)

    def _over_devices(self, values: Array) -> Array:
        """Return the sum of an array over all devices.

        Between processes, devices exchange arrays in pairs, then pairs of pairs: gloo's own sum takes many small
        messages, and five times as long on two processes.
        """
        if self._processes == 1 or self._devices & (self._devices - 1):
            return jax.lax.psum(values, AXIS)
        for step in range(self._devices.bit_length() - 1):
            pairs = [(k, k ^ (1 << step)) for k in range(self._devices)]
            values += jax.lax.ppermute(values, AXIS, pairs)
        return values


class _Group:
    """The arrays of one type: small ones, which travel at the end of the largest, and others."""

    def __init__(self, leaves: list[Any], dtype: Any):
        mine = [k for k, leaf in enumerate(leaves) if leaf.dtype == dtype]
        self._small = [k for k in mine if leaves[k].size <= SMALL]
        self._large = [k for k in mine if leaves[k].size > SMALL]
        self.carrier = max(self._large, key=lambda k: leaves[k].size) if self._large and self._small else None
        self.rows = 0
        if self.carrier is not None:
            width = math.prod(leaves[self.carrier].shape[1:])
            self.rows = -(-sum(leaves[k].size for k in self._small) // width)

    def exchanged(self, processes: int) -> list[list[int]]:
        """Return which arrays are exchanged as one. Between processes all are: waiting takes longer than a copy."""
        if self.carrier is None and self._small:
            return [self._small]
        return [self._large] if processes > 1 else [[k] for k in self._large]

    def load(self, leaves: list[Any]) -> None:
        """Put the small arrays into the room at the end of the largest."""
        if self.carrier is None:
            return
        largest = leaves[self.carrier]
        joined = jnp.concatenate([leaves[k].ravel() for k in self._small])
        room = (self.rows, *largest.shape[1:])
        joined = jnp.pad(joined, (0, math.prod(room) - joined.size)).reshape(room)
        leaves[self.carrier] = jax.lax.dynamic_update_slice_in_dim(largest, joined, len(largest) - self.rows, 0)

    def unload(self, leaves: list[Any], shapes: list[tuple[int, ...]]) -> None:
        """Take the small arrays out again."""
        if self.carrier is None:
            return
        largest = leaves[self.carrier]
        rows, begin = shapes[self.carrier][0], 0
        joined, leaves[self.carrier] = largest[rows:].ravel(), largest[:rows]
        for k in self._small:
            end = begin + math.prod(shapes[k])
            leaves[k] = joined[begin:end].reshape(shapes[k])
            begin = end
