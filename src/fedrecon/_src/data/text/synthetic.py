"""Synthetic text in which every client has words of its own that only a personal model can use."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedrecon._src.data.text.corpus import Corpus
from fedrecon._src.data.text.preparation import FRACTIONS, Plan, prepare_corpus
from fedrecon._src.data.text.runs import Post


def synthetic_text(
    num_clients: int = 100,
    sentences: int = 40,
    shared_words: int = 20,
    private_words: int = 3,
    kinds: int = 5,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 0,
) -> Corpus:
    """Draw a corpus of sentences such as "w4 w5 p17-2 k3 w6 w7", in memory.

    Shared words follow one another in a circle: w5 comes after w4. Between two of them is a private word of the client,
    always followed by the one word that belongs to its kind. Kinds are drawn anew for every client, so nothing about a
    private word can be learned from other clients. A model that cannot tell a client's private words apart has to guess
    what follows them; one that can knows it.

    Args:
      num_clients: number of clients.
      sentences: how many each client has.
      shared_words: number of words in the circle.
      private_words: how many each client has.
      kinds: number of words that can follow a private word.
      fractions: the share of clients for training, validation and test.
      seed: the same seed gives the same corpus.

    Returns:
      A corpus that keeps the `shared_words + kinds` words that are not private.
    """
    sizes = (num_clients, sentences, shared_words, private_words, kinds)
    if min(sizes) < 1:
        raise ValueError(
            "`num_clients`, `sentences`, `shared_words`, `private_words` and `kinds` must be positive, "
            f"but are {', '.join(map(str, sizes))}."
        )
    words = [f"w{k}" for k in range(shared_words)] + [f"k{k}" for k in range(kinds)]
    plan = Plan(fractions=fractions, seed=seed, words=words, kept_words=len(words), max_sentences=sentences)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "corpus"
        prepare_corpus(_posts(np.random.default_rng(seed), *sizes), folder, plan, "synthetic text", {})
        return Corpus.open(folder, mapped=False)


def _posts(
    rng: np.random.Generator, num_clients: int, sentences: int, shared_words: int, private_words: int, kinds: int
) -> Iterator[Post]:
    width = len(str(num_clients - 1))
    for client in range(num_clients):
        kind = rng.integers(kinds, size=private_words)
        starts, private = rng.integers([shared_words, private_words], size=(sentences, 2)).T.tolist()
        for time, (start, own) in enumerate(zip(starts, private, strict=True)):
            circle = [f"w{(start + k) % shared_words}" for k in range(4)]
            sentence = [*circle[:2], f"p{client}-{own}", f"k{kind[own]}", *circle[2:]]
            yield Post(f"{client:0{width}}", float(time), [sentence])
