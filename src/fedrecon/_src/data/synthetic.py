"""Synthetic data: ratings in the shape of MovieLens 1M, and text in which every client has words of its own."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedrecon._src.core.checks import check_number, check_numbers
from fedrecon._src.data.corpus import Corpus
from fedrecon._src.data.corpus_writer import FRACTIONS, CorpusSettings, Post, prepare_corpus
from fedrecon._src.data.ratings import Ratings

MIN_RATINGS = 20  # as in MovieLens 1M, where nobody has fewer
MEDIAN_TO_MEAN = 96 / 165  # of the number of ratings per user, in MovieLens 1M
POPULARITY_OFFSET = 60  # Zipf-Mandelbrot: flattens the head, so that the top item is rated by about half the users
USERS_PER_BLOCK = 1024


def synthetic_ratings(
    num_users: int = 6040,
    num_items: int = 3706,
    mean_ratings: float = 165,
    dim: int = 8,
    noise: float = 0.8,
    seed: int = 0,
) -> Ratings:
    """Draw ratings from a low-rank model with biases, rounded to whole stars from 1 to 5.

    A user rates an item at most once and popular items more often. Every user has at least 20 ratings,
    or a fifth of the mean if that is less.

    Args:
      num_users: number of users, all of whom have ratings.
      num_items: number of items; in a small draw some may go unrated.
      mean_ratings: ratings per user on average; the median is lower and the largest users far above it.
      dim: rank of the model behind the ratings.
      noise: standard deviation of what the model does not explain, in stars.
      seed: the same seed gives the same data.

    Returns:
      Ratings whose `time` increases along each user's examples.

    Example:
      >>> import fedrecon as fr
      >>> fr.data.synthetic_ratings(num_users=100, num_items=50, mean_ratings=10).num_items
      50
    """
    check_numbers({"num_users": num_users, "num_items": num_items, "dim": dim}, least=1)
    check_number("mean_ratings", mean_ratings, above=True)
    check_number("noise", noise)
    rng = np.random.default_rng(seed)
    sizes = _sizes(rng, num_users, num_items, mean_ratings)
    popularity = (np.arange(num_items) + POPULARITY_OFFSET) ** -1.2
    item = _choose_items(rng, sizes, rng.permutation(popularity))
    user = np.repeat(np.arange(num_users), sizes)
    ends = np.cumsum(sizes)
    rating = _stars(rng, user, item, (num_users, num_items, dim), noise)
    columns = {"item": item, "rating": rating, "time": _times(rng, sizes)}
    return Ratings(columns, ends - sizes, ends, np.arange(num_users), item_ids=np.arange(num_items))


def _sizes(rng: np.random.Generator, num_users: int, num_items: int, mean: float) -> np.ndarray:
    """Draw how many items each user rates: a minimum plus a lognormal, as the logarithms of ML-1M's look."""
    least = min(MIN_RATINGS, num_items, int(mean / 5))
    middle = max(mean * MEDIAN_TO_MEAN - least, 0.1)
    sigma = np.sqrt(2 * np.log(max((mean - least) / middle, 1.0)))  # mean / median of a lognormal is exp(sigma^2/2)
    sizes = least + rng.lognormal(np.log(middle), sigma, num_users)
    return np.clip(np.rint(sizes), max(least, 1), max(1, int(0.63 * num_items), least)).astype(np.int64)


def _choose_items(rng: np.random.Generator, sizes: np.ndarray, popularity: np.ndarray) -> np.ndarray:
    """Draw for each user that many distinct items, by popularity.

    The smallest of exponential waiting times with rates `popularity` are a draw without replacement.
    """
    rates = popularity.astype(np.float32)
    chosen = []
    for start in range(0, len(sizes), USERS_PER_BLOCK):
        block = sizes[start : start + USERS_PER_BLOCK]
        waits = rng.standard_exponential((len(block), len(rates)), np.float32) / rates  # (users, items)
        order = np.argsort(waits, axis=1)
        chosen.append(order[np.arange(len(rates)) < block[:, None]])
    return np.concatenate(chosen).astype(np.int32)


def _stars(
    rng: np.random.Generator, user: np.ndarray, item: np.ndarray, sizes: tuple[int, int, int], noise: float
) -> np.ndarray:
    """Rate: a mean, a bias of user and item, a product of factors with variance 1/4, and noise."""
    num_users, num_items, dim = sizes
    users = rng.normal(size=(num_users, dim)).astype(np.float32)
    items = rng.normal(scale=0.5 / np.sqrt(dim), size=(num_items, dim)).astype(np.float32)
    score = 3.6 + rng.normal(scale=0.4, size=num_users)[user] + rng.normal(scale=0.4, size=num_items)[item]
    score += np.einsum("nd,nd->n", users[user], items[item]) + rng.normal(scale=noise, size=len(user))
    return np.clip(np.rint(score), 1, 5).astype(np.float32)


def _times(rng: np.random.Generator, sizes: np.ndarray) -> np.ndarray:
    """Draw seconds: every user starts some day of a year and rates every half minute or so."""
    gaps = 1 + rng.exponential(30, sizes.sum()).astype(np.int64)
    running = np.cumsum(gaps)
    before = np.concatenate([[0], running])[np.cumsum(sizes) - sizes]
    first = 956_703_600 + rng.integers(0, 365 * 86_400, len(sizes))
    return np.repeat(first - before, sizes) + running


# ---- text ----


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

    Example:
      >>> import fedrecon as fr
      >>> len(fr.data.synthetic_text(num_clients=10, sentences=4, shared_words=20, kinds=5).words)
      25
    """
    sizes = {"num_clients": num_clients, "sentences": sentences, "shared_words": shared_words}
    sizes |= {"private_words": private_words, "kinds": kinds}
    check_numbers(sizes, least=1)
    words = [f"w{k}" for k in range(shared_words)] + [f"k{k}" for k in range(kinds)]
    settings = CorpusSettings(
        fractions=fractions, seed=seed, words=words, kept_words=len(words), max_sentences=sentences
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "corpus"
        prepare_corpus(_posts(np.random.default_rng(seed), **sizes), folder, settings, "synthetic text", Counter())
        return Corpus.open(folder, mapped=False)


def _posts(
    rng: np.random.Generator, num_clients: int, sentences: int, shared_words: int, private_words: int, kinds: int
) -> Iterator[Post]:
    width = len(str(num_clients - 1))
    for client in range(num_clients):
        kind = rng.integers(kinds, size=private_words)
        starts, private = rng.integers([shared_words, private_words], size=(sentences, 2)).T.tolist()
        for time, (start, word) in enumerate(zip(starts, private, strict=True)):
            circle = [f"w{(start + k) % shared_words}" for k in range(4)]
            sentence = [*circle[:2], f"p{client}-{word}", f"k{kind[word]}", *circle[2:]]
            yield Post(f"{client:0{width}}", float(time), [sentence])
