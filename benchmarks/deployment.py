"""A deployment on loopback with four nodes over TLS, and with many simulated ones: seconds, bytes, CPU, memory.

Seconds a round are those that the server waits, less those that its slowest node computes. CPU and memory are those of
processes as the system counts them, from the first round that counts on.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from fedrecon.data import synthetic_ratings
from fedrecon.deploy import Plan

NODES, USERS, ITEMS = 4, 200, 2000
KINDS = {"open sums": 30, "secure sums": 10}  # rounds
FIRST = 1  # rounds that do not count: processes start and compile
LONGEST = 900


def fedrecon(*words):
    return [sys.executable, "-m", "fedrecon", *map(str, words)]


def make_catalogue(folder):
    (folder / "items.csv").write_text("item\n" + "\n".join(map(str, range(ITEMS))) + "\n")


def write_files(folder):
    """Write a quarter of the users to the file of each node."""
    ratings = synthetic_ratings(num_users=USERS, num_items=ITEMS, mean_ratings=30, seed=0)
    make_catalogue(folder)
    lines = [["user,item,rating"] for _ in range(NODES)]
    for k, one in enumerate(ratings):
        lines[k % NODES] += [f"u{k},{i},{r}" for i, r in zip(one["item"], one["rating"], strict=True)]
    for k in range(NODES):
        (folder / f"node{k}.csv").write_text("\n".join(lines[k]) + "\n")


def make(folder, kind):
    """Make keys and a plan; return the plan's digest."""
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(fedrecon("keys", folder / "keys", "--nodes", *(f"node{k}" for k in range(NODES))), **quiet)
    settings = [
        "--preset",
        "paper",
        "--model.dim",
        "8",
        "--reconstruct.solver",
        "least-squares",
        "--evaluate-every",
        "0",
    ]
    settings += ["--data.fractions", 1, 0, 0, "--rounds", KINDS[kind]]
    safety = ["--secure", "--least-nodes", 3, "--nodes", folder / "keys" / "nodes"] if "secure" in kind else []
    plan = ("plan", "--items", folder / "items.csv", "--out", folder / "plan", *settings, *safety)
    subprocess.run(fedrecon(*plan), **quiet)
    return Plan.open(folder / "plan").digest


def commands(folder, address, digest):
    """Return the command of each node."""
    keys = folder / "keys"
    for k in range(NODES):
        own = ("--ca", keys / "ca.crt", "--key", keys / "nodes" / f"node{k}.key", "--accept", digest, "--once")
        yield fedrecon("join", folder / f"node{k}.csv", "--server", f"https://{address}", *own)


def free_port():
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(kind):
    """Run a training; return figures of its rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        digest = make(folder, kind)
        address = f"127.0.0.1:{free_port()}"
        patient = ("--min-nodes", NODES, "--deadline", 300, "--stage-deadline", 120, "--wait", 300)
        serve = ("serve", folder / "plan", "--out", folder / "run", "--listen", address, "--keys", folder / "keys")
        started = [launch(folder / "server.log", fedrecon(*serve, *patient))]
        try:
            end = time.monotonic() + LONGEST
            for k, command in enumerate(commands(folder, address, digest)):
                started.append(launch(folder / f"node{k}.log", command))
            looks = []
            while started[0].poll() is None and time.monotonic() < end:
                with contextlib.suppress(OSError, IndexError):  # a process may have ended
                    looks.append(look(folder, started))
                time.sleep(0.1)
            if started[0].returncode != 0:
                raise RuntimeError((folder / "server.log").read_text()[-3000:])
        finally:
            for process in started:
                stop(process)
        return figures_of(folder) | costs_of(looks)


def processor_of(pid):
    """Return the CPU seconds of a process and of those that it started and waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid):
    """Return the MB that a process has in memory; of one that has ended, 0."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


def rounds_done(run):
    file = run / "metrics.jsonl"
    return 0 if not file.exists() else sum('"kind": "round"' in line for line in file.read_text().splitlines())


def look(folder, started):
    """Return how many rounds are done, and CPU and memory of the server and of the nodes."""
    server, *nodes = (process.pid for process in started)
    groups = {"server": [server], "node": nodes}
    costs = {
        name: (sum(map(processor_of, pids)) / len(pids), max(map(memory_of, pids))) for name, pids in groups.items()
    }
    return rounds_done(folder / "run"), costs


def costs_of(looks):
    """Return CPU seconds a message to a node and its reply, and MB, of each kind of process."""
    settled = [found for found in looks if found[0] >= FIRST]
    (begun, first), (done, last) = settled[0], settled[-1]
    found, rounds = {}, max(done - begun, 1)
    for name in first:
        each = rounds if name == "node" else rounds * NODES
        found[f"CPU of {name}"] = (last[name][0] - first[name][0]) / each
        found[f"MB of {name}"] = max(costs[name][1] for _, costs in settled)
    return found


def answered_per_cpu_second(serving, requests, authority=None, after=lambda k: None):
    """Return how many requests a core answers in a second, by the CPU seconds of the server's thread.

    Args:
      serving: serves the application in a thread; yields the port.
      requests: bytes, sent one after another over one plain connection.
      authority: with a certificate, every request has a TLS connection of its own.
      after: called after every request.
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
        for k, request in enumerate(requests):
            with contextlib.nullcontext(kept) if kept else connect() as connection:
                connection.sendall(request)
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += connection.recv(4096)
            assert head[9:12] in (b"201", b"204"), head
            after(k)
        return len(requests) / (time.clock_gettime(clock) - began)


