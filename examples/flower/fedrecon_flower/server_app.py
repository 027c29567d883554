"""A ServerApp that lends its grid, at a Unix socket of this machine, to a coordinator (`fedrecon serve --flower`)."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import threading
from multiprocessing.connection import Client, Connection

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Answer coordinators, one after another, until one says that training is over."""
    path, command = str(context.run_config["socket"]), str(context.run_config["command"])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a run that was killed
    os.umask(0o177)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(1.0)  # so that Flower can stop this process, too
        if command:
            threading.Thread(target=run_coordinator, args=(path, command), daemon=True).start()
        over = False
        while not over:
            with contextlib.suppress(OSError, EOFError), Connection(listener.accept()[0].detach()) as peer:
                while not over:
                    over = answer(grid, peer)


def run_coordinator(path: str, command: str) -> None:
    """Run the coordinator's command, and end this app when it has ended."""
    subprocess.run([*shlex.split(command), "--flower", path], umask=0o077, check=False)
    with contextlib.suppress(OSError), Client(path, "AF_UNIX") as peer:
        peer.send_bytes(b'{"op": "end"}')
        peer.send_bytes(b"")


def answer(grid: Grid, peer: Connection) -> bool:
    """Answer one request; return whether it was the last."""
    request, data = json.loads(peer.recv_bytes()), peer.recv_bytes()
    result, parts = {}, []
    if request["op"] == "nodes":
        result = {"nodes": list(grid.get_node_ids())}
    elif request["op"] == "send":
        content = RecordDict({"fedrecon": ConfigRecord({"data": data})})
        group, seconds = str(request["round"]), request["seconds"]
        message = Message(content, dst_node_id=request["node"], message_type="query", ttl=seconds, group_id=group)
        result = {"ticket": next(iter(grid.push_messages([message])), None)}
    elif request["op"] == "poll":
        replies = list(grid.pull_messages(request["tickets"]))
        errors = [reply.error.reason or "the SuperNode failed" if reply.has_error() else "" for reply in replies]
        tickets = [reply.metadata.reply_to_message_id for reply in replies]
        result["replies"] = [{"ticket": t, "error": e} for t, e in zip(tickets, errors, strict=True)]
        parts = [b"" if e else r.content["fedrecon"]["data"] for r, e in zip(replies, errors, strict=True)]
    peer.send_bytes(json.dumps(result).encode())
    for part in parts:
        peer.send_bytes(part)
    return request["op"] == "end"
