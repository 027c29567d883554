"""Devices in JavaScript with a real coordinator and helper: the training is that of the simulator."""

import json
import re
import subprocess
import sys

import pytest

from deployed_devices import ROOT, RUNTIME, assert_equal, coordinating, make_bundle, ratings_of, run_node, simulate

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


def test_the_demonstration_runs(tmp_path):
    command = [sys.executable, "examples/devices/demo.py", "--small", "--out", str(tmp_path / "demo")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "devices in Python" in result.stdout
    assert "round 2: 5 reports" in result.stdout
    assert re.search(r"RMSE on unseen people: 0\.\d+ before, 0\.\d+ after 2 rounds", result.stdout)
