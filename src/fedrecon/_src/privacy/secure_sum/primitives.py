"""Cryptography of a secure sum: keys and signatures, masks from ChaCha20, and Shamir's secret sharing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
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
    combine = np.subtract if subtract else np.add
    for begin in range(0, len(total), len(_ZEROS) // width):
        part = total[begin : begin + len(_ZEROS) // width]
        mask = np.frombuffer(stream.update(_ZEROS[: len(part) * width]), total.dtype)
        combine(part, mask, out=part)


_POLYNOMIAL = (1 << 128) | 0b10000111  # irreducible: x**128 + x**7 + x**2 + x + 1
SECRET = 16  # bytes of a secret, and of a share


def split(secret: bytes, threshold: int, holders: tuple[int, ...]) -> dict[int, bytes]:
    """Divide a secret among holders; any `threshold` of them can put it together.

    The coefficients always come from the system's entropy; the library takes no other. No result depends on them.
    """
    shares = Shamir.split(threshold, len(holders), secret, False)
    return {holder: value for holder, (_, value) in zip(holders, shares, strict=True)}


class Combiner:
    """Puts secrets together from at least `threshold` shares of each; further ones are ignored.

    The same as `Shamir.combine`, whose time grows with the square of the threshold (30 ms for 25). What depends only on
    the positions of the shares is computed once, and used for every secret with shares at the same positions.
    """

    def __init__(self, threshold: int) -> None:
        """Begin without any positions."""
        self._threshold = threshold
        self._weights: list[dict[int, int]] = []  # for some positions, what shares at them are multiplied by

    def combine(self, shares: Mapping[int, bytes], holders: tuple[int, ...]) -> bytes:
        """Put a secret together.

        Args:
          shares: by holder.
          holders: all that the secret was divided among, in the same order.
        """
        by_position = {k: shares[holder] for k, holder in enumerate(holders, 1) if holder in shares}
        weights = next((weights for weights in self._weights if weights.keys() <= by_position.keys()), None)
        if weights is None:
            weights = _lagrange_weights(sorted(by_position)[: self._threshold])
            self._weights.append(weights)
        secret = 0
        for position, weight in weights.items():
            secret ^= _multiply(int.from_bytes(by_position[position], "big"), weight)
        return secret.to_bytes(SECRET, "big")


def _lagrange_weights(positions: Sequence[int]) -> dict[int, int]:
    """Return what shares at these positions are multiplied by: Lagrange's polynomials at 0."""
    weights = {}
    for position in positions:
        above, below = 1, 1
        for other in positions:
            if other != position:
                above, below = _multiply(above, other), _multiply(below, position ^ other)
        weights[position] = _multiply(above, _invert(below))
    return weights


def _multiply(a: int, b: int) -> int:
    """Multiply in the field of 2**128 elements in which `Shamir` computes."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        b >>= 1
        a <<= 1
        if a >> 128:
            a ^= _POLYNOMIAL
    return product


def _invert(element: int) -> int:
    """Return the multiplicative inverse: the power of 2**128 - 2."""
    inverse = 1
    for _ in range(127):
        element = _multiply(element, element)
        inverse = _multiply(inverse, element)
    return inverse
