"""HTTPS with bounds: what all servers of a deployment share, served by uvicorn in a thread.

A request that is refused gets a JSON problem (RFC 9457), is counted by its kind and has no effect. Everything is
bounded before it is read.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedrecon._src.deploy.admission import AdmissionError, Verifier

log = logging.getLogger(__name__)
KEEP_ALIVE = 30  # seconds that a connection may be idle between two requests
VERBS = {"put": ["PUT"], "post": ["POST"]}  # methods of HTTP, by how the name of an endpoint begins; else GET
ROUNDS = {  # the endpoints for nodes and devices that take part in rounds
    "get_plan": "/v1/plan",
    "check_in": "/v1/check-in",
    "get_broadcast": "/v1/broadcasts/{digest}",
    "put_report": "/v1/rounds/{number}/reports/{ticket}",
}
IMMUTABLE = "private, max-age=31536000, immutable"


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the coordinator.

    Attributes:
      body_bytes: the largest report.
      header_bytes: the largest head of a request.
      header_seconds: how long the head of a request may take.
      body_seconds: how long a report may take from its first byte to its last.
      connections: open connections from one address.
    """

    body_bytes: int
    header_bytes: int = 2**14
    header_seconds: float = 10.0
    body_seconds: float = 120.0
    connections: int = 256


class Tls(NamedTuple):
    """Files of a server: its certificate, its key, and the certificate of the authority that signed it."""

    certificate: Path
    key: Path
    authority: Path


def parse_address(text: str, option: str = "--listen", least: int = 1) -> tuple[str, int]:
    """Return host and port of an address such as `127.0.0.1:8000`.

    Raises:
      ValueError: it is not an address.
    """
    host, _, port = text.rpartition(":")
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else -1
    if not re.fullmatch(r"[^\s/@]+", host) or not least <= number < 2**16:
        raise ValueError(f"{option} must be host:port, such as 127.0.0.1:8000 (got {text[:100]!r})")
    return host.strip("[]"), number


@dataclass(frozen=True)
class Problem:
    """Why a request was refused, as RFC 9457 writes it.

    Attributes:
      type: a word that says why, after `urn:fedrecon:`.
      status: the response's.
      detail: a sentence.
    """

    type: Annotated[str, Field(pattern="^urn:fedrecon:[a-z-]+$")]
    status: Annotated[int, Field(ge=400, lt=500)]
    detail: str


class RequestError(HTTPException):
    """A request that is refused."""

    def __init__(self, status: int, kind: str, detail: str, **headers: str):
        """Set the status, a word by which refusals are counted, and a sentence."""
        super().__init__(status, detail, headers)
        self.kind = kind


class Service:
    """An application that bounds what it reads, and counts what it refuses by kind."""

    def __init__(self, limits: Limits, paths: Mapping[str, str]):
        """Serve the methods that have these names, at these paths."""
        self.limits = limits
        self.port = 0  # while it is served
        self._uploading: set[Hashable] = set()  # who is sending a body
        self.problems: collections.Counter[str] = collections.Counter()
        verbs = {name: VERBS.get(name.split("_")[0]) for name in paths}
        routes = [Route(path, getattr(self, name), methods=verbs[name]) for name, path in paths.items()]
        handlers: Any = dict.fromkeys((HTTPException, AdmissionError), self._refuse)
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    def close(self) -> None:
        """End requests that would go on for ever."""

    async def _refuse(self, request: Request, problem: Exception) -> Response:
        if isinstance(problem, AdmissionError):
            status = 429 if problem.reason == "too-many" else 401
            problem = RequestError(status, problem.reason, problem.why, **problem.headers)
        assert isinstance(problem, HTTPException)
        status, detail = problem.status_code, problem.detail
        kind = getattr(problem, "kind", detail.lower().replace(" ", "-"))  # or there is no such path or method
        self.problems[kind] += 1
        await self._discard_body(request)
        content = dataclasses.asdict(Problem(f"urn:fedrecon:{kind}", status, detail))
        headers = {**({} if status == 404 else {"Connection": "close"}), **(problem.headers or {})}
        return JSONResponse(content, status, headers, "application/problem+json")

    async def _discard_body(self, request: Request) -> None:
        """Read the rest of a request that is refused, if it is no larger than a good one.

        A connection that is closed while the other side still sends is reset, and whoever sends slowly would never see
        why it was refused.
        """
        length = whole_number(request.headers.get("content-length", ""), 15)
        if not length or length > self.limits.body_bytes or getattr(request.state, "is_read", False):
            return
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(self.limits.body_seconds):
                async for _ in request.stream():
                    pass

    async def read_body(self, request: Request, sender: Hashable, digest: str | None = None) -> bytes:
        """Read what a request sends, within the limits; one at a time of a sender, so that memory is bounded.

        Args:
          request: whose body is read.
          sender: who sends it.
          digest: its SHA-256, if that was signed.
        """
        length = whole_number(request.headers.get("content-length", ""), 15)
        if length is None:
            raise RequestError(411, "no-length", "a report needs a Content-Length")
        if length > self.limits.body_bytes:
            raise RequestError(413, "too-large", f"at most {self.limits.body_bytes} bytes are accepted")
        if sender in self._uploading:
            raise RequestError(429, "too-many", "a report of this sender is on its way already", **{"Retry-After": "1"})
        self._uploading.add(sender)
        request.state.is_read = True
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                body = await request.body()  # never more than was announced: the HTTP parser checks it
        except TimeoutError:
            raise RequestError(408, "slow", f"a report may take {self.limits.body_seconds:g} s") from None
        except ClientDisconnect:
            raise RequestError(400, "cut-off", "the connection ended before the report") from None
        finally:
            self._uploading.discard(sender)
        if digest is not None and hashlib.sha256(body).hexdigest() != digest:
            raise RequestError(400, "wrong-digest", "the body does not have the digest that was signed")
        return body


