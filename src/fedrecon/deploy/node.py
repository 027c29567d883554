"""A node: answers the server's messages with sums over its own users. There is no network in here."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedrecon.app.experiment import make_evaluator
from fedrecon.app.saved import save_model
from fedrecon.deploy import measure
from fedrecon.deploy.holding import Holding, taking_part
from fedrecon.deploy.memory import MOST_TRIES, Memory
from fedrecon.deploy.messages import MOST_HEADER, OK, Envelope, Failure, pack, refusal, unpack
from fedrecon.deploy.plan import MOST_BYTES, Plan, PlanError, digest_of, weaker
from fedrecon.fitting import check_fit
from fedrecon.hosts import client_total, total_shapes
from fedrecon.keys import round_key
from fedrecon.wire import SLACK, WireError, from_bytes, nbytes, to_bytes

TRAIN, PARTS = "train", ("valid", "test")
_LENGTH = struct.Struct(">I")


class Node:
    """A node. All that it does is answer: bytes in, bytes out."""

    def __init__(
        self,
        read: Callable[[Plan], Holding],
        accept: Callable[[Plan], bool],
        memory: Memory | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        """Prepare.

        Args:
          read: reads the node's own data for a plan.
          accept: asks the node's owner about a plan; asked once for each.
          memory: what was accepted and seen before.
          say: is told a line about every round.
        """
        self._read, self._accept, self._say = read, accept, say
        self.memory = memory or Memory()
        self.plan: Plan | None = None
        self.holding: Holding | None = None
        self.finished = False  # whether the run that it joined last is over
        self._evaluators: dict[str, Any] = {}
        self._sum: Any = None  # a secure sum that is under way: (what of, round, state of the client)
        self._stages = {
            "train": lambda message: self._open(message, TRAIN),
            "evaluate": lambda message: self._open(message, self._part(message)),
            "advertise": self._advertise,
            "share": self._share,
            "mask": self._mask,
            "unmask": self._unmask,
            "finish": self._finish,
        }

    def handle(self, data: bytes) -> bytes:
        """Answer a message. Whatever it is, there is an answer and no error."""
        message = None
        try:
            message = unpack(data, self._most())
            if message.kind == "join":
                return self._reply(message, *self._join(message))
            if message.kind not in self._stages:
                raise Failure("garbage", f"a message of the unknown kind {message.kind[:40]!r}")
            self._check(message)
            return self._reply(message, *self._stages[message.kind](message))
        except Failure as failure:
            self._say(f"refused: {failure.why}")
            return refusal(message, failure)
        except Exception as problem:
            # The server learns the kind of error and nothing else: a message may have parts of the data in it.
            self._say(f"failed: {type(problem).__name__}: {problem}")
            return refusal(message, Failure("error", f"the node failed with {type(problem).__name__}"))

    def _most(self) -> int:
        if self.plan is None:
            return MOST_BYTES + MOST_HEADER
        largest = max(nbytes(self.plan.message_shapes), nbytes(self.plan.params_shapes), len(self.plan.content))
        return largest + 2 * SLACK + 2**22  # a roster or a delivery of a secure sum may come along

    def _reply(self, message: Envelope, facts: dict[str, Any], body: bytes) -> bytes:
        return pack(Envelope(OK, message.plan, message.run, message.round, facts, body))

    # ---- joining ----

    def _join(self, message: Envelope) -> tuple[dict[str, Any], bytes]:
        if digest_of(message.body) != message.plan:
            raise Failure("wrong_plan", "the server names another plan than it sends")
        if self.plan is None or self.plan.digest != message.plan:
            self._take(message.body)
        assert self.holding is not None
        if message.run in self.memory.ended or not message.run:
            raise Failure("old_run", f"the run {message.run!r} is over for this node")
        if message.run != self.memory.run:
            self.memory.begin(message.run)
        self.finished = False
        self._say(f"joined run {message.run} of plan {message.plan[:16]}")
        return {}, b""

    def _take(self, data: bytes) -> None:
        """Take a plan that is not the current one, if it is good enough and the owner agrees."""
        try:
            plan = Plan.from_bytes(data)
        except PlanError as problem:
            raise Failure("wrong_plan", str(problem)) from None
        if plan.digest != self.memory.accepted:
            less = [] if self.memory.promises is None else weaker(self.memory.promises, plan.promises)
            if less:
                raise Failure("weaker_plan", f"this plan promises less than the one accepted: {', '.join(less)}")
            if not self._accept(plan):
                raise Failure("not_accepted", f"the owner has not accepted the plan {plan.digest}")
        holding = self._read(plan)
        for part in holding.users:
            if len(part):
                check_fit(plan.algorithm, part)
        self.memory.accept(plan.digest, plan.promises)
        self.plan, self.holding, self._evaluators, self._sum = plan, holding, {}, None

    def _check(self, message: Envelope) -> None:
        """Fail unless a message is of the plan, the run and no earlier round than the one that this node is in."""
        if self.plan is None:
            raise Failure("not_joined", "this node has just started; ask it to join")
        if message.plan != self.plan.digest:
            raise Failure("wrong_plan", f"this node takes part in plan {self.plan.digest[:16]} and in no other")
        if message.run != self.memory.run:
            raise Failure("old_run", f"this node takes part in run {self.memory.run} and in no other")
        if message.round < self.memory.round:
            raise Failure("old_round", f"round {message.round} is over; this node is in round {self.memory.round}")
        if message.round > self.plan.config.rounds:
            raise Failure("old_round", f"the plan has {self.plan.config.rounds} rounds, and this is another")

    # ---- what is computed ----

    def _part(self, message: Envelope) -> str:
        part = message.facts.get("part")
        if part not in PARTS:
            raise Failure("garbage", f"there is no part {str(part)[:40]!r} to evaluate")
        return part

    def _open(self, message: Envelope, of: str) -> tuple[dict[str, Any], bytes]:
        assert self.plan is not None
        if self.plan.secure:
            raise Failure("weaker_plan", "the plan says that sums are secure; this message asks for an open one")
        return {}, to_bytes(self._compute(of, message.round, message.body))

    def _compute(self, of: str, number: int, body: bytes) -> Any:
        assert self.plan is not None
        assert self.holding is not None
        if of == TRAIN:
            if number == self.memory.round and self.memory.tries >= MOST_TRIES:
                raise Failure("old_round", f"this node took part in round {number} {MOST_TRIES} times already")
            self.memory.see(number)
        like = self.plan.message_shapes if of == TRAIN else self.plan.params_shapes
        try:
            value = from_bytes(body, like, most=nbytes(like) + SLACK)
        except WireError as problem:
            raise Failure("garbage", str(problem)) from None
        if not _finite(value):
            raise Failure("not_finite", "the server sent numbers that are not finite")
        return self._train(number, value) if of == TRAIN else self._evaluate(of, value)

    def _train(self, number: int, message: Any) -> Any:
        assert self.plan is not None
        assert self.holding is not None
        plan = self.plan
        users = taking_part(plan, self.holding.users.train, number)
        if len(users) < plan.least_users:
            self._say(f"round {number + 1}: {len(users)} of its {plan.task.people} would take part, too few: zeros")
            return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), total_shapes(plan.algorithm))
        total = client_total(
            plan.algorithm, message, users, round_key(plan.config.seed, number), lengths=plan.lengths
        ).total
        self._say(f"round {number + 1}: {len(users)} {plan.task.people} trained")
        return total

    def _evaluate(self, part: str, params: Any) -> Any:
        assert self.plan is not None
        assert self.holding is not None
        plan, users = self.plan, self.holding.users
        there = len(getattr(users, part))
        if there < plan.least_users:
            return measure.nothing(plan.algorithm.model)
        if part not in self._evaluators:
            self._evaluators[part] = make_evaluator(plan.config, plan.algorithm, users, part=part)
        self._say(f"evaluated {there} {part} {plan.task.people}")
        return measure.measured(plan.algorithm.model, self._evaluators[part].sums(params))

    def _finish(self, message: Envelope) -> tuple[dict[str, Any], bytes]:
        """Keep the trained model for the owner."""
        assert self.plan is not None
        try:
            params = from_bytes(message.body, self.plan.params_shapes)
        except WireError as problem:
            raise Failure("garbage", str(problem)) from None
        if self.memory.folder is not None:
            save_model(self.memory.folder / "model", self.plan.config, params, self.plan.legend)
            self._say(f"training is over; the model is in {self.memory.folder / 'model'}")
        self.finished = True
        return {}, b""

    # ---- secure sums ----

    def _advertise(self, message: Envelope) -> tuple[dict[str, Any], bytes]:
        from fedrecon.deploy.secret import BITS, length_of
        from fedrecon.privacy import secure_sum

        assert self.plan is not None
        of, me = message.facts.get("of"), message.facts.get("me")
        if of not in (TRAIN, *PARTS) or type(me) is not int:
            raise Failure("garbage", "a secure sum of nothing, or for nobody")
        try:
            terms = secure_sum.Terms.from_bytes(message.body)
            like = shapes_of(self.plan, of)
            if terms.bits != BITS or terms.length != length_of(like) or terms.circle > self.plan.most_nodes:
                raise Failure("weaker_plan", "the terms of the secure sum are not those of the plan")
            state, hello = secure_sum.advertise(terms, me, least=self.plan.least_nodes)
        except secure_sum.SecureSumError as problem:
            raise Failure("secure_sum", str(problem)) from None
        self._sum = (of, message.round, state)
        return {}, hello

    def _step(self, message: Envelope, take: Callable[[Any], tuple[Any, bytes]]) -> tuple[dict[str, Any], bytes]:
        from fedrecon.privacy import secure_sum

        if self._sum is None or self._sum[1] != message.round:
            raise Failure("secure_sum", "there is no secure sum of this round under way")
        of, number, state = self._sum
        self._sum = None  # a state is for one step, also if that fails
        try:
            state, reply = take(state)
        except secure_sum.SecureSumError as problem:
            raise Failure("secure_sum", str(problem)) from None
        self._sum = (of, number, state)
        return {}, reply

    def _share(self, message: Envelope) -> tuple[dict[str, Any], bytes]:
        from fedrecon.privacy import secure_sum

        return self._step(message, lambda state: secure_sum.share(state, message.body))

    def _mask(self, message: Envelope) -> tuple[dict[str, Any], bytes]:
        from fedrecon.deploy.secret import to_integers
        from fedrecon.privacy import secure_sum

        delivery, body = two_of(message.body)
        of = None if self._sum is None else self._sum[0]

        def take(state: Any) -> tuple[Any, bytes]:
            assert self.plan is not None
            assert of is not None
            vector = to_integers(self.plan, self._compute(of, message.round, body))
            return secure_sum.mask(state, delivery, vector)

        return self._step(message, take)

    def _unmask(self, message: Envelope) -> tuple[dict[str, Any], bytes]:
        from fedrecon.privacy import secure_sum

        return self._step(message, lambda state: secure_sum.unmask(state, message.body))


def shapes_of(plan: Plan, of: str) -> Any:
    """Return what a node sends of training or of an evaluation, with shapes or zeros."""
    return total_shapes(plan.algorithm) if of == TRAIN else measure.nothing(plan.algorithm.model)


def two_in_one(first: bytes, second: bytes) -> bytes:
    """Write two bodies as one."""
    return _LENGTH.pack(len(first)) + first + second


def two_of(body: bytes) -> tuple[bytes, bytes]:
    """Read two bodies from one."""
    if len(body) < _LENGTH.size or (size := _LENGTH.unpack_from(body)[0]) > len(body) - _LENGTH.size:
        raise Failure("garbage", "the message should have two parts")
    return body[_LENGTH.size : _LENGTH.size + size], body[_LENGTH.size + size :]


def _finite(tree: Any) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if np.issubdtype(leaf.dtype, np.floating))
