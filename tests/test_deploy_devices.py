"""Rounds over devices: who may report, what counts, and that nothing is lost or counted twice."""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import math
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from jsonschema import validate

import fedrecon as fr
from deployed import free_port
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.app.cli import main
from fedrecon._src.core.factories import recipe_of
from fedrecon._src.deploy import admission, device_rounds, devices
from fedrecon._src.deploy.admission import Verifier, public_bytes
from fedrecon._src.deploy.device_rounds import serve_devices
from fedrecon._src.deploy.devices import DeviceApi, OpenRound
from fedrecon._src.deploy.helper_server import HelperApi
from fedrecon._src.deploy.http_client import Connection, JoinError, parse_server
from fedrecon._src.deploy.http_server import run_service
from fedrecon._src.deploy.registry import NotEnoughNodes, Pace
from fedrecon._src.privacy.secure_sum.two_servers import Helper, Spool, read_served_plan
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import read_manifest, write_manifest
from fedrecon.deploy import issue_token
from fedrecon_device.sealing import add_noise, make_report
from fedrecon_device.tensors import read_metadata

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what starlette uses
    from starlette.testclient import TestClient

SECRET = bytes(range(32))
HELPER = X25519PrivateKey.from_private_bytes(bytes(range(32)))
COORDINATOR = Ed25519PrivateKey.generate()
ITEMS, LEAST = 6, 3


def algorithm_of(**options):
    descend = fr.gradient_descent(fr.optimizers.sgd(0.2), batch_size=4)
    return fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS, 2),
        reconstruct=descend,
        update=descend,
        server=fr.optimizers.sgd(1.0),
        aggregate=fr.aggregators.secure(1.0, clients=50, max_weight=20, protocol="two-servers", **options),
    )


ALGORITHM = algorithm_of(bits=24)
NAMES = [f"device-{k}" for k in range(8)]
LENGTH = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(total_shapes(ALGORITHM)))


def vector_of(name, number):
    """Return what a device of this name adds to a sum: any integers, since what they mean is not tested here."""
    return np.random.default_rng([NAMES.index(name), number]).integers(-99, 99, LENGTH).astype(np.uint32)


def write_plan(folder, algorithm, rounds=2, **changes):
    plan = {
        "format": "fedrecon-device-plan",
        "version": 1,
        "algorithm": fr.kit.digest(algorithm),
        "rounds": rounds,
        "vector": {"length": LENGTH, "dtype": "uint32"},
        "sum": {
            "protocol": "two-servers",
            "bits": algorithm.aggregator.ring.bits,
            "helper": HELPER.public_key().public_bytes_raw().hex(),
            "least": LEAST,
        },
        "noise": None,
        "limits": {"reports_per_day": 100, "min_examples": 1},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan | changes))
    return read_served_plan(folder)


def report_of(plan, data, name):
    """Return a device's report on a broadcast."""
    about = json.loads(read_metadata(data, "broadcast")["fedrecon"])
    batch, vector = bytes.fromhex(about["batch"]), vector_of(name, about["round"])
    purpose = plan.purpose(about["run"], about["round"], batch, hashlib.sha256(data).hexdigest())
    return make_report(vector, plan.helper, purpose, plan.bits)


class Devices:
    """Devices that call an application in this process."""

    def __init__(self, api):
        self.api, self.http = api, TestClient(api.app, "https://server", raise_server_exceptions=False)

    def call(self, method, path, name="device-0", data=None, token=None):
        token = token or issue_token(SECRET, name)
        return self.http.request(method, path, content=data, headers={"Authorization": f"Bearer {token}"})

    def take_part(self, name):
        """Report once; returns the status of the report."""
        response = self.call("GET", "/v1/check-in", name)
        if response.status_code != 200:
            return response.status_code
        task = response.json()
        data = self.call("GET", f"/v1/broadcasts/{task['broadcast']}", name).content
        assert hashlib.sha256(data).hexdigest() == task["broadcast"]
        path = f"/v1/rounds/{task['round']}/reports/{task['ticket']}"
        return self.call("PUT", path, name, report_of(self.api.plan, data, name)).status_code


@pytest.fixture
def plan(tmp_path):
    return write_plan(tmp_path / "bundle", ALGORITHM)


@pytest.fixture
def opened(plan, tmp_path):
    """Devices, and a round that takes their reports."""
    api = DeviceApi(plan, SECRET, retry=10)
    api.run = "a run"
    spool = Spool(tmp_path / "spool", plan.report_bytes)
    current = OpenRound(0, bytes(16), b"broadcast", spool, 3, time.monotonic() + 60)
    api.open_round(current)
    yield Devices(api), current
    spool.close()


