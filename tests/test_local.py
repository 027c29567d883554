import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.client.closed_form import MOST_SOLVED_FOR
from fedrecon._src.client.objectives import Objective, Problem
from fedrecon._src.core.cohort import Examples
from toy_models import a_and_b, clients_of, descend, linear, squared_error, xy

ITEMS, DIM = 10, 3


def solve_for_both(solver, columns, count, start=0.0):
    """Solve for w and b of the linear model together."""
    objective = Objective(linear(), lambda both, _, batch: linear().predict({"w": both["w"]}, {"b": both["b"]}, batch))
    params = {"w": jnp.full(len(count), start), "b": jnp.full(len(count), start)}
    columns = {name: jnp.asarray(column, jnp.float32) for name, column in columns.items()}
    return jax.jit(lambda examples: solver.solve(Problem(objective, params, (), examples)))(
        Examples(columns, jnp.array(count))
    )


def descend_by_hand(x, y, rate, batch, epochs, steps):
    """SGD on w * x + b in float64; also the squared errors before each step, and the examples seen."""
    w = b = loss = 0.0
    seen = taken = 0
    for _ in range(epochs):
        for at in range(0, len(x), batch):
            if taken == steps:
                return w, b, loss, seen
            xs, ys = x[at : at + batch], y[at : at + batch]
            error = w * xs + b - ys
            w, b = w - rate * np.mean(2 * error * xs), b - rate * np.mean(2 * error)
            loss, seen, taken = loss + np.sum(error**2), seen + len(xs), taken + 1
    return w, b, loss, seen


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 4, 7])
@pytest.mark.parametrize(("epochs", "steps"), [(1, None), (3, None), (3, 4), (2, 0)])
def test_descent_goes_through_the_examples_in_order_in_batches(batch, epochs, steps):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 4, 5))
    count = [5, 3, 0, 4]
    solver = descend(0.05, batch, epochs=epochs, steps=steps)
    found = solve_for_both(solver, {"x": x, "y": y}, count)
    for i, n in enumerate(count):
        w, b, loss, seen = descend_by_hand(x[i, :n], y[i, :n], 0.05, batch, epochs, steps)
        np.testing.assert_allclose([found.params["w"][i], found.params["b"][i]], [w, b], 1e-4, 1e-6)
        np.testing.assert_allclose(found.sums[i, 0], [loss, seen], 1e-4, 1e-6)
        assert found.examples[i] == seen


