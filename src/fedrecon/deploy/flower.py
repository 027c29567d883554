"""Flower carries the messages: its SuperLink beside the server, resident nodes on its Fleet API.

This is the only file that knows Flower; superlink.py beside it starts one of Flower's processes. It uses internals of
flwr 1.41 and 1.42 for what has no public way: a node that stays in its process instead of one process for each message,
and a server that has the grid in its own process.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrecon.deploy.grid import Reply
from fedrecon.deploy.superlink import OFFLINE, PATIENCE, FlowerError, SuperLink, Tls

RECORD, FIELD, TYPE = "fedrecon", "message", "query"  # where in Flower's messages ours are
BUSY, IDLE, BUSY_FOR = 0.05, 0.5, 20.0  # seconds between a node's questions whether there is something for it
MOST_WAITING = 10_000  # replies that may be on their way
AGAIN = 2.0  # seconds until a node that was refused, or cut off, tries again
APP = b"""\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedrecon"
version = "1.0.0"
description = "Stands for a training. It holds no code: server and nodes have fedrecon installed."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedrecon"

[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "fedrecon.deploy.app:app"

[tool.flwr.app.config]
"""


def quiet_flower() -> None:
    """Import Flower without its remarks, offline.

    Raises:
      FlowerError: it is not installed.
    """
    os.environ.update({name: value for name, value in OFFLINE.items() if name not in os.environ})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import flwr  # noqa: F401
    except ImportError as problem:
        raise FlowerError(f"Flower is not installed ({problem}): pip install 'fedrecon[deploy]'") from None
    import logging

    for name in ("flwr", "httpx", "httpcore"):  # what matters, we say ourselves
        logging.getLogger(name).setLevel(logging.CRITICAL)


# ---- nodes ----


def run_node(
    server: str,
    handle: Callable[[bytes], bytes],
    *,
    authority: Path | None,
    key: Path | None,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Take part until told to stop: ask the server for messages, and send what `handle` answers.

    Args:
      server: host and port.
      handle: from bytes to bytes.
      authority: the certificate of the authority that vouches for the server; None for no encryption.
      key: this node's private key; None for a node that is nobody in particular.
      stop: asked between messages.
      say: is told when the connection stands.
    """
    quiet_flower()
    from flwr.supernode import fleet_http_connection as fleet

    fleet.flwr_exit = _refused  # type: ignore[assignment]  # it would end the process
    private = None if key is None else private_key(key)
    keys = None if private is None else (private, private.public_key())
    certificates = None if authority is None else authority.read_bytes()
    refused = 0.0  # seconds
    while not stop():
        try:
            with fleet.http_request_response(server, authority is None, certificates, keys) as connection:
                say(f"connected to {server} as node {connection[0]}")
                refused = 0.0
                _take_part(connection, handle, stop)
        except FlowerError as problem:  # the server may not have registered the key yet
            if refused >= PATIENCE:
                raise FlowerError(
                    f"{server} has refused this node for {PATIENCE:g} s: {problem} Does the server have the public "
                    f"half of {key}? Is it a fedrecon server, with the same version of Flower?"
                ) from None
            say(f"{server} refuses this node, or is not ready: {problem} Trying again")
        if not stop():
            time.sleep(AGAIN)
            refused += AGAIN


def _refused(code: int, message: str | None = None, *args: Any, **options: Any) -> None:
    """Take the place of Flower's way to end the process where a connection cannot be made."""
    del args, options
    raise FlowerError((message or f"Flower's code {code}").replace("\n", " ").strip().rstrip(".") + ".")


def _take_part(connection: Any, handle: Callable[[bytes], bytes], stop: Callable[[], bool]) -> None:
    """Ask for messages and answer them as long as the connection stands."""
    _, receive, send, _, _, pull, push, confirm = connection
    active = time.monotonic()
    while not stop():
        found = receive()
        if found is None:
            time.sleep(BUSY if time.monotonic() - active < BUSY_FOR else IDLE)
            continue
        _answer(found, handle, send, pull, push, confirm)
        active = time.monotonic()


def _answer(found: Any, handle: Any, send: Any, pull: Any, push: Any, confirm: Any) -> None:
    """Pull a message, let it be answered, push the reply."""
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects

    head, tree = found
    run = head.metadata.run_id
    began = time.monotonic()
    whole = pull_and_inflate_object_from_tree(
        tree, lambda name: pull(run, name), lambda name: confirm(run, name), return_type=Message
    )
    head.content = whole.content
    reply = Message(RecordDict({RECORD: ConfigRecord({FIELD: handle(_data_of(head))})}), reply_to=head)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        parts, new = get_all_nested_objects(reply), get_object_tree(reply)
        wanted, session = send(reply, new, time.monotonic() - began)
        push_objects(parts, lambda name, content: push(run, session, name, content), object_ids_to_push=wanted)


def _data_of(message: Any) -> bytes:
    """Return our bytes in Flower's message; none if there are none."""
    try:
        data = message.content[RECORD][FIELD]
    except (KeyError, TypeError, ValueError):
        return b""
    return data if isinstance(data, bytes) else b""


def private_key(path: Path) -> Any:
    """Read a node's private key.

    Raises:
      FlowerError: it cannot be read.
    """
    from cryptography.hazmat.primitives import serialization

    try:
        return serialization.load_ssh_private_key(path.read_bytes(), None)
    except ValueError as problem:
        raise FlowerError(
            f"{path} is no private key that can be read ({problem}); make one with fedrecon keys"
        ) from None


# ---- nodes of Flower's own: a SuperNode starts a process for every message ----


def client_app(answer: Callable[[bytes, Mapping[str, Any], bytes], tuple[bytes, bytes]]) -> Any:
    """Return a ClientApp for a stock SuperNode.

    Args:
      answer: `(message, what the SuperNode was told, what was kept) -> (reply, what to keep)`, all but the second as
        bytes. What is kept is in the SuperNode's memory, for this run.
    """
    quiet_flower()
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def query(message: Any, context: Any) -> Any:
        kept = context.state[RECORD][FIELD] if RECORD in context.state else b""
        reply, kept = answer(_data_of(message), context.node_config, kept)
        context.state[RECORD] = ConfigRecord({FIELD: kept})
        return Message(RecordDict({RECORD: ConfigRecord({FIELD: reply})}), reply_to=message)

    app.query()(query)
    return app


# ---- the server ----


class FlowerGrid:
    """The server's way to nodes through a SuperLink."""

    def __init__(self, link: SuperLink, grid: Any, known: Collection[int] | None, say: Callable[[str], None]):
        """Use Flower's grid; with `known`, only nodes of these numbers exist for us, whoever else registered."""
        self._link, self._grid, self._known, self._say = link, grid, known, say
        self._numbers, self._restarts = itertools.count(), 0
        self._outbox: dict[int, Any] = {}  # by ticket: messages that are not sent yet
        self._sent: dict[str, tuple[int, int]] = {}  # by Flower's number of a message: its ticket and its node
        self._failed: list[int] = []  # tickets of what could not be sent

    def nodes(self) -> list[int]:
        """List the nodes that are there."""
        found = self._try(self._grid.get_node_ids, [])
        return sorted(node for node in found if self._known is None or node in self._known)

    def send(self, node: int, data: bytes, seconds: float) -> int:
        """Take a message; it leaves with all others at the next poll, so that equal ones travel once."""
        from flwr.app import ConfigRecord, Message, RecordDict

        content = RecordDict({RECORD: ConfigRecord({FIELD: data})})
        ticket = next(self._numbers)
        self._outbox[ticket] = Message(content, dst_node_id=node, message_type=TYPE, ttl=max(seconds, 1.0) + 60)
        return ticket

    def poll(self, tickets: Collection[int]) -> Mapping[int, Reply]:
        """Send what is to be sent, and return the replies that are there."""
        self._flush()
        waiting = set(tickets)
        found = {ticket: Reply(None, "could not be sent") for ticket in self._failed if ticket in waiting}
        self._failed = [ticket for ticket in self._failed if ticket not in waiting]
        names = [name for name, (ticket, _) in self._sent.items() if ticket in waiting]
        if not names:
            return found
        for message in self._try(lambda: self._grid.pull_messages(names), []):
            ticket, node = self._sent.pop(message.metadata.reply_to_message_id, (-1, -1))
            if message.has_error():
                found[ticket] = Reply(None, f"Flower says {message.error.code}: {message.error.reason}"[:300])
            elif message.metadata.src_node_id != node:
                found[ticket] = Reply(None, "another node answered")
            else:
                found[ticket] = Reply(_data_of(message))
        return {ticket: reply for ticket, reply in found.items() if ticket in waiting}

    def _flush(self) -> None:
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, {}
        pushed = list(self._try(lambda: self._grid.push_messages(list(outbox.values())), []))
        for k, (ticket, message) in enumerate(outbox.items()):
            if k < len(pushed) and pushed[k]:
                self._sent[pushed[k]] = (ticket, message.metadata.dst_node_id)
            else:
                self._failed.append(ticket)
        for name in list(self._sent)[:-MOST_WAITING]:  # nobody waits for the oldest any more
            del self._sent[name]

    def _try(self, call: Callable[[], Any], otherwise: Any) -> Any:
        """Call Flower, which may have other things to say than was hoped for."""
        if self._link.restarts > self._restarts:
            self._restarts = self._link.restarts
            self._say("Flower's SuperLink had died, and was started again")
        try:
            return call()
        except Exception as problem:
            import httpx

            if not isinstance(problem, httpx.HTTPError):
                raise
            self._say(f"Flower's SuperLink does not do as told: {type(problem).__name__}")
            time.sleep(0.5)
            return otherwise


@contextmanager
def flower_grid(
    listen: str, folder: Path, tls: Tls | None, node_keys: Collection[Path], say: Callable[[str], None]
) -> Iterator[FlowerGrid]:
    """Start a SuperLink, register nodes, and reach them as long as a block runs.

    Args:
      listen: host and port.
      folder: for Flower's files.
      tls: certificates; None for no encryption, in which case anybody may be a node.
      node_keys: public keys of the nodes.
      say: is told what happens.
    """
    quiet_flower()
    os.environ["FLWR_HOME"] = str(folder / "home")
    link = SuperLink(listen, folder, tls)
    link.start()
    try:
        known = None if tls is None else _register(link, node_keys, say)
        grid, beat, done = _grid_of(link)
        try:
            yield FlowerGrid(link, grid, known, say)
            done()
        finally:
            beat.stop()
            grid.close()
    finally:
        link.stop()


def _control(link: SuperLink) -> Any:
    from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return ControlHttpClient.from_server_address(
        server_address=link.address,
        insecure=link.tls is None,
        root_certificates=link.certificates,
        interceptors=[CliClientHttpInterceptor(), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )


def _register(link: SuperLink, node_keys: Collection[Path], say: Callable[[str], None]) -> set[int]:
    """Register public keys, those that are not yet; return the numbers of all of them."""
    from cryptography.hazmat.primitives import serialization
    from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    client = _control(link)
    try:
        there = {node.public_key: node.node_id for node in client.ListNodes(ListNodesRequest()).nodes_info}
        found = set()
        for path in sorted(node_keys):
            try:
                public: Any = serialization.load_ssh_public_key(path.read_bytes())
            except ValueError as problem:
                raise FlowerError(f"{path} is no public key: {problem}") from None
            written = public_key_to_bytes(public)
            number = there.get(written)
            if number is None:
                number = client.RegisterNode(RegisterNodeRequest(public_key=written, name=path.stem)).node_id
            say(f"{path.stem} is node {number}")
            found.add(number)
        return found
    finally:
        client.close()


def _grid_of(link: SuperLink) -> tuple[Any, Any, Callable[[], None]]:
    """Start a run and take its task ourselves: the grid, its heartbeat, and how to say that it is done."""
    import hashlib

    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, run_from_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.interceptors.http.superexec_auth import SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid.http_grid import HttpGrid

    fab = build_fab_from_files({"pyproject.toml": APP, "nothing.py": b"app = None\n"})[0]
    control = _control(link)
    try:
        started = control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))))
    finally:
        control.close()
    guard = SuperExecAuthHttpInterceptor(
        master_secret=link.secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
    )
    insecure = link.tls is None
    runtime = RuntimeHttpClient.from_server_address(
        server_address=link.address,
        insecure=insecure,
        root_certificates=link.certificates,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), guard],
    )
    try:
        end = time.monotonic() + PATIENCE
        while True:
            task = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP.value]))
            if task.HasField("task") and task.task.run_id == started.run_id:
                break  # tasks of other runs, such as one that was killed, are taken and left alone
            if time.monotonic() > end:
                raise FlowerError("Flower's SuperLink does not give us the run that was started")
            time.sleep(0.1)
    finally:
        runtime.close()
    grid: Any = HttpGrid(link.address, insecure, link.certificates, token=task.token)
    beat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
    beat.start()
    given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    grid.set_run(run_from_proto(given.run))

    def done() -> None:
        from flwr.common.constant import SubStatus

        grid._retry_invoker.max_tries = 1
        grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))

    return grid, beat, done
