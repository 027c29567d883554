"""The ClientApp that stock SuperNodes run: the same answers as a resident node's, from a process for every message."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest

from deployed import config_of, deployed, files_of, grid_of, plan_of
from fedrecon.app.config import Data, Reconstruct
from fedrecon.deploy import InProcess
from fedrecon.deploy.messages import Envelope, pack, unpack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Flower's own command line uses what click deprecates
    pytest.importorskip("flwr", reason="the extra `deploy` is not installed", exc_type=ImportError)
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

from fedrecon.deploy.app import app
from fedrecon.deploy.flower import FIELD, RECORD, TYPE

CONFIG = config_of(
    reconstruct=Reconstruct(solver="least-squares", ridge=0.5),
    data=Data(source="", fractions=(1.0, 0.0, 0.0), max_examples=10),
    rounds=2,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def as_in_a_process_of_flower(monkeypatch):
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 7, raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "none")  # of the whole process: other tests are not to meet it


def super_node(file, plan, state):
    """Return a handler that makes Flower's messages, calls the ClientApp as a SuperNode does, and keeps its context."""
    told = {"fedrecon-file": str(file), "fedrecon-accept": plan.digest[:16], "fedrecon-state": str(state)}
    context = Context(1, 7, told, RecordDict(), {})

    def handle(data):
        content = RecordDict({RECORD: ConfigRecord({FIELD: data})})
        message = Message(content, dst_node_id=7, message_type=TYPE)
        return app(message, context).content[RECORD][FIELD]

    return handle


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
    with pytest.raises(ValueError, match="this SuperNode was not told its file: give --node-config"):
        app(Message(RecordDict(), dst_node_id=7, message_type=TYPE), Context(1, 7, {}, RecordDict(), {}))
