"""The protocol's endpoints: what is signed is answered once, everything else is refused, counted and without effect."""

import hashlib
import runpy
import time
import warnings
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate

from deployed import config_of, plan_of
from fedrecon._src.deploy import admission, tasks
from fedrecon._src.deploy.admission import FIELDS, AdmissionError, Verifier, public_bytes, sign_request
from fedrecon._src.deploy.http_server import Limits
from fedrecon._src.deploy.messages import Envelope
from fedrecon._src.deploy.registry import NodeRegistry, Pace
from fedrecon._src.deploy.tasks import Api, TaskBoard
from fedrecon._src.deploy.transport import Channel
from fedrecon._src.recommend.config import Data, Reconstruct

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what starlette uses
    from starlette.testclient import TestClient

PLAN = plan_of(
    config_of(
        reconstruct=Reconstruct(solver="least-squares", ridge=0.5),
        data=Data(source="", fractions=(1.0, 0.0, 0.0), max_examples=10),
    )
)
MAX_BYTES = 1000
NORTH, SOUTH, STRANGER = (Ed25519PrivateKey.generate() for _ in range(3))


class Server:
    """The application in this process, called by signed requests."""

    def __init__(self):
        self.board = TaskBoard()
        verifier = Verifier({public_bytes(NORTH): "north", public_bytes(SOUTH): "south"})
        self.api = Api(PLAN, self.board, verifier, Limits(MAX_BYTES))
        self.http = TestClient(self.api.app, "https://server", raise_server_exceptions=False)

    def call(self, method, target, data=b"", *, key=NORTH, headers=None, **changes):
        signed = {"digest": hashlib.sha256(data).hexdigest(), **changes}
        headers = headers or self.sign(key, method, target, **signed)
        return self.http.request(method, target, content=data or None, headers=headers)

    def sign(self, key, method, target, digest, **changes):
        return sign_request(key, method, target, digest, **{"epoch": self.api.verifier.epoch, **changes})

    def task(self, data=b"question", number=3, key=NORTH, seconds=60):
        name = self.board.send(self.board.number_of(public_bytes(key)), data, seconds, number)
        return name, self.call("GET", "/v1/check-in", key=key).json()


@pytest.fixture
def server():
    return Server()


def path_of(task):
    return f"/v1/rounds/{task['round']}/reports/{task['ticket']}"


def test_a_task_is_fetched_answered_and_counted_once(server):
    assert server.call("GET", "/v1/check-in").status_code == 204
    name, task = server.task()
    assert (task["round"], task["size"], 0 < task["seconds"] <= 60) == (3, 8, True)
    fetched = server.call("GET", f"/v1/broadcasts/{task['broadcast']}")
    assert (fetched.content, "immutable" in fetched.headers["cache-control"]) == (b"question", True)
    assert server.call("PUT", path_of(task), b"answer").status_code == 201
    assert server.call("PUT", path_of(task), b"another").status_code == 200
    assert server.board.poll([name])[name].data == b"answer"
    assert server.board.poll([name]) == {}
    assert server.call("PUT", path_of(task), b"another").status_code == 200
    assert server.call("GET", "/v1/check-in").status_code == 204
    assert server.call("GET", f"/v1/broadcasts/{task['broadcast']}").status_code == 404  # nothing is kept
    assert not any(entry.data for entry in server.board._entries.values())


def test_a_node_that_was_restarted_gets_its_task_again(server):
    _, task = server.task()
    assert server.call("GET", "/v1/check-in").json() | {"seconds": 0} == task | {"seconds": 0}


def test_the_plan_is_served_by_its_digest(server):
    response = server.call("GET", "/v1/plan")
    assert (response.content, response.headers["etag"]) == (PLAN.content, f'"{PLAN.digest}"')
    headers = server.sign(NORTH, "GET", "/v1/plan", hashlib.sha256().hexdigest()) | {
        "if-none-match": f'"{PLAN.digest}"'
    }
    assert server.call("GET", "/v1/plan", headers=headers).status_code == 304