def refusal(response):
    assert response.json()["status"] == response.status_code
    return response.status_code, response.json()["type"].removeprefix("urn:fedrecon:")


# ---- admission ----


def test_a_token_by_hand():
    # base64url(HMAC-SHA256(00 01 .. 1f, "fedrecon-token v1.phone-7.4102444800"))
    assert admission.device_of(SECRET, "v1.phone-7.4102444800.haC0W8X3XZlNa5MQzglju8QVNgo9j6xNi_E9a_uhMsc") == "phone-7"


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("", "no-token"),
        ("v1.a.b.c", "no-token"),
        (issue_token(bytes(32), "phone"), "bad-token"),
        (issue_token(SECRET, "phone").replace("phone", "other"), "bad-token"),
        (issue_token(SECRET, "phone", 1e-6), "expired-token"),
    ],
    ids=["none", "garbage", "other secret", "other name", "expired"],  # tokens have the time in them
)
def test_tokens_that_admit_nobody(token, problem, opened):
    time.sleep(1.1 if problem == "expired-token" else 0)
    with pytest.raises(admission.AdmissionError) as caught:
        admission.device_of(SECRET, token)
    assert caught.value.reason == problem
    http = opened[0]
    for path in ("/v1/plan", "/v1/check-in", "/v1/broadcasts/" + "0" * 64):
        assert refusal(http.call("GET", path, token=token or "nothing")) == (401, problem)
    assert refusal(http.call("PUT", "/v1/rounds/0/reports/" + "0" * 48, token=token or "nothing")) == (401, problem)


def test_settings_of_tokens_that_make_no_sense_are_refused():
    for secret, device, seconds in ((SECRET, "a b", 1), (SECRET, "", 1), (SECRET[:31], "a", 1), (SECRET, "a", 0)):
        with pytest.raises(ValueError, match=r"`(device|secret|seconds)`"):
            issue_token(secret, device, seconds)


def test_a_device_may_not_flood_whatever_its_number_of_tokens(opened):
    http, _ = opened
    several = [issue_token(SECRET, "device-0", seconds) for seconds in (60, 600, 6000)]
    statuses = [http.call("GET", "/v1/plan", token=several[k % 3]).status_code for k in range(40)]
    assert statuses[:30] == [200] * 30
    assert 429 in statuses
    assert http.call("GET", "/v1/plan", "another").status_code == 200


def test_a_budget_of_requests_fills_up_again():
    budgets = admission.Budgets(per_second=20.0, burst=2.0)
    assert [budgets.spend("a") for _ in range(3)] == [True, True, False]
    assert budgets.spend("b")
    time.sleep(0.06)  # worth one request
    assert [budgets.spend("a") for _ in range(2)] == [True, False]


# ---- reports ----


def path_of(task):
    return f"/v1/rounds/{task['round']}/reports/{task['ticket']}"


def test_a_device_reports_once_a_round(opened, plan):
    http, current = opened
    task = http.call("GET", "/v1/check-in").json()
    assert task | {"seconds": 0} == http.call("GET", "/v1/check-in").json() | {"seconds": 0}
    description = json.loads((Path(__file__).parent.parent / "docs" / "openapi-devices.json").read_text())
    validate(task, description["components"]["schemas"]["DeviceTask"])
    assert (task["plan"], task["run"], task["round"], task["size"]) == (plan.digest, "a run", 0, 9)
    assert http.call("GET", f"/v1/broadcasts/{task['broadcast']}").content == b"broadcast"
    data = bytes(plan.report_bytes)
    assert http.call("PUT", path_of(task), data=data).status_code == 201
    assert http.call("PUT", path_of(task), data=data[:-1] + b"1").status_code == 200
    assert list(current.spool.reports(1)) == [data]
    assert len(current.spool) == 1
    pause = http.call("GET", "/v1/check-in")
    assert (pause.status_code, 5 <= int(pause.headers["retry-after"]) <= 15) == (204, True)


