"""What the tests of all frameworks share: ratings, the round that our own model makes of them, small images."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedrecon as fr
from toy_models import assert_close, assert_same_history, clients_of, descend, one_round

ITEMS, DIM = 12, 3
RATINGS = {"local": "user", "inputs": "item", "label": "rating", "loss": "mse", "metrics": ["rmse"]}


def rating_clients(sizes=(7, 3, 5), seed=0):
    generator = np.random.default_rng(seed)
    return clients_of(
        *(
            {
                "item": generator.integers(0, ITEMS, size).astype(np.int32),
                "rating": generator.integers(1, 6, size).astype(np.float32),
            }
            for size in sizes
        )
    )


def started(model, shared, local):
    """A model that starts from these parameters, whatever the key."""
    return model._replace(
        init_global=lambda key: jax.tree.map(jnp.asarray, shared),
        init_local=lambda key: jax.tree.map(jnp.asarray, local),
    )


def recon(model, optimizer=None, **options):
    return fr.federated_reconstruction(
        model,
        reconstruct=descend(0.1, 2),
        update=fr.gradient_descent(optimizer or optax.sgd(0.2), batch_size=2),
        server=optax.sgd(1.0),
        **options,
    )


def assert_a_round_equals_ours(model, items, user, shape=(DIM, 1), optimizer=None):
    """Compare a round of a framework's matrix factorization with one of ours from the same parameters.

    `items` and `user` are the paths of its two parameters; its user embedding has `shape`.
    """
    generator = np.random.default_rng(3)
    table = generator.normal(size=(ITEMS, DIM)).astype(np.float32)
    vector = generator.normal(size=DIM).astype(np.float32)
    ours = fr.models.matrix_factorization(ITEMS, DIM)._replace(metrics={})
    ours = started(ours, {"item_embedding": table}, {"user_embedding": vector})
    theirs = started(model._replace(metrics={}), {items: table}, {user: vector.reshape(shape)})
    clients = rating_clients()
    expected = one_round(recon(ours, optimizer), clients, rounds=2)
    found = one_round(recon(theirs, optimizer), clients, rounds=2)
    assert_close(found.params[items], expected.params["item_embedding"])
    assert_same_history(found, expected)


def features(examples, seed=0, width=4):
    generator = np.random.default_rng(seed)
    return {
        "x": (generator.normal(size=(examples, width)) * [1, 2, 3, 4] + [0, 1, 2, 3]).astype(np.float32),
        "label": generator.integers(0, 2, examples).astype(np.int32),
    }


def batch_of(examples, seed=0):
    return jax.tree.map(jnp.asarray, features(examples, seed))
