"""The server's priors: what its optimizer is given, and what stays as it is."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr

PARAMS = {"table": {"items": jnp.array([1.0, -2.0])}, "bias": jnp.array([4.0])}
SLOPES = {"table": {"items": jnp.array([0.5, 0.0])}, "bias": jnp.array([1.0])}


def updates_of(optimizer):
    return optimizer.update(SLOPES, optimizer.init(PARAMS), PARAMS)[0]


def test_the_optimizer_is_given_the_gradient_over_everybody_plus_the_prior():
    found = updates_of(fr.optimizers.with_prior(optax.sgd(1.0), {"table/*": 3.0}, examples=10))
    np.testing.assert_allclose(found["table"]["items"], [-(5 + 3), 6])
    np.testing.assert_allclose(found["bias"], [-10])


def test_one_prior_for_everything():
    found = updates_of(fr.optimizers.with_prior(optax.sgd(1.0), 2.0, examples=1))
    np.testing.assert_allclose(found["table"]["items"], [-2.5, 4])
    np.testing.assert_allclose(found["bias"], [-9])


def test_a_prior_may_change_with_the_steps():
    optimizer = fr.optimizers.with_prior(optax.sgd(1.0), {"bias": lambda step: 3.0 - step}, examples=1)
    state, found = optimizer.init(PARAMS), []
    for _ in range(3):
        updates, state = optimizer.update(SLOPES, state, PARAMS)
        found.append(float(updates["bias"][0]))
        np.testing.assert_allclose(updates["table"]["items"], [-0.5, 0])
    assert found == [-(1 + 3 * 4), -(1 + 2 * 4), -(1 + 1 * 4)]


def test_descending_with_a_prior_ends_at_the_ridge_regression():
    x, y = np.array([1.0, 2.0, -1.0]), np.array([2.0, 3.0, 1.0])
    optimizer = fr.optimizers.with_prior(optax.sgd(0.02), 5.0, examples=3)
    w, state = {"w": jnp.zeros(())}, optimizer.init({"w": jnp.zeros(())})
    for _ in range(200):
        gradient = {"w": jnp.mean((w["w"] * x - y) * x)}  # of half the squared error
        steps, state = optimizer.update(gradient, state, w)
        w = optax.apply_updates(w, steps)
    assert float(w["w"]) == pytest.approx(float(x @ y / (x @ x + 5)), rel=1e-4)


def test_constant_parameters_stay_as_they_are():
    found = updates_of(fr.optimizers.keep_constant(optax.sgd(1.0), "bias"))
    np.testing.assert_array_equal(found["bias"], [0])
    np.testing.assert_allclose(found["table"]["items"], [-0.5, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fr.optimizers.with_prior(optax.sgd(1.0), -1.0, examples=1), "`prior`"),
        (lambda: fr.optimizers.with_prior(optax.sgd(1.0), {"bias": float("nan")}, examples=1), "`prior`"),
        (lambda: fr.optimizers.with_prior(optax.sgd(1.0), 1.0, examples=0), "`examples`"),
        (
            lambda: updates_of(fr.optimizers.with_prior(optax.sgd(1.0), {"tables": 1.0}, examples=1)),
            "selects no parameter",
        ),
        (lambda: updates_of(fr.optimizers.keep_constant(optax.sgd(1.0), "tables")), "selects no parameter"),
    ],
)
def test_what_makes_no_sense_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()
