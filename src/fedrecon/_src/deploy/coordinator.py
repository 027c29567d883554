"""The server: rounds over nodes that come and go, each closed by enough good replies or by its deadline."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm, ServerState, with_params
from fedrecon._src.algorithms.rounds import server_round
from fedrecon._src.core.display import Say
from fedrecon._src.core.keys import fresh_key, round_key, run_keys
from fedrecon._src.core.wire import to_bytes
from fedrecon._src.deploy import plan_privacy
from fedrecon._src.deploy.messages import Envelope
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.registry import NodeRegistry, NotEnoughNodes, Pace
from fedrecon._src.deploy.sums import add_sums, to_evaluation
from fedrecon._src.deploy.transport import SYSTEM, Channel, Clock, Grid, Replies
from fedrecon._src.privacy.ledger import Ledger
from fedrecon._src.recommend.stopping import why_failed
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.simulation.training import describe_round
from fedrecon._src.storage.atomic import StorageError, timestamp
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon._src.storage.run_folder import KEPT, RunFolder, package_versions

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
    say: Say = lambda text: None,
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
        subject = {"config": None} | {name: v for name, v in plan.subject().items() if name in ("config", "algorithm")}
        privacy = None if promised is None else promised.to_dict()
        facts = begin_run(folder, plan.digest, {**subject, "seed": plan.seed, "privacy": privacy}, resume)
        nodes = _Nodes(plan, Channel(grid, clock), pace or Pace(), facts["deployment"]["run"], say)
        nodes.repeated = len(facts["resumed"])
        training = nodes.begin(folder)  # an interruption until here leaves nothing to save
        interrupted = False
        try:
            nodes.run(on_record)
        except KeyboardInterrupt:
            interrupted = True
            training.checkpoint()
        plan, params = nodes.plan, training.params()
        failed = why_failed(training.history, plan.task)
        plan.save_model(folder.model_path, params, failed)
        test = None if interrupted else nodes.evaluate("test")
        if test is not None and test.clients and (verdict := why_failed(training.history, plan.task, test)) != failed:
            failed = verdict
            plan.save_model(folder.model_path, params, failed)
        if not interrupted:
            nodes.send_model(failed)
        if (ledger := nodes.ledger()) is not None:
            facts["privacy"] = ledger.to_dict()
        return training.end(facts, interrupted, test, failed)


def round_cells(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what tables show of a round, by the names of their columns."""
    failed = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in record["failed"].items())
    counts = {"nodes": "invited", "answered": "answered", "late": "late"}
    return {
        "round": str(record["round"]),
        **{name: str(record[key]) for name, key in counts.items()},
        "failed": failed or "0",
        "users": str(record.get("clients", "")),
        "loss": "–" if record["loss"] is None else f"{record['loss']:.4f}",  # saved records have no NaN
        "seconds": f"{record['seconds']:.2f}",
        "MB out": f"{record['bytes_sent'] / 1e6:.3f}",
        "MB in": f"{record['bytes_received'] / 1e6:.3f}",
        "epsilon": f"{record['epsilon']:.3g}" if "epsilon" in record else "none",  # without noise nothing is promised
    }


