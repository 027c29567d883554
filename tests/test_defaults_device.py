"""Models of ratings and clicks on devices: Python, ONNX Runtime and the page give the same numbers and order.

The model of counts has learned log(1 + x); what devices take and give are counts.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from device_models import NUMBER, clicks_model, default_model
from device_page import Page
from fedrecon._src.app.cli import main
from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.device.export import packed
from fedrecon._src.device.model_bundle import bundle_model
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.recommend.serving import Recommender
from fedrecon._src.recommend.tasks import RATINGS

pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")
pytest.importorskip("onnxruntime", reason="needs fedrecon[device]")

from fedrecon_device import Bundle, Personal
from fedrecon_device.tensors import GLOBAL, as_float32

pytestmark = pytest.mark.slow

MOST = 12
RATES = [1.0, 2.0, 3.5, 5.0]
COUNTS = [0.0, 1.0, 7.0, 250.0, 90000.0]
CLICKS = [1.0, 2.0, 40.0]
CASES = {  # by name: the transform or what counts of clicks do, the quantisation, what people may give
    "ratings": ("none", None, RATES),
    "ratings in int8": ("none", "int8", RATES),
    "ratings in float16": ("none", "float16", RATES),
    "counts": ("log1p", None, COUNTS),
    "counts in int8": ("log1p", "int8", COUNTS),
    "clicks": ("ignore", None, CLICKS),
    "clicks in int8": ("ignore", "int8", CLICKS),
    "clicks that are counted": ("log", None, CLICKS),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Bundle each case once; by name: the bundle, the recommender with a device's tables, the page, the run."""
    found = {}

    def get(name):
        if name not in found:
            transform, quantise, _ = CASES[name]
            place = tmp_path_factory.mktemp("case")
            made_up = clicks_model(transform) if name.startswith("clicks") else default_model(transform)
            made_up.save(place / "run" / "model")
            saved = open_model(place / "run")
            bundle_model(saved, place / "bundle", most=MOST, quantise=quantise)
            leaves, structure = flatten(saved.params)
            params = unflatten(structure, as_float32(packed(leaves, quantise, ("gram", "*popularity*")), GLOBAL))
            served = Recommender(dataclasses.replace(saved, params=params))
            page = Page(place / "bundle", place) if shutil.which("node") else None
            found[name] = (Bundle(place / "bundle"), served, page, place / "run")
        return found[name]

    yield get
    for *_, page, _ in found.values():
        if page is not None:
            page.close()


def near(found, expected, name):
    """To 1e-5, relative to numbers above 1, as the checker compares."""
    found, expected = np.asarray(found, np.float64).ravel(), np.asarray(expected, np.float64).ravel()
    assert found.shape == expected.shape, name
    assert np.max(np.abs(found - expected) / np.maximum(1, np.abs(expected)), initial=0) <= 1e-5, name


def examples(values):
    return st.lists(st.tuples(st.integers(0, NUMBER - 1), st.sampled_from(values)), max_size=MOST + 4)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_devices_reconstruct_and_predict_what_jax_does(made, name, data):
    """From no example, one, as many as count, more, with repeats."""
    device, served, page, _ = made(name)
    drawn = data.draw(examples(CASES[name][2]))
    item = np.array([item for item, _ in drawn], np.int32)
    rating = np.array([rating for _, rating in drawn], np.float32)
    local, expected, scores = in_jax(served, item[-MOST:], rating[-MOST:])
    found = device.reconstruct({"item": item, "rating": rating})
    for path, leaf in local.items():
        near(found[path], leaf, path)
    near(device.predict(found, {"item": np.arange(NUMBER, dtype=np.int32)}), scores, "predictions")
    if page is not None:
        mine = page.ask(item, rating)
        near(mine["local"], expected, "local parameters of the page")
        near(mine["scores"], scores, "predictions of the page")


def in_jax(served, item, rating):
    """Return local parameters by path, all in the page's order, and the predictions of all items before clipping."""
    saved = served.saved
    clients = fr.Clients({"item": item, "rating": rating}, np.array([0]), np.array([len(item)]))
    seen = saved.task.view(saved.config, clients)
    local = fr.reconstruct(saved.algorithm, served.saved.params, seen[0], seed=saved.config.seed)
    ((_, scores, _),) = served._every_score(seen)
    if saved.task is RATINGS and saved.config.model.scale.transform == "log1p":
        scores = np.expm1(scores)
    names = ("user_bias", "user_embedding", "user_traits", "popularity_weight")
    order = [name for name in names if name in local]
    return local, np.concatenate([np.ravel(local[name]) for name in order]), scores[0]


