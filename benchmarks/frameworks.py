"""W1 with matrix factorization in Keras and in Flax, without declared lookups, against the built-in model."""

import argparse
import json
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

from w1 import DIM, Rounds, algorithm, in_turn, setup


def close(predictions, labels):
    import jax.numpy as jnp

    return (jnp.abs(predictions.reshape(labels.shape) - labels) <= 0.5).astype(jnp.float32)


OPTIONS = {
    "local": "user",
    "inputs": "item",
    "label": "rating",
    "loss": "mse",
    "metrics": {"rmse": "rmse", "accuracy": close},
}


def in_keras(num_items):
    import keras

    import fedrecon as fr

    item = keras.Input((), dtype="int32")
    small = keras.initializers.RandomUniform(-0.05, 0.05)
    row = keras.layers.Embedding(num_items, DIM, embeddings_initializer=small, name="items")(item)
    rating = keras.layers.Dense(1, use_bias=False, kernel_initializer=small, name="user")(row)
    return fr.models.from_keras(keras.Model(item, rating), **OPTIONS)


def in_flax(num_items):
    import jax
    from flax import nnx

    import fedrecon as fr

    def small(key, shape, dtype=float):
        return jax.random.uniform(key, shape, dtype, -0.05, 0.05)

    class Factors(nnx.Module):
        def __init__(self, rngs):
            self.items = nnx.Embed(num_items, DIM, embedding_init=small, rngs=rngs)
            self.user = nnx.Linear(DIM, 1, use_bias=False, kernel_init=small, rngs=rngs)

        def __call__(self, item):
            return self.user(self.items(item))

    return fr.models.from_flax(Factors, **OPTIONS)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    from fedrecon import start_jax_devices

    start_jax_devices()
    ratings = setup(arguments.data)
    from fedrecon.kit import decide_lookups

    runners = {"ours": Rounds(ratings, algorithm(ratings.num_items)).call}
    for name, make in {"Keras": in_keras, "Flax": in_flax}.items():
        found = decide_lookups(algorithm(ratings.num_items, model=make(ratings.num_items)), ratings)
        runners[name] = Rounds(ratings, found).call
    seconds = in_turn(runners, 30)
    rows = [
        (
            f"the model in {name}",
            f"{seconds[name] / seconds['ours']:.2f} times ours ({1e3 * seconds[name]:.2f} ms a round)",
            "at most 1.5 times" if name == "Keras" else "",
        )
        for name in ("Keras", "Flax")
    ]
    figures = {name: 1e3 * found for name, found in seconds.items()}
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
