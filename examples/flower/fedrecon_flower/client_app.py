"""A ClientApp that passes a message to the gateway or node at a Unix socket of this machine, and its reply back."""

import json
import time
from multiprocessing.connection import Client

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def forward(message: Message, context: Context) -> Message:
    """Ask whoever listens at the socket that the SuperNode's configuration names."""
    seconds = message.metadata.ttl - max(0.0, time.time() - message.metadata.created_at)
    with Client(str(context.node_config["socket"]), "AF_UNIX") as peer:
        peer.send_bytes(json.dumps({"seconds": max(seconds, 1.0)}).encode())
        peer.send_bytes(message.content["fedrecon"]["data"])
        reply = peer.recv_bytes()
    return Message(RecordDict({"fedrecon": ConfigRecord({"data": reply})}), reply_to=message)
