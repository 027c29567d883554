"""A real deployment on loopback, with TLS and keys: everything is killed once, and the numbers stay the same."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from deployed import ITEMS, Processes, files_of, simulated
from fedrecon.app.saved import open_model
from fedrecon.deploy.demo import free_port
from fedrecon.deploy.plan import Plan

pytest.importorskip("flwr", reason="the extra `deploy` is not installed", exc_type=ImportError)
ROUNDS, LONGEST = 14, 420


@pytest.fixture
def processes(tmp_path):
    found = Processes(tmp_path)
    yield found
    found.end()


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            if int(text.rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def rounds_of(run):
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [record["round"] for record in map(json.loads, lines) if record["kind"] == "round"]


def wait_for(condition, process, folder):
    end = time.monotonic() + LONGEST
    while not condition():
        log = (folder / "server.log").read_text()
        assert process.poll() is None, log
        assert time.monotonic() < end, log
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds Flower's process in /proc")
def test_everything_is_killed_and_every_user_counts_once_in_every_round(tmp_path, processes):
    """All three nodes are needed for a round, so parameters are those of the simulation or somebody was not counted."""
    union, parts = files_of(tmp_path)
    (tmp_path / "items.csv").write_text("item\n" + "\n".join(str(100 + k) for k in range(ITEMS)) + "\n")
    keys, plan, run = tmp_path / "keys", tmp_path / "plan", tmp_path / "run"
    settings = [
        "--preset",
        "paper",
        "--model.dim",
        "3",
        "--data.max-examples",
        "10",
        "--reconstruct.solver",
        "least-squares",
    ]
    for words in (
        ("keys", keys, "--nodes", "n0", "n1", "n2", "stranger"),
        (
            "plan",
            "--items",
            tmp_path / "items.csv",
            "--out",
            plan,
            *settings,
            "--rounds",
            ROUNDS,
            "--evaluate-every",
            0,
        ),
    ):
        assert processes.start("made", *words).wait(120) == 0
    (keys / "nodes" / "stranger.pub").unlink()
    address = f"127.0.0.1:{free_port()}"
    digest = Plan.open(plan).digest

    def node(name, file):
        own = ("--ca", keys / "ca.crt", "--key", keys / "nodes" / f"{name}.key")
        return processes.start(name, "node", file, "--server", address, *own, "--accept", digest, "--once")

    def server(*more):
        pace = ("--min-nodes", 3, "--deadline", 30, "--wait", 300)
        return processes.start(
            "server", "server", plan, "--out", run, "--listen", address, "--keys", keys, *pace, *more
        )

    serving = server()
    nodes = [node(f"n{k}", part) for k, part in enumerate(parts)]
    stranger = node("stranger", parts[0])

    wait_for(lambda: len(rounds_of(run)) >= 3, serving, tmp_path)
    processes.kill(nodes[1])
    nodes[1] = node("n1", parts[1])

    wait_for(lambda: len(rounds_of(run)) >= 6, serving, tmp_path)
    (link,) = children_of(serving.pid)
    os.kill(link, signal.SIGKILL)

    wait_for(lambda: len(rounds_of(run)) >= 9, serving, tmp_path)
    processes.kill(serving)
    serving = server("--resume")

    wait_for(lambda: len(rounds_of(run)) >= ROUNDS, serving, tmp_path)
    assert serving.wait(LONGEST) == 0, (tmp_path / "server.log").read_text()
    assert rounds_of(run) == list(range(1, ROUNDS + 1))
    expected = simulated(Plan.open(plan), union)[0].params
    for a, b in zip(jax.tree.leaves(open_model(run).params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 2e-6, 2e-6)
    assert "joined" not in (tmp_path / "stranger.log").read_text()
    assert "connected" not in (tmp_path / "stranger.log").read_text()
    processes.kill(stranger)
