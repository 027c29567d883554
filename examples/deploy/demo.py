"""A deployment on one machine: a coordinator, four nodes with a quarter of MovieLens small each, and one that dies.

python examples/deploy/demo.py --out deploy-demo
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NODES, ROUNDS, KILLED_AFTER = 4, 15, 5
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
LONGEST = 600  # seconds, whatever happens
MODEL = (
    "--preset paper --model.dim 8 --model.biases --model.init-mean 3.5 "
    "--reconstruct.solver least-squares --reconstruct.ridge 2"
)
TRAINING = (
    f"--update.learning-rate 0.5 --server.learning-rate 5 --rounds {ROUNDS} --evaluate-every 0 --data.min-ratings 2"
)


def fedrecon(*words: str) -> list[str]:
    """Return a command line."""
    return [sys.executable, "-m", "fedrecon", *words]


def write_files(folder: Path) -> list[Path]:
    """Write the catalogue, and a quarter of the users to the file of each node."""
    from fedrecon._src.data import load

    ratings = load("movielens-small")
    with (folder / "catalogue.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("item", "title"))
        writer.writerows((own, ratings.title(k)) for k, own in enumerate(ratings.item_ids.tolist()))
    paths = [folder / f"node{k}.csv" for k in range(NODES)]
    files = [path.open("w", newline="") for path in paths]
    writers = [csv.writer(file) for file in files]
    for writer in writers:
        writer.writerow(("user", "item", "rating"))
    assert ratings.names is not None
    for k, (name, one) in enumerate(zip(ratings.names.tolist(), ratings, strict=True)):
        for item, rating in zip(one["item"].tolist(), one["rating"].tolist(), strict=True):
            writers[k % NODES].writerow((name, ratings.item_ids[item], rating))
    for file in files:
        file.close()
    return paths


def compile_once(plan: Path, file: Path) -> str:
    """Compile a round once, where all nodes find it; return the plan's digest."""
    import jax

    from fedrecon._src.algorithms.rounds import client_total
    from fedrecon._src.core.keys import round_key
    from fedrecon.deploy import Plan, SettingsPlan

    for name, value in CACHE.items():
        jax.config.update(name.lower(), float(value) if "SECS" in name else int(value))
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    opened = Plan.open(plan)
    assert isinstance(opened, SettingsPlan)
    message = opened.algorithm.message(opened.algorithm.init(jax.random.key(0)))
    users = opened.read_file(file).users.train
    client_total(opened.algorithm, message, users, round_key(opened.seed, 0), lengths=opened.lengths)
    return opened.digest


def make_keys(folder: Path, names: list[str]) -> None:
    """Make what `fedrecon keys` makes, without starting another process."""
    from fedrecon._src.deploy import certificates

    certificates.make_authority(folder)
    certificates.make_server(folder, ())
    for name in names:
        certificates.make_node(folder / "nodes", name)


def free_port() -> int:
    """Return a port that nobody uses now, below those that the system gives to outgoing connections meanwhile."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("no port is free")


def rounds_done(run: Path) -> int:
    """Return how many rounds a run's metrics have."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return 0
    lines = [line for line in file.read_text().split("\n")[:-1] if line]
    return sum(json.loads(line)["kind"] == "round" for line in lines)


def end(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGTERM) -> None:
    """End a process that we started, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def announce(text: str) -> None:
    """Say what the demo does, apart from what commands print."""
    print(f"== {text}", flush=True)


def demonstrate(folder: Path, secure: bool) -> int:
    """Make files, keys and a plan; start everything; kill a node; wait for the end."""
    began = time.monotonic()
    data = write_files(folder)
    names = [f"node{k}" for k in range(NODES)]
    run, keys, plan = folder / "run", folder / "keys", folder / "plan"
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), **CACHE}
    make_keys(keys, names)
    safety = ["--secure", "--least-nodes", "3"] if secure else []
    made = ["plan", "--items", str(folder / "catalogue.csv"), "--out", str(plan), *MODEL.split(), *TRAINING.split()]
    announce("The plan that server and nodes agree on, made by fedrecon plan:")
    shown = subprocess.run(fedrecon(*made, *safety), check=True, capture_output=True, text=True).stdout
    print(shown.partition("next:")[0].rstrip(), flush=True)  # what comes next is done here
    digest = compile_once(plan, data[0])
    address = f"127.0.0.1:{free_port()}"
    quick = ["--per-round", "3", "--oversample", "1.34", "--min-nodes", "3", "--deadline", "60", "--wait", "120"]
    server = subprocess.Popen(
        fedrecon("serve", str(plan), "--out", str(run), "--listen", address, "--keys", str(keys), *quick),
        start_new_session=True,
    )
    nodes = []
    announce(f"fedrecon serve, and fedrecon join for {NODES} nodes; {names[-1]} is killed after {KILLED_AFTER} rounds.")
    try:
        for name, path in zip(names, data, strict=True):
            options = ["--server", f"https://{address}", "--accept", digest, "--once"]
            options += ["--ca", str(keys / "ca.crt"), "--key", str(keys / "nodes" / f"{name}.key")]
            with (folder / f"{name}.log").open("wb") as log:
                command = fedrecon("join", str(path), *options)
                nodes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        while server.poll() is None and rounds_done(run) < KILLED_AFTER and time.monotonic() - began < LONGEST:
            time.sleep(0.2)
        if server.poll() is None:
            end(nodes[-1], signal.SIGKILL)
            announce(f"{names[-1]} was killed (kill -9); training continues without it")
        code = server.wait(max(LONGEST - (time.monotonic() - began), 1))
    finally:
        for process in (*nodes, server):
            end(process)
    announce(f"{folder} has everything, with a log for each node; it took {time.monotonic() - began:.0f} s")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("deploy-demo"), help="the folder; an earlier demo is replaced")
    parser.add_argument("--secure", action="store_true", help="hide every node's sum from the server")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes must not outlive the demonstration
    mark = args.out / ".deploy-demo"
    if args.out.exists():
        if not mark.exists():
            parser.error(f"{args.out} is not an earlier demo; give another folder with --out")
        shutil.rmtree(args.out)
    args.out.mkdir(parents=True)
    mark.touch()
    return demonstrate(args.out, args.secure)


if __name__ == "__main__":
    sys.exit(main())
