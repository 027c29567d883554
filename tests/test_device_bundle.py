"""Bundles: what they reconstruct and predict is what JAX does; the same input gives the same bytes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.device.export import export_form, packed

pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")
pytest.importorskip("onnxruntime", reason="needs fedrecon[device]")

from device_models import ITEMS, MOST, algorithm_of, factorization, newest, ratings_bundle, trained
from device_page import Page
from fedrecon.device import ExportError, bundle
from fedrecon_device import Bundle, Personal, check
from fedrecon_device.tensors import GLOBAL, as_float32, read_tensors

pytestmark = pytest.mark.slow

CASES = {
    "least squares": (factorization(), "least-squares", None),
    "least squares, all parts": (factorization(default=True, feedback=True), "least-squares", None),
    "sgd, no biases": (factorization(biases=False), "sgd", None),
    "momentum, learned default": (factorization(default=True), "momentum", None),
    "adagrad, feedback": (factorization(feedback=True), "adagrad", None),
    "adam": (factorization(), "adam", None),
}
QUICK = ("least squares, all parts", "sgd, no biases")
RATINGS = st.lists(st.tuples(st.integers(0, ITEMS - 1), st.sampled_from([1.0, 2.0, 3.5, 5.0])), max_size=MOST + 4)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Export each case once; by name: the open bundle, its algorithm, its parameters, the page over it."""
    made = {}

    def get(name):
        if name not in made:
            model, solver, quantise = CASES[name]
            out = tmp_path_factory.mktemp("bundle") / "b"
            algorithm, params = ratings_bundle(out, model, solver, quantise=quantise)
            page = Page(out, out.parent) if shutil.which("node") else None
            made[name] = (Bundle(out), algorithm, params, page)
        return made[name]

    yield get
    for *_, page in made.values():
        if page is not None:
            page.close()


def assert_close(found, expected):
    assert np.max(np.abs(np.asarray(found) - np.asarray(expected)), initial=0) <= 1e-5


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ratings=RATINGS)
@example(ratings=[])
@example(ratings=[(7, 5.0)])
@example(ratings=[(k, 3.5) for k in range(MOST)])
@example(ratings=[(7, 1.0 + k % 5) for k in range(MOST + 4)])
def test_a_device_and_the_page_reconstruct_and_predict_what_jax_does(bundles, name, ratings):
    """From no example, one, as many as count, more, with repeats."""
    device, algorithm, params, page = bundles(name)
    columns = columns_of(ratings)
    expected = jitted(algorithm, params)(newest(columns))
    local = device.reconstruct(columns)
    assert set(local) == set(expected)
    for path, leaf in local.items():
        assert_close(leaf, expected[path])
    items = np.arange(ITEMS, dtype=np.int32)
    scores = fr.predict(algorithm.model, params, expected, {"item": items})
    assert_close(device.predict(local, {"item": items}), scores)
    if page is not None:
        found = page.ask(columns["item"], columns["rating"])
        order = [path for path in ("user_bias", "user_embedding") if path in expected]
        assert_close(found["local"], np.concatenate([np.ravel(expected[path]) for path in order]))
        assert_close(found["scores"], scores)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=st.lists(st.tuples(st.integers(90, 310), st.sampled_from([1.0, 2.0, 5.0])), max_size=MOST + 8))
def test_a_person_with_unknown_and_repeated_items_has_the_parameters_of_jax(bundles, tmp_path_factory, name, given):
    device, algorithm, params, _ = bundles(name)
    person = Personal(device, tmp_path_factory.mktemp("me") / "me.json")
    added = person.add(item=[item for item, _ in given], rating=[rating for _, rating in given])
    assert added.unknown == [item for item, _ in given if not 100 <= item < 100 + ITEMS]
    last = {item: rating for item, rating in given if 100 <= item < 100 + ITEMS}
    expected = jitted(algorithm, params)(newest(columns_of([(item - 100, rating) for item, rating in last.items()])))
    for path, leaf in person.refresh().items():
        assert_close(leaf, expected[path])


def columns_of(ratings):
    return {
        "item": np.array([item for item, _ in ratings], np.int32),
        "rating": np.array([rating for _, rating in ratings], np.float32),
    }


JITTED = {}


def jitted(algorithm, params):
    """Reconstruct with JAX, padded as a device pads."""
    if id(algorithm) not in JITTED:
        form = export_form(algorithm, params, 0)
        run = jax.jit(form.reconstruct)

        def padded(columns):
            count = len(columns["item"])
            full = {name: np.zeros(MOST, one.dtype) for name, one in columns.items()}
            for name, column in columns.items():
                full[name][:count] = column
            return run(params, form.start, full, jnp.int32(count))

        JITTED[id(algorithm)] = padded
    return JITTED[id(algorithm)]


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("count", [1, 5, MOST])
def test_the_exported_form_is_the_one_that_serves(bundles, name, count):
    _, algorithm, params, _ = bundles(name)
    draw = np.random.default_rng(count)
    columns = {
        "item": draw.integers(0, ITEMS, count).astype(np.int32),
        "rating": draw.integers(1, 6, count).astype(np.float32),
    }
    served = fr.reconstruct(algorithm, params, columns, seed=0)
    for path, leaf in jitted(algorithm, params)(columns).items():
        assert_close(leaf, served[path])