def test_what_is_not_a_report_has_no_effect(opened, plan):
    http, current = opened
    task, data = http.call("GET", "/v1/check-in").json(), bytes(plan.report_bytes)
    for change, expected in [
        ({"ticket": "0" * 48}, (404, "forged")),
        ({"ticket": "\u00e9"}, (404, "forged")),
        ({"round": 1}, (404, "forged")),
        ({"round": "x"}, (404, "forged")),
    ]:
        assert refusal(http.call("PUT", path_of(task | change), data=data)) == expected
    assert refusal(http.call("PUT", path_of(task), "device-1", data)) == (404, "forged")
    assert refusal(http.call("PUT", path_of(task), data=data + b"1")) == (413, "too-large")
    assert refusal(http.call("PUT", path_of(task), data=data[:-1])) == (400, "wrong-size")
    assert http.call("PUT", path_of(task), data=iter([data])).status_code == 411
    owner = hmac.digest(SECRET, b"fedrecon-owner device-0", "sha256")[:16]
    http.api._uploading.add(owner)  # on another connection
    assert refusal(http.call("PUT", path_of(task), data=data)) == (429, "too-many")
    http.api._uploading.clear()
    assert len(current.spool) == 0
    assert http.call("PUT", path_of(task), data=data).status_code == 201


def test_a_round_that_is_full_or_over_takes_no_report(opened, plan):
    http, current = opened
    tasks = {f"device-{k}": http.call("GET", "/v1/check-in", f"device-{k}").json() for k in range(5)}
    data = bytes(plan.report_bytes)
    for name in list(tasks)[:3]:
        assert http.call("PUT", path_of(tasks[name]), name, data).status_code == 201
    assert refusal(http.call("PUT", path_of(tasks["device-3"]), "device-3", data)) == (410, "expired")
    assert http.call("GET", "/v1/check-in", "device-3").status_code == 204
    http.api.close_round(current)  # while the helper is asked, after which more reports may be needed
    assert refusal(http.call("PUT", path_of(tasks["device-4"]), "device-4", data)) == (429, "not-open")
    http.api.done = 1
    assert refusal(http.call("PUT", path_of(tasks["device-4"]), "device-4", data)) == (410, "expired")
    # One that counts, and whose device heard no answer, is not called late.
    assert http.call("PUT", path_of(tasks["device-0"]), "device-0", data).status_code == 200
    assert len(current.spool) == 3


def test_a_report_during_a_restart_is_sent_again(plan, opened):
    task, data = opened[0].call("GET", "/v1/check-in").json(), bytes(plan.report_bytes)
    api = DeviceApi(plan, SECRET)
    http = Devices(api)
    for run in ("", "a run"):  # the run is not known yet, then it is, and its round is not open yet
        api.run = run
        response = http.call("PUT", path_of(task), data=data)
        assert (*refusal(response), response.headers["retry-after"]) == (429, "not-open", "5")
    api.open_round(opened[1])
    assert http.call("PUT", path_of(task), data=data).status_code == 201


def test_a_device_reports_so_often_a_day(tmp_path):
    plan = write_plan(tmp_path / "bundle", ALGORITHM, limits={"reports_per_day": 2, "min_examples": 1})
    api = DeviceApi(plan, SECRET)
    api.run = "a run"
    http, data = Devices(api), bytes(plan.report_bytes)
    for number in range(3):
        with contextlib.closing(Spool(tmp_path / f"spool-{number}", plan.report_bytes)) as spool:
            api.open_round(OpenRound(number, bytes(16), b"broadcast", spool, 3, time.monotonic() + 60))
            token = issue_token(SECRET, "device-0", 60 + number)  # a new one does not help
            response = http.call("GET", "/v1/check-in", token=token)
            assert response.status_code == (200 if number < 2 else 204)
            ticket = response.json()["ticket"] if number < 2 else api._ticket(2, "device-0")
            response = http.call("PUT", f"/v1/rounds/{number}/reports/{ticket}", data=data, token=token)
            assert response.status_code == (201 if number < 2 else 429)


def test_reports_of_a_day_are_counted_across_restarts(tmp_path, monkeypatch):
    plan = write_plan(tmp_path / "bundle", ALGORITHM, limits={"reports_per_day": 2, "min_examples": 1})
    midnight, data, statuses = time.time() // 86_400 * 86_400, bytes(plan.report_bytes), []
    now = midnight
    monkeypatch.setattr(devices.time, "time", lambda: now)
    token = issue_token(SECRET, "device-0", 7 * 86_400)
    for number, moment in enumerate((0, 1, 86_399, 86_400)):  # seconds after midnight
        now = midnight + moment
        api = DeviceApi(plan, SECRET)  # the coordinator is started again
        api.run, api.folder = "a run", tmp_path
        with contextlib.closing(api), contextlib.closing(Spool(tmp_path / f"spool-{number}", len(data))) as spool:
            api.open_round(OpenRound(number, bytes(16), b"broadcast", spool, 3, time.monotonic() + 60))
            path = f"/v1/rounds/{number}/reports/{api._ticket(number, 'device-0')}"
            statuses.append(Devices(api).call("PUT", path, data=data, token=token).status_code)
    assert statuses == [201, 201, 429, 201]
    (file,) = tmp_path.glob("*.counted")  # of one day only
    assert file.stat().st_size == 16


