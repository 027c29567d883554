"""A gateway: to the coordinator it is one node, whose answer is the sum of its own clients' answers."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from fedrecon._src.core.display import Say
from fedrecon._src.core.wire import WireError, to_bytes
from fedrecon._src.deploy.messages import (
    OK,
    TRAIN,
    Envelope,
    Failure,
    check_request,
    fails_with,
    largest_message,
    pack,
    purpose_of,
    refusal,
    unpack,
)
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.registry import GATEWAY, NodeRegistry, NotEnoughNodes, Pace
from fedrecon._src.deploy.sums import add_sums
from fedrecon._src.deploy.transport import Channel
from fedrecon._src.recommend.round_zero import StateError
from fedrecon._src.storage.atomic import write_bytes

SHARE_OF_TIME = 0.7  # of the coordinator's deadline that clients have; the rest is for the way there and back


class Gateway:
    """Answers a coordinator: bytes in, bytes out, as a `Node` does.

    It invites its clients to the coordinator's run, passes questions on, and adds up what they answer. A secure sum
    runs between the clients of one gateway, which learns only their sum, as the coordinator does.

    Example:
      >>> channel = Channel(InProcess({0: node.handle}), SYSTEM)  # doctest: +SKIP
      >>> Gateway(plan, channel, Pace()).handle(message, seconds=60.0)  # doctest: +SKIP
    """

    def __init__(
        self, plan: Plan, channel: Channel, pace: Pace, folder: Path | None = None, say: Say = lambda text: None
    ):
        """Serve a plan to the clients that a channel reaches.

        Args:
          plan: the plan.
          channel: reaches the clients.
          pace: how many clients, and how long to wait for them.
          folder: where the result of round zero is kept, so that a gateway that was killed can go on in the next round.
          say: called with a line about every question.
        """
        self.plan, self.channel, self.pace, self.folder, self.say = plan, channel, pace, folder, say
        self._registry: NodeRegistry | None = None  # of the run that the coordinator named last

    def handle(self, data: bytes, seconds: float) -> bytes:
        """Answer a message of the coordinator, which waits so many seconds. Failures become answers too."""
        message = None
        try:
            message = unpack(data, largest_message(self.plan))
            check_request(message)
            if message.plan != self.plan.digest:
                raise Failure("wrong_plan", f"this gateway serves plan {self.plan.digest[:16]} and no other")
            answer = self._register if message.kind == "join" else self._request_sum
            with fails_with("not_joined", NotEnoughNodes), fails_with("garbage", StateError, WireError):
                body = answer(message, seconds)
            return pack(Envelope(OK, message.plan, message.run, message.round, {}, body))
        except Failure as failure:
            self.say(f"refused: {failure.why}")
            return refusal(message, failure)
        except Exception as error:
            self.say(f"failed: {type(error).__name__}: {error}")
            return refusal(message, Failure("error", f"the gateway failed with {type(error).__name__}"))

    def _register(self, message: Envelope, seconds: float) -> bytes:
        """Take part in a run, once there are clients who do."""
        size = message.facts.get("result_bytes", 0)
        result = message.body[len(message.body) - size :] if size else b""
        self._clients(message, seconds, result)
        return GATEWAY

    def _file(self, run: str) -> Path:
        return (self.folder or Path()) / f"round-zero-{hashlib.sha256(run.encode()).hexdigest()[:16]}"

    def _recall(self, run: str) -> bytes:
        """Return the result of a run's round zero, as far as this gateway needs one and knows it."""
        if self._registry is not None and self._registry.run_id == run:
            return self._registry.round_zero
        if self.plan.zero is None:
            return b""
        if self.folder is None or not self._file(run).exists():
            raise Failure("not_joined", "this gateway has just started; ask it to join")
        result = self._file(run).read_bytes()
        with fails_with("not_joined", StateError, WireError):
            self.plan.zero.read_result(result)
        return result

    def _clients(self, message: Envelope, seconds: float, result: bytes) -> tuple[NodeRegistry, list[int]]:
        """Return the registry of the run of a message, and the clients in it; wait for the first of them."""
        registry = self._registry
        if registry is None or registry.run_id != message.run or registry.round_zero != result:
            registry = NodeRegistry(self.plan, self.channel, self.pace, message.run, self.say)
            if result and self.plan.zero is not None:
                registry.plan = self.plan.prepared(result)
                registry.round_zero = result
                if self.folder is not None:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    write_bytes(self._file(message.run), result)
            self._registry = registry
        registry.done = message.round
        registry.pace = dataclasses.replace(self.pace, patience=min(self.pace.patience, seconds / 2))
        return registry, registry.wait_for_nodes(self.channel.clock.monotonic(), message.round)

    def _request_sum(self, message: Envelope, seconds: float) -> bytes:
        """Pass a question on to clients, and return the sum of their answers.

        No other gateway or node takes part in a gateway's secure sums, so their messages are not passed on.
        """
        if message.kind not in ("train", "evaluate", "prepare", "finish"):
            raise Failure("garbage", f"a gateway does not answer messages of the kind {message.kind[:40]!r}")
        end = self.channel.clock.monotonic() + SHARE_OF_TIME * seconds
        registry, ready = self._clients(message, seconds, self._recall(message.run))
        seconds = max(end - self.channel.clock.monotonic(), 0.1)
        if message.kind == "finish":
            registry.finish(ready, message, seconds)
            return b""
        purpose = purpose_of(message)
        invited, enough = registry.select(ready, message.round, 0, all_nodes=purpose != TRAIN)
        # With secure sums, three small messages and, with the rest of the time, the masked sums.
        small = min(self.pace.stage_deadline, seconds / 8) if self.plan.secure else 0.0
        pace = dataclasses.replace(self.pace, deadline=max(seconds - 3 * small, 1e-3), stage_deadline=max(small, 1e-3))
        node_sum = registry.collect_sum(message, invited, enough, pace)
        answered = f"{len(node_sum.nodes)} of {len(invited)} clients answered"
        self.say(f"round {message.round + (purpose == TRAIN)}, {purpose}: {answered}")
        if len(node_sum.nodes) < registry.min_nodes:
            raise Failure("error", answered)
        return to_bytes(add_sums(node_sum.parts))
