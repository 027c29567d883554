"""The nodes of a training: who joined, who is invited, and who missed deadlines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedrecon._src.core.checks import MOST_ROUNDS, check_number
from fedrecon._src.deploy.asking import Answers, open_reply
from fedrecon._src.deploy.grid import Clock, Grid
from fedrecon._src.deploy.messages import MOST_HEADER, Envelope, Failure, pack, unpack
from fedrecon._src.deploy.plan import Plan

ASK_AGAIN = 30.0  # seconds until a node that refused to join is asked again
MOST_ROUNDS_OUT = 32  # the most rounds for which a node that missed deadlines is not invited
MOST_SECONDS = 1e9  # of waiting
WAIT = 0.2  # seconds between two checks for nodes


class NotEnoughNodes(RuntimeError):
    """Too few nodes for too long."""


@dataclass(frozen=True)
class Pace:
    """How the server paces its rounds.

    Attributes:
      per_round: how many good replies close a round; None for those of all nodes.
      oversample: invite this many times as many nodes.
      deadline: seconds after which a round is closed with the replies that have arrived.
      stage_deadline: the same for each of the small messages of a secure sum.
      min_nodes: how many nodes must have joined to begin a round, and have answered to end one; the plan's minimum
        applies if it is larger.
      patience: seconds to wait for that many nodes before giving up.
      checkpoint_every: save the state every this many rounds.
    """

    per_round: int | None = None
    oversample: float = 1.1
    deadline: float = 60.0
    stage_deadline: float = 15.0
    min_nodes: int = 1
    patience: float = 600.0
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.per_round is not None and self.per_round < self.min_nodes:
            raise ValueError(f"per_round is {self.per_round} and min_nodes {self.min_nodes}: no round could ever end")
        check_number("oversample", self.oversample, least=1, most=1000)
        for name in ("min_nodes", "checkpoint_every"):
            check_number(name, getattr(self, name), least=1, most=MOST_ROUNDS)
        for name in ("deadline", "stage_deadline", "patience"):
            check_number(f"{name} (seconds)", getattr(self, name), above=True, most=MOST_SECONDS)


class Members:
    """The nodes of a training."""

    def __init__(self, plan: Plan, grid: Grid, pace: Pace, run: str, clock: Clock, say: Callable[[str], None]):
        """Begin without nodes."""
        self.plan, self.grid, self.pace, self.run_id, self.clock, self.say = plan, grid, pace, run, clock, say
        self.least = max(pace.min_nodes, plan.least_nodes)
        self.done = 0  # rounds
        self.found = b""  # by round zero
        self.joined: dict[int, int | None] = {}  # with their numbers in the plan's list, if it has one
        self.missed: dict[int, tuple[int, int]] = {}  # by node: deadlines missed in a row, not invited before round
        self._joining: dict[Any, int] = {}
        self._asked: dict[int, float] = {}  # when nodes were asked to join
        self._refused: dict[int, str] = {}

    def ask_everybody_again(self) -> None:
        """Let every node join again, with what is known now."""
        self.joined, self._asked = {}, {}

    def welcome(self) -> list[int]:
        """Ask new nodes to join, read the replies of those that were asked, and return who takes part now."""
        there, now = set(self.grid.nodes()), self.clock.monotonic()
        self.joined = {node: number for node, number in self.joined.items() if node in there}
        facts = {"found": len(self.found)}
        join = Envelope("join", self.plan.digest, self.run_id, self.done, facts, self.plan.content + self.found)
        for node in sorted(there - set(self.joined)):
            if node not in self._asked or now - self._asked[node] >= ASK_AGAIN:
                self._asked[node] = now
                self._joining[self.grid.send(node, pack(join), 10 * ASK_AGAIN, self.done)] = node
        for ticket, reply in self.grid.poll(list(self._joining)).items():
            node = self._joining.pop(ticket)
            try:
                if reply.data is None:
                    raise Failure("unreachable", reply.error or "no reply")
                body = open_reply(reply.data, join._replace(round=_round_of(reply.data)), MOST_HEADER)
                self.joined[node] = self._number_in(body)
                self._refused.pop(node, None)
            except Failure as failure:
                if self._refused.get(node) != failure.reason:
                    self.say(f"node {node} does not join: {failure.reason.replace('_', ' ')}")
                self._refused[node] = failure.reason
        return sorted(self.joined)

    def _number_in(self, body: bytes) -> int | None:
        """Return a node's number in the plan's list; secure sums check by its signature that it is this node."""
        if not self.plan.promises.signed:
            return None
        if not body.isdigit() or len(body) > 6 or (number := int(body)) >= len(self.plan.nodes):
            raise Failure("garbage", "the node does not say which node of the plan's list it is")
        if number in self.joined.values():
            raise Failure("garbage", "two nodes say that they are the same node of the plan's list")
        return number

    def await_nodes(self, since: float, number: int) -> list[int]:
        """Return the nodes that take part, once there are enough."""
        told = False
        while len(ready := self.welcome()) < self.least:
            if self.clock.monotonic() - since > self.pace.patience:
                refused = f"; did not join: {', '.join(sorted(set(self._refused.values())))}" if self._refused else ""
                raise NotEnoughNodes(
                    f"{len(ready)} nodes take part, and a round needs {self.least}: no others joined within "
                    f"{self.pace.patience:g} s{refused}. {number} rounds are done and saved; continue with --resume"
                )
            if not told:
                self.say(f"waiting for nodes: {len(ready)} of {self.least} have joined")
            told = True
            self.clock.sleep(WAIT)
        return ready

    def invite(self, ready: list[int], number: int, attempt: int, everybody: bool) -> tuple[list[int], int]:
        """Choose the nodes of a round, and how many of them are enough.

        A node that missed a deadline is left out for a while, longer each time, as long as there are enough others: a
        dead node stays listed for a minute.
        """
        there = [node for node in ready if self.missed.get(node, (0, 0))[1] <= number]
        ready = there if len(there) >= self.least else ready
        wanted = None if everybody else self.pace.per_round
        if wanted is None or wanted >= len(ready):
            return ready, len(ready)
        invited = min(len(ready), math.ceil(wanted * self.pace.oversample))
        generator = np.random.default_rng([self.plan.seed, number, attempt])
        return sorted(ready[k] for k in generator.choice(len(ready), invited, replace=False)), wanted

    def heed(self, answers: Answers, nodes: list[int], number: int, closed_by_deadline: bool) -> None:
        """Draw conclusions from who answered a question: who must join again, and who is left out for a while."""
        for node, reason in answers.failed.items():
            if reason in ("not_joined", "old_run"):
                self.joined.pop(node, None)
                self._asked.pop(node, None)
        if closed_by_deadline:
            for node in answers.late:
                misses = self.missed.get(node, (0, 0))[0] + 1
                self.missed[node] = (misses, number + 1 + min(2**misses, MOST_ROUNDS_OUT))
        for node in nodes:
            self.missed.pop(node, None)

    def numbers(self, nodes: list[int]) -> dict[int, int] | None:
        """Return the numbers of nodes in the plan's list; None if it has none."""
        found = {node: number for node in nodes if (number := self.joined[node]) is not None}
        return found if self.plan.promises.signed else None


def _round_of(data: bytes) -> int:
    """Return the round that a reply names: a reply to a join may come several rounds later."""
    return unpack(data, MOST_HEADER).round
