"""Matrix factorization in Keras: ratings of movies by people who took no part in training.

Item embeddings are global. The user is a Dense layer with one output, and is local.

    pip install '.[keras,datasets]'
    python examples/matrix_factorization_keras.py
    python examples/matrix_factorization_keras.py --rounds 50 --clients 200
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import optax
import tyro

import fedrecon as fr

dim = 8  # of the embeddings
batch_size = 5
most_steps = 50  # of a client, in U and in R
mean = 3.5  # what predictions start from


def build(num_items: int) -> keras.Model:
    """Predict a rating: item embedding times user embedding, plus a bias of each."""
    item = keras.Input((), dtype="int32", name="item")
    embedding = keras.layers.Embedding(num_items, dim, name="items")(item)  # (batch, dim)
    item_bias = keras.layers.Embedding(num_items, 1, embeddings_initializer="zeros", name="item_bias")(item)
    user = keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(mean), name="user")(embedding)
    return keras.Model(item, user + item_bias)  # (batch, 1)


def descend(rate: float, epochs: int = 1) -> fr.kit.Solver:
    return fr.gradient_descent(optax.sgd(rate), batch_size=batch_size, epochs=epochs, steps=most_steps)


def main(rounds: int = 300, clients: int = 671, seed: int = 0):
    ratings = fr.data.load_movielens("movielens-small").shuffle(seed).take(range(clients))
    train, _, test = ratings.split_clients(0.8, 0.1, 0.1, seed=seed)
    network = build(ratings.num_items)

    def model(local) -> fr.Model:
        return fr.models.from_keras(
            network, local=local, inputs="item", label="rating", loss="mse", metrics=["rmse", "mae"]
        )

    print(fr.explain(model("user"), train), "\n")
    ways = {
        "local only": fr.local_training(model("*"), train=descend(0.05, epochs=5)),
        "global only": fr.federated_averaging(model(()), update=descend(0.05), server=optax.sgd(1.0)),
        "partially local": fr.federated_reconstruction(
            model("user"), reconstruct=descend(0.05, epochs=5), update=descend(0.2), server=optax.sgd(1.0)
        ),
    }
    return fr.compare(ways, train, test, rounds=rounds, clients_per_round=50, seeds=(seed,))


if __name__ == "__main__":
    print(tyro.cli(main))
