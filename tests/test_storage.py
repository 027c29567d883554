import os
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrecon._src.storage.arrays import check_parameters, load_arrays, map_array, save_arrays
from fedrecon._src.storage.atomic import StorageError, read_bytes, read_json, without_nan, write_json
from fedrecon._src.storage.manifest import file_digest
from toy_models import assert_same_bits


class Pair(NamedTuple):
    left: np.ndarray
    right: dict


TREES = {
    "nested": {"a": np.arange(6.0).reshape(2, 3), "b": [np.ones(2, np.int32), {"c": np.zeros((0, 4))}]},
    "named": Pair(np.arange(3, dtype=np.uint32), {"x": np.array([True, False])}),
    "scalar leaves": {"w": np.float32(3), "count": np.asarray(7, np.int32)},
    "not in memory order": {"a": np.arange(6.0).reshape(2, 3).T},
    "one array": np.arange(4),
    "an optimizer's state": jax.tree.map(np.asarray, optax.adam(0.1).init({"w": jnp.ones(3)})),
    "nothing": {},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_what_is_saved_is_loaded_to_the_bit(tmp_path, tree):
    save_arrays(tmp_path / "it", tree)
    assert_same_bits(load_arrays(tmp_path / "it", tree), tree)


def test_arrays_may_be_described_by_their_shapes(tmp_path):
    tree = TREES["nested"]
    save_arrays(tmp_path / "it", tree)
    like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), tree)
    assert_same_bits(load_arrays(tmp_path / "it", like), tree)


SAVED = {"a": np.zeros((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"a": np.zeros((2, 4), np.float32)}, "'a' is float32(2, 3); expected float32(2, 4)"),
        ({"a": np.zeros((2, 3), np.int32)}, "'a' is float32(2, 3); expected int32(2, 3)"),
        ({"b": SAVED["a"]}, "'a' is float32(2, 3); expected none"),
        ({**SAVED, "b": SAVED["a"]}, "'b' is missing; expected float32(2, 3)"),
    ],
    ids=["shape", "type", "name", "missing"],
)
def test_something_else_than_expected_is_a_sentence(tmp_path, like, message):
    save_arrays(tmp_path / "it", SAVED)
    with pytest.raises(StorageError, match=re.escape(message)):
        load_arrays(tmp_path / "it", like)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StorageError, match=f"{tmp_path}/it is missing"):
        load_arrays(tmp_path / "it", SAVED)
    with pytest.raises(StorageError, match=f"{tmp_path}/it is missing"):
        read_json(tmp_path / "it")


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_damaged_file_is_named(tmp_path, keep):
    path = tmp_path / "it"
    save_arrays(path, SAVED)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StorageError, match=f"{path} cannot be read"):
        load_arrays(path, SAVED)


@pytest.mark.parametrize("text", [b"", b'{"a": ', b"\xff\xfe"])
def test_damaged_json_is_named(tmp_path, text):
    (tmp_path / "it").write_bytes(text)
    with pytest.raises(StorageError, match=f"{tmp_path}/it is not valid JSON"):
        read_json(tmp_path / "it")


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "it.json"
    write_json(path, {"a": 1})
    write_json(path, {"b": [2]})
    assert read_json(path) == {"b": [2]}
    assert [p.name for p in tmp_path.iterdir()] == ["it.json"]


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    value = {"a": [float("nan"), 1.5, (float("inf"), "x")], "b": {"c": -float("inf"), "d": None, "e": True}}
    write_json(tmp_path / "it.json", value)
    expected = {"a": [None, 1.5, [None, "x"]], "b": {"c": None, "d": None, "e": True}}
    assert read_json(tmp_path / "it.json") == without_nan(value) == expected


# ---- what is not a file ----


@pytest.fixture(params=["fifo", "device", "folder"])
def special(request, tmp_path):
    """Return a path that is no regular file."""
    path = tmp_path / "it"
    {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[request.param](path)
    return path


@pytest.mark.parametrize("read", [read_json, lambda path: load_arrays(path, SAVED), file_digest, map_array])
def test_only_regular_files_are_read(special, read):
    with pytest.raises(StorageError, match="regular file"):
        read(special)


def test_a_link_to_a_file_is_read(tmp_path):
    write_json(tmp_path / "there", {"a": 1})
    (tmp_path / "it").symlink_to(tmp_path / "there")
    assert read_json(tmp_path / "it") == {"a": 1}


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "it").write_bytes(b"12345")
    assert read_bytes(tmp_path / "it", 5) == b"12345"
    with pytest.raises(StorageError, match="at most 4"):
        read_bytes(tmp_path / "it", 4)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)  # a hole; it takes no space
    for read in (read_json, lambda path: load_arrays(path, SAVED)):
        with pytest.raises(StorageError, match="at most"):
            read(tmp_path / "large")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_parameters_that_nothing_can_be_computed_with_are_refused(tmp_path, value):
    check_parameters(tmp_path, SAVED)
    with pytest.raises(StorageError, match="'a'"):
        check_parameters(tmp_path, {"a": np.array([1.0, value], np.float32)})