def test_without_examples_the_start_comes_back(bundles):
    device, *_ = bundles("sgd, no biases")
    local = device.reconstruct({"item": [], "rating": []})
    for path, leaf in device.start.items():
        assert np.array_equal(local[path], leaf)


def test_the_same_model_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        ratings_bundle(tmp_path / name, factorization(), "least-squares")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_a_bundle_tells_nothing_of_the_machine_it_was_made_on(bundles):
    device, *_ = bundles("least squares, all parts")
    places = [str(Path(fr.__file__).parent).encode(), str(Path.home()).encode() + b"/", sys.prefix.encode()]
    for name in device.manifest["files"]:
        data = (device.folder / name).read_bytes()
        assert not [place for place in places if place in data], name


@pytest.mark.parametrize("quantise", ["int8", "float16"])
def test_quantised_tables_are_near_and_test_vectors_are_of_what_the_device_has(tmp_path, quantise):
    model = fr.models.matrix_factorization(300, 6, biases=True)
    params = trained(model)
    whole = params["item_embedding"]
    stored = packed(params, quantise)
    near = as_float32(stored, GLOBAL)["item_embedding"]
    assert stored["global/item_embedding"].dtype == np.dtype(quantise)
    step = np.max(np.abs(whole), 1, keepdims=True) / (254 if quantise == "int8" else 2000)
    assert np.all(np.abs(near - whole) <= step * 1.001)
    assert np.any(near != whole)
    assert as_float32(stored, GLOBAL)["mean"] == params["mean"]


def test_a_quantised_bundle_keeps_its_promises(tmp_path):
    ratings_bundle(tmp_path / "b", factorization(), "least-squares", quantise="int8")
    assert check(tmp_path / "b").difference < 1e-5
    tensors = read_tensors((tmp_path / "b" / "global.safetensors").read_bytes(), "tables")
    assert tensors["global/item_embedding"].dtype == np.int8


def test_numbers_that_are_not_finite_are_refused_with_the_name_of_the_table(tmp_path):
    params = trained(factorization())
    params["item_bias"][3] = np.nan
    with pytest.raises(ValueError, match="'item_bias' has entries that are not finite"):
        ratings_bundle(tmp_path / "b", factorization(), "sgd", params=params)


def test_what_has_no_translation_is_named_and_the_stablehlo_form_is_there(tmp_path):
    def predict(shared, local, batch):
        root = jnp.linalg.eigh(shared["metric"] + local["metric"])[0]
        return batch["x"] * root[0]

    model = fr.Model(
        init_global=lambda key: {"metric": jnp.eye(2)},
        init_local=lambda key: {"metric": jnp.zeros((2, 2))},
        predict=predict,
        loss=lambda predictions, batch: ((predictions - batch["y"]) ** 2, jnp.ones_like(predictions)),
    )
    algorithm = algorithm_of(model, fr.gradient_descent(optax.sgd(0.1), batch_size=2))
    like = {"x": np.ones(3, np.float32), "y": np.ones(3, np.float32)}
    with pytest.raises(ExportError, match="StableHLO") as problem:
        bundle(algorithm, {"metric": np.eye(2, dtype=np.float32)}, tmp_path / "b", like=like, most=4)
    assert "eigh" in str(problem.value)
    assert "global/metric" in str(problem.value)
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert "eigh" in manifest["graphs"]["reconstruct"]["missing"]
    exported = jax.export.deserialize((tmp_path / "b" / "reconstruct.jaxexport").read_bytes())
    assert not re.search(r'loc\("[^"]*":[0-9]+:[0-9]+', exported.mlir_module())  # no lines of source files
    inputs = {
        "global/metric": np.eye(2, dtype=np.float32),
        "start/metric": np.zeros((2, 2), np.float32),
        "example/x": np.ones(4, np.float32),
        "example/y": np.ones(4, np.float32),
        "count": np.int32(3),
    }
    assert exported.call(inputs)[0].shape == (2, 2)


def test_the_tables_are_the_file_that_safetensors_reads(bundles):
    from safetensors.numpy import load

    device, *_ = bundles("sgd, no biases")
    data = (device.folder / "global.safetensors").read_bytes()
    ours, theirs = read_tensors(data, "it"), load(data)
    assert set(ours) == set(theirs)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_runtime_imports_neither_jax_nor_onnxruntime_nor_fedrecon():
    code = (
        "import sys, fedrecon_device; unwanted = {'jax', 'onnxruntime', 'fedrecon'}; "
        "print([name for name in sys.modules if name.split('.')[0] in unwanted])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
