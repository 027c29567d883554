"""The server: rounds over nodes that come and go, each closed by enough good replies or by its deadline."""

from __future__ import annotations

import base64
import datetime
import platform
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import ServerState
from fedrecon._src.algorithms.rounds import server_round
from fedrecon._src.core.keys import fresh_key, round_key, run_keys
from fedrecon._src.core.model import finish, metric_names
from fedrecon._src.core.wire import to_bytes
from fedrecon._src.deploy import measure, noise
from fedrecon._src.deploy.asking import Answers, ask, open_reply
from fedrecon._src.deploy.grid import SYSTEM, Clock, Grid
from fedrecon._src.deploy.members import Members, NotEnoughNodes, Pace
from fedrecon._src.deploy.messages import MOST_HEADER, PREPARE, TRAIN, Envelope, pack
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.settings_plan import SettingsPlan
from fedrecon._src.deploy.sums import Question, Summed, open_sum, secure_sum_of
from fedrecon._src.privacy.ledger import Ledger
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon._src.storage.run_folder import RunFolder
from fedrecon._version import __version__

MOST_PAUSE = 60.0  # the most seconds between two tries of a round; they grow from one
ROUND_ZERO, ROUND_ZERO_FORMAT = "round-zero.json", Format("fedrecon-round-zero", 1)  # in the run's folder


class Outcome(NamedTuple):
    """What a deployed training leaves in memory.

    Attributes:
      params: the global parameters.
      history: one dict per round or evaluation, as in `metrics.jsonl`.
      rounds: how many rounds were run in all.
      test: how the model serves the test users of all nodes; None after an interruption, or if there are none.
      failed: why the training failed, or None.
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
      resume: continue from the folder's newest checkpoint; start anew if it has none.
      clock: tells the time.
      on_record: called with every round's and evaluation's record.
      say: called with remarks and warnings.

    Raises:
      NotEnoughNodes: too few nodes for too long. What was learned until then is in the folder.
      StorageError: the folder holds another run.
    """
    with folder.lock():
        facts = _facts(plan, folder, resume)
        folder.describe(facts)
        training = _Training(plan, grid, folder, pace or Pace(), facts["deployment"]["run"], clock, say)
        training.repeated = len(facts["resumed"])
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
            training.finish(failed)
        ended = {
            "ended": _now(),
            "rounds": training.done,
            "interrupted": interrupted,
            "failed": failed,
            "test": test.summary() if test else None,
            **({} if (ledger := training.ledger()) is None else {"privacy": ledger.to_dict()}),
        }
        folder.describe(facts | ended)
        return Outcome(params, training.history, training.done, test, failed, interrupted)


