"""The cost of a round from 10 thousand to 10 million memory-mapped clients."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POPULATIONS = (10_000, 100_000, 1_000_000, 10_000_000)
ITEMS, EXAMPLES = 3706, 6


def make(path, clients):
    """Write clients of six ratings each."""
    import numpy as np

    import fedrecon as fr

    rng = np.random.default_rng(0)
    columns = {
        "item": rng.integers(0, ITEMS, clients * EXAMPLES, dtype=np.int32),
        "rating": rng.integers(1, 6, clients * EXAMPLES).astype(np.float32),
    }
    starts = np.arange(clients, dtype=np.int64) * EXAMPLES
    fr.Clients(columns, starts, starts + EXAMPLES).save(path)


def measure(path):
    """Open, train 200 rounds, and report seconds and memory."""
    import optax

    import fedrecon as fr

    fr.start_jax_devices()
    solver = fr.gradient_descent(optax.sgd(0.1), batch_size=3)
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS), reconstruct=solver, update=solver, server=optax.sgd(1.0)
    )
    begin = time.perf_counter()
    clients = fr.Clients.open(path)
    opened = time.perf_counter() - begin
    marks = []

    class Clock(fr.Callback):
        def after_round(self, record):
            marks.append(time.perf_counter())

    fr.train(algorithm, clients, rounds=400, callbacks=[Clock()])
    later = marks[200:]
    # Pages of mapped files that were touched are the system's cache, not this process's memory.
    own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    memory = int(own.split()[1]) / 1024
    print(json.dumps({"open": opened, "round": (later[-1] - marks[199]) / len(later), "megabytes": memory}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--make", nargs=2)
    parser.add_argument("--measure")
    arguments = parser.parse_args()
    if arguments.make:
        return make(Path(arguments.make[0]), int(arguments.make[1]))
    if arguments.measure:
        return measure(Path(arguments.measure))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for clients in POPULATIONS:
            path = str(Path(folder) / str(clients))
            subprocess.run([sys.executable, __file__, "--make", path, str(clients)], check=True)
        for clients in POPULATIONS:
            path = str(Path(folder) / str(clients))
            command = [sys.executable, __file__, "--measure", path]
            runs = [subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True) for _ in range(3)]
            found = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
            figures[clients] = {name: min(f[name] for f in found) for name in found[0]}
    rows = [
        (
            f"{clients:,} clients",
            f"{1e3 * f['round']:.2f} ms a round, {f['megabytes']:.0f} MB, opened in {1e3 * f['open']:.0f} ms",
            "",
        )
        for clients, f in figures.items()
    ]
    costs, memory = ([f[name] for f in figures.values()] for name in ("round", "megabytes"))
    rows.append(
        (
            "most against least",
            f"{max(costs) / min(costs):.2f} times the time, {max(memory) / min(memory):.2f} times the memory",
            "within 1.2",
        )
    )
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
