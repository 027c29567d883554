"""Tasks for nodes: a message for each, waiting to be fetched, and the reports that came back; and how nodes reach them.

    GET /v1/plan                         the plan, by its digest
    GET /v1/check-in?wait=SECONDS        204 with Retry-After, or a task: round, broadcast, size, ticket, seconds
    GET /v1/broadcasts/{sha256}          a task's message; immutable
    PUT /v1/rounds/{n}/reports/{ticket}  the answer; 201, or 200 if it was received before

Every request is signed (`admission`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fedrecon._src.deploy.admission import Verifier
from fedrecon._src.deploy.http_server import (
    ROUNDS,
    Limits,
    RequestError,
    Service,
    Tls,
    authenticate,
    immutable_response,
    round_number,
    run_service,
    whole_number,
)
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.transport import Reply

NAME_BYTES, MAC_BYTES = 12, 16
MAX_WAIT = 25.0  # seconds of a long poll
RETRY_SECONDS = 5  # until a node that is not to wait checks in again
PURGE_SECONDS = 1.0  # between two searches for tasks that are over
PRESENCE_SECONDS = 5.0  # how long a node counts as connected after its last request
DIGEST, TICKET = "[0-9a-f]{64}", f"[0-9a-f]{{{2 * (NAME_BYTES + MAC_BYTES)}}}"  # as regular expressions


@dataclass(frozen=True)
class NodeTask:
    """What a node is asked to do: fetch a broadcast, answer it, report before the deadline.

    Attributes:
      round: which round it belongs to, from 0.
      broadcast: the SHA-256 of the message, by which it is fetched.
      size: the bytes of the message.
      ticket: what the report is sent with.
      seconds: how many are left.
    """

    round: Annotated[int, Field(ge=0, lt=10**9)]
    broadcast: Annotated[str, Field(pattern=f"^{DIGEST}$")]
    size: Annotated[int, Field(ge=0)]
    ticket: Annotated[str, Field(pattern=f"^{TICKET}$")]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass
class _Entry:
    node: int
    round: int
    digest: str
    data: bytes  # the message, until there is a report
    deadline: float
    fetched: bool = False
    reply: bytes | None = None


class TaskBoard:
    """The tasks of all nodes. It implements `Grid` and, since waiting ends when a report arrives, `Clock`.

    A ticket is a random name with a MAC under the round's key over the name and the node's key. So a forged ticket, one
    of another node and an expired one are told apart without a list of all tickets ever given.
    """

    def __init__(self, name_of_key: Callable[[bytes], str] = bytes.hex) -> None:
        """Begin without nodes; `name_of_key` names them."""
        self._name_of_key = name_of_key
        self._changed = threading.Condition()
        self._secret = secrets.token_bytes(32)
        self._entries: dict[str, _Entry] = {}  # by name, in the order of sending
        self._open: dict[int, dict[str, _Entry]] = {}  # by node: the entries that have no report
        self._purged = 0.0  # when expired entries were dropped
        self._numbers: dict[bytes, int] = {}  # of nodes, by key
        self._keys: list[bytes] = []
        self._last_seen: dict[int, float] = {}
        self._polls: collections.Counter[int] = collections.Counter()
        self.wake: Callable[[int], None] = lambda node: None  # called when a node has a new task

    # ---- for the round loop ----

    def nodes(self) -> list[int]:
        """List the nodes that are connected: they wait for a task, work on one, or were heard a moment ago."""
        with self._changed:
            now = time.monotonic()
            entries = [entry for by_name in self._open.values() for entry in by_name.values()]
            busy = {entry.node for entry in entries if entry.fetched and entry.deadline > now}
            recent = {node for node, seen in self._last_seen.items() if now - seen < PRESENCE_SECONDS}
            return sorted(busy | recent | (+self._polls).keys())

    def name(self, node: int) -> str:
        """Return the name that a node is registered with."""
        return self._name_of_key(self._keys[node])

    def send(self, node: int, data: bytes, seconds: float, number: int = 0) -> str:
        """Give a node a task of a round, and return its name."""
        name, digest, now = secrets.token_hex(NAME_BYTES), hashlib.sha256(data).hexdigest(), time.monotonic()
        with self._changed:
            if now - self._purged > PURGE_SECONDS:
                self._purged = now
                for old, earlier in list(self._entries.items()):
                    if earlier.deadline < now or (earlier.reply == b"" and earlier.round < number):
                        self._drop(old)
            entry = self._entries[name] = _Entry(node, number, digest, data, now + seconds)
            self._open.setdefault(node, {})[name] = entry
        self.wake(node)
        return name

    def poll(self, tickets: Collection[str]) -> Mapping[str, Reply]:
        """Return the reports that have arrived, each once."""
        with self._changed:
            replies = {}
            for name in tickets:
                entry = self._entries.get(name)
                if entry is not None and entry.reply:
                    replies[name], entry.reply = Reply(entry.reply), b""
            return replies

    def cancel(self, tickets: Collection[str]) -> None:
        """Withdraw tasks that are no longer needed."""
        with self._changed:
            for name in tickets:
                self._drop(name)

    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float, /) -> None:
        """Wait this long, or until a report arrives or a node connects."""
        with self._changed:
            self._changed.wait(seconds)

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None and entry.reply is None:
            del self._open[entry.node][name]

    # ---- for nodes ----

    def number_of(self, key: bytes) -> int:
        """Return a node's number, and note that it was heard."""
        with self._changed:
            number = self._numbers.setdefault(key, len(self._keys))
            if number == len(self._keys):
                self._keys.append(key)
            if number not in self._last_seen:
                self._changed.notify_all()
            self._last_seen[number] = time.monotonic()
            return number

    def begin_poll(self, node: int) -> None:
        """Note that a node waits for a task."""
        with self._changed:
            self._polls[node] += 1

    def end_poll(self, node: int, lost: bool = False) -> None:
        """Note that a node's wait is over, or that its connection was lost meanwhile."""
        with self._changed:
            self._polls[node] -= 1
            self._last_seen[node] = time.monotonic()
            if lost:
                del self._last_seen[node]

    def next_task(self, node: int) -> NodeTask | None:
        """Return the oldest task that a node has not reported; again, if it fetched it before and was restarted."""
        now = time.monotonic()
        with self._changed:
            for name, entry in self._open.get(node, {}).items():
                if entry.deadline > now:
                    entry.fetched = True
                    ticket, seconds = self._ticket(name, entry.round, node), round(entry.deadline - now, 3)
                    return NodeTask(entry.round, entry.digest, len(entry.data), ticket, seconds)
        return None

    def message(self, node: int, digest: str) -> bytes | None:
        """Return a message that a node has a task for."""
        with self._changed:
            entries = self._open.get(node, {}).values()
            return next((entry.data for entry in entries if entry.digest == digest), None)

    def state(self, node: int, number: int, ticket: str) -> str:
        """Return `forged`, `open`, `reported` or `expired`."""
        name = ticket[: 2 * NAME_BYTES]
        genuine = re.fullmatch(TICKET, ticket) and hmac.compare_digest(ticket, self._ticket(name, number, node))
        if not genuine:
            return "forged"
        with self._changed:
            entry = self._entries.get(name)
            if entry is not None and entry.reply is not None:
                return "reported"
            return "open" if entry is not None and entry.deadline > time.monotonic() else "expired"

    def report(self, node: int, number: int, ticket: str, data: bytes) -> str:
        """Take a report, if the ticket is open; return what its state was."""
        with self._changed:
            state = self.state(node, number, ticket)
            if state == "open":
                name = ticket[: 2 * NAME_BYTES]
                entry = self._open[node].pop(name)
                entry.reply, entry.data = data or b"\0", b""  # an empty report is garbage, and counts as one
                self._changed.notify_all()
            return state

    def _ticket(self, name: str, number: int, node: int) -> str:
        round_key = hmac.digest(self._secret, str(number).encode(), "sha256")
        return name + hmac.digest(round_key, bytes.fromhex(name) + self._keys[node], "sha256")[:MAC_BYTES].hex()


