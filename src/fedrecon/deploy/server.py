"""The server: rounds over nodes that come and go, each closed by enough good replies or by its deadline."""

from __future__ import annotations

import datetime
import math
import platform
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._version import __version__
from fedrecon.algorithm import ServerState
from fedrecon.deploy import measure, round_zero
from fedrecon.deploy.asking import Answers, ask, open_reply
from fedrecon.deploy.grid import SYSTEM, Clock, Grid
from fedrecon.deploy.messages import MOST_HEADER, Envelope, Failure, pack
from fedrecon.deploy.node import PREPARE, TRAIN
from fedrecon.deploy.plan import Plan
from fedrecon.deploy.settings_plan import SettingsPlan
from fedrecon.deploy.sums import Question, Summed, open_sum, secure_sum_of
from fedrecon.disk.arrays import write_bytes
from fedrecon.disk.errors import StorageError
from fedrecon.disk.runs import RunFolder
from fedrecon.evaluation import Evaluation
from fedrecon.hosts import server_round
from fedrecon.keys import round_key, run_keys
from fedrecon.model import finish
from fedrecon.wire import to_bytes

ASK_AGAIN = 30.0  # seconds until a node that refused to join is asked again
MOST_ROUNDS_OUT = 32  # rounds for which a node is not invited that let deadlines pass
MOST_PAUSE = 60.0  # seconds between two tries of a round; they grow from one on
WAIT = 0.2  # seconds between two looks for nodes
ROUND_ZERO = "round-zero.safetensors"  # in the run's folder


class NotEnoughNodes(RuntimeError):
    """Too few nodes for too long."""


@dataclass(frozen=True)
class Pace:
    """How the server goes through rounds.

    Attributes:
      per_round: how many good replies close a round; None for those of all nodes that are there.
      oversample: invite this many times as many.
      deadline: seconds after which a round is closed with the replies that there are.
      stage_deadline: the same for each of the small messages of a secure sum.
      min_nodes: how many nodes must be there to begin a round, and have answered to end one; the plan's least number
        counts if it is larger.
      patience: seconds to wait for so many before giving up.
      checkpoint_every: save the state every so many rounds.
    """

    per_round: int | None = None
    oversample: float = 1.3
    deadline: float = 60.0
    stage_deadline: float = 15.0
    min_nodes: int = 1
    patience: float = 600.0
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.per_round is not None and self.per_round < self.min_nodes:
            raise ValueError(f"per_round is {self.per_round} and min_nodes {self.min_nodes}: no round could ever end")
        if self.oversample < 1 or self.min_nodes < 1 or self.checkpoint_every < 1:
            raise ValueError("oversample, min_nodes and checkpoint_every must be at least 1")
        if not (self.deadline > 0 and self.stage_deadline > 0 and self.patience > 0):
            raise ValueError("deadline, stage_deadline and patience must be above 0 seconds")


class Outcome(NamedTuple):
    """What a deployed training leaves in memory.

    Attributes:
      params: the global parameters.
      history: one dict a round or evaluation, as in `metrics.jsonl`.
      rounds: how many rounds were run in all.
      test: how the model serves the test users of all nodes; None after an interruption, or if there are none.
      failed: why the training is said to have failed, or None.
      interrupted: whether it was stopped before the last round.
    """

    params: Any
    history: list[dict[str, Any]]
    rounds: int
    test: Evaluation | None
    failed: str | None
    interrupted: bool


class Gathered(NamedTuple):
    """A sum of enough nodes, how many were invited, and at which attempt there were enough."""

    summed: Summed
    invited: int
    attempts: int


