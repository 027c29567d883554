"""A node: answers the server's messages with sums over its own users, and remembers what it has answered. There is
no network in here.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import TypeAdapter

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import client_total, total_shapes
from fedrecon._src.algorithms.validation import check_training
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Say
from fedrecon._src.core.keys import fresh_key, round_key
from fedrecon._src.core.wire import WireError, to_bytes
from fedrecon._src.deploy import admission, plan_privacy
from fedrecon._src.deploy.messages import (
    MOST_HEADER,
    OK,
    PREPARE,
    TRAIN,
    Envelope,
    Failure,
    check_request,
    fails_with,
    largest_message,
    pack,
    purpose_of,
    question_number,
    read_tree,
    refusal,
    unpack,
    unpack_pair,
)
from fedrecon._src.deploy.plan import MOST_BYTES, NodeData, Plan, PlanError, Promises, digest_of, weaker
from fedrecon._src.deploy.sums import bits_of, length_of, no_users, shapes_of, sum_users, to_integers
from fedrecon._src.recommend.round_zero import RoundZero, StateError
from fedrecon._src.recommend.tasks import Users
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon._src.storage.ownership import LOCK, check_names

FILE, FORMAT = "node.json", Format("fedrecon-node", 3)
_FILES = re.compile(rf"{re.escape(FILE)}|{re.escape(LOCK)}|model|\..*\.(partial|old)")
MAX_TRIES = 20  # how often a node takes part in the same round: a server may be restarted
MAX_ENDED = 1000  # runs that are remembered


@dataclasses.dataclass
class Memory:
    """A node's memory, in a folder or, without one, as long as the process lives.

    Attributes:
      folder: where it is kept; None to forget it with the process.
      accepted: the digest of the plan that was accepted last.
      promises: what that plan promises.
      run: the run that the node takes part in.
      ended: runs before this one.
      round: the last round that it has seen.
      tries: how often it has seen that round.
      questions: how many questions of round zero it has answered in this run.
      answers: how often it has answered, by the digest of plans with noise, over all their runs; for questions of
        round zero, by the digest and the question.

    Raises:
      StorageError: the folder is not a node's, or what is in it is damaged.

    Example:
      >>> memory = fr.deploy.Memory()
      >>> memory.begin("run-1")
      >>> memory.see(0)
      >>> memory.round, memory.tries
      (0, 1)
    """

    folder: Path | None = None
    accepted: str | None = None
    promises: Promises | None = None
    run: str | None = None
    ended: list[str] = dataclasses.field(default_factory=list)
    round: int = -1
    tries: int = 0
    questions: int = 0
    answers: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what is in the folder."""
        if self.folder is None:
            return
        check_names(self.folder, _FILES)
        if (self.folder / FILE).exists():
            self._read(self.folder / FILE)

    def accept(self, digest: str, promises: Promises) -> None:
        """Remember that a plan was accepted."""
        self._write(accepted=digest, promises=promises)

    def begin(self, run: str) -> None:
        """Remember that a run has begun."""
        ended = self.ended if self.run is None else [*self.ended, self.run][-MAX_ENDED:]
        self._write(run=run, ended=ended, round=-1, tries=0, questions=0)

    def see(self, number: int) -> None:
        """Remember a round before anything of it is sent."""
        self._write(round=number, tries=self.tries + 1 if number == self.round else 1)

    def answer(self, name: str) -> None:
        """Remember an answer of a plan with noise before it is sent."""
        self._write(answers={**self.answers, name: self.answers.get(name, 0) + 1})

    def note_question(self) -> None:
        """Remember a question of round zero before it is answered."""
        self._write(questions=self.questions + 1)

    def _write(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)
        if self.folder is not None:
            values = {name: getattr(self, name) for name in SAVED}
            values["promises"] = None if self.promises is None else self.promises._asdict()
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_manifest(self.folder / FILE, FORMAT, values, mode=0o600)

    def _read(self, file: Path) -> None:
        try:
            values = read_manifest(file, FORMAT)
            saved = _MEMORY.validate_python({name: values[name] for name in SAVED})
            vars(self).update({name: getattr(saved, name) for name in SAVED})
        except (ValueError, KeyError) as error:
            advice = "This file says which plan the node accepted; check it, and remove it to accept a plan again"
            raise StorageError(f"{error}. {advice}") from None


_MEMORY = TypeAdapter(Memory)
SAVED = [field.name for field in dataclasses.fields(Memory) if field.name != "folder"]
LASTING = ("not_accepted", "weaker_plan", "wrong_plan")  # refusals that asking again would not change
MAX_REASON = 500  # characters of why a training failed
MAX_QUESTIONS = 20 * MAX_TRIES  # how many questions of round zero a node answers in a run


