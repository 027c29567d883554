import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrecon._src.client.batches import Batches, fold_batches
from fedrecon._src.core.cohort import Examples

quick = settings(max_examples=12, deadline=None)
LENGTH = 8  # always the same, as are the number of clients and some sizes of batches: every shape is compiled by itself
sizes = st.sampled_from([1, 3, 9])


def examples_of(counts, length, width=2):
    """Examples that tell their client and place, padded with -1, which no batch may show."""
    column = np.full((len(counts), length, width), -1.0, np.float32)
    for client, count in enumerate(counts):
        column[client, :count] = 100 * client + np.arange(count)[:, None]
    return Examples({"x": column}, jnp.asarray(counts, jnp.int32))


@pytest.mark.parametrize(("epochs", "cyclic"), [(1, False), (2, False), (1, True)])
@quick
@given(counts=st.lists(st.integers(1, LENGTH), min_size=3, max_size=3), size=sizes)
def test_a_batch_is_the_clients_own_examples_in_order(epochs, cyclic, counts, size):
    examples = examples_of(counts, LENGTH)
    batches = Batches(examples, size, epochs=epochs, cyclic=cyclic)
    columns = batches.arrange(examples.columns)
    assert batches.number.tolist() == [-(-count // size) for count in counts]
    for client, count in enumerate(counts):
        number = -(-count // size)
        for t in range(number * epochs):
            places = (t % number) * size + np.arange(size)
            own = places < count
            padding = places % count if cyclic else count - 1
            found = np.asarray(batches.take(columns, jnp.int32(t))["x"])[client]
            np.testing.assert_array_equal(found[:, 0], 100 * client + np.where(own, places, padding))
            np.testing.assert_array_equal(np.broadcast_to(batches.mask(jnp.int32(t)), (len(counts), size))[client], own)


@quick
@given(counts=st.lists(st.integers(0, LENGTH), min_size=3, max_size=3), size=sizes)
def test_every_example_is_folded_once(counts, size):
    examples = examples_of(counts, LENGTH)

    def add(total, batch, mask, held):
        return total + jnp.sum(jnp.where(mask, batch["x"][:, 0], 0)) + held

    found = fold_batches(add, jnp.zeros(len(counts)), jnp.zeros(len(counts)), examples, size)
    expected = [100 * client * count + count * (count - 1) / 2 for client, count in enumerate(counts)]
    np.testing.assert_allclose(found, expected)
