"""Digits seen through different cameras, in Flax Linen: everything is global except BatchNorm, as in FedBN.

Every client's images have their own contrast and brightness, and half of the clients see negatives. The layers are
global. BatchNorm's scale, bias and statistics are local.

    pip install '.[examples,flax]'
    python examples/digits_local_batchnorm.py
    python examples/digits_local_batchnorm.py --negatives 0

References: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
import tyro
from sklearn.datasets import load_digits

import fedrecon as fr

hidden = (64, 32)


class Net(nn.Module):
    """Two hidden layers, each normalised."""

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = pixels  # (batch, 64)
        for width in hidden:
            x = nn.relu(nn.BatchNorm(momentum=0.9)(nn.Dense(width)(x)))
        return nn.Dense(10)(x)  # (batch, 10)


def photograph(clients: int, negatives: float, seed: int) -> fr.Clients:
    """Deal the images out, and let every client take them with its own camera."""
    rng = np.random.default_rng(seed)
    pixels, label = load_digits(return_X_y=True)
    owner = rng.permutation(np.resize(np.arange(clients), len(label)))
    sign = np.where(rng.random(clients) < negatives, -1, 1)
    contrast, brightness = sign * rng.uniform(0.3, 3, clients), rng.uniform(-2, 2, clients)
    seen = contrast[owner, None] * (pixels / 16 - 0.5) + brightness[owner, None]
    columns = {"pixels": seen.astype(np.float32), "label": label.astype(np.int32)}
    return fr.Clients.from_columns(columns, client=owner)


def descend(rate: float, epochs: int) -> fr.kit.Solver:
    return fr.gradient_descent(optax.sgd(rate), batch_size=10, epochs=epochs)


def main(rounds: int = 100, clients: int = 60, negatives: float = 0.5, seed: int = 0):
    data = photograph(clients, negatives, seed)
    train, test = data.split_clients(0.6, 0.4, seed=seed)

    def model(local) -> fr.Model:
        what = {"inputs": "pixels", "loss": "cross_entropy", "metrics": ["accuracy"]}
        return fr.models.from_flax(Net(), example=data, local=local, **what)

    print(fr.explain(model("BatchNorm*"), data), "\n")
    reconstruct, update, server = descend(0.3, epochs=10), descend(0.3, epochs=2), optax.sgd(1.0)
    split = fr.split.redrawn(fr.split.half())  # there are so few images that support is drawn again in every round
    ways = {
        "local only": fr.local_training(model("*"), train=descend(0.3, epochs=20)),
        "global only": fr.federated_averaging(model(()), update=descend(0.1, epochs=2), server=server),
        "partially local": fr.federated_reconstruction(
            model("BatchNorm*"), reconstruct=reconstruct, update=update, server=server, split=split
        ),
    }
    return fr.compare(ways, train, test, rounds=rounds, clients_per_round=20, seeds=(seed,))


if __name__ == "__main__":
    print(tyro.cli(main))
