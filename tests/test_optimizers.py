import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr

GRADIENTS = np.array([[0.5, -2.0, 0.0], [1.5, -1.0, 0.3], [-0.2, 3.0, -0.3]])


def yogi_by_hand(rate, b1, b2, eps, start):
    """m = b1 m + (1-b1) g; v -= (1-b2) sign(v - g^2) g^2; both corrected for bias; x -= rate m / (sqrt(v) + eps)."""
    x, m, v = np.zeros(3), np.full(3, start), np.full(3, start)
    for t, g in enumerate(GRADIENTS, 1):
        m = b1 * m + (1 - b1) * g
        v = v - (1 - b2) * np.sign(v - g**2) * g**2
        x = x - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return x


@pytest.mark.parametrize(
    "settings",
    [{}, {"b1": 0.5, "b2": 0.9, "eps": 0.1}, {"initial_accumulator": 1e-6}],
    ids=["defaults", "others", "optax's start"],
)
def test_three_steps_of_yogi_are_those_computed_by_hand(settings):
    optimizer = fr.optimizers.fedyogi(0.1, **settings)
    x = jnp.zeros(3)
    state = optimizer.init(x)
    for gradient in GRADIENTS:
        updates, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, x)
        x = optax.apply_updates(x, updates)
    full = {"b1": 0.9, "b2": 0.99, "eps": 1e-3, "initial_accumulator": 0.0} | settings
    np.testing.assert_allclose(
        x, yogi_by_hand(0.1, full["b1"], full["b2"], full["eps"], full["initial_accumulator"]), 1e-5, 1e-7
    )


def test_the_accumulators_of_yogi_start_at_zero():
    state = fr.optimizers.fedyogi(0.1).init({"w": jnp.ones(2)})
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(state))


def test_three_steps_of_adagrad_are_those_computed_by_hand():
    optimizer = fr.optimizers.fedadagrad(0.1, eps=0.01)
    x, by_hand, total = jnp.zeros(3), np.zeros(3), np.zeros(3)
    state = optimizer.init(x)
    for gradient in GRADIENTS:
        updates, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, x)
        x = optax.apply_updates(x, updates)
        total += gradient**2
        by_hand -= 0.1 * gradient / (np.sqrt(total) + 0.01)
    np.testing.assert_allclose(x, by_hand, 1e-5, 1e-7)
