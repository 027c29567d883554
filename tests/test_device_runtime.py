"""The runtime on a device: hostile and damaged bundles, a person's file, recommendations that people can trust."""

import json
import os
import stat
import subprocess
import sys
import venv
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")
pytest.importorskip("onnxruntime", reason="needs fedrecon[device]")

import shutil

import fedrecon_device
from device_models import ITEMS, MOST, factorization, ratings_bundle, trained
from fedrecon._src.device.web_page import page_files
from fedrecon._src.recommend.ranking import recommend_items
from fedrecon_device import Bundle, BundleError, Personal, StoreError, check
from fedrecon_device.__main__ import main
from fedrecon_device.contents import MOST_JSON, content_of
from fedrecon_device.files import manifest_bytes
from fedrecon_device.ranking import clipped, nearest, rank
from fedrecon_device.tensors import read_tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "films"
    ratings_bundle(out, factorization(default=True), "least-squares", page=page_files)
    return out


def files_of(folder):
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


@pytest.fixture
def folder(made, tmp_path):
    """A copy of a bundle that may be damaged."""
    shutil.copytree(made, tmp_path / "films")
    return tmp_path / "films"


def rewrite(folder, change):
    """Change a manifest and give it a digest that fits, as somebody hostile would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_bytes(manifest_bytes(manifest))


# ---- damaged and hostile bundles ----


def test_a_whole_bundle_passes(made, capsys):
    assert main(["check", str(made)]) == 0
    assert "6 test vectors" in capsys.readouterr().out


def test_a_changed_byte_of_any_file_is_found(made, folder):
    names = files_of(folder)
    assert {"manifest.json", "predict.onnx", "web/app.js"} < set(names)
    for name in names:
        whole = (made / name).read_bytes()
        for where in (0, len(whole) // 2, len(whole) - 1):
            changed = bytearray(whole)
            changed[where] ^= 1
            (folder / name).write_bytes(changed)
            with pytest.raises(BundleError):
                check(folder)
        (folder / name).write_bytes(whole)
    check(folder)


@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), which=st.integers(0, 100), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_found(made, tmp_path_factory, where, which, flip):
    files = files_of(made)
    name = files[which % len(files)]
    data = bytearray((made / name).read_bytes())
    data[int(where * len(data))] ^= flip
    folder = tmp_path_factory.mktemp("changed") / "films"
    shutil.copytree(made, folder)
    (folder / name).write_bytes(data)
    with pytest.raises(BundleError):
        check(folder)


JUNK = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1 << 70,
        1e308,
        float("nan"),
        "",
        "x",
        "../x",
        [],
        {},
        [[]],
        [-1],
        [1 << 40],
        {"first": 0, "count": 1 << 40},
    ]
)


def replaced_somewhere(content, data):
    """Replace one value of nested JSON, however deep, or leave it out."""
    where, inside = None, content
    while isinstance(inside, (dict, list)) and inside and (where is None or data.draw(st.integers(0, 3))):
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        where = (inside, data.draw(st.sampled_from(keys)))
        inside = inside[where[1]]
    parent, key = where
    if isinstance(parent, dict) and data.draw(st.booleans()):
        del parent[key]
    else:
        parent[key] = data.draw(JUNK)
    return content


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "items.json.zlib", "test_vectors.json"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_anything_in_a_bundle_whose_digests_fit_is_read_or_refused(made, tmp_path_factory, name, data):
    """Somebody hostile writes digests that fit; whatever they wrote, no other error comes out."""
    folder = tmp_path_factory.mktemp("hostile") / "films"
    shutil.copytree(made, folder)
    changed = replaced_somewhere(content_of(name, (folder / name).read_bytes()), data)
    if name == "manifest.json":
        (folder / name).write_bytes(manifest_bytes(changed))
    else:
        rewritten(folder, name, packed_json(name, json.dumps(changed).encode()))
    try:
        check(folder)
        if Bundle(folder).task == "ratings":
            Personal(folder, folder.parent / "me.json").recommend(3)
    except BundleError:
        return
    finally:
        shutil.rmtree(folder)


def packed_json(name, text):
    return zlib.compress(text) if name.endswith(".zlib") else text


def rewritten(folder, name, content):
    """Replace a file, with a digest that fits."""
    (folder / name).write_bytes(content)
    about = {"bytes": len(content), "sha256": fedrecon_device.files.digest_of(content)}
    rewrite(folder, lambda manifest: manifest["files"].update({name: about}))


@pytest.mark.parametrize("name", ["items.json.zlib", "test_vectors.json"])
def test_json_inside_that_goes_too_deep_is_refused(folder, name):
    rewritten(folder, name, packed_json(name, b"[" * 200_000))
    with pytest.raises(BundleError, match="not valid JSON"):
        check(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest["examples"].update(most=1 << 40), "`examples` is damaged; expected at most"),
        (lambda manifest: manifest["examples"]["columns"]["item"].update(shape=[1 << 40]), "expected at most"),
        (lambda manifest: manifest["examples"]["columns"]["item"].update(dtype="O"), "columns.item` is damaged"),
        (lambda manifest: manifest["graphs"]["predict"]["inputs"][0].update(shape=[1 << 40, 6]), "the manifest says"),
    ],
)
def test_huge_shapes_are_refused_before_there_is_room_for_them(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(BundleError, match=message):
        check(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../b", "..", "web//x", "C:\\x", "a\nb", "manifest.json"]
)
def test_names_that_lead_out_of_the_folder_are_refused(folder, name):
    rewrite(folder, lambda manifest: manifest["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}))
    with pytest.raises(BundleError, match="not a plain name"):
        check(folder)


@pytest.mark.parametrize("size", [1 << 40, -1, "many", None, True])
def test_sizes_that_no_bundle_has_are_refused_before_anything_is_read(folder, size):
    rewrite(folder, lambda manifest: manifest["files"]["items.json.zlib"].update(bytes=size))
    with pytest.raises(BundleError, match=r"bytes|size"):
        Bundle(folder)


def test_links_and_cycles_of_folders_are_refused(folder, tmp_path):
    (folder / "round").symlink_to(folder)
    with pytest.raises(BundleError, match="is a link"):
        check(folder)
    (folder / "round").unlink()
    (tmp_path / "elsewhere").write_bytes((folder / "items.json.zlib").read_bytes())
    (folder / "items.json.zlib").unlink()
    (folder / "items.json.zlib").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"plain file|is a link"):
        check(folder)


def test_a_pipe_in_place_of_a_file_does_not_make_the_checker_wait(folder):
    (folder / "items.json.zlib").unlink()
    os.mkfifo(folder / "items.json.zlib")
    with pytest.raises(BundleError, match="not a plain file"):
        check(folder)


def test_files_that_the_manifest_does_not_name_are_found(folder):
    (folder / "more.txt").write_text("x")
    with pytest.raises(BundleError, match="not in manifest"):
        check(folder)


def test_json_that_goes_too_deep_is_refused(folder):
    (folder / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(BundleError, match="not valid JSON"):
        check(folder)


def test_another_version_is_named(folder):
    rewrite(folder, lambda manifest: manifest.update(version=3))
    with pytest.raises(BundleError, match="version 3; this runtime reads version 2"):
        check(folder)


def graph_with(change):
    """Build a graph with the inputs of none, and return its bytes after `change`."""
    import onnx

    value = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [1])
    model = onnx.helper.make_model(onnx.helper.make_graph(change(onnx), "g", [], [value]))
    return model.SerializeToString()


def replaced(folder, data):
    """Put another graph in place of `predict`, with digests that fit."""
    (folder / "predict.onnx").write_bytes(data)

    def change(manifest):
        manifest["files"]["predict.onnx"] = {"bytes": len(data), "sha256": fedrecon_device.files.digest_of(data)}
        manifest["graphs"]["predict"].update(inputs=[], outputs=[{"name": "out", "dtype": "float32", "shape": [1]}])

    rewrite(folder, change)


def test_a_graph_with_a_cycle_is_refused(folder):
    def nodes(onnx):
        return [
            onnx.helper.make_node("Add", ["a", "b"], ["out"]),
            onnx.helper.make_node("Neg", ["out"], ["a"]),
        ]

    replaced(folder, graph_with(nodes))
    with pytest.raises(BundleError, match="ONNX Runtime refuses it"):
        check(folder)


def test_a_graph_that_reads_files_of_the_machine_is_refused(folder, tmp_path):
    import onnx

    (tmp_path / "secret").write_bytes(b"\0" * 4)
    tensor = onnx.TensorProto(name="a", data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=str(tmp_path / "secret"))
    value = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["a"], ["out"])], "g", [], [value], [tensor])
    replaced(folder, onnx.helper.make_model(graph).SerializeToString())
    with pytest.raises(BundleError, match="tables in files beside it"):
        check(folder)


def test_a_graph_that_never_ends_is_stopped(folder, monkeypatch):
    import onnx

    monkeypatch.setattr("fedrecon_device.graphs.SECONDS", 0.3)
    helper, of = onnx.helper, onnx.TensorProto
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["x", "x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("t", of.INT64, []),
            helper.make_tensor_value_info("go", of.BOOL, []),
            helper.make_tensor_value_info("x", of.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("go_on", of.BOOL, []), helper.make_tensor_value_info("y", of.FLOAT, [1])],
    )
    constants = [
        helper.make_tensor("most", of.INT64, [], [2**62]),
        helper.make_tensor("yes", of.BOOL, [], [True]),
        helper.make_tensor("one", of.FLOAT, [1], [0.0]),
    ]
    loop = helper.make_node("Loop", ["most", "yes", "one"], ["out"], body=body)
    value = helper.make_tensor_value_info("out", of.FLOAT, [1])
    graph = helper.make_graph([loop], "g", [], [value], constants)
    replaced(
        folder, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    )
    with pytest.raises(BundleError, match="failed in ONNX Runtime"):
        check(folder)


def of_onnx(nodes, constants=(), functions=(), output=("float32", [1]), **more):
    """Return the bytes of a graph without inputs."""
    import onnx

    helper = onnx.helper
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(output[0]))
    out = helper.make_tensor_value_info("out", dtype, output[1])
    graph = helper.make_graph(nodes, "g", [], [out], list(constants), **more)
    opsets = [helper.make_opsetid("", 21), *([helper.make_opsetid("mine", 1)] if functions else [])]
    made = helper.make_model(graph, functions=list(functions), opset_imports=opsets, ir_version=10)
    return made.SerializeToString()


def nested_functions(depth):
    """A file of about a kilobyte that is 2 to the power of `depth` operations once it is loaded."""
    from onnx import helper

    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)]
    made = [helper.make_function("mine", "f0", ["x"], ["y"], [helper.make_node("Neg", ["x"], ["y"])], opsets)]
    for k in range(1, depth):
        twice = [
            helper.make_node(f"f{k - 1}", [a], [b], domain="mine") for a, b in (("x", "between"), ("between", "y"))
        ]
        made.append(helper.make_function("mine", f"f{k}", ["x"], ["y"], twice, opsets))
    node = helper.make_node(f"f{depth - 1}", ["one"], ["out"], domain="mine")
    return of_onnx([node], [helper.make_tensor("one", 1, [1], [1.0])], made)


def sparse_table():
    from onnx import helper

    sparse = helper.make_sparse_tensor(
        helper.make_tensor("a", 1, [1], [1.0]), helper.make_tensor("i", 7, [1], [0]), [1 << 40]
    )
    return of_onnx([helper.make_node("ReduceMax", ["a"], ["out"])], sparse_initializer=[sparse])


def text():
    from onnx import helper

    return of_onnx([helper.make_node("Identity", ["a"], ["out"])], [helper.make_tensor("a", 8, [1], [b"x"])])


def of_another_domain():
    from onnx import helper

    return of_onnx([helper.make_node("Inverse", ["a"], ["out"], domain="com.microsoft")])


def graphs_in_graphs():
    from onnx import helper

    yes = helper.make_tensor("yes", 9, [], [True])
    out = helper.make_tensor_value_info("out", 1, [1])
    body = helper.make_graph([helper.make_node("Identity", ["yes"], ["out"])], "g", [], [out], [yes])
    for _ in range(25):
        node = helper.make_node("If", ["yes"], ["out"], then_branch=body)
        body = helper.make_graph([node], "g", [], [out])
    return helper.make_model(body).SerializeToString()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nested_functions(60), "functions of its own"),
        (sparse_table, "sparse tables"),
        (text, "has text"),
        (of_another_domain, "an operation of b'com.microsoft'"),
        (graphs_in_graphs, "deeper than"),
        (lambda: b"\x3a\xff\xff\xff\xff\x0f", "not an ONNX file"),
        (lambda: b"\x0b" * 50, "not an ONNX file"),
        (lambda: b"\xff" * 50, "not an ONNX file"),
    ],
)
def test_a_graph_that_onnxruntime_should_not_load_is_refused(folder, make, message):
    replaced(folder, make())
    with pytest.raises(BundleError, match=message):
        check(folder)


def test_a_graph_that_wants_much_memory_does_not_get_it(folder):
    from onnx import helper

    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["large"]),
        helper.make_node("ReduceSum", ["large"], ["out"], keepdims=1),
    ]
    replaced(folder, of_onnx(nodes, [helper.make_tensor("size", 7, [1], [1 << 29])]))  # 2 GB
    with pytest.raises(BundleError, match=r"failed in ONNX Runtime"):
        check(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: zlib.compress(b" " * (MOST_JSON + 1)), "when decompressed"),  # a thousandth of it on disk
        (lambda: zlib.compress(b"{}")[:-1], "ends too early"),
        (lambda: zlib.compress(b"{}") + b"x", "has bytes after its end"),
        (lambda: b"not compressed", "not compressed with zlib"),
        (lambda: zlib.compress(b'{"ids":[1],"labels":null,"counts":[NaN]}'), "not valid JSON"),
        (lambda: zlib.compress(b'{"ids":[[]],"labels":null,"counts":null}'), "damaged"),
    ],
)
def test_items_that_are_too_large_cut_off_or_no_json_are_refused(folder, content, message):
    rewritten(folder, "items.json.zlib", content())
    with pytest.raises(BundleError, match=message):
        check(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"least_count": 3', '"least_count": NaN'),
        lambda text: text.replace('"least_count": 3', '"least_count": 3,\n "least_count": 3'),
        lambda text: text.replace('"least_count": 3', '"deep": ' + "[" * 900 + "]" * 900),
    ],
)
def test_a_manifest_with_no_numbers_repeated_names_or_endless_lists_is_refused(folder, change):
    path = folder / "manifest.json"
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    with pytest.raises(BundleError):
        check(folder)


def test_a_folder_in_a_bundle_that_is_a_link_is_refused(folder, tmp_path):
    shutil.move(folder / "web", tmp_path / "web")
    (folder / "web").symlink_to(tmp_path / "web")
    with pytest.raises(BundleError, match="is a link"):
        check(folder)
    with pytest.raises(BundleError, match="is a link"):
        fedrecon_device.files.read_checked(folder, Bundle(folder).manifest, "web/app.js")


def test_a_table_that_is_not_of_items_is_not_taken_for_one(folder, tmp_path):
    rewrite(folder, lambda manifest: manifest["roles"].update(item_embedding=manifest["roles"]["item_bias"]))
    with pytest.raises(BundleError, match="embeddings of 200 items have the shape"):
        Personal(folder, tmp_path / "me.json").recommend(3)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_tables_of_any_bytes_are_read_or_refused(data):
    try:
        read_tensors(data, "tables")
    except BundleError:
        return


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
        },
        {"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [1] * 100 + [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "O", "shape": [1], "data_offsets": [0, 8]}},
        [],
    ],
)
def test_tables_whose_ranges_do_not_fit_are_refused(header):
    text = json.dumps(header).encode()
    with pytest.raises(BundleError):
        read_tensors(len(text).to_bytes(8, "little") + text + b"\0" * 8, "tables")


# ---- a person ----


@pytest.fixture
def person(made, tmp_path):
    return Personal(made, tmp_path / "me" / "person.json")


def test_a_persons_file_is_theirs_alone_and_there_is_no_other(person, tmp_path):
    person.add(item=[103, 105], rating=[5, 2])
    person.refresh()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files == [tmp_path / "me" / "person.json"]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600


def test_deleting_the_file_deletes_the_person(person, made):
    start = {path: leaf.copy() for path, leaf in Bundle(made).start.items()}
    person.add(item=[103, 105], rating=[5, 2])
    person.refresh()
    person.store.path.unlink()
    assert person.stored() == {}
    assert all(np.array_equal(person.local()[path], leaf) for path, leaf in start.items())
    assert not person.store.path.exists()  # nor does asking bring it back


def test_a_failed_write_leaves_the_old_file_and_nothing_else(person, monkeypatch, tmp_path):
    person.add(item=[103], rating=[5])
    before = person.store.path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        person.add(item=[104], rating=[1])
    assert person.store.path.read_bytes() == before
    assert len(list((tmp_path / "me").iterdir())) == 1


def test_a_damaged_file_is_named(person):
    person.add(item=[103], rating=[5])
    person.store.path.write_text("{")
    with pytest.raises(StoreError, match=r"person\.json"):
        person.local()


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"examples": 7},
        {"examples": [["a"]]},
        {"examples": [[1, None]]},
        {"examples": {"x": [1]}},
        {"examples": [[[], 1]]},
    ],
)
def test_a_file_of_something_else_is_refused_in_a_sentence(person, content):
    person.store.write(content)
    for use in (person.recommend, person.local, lambda: person.add(item=[103], rating=[5])):
        with pytest.raises(StoreError, match="no examples for a model of ratings; delete it"):
            use()
    person.forget()
    assert person.recommend(1)


def test_kept_local_parameters_that_make_no_sense_are_made_anew(person):
    person.add(item=[103, 105], rating=[5, 2])
    expected = person.refresh()
    examples, digest = person.stored()["examples"], person.bundle.model_digest
    for local in ({}, {"user_embedding": [1]}, 7, {"user_embedding": "x", "user_bias": 1}):
        person.store.write({"examples": examples, "model": digest, "local": local, "before": 3})
        found = person.local()
        assert all(np.array_equal(found[path], leaf) for path, leaf in expected.items())


def test_the_last_rating_of_an_item_counts_and_unknown_items_are_returned(person):
    assert person.add(item=[103, 999, 103], rating=[5, 4, 2]) == (1, [999])
    person.add(item=[105, 103], rating=[3, 1])
    assert person.stored()["examples"] == [[105, 3.0], [103, 1.0]]


def test_the_newest_examples_count(person, made):
    ids = list(range(100, 100 + MOST + 5))
    person.add(item=ids, rating=[1 + k % 5 for k in range(len(ids))])
    expected = Bundle(made).reconstruct(
        {"item": np.arange(5, MOST + 5), "rating": [1 + k % 5 for k in range(5, MOST + 5)]}
    )
    for path, leaf in person.refresh().items():
        assert np.array_equal(leaf, expected[path])


def test_a_new_global_model_makes_kept_local_parameters_useless(person, tmp_path):
    person.add(item=[103, 105], rating=[5, 2])
    old = person.refresh()
    model = factorization(default=True)
    ratings_bundle(tmp_path / "newer", model, "least-squares", params=trained(model, seed=1))
    again = Personal(tmp_path / "newer", person.store.path)
    new = again.local()
    assert not np.allclose(old["user_embedding"], new["user_embedding"])
    expected = again.bundle.reconstruct({"item": [3, 5], "rating": [5, 2]})
    assert np.array_equal(new["user_embedding"], expected["user_embedding"])


def test_a_warm_start_goes_on_from_the_old_parameters_with_all_examples(tmp_path):
    ratings_bundle(tmp_path / "b", factorization(), "sgd")
    person = Personal(tmp_path / "b", tmp_path / "me.json")
    person.add(item=[103, 105], rating=[5, 2])
    old = person.refresh()
    person.add(item=[107], rating=[4])
    warm = person.refresh(warm=True)
    columns = {"item": [3, 5, 7], "rating": [5, 2, 4]}
    expected = person.bundle.reconstruct(columns, old)
    cold = person.bundle.reconstruct(columns)
    assert np.array_equal(warm["user_embedding"], expected["user_embedding"])
    assert not np.array_equal(warm["user_embedding"], cold["user_embedding"])
    assert np.array_equal(person.refresh()["user_embedding"], cold["user_embedding"])


def test_recommendations_are_within_the_scale_rated_often_enough_and_not_rated_yet(person):
    person.add(item=[150, 151], rating=[5, 5])
    found = person.recommend(ITEMS)
    assert len(found) == ITEMS - 2 - 3  # two are rated, three have fewer than three ratings
    assert all(1 <= one.score <= 5 for one in found)
    assert {one.item for one in found}.isdisjoint({100, 101, 102, 150, 151})
    assert all(set(one.because) <= {"film 50", "film 51"} for one in found)
    raw = person.bundle.predict(person.local(), {"item": np.array([one.item - 100 for one in found])})
    assert np.all(np.diff(raw) <= 0)


def test_predictions_are_within_the_scale_and_unknown_items_are_named(person):
    person.add(item=[150], rating=[5])
    assert np.all((person.predict([101, 102, 150]) >= 1) & (person.predict([101, 102, 150]) <= 5))
    with pytest.raises(ValueError, match="does not know item 7"):
        person.predict([7])


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, 1.0, 1.5, float("nan")]), min_size=1, max_size=12),
    n=st.integers(1, 12),
    data=st.data(),
)
def test_the_order_is_the_one_of_recommend(scores, n, data):
    rated = data.draw(st.lists(st.integers(0, len(scores) - 1), max_size=4))
    array = np.array(scores, np.float32)
    found = rank(array, n, left_out=rated)
    expected = recommend_items(Echo(array), {}, {}, num_items=len(array), exclude=rated, n=n).items
    assert found.tolist() == expected.tolist()


class Echo:
    """A model whose predictions are given."""

    def __init__(self, scores):
        self.scores = scores

    def predict(self, params, local, batch):
        return self.scores[np.asarray(batch["item"])]


def test_scores_are_clipped_and_neighbours_are_by_angle():
    assert clipped(np.array([-1.0, 3.0, 7.2]), (0.5, 5)).tolist() == [0.5, 3.0, 5.0]
    table = np.array([[1, 0], [2, 0.1], [0, 1], [-1, 0]], np.float32)
    assert nearest(table, 0, [2, 1, 3]) == [1]
    assert nearest(table, 0, []) == []


@pytest.mark.slow
def test_the_checker_works_where_there_is_no_jax(made, tmp_path):
    """A fresh environment with numpy and onnxruntime, and the package on its path."""
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    pins = ["onnxruntime==1.31.1", "numpy==2.4.6"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins], check=True)
    package = Path(fedrecon_device.__file__).parent
    (tmp_path / "path").mkdir()
    shutil.copytree(package, tmp_path / "path" / "fedrecon_device")
    run = subprocess.run(
        [python, "-m", "fedrecon_device", "check", made],
        env={"PYTHONPATH": str(tmp_path / "path")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "largest difference" in run.stdout
    without = subprocess.run([python, "-c", "import jax"], capture_output=True)
    assert without.returncode == 1


def test_the_runtime_imports_neither_fedrecon_nor_jax():
    modules = [path.stem for path in Path(fedrecon_device.__file__).parent.glob("[a-z]*.py")]
    imports = "; ".join(f"import fedrecon_device.{name}" for name in modules)
    script = f"import sys; {imports}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "fedrecon_device" in found
    assert not {"fedrecon", "jax", "jaxlib", "scipy", "optax", "onnx"} & set(found)


@pytest.mark.slow
def test_the_runtime_is_a_wheel_of_its_own(tmp_path):
    source = shutil.copytree(Path(fedrecon_device.__file__).parents[1], tmp_path / "src-device")
    build = ["pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    subprocess.run([sys.executable, "-m", *build], check=True)
    (wheel,) = tmp_path.glob(f"fedrecon_device-{fedrecon_device.__version__}-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fedrecon_device/bundle.py", "fedrecon_device/web/index.html", "fedrecon_device/web/app.js"} <= set(names)
    assert not [name for name in names if name.startswith("fedrecon/")]
