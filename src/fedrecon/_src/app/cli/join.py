"""`fedrecon join`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge, Le

from fedrecon._src.app.cli import options, show
from fedrecon._src.core.checks import MOST_INT
from fedrecon._src.core.display import Say, listed_counts
from fedrecon._src.recommend.config import Reading, Rule

if TYPE_CHECKING:
    from fedrecon._src.deploy.node import Node
    from fedrecon._src.deploy.plan import NodeData, Plan

UNIX = "unix:"
SHORTEST = 16  # characters of a plan's digest, as in fedrecon._src.deploy.plan, which is imported where it is used


@dataclass(frozen=True, kw_only=True)
class Join:
    """Join a training as a node; your file stays on this machine.

    Shows the server's plan and sends nothing until you accept it.
    Example: fedrecon join ratings.csv --server https://fed.example.org:8000 --ca ca.crt --key north.key

    Attributes:
      source: this node's file: ratings, clicks or text, as the plan says.
      server: the server's URL, with its port; or unix:PATH, to be asked at a Unix socket by a Flower SuperNode of this
        machine (examples/flower).
      ca: the certificate of the authority that vouches for the server (ca.crt).
      key: this node's private key.
      min_examples: leave out users with fewer examples; the plan's own minimum applies if it is larger.
      accept: accept the plan with this digest (at least its first 16 characters) without asking.
      state: the folder for the node's state (which plan was accepted) and the trained model; by default
        FILE.node.
      nodes: a folder with public keys (*.pub) of the nodes that you know. A plan that lists others is refused, and so
        is a plan with secure sums whose keys are not signed.
      algorithm: package.module:function, for a plan of an algorithm made in Python. The function is called with FILE
        and returns the algorithm and this node's clients. It is your code: the server sends none.
      once: exit when the training is over, instead of waiting for another one.
      insecure: use no encryption and do not authenticate the server. Only for trials on one machine.
      json: print a JSON object for every event.
      data: how a ratings file is read.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(name="FILE", metavar="FILE")]
    server: str
    ca: Path | None = None
    key: Path | None = None
    min_examples: Annotated[int, Ge(0), Le(MOST_INT)] = 1
    accept: str | None = None
    state: Path | None = None
    nodes: Path | None = None
    algorithm: str | None = None
    once: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    data: Reading = field(default_factory=Reading)

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for options that must fit together."""
        local = self.server.startswith(UNIX)
        yield Rule(local and self.insecure, "insecure", "cannot be combined with a Unix socket; leave it out")
        has_ca = local and self.ca is not None
        yield Rule(has_ca, "ca", "cannot be combined with a Unix socket; Flower has certificates")
        for name in ("ca", "key"):
            is_set = getattr(self, name) is not None
            missing = not (self.insecure or local or is_set)
            yield Rule(self.insecure and is_set, "insecure", f"cannot be combined with `{name}`; leave it out")
            yield Rule(missing, name, "is missing: fedrecon keys makes it; to try out, give --insecure")
        short = self.accept is not None and len(self.accept) < SHORTEST
        yield Rule(short, "accept", f"must be the digest of the plan, or its first {SHORTEST} characters or more")


parse = partial(options.parse, Join, "join")


def run(args: Join) -> int:
    """Take part until interrupted."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedrecon._src.deploy.admission import read_private_key
    from fedrecon._src.deploy.http_client import Connection, JoinError, parse_server, run_node
    from fedrecon._src.deploy.transport import answer_socket
    from fedrecon._src.storage.ownership import LOCK, file_lock

    socket = Path(args.server.removeprefix(UNIX)) if args.server.startswith(UNIX) else None
    server = args.server if socket is not None else parse_server(args.server, args.insecure)
    for file in (args.source, args.ca, args.key, args.nodes):
        if file is not None and not file.exists():
            raise ValueError(f"{file} does not exist; check the path")

    def say(text: str) -> None:
        if args.json:
            print(json.dumps({"node": text}), flush=True)
        else:
            show.remark(text)

    if args.insecure:
        show.alarm("--insecure: nothing is encrypted, and anyone can impersonate the server or read the traffic")
    key = None if args.key is None else read_private_key(args.key)
    folder = args.state or args.source.with_name(args.source.name + ".node")
    node = make_node(args, folder, key, say)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as with Ctrl-C
    say(f"looking for the server at {server}")

    def stop() -> bool:
        return node.refusal is not None or (args.once and node.finished)

    with file_lock(folder / LOCK, f"what this node remembers in {folder}"):
        if socket is not None:
            answer_socket(socket, lambda data, seconds: node.handle(data), node.max_message_bytes, stop)
        else:
            with contextlib.closing(Connection(server, key or Ed25519PrivateKey.generate(), args.ca)) as connection:
                run_node(connection, node.handle, max_bytes=node.max_message_bytes, stop=stop, say=say)
    if node.refusal is not None:
        raise JoinError(node.refusal)
    return 0


def make_node(args: Join, folder: Path, key: Any, say: Say) -> Node:
    """Return the node that an operator's options describe."""
    from fedrecon._src.deploy.admission import read_public_keys
    from fedrecon._src.deploy.algorithm_plan import AlgorithmPlan, import_algorithm
    from fedrecon._src.deploy.node import Memory, Node
    from fedrecon._src.deploy.settings_plan import SettingsPlan

    algorithm, clients = (None, None) if args.algorithm is None else import_algorithm(args.algorithm, args.source)

    def read(plan: Plan) -> NodeData:
        if isinstance(plan, AlgorithmPlan) and clients is not None:
            data = plan.split_clients(clients)
        else:
            assert isinstance(plan, SettingsPlan)
            data = plan.read_file(args.source, args.data, args.min_examples)
        train, valid, test = map(len, data.users)
        left_out = f"; left out: {skipped}" if (skipped := listed_counts(data.skipped)) else ""
        say(f"{args.source}: {train:,} {plan.task.people} train, {valid:,} validate, {test:,} test{left_out}")
        return data

    return Node(
        read,
        acceptance(args, say),
        Memory(folder),
        say,
        algorithm=algorithm,
        key=key,
        trusted=None if args.nodes is None else read_public_keys(args.nodes),
    )


def acceptance(args: Join, say: Say) -> Callable[[Plan], bool]:
    """Return the function that asks the owner about a plan."""
    from fedrecon._src.deploy.plan import describe, is_prefix

    def accept(plan: Plan) -> bool:
        if args.accept is not None:
            agreed = is_prefix(plan.digest, args.accept)
            if not agreed:
                say(f"the server's plan is {plan.digest}; --accept names another")
            return agreed
        show.table("the server asks this node to take part in", ("", ""), describe(plan), texts=(0, 1))
        if not sys.stdin.isatty():
            say(f"there is no terminal to ask you about this plan: start the node with --accept {plan.digest[:16]}")
            return False
        return input("Take part? [y/N] ").strip().lower() in ("y", "yes")

    return accept
