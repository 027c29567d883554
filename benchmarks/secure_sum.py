"""A secure sum of 1,000 clients with 200,000 numbers each: processor time of a client and of the server, by message.

    python benchmarks/secure_sum.py --json figures.json
    python benchmarks/secure_sum.py --clients 100 --json figures.json
    python benchmarks/secure_sum.py --devices --length 50000 --json figures.json

One client in twenty drops out before each of the last three messages. The sum is compared with the exact one. Then the
same with one message and two servers. With --devices, 1,000 simulated devices report over loopback to `fedrecon serve`,
which asks `fedrecon helper`: every fourth drops out in a round, at one of four stages, and one in fifty sends garbage.
The parameters at the end must be those of the exact sums.
"""

import argparse
import asyncio
import dataclasses
import functools
import hashlib
import json
import math
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import fedrecon as fr
from deployment import fedrecon, free_port, launch, memory_of, rounds_done, stop
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.deploy.admission import issue_token, read_secret
from fedrecon._src.deploy.certificates import make_helper, make_node, make_token_secret, read_helper
from fedrecon._src.privacy import secure_sum as ss
from fedrecon._src.privacy.secure_sum import two_servers
from fedrecon_device.sealing import make_report
from fedrecon_device.tensors import read_metadata
from load import STAGES, SimulatedDevice, run_devices

LEAST, ROUNDS, LONGEST = 100, 4, 600
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


# ---- one message, two servers ----


