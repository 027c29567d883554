"""Small trained-looking models for the tests of bundles, and what JAX makes of a person's examples."""

import jax
import numpy as np
import optax

import fedrecon as fr
from fedrecon.device import Legend, bundle
from fedrecon.device.vectors import made_up_ratings

ITEMS, MOST = 200, 12
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
}
DESCENT = {"learning_rate": 0.1, "batch_size": 5, "epochs": 3, "steps": 8}


def factorization(*, biases=True, default=False, feedback=False):
    model = fr.models.matrix_factorization(ITEMS, 6, biases=biases)
    model = fr.models.learned_default(model) if default else model
    return fr.models.implicit_feedback(model, ITEMS) if feedback else model


def solver_of(name):
    if name == "least-squares":
        return fr.least_squares(1.5), {"solver": name, "ridge": 1.5}
    descent = fr.gradient_descent(OPTIMIZERS[name](), batch_size=5, epochs=3, steps=8)
    return descent, {"solver": "gradient-descent", "optimizer": name, **DESCENT}


def algorithm_of(model, reconstruct):
    update = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
    return fr.federated_reconstruction(model, reconstruct=reconstruct, update=update, server=optax.sgd(1.0))


def trained(model, seed=0):
    """Parameters as large as trained ones, drawn from a seed."""
    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init_global, jax.random.key(0))
    return jax.tree.map(lambda leaf: draw.normal(0, 0.4, leaf.shape).astype(np.float32), shapes)


def roles_of(params):
    from fedrecon.trees import flatten

    return {"/".join(part for part in path.split("/") if part != "shared"): path for path in flatten(params)[0]}


def ratings_bundle(out, model, name, *, quantise=None, params=None, **more):
    """Bundle a ratings model with a solver; return its algorithm and parameters too."""
    solver, settings = solver_of(name)
    algorithm, params = algorithm_of(model, solver), trained(model) if params is None else params
    items = {
        "ids": list(range(100, 100 + ITEMS)),
        "labels": [f"film {k}" for k in range(ITEMS)],
        "counts": list(range(ITEMS)),
    }
    bundle(
        algorithm,
        params,
        out,
        like=made_up_ratings(ITEMS, (1, 5), MOST),
        ask={"item": np.arange(7, dtype=np.int32)},
        most=MOST,
        settings=settings,
        quantise=quantise,
        legend=Legend("ratings", {"items.json": items}, (1.0, 5.0), 3, roles_of(params)),
        replace=True,
        **more,
    )
    return algorithm, params




def newest(columns, most=MOST):
    return {name: np.asarray(column)[-most:] for name, column in columns.items()}
