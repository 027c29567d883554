"""A small Transformer with LoRA adapters, in Flax NNX: the Transformer is global, the adapters are local.

The data is made up. All clients share one grammar, in which the next notion depends on the last two. A notion has three
words, and each client always uses the same one of them. It takes many clients to learn the grammar. Eight sentences are
enough to learn a client's words, by adapters of rank 2 on attention and output.

    pip install '.[flax]'
    python examples/transformer_adapters.py  # --rounds 100 --rank 1
"""

import functools

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import fedrecon as fr

notions, synonyms, length, sentences = 6, 3, 10, 16
vocabulary, width, heads = notions * synonyms, 24, 2


class Transformer(nnx.Module):
    """One causal attention layer and one dense layer, between embeddings and logits."""

    def __init__(self, rank: int, rngs: nnx.Rngs):
        plain = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        adapted = functools.partial(nnx.LoRALinear, lora_rank=rank, use_bias=False, rngs=rngs)
        self.words, self.places = nnx.Embed(vocabulary, width, rngs=rngs), nnx.Embed(length, width, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(3)])
        self.attend, self.mix, self.head = adapted(width, 3 * width), plain(width, width), adapted(width, vocabulary)
        self.widen, self.narrow = plain(width, 2 * width), plain(2 * width, width)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.words(words) + self.places(np.arange(words.shape[1]))  # (batch, length, width)
        parts = self.attend(self.norms[0](x)).reshape(*words.shape, 3, heads, -1)
        seen = jax.nn.dot_product_attention(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], is_causal=True)
        x = x + self.mix(seen.reshape(x.shape))
        x = x + self.narrow(jax.nn.gelu(self.widen(self.norms[1](x))))
        return self.head(self.norms[2](x))  # (batch, length, vocabulary)


def speak(clients: int, seed: int) -> fr.Clients:
    """Draw sentences from one grammar, with each client's own choice of words."""
    rng = np.random.default_rng(seed)
    grammar = rng.integers(0, notions, (notions, notions))
    said = rng.integers(0, notions, (clients, sentences, length + 1))
    for t in range(2, length + 1):
        keeps = rng.random((clients, sentences)) < 0.9
        said[..., t] = np.where(keeps, grammar[said[..., t - 2], said[..., t - 1]], said[..., t])
    habit = rng.integers(0, synonyms, (clients, notions))
    words = (said * synonyms + habit[np.arange(clients)[:, None, None], said]).reshape(-1, length + 1)
    owner = np.repeat(np.arange(clients), sentences)
    return fr.Clients.from_columns({"words": words[:, :-1], "label": words[:, 1:]}, client=owner)


def main(rounds: int = 250, clients: int = 200, rank: int = 2, seed: int = 0):
    train, test = speak(clients, seed).split_clients(0.8, 0.2, seed=seed)

    def model(local) -> fr.Model:
        what = {"inputs": "words", "loss": "cross_entropy", "metrics": ["accuracy"]}
        return fr.models.from_flax(lambda rngs: Transformer(rank, rngs), local=local, **what)

    descend = functools.partial(fr.gradient_descent, batch_size=8)
    server, split = optax.adam(0.02), fr.split.redrawn(fr.split.half())
    reconstruct, update = descend(optax.adam(0.03), epochs=10), descend(optax.sgd(0.3))
    adapted = {"reconstruct": reconstruct, "update": update, "server": server, "split": split}
    ways = {
        "local only": fr.local_training(model("*"), train=descend(optax.adam(0.01), epochs=20)),
        "global only": fr.federated_averaging(model(()), update=update, server=server),
        "partially local": fr.federated_reconstruction(model("*/lora"), **adapted),
    }
    return fr.compare(ways, train, test, rounds=rounds, clients_per_round=20, seeds=(seed,))


if __name__ == "__main__":
    print(tyro.cli(main))
