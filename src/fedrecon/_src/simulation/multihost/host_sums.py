"""Sums over all devices: one exchange per round, in which small arrays travel with a large one."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.upload import Total
from fedrecon._src.simulation.multihost.host_arrays import AXIS

SMALL = 2**10  # numbers: an array up to this size does not travel by itself
MOST_ROOM = 1 / 16  # of an array: with more, it would be exchanged for nothing


class Exchange:
    """How the devices of a round exchange their sums.

    With every array that they exchange, devices wait for each other: for a few numbers as long as for a hundred
    kilobytes. So a large array has some rows more than it needs, and small arrays of its type travel there.
    """

    def __init__(self, total: Total, devices: int, processes: int):
        """Decide which arrays travel together.

        Args:
          total: a sum, or the shapes of one.
          devices: how many there are in all.
          processes: how many processes have them.
        """
        self._devices, self._processes = devices, processes
        leaves, parts = jax.tree.leaves(total), len(jax.tree.leaves(total.parts))
        self._shapes = [leaf.shape for leaf in leaves]
        self._groups = [_Group(leaves, dtype, parts) for dtype in dict.fromkeys(leaf.dtype for leaf in leaves)]

    def with_room(self, total: Total) -> Total:
        """Return a sum of nothing in which some arrays have room for the small ones; `upload.add` adds to it.

        Args:
          total: the sum of nothing.
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
        messages, and .2 to .4 ms longer between two processes.
        """
        if self._processes == 1 or self._devices & (self._devices - 1):
            return jax.lax.psum(values, AXIS)
        for step in range(self._devices.bit_length() - 1):
            pairs = [(k, k ^ (1 << step)) for k in range(self._devices)]
            values += jax.lax.ppermute(values, AXIS, pairs)
        return values


class _Group:
    """The arrays of one type: small ones, which travel at the end of a large one if that has short rows, and others.

    Attributes:
      carrier: which array the small ones travel with; None if they travel by themselves.
      rows: how many rows it has for them.
    """

    def __init__(self, leaves: list[Any], dtype: Any, parts: int):
        """Choose among the arrays of a type; only the first `parts` of all may have room, as `upload.add` expects."""
        mine = [k for k, leaf in enumerate(leaves) if leaf.dtype == dtype]
        self._small = [k for k in mine if leaves[k].size <= SMALL]
        self._large = [k for k in mine if leaves[k].size > SMALL]
        self.carrier: int | None = None
        self.rows = 0
        number = sum(leaves[k].size for k in self._small)
        width = {k: math.prod(leaves[k].shape[1:]) for k in self._large if k < parts}
        room = {k: -(-number // width[k]) * width[k] for k in width}
        if self._small and room and room[best := min(room, key=room.__getitem__)] <= MOST_ROOM * leaves[best].size:
            self.carrier, self.rows = best, room[best] // width[best]

    def exchanged(self, processes: int) -> list[list[int]]:
        """Return which arrays are exchanged as one. Between processes all are: waiting takes longer than a copy."""
        alone = self._small if self.carrier is None else []
        if processes > 1:
            return [[*self._large, *alone]]
        return [[k] for k in self._large] + ([alone] if alone else [])

    def load(self, leaves: list[Any]) -> None:
        """Put the small arrays into the room of the carrier."""
        if self.carrier is None:
            return
        carrier = leaves[self.carrier]
        joined = jnp.concatenate([leaves[k].ravel() for k in self._small])
        room = (self.rows, *carrier.shape[1:])
        joined = jnp.pad(joined, (0, math.prod(room) - joined.size)).reshape(room)
        leaves[self.carrier] = jax.lax.dynamic_update_slice_in_dim(carrier, joined, len(carrier) - self.rows, 0)

    def unload(self, leaves: list[Any], shapes: list[tuple[int, ...]]) -> None:
        """Take the small arrays out again."""
        if self.carrier is None:
            return
        carrier, rows, begin = leaves[self.carrier], shapes[self.carrier][0], 0
        joined, leaves[self.carrier] = carrier[rows:].ravel(), carrier[:rows]
        for k in self._small:
            end = begin + math.prod(shapes[k])
            leaves[k] = joined[begin:end].reshape(shapes[k])
            begin = end