def whole_number(text: str, digits: int) -> int | None:
    """Return the number that so many digits at most stand for; None if it is anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


def authenticate(verifier: Verifier, request: Request) -> tuple[bytes, str]:
    """Return the key that signed a request, and the digest of the body that it announces."""
    path, query = request.scope["raw_path"], request.scope["query_string"]
    target = (path + b"?" + query if query else path).decode("latin-1")
    return verifier.check(request.method, target, request.headers)


def round_number(request: Request) -> int:
    """Return the number of the round in a request's path."""
    if (number := whole_number(request.path_params["number"], 9)) is None:
        raise RequestError(404, "forged", "the round must be a number")
    return number


def immutable_response(request: Request, data: bytes, digest: str, media_type: str) -> Response:
    """Return bytes that never change under their digest; nothing if the client has them."""
    headers = {"ETag": f'"{digest}"', "Cache-Control": IMMUTABLE}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media_type)


class ConnectionBounds:
    """Bounds on what lies below HTTP: connections of an address, and the seconds until a request's head is complete.

    uvicorn's protocol is extended through what `asyncio.Protocol` defines. Which request belongs to which connection is
    known by the address of the client. A connection that was used before has `KEEP_ALIVE` seconds more for its head.
    """

    def __init__(self, app: ASGIApp, limits: Limits):
        """Bound the connections of an application."""
        self.app, self.limits = app, limits
        self._counts: collections.Counter[str] = collections.Counter()
        self._transports: dict[Any, asyncio.Transport] = {}
        self._deadlines: dict[Any, asyncio.TimerHandle] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on: its head is complete."""
        client = tuple(scope["client"])
        self._stop_timer(client)
        try:
            await self.app(scope, receive, send)
        finally:
            self._start_timer(client, KEEP_ALIVE + self.limits.header_seconds)

    def _start_timer(self, client: Any, seconds: float) -> None:
        if (transport := self._transports.get(client)) is not None:
            self._deadlines[client] = asyncio.get_running_loop().call_later(seconds, transport.abort)

    def _stop_timer(self, client: Any) -> None:
        if (deadline := self._deadlines.pop(client, None)) is not None:
            deadline.cancel()

    def opened(self, client: Any, transport: asyncio.Transport) -> None:
        """Count a connection, and abort it if its address has too many or its first head takes too long."""
        self._counts[client[0]] += 1
        self._transports[client] = transport
        self._start_timer(client, self.limits.header_seconds)
        if self._counts[client[0]] > self.limits.connections:
            transport.abort()

    def closed(self, client: Any) -> None:
        """Forget a connection."""
        self._stop_timer(client)
        del self._transports[client]
        self._counts[client[0]] -= 1
        if not self._counts[client[0]]:
            del self._counts[client[0]]

    def protocol(self) -> type[asyncio.Protocol]:
        """Return uvicorn's HTTP/1.1 protocol with these bounds."""
        bounds = self

        class BoundedProtocol(H11Protocol):
            def connection_made(self, transport: Any) -> None:
                self.peer = tuple(transport.get_extra_info("peername")[:2])
                super().connection_made(transport)
                bounds.opened(self.peer, transport)

            def connection_lost(self, exc: Exception | None) -> None:
                bounds.closed(self.peer)
                super().connection_lost(exc)

        return BoundedProtocol


@contextlib.contextmanager
def run_server(
    app: ASGIApp,
    address: tuple[str, int],
    tls: Tls | None = None,
    stop: Callable[[], None] = lambda: None,
    **options: Any,
) -> Iterator[int]:
    """Serve an application in a thread; yields the port, which the system chooses if it is 0.

    Args:
      app: the application.
      address: host and port to listen on.
      tls: certificates; None for no encryption.
      stop: called on leaving; ends requests that would go on for ever.
      options: for uvicorn.

    Raises:
      OSError: the address cannot be used.
    """
    config = uvicorn.Config(
        app,
        **{"http": "h11", **options},
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=5,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # bad requests are counted, not logged one by one
    server = uvicorn.Server(config)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.create_server(address, family=family, backlog=1024) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="fedrecon-http", daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise OSError(f"the server at {address[0]}:{address[1]} could not be started")
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            stop()
            thread.join(15)


@contextlib.contextmanager
def run_service(service: Service, address: tuple[str, int], tls: Tls | None) -> Iterator[int]:
    """Serve an application within its limits in a thread; yields the port. On leaving, answer what is under way.

    Raises:
      OSError: the address cannot be used.
    """
    bounds = ConnectionBounds(service.app, service.limits)
    options = {"http": bounds.protocol(), "h11_max_incomplete_event_size": service.limits.header_bytes}
    with run_server(bounds, address, tls, stop=service.close, **options) as port:
        yield port
    if service.problems:
        log.info("refused requests: %s", json.dumps(dict(service.problems)))
