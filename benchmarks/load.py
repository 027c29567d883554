"""Many simulated nodes in one process: each has a key and a connection of its own, and answers without computing.

They make the requests that `fedrecon join` makes. All give the same answer in all rounds, which is computed once and
packed anew for every round, so that all of the coordinator's work is real and none of the nodes'.
"""

import asyncio
import contextlib
import hashlib
import json

import jax
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedrecon._src.algorithms.rounds import client_total
from fedrecon._src.core.keys import round_key
from fedrecon._src.core.wire import to_bytes
from fedrecon._src.deploy.messages import OK, Envelope, pack, unpack
from fedrecon._src.deploy.node_keys import NO_EPOCH, sign_request
from fedrecon._src.deploy.sums import no_users

WAIT = 20


class SimulatedNode:
    def __init__(self, port, answers):
        self.port, self.answers, self.key = port, answers, Ed25519PrivateKey.generate()
        self.epoch, self.reports, self.finished = NO_EPOCH, 0, False

    async def request(self, method, path, data=b""):
        """Send a signed request; return status and body."""
        for _ in range(2):
            headers = sign_request(self.key, method, path, hashlib.sha256(data).hexdigest(), self.epoch)
            lines = [f"{method} {path} HTTP/1.1", "Host: a", f"Content-Length: {len(data)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self.writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(fields.get("content-length", 0)))
            status = int(head[0].split()[1])
            if status != 401 or "fedrecon-epoch" not in fields:
                return status, body
            self.epoch = fields["fedrecon-epoch"]
            await self.connect()  # after a refusal the server closes the connection
        raise RuntimeError(f"refused twice: {body!r}")

    async def connect(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    async def run(self):
        await self.connect()
        while not self.finished:
            status, body = await self.request("GET", f"/v1/check-in?wait={WAIT}")
            if status != 200:
                continue
            task = json.loads(body)
            _, data = await self.request("GET", f"/v1/broadcasts/{task['broadcast']}")
            message = unpack(data, 2**30)
            reply = Envelope(OK, message.plan, message.run, message.round, {}, self.answers.get(message.kind, b""))
            status, _ = await self.request("PUT", f"/v1/rounds/{task['round']}/reports/{task['ticket']}", pack(reply))
            self.reports += status in (200, 201) and message.kind == "train"
            self.finished = message.kind == "finish"
        self.writer.close()


def answers_of(plan, file):
    """Return what a node with a file answers to the first round."""
    message = plan.algorithm.message(plan.algorithm.init(jax.random.key(0)))
    users = plan.read_file(file).users.train
    total = client_total(plan.algorithm, message, users, round_key(plan.seed, 0), lengths=plan.lengths).total
    return {"train": to_bytes(total), "evaluate": to_bytes(no_users(plan.algorithm.model))}


async def run_nodes(answers, port, count, seconds):
    """Run nodes until training is over or time is up; return how many reports each sent."""
    nodes = [SimulatedNode(port, answers) for _ in range(count)]
    tasks = [asyncio.create_task(node.run()) for node in nodes]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        task.cancel()
    return [node.reports for node in nodes]
