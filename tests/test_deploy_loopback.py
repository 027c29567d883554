"""A real deployment on loopback, with TLS and keys: everything is killed once, and the numbers stay the same."""

import contextlib
import json
import os
import signal
import socket
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from deployed import ITEMS, Processes, files_of, simulated
from fedrecon._src.app.saved import open_model
from fedrecon._src.deploy import flower, flower_server
from fedrecon._src.deploy.demo import free_port
from fedrecon._src.deploy.plan import Plan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Flower's own command line uses what click deprecates
    pytest.importorskip("flwr", reason="the extra `deploy` is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower uses
ROUNDS, LONGEST = 11, 420


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


class Deployment:
    """Three nodes and a server over TLS with registered keys, each a process of its own."""

    def __init__(self, folder, processes, rounds, *pace):
        self.folder, self.processes, self.pace = folder, processes, pace
        self.keys, self.plan, self.run = folder / "keys", folder / "plan", folder / "run"
        self.union, self.parts = files_of(folder)
        (folder / "items.csv").write_text("item\n" + "\n".join(str(100 + k) for k in range(ITEMS)) + "\n")
        settings = "--preset paper --model.dim 3 --data.max-examples 10 --reconstruct.solver least-squares"
        made = ("--items", folder / "items.csv", "--out", self.plan, "--rounds", rounds, "--evaluate-every", 0)
        for words in (
            ("keys", self.keys, "--nodes", "n0", "n1", "n2", "stranger"),
            ("plan", *made, *settings.split()),
        ):
            assert processes.start("made", *words).wait(120) == 0
        (self.keys / "nodes" / "stranger.pub").unlink()
        self.address, self.digest = f"127.0.0.1:{free_port()}", Plan.open(self.plan).digest
        self.start_server()
        self.nodes = [self.node(f"n{k}", part) for k, part in enumerate(self.parts)]

    def node(self, name, file, *more):
        own = ("--ca", self.keys / "ca.crt", "--key", self.keys / "nodes" / f"{name}.key", "--accept", self.digest)
        return self.processes.start(name, "node", file, "--server", self.address, *own, "--once", *more)

    def start_server(self, *more):
        own = ("--out", self.run, "--listen", self.address, "--keys", self.keys, *self.pace, *more)
        self.server = self.processes.start("server", "server", self.plan, *own)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, condition):
        end = time.monotonic() + LONGEST
        while not condition():
            assert self.server.poll() is None, self.log("server")
            for k, node in enumerate(self.nodes):
                assert node.poll() in (None, 0, -signal.SIGKILL), self.log(f"n{k}")
            assert time.monotonic() < end, self.log("server")
            time.sleep(0.1)

    def rounds(self):
        file = self.run / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [record for record in map(json.loads, lines) if record["kind"] == "round"]

    def wait_for_rounds(self, number):
        self.wait_for(lambda: len(self.rounds()) >= number)

    @contextlib.contextmanager
    def in_the_middle_of_a_round(self, stopped):
        """Stop a node, so that no round can end, wait until the others have trained for one, and let it go on."""
        os.kill(stopped.pid, signal.SIGSTOP)

        def others_wait():
            trained = f"round {len(self.rounds()) + 1}:"
            others = [f"n{k}" for k in range(3) if self.nodes[k] is not stopped]
            return all(trained in self.log(name) for name in others)

        try:
            self.wait_for(others_wait)
            before = len(self.rounds())
            yield
            assert len(self.rounds()) == before  # it was in the middle of one
        finally:
            os.kill(stopped.pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds Flower's process in /proc")
def test_everything_is_killed_within_a_round_and_every_user_counts_once_in_every_round(tmp_path, processes):
    """All three nodes are needed for a round, so parameters are those of the simulation or somebody was not counted."""
    pace = ("--min-nodes", 3, "--deadline", 20, "--wait", 300)
    run = Deployment(tmp_path, processes, ROUNDS, *pace)
    # With the file of another node, but not the folder in which that one remembers: only one process may have it.
    stranger = run.node("stranger", run.parts[0], "--state", tmp_path / "stranger")

    run.wait_for_rounds(2)
    with run.in_the_middle_of_a_round(run.nodes[1]):
        processes.kill(run.nodes[2])
    run.nodes[2] = run.node("n2", run.parts[2])

    run.wait_for_rounds(5)
    with run.in_the_middle_of_a_round(run.nodes[1]):
        (link,) = children_of(run.server.pid)
        os.kill(link, signal.SIGKILL)

    run.wait_for_rounds(8)
    with run.in_the_middle_of_a_round(run.nodes[1]):
        processes.kill(run.server)
    run.start_server("--resume")

    run.wait_for_rounds(ROUNDS)
    assert run.server.wait(LONGEST) == 0, run.log("server")
    assert [record["round"] for record in run.rounds()] == list(range(1, ROUNDS + 1))
    expected = simulated(Plan.open(run.plan), run.union)[0].params
    for a, b in zip(jax.tree.leaves(open_model(run.run).params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 2e-6, 2e-6)
    assert "joined" not in run.log("stranger")
    assert "connected" not in run.log("stranger")
    processes.kill(stranger)


@pytest.mark.slow
def test_a_node_that_hangs_costs_a_deadline_and_comes_back_when_it_wakes(tmp_path, processes):
    run = Deployment(tmp_path, processes, 500, "--min-nodes", 2, "--deadline", 6, "--wait", 300)
    run.wait_for(lambda: run.rounds() and run.rounds()[-1]["answered"] == 3)
    os.kill(run.nodes[0].pid, signal.SIGSTOP)
    since = len(run.rounds())
    run.wait_for(lambda: any(record["late"] for record in run.rounds()[since:]))
    late = next(record for record in run.rounds()[since:] if record["late"])
    assert (late["invited"], late["answered"], late["failed"]) == (3, 2, {})
    run.wait_for(lambda: run.rounds()[-1]["invited"] == 2)  # it is not invited for a while: no round waits for it
    os.kill(run.nodes[0].pid, signal.SIGCONT)
    since = len(run.rounds())
    run.wait_for(lambda: any(record["answered"] == 3 for record in run.rounds()[since:]))
    processes.kill(run.server, signal.SIGTERM)
    assert "to continue: fedrecon server" in run.log("server")


@pytest.mark.slow
def test_requests_of_any_size_and_kind_at_the_port_do_no_harm(tmp_path):
    """A real SuperLink refuses what says that it has 10 GB, cuts off what has no end, and does not mind garbage."""
    port = free_port()
    with flower_server.flower_grid(f"127.0.0.1:{port}", tmp_path, None, [], print, most=2**20) as grid:
        (link,) = children_of(os.getpid())

        def ask(*parts):
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 20) as there:
                with contextlib.suppress(ConnectionError):
                    for part in parts:
                        there.sendall(part)
                return there.recv(100)
            return b""

        path = b"POST /flwr.proto.Fleet/PushMessages HTTP/1.1\r\nHost: a\r\n"
        assert b" 413 " in ask(path + b"Content-Length: 10737418240\r\n\r\n", b"x" * 1000)
        before = memory_of(link)
        chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
        assert b" 200 " not in ask(path + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 200)
        assert memory_of(link) < before + 50_000  # kB, of the 200 MB that were sent
        assert b" 200 " not in ask(path + b"Content-Length: 100\r\n\r\n", os.urandom(100))
        ask(os.urandom(4096))
        assert grid.nodes() == []  # it still answers


@pytest.mark.slow
def test_a_node_that_dies_while_it_sends_holds_nobody_up(tmp_path, monkeypatch):
    """Flower lists a reply before all of it is there, and would wait hours for the rest."""
    monkeypatch.setattr(flower_server, "LONGEST_REPLY", 1.0)
    flower.quiet_flower()
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.supernode.fleet_http_connection import http_request_response

    address = f"127.0.0.1:{free_port()}"
    with (
        flower_server.flower_grid(address, tmp_path, None, [], print) as grid,
        http_request_response(address, True) as (number, receive, send, *_),
    ):
        ticket, found = grid.send(number, b"question", 60), None
        assert grid.poll([ticket]) == {}
        end = time.monotonic() + 60
        while found is None and time.monotonic() < end:
            found = receive()
        head, _ = found
        head.content = RecordDict()
        reply = Message(RecordDict({"fedrecon": ConfigRecord({"message": b"answer"})}), reply_to=head)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        send(reply, get_object_tree(reply), 0.1)  # and then nothing more
        replies = {}
        while not replies and time.monotonic() < end:
            replies = grid.poll([ticket])
        assert replies[ticket].data is None
        assert grid.nodes() == [number]


def memory_of(pid):
    """Return the kB that a process has in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
