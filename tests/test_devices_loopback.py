"""Device rounds with real processes over TLS: coordinator, helper, and devices that come, go and lie."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")

import fedrecon as fr
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.app.cli import main
from fedrecon._src.core.keys import words_of
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.deploy.devices import read_served_plan
from fedrecon._src.deploy.tokens import issue_token, read_secret
from fedrecon_device import Bundle
from fedrecon_device.store import Store
from fedrecon_device.training import Trainer

pytestmark = pytest.mark.slow
ITEMS, ROUNDS, HONEST = 12, 4, [f"device-{k}" for k in range(4)]
TESTS = Path(__file__).parent


def algorithm_of():
    descend = fr.gradient_descent(fr.optimizers.sgd(0.2), batch_size=4)
    return fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS, 2),
        reconstruct=descend,
        update=descend,
        server=fr.optimizers.sgd(1.0),
        aggregate=fr.aggregators.secure(
            1.0, clients=50, max_weight=20, max_metric=200, protocol="two-servers", bits=20
        ),
    )


def examples_of(name):
    draw = np.random.default_rng(list(name.encode()))
    return {"item": draw.permutation(ITEMS)[:6].tolist(), "rating": draw.integers(1, 6, 6).astype(float).tolist()}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Program:
    """A process of ours whose output goes to a file."""

    def __init__(self, log, *words):
        self.log = log
        with open(log, "ab") as file:
            self.process = subprocess.Popen([sys.executable, *map(str, words)], stdout=file, stderr=file)

    def stop(self, number=signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(60)

    def text(self):
        return self.log.read_text()


def wait_until(condition, programs, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "\n".join(program.text()[-3000:] for program in programs)
        time.sleep(0.1)


@pytest.fixture
def deployment(tmp_path):
    """Keys, a bundle, what training begins with, and the commands of both servers."""
    assert main(["keys", str(tmp_path / "helper-keys"), "--helper"]) == 0
    assert main(["keys", str(tmp_path / "keys"), "--tokens", "--nodes", "coordinator"]) == 0
    algorithm = algorithm_of()
    params = jax.tree.map(np.asarray, algorithm.params(algorithm.init(jax.random.key(1))))
    fr.save_algorithm(tmp_path / "start", algorithm, params)
    helper = (tmp_path / "helper-keys" / "helper.pub").read_text().strip()
    fr.device.bundle(
        algorithm,
        params,
        tmp_path / "bundle",
        like={"item": np.arange(6), "rating": np.float32([1, 2, 3, 4, 5, 1])},
        most=6,
        train=fr.device.DevicePlan(rounds=ROUNDS, least=3, helper=helper, reports_per_day=100),
    )
    ports = {"helper": free_port(), "serve": free_port()}
    helper_words = ["-m", "fedrecon", "helper", tmp_path / "bundle", "--keys", tmp_path / "helper-keys"]
    helper_words += ["--key", tmp_path / "helper-keys" / "helper.key", "--state", tmp_path / "helper"]
    helper_words += ["--coordinator", tmp_path / "keys" / "nodes" / "coordinator.pub"]
    helper_words += ["--listen", f"127.0.0.1:{ports['helper']}"]
    serve_words = ["-m", "fedrecon", "serve", tmp_path / "bundle", "--out", tmp_path / "run", "--json"]
    serve_words += ["--keys", tmp_path / "keys", "--listen", f"127.0.0.1:{ports['serve']}", "--per-round", 4]
    serve_words += ["--deadline", 60, "--devices.run", tmp_path / "start", "--devices.retry", 0.5]
    serve_words += ["--devices.tokens", tmp_path / "keys" / "tokens.key", "--devices.seed", 3]
    serve_words += ["--devices.helper", f"https://127.0.0.1:{ports['helper']}"]
    serve_words += ["--devices.helper-ca", tmp_path / "helper-keys" / "ca.crt"]
    serve_words += ["--devices.sign", tmp_path / "keys" / "nodes" / "coordinator.key"]
    secret = read_secret(tmp_path / "keys" / "tokens.key")
    names = ["liar", *HONEST, "leaver"]
    settings = {
        "tokens": {name: issue_token(secret, name) for name in names},
        "examples": {name: examples_of(name) for name in names},
        "stores": str(tmp_path / "stores"),
        "bundle": str(tmp_path / "bundle"),
        "server": f"https://localhost:{ports['serve']}",
        "authority": str(tmp_path / "keys" / "ca.crt"),
        "seconds": 300,
        "stop": str(tmp_path / "stop"),
        "bytes": read_served_plan(tmp_path / "bundle").report_bytes,
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    return algorithm, helper_words, serve_words


def records_of(folder):
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_devices_train_as_the_simulator_does_through_restarts(deployment, tmp_path):
    algorithm, helper_words, serve_words = deployment
    helper = Program(tmp_path / "helper.log", *helper_words)
    server = Program(tmp_path / "serve.log", *serve_words)
    devices = Program(tmp_path / "devices.log", TESTS / "devices_program.py", tmp_path / "settings.json")
    programs = [helper, server, devices]
    try:
        wait_until(lambda: len(records_of(tmp_path)) >= 1, programs)
        assert helper.stop() == 0
        helper = programs[0] = Program(tmp_path / "helper.log", *helper_words)
        wait_until(lambda: len(records_of(tmp_path)) >= 2, programs)
        server.stop(signal.SIGKILL)
        server = programs[1] = Program(tmp_path / "serve.log", *serve_words, "--resume")
        wait_until(lambda: server.process.poll() is not None, programs)
        assert server.process.returncode == 0, server.text()
        (tmp_path / "stop").touch()
        assert devices.process.wait(60) == 0, devices.text()
    finally:
        for program in programs:
            program.stop(signal.SIGKILL)
    records = records_of(tmp_path)
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    stores = {name: Store(tmp_path / "stores" / f"{name}.json").read() for name in HONEST}
    reports = {name: store["participation"] for name, store in stores.items() if "participation" in store}
    cohorts = [
        [
            name
            for name, entry in reports.items()
            for report in entry["reports"]
            if report["round"] == number and report["status"] == "sent"
        ]
        for number in range(ROUNDS)
    ]
    # The liar's reports can be read by nobody, and the leaver sent none.
    assert (
        [len(names) for names in cohorts]
        == [record["answered"] for record in records]
        == [record["clients"] for record in records]
    )
    assert all(len(set(names)) == len(names) >= 3 for names in cohorts)
    assert any(record["failed"] for record in records)
    state = algorithm.init(fr.kit.run_keys(3).init)
    simulated = state = state._replace(
        method=state.method._replace(params=fr.load_algorithm(tmp_path / "start").params)
    )
    trainer = Trainer(Bundle(tmp_path / "bundle"))
    for number, names in enumerate(cohorts):
        key, message = fr.kit.round_key(3, number), algorithm.message(state)
        arrays = {f"message/{path}": np.asarray(leaf) for path, leaf in flatten(message)[0].items()}
        words = tuple(words_of(key).tolist())
        columns = {
            name: {n: np.asarray(c, t) for (n, c), t in zip(examples_of(name).items(), ("i4", "f4"), strict=True)}
            for name in names
        }
        vectors = [trainer.update(arrays, words, reports[name]["name"], columns[name]).vector for name in names]
        total = fr.privacy.from_vector(np.sum(vectors, 0, dtype=np.uint32), total_shapes(algorithm))
        state = fr.kit.server_update(algorithm, state, [total], key)
        message = algorithm.message(simulated)
        lengths = fr.kit.Lengths(*(trainer.plan["examples"][side] for side in ("support", "query")))
        totals = [
            fr.kit.client_total(
                algorithm, message, columns[name], key, client=reports[name]["name"], lengths=lengths
            ).total
            for name in names
        ]
        simulated = fr.kit.server_update(algorithm, simulated, totals, key)
    params = fr.load_algorithm(tmp_path / "run" / "model").params
    for path, leaf in flatten(params)[0].items():
        np.testing.assert_array_equal(leaf, flatten(algorithm.params(state))[0][path])
        np.testing.assert_allclose(leaf, flatten(algorithm.params(simulated))[0][path], atol=1e-5)
