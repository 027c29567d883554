"""A deployment on loopback with four nodes over TLS: seconds a round, bytes, CPU, memory; resident and stock nodes.

Seconds a round are those that the server waits, less those that its slowest node computes. CPU and memory are those of
processes as the system counts them, from the first round that counts on.
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

from fedrecon._src.deploy.demo import free_port
from fedrecon._src.deploy.plan import Plan
from fedrecon.data import synthetic_ratings

NODES, USERS, ITEMS = 4, 200, 2000
KINDS = {"resident": 30, "resident, secure": 10, "stock": 3}  # rounds
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
            while "waiting for nodes" not in (folder / "server.log").read_text():
                if started[0].poll() is not None or time.monotonic() > end:
                    raise RuntimeError((folder / "server.log").read_text()[-3000:])
                time.sleep(0.2)
            for k, command in enumerate(commands(folder, kind, address, digest)):
                home = {**offline, "FLWR_HOME": str(folder / f"home{k}")}
                started.append(launch(folder / f"node{k}.log", command, home))
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


def child_of(pid):
    """Return the first process that a process started: the server's is the SuperLink."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def rounds_done(run):
    file = run / "metrics.jsonl"
    return 0 if not file.exists() else sum('"kind": "round"' in line for line in file.read_text().splitlines())


def look(folder, started):
    """Return how many rounds are done, and CPU and memory of the server, of the SuperLink and of the nodes."""
    server, *nodes = (process.pid for process in started)
    groups = {"server": [server], "SuperLink": [child_of(server)], "node": nodes}
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


def requests(count=500):
    """Ask a SuperLink over TLS for messages that are not there; return its CPU seconds and the seconds of a request."""
    from fedrecon._src.deploy import certificates
    from fedrecon._src.deploy.flower import private_key, quiet_flower
    from fedrecon._src.deploy.flower_server import flower_grid
    from fedrecon._src.deploy.superlink import Tls

    quiet_flower()
    from flwr.supernode.fleet_http_connection import http_request_response

    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys"
        certificates.make_authority(keys)
        certificates.make_server(keys, ())
        certificates.make_node(keys / "nodes", "one")
        tls = Tls(keys / "server.crt", keys / "server.key", keys / "ca.crt")
        address, own = f"127.0.0.1:{free_port()}", private_key(keys / "nodes" / "one.key")
        with flower_grid(address, Path(name) / "flower", tls, [keys / "nodes" / "one.pub"], lambda text: None):
            (link,) = map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
            with http_request_response(address, False, tls.authority.read_bytes(), (own, own.public_key())) as there:
                receive = there[1]
                for _ in range(50):
                    receive()
                began, before = time.monotonic(), processor_of(link)
                for _ in range(count):
                    receive()
                return (processor_of(link) - before) / count, (time.monotonic() - began) / count


def memory_of_a_user(users=40_000, ratings=30):
    """Return the bytes by which a node grows with a user of so many ratings."""
    program = (
        "import sys, pathlib; from fedrecon.deploy import Plan, read_holding; "
        "held = read_holding(Plan.open(sys.argv[1]), sys.argv[2]); "
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
        print(kind, json.dumps(found), file=sys.stderr, flush=True)
        aim = "below 1 s" if kind == "resident" else ""
        rows.append((f"{kind}: a round of {NODES} nodes, computing aside", f"{found['aside']:.2f} s", aim))
        rows.append((f"{kind}: bytes to and from a node", f"{found['down']:,.0f} and {found['up']:,.0f}", ""))
        costs = {name: found[f"CPU of {name}"] for name in ("SuperLink", "server", "node")}
        text = ", ".join(f"{1000 * seconds:.0f} ms at the {name}" for name, seconds in costs.items())
        rows.append((f"{kind}: CPU of a message and its reply", text, ""))
    if "resident" in figures:
        text = ", ".join(f"{figures['resident'][f'MB of {name}']:.0f} MB {name}" for name in costs)
        rows.append(("memory", text, ""))
        processor, seconds = requests()
        figures["request"] = {"CPU of SuperLink": processor, "seconds": seconds, "bytes a user": memory_of_a_user()}
        text = f"{1000 * processor:.1f} ms of CPU, so {1 / processor:.0f} a second and core"
        rows.append(("a request at the SuperLink", text, ""))
        rows.append(("memory of a user with 30 ratings", f"{figures['request']['bytes a user']:,.0f} bytes", ""))
    if {"resident", "stock"} <= set(figures):
        times = figures["stock"]["aside"] / figures["resident"]["aside"]
        rows.append(("stock SuperNodes against resident nodes", f"{times:.1f} times as long", ""))
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
