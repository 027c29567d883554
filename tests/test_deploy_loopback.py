"""A real deployment on loopback, with TLS and keys: everything is killed once, and the numbers stay the same."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deployed import ITEMS, Processes, config_of, files_of, free_port, node_of, plan_of, simulated
from fedrecon._src.deploy import certificates, http_client, tasks
from fedrecon._src.deploy.admission import read_private_key, read_registry
from fedrecon._src.deploy.http_client import Connection, JoinError, parse_server, run_node
from fedrecon._src.deploy.http_server import Limits, Tls
from fedrecon._src.deploy.messages import Envelope, unpack
from fedrecon._src.deploy.tasks import serve_tasks
from fedrecon._src.deploy.transport import Channel
from fedrecon._src.recommend.saved_models import open_model
from fedrecon.deploy import Plan

ROUNDS, LONGEST = 8, 420


@pytest.fixture
def processes(tmp_path):
    found = Processes(tmp_path)
    yield found
    found.end()


class Deployment:
    """A server over TLS with registered keys, and nodes; each a process of its own."""

    def __init__(self, folder, processes, rounds, *pace):
        self.folder, self.processes, self.pace, self.nodes = folder, processes, pace, {}
        self.keys, self.plan, self.run = folder / "keys", folder / "plan", folder / "run"
        self.union, self.parts = files_of(folder)
        (folder / "items.csv").write_text("item\n" + "\n".join(str(100 + k) for k in range(ITEMS)) + "\n")
        settings = "--preset paper --model.dim 3 --data.max-examples 10 --reconstruct.solver least-squares"
        made = ("--items", folder / "items.csv", "--out", self.plan, "--rounds", rounds, "--evaluate-every", 0)
        for words in (
            ("keys", self.keys, "--nodes", "n0", "n1", "n2", "stranger"),
            ("plan", *made, *settings.split()),
        ):
            assert processes.start("made", *words).wait(LONGEST) == 0
        (self.keys / "nodes" / "stranger.pub").unlink()
        self.address, self.digest = f"127.0.0.1:{free_port()}", Plan.open(self.plan).digest
        self.start_server()

    def start_node(self, name, file, *more):
        own = ("--ca", self.keys / "ca.crt", "--key", self.keys / "nodes" / f"{name}.key", "--accept", self.digest)
        words = ("join", file, "--server", f"https://{self.address}", *own, "--once", *more)
        self.nodes[name] = self.processes.start(name, *words)
        return self.nodes[name]

    def start_server(self, *more):
        own = ("--out", self.run, "--listen", self.address, "--keys", self.keys, *self.pace, *more)
        self.server = self.processes.start("server", "serve", self.plan, *own)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, condition):
        end = time.monotonic() + LONGEST
        while True:
            over, lost = self.server.poll() is not None, [n for n, node in self.nodes.items() if node.poll()]
            if condition():
                return
            assert not over, self.log("server")
            assert not lost, self.log(lost[0])
            assert time.monotonic() < end, self.log("server")
            time.sleep(0.02)

    def rounds(self):
        file = self.run / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [record for record in map(json.loads, lines) if record["kind"] == "round"]


class HeldNode:
    """A node of this process that waits with its answer to some rounds, so that these cannot end."""

    def __init__(self, run, name, file, rounds):
        self.node, self.over = node_of(file), False
        self.reached, self.released = ({number: threading.Event() for number in rounds} for _ in range(2))
        key = read_private_key(run.keys / "nodes" / f"{name}.key")
        self.connection = Connection(f"https://{run.address}", key, run.keys / "ca.crt")
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with contextlib.closing(self.connection):
            options = {"max_bytes": lambda: 2**24, "stop": lambda: self.over or self.node.finished}
            run_node(self.connection, self.answer, **options)

    def end(self):
        """End, also in the middle of a round."""
        self.over = True
        for event in self.released.values():
            event.set()
        self.thread.join(LONGEST)

    def answer(self, data):
        message = unpack(data, 2**24)
        if message.kind == "train" and message.round in self.reached:
            self.reached[message.round].set()
            self.released[message.round].wait(LONGEST)
        return self.node.handle(data)

    @contextlib.contextmanager
    def holding(self, run, number):
        """Wait until the other nodes have trained in a round, counted from 0, which ends after the block."""
        others = [name for name, process in run.nodes.items() if process.poll() is None]
        run.wait_for(self.reached[number].is_set)
        run.wait_for(lambda: all(f"round {number + 1}:" in run.log(name) for name in others))
        assert len(run.rounds()) == number
        yield
        assert len(run.rounds()) == number
        self.released[number].set()


@pytest.mark.slow
def test_everything_is_killed_within_a_round_and_every_user_counts_once_in_every_round(tmp_path, processes):
    """All three nodes are needed for a round, so parameters are those of the simulation or somebody was not counted."""
    run = Deployment(tmp_path, processes, ROUNDS, "--min-nodes", 3, "--deadline", 60, "--wait", 300)
    # With the file of another node, but not the folder in which that one remembers: only one process may have it.
    stranger = run.start_node("stranger", run.parts[0], "--state", tmp_path / "stranger")
    assert stranger.wait(LONGEST) == 1  # it was told once, and did not try again
    del run.nodes["stranger"]
    for k in (0, 2):
        run.start_node(f"n{k}", run.parts[k])
    held = HeldNode(run, "n1", run.parts[1], rounds=(2, 5))
    try:
        with held.holding(run, 2):
            processes.kill(run.nodes.pop("n2"))
        run.start_node("n2", run.parts[2])
        with held.holding(run, 5):
            processes.kill(run.server)
        run.start_server("--resume")
        assert run.server.wait(LONGEST) == 0, run.log("server")
    finally:
        processes.kill(run.server)
        held.end()
    assert [record["round"] for record in run.rounds()] == list(range(1, ROUNDS + 1))
    expected = simulated(Plan.open(run.plan), run.union)[0].params
    for a, b in zip(jax.tree.leaves(open_model(run.run).params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 2e-6, 2e-6)
    assert "does not know this node's key" in run.log("stranger")
    assert "joined" not in run.log("stranger")


@pytest.mark.slow
def test_a_node_that_hangs_costs_a_deadline_and_comes_back_when_it_wakes(tmp_path, processes):
    run = Deployment(tmp_path, processes, 1_000_000, "--min-nodes", 2, "--deadline", 6, "--wait", 300)
    for k, part in enumerate(run.parts):
        run.start_node(f"n{k}", part)

    def wait_for_round(holds):
        """Wait for a round from now on of which something holds; return its record."""
        since = len(run.rounds())
        run.wait_for(lambda: any(map(holds, run.rounds()[since:])))
        return next(filter(holds, run.rounds()[since:]))

    wait_for_round(lambda record: record["answered"] == 3)
    os.kill(run.nodes["n0"].pid, signal.SIGSTOP)
    late = wait_for_round(lambda record: record["late"])
    assert (late["invited"], late["answered"], late["failed"]) == (3, 2, {})
    wait_for_round(lambda record: record["invited"] == 2)  # it is not invited for a while: no round waits for it
    os.kill(run.nodes["n0"].pid, signal.SIGCONT)
    wait_for_round(lambda record: record["answered"] == 3)
    processes.kill(run.server, signal.SIGTERM)
    assert "to continue: fedrecon serve" in run.log("server")


# ---- a server in this process ----

PLAN = plan_of(config_of())


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    certificates.make_authority(folder)
    certificates.make_server(folder, ())
    for name in ("north", "stranger"):
        certificates.make_node(folder / "nodes", name)
    (folder / "nodes" / "stranger.pub").unlink()
    return folder


@contextlib.contextmanager
def serving(keys=None, **limits):
    tls = None if keys is None else Tls(keys / "server.crt", keys / "server.key", keys / "ca.crt")
    registry = None if keys is None else read_registry(keys / "nodes")
    with serve_tasks(PLAN, ("127.0.0.1", 0), tls, registry, Limits(2**20, **limits)) as (board, api):
        yield api.port, board, api


def connect(port, keys, name="north", authority=None, insecure=False, **options):
    key = read_private_key(keys / "nodes" / f"{name}.key")
    server = parse_server(f"127.0.0.1:{port}", insecure)
    return Connection(server, key, None if insecure else authority or keys / "ca.crt", **options)


def answer_once(connection, handle=bytes.upper, **options):
    """Take part until one message was answered."""
    answered = []

    def once(data):
        answered.append(data)
        return handle(data)

    with contextlib.closing(connection):
        run_node(connection, once, max_bytes=lambda: 2**20, stop=lambda: bool(answered), **options)
    return answered


@contextlib.contextmanager
def asked(board, data=b"question"):
    """Send a message to the first node, in a thread, once it is connected."""
    replies = {}

    def loop():
        end = time.monotonic() + 60
        while not board.nodes() and time.monotonic() < end:
            board.sleep(0.1)
        name = board.send(board.nodes()[0], data, 60, 1)
        while not replies and time.monotonic() < end:
            replies.update(board.poll([name]))
            board.sleep(0.1)

    thread = threading.Thread(target=loop)
    thread.start()
    yield replies
    thread.join(60)


def test_a_message_reaches_a_node_and_its_answer_comes_back_over_tls(keys):
    with serving(keys) as (port, board, api), asked(board) as replies:
        assert answer_once(connect(port, keys)) == [b"question"]
    assert [reply.data for reply in replies.values()] == [b"QUESTION"]
    assert api.problems == {"epoch": 1}


def test_errors_that_last_end_with_a_sentence(keys, tmp_path):
    certificates.make_authority(tmp_path)
    with serving(keys) as (port, _, api):
        for options, sentence in (
            ({"name": "stranger"}, "does not know this node's key"),
            ({"authority": tmp_path / "ca.crt"}, "did not sign"),
            ({"insecure": True}, "speaks TLS: leave out --insecure"),
            ({"clock": lambda: time.time() + 600}, "set this machine's clock"),
            ({"clock": lambda: time.time() - 600}, "set this machine's clock"),
        ):
            with pytest.raises(JoinError, match=sentence):
                answer_once(connect(port, keys, **options))
        assert api.problems == {"unknown-key": 1, "clock": 2}
    with serving() as (port, _, _), pytest.raises(JoinError, match="started with --insecure"):
        answer_once(connect(port, keys))


def test_a_node_waits_for_a_server_that_is_not_there_yet_and_comes_back_to_it(keys, monkeypatch):
    monkeypatch.setattr(http_client, "LAST_PAUSE", 0.2)
    monkeypatch.setattr(tasks, "RETRY_SECONDS", 2)
    port, said = free_port(), []
    connection = connect(port, keys, insecure=True)
    thread = threading.Thread(target=answer_once, args=(connection,), kwargs={"say": said.append})
    thread.start()
    end = time.monotonic() + 60
    while not said and time.monotonic() < end:
        time.sleep(0.01)
    with serve_tasks(PLAN, ("127.0.0.1", port), None, None, Limits(2**20)) as (board, _):
        while not board.nodes() and time.monotonic() < end:
            board.sleep(0.05)
    with serve_tasks(PLAN, ("127.0.0.1", port), None, None, Limits(2**20)) as (board, _), asked(board):
        thread.join(60)
    assert not thread.is_alive()
    assert [text.split()[1] for text in said] == ["cannot", "to"]  # a server that stops says when to come back


@pytest.mark.slow
def test_a_hundred_nodes_complete_a_round_without_leaks(monkeypatch):
    """Nodes in threads, over loopback: every round gets all reports, and messages are dropped after it."""
    monkeypatch.setattr(tasks, "RETRY_SECONDS", 0)  # nodes end when the server does
    stop, count, rounds = threading.Event(), 100, 20
    with serving(connections=2 * count) as (port, board, api):

        def node():
            connection = Connection(f"http://127.0.0.1:{port}", Ed25519PrivateKey.generate(), None)
            with contextlib.closing(connection):
                run_node(connection, bytes, max_bytes=lambda: 2**20, stop=stop.is_set)

        threads = [threading.Thread(target=node, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + LONGEST
        while len(board.nodes()) < count and time.monotonic() < end:
            time.sleep(0.1)
        channel = Channel(board, board)
        for number in range(rounds):
            request = Envelope("train", "plan", "run", number, {}, os.urandom(20_000))
            replies = channel.collect(dict.fromkeys(board.nodes(), request), count, LONGEST, 2**20)
            assert (list(replies.good.values()), replies.failed, replies.late) == ([request.body] * count, {}, [])
            assert not any(entry.data for entry in board._entries.values())
        stop.set()
    for thread in threads:
        thread.join(LONGEST)
    assert api.problems == {"epoch": count}


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10737418240\r\n\r\n" + bytes(2**20), "more than the 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "does not answer like a coordinator"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "is not a fedrecon coordinator"),
    ],
)
def test_a_node_reads_no_more_than_it_expects_and_leaves_a_server_of_another_kind(answer, sentence, keys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            there, _ = listener.accept()
            with there, contextlib.suppress(OSError):
                there.recv(65536)
                there.sendall(answer)
                there.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(JoinError, match=sentence):
            answer_once(connect(listener.getsockname()[1], keys, insecure=True))
        thread.join(10)


def speak(port, *parts, seconds=20):
    """Send bytes to a port, and return what comes back until the other side closes or time is up."""
    received = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), seconds) as there:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                there.sendall(part)
        there.settimeout(seconds)
        while data := there.recv(65536):
            received += data
    return received


def test_requests_of_any_size_and_kind_at_the_port_do_no_harm():
    """What says that it has 10 GB, has no end, has an endless head or is garbage is refused, and never kept."""
    with serving(header_seconds=2.0, header_bytes=4096) as (port, board, _):
        head = b"PUT /v1/rounds/0/reports/" + b"0" * 56 + b" HTTP/1.1\r\nHost: a\r\n"
        assert b" 401 " in speak(port, head + b"Content-Length: 10737418240\r\n\r\n", b"x" * 1000)
        before = memory_kb()
        chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
        speak(port, head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 100)
        assert memory_kb() < before + 50_000  # of the 100 MB that were sent
        assert b" 400 " in speak(port, b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 10_000)
        assert b" 200 " not in speak(port, os.urandom(4096))
        assert b" 404 " in speak(port, b"GET /nothing HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        began = time.monotonic()
        assert speak(port, b"GET /v1/plan HTTP/1.1\r\nHost:") == b""  # a head that never ends is cut off
        assert 1 < time.monotonic() - began < 15
        assert board.nodes() == []


def test_an_address_has_a_bounded_number_of_connections():
    with serving(connections=3) as (port, _, _), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(5)]
        for one in opened[3:]:
            with contextlib.suppress(ConnectionError):
                assert one.recv(1000) == b""  # closed, while the first three wait for a request
        for one in opened[:3]:
            one.sendall(b"GET /v1/plan HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert b" 401 " in one.recv(1000)


def test_a_slow_report_is_cut_off(keys):
    with serving(body_seconds=1.0) as (port, board, api):
        key = read_private_key(keys / "nodes" / "north.key")
        number = board.number_of(key.public_key().public_bytes_raw())
        board.send(number, b"question", 60)
        task = board.next_task(number)
        path = f"/v1/rounds/{task.round}/reports/{task.ticket}"
        signed = http_client.sign_request(key, "PUT", path, "0" * 64, api.verifier.epoch)
        head = f"PUT {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in signed.items()) + "\r\n"
        assert b" 408 " in speak(port, head.encode(), b"x")
        assert api.problems == {"slow": 1}
        assert board.state(number, 0, task.ticket) == "open"


def memory_kb():
    """Return the kB that this process has in memory."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
