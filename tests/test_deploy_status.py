"""The operator's status page: what it says, how records reach watchers, and who may read it."""

import contextlib
import json

import httpx
import pytest

from fedrecon._src.deploy.status_page import CURVE_POINTS, render_curve, render_page, serve_status
from fedrecon._src.storage.run_folder import RunFolder


def round_record(number, loss=0.5, **changes):
    counts = {"invited": 4, "answered": 3, "late": 1, "failed": {"garbage": 1}, "clients": 90}
    sizes = {"seconds": 0.25, "bytes_sent": 2_000_000, "bytes_received": 1_500_000}
    return {"kind": "round", "round": number, "loss": loss, **counts, **sizes, **changes}


@contextlib.contextmanager
def serving(folder, facts=None, host="127.0.0.1"):
    with (
        serve_status(RunFolder(folder), 15, lambda: facts or {}, (host, 0)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client,
    ):
        yield client


def test_the_page_adds_up_rounds_and_escapes_what_nodes_are_called():
    records = [round_record(1, 0.75, epsilon=0.5), round_record(2, 0.5, epsilon=0.875)]
    page = render_page(records, 15, {"Connected nodes": "<script>alert(1)</script>"})
    for value in ("2 of 15", "0.5", "0.875", "<dd>4</dd>", "<dd>3</dd>", "1 garbage", "&lt;script&gt;"):
        assert value in page
    assert '<th scope="col">nodes</th><th scope="col">answered</th>' in page
    assert "<td>4</td><td>3</td>" in page
    assert "<script>alert" not in page
    assert "none promised" in render_page([round_record(1)], 15, {})
    assert "No loss has been reported" in render_page([round_record(1, None)], 15, {})


def test_the_curve_has_a_point_for_each_round_and_leaves_out_what_is_no_number():
    records = [round_record(k + 1, loss) for k, loss in enumerate([2.0, None, float("nan"), 1.0])]
    curve = render_curve([*records, {"kind": "evaluation", "round": 4, "micro": {"loss": 1.5}}])
    assert 'points="50.0,20.0 390.0,170.0"' in curve
    assert '<circle r="3.5" cx="390.0" cy="95.0"/>' in curve
    assert "Loss from 2 in round 1 to 1" in curve
    long = render_curve([round_record(k + 1, 1.0) for k in range(10_000)])
    assert len(long.split('points="')[1].split('"')[0].split()) <= CURVE_POINTS


def test_the_curve_of_rounds_without_loss_has_the_dots_of_evaluations_alone():
    evaluations = [{"kind": "evaluation", "round": k, "micro": {"loss": 1.0 / k}} for k in (1, 2)]
    curve = render_curve([round_record(1, None), round_record(2, None), *evaluations])
    assert "Loss from 1 in round 1 to 0.5" in curve
    assert "Dots: loss of held-out users." in curve
    assert "Line:" not in curve
    assert curve.count("<circle") == 2


def test_records_arrive_as_events_from_the_one_that_was_read_last(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for k in range(3):
        folder.record(round_record(k + 1))
    with serving(tmp_path / "run") as client:
        for query, headers, first in (("", {}, 1), ("?after=1", {}, 2), ("?after=nonsense", {"last-event-id": "2"}, 3)):
            with client.stream("GET", f"/events{query}", headers=headers) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                lines = response.iter_lines()
                data = next(line for line in lines if line.startswith("data: "))
                assert json.loads(data[6:])["round"] == first
                if first == 3:  # a record that is written while somebody watches
                    folder.record(round_record(4))
                    assert json.loads(next(line for line in lines if line.startswith("data: "))[6:])["round"] == 4


def test_only_this_machine_may_read_the_page_under_a_name_of_its_own(tmp_path):
    with serving(tmp_path / "run") as client:
        response = client.get("/")
        policy = response.headers["content-security-policy"]
        assert (response.status_code, "default-src 'none'" in policy, "unsafe" in policy) == (200, True, False)
        assert client.get("/", headers={"host": "evil.example.org"}).status_code == 400
        assert client.get("/", headers={"host": "localhost:80"}).status_code == 200
        assert client.post("/").status_code == 405
        assert client.get("/nothing").status_code == 404


def test_a_port_that_is_taken_is_an_error(tmp_path):
    with serving(tmp_path / "a") as client:
        port = client.base_url.port
        with (
            pytest.raises(OSError, match="in use"),
            serve_status(RunFolder(tmp_path / "b"), 1, dict, ("127.0.0.1", port)),
        ):
            pass
