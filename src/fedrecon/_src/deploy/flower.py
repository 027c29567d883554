"""Flower carries the messages: nodes that stay in their process, on its Fleet API, and the ClientApp of stock ones.

Only this file and flower_server.py know Flower. They use internals of flwr 1.41 and 1.42 where there is no public
API: for a node that keeps one process instead of one per message, and for a server with the grid in its own process.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedrecon._src.deploy.superlink import OFFLINE, PATIENCE, FlowerError

RECORD, FIELD, TYPE = "fedrecon", "message", "query"  # where in Flower's messages ours are
# seconds between two polls of a node, and the same as a share of the time since its last message
BUSY, IDLE, SHARE = 0.05, 2.0, 0.15
AGAIN = 2.0  # seconds until a node that was refused, or cut off, tries again
BEAT = 15  # seconds between heartbeats; Flower drops a process after twice as many


def quiet_flower() -> None:
    """Import Flower, offline and without its log.

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

    for name in ("flwr", "httpx", "httpcore"):  # we report what matters ourselves
        logging.getLogger(name).setLevel(logging.CRITICAL)


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
      key: this node's private key; None for an anonymous node.
      stop: called between messages; returns whether to stop.
      say: called with remarks on the connection.
    """
    quiet_flower()
    stay_alive()
    from flwr.supernode import fleet_http_connection as fleet

    private = None if key is None else private_key(key)
    keys = None if private is None else (private, private.public_key())
    certificates = None if authority is None else authority.read_bytes()
    refused: float | None = None  # since when
    said = ""
    say(f"connecting to {server}, once the server is up")
    while not stop():
        try:
            with fleet.http_request_response(server, authority is None, certificates, keys) as connection:
                say(f"connected to {server} as node {connection[0]}")
                refused, said = None, ""
                _take_part(connection, handle, stop)
        except Exception as problem:
            why = _why_refused(problem)
            if why is None and not _is_of_the_network(problem):
                raise
            text = f"the connection to {server} is lost ({type(problem).__name__}). Trying again"
            if why is not None:
                refused = time.monotonic() if refused is None else refused
                if time.monotonic() - refused >= PATIENCE:
                    raise FlowerError(
                        f"{server} has refused this node for {PATIENCE:g} s: {why} Does the server have the public "
                        f"half of {key}? Is this machine's clock right? (Flower allows 5 s ahead and 300 s behind.) "
                        "Does another process use this key? Is it a fedrecon server, with the same version of Flower?"
                    ) from None
                text = (  # the server may not have registered the key yet
                    f"{server} does not admit this node yet: {why} If this node was killed a moment ago, the server "
                    f"admits it after {2 * BEAT} s. Trying again"
                )
            if text != said:
                say(text)
            said = text
        if not stop():
            time.sleep(AGAIN)


def _why_refused(problem: Exception) -> str | None:
    """Return why a SuperLink refused this node; None for any other problem."""
    import httpx

    if isinstance(problem, httpx.HTTPStatusError) and problem.response.status_code == httpx.codes.UNAUTHORIZED:
        return "it does not accept the key or the time that this node signs with (401)."
    return str(problem) if isinstance(problem, FlowerError) else None


def _is_of_the_network(problem: Exception) -> bool:
    """Say whether an error comes from the connection: a restarted SuperLink does not know its nodes."""
    import httpx

    return isinstance(problem, httpx.HTTPError)


def stay_alive() -> None:
    """Keep Flower from ending or interrupting this process when a SuperLink refuses it. It raises an error instead.

    Also send heartbeats more often, so that a dead process is noticed sooner.
    """
    from flwr.supercore import heartbeat
    from flwr.supercore.retry import http_retry
    from flwr.supernode import fleet_http_connection as fleet

    nothing = SimpleNamespace(kill=lambda *args: None, raise_signal=lambda *args: None, getpid=os.getpid, SIGINT=None)
    fleet.os = fleet.signal = http_retry.os = http_retry.signal = heartbeat.signal = nothing  # type: ignore[assignment]
    http_retry.FORCE_EXIT_TIMEOUT_SECONDS = 0  # otherwise it waits for its own exit
    fleet.flwr_exit = _refused  # type: ignore[assignment]
    fleet.HEARTBEAT_DEFAULT_INTERVAL = heartbeat.HEARTBEAT_DEFAULT_INTERVAL = BEAT
    fleet.HeartbeatSender = beating  # type: ignore[assignment,misc]


def beating(beat: Callable[[], bool]) -> Any:
    """Return a sender of heartbeats that does not mind a SuperLink which forgot this process.

    Args:
      beat: sends one heartbeat. If it fails, other calls fail as well, and they report it.
    """
    import httpx
    from flwr.supercore.heartbeat import HeartbeatSender

    def try_to() -> bool:
        try:
            return beat()
        except (httpx.HTTPError, RuntimeError):
            return True

    return HeartbeatSender(try_to)


def _refused(code: int, message: str | None = None, *args: Any, **options: Any) -> None:
    """Raise an error where Flower would end the process because it cannot connect."""
    del args, options
    raise FlowerError((message or f"Flower's code {code}").replace("\n", " ").strip().rstrip(".") + ".")


def _take_part(connection: Any, handle: Callable[[bytes], bytes], stop: Callable[[], bool]) -> None:
    """Ask for messages and answer them while the connection is up."""
    _, receive, send, _, _, pull, push, confirm = connection
    active = time.monotonic()
    while not stop():
        found = receive()
        if found is None:
            time.sleep(min(max(BUSY, SHARE * (time.monotonic() - active)), IDLE))
            continue
        _answer(found, handle, send, pull, push, confirm)
        active = time.monotonic()


def _answer(found: Any, handle: Any, send: Any, pull: Any, push: Any, confirm: Any) -> None:
    """Pull a message, answer it, push the reply."""
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
        tree,
        lambda name: pull(run, name),
        lambda name: confirm(run, name),
        return_type=Message,
        initial_backoff=BUSY,  # a message may be listed before all of it is there; Flower's default is 1 s
        backoff_cap=IDLE,
    )
    head.content = whole.content
    reply = Message(RecordDict({RECORD: ConfigRecord({FIELD: handle(data_of(head))})}), reply_to=head)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        parts, new = get_all_nested_objects(reply), get_object_tree(reply)
        wanted, session = send(reply, new, time.monotonic() - began)
        push_objects(parts, lambda name, content: push(run, session, name, content), object_ids_to_push=wanted)


def data_of(message: Any) -> bytes:
    """Return our bytes in Flower's message; empty if it has none."""
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
        raise FlowerError(f"{path} cannot be read as a private key ({problem}); make one with fedrecon keys") from None


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
        reply, kept = answer(data_of(message), context.node_config, kept)
        context.state[RECORD] = ConfigRecord({FIELD: kept})
        return Message(RecordDict({RECORD: ConfigRecord({FIELD: reply})}), reply_to=message)

    app.query()(query)
    return app
