"""Shamir's secret sharing of 16-byte secrets."""

from __future__ import annotations

from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir

SECRET = 16  # bytes of a secret, and of a share


def split(secret: bytes, threshold: int, holders: tuple[int, ...]) -> dict[int, bytes]:
    """Divide a secret among holders; any `threshold` of them can put it together.

    The coefficients come from the system's entropy always; the library takes no other. No result depends on them.
    """
    shares = Shamir.split(threshold, len(holders), secret, False)
    return {holder: value for holder, (_, value) in zip(holders, shares, strict=True)}


def combine(shares: Mapping[int, bytes], threshold: int, holders: tuple[int, ...]) -> bytes:
    """Put a secret together from at least `threshold` shares; more are not looked at.

    The time grows with the square of the threshold (30 ms for 24), so circles are a few dozen.
    """
    places = {holder: place for place, holder in enumerate(holders, 1)}
    chosen = sorted(shares, key=places.__getitem__)[:threshold]
    return Shamir.combine([(places[holder], shares[holder]) for holder in chosen], False)
