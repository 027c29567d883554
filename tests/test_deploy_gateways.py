"""Gateways: each adds up its clients' answers; a coordinator over gateways learns what one over all clients learns."""

import dataclasses
import json
import threading
import time
from multiprocessing.connection import Client

import jax
import numpy as np
import pytest

from deployed import Waiting, config_of, deployed, files_of, grid_of, node_of, plan_of
from fedrecon._src.core.wire import to_bytes
from fedrecon._src.deploy.gateway import Gateway
from fedrecon._src.deploy.messages import Envelope, pack, unpack
from fedrecon._src.deploy.transport import Channel, SocketGrid, answer_socket, open_listener
from fedrecon._src.recommend.config import Reconstruct
from fedrecon.deploy import InProcess, Pace
from test_deploy_plans import ROUND_ZERO_CONFIG


def quick_plan(**options):
    return plan_of(config_of(reconstruct=Reconstruct(solver="least-squares", ridge=0.5)), **options)


def default_plan():
    """A plan that begins with round zero."""
    return plan_of(ROUND_ZERO_CONFIG)


def gateway_of(plan, grid, folder=None):
    return Gateway(plan, Channel(grid, Waiting()), Pace(patience=5.0), folder)


def handler_of(gateway):
    return lambda data: gateway.handle(data, 60.0)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("files"), nodes=4)[1]


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_a_coordinator_over_gateways_learns_what_one_over_all_clients_learns(parts, tmp_path, secure):
    plan = quick_plan(secure=secure, least_nodes=2 if secure else 1)
    direct = deployed(plan, grid_of(parts), tmp_path / "direct")
    gateways = [
        gateway_of(plan, grid_of(half)) for half in ((parts[:2], parts[2:]) if secure else (parts[:1], parts[1:]))
    ]
    over = deployed(plan, InProcess({k: handler_of(gateway) for k, gateway in enumerate(gateways)}), tmp_path / "over")
    for ours, theirs in zip(jax.tree.leaves(over.params), jax.tree.leaves(direct.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert [record["answered"] for record in over.history if record["kind"] == "round"] == [2, 2, 2]
    assert [record["clients"] for record in over.history if record["kind"] == "round"] == [
        record["clients"] for record in direct.history if record["kind"] == "round"
    ]
    assert over.test.clients == direct.test.clients
    assert over.test.micro["loss"] == pytest.approx(direct.test.micro["loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("default", [False, True])
def test_a_killed_gateway_costs_its_clients_of_that_round_and_nothing_else(parts, tmp_path, default):
    """It dies with a question of the second round, and comes back without memory but for its folder."""
    plan = default_plan() if default else quick_plan()
    grids = [grid_of(half) for half in (parts[:2], parts[2:])]
    gateways = {k: gateway_of(plan, grid, tmp_path / f"gateway{k}") for k, grid in enumerate(grids)}
    died = []

    def fragile(data):
        message = unpack(data, 2**30)
        if message.kind == "train" and message.round == 1 and not died:
            died.append(message.round)
            gateways[1] = gateway_of(plan, grids[1], tmp_path / "gateway1")
            raise ConnectionError("nobody listens at the socket")
        return gateways[1].handle(data, 60.0)

    result = deployed(plan, InProcess({0: handler_of(gateways[0]), 1: fragile}), tmp_path / "run", min_nodes=1)
    rounds = [record for record in result.history if record["kind"] == "round"]
    assert died == [1]
    assert [(record["answered"], record["failed"]) for record in rounds] == [(2, {}), (1, {"unreachable": 1}), (2, {})]
    direct = deployed(plan, grid_of(parts), tmp_path / "direct")
    assert result.test.clients == direct.test.clients
    assert [record["clients"] for record in rounds][::2] == [
        record["clients"] for record in direct.history if record["kind"] == "round"
    ][::2]


def test_a_gateway_adds_up_those_who_answer_in_time(parts):
    plan = quick_plan()
    handlers = {k: node_of(part).handle for k, part in enumerate(parts)}
    silent = []
    handlers[3] = lambda data, answer=handlers[3]: None if silent else answer(data)
    gateway = gateway_of(plan, InProcess(handlers))
    assert unpack(gateway.handle(join_of(plan), 60.0), 2**20).kind == "ok"
    silent.append(True)
    message = plan.algorithm.message(plan.algorithm.init(jax.random.key(0)))
    question = Envelope("train", plan.digest, "run", 0, {}, to_bytes(message))
    assert unpack(gateway.handle(pack(question), 60.0), 2**24).kind == "ok"
    assert list(gateway._registry.missed) == [3]


def join_of(plan):
    return pack(Envelope("join", plan.digest, "run", 0, {"result_bytes": 0}, plan.content))


def reason(reply):
    return unpack(reply, 2**20).facts["reason"]


def test_what_a_gateway_refuses(parts):
    plan = quick_plan()
    gateway = gateway_of(plan, grid_of(parts))
    train = Envelope("train", plan.digest, "run", 0)
    assert reason(gateway.handle(b"nonsense", 1.0)) == "garbage"
    assert reason(gateway.handle(pack(train._replace(kind="join", plan="0" * 64)), 1.0)) == "wrong_plan"
    assert reason(gateway.handle(pack(train), 1.0)) == "error"  # no client answers it
    assert reason(gateway.handle(pack(train._replace(kind="mask")), 1.0)) == "garbage"
    assert reason(gateway_of(plan, InProcess({})).handle(join_of(plan), 60.0)) == "not_joined"


@pytest.mark.parametrize("what", ["nonsense", "a state before the end"])
def test_a_gateway_refuses_a_result_of_round_zero_that_is_none_and_keeps_no_file(what, parts, tmp_path):
    plan = default_plan()
    result = what.encode() if what == "nonsense" else plan.zero.to_bytes(plan.zero.start()._replace(answered=1))
    join = Envelope("join", plan.digest, "run", 0, {"result_bytes": len(result)}, plan.content + result)
    assert reason(gateway_of(plan, grid_of(parts), tmp_path).handle(pack(join), 60.0)) == "garbage"
    assert not list(tmp_path.iterdir())


def test_a_gateway_asks_to_join_again_where_its_file_of_round_zero_is_damaged(parts, tmp_path):
    plan = default_plan()
    gateway = gateway_of(plan, grid_of(parts), tmp_path)
    gateway._file("run").write_bytes(b"damaged")
    assert reason(gateway.handle(pack(Envelope("train", plan.digest, "run", 0)), 60.0)) == "not_joined"


def test_a_gateway_answers_whatever_fails(parts):
    class Broken(InProcess):
        def nodes(self):
            raise OverflowError("too many")

    plan = quick_plan()
    assert reason(gateway_of(plan, Broken({})).handle(join_of(plan), 60.0)) == "error"


# ---- sockets ----


def test_a_socket_answers_whoever_comes_and_survives_nonsense(tmp_path):
    path, seen = tmp_path / "node.sock", []

    def handle(data, seconds):
        seen.append((data, seconds))
        return data.upper()

    thread = threading.Thread(target=answer_socket, args=(path, handle, lambda: 100, lambda: len(seen) == 2))
    thread.start()
    wait_for(path.is_socket)
    assert path.stat().st_mode & 0o077 == 0
    for frames in ([b"nonsense"], [b"[]"], [b'{"seconds": 1}', bytes(101)], []):
        with Client(str(path)) as peer:
            for frame in frames:
                peer.send_bytes(frame)
    for word in (b"one", b"two"):
        with Client(str(path)) as peer:
            peer.send_bytes(b'{"seconds": 7.5}')
            peer.send_bytes(word)
            assert peer.recv_bytes() == word.upper()
    thread.join(10)
    assert seen == [(b"one", 7.5), (b"two", 7.5)]


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


@dataclasses.dataclass
class Lender:
    """What the ServerApp does, with nodes that answer at once; it dies after some requests."""

    path: object
    lives: int = 1000
    waiting: dict = dataclasses.field(default_factory=dict)

    def run(self):
        with open_listener(self.path) as listener, listener.accept() as peer:
            while self.lives:
                self.lives -= 1
                request, data = json.loads(peer.recv_bytes()), peer.recv_bytes()
                result, parts = {}, []
                if request["op"] == "nodes":
                    result = {"nodes": [7, 5]}
                elif request["op"] == "send":
                    result = {"ticket": f"t{len(self.waiting)}"}
                    self.waiting[result["ticket"]] = (request["node"], data)
                elif request["op"] == "poll":
                    tickets = [ticket for ticket in request["tickets"] if ticket in self.waiting]
                    entries = [(ticket, *self.waiting.pop(ticket)) for ticket in tickets]
                    result["replies"] = [{"ticket": t, "error": "gone" if n == 5 else ""} for t, n, _ in entries]
                    parts = [data.upper() for _, _, data in entries]
                peer.send_bytes(json.dumps(result).encode())
                for part in parts:
                    peer.send_bytes(part)
                if request["op"] == "end":
                    return


def test_a_lent_grid_sends_polls_and_notices_that_it_is_gone(tmp_path):
    path = tmp_path / "grid.sock"
    grid = SocketGrid(path, 1000)
    assert grid.nodes() == []  # nobody is there yet
    thread = threading.Thread(target=Lender(path, lives=5).run)
    thread.start()
    wait_for(path.is_socket)
    assert grid.nodes() == [5, 7]
    tickets = [grid.send(node, b"question", 60.0) for node in (5, 7)]
    replies = grid.poll(tickets)
    assert [replies[ticket] for ticket in tickets] == [(None, "gone"), (b"QUESTION", None)]
    assert grid.poll(tickets) == {}
    lost = grid.send(7, b"question", 60.0)
    thread.join(10)
    assert grid.poll([lost])[lost].data is None
    thread = threading.Thread(target=Lender(path).run)  # another flwr run
    thread.start()
    wait_for(path.is_socket)
    wait_for(lambda: grid.nodes() == [5, 7])
    grid.close()
    thread.join(10)
    assert not thread.is_alive()
