"""A secure sum of 1,000 clients with 200,000 numbers each: processor time of a client and of the server, by message.

    python benchmarks/secure_sum.py --json figures.json
    python benchmarks/secure_sum.py --clients 100 --json figures.json

One client in twenty drops out before each of the last three messages. The sum is compared with the exact one.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from fedrecon._src.privacy import secure_sum as ss

LEAVING = 20  # one client in so many, before each message but the first


class Clock:
    """Adds up processor time by name."""

    def __init__(self):
        self.seconds, self.calls, self.sent = {}, {}, {}

    def __call__(self, name, function, *arguments, **options):
        begin = time.process_time()
        result = function(*arguments, **options)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
        self.calls[name] = self.calls.get(name, 0) + 1
        return result


def vector(client, length):
    return np.random.default_rng(client).integers(0, 2**32, length, dtype=np.uint32)


def measure(clients, length):
    """Run the protocol, and time what each side does."""
    clock, states = Clock(), {}
    terms = ss.plan(clients, length)

    def answers(name, take, messages):
        """Yield the clients' messages; what is timed is the client's part, and its bytes are counted."""
        for me, message in messages.items():
            if name != "advertise" and me % LEAVING == ("share", "mask", "unmask").index(name):
                continue
            states[me], sent = clock(name, take, me, message)
            clock.sent[name] = len(sent)
            yield me, sent

    def server(name, function, messages):
        """Time a step of the server without the clients' part of it."""
        own = sum(clock.seconds.values())
        begin = time.process_time()
        result = function(messages)
        clock.seconds[name] = time.process_time() - begin - (sum(clock.seconds.values()) - own)
        return result

    hellos = answers("advertise", lambda me, _: ss.advertise(terms, me, least=20), dict.fromkeys(range(clients), b""))
    host, rosters = server("introduce", lambda m: ss.introduce(terms, m), hellos)
    shares = answers("share", lambda me, message: ss.share(states[me], message), rosters)
    host, deliveries = server("deliver", lambda m: ss.deliver(host, m), shares)
    inputs = answers("mask", lambda me, message: ss.mask(states[me], message, vector(me, length)), deliveries)
    host, requests = server("collect", lambda m: ss.collect(host, m), inputs)
    reveals = answers("unmask", lambda me, message: ss.unmask(states[me], message), requests)
    result = server("total", lambda m: ss.total(host, m), reveals)

    exact = np.zeros(length, np.uint32)
    for client in result.clients:
        exact += vector(client, length)
    assert (result.total == exact).all(), "the sum is wrong"
    return terms, clock, result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--length", type=int, default=200_000)
    arguments = parser.parse_args()
    terms, clock, result = measure(arguments.clients, arguments.length)
    each = {name: clock.seconds[name] / clock.calls[name] for name in clock.calls}
    host = {name: clock.seconds[name] for name in ("introduce", "deliver", "collect", "total")}
    size = f"{arguments.clients:,} clients, {arguments.length:,} numbers, circles of {terms.circle}"
    client = " / ".join(f"{1e3 * each[name]:.1f}" for name in ("advertise", "share", "mask", "unmask"))
    server = " / ".join(f"{seconds:.2f}" for seconds in host.values())
    kilobytes = sum(clock.sent.values()) / 1000
    rows = [
        (size, f"{len(result.clients):,} in the sum, which is exact", "exact"),
        ("a client, by message", f"{client} ms, {kilobytes:,.0f} kB up", ""),
        ("the server, by message", f"{server} s", ""),
    ]
    figures = {"client_seconds": each, "server_seconds": host, "bytes_up": clock.sent, "in_sum": len(result.clients)}
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
