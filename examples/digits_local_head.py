"""Digits with skewed labels, as a plain JAX function: the body is global, the head is local.

Every client has images of only two of the ten digits, and not the same two. In noisy images it is harder to tell ten
digits apart than two, and a local head only has to tell two apart. With `--noise 0` there is little to gain.

    pip install '.[examples]'
    python examples/digits_local_head.py
    python examples/digits_local_head.py --classes 3 --noise 0
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from sklearn.datasets import load_digits

import fedrecon as fr

hidden = (64, 32)


def init(key: jax.Array) -> dict:
    """Draw the body's weights; the head starts at zero."""
    keys = jax.random.split(key)
    normal = jax.nn.initializers.he_normal()
    first = {"w": normal(keys[0], (64, hidden[0])), "b": jnp.zeros(hidden[0])}
    second = {"w": normal(keys[1], hidden), "b": jnp.zeros(hidden[1])}
    head = {"w": jnp.zeros((hidden[1], 10)), "b": jnp.zeros(10)}
    return {"body": [first, second], "head": head}


def logits(params: dict, pixels: jax.Array) -> jax.Array:
    """Classify images of (batch, 64) pixels."""
    x = pixels
    for layer in params["body"]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params["head"]["w"] + params["head"]["b"]  # (batch, 10)


def deal(clients: int, classes: int, noise: float, seed: int) -> fr.Clients:
    """Give every client so many digits, and deal the images of a digit out to those who have it."""
    rng = np.random.default_rng(seed)
    pixels, label = load_digits(return_X_y=True)
    has = np.argsort(rng.random((clients, 10)), axis=1) < classes  # (clients, digits)
    owner = np.empty(len(label), int)
    for digit in range(10):
        images, who = np.flatnonzero(label == digit), np.flatnonzero(has[:, digit])
        owner[images] = np.resize(who, len(images))
    pixels = pixels / 16 + rng.normal(scale=noise, size=pixels.shape)
    columns = {"pixels": pixels.astype(np.float32), "label": label.astype(np.int32)}
    return fr.Clients.from_columns(columns, client=owner).shuffle(seed)


def descend(rate: float, epochs: int) -> fr.kit.Solver:
    return fr.gradient_descent(optax.sgd(rate), batch_size=5, epochs=epochs)


def main(rounds: int = 150, clients: int = 90, classes: int = 2, noise: float = 0.3, seed: int = 0):
    train, test = deal(clients, classes, noise, seed).split_clients(0.6, 0.4, seed=seed)

    def model(local) -> fr.Model:
        data = {"inputs": "pixels", "loss": "cross_entropy", "metrics": ["accuracy"]}
        return fr.models.from_function(logits, init, local=local, **data)

    reconstruct, update, server = descend(0.3, epochs=10), descend(0.3, epochs=2), optax.sgd(1.0)
    split = fr.split.redrawn(fr.split.half())  # there are so few images that support is drawn again in every round
    ways = {
        "local only": fr.local_training(model("*"), train=descend(0.3, epochs=20)),
        "global only": fr.federated_averaging(model(()), update=update, server=server),
        "partially local": fr.federated_reconstruction(
            model("head"), reconstruct=reconstruct, update=update, server=server, split=split
        ),
    }
    return fr.compare(ways, train, test, rounds=rounds, clients_per_round=20, seeds=(seed,))


if __name__ == "__main__":
    print(tyro.cli(main))
