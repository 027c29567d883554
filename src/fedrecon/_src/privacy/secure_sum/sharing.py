"""Shamir's secret sharing of 16-byte secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from Crypto.Protocol import SecretSharing

Shamir = SecretSharing.Shamir
Element: Any = SecretSharing._Element  # of the field of 2**128 that `Shamir` computes in

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
    the places of the shares is computed once, and used for every secret that has shares at the same places.
    """

    def __init__(self, threshold: int) -> None:
        """Begin without any places.

        Args:
          threshold: of all secrets.
        """
        self._threshold = threshold
        self._known: list[dict[int, Any]] = []  # for some places, what shares at them are multiplied by

    def combine(self, shares: Mapping[int, bytes], holders: tuple[int, ...]) -> bytes:
        """Put a secret together.

        Args:
          shares: by holder.
          holders: all that the secret was divided among, in the same order.
        """
        here = {place: shares[holder] for place, holder in enumerate(holders, 1) if holder in shares}
        weights = next((known for known in self._known if known.keys() <= here.keys()), None)
        if weights is None:
            weights = _weights(sorted(here)[: self._threshold])
            self._known.append(weights)
        secret = Element(0)
        for place, weight in weights.items():
            secret += Element(here[place]) * weight
        return secret.encode()


def _weights(places: Sequence[int]) -> dict[int, Any]:
    """Return what shares at these places are multiplied by: Lagrange's polynomials at 0."""
    points, weights = [Element(place) for place in places], {}
    for place, mine in zip(places, points, strict=True):
        above, below = Element(1), Element(1)
        for other in points:
            if other is not mine:
                above, below = above * other, below * (mine + other)
        weights[place] = above * below.inverse()
    return weights
