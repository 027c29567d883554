"""A deployment on loopback with four nodes over TLS, and with many simulated ones: seconds, bytes, CPU, memory.

Seconds a round are those that the server waits, less those that its slowest node computes. CPU and memory are those of
processes as the system counts them, from the first round that counts on.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
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


async def answered_per_cpu_second(app, requests, path, headers, body, after):
    """Return how many requests one core answers in a second: prepared requests over one plain connection kept open.

    Client and server share the core, so that a server alone answers more.
    """
    import uvicorn

    options = {"log_config": None, "access_log": False, "lifespan": "off", "http": "h11"}
    server, port = uvicorn.Server(uvicorn.Config(app, port=free_port(), **options)), 0
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prepared = [
        f"{'PUT' if body else 'GET'} {path(k)} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n".encode()
        + "".join(f"{name}: {value}\r\n" for name, value in headers(k).items()).encode()
        + b"\r\n"
        + body
        for k in range(requests)
    ]
    began = time.process_time()
    for k, request in enumerate(prepared):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head[9:12] in (b"200", b"201", b"204"), head
        after(k)
    used = time.process_time() - began
    writer.close()
    server.should_exit = True
    await serving
    return requests / used


def shares_of_an_empty_application(checkins=2000, reports=300, size=150_000):
    """Return the rates of check-ins and reports as shares of those of an application that only answers."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    from fedrecon._src.deploy import node_keys
    from fedrecon._src.deploy.http_server import Api, Limits
    from fedrecon._src.deploy.tasks import TaskBoard

    node_keys.REQUESTS_PER_SECOND = node_keys.BURST = 1e9
    key, body = Ed25519PrivateKey.generate(), os.urandom(size)
    digests = {False: hashlib.sha256(b"").hexdigest(), True: hashlib.sha256(body).hexdigest()}
    board = TaskBoard()
    number = board.number_of(node_keys.public_bytes(key))

    class Nothing:
        content, digest = b"", ""

    api = Api(Nothing, board, node_keys.Verifier(None), Limits(size))
    names = [board.send(number, str(k).encode(), 3600) for k in range(reports)]
    tickets = [board._ticket(name, 0, number) for name in names]

    async def read(request):
        await request.body()
        return Response(status_code=204)

    empty = Starlette(routes=[Route("/{path:path}", read, methods=["GET", "PUT"])])
    shares = {}
    for what, count, path, data, after in (  # the round loop takes a report as soon as it is there
        ("reports", reports, lambda k: f"/v1/rounds/0/reports/{tickets[k]}", body, lambda k: board.poll([names[k]])),
        ("check-ins", checkins, lambda k: "/v1/check-in", b"", lambda k: None),
    ):
        method = "PUT" if data else "GET"
        digest, epoch = digests[bool(data)], api.verifier.epoch
        signed = [node_keys.sign_request(key, method, path(k), digest, epoch) for k in range(count)]
        rates = [
            asyncio.run(answered_per_cpu_second(app, count, path, signed.__getitem__, data, after))
            for app in (api.app, empty)
        ]
        shares[what] = {"per core and second": rates[0], "share of an empty application": rates[0] / rates[1]}
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[*KINDS, "load"], default=[*KINDS, "load"])
    parser.add_argument("--nodes", type=int, default=500, help="of the load")
    parser.add_argument("--rounds", type=int, default=100, help="of the load")
    arguments = parser.parse_args()
    rows, figures = [], {}
    for kind in KINDS:
        if kind not in arguments.only:
            continue
        found = figures[kind] = measure(kind)
        print(kind, json.dumps(found), file=sys.stderr, flush=True)
        aim = "at most 0.3 s" if kind == "open sums" else ""
        rows.append((f"{kind}: a round of {NODES} nodes, computing aside", f"{found['aside']:.2f} s", aim))
        rows.append((f"{kind}: bytes to and from a node", f"{found['down']:,.0f} and {found['up']:,.0f}", ""))
        costs = {name: found[f"CPU of {name}"] for name in ("server", "node")}
        text = ", ".join(f"{1000 * seconds:.0f} ms at the {name}" for name, seconds in costs.items())
        rows.append((f"{kind}: CPU of a message and its reply", text, ""))
    if "open sums" in figures:
        text = ", ".join(f"{figures['open sums'][f'MB of {name}']:.0f} MB {name}" for name in costs)
        rows.append(("memory", text, ""))
        figures["requests"] = shares_of_an_empty_application()
        for what, found in figures["requests"].items():
            text = f"{found['per core and second']:,.0f}, {found['share of an empty application']:.0%} of an empty app"
            rows.append((f"{what} per core and second, signed", text, "at least 60 %"))
        rows.append(("memory of a user with 30 ratings", f"{memory_of_a_user():,.0f} bytes", ""))
    if "load" in arguments.only:
        found = figures["load"] = measure_load(arguments.nodes, arguments.rounds)
        name = f"{arguments.nodes} simulated nodes"
        rows.append((f"{name}: seconds a round", f"{found['seconds']:.2f} s", ""))
        rows.append((f"{name}: reports lost in {arguments.rounds} rounds", str(found["lost"]), "none"))
        text = f"{found['MB first']:.0f} MB after a fifth of the rounds, {found['MB last']:.0f} MB at the end"
        rows.append((f"{name}: memory of the coordinator", text, "flat"))
        rows.append((f"{name}: bytes a round", f"{found['bytes']:,.0f}", ""))
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
