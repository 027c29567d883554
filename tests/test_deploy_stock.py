"""The ClientApp that stock SuperNodes run: the same answers as a resident node's, from a process for every message."""

import dataclasses
import datetime
import importlib.metadata
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from deployed import Processes, config_of, deployed, files_of, grid_of, node_of, plan_of
from fedrecon._src.app.config import Data, Reconstruct
from fedrecon._src.deploy import certificates, flower
from fedrecon._src.deploy.demo import free_port
from fedrecon._src.deploy.messages import Envelope, pack, unpack
from fedrecon.deploy import InProcess, Pace, serve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Flower's own command line uses what click deprecates
    pytest.importorskip("flwr", reason="the extra `deploy` is not installed", exc_type=ImportError)
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

from fedrecon._src.deploy.app import app
from fedrecon._src.deploy.flower import FIELD, RECORD, TYPE
from fedrecon._src.deploy.flower_server import flower_grid
from fedrecon._src.deploy.superlink import OFFLINE, FlowerError, Tls
from fedrecon._src.storage.run_folders import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower uses
CONFIG = config_of(
    reconstruct=Reconstruct(solver="least-squares", ridge=0.5),
    data=Data(source="", fractions=(1.0, 0.0, 0.0), max_examples=10),
    rounds=2,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def as_in_a_process_of_flower(monkeypatch, tmp_path):
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 7, raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))  # of this test alone


def super_node(file, plan, state):
    """Return a handler that makes Flower's messages, calls the ClientApp as a SuperNode does, and keeps its context."""
    told = {"fedrecon-file": str(file), "fedrecon-accept": plan.digest[:16], "fedrecon-state": str(state)}
    context = Context(1, 7, told, RecordDict(), {})

    def handle(data):
        content = RecordDict({RECORD: ConfigRecord({FIELD: data})})
        message = Message(content, dst_node_id=7, message_type=TYPE)
        return app(message, context).content[RECORD][FIELD]

    return handle


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_client_app_gives_what_a_resident_node_gives(secure, files, tmp_path):
    plan = plan_of(CONFIG, secure=secure, least_nodes=2)
    stock = InProcess({k: super_node(part, plan, tmp_path / f"n{k}") for k, part in enumerate(files[1])})
    found = deployed(plan, stock, tmp_path / "stock")
    expected = deployed(plan, grid_of(files[1]), tmp_path / "resident")
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-6)
    assert [record["answered"] for record in found.history] == [3, 3]


def test_a_client_app_accepts_the_plan_that_its_operator_named_and_no_other(files, tmp_path):
    plan, other = plan_of(CONFIG), plan_of(dataclasses.replace(CONFIG, seed=9))
    handle = super_node(files[1][0], other, tmp_path / "n")
    reply = unpack(handle(pack(Envelope("join", plan.digest, "run", 0, {}, plan.content))), 2**20)
    assert reply.facts["reason"] == "not_accepted"


def test_a_client_app_that_was_told_nothing_says_what_to_tell_it(monkeypatch):
    monkeypatch.delenv("FEDRECON_FILE", raising=False)
    with pytest.raises(ValueError, match="this SuperNode's fedrecon-file is not set: give --node-config"):
        app(Message(RecordDict(), dst_node_id=7, message_type=TYPE), Context(1, 7, {}, RecordDict(), {}))


# ---- over the network ----


@pytest.fixture
def processes(tmp_path):
    found = Processes(tmp_path)
    yield found
    found.end()


def keys_of(folder, *names):
    certificates.make_authority(folder)
    certificates.make_server(folder, ())
    for name in names:
        certificates.make_node(folder / "nodes", name)
    return Tls(folder / "server.crt", folder / "server.key", folder / "ca.crt")


