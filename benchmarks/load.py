"""Many simulated nodes or devices in one process: each has a key or token of its own, and answers without computing.

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
from fedrecon._src.deploy.admission import NO_EPOCH, sign_request
from fedrecon._src.deploy.messages import OK, Envelope, pack, unpack
from fedrecon._src.deploy.sums import no_users

WAIT = 20


def head_of(method, path, headers, length):
    lines = [f"{method} {path} HTTP/1.1", "Host: a", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


async def read_answer(reader):
    """Return the status, the fields of the head and the body of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), fields, await reader.readexactly(int(fields.get("content-length", 0)))


class SimulatedNode:
    def __init__(self, port, answers):
        self.port, self.answers, self.key = port, answers, Ed25519PrivateKey.generate()
        self.epoch, self.reports, self.finished = NO_EPOCH, 0, False

    async def request(self, method, path, data=b""):
        """Send a signed request; return status and body."""
        for _ in range(2):
            headers = sign_request(self.key, method, path, hashlib.sha256(data).hexdigest(), self.epoch)
            self.writer.write(head_of(method, path, headers, len(data)) + data)
            status, fields, body = await read_answer(self.reader)
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


# ---- devices ----

STAGES = ("checked in", "downloaded", "half sent", "sent")  # after which a device may drop out


class SimulatedDevice:
    """A device that opens a connection for every request, and sends a report that follows from its name and round.

    Args:
      port: of the coordinator.
      name: of the device.
      token: its token.
      report: from name and broadcast to a report.
      leaves: from a round's number to the stage after which it drops out, or None.
    """

    def __init__(self, port, name, token, report, leaves):
        self.port, self.name, self.token, self.report, self.leaves = port, name, token, report, leaves
        self.counted = []  # rounds whose report was taken

    async def request(self, method, path, data=b"", send=None):
        """Send a request, or its first `send` bytes of data and then nothing more."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head_of(method, path, {"Authorization": f"Bearer {self.token}"}, len(data)) + data[:send])
            await writer.drain()
            return await read_answer(reader) if send is None else None
        finally:
            writer.close()

    async def step(self):
        """Take part once; return after how many seconds to ask again."""
        status, fields, body = await self.request("GET", "/v1/check-in")
        if status != 200:
            return float(fields.get("retry-after", 1))
        task = json.loads(body)
        stage = self.leaves(task["round"])
        if stage == "checked in":
            return 1.0
        status, _, data = await self.request("GET", f"/v1/broadcasts/{task['broadcast']}")
        if status != 200 or stage == "downloaded":
            return 1.0
        report, path = self.report(self.name, data), f"/v1/rounds/{task['round']}/reports/{task['ticket']}"
        if stage == "half sent":
            await self.request("PUT", path, report, send=len(report) // 2)
            return 1.0
        status, _, _ = await self.request("PUT", path, report)
        if status in (200, 201) and task["round"] not in self.counted:
            self.counted.append(task["round"])
        return 1.0


async def run_devices(devices, finished, at_once=100):
    """Let devices take part in turn until training is finished."""
    slots = asyncio.Semaphore(at_once)

    async def live(device):
        while not finished():
            pause = 1.0
            async with slots:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    pause = await device.step()
            await asyncio.sleep(pause)

    await asyncio.gather(*(live(device) for device in devices))
