"""Messages over Unix sockets: what lies between our processes and those that Flower starts (`examples/flower`).

Frames are those of `multiprocessing.connection` (`send_bytes`), never pickled. Whoever may open a socket may use it, so
only its owner may.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from fedrecon._src.deploy.transport import Reply


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

    def __init__(self, path: Path, max_bytes: int, say: Callable[[str], None] = lambda text: None):
        """Connect when it is first needed."""
        self._path, self._max_bytes, self._say = path, max_bytes, say
        self._peer: Connection | None = None
        self._lock = threading.Lock()
        self._lost: set[str] = set()  # tickets
        self._open: set[str] = set()

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
        (self._open if answer.get("ticket") else self._lost).add(ticket)
        return ticket

    def poll(self, tickets: Collection[str]) -> Mapping[str, Reply]:
        """Return the replies that have arrived, each once."""
        waiting = sorted(self._open.intersection(tickets))
        answer, parts = self._call({"op": "poll", "tickets": waiting}) if waiting else ({}, [])
        replies = {}
        for entry, part in zip(answer.get("replies", []), parts, strict=True):
            replies[entry["ticket"]] = Reply(None, entry["error"]) if entry["error"] else Reply(part)
        lost = self._lost.intersection(tickets)
        replies |= dict.fromkeys(lost, Reply(None, "the ServerApp was restarted"))
        self._open -= set(replies)
        self._lost -= lost
        return replies

    def cancel(self, tickets: Collection[str]) -> None:
        """Forget messages. Flower drops them when their time is over."""
        self._open -= set(tickets)
        self._lost -= set(tickets)

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
                self._lost, self._open = self._lost | self._open, set()
                return {}, []
