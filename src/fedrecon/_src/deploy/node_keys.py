"""Keys of nodes: the server's registry, signed requests, and the keys of secure sums."""

from __future__ import annotations

import functools
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrecon._src.deploy.messages import Failure
from fedrecon._src.deploy.plan import Plan, PlanError

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


def read_private_key(path: Path) -> Any:
    """Read a node's private key, an Ed25519 key as OpenSSH writes it.

    Raises:
      ValueError: it cannot be read.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except ValueError as error:
        raise ValueError(f"{path} is not an unencrypted private key ({error}); make one with fedrecon keys") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path} is not an Ed25519 key; make one with fedrecon keys")
    return key


def read_public_keys(folder: Path) -> tuple[str, ...]:
    """Read the public keys in a folder, one line each, as a plan lists them.

    Raises:
      PlanError: there are none, or one cannot be read.
    """
    files = sorted(folder.glob("*.pub"))
    if not files:
        raise PlanError(f"{folder} has no public keys (*.pub); make some with fedrecon keys")
    lines = []
    for file in files:
        kind, text, *_ = [*file.read_text(encoding="ascii", errors="replace").split(), "", ""]
        _load(f"{kind} {text}")
        lines.append(f"{kind} {text} {file.stem}")
    return tuple(lines)


def read_registry(folder: Path) -> dict[bytes, str]:
    """Read the public keys in a folder as a registry: the names of nodes by the bytes of their keys.

    Raises:
      PlanError: there are none, or one cannot be read.
    """
    lines = read_public_keys(folder)
    return {_load(_without_comment(line)).public_bytes_raw(): line.split()[2] for line in lines}


def number_in_plan(plan: Plan, key: Any, trusted: Collection[str] | None) -> int | None:
    """Return a node's number among the nodes that a plan lists; None if keys are not signed.

    Args:
      plan: the plan of the secure sums.
      key: the node's private key.
      trusted: public keys of nodes that the node's owner knows; None to trust the plan's list.

    Raises:
      Failure: the node is not in the list, or its owner does not know a node that is.
    """
    if not plan.promises.signed:
        if trusted is not None and plan.secure:
            raise Failure("not_accepted", "this node's owner listed nodes, but in this plan keys are not signed")
        return None
    listed = [_without_comment(line) for line in plan.nodes]
    if trusted is not None and (strangers := set(listed) - set(map(_without_comment, trusted))):
        raise Failure("not_accepted", f"the plan lists {len(strangers)} nodes that this node's owner does not know")
    public = None if key is None else _public_line(key)
    if public not in listed:
        raise Failure("not_accepted", "the plan lists the keys of its nodes, and this node's is not among them")
    return listed.index(public)


def verify_keys(plan: Plan) -> Mapping[int, Any] | None:
    """Return the keys of a plan's nodes by number; None if keys are not signed."""
    return {k: _load(_without_comment(line)) for k, line in enumerate(plan.nodes)} if plan.promises.signed else None


def _without_comment(line: str) -> str:
    return " ".join(line.split()[:2])


def _public_line(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@functools.lru_cache(maxsize=4096)
def _load(line: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(line.encode())
    except ValueError as error:
        raise PlanError(f"{line[:60]!r} is not a public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise PlanError(f"{line[:60]!r} is not an Ed25519 key; make one with fedrecon keys")
    return key


# ---- signed requests ----


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


@functools.lru_cache(maxsize=4096)
def _public_key(key: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(key)


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
            _public_key(key).verify(signature, _signed_text(method, target, *values[1:4]))
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