def test_what_padding_holds_is_never_read():
    x = np.array([[1.0, 2.0, np.nan, np.inf], [3.0, np.nan, np.nan, np.nan]])
    clean = np.nan_to_num(x, nan=9.0, posinf=9.0)
    one, other = (solve_for_both(descend(0.1, 3), {"x": v, "y": v}, [2, 1]) for v in (x, clean))
    assert np.isfinite(one.params["w"]).all()
    np.testing.assert_array_equal(one.params["w"], other.params["w"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size`"),
        ({"batch_size": 1, "epochs": 0}, "`epochs`"),
        ({"batch_size": 1, "steps": -1}, "`steps`"),
    ],
)
def test_impossible_descents_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fr.gradient_descent(optax.sgd(0.1), **options)


@pytest.mark.parametrize(("steps", "batch_size", "limit"), [(None, 5, None), (50, 5, 250), (0, 5, None)])
def test_a_descent_says_how_many_examples_it_can_use(steps, batch_size, limit):
    found = descend(0.1, batch_size, steps=steps).limit
    assert found == limit


def factorization(start=0.0):
    model = fr.models.matrix_factorization(ITEMS, DIM, init_scale=1.0)
    return model._replace(init_local=lambda key: {"user_embedding": jnp.full(DIM, start)})


def solving(model, solver):
    return fr.federated_reconstruction(model, reconstruct=solver, update=descend(0.1, 2), server=optax.sgd(1.0))


def rated(sizes, seed=0):
    generator = np.random.default_rng(seed)
    return clients_of(
        *(
            {
                "item": generator.integers(0, ITEMS, n).astype(np.int32),
                "rating": generator.normal(size=n).astype(np.float32),
            }
            for n in sizes
        )
    )


@pytest.mark.parametrize("start", [0.0, 1.5])
@pytest.mark.parametrize("ridge", [1e-3, 2.0])
def test_least_squares_equals_the_solution_of_numpy(ridge, start):
    clients = rated([8, 2, 0, 5])
    model = factorization(start)
    params = model.init_global(jax.random.key(1))
    found = fr.reconstruct(solving(model, fr.least_squares(ridge)), params, clients)["user_embedding"]
    table = np.asarray(params["item_embedding"], np.float64)
    for client, mine in zip(clients, found, strict=True):
        matrix = np.concatenate([table[client["item"]], np.sqrt(ridge) * np.eye(DIM)])
        target = np.concatenate([client["rating"], np.sqrt(ridge) * np.full(DIM, start)])
        np.testing.assert_allclose(mine, np.linalg.lstsq(matrix, target)[0], 1e-3, 1e-4)


def test_ridge_draws_towards_the_start():
    clients = rated([8])
    params = factorization().init_global(jax.random.key(1))
    distance = [
        np.abs(
            fr.reconstruct(solving(factorization(1.5), fr.least_squares(ridge)), params, clients)["user_embedding"]
            - 1.5
        ).max()
        for ridge in (0.1, 10.0, 1e6)
    ]
    assert distance[0] > distance[1] > distance[2]
    assert distance[2] < 1e-4


def test_least_squares_uses_at_most_its_limit_of_examples():
    clients, first = rated([8, 3]), rated([8, 3]).cap(4)
    model = factorization()
    params = model.init_global(jax.random.key(1))
    limited = fr.reconstruct(solving(model, fr.least_squares(0.1, limit=4)), params, clients)
    expected = fr.reconstruct(solving(model, fr.least_squares(0.1)), params, first)
    np.testing.assert_allclose(limited["user_embedding"], expected["user_embedding"], 1e-5)


@pytest.mark.parametrize("ridge", [0.0, -1.0, float("nan")])
def test_least_squares_needs_a_ridge(ridge):
    with pytest.raises(ValueError, match="`ridge` must be above 0, or clients with little data have no solution"):
        fr.least_squares(ridge)


def bent():
    model = linear()
    return model._replace(predict=lambda g, local, batch: g["w"] * batch["x"] + jnp.sin(local["b"]))


def absolute():
    return linear()._replace(loss=lambda p, batch: (abs(p - batch["y"]), jnp.ones_like(p)))


def fourth_power():
    return linear()._replace(loss=lambda p, batch: ((p - batch["y"]) ** 4, jnp.ones_like(p)))


WRONG = {
    "not linear": (bent, "predictions that are linear in what is solved for"),
    "absolute error": (absolute, "squared error as `loss`"),
    "fourth power": (fourth_power, "squared error as `loss`"),
}


@pytest.mark.parametrize(("model", "message"), WRONG.values(), ids=WRONG)
def test_least_squares_refuses_what_it_cannot_solve_before_training(model, message):
    algorithm = solving(model(), fr.least_squares(0.1))
    with pytest.raises(ValueError, match=message):
        fr.train(algorithm, a_and_b(), rounds=1, clients_per_round=2)


@pytest.mark.parametrize(("model", "message"), WRONG.values(), ids=WRONG)
def test_least_squares_refuses_what_it_cannot_solve_when_only_evaluated(model, message):
    algorithm = solving(model(), fr.least_squares(0.1))
    with pytest.raises(ValueError, match=message):
        fr.evaluate(algorithm, {"w": np.float32(1)}, a_and_b())


def test_least_squares_refuses_to_solve_for_too_much():
    model = fr.Model(
        init_global=lambda key: {"w": jnp.zeros(())},
        init_local=lambda key: {"b": jnp.zeros(MOST_SOLVED_FOR + 1)},
        predict=lambda g, local, batch: g["w"] * batch["x"] + local["b"].sum(),
        loss=squared_error,
    )
    with pytest.raises(ValueError, match=f"at most {MOST_SOLVED_FOR} parameters"):
        fr.reconstruct(solving(model, fr.least_squares(1.0)), {"w": np.float32(0)}, {"x": np.ones(1), "y": np.ones(1)})


def test_least_squares_weighs_examples_as_the_loss_does():
    model = linear()._replace(loss=lambda p, batch: ((p - batch["y"]) ** 2, batch["x"]))
    clients = xy(([1, 3, 0], [4, 8, 99]))
    found = fr.reconstruct(solving(model, fr.least_squares(1.0)), {"w": np.float32(0)}, clients)
    np.testing.assert_allclose(found["b"], [(1 * 4 + 3 * 8) / (4 + 1)], 1e-5)


def test_a_multiple_of_the_squared_error_weighs_as_much_against_the_ridge():
    model = linear()._replace(loss=lambda p, batch: (3 * (p - batch["y"]) ** 2, jnp.ones_like(p)))
    found = fr.reconstruct(solving(model, fr.least_squares(2.0)), {"w": np.float32(0)}, xy(([1, 1], [4, 8])))
    np.testing.assert_allclose(found["b"], [3 * (4 + 8) / (3 * 2 + 2)], 1e-5)


def test_ridges_differ_by_pattern():
    model = fr.models.matrix_factorization(ITEMS, DIM, biases=True, init_local_scale=0)
    clients, params = rated([8, 2]), model.init_global(jax.random.key(1))
    params = {**params, "item_bias": np.linspace(-1, 1, ITEMS).astype(np.float32)}
    ridge = {"*_bias": 5.0, "user_*": 0.5}  # both match the bias: the first counts
    found = fr.reconstruct(solving(model, fr.least_squares(ridge)), params, clients)
    for i, client in enumerate(clients):
        x = np.concatenate([params["item_embedding"][client["item"]], np.ones((len(client["item"]), 1))], 1)
        target = client["rating"] - params["item_bias"][client["item"]]
        expected = np.linalg.solve(x.T @ x + np.diag([0.5] * DIM + [5.0]), x.T @ target)
        np.testing.assert_allclose(found["user_embedding"][i], expected[:-1], 1e-3, 1e-4)
        np.testing.assert_allclose(found["user_bias"][i], expected[-1], 1e-3, 1e-4)


def test_a_parameter_without_a_ridge_is_an_error():
    model = fr.models.matrix_factorization(ITEMS, DIM, biases=True)
    algorithm = solving(model, fr.least_squares({"user_bias": 1.0}))
    with pytest.raises(ValueError, match="no pattern for 'user_embedding'"):
        fr.reconstruct(algorithm, model.init_global(jax.random.key(1)), rated([3]))


def test_a_pattern_that_matches_nothing_is_an_error():
    model = factorization()
    algorithm = solving(model, fr.least_squares({"bias": 1.0, "*": 1.0}))
    with pytest.raises(ValueError, match="`ridge`: 'bias' selects no parameter"):
        fr.reconstruct(algorithm, model.init_global(jax.random.key(1)), rated([3]))


def test_a_client_without_support_keeps_the_start():
    for solver in (fr.least_squares(0.5), descend(0.1, 2)):
        found = fr.reconstruct(
            solving(factorization(1.5), solver), factorization().init_global(jax.random.key(0)), rated([0, 3])
        )
        np.testing.assert_array_equal(found["user_embedding"][0], np.full(DIM, 1.5, np.float32))
