"""`fedrecon serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge, Le

from fedrecon._src.app.cli import FAILED, options, show
from fedrecon._src.recommend.config import Rule
from fedrecon._src.recommend.settings import Positive, PositiveInt, Seed

if TYPE_CHECKING:
    from fedrecon._src.deploy.coordinator import ServeResult
    from fedrecon._src.deploy.gateway import Gateway
    from fedrecon._src.deploy.http_server import Tls
    from fedrecon._src.deploy.plan import Plan
    from fedrecon._src.deploy.transport import Clock, Grid
    from fedrecon._src.recommend.task import Measure
    from fedrecon._src.storage.run_folder import RunFolder

WIDTHS = (6, 5, 8, 4, 14, 7, 8, 7, 7, 7, 7)  # of the columns of the table of rounds
# Refusals that honest nodes get: after a restart of the server, and when a round closed without them.
ROUTINE = {"epoch", "expired", "no-broadcast"}


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Training over devices.

    Attributes:
      run: the run that the bundle was made of, whose parameters training begins with; or a folder of
        fr.save_algorithm; or an earlier run over devices.
      tokens: the secret with which your backend issues tokens; fedrecon keys --tokens makes it.
      helper: the helper's URL, if the plan names a helper.
      helper_ca: the certificate of the authority that vouches for the helper.
      sign: the coordinator's private key, whose public half the helper knows; fedrecon keys --nodes makes it.
      retry: how many seconds a device waits before it asks again, on average.
      seed: the seed of the run.
    """

    run: Path | None = None
    tokens: Path | None = None
    helper: str | None = None
    helper_ca: Path | None = None
    sign: Path | None = None
    retry: Positive = 60.0
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Run a plan: coordinate training over nodes that keep their data, or over devices.

    Writes the same files as fedrecon train.

    Example: fedrecon serve plan --listen 0.0.0.0:8000 --keys keys --min-nodes 3 --out runs/together

    Over devices: fedrecon serve bundle --devices.run start --devices.tokens keys/tokens.key --keys keys --per-round 100
    --devices.helper https://helper.example.org:8100 --devices.helper-ca ca.crt --devices.sign coordinator.key --out run

    Attributes:
      plan: the folder of the plan; or, to train over devices, the bundle that they have.
      out: the folder for everything the run writes: run.json, metrics.jsonl, checkpoint/, model/, plots/.
      listen: address and port for nodes or devices.
      status: address and port of the status page. It has no password, so do not expose it. With port 0 the system
        chooses a port, which is printed. "none" for no page.
      keys: the folder that fedrecon keys made: server.crt, server.key, ca.crt and nodes/ are taken from there.
      cert: the server's certificate, if it is elsewhere.
      key: its private key, if it is elsewhere.
      ca: the authority's certificate, if it is elsewhere.
      nodes: the folder with public keys of the nodes that may take part, if it is elsewhere.
      per_round: close a round after this many good replies; by default when all connected nodes have replied, and with
        devices at the fewest that the plan allows, or with noise at as many as it says.
      oversample: invite this many times as many nodes as --per-round. Large values exclude slow nodes.
      deadline: seconds after which a round is closed with the replies received so far.
      stage_deadline: the same for each small message of a secure sum.
      min_nodes: how many nodes must be connected to begin a round, and must have answered to end it.
      wait: seconds to wait for that many nodes before giving up.
      algorithm: package.module:function, for a plan of an algorithm made in Python. The function is called with None
        and returns a pair; the first is the algorithm, the second is ignored.
      max_connections: how many connections one address may have open.
      resume: continue the run in the folder.
      insecure: use no encryption and admit any node. Only for trials on one machine.
      gateway: run a gateway: sum the replies of nodes for a remote coordinator, which connects to this Unix socket with
        the Flower app in examples/flower. --out is then the folder for the gateway's state.
      flower: train over the SuperNodes of a Flower run, whose ServerApp is at this Unix socket. No port is opened.
      json: print a JSON object for every round and evaluation.
      devices: for training over devices.
    """

    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    out: Path
    listen: str = "127.0.0.1:8000"
    status: str = "127.0.0.1:0"
    keys: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    nodes: Path | None = None
    per_round: PositiveInt | None = None
    oversample: Annotated[float, Ge(1), Le(1000)] = 1.1
    deadline: Positive = 60.0
    stage_deadline: Positive = 15.0
    min_nodes: PositiveInt = 2
    wait: Positive = 600.0
    algorithm: str | None = None
    max_connections: PositiveInt = 256
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    gateway: Path | None = None
    flower: Path | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    devices: DeviceOptions = field(default_factory=DeviceOptions)
    typed: tyro.conf.Suppress[tuple[str, ...]] = ()

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for options that must fit together."""
        yield from self._device_rules()
        files = [self.cert, self.key, self.ca, self.nodes]
        unsafe = self.insecure and any((self.keys, *files))
        yield Rule(unsafe, "insecure", "cannot be combined with keys and certificates; leave it out to be safe")
        other = self.gateway is not None or self.insecure or any((self.keys, *files))
        rule = "cannot be combined with `gateway`, `insecure`, keys or certificates: Flower has its own"
        yield Rule(self.flower is not None and other, "flower", rule)
        missing = self.flower is None and not self.insecure and self.keys is None and None in files
        rule = "is missing: fedrecon keys makes it; else give `cert`, `key`, `ca` and `nodes`, or --insecure"
        yield Rule(missing, "keys", rule)

    def _device_rules(self) -> Iterator[Rule]:
        devices, trains = self.devices, self.devices.run is not None
        unused = not trains and devices != DeviceOptions()
        yield Rule(unused, "devices.run", "is missing: training over devices needs it")
        yield Rule(trains and devices.tokens is None, "devices.tokens", "is missing: fedrecon keys --tokens makes it")
        other = trains and bool(self.gateway or self.flower)
        yield Rule(other, "devices", "cannot be combined with gateways or Flower")
        without = devices.helper is not None and (devices.sign is None or not (devices.helper_ca or self.insecure))
        yield Rule(without, "devices.helper", "needs `devices.sign` and `devices.helper_ca`")


