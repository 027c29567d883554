"""Admission: tokens of devices, keys and signed requests of nodes, and how often somebody may ask.

A token says that the operator's own backend vouches for a device until some time. How the backend knows (an account,
App Attest, Play Integrity) is its own business: it calls `issue_token` once it does. The coordinator checks tokens with
the same secret. Nodes have keys, which the coordinator has in a registry, and sign every request; with secure sums,
they sign their keys of the sum, too.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrecon._src.core.checks import check_number, check_rules
from fedrecon._src.storage.atomic import StorageError, read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedrecon._src.deploy.plan import Plan

SECRET_BYTES = 32
MOST_KEY = 2**16  # bytes of a file with a key
LONGEST = 3650 * 86_400  # seconds for which a token may be valid
MOST_BUDGETS = 100_000  # after which budgets that are full again are forgotten
_DEVICE = re.compile("[A-Za-z0-9_-]{1,64}")
_TOKEN = re.compile(r"v1\.([A-Za-z0-9_-]{1,64})\.([0-9]{1,12})\.([A-Za-z0-9_-]{43})")
BEARER = {"WWW-Authenticate": "Bearer"}  # how devices are admitted
MAX_CLOCK_SKEW = 300.0  # seconds between the clocks of a node and the coordinator
NO_EPOCH = "0" * 32  # of a node that has not heard from its server yet
REQUESTS_PER_SECOND, BURST = 200.0, 400.0  # of one key
FIELDS = {
    "fedrecon-key": re.compile("[0-9a-f]{64}"),
    "fedrecon-time": re.compile("[0-9]{1,12}"),
    "fedrecon-nonce": re.compile("[0-9a-f]{32}"),
    "fedrecon-epoch": re.compile("[0-9a-f]{32}"),
    "fedrecon-digest": re.compile("[0-9a-f]{64}"),
    "fedrecon-signature": re.compile("[0-9a-f]{128}"),
}
PROBLEMS = {  # with a token or a signature
    "no-token": "a request needs `Authorization: Bearer TOKEN`",
    "bad-token": "the token was not issued with the coordinator's secret",
    "expired-token": "the token has expired; ask for another",
    "unsigned": f"a request needs the headers {', '.join(FIELDS)}",
    "unknown-key": "this key is not registered with the coordinator",
    "clock": "signed at {signed}, and it is {now}: at most 300 s are allowed",
    "epoch": "signed for another start of the coordinator; sign with the epoch of this response",
    "bad-signature": "the signature is not one of this key for this request",
    "too-many": f"a node may send {REQUESTS_PER_SECOND:g} requests per second",
    "replayed": "this request was received before",
}


class RefusalError(ValueError):
    """A message or request that is refused.

    Attributes:
      reason: one word, by which refusals are counted.
      why: a sentence.
    """

    def __init__(self, reason: str, why: str):
        """Set the reason and why."""
        super().__init__(why)
        self.reason, self.why = reason, why


class AdmissionError(RefusalError):
    """A request that is not admitted, for one of the reasons in `PROBLEMS`.

    Attributes:
      headers: what the response says besides.
    """

    def __init__(self, reason: str, headers: Mapping[str, str], **values: Any):
        """Explain the reason, with the values that its sentence mentions."""
        super().__init__(reason, PROBLEMS[reason].format(**values))
        self.headers = headers


def issue_token(secret: bytes, device: str, seconds: float = 30 * 86_400) -> str:
    """Vouch for a device: return a token with which it may take part in training.

    Args:
      secret: what the backend and the coordinator share, 32 bytes or more.
      device: a name of the device, the same whenever it asks: 1 to 64 letters, digits, - and _. One device has one
        report per round, whatever the number of its tokens. Use a random name, not one that says who it is.
      seconds: for how long.

    Example:
      >>> import fedrecon as fr
      >>> token = fr.deploy.issue_token(bytes(32), "phone-7", seconds=3600)
      >>> token.split(".")[:2]
      ['v1', 'phone-7']
    """
    rules = {
        f"`device` must be 1 to 64 letters, digits, - and _ (got {device[:80]!r})": _DEVICE.fullmatch(device),
        f"`secret` must have {SECRET_BYTES} bytes or more (got {len(secret)})": len(secret) >= SECRET_BYTES,
    }
    check_rules(rules)
    check_number("seconds", seconds, most=LONGEST, above=True)
    text = f"v1.{device}.{int(time.time() + seconds)}"
    return f"{text}.{_mac(secret, text)}"


def device_of(secret: bytes, token: str) -> str:
    """Return the device that a token vouches for.

    Raises:
      AdmissionError: it vouches for none.
    """
    if (match := _TOKEN.fullmatch(token)) is None:
        raise AdmissionError("no-token", BEARER)
    genuine = hmac.compare_digest(match[3], _mac(secret, token.rpartition(".")[0]))
    if not genuine or int(match[2]) < time.time():
        raise AdmissionError("expired-token" if genuine else "bad-token", BEARER)
    return match[1]


def _mac(secret: bytes, text: str) -> str:
    mac = hmac.digest(secret, f"fedrecon-token {text}".encode(), "sha256")
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")


def read_secret(path: Path) -> bytes:
    """Read the secret of tokens, as `fedrecon keys` writes it.

    Raises:
      ValueError: it is missing, or not a secret.
    """
    text = read_bytes(path, 2**10).decode("ascii", "replace").strip()
    if not re.fullmatch(f"([0-9a-f]{{2}}){{{SECRET_BYTES},}}", text):
        raise ValueError(f"{path} must hold {SECRET_BYTES} bytes or more as hexadecimal digits; fedrecon keys makes it")
    return bytes.fromhex(text)


class Budgets:
    """How many requests somebody may send: some at once, and so many per second on average."""

    def __init__(self, per_second: float, burst: float):
        """Give everybody a full budget."""
        self._rate, self._burst = per_second, burst
        self._left: dict[Hashable, tuple[float, float]] = {}  # requests, and when

    def spend(self, name: Hashable) -> bool:
        """Count a request, and say whether it may be sent now."""
        now = time.monotonic()
        if len(self._left) > MOST_BUDGETS:
            full = self._burst / self._rate
            self._left = {name: budget for name, budget in self._left.items() if now - budget[1] < full}
        left, since = self._left.get(name, (self._burst, now))
        left = min(self._burst, left + self._rate * (now - since)) - 1
        if left >= 0:
            self._left[name] = (left, now)
        return left >= 0


# ---- keys of nodes ----


def read_private_key(path: Path) -> Any:
    """Read a node's private key, an Ed25519 key as OpenSSH writes it.

    Raises:
      ValueError: it cannot be read.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    what = "an unencrypted private Ed25519 key"
    return read_key(path, lambda content: load_ssh_private_key(content, None), Ed25519PrivateKey, what)


