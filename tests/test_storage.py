import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrecon._src.storage.arrays import (
    StorageError,
    load_arrays,
    read_json,
    save_arrays,
    without_nan,
    write_json,
)
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
        ({"b": SAVED["a"]}, "it holds ['a']; expected ['b']"),
        ({**SAVED, "b": SAVED["a"]}, "it holds ['a']; expected ['a', 'b']"),
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
