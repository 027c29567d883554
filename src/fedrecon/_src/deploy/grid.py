"""How the server reaches its nodes: a small interface, and one where the nodes are objects in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol


class Reply(NamedTuple):
    """What came back from a node: bytes, or why there are none."""

    data: bytes | None
    error: str | None = None


class Grid(Protocol):
    """Carries messages to nodes and their replies back."""

    def nodes(self) -> list[int]:
        """List the nodes that are connected now."""

    def send(self, node: int, data: bytes, seconds: float, number: int = 0) -> Any:
        """Send a message of a round that expires after this many seconds; return a ticket for the reply."""

    def poll(self, tickets: Collection[Any]) -> Mapping[Any, Reply]:
        """Return the replies that have arrived, each once, without waiting for others."""

    def cancel(self, tickets: Collection[Any]) -> None:
        """Withdraw messages whose replies nobody waits for any more."""


class Clock(Protocol):
    """Tells how much time has passed, and waits."""

    def monotonic(self) -> float:
        """Return seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Wait this long, or less if something arrived."""


SYSTEM: Clock = time


class InProcess:
    """Nodes as functions from bytes to bytes, without a network.

    A function that raises is a node that fails; one that returns None is a node that does not answer.
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

    def send(self, node: int, data: bytes, seconds: float, number: int = 0) -> int:
        """Keep a message until the reply is asked for."""
        del seconds, number
        ticket = next(self._numbers)
        self._waiting[ticket] = (node, data)
        return ticket

    def poll(self, tickets: Collection[int]) -> Mapping[int, Reply]:
        """Let the nodes of these tickets answer."""
        replies = {}
        for ticket in tickets:
            if ticket not in self._waiting:
                continue
            node, data = self._waiting.pop(ticket)
            try:
                reply = self.handlers[node](data)
            except Exception as problem:
                replies[ticket] = Reply(None, f"{type(problem).__name__}: {problem}")
                continue
            self.seen.append((node, data, reply))
            if reply is not None:
                replies[ticket] = Reply(reply)
        return replies

    def cancel(self, tickets: Collection[int]) -> None:
        """Forget messages that were not delivered."""
        for ticket in tickets:
            self._waiting.pop(ticket, None)
