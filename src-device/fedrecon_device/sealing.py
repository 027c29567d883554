"""Reports for two servers: a vector under a mask, and the mask's seed sealed to the helper.

The coordinator gets the masked vector and cannot open the seed; the helper opens the seed and never sees the vector.
Only `cryptography` is needed beside numpy; it is imported here and by nothing else of the runtime.
"""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

BITS = (20, 24, 32)
ID, SEED, SEALED = 16, 32, 80  # bytes of a report's id, of a seed, and of a sealed seed
RECORD = ID + SEALED  # what the helper gets of a report
INFO = b"fedrecon two servers v1"
NONCE = bytes(12)  # every key is used once


class Purpose(NamedTuple):
    """What a report is for. A seed that was sealed for one purpose opens for no other.

    Attributes:
      plan: the SHA-256 of the device plan, 32 bytes.
      run: the name of the training.
      batch: 16 bytes that name the sum.
      round: its number, from 0.
      length: how many integers the vector has.
    """

    plan: bytes
    run: str
    batch: bytes
    round: int
    length: int

    def bind(self, report_id: bytes) -> bytes:
        """Return what the seed of a report is bound to."""
        run = hashlib.sha256(self.run.encode()).digest()
        return self.plan + run + self.batch + self.round.to_bytes(8, "big") + report_id + self.length.to_bytes(8, "big")


class Secrets(NamedTuple):
    """What is random in a report: its id, the mask's seed, and a private key that is used once."""

    id: bytes
    seed: bytes
    ephemeral: bytes


def draw_secrets() -> Secrets:
    """Draw the secrets of a report from the system's entropy."""
    return Secrets(os.urandom(ID), os.urandom(SEED), os.urandom(32))


def make_report(
    vector: np.ndarray, helper: bytes, purpose: Purpose, bits: int, secrets: Secrets | None = None
) -> bytes:
    """Return a report: its id, the sealed seed, and the masked vector, packed.

    Args:
      vector: integers of the ring.
      helper: the helper's public key, 32 bytes.
      purpose: what the report is for.
      bits: of the ring: 20, 24 or 32.
      secrets: for test vectors; drawn from the system's entropy by default.
    """
    if vector.shape != (purpose.length,):
        raise ValueError(f"`vector` must have shape ({purpose.length},) (got {vector.shape})")
    secrets = draw_secrets() if secrets is None else secrets
    masked = vector.astype(np.uint32) + expand(secrets.seed, purpose.length)
    return secrets.id + seal(helper, secrets, purpose) + pack(masked, bits)


def expand(seed: bytes, length: int) -> np.ndarray:
    """Return the mask of a seed: the key stream of AES-256-CTR from counter 0, as 32-bit integers."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(4 * length))
    return np.frombuffer(stream, "<u4")


def seal(helper: bytes, secrets: Secrets, purpose: Purpose) -> bytes:
    """Encrypt a seed for the helper: a public key that is used once, and the seed under AES-256-GCM."""
    private = X25519PrivateKey.from_private_bytes(secrets.ephemeral)
    public = private.public_key().public_bytes_raw()
    key = _derive(private.exchange(X25519PublicKey.from_public_bytes(helper)), public, helper)
    return public + AESGCM(key).encrypt(NONCE, secrets.seed, purpose.bind(secrets.id))


def open_seed(private: X25519PrivateKey, public: bytes, record: bytes, purpose: Purpose) -> bytes | None:
    """Return the seed in a record; None if it was sealed for somebody or something else, or is damaged.

    Args:
      private: the helper's key.
      public: its public half.
      record: a report's id and sealed seed.
      purpose: what it should be for.
    """
    report_id, ephemeral, box = record[:ID], record[ID : ID + 32], record[ID + 32 :]
    try:
        key = _derive(private.exchange(X25519PublicKey.from_public_bytes(ephemeral)), ephemeral, public)
        return AESGCM(key).decrypt(NONCE, box, purpose.bind(report_id))
    except (InvalidTag, ValueError):
        return None


def _derive(shared: bytes, ephemeral: bytes, helper: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=ephemeral + helper, info=INFO).derive(shared)


def add_noise(vector: np.ndarray, variance: float) -> np.ndarray:
    """Add Skellam noise, the difference of two Poisson variables, to integers of a ring.

    numpy's generator is seeded with 256 bits of the system's entropy. It is a statistical generator, not a
    cryptographic one; noise leaves the device only in sums, or under a mask.

    Args:
      vector: integers of the ring.
      variance: of the noise in every entry.
    """
    rng = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(os.urandom(32), "big")))
    noise = rng.poisson(variance / 2, vector.shape) - rng.poisson(variance / 2, vector.shape)
    return vector.astype(np.uint32) + noise.astype(np.int32).astype(np.uint32)


# ---- integers of a few bits ----


def packed_size(length: int, bits: int) -> int:
    """Return how many bytes integers have when they are packed."""
    if bits not in BITS:
        raise ValueError(f"`bits` must be one of {BITS} (got {bits!r})")
    return (length + 1) // 2 * 5 if bits == 20 else length * bits // 8


def pack(values: np.ndarray, bits: int) -> bytes:
    """Write integers modulo 2**bits without gaps: two of 20 bits in five bytes, all else in whole bytes."""
    packed_size(len(values), bits)
    if bits != 20:
        return values.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()
    pairs = np.zeros(((len(values) + 1) // 2, 2), "<u8")
    pairs.reshape(-1)[: len(values)] = values & np.uint32(2**20 - 1)
    both = pairs[:, 0] | pairs[:, 1] << np.uint64(20)
    return both.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :5].tobytes()


def unpack(data: bytes, length: int, bits: int) -> np.ndarray:
    """Read what `pack` wrote, as 32-bit integers.

    Raises:
      ValueError: there are more or fewer bytes than so many integers have.
    """
    if len(data) != packed_size(length, bits):
        raise ValueError(f"{length} integers of {bits} bits have {packed_size(length, bits)} bytes (got {len(data)})")
    if bits == 32:
        return np.frombuffer(data, "<u4").astype(np.uint32)
    rows = np.frombuffer(data, np.uint8).reshape(-1, 5 if bits == 20 else bits // 8)
    wide = np.zeros((len(rows), 8 if bits == 20 else 4), np.uint8)
    wide[:, : rows.shape[1]] = rows
    if bits == 24:
        return wide.view("<u4").reshape(-1).astype(np.uint32)
    both, last = wide.view("<u8").reshape(-1), np.uint64(2**20 - 1)
    return np.stack([both & last, both >> np.uint64(20)], 1).reshape(-1)[:length].astype(np.uint32)