def parse(argv: Sequence[str]) -> Serve:
    """Parse the options."""
    return dataclasses.replace(options.parse(Serve, "serve", argv), typed=tuple(argv))


def run(args: Serve) -> int:
    """Train over nodes and print the evaluation on their held-out users; or train over devices."""
    if args.devices.run is not None:
        return _run_devices(args)
    from fedrecon._src.app.plots import learning_curve
    from fedrecon._src.deploy.algorithm_plan import import_algorithm
    from fedrecon._src.deploy.coordinator import serve
    from fedrecon._src.deploy.gateway import Gateway
    from fedrecon._src.deploy.http_server import parse_address
    from fedrecon._src.deploy.plan import Plan
    from fedrecon._src.deploy.registry import Pace
    from fedrecon._src.deploy.transport import Channel
    from fedrecon._src.storage.run_folder import RunFolder

    plan = Plan.open(args.plan, None if args.algorithm is None else import_algorithm(args.algorithm, None)[0])
    pace = Pace(args.per_round, args.oversample, args.deadline, args.stage_deadline, args.min_nodes, args.wait)
    status = None if args.status == "none" else parse_address(args.status, "--status", least=0)
    folder, on_record = RunFolder(args.out), _printer(args.json, plan.task.measures)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as with Ctrl-C
    with folder.lock(), _open_grid(args, plan) as (grid, clock, problems):  # no port if the folder cannot be used
        if args.gateway is not None:
            return _run_gateway(args.gateway, Gateway(plan, Channel(grid, clock), pace, args.out, show.remark))
        page = contextlib.nullcontext() if status is None else _serve_status(status, folder, plan, grid, problems)
        with page:
            outcome = serve(
                plan, grid, folder, pace, resume=args.resume, clock=clock, on_record=on_record, say=show.remark
            )
        if set(problems) - ROUTINE:
            show.remark(f"refused requests: {_counts(problems)}")
    learning_curve(outcome.history, folder.plots_path / "learning_curve.png", plan.task.curve)
    return _show_outcome(args, plan, outcome)


