"""Signed requests: which node sent a request and when, and that nobody sent it before."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_CLOCK_SKEW = 300.0  # seconds between the clocks of a node and the coordinator
REQUESTS_PER_SECOND, BURST = 200.0, 400.0  # of one key
_FIELDS = {
    "fedrecon-key": re.compile("[0-9a-f]{64}"),
    "fedrecon-time": re.compile("[0-9]{1,12}"),
    "fedrecon-nonce": re.compile("[0-9a-f]{32}"),
    "fedrecon-digest": re.compile("[0-9a-f]{64}"),
    "fedrecon-signature": re.compile("[0-9a-f]{128}"),
}


class SignatureError(ValueError):
    """A request whose signature does not count.

    Attributes:
      problem: one word that says why: `unsigned`, `unknown-key`, `clock`, `bad-signature`, `replayed`, `too-many`.
    """

    def __init__(self, problem: str, detail: str):
        """Set the problem and a sentence about it."""
        super().__init__(detail)
        self.problem = problem


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the 32 bytes that name a node."""
    return key.public_key().public_bytes_raw()


def sign_request(
    key: Ed25519PrivateKey, method: str, target: str, digest: str, clock: Callable[[], float] = time.time
) -> dict[str, str]:
    """Return the headers that sign a request.

    Args:
      key: the node's private key.
      method: the request's method.
      target: its path with the query.
      digest: the SHA-256 of its body, in hexadecimal digits.
      clock: returns the seconds since 1970.
    """
    fields = [str(int(clock())), secrets.token_hex(16), digest]
    signature = key.sign(_signed_text(method, target, *fields)).hex()
    return dict(zip(_FIELDS, (public_bytes(key).hex(), *fields, signature), strict=True))


def _signed_text(method: str, target: str, *fields: str) -> bytes:
    return "\n".join(("fedrecon request 1", method, target, *fields)).encode()


class Verifier:
    """Checks signatures of registered keys; refuses repeats, clocks that are far off, and floods."""

    def __init__(self, keys: Mapping[bytes, str] | None, max_keys: int = 4096):
        """Take the public keys of nodes with their names; None to admit any key, up to `max_keys`."""
        self._names, self._open, self._max_keys = dict(keys or {}), keys is None, max_keys
        self._nonces: dict[tuple[bytes, str], float] = {}  # in the order of their arrival, with its time
        self._budgets: dict[bytes, tuple[float, float]] = {}  # by key: requests left, and when

    def name(self, key: bytes) -> str:
        """Return the name of a key's node."""
        return self._names[key]

    def keys(self) -> list[bytes]:
        """List the keys that were registered, or seen where any key is admitted."""
        return list(self._names)

    def check(self, method: str, target: str, headers: Mapping[str, str]) -> tuple[bytes, str]:
        """Return the key that signed a request, and the digest of the body that it announces.

        Raises:
          SignatureError: the signature does not count.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        values = [headers.get(name, "") for name in _FIELDS]
        if not all(pattern.fullmatch(value) for pattern, value in zip(_FIELDS.values(), values, strict=True)):
            raise SignatureError("unsigned", f"a request needs the headers {', '.join(_FIELDS)}")
        key, signature = bytes.fromhex(values[0]), bytes.fromhex(values[4])
        moment, nonce, digest = values[1:4]
        if key not in self._names and not (self._open and len(self._names) < self._max_keys):
            raise SignatureError("unknown-key", "this key is not registered with the coordinator")
        now = time.time()
        if abs(now - int(moment)) > MAX_CLOCK_SKEW:
            raise SignatureError("clock", f"signed at {moment}, and it is {now:.0f}: at most 300 s are allowed")
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed_text(method, target, *values[1:4]))
        except (InvalidSignature, ValueError):
            raise SignatureError("bad-signature", "the signature is not one of this key for this request") from None
        self._spend(key)
        self._remember(key, nonce)
        self._names.setdefault(key, f"node-{key.hex()[:8]}")
        return key, digest

    def _spend(self, key: bytes) -> None:
        now = time.monotonic()
        left, since = self._budgets.get(key, (BURST, now))
        left = min(BURST, left + REQUESTS_PER_SECOND * (now - since)) - 1
        if left < 0:
            raise SignatureError("too-many", f"a node may send {REQUESTS_PER_SECOND:g} requests per second")
        self._budgets[key] = (left, now)

    def _remember(self, key: bytes, nonce: str) -> None:
        now = time.monotonic()
        while self._nonces and now - next(iter(self._nonces.values())) > 2 * MAX_CLOCK_SKEW:
            del self._nonces[next(iter(self._nonces))]
        if (key, nonce) in self._nonces:
            raise SignatureError("replayed", "this request was received before")
        self._nonces[key, nonce] = now
