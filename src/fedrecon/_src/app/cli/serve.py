"""`fedrecon serve`."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fedrecon._src.app.cli import FAILED, options, show

if TYPE_CHECKING:
    from fedrecon._src.deploy.coordinator import ServeResult
    from fedrecon._src.deploy.http_server import Tls
    from fedrecon._src.deploy.plan import Plan

COLUMNS = ("round", "nodes", "answered", "late", "failed", "users", "loss", "seconds", "MB out", "MB in", "epsilon")
WIDTHS = (6, 5, 8, 4, 14, 7, 8, 7, 7, 7, 7)


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Train a plan over nodes that keep their data. Writes what fedrecon train writes. Example: fedrecon serve plan
    --listen 0.0.0.0:8000 --keys keys --min-nodes 3 --out runs/together

    Attributes:
      plan: the folder of the plan.
      out: the folder for everything the run leaves: run.json, metrics.jsonl, checkpoint/, model/, plots/.
      listen: address and port for nodes.
      keys: the folder that fedrecon keys made: server.crt, server.key, ca.crt and nodes/ are taken from there.
      cert: the server's certificate, if it is elsewhere.
      key: its private key, if it is elsewhere.
      ca: the authority's certificate, if it is elsewhere.
      nodes: the folder with public keys of the nodes that may take part, if it is elsewhere.
      per_round: close a round after this many good replies; by default when all connected nodes have replied.
      oversample: invite this many times as many nodes as --per-round. Far above the drop-outs, it excludes slow nodes.
      deadline: seconds after which a round is closed with the replies received so far.
      stage_deadline: the same for each small message of a secure sum.
      min_nodes: how many nodes must be connected to begin a round, and must have answered to end it.
      wait: seconds to wait for that many nodes before giving up.
      algorithm: package.module:function, for a plan of an algorithm made in Python. The function is called with None
        and returns a pair: the algorithm, and anything.
      max_connections: how many connections one address may have open.
      resume: continue the run in the folder.
      insecure: no encryption, and anybody may be a node. Only for trying out on one machine.
      json: print a JSON object for every round and evaluation.
    """

    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    out: Path
    listen: str = "127.0.0.1:8000"
    keys: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    nodes: Path | None = None
    per_round: int | None = None
    oversample: float = 1.1
    deadline: float = 60.0
    stage_deadline: float = 15.0
    min_nodes: int = 2
    wait: float = 600.0
    algorithm: str | None = None
    max_connections: int = 256
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    typed: tyro.conf.Suppress[tuple[str, ...]] = ()


def parse(argv: Sequence[str]) -> Serve:
    """Parse the options."""
    args = options.parse(Serve, "serve", argv)
    files = [args.keys, args.cert, args.key, args.ca, args.nodes]
    if args.insecure and any(files):
        raise options.UsageError("--insecure has no use for keys and certificates; leave it out to be safe")
    if not args.insecure and args.keys is None and None in files[1:]:
        raise options.UsageError(
            "give --keys, the folder that fedrecon keys makes (or --cert, --key, --ca and --nodes), or --insecure for "
            "trying out"
        )
    object.__setattr__(args, "typed", tuple(argv))
    return args


def run(args: Serve) -> int:
    """Train over nodes and say how the model serves their held-out users."""
    from fedrecon._src.app.plots import learning_curve
    from fedrecon._src.deploy.algorithm_plan import import_algorithm
    from fedrecon._src.deploy.coordinator import serve
    from fedrecon._src.deploy.http_server import Limits, parse_address, serve_tasks
    from fedrecon._src.deploy.messages import largest_message
    from fedrecon._src.deploy.plan import Plan
    from fedrecon._src.deploy.registry import NotEnoughNodes, Pace
    from fedrecon._src.storage.run_folder import RunFolder

    plan = Plan.open(args.plan, None if args.algorithm is None else import_algorithm(args.algorithm, None).algorithm)
    pace = Pace(args.per_round, args.oversample, args.deadline, args.stage_deadline, args.min_nodes, args.wait)
    address, (tls, keys) = parse_address(args.listen), _files(args)
    limits = Limits(largest_message(plan), connections=args.max_connections)
    scheme, credentials = "https", "--ca ca.crt --key NODE.key"
    if args.insecure:
        show.alarm("--insecure: nothing is encrypted, and anybody who reaches this port can take part")
        scheme, credentials = "http", "--insecure"
    show.remark(
        f"plan {plan.digest}; on every node: fedrecon join FILE --server {scheme}://HOST:{address[1]} {credentials}"
    )
    folder, table, task = RunFolder(args.out), _Table(args.json), _task_of(plan)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as with Ctrl-C

    def on_record(record: dict[str, Any]) -> None:
        table.row(record)
        if not args.json:
            show.progress_of(record, task.measures)

    try:
        with (
            folder.lock(),  # a folder that cannot be written to is noticed before a port is opened
            serve_tasks(plan, address, tls, keys, limits) as (board, api),
        ):
            outcome = serve(
                plan, board, folder, pace, resume=args.resume, clock=board, on_record=on_record, say=show.remark
            )
            if api.problems:
                refused = ", ".join(f"{count} {kind}" for kind, count in sorted(api.problems.items()))
                show.remark(f"requests that were refused: {refused}")
    except NotEnoughNodes as problem:
        raise ValueError(str(problem)) from None
    learning_curve(outcome.history, folder.plots_path / "learning_curve.png", task.curve)
    return _show_outcome(args, plan, outcome)