def test_numbers_that_are_not_finite_are_refused_in_open_reports(tmp_path):
    about = {"protocol": "open", "bits": 32, "helper": None, "least": 1}
    plan = write_plan(tmp_path, ALGORITHM, sum=about, vector={"length": 2, "dtype": "float32"})
    api = DeviceApi(plan, SECRET)
    api.run = "a run"
    http = Devices(api)
    with contextlib.closing(Spool(tmp_path / "spool", 8)) as spool:
        api.open_round(OpenRound(0, bytes(16), b"broadcast", spool, 3, time.monotonic() + 60))
        task = http.call("GET", "/v1/check-in").json()
        data = np.array([1, np.nan], "<f4").tobytes()
        assert refusal(http.call("PUT", path_of(task), data=data)) == (400, "not-finite")
        assert http.call("PUT", path_of(task), data=data[:4] * 2).status_code == 201


# ---- rounds ----


@contextlib.contextmanager
def helping(plan, folder):
    """Run a helper, and yield the coordinator's connection to it."""
    folder.mkdir(exist_ok=True)
    helper = Helper(read_served_plan(plan), HELPER, folder)
    api = HelperApi(helper, Verifier({public_bytes(COORDINATOR): "coordinator"}))
    with run_service(api, ("127.0.0.1", 0), None) as port, connect(port) as connection:
        yield connection


def connect(port, key=COORDINATOR):
    return contextlib.closing(Connection(f"http://127.0.0.1:{port}", key, None))


def start_of(algorithm=ALGORITHM, seed=1):
    params = jax.tree.map(np.asarray, algorithm.params(algorithm.init(jax.random.key(seed))))
    return device_rounds.Start(algorithm, params, lambda folder, params: fr.save_algorithm(folder, algorithm, params))


@contextlib.contextmanager
def training(api, folder, helper, **options):
    """Run the coordinator in a thread; yields a list that gets its result, or what it raised."""
    results = []

    def run():
        try:
            pace = Pace(**{"per_round": 4, "deadline": 30, "patience": 30} | options.pop("pace", {}))
            results.append(serve_devices(api, start_of(), fr.RunFolder(folder), helper, pace, seed=5, **options))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield results
    thread.join(60)
    assert results


def expected(cohorts, seed=5):
    """Return the parameters after rounds with these devices."""
    params = start_of().params
    model = ALGORITHM.model._replace(init_global=lambda key: params)
    state = dataclasses.replace(ALGORITHM, model=model).init(fr.kit.run_keys(seed).init)
    for number, names in enumerate(cohorts):
        vectors = [vector_of(name, number) for name in names]
        totals = [fr.privacy.from_vector(vector, total_shapes(ALGORITHM)) for vector in vectors]
        state = fr.kit.server_update(ALGORITHM, state, totals, fr.kit.round_key(seed, number))
    return ALGORITHM.params(state)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def assert_equal(params, expected):
    for left, right in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        np.testing.assert_array_equal(left, right)


def test_rounds_have_the_sum_of_their_reports(plan, tmp_path):
    api = DeviceApi(plan, SECRET)
    http, cohorts = Devices(api), [NAMES[:4], NAMES[3:7]]
    with (
        helping(tmp_path / "bundle", tmp_path / "helper") as helper,
        training(api, tmp_path / "run", helper) as results,
    ):
        for number, names in enumerate(cohorts):
            wait_until(lambda n=number: api._round is not None and api._round.number == n)
            assert [http.take_part(name) for name in names] == [201] * 4
    outcome = results[0]
    assert outcome.rounds == 2
    assert_equal(outcome.params, expected(cohorts))
    assert [(record["invited"], record["answered"], record["failed"]) for record in outcome.history] == [(4, 4, {})] * 2
    assert outcome.history[0]["bytes_received"] == 4 * plan.report_bytes
    assert_equal(device_rounds.open_start(tmp_path / "run", plan).params, outcome.params)
    assert not (tmp_path / "run" / device_rounds.SPOOL).exists()


class Nobody:
    """A connection to a helper that is not there; after three tries it is known not to come back."""

    server, tries = "nowhere", 0

    def post(self, path, data, most):
        self.tries += 1
        raise httpx.ConnectError("connection refused")

    def lasting(self, error):
        return "the helper is gone" if self.tries == 3 else None


