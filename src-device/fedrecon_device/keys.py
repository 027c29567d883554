"""Random keys as the simulator draws them: Threefry-2x32, the hash of a name, the order of a redrawn split.

Keys are pairs of 32-bit words. What a device draws follows from the round's key and its own name, so the server can
repeat it only if it knows the name; nothing here is secret, and nothing that must be secret is drawn here.
"""

from __future__ import annotations

Key = tuple[int, int]  # two 32-bit words
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
NAME_SALT = 0x632BE59BD9B4E019
WORD, LONG = (1 << 32) - 1, (1 << 64) - 1


def threefry(key: Key, counter: Key) -> Key:
    """Encrypt a counter with Threefry-2x32 of 20 rounds, the generator of JAX's default keys."""
    words = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + words[0]) & WORD, (counter[1] + words[1]) & WORD
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = (x + y) & WORD
            y = x ^ ((y << rotation | y >> (32 - rotation)) & WORD)
        x = (x + words[(group + 1) % 3]) & WORD
        y = (y + words[(group + 2) % 3] + group + 1) & WORD
    return x, y


def fold_in(key: Key, number: int) -> Key:
    """Return the key that `jax.random.fold_in` makes of a key and a 32-bit number."""
    return threefry(key, (0, number & WORD))


def mix_hash(number: int, salt: int) -> int:
    """Hash a 64-bit number with a salt: the mixer of SplitMix64."""
    x = (number * 0x9E3779B97F4A7C15 + salt) & LONG
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & LONG
    return x ^ (x >> 31)


def name_hash(name: str) -> int:
    """Return the 64-bit hash of a client's name, over its code points; those that are 0 do not count."""
    result = 0
    for character in name.replace("\0", ""):
        result = mix_hash(result ^ ord(character), NAME_SALT)
    return result


def client_key(round_key: Key, name: str) -> Key:
    """Return a client's key of a round: the round's, with both words of the name's hash folded in."""
    identity = name_hash(name)
    return fold_in(fold_in(round_key, identity >> 32), identity)


def redrawn_order(round_key: Key, name: str, size: int) -> list[int]:
    """Return the order in which a redrawn split takes a client's examples in a round: by hash, ties by position."""
    draw = mix_hash(name_hash(name), round_key[0] << 32 | round_key[1])
    return sorted(range(size), key=lambda position: (mix_hash(position, draw), position))
