"""The server: rounds over nodes that come and go, each closed by enough good replies or by its deadline."""

from __future__ import annotations

import base64
import datetime
import platform
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm, ServerState
from fedrecon._src.algorithms.rounds import server_round
from fedrecon._src.core.keys import fresh_key, round_key, run_keys
from fedrecon._src.core.model import finish, metric_names
from fedrecon._src.core.wire import to_bytes
from fedrecon._src.deploy import plan_privacy
from fedrecon._src.deploy.messages import Envelope
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.registry import NodeRegistry, NotEnoughNodes, Pace
from fedrecon._src.deploy.sums import add_sums, to_evaluation
from fedrecon._src.deploy.transport import SYSTEM, Channel, Clock, Grid, Replies
from fedrecon._src.privacy.ledger import Ledger
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon._src.storage.run_folder import RunFolder
from fedrecon._version import __version__

MAX_PAUSE = 60.0  # seconds between two attempts at a round; they grow from one
ROUND_ZERO, ROUND_ZERO_FORMAT = "round-zero.json", Format("fedrecon-round-zero", 2)  # in the run's folder


class ServeResult(NamedTuple):
    """What a deployed training leaves in memory.

    Attributes:
      params: the global parameters.
      history: one dict per round or evaluation, as in `metrics.jsonl`.
      rounds: how many rounds were run in all.
      test: how the model serves the test users of all nodes; None after an interruption, or if there are none.
      failed: why the training failed, or None.
      interrupted: whether it was stopped before the last round.

    Example:
      >>> fr.deploy.ServeResult({"w": 1.0}, [], rounds=0, test=None, failed=None, interrupted=True).interrupted
      True
    """

    params: Any
    history: list[dict[str, Any]]
    rounds: int
    test: Evaluation | None
    failed: str | None
    interrupted: bool


def serve(
    plan: Plan,
    grid: Grid,
    folder: str | Path | RunFolder,
    pace: Pace | None = None,
    *,
    resume: bool = False,
    clock: Clock = SYSTEM,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    say: Callable[[str], None] = lambda text: None,
) -> ServeResult:
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

    Example:
      >>> grid = fr.deploy.InProcess({0: node.handle})  # doctest: +SKIP
      >>> fr.deploy.serve(plan, grid, "runs/first").rounds  # doctest: +SKIP
      100
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    with folder.lock():
        promised = plan_privacy.ledger_of(plan, 0)
        settings = {"seed": plan.seed, "privacy": None if promised is None else promised.to_dict()}
        facts = run_facts(plan.digest, plan.settings() | settings, folder, resume)
        folder.describe(facts)
        channel, run = Channel(grid, clock), facts["deployment"]["run"]
        training = _Training(plan, channel, folder, pace or Pace(), run, say)
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
        if test is not None and test.clients and (verdict := plan.why_failed(training.history, test)) != failed:
            failed = verdict
            plan.save_model(folder.model_path, params, failed)
        if not interrupted:
            training.send_model(failed)
        ended = {
            "ended": timestamp(),
            "rounds": training.done,
            "interrupted": interrupted,
            "failed": failed,
            "test": test.summary() if test else None,
            **({} if (ledger := training.ledger()) is None else {"privacy": ledger.to_dict()}),
        }
        folder.describe(facts | ended)
        return ServeResult(params, training.history, training.done, test, failed, interrupted)


