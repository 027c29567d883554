"""Flower through its public API: gateways and silos behind stock SuperNodes give what nodes in one process give.

The slow ones need Flower's programs, on the PATH or in the folder that FEDRECON_FLOWER_BIN names; a virtualenv with
flwr alone will do.
"""

import itertools
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deployed import Processes, config_of, deployed, files_of, free_port, grid_of, node_of, plan_of
from fedrecon._src.app.cli import serve
from fedrecon._src.deploy.transport import answer_socket
from fedrecon._src.recommend.config import Reconstruct
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.storage.run_folder import RunFolder
from fedrecon.deploy import Connection, run_node

FOLDER = Path(__file__).parent.parent / "examples" / "flower"
PROGRAM = shutil.which("flower-superlink", path=os.environ.get("FEDRECON_FLOWER_BIN") or None)
needs_flower = pytest.mark.skipif(PROGRAM is None, reason="needs Flower: pip install 'fedrecon[flower]'")
LONGEST = 400  # seconds


def test_code_that_knows_flower_is_short_and_imports_only_flower_and_the_standard_library():
    files = [*FOLDER.glob("*.py"), *FOLDER.glob("fedrecon_flower/*.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) < 200
    modules = {
        line.split()[1].split(".")[0]
        for file in files
        for line in file.read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
    assert modules - set(sys.stdlib_module_names) == {"flwr"}


def test_every_socket_of_the_compose_file_is_shared_by_the_two_that_use_it():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        if service["image"] == "fedrecon-flower" and "entrypoint" not in service:
            serve.parse(shlex.split(service["command"])[1:])
        assert set(service.get("depends_on", ())) <= set(services), name
        for option, value in itertools.pairwise(shlex.split(service.get("command", ""))):
            if option in ("--node-config", "--run-config"):
                assert tomllib.loads(value)["socket"].startswith("/sockets/")
    pairs = {"grid": ("superlink", "coordinator"), "gateway0": ("gateway0", "supernode0")}
    pairs["gateway1"] = ("gateway1", "supernode1")
    for volume, (one, other) in pairs.items():
        users = [name for name, service in services.items() if f"{volume}:/sockets" in service.get("volumes", ())]
        assert sorted(users) == sorted((one, other))
    balanced = re.findall(r"server (\w+):8000;", (FOLDER / "nginx.conf").read_text())
    assert balanced == [name for name in services if name.startswith("gateway")]


def test_every_container_of_the_kubernetes_file_has_its_command_its_volumes_and_limits():
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    kinds = [(document["apiVersion"], document["kind"], document["metadata"]["name"]) for document in documents]
    assert kinds == [
        ("v1", "Service", "gateways"),
        ("v1", "Service", "superlink"),
        ("apps/v1", "StatefulSet", "gateway"),
        ("apps/v1", "StatefulSet", "coordinator"),
    ]
    labels = {document["spec"]["template"]["metadata"]["labels"]["app"] for document in documents[2:]}
    assert {document["spec"]["selector"]["app"] for document in documents[:2]} == labels
    for document in documents[2:]:
        pod = document["spec"]["template"]["spec"]
        claims = [claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())]
        volumes = {*claims, *(volume["name"] for volume in pod["volumes"])}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert "memory" in container["resources"]["limits"]
            if "command" not in container:
                serve.parse(container["args"][1:])


starting = runpy.run_path(str(FOLDER.parent / "deploy" / "gateways.py"))


@pytest.fixture
def flower(tmp_path):
    """Start Flower for some sockets; stop it after the test."""
    starter, started = starting["load_starter"](), []

    def start(sockets, coordinator=""):
        bin_folder = Path(PROGRAM).parent
        started.extend(starter.start(tmp_path / "flower", bin_folder, tmp_path / "grid.sock", sockets, coordinator))
        return tmp_path / "grid.sock"

    yield start
    starter.stop(started)


@pytest.fixture
def processes(tmp_path):
    processes = Processes(tmp_path)
    yield processes
    processes.end()


def quick_plan(**options):
    return plan_of(config_of(reconstruct=Reconstruct(solver="least-squares", ridge=0.5), evaluate_every=0, **options))


def in_thread(work, *arguments, **options):
    threading.Thread(target=work, args=arguments, kwargs=options, daemon=True).start()


def wait_for(condition, log):
    end = time.monotonic() + LONGEST
    while not condition() and time.monotonic() < end:
        time.sleep(0.5)
    assert condition(), log.read_text()[-3000:] if log.exists() else "no log"


def rounds_of(run):
    return [record for record in run.records() if record["kind"] == "round"]


def assert_same(folder, direct):
    for ours, theirs in zip(jax.tree.leaves(open_model(folder).params), jax.tree.leaves(direct.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@needs_flower
@pytest.mark.slow
def test_stock_supernodes_with_silos_give_what_nodes_in_one_process_give(flower, tmp_path):
    """`flwr run` starts the coordinator, too."""
    plan, parts = quick_plan(), files_of(tmp_path, nodes=2)[1]
    plan.save(tmp_path / "plan")
    direct = deployed(plan, grid_of(parts), tmp_path / "direct")
    sockets = [tmp_path / f"silo{k}.sock" for k in range(2)]
    handlers = [node_of(part).handle for part in parts]
    for k, socket in enumerate(sockets):
        in_thread(answer_socket, socket, lambda data, seconds, k=k: handlers[k](data), lambda: 2**24, lambda: False)
    run = tmp_path / "run"
    command = f"{sys.executable} -m fedrecon serve {tmp_path}/plan --out {run} --min-nodes 2 --deadline 120"
    flower(sockets, command)
    wait_for(lambda: (run / "model").exists(), tmp_path / "flower" / "superlink.log")
    assert_same(run, direct)


@needs_flower
@pytest.mark.slow
def test_gateways_over_flower_and_one_that_is_killed(flower, processes, tmp_path):
    parts = files_of(tmp_path, nodes=4)[1]
    everybody = deployed(quick_plan(rounds=1), grid_of(parts), tmp_path / "direct").history[0]["clients"]
    quick_plan(rounds=1_000_000).save(tmp_path / "plan")
    sockets, ports = [tmp_path / f"gateway{k}.sock" for k in range(2)], [free_port() for _ in range(2)]

    def start_gateway(k):
        # Both clients of a gateway must be there: they come back one after the other.
        processes.all.append(starting["start_gateway"](tmp_path / "plan", tmp_path, k, ports[k], min_nodes=2))
        return processes.all[-1]

    gateways = [start_gateway(k) for k in range(2)]
    for k, part in enumerate(parts):
        connection = Connection(f"http://127.0.0.1:{ports[k % 2]}", Ed25519PrivateKey.generate(), None)
        in_thread(run_node, connection, node_of(part).handle, max_bytes=lambda: 2**24)
    wait_for(lambda: all(socket.exists() for socket in sockets), tmp_path / "gateway0.log")
    grid, run = flower(sockets), RunFolder(tmp_path / "run")
    pace = ("--min-nodes", 1, "--deadline", 60, "--per-round", 2, "--oversample", 1)
    server = processes.start("server", "serve", tmp_path / "plan", "--flower", grid, "--out", run.path, *pace)

    def rounds():
        return [record for record in run.records() if record["kind"] == "round"]

    def wait_for_answers(count):
        since = len(rounds())
        wait_for(lambda: any(record["answered"] == count for record in rounds()[since:]), tmp_path / "server.log")

    wait_for_answers(2)
    processes.kill(gateways[1])
    wait_for_answers(1)
    start_gateway(1)
    wait_for_answers(2)
    processes.kill(server, signal.SIGTERM)
    assert (run.path / "model").exists()
    assert [record["round"] for record in rounds()] == [k + 1 for k in range(len(rounds()))]
    for record in rounds():
        assert record["clients"] == everybody if record["answered"] == 2 else record["clients"] < everybody
