"""Cryptography of a secure sum: keys, masks from ChaCha20, and Shamir's secret sharing."""

from __future__ import annotations

import functools
import operator
import secrets
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedrecon._src.privacy.secure_sum.terms import MessageError


def derive(secret: bytes, digest: bytes, purpose: bytes, *ids: int) -> bytes:
    """Derive a key for one purpose, bound to the terms and to the clients it is for."""
    info = purpose + b"".join(client.to_bytes(8, "big") for client in ids)
    return HKDF(hashes.SHA256(), 32, salt=digest, info=info).derive(secret)


def public_of(private: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def mask_private(root: bytes, digest: bytes, client: int) -> bytes:
    """Return the private key from which a client's pairwise masks follow.

    It is derived from 16 bytes, which are what is shared: Shamir's scheme then runs once, not on two halves. The key
    agreement has no more than 128 bits of security anyway, and terms and client are part of the derivation, so that
    work spent on one client does not help with another.
    """
    return derive(root, digest, b"mask key", client)


def agree(private: bytes, public: bytes, digest: bytes, purpose: bytes, *ids: int) -> bytes:
    """Return the key that two clients have in common for a purpose."""
    try:
        common = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise MessageError("a public key is not valid: no secret can be agreed with it") from None
    return derive(common, digest, purpose, *ids)


_ZEROS = bytes(1 << 18)  # a stretch that stays in the processor's cache


def add_mask(total: np.ndarray, key: bytes, *, subtract: bool = False) -> None:
    """Add to `total`, in place, the integers that follow from a key, or subtract them.

    A key is for one mask only, which is why the nonce can be zero.
    """
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    width = total.dtype.itemsize
    change = np.subtract if subtract else np.add
    for begin in range(0, len(total), len(_ZEROS) // width):
        part = total[begin : begin + len(_ZEROS) // width]
        mask = np.frombuffer(stream.update(_ZEROS[: len(part) * width]), total.dtype)
        change(part, mask, out=part)


PRIME = 2**130 - 5  # of the field of Shamir's scheme
SECRET, SHARE = 16, 17  # bytes of a secret, and of a share: any number below the prime


def split(secret: bytes, threshold: int, holders: tuple[int, ...]) -> dict[int, bytes]:
    """Divide a secret among holders; any `threshold` of them can put it together.

    The k-th holder's share is the value at k of a random polynomial of degree `threshold - 1`. At 0 it is the secret.
    """
    coefficients = [*(secrets.randbelow(PRIME) for _ in range(threshold - 1)), int.from_bytes(secret)]
    shares = {}
    for position, holder in enumerate(holders, 1):
        value = 0
        for coefficient in coefficients:
            value = (value * position + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE)
    return shares


def combine(shares: Mapping[int, bytes], threshold: int, holders: tuple[int, ...]) -> bytes:
    """Put a secret together from at least `threshold` shares; further ones are ignored. Wrong shares give any bytes.

    Args:
      shares: by holder.
      threshold: how many are needed.
      holders: all that the secret was divided among, in the same order.
    """
    positions = tuple(k for k, holder in enumerate(holders, 1) if holder in shares)[:threshold]
    values = (int.from_bytes(shares[holders[position - 1]]) for position in positions)
    value = sum(map(operator.mul, _lagrange_weights(positions), values)) % PRIME
    return value.to_bytes(SECRET if value < 2 ** (8 * SECRET) else SHARE)  # longer than any secret: a share was wrong


@functools.lru_cache(maxsize=64)  # the secrets of a circle have shares at the same positions
def _lagrange_weights(positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return what shares at these positions are multiplied by: Lagrange's polynomials at 0."""
    weights = []
    for position in positions:
        above, below = 1, 1
        for other in positions:
            if other != position:
                above, below = above * other % PRIME, below * (other - position) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
