"""The page's files, the server for this machine, the commands, and what a saved model knows about its items."""

import dataclasses
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import device_vectors
from fedrecon._src.app.cli import main, show
from fedrecon._src.device.model_bundle import items_legend
from fedrecon._src.device.web_page import VENDORED, page_files, page_lacks, policy, serve
from fedrecon._src.recommend.config import Data, Factorization, RatingsConfig
from fedrecon._src.recommend.saved_models import SavedModel, open_model
from fedrecon._src.recommend.tasks import RATINGS, Items
from fedrecon._src.storage.ownership import file_lock
from fedrecon_device import BundleError
from fedrecon_device.contents import content_of
from fedrecon_device.files import FORMAT, VERSION, manifest_bytes

ROOT = Path(__file__).parent.parent


def fake_bundle(folder, task="ratings"):
    """A bundle with nothing but a page: what a server needs."""
    manifest = {"format": "fedrecon-bundle", "version": VERSION, "task": task, "files": {}}
    pages = page_files(manifest)
    for name, data in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    from fedrecon._src.device.bundle_writer import _entries

    (folder / "manifest.json").write_bytes(manifest_bytes({**manifest, "files": _entries(pages)}))
    return pages


@pytest.mark.slow
def test_the_shared_vectors_are_what_python_computes():
    saved, now = json.loads(device_vectors.FILE.read_text()), json.loads(json.dumps(device_vectors.vectors()))
    compare(saved, now, "vectors")


