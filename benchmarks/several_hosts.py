"""Two processes with one device each against one process with two, on this machine: the time and bytes of a round."""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

CLIENTS = (100, 1_000, 10_000)  # a round
REPEATS = 3  # starts of each kind, in turn
POPULATION = 24_000  # at least: users are repeated
AIM = {1_000: 1.15}


class Rounds:
    """Rounds as the training loop runs them: the next call's cohorts are packed while the devices run this one's."""

    def __init__(self, clients, algorithm, number):
        import jax

        import fedrecon as fr
        from fedrecon.sampling import Cohorts, Sampling

        self.at_once = max(1, min(10, 10_000 // number))
        place, keys = fr.layout(model=algorithm.model), fr.run_keys(0)
        self.cohorts = Cohorts(algorithm, clients, Sampling(number), place, keys, self.at_once)
        self.run_rounds = fr.engine.compile_rounds(algorithm, place)
        self.state = fr.engine.everywhere(algorithm.init(jax.random.key(1)), place)
        self.key = fr.engine.everywhere(jax.random.key(2), place)
        self.ready = self.cohorts.prepare(0, self.at_once)
        self.call()

    def call(self):
        """Run one call; return the seconds a round."""
        import jax

        begin, ready = time.perf_counter(), self.ready
        self.state, _, report = self.run_rounds(self.state, (), ready.cohorts, self.key, ready.first, self.at_once)
        ahead = self.cohorts.prepare_ahead(ready.first + self.at_once, self.at_once)
        jax.block_until_ready((self.state, report))
        self.ready = ahead.result()
        return (time.perf_counter() - begin) / self.at_once


def population(source):
    """Return the clients of W1, repeated until there are enough, and how many items there are."""
    import numpy as np

    import fedrecon as fr
    from w1 import setup

    ratings = setup(source)
    times = -(-POPULATION // len(ratings))
    return fr.Clients(ratings.columns, np.tile(ratings.starts, times), np.tile(ratings.ends, times)), ratings.num_items


def sent_on_loopback():
    """Return how many bytes this machine has sent to itself."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(source):
    """Print the seconds a round, and the bytes that a process sends in one, for every size of a cohort."""
    from w1 import algorithm

    clients, num_items = population(source)
    found = {}
    for number in CLIENTS:
        rounds = Rounds(clients, algorithm(num_items), number)
        rounds.call()
        calls = {100: 30, 1_000: 20}.get(number, 5)
        before = sent_on_loopback()
        seconds = [rounds.call() for _ in range(calls)]
        sent = (sent_on_loopback() - before) / calls / rounds.at_once
        found[number] = {"seconds": statistics.median(seconds), "bytes": sent / 2}
    print(json.dumps(found), flush=True)


def start(source, *where):
    command = [sys.executable, __file__, "--data", source, "--measure", *where]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def figures_of(processes):
    """Return what the first of some processes printed; end all if one fails."""
    try:
        outputs = [process.communicate(timeout=1200)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("a process failed; its error is above")
    finally:
        for process in processes:
            process.kill()
    return {int(number): figures for number, figures in json.loads(outputs[0].splitlines()[-1]).items()}


def one_and_two(source):
    """Start one process with two devices, then two with one device; return the figures of both."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
    one = figures_of([start(source, "alone")])
    return one, figures_of([start(source, where, str(k)) for k in range(2)])


def rows_of(found):
    for number, figures in found.items():
        times = f"{1e3 * figures['one']:.2f} and {1e3 * figures['two']:.2f} ms"
        aim = f"at most {AIM[number]}" if number in AIM else ""
        yield f"{number:,} clients a round: time against one process", f"{figures['ratio']:.2f} ({times})", aim
    sent = ", ".join(f"{figures['bytes'] / 1e6:.2f}" for figures in found.values())
    yield "bytes that each process sends in a round", f"{sent} MB", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs="+", metavar="WHERE")
    arguments = parser.parse_args()
    if arguments.measure:
        import fedrecon as fr

        if arguments.measure == ["alone"]:
            fr.start_devices(2)
        else:
            fr.start_hosts(arguments.measure[0], 2, int(arguments.measure[1]), devices=2)
        return measure(arguments.data)
    pairs = [one_and_two(arguments.data) for _ in range(REPEATS)]
    found = {}
    for number in CLIENTS:
        one, two = (min(pair[k][number]["seconds"] for pair in pairs) for k in range(2))
        sent = min(pair[1][number]["bytes"] for pair in pairs)
        found[number] = {"one": one, "two": two, "ratio": two / one, "bytes": sent}
    arguments.json.write_text(json.dumps({"rows": list(rows_of(found)), "figures": found}))


if __name__ == "__main__":
    main()
