"""Keys: agreed between two clients, derived from a secret, and signatures over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedrecon._src.privacy.secure_sum.errors import MessageError

SigningKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
VerifyKey = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey
VerifyKeys = Mapping[int, VerifyKey] | Callable[[int], VerifyKey | None]  # of the clients that exist


def derive(secret: bytes, digest: bytes, purpose: bytes, *ids: int, length: int = 32) -> bytes:
    """Derive a key for one purpose, bound to the terms and to the clients it is for."""
    info = purpose + b"".join(client.to_bytes(8, "big") for client in ids)
    return HKDF(hashes.SHA256(), length, salt=digest, info=info).derive(secret)


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


def encrypt(key: bytes, nonce: bytes, text: bytes, bound: bytes) -> bytes:
    """Encrypt and authenticate, together with what the text is bound to."""
    return AESGCM(key).encrypt(nonce, text, bound)


def decrypt(key: bytes, nonce: bytes, text: bytes, bound: bytes) -> bytes | None:
    """Decrypt; None if the text was changed, or is for somebody or something else."""
    try:
        return AESGCM(key).decrypt(nonce, text, bound)
    except InvalidTag:
        return None


def sign(key: Any, text: bytes) -> bytes:
    """Sign with an Ed25519 or an elliptic curve key."""
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(text)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(text, ec.ECDSA(hashes.SHA256()))
    raise TypeError(f"`signing_key` is a {type(key).__name__}; use an Ed25519 or an elliptic curve private key")


def verify(keys: VerifyKeys, client: int, signature: bytes, text: bytes) -> None:
    """Raise `MessageError` unless the client's own key signed the text."""
    key = keys(client) if callable(keys) else keys.get(client)
    if key is None:
        raise MessageError(f"client {client} has no verify key here: it is not one of the devices that are known")
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, text)
        else:
            key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise MessageError(f"client {client} has not signed its keys, or not with the key that is known here") from None