def test_reports_outlive_a_coordinator_whose_helper_is_gone(plan, tmp_path):
    api, names = DeviceApi(plan, SECRET), NAMES[:4]
    http = Devices(api)
    with training(api, tmp_path / "run", Nobody()) as results:
        wait_until(lambda: api._round is not None)
        assert [http.take_part(name) for name in names] == [201] * 4
    assert isinstance(results[0], NotEnoughNodes)
    with helping(tmp_path / "bundle", tmp_path / "helper") as helper:
        api = DeviceApi(plan, SECRET)
        http = Devices(api)
        with training(api, tmp_path / "run", helper, resume=True) as results:
            wait_until(lambda: api._round is not None and api._round.number == 1)  # no device was asked again
            late = f"/v1/rounds/0/reports/{api._ticket(0, names[0])}"  # its device heard no answer before the restart
            assert http.call("PUT", late, names[0], bytes(plan.report_bytes)).status_code == 200
            assert [http.take_part(name) for name in names] == [201] * 4
    assert_equal(results[0].params, expected([names, names]))


def test_reports_that_a_full_disk_lost_are_asked_for_again(plan, tmp_path):
    api, names = DeviceApi(plan, SECRET), NAMES[:4]
    with training(api, tmp_path / "run", Nobody()) as results:
        wait_until(lambda: api._round is not None)
        assert [Devices(api).take_part(name) for name in names] == [201] * 4
    assert isinstance(results[0], NotEnoughNodes)
    (tmp_path / "run" / device_rounds.SPOOL).write_bytes(b"")
    api = DeviceApi(plan, SECRET)
    http = Devices(api)
    with (
        helping(tmp_path / "bundle", tmp_path / "helper") as helper,
        training(api, tmp_path / "run", helper, resume=True) as results,
    ):
        for number in range(2):
            wait_until(lambda n=number: api._round is not None and api._round.number == n)
            assert [http.take_part(name) for name in names] == [201] * 4
    assert_equal(results[0].params, expected([names, names]))


def test_a_round_does_not_continue_with_another_broadcast(plan, tmp_path):
    """What its devices have sent is bound to the first, so the helper would open none of it."""
    api = DeviceApi(plan, SECRET)
    with connect(1) as nobody, training(api, tmp_path / "run", nobody, pace={"patience": 0.1}) as results:
        pass
    assert isinstance(results[0], NotEnoughNodes)
    file = tmp_path / "run" / device_rounds.BATCH
    about = read_manifest(file, device_rounds.BATCH_FORMAT)
    write_manifest(file, device_rounds.BATCH_FORMAT, about | {"broadcast": "0" * 64})
    with connect(1) as nobody, training(api, tmp_path / "run", nobody, resume=True) as results:
        pass
    assert isinstance(results[0], StorageError)
    assert "has the broadcast 0000000000000000" in str(results[0])


def test_too_few_readable_reports_leave_the_round_open(plan, tmp_path):
    api, names = DeviceApi(plan, SECRET), NAMES[:5]
    http = Devices(api)
    with (
        helping(tmp_path / "bundle", tmp_path / "helper") as helper,
        training(api, tmp_path / "run", helper, pace={"per_round": 3}) as results,
    ):
        wait_until(lambda: api._round is not None)
        task = http.call("GET", "/v1/check-in", "liar").json()
        assert http.call("PUT", path_of(task), "liar", bytes(plan.report_bytes)).status_code == 201
        assert [http.take_part(name) for name in names[:2]] == [201] * 2
        wait_until(lambda: api._round is not None and api._round.closes_at == 4)  # two can be read, three are needed
        assert http.take_part(names[0]) == 204
        assert http.take_part(names[2]) == 201
        wait_until(lambda: api._round is not None and api._round.number == 1)
        assert [http.take_part(name) for name in names[2:]] == [201] * 3
    assert_equal(results[0].params, expected([names[:3], names[2:]]))
    assert results[0].history[0]["failed"] == {"unreadable": 1}


class SlowHelper(Helper):
    """A helper that needs longer to open seeds than the coordinator waits for an answer."""

    opened = 0

    def _open_once(self, parts, purpose):
        self.opened += 1
        time.sleep(0.7)
        return super()._open_once(parts, purpose)


