"""Asking nodes: who answered in time, with what, and why the other answers were not used."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedrecon._src.core.wire import SLACK, WireError, from_bytes, nbytes
from fedrecon._src.deploy.grid import Clock, Grid
from fedrecon._src.deploy.messages import MOST_HEADER, REFUSED, Envelope, Failure, unpack

# seconds between two checks for replies, and the same as a share of the time waited
PAUSE, LONGEST_PAUSE, SHARE = 0.05, 0.5, 0.15
REASONS = frozenset(  # that a node may give; any other text from a node may be long or nonsense
    {
        "garbage",
        "too_large",
        "wrong_plan",
        "weaker_plan",
        "budget",
        "not_accepted",
        "not_joined",
        "old_run",
        "old_round",
        "not_finite",
        "error",
        "beyond_limit",
        "secure_sum",
    }
)


@dataclass
class Answers:
    """How a question was answered.

    Attributes:
      good: what nodes answered.
      failed: why others did not, by node.
      late: who had not answered when the question was closed.
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

    def take_over(self, earlier: Answers) -> None:
        """Add the cost of an earlier stage of the same question."""
        self.failed = {**earlier.failed, **self.failed}
        self.late = sorted({*earlier.late, *self.late})
        self.sent, self.received = self.sent + earlier.sent, self.received + earlier.received


def ask(
    grid: Grid,
    requests: Mapping[int, bytes],
    read: Callable[[int, bytes], Any],
    *,
    enough: int,
    seconds: float,
    clock: Clock,
    number: int = 0,
) -> Answers:
    """Ask nodes until enough of them have given a good answer, or time is up.

    Args:
      grid: reaches the nodes.
      requests: a message for each.
      read: reads a node's reply, or raises `Failure`.
      enough: how many good answers are enough.
      seconds: how long to wait.
      clock: tells the time.
      number: the round.
    """
    found, began = Answers(), clock.monotonic()
    waiting: dict[Any, int] = {}
    for node, data in requests.items():
        waiting[grid.send(node, data, seconds, number)] = node
        found.sent += len(data)
    while waiting and len(found.good) < enough:
        replies = grid.poll(list(waiting))
        for ticket, reply in replies.items():
            if len(found.good) == enough:
                break
            node = waiting.pop(ticket)
            try:
                if reply.data is None:
                    raise Failure("unreachable", reply.error or "no reply")
                found.received += len(reply.data)
                found.good[node] = read(node, reply.data)
            except Failure as failure:
                found.failed[node] = failure.reason
        if not waiting or len(found.good) >= enough or clock.monotonic() - began >= seconds:
            break
        clock.sleep(min(max(PAUSE, SHARE * (clock.monotonic() - began)), LONGEST_PAUSE))
    grid.cancel(list(waiting))
    found.late = sorted(waiting.values())
    return found


def open_reply(data: bytes, asked: Envelope, most: int) -> bytes:
    """Return the body of a node's reply.

    Raises:
      Failure: the node refused, or the reply is not to this question.
    """
    reply = unpack(data, most)
    if reply.kind == REFUSED:
        reason = reply.facts.get("reason")
        raise Failure(reason if reason in REASONS else "refused", "the node refused")
    if reply.plan != asked.plan:
        raise Failure("wrong_plan", "the reply is for another plan")
    if (reply.run, reply.round) != (asked.run, asked.round):
        raise Failure("old_round", "the reply is for another round")
    return reply.body


def read_tree(data: bytes, asked: Envelope, like: Any) -> Any:
    """Return the arrays in a node's reply, all of them finite.

    Raises:
      Failure: the arrays are not the expected ones, or not finite.
    """
    most = nbytes(like) + SLACK
    body = open_reply(data, asked, most + MOST_HEADER)
    try:
        tree = from_bytes(body, like, most=most)
    except WireError as problem:
        raise Failure("garbage", str(problem)) from None
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)):
        raise Failure("not_finite", "the reply has numbers that are not finite")
    return tree
