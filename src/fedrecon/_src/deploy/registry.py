"""The nodes of a training: which have joined, which are invited to a round, and which missed deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedrecon._src.core.checks import check_number, check_numbers
from fedrecon._src.core.display import Say
from fedrecon._src.deploy.messages import MOST_HEADER, Envelope, Failure, pack, unpack
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.sums import NodeSum, open_sum, secure_sum_of
from fedrecon._src.deploy.transport import Channel, open_reply

RETRY_SECONDS = 30.0  # until a node that refused to join is invited again
MAX_ROUNDS_OUT = 32  # the most rounds for which a node that missed deadlines is not invited
MAX_SECONDS, MAX_COUNT = 1e9, 2**31 - 1
POLL_SECONDS = 0.2  # between two checks for nodes
GATEWAY = b"gateway"  # what a gateway says when it joins


class NotEnoughNodes(ValueError):
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

    Example:
      >>> fr.deploy.Pace(per_round=20, min_nodes=10).deadline
      60.0
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
        check_number("oversample", self.oversample, least=1, most=1000)
        times = {name: getattr(self, name) for name in ("deadline", "stage_deadline", "patience")}
        check_numbers({"min_nodes": self.min_nodes, "checkpoint_every": self.checkpoint_every}, least=1, most=MAX_COUNT)
        check_numbers(times, least=1e-3, most=MAX_SECONDS)
        check_number("per_round", self.per_round, least=self.min_nodes)


class NodeRegistry:
    """The nodes of a training, and the sums that they are asked for."""

    accepts_gateways = False  # whether those who join may be gateways

    def __init__(self, plan: Plan, channel: Channel, pace: Pace, run: str, say: Say):
        """Begin without nodes."""
        self.plan, self.channel, self.pace, self.run_id, self.say = plan, channel, pace, run, say
        self.done = 0  # rounds
        self.round_zero = b""  # its result
        self.over_gateways = False  # whether those who joined are gateways, each with the plan's least number of nodes
        self.joined: dict[int, int | None] = {}  # with their numbers in the plan's list, if it has one
        self.missed: dict[int, tuple[int, int]] = {}  # by node: deadlines missed in a row, not invited before round
        self._invitation: tuple[Envelope | None, bytes] = (None, b"")  # and as bytes, one copy for all nodes
        self._invitations: dict[Any, int] = {}  # nodes by ticket
        self._invited_at: dict[int, float] = {}
        self._refusals: dict[int, str] = {}

    @property
    def least_nodes(self) -> int:
        """How many must have answered for a sum to count."""
        return 1 if self.over_gateways else self.plan.least_nodes

    @property
    def min_nodes(self) -> int:
        """How many must have joined to begin a round, and have answered to end one."""
        return max(self.pace.min_nodes, self.least_nodes)

    def update(self) -> list[int]:
        """Invite new nodes, read the replies of those that were invited, and return the nodes that take part."""
        grid, now = self.channel.grid, self.channel.clock.monotonic()
        connected = set(grid.nodes())
        self.joined = {node: number for node, number in self.joined.items() if node in connected}
        body = self.plan.content + self.round_zero
        invitation = self.message("join", self.done, body, result_bytes=len(self.round_zero))
        if invitation != self._invitation[0]:
            self._invitation = (invitation, pack(invitation))
        for node in sorted(connected - set(self.joined)):
            if now - self._invited_at.get(node, -math.inf) >= RETRY_SECONDS:
                self._invited_at[node] = now
                self._invitations[grid.send(node, self._invitation[1], 10 * RETRY_SECONDS, self.done)] = node
        for ticket, reply in grid.poll(list(self._invitations)).items():
            node = self._invitations.pop(ticket)
            try:
                data = reply.content()
                # A reply to an invitation may come several rounds later.
                request = invitation._replace(round=unpack(data, MOST_HEADER).round)
                body = open_reply(data, request, MOST_HEADER)
                self.over_gateways = self.accepts_gateways and body == GATEWAY
                self.joined[node] = None if self.over_gateways else self._number_in(body)
                self._refusals.pop(node, None)
            except Failure as failure:
                if self._refusals.get(node) != failure.reason:
                    self.say(f"{grid.name(node)} does not join: {failure.reason.replace('_', ' ')}")
                self._refusals[node] = failure.reason
        return sorted(self.joined)

    def _number_in(self, body: bytes) -> int | None:
        """Return a node's number in the plan's list; secure sums check by its signature that it is this node."""
        if not self.plan.promises.signed:
            return None
        if not body.isdigit() or len(body) > 6 or (number := int(body)) >= len(self.plan.nodes):
            raise Failure("garbage", "the node gives no index in the plan's list of nodes")
        if number in self.joined.values():
            raise Failure("garbage", "two nodes claim the same index in the plan's list")
        return number

    def wait_for_nodes(self, since: float, number: int) -> list[int]:
        """Return the nodes that take part, once there are enough."""
        announced = False
        while len(ready := self.update()) < self.min_nodes:
            if self.channel.clock.monotonic() - since > self.pace.patience:
                reasons = f"; did not join: {', '.join(sorted(set(self._refusals.values())))}" if self._refusals else ""
                raise NotEnoughNodes(
                    f"{len(ready)} nodes take part, and a round needs {self.min_nodes}: no others joined within "
                    f"{self.pace.patience:g} s{reasons}. {number} rounds are done and saved; continue with --resume"
                )
            if not announced:
                self.say(f"waiting for nodes: {len(ready)} of {self.min_nodes} have joined")
            announced = True
            self.channel.clock.sleep(POLL_SECONDS)
        return ready

    def select(self, ready: list[int], number: int, attempt: int, all_nodes: bool) -> tuple[list[int], int]:
        """Choose the nodes of a round, and how many of them are enough.

        A node that missed a deadline is left out for a while, longer each time, as long as there are enough others.
        """
        punctual = [node for node in ready if self.missed.get(node, (0, 0))[1] <= number]
        ready = punctual if len(punctual) >= self.min_nodes else ready
        enough = None if all_nodes else self.pace.per_round
        if enough is None or enough >= len(ready):
            return ready, len(ready)
        count = min(len(ready), math.ceil(enough * self.pace.oversample))
        generator = np.random.default_rng([self.plan.seed, number, attempt])
        return sorted(ready[k] for k in generator.choice(len(ready), count, replace=False)), enough

    def message(self, kind: str, number: int, body: bytes, /, **facts: Any) -> Envelope:
        """Return a message of a round."""
        return Envelope(kind, self.plan.digest, self.run_id, number, facts, body)

    def collect_sum(self, question: Envelope, invited: list[int], enough: int, pace: Pace) -> NodeSum:
        """Collect a sum over nodes; note which of them must join again, and which are left out for a while."""
        if self.plan.secure and not self.over_gateways:  # their sums are secure already
            numbers, times = {node: self.joined[node] for node in invited}, (pace.deadline, pace.stage_deadline)
            node_sum = secure_sum_of(self.plan, self.channel, question, numbers, *times)
        else:
            node_sum = open_sum(self.plan, self.channel, question, invited, enough, pace.deadline)
        for node, reason in node_sum.replies.failed.items():
            if reason in ("not_joined", "old_run"):
                self.joined.pop(node, None)
                self._invited_at.pop(node, None)
        if len(node_sum.nodes) < enough:  # closed by the deadline
            for node in node_sum.replies.late:
                misses = self.missed.get(node, (0, 0))[0] + 1
                self.missed[node] = (misses, question.round + 1 + min(2**misses, MAX_ROUNDS_OUT))
        for node in node_sum.nodes:
            self.missed.pop(node, None)
        return node_sum

    def finish(self, nodes: list[int], message: Envelope, seconds: float) -> None:
        """Give nodes the trained model, for their owners."""
        self.channel.collect(dict.fromkeys(nodes, message), len(nodes), seconds)