def test_a_helper_that_takes_long_is_asked_again_and_adds_up_once(plan, tmp_path):
    (tmp_path / "helper").mkdir()
    helper, remarks = SlowHelper(read_served_plan(tmp_path / "bundle"), HELPER, tmp_path / "helper"), []
    service = HelperApi(helper, Verifier({public_bytes(COORDINATOR): "coordinator"}))
    api, cohorts = DeviceApi(plan, SECRET), [NAMES[:4], NAMES[3:7]]
    with (
        run_service(service, ("127.0.0.1", 0), None) as port,
        contextlib.closing(Connection(f"http://127.0.0.1:{port}", COORDINATOR, None, timeout=0.2)) as connection,
        training(api, tmp_path / "run", connection, say=remarks.append) as results,
    ):
        for number, names in enumerate(cohorts):
            wait_until(lambda n=number: api._round is not None and api._round.number == n)
            assert [Devices(api).take_part(name) for name in names] == [201] * 4
    assert_equal(results[0].params, expected(cohorts))
    assert helper.opened == 2  # once in each round, however often it was asked
    assert any("has not answered yet; trying again" in remark for remark in remarks)


def test_a_round_is_closed_at_its_deadline_if_there_are_enough(plan, tmp_path):
    api, names = DeviceApi(plan, SECRET), NAMES[:3]
    http = Devices(api)
    with (
        helping(tmp_path / "bundle", tmp_path / "helper") as helper,
        training(api, tmp_path / "run", helper, pace={"per_round": 100, "deadline": 0.3}) as results,
    ):
        for number in range(2):
            wait_until(lambda n=number: api._round is not None and api._round.number == n)
            assert [http.take_part(name) for name in names] == [201] * 3
    assert [record["answered"] for record in results[0].history] == [3, 3]


def test_another_algorithm_or_folder_is_refused(plan, tmp_path):
    pace, other = Pace(), start_of(algorithm_of(bits=20))
    api = DeviceApi(plan, SECRET)
    with pytest.raises(StorageError, match="the plan is for the algorithm"):
        serve_devices(api, other, fr.RunFolder(tmp_path / "run"), None, pace)
    with pytest.raises(ValueError, match="`helper` must be given"):
        serve_devices(api, start_of(), fr.RunFolder(tmp_path / "run"), None, pace)
    plan = write_plan(tmp_path / "recipe", ALGORITHM, aggregator=recipe_of(ALGORITHM.aggregator))
    with pytest.raises(ValueError, match=r"--per-round must be at most 50, .* \(got 51\)"):
        serve_devices(DeviceApi(plan, SECRET), start_of(), fr.RunFolder(tmp_path / "run"), None, Pace(51))
    for change in ({"rounds": 0}, {"limits": {}}, {"sum": {"protocol": "open"}}, {"format": "x"}, {"vector": None}):
        with pytest.raises(StorageError, match=r"plan\.json"):
            write_plan(tmp_path / "other", ALGORITHM, **change)


def test_training_begins_with_a_run_of_the_command_line(tmp_path):
    from device_models import default_model
    from fedrecon._src.recommend.saved_models import open_model

    saved, secure = default_model(), ALGORITHM.aggregator
    saved.save(tmp_path / "run" / "model")
    algorithm = saved.trainable(2, secure)
    plan = write_plan(tmp_path / "bundle", algorithm, aggregator=recipe_of(secure))
    start = device_rounds.open_start(tmp_path / "run", plan)
    assert fr.kit.digest(start.algorithm) == plan.algorithm
    start.save(folder=tmp_path / "after", params=jax.tree.map(lambda leaf: leaf + 1, start.params))
    assert_equal(open_model(tmp_path / "after").params, jax.tree.map(lambda leaf: leaf + 1, saved.params))


def test_only_the_registered_coordinator_asks_the_helper(plan, tmp_path):
    helper = Helper(read_served_plan(tmp_path / "bundle"), HELPER, tmp_path)
    api = HelperApi(helper, Verifier({public_bytes(COORDINATOR): "coordinator"}))
    http = TestClient(api.app, "https://helper", raise_server_exceptions=False)
    assert http.get("/v1/key").text == plan.helper.hex()
    assert refusal(http.post(f"/v1/rounds/0/batches/{'0' * 32}?run=a", content=b"")) == (401, "unsigned")
    with run_service(api, ("127.0.0.1", 0), None) as port:
        for key, path, message in [
            (Ed25519PrivateKey.generate(), f"/v1/rounds/0/batches/{'0' * 32}?run=a&broadcast={'0' * 64}", "key"),
            (COORDINATOR, f"/v1/rounds/0/batches/{'0' * 31}?run=a", "32 hexadecimal digits"),
            (COORDINATOR, f"/v1/rounds/0/batches/{'0' * 32}", "names the training"),
            (COORDINATOR, f"/v1/rounds/0/batches/{'0' * 32}?run=a&broadcast=x", "`broadcast` is the SHA-256"),
        ]:
            with connect(port, key) as connection, pytest.raises(Exception, match=message):
                connection.post(path, b"", 100)


