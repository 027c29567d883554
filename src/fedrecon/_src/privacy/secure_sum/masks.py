"""Masks: the keystream of ChaCha20, read as integers of a ring."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

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
