"""All bytes of real runs on loopback, of nodes and of the server, are kept and searched for what must not travel."""

import contextlib
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

import fedrecon as fr
from deployed import Processes, config_of, write_ratings
from fedrecon._src.core.wire import WireError, from_bytes
from fedrecon._src.deploy import certificates
from fedrecon._src.deploy.admission import read_registry
from fedrecon._src.deploy.http_server import Limits, Tls
from fedrecon._src.deploy.messages import MAGIC, largest_message, unpack, unpack_pair
from fedrecon._src.deploy.tasks import serve_tasks
from fedrecon._src.recommend.config import Data, Reconstruct
from fedrecon._src.recommend.tasks import Items
from fedrecon._src.storage.run_folder import RunFolder
from fedrecon.deploy import Pace, Plan, make_plan, serve
from recorder import Recorder, bodies_of

pytestmark = pytest.mark.slow
ITEMS = np.array([f"catalogue-item-{k:03d}" for k in range(12)])
CONFIG = config_of(
    data=Data(source="", fractions=(0.7, 0.1, 0.2), max_examples=10),
    reconstruct=Reconstruct(solver="least-squares", ridge=0.5),
    rounds=2,
    evaluate_every=1,
)


class Capture(NamedTuple):
    """Streams of bytes between nodes and the server: what nodes sent, and what they received."""

    from_nodes: list
    to_nodes: list

    def text(self):
        """Return the bodies of HTTP messages in place of streams."""
        return Capture(*([b"".join(bodies_of(stream)) for stream in streams] for streams in self))

    def everything(self):
        return [stream for streams in self for stream in streams]


class Noting:
    """The server's grid, which also notes our own messages: node, what was sent, what came back."""

    def __init__(self, grid):
        self._grid, self._asked, self.seen = grid, {}, []
        self.cancel, self.sleep, self.monotonic, self.name = grid.cancel, grid.sleep, grid.monotonic, grid.name

    def nodes(self):
        return self._grid.nodes()

    def send(self, node, data, seconds, number=0):
        ticket = self._grid.send(node, data, seconds, number)
        self._asked[ticket] = data
        return ticket

    def poll(self, tickets):
        found = self._grid.poll(tickets)
        self.seen += [(self._asked[ticket], reply.data) for ticket, reply in found.items() if reply.data]
        return found


def files_of(folder):
    ratings = fr.data.synthetic_ratings(num_users=18, num_items=len(ITEMS), mean_ratings=7, seed=1)
    rows = [
        (f"somebody-called-{k:04d}", ITEMS[item], float(rating))
        for k, one in enumerate(ratings)
        for item, rating in zip(one["item"], one["rating"], strict=True)
    ]
    parts = [write_ratings(folder / f"n{k}.csv", [r for r in rows if int(r[0][-4:]) % 3 == k]) for k in range(3)]
    return write_ratings(folder / "union.csv", rows), parts


def run_and_record(plan, parts, folder, keys=None):
    """Train with three nodes in processes of their own, all bytes through a recorder; return these and our messages."""
    processes, recorder, tls, registry = Processes(folder), None, None, None
    if keys is not None:
        tls = Tls(keys / "server.crt", keys / "server.key", keys / "ca.crt")
        registry = read_registry(keys / "nodes")
    limits = Limits(largest_message(plan))
    try:
        with serve_tasks(plan, ("127.0.0.1", 0), tls, registry, limits) as (board, api):
            recorder = Recorder(api.port)
            for k, part in enumerate(parts):
                own = (
                    ("--insecure",) if keys is None else ("--ca", tls.authority, "--key", keys / "nodes" / f"n{k}.key")
                )
                words = ("--server", recorder.address, "--accept", plan.digest, "--once", *own)
                processes.start(f"n{k}", "join", part, *words)
            noting, pace = Noting(board), Pace(min_nodes=3, deadline=240, stage_deadline=240, patience=400)
            outcome = serve(plan, noting, RunFolder(folder / "run"), pace, clock=noting)
            for process in processes.all:
                assert process.wait(240) == 0
        assert api.problems == {"epoch": 3}
        assert [record["answered"] for record in outcome.history if record["kind"] == "round"] == [3, 3]
        assert outcome.test.clients > 0
    finally:
        processes.end()
        if recorder is not None:
            recorder.close()
    return Capture(recorder.sent, recorder.received), noting.seen


def params_of(plan, seen):
    """Return the parameters that nodes trained with, of every round."""
    found = {}
    for data, _ in seen:
        message = unpack(data, 2**30)
        if message.kind in ("train", "mask"):
            body = message.body if message.kind == "train" else unpack_pair(message.body)[1]
            with contextlib.suppress(WireError):  # masked sums of evaluations have other arrays
                found[message.round] = from_bytes(body, plan.message_shapes).method
    return [found[number] for number in sorted(found)]


