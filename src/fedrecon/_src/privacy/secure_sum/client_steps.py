"""The client's four steps: advertise, share, mask, unmask.

Each takes the state and a message of the server, and returns the next state and a message for it. Keep the new state
before you send the message, and forget the old one: a state is for one step. A step that is taken again, or
out of order, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedrecon._src.core.checks import check_rules
from fedrecon._src.privacy.secure_sum import primitives, sum_messages
from fedrecon._src.privacy.secure_sum.primitives import SECRET, SHARE, add_mask, split
from fedrecon._src.privacy.secure_sum.sum_messages import ANSWERED, DROPPED, Hello
from fedrecon._src.privacy.secure_sum.terms import (
    MessageError,
    Refusal,
    SecureSumError,
    Terms,
    expect_step,
)


@dataclass(frozen=True)
class ClientState:
    """What a client keeps between messages. It holds secrets: it stays on the device.

    Attributes:
      terms: of this sum.
      me: this client's number.
      stage: the step that comes next.
      seed: the secret from which its own mask follows.
      root: the secret from which its masks with others follow.
      cipher: the private key with which it reads shares.
      circle: `{client: (cipher key, mask key)}`, public keys, itself included.
      held: `{client: (share of its root, share of its seed)}`, of those who shared, itself included.
    """

    terms: Terms
    me: int
    stage: str
    seed: bytes = field(default=b"", repr=False)
    root: bytes = field(default=b"", repr=False)
    cipher: bytes = field(default=b"", repr=False)
    circle: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    held: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)


def advertise(
    terms: Terms, me: int, *, least: int, signing_key: Ed25519PrivateKey | None = None
) -> tuple[ClientState, bytes]:
    """Draw keys for one sum and advertise them.

    Args:
      terms: as the server says.
      me: this client's number in the cohort.
      least: the fewest clients whose sum this client wants to be part of; refused if the threshold is below.
      signing_key: the client's own, if others know its verify key.
    """
    terms.check()
    if not 0 <= me < 2**64:
        raise SecureSumError(f"`me` must be from 0 to 2**64 - 1 (got {me})")
    if terms.threshold < least:
        raise Refusal(f"client {me} takes part in sums of {least} or more; the terms allow {terms.threshold}")
    seed = os.urandom(SECRET)
    state = ClientState(terms, me, "share", seed, root=os.urandom(SECRET), cipher=os.urandom(32))
    commitment = primitives.derive(seed, terms.digest(), b"commitment", me)
    return state, sum_messages.write_hello(terms, me, Hello(*_public_keys(state), commitment), signing_key)


def _public_keys(state: ClientState) -> tuple[bytes, bytes]:
    """Return the keys that a client advertises: for shares, and for masks."""
    mask_key = primitives.mask_private(state.root, state.terms.digest(), state.me)
    return primitives.public_of(state.cipher), primitives.public_of(mask_key)


def share(
    state: ClientState, roster: bytes, *, verify_keys: sum_messages.VerifyKeys | None = None
) -> tuple[ClientState, bytes]:
    """Give each member of the circle a share of both secrets, encrypted for it.

    Args:
      state: after `advertise`.
      roster: the server's answer.
      verify_keys: keys of the clients that exist, by number; a member that has not signed with its own is refused.
        Without them the server is trusted not to invent clients.
    """
    expect_step("share", state.stage, f"client {state.me}", Refusal)
    terms, me = state.terms, state.me
    circle = sum_messages.read_roster(roster, terms, me, verify_keys)
    _check_circle(state, circle)
    members = tuple(sorted(circle))
    roots = split(state.root, terms.threshold, members)
    seeds = split(state.seed, terms.threshold, members)
    digest, sealed = terms.digest(), {}
    for other in members:
        if other != me:
            key = primitives.agree(state.cipher, circle[other].cipher, digest, b"share", me, other)
            nonce = os.urandom(sum_messages.NONCE)
            sealed[other] = nonce + AESGCM(key).encrypt(nonce, roots[other] + seeds[other], digest)
    public = {client: (hello.cipher, hello.mask) for client, hello in circle.items()}
    after = replace(state, stage="mask", circle=public, held={me: (roots[me], seeds[me])})
    return after, sum_messages.write_entries("shares", terms, me, sealed)


def mask(state: ClientState, delivery: bytes, vector: np.ndarray) -> tuple[ClientState, bytes]:
    """Mask the input: only in the sum with the others' do the masks cancel.

    Args:
      state: after `share`.
      delivery: the server's answer.
      vector: `(length,)` integers of the ring.
    """
    expect_step("mask", state.stage, f"client {state.me}", Refusal)
    terms, me = state.terms, state.me
    if vector.shape != (terms.length,) or vector.dtype != terms.dtype:
        raise SecureSumError(f"`vector` must be {terms.dtype}[{terms.length}] (got {vector.dtype}{list(vector.shape)})")
    held, digest = dict(state.held), terms.digest()
    for other, text in sum_messages.read_entries("delivery", delivery, terms, me).items():
        if other == me or other not in state.circle:
            raise MessageError(f"a delivery message has shares of client {other}, who is not in this client's circle")
        key = primitives.agree(state.cipher, state.circle[other][0], digest, b"share", other, me)
        try:
            both = AESGCM(key).decrypt(text[: sum_messages.NONCE], text[sum_messages.NONCE :], digest)
        except InvalidTag:
            raise MessageError(f"the shares of client {other} are damaged, or for another client") from None
        held[other] = (both[:SHARE], both[SHARE:])
    if len(held) < terms.threshold:
        raise Refusal(f"{len(held)} of this circle shared, below the threshold {terms.threshold}: nothing is sent")
    masked = vector.copy()
    add_mask(masked, primitives.derive(state.seed, digest, b"own mask", me))
    private = primitives.mask_private(state.root, digest, me)
    for other in held:
        if other != me:
            add_mask(masked, pair_key(private, me, state.circle[other][1], other, digest), subtract=other < me)
    # The seed, the root and the cipher key are no longer needed; others may still ask for the shares.
    after = replace(state, stage="unmask", held=held, seed=b"", root=b"", cipher=b"")
    return after, sum_messages.write_masked(terms, me, masked)


def unmask(state: ClientState, request: bytes) -> tuple[ClientState, bytes]:
    """Reveal one share for each member of the circle: of the seed if it answered, of the root if it dropped out.

    Args:
      state: after `mask`.
      request: the server's answer.
    """
    expect_step("unmask", state.stage, f"client {state.me}", Refusal)
    # A client that is named twice is refused here: both its secrets would reveal its input.
    requested = sum_messages.read_entries("request", request, state.terms, state.me)
    answered = {client: flag == ANSWERED for client, flag in requested.items()}
    threshold, count = state.terms.threshold, sum(answered.values())
    sent = "its input was sent, so nothing is revealed"
    strangers = "the clients that the server asks about are not those that shared with this one"
    rules = {
        "the server asks for a kind of share that does not exist": set(requested.values()) <= {ANSWERED, DROPPED},
        strangers: set(answered) == set(state.held),
        f"the server says that client {state.me} did not answer; {sent}": answered.get(state.me),
        f"{count} clients of this client's circle answered, and the threshold is {threshold}": count >= threshold,
    }
    check_rules(rules, Refusal)
    shares = {client: state.held[client][1 if yes else 0] for client, yes in answered.items()}
    reveal = sum_messages.write_entries("reveal", state.terms, state.me, shares)
    return replace(state, stage="done", circle={}, held={}), reveal


def pair_key(private: bytes, client: int, public: bytes, other: int, digest: bytes) -> bytes:
    """Return the key of the mask that two clients have in common: the lower number adds it, the other subtracts."""
    return primitives.agree(private, public, digest, b"pair mask", min(client, other), max(client, other))


def _check_circle(state: ClientState, circle: Mapping[int, Hello]) -> None:
    least, hello = state.terms.threshold, circle.get(state.me)
    keys = {key for each in circle.values() for key in (each.cipher, each.mask)}
    present = hello is not None and (hello.cipher, hello.mask) == _public_keys(state)
    rules = {
        f"the server's roster does not have client {state.me} with the keys that it advertised": present,
        f"a circle of {len(circle)} clients; the terms allow {least} or more": len(circle) >= least,
        "two clients of the server's roster have the same key: it names one client twice": len(keys) == 2 * len(circle),
    }
    check_rules(rules, Refusal)
