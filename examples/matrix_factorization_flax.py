"""Matrix factorization in Flax NNX: ratings of movies by people who took no part in training.

Item embeddings are global. The user is a linear layer with one output, and is local. Predictions are linear in it, so
least squares solves for it exactly, without gradient steps.

    pip install '.[flax,datasets]'
    python examples/matrix_factorization_flax.py
    python examples/matrix_factorization_flax.py --rounds 50 --clients 200
"""

import jax
import optax
import tyro
from flax import nnx

import fedrecon as fr

dim = 8  # of the embeddings
mean = 3.5  # what predictions start from


class Factorization(nnx.Module):
    """Predict a rating: item embedding times user embedding, plus a bias of each."""

    def __init__(self, num_items: int, rngs: nnx.Rngs):
        zeros, near_zero = nnx.initializers.zeros_init(), nnx.initializers.uniform(0.1)
        self.items = nnx.Embed(num_items, dim, embedding_init=near_zero, rngs=rngs)
        self.item_bias = nnx.Embed(num_items, 1, embedding_init=zeros, rngs=rngs)
        self.user = nnx.Linear(dim, 1, bias_init=nnx.initializers.constant(mean), rngs=rngs)

    def __call__(self, item: jax.Array) -> jax.Array:
        return (self.user(self.items(item)) + self.item_bias(item))[:, 0]  # (batch,)


def descend(rate: float, epochs: int = 1) -> fr.kit.Solver:
    return fr.gradient_descent(optax.sgd(rate), batch_size=5, epochs=epochs, steps=50)


def main(rounds: int = 300, clients: int = 671, seed: int = 0):
    ratings = fr.data.load_movielens("movielens-small").shuffle(seed).take(range(clients))
    train, _, test = ratings.split_clients(0.8, 0.1, 0.1, seed=seed)

    def model(local) -> fr.Model:
        what = {"inputs": "item", "label": "rating", "loss": "mse", "metrics": ["rmse", "mae"]}
        return fr.models.from_flax(lambda rngs: Factorization(ratings.num_items, rngs), local=local, **what)

    print(fr.explain(model("user"), train), "\n")
    ways = {
        "local only": fr.local_training(model("*"), train=descend(0.05, epochs=5)),
        "global only": fr.federated_averaging(model(()), update=descend(0.05), server=optax.sgd(1.0)),
        "partially local": fr.federated_reconstruction(
            model("user"), reconstruct=fr.least_squares(ridge=2.0), update=descend(0.2), server=optax.sgd(1.0)
        ),
    }
    return fr.compare(ways, train, test, rounds=rounds, clients_per_round=50, seeds=(seed,))


if __name__ == "__main__":
    print(tyro.cli(main))