def supports_of(plan, union):
    """Return the users that train, and the halves of their ratings that training takes as support."""
    users = plan.read_file(union).users.train
    return users, dataclasses.replace(users, ends=users.starts + users.sizes // 2).at_least(2)


def secrets_of(plan, union, local):
    """Name what must not travel as bytes: names, lines, support and local parameters of every training user."""
    users, halves = supports_of(plan, union)
    found = {f"name {name}": str(name).encode() for name in users.names}
    found |= {f"line {line}": line for line in union.read_bytes().splitlines()[1:]}
    for k, one in enumerate(halves):
        for name, kinds in (("item", (np.int32, np.int64)), ("rating", (np.float32, np.float64))):
            if len(one[name]) > 2 and len(set(one[name].tolist())) > 1:
                found |= {f"{name}s of {k}, {kind}": np.asarray(one[name], kind).tobytes() for kind in kinds}
    for k, vector in enumerate(local):
        found |= {f"vector {k}, {kind}": vector.astype(kind).tobytes() for kind in (np.float32, np.float64)}
        found |= {f"entry {x!r} as text": repr(float(x)).encode() for x in vector}
        found |= {f"entry {x!r} as double": np.float64(x).tobytes() for x in vector}
    return found


def assert_not_in(secrets, streams):
    for name, secret in secrets.items():
        for stream in streams:
            assert secret not in stream, name


def has(stream, vector):
    """Say whether a stream holds a vector as floats or doubles, at any place, to four digits."""
    for kind in (np.float32, np.float64):
        size = np.dtype(kind).itemsize
        for start in range(size):
            numbers = np.frombuffer(stream[start : start + (len(stream) - start) // size * size], kind)
            many = len(numbers) - len(vector) + 1
            if many > 0:
                with np.errstate(invalid="ignore"):  # bytes of other things may be infinite as numbers
                    near = [np.abs(numbers[j : many + j] - x) <= 1e-4 * abs(x) for j, x in enumerate(vector)]
                if np.logical_and.reduce(near).any():
                    return True
    return False


@pytest.mark.parametrize("secure", [False, True])
def test_no_byte_of_a_run_is_of_a_user(secure, tmp_path):
    union, parts = files_of(tmp_path)
    plan = Plan.from_bytes(make_plan(CONFIG, Items(ITEMS), secure=secure, least_nodes=3 if secure else 1).content)
    raw, seen = run_and_record(plan, parts, tmp_path)
    text = raw.text()

    # What is looked through is all of it, and no encoding hides it: every message and every reply is there as it is.
    assert sum(unpack(data, 2**30).kind in ("train", "mask") for data, _ in seen) >= 6
    for data, reply in seen:
        assert any(data in stream for stream in text.to_nodes)
        assert any(reply in stream for stream in text.from_nodes)
    params = params_of(plan, seen)
    assert len(params) == 2
    assert any(has(stream, params[1]["item_embedding"][3]) for stream in text.to_nodes)

    halves = supports_of(plan, union)[1]
    local = [row for shared in params for row in fr.reconstruct(plan.algorithm, shared, halves)["user_embedding"]]
    local = [np.asarray(row) for row in local if np.any(row)]
    assert len(local) > 20
    assert_not_in(secrets_of(plan, union, local), (*raw.everything(), *text.everything()))
    with np.errstate(all="ignore"):
        assert not any(has(stream, vector) for stream in text.everything() for vector in local)
    upward = (*raw.from_nodes, *text.from_nodes)
    assert_not_in({f"entry {x!r}": np.float32(x).tobytes() for vector in local for x in vector}, upward)
    logs = [path.read_bytes() for path in tmp_path.rglob("*.log")]
    assert len(logs) == 3
    assert_not_in(secrets_of(plan, union, local) | {item: item.encode() for item in ITEMS}, logs)
    assert_not_in({item: item.encode() for item in ITEMS}, upward)  # the catalogue is the server's: downward it travels


def test_with_tls_nothing_can_be_read(tmp_path):
    union, parts = files_of(tmp_path)
    plan = Plan.from_bytes(make_plan(CONFIG, Items(ITEMS)).content)
    keys = tmp_path / "keys"
    certificates.make_authority(keys)
    certificates.make_server(keys, ())
    for k in range(3):
        certificates.make_node(keys / "nodes", f"n{k}")
    raw, seen = run_and_record(plan, parts, tmp_path, keys)
    assert sum(map(len, raw.everything())) > sum(len(data) + len(reply) for data, reply in seen)
    assert all(stream[:2] == b"\x16\x03" for stream in raw.everything() if stream)  # a TLS handshake begins each
    known = {
        "magic": MAGIC,
        "digest": plan.digest.encode(),
        "HTTP": b"HTTP/1.1",
        "ours": b"fedrecon",
    }
    known |= {item: item.encode() for item in ITEMS}
    known |= {f"plan at {k}": plan.content[k : k + 40] for k in range(0, len(plan.content) - 40, 40)}
    known |= {f"reply {k}": reply[8:72] for k, (_, reply) in enumerate(seen)}
    known |= {f"message {k}": data[8:72] for k, (data, _) in enumerate(seen)}
    known |= {name: name.encode() for name in plan.read_file(union).users.train.names.tolist()}
    assert_not_in(known, raw.everything())
