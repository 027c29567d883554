"""Devices in JavaScript with a real coordinator and helper: the training is that of the simulator."""

import json
import math
import re
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import fedrecon as fr
from deployed_devices import (
    HELPER,
    LEAST,
    MOST,
    ROOT,
    ROUNDS,
    RUNTIME,
    SECRET,
    assert_equal,
    coordinating,
    make_bundle,
    ratings_of,
    record_of,
    run_node,
    simulate,
)
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.deploy.device_rounds import Start
from fedrecon.deploy import issue_token
from fedrecon_device import Participant, ParticipationError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RUNTIME.is_dir(), reason="needs node and its packages: make test-web"),
]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("train") / "bundle")


def test_devices_of_node_train_as_the_simulator_does(bundled, tmp_path):
    bundle, start = bundled
    people = {name: ratings_of(k) for k, name in enumerate(("ann", "bo", "cy"))}
    with coordinating(bundle, start, tmp_path) as (server, results):
        process = run_node(bundle, server, people, tmp_path)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {"devices": 3, "reports": 6}
    assert_equal(results[0].params, simulate(bundle, start, people))
    record = json.loads((tmp_path / "bo.json").read_text())
    assert [(report["round"], report["status"]) for report in record["reports"]] == [(0, "sent"), (1, "sent")]
    assert len({report["bytes"] for report in record["reports"]}) == 1


def bundle_of(algorithm, folder, **terms):
    """Bundle an algorithm with fresh parameters; return the bundle and what training starts with."""
    params = jax.tree.map(np.asarray, algorithm.params(algorithm.init(jax.random.key(1))))
    helper = HELPER.public_key().public_bytes_raw().hex()
    terms = fr.device.DevicePlan(**{"least": LEAST, "helper": helper, "reports_per_day": 50} | terms)
    bundle = fr.device.bundle(algorithm, params, folder, like=ratings_of(2), most=MOST, train=terms)
    return bundle, Start(algorithm, params, lambda folder, params: None)


def descend():
    return fr.gradient_descent(fr.optimizers.sgd(0.2), batch_size=4, steps=5)


def train_on_both(bundle, start, folder):
    """Train over one device in Python and two in node; return the people, the result and the device."""
    people = {name: ratings_of(k) for k, name in enumerate(("ann", "bo", "cy"))}
    with coordinating(bundle, start, folder, reports=None) as (server, results):
        device = Participant(bundle, server, folder / "cy.json", token=issue_token(SECRET, "cy"))
        device.personal.add(people["cy"])
        device.personal.store.write(device.personal.stored() | {"participation": record_of("cy")})
        rounds = device.trainer.plan["rounds"]
        thread = threading.Thread(
            # No more than a request per second, or the coordinator refuses some while node still starts.
            target=device.run,
            args=[lambda: len(device.reports()) == rounds, lambda seconds: time.sleep(min(seconds, 1.0))],
        )
        thread.start()
        process = run_node(bundle, server, {name: people[name] for name in ("ann", "bo")}, folder)
        thread.join(180)
    assert process.returncode == 0, process.stderr
    return people, results[0], device


def test_the_noise_of_devices_of_every_kind_is_what_was_promised(tmp_path):
    """The server's step is the mean and nothing else, so what differs from the simulation, without noise, is noise."""
    noise = fr.aggregators.ClientNoise(0.5, per_round=LEAST, least=LEAST, simulated=False)
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(400, 4),
        reconstruct=descend(),
        update=descend(),
        server=fr.optimizers.sgd(1.0),
        aggregate=fr.aggregators.secure(1.0, clients=10, protocol="two-servers", bits=24, noise=noise),
    )
    bundle, start = bundle_of(algorithm, tmp_path / "b", rounds=1)
    people, outcome, device = train_on_both(bundle, start, tmp_path)
    for name in ("ann", "cy"):
        assert "with noise from this device" in (tmp_path / f"{name}.json").read_text()
    before, exact = flatten(start.params)[0], flatten(simulate(bundle, start, people))[0]
    noise = np.concatenate([(leaf - exact[path]).ravel() for path, leaf in flatten(outcome.params)[0].items()])
    share = algorithm.aggregator.share(total_shapes(algorithm).parts)
    expected = 0.5 * share.steps * share.grid.step / LEAST
    assert np.std(noise) == pytest.approx(expected, rel=6 / math.sqrt(2 * noise.size))
    assert any(np.abs(leaf - before[path]).max() > 0 for path, leaf in exact.items())
    saved = fr.RunFolder(tmp_path / "run").description()["noise"]
    plan = json.loads((bundle / "plan.json").read_text())
    assert outcome.history[0]["epsilon"] == saved["epsilon"] == plan["noise"]["epsilon"]
    with pytest.raises(ParticipationError, match="sent the 1 reports that the plan's noise protects"):
        device.step()


def test_what_a_method_keeps_on_a_client_is_in_its_owners_file_and_used_in_the_next_round(tmp_path):
    """FedPer: the person's embedding is never sent, and continues from round to round."""
    algorithm = fr.federated_averaging(
        fr.models.matrix_factorization(400, 4),
        update=descend(),
        reconstruct=descend(),
        server=fr.optimizers.sgd(1.0),
        aggregate=fr.aggregators.secure(5.0, clients=10, max_weight=100, protocol="two-servers", bits=24),
    )
    bundle, start = bundle_of(algorithm, tmp_path / "b", rounds=ROUNDS)
    people, outcome, device = train_on_both(bundle, start, tmp_path)
    assert_equal(outcome.params, simulate(bundle, start, people, states := {}))
    stored = device.personal.stored()["participation"]["state"]
    record = json.loads((tmp_path / "bo.json").read_text())["state"]
    assert set(stored) == set(record) == {"user_embedding"}
    np.testing.assert_allclose(stored["user_embedding"], states["cy"]["user_embedding"], atol=1e-5)
    np.testing.assert_allclose(record["user_embedding"]["data"], states["bo"]["user_embedding"], atol=1e-5)


def test_the_demonstration_runs(tmp_path):
    command = [sys.executable, "examples/devices/demo.py", "--small", "--out", str(tmp_path / "demo")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "devices in Python" in result.stdout
    assert "round 2: 5 reports" in result.stdout
    assert re.search(r"RMSE on unseen people: 0\.\d+ before, 0\.\d+ after 2 rounds", result.stdout)