@pytest.mark.parametrize("name", ["ratings", "counts", "clicks", "clicks that are counted"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_python_a_device_and_the_page_recommend_the_same(made, tmp_path_factory, name, data):
    """Unknown items are left out, the last rating of an item counts, nothing rare or outside the scale comes back."""
    device, served, page, _ = made(name)
    ids = st.integers(995, 1005 + NUMBER)
    drawn = data.draw(st.lists(st.tuples(ids, st.sampled_from(CASES[name][2])), max_size=MOST))
    person = {}
    for one, rating in drawn:
        person.pop(one, None)
        person[one] = rating
    personal = Personal(device, tmp_path_factory.mktemp("me") / "me.json")
    personal.add(item=[one for one, _ in drawn], rating=[rating for _, rating in drawn])
    known = {one: rating for one, rating in person.items() if 1000 <= one < 1000 + NUMBER}  # Python warns of others
    expected, found = served.recommend(known, NUMBER), personal.recommend(NUMBER)
    same_order([(one.item, one.title, one.rating) for one in expected], [one[:3] for one in found])
    if device.task == "ratings":
        low, high = (np.expm1([1.0, 4.1]) if name == "counts" else (1.0, 4.1)) * np.array([0.99999, 1.00001])
        assert all(low <= one.score <= high for one in found)
    assert not [one for one in found if (one.item - 1000) % 40 < 5 or one.item in person]
    assert len({one.label for one in found}) == len(found)
    if page is not None:
        mine = page.ask({one - 1000: rating for one, rating in known.items()}, known.values())
        labels = device.items.labels
        shown = [(1000 + k, labels[k], score) for k, score in zip(mine["best"], mine["shown"], strict=True)]
        same_order([one[:3] for one in found], shown)


def same_order(expected, found):
    """The same items with the same labels and scores; those whose scores are as good as equal may change places."""
    assert {one[:2] for one in found} == {one[:2] for one in expected}
    near([one[2] for one in found], [one[2] for one in expected], "scores")
    scores = {item: score for item, _, score in expected}
    for (ours, _, _), (theirs, _, score) in zip(found, expected, strict=True):
        assert ours == theirs or abs(scores[ours] - score) <= 2e-5 * max(1, abs(score)), (ours, theirs)


def test_the_order_is_that_of_the_predictions_before_they_are_clipped(made, tmp_path):
    device, served, *_ = made("ratings")
    personal = Personal(device, tmp_path / "me.json")
    personal.add(item=[1010, 1011, 1012], rating=[5, 5, 5])
    found = personal.recommend(NUMBER)
    best = [one for one in found if one.score == pytest.approx(4.1)]
    assert len(best) > 5
    raw = device.predict(personal.local(), {"item": np.array([one.item - 1000 for one in best])})
    assert np.all(np.diff(raw) <= 0)
    assert raw[0] > raw[-1] > 4.1
    expected = served.recommend({1010: 5, 1011: 5, 1012: 5}, 10)
    assert [one.item for one in expected] == [one.item for one in found[:10]]


@pytest.mark.parametrize("name", ["ratings", "counts", "clicks", "clicks that are counted"])
def test_the_command_line_recommends_what_a_device_does(made, tmp_path, name, capsys):
    device, *_, run = made(name)
    given = {1010: 5.0, 1011: 1.0, 1300: 3.0}
    lines = [f"me,{item},{rating}" for item, rating in given.items()]
    (tmp_path / "mine.csv").write_text("\n".join(["user,item,rating", *lines]))
    assert main(["recommend", str(run), f"--{device.task}", str(tmp_path / "mine.csv"), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["users"]
    personal = Personal(device, tmp_path / "me.json")
    personal.add(item=list(given), rating=list(given.values()))
    found = personal.recommend(10)
    assert [one["item"] for one in told["recommendations"]] == [one.item for one in found]
    assert [one["title"] for one in told["recommendations"]] == [one.label for one in found]
    ratings = [one["rating"] for one in told["recommendations"]]
    assert ratings == pytest.approx([one.score for one in found], rel=1e-4, abs=1e-4)


def test_a_bundle_recommends_what_the_settings_of_its_model_allow(tmp_path):
    saved = default_model()
    bundle_model(saved, tmp_path / "own", most=2, onnx=False)
    bundle_model(saved, tmp_path / "given", most=2, onnx=False, least_count=9)
    assert Bundle(tmp_path / "own").least_count == saved.config.model.least_ratings == 5
    assert Bundle(tmp_path / "given").least_count == 9


def test_another_process_folder_and_hash_seed_give_the_same_bytes(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from device_models import default_model; "
        "from fedrecon._src.device.model_bundle import bundle_model; "
        "bundle_model(default_model(), 'b', most=4, quantise='int8')"
    )
    for name, seed, zone in (("one", "1", "UTC"), ("a deeper/two", "77", "Asia/Tokyo")):
        (tmp_path / name).mkdir(parents=True)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone}
        command = [sys.executable, "-c", code, str(Path(__file__).parent)]
        subprocess.run(command, cwd=tmp_path / name, env=environment, check=True)
    same_files(tmp_path / "one" / "b", tmp_path / "a deeper" / "two" / "b")


def same_files(one, other):
    files = sorted(file.relative_to(one) for file in one.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(other) for file in other.rglob("*") if file.is_file())
    assert len(files) > 10
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.parametrize("make", [default_model, lambda: default_model("log1p"), clicks_model])
def test_the_same_model_gives_the_same_bytes(tmp_path, make):
    for name in ("one", "two"):
        bundle_model(make(), tmp_path / name, most=4, quantise="int8")
    same_files(tmp_path / "one", tmp_path / "two")