def measure_two_servers(clients, length, bits):
    """Return the processor time of a report on the device, at the coordinator and at the helper, and its bytes."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_helper(folder)
        key = read_helper(folder / "helper.key")
        about = {"format": "fedrecon-device-plan", "protocol": "two-servers", "algorithm": "", "dtype": "uint32"}
        sums = {"length": length, "bits": bits, "least": LEAST, "helper": key.public_key().public_bytes_raw()}
        plan = two_servers.ServedPlan(**about, **sums, rounds=1, reports_per_day=1)
        purpose = plan.purpose("run", 0, bytes(16), "0" * 64)
        spool, exact = two_servers.Spool(folder / "spool", plan.report_bytes), np.zeros(length, np.uint32)
        for client in range(clients):
            values = vector(client, length)
            report = clock("device", make_report, values, plan.helper, purpose, bits)
            if client % LEAVING:  # the others drop out
                clock("coordinator", spool.add, bytes(16), report)
                exact += values
        count = len(spool)
        records = clock("coordinator", spool.records, count)
        helper = two_servers.Helper(plan, key, folder)
        answer = clock("helper", helper.answer, "run", 0, bytes(16), records, "0" * 64)
        total, counted = clock("coordinator", two_servers.unmask, plan, spool.reports(count), answer, count)
        spool.close()
    assert counted == count
    assert (total == exact & np.uint32(2**bits - 1)).all(), "the sum is wrong"
    per_report = {name: clock.seconds[name] / count for name in ("coordinator", "helper")}
    return {"device": clock.seconds["device"] / clients, **per_report, "bytes": plan.report_bytes}


# ---- devices over loopback ----


def algorithm_of(length, clients):
    """Return an algorithm whose vector has about so many numbers; its meaning does not matter here."""
    descend = fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=4)
    secure = fr.aggregators.secure(1.0, clients=clients, max_weight=1, protocol="two-servers", bits=24)
    model = fr.models.matrix_factorization(length // 10, 10)
    return fr.federated_reconstruction(
        model, reconstruct=descend, update=descend, server=fr.optimizers.sgd(1.0), aggregate=secure
    )


def deploy(folder, length, clients):
    """Write keys, plan and start; return the commands of the helper and the coordinator, and the coordinator's port."""
    algorithm, ports = algorithm_of(length, clients), (free_port(), free_port())
    make_helper(folder)
    make_node(folder, "coordinator")
    make_token_secret(folder)
    params = algorithm.params(algorithm.init(jax.random.key(0)))
    fr.save_algorithm(folder / "start", algorithm, params)
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(total_shapes(algorithm)))
    about = {
        "protocol": "two-servers",
        "bits": 24,
        "least": LEAST,
        "helper": (folder / "helper.pub").read_text().strip(),
    }
    plan = {
        "format": "fedrecon-device-plan",
        "algorithm": fr.kit.digest(algorithm),
        "rounds": ROUNDS,
        "vector": {"length": size, "dtype": "uint32"},
        "sum": about,
        "noise": None,
        "limits": {"reports_per_day": 1000, "min_examples": 1},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    addresses = [f"127.0.0.1:{port}" for port in ports]
    helper = ["helper", folder, "--key", folder / "helper.key", "--coordinator", folder / "coordinator.pub"]
    helper += ["--state", folder / "helper", "--insecure", "--listen", addresses[0]]
    serve = [
        "serve",
        folder,
        "--insecure",
        "--listen",
        addresses[1],
        "--out",
        folder / "run",
        "--max-connections",
        5000,
    ]
    serve += ["--per-round", clients // 2, "--devices.run", folder / "start", "--devices.tokens", folder / "tokens.key"]
    serve += ["--devices.helper", f"http://{addresses[0]}", "--devices.sign", folder / "coordinator.key"]
    serve += ["--devices.retry", 1, "--json"]
    return algorithm, fedrecon(*helper), fedrecon(*serve), ports[1]


def small_vector(length, name, number):
    return np.random.default_rng([int(name), number]).integers(-9, 9, length).astype(np.uint32)


def report_on(plan, name, data):
    """Return a device's report; one in fifty is garbage."""
    if int(name) % 50 == 0:
        return bytes(plan.report_bytes)
    about = json.loads(read_metadata(data, "broadcast")["fedrecon"])
    batch, broadcast = bytes.fromhex(about["batch"]), hashlib.sha256(data).hexdigest()
    purpose = plan.purpose(about["run"], about["round"], batch, broadcast)
    return make_report(small_vector(plan.length, name, about["round"]), plan.helper, purpose, plan.bits)


def stage_of(name, number):
    """Return after which stage a device drops out in a round; None for three in four."""
    k = (int(name) + 7 * number) % 16
    return STAGES[k] if k < len(STAGES) else None


def seconds_of(pid):
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def expected_params(algorithm, folder, devices, length):
    """Return the parameters after rounds with just the devices whose reports were taken."""
    params = fr.load_algorithm(folder / "start").params
    model = algorithm.model._replace(init_global=lambda key: params)
    state = dataclasses.replace(algorithm, model=model).init(fr.kit.run_keys(0).init)
    for number in range(ROUNDS):
        total = np.zeros(length, np.uint32)
        for device in devices:
            if number in device.counted and int(device.name) % 50:
                total += small_vector(length, device.name, number)
        parts = fr.privacy.from_vector(total, total_shapes(algorithm))
        state = fr.kit.server_update(algorithm, state, [parts], fr.kit.round_key(0, number))
    return algorithm.params(state)


def measure_devices(clients, length):
    """Run device rounds; return the processor time per report and the memory of both servers after every round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        algorithm, helper_words, serve_words, port = deploy(folder, length, clients)
        plan, secret = two_servers.read_served_plan(folder), read_secret(folder / "tokens.key")
        devices = []
        for k in range(clients):
            leaves = functools.partial(stage_of, str(k))
            token, report = issue_token(secret, str(k)), functools.partial(report_on, plan)
            devices.append(SimulatedDevice(port, str(k), token, report, leaves))
        helper, server = launch(folder / "helper.log", helper_words), launch(folder / "serve.log", serve_words)
        end, looks = time.monotonic() + LONGEST, {}

        def finished():
            done = rounds_done(folder / "run")
            if done not in looks and server.poll() is None:
                pids = {"coordinator": server.pid, "helper": helper.pid}
                looks[done] = {who: (memory_of(pid), seconds_of(pid)) for who, pid in pids.items()}
            return done >= ROUNDS or server.poll() is not None or time.monotonic() > end

        try:
            asyncio.run(run_devices(devices, finished))
            assert server.wait(60) == 0, (folder / "serve.log").read_text()[-2000:]
        except subprocess.TimeoutExpired:
            raise RuntimeError((folder / "serve.log").read_text()[-2000:]) from None
        finally:
            stop(server)
            stop(helper)
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        params = fr.load_algorithm(folder / "run" / "model").params
        expected = expected_params(algorithm, folder, devices, plan.length)
        exact = all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True))
        assert exact, "the sums are wrong"
    return {"records": records, "looks": looks, "bytes": plan.report_bytes}


def rows_of_devices(clients, length):
    """Return rows about device rounds over loopback, and all figures."""
    figures = measure_devices(clients, length)
    records, looks = figures["records"], figures["looks"]
    counted, unreadable = (
        sum(values) for values in zip(*((r["answered"], sum(r["failed"].values())) for r in records), strict=True)
    )
    first, last = 1, max(looks)
    reports = sum(record["answered"] + sum(record["failed"].values()) for record in records[first:last])
    rows = [
        (
            f"{clients:,} devices over loopback, {length:,} numbers, {ROUNDS} rounds",
            f"{counted:,} reports in the sums, which are exact; {unreadable} were garbage",
            "exact",
        )
    ]
    for who in ("coordinator", "helper"):
        memory = " / ".join(f"{looks[number][who][0]:.0f}" for number in sorted(looks))
        seconds = looks[last][who][1] - looks[first][who][1]
        rows.append((f"{who}: reports per second and core", f"{reports / max(seconds, 1e-2):,.0f}", ""))
        rows.append((f"{who}: MB after every round", memory, "flat"))
    return rows, figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--length", type=int, default=200_000)
    parser.add_argument("--devices", action="store_true")
    arguments = parser.parse_args()
    if arguments.devices:
        rows, figures = rows_of_devices(arguments.clients, arguments.length)
        arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))
        return
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
    per_client = sum(host.values()) / len(result.clients)
    rows.append(("four messages: clients per second and core of the server", f"{1 / per_client:,.0f}", ""))
    single = {bits: measure_two_servers(arguments.clients, arguments.length, bits) for bits in (32, 24, 20)}
    for bits, times in single.items():
        measured = (
            f"device {1e3 * times['device']:.2f} ms, {times['bytes'] / 1e3:,.0f} kB up; reports per second and core: "
        )
        measured += f"coordinator {1 / times['coordinator']:,.0f}, helper {1 / times['helper']:,.0f}"
        rows.append((f"two servers, {bits} bits", measured, ""))
    figures = {
        "two_servers": single,
        "client_seconds": each,
        "server_seconds": host,
        "bytes_up": clock.sent,
        "in_sum": len(result.clients),
    }
    arguments.json.write_text(json.dumps({"rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