def refusal(response):
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["status"] == response.status_code
    return response.status_code, response.json()["type"].removeprefix("urn:fedrecon:")


def test_a_ticket_is_good_for_its_node_its_round_and_its_time(server):
    name, task = server.task()
    assert refusal(server.call("PUT", path_of(task), b"x", key=SOUTH)) == (404, "forged")
    assert refusal(server.call("PUT", path_of(task | {"round": 4}), b"x")) == (404, "forged")
    assert refusal(server.call("PUT", path_of(task | {"ticket": "0" * 56}), b"x")) == (404, "forged")
    assert refusal(server.call("GET", f"/v1/broadcasts/{task['broadcast']}", key=SOUTH)) == (404, "no-broadcast")
    server.board.cancel([name])
    assert refusal(server.call("PUT", path_of(task), b"x")) == (410, "expired")
    assert server.board.poll([name]) == {}


def test_requests_without_a_good_signature_are_refused(server):
    _, task = server.task()
    path = path_of(task)
    good = server.sign(NORTH, "PUT", path, hashlib.sha256(b"x").hexdigest())
    assert refusal(server.call("PUT", path, b"x", key=STRANGER)) == (401, "unknown-key")
    assert refusal(server.call("PUT", path, b"x", headers={"a": "b"})) == (401, "unsigned")
    assert refusal(server.call("PUT", path + "0", b"x", headers=good)) == (401, "bad-signature")
    assert refusal(server.call("PUT", path, b"y", headers=good)) == (400, "wrong-digest")
    assert refusal(server.call("PUT", path, b"x", headers=good)) == (401, "replayed")
    for skew, expected in ((400, (401, "clock")), (-400, (401, "clock")), (-200, None), (200, None)):
        response = server.call("GET", "/v1/check-in", clock=lambda skew=skew: time.time() + skew)
        assert (refusal(response) if expected else None) == expected
    assert server.api.problems == {
        "unknown-key": 1, "unsigned": 1, "bad-signature": 1, "wrong-digest": 1, "replayed": 1, "clock": 2
    }  # fmt: skip
    assert server.board.state(0, 3, task["ticket"]) == "open"


def test_what_was_captured_cannot_be_replayed_after_a_restart():
    before, after = Server(), Server()
    headers = before.sign(NORTH, "GET", "/v1/check-in", hashlib.sha256().hexdigest())
    assert before.call("GET", "/v1/check-in", headers=headers).status_code == 204
    assert refusal(before.call("GET", "/v1/check-in", headers=headers)) == (401, "replayed")
    refused = after.call("GET", "/v1/check-in", headers=headers)
    assert (refusal(refused), refused.headers["fedrecon-epoch"]) == ((401, "epoch"), after.api.verifier.epoch)
    forged = headers | {"fedrecon-epoch": after.api.verifier.epoch}
    assert refusal(after.call("GET", "/v1/check-in", headers=forged)) == (401, "bad-signature")
    assert after.call("GET", "/v1/check-in").status_code == 204


def test_a_report_beyond_the_plans_size_is_refused_before_it_is_read(server):
    _, task = server.task()
    assert refusal(server.call("PUT", path_of(task), bytes(MAX_BYTES + 1))) == (413, "too-large")
    headers = server.sign(NORTH, "PUT", path_of(task), hashlib.sha256(b"xx").hexdigest())
    response = server.http.put(path_of(task), content=iter([b"x", b"x"]), headers=headers)  # of no stated length
    assert refusal(response) == (411, "no-length")
    assert server.call("PUT", path_of(task), bytes(MAX_BYTES)).status_code == 201


