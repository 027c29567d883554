"""How the server reaches its nodes through Flower: a SuperLink beside it, a run, and messages through the grid."""

from __future__ import annotations

import functools
import itertools
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrecon._src.deploy.flower import FIELD, RECORD, TYPE, beating, data_of, quiet_flower, stay_alive
from fedrecon._src.deploy.grid import Reply
from fedrecon._src.deploy.superlink import PATIENCE, FlowerError, SuperLink, Tls

MOST_WAITING = 10_000  # replies that may be on their way
LONGEST_REPLY = 60.0  # seconds that a reply may take from its first byte to its last
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
clientapp = "fedrecon._src.deploy.app:app"

[tool.flwr.app.config]
"""


class FlowerGrid:
    """Reaches nodes through a SuperLink. It starts over with every SuperLink that is started."""

    def __init__(self, link: SuperLink, node_keys: Collection[Path], say: Callable[[str], None]):
        """Register nodes and start a run. With TLS, it ignores all nodes but those with these keys."""
        self._link, self._node_keys, self._say = link, node_keys, say
        self._numbers, self._restarts = itertools.count(), 0
        self._outbox: dict[int, Any] = {}  # by ticket: messages that are not sent yet
        self._sent: dict[str, tuple[int, int]] = {}  # by Flower's number of a message: its ticket and its node
        self._failed: list[int] = []  # tickets of what could not be sent
        self._connect()

    def _connect(self) -> None:
        link = self._link
        self._known = None if link.tls is None else _register(link, self._node_keys, self._say)
        self._grid, self._beat, self._done = _grid_of(link)

    def close(self, completed: bool) -> None:
        """Leave; tell Flower that the run is completed if it is."""
        try:
            if completed:
                self._done()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._beat.is_running:
            self._beat.stop()
        self._grid.close()

    def _begin_anew(self) -> None:
        """Register and start a run with a restarted SuperLink; messages on their way are lost."""
        self._restarts = self._link.restarts
        self._say("Flower's SuperLink died and was restarted")
        self._disconnect()
        self._failed += [ticket for ticket, _ in self._sent.values()]
        self._sent = {}
        self._link.wait()
        self._connect()

    def nodes(self) -> list[int]:
        """List the nodes that are connected."""
        found = self._try(lambda: self._grid.get_node_ids(), [])
        return sorted(node for node in found if self._known is None or node in self._known)

    def send(self, node: int, data: bytes, seconds: float) -> int:
        """Queue a message. All leave together at the next poll, so that equal ones travel once."""
        from flwr.app import ConfigRecord, Message, RecordDict

        content = RecordDict({RECORD: ConfigRecord({FIELD: data})})
        ticket = next(self._numbers)
        self._outbox[ticket] = Message(content, dst_node_id=node, message_type=TYPE, ttl=max(seconds, 1.0) + 60)
        return ticket

    def poll(self, tickets: Collection[int]) -> Mapping[int, Reply]:
        """Send the queued messages, and return the replies that have arrived."""
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
                found[ticket] = Reply(data_of(message))
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
        """Call Flower, which may have died, or may answer with an error."""
        import httpx

        try:
            if self._link.restarts > self._restarts:
                self._begin_anew()
                return otherwise
            return call()
        except httpx.HTTPError as problem:
            self._say(f"Flower's SuperLink failed: {type(problem).__name__}")
            time.sleep(0.5)
            return otherwise


@contextmanager
def flower_grid(
    listen: str,
    folder: Path,
    tls: Tls | None,
    node_keys: Collection[Path],
    say: Callable[[str], None],
    most: int = 2**31,
    database: Path | None = None,
) -> Iterator[FlowerGrid]:
    """Start a SuperLink, register nodes, and reach them while a `with` block runs.

    Args:
      listen: host and port.
      folder: for Flower's files.
      tls: certificates; None for no encryption, in which case anybody may be a node.
      node_keys: public keys of the nodes.
      say: called with remarks.
      most: bytes of the largest request that Flower accepts.
      database: where Flower keeps its state; None to keep it in memory.
    """
    quiet_flower()
    stay_alive()
    os.environ["FLWR_HOME"] = str(folder / "home")
    link = SuperLink(listen, folder, tls, most, database)
    link.start()
    try:
        grid, completed = FlowerGrid(link, node_keys, say), False
        try:
            yield grid
            completed = True
        finally:
            grid.close(completed)
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
    """Register the public keys that are not registered yet; return the numbers of all."""
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
                raise FlowerError(f"{path} is not a public key: {problem}") from None
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
    """Start a run and take its task ourselves: return the grid, its heartbeat, and how to say that it is done."""
    import hashlib

    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, run_from_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.heartbeat import make_task_heartbeat_fn_http
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.interceptors.http.superexec_auth import SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import http_grid

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flower uses what pathspec deprecates
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
                raise FlowerError("Flower's SuperLink did not give us the run that was started")
            time.sleep(0.1)
    finally:
        runtime.close()
    # A reply may be listed before all of it has arrived. Flower then retries every second for two hours: a node that
    # died while sending would hold up everybody.
    http_grid.pull_objects = functools.partial(
        pull_objects, initial_backoff=0.05, backoff_cap=1.0, max_time=LONGEST_REPLY
    )
    grid: Any = http_grid.HttpGrid(link.address, insecure, link.certificates, token=task.token)
    beat = beating(make_task_heartbeat_fn_http(grid._runtime_client))
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