class _Training(NodeRegistry):
    """Training between rounds, and the nodes that are in it."""

    accepts_gateways = True

    def __init__(
        self, plan: Plan, channel: Channel, folder: RunFolder, pace: Pace, run: str, say: Callable[[str], None]
    ):
        super().__init__(plan, channel, pace, run, say)
        self.folder, self.clock = folder, channel.clock
        self.repeated = 0  # rounds that may have been summed twice: one for each time that the run was resumed
        self.state: Any = None
        self.history: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Run round zero if the plan has one, and begin with its algorithm or continue from a checkpoint."""
        if self.plan.unprepared:
            self.plan = self._run_round_zero(self.plan)
            self.reset()  # all nodes need the result
        self.state = jax.tree.map(np.asarray, self.plan.algorithm.init(run_keys(self.plan.seed).init))
        if (checkpoint := self.folder.restore(self._checkpoint_tree())) is not None:
            self.done, saved, self.history = checkpoint
            self.state = ServerState(**saved["server"])

    def _run_round_zero(self, plan: Plan) -> Plan:
        """Ask nodes for the sums that the model begins with, and save the result in the run's folder."""
        zero, file = plan.zero, self.folder.path / ROUND_ZERO
        assert zero is not None
        state = zero.start()
        if file.exists():
            state = zero.from_bytes(base64.b64decode(read_manifest(file, ROUND_ZERO_FORMAT)["state"]))
        while not state.done:
            question = self.message("prepare", 0, zero.to_bytes(state), number=state.answered)
            parts, facts = self._sum_of_enough(question, all_nodes=True)
            nodes = facts["answered"] * (plan.least_nodes if self.over_gateways else 1)  # or more
            state = plan_privacy.advance_round_zero(zero, state, parts, nodes)
            # With noise, nodes hardly answer a question twice: after a restart, the next one is asked.
            write_manifest(file, ROUND_ZERO_FORMAT, {"state": base64.b64encode(zero.to_bytes(state)).decode()})
        result = zero.read_result(zero.to_bytes(state))
        self.round_zero = result.data
        self.say(zero.describe(result))
        return plan.prepared(result)

    def ledger(self) -> Ledger | None:
        """Return what was spent so far; None without noise."""
        return plan_privacy.ledger_of(self.plan, self.done + self.repeated)

    def _spent(self) -> dict[str, float]:
        ledger = self.ledger()
        return {} if ledger is None else {"epsilon": ledger.epsilon}

    def params(self) -> Any:
        return jax.tree.map(np.asarray, self.plan.algorithm.params(self.state))

    def checkpoint(self) -> None:
        self.folder.checkpoint(self.done, self._checkpoint_tree())

    def _checkpoint_tree(self) -> Any:
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
        most = plan_privacy.max_answers(plan.rounds) - self.repeated if plan.release else plan.rounds
        last = min(plan.rounds, most)
        if last < plan.rounds:
            self.say(f"the privacy budget ends training after {last} rounds: the run was resumed {self.repeated} times")
        evaluated = max((entry["round"] for entry in self.history if entry["kind"] == "evaluation"), default=0)
        while True:
            every, now = plan.evaluate_every, self.done
            due = now and (now == last or (every and now % every == 0))
            if due and now != evaluated:
                evaluation = self.evaluate("valid")
                evaluated = now
                if evaluation is not None and evaluation.clients:
                    record({"kind": "evaluation", "round": now, **self._spent(), **evaluation.summary()})
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
        parts, facts = self._sum_of_enough(self.message("train", number, body))
        # Noise must come from entropy that nobody knows; all else may follow from the seed, as in the simulation.
        key = round_key(self.plan.seed, number) if self.plan.release is None else fresh_key()
        state, report = server_round(self.plan.algorithm, self.state, parts, key)
        self.state, self.done = jax.tree.map(np.asarray, state), number + 1
        facts["seconds"] = round(self.clock.monotonic() - began, 3)
        return {**describe_round(self.plan.algorithm, self.done, report), **facts, **self._spent()}

    def _sum_of_enough(self, question: Envelope, all_nodes: bool = False) -> tuple[list[Any], dict[str, Any]]:
        """Ask nodes for a sum until enough of them have answered; return its parts, and what a record says of them."""
        began, attempt, replies, number = self.clock.monotonic(), 0, Replies(), question.round
        title = f"round {number + 1}" if question.kind == "train" else "round zero"
        while True:
            ready = self.wait_for_nodes(began, number)
            invited, enough = self.select(ready, number, attempt, all_nodes)
            node_sum = self.collect_sum(question, invited, enough, self.pace)
            replies.add(node_sum.replies)
            answered, attempt = len(node_sum.nodes), attempt + 1
            if answered >= self.min_nodes:
                break
            if self.clock.monotonic() - began > self.pace.patience:
                raise NotEnoughNodes(
                    f"{title} got {answered} valid replies in attempt {attempt} and needs "
                    f"{self.min_nodes} (late: {len(replies.late)}, failed: {replies.reasons or 'none'}). "
                    f"{number} rounds are done and saved; continue with --resume"
                )
            self.say(f"{title}: {answered} good replies, {self.min_nodes} are needed; trying again")
            self.clock.sleep(min(2.0**attempt / 2, MAX_PAUSE))
        return node_sum.parts, {
            "invited": len(invited),
            "answered": answered,
            "late": len(replies.late),
            "failed": replies.reasons,
            "attempts": attempt,
            "too_small": 0,
            "dropped": len(invited) - answered,
            "bytes_sent": replies.sent,
            "bytes_received": replies.received,
        }

    def evaluate(self, part: str) -> Evaluation | None:
        """Measure the parameters on the held-out users of every node; None if nobody could."""
        ready = [node for node in self.update() if node not in self.missed]
        question = self.message("evaluate", self.done, to_bytes(self.params()), part=part)
        node_sum = self.collect_sum(question, ready, len(ready), self.pace)
        if len(node_sum.nodes) < self.least_nodes:
            self.say(f"the {part} users were not measured: {len(node_sum.nodes)} nodes answered")
            return None
        return to_evaluation(self.plan.algorithm.model, add_sums(node_sum.parts))

    def send_model(self, failed: str | None) -> None:
        """Give every node the model, for its owner, and say why training failed, if it did."""
        facts = {} if failed is None else {"failed": failed}
        message = self.message("finish", self.done, to_bytes(self.params()), **facts)
        nodes = [node for node in self.update() if node not in self.missed]
        self.finish(nodes, message, self.pace.stage_deadline)