class Api(Service):
    """The four endpoints over a board of tasks."""

    def __init__(self, plan: Plan, board: TaskBoard, verifier: Verifier, limits: Limits):
        """Serve a plan and the tasks of a board."""
        self.plan, self.board, self.verifier = plan, board, verifier
        self._waiting: dict[int, asyncio.Event] = {}  # by node
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        board.wake = self._wake
        super().__init__(limits, ROUNDS)

    def _wake(self, node: int) -> None:
        """Tell a waiting node, from the thread of the round loop, that it has a task."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._waiting[node].set() if node in self._waiting else None)

    def close(self) -> None:
        """Answer all waiting check-ins; later ones do not wait."""
        self._closing = True
        for node in list(self._waiting):
            self._wake(node)

    def _authenticate(self, request: Request) -> tuple[int, str]:
        """Return the node that signed a request, and the digest of its body."""
        key, digest = authenticate(self.verifier, request)
        return self.board.number_of(key), digest

    async def get_plan(self, request: Request) -> Response:
        """Return the plan."""
        self._authenticate(request)
        return immutable_response(request, self.plan.content, self.plan.digest, "application/json")

    async def check_in(self, request: Request) -> Response:
        """Return a node's next task, or wait for one."""
        node, _ = self._authenticate(request)
        self._loop = asyncio.get_running_loop()
        if (wait := whole_number(request.query_params.get("wait", "0"), 5)) is None:
            raise RequestError(400, "bad-wait", "`wait` must be a whole number of seconds")
        task = self.board.next_task(node)
        if task is None and wait and not self._closing:
            await self._await_task(request, node, min(wait, MAX_WAIT))
            task = self.board.next_task(node)
        if task is not None:
            return JSONResponse(dataclasses.asdict(task), headers={"Cache-Control": "no-store"})
        pause = RETRY_SECONDS if self._closing or not wait else 0
        return Response(status_code=204, headers={"Retry-After": str(pause)})

    async def _await_task(self, request: Request, node: int, seconds: float) -> None:
        if node in self._waiting:  # an earlier connection of this node: the newest counts
            self._waiting[node].set()
        arrived = self._waiting[node] = asyncio.Event()

        async def disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        waits = [asyncio.create_task(arrived.wait()), asyncio.create_task(disconnect())]
        self.board.begin_poll(node)
        lost = False
        try:
            if self.board.next_task(node) is None:  # it may have come before `arrived` was there to be set
                done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                lost = waits[1] in done
        finally:
            for wait in waits:
                wait.cancel()
            if self._waiting.get(node) is arrived:
                del self._waiting[node]
            self.board.end_poll(node, lost)

    async def get_broadcast(self, request: Request) -> Response:
        """Return the message of a task."""
        node, _ = self._authenticate(request)
        digest = request.path_params["digest"]
        data = self.board.message(node, digest)
        if data is None:
            raise RequestError(404, "no-broadcast", "this node has no task with such a broadcast")
        return immutable_response(request, data, digest, "application/octet-stream")

    async def put_report(self, request: Request) -> Response:
        """Take a report."""
        node, digest = self._authenticate(request)
        number, ticket = round_number(request), request.path_params["ticket"]
        state = self.board.state(node, number, ticket)
        if state == "open":
            data = await self.read_body(request, node, digest)
            state = self.board.report(node, number, ticket, data)
        if state == "forged":
            raise RequestError(404, state, "the coordinator gave this node no such ticket")
        if state == "expired":
            raise RequestError(410, state, "the task is over: the round was closed, or its deadline has passed")
        return Response(status_code=201 if state == "open" else 200)


@contextlib.contextmanager
def serve_tasks(
    plan: Plan, address: tuple[str, int], tls: Tls | None, keys: Mapping[bytes, str] | None, limits: Limits
) -> Iterator[tuple[TaskBoard, Api]]:
    """Serve a board of tasks over HTTPS in a thread; on leaving, answer what is under way and stop.

    Args:
      plan: the plan that nodes may fetch.
      address: host and port to listen on.
      tls: certificates; None for no encryption.
      keys: the names of nodes by their public keys; None to admit any key.
      limits: what a client may ask for.

    Raises:
      OSError: the address cannot be used.
    """
    verifier = Verifier(keys)
    board = TaskBoard(verifier.name)
    api = Api(plan, board, verifier, limits)
    with run_service(api, address, tls) as api.port:
        yield board, api