class Training:
    """A training on its server: the state after so many rounds, and their records, both saved in the run's folder."""

    def __init__(self, algorithm: Algorithm, folder: RunFolder, seed: int, params: Any = None):
        """Continue from the folder's newest checkpoint; without one, begin, with other parameters if any are given."""
        self.algorithm, self.folder, self.seed = algorithm, folder, seed
        state = algorithm.init(run_keys(seed).init)
        self.state: ServerState = jax.tree.map(np.asarray, state if params is None else with_params(state, params))
        self.done, self.history = 0, list[dict[str, Any]]()
        if (checkpoint := folder.restore(self._tree())) is not None:
            self.done, saved, self.history = checkpoint
            self.state = ServerState(**saved["server"])

    def _tree(self) -> Any:
        return {"server": self.state._asdict(), KEPT: ()}

    def params(self) -> Any:
        """Return the global parameters."""
        return jax.tree.map(np.asarray, self.algorithm.params(self.state))

    def step(self, parts: Iterable[Any]) -> dict[str, Any]:
        """End a round with the parts of its sum, and return what its record says of it."""
        # Noise must come from entropy that nobody knows; all else may follow from the seed, as in the simulation.
        noised = self.algorithm.aggregator.release is not None
        key = fresh_key() if noised else round_key(self.seed, self.done)
        state, report = server_round(self.algorithm, self.state, parts, key)
        self.state, self.done = jax.tree.map(np.asarray, state), self.done + 1
        return describe_round(self.algorithm.model, self.done, report)

    def record(self, entry: dict[str, Any]) -> None:
        """Add a record."""
        self.history.append(entry)
        self.folder.record(entry)

    def checkpoint(self) -> None:
        """Save the state."""
        self.folder.checkpoint(self.done, self._tree())

    def end(
        self, facts: Mapping[str, Any], interrupted: bool, test: Evaluation | None = None, failed: str | None = None
    ) -> ServeResult:
        """Describe the run in its folder, and return what it leaves."""
        result = ServeResult(self.params(), self.history, self.done, test, failed, interrupted)
        ended = {name: getattr(result, name) for name in ("rounds", "interrupted", "failed")}
        self.folder.describe({**facts, **ended, "ended": timestamp(), "test": test.summary() if test else None})
        return result


class _Nodes(NodeRegistry):
    """The nodes of a training, asked for one sum after another."""

    accepts_gateways = True
    repeated = 0  # rounds that may have been summed twice: one for each time that the run was resumed
    training: Training

    def begin(self, folder: RunFolder) -> Training:
        """Run round zero if the plan has one, and begin with its algorithm or continue from a checkpoint."""
        if self.plan.unprepared:
            self.plan = self._run_round_zero(self.plan, folder.path / ROUND_ZERO)
            self.joined, self._invited_at = {}, {}  # all nodes need the result
        plan = self.plan
        self.training = Training(plan.algorithm, folder, plan.seed)
        self.done = self.training.done
        return self.training

    def _run_round_zero(self, plan: Plan, file: Path) -> Plan:
        """Ask nodes for the sums that the model begins with, and save the result in the run's folder."""
        zero = plan.zero
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
        self.round_zero = zero.to_bytes(state)
        self.say(zero.describe(zero.read_result(self.round_zero)))
        return plan.prepared(self.round_zero)

    def ledger(self) -> Ledger | None:
        """Return what was spent so far; None without noise."""
        return plan_privacy.ledger_of(self.plan, self.training.done + self.repeated)

    def _spent(self) -> dict[str, float]:
        ledger = self.ledger()
        return {} if ledger is None else {"epsilon": ledger.epsilon}

    # ---- rounds ----

    def run(self, on_record: Callable[[dict[str, Any]], None]) -> None:
        """Run all rounds that are left, with the evaluations between them."""
        plan, training, watch = self.plan, self.training, self.plan.watch(self.say)

        def record(entry: dict[str, Any]) -> None:
            training.record(entry)
            watch(entry)
            on_record(entry)

        # A round that was summed but not saved would be summed again, and count twice.
        every_so_often = self.pace.checkpoint_every if plan.release is None else 1
        most = plan_privacy.max_answers(plan.rounds) - self.repeated if plan.release else plan.rounds
        last = min(plan.rounds, most)
        if last < plan.rounds:
            self.say(f"the privacy budget ends training after {last} rounds: the run was resumed {self.repeated} times")
        evaluated = max((entry["round"] for entry in training.history if entry["kind"] == "evaluation"), default=0)
        while True:
            every, now = plan.evaluate_every, self.done
            due = now and (now == last or (every and now % every == 0))
            if due and now != evaluated:
                evaluation = self.evaluate("valid")
                evaluated = now
                if evaluation is not None and evaluation.clients:
                    record({"kind": "evaluation", "round": now, **self._spent(), **evaluation.summary()})
            if now >= last:
                training.checkpoint()
                return
            record(self._round())
            if self.done % every_so_often == 0 and self.done < last:
                training.checkpoint()

    def _round(self) -> dict[str, Any]:
        """Run one round and return its record."""
        clock, training = self.channel.clock, self.training
        began = clock.monotonic()
        body = to_bytes(training.algorithm.message(training.state))
        parts, facts = self._sum_of_enough(self.message("train", self.done, body))
        record = training.step(parts)
        self.done = training.done
        return {**record, **facts, "seconds": round(clock.monotonic() - began, 3), **self._spent()}

    def _sum_of_enough(self, question: Envelope, all_nodes: bool = False) -> tuple[list[Any], dict[str, Any]]:
        """Ask nodes for a sum until enough of them have answered; return its parts, and what a record says of them."""
        clock, attempt, replies, number = self.channel.clock, 0, Replies(), question.round
        began = clock.monotonic()
        title = f"round {number + 1}" if question.kind == "train" else "round zero"
        while True:
            ready = self.wait_for_nodes(began, number)
            invited, enough = self.select(ready, number, attempt, all_nodes)
            node_sum = self.collect_sum(question, invited, enough, self.pace)
            replies.add(node_sum.replies)
            answered, attempt = len(node_sum.nodes), attempt + 1
            if answered >= self.min_nodes:
                break
            if clock.monotonic() - began > self.pace.patience:
                raise NotEnoughNodes(
                    f"{title} got {answered} valid replies in attempt {attempt} and needs "
                    f"{self.min_nodes} (late: {len(replies.late)}, failed: {replies.reasons or 'none'}). "
                    f"{number} rounds are done and saved; continue with --resume"
                )
            self.say(f"{title}: {answered} good replies, {self.min_nodes} are needed; trying again")
            clock.sleep(min(2.0**attempt / 2, MAX_PAUSE))
        return node_sum.parts, {
            "invited": len(invited),
            "answered": answered,
            "late": len(replies.late),
            "failed": replies.reasons,
            "attempts": attempt,
            "dropped": len(invited) - answered,
            "bytes_sent": replies.sent,
            "bytes_received": replies.received,
        }

    def evaluate(self, part: str) -> Evaluation | None:
        """Measure the parameters on the held-out users of every node; None if nobody could."""
        ready = [node for node in self.update() if node not in self.missed]
        question = self.message("evaluate", self.done, to_bytes(self.training.params()), part=part)
        node_sum = self.collect_sum(question, ready, len(ready), self.pace)
        if len(node_sum.nodes) < self.least_nodes:
            self.say(f"the {part} users were not measured: {len(node_sum.nodes)} nodes answered")
            return None
        return to_evaluation(self.plan.algorithm.model, add_sums(node_sum.parts))

    def send_model(self, failed: str | None) -> None:
        """Give every node the model, for its owner, and say why training failed, if it did."""
        facts = {} if failed is None else {"failed": failed}
        message = self.message("finish", self.done, to_bytes(self.training.params()), **facts)
        nodes = [node for node in self.update() if node not in self.missed]
        self.finish(nodes, message, self.pace.stage_deadline)


