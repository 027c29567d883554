"""A node's side of the protocol: outgoing requests only, signed, repeated until the server is back."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
from pydantic import TypeAdapter, ValidationError

from fedrecon._src.core.display import Say
from fedrecon._src.deploy.admission import FIELDS, NO_EPOCH, RefusalError, sign_request
from fedrecon._src.deploy.tasks import NodeTask

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

WAIT = 20  # seconds of a long poll
FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0  # between two tries to reach the server
TIMEOUT, CONNECT = 60.0, 10.0  # seconds of an answer, and until there is a connection
MAX_ANSWER = 2**16  # bytes of a response that is not a broadcast
MAX_RETRY_AFTER = 600.0  # seconds
PLAIN = {"Accept-Encoding": "identity"}  # nothing that grows when it is read
_TASK = TypeAdapter(NodeTask)
REFUSALS = {  # problems that will not go away by trying again
    "unknown-key": "{server} does not know this node's key; give the coordinator the public half of it (*.pub)",
    "bad-signature": "{server} does not accept this node's signature; is there a proxy that rewrites requests?",
    "clock": "{server} refuses the time that this node signs with ({detail}); set this machine's clock",
    "unsigned": "{server} does not understand this node's signature ({detail}); use the same version of fedrecon",
}


class JoinError(ValueError):
    """A permanent error: this node cannot join, and a retry would not help."""


class Conflict(RefusalError):
    """The server refuses what is asked of it, for a reason that its state gives."""


class _TaskOver(Exception):
    """The task was withdrawn, or its deadline has passed."""


def parse_server(text: str, insecure: bool, option: str = "--server") -> str:
    """Return the URL of a server, given as a URL or as `host:port` by an option.

    Raises:
      JoinError: it is not an address, or asks for another kind of connection than `insecure` says.
    """
    scheme = "http" if insecure else "https"
    try:
        url = urlsplit(text if "://" in text else f"{scheme}://{text}")
        valid = bool(url.hostname and url.port) and (url.path in ("", "/")) and not (url.query or url.username)
    except ValueError:
        valid = False
    if not valid or any(character.isspace() for character in text):
        rule = "must be a URL with a port, such as https://fed.example.org:8000"
        raise JoinError(f"{option} {rule} (got {text[:100]!r})")
    if url.scheme != scheme:
        raise JoinError(f"{option} is {text[:100]!r}; {'with' if insecure else 'without'} --insecure it is {scheme}://")
    return f"{scheme}://{url.netloc}"


@dataclasses.dataclass
class Connection:
    """A node's connection to its server.

    Attributes:
      server: the URL.
      key: the node's private key, which signs every request.
      authority: the certificate that vouches for the server; None for no encryption.
      clock: returns the seconds since 1970.
      timeout: how many seconds the server may take to answer.
    """

    server: str
    key: Ed25519PrivateKey
    authority: Path | None
    clock: Callable[[], float] = time.time
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        """Read the certificate."""
        verify: Any = False
        if self.authority is not None:
            try:
                verify = ssl.create_default_context(cafile=self.authority)
            except ssl.SSLError:
                raise JoinError(f"{self.authority} is not a certificate; use the server's ca.crt") from None
        self._epoch = NO_EPOCH
        options: dict[str, Any] = {"verify": verify, "timeout": httpx.Timeout(self.timeout, connect=CONNECT)}
        self._client = httpx.Client(base_url=self.server, trust_env=False, headers=PLAIN, **options)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def check_in(self) -> NodeTask | float:
        """Wait for a task; return it, or after how many seconds to ask again."""
        response, body = self._request("GET", f"/v1/check-in?wait={WAIT}")
        if response.status_code == 204:
            pause = response.headers.get("retry-after", "")
            return min(float(pause), MAX_RETRY_AFTER) if pause.isdecimal() else 1.0
        try:
            return _TASK.validate_json(body)
        except ValidationError:
            raise JoinError(f"{self.server} does not answer like a coordinator of this version of fedrecon") from None

    def fetch(self, task: NodeTask, max_bytes: int) -> bytes:
        """Return a task's message, which is not larger than expected and has the digest that names it."""
        _, data = self._request("GET", f"/v1/broadcasts/{task.broadcast}", max_bytes=max_bytes)
        if hashlib.sha256(data).hexdigest() != task.broadcast:
            raise httpx.RemoteProtocolError("the broadcast does not have the digest that names it")
        return data

    def report(self, task: NodeTask, data: bytes) -> None:
        """Send the answer to a task; again if that fails, until the task's deadline."""
        end, path = time.monotonic() + task.seconds, f"/v1/rounds/{task.round}/reports/{task.ticket}"
        for pause in backoff():
            try:
                self._request("PUT", path, data)
                return
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
                time.sleep(pause)

    def post(self, path: str, data: bytes, max_bytes: int) -> bytes:
        """Send bytes and return the answer, which is not larger than expected.

        Raises:
          Conflict: the server refuses.
          JoinError: it is another server.
        """
        try:
            return self._request("POST", path, data, max(max_bytes, MAX_ANSWER))[1]
        except _TaskOver as error:
            raise JoinError(f"{self.server} does not answer like a helper of this version: {error}") from None

    def _request(
        self, method: str, path: str, data: bytes = b"", max_bytes: int = MAX_ANSWER
    ) -> tuple[httpx.Response, bytes]:
        """Send a signed request; return the response and its body, of which no more is read than expected."""
        response, body = self._send(method, path, data, max_bytes)
        epoch = response.headers.get("fedrecon-epoch", "")
        if response.status_code == 401 and FIELDS["fedrecon-epoch"].fullmatch(epoch):
            self._epoch = epoch  # the server was started since
            response, body = self._send(method, path, data, max_bytes)
        if response.status_code >= 300:
            raise self._problem(response, body)
        return response, body

    def _send(self, method: str, path: str, data: bytes, max_bytes: int) -> tuple[httpx.Response, bytes]:
        headers = sign_request(self.key, method, path, hashlib.sha256(data).hexdigest(), self._epoch, self.clock)
        body = bytearray()
        with self._client.stream(method, path, content=data or None, headers=headers) as response:
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > max_bytes:
                    raise JoinError(f"{self.server} sent more than the {max_bytes} bytes that were expected")
        return response, bytes(body)

    def _problem(self, response: httpx.Response, body: bytes) -> Exception:
        """Return what a response that refuses a request means."""
        try:
            problem = json.loads(body)
            kind, detail = str(problem["type"]).removeprefix("urn:fedrecon:"), str(problem["detail"])[:300]
        except (ValueError, KeyError, TypeError, RecursionError):
            kind, detail = "", body[:300].decode(errors="replace")
        if response.status_code in (404, 410):
            return _TaskOver(detail)
        if response.status_code == 409:
            return Conflict(kind, detail)
        if kind in REFUSALS:
            return JoinError(REFUSALS[kind].format(server=self.server, detail=detail))
        return httpx.RemoteProtocolError(f"{response.status_code} {kind or response.reason_phrase}: {detail}")

    def lasting(self, error: httpx.TransportError) -> str | None:
        """Say why an error will not go away by trying again; None if it may."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return f"{self.server} has a certificate that {self.authority} did not sign, or for another name"
            if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
                return f"{self.server} does not speak TLS: the server was started with --insecure"
            cause = cause.__cause__ or cause.__context__
        connected = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
        if self.authority is None and connected and _speaks_tls(self.server):
            return f"{self.server} speaks TLS: leave out --insecure, and give --ca and --key"
        return None


def _speaks_tls(server: str) -> bool:
    url, context = urlsplit(server), ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((url.hostname, url.port), 5) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def backoff() -> Any:
    """Yield pauses that grow, with some chance in them so that nodes do not all come back at once."""
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, LAST_PAUSE)


def run_node(
    connection: Connection,
    handle: Callable[[bytes], bytes],
    *,
    max_bytes: Callable[[], int],
    stop: Callable[[], bool] = lambda: False,
    say: Say = lambda text: None,
) -> None:
    """Take part until `stop` says so: check in for tasks, and report what `handle` answers.

    Args:
      connection: reaches the server.
      handle: from a message to a reply.
      max_bytes: returns the size of the largest message that is read.
      stop: called between tasks.
      say: called with remarks on the connection.

    Raises:
      JoinError: this node cannot take part.
    """
    pauses, status = backoff(), ""
    while not stop():
        try:
            task = connection.check_in()
            if status != "connected":
                status = "connected"
                say(f"connected to {connection.server}")
            pauses = backoff()
            if isinstance(task, float):
                time.sleep(task)
                continue
            with contextlib.suppress(_TaskOver):
                connection.report(task, handle(connection.fetch(task, max_bytes())))
        except _TaskOver as error:
            raise JoinError(f"{connection.server} is not a fedrecon coordinator: {error}") from None
        except httpx.TransportError as error:
            if (reason := connection.lasting(error)) is not None:
                raise JoinError(reason) from None
            if status != type(error).__name__:
                status = type(error).__name__
                say(f"{connection.server} cannot be reached ({status}: {error}); trying again")
            time.sleep(next(pauses))