def serve(
    plan: Plan,
    grid: Grid,
    folder: RunFolder,
    pace: Pace | None = None,
    *,
    resume: bool = False,
    clock: Clock = SYSTEM,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train a plan over nodes, evaluate on their held-out users, and write what `fedrecon train` writes.

    Args:
      plan: what is trained.
      grid: reaches the nodes.
      folder: where everything goes.
      pace: how many nodes, and how long to wait.
      resume: go on from the folder's newest checkpoint; begin if it has none.
      clock: tells the time.
      on_record: called with every round's and evaluation's record.
      say: called with remarks and warnings.

    Raises:
      NotEnoughNodes: too few nodes for too long. What was learned until then is in the folder.
      StorageError: the folder holds another run.
    """
    with folder.held():
        facts = _facts(plan, folder, resume)
        folder.describe(facts)
        training = _Training(plan, grid, folder, pace or Pace(), facts["deployment"]["run"], clock, say)
        watch = plan.watch(say)

        def watched(record: dict[str, Any]) -> None:
            watch(record)
            on_record(record)

        interrupted = False
        try:
            training.begin()
            training.run(watched)
        except KeyboardInterrupt:
            interrupted = True
            if training.state is None:  # nothing was learned yet
                raise
            training.checkpoint()
        plan, params = training.plan, training.params()
        failed = plan.why_failed(training.history)
        plan.save_model(folder.model_path, params, failed)
        test = None if interrupted else training.evaluate("test")
        if test is not None and test.clients and (found := plan.why_failed(training.history, test)) != failed:
            failed = found
            plan.save_model(folder.model_path, params, failed)
        if not interrupted:
            training.finish()
        ended = {
            "ended": _now(),
            "rounds": training.done,
            "interrupted": interrupted,
            "failed": failed,
            "test": test.summary() if test else None,
        }
        folder.describe(facts | ended)
        return Outcome(params, training.history, training.done, test, failed, interrupted)


class _Training:
    """Training between rounds, and the nodes that are in it."""

    def __init__(
        self, plan: Plan, grid: Grid, folder: RunFolder, pace: Pace, run: str, clock: Clock, say: Callable[[str], None]
    ):
        self.plan, self.grid, self.folder, self.pace, self.run_id = plan, grid, folder, pace, run
        self.clock, self.say = clock, say
        self.least = max(pace.min_nodes, plan.least_nodes)
        self.joined: dict[int, int | None] = {}  # with their numbers in the plan's list, if it has one
        self._joining: dict[Any, int] = {}
        self._asked: dict[int, float] = {}  # when nodes were asked to join
        self._refused: dict[int, str] = {}
        self._missed: dict[int, tuple[int, int]] = {}  # by node: deadlines missed in a row, not invited before round
        self._found = b""  # by round zero
        self.state: Any = None
        self.history: list[dict[str, Any]] = []
        self.done = 0

    def begin(self) -> None:
        """Run round zero if the plan has one, and begin with its algorithm or go on from a checkpoint."""
        if isinstance(self.plan, SettingsPlan) and self.plan.unprepared:
            self.plan = self._prepare(self.plan)
            self.joined, self._asked = {}, {}  # everybody is to know what was found
        self.state = jax.tree.map(np.asarray, self.plan.algorithm.init(run_keys(self.plan.seed).init))
        if (found := self.folder.restore(self._everything())) is not None:
            self.done, saved, self.history = found
            self.state = ServerState(**saved["server"])

    def _prepare(self, plan: SettingsPlan) -> SettingsPlan:
        """Ask nodes for the sums that the model begins with; what they come to is in the run's folder."""
        config: Any = plan.config
        file, items = self.folder.path / ROUND_ZERO, len(plan.legend)
        if not file.exists():
            question = round_zero.first(config, items)
            while not question.over:
                of = f"{PREPARE}{question.number}"
                summed = self._gather(Question(self.run_id, 0, of, question.to_bytes()), everybody=True).summed
                total = {name: sum(part[name] for part in summed.parts) for name in summed.parts[0]}
                question = round_zero.following(question, total, config.data.transform)
            write_bytes(file, round_zero.found_by(question))
        found = round_zero.read_found(file.read_bytes(), config, items)
        ready, self._found = plan.prepared(found), bytes(found)
        scale = ready.config.model.scale  # type: ignore[attr-defined]
        self.say(
            f"round zero: {found.examples:,} ratings, mean {scale.mean:.4g}, deviation {scale.deviation:.4g}"
            + (", which look like counts: log(1+x) is taken" if scale.transform == "log1p" else "")
        )
        return ready

    def params(self) -> Any:
        return jax.tree.map(np.asarray, self.plan.algorithm.params(self.state))

    def checkpoint(self) -> None:
        self.folder.checkpoint(self.done, self._everything())

    def _everything(self) -> Any:
        return {"server": self.state._asdict(), "kept": ()}

    # ---- nodes ----

    def welcome(self) -> list[int]:
        """Ask new nodes to join, hear those that were asked, and return who takes part now."""
        there, now = set(self.grid.nodes()), self.clock.monotonic()
        self.joined = {node: number for node, number in self.joined.items() if node in there}
        facts = {"found": len(self._found)}
        join = Envelope("join", self.plan.digest, self.run_id, self.done, facts, self.plan.content + self._found)
        for node in sorted(there - set(self.joined)):
            if node not in self._asked or now - self._asked[node] >= ASK_AGAIN:
                self._asked[node] = now
                self._joining[self.grid.send(node, pack(join), 10 * ASK_AGAIN)] = node
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
            raise Failure("garbage", "the node does not say which one of the plan's list it is")
        if number in self.joined.values():
            raise Failure("garbage", "two nodes say that they are the same one of the plan's list")
        return number

    def await_nodes(self, since: float, number: int) -> list[int]:
        """Return the nodes that take part, once there are enough."""
        told = False
        while len(ready := self.welcome()) < self.least:
            if self.clock.monotonic() - since > self.pace.patience:
                refused = f"; did not join: {', '.join(sorted(set(self._refused.values())))}" if self._refused else ""
                raise NotEnoughNodes(
                    f"{len(ready)} nodes take part, and a round needs {self.least}: nothing more came in "
                    f"{self.pace.patience:g} s{refused}. {number} rounds are done and saved; go on with --resume"
                )
            if not told:
                self.say(f"waiting for nodes: {len(ready)} of {self.least} are there")
            told = True
            self.clock.sleep(WAIT)
        return ready

    def _invite(self, ready: list[int], number: int, attempt: int, everybody: bool) -> tuple[list[int], int]:
        """Choose the nodes of a round, and how many of them are enough.

        Who let a deadline pass is left out for a while, longer each time, as long as there are enough others: a node
        that died is listed for a minute.
        """
        there = [node for node in ready if self._missed.get(node, (0, 0))[1] <= number]
        ready = there if len(there) >= self.least else ready
        wanted = None if everybody else self.pace.per_round
        if wanted is None or wanted >= len(ready):
            return ready, len(ready)
        invited = min(len(ready), math.ceil(wanted * self.pace.oversample))
        generator = np.random.default_rng([self.plan.seed, number, attempt])
        return sorted(ready[k] for k in generator.choice(len(ready), invited, replace=False)), wanted

    # ---- rounds ----

    def run(self, on_record: Callable[[dict[str, Any]], None]) -> None:
        plan = self.plan

        def record(entry: dict[str, Any]) -> None:
            self.history.append(entry)
            self.folder.record(entry)
            on_record(entry)

        evaluated = max((entry["round"] for entry in self.history if entry["kind"] == "evaluation"), default=0)
        while True:
            every, now = plan.evaluate_every, self.done
            due = now and (now == plan.rounds or (every and now % every == 0))
            if due and now != evaluated:
                found = self.evaluate("valid")
                evaluated = now
                if found is not None and found.clients:
                    record({"kind": "evaluation", "round": now, **found.summary()})
            if now >= plan.rounds:
                self.checkpoint()
                return
            record(self._round(now))
            if self.done % self.pace.checkpoint_every == 0 and self.done < plan.rounds:
                self.checkpoint()

    def _round(self, number: int) -> dict[str, Any]:
        """Run one round."""
        began = self.clock.monotonic()
        body = to_bytes(self.plan.algorithm.message(self.state))
        gathered = self._gather(Question(self.run_id, number, TRAIN, body))
        key = round_key(self.plan.seed, number)
        state, report = server_round(self.plan.algorithm, self.state, gathered.summed.parts, key)
        self.state, self.done = jax.tree.map(np.asarray, state), number + 1
        return self._entry(report, gathered, self.clock.monotonic() - began)

    def _gather(self, question: Question, everybody: bool = False) -> Gathered:
        """Ask nodes for a sum, again and again until enough of them have answered."""
        began, attempt, lost, number = self.clock.monotonic(), 0, Answers(), question.round
        what = f"round {number + 1}" if question.of == TRAIN else "round zero"
        while True:
            ready = self.await_nodes(began, number)
            invited, enough = self._invite(ready, number, attempt, everybody)
            summed = self._sum(question, invited, enough)
            summed.answers.take_over(lost)
            if len(summed.nodes) >= self.least:
                return Gathered(summed, len(invited), attempt + 1)
            lost, attempt = summed.answers, attempt + 1
            if self.clock.monotonic() - began > self.pace.patience:
                raise NotEnoughNodes(
                    f"{what} had {len(summed.nodes)} good replies, {attempt} times over, and needs "
                    f"{self.least} (late: {len(lost.late)}, failed: {lost.reasons or 'none'}). "
                    f"{number} rounds are done and saved; go on with --resume"
                )
            self.say(f"{what}: {len(summed.nodes)} good replies, {self.least} are needed; once more")
            self.clock.sleep(min(2.0**attempt / 2, MOST_PAUSE))

    def _entry(self, report: Any, gathered: Gathered, seconds: float) -> dict[str, Any]:
        summed, invited, attempts = gathered
        report, answers = {name: np.asarray(value) for name, value in report.items()}, summed.answers
        return {
            "kind": "round",
            "round": self.done,
            **finish(self.plan.algorithm.model, report.pop("sums")),
            "weight": float(report.pop("weight", np.nan)),
            "skipped": bool(report.pop("skipped")),
            **{name: _number(value) for name, value in report.items() if value.ndim == 0},
            "invited": invited,
            "answered": len(summed.nodes),
            "late": len(answers.late),
            "failed": answers.reasons,
            "attempts": attempts,
            "too_small": 0,
            "dropped": invited - len(summed.nodes),
            "seconds": round(seconds, 3),
            "bytes_sent": answers.sent,
            "bytes_received": answers.received,
        }

    def _sum(self, question: Question, invited: list[int], enough: int) -> Summed:
        pace, plan = self.pace, self.plan
        if plan.secure:
            summed = secure_sum_of(
                plan,
                self.grid,
                question,
                invited,
                stage_seconds=pace.stage_deadline,
                seconds=pace.deadline,
                clock=self.clock,
                numbers=self._numbers(invited),
            )
        else:
            summed = open_sum(
                plan, self.grid, question, invited, enough=enough, seconds=pace.deadline, clock=self.clock
            )
        for node, reason in summed.answers.failed.items():
            if reason in ("not_joined", "old_run"):
                self.joined.pop(node, None)
                self._asked.pop(node, None)
        if len(summed.nodes) < enough:  # the deadline closed it, not the first good replies
            for node in summed.answers.late:
                misses = self._missed.get(node, (0, 0))[0] + 1
                self._missed[node] = (misses, question.round + 1 + min(2**misses, MOST_ROUNDS_OUT))
        for node in summed.nodes:
            self._missed.pop(node, None)
        return summed

    def _numbers(self, nodes: list[int]) -> dict[int, int] | None:
        """Return the numbers of nodes in the plan's list; None if it has none."""
        found = {node: number for node in nodes if (number := self.joined[node]) is not None}
        return found if self.plan.promises.signed else None

    def evaluate(self, part: str) -> Evaluation | None:
        """Measure the parameters on the held-out users of every node; None if nobody could."""
        ready = [node for node in self.welcome() if node not in self._missed]
        body = to_bytes(self.params())
        summed = self._sum(Question(self.run_id, self.done, part, body), ready, len(ready))
        if len(summed.nodes) < self.plan.least_nodes:
            self.say(f"nothing is known of the {part} users: {len(summed.nodes)} nodes answered")
            return None
        return measure.evaluation_of(self.plan.algorithm.model, measure.add(summed.parts))

    def finish(self) -> None:
        """Give every node the model, for its owner."""
        asked = Envelope("finish", self.plan.digest, self.run_id, self.done, {}, to_bytes(self.params()))
        nodes = [node for node in self.welcome() if node not in self._missed]
        ask(
            self.grid,
            dict.fromkeys(nodes, pack(asked)),
            lambda node, reply: open_reply(reply, asked, MOST_HEADER),
            enough=len(nodes),
            seconds=self.pace.stage_deadline,
            clock=self.clock,
        )


def _round_of(data: bytes) -> int:
    """Return the round that a reply names: one to a join may come several rounds later."""
    from fedrecon.deploy.messages import unpack

    return unpack(data, MOST_HEADER).round


def _number(value: Any) -> float | int:
    number = float(value)
    return int(number) if number.is_integer() else number


def _facts(plan: Plan, folder: RunFolder, resume: bool) -> dict[str, Any]:
    """Return what `run.json` says from the beginning; of a run that goes on, what it said."""
    if folder.holds_run():
        if not resume:
            raise StorageError(f"{folder.path} holds a run; continue it with --resume, or use another folder")
        earlier = folder.description()
        found = earlier.get("deployment")
        if not isinstance(found, dict) or found.get("plan") != plan.digest or not isinstance(found.get("run"), str):
            raise StorageError(
                f"the run in {folder.path} is not one of the plan {plan.digest[:16]}; use another folder"
            )
        kept = {name: value for name, value in earlier.items() if name not in ("format", "version", "sha256")}
        return {**kept, "resumed": [*kept.get("resumed", []), _now()], "ended": None}
    run = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(8)}"
    return {
        "made_by": "server",
        **plan.settings(),
        "seed": plan.seed,
        "versions": {
            "python": platform.python_version(),
            "fedrecon": __version__,
            **{module.__name__: module.__version__ for module in (jax, np)},
        },
        "data": {"source": "", "path": None, "fingerprint": plan.digest},
        "deployment": {"plan": plan.digest, "run": run},
        "started": _now(),
        "resumed": [],
        "ended": None,
        "rounds": None,
        "interrupted": None,
        "failed": None,
        "test": None,
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
