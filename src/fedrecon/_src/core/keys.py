"""Random keys: randomness for a client depends on the seed, the round and its name, never on where it is packed."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key, Shaped

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class RunKeys(NamedTuple):
    """The keys of a run: for the initial parameters, for sampling clients, and for what is random on clients."""

    init: Array
    sampling: Array
    clients: Array


def run_keys(seed: int) -> RunKeys:
    """Return the keys of a run.

    Args:
      seed: the run's seed.

    Example:
      >>> import fedrecon as fr
      >>> fr.kit.run_keys(0)._fields
      ('init', 'sampling', 'clients')
    """
    return RunKeys(*jax.random.split(jax.random.key(seed), 3))


def round_key(seed: int, number: int) -> Array:
    """Return the key of a round. Every client of the round gets the same key.

    Args:
      seed: the run's seed.
      number: the round's number, from 0.

    Example:
      >>> import fedrecon as fr
      >>> bool(fr.kit.round_key(0, 1) == fr.kit.round_key(0, 1)), bool(fr.kit.round_key(0, 1) == fr.kit.round_key(0, 2))
      (True, False)
    """
    return jax.random.fold_in(run_keys(seed).clients, number)


def fresh_key() -> Array:
    """Return a key from the system's entropy."""
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(os.urandom(8), np.uint32)))


def client_keys(key: Key[Array, ""], identity: Shaped[Any, "clients 2"]) -> Key[Array, " clients"]:
    """Derive every client's key from the round's.

    Args:
      key: the round's key.
      identity: hashes of the clients' names, as two 32-bit words each (`Clients.identities`).

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> clients = fr.Clients.from_columns({"x": [1, 2]}, client=["ann", "bob"])
      >>> kit.client_keys(fr.kit.round_key(0, 1), clients.identities()).shape
      (2,)
    """
    return jax.vmap(lambda words: jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1]))(identity)


def fold_keys(keys: Key[Array, " clients"], number: Any) -> Key[Array, " clients"]:
    """Fold one number into the keys of several clients.

    Args:
      keys: the clients' keys.
      number: what to fold in.
    """
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def words_of(key: Array) -> np.ndarray:
    """Return the two 32-bit words of a key, as a numpy array.

    Args:
      key: a JAX key.
    """
    return np.asarray(jax.random.key_data(key), np.uint32)


def threefry(words: Any, counters: Any) -> tuple[Any, Any]:
    """Encrypt counters below 2**32 with one key, by numpy (while JAX's devices may be busy) or in a graph of JAX.

    This is Threefry-2x32 with 20 rounds, the generator of JAX's default keys: the result for a number has the words of
    `jax.random.fold_in(key, number)`. Sums are of int32, since ONNX Runtime has no sum of uint32.

    Args:
      words: `(2,)` of uint32, of the key.
      counters: `(...)` of int32.

    Returns:
      Both words of each, of int32.
    """
    first, second = words.astype(np.int32)
    keys = (first, second, first ^ second ^ np.int32(0x1BD11BDA))
    x, y = keys[0], counters + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            bits = y.astype(np.uint32)
            y = x ^ ((bits << np.uint32(rotation)) | (bits >> np.uint32(32 - rotation))).astype(np.int32)
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + np.int32(group + 1)
    return x, y


def as_number(words: np.ndarray) -> np.ndarray:
    """Return pairs of 32-bit words as 64-bit numbers.

    Args:
      words: `(..., 2)`.
    """
    wide = np.asarray(words, np.uint32).astype(np.uint64)
    return wide[..., 0] << np.uint64(32) | wide[..., 1]


def as_words(numbers: np.ndarray) -> np.ndarray:
    """Return 64-bit numbers as pairs of 32-bit words, `(..., 2)`.

    Args:
      numbers: `(...)`.
    """
    numbers = np.asarray(numbers, np.uint64)
    return np.stack([numbers >> np.uint64(32), numbers & np.uint64(0xFFFFFFFF)], -1).astype(np.uint32)


def mix_hashes(numbers: np.ndarray, salt: np.ndarray | int) -> np.ndarray:
    """Hash 64-bit numbers, each with a salt, so that every output bit depends on every input bit.

    This is the mixer of SplitMix64.

    Args:
      numbers: what to hash.
      salt: one for all, or one for each.
    """
    x = np.asarray(numbers, np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.asarray(salt, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def name_hashes(names: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each name. A number and its decimal text have the same hash.

    Args:
      names: `(clients,)` of integers or text.
    """
    text = np.ascontiguousarray(names.astype(str))
    characters = text.view(np.uint32).reshape(len(text), text.itemsize // 4)  # (clients, longest name)
    hashes = np.zeros(len(text), np.uint64)
    with np.errstate(over="ignore"):
        for column in characters.T:
            in_name = column != 0  # shorter names are padded with zeros, and the padding must not change the hash
            if not in_name.any():
                break  # an integer as text has room for 21 characters, whatever its size
            hashes = np.where(in_name, mix_hashes(hashes ^ column, 0x632BE59BD9B4E019), hashes)
    return hashes