def _show_outcome(args: Serve, plan: Plan, outcome: ServeResult) -> int:
    from fedrecon._src.deploy.settings_plan import SettingsPlan
    from fedrecon._src.storage.atomic import without_nan

    task = _task_of(plan)
    if outcome.failed is not None:
        show.alarm(f"training failed: {outcome.failed}")
    if outcome.interrupted:
        again = [word for word in args.typed if word != "--resume"]
        show.remark(f"stopped after {outcome.rounds} of {plan.rounds} rounds; what was learned is in {args.out}")
        show.remark(f"to continue: {shlex.join(['fedrecon', 'serve', *again, '--resume'])}")
        return 130
    if args.json:
        test = None if outcome.test is None else outcome.test.summary()
        print(json.dumps(without_nan({"kind": "test", "failed": outcome.failed, "test": test})), flush=True)
    elif outcome.test is not None and outcome.test.clients:
        show.evaluation(f"test {task.people} of all nodes, none seen in training", outcome.test, task)
    if outcome.failed is not None:
        return FAILED
    if not args.json:
        print(f"saved: {args.out} (model/ is all that is needed to serve)")
        if isinstance(plan, SettingsPlan):
            show.following(task.serve.format(run=shlex.quote(str(args.out))))
    return 0


def _task_of(plan: Plan) -> Any:
    """Return what people and metrics of a plan are called; a `Task` or similar."""
    from fedrecon._src.core.model import metric_names
    from fedrecon._src.deploy.settings_plan import SettingsPlan
    from fedrecon._src.recommend.tasks import Measure

    if isinstance(plan, SettingsPlan):
        return plan.task
    measures = tuple(Measure(name, name) for name in metric_names(plan.algorithm.model))
    words = {"people": plan.people, "examples": plan.examples}
    return SimpleNamespace(name="algorithm", measures=measures, curve=(*measures, *measures)[:2], **words)


def _files(args: Serve) -> tuple[Tls | None, dict[bytes, str] | None]:
    """Return certificates and the registry of nodes; None for both if nothing is to be encrypted."""
    from fedrecon._src.deploy.certificates import check_server
    from fedrecon._src.deploy.http_server import Tls
    from fedrecon._src.deploy.node_keys import read_registry

    if args.insecure:
        return None, None
    base = args.keys or Path()
    tls = Tls(args.cert or base / "server.crt", args.key or base / "server.key", args.ca or base / "ca.crt")
    check_server(*tls)
    folder = args.nodes or base / "nodes"
    registry = read_registry(folder)
    if len(registry) < args.min_nodes:
        raise ValueError(f"{folder} has {len(registry)} public keys, but --min-nodes is {args.min_nodes}")
    return tls, registry


class _Table:
    """A table that grows by a line a round."""

    def __init__(self, as_json: bool):
        self._json, self._begun = as_json, False

    def row(self, record: dict[str, Any]) -> None:
        from fedrecon._src.storage.atomic import without_nan

        if self._json:
            print(json.dumps(without_nan(record)), flush=True)
            return
        if record["kind"] != "round":
            return
        if not self._begun:
            self._print(COLUMNS)
            self._begun = True
        failed = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in record["failed"].items()) or "0"
        self._print(
            (
                str(record["round"]),
                str(record["invited"]),
                str(record["answered"]),
                str(record["late"]),
                failed,
                str(record.get("clients", "")),
                f"{record['loss']:.4f}",
                f"{record['seconds']:.2f}",
                f"{record['bytes_sent'] / 1e6:.3f}",
                f"{record['bytes_received'] / 1e6:.3f}",
                f"{record['epsilon']:.3g}" if "epsilon" in record else "none",  # without noise nothing is promised
            )
        )

    def _print(self, cells: Sequence[str]) -> None:
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)
