"""The server's four steps: introduce, deliver, collect, total.

Each takes the state and the clients' messages as `(client, bytes)` pairs, where `client` is the sender
according to the transport, and returns the next state and a message for each client. Whoever is missing has dropped
out. A message that cannot be read counts as missing; `SumState.refused` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from fedrecon._src.core.checks import check_rules
from fedrecon._src.privacy.secure_sum import primitives, sum_messages
from fedrecon._src.privacy.secure_sum.client_steps import pair_key
from fedrecon._src.privacy.secure_sum.primitives import add_mask, combine
from fedrecon._src.privacy.secure_sum.sum_messages import ANSWERED, DROPPED
from fedrecon._src.privacy.secure_sum.terms import (
    MessageError,
    SecureSumError,
    Terms,
    TooFewClients,
    circles,
    expect_step,
)

T = TypeVar("T")
Incoming = Iterable[tuple[int, bytes]]
Outgoing = dict[int, bytes]


class Sum(NamedTuple):
    """What the server learns.

    Attributes:
      total: `(length,)` the sum, modulo 2**bits, over `clients`.
      clients: whose input is in the sum.
      refused: `{client: why its message was not accepted}`.
    """

    total: np.ndarray
    clients: tuple[int, ...]
    refused: Mapping[int, str]


@dataclass(frozen=True)
class SumState:
    """What the server keeps between messages.

    Attributes:
      terms: of this sum.
      stage: the step that comes next.
      hellos: what each client advertised.
      circles: who exchanges keys with whom.
      shared: clients who gave shares to their circle.
      answered: clients whose masked input is in `masked`.
      masked: the sum of masked inputs.
      refused: messages that were not accepted, by client.
    """

    terms: Terms
    stage: str
    hellos: Mapping[int, sum_messages.Hello]
    circles: Mapping[int, tuple[int, ...]]
    shared: frozenset[int] = frozenset()
    answered: frozenset[int] = frozenset()
    masked: np.ndarray | None = field(default=None, repr=False)
    refused: Mapping[int, str] = field(default_factory=dict)


def introduce(
    terms: Terms, hellos: Incoming, *, verify_keys: sum_messages.VerifyKeys | None = None
) -> tuple[SumState, Outgoing]:
    """Draw circles among those who advertised, and tell each client its own.

    Args:
      terms: as clients were told.
      hellos: of `advertise`.
      verify_keys: keys of the devices that exist; whoever has not signed with its own is left out.
    """
    terms.check()
    refused: dict[int, str] = {}
    read = partial(sum_messages.read_hello, terms=terms, verify_keys=verify_keys)
    by_client = dict(_readable(hellos, read, None, refused))
    if len(by_client) < terms.threshold:
        raise TooFewClients("advertise", len(by_client), terms.threshold)
    drawn = circles(by_client, terms.circle)
    rosters = {
        client: sum_messages.write_roster(terms, client, {member: by_client[member] for member in circle})
        for client, circle in drawn.items()
    }
    return SumState(terms, "deliver", by_client, drawn, refused=refused), rosters


def deliver(state: SumState, shares: Incoming) -> tuple[SumState, Outgoing]:
    """Deliver shares to the clients they are for.

    A client whose circle has too few left to continue is left out, as if it had dropped out.

    Args:
      state: after `introduce`.
      shares: of `share`.
    """
    expect_step("deliver", state.stage)
    terms, refused = state.terms, dict(state.refused)

    def read(message: bytes, *, client: int) -> dict[int, bytes]:
        return sum_messages.read_entries("shares", message, terms, client, set(state.circles[client]) - {client})

    sealed = dict(_readable(shares, read, state.circles, refused))
    shared = set(sealed)
    while lonely := {client for client in shared if _present(state, client, shared) < terms.threshold}:
        shared -= lonely
    if len(shared) < terms.threshold:
        most = max((_present(state, client, set(sealed)) for client in sealed), default=0)
        raise TooFewClients("share", most, terms.threshold)
    after = replace(state, stage="collect", shared=frozenset(shared), refused=refused)
    deliveries = {}
    for client in sorted(shared):
        entries = {other: sealed[other][client] for other in state.circles[client] if other in shared - {client}}
        deliveries[client] = sum_messages.write_entries("delivery", terms, client, entries)
    return after, deliveries


def collect(state: SumState, masked: Incoming) -> tuple[SumState, Outgoing]:
    """Add up masked inputs, one at a time, and ask for what is needed to take the masks off.

    Args:
      state: after `deliver`.
      masked: of `mask`; may be a generator, so that not all inputs are in memory.
    """
    expect_step("collect", state.stage)
    terms, refused = state.terms, dict(state.refused)
    total, answered = np.zeros(terms.length, terms.dtype), set()
    read = partial(sum_messages.read_masked, terms=terms)
    for client, vector in _readable(masked, read, state.shared, refused):
        np.add(total, vector, out=total)
        answered.add(client)
    _check_left(state, answered, answered, "mask")
    after = replace(state, stage="total", answered=frozenset(answered), masked=total, refused=refused)
    requests = {
        client: sum_messages.write_entries("request", terms, client, _shares_to_reveal(after, client))
        for client in sorted(answered)
    }
    return after, requests


def total(state: SumState, reveals: Incoming) -> Sum:
    """Take the masks off the sum.

    Args:
      state: after `collect`.
      reveals: of `unmask`.
    """
    expect_step("total", state.stage)
    terms, refused = state.terms, dict(state.refused)

    def read(message: bytes, *, client: int) -> dict[int, bytes]:
        return sum_messages.read_entries("reveal", message, terms, client, _shares_to_reveal(state, client))

    revealed = dict(_readable(reveals, read, state.answered, refused))
    _check_left(state, state.answered, set(revealed), "unmask")
    assert state.masked is not None
    result, digest = state.masked.copy(), terms.digest()
    for client in sorted(state.answered):
        seed = _secret(state, client, revealed)
        add_mask(result, primitives.derive(seed, digest, b"own mask", client), subtract=True)
    # the masks that others have in common with a client that dropped out
    for client in sorted(state.shared - state.answered):
        if partners := [other for other in state.circles[client] if other in state.answered]:
            private = primitives.mask_private(_secret(state, client, revealed), digest, client)
            for other in partners:
                key = pair_key(private, client, state.hellos[other].mask, other, digest)
                add_mask(result, key, subtract=other < client)
    return Sum(result, tuple(sorted(state.answered)), refused)


def _secret(state: SumState, client: int, revealed: Mapping[int, dict[int, bytes]]) -> bytes:
    """Put together the seed of a client that answered, or the root of one that did not."""
    circle, digest, hello = state.circles[client], state.terms.digest(), state.hellos[client]
    shares = {holder: revealed[holder][client] for holder in circle if holder in revealed}
    secret = combine(shares, state.terms.threshold, circle)
    if client in state.answered:
        right = primitives.derive(secret, digest, b"commitment", client) == hello.commitment
    else:
        right = primitives.public_of(primitives.mask_private(secret, digest, client)) == hello.mask
    if not right:
        raise SecureSumError(
            f"the shares of client {client} do not give its secret: client {client} shared, or one of its circle "
            "revealed, something wrong; there is no sum, and nobody's data is known"
        )
    return secret


def _shares_to_reveal(state: SumState, client: int) -> dict[int, bytes]:
    """Return the entries of the request to a client."""
    members = (other for other in state.circles[client] if other in state.shared)
    return {other: ANSWERED if other in state.answered else DROPPED for other in members}


def _present(state: SumState, client: int, among: Set[int]) -> int:
    return sum(member in among for member in state.circles[client])


def _check_left(state: SumState, answered: Set[int], left: Set[int], stage: str) -> None:
    """Refuse to continue if too few are left of a circle whose secret is needed."""
    needed = state.terms.threshold
    count, scope = len(left), ""
    if count >= needed:
        affected = [client for client in state.shared if _present(state, client, answered)]
        worst = min(affected, key=lambda client: _present(state, client, left))
        count, scope = _present(state, worst, left), f" of the circle of client {worst}"
    if count < needed:
        raise TooFewClients(stage, count, needed, scope)


def _readable(
    incoming: Incoming, read: Callable[..., T], expected: Collection[int] | None, refused: dict[int, str]
) -> Iterable[tuple[int, T]]:
    """Yield what can be read, each client once; note in `refused` what cannot."""
    seen: set[int] = set()
    for client, message in incoming:
        rules = {
            f"client {client} sent this message twice; the first one is used": client not in seen,
            f"client {client} is not, or no longer, part of this sum": expected is None or client in expected,
        }
        try:
            check_rules(rules, MessageError)
            content = read(message, client=client)
        except MessageError as problem:
            refused[client] = str(problem)
        else:
            seen.add(client)
            yield client, content