@contextlib.contextmanager
def _open_grid(args: Serve, plan: Plan) -> Iterator[tuple[Grid, Clock, Mapping[str, int]]]:
    """Yield what reaches the nodes, a clock that waits for them, and counts of the requests that were refused."""
    from fedrecon._src.deploy.http_server import Limits, parse_address
    from fedrecon._src.deploy.messages import largest_message
    from fedrecon._src.deploy.tasks import serve_tasks
    from fedrecon._src.deploy.transport import SYSTEM, SocketGrid

    if args.flower is not None:
        show.remark(f"plan {plan.digest}; waiting for a Flower run at {args.flower}")
        grid = SocketGrid(args.flower, largest_message(plan), show.remark)
        yield grid, SYSTEM, {}
        grid.close()  # not after an error: then the run waits for a coordinator that resumes
        return
    address, (tls, keys) = parse_address(args.listen), _files(args)
    limits = Limits(largest_message(plan), connections=args.max_connections)
    server = f"https://HOST:{address[1]} --ca ca.crt --key NODE.key"
    if args.insecure:
        show.alarm("--insecure: nothing is encrypted, and anyone who can reach this port can join")
        server = f"http://HOST:{address[1]} --insecure"
    show.remark(f"plan {plan.digest}; on every node: fedrecon join FILE --server {server}")
    with serve_tasks(plan, address, tls, keys, limits) as (board, api):
        yield board, board, api.problems


def _run_devices(args: Serve) -> int:
    """Train over devices."""
    from fedrecon._src.deploy.admission import read_private_key, read_secret
    from fedrecon._src.deploy.device_rounds import open_start, serve_devices
    from fedrecon._src.deploy.devices import DeviceApi
    from fedrecon._src.deploy.http_client import Connection, parse_server
    from fedrecon._src.deploy.http_server import Limits, parse_address, run_service
    from fedrecon._src.deploy.registry import Pace
    from fedrecon._src.privacy.secure_sum.two_servers import read_served_plan
    from fedrecon._src.storage.run_folder import RunFolder

    devices, plan = args.devices, read_served_plan(args.plan)
    assert devices.run is not None  # or `rules` had refused it
    assert devices.tokens is not None
    start, address = open_start(devices.run, plan), parse_address(args.listen)
    pace = Pace(args.per_round, deadline=args.deadline, patience=args.wait)
    limits = Limits(plan.report_bytes, connections=args.max_connections)
    api = DeviceApi(plan, read_secret(devices.tokens), devices.retry, limits)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as with Ctrl-C
    with contextlib.ExitStack() as stack:
        helper = None
        if devices.helper is not None and devices.sign is not None:
            url = parse_server(devices.helper, devices.helper_ca is None, "--devices.helper")
            helper = Connection(url, read_private_key(devices.sign), devices.helper_ca)
            stack.enter_context(contextlib.closing(helper))
        folder = RunFolder(args.out)
        stack.enter_context(folder.lock())
        stack.enter_context(run_service(api, address, None if args.insecure else _tls(args)))
        show.remark(f"device plan {plan.digest}; devices report at {args.listen}")
        modes: dict[str, Any] = {"seed": devices.seed, "resume": args.resume}
        outcome = serve_devices(
            api, start, folder, helper, pace, **modes, on_record=_printer(args.json), say=show.remark
        )
    if outcome.interrupted:
        show.remark(f"stopped after {outcome.rounds} of {plan.rounds} rounds; continue with --resume")
        return 130
    if not args.json:
        print(f"saved: {args.out}")
    return 0