def test_a_key_that_asks_too_often_is_slowed_down(monkeypatch):
    monkeypatch.setattr(admission, "BURST", 5.0)
    monkeypatch.setattr(admission, "REQUESTS_PER_SECOND", 1e-6)
    verifier = Verifier(None)

    def knock():
        verifier.check("GET", "/", sign_request(NORTH, "GET", "/", "0" * 64, verifier.epoch))

    for _ in range(5):
        knock()
    with pytest.raises(AdmissionError) as refused:
        knock()
    assert refused.value.reason == "too-many"


def test_nonces_are_kept_as_long_as_their_request_could_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    verifier = Verifier(None)
    first = sign_request(NORTH, "GET", "/", "0" * 64, verifier.epoch, clock=lambda: time.time() + 290)
    verifier.check("GET", "/", first)
    for second in range(100):
        now[0] = 10.0 * second
        verifier.check("GET", "/", sign_request(NORTH, "GET", "/", "0" * 64, verifier.epoch))
        if now[0] <= 2 * admission.MAX_CLOCK_SKEW:
            with pytest.raises(AdmissionError, match="before"):
                verifier.check("GET", "/", first)
    assert 61 <= sum(map(len, verifier._nonces)) <= 91


def test_a_report_is_forgotten_in_the_next_round(server, monkeypatch):
    monkeypatch.setattr(tasks, "PURGE_SECONDS", 0.0)
    name, task = server.task(number=3)
    server.call("PUT", path_of(task), b"answer")
    server.board.poll([name])
    _, second = server.task(number=3)
    assert server.call("PUT", path_of(task), b"answer").status_code == 200
    server.call("PUT", path_of(second), b"answer")  # and nobody has read it yet
    server.task(number=4)
    assert len(server.board._entries) == 2
    assert refusal(server.call("PUT", path_of(task), b"answer")) == (410, "expired")


def test_nodes_that_connect_one_after_the_other_share_one_copy_of_the_plan(server):
    registry = NodeRegistry(PLAN, Channel(server.board, server.board), Pace(), "run", print)
    for key in (NORTH, SOUTH):
        server.board.number_of(public_bytes(key))
        registry.update()
    first, second = (entry.data for entry in server.board._entries.values())
    assert first is second


def test_nodes_are_connected_while_they_wait_work_or_were_heard_a_moment_ago(monkeypatch):
    board, now = TaskBoard(), [1000.0]
    monkeypatch.setattr(tasks.time, "monotonic", lambda: now[0])
    north, south = (board.number_of(public_bytes(key)) for key in (NORTH, SOUTH))
    assert board.nodes() == [north, south]
    assert board.name(south) == public_bytes(SOUTH).hex()
    board.begin_poll(north)
    now[0] += 20
    assert board.nodes() == [north]
    name = board.send(north, b"question", 60)
    board.next_task(north)
    board.end_poll(north)
    now[0] += 20
    assert board.nodes() == [north]  # it works
    board.cancel([name])
    assert board.nodes() == []
    board.begin_poll(south)
    board.end_poll(south, lost=True)
    assert board.nodes() == []


# ---- the description of the protocol, and any request that can be made from it ----

ROOT = Path(__file__).parent.parent
OPENAPI = runpy.run_path(str(ROOT / ".ci" / "openapi.py"))
describe_api = OPENAPI["describe_api"]
HOSTILE = st.one_of(st.sampled_from(["0", "3", "-1", "9" * 20, "٣", "a" * 64, "../plan"]), st.text(max_size=20))


def test_the_descriptions_in_the_docs_are_those_of_the_routes():
    """After a change of a protocol, `python .ci/openapi.py docs` writes them anew."""
    for name, text in OPENAPI["descriptions"]().items():
        assert (ROOT / "docs" / name).read_text() == text, name


def test_the_description_names_what_is_sent(server):
    description = describe_api(server.api.app.routes)
    operations = [(path, method) for path, methods in description["paths"].items() for method in methods]
    assert operations == [
        ("/v1/plan", "get"),
        ("/v1/check-in", "get"),
        ("/v1/broadcasts/{digest}", "get"),
        ("/v1/rounds/{number}/reports/{ticket}", "put"),
    ]
    schemas = description["components"]["schemas"]
    validate(server.task()[1], schemas["NodeTask"])
    validate(server.call("GET", "/v1/nothing").json(), schemas["Problem"])


