"""A soak on loopback: many rounds with nodes over TLS. Memory of every process and files must not grow.

Ends with exit code 1 if, from round 20 on, a process grows by more than a tenth (and 16 MB), or files by more than the
records. With --kills, the coordinator is killed (kill -9) so many times on the way and started again with --resume:
then every round must be in the records once.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deployment import NODES, fedrecon, free_port, launch, memory_of, rounds_done, stop, write_files
from fedrecon.deploy import Plan

SETTLED = 20  # rounds after which nothing may grow any more
MEMORY, LEAST, FILES = 1.1, 16, 0.05  # times, MB, MB: what may be between two looks
LONGEST = 1800
SETTINGS = "--preset paper --model.dim 8 --reconstruct.solver least-squares --data.fractions 0.8 0.1 0.1"


def files_of(folder):
    """Return the MB of all files but the records of rounds, and how many files there are."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # checkpoints come and go
            if path.is_file() and path.name != "metrics.jsonl":
                sizes.append(path.stat().st_size)
    return sum(sizes) / 1e6, len(sizes)


def least_files(folder):
    """Look several times: while a checkpoint is written there are two."""
    found = []
    for _ in range(5):
        found.append(files_of(folder))
        time.sleep(0.2)
    return min(size for size, _ in found), min(count for _, count in found)


def look(folder, server, nodes):
    """Return what everything weighs now."""
    size, count = least_files(folder)
    return {
        "server": memory_of(server.pid),
        "node (largest)": max(memory_of(node.pid) for node in nodes),
        "files": size,
        "number of files": count,
    }


def soak(rounds, secure, kills=0):
    """Run a training; return what was seen after every tenth round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        quiet = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run(fedrecon("keys", folder / "keys", "--nodes", *(f"node{k}" for k in range(NODES))), **quiet)
        safety = ["--secure", "--least-nodes", 3] if secure else []
        made = ("--items", folder / "items.csv", "--out", folder / "plan", "--rounds", rounds, "--evaluate-every", 10)
        subprocess.run(fedrecon("plan", *made, *SETTINGS.split(), *safety), **quiet)
        address, digest = f"127.0.0.1:{free_port()}", Plan.open(folder / "plan").digest
        pace = ("--min-nodes", NODES, "--deadline", 300, "--wait", 300, "--keys", folder / "keys")
        start = fedrecon("serve", folder / "plan", "--out", folder / "run", "--listen", address, *pace)
        server = launch(folder / "server.log", start)
        nodes, seen = [], {}
        deaths = [(k + 1) * rounds // (kills + 1) for k in range(kills)]  # after these rounds
        try:
            for k in range(NODES):
                own = ("--ca", folder / "keys" / "ca.crt", "--key", folder / "keys" / "nodes" / f"node{k}.key")
                command = fedrecon(
                    "join", folder / f"node{k}.csv", "--server", f"https://{address}", *own, "--accept", digest
                )
                nodes.append(launch(folder / f"node{k}.log", command))
            end = time.monotonic() + LONGEST
            while server.poll() is None and time.monotonic() < end:
                done = rounds_done(folder / "run") // 10 * 10
                if done and done not in seen:
                    seen[done] = look(folder, server, nodes)
                    print(done, json.dumps(seen[done]), file=sys.stderr, flush=True)
                if deaths and rounds_done(folder / "run") >= deaths[0]:
                    del deaths[0]
                    os.killpg(server.pid, signal.SIGKILL)
                    server.wait()
                    server = launch(folder / "server.log", [*start, "--resume"])
                time.sleep(0.1)
            if server.returncode != 0 or rounds_done(folder / "run") < rounds:
                raise RuntimeError((folder / "server.log").read_text()[-3000:])
            records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
            if [record["round"] for record in records if record["kind"] == "round"] != list(range(1, rounds + 1)):
                raise RuntimeError("a round is missing from the records, or is there twice")
        finally:
            for process in (*nodes, server):
                stop(process)
        return seen


def grown(seen):
    """Return what has grown between the round from which on nothing may and the last look."""
    first, last = seen[SETTLED], seen[max(seen)]
    for what, before in first.items():
        room = FILES if what == "files" else 0 if what == "number of files" else max(LEAST, (MEMORY - 1) * before)
        if last[what] > before + room:
            yield f"{what}: {before:.4g} after {SETTLED} rounds, {last[what]:.4g} after {max(seen)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=105, help="the last look is before the last round")
    parser.add_argument("--only", nargs="+", choices=["open", "secure"], default=["open"])
    parser.add_argument("--kills", type=int, default=0, help="of the coordinator")
    arguments = parser.parse_args()
    failed = False
    for kind in arguments.only:
        seen = soak(arguments.rounds, kind == "secure", arguments.kills)
        print(f"{kind} sums; MB")
        print(f"{'rounds':>8}" + "".join(f"{name:>18}" for name in next(iter(seen.values()))))
        for number, row in sorted(seen.items()):
            print(f"{number:>8}" + "".join(f"{value:>18.4g}" for value in row.values()))
        for sentence in grown(seen):
            failed = True
            print(f"has grown: {sentence}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