@pytest.mark.slow
def test_a_stock_super_node_and_a_resident_one_train_together(files, tmp_path, processes):
    """Over TLS with registered keys; Flower's own program runs the ClientApp, and the server sends no code."""
    plan = plan_of(dataclasses.replace(CONFIG, rounds=1))
    tls, address = keys_of(tmp_path / "keys", "stock", "resident"), f"127.0.0.1:{free_port()}"
    keys = tmp_path / "keys" / "nodes"
    told = f'fedrecon-file="{files[1][0]}" fedrecon-accept="{plan.digest}" fedrecon-state="{tmp_path / "state"}"'
    program = Path(sys.executable).with_name("flower-supernode")
    command = [program, "--superlink", address, "--root-certificates", tls.authority, "--port", free_port()]
    command += ["--auth-supernode-private-key", keys / "stock.key", "--node-config", told]
    offline = {**OFFLINE, "FLWR_HOME": str(tmp_path / "home"), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    offline["PATH"] = os.pathsep.join((str(program.parent), os.environ["PATH"]))  # a SuperNode starts others by name
    with flower_grid(address, tmp_path / "flower", tls, list(keys.glob("*.pub")), print) as grid:
        processes.launch("stock", list(map(str, command)), **offline)
        own = ("--ca", tls.authority, "--key", keys / "resident.key", "--accept", plan.digest, "--once")
        processes.start("resident", "node", files[1][1], "--server", address, *own)
        pace = Pace(min_nodes=2, deadline=200, patience=300)
        outcome = serve(plan, grid, RunFolder(tmp_path / "run"), pace)
    both = InProcess({k: node_of(files[1][k]).handle for k in range(2)})
    expected = deployed(plan, both, tmp_path / "expected")
    for a, b in zip(jax.tree.leaves(outcome.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-6)
    assert outcome.history[0]["answered"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "refused"), [(600, True), (-600, True), (-200, False)])
def test_flower_refuses_a_node_whose_clock_is_far_off_and_the_node_says_why(seconds, refused, tmp_path, monkeypatch):
    """It allows 5 s ahead and 300 s behind: what a node signs is the time."""
    from flwr.supernode import node_auth_http_interceptor as interceptor

    tls, address = keys_of(tmp_path / "keys", "late"), f"127.0.0.1:{free_port()}"
    right = interceptor.now
    monkeypatch.setattr(interceptor, "now", lambda: right() + datetime.timedelta(seconds=seconds))
    monkeypatch.setattr(flower, "PATIENCE", 0.0)
    key, said = tmp_path / "keys" / "nodes" / "late.key", []
    with flower_grid(address, tmp_path / "flower", tls, [key.with_suffix(".pub")], print):
        options = {"authority": tls.authority, "key": key, "say": said.append}
        if refused:
            with pytest.raises(FlowerError, match="Is this machine's clock right"):
                flower.run_node(address, bytes, **options)
        else:
            flower.run_node(address, bytes, stop=lambda: len(said) > 1, **options)
            assert said[1].startswith("connected")


@pytest.mark.slow
@pytest.mark.skipif(importlib.metadata.version("flwr").startswith("1.42"), reason="the environment has flwr 1.42")
def test_all_of_this_works_with_the_next_version_of_flower(tmp_path):
    """The tests of this file and of Flower's names again, with flwr 1.42 instead of the one that is installed."""
    target = tmp_path / "flwr-1.42"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), "flwr==1.42.0"]
    if subprocess.run(install, capture_output=True).returncode:
        pytest.skip("flwr 1.42.0 cannot be installed here: no package index is reachable")
    here, source = Path(__file__).parent, Path(flower.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (target, source, here)))}
    chosen = "client_app or stock_super_node or every_name or connection"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    command += [str(here / name) for name in ("test_deploy_stock.py", "test_deploy_flower.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here.parent)
    assert found.returncode == 0, found.stdout[-4000:]
    version = [sys.executable, "-W", "ignore", "-c", "import flwr; print(flwr.__version__)"]
    assert subprocess.run(version, env=environment, capture_output=True, text=True).stdout.strip() == "1.42.0"