HELPER_PROGRAM = """
import sys
from fedrecon.__main__ import main
code = main(sys.argv[1:])
print(code, sorted({"jax", "optax", "pyarrow", "scipy", "onnxruntime"} & set(sys.modules)))
"""


def test_a_helper_starts_without_jax(plan, tmp_path):
    """It is a small process of another operator, which knows nothing about models."""
    assert main(["keys", str(tmp_path / "helper-keys"), "--helper"]) == 0
    assert main(["keys", str(tmp_path / "keys"), "--nodes", "coordinator"]) == 0
    about = json.loads((tmp_path / "bundle" / "plan.json").read_text())
    about["sum"]["helper"] = (tmp_path / "helper-keys" / "helper.pub").read_text().strip()
    (tmp_path / "plan.json").write_text(json.dumps(about))
    words = ["helper", tmp_path / "plan.json", "--key", tmp_path / "helper-keys" / "helper.key", "--state", tmp_path]
    words += ["--coordinator", tmp_path / "keys" / "nodes" / "coordinator.pub", "--keys", tmp_path / "helper-keys"]
    command = [sys.executable, "-c", HELPER_PROGRAM, *map(str, words), "--listen", f"127.0.0.1:{free_port()}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert "sums of 3 reports or more" in process.stdout.readline()
        process.terminate()
        assert process.communicate(timeout=60)[0] == "0 []\n"


def test_what_is_not_a_helper_is_named(plan):
    with (
        run_service(DeviceApi(plan, SECRET), ("127.0.0.1", 0), None) as port,
        connect(port) as connection,
        pytest.raises(JoinError, match=f"127.0.0.1:{port} does not answer like a helper"),
    ):
        connection.post(f"/v1/rounds/0/batches/{'0' * 32}?run=a&broadcast={'0' * 64}", b"", 100)
    with pytest.raises(JoinError, match=r"--devices\.helper must be a URL with a port"):
        parse_server("helper", False, "--devices.helper")


def test_what_devices_do_not_send_is_zero_in_the_sum(plan):
    shorter = dataclasses.replace(plan, left_out=((1, 2), (5, 1)))
    assert shorter.complete(np.uint32([1, 2, 3, 4])).tolist() == [1, 0, 0, 2, 3, 0, 4]


# ---- slow connections ----


def upload_slowly(port, head, length, seconds=0.4, pieces=20):
    """Send a body piece by piece, and return all that the server answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{head}\r\nHost: server\r\nContent-Length: {length}\r\n\r\n".encode())
        for _ in range(pieces):
            time.sleep(seconds / pieces)
            connection.sendall(bytes(length // pieces))
        connection.sendall(bytes(length % pieces))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
        return answer


@pytest.mark.parametrize(
    ("token", "number", "status", "problem"),
    [("", 0, 401, "no-token"), (None, 1, 404, "forged"), (None, 0, 410, "expired")],
)
def test_who_sends_slowly_sees_why_a_report_is_refused(tmp_path, token, number, status, problem):
    plan = write_plan(tmp_path / "bundle", ALGORITHM, vector={"length": 100_000, "dtype": "uint32"})
    api = DeviceApi(plan, SECRET)
    api.run, api.done = "a run", 1
    token = issue_token(SECRET, "phone") if token is None else token
    head = f"PUT /v1/rounds/{number}/reports/{api._ticket(0, 'phone')} HTTP/1.1\r\nAuthorization: Bearer {token}"
    with run_service(api, ("127.0.0.1", 0), None) as port:
        answer = upload_slowly(port, head, plan.report_bytes)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == f"urn:fedrecon:{problem}"


def test_what_is_too_large_is_refused_without_being_read(plan):
    api = DeviceApi(plan, SECRET)
    api.run, api.done = "a run", 0
    token = issue_token(SECRET, "phone")
    head = f"PUT /v1/rounds/0/reports/{api._ticket(0, 'phone')} HTTP/1.1\r\nAuthorization: Bearer {token}"
    with run_service(api, ("127.0.0.1", 0), None) as port, pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
        upload_slowly(port, head, 10**8, pieces=50)


# ---- noise ----


def noised_algorithm(least):
    return algorithm_of(noise=fr.aggregators.ClientNoise(2.0, per_round=10, least=least, simulated=False))


def write_noised_plan(folder, algorithm, **changes):
    share = algorithm.aggregator.share(total_shapes(algorithm).parts)
    noise = {"variance": share.variance, "least": share.least, "epsilon": 1.0, "delta": 1e-6} | changes
    return write_plan(folder, algorithm, noise=noise, aggregator=recipe_of(algorithm.aggregator))


def test_fewer_honest_devices_have_less_noise_than_was_promised():
    share = noised_algorithm(10).aggregator.share(total_shapes(ALGORITHM).parts)
    delta = 1e-6
    table = device_rounds.describe_noise(share, 5, 10, delta)
    assert list(table) == ["0", "0.1", "0.25", "0.5"]
    assert table["0"] == pytest.approx(fr.privacy.epsilon_of([share.release(1.0, 5)], delta))  # as promised
    # With half of the noise's variance, noise 2 is noise 2 / sqrt(2).
    half = share._replace(noise_multiplier=2.0 / math.sqrt(2)).release(1.0, 5)
    assert table["0.5"] == pytest.approx(fr.privacy.epsilon_of([half], delta))
    assert list(table.values()) == sorted(table.values())
    more = device_rounds.describe_noise(share, 5, 20, delta)  # twice as many as were needed: half of them may lie
    assert more["0.5"] == pytest.approx(table["0"])


@pytest.mark.parametrize(
    ("least", "noise", "reports", "message"),
    [
        (LEAST + 1, {}, None, "`least` of the plan is 3; the noise is promised for 4"),
        (LEAST, {"variance": 1.0}, None, "is not that of the algorithm"),
        (LEAST, {}, 6, r"--per-round must be 10, by which the plan divides .* \(got 6\)"),
    ],
)
def test_sums_with_other_noise_than_promised_are_refused_before_training(tmp_path, least, noise, reports, message):
    algorithm = noised_algorithm(least)
    plan, folder = write_noised_plan(tmp_path / "bundle", algorithm, **noise), fr.RunFolder(tmp_path / "run")
    with connect(1) as nobody, pytest.raises(ValueError, match=message):
        serve_devices(DeviceApi(plan, SECRET), start_of(algorithm), folder, nobody, Pace(reports, patience=1))


def test_what_the_noise_promises_is_said_and_saved(tmp_path):
    algorithm, remarks = noised_algorithm(LEAST), []
    plan, pace = write_noised_plan(tmp_path / "bundle", algorithm), Pace(patience=0.1)
    folder = fr.RunFolder(tmp_path / "run")
    with connect(1) as nobody, pytest.raises(NotEnoughNodes):
        serve_devices(DeviceApi(plan, SECRET), start_of(algorithm), folder, nobody, pace, say=remarks.append)
    saved = folder.description()["noise"]
    assert (saved["least"], saved["delta"]) == (LEAST, 1e-6)
    assert saved["liars"]["3"]["0"] == pytest.approx(saved["epsilon"])  # as few as a sum may have
    assert saved["liars"]["10"]["0.5"] < saved["epsilon"] < saved["liars"]["3"]["0.1"]  # of ten, five are enough
    assert any("at least 3 reports of every sum are honest" in remark for remark in remarks)
    assert f"epsilon if a share of 3 reports adds no noise: {saved['epsilon']:.3g} (0%)" in "\n".join(remarks)


def test_the_noise_in_a_sum_has_the_promised_variance_and_is_counted(tmp_path):
    """Devices add their shares to zeros, so that the step of the server is the noise alone."""
    algorithm = noised_algorithm(LEAST)
    share = algorithm.aggregator.share(total_shapes(algorithm).parts)
    plan, length = write_noised_plan(tmp_path / "bundle", algorithm), share.length
    sums = []
    for _ in range(400):
        reports = [add_noise(np.zeros(length, np.uint32), plan.noise.variance) for _ in range(LEAST)]
        total = np.sum(reports, 0, dtype=np.uint32)
        sums.append(total.astype(np.int32) * share.grid.step)
    # In units of the clipping norm (1), plus what rounding may add to a report.
    expected = 2.0 * share.steps * share.grid.step
    noise = np.concatenate(sums)
    assert np.std(noise) == pytest.approx(expected, rel=6 / math.sqrt(2 * noise.size))
    assert abs(np.mean(noise)) < 6 * expected / math.sqrt(noise.size)
    assert 2.0 <= expected < 2.01
