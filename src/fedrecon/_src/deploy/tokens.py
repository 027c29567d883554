"""Admission of devices: tokens that the operator's own backend issues, and how often somebody may ask.

A token says that the backend vouches for a device until some time. How the backend knows (an account, App Attest, Play
Integrity) is its own business: it calls `issue_token` once it does. The coordinator checks tokens with the same secret.
"""

from __future__ import annotations

import base64
import hmac
import re
import time
from collections.abc import Hashable
from pathlib import Path

from fedrecon._src.core.checks import check_number, check_rules
from fedrecon._src.storage.atomic import read_bytes

SECRET_BYTES = 32
LONGEST = 3650 * 86_400  # seconds for which a token may be valid
MOST_BUDGETS = 100_000  # after which budgets that are full again are forgotten
_DEVICE = re.compile("[A-Za-z0-9_-]{1,64}")
_TOKEN = re.compile(r"v1\.([A-Za-z0-9_-]{1,64})\.([0-9]{1,12})\.([A-Za-z0-9_-]{43})")


class Refused(ValueError):
    """A message or request that is refused.

    Attributes:
      reason: one word, by which refusals are counted.
      why: a sentence.
    """

    def __init__(self, reason: str, why: str):
        """Set the reason and why."""
        super().__init__(why)
        self.reason, self.why = reason, why


class AdmissionError(Refused):
    """A request whose token or signature admits nobody: `no-token`, `bad-token`, or one of `node_keys.PROBLEMS`."""


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
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise AdmissionError("no-token", "a request needs `Authorization: Bearer TOKEN`")
    if not hmac.compare_digest(match[3], _mac(secret, token.rpartition(".")[0])):
        raise AdmissionError("bad-token", "the token was not issued with the coordinator's secret")
    if int(match[2]) < time.time():
        raise AdmissionError("expired-token", "the token has expired; ask for another")
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