def begin_run(folder: RunFolder, digest: str, settings: Mapping[str, Any], resume: bool) -> dict[str, Any]:
    """Write and return what `run.json` says from the beginning; for a resumed run, what it says already.

    Args:
      folder: of the run.
      digest: of the plan.
      settings: what else it says.
      resume: whether the run may be there already.

    Raises:
      StorageError: the folder holds a run that cannot be continued.
    """
    run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(8)}"
    facts: dict[str, Any] = {
        "made_by": "server",
        **settings,
        "versions": package_versions(jax, np),
        "data": {"source": "", "path": None, "fingerprint": digest},
        "deployment": {"plan": digest, "run": run},
        "started": timestamp(),
        "resumed": [],
        **dict.fromkeys(("ended", "rounds", "interrupted", "failed", "test")),
    }
    if folder.has_run():
        if not resume:
            raise StorageError(f"{folder.path} holds a run; continue it with --resume, or use another folder")
        earlier = folder.description()
        deployment = earlier.get("deployment")
        if not isinstance(deployment, dict) or deployment.get("plan") != digest or "run" not in deployment:
            problem = f"the run in {folder.path} does not belong to the plan {digest[:16]}"
            raise StorageError(f"{problem}; use another folder")
        facts = {name: value for name, value in earlier.items() if name not in ("format", "version", "sha256")}
        facts |= {"resumed": [*facts.get("resumed", []), timestamp()], "ended": None}
    folder.describe(facts)
    return facts
