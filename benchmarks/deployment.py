"""A deployment on loopback with four nodes over TLS: seconds a round, bytes, CPU; resident nodes and stock SuperNodes.

Seconds a round are those that the server waits, less those that its slowest node computes.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedrecon.data import synthetic_ratings
from fedrecon.deploy.demo import free_port
from fedrecon.deploy.plan import Plan

NODES, USERS, ITEMS = 4, 200, 2000
KINDS = {"resident": 30, "resident, secure": 10, "stock": 3}  # rounds
FIRST = 1  # rounds that do not count: processes start and compile
LONGEST = 900


def fedrecon(*words):
    return [sys.executable, "-m", "fedrecon", *map(str, words)]


def write_files(folder):
    """Write a quarter of the users to the file of each node."""
    ratings = synthetic_ratings(num_users=USERS, num_items=ITEMS, mean_ratings=30, seed=0)
    (folder / "items.csv").write_text("item\n" + "\n".join(map(str, range(ITEMS))) + "\n")
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


def commands(folder, kind, address, digest):
    """Return the command of each node."""
    for k in range(NODES):
        keys, file = folder / "keys", folder / f"node{k}.csv"
        key = keys / "nodes" / f"node{k}.key"
        if kind != "stock":
            own = ("--ca", keys / "ca.crt", "--key", key, "--accept", digest, "--once")
            yield fedrecon("node", file, "--server", address, *own)
            continue
        program = Path(sys.executable).with_name("flower-supernode")
        told = f'fedrecon-file="{file}" fedrecon-accept="{digest}"'
        found = [str(program) if program.exists() else str(shutil.which("flower-supernode")), "--superlink", address]
        found += ["--root-certificates", str(keys / "ca.crt"), "--auth-supernode-private-key", str(key)]
        yield [*found, "--node-config", told, "--port", str(free_port())]


def measure(kind):
    """Run a training; return figures of its rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        digest = make(folder, kind)
        address = f"127.0.0.1:{free_port()}"
        patient = ("--min-nodes", NODES, "--deadline", 300, "--stage-deadline", 120, "--wait", 300)
        serve = ("server", folder / "plan", "--out", folder / "run", "--listen", address, "--keys", folder / "keys")
        offline = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        offline["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
        # A SuperNode starts others by name.
        offline["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        started = [launch(folder / "server.log", fedrecon(*serve, *patient), {})]
        try:
            end = time.monotonic() + LONGEST
            # A SuperNode gives up if its key is not registered when it starts.
            while "waiting for nodes" not in (folder / "server.log").read_text() and time.monotonic() < end:
                time.sleep(0.2)
            for k, command in enumerate(commands(folder, kind, address, digest)):
                home = {**offline, "FLWR_HOME": str(folder / f"home{k}")}
                started.append(launch(folder / f"node{k}.log", command, home))
            while started[0].poll() is None and time.monotonic() < end:
                time.sleep(0.2)
            if started[0].returncode != 0:
                raise RuntimeError((folder / "server.log").read_text()[-3000:])
        finally:
            for process in started:
                stop(process)
        return figures_of(folder)


def launch(log, command, environment):
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **environment}, start_new_session=True
        )


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
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    arguments = parser.parse_args()
    rows, figures = [], {}
    for kind in arguments.only:
        found = figures[kind] = measure(kind)
        aim = "below 1 s" if kind == "resident" else ""
        rows.append((f"{kind}: a round of {NODES} nodes, computing aside", f"{found['aside']:.2f} s", aim))
        rows.append((f"{kind}: bytes to and from a node", f"{found['down']:,.0f} and {found['up']:,.0f}", ""))
    if {"resident", "stock"} <= set(figures):
        times = figures["stock"]["aside"] / figures["resident"]["aside"]
        rows.append(("stock SuperNodes against resident nodes", f"{times:.1f} times as long", ""))
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
