"""A deployment on loopback with four nodes over TLS, and with many simulated ones: seconds, bytes, CPU, memory.

Seconds a round are those that the server waits, less those that its slowest node computes. CPU and memory are those of
processes as the system counts them, from the first round that counts on.
"""

import argparse
import asyncio
import contextlib
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
    from request_rates import measure_rates

    for what, rate, share in measure_rates():
        yield f"{what}, per core and second", f"{rate:,.0f}, {share:.0%} of an empty application", "at least 60 %"


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
