"""Two processes with one device each against one process with two, on this machine: the time and bytes of a round."""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

CALLS = {100: 3, 1_000: 2, 10_000: 3}  # clients a round: calls that a turn measures
TURNS = 30  # of each kind; the figure is the median of their ratios, so a noisy minute does not count for one of them
POPULATION = 24_000  # at least: users are repeated
AIM = {1_000: 1.15}


class Rounds:
    """Rounds as the training loop runs them: the next call's cohorts are packed while the devices run this one's."""

    def __init__(self, clients, algorithm, number):
        import jax

        import fedrecon as fr
        from fedrecon._src.simulation import engine
        from fedrecon._src.simulation.sampling import Cohorts, Sampling

        self.at_once = max(1, min(10, 10_000 // number))
        place, keys = fr.layout(model=algorithm.model), fr.run_keys(0)
        self.cohorts = Cohorts(algorithm, clients, Sampling(number), place, keys, self.at_once)
        self.run_rounds = engine.compile_rounds(algorithm, place)
        self.state = engine.everywhere(algorithm.init(jax.random.key(1)), place)
        self.key = engine.everywhere(jax.random.key(2), place)
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


def take_turns(source):
    """Run rounds whenever somebody asks on standard input; print what a turn took and sent."""
    from w1 import algorithm

    clients, num_items = population(source)
    rounds = {}
    for line in sys.stdin:
        number, calls = json.loads(line)
        if number not in rounds:
            rounds[number] = Rounds(clients, algorithm(num_items), number)
        rounds[number].call()  # whoever had the turn before has filled the caches
        before = sent_on_loopback()
        seconds = statistics.mean(rounds[number].call() for _ in range(calls))
        sent = (sent_on_loopback() - before) / calls / rounds[number].at_once
        print(json.dumps({"seconds": seconds, "bytes": sent / 2}), flush=True)


class Group:
    """Processes that run rounds together, when it is their turn."""

    def __init__(self, source, *places):
        """Start a process for each place: `["alone"]`, or the coordinator and which process it is."""
        command = [sys.executable, __file__, "--data", source, "--place"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [subprocess.Popen([*command, *place], **pipes) for place in places]

    def turn(self, number, calls):
        """Run some calls of rounds with so many clients; return what the first process measured."""
        for process in self.processes:
            process.stdin.write(f"{json.dumps([number, calls])}\n")
            process.stdin.flush()
        told = [process.stdout.readline() for process in self.processes]
        if not all(told):
            raise SystemExit("a process failed; its error is above")
        return json.loads(told[0])

    def end(self):
        """Let the processes end; kill those that do not."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def compare(source):
    """Let one process with two devices and two with one take turns; return the figures for every size of a cohort."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
    one, two = Group(source, ["alone"]), Group(source, [where, "0"], [where, "1"])
    try:
        found = {}
        for number, calls in CALLS.items():
            one.turn(number, 1), two.turn(number, 1)  # compile
            turns = [(one.turn(number, calls), two.turn(number, calls)) for _ in range(TURNS)]
            seconds = [[turn[k]["seconds"] for turn in turns] for k in range(2)]
            found[number] = {
                "one": statistics.median(seconds[0]),
                "two": statistics.median(seconds[1]),
                "ratio": statistics.median(b / a for a, b in zip(*seconds, strict=True)),
                "bytes": min(turn[1]["bytes"] for turn in turns),
            }
        return found
    finally:
        one.end()
        two.end()


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
    parser.add_argument("--place", nargs="+")
    arguments = parser.parse_args()
    if arguments.place:
        import fedrecon as fr

        if arguments.place == ["alone"]:
            fr.start_devices(2)
        else:
            fr.start_hosts(arguments.place[0], 2, int(arguments.place[1]), devices=2)
        return take_turns(arguments.data)
    found = compare(arguments.data)
    arguments.json.write_text(json.dumps({"rows": list(rows_of(found)), "figures": found}))


if __name__ == "__main__":
    main()