def read_key(
    path: Path, load: Callable[[bytes], Any], kind: type = object, what: str = "an unencrypted private key"
) -> Any:
    """Return the key or certificate that a function of `cryptography` reads from a file.

    Raises:
      ValueError: it cannot be read, or is of another kind.
    """
    try:
        content = read_bytes(path, MOST_KEY)
    except StorageError as error:
        raise ValueError(f"{error}; fedrecon keys makes {what}") from None
    return _load_key(content, load, kind, str(path), what)


def _load_key(content: bytes, load: Callable[[bytes], Any], kind: type, name: str, what: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    with contextlib.suppress(ValueError, TypeError, UnsupportedAlgorithm):  # OpenSSL's own reasons do not help
        if isinstance(key := load(content), kind):
            return key
    raise ValueError(f"{name} is damaged, or is not {what}; fedrecon keys makes one")


def read_public_keys(folder: Path) -> tuple[str, ...]:
    """Read the public keys in a folder, or the one in a file, one line each, as a plan lists them.

    Raises:
      ValueError: there are none, or one cannot be read.
    """
    files = [folder] if folder.is_file() else sorted(folder.glob("*.pub"))
    if not files:
        raise ValueError(f"{folder} has no public keys (*.pub); make some with fedrecon keys")
    lines = []
    for file in files:
        kind, text, *_ = [*file.read_text(encoding="ascii", errors="replace").split(), "", ""]
        _load_public(f"{kind} {text}")
        lines.append(f"{kind} {text} {file.stem}")
    return tuple(lines)


def read_registry(folder: Path) -> dict[bytes, str]:
    """Read the public keys in a folder, or the one in a file, as a registry: names by the bytes of the keys.

    Raises:
      ValueError: there are none, or one cannot be read.
    """
    return {_load_public(line).public_bytes_raw(): line.split()[2] for line in read_public_keys(folder)}


def number_in_plan(plan: Plan, key: Any, trusted: Collection[str] | None) -> int | None:
    """Return a node's number among the nodes that a plan lists; None if keys are not signed.

    Args:
      plan: the plan of the secure sums.
      key: the node's private key.
      trusted: public keys of nodes that the node's owner knows; None to trust the plan's list.

    Raises:
      ValueError: the node is not in the list, or its owner does not know a node that is.
    """
    if not plan.promises.signed:
        if plan.secure and trusted is not None:
            raise ValueError("this node's owner listed nodes, but in this plan keys are not signed")
        return None
    listed, known = ([_load_public(line) for line in lines] for lines in (plan.nodes, trusted or ()))
    strangers = [] if trusted is None else [public for public in listed if public not in known]
    public = None if key is None else key.public_key()
    rules = {
        f"the plan lists {len(strangers)} nodes that this node's owner does not know": not strangers,
        "the plan lists the keys of its nodes, and this node's is not among them": public in listed,
    }
    check_rules(rules)
    return listed.index(public)


def verify_keys(plan: Plan) -> Mapping[int, Any] | None:
    """Return the keys of a plan's nodes by number; None if keys are not signed."""
    return dict(enumerate(map(_load_public, plan.nodes))) if plan.promises.signed else None


@functools.lru_cache(maxsize=4096)
def _load_public(line: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    content, what = line.encode(errors="replace"), "a public Ed25519 key"
    return _load_key(content, load_ssh_public_key, Ed25519PublicKey, f"{line[:60]!r}", what)


# ---- signed requests ----


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the 32 bytes that name a node."""
    return key.public_key().public_bytes_raw()


def sign_request(
    key: Ed25519PrivateKey, method: str, target: str, digest: str, epoch: str, clock: Callable[[], float] = time.time
) -> dict[str, str]:
    """Return the headers that sign a request.

    Args:
      key: the node's private key.
      method: the request's method.
      target: its path with the query.
      digest: the SHA-256 of its body, in hexadecimal digits.
      epoch: the server's, from its last refusal; `NO_EPOCH` at first.
      clock: returns the seconds since 1970.
    """
    fields = [str(int(clock())), secrets.token_hex(16), epoch, digest]
    signature = key.sign(_signed_text(method, target, *fields)).hex()
    return dict(zip(FIELDS, (public_bytes(key).hex(), *fields, signature), strict=True))


def _signed_text(method: str, target: str, *fields: str) -> bytes:
    return "\n".join(("fedrecon request 2", method, target, *fields)).encode()


@functools.lru_cache(maxsize=4096)
def _public_key(key: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(key)


class Verifier:
    """Checks signatures of registered keys; refuses repeats, clocks that are far off, and floods.

    Nonces are kept in memory only. So that nothing can be repeated after a restart, either, every signature covers the
    verifier's epoch, a random number that nodes learn when a request with another one is refused.
    """

    def __init__(self, keys: Mapping[bytes, str] | None, max_keys: int = 4096):
        """Take the public keys of nodes with their names; None to admit any key, up to `max_keys`."""
        self._names, self._open, self._max_keys = dict(keys or {}), keys is None, max_keys
        self.epoch = secrets.token_hex(16)
        # A request counts for at most 600 s: two generations of 300 s and the one that grows. Hashes take a fifth of
        # the memory of keys and nonces, of which there may be thousands per second.
        self._nonces: collections.deque[set[int]] = collections.deque([set()], maxlen=3)
        self._rotated = time.monotonic()
        self._budgets = Budgets(REQUESTS_PER_SECOND, BURST)

    def name(self, key: bytes) -> str:
        """Return the name of a key's node."""
        return self._names[key]

    def check(self, method: str, target: str, headers: Mapping[str, str]) -> tuple[bytes, str]:
        """Return the key that signed a request, and the digest of the body that it announces.

        Raises:
          AdmissionError: the signature does not count.
        """
        values = [headers.get(name, "") for name in FIELDS]
        if (problem := self._problem(method, target, values)) is not None:
            headers = {"Retry-After": "1"} | ({"Fedrecon-Epoch": self.epoch} if problem == "epoch" else {})
            raise AdmissionError(problem, headers, signed=values[1], now=int(time.time()))
        key = bytes.fromhex(values[0])
        self._names.setdefault(key, f"node-{key.hex()[:8]}")
        return key, values[4]

    def _problem(self, method: str, target: str, values: Sequence[str]) -> str | None:
        """Return the name of what is wrong with a request, the cheapest to find first; None if nothing is."""
        from cryptography.exceptions import InvalidSignature

        if not all(pattern.fullmatch(value) for pattern, value in zip(FIELDS.values(), values, strict=True)):
            return "unsigned"
        key, moment, nonce, epoch = bytes.fromhex(values[0]), int(values[1]), values[2], values[3]
        if key not in self._names and not (self._open and len(self._names) < self._max_keys):
            return "unknown-key"
        if abs(time.time() - moment) > MAX_CLOCK_SKEW:
            return "clock"
        if epoch != self.epoch:
            return "epoch"
        try:
            _public_key(key).verify(bytes.fromhex(values[5]), _signed_text(method, target, *values[1:5]))
        except (InvalidSignature, ValueError):
            return "bad-signature"
        if not self._budgets.spend(key):
            return "too-many"
        return None if self._remember(key, nonce) else "replayed"

    def _remember(self, key: bytes, nonce: str) -> bool:
        """Remember a nonce for 600 to 900 s, and say whether it is new."""
        now = time.monotonic()
        if now - self._rotated > MAX_CLOCK_SKEW:
            self._nonces.appendleft(set())
            self._rotated = now
        short = int.from_bytes(hashlib.blake2b(key + nonce.encode(), digest_size=7).digest())
        new = not any(short in generation for generation in self._nonces)
        self._nonces[0].add(short)
        return new