def shares_of_an_empty_application(checkins=2000, reports=300, sizes=(150_000, 600_000)):
    """Return the rates of check-ins and reports, and as shares of those of an application that only answers."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    from fedrecon._src.deploy import certificates, node_keys
    from fedrecon._src.deploy.http_server import Api, Limits, Tls, run_server, run_service
    from fedrecon._src.deploy.tasks import TaskBoard

    node_keys.REQUESTS_PER_SECOND = node_keys.BURST = 1e9
    key, board = Ed25519PrivateKey.generate(), TaskBoard()
    number = board.number_of(node_keys.public_bytes(key))

    class Nothing:
        content, digest = b"", ""

    api = Api(Nothing, board, node_keys.Verifier(None), Limits(max(sizes)))

    async def read(request):
        await request.body()
        return Response(status_code=204)

    empty = Starlette(routes=[Route("/{path:path}", read, methods=["GET", "PUT"])])

    def prepare(method, path, data=b""):
        digest = hashlib.sha256(data).hexdigest()
        fields = {"Host": "a", "Content-Length": len(data)}
        fields |= node_keys.sign_request(key, method, path, digest, api.verifier.epoch)
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data

    def take(names, k):  # as the round loop does
        if names:
            board.poll([names[k]])

    names, requests = {}, {}
    for size in sizes:
        what, data = f"reports of {size // 1000} kB", os.urandom(size)
        names[what] = [board.send(number, f"{size} {k}".encode(), 3600) for k in range(reports)]
        tickets = [board._ticket(name, 0, number) for name in names[what]]
        requests[what] = [prepare("PUT", f"/v1/rounds/0/reports/{ticket}", data) for ticket in tickets]
    requests["check-ins"] = [prepare("GET", "/v1/check-in") for _ in range(checkins)]
    requests["check-ins, a new TLS connection each"] = [prepare("GET", "/v1/check-in") for _ in range(reports)]
    shares, address = {}, ("127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certificates.make_authority(folder)
        certificates.make_server(folder, ())
        files = Tls(folder / "server.crt", folder / "server.key", folder / "ca.crt")
        for what, prepared in requests.items():
            tls = files if "TLS" in what else None
            authority, after = None if tls is None else tls.authority, functools.partial(take, names.get(what, ()))
            rate = answered_per_cpu_second(run_service(api, address, tls), prepared, authority, after)
            least = answered_per_cpu_second(run_server(empty, address, tls), prepared, authority, after)
            shares[what] = {"per core and second": rate, "share of an empty application": rate / least}
    return shares


def measure_load(nodes, rounds, longest=LONGEST):
    """Run a training of many simulated nodes; return seconds a round, reports that are missing, and memory by round."""
    from load import answers_of, run_nodes

    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        write_files(folder)
        settings = ["--preset", "paper", "--model.dim", 8, "--rounds", rounds, "--evaluate-every", 0]
        made = (
            "plan",
            "--items",
            folder / "items.csv",
            "--out",
            folder / "plan",
            "--data.fractions",
            1,
            0,
            0,
            *settings,
        )
        subprocess.run(fedrecon(*made), check=True, stdout=subprocess.DEVNULL)
        answers = answers_of(Plan.open(folder / "plan"), folder / "node0.csv")
        patient = ("--min-nodes", nodes, "--deadline", 300, "--wait", 300, "--max-connections", 3 * nodes)
        serve = ("serve", folder / "plan", "--out", folder / "run", "--listen", f"127.0.0.1:{port}", "--insecure")
        server, memory = launch(folder / "server.log", fedrecon(*serve, *patient)), {}

        async def watch():
            while server.poll() is None:
                with contextlib.suppress(OSError):
                    memory[rounds_done(folder / "run")] = memory_of(server.pid)
                await asyncio.sleep(0.5)

        async def everything():
            while not listens(port) and server.poll() is None:
                await asyncio.sleep(0.2)
            watching = asyncio.create_task(watch())
            reports = await run_nodes(answers, port, nodes, longest)
            watching.cancel()
            return reports

        try:
            reports = asyncio.run(everything())
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            if server.returncode != 0:
                raise RuntimeError((folder / "server.log").read_text()[-3000:])
        finally:
            stop(server)
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        counted = [record for record in records if record["kind"] == "round"]
        settled = {done: size for done, size in memory.items() if done >= rounds // 5} or memory
        return {
            "seconds": statistics.median(record["seconds"] for record in counted),
            "lost": nodes * rounds - sum(record["answered"] for record in counted),
            "reports": sum(reports),
            "MB first": settled[min(settled)],
            "MB last": settled[max(settled)],
            "bytes": statistics.median(record["bytes_sent"] + record["bytes_received"] for record in counted),
            "memory": memory,
        }


def listens(port):
    """Say whether somebody listens at a port."""
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


def memory_of_a_user(users=40_000, ratings=30):
    """Return the bytes by which a node grows with a user of so many ratings."""
    program = (
        "import sys, pathlib; from fedrecon.deploy import Plan; "
        "data = Plan.open(sys.argv[1]).read_file(sys.argv[2]); "
        "print(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1])"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_catalogue(folder)
        made = ("plan", "--items", folder / "items.csv", "--out", folder / "plan", "--preset", "paper")
        subprocess.run(fedrecon(*made), check=True, stdout=subprocess.DEVNULL)
        found = []
        for many in (users // 2, users):
            with (folder / "ratings.csv").open("w") as file:
                file.write("user,item,rating\n")
                for k in range(many):
                    file.writelines(f"u{k},{(k + 61 * i) % ITEMS},{1 + (k + i) % 5}\n" for i in range(ratings))
            command = [sys.executable, "-c", program, folder / "plan", folder / "ratings.csv"]
            found.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1000)
        return (found[1] - found[0]) / (users - users // 2)


def launch(log, command):
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def stop(process):
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return


def figures_of(folder):
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    rounds = [record for record in records if record["kind"] == "round"]
    computed = {}
    for k in range(NODES):
        for number, seconds in re.findall(
            r"round (\d+): .* trained in ([\d.]+) s", (folder / f"node{k}.log").read_text()
        ):
            computed[int(number)] = max(computed.get(int(number), 0.0), float(seconds))
    counted = rounds[FIRST:]
    waited = [record["seconds"] - computed.get(record["round"], 0.0) for record in counted]
    return {
        "seconds": statistics.median(record["seconds"] for record in counted),
        "computing": statistics.median(computed.get(record["round"], 0.0) for record in counted),
        "aside": statistics.median(waited),
        "slowest": max(waited),
        "down": statistics.median(record["bytes_sent"] for record in counted) / NODES,
        "up": statistics.median(record["bytes_received"] for record in counted) / NODES,
    }


def rows_of_rounds(kind):
    found = measure(kind)
    aim = "at most 0.3 s" if kind == "open sums" else ""
    yield f"{kind}: a round of {NODES} nodes, computing aside", f"{found['aside']:.2f} s", aim
    yield f"{kind}: bytes to and from a node", f"{found['down']:,.0f} and {found['up']:,.0f}", ""
    for name in ("server", "node"):
        cpu, memory = 1000 * found[f"CPU of {name}"], found[f"MB of {name}"]
        yield f"{kind}: a message and its reply at the {name}", f"{cpu:.0f} ms of CPU; {memory:.0f} MB in all", ""


def rows_of_requests():
    for what, found in shares_of_an_empty_application().items():
        text = f"{found['per core and second']:,.0f}, {found['share of an empty application']:.0%} of an empty app"
        yield f"{what} per core and second, signed", text, "at least 60 %"


def rows_of_load(nodes, rounds):
    found, name = measure_load(nodes, rounds), f"{nodes} simulated nodes"
    yield f"{name}: seconds a round", f"{found['seconds']:.2f} s", ""
    yield f"{name}: reports lost in {rounds} rounds", str(found["lost"]), "none"
    text = f"{found['MB first']:.0f} MB after a fifth of the rounds, {found['MB last']:.0f} MB at the end"
    yield f"{name}: memory of the coordinator", text, "flat"
    yield f"{name}: bytes a round", f"{found['bytes']:,.0f}", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {kind: lambda kind=kind: rows_of_rounds(kind) for kind in KINDS}
    parts["requests"] = rows_of_requests
    parts["load"] = lambda: rows_of_load(arguments.nodes, arguments.rounds)
    parts["user"] = lambda: [("memory of a user with 30 ratings", f"{memory_of_a_user():,.0f} bytes", "")]
    parser.add_argument("--data", help="not used")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--nodes", type=int, default=500, help="of the load")
    parser.add_argument("--rounds", type=int, default=100, help="of the load")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        for row in parts[name]():
            print(": ".join(row[:2]), file=sys.stderr, flush=True)
            rows.append(row)
    arguments.json.write_text(json.dumps({"rows": rows, "figures": {what: text for what, text, _ in rows}}))


if __name__ == "__main__":
    main()
