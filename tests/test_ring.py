"""Integers of a ring: the error stays within its bound, and nothing overflows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrecon._src.privacy import ring

limits = st.floats(1e-3, 1e6)


@given(limits, st.integers(1, 10_000), st.sampled_from([32, 64]))
def test_the_sum_of_the_largest_values_fits(limit, clients, bits):
    grid = ring.grid(limit, clients, bits=bits)
    largest = int(ring.quantise(grid, np.array([limit]))[0])
    assert largest <= grid.levels
    assert clients * grid.levels < 2 ** (bits - 1)
    # And the grid is the finest: with half the step it would not fit.
    room = 2 ** min(bits - 1, 53) - 1
    assert clients * grid._replace(step=grid.step / 2).levels > room


@given(limits, st.integers(1, 300), st.sampled_from([20, 24, 32, 64]), st.integers(0, 2**32))
def test_sums_are_off_by_half_a_step_a_client_at_most(limit, clients, bits, seed):
    values = np.random.default_rng(seed).uniform(-limit, limit, (clients, 7))
    grid = ring.grid(limit, clients, bits=bits)
    found = ring.restore(grid, ring.quantise(grid, values).sum(0, dtype=ring.WIDTHS[bits][1]))
    rounding = 1e-15 * clients * limit  # of the exact sum in double precision
    assert np.abs(found - values.sum(0)).max() <= clients * grid.step / 2 + rounding


@pytest.mark.parametrize("sign", [1, -1])
def test_all_at_the_limit_is_no_overflow(sign):
    grid = ring.grid(3.7, 1000)
    total = ring.quantise(grid, np.full((1000, 1), sign * 3.7)).sum(0, dtype=np.uint32)
    assert ring.restore(grid, total) == pytest.approx(sign * 3700, abs=1000 * grid.step / 2)


def test_what_is_beyond_the_limit_counts_as_the_limit():
    grid = ring.grid(1.0, 10)
    found = ring.restore(grid, ring.quantise(grid, np.array([5.0, -1e30, 0.25])))
    assert found.tolist() == [1.0, -1.0, 0.25]


def test_the_step_by_hand():
    # 4 clients share 2**31 - 1 integers: 536870911 each. 1 / 2**-28 = 268435456 fits, 2**29 does not.
    assert ring.grid(1.0, 4).step == 2.0**-28
    assert ring.grid(1.0, 4).levels == 2**28 + 64  # the 64 are for a limit rounded up in single precision


@settings(deadline=None, max_examples=30)
@given(limits, st.integers(1, 100))
def test_jax_does_not_send_more_than_the_largest_integer_either(limit, clients):
    grid = ring.grid(limit, clients)
    sent = ring.quantise(grid, jnp.array([limit, 2 * limit, -limit], jnp.float32), jnp)
    assert np.abs(np.asarray(sent).astype(np.int32).astype(np.int64)).max() <= grid.levels


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 50))
def test_jax_in_single_precision_gives_the_same_integers(seed, clients):
    values = np.random.default_rng(seed).normal(0, 1, 40).astype(np.float32)
    grid = ring.grid(2.5, clients)
    compiled = jax.jit(lambda x: ring.quantise(grid, x, jnp))(values)
    assert compiled.dtype == jnp.uint32
    assert np.asarray(compiled).tolist() == ring.quantise(grid, values).tolist()


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(0, 2**32))
def test_a_weighted_mean_stays_within_its_bound_and_whole_weights_are_exact(weights, seed):
    vectors = np.random.default_rng(seed).uniform(-1, 1, (len(weights), 5))
    grid = ring.grid(200.0, len(weights))  # of entries up to 1 times weights up to 200, and of the weights
    sums = ring.restore(grid, ring.quantise(grid, vectors * np.array(weights)[:, None]).sum(0, dtype=np.uint32))
    weight = ring.restore(grid, ring.quantise(grid, np.array(weights)).sum(dtype=np.uint32))
    assert weight == sum(weights)
    exact = np.average(vectors, axis=0, weights=weights)
    assert np.abs(sums / weight - exact).max() <= len(weights) * grid.step / 2 / weight * (1 + 1e-9)


def test_negative_sums_come_back_from_the_ring_in_jax_as_in_numpy():
    grid = ring.grid(2.0, 16)
    values = np.linspace(-2, 2, 33, dtype=np.float32)
    total = (ring.quantise(grid, values) * np.uint32(15)).astype(np.uint32)
    compiled = jax.jit(lambda x: ring.restore(grid, x, jnp))(total)
    assert np.asarray(compiled).tolist() == ring.restore(grid, total).astype(np.float32).tolist()
    assert np.asarray(compiled) == pytest.approx(15 * values, abs=15 * grid.step / 2, rel=1e-6)


def test_rounding_lengthens_a_vector_by_no_more_than_the_norm_says():
    grid = ring.grid(1.0, 2**20)
    rng = np.random.default_rng(0)
    for _ in range(20):
        vector = rng.normal(size=500)
        vector /= np.linalg.norm(vector)
        steps = ring.quantise(grid, vector).astype(np.int32)
        assert np.linalg.norm(steps.astype(float)) <= grid.norm(1.0, 500)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"limit": 0.0}, "`limit`"),
        ({"limit": float("nan")}, "`limit`"),
        ({"clients": 0}, "`clients`"),
        ({"bits": 8}, "`bits`"),
        ({"clients": 2**31}, "32 bits cannot hold the sum of 2147483648 clients; use more bits"),
    ],
)
def test_grids_that_cannot_be_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ring.grid(**({"limit": 1.0, "clients": 10} | change))