def compare(saved, now, where):
    assert type(saved) is type(now), where
    if isinstance(now, dict):
        assert saved.keys() == now.keys(), where
        for name in now:
            compare(saved[name], now[name], f"{where}/{name}")
    elif isinstance(now, list) and now and isinstance(now[0], float):
        assert saved == pytest.approx(now, abs=1e-5), where
    elif isinstance(now, list):
        assert len(saved) == len(now), where
        for k, one in enumerate(now):
            compare(saved[k], one, f"{where}/{k}")
    elif isinstance(now, float):
        assert saved == pytest.approx(now, abs=1e-5), where
    else:
        assert saved == now, where


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
def test_the_pages_own_tests_pass():
    found = subprocess.run(["node", "--test", "tests/web/"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_page_is_small_and_makes_no_other_requests():
    pages = page_files({"task": "ratings", "files": {}})
    assert sum(map(len, pages.values())) < 100_000
    for name, data in pages.items():
        assert not re.search(rb"https?://", data), name
        assert b"@POLICY@" not in data
        assert b"@FILES@" not in data


def test_the_service_worker_caches_every_file_of_the_page_and_follows_the_model():
    tables = {"global.safetensors": {"bytes": 1, "sha256": "a"}, "items.json.zlib": {"bytes": 1, "sha256": "b"}}
    pages = page_files({"task": "ratings", "files": tables})
    worker = pages["web/sw.js"].decode()
    names = set(re.findall(r'"([\w./-]+\.(?:js|html|css|json\.zlib|safetensors))"', worker))
    assert names >= {*tables, *pages} - {"web/sw.js"}
    other = page_files({"task": "ratings", "files": {**tables, "items.json.zlib": {"bytes": 1, "sha256": "c"}}})
    assert other["web/sw.js"] != pages["web/sw.js"]
    assert page_files({"task": "ratings", "files": tables}) == pages


def test_only_text_and_training_may_run_webassembly():
    assert "wasm" not in policy({"task": "ratings", "files": {}})
    assert "wasm" not in policy({"task": "ratings", "files": {"plan.json": {}}})
    assert "'wasm-unsafe-eval'" in policy({"task": "text", "files": {}})
    assert "'wasm-unsafe-eval'" in policy({"task": "ratings", "files": {"web/sharing.js": {}}})


def test_a_page_can_train_with_a_plan_and_onnxruntime_web(tmp_path):
    for name in VENDORED:
        (tmp_path / name).write_bytes(b"")
    manifest = {
        "task": "ratings",
        "files": {name: {"bytes": 1, "sha256": "a"} for name in ("plan.json", "update.onnx")},
    }
    scripts = {
        f"web/{name}.js" for name in ("background", "keys", "onnx", "participant", "sealing", "sharing", "training")
    }
    assert not scripts & page_files({"task": "ratings", "files": {}}, tmp_path).keys()
    assert not scripts & page_files(manifest).keys()
    pages = page_files(manifest, tmp_path)
    assert scripts <= pages.keys()
    assert b"wasm-unsafe-eval" in pages["web/index.html"]
    assert b'"plan.json"' in pages["web/sw.js"]
    assert b"vendor" not in pages["web/sw.js"]  # 14 MB that only those who take part need
    whole = {**manifest, "files": {**manifest["files"], **dict.fromkeys(pages)}}
    assert page_lacks(whole) == "global.safetensors"
    assert page_lacks(manifest) is None


def test_text_needs_all_of_onnxruntime_web(tmp_path):
    with pytest.raises(ValueError, match=r"has no ort.*npm install"):
        page_files({"task": "text", "files": {}}, vendor=tmp_path)
    fake_bundle(tmp_path, task="text")
    with pytest.raises(BundleError, match=r"lacks web/vendor/ort.*--onnxruntime-web"):
        serve(tmp_path)


def test_a_port_that_is_taken_or_is_none_is_named(server, tmp_path, capsys):
    taken = str(server.server_address[1])
    assert main(["page", str(tmp_path), "--port", taken, "--no-open"]) == 2
    assert f"cannot listen on port {taken}" in capsys.readouterr().err
    assert main(["page", str(tmp_path), "--port", "70000"]) == 2
    assert "--port" in capsys.readouterr().err


def test_what_to_do_next_is_printed_as_commands_of_fedrecon(capsys):
    show.following("page bundles/mine", "recommend runs/mine")
    assert capsys.readouterr().out == "next:  fedrecon page bundles/mine\n       fedrecon recommend runs/mine\n"


@pytest.fixture
def server(tmp_path):
    fake_bundle(tmp_path)
    (tmp_path / "secret.txt").write_text("not in the manifest")
    found = serve(tmp_path)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def get(server, path, host="localhost"):
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def a_run(folder):
    """A saved model of three films."""
    config = dataclasses.replace(RatingsConfig(), model=Factorization(dim=3))
    legend = Items(np.array([5, 7, 9]), np.array(["A", "B", "A"]), np.array([9, 1, 8]), (1.0, 5.0))
    params = {"item_embedding": np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)}
    SavedModel(config, params, legend).save(folder / "model")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_page_of_a_ratings_run_is_served_without_exporting_anything(tmp_path, end):
    (tmp_path / "scratch").mkdir()
    code = (
        "import signal, sys; sys.modules['jax2onnx'] = sys.modules['onnxruntime'] = None; "  # as if not installed
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # whoever runs tests in the background ignores it
        "from fedrecon._src.app.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-u", "-c", code, "page", str(a_run(tmp_path / "run")), "--no-open"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        try:
            address = re.search(r"http://localhost:(\d+)/web/", running.stdout.readline())
            connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=10)
            connection.request("GET", "/items.json.zlib", headers={"Host": f"localhost:{address[1]}"})
            items = content_of("items.json.zlib", connection.getresponse().read())
            assert items["labels"] == ["A [5]", "B", "A [9]"]
            connection.close()
        finally:
            running.send_signal(end)
            last_resort = threading.Timer(20, running.kill)
            last_resort.start()
        assert running.wait() == 0
        last_resort.cancel()
    assert list((tmp_path / "scratch").iterdir()) == []  # the bundle that was made for it is gone


def test_the_server_gives_the_page_under_a_strict_policy(server):
    answer, body = get(server, "/web/")
    assert answer.status == 200
    assert b"<h1>" in body
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert get(server, "/")[0].headers["Location"] == "/web/"
    assert get(server, "/web/app.js")[0].headers["Content-Type"].startswith("text/javascript")


@pytest.mark.parametrize("path", ["/secret.txt", "/../secret.txt", "/web/../secret.txt", "/%2e%2e/x", "/web/no.js"])
def test_the_server_gives_nothing_but_files_of_the_manifest(server, path):
    answer, body = get(server, path)
    assert answer.status == 404
    assert b"not in the manifest" not in body


def test_another_name_that_leads_to_this_machine_is_turned_away(server):
    assert get(server, "/web/", host="evil.example")[0].status == 403


def test_a_folder_without_a_page_is_refused_in_a_sentence(tmp_path, capsys):
    assert main(["page", str(tmp_path)]) == 1
    assert "holds no model" in capsys.readouterr().err


# ---- the commands ----


def test_bundle_check_says_what_is_wrong(tmp_path, capsys):
    assert main(["bundle", "check", str(tmp_path)]) == 1
    told = (
        f"{tmp_path} is not a bundle: manifest.json is missing. Make a bundle of a run with fedrecon bundle RUN --out"
    )
    assert told in capsys.readouterr().err
    assert main(["bundle", "check"]) == 2


def test_one_process_at_a_time_writes_a_bundle(tmp_path, capsys):
    with file_lock(tmp_path / ".there.lock"):
        assert main(["bundle", str(tmp_path / "run"), "--out", str(tmp_path / "there")]) == 1
    assert f"the bundle in {tmp_path / 'there'} is in use by process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["page", "run", "--port", "65536"], "--port"),
        (["page", "run", "--port", "-1"], "--port"),
        (["bundle", "{run}", "--out", "there", "--examples", str(2**70)], "--examples: "),
        (["bundle", "{run}", "--out", "there", "--least-ratings", "-1"], "--least-ratings: "),
        (["bundle", "{run}", "--out", "there", "--onnxruntime-web", "none"], "none has no ort"),
    ],
)
def test_numbers_and_folders_that_make_no_sense_are_refused_before_the_work(
    command, message, tmp_path, monkeypatch, capsys
):
    config, items = RatingsConfig(data=Data(source="")), Items(np.arange(2))
    params = {"item_embedding": np.zeros((2, config.model.dim), np.float32)}
    SavedModel(config, params, items).save(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main([word.format(run=tmp_path / "run") for word in command]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


def test_bundle_overwrites_only_with_the_option(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": {}}))
    assert main(["bundle", str(tmp_path), "--out", str(tmp_path / "there")]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_bundle_never_replaces_what_is_not_a_bundle(tmp_path, capsys):
    for name, manifest in (("thesis", None), ("bundle", {"format": FORMAT, "files": {}}), ("app", {"name": "app"})):
        folder = tmp_path / name
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "thesis.tex").write_text("mine")
        if manifest is not None:
            (folder / "manifest.json").write_text(json.dumps(manifest))
        for more in ([], ["--overwrite"]):
            assert main(["bundle", str(tmp_path), "--out", str(folder), *more]) == 1
            assert "fedrecon did not make it" in capsys.readouterr().err
        assert (folder / "deep" / "thesis.tex").read_text() == "mine"


@pytest.mark.slow
def test_a_run_becomes_a_bundle_that_passes(tmp_path, capsys):
    pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")
    a_run(tmp_path / "run")
    assert main(["bundle", str(tmp_path / "run"), "--out", str(tmp_path / "b"), "--examples", "4"]) == 0
    assert main(["bundle", "check", str(tmp_path / "b")]) == 0
    assert "6 test vectors" in capsys.readouterr().out
    items = content_of("items.json.zlib", (tmp_path / "b" / "items.json.zlib").read_bytes())
    assert items == {"ids": [5, 7, 9], "labels": ["A [5]", "B", "A [9]"], "counts": [9, 1, 8]}
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["scale"] == [1.0, 5.0]
    assert manifest["least_count"] == 1  # as the settings of its model say


# ---- what a saved model knows about its items ----


def test_a_saved_model_knows_how_often_items_were_rated_and_the_scale(tmp_path):
    legend = Items(np.array([5, 7]), None, np.array([2, 0]), (0.5, 5.0))
    params = {"item_embedding": np.zeros((2, 50), np.float32)}
    SavedModel(RatingsConfig(), params, legend).save(tmp_path / "model")
    found = open_model(tmp_path).legend
    assert found.counts.tolist() == [2, 0]
    assert found.scale == (0.5, 5.0)


def test_counts_are_of_the_people_who_train_alone():
    from fedrecon._src.recommend.config import Data, RatingsConfig
    from fedrecon._src.recommend.tasks.ratings import load_ratings

    config = RatingsConfig(data=Data(source="synthetic"))
    ratings = load_ratings(config.data)
    legend = RATINGS.legend(config, ratings)
    expected = np.zeros(ratings.num_items, np.int64)
    for columns in RATINGS.divide(config, ratings, None).train:
        np.add.at(expected, columns["item"], 1)
    assert legend.counts.tolist() == expected.tolist()
    assert legend.counts.sum() < ratings.num_examples


def test_a_model_saved_before_there_were_counts_still_opens(tmp_path):
    recalled = RATINGS.recall({"item_ids": [3, 7], "titles": None})
    assert recalled.counts is None
    assert recalled.scale is None
    assert legend_of(recalled).files["items.json.zlib"]["counts"] is None


def test_ids_in_a_row_are_written_short():
    assert legend_of(Items(np.arange(10, 20))).files["items.json.zlib"]["ids"] == {"first": 10, "count": 10}


def legend_of(items):
    return items_legend(SavedModel(RatingsConfig(), {}, items))


def test_repeated_titles_of_an_older_model_are_made_unique():
    recalled = RATINGS.recall({"item_ids": [3, 7, 9], "titles": ["A", "B", "A"]})
    assert recalled.titles.tolist() == ["A [3]", "B", "A [9]"]
