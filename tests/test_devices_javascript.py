"""Devices in JavaScript with a real coordinator and helper: the training is that of the simulator."""

import json
import math
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import fedrecon as fr
from deployed_devices import (
    HELPER,
    LEAST,
    MOST,
    ROOT,
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


def test_the_noise_of_devices_of_every_kind_is_what_was_promised(tmp_path):
    """The server's step is the mean and nothing else, so what differs from the simulation, without noise, is noise."""
    descend = fr.gradient_descent(fr.optimizers.sgd(0.2), batch_size=4, steps=5)
    settings = {"noise_multiplier": 0.5, "per_round": LEAST, "least": LEAST, "simulated_noise": False}
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(400, 4),
        reconstruct=descend,
        update=descend,
        server=fr.optimizers.sgd(1.0),
        aggregate=fr.aggregators.secure(1.0, clients=10, protocol="two-servers", bits=24, **settings),
    )
    params = algorithm.params(algorithm.init(jax.random.key(1)))
    terms = fr.device.DevicePlan(rounds=1, least=LEAST, helper=HELPER.public_key().public_bytes_raw().hex())
    people = {name: ratings_of(k) for k, name in enumerate(("ann", "bo", "cy"))}
    bundle = fr.device.bundle(algorithm, params, tmp_path / "b", like=people["cy"], most=MOST, train=terms)
    start = Start(algorithm, params, lambda folder, params: None)
    with coordinating(bundle, start, tmp_path, reports=None) as (server, results):
        device = Participant(bundle, server, tmp_path / "cy.json", token=issue_token(SECRET, "cy"))
        device.personal.add(people["cy"])
        device.personal.store.write(device.personal.stored() | {"participation": record_of("cy")})
        assert device.step().report["protected"].endswith("with noise from this device")
        process = run_node(bundle, server, {name: people[name] for name in ("ann", "bo")}, tmp_path)
    assert json.loads(process.stdout) == {"devices": 2, "reports": 2}, process.stderr
    assert "with noise from this device" in (tmp_path / "ann.json").read_text()
    before, exact = flatten(params)[0], flatten(simulate(bundle, start, people))[0]
    noise = np.concatenate([(leaf - exact[path]).ravel() for path, leaf in flatten(results[0].params)[0].items()])
    share = algorithm.aggregator.share(total_shapes(algorithm).parts)
    expected = 0.5 * share.steps * share.grid.step / LEAST
    assert np.std(noise) == pytest.approx(expected, rel=6 / math.sqrt(2 * noise.size))
    assert any(np.abs(leaf - before[path]).max() > 0 for path, leaf in exact.items())
    saved = fr.RunFolder(tmp_path / "run").description()["noise"]
    plan = json.loads((bundle / "plan.json").read_text())
    assert results[0].history[0]["epsilon"] == saved["epsilon"] == plan["noise"]["epsilon"]
    with pytest.raises(ParticipationError, match="sent the 1 reports that the plan's noise protects"):
        device.step()


def test_the_demonstration_runs(tmp_path):
    command = [sys.executable, "examples/devices/demo.py", "--small", "--out", str(tmp_path / "demo")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "devices in Python" in result.stdout
    assert "round 2: 5 reports" in result.stdout
    assert re.search(r"RMSE on unseen people: 0\.\d+ before, 0\.\d+ after 2 rounds", result.stdout)