def describe_round(algorithm: Algorithm, number: int, report: Any) -> dict[str, Any]:
    """Return what a round's record says about the sum: metrics, weight, counts, whether it was skipped."""
    report = {name: np.asarray(value) for name, value in report.items()}
    nothing = np.zeros((len(metric_names(algorithm.model)), 2))  # for aggregators that report no metrics
    return {
        "kind": "round",
        "round": number,
        **finish(algorithm.model, report.pop("sums", nothing)),
        "weight": float(report.pop("weight", np.nan)),
        "skipped": bool(report.pop("skipped")),
        **{name: _number(value) for name, value in report.items() if value.ndim == 0},
    }


def _number(value: Any) -> float | int:
    number = float(value)
    return int(number) if number.is_integer() else number


def run_facts(digest: str, settings: Mapping[str, Any], folder: RunFolder, resume: bool) -> dict[str, Any]:
    """Return what `run.json` says from the beginning; for a resumed run, what it says already.

    Args:
      digest: of the plan.
      settings: what else it says.
      folder: of the run.
      resume: whether the run may be there already.

    Raises:
      StorageError: the folder holds a run that cannot be continued.
    """
    if folder.has_run():
        if not resume:
            raise StorageError(f"{folder.path} holds a run; continue it with --resume, or use another folder")
        earlier = folder.description()
        deployment = earlier.get("deployment")
        if not isinstance(deployment, dict) or deployment.get("plan") != digest or "run" not in deployment:
            raise StorageError(
                f"the run in {folder.path} does not belong to the plan {digest[:16]}; use another folder"
            )
        facts = {name: value for name, value in earlier.items() if name not in ("format", "version", "sha256")}
        return {**facts, "resumed": [*facts.get("resumed", []), timestamp()], "ended": None}
    run = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(8)}"
    return {
        "made_by": "server",
        **settings,
        "versions": {
            "python": platform.python_version(),
            "fedrecon": __version__,
            **{module.__name__: module.__version__ for module in (jax, np)},
        },
        "data": {"source": "", "path": None, "fingerprint": digest},
        "deployment": {"plan": digest, "run": run},
        "started": timestamp(),
        "resumed": [],
        "ended": None,
        "rounds": None,
        "interrupted": None,
        "failed": None,
        "test": None,
    }


def timestamp() -> str:
    """Return the time as a run's description writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