@dataclasses.dataclass
class _Membership:
    """The plan that a node takes part in, with its users.

    Attributes:
      agreed: the plan without the result of round zero.
      plan: the plan with it.
      data: the node's users, as they were read.
      users: as the model sees them.
      number: of this node in the plan's list, if it has one.
      evaluators: of the parts of the users.
      secure_sum: one that is under way: its purpose, its round, the state of the client.
    """

    agreed: Plan
    plan: Plan
    data: NodeData
    users: Users
    number: int | None
    evaluators: dict[str, Any] = dataclasses.field(default_factory=dict)
    secure_sum: tuple[str, int, Any] | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """A node: a handler that turns request bytes into reply bytes.

    Attributes:
      read: reads the node's own data for a plan.
      accept: asks the node's owner about a plan, once per plan.
      memory: what was accepted and seen before.
      say: called with a line about every round.
      algorithm: what is trained, for plans of an algorithm made in Python.
      key: the node's own private key, with which it signs its part in secure sums.
      trusted: public keys of the nodes that the owner knows; a plan that lists others is refused. By default the plan's
        list is trusted.
      refusal: why it will never take part in the plan that it was offered; None if it may.
      finished: whether the run that it joined last is over.

    Example:
      >>> ratings = fr.data.synthetic_ratings(num_users=4, seed=0)
      >>> node = fr.deploy.Node(lambda plan: plan.split_clients(ratings), accept=lambda plan: True)
      >>> b"garbage" in node.handle(b"not a message")
      True
    """

    read: Callable[[Plan], NodeData]
    accept: Callable[[Plan], bool]
    memory: Memory = dataclasses.field(default_factory=Memory)
    say: Say = lambda text: None
    _: dataclasses.KW_ONLY
    algorithm: Algorithm | None = None
    key: Any = None
    trusted: Collection[str] | None = None
    refusal: str | None = dataclasses.field(default=None, init=False)
    finished: bool = dataclasses.field(default=False, init=False)
    _membership: _Membership | None = dataclasses.field(default=None, init=False)

    def handle(self, data: bytes) -> bytes:
        """Answer any message; errors become replies, too."""
        message = None
        try:
            message = unpack(data, self.max_message_bytes())
            check_request(message)
            body = self._enroll(message) if message.kind == "join" else self._answer(self._check(message), message)
            return pack(Envelope(OK, message.plan, message.run, message.round, {}, body))
        except (Failure, StateError, WireError) as error:
            failure = error if isinstance(error, Failure) else Failure("garbage", str(error))
            self.say(f"refused: {failure.why}")
            if message is not None and message.kind == "join" and failure.reason in LASTING:
                self.refusal = failure.why
            return refusal(message, failure)
        except Exception as error:
            # The server learns the kind of error and nothing else: a message may have parts of the data in it.
            self.say(f"failed: {type(error).__name__}: {error}")
            return refusal(message, Failure("error", f"the node failed with {type(error).__name__}"))

    def max_message_bytes(self) -> int:
        """Return the size of the largest message that is read."""
        return MOST_BYTES + MOST_HEADER if self._membership is None else largest_message(self._membership.plan)

    # ---- joining ----

    def _enroll(self, message: Envelope) -> bytes:
        end = max(len(message.body) - message.facts.get("result_bytes", 0), 0)
        content, result = message.body[:end], message.body[end:]
        if digest_of(content) != message.plan:
            raise Failure("wrong_plan", "the server sent a plan that is not the one it names")
        membership = self._membership
        if membership is None or membership.agreed.digest != message.plan:
            membership = self._membership = self._take(content)
        if message.run in self.memory.ended or not message.run:
            raise Failure("old_run", f"the run {message.run!r} is over for this node")
        if message.run != self.memory.run:
            self.memory.begin(message.run)
            self.say(f"joined run {message.run} of plan {message.plan[:16]}")
        if result and membership.agreed.zero is not None:
            plan = membership.agreed.prepared(result)
            if plan is not membership.plan:
                users = plan.view(membership.data.users)
                self._membership = _Membership(membership.agreed, plan, membership.data, users, membership.number)
        self.finished, self.refusal = False, None
        return b"" if membership.number is None else str(membership.number).encode()

    def _take(self, data: bytes) -> _Membership:
        """Take a new plan, if it promises enough and the owner agrees."""
        with fails_with("wrong_plan", PlanError):
            plan = Plan.from_bytes(data, self.algorithm)
        if plan.digest != self.memory.accepted:
            less = [] if self.memory.promises is None else weaker(self.memory.promises, plan.promises)
            if less:
                why = f"this plan gives weaker guarantees than the accepted one: {', '.join(less)}"
                raise Failure("weaker_plan", why)
            if not self.accept(plan):
                raise Failure("not_accepted", f"the owner has not accepted the plan {plan.digest}")
        with fails_with("not_accepted", ValueError):
            number = admission.number_in_plan(plan, self.key, self.trusted)
        node_data = self.read(plan)
        users = plan.view(node_data.users)
        for part in users:
            if len(part):
                check_training(plan.algorithm, part)
        self.memory.accept(plan.digest, plan.promises)
        return _Membership(plan, plan, node_data, users, number)

    def _check(self, message: Envelope) -> _Membership:
        """Return the membership; fail unless a message belongs to its plan and run, and to its round or a later one."""
        if self._membership is None:
            raise Failure("not_joined", "this node has just started; ask it to join")
        plan, run, now = self._membership.plan, self.memory.run, self.memory.round
        refusals = (
            (message.plan != plan.digest, "wrong_plan", f"this node takes part in plan {plan.digest[:16]} alone"),
            (message.run != run, "old_run", f"this node takes part in run {run} and in no other"),
            (message.round < now, "old_round", f"round {message.round} is over; this node is in round {now}"),
            (message.round > plan.rounds, "old_round", f"the plan has {plan.rounds} rounds, and this is a later one"),
        )
        for applies, reason, why in refusals:
            if applies:
                raise Failure(reason, why)
        return self._membership

    # ---- what is computed ----

    def _answer(self, member: _Membership, message: Envelope) -> bytes:
        """Return the body of the reply to a message of this node's run."""
        if message.kind == "finish":
            return self._finish(member.plan, message)
        if message.kind in ("advertise", "share", "mask", "unmask"):
            return self._add_secretly(member, message)
        if member.plan.secure:
            raise Failure("weaker_plan", "the plan requires secure sums, but this message asks for a plain one")
        return to_bytes(self._compute(member, purpose_of(message), message.round, message.body))

    def _compute(self, member: _Membership, purpose: str, number: int, body: bytes) -> Any:
        plan = member.plan
        if purpose.startswith(PREPARE):
            return self._prepare_model(member, purpose, body)
        if plan.unprepared:
            raise Failure("not_joined", "this node does not have the result of round zero; ask it to join again")
        if purpose != TRAIN:
            return self._evaluate(member, purpose, read_tree(body, plan.params_shapes))
        if number == plan.rounds:  # which only evaluations and the end of training may have
            raise Failure("old_round", f"the plan has {plan.rounds} rounds, and all are over")
        if number == self.memory.round and self.memory.tries >= MAX_TRIES:
            raise Failure("old_round", f"this node took part in round {number} {MAX_TRIES} times already")
        if plan.release is not None:
            self._spend(plan)
        self.memory.see(number)
        return self._train(plan, member.users.train, number, read_tree(body, plan.message_shapes))

    def _prepare_model(self, member: _Membership, purpose: str, body: bytes) -> Any:
        """Answer a question of round zero, before the first round."""
        plan, users = member.agreed, member.data.users.train
        if (zero := plan.zero) is None or self.memory.round >= 0 or self.memory.questions >= MAX_QUESTIONS:
            raise Failure("old_round", "the plan has no round zero, it is over, or it was requested too often")
        state = zero.from_bytes(body)
        if purpose != f"{PREPARE}{state.answered}" or state.done:
            raise Failure("garbage", f"the question has number {state.answered}, but the message asks for {purpose}")
        if zero.noised:
            self._spend_question(plan, zero, state.answered)
        self.memory.note_question()
        if len(users) < plan.least_users:
            users = users.take(np.zeros(len(users), bool))
        elif state.answered == 0:
            self.say(f"round zero: sums over {len(users)} {plan.task.people}")
        return plan_privacy.answer_round_zero(zero, state, users)

    def _train(self, plan: Plan, users: Clients, number: int, message: Any) -> Any:
        users = plan.participants(users, number)
        if len(users) < plan.least_users:
            self.say(f"round {number + 1}: {len(users)} {plan.task.people} would take part, too few: sending zeros")
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), total_shapes(plan.algorithm))
            return plan_privacy.add_node_noise(plan.algorithm, zeros)
        began, key = time.monotonic(), round_key(plan.seed, number)
        secret = key if plan.release is None else fresh_key()
        total = client_total(plan.algorithm, message, users, key, lengths=plan.lengths, secret=secret).total
        total = plan_privacy.add_node_noise(plan.algorithm, total)
        seconds = time.monotonic() - began
        self.say(f"round {number + 1}: {len(users)} {plan.task.people} trained in {seconds:.3f} s")
        return total

    def _spend(self, plan: Plan) -> None:
        """Count an answer of a plan with noise before anything of it is sent, or refuse it."""
        max_answers = plan_privacy.max_answers(plan.rounds)
        if self.memory.answers.get(plan.digest, 0) >= max_answers:
            why = f"this node has answered {max_answers} times, the limit of the plan's privacy guarantee"
            raise Failure("budget", why)
        self.memory.answer(plan.digest)

    def _spend_question(self, plan: Plan, zero: RoundZero, number: int) -> None:
        """Do what `_spend` does for a question of round zero, of which few may be asked twice."""
        names = [f"{plan.digest} {PREPARE}{k}" for k in range(len(zero.questions))]
        counts = [self.memory.answers.get(name, 0) for name in names]
        if counts[number] and sum(max(count - 1, 0) for count in counts) >= plan_privacy.spare_questions(zero):
            raise Failure("budget", f"this node has already answered question {number} of round zero")
        self.memory.answer(names[number])

    def _evaluate(self, member: _Membership, part: str, params: Any) -> Any:
        plan, count = member.plan, len(getattr(member.users, part))
        if count < plan.least_users:
            return no_users(plan.algorithm.model)
        if part not in member.evaluators:
            member.evaluators[part] = plan.evaluator(member.users, part)
        self.say(f"evaluated {count} {part} {plan.task.people}")
        return sum_users(plan.algorithm.model, member.evaluators[part].sums(params))

    def _finish(self, plan: Plan, message: Envelope) -> bytes:
        """Keep the trained model for the owner."""
        params = read_tree(message.body, plan.params_shapes, finite=False)
        if self.memory.folder is not None:
            failed = None if "failed" not in message.facts else message.facts["failed"][:MAX_REASON]
            plan.save_model(self.memory.folder / "model", params, failed)
            how = "is over" if failed is None else f"failed: {failed}"
            self.say(f"training {how}; the model is in {self.memory.folder / 'model'}")
        self.finished = True
        return b""

    # ---- secure sums ----

    def _add_secretly(self, member: _Membership, message: Envelope) -> bytes:
        """Take a step of a secure sum; refuse a message that breaks the protocol."""
        from fedrecon._src.privacy import secure_sum  # whose packages are imported when it is used

        with fails_with("secure_sum", secure_sum.SecureSumError):
            return self._advertise(member, message) if message.kind == "advertise" else self._step(member, message)

    def _advertise(self, member: _Membership, message: Envelope) -> bytes:
        from fedrecon._src.privacy import secure_sum

        purpose, node_number, plan = message.facts["purpose"], message.facts["me"], member.plan
        if member.number not in (None, node_number):
            raise Failure("garbage", f"a secure sum for node {node_number}, but this is another node")
        like = shapes_of(member.agreed if purpose.startswith(PREPARE) else plan, purpose)
        length = length_of(like, wide=question_number(purpose) is not None)
        terms = secure_sum.Terms.from_bytes(message.body)
        if terms.bits != bits_of(like) or terms.length != length or terms.circle > plan.most_nodes:
            raise Failure("weaker_plan", "the terms of the secure sum are not those of the plan")
        signing_key = self.key if member.number is not None else None
        state, hello = secure_sum.advertise(terms, node_number, least=plan.least_nodes, signing_key=signing_key)
        member.secure_sum = (purpose, message.round, state)
        return hello

    def _step(self, member: _Membership, message: Envelope) -> bytes:
        """Take the step after the last one, in the same round."""
        from fedrecon._src.privacy import secure_sum

        if member.secure_sum is None or member.secure_sum[1] != message.round:
            raise Failure("secure_sum", "there is no secure sum of this round under way")
        (purpose, number, state), plan = member.secure_sum, member.plan
        member.secure_sum = None  # a state is for one step, even if that fails
        if message.kind == "share":
            state, reply = secure_sum.share(state, message.body, verify_keys=admission.verify_keys(plan))
        elif message.kind == "mask":
            delivery, body = unpack_pair(message.body)
            value = self._compute(member, purpose, number, body)
            vector = to_integers(plan, value, wide=question_number(purpose) is not None)
            state, reply = secure_sum.mask(state, delivery, vector)
        else:
            state, reply = secure_sum.unmask(state, message.body)
        member.secure_sum = (purpose, number, state)
        return reply
