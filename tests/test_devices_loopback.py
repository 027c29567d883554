"""Device rounds with real processes over TLS: coordinator, helper, and devices that come, go and lie."""

import contextlib
import hashlib
import http.server
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save

pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")

import fedrecon as fr
from deployed import free_port
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.app.cli import main
from fedrecon._src.core.keys import words_of
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.deploy.admission import issue_token, read_secret
from fedrecon._src.deploy.certificates import read_helper
from fedrecon._src.privacy.secure_sum.two_servers import read_served_plan
from fedrecon_device import Bundle, BundleError, Participant, ParticipationError
from fedrecon_device.sealing import RECORD, expand, open_seed, unpack
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


def wait_until(condition, programs, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "\n".join(program.text()[-3000:] for program in programs)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Keys, what training begins with, and a bundle."""
    folder = tmp_path_factory.mktemp("made")
    assert main(["keys", str(folder / "helper-keys"), "--helper"]) == 0
    assert main(["keys", str(folder / "keys"), "--tokens", "--nodes", "coordinator"]) == 0
    algorithm = algorithm_of()
    params = jax.tree.map(np.asarray, algorithm.params(algorithm.init(jax.random.key(1))))
    fr.save_algorithm(folder / "start", algorithm, params)
    helper = (folder / "helper-keys" / "helper.pub").read_text().strip()
    fr.device.bundle(
        algorithm,
        params,
        folder / "bundle",
        like={"item": np.arange(6), "rating": np.float32([1, 2, 3, 4, 5, 1])},
        most=6,
        train=fr.device.DevicePlan(rounds=ROUNDS, least=3, helper=helper, reports_per_day=100),
    )
    return folder, algorithm


@pytest.fixture
def deployment(made, tmp_path):
    """What is made, and the commands of both servers."""
    folder, algorithm = made
    for source in folder.iterdir():
        shutil.copytree(source, tmp_path / source.name)
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
        "seconds": 600,
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


# ---- what a device does not do, whoever asks ----


class Coordinator:
    """A server that says what a test wants it to, and remembers what it was sent."""

    def __init__(self, made):
        folder, algorithm = made
        self.bundle, self.requests, self.bodies = folder / "bundle", [], []
        plan = read_served_plan(self.bundle)
        self.about = {"plan": plan.digest, "run": "a run", "round": 0, "key": [1, 2], "batch": "0" * 32}
        state = algorithm.init(jax.random.key(1))
        self.arrays = {f"message/{path}": np.asarray(x) for path, x in flatten(algorithm.message(state))[0].items()}
        self.retry, self.before_report = 7, lambda: None
        self.task, self.statuses, self.check_in = {}, [], 200  # changes of the task; of reports, one after the other

    def broadcast(self):
        return save(self.arrays, {"fedrecon": json.dumps(self.about)})

    def answer(self, method, path):
        data = self.broadcast()
        if method == "PUT":
            self.before_report()
        if path == "/v1/check-in":
            task = {name: self.about[name] for name in ("plan", "run", "round")}
            task |= {"broadcast": hashlib.sha256(data).hexdigest(), "size": len(data), "ticket": "t", "seconds": 30}
            return self.check_in, json.dumps(task | self.task).encode()
        return (200, data) if method == "GET" else (self.statuses.pop(0) if self.statuses else 201, b"")


@pytest.fixture
def coordinator(made):
    script = Coordinator(made)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            script.requests.append((self.command, self.path))
            script.bodies.append(body)
            status, data = script.answer(self.command, self.path)
            if status is None:  # the connection ends without an answer
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in (
                ("Content-Length", len(data)),
                ("Location", "/elsewhere"),
                ("Retry-After", script.retry),
            ):
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

        do_PUT = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        script.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield script
        server.shutdown()
        thread.join()


def device_of(coordinator, tmp_path, examples=6):
    device = Participant(coordinator.bundle, coordinator.url, tmp_path / "me.json", token="a token")
    if not device.personal.stored():
        device.personal.add({name: column[:examples] for name, column in examples_of("me").items()})
    return device


def test_a_device_reports_once_and_its_owner_can_see_it(coordinator, tmp_path):
    step = device_of(coordinator, tmp_path).step()
    plan = read_served_plan(coordinator.bundle)
    assert coordinator.requests[-1] == ("PUT", "/v1/rounds/0/reports/t")
    assert len(coordinator.bodies[-1]) == plan.report_bytes == step.report["bytes"]
    again = device_of(coordinator, tmp_path)  # as after a restart
    assert again.step().report is None
    assert again.reports() == [step.report]
    assert (step.report["run"], step.report["round"], step.report["status"]) == ("a run", 0, "sent")
    assert "sums of 3 or more" in step.report["protected"]
    assert [method for method, _ in coordinator.requests].count("PUT") == 1
    stored = again.personal.stored()
    sent = b"".join(coordinator.bodies)
    assert stored["participation"]["name"].encode() not in sent
    assert bytes.fromhex(stored["participation"]["name"]) not in sent
    again.leave()
    assert again.personal.stored() == {name: value for name, value in stored.items() if name != "participation"}


def test_a_lost_answer_is_followed_by_the_same_bytes(coordinator, tmp_path):
    coordinator.statuses = [None, 200]
    assert device_of(coordinator, tmp_path).step().report["status"] == "sent"
    reports = [body for body in coordinator.bodies if body]
    assert len(reports) == 2
    assert reports[0] == reports[1]


def test_a_report_that_is_late_is_not_sent_again(coordinator, tmp_path):
    coordinator.statuses = [410]
    device = device_of(coordinator, tmp_path)
    assert device.step().report["status"] == "too late"
    assert device.step().report is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda c: c.task.update(plan="0" * 64), ParticipationError),
        (lambda c: c.task.update(round=1), ParticipationError),
        (lambda c: c.task.update(run="another"), ParticipationError),
        (lambda c: c.about.update(round=ROUNDS), ParticipationError),
        (lambda c: c.task.update(seconds=float("nan")), ParticipationError),
        (lambda c: c.task.update(ticket="../../elsewhere"), ParticipationError),
        (lambda c: c.about.update(batch="x"), ParticipationError),
        (lambda c: c.about.update(key=[1]), ParticipationError),
        (lambda c: c.task.update(size=10), ConnectionError),
        (lambda c: c.task.update(broadcast="0" * 64), ConnectionError),
        (lambda c: c.arrays.clear(), BundleError),
        (lambda c: c.arrays.update({name: array[:1] for name, array in c.arrays.items()}), BundleError),
        (lambda c: c.arrays.update({name: array * np.nan for name, array in c.arrays.items()}), ParticipationError),
        (
            lambda c: c.arrays.update({name: array + np.float64(1e300) for name, array in c.arrays.items()}),
            ParticipationError,
        ),
        (lambda c: setattr(c, "check_in", 401), ParticipationError),
        (lambda c: setattr(c, "check_in", 302), ConnectionError),
        (lambda c: setattr(c, "check_in", 500), ConnectionError),
    ],
)
def test_a_device_sends_nothing_to_a_server_that_asks_for_something_else(change, error, coordinator, tmp_path):
    change(coordinator)
    device = device_of(coordinator, tmp_path)
    with pytest.raises(error):
        device.step()
    assert not any(coordinator.bodies)
    assert ("GET", "/elsewhere") not in coordinator.requests
    assert device.reports() == []


def test_limits_of_the_plan_hold_on_the_device(coordinator, tmp_path):
    device = device_of(coordinator, tmp_path, examples=1)
    assert device.step() == (None, 86_400)
    assert coordinator.requests == []
    device.personal.add(examples_of("me"))
    device.trainer.plan["limits"]["reports_per_day"] = 1
    assert device.step().report is not None
    coordinator.about["round"] = 1
    requests = len(coordinator.requests)
    step = device.step()
    assert (step.report, 86_300 < step.pause <= 86_400) == (None, True)
    assert len(coordinator.requests) == requests


def test_a_device_waits_as_it_is_told_and_comes_back_after_errors(coordinator, tmp_path):
    pauses = []
    coordinator.check_in = 204
    device = device_of(coordinator, tmp_path)
    device.run(stop=lambda: len(pauses) == 2, sleep=pauses.append)
    coordinator.check_in = 503
    device.run(stop=lambda: len(pauses) == 4, sleep=pauses.append)
    assert pauses == [7, 7, 5, 10]


def test_a_device_whose_report_was_lost_is_in_no_hurry(coordinator, tmp_path):
    coordinator.retry = "Wed, 18 Nov 2026 00:00:00 GMT"
    device = device_of(coordinator, tmp_path)
    assert device.step().pause == 1
    for seconds, pause in ((30, 60), (600, 600), (1e6, 3600)):
        coordinator.task["seconds"] = seconds
        assert device.step() == (None, pause)


@pytest.mark.parametrize("end", ["leave", "forget"])
def test_who_leaves_while_a_report_is_sent_has_left(end, coordinator, tmp_path):
    device = device_of(coordinator, tmp_path)
    coordinator.before_report = device.leave if end == "leave" else device.personal.forget
    with pytest.raises(ParticipationError, match="the owner no longer takes part"):
        device.step()
    assert "participation" not in device.personal.stored()
    assert bool(device.personal.stored()) == (end == "leave")


def test_noise_is_for_one_report_in_each_round_of_the_plan(coordinator, tmp_path):
    device = device_of(coordinator, tmp_path)
    device.trainer.plan |= {"noise": {"variance": 400.0, "least": 3}, "rounds": 2}
    for run in ("a run", "another"):
        coordinator.about["run"] = run
        assert device.step().report is not None
    coordinator.about["run"] = "a third"
    with pytest.raises(ParticipationError, match="has sent the 2 reports that the plan's noise protects"):
        device.step()


def test_without_tls_only_this_machine_is_a_server(made, tmp_path):
    for server in ("http://fed.example.org", "ftp://127.0.0.1", "127.0.0.1:80"):
        with pytest.raises(ValueError, match="`server`"):
            Participant(made[0] / "bundle", server, tmp_path / "me.json", token="t")


def test_a_device_adds_the_noise_of_the_plan_before_it_masks(coordinator, made, tmp_path):
    device = device_of(coordinator, tmp_path)
    device.trainer.plan["noise"] = {"variance": 400.0, "least": 3}
    report = device.step().report
    assert report["protected"].endswith("with noise from this device")
    key, sums = read_helper(made[0] / "helper-keys" / "helper.key"), read_served_plan(coordinator.bundle)
    data = coordinator.bodies[-1]
    broadcast = hashlib.sha256(coordinator.broadcast()).hexdigest()
    seed = open_seed(key, sums.helper, data[:RECORD], sums.purpose("a run", 0, bytes(16), broadcast))
    noised = unpack(data[RECORD:], sums.length, sums.bits) - expand(seed, sums.length)
    name, columns = device.personal.stored()["participation"]["name"], device.personal.columns()
    exact = device.trainer.update(coordinator.arrays, (1, 2), name, columns).vector
    noise = ((noised - exact).astype(np.uint32) << 12).astype(np.int32) >> 12  # of 20 bits
    assert 10 < noise.std() < 40
    assert np.count_nonzero(noise) > 0.8 * len(noise)