def values_of(schema):
    """Return a strategy for a parameter: what its schema allows, or anything."""
    if schema["type"] == "integer":
        allowed = st.integers(schema["minimum"], schema["maximum"]).map(str)
    else:
        allowed = st.from_regex(schema["pattern"], fullmatch=True)
    return st.one_of(allowed, HOSTILE)


@st.composite
def requests(draw, description, real):
    """Draw a request of the description: method, path with query, body, and what is described of it."""
    path, methods = draw(st.sampled_from(list(description["paths"].items())))
    method, operation = next(iter(methods.items()))
    query = {}
    for parameter in operation["parameters"]:
        name, place = parameter.get("name"), parameter.get("in")
        if place == "path":
            value = draw(st.one_of(st.just(real[name]), values_of(parameter["schema"])))
            path = path.replace(f"{{{name}}}", quote(value, safe=""))
        elif place == "query" and draw(st.booleans()):
            query[name] = draw(HOSTILE.filter(lambda word: not word.isdigit() or word == "0"))  # never wait
    method = draw(st.one_of(st.just(method.upper()), st.sampled_from(["POST", "HEAD", "DELETE", "PATCH", "PUT"])))
    return method, path + ("?" + urlencode(query) if query else ""), draw(st.binary(max_size=40)), operation


@pytest.fixture(scope="module")
def fuzzed():
    server = Server()
    return server, server.task(seconds=3600), describe_api(server.api.app.routes)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_request_makes_the_server_fail_or_grow(fuzzed, data):
    """Signed or not, as described or not: an answer of the description, no entry more, and the task stays open."""
    server, (_, task), description = fuzzed
    real = {"digest": task["broadcast"], "number": str(task["round"]), "ticket": "0" * 56}
    method, path, body, operation = data.draw(requests(description, real))
    headers = server.sign(NORTH, method, path, hashlib.sha256(body).hexdigest())
    for name, pattern in FIELDS.items():
        if data.draw(st.integers(0, 9)) == 0:
            headers[name] = data.draw(st.one_of(st.from_regex(pattern, fullmatch=True), st.text("0aF -", max_size=130)))
    response = server.call(method, path, body, headers=headers)
    assert response.status_code < 500
    if response.status_code >= 400 and method != "HEAD":
        refusal(response)
        validate(response.json(), description["components"]["schemas"]["Problem"])
    elif response.status_code < 400:
        assert str(response.status_code) in operation["responses"]
    assert [entry.reply for entry in server.board._entries.values()] == [None]
    assert server.board.state(0, task["round"], task["ticket"]) == "open"
    assert len(server.api.problems) < 30
    assert not server.api._uploading


def test_nobody_waits_for_a_node_that_is_gone(monkeypatch):
    """Its connection is lost before it fetches the question: the round closes 5 s later, not at the deadline."""
    board, now = TaskBoard(), [1000.0]
    monkeypatch.setattr(tasks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(board, "monotonic", lambda: now[0])
    monkeypatch.setattr(board, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    north, south = (board.number_of(public_bytes(key)) for key in (NORTH, SOUTH))
    board.begin_poll(north)
    board.begin_poll(south)
    board.end_poll(south, lost=True)
    requests = dict.fromkeys((north, south), Envelope("train", "plan", "run", 0))
    replies = Channel(board, board).collect(requests, 2, seconds=60.0)
    assert (replies.failed, replies.late) == ({south: "unreachable"}, [north])
    now[0], began = 2000.0, 2000.0
    replies = Channel(board, board).collect({south: requests[south]}, 1, seconds=60.0)
    assert replies.failed == {south: "unreachable"}
    assert 5 < now[0] - began < 9