def _run_gateway(path: Path, gateway: Gateway) -> int:
    """Answer the coordinator until Ctrl-C."""
    from fedrecon._src.deploy.messages import largest_message
    from fedrecon._src.deploy.transport import answer_socket

    show.remark(f"gateway: the coordinator asks at {path}")
    with contextlib.suppress(KeyboardInterrupt):
        answer_socket(path, gateway.handle, lambda: largest_message(gateway.plan), lambda: False)
    return 0


def _counts(problems: Mapping[str, int]) -> str:
    """List the requests that were refused, but for those of honest nodes."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(problems.items()) if kind not in ROUTINE) or "none"


@contextlib.contextmanager
def _serve_status(
    address: tuple[str, int], folder: RunFolder, plan: Plan, grid: Grid, problems: Mapping[str, int]
) -> Iterator[None]:
    """Serve the status page."""
    from fedrecon._src.deploy.status_page import serve_status

    def facts() -> dict[str, Any]:
        names = [grid.name(node) for node in grid.nodes()]
        more = f" and {len(names) - 10} more" * (len(names) > 10)
        return {"Connected nodes": (", ".join(names[:10]) or "none") + more, "Refused requests": _counts(problems)}

    with serve_status(folder, plan.rounds, facts, address) as port:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        show.remark(f"status page: http://{host}:{port}/")
        yield


def _show_outcome(args: Serve, plan: Plan, outcome: ServeResult) -> int:
    from fedrecon._src.storage.atomic import without_nan

    task = plan.task
    if outcome.failed is not None:
        show.alarm(f"training failed: {outcome.failed}")
    if outcome.interrupted:
        again = [word for word in args.typed if word != "--resume"]
        show.remark(f"stopped after {outcome.rounds} of {plan.rounds} rounds; the model so far is in {args.out}")
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
        print(f"saved: {args.out} (model/ is all you need for serving)")
        if task.serve:
            show.following(task.serve.format(run=shlex.quote(str(args.out))))
    return 0


def _files(args: Serve) -> tuple[Tls | None, dict[bytes, str] | None]:
    """Return the certificates and the node registry; None for both with --insecure."""
    from fedrecon._src.deploy.admission import read_registry

    if args.insecure:
        return None, None
    tls, folder = _tls(args), args.nodes or (args.keys or Path()) / "nodes"
    registry = read_registry(folder)
    if len(registry) < args.min_nodes:
        most = f"{len(registry)}, the number of public keys in {folder}"
        raise ValueError(f"--min-nodes must be at most {most} (got {args.min_nodes})")
    return tls, registry


def _tls(args: Serve) -> Tls:
    """Return the server's certificates."""
    from fedrecon._src.deploy.certificates import check_server
    from fedrecon._src.deploy.http_server import Tls

    base = args.keys or Path()
    tls = Tls(args.cert or base / "server.crt", args.key or base / "server.key", args.ca or base / "ca.crt")
    check_server(*tls)
    return tls


def _printer(as_json: bool, measures: Sequence[Measure] = ()) -> Callable[[dict[str, Any]], None]:
    """Return a function that prints the records of a run: as JSON, or the rounds as a table that grows by a line."""
    from fedrecon._src.deploy.coordinator import round_cells
    from fedrecon._src.storage.atomic import without_nan

    def line(cells: Iterable[str]) -> str:
        return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))

    is_begun = False

    def show_record(record: dict[str, Any]) -> None:
        nonlocal is_begun
        if as_json:
            print(json.dumps(without_nan(record)), flush=True)
        elif record["kind"] == "round":
            cells = round_cells(record)
            print(*([] if is_begun else [line(cells)]), line(cells.values()), sep="\n", flush=True)
            is_begun = True
        else:
            show.progress_of(record, measures)

    return show_record
