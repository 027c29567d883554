"""How the server reaches its nodes: an interface, nodes in this process or behind Flower, the collection of replies."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedrecon._src.core.display import Say
from fedrecon._src.deploy.messages import MOST_HEADER, REFUSED, Envelope, Failure, pack, unpack


class Reply(NamedTuple):
    """What came back from a node: bytes, or why there are none.

    Example:
      >>> fr.deploy.Reply(None, "connection lost").error
      'connection lost'
    """

    data: bytes | None
    error: str | None = None

    def content(self) -> bytes:
        """Return the bytes, or raise `Failure` if there are none."""
        if self.data is None:
            raise Failure("unreachable", self.error or "no reply")
        return self.data


class Grid(Protocol):
    """Carries messages to nodes and their replies back: in this process (`InProcess`) or over HTTPS (`serve_tasks`).

    Example:
      >>> grid: fr.deploy.Grid = fr.deploy.InProcess({7: bytes.upper})
      >>> ticket = grid.send(7, b"hello", seconds=60.0)
      >>> grid.poll([ticket])[ticket].data
      b'HELLO'
    """

    def nodes(self) -> list[int]:
        """List the nodes that are connected now."""

    def name(self, node: int) -> str:
        """Return what to call a node in messages to people."""

    def send(self, node: int, data: bytes, seconds: float, number: int = 0) -> Any:
        """Send a message of a round that expires after this many seconds; return a ticket for the reply."""

    def poll(self, tickets: Collection[Any]) -> Mapping[Any, Reply]:
        """Return the replies that have arrived, each once, without waiting for others."""

    def cancel(self, tickets: Collection[Any]) -> None:
        """Withdraw messages whose replies are no longer needed."""


class Clock(Protocol):
    """Tells how much time has passed, and waits; the module `time` is one.

    Example:
      >>> import time
      >>> clock: fr.deploy.Clock = time
    """

    def monotonic(self) -> float:
        """Return seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Wait this long, or less if something arrived."""


SYSTEM: Clock = time


class InProcess:
    """Nodes as functions from bytes to bytes, without a network.

    A function that raises is a node that fails; one that returns None is a node that does not answer.

    Example:
      >>> nodes = {0: bytes.upper, 1: lambda message: None}
      >>> grid = fr.deploy.InProcess(nodes)
      >>> tickets = [grid.send(node, b"hello", seconds=60.0) for node in grid.nodes()]
      >>> len(grid.poll(tickets))
      1
    """

    def __init__(self, handlers: Mapping[int, Callable[[bytes], bytes | None]]):
        """Take the nodes by their number."""
        self.handlers = dict(handlers)
        self.seen: list[tuple[int, bytes, bytes | None]] = []  # all traffic: node, message, reply
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[int, bytes]] = {}

    def nodes(self) -> list[int]:
        """List the nodes."""
        return sorted(self.handlers)

    def name(self, node: int) -> str:
        """Return its number."""
        return f"node {node}"

    def send(self, node: int, data: bytes, seconds: float, number: int = 0) -> int:
        """Queue a message until its reply is collected."""
        del seconds, number
        ticket = next(self._numbers)
        self._waiting[ticket] = (node, data)
        return ticket

    def poll(self, tickets: Collection[int]) -> Mapping[int, Reply]:
        """Let the nodes of these tickets answer."""
        replies = {}
        for ticket in [ticket for ticket in tickets if ticket in self._waiting]:
            node, data = self._waiting.pop(ticket)
            try:
                reply = self.handlers[node](data)
                self.seen.append((node, data, reply))
                if reply is not None:
                    replies[ticket] = Reply(reply)
            except Exception as problem:
                replies[ticket] = Reply(None, f"{type(problem).__name__}: {problem}")
        return replies

    def cancel(self, tickets: Collection[int]) -> None:
        """Forget messages that were not delivered."""
        for ticket in tickets:
            self._waiting.pop(ticket, None)


# Seconds between two checks for replies: a share of the time waited, between two bounds.
POLL_SHARE, MIN_POLL, MAX_POLL = 0.15, 0.05, 0.5
ABSENCE = 5.0  # seconds for which a node is not connected until nobody waits for its reply any more
# Reasons that a node may give; any other text from a node may be long or nonsense.
REASONS = {"garbage", "too_large", "not_finite", "error", "beyond_limit", "secure_sum", "budget"}
REASONS |= {"wrong_plan", "weaker_plan", "not_accepted", "not_joined", "old_run", "old_round"}


@dataclass
class Replies:
    """Replies to one message that was sent to several nodes.

    Attributes:
      good: what nodes answered.
      failed: why the answers of other nodes are not used.
      late: nodes that had not answered when the question was closed.
      sent: bytes to nodes.
      received: bytes from them, with replies that were rejected.
    """

    good: dict[int, Any] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    sent: int = 0
    received: int = 0

    @property
    def reasons(self) -> dict[str, int]:
        """How many nodes failed, by reason."""
        return dict(sorted(collections.Counter(self.failed.values()).items()))

    def add(self, later: Replies) -> None:
        """Add the failures and bytes of a later stage."""
        self.failed |= later.failed
        self.late = sorted({*self.late, *later.late})
        self.sent, self.received = self.sent + later.sent, self.received + later.received


class Channel(NamedTuple):
    """How the server talks to nodes: a grid, and the clock that tells when to give up."""

    grid: Grid
    clock: Clock

    def collect(
        self,
        requests: Mapping[int, Envelope],
        enough: int,
        seconds: float,
        max_bytes: int = MOST_HEADER,
        read: Callable[[bytes], Any] = bytes,
    ) -> Replies:
        """Send each node its request, and wait until enough have given a good reply, others are gone, or time is up.

        Args:
          requests: by node.
          enough: how many good replies are enough.
          seconds: how long to wait.
          max_bytes: the size of the largest reply that is read.
          read: reads the body of a reply, or raises `Failure`.
        """
        replies, began = Replies(), self.clock.monotonic()
        waiting: dict[Any, int] = {}
        checked, absent = 0.0, dict[int, float]()  # nodes that are not connected, since when
        different = {id(request): request for request in requests.values()}  # most nodes get the same, written once
        content = {key: pack(request) for key, request in different.items()}
        for node, request in requests.items():
            data = content[id(request)]
            waiting[self.grid.send(node, data, seconds, request.round)] = node
            replies.sent += len(data)
        while waiting and len(replies.good) < enough:
            for ticket, reply in self.grid.poll(list(waiting)).items():
                if len(replies.good) == enough:
                    break
                node = waiting.pop(ticket)
                try:
                    data = reply.content()
                    replies.received += len(data)
                    replies.good[node] = read(open_reply(data, requests[node], max_bytes))
                except Failure as failure:
                    replies.failed[node] = failure.reason
            elapsed = self.clock.monotonic() - began
            if elapsed - checked > ABSENCE / 5:
                checked, connected = elapsed, set(self.grid.nodes())
                absent = {node: absent.get(node, elapsed) for node in waiting.values() if node not in connected}
                for ticket, node in list(waiting.items()):
                    if elapsed - absent.get(node, elapsed) >= ABSENCE:
                        self.grid.cancel([ticket])
                        del waiting[ticket]
                        replies.failed[node] = "unreachable"
            if not waiting or len(replies.good) >= enough or elapsed >= seconds:
                break
            self.clock.sleep(min(max(MIN_POLL, POLL_SHARE * elapsed), MAX_POLL))
        self.grid.cancel(list(waiting))
        replies.late = sorted(waiting.values())
        return replies


def open_reply(data: bytes, request: Envelope, max_bytes: int) -> bytes:
    """Return the body of a node's reply.

    Raises:
      Failure: the node refused, or the reply is not to this request.
    """
    reply = unpack(data, max_bytes)
    if reply.kind == REFUSED:
        reason = reply.facts.get("reason")
        raise Failure(reason if reason in REASONS else "refused", "the node refused")
    if reply.plan != request.plan:
        raise Failure("wrong_plan", "the reply is for another plan")
    if (reply.run, reply.round) != (request.run, request.round):
        raise Failure("old_round", "the reply is for another round")
    return reply.body


# ---- Unix sockets: what lies between our processes and those that Flower starts (`examples/flower`). Frames are those
# of `multiprocessing.connection` (`send_bytes`), never pickled. Whoever may open a socket may use it, so only its owner
# may. ----


@contextlib.contextmanager
def open_listener(path: Path) -> Iterator[Listener]:
    """Listen at a path; a socket that an earlier process left there is replaced."""
    if path.is_socket():
        path.unlink()
    before = os.umask(0o177)
    try:
        listener = Listener(str(path), "AF_UNIX", backlog=8)
    finally:
        os.umask(before)
    with listener:
        yield listener


def answer_socket(
    path: Path, handle: Callable[[bytes, float], bytes], max_bytes: Callable[[], int], stop: Callable[[], bool]
) -> None:
    """Answer messages at a socket, one after another, until `stop` says so.

    Args:
      path: of the socket.
      handle: from a message and the seconds that are left for it to a reply.
      max_bytes: returns the size of the largest message that is read.
      stop: called after every message.
    """
    with open_listener(path) as listener:
        while not stop():
            # Whoever asked may be gone, or have sent something else: that is no reason to stop.
            with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError), listener.accept() as peer:
                seconds = float(json.loads(peer.recv_bytes(1000))["seconds"])
                peer.send_bytes(handle(peer.recv_bytes(max_bytes()), seconds))


class SocketGrid:
    """The nodes of a Flower run, by a ServerApp that lends its grid at a socket. It implements `Grid`.

    When the ServerApp is restarted, messages under way are lost, and the round is repeated with whoever is there.
    """

    def __init__(self, path: Path, max_bytes: int, say: Say = lambda text: None):
        """Connect when it is first needed."""
        self._path, self._max_bytes, self._say = path, max_bytes, say
        self._peer: Connection | None = None
        self._lock = threading.Lock()
        self._tickets: dict[str, bool] = {}  # of messages under way, and whether they are lost

    def nodes(self) -> list[int]:
        """List the nodes that are connected now; none while there is no ServerApp."""
        answer, _ = self._call({"op": "nodes"})
        return sorted(answer.get("nodes", []))

    def name(self, node: int) -> str:
        """Return its number in Flower."""
        return f"SuperNode {node}"

    def send(self, node: int, data: bytes, seconds: float, number: int = 0) -> str:
        """Send a message of a round; return Flower's name for it."""
        answer, _ = self._call({"op": "send", "node": node, "seconds": seconds, "round": number}, data)
        ticket = answer.get("ticket") or f"lost-{time.monotonic_ns()}"
        self._tickets[ticket] = not answer.get("ticket")
        return ticket

    def poll(self, tickets: Collection[str]) -> Mapping[str, Reply]:
        """Return the replies that have arrived, each once."""
        waiting = sorted(ticket for ticket in tickets if self._tickets.get(ticket) is False)
        answer, parts = self._call({"op": "poll", "tickets": waiting}) if waiting else ({}, [])
        replies = {
            ticket: Reply(None, "the ServerApp was restarted") for ticket in tickets if self._tickets.get(ticket)
        }
        for entry, part in zip(answer.get("replies", []), parts, strict=True):
            replies[entry["ticket"]] = Reply(None, entry["error"]) if entry["error"] else Reply(part)
        self.cancel(replies)
        return replies

    def cancel(self, tickets: Collection[str]) -> None:
        """Forget messages. Flower drops them when their time is over."""
        for ticket in tickets:
            self._tickets.pop(ticket, None)

    def close(self) -> None:
        """End the Flower run."""
        self._call({"op": "end"})

    def _call(self, request: Mapping[str, Any], data: bytes = b"") -> tuple[dict[str, Any], list[bytes]]:
        """Ask the ServerApp; an empty answer if it cannot be reached."""
        with self._lock:
            try:
                if self._peer is None:
                    self._peer = Client(str(self._path), "AF_UNIX")
                    self._say(f"connected to the ServerApp at {self._path}")
                self._peer.send_bytes(json.dumps(request).encode())
                self._peer.send_bytes(data)
                answer = json.loads(self._peer.recv_bytes(self._max_bytes))
                return answer, [self._peer.recv_bytes(self._max_bytes) for _ in answer.get("replies", [])]
            except (OSError, EOFError):
                if self._peer is not None:
                    self._peer.close()
                    self._say("the ServerApp is gone; waiting for another flwr run")
                self._peer = None
                self._tickets = dict.fromkeys(self._tickets, True)
                return {}, []