class _Training(Members):
    """Training between rounds, and the nodes that are in it."""

    def __init__(
        self, plan: Plan, grid: Grid, folder: RunFolder, pace: Pace, run: str, clock: Clock, say: Callable[[str], None]
    ):
        super().__init__(plan, grid, pace, run, clock, say)
        self.folder = folder
        self.repeated = 0  # rounds that may have been summed twice: one for each time that the run was resumed
        self.state: Any = None
        self.history: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Run round zero if the plan has one, and begin with its algorithm or continue from a checkpoint."""
        if isinstance(self.plan, SettingsPlan) and self.plan.unprepared:
            self.plan = self._prepare(self.plan)
            self.ask_everybody_again()  # all nodes need what was found
        self.state = jax.tree.map(np.asarray, self.plan.algorithm.init(run_keys(self.plan.seed).init))
        if (found := self.folder.restore(self._everything())) is not None:
            self.done, saved, self.history = found
            self.state = ServerState(**saved["server"])

    def _prepare(self, plan: SettingsPlan) -> SettingsPlan:
        """Ask nodes for the sums that the model begins with, and save the result in the run's folder."""
        zero, file = plan.zero, self.folder.path / ROUND_ZERO
        assert zero is not None
        if not file.exists():
            state = zero.start()
            while not state.done:
                of = f"{PREPARE}{state.asked}"
                summed = self._gather(Question(self.run_id, 0, of, zero.to_bytes(state)), everybody=True).summed
                total = {name: sum(part[name] for part in summed.parts) for name in summed.parts[0]}
                state = zero.advance(state, total)
            write_manifest(file, ROUND_ZERO_FORMAT, {"result": base64.b64encode(zero.to_bytes(state)).decode()})
        result = zero.read_result(base64.b64decode(read_manifest(file, ROUND_ZERO_FORMAT)["result"]))
        ready, self.found = plan.prepared(result), result.data
        self.say(zero.describe(result))
        return ready

    def ledger(self) -> Ledger | None:
        """Return what was spent so far; None without noise."""
        return noise.spent(self.plan, self.done + self.repeated)

    def _spent(self) -> dict[str, float]:
        ledger = self.ledger()
        return {} if ledger is None else {"epsilon": ledger.epsilon}

    def params(self) -> Any:
        return jax.tree.map(np.asarray, self.plan.algorithm.params(self.state))

    def checkpoint(self) -> None:
        self.folder.checkpoint(self.done, self._everything())

    def _everything(self) -> Any:
        return {"server": self.state._asdict(), "kept": ()}

    # ---- rounds ----

    def run(self, on_record: Callable[[dict[str, Any]], None]) -> None:
        plan = self.plan

        def record(entry: dict[str, Any]) -> None:
            self.history.append(entry)
            self.folder.record(entry)
            on_record(entry)

        # A round that was summed but not saved would be summed again, and count twice.
        every_so_often = self.pace.checkpoint_every if plan.release is None else 1
        most = noise.answers_of(plan.rounds) - self.repeated if plan.release else plan.rounds
        last = min(plan.rounds, most)
        if last < plan.rounds:
            self.say(f"the privacy budget ends training after {last} rounds: the run was resumed {self.repeated} times")
        evaluated = max((entry["round"] for entry in self.history if entry["kind"] == "evaluation"), default=0)
        while True:
            every, now = plan.evaluate_every, self.done
            due = now and (now == last or (every and now % every == 0))
            if due and now != evaluated:
                found = self.evaluate("valid")
                evaluated = now
                if found is not None and found.clients:
                    record({"kind": "evaluation", "round": now, **self._spent(), **found.summary()})
            if now >= last:
                self.checkpoint()
                return
            record(self._round(now))
            if self.done % every_so_often == 0 and self.done < last:
                self.checkpoint()

    def _round(self, number: int) -> dict[str, Any]:
        """Run one round."""
        began = self.clock.monotonic()
        body = to_bytes(self.plan.algorithm.message(self.state))
        gathered = self._gather(Question(self.run_id, number, TRAIN, body))
        # Noise must come from entropy that nobody knows; all else may follow from the seed, as in the simulation.
        key = round_key(self.plan.seed, number) if self.plan.release is None else fresh_key()
        state, report = server_round(self.plan.algorithm, self.state, gathered.summed.parts, key)
        self.state, self.done = jax.tree.map(np.asarray, state), number + 1
        return self._entry(report, gathered, self.clock.monotonic() - began)

    def _gather(self, question: Question, everybody: bool = False) -> Gathered:
        """Ask nodes for a sum, again and again until enough of them have answered."""
        began, attempt, lost, number = self.clock.monotonic(), 0, Answers(), question.round
        what = f"round {number + 1}" if question.of == TRAIN else "round zero"
        while True:
            ready = self.await_nodes(began, number)
            invited, enough = self.invite(ready, number, attempt, everybody)
            summed = self._sum(question, invited, enough)
            summed.answers.take_over(lost)
            if len(summed.nodes) >= self.least:
                return Gathered(summed, len(invited), attempt + 1)
            lost, attempt = summed.answers, attempt + 1
            if self.clock.monotonic() - began > self.pace.patience:
                raise NotEnoughNodes(
                    f"{what} got {len(summed.nodes)} good replies at attempt {attempt}, and needs "
                    f"{self.least} (late: {len(lost.late)}, failed: {lost.reasons or 'none'}). "
                    f"{number} rounds are done and saved; continue with --resume"
                )
            self.say(f"{what}: {len(summed.nodes)} good replies, {self.least} are needed; trying again")
            self.clock.sleep(min(2.0**attempt / 2, MOST_PAUSE))

    def _entry(self, report: Any, gathered: Gathered, seconds: float) -> dict[str, Any]:
        summed, invited, attempts = gathered
        report, answers = {name: np.asarray(value) for name, value in report.items()}, summed.answers
        model = self.plan.algorithm.model
        nothing = np.zeros((len(metric_names(model)), 2))  # for aggregators that report no metrics
        return {
            "kind": "round",
            "round": self.done,
            **finish(model, report.pop("sums", nothing)),
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
            **self._spent(),
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
                numbers=self.numbers(invited),
            )
        else:
            summed = open_sum(
                plan, self.grid, question, invited, enough=enough, seconds=pace.deadline, clock=self.clock
            )
        self.heed(summed.answers, summed.nodes, question.round, closed_by_deadline=len(summed.nodes) < enough)
        return summed

    def evaluate(self, part: str) -> Evaluation | None:
        """Measure the parameters on the held-out users of every node; None if nobody could."""
        ready = [node for node in self.welcome() if node not in self.missed]
        body = to_bytes(self.params())
        summed = self._sum(Question(self.run_id, self.done, part, body), ready, len(ready))
        if len(summed.nodes) < self.plan.least_nodes:
            self.say(f"the {part} users were not measured: {len(summed.nodes)} nodes answered")
            return None
        return measure.evaluation_of(self.plan.algorithm.model, measure.add(summed.parts))

    def finish(self, failed: str | None = None) -> None:
        """Give every node the model, for its owner, and say why training failed, if it did."""
        facts = {} if failed is None else {"failed": failed}
        asked = Envelope("finish", self.plan.digest, self.run_id, self.done, facts, to_bytes(self.params()))
        nodes = [node for node in self.welcome() if node not in self.missed]
        ask(
            self.grid,
            dict.fromkeys(nodes, pack(asked)),
            lambda node, reply: open_reply(reply, asked, MOST_HEADER),
            enough=len(nodes),
            seconds=self.pace.stage_deadline,
            clock=self.clock,
            number=self.done,
        )


def _number(value: Any) -> float | int:
    number = float(value)
    return int(number) if number.is_integer() else number


def _facts(plan: Plan, folder: RunFolder, resume: bool) -> dict[str, Any]:
    """Return what `run.json` says from the beginning; for a resumed run, what it says already."""
    if folder.has_run():
        if not resume:
            raise StorageError(f"{folder.path} holds a run; continue it with --resume, or use another folder")
        earlier = folder.description()
        found = earlier.get("deployment")
        if not isinstance(found, dict) or found.get("plan") != plan.digest or not isinstance(found.get("run"), str):
            raise StorageError(
                f"the run in {folder.path} does not belong to the plan {plan.digest[:16]}; use another folder"
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
        "privacy": None if (promised := noise.spent(plan, 0)) is None else promised.to_dict(),
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
