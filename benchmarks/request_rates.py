"""How many requests of nodes and devices a core answers in a second, next to an application that only answers.

CPU seconds are those of the server's thread; the client is in another one.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import socket
import ssl
import statistics
import tempfile
import threading
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from fedrecon._src.deploy import admission, certificates
from fedrecon._src.deploy.admission import issue_token
from fedrecon._src.deploy.devices import DeviceApi, OpenRound
from fedrecon._src.deploy.http_server import Limits, Service, Tls, run_server, run_service
from fedrecon._src.deploy.tasks import Api, TaskBoard
from fedrecon._src.privacy.secure_sum.two_servers import ServedPlan, Spool

CHECK_INS, REPORTS, SIZES = 2000, 300, (150_000, 600_000)
CHECK_IN = "/v1/check-in"
TURNS = 3  # in which the two applications are compared


@dataclasses.dataclass
class Job:
    """Requests to a service; `after` is called with the number of each."""

    what: str
    service: Service
    requests: list
    after: object = staticmethod(lambda k: None)


def write_request(method, path, headers, data=b""):
    fields = {"Host": "a", "Content-Length": len(data), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def served_plan(length, dtype, reports_per_day):
    """Return a plan of one round with open sums."""
    about = {"format": "fedrecon-device-plan", "protocol": "open", "algorithm": "", "rounds": 1, "least": 1, "bits": 32}
    return ServedPlan(**about, length=length, dtype=dtype, reports_per_day=reports_per_day)


def node_jobs():
    """Yield jobs of a node that signs its requests."""
    admission.REQUESTS_PER_SECOND = admission.BURST = 1e9
    key, board = Ed25519PrivateKey.generate(), TaskBoard()
    number = board.number_of(admission.public_bytes(key))
    plan = served_plan(1, "float32", 1)
    api = Api(plan, board, admission.Verifier(None), Limits(max(SIZES)))

    def sign(method, path, data=b""):
        digest = hashlib.sha256(data).hexdigest()
        return write_request(method, path, admission.sign_request(key, method, path, digest, api.verifier.epoch), data)

    for size in SIZES:
        data = os.urandom(size)
        names = [board.send(number, f"{size} {k}".encode(), 3600) for k in range(REPORTS)]
        paths = [f"/v1/rounds/0/reports/{board._ticket(name, 0, number)}" for name in names]
        take = lambda k, names=names: board.poll([names[k]])  # noqa: E731  # as the round loop does
        yield Job(f"signed reports of {size // 1000} kB", api, [sign("PUT", path, data) for path in paths], take)
    yield Job("signed check-ins", api, [sign("GET", CHECK_IN) for _ in range(CHECK_INS)])
    yield Job("signed check-ins, a new TLS connection each", api, [sign("GET", CHECK_IN) for _ in range(REPORTS)])


def device_jobs(folder):
    """Yield jobs of devices with tokens, each of which checks in or reports once."""
    secret = os.urandom(32)

    def headers(k):
        return {"Authorization": f"Bearer {issue_token(secret, f'device-{k}')}"}

    for size in SIZES:
        api = DeviceApi(served_plan(size // 4, "uint32", 10), secret)
        api.run = "run"
        spool = Spool(folder / f"spool-{size}", size)
        current = OpenRound(0, b"", b"", spool, 10**9, time.monotonic() + 3600)
        api.open_round(current)
        data, requests = os.urandom(size), []
        for k in range(REPORTS):
            path = f"/v1/rounds/0/reports/{api._ticket(0, f'device-{k}')}"
            requests.append(write_request("PUT", path, headers(k), data))
        yield Job(f"devices' reports of {size // 1000} kB", api, requests)
        spool.close()
    api.close_round(current)
    requests = [write_request("GET", CHECK_IN, headers(k)) for k in range(CHECK_INS)]
    yield Job("devices' check-ins", api, requests)
    yield Job("devices' check-ins, a new TLS connection each", api, requests[:REPORTS])


def answered_per_cpu_second(serving, job, numbers, authority):
    """Return how many requests a core answers in a second.

    Args:
      serving: serves an application in a thread; yields the port.
      job: whose requests are sent one after another.
      numbers: which of them.
      authority: the certificate that vouches for the server, if every request has a TLS connection of its own; None for
        one plain connection.
    """
    context = None if authority is None else ssl.create_default_context(cafile=authority)
    with serving as port, contextlib.ExitStack() as stack:
        thread = next(thread for thread in threading.enumerate() if thread.name == "fedrecon-http")
        clock = time.pthread_getcpuclockid(thread.ident)

        def connect():
            connection = socket.create_connection(("127.0.0.1", port))
            return connection if context is None else context.wrap_socket(connection, server_hostname="localhost")

        kept = None if context else stack.enter_context(connect())
        began = time.clock_gettime(clock)
        for k in numbers:
            with contextlib.nullcontext(kept) if kept else connect() as connection:
                connection.sendall(job.requests[k])
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += connection.recv(4096)
            assert head[9:12] in (b"201", b"204"), head
            job.after(k)
        return len(numbers) / (time.clock_gettime(clock) - began)


async def only_answer(request):
    await request.body()
    return Response(status_code=204)


def measure_rates():
    """Yield what was requested, the rate, and its share of that of an application that only reads and answers."""
    empty = Starlette(routes=[Route("/{path:path}", only_answer, methods=["GET", "PUT"])])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certificates.make_authority(folder)
        certificates.make_server(folder, ())
        files = Tls(folder / "server.crt", folder / "server.key", folder / "ca.crt")
        for job in itertools.chain(node_jobs(), device_jobs(folder)):
            tls = files if "TLS" in job.what else None
            rates, shares = [], []
            for turn in range(TURNS):
                servers = (run_service(job.service, ("127.0.0.1", 0), tls), run_server(empty, ("127.0.0.1", 0), tls))
                options = (job, range(turn, len(job.requests), TURNS), tls and tls.authority)
                rate, most = (answered_per_cpu_second(server, *options) for server in servers)
                rates.append(rate)
                shares.append(rate / most)
            yield job.what, statistics.median(rates), statistics.median(shares)
