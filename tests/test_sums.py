"""Sums over devices: every device gets the sum of every array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import fedrecon as fr
from fedrecon._src.core.upload import RowChanges, Summand, Total, add
from fedrecon._src.simulation.engine import SMALL_ARRAY, sum_over_devices
from fedrecon._src.simulation.multihost import AXIS

DEVICES = 4
shapes = st.sampled_from([(), (3,), (2, 2), (SMALL_ARRAY + 1,), (SMALL_ARRAY, 2), (40, 9, 3), (1, SMALL_ARRAY + 5)])
arrays = st.lists(st.tuples(shapes, st.sampled_from([np.float32, np.uint32, np.int32])), max_size=5)


def compile_sum(total):
    """Return a compiled sum over four devices; `total` has the devices first in every leaf."""

    def run(total):
        total = sum_over_devices(jax.tree.map(lambda leaf: leaf[0], total))
        return jax.tree.map(lambda leaf: leaf[None], total)

    every = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(run, mesh=fr.layout(1, DEVICES).mesh, in_specs=every, out_specs=every, check_vma=False)
    )


@settings(max_examples=8, deadline=None)
@given(parts=arrays, scalars=arrays, seed=st.integers(0, 99))
def test_every_device_gets_the_sum_of_every_array(parts, scalars, seed):
    rng = np.random.default_rng(seed)

    def draw(specs):
        return {str(k): rng.integers(0, 9, (DEVICES, *shape)).astype(dtype) for k, (shape, dtype) in enumerate(specs)}

    total = Total({"delta": draw(parts)}, draw(scalars))
    summed = compile_sum(total)(total)
    assert jax.tree.structure(summed) == jax.tree.structure(total)
    for leaf, terms in zip(jax.tree.leaves(summed), jax.tree.leaves(total), strict=True):
        assert (leaf.dtype, leaf.shape) == (terms.dtype, terms.shape)
        np.testing.assert_array_equal(leaf, np.broadcast_to(terms.sum(0, dtype=terms.dtype), terms.shape))


def test_small_arrays_of_one_type_are_summed_as_one():
    table, small = jnp.zeros((DEVICES, 400, 5)), jnp.zeros((DEVICES, 3))
    total = Total({"delta": {"table": table, "bias": small}}, {"weight": small, "examples": small})
    assert str(jax.make_jaxpr(compile_sum(total))(total)).count("psum") == 2


@pytest.mark.parametrize("rows", [True, False], ids=["by rows", "whole"])
def test_clients_add_their_scaled_changes(rows):
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
    total = add(Total({"delta": {"table": jnp.zeros((4, 2))}}, {}), summand).parts["delta"]["table"]
    np.testing.assert_allclose(total, whole[0] + 2 * whole[1])
