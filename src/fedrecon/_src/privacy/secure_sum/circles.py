"""Who exchanges keys with whom."""

from __future__ import annotations

from collections.abc import Iterable

from fedrecon._src.privacy.secure_sum.entropy import SYSTEM, Entropy


def circles(clients: Iterable[int], size: int, entropy: Entropy = SYSTEM) -> dict[int, tuple[int, ...]]:
    """Give each client a circle: itself and those it exchanges keys with, in order of their numbers.

    Up to `size` clients are one circle. More are put on a ring in random order, and a client's circle is those up to
    `(size - 1) // 2` places away on either side. So being in somebody's circle is mutual.

    Args:
      clients: their numbers.
      size: of a circle.
      entropy: where the order on the ring comes from.
    """
    members = sorted(clients)
    if len(members) <= size:
        return dict.fromkeys(members, tuple(members))
    tags = {client: entropy.draw(16) for client in members}
    ring = sorted(members, key=tags.__getitem__)
    reach = (size - 1) // 2
    return {
        client: tuple(sorted(ring[(place + step) % len(ring)] for step in range(-reach, reach + 1)))
        for place, client in enumerate(ring)
    }
