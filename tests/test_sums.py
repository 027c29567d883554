"""Sums over devices: whatever travels together, everybody gets the sum of everything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import fedrecon as fr
from fedrecon._src.core.upload import RowChanges, Summand, Total, add
from fedrecon._src.simulation.multihost.host_arrays import AXIS
from fedrecon._src.simulation.multihost.host_sums import SMALL, Exchange

DEVICES = 4
shapes = st.sampled_from([(), (3,), (2, 2), (SMALL + 1,), (SMALL, 2), (40, 9, 3), (1, SMALL + 5)])
arrays = st.lists(st.tuples(shapes, st.sampled_from([np.float32, np.uint32, np.int32])), max_size=5)


def exchanged(total, processes=1):
    """Add up sums of four devices; `total` has the devices first in every leaf."""

    def run(mine):
        mine = jax.tree.map(lambda leaf: leaf[0], mine)
        exchange = Exchange(mine, DEVICES, processes)
        room = exchange.with_room(jax.tree.map(jnp.zeros_like, mine))
        loaded = jax.tree.map(lambda a, b: a.at[tuple(map(slice, b.shape))].set(b), room, mine)
        return jax.tree.map(lambda leaf: leaf[None], exchange.add_up(loaded))

    every = PartitionSpec(AXIS)
    call = jax.shard_map(run, mesh=fr.layout(1, DEVICES).mesh, in_specs=every, out_specs=every, check_vma=False)
    return jax.jit(call)(total)


@settings(max_examples=8, deadline=None)
@given(parts=arrays, scalars=arrays, seed=st.integers(0, 99), processes=st.sampled_from([1, 2]))
def test_every_device_gets_the_sum_of_every_array(parts, scalars, seed, processes):
    rng = np.random.default_rng(seed)

    def drawn(which):
        return {str(k): rng.integers(0, 9, (DEVICES, *shape)).astype(dtype) for k, (shape, dtype) in enumerate(which)}

    total = Total({"delta": drawn(parts)}, drawn(scalars))
    found = exchanged(total, processes)
    assert jax.tree.structure(found) == jax.tree.structure(total)
    for leaf, given_ in zip(jax.tree.leaves(found), jax.tree.leaves(total), strict=True):
        assert (leaf.dtype, leaf.shape) == (given_.dtype, given_.shape)
        np.testing.assert_array_equal(leaf, np.broadcast_to(given_.sum(0, dtype=given_.dtype), given_.shape))


def test_small_arrays_travel_with_a_large_one_of_their_type_that_has_short_rows():
    total = Total({"delta": {"table": jnp.zeros((400, 5)), "wide": jnp.zeros((2, 5000))}}, {"weight": jnp.zeros(())})
    room = Exchange(total, 2, 1).with_room(total)
    assert room.parts["delta"]["table"].shape == (401, 5)
    assert room.parts["delta"]["wide"].shape == (2, 5000)
    exchange = Exchange(total, DEVICES, 1)
    run = functools.partial(jax.shard_map, mesh=fr.layout(1, DEVICES).mesh, in_specs=PartitionSpec(), check_vma=False)
    text = str(jax.make_jaxpr(run(lambda t: exchange.add_up(exchange.with_room(t)), out_specs=PartitionSpec()))(total))
    assert text.count("psum") == 2


@pytest.mark.parametrize("which", ["wide rows", "scalars"])
def test_small_arrays_travel_by_themselves_if_nothing_else_should_carry_them(which):
    """A row more of two would be half as much again; and clients add to scalars without room."""
    parts = {"wide": jnp.zeros((2, 5000))} if which == "wide rows" else {"w": jnp.zeros(3)}
    scalars = {"weight": jnp.zeros(())} | ({} if which == "wide rows" else {"metrics": jnp.zeros((2000, 2))})
    total = Total({"delta": parts}, scalars)
    found = Exchange(total, 2, 1).with_room(total)
    assert [leaf.shape for leaf in jax.tree.leaves(found)] == [leaf.shape for leaf in jax.tree.leaves(total)]


def test_one_device_exchanges_nothing():
    total = Total({"delta": {"table": jnp.ones((400, 5))}}, {"weight": jnp.ones(())})
    exchange = Exchange(total, 1, 1)
    assert exchange.with_room(total) is total
    assert exchange.add_up(total) is total


@pytest.mark.parametrize("rows", [True, False], ids=["by rows", "whole"])
def test_clients_add_to_a_sum_with_room_and_leave_the_room_alone(rows):
    values = jnp.arange(12.0).reshape(2, 3, 2)
    whole = jnp.zeros((2, 4, 2)).at[:, jnp.array([0, 1, 3])].set(values)
    change = RowChanges(jnp.array([[0, 1, 3]] * 2), values, jnp.array([3, 3]), 4) if rows else whole
    if rows:  # lists of rows are as long as a chunk
        change = jax.tree.map(
            lambda leaf: jnp.pad(leaf, [(0, 0), (0, 29)] + [(0, 0)] * (leaf.ndim - 2)) if leaf.ndim > 1 else leaf,
            change,
        )
    scale = jnp.array([1.0, 2.0])
    summand = Summand({"delta": {"table": change}}, scale, scale, jnp.zeros((2, 1, 2)), {}, {})
    found = add(Total({"delta": {"table": jnp.zeros((6, 2))}}, {}), summand).parts["delta"]["table"]
    np.testing.assert_allclose(found[:4], whole[0] + 2 * whole[1])
    np.testing.assert_array_equal(found[4:], 0)
