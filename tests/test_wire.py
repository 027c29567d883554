"""Bytes and back: exact, and anything else is a sentence."""

import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.core.upload import ROW_CHUNK, Upload
from fedrecon._src.deploy.messages import read_tree


def upload(clients=3, rows=ROW_CHUNK, seed=0):
    draw = np.random.default_rng(seed)
    count = draw.integers(0, 8, clients).astype(np.int32)
    there = np.arange(rows)[None] < count[:, None]
    return Upload(
        {
            "delta": {
                "table": fr.kit.RowChanges(
                    np.where(there, draw.integers(0, 50, (clients, rows)), 0).astype(np.int32),
                    np.where(there[..., None], draw.normal(size=(clients, rows, 2)), 0).astype(np.float32),
                    count,
                    50,
                ),
                "dense": draw.normal(size=(clients, 4)).astype(np.float32),
            }
        },
        draw.integers(1, 9, clients).astype(np.float32),
        draw.normal(size=(clients, 2, 2)).astype(np.float32),
    )


def test_a_message_of_many_arrays_is_read():
    many = {f"block_{number}/attention/kernel": np.float32([number]) for number in range(2000)}
    assert read_tree(fr.kit.to_bytes(many), many) == many


LIKE = upload(1)
GOOD = fr.kit.to_bytes(upload())


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 5), seed=st.integers(0, 999))
def test_an_upload_comes_back_to_the_bit(clients, seed):
    sent = upload(clients, seed=seed)
    found = fr.kit.from_bytes(fr.kit.to_bytes(sent), LIKE)
    assert jax.tree.structure(found) == jax.tree.structure(sent)
    jax.tree.map(np.testing.assert_array_equal, found, sent)


def test_the_same_upload_has_the_same_bytes():
    assert fr.kit.to_bytes(upload()) == GOOD


def test_rows_that_nobody_has_are_not_sent():
    assert len(fr.kit.to_bytes(upload(rows=10 * ROW_CHUNK))) == len(GOOD)


def with_table(**changes):
    import dataclasses

    good = upload()
    table = dataclasses.replace(good.delta["table"], **changes)
    return good._replace(parts={"delta": {**good.delta, "table": table}})


def full(shape, value, dtype):
    return np.full(shape, value, dtype)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (with_table(ids=full((3, ROW_CHUNK), 50, np.int32)), "names a row outside of 0 to 49"),
        (with_table(ids=full((3, ROW_CHUNK), -1, np.int32)), "names a row outside of 0 to 49"),
        (with_table(values=np.ones((3, ROW_CHUNK, 2), np.float32)), "has values that are not zero in its padding"),
        (with_table(values=np.zeros((3, ROW_CHUNK, 3), np.float32)), r"'parts/delta/table/values' is float32\(3"),
        (upload()._replace(examples=np.ones(2, np.float32)), "is of 3 clients, 'examples' of 2"),
        (upload()._replace(sums=np.ones((3, 1, 2), np.float32)), "'sums' is float32"),
        (upload()._replace(parts={"delta": {}}), "'parts/delta/dense' is missing; expected float32"),
        (upload().parts, "'dict'.; expected .*'Upload'"),
    ],
)
def test_what_does_not_fit_is_named(value, message):
    with pytest.raises(fr.kit.WireError, match=message):
        fr.kit.from_bytes(fr.kit.to_bytes(value), LIKE)


def test_a_message_above_the_limit_is_not_read():
    with pytest.raises(fr.kit.WireError, match=f"has {len(GOOD)} bytes; at most 10 are accepted"):
        fr.kit.from_bytes(GOOD, LIKE, most=10)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"\xff" * 64,
        (2**60).to_bytes(8, "little") + b"{}",
        (2**19).to_bytes(8, "little") + b"[" * 2**19,
        GOOD[:-1],
        GOOD + b"\0",
        GOOD.replace(rb"\"version\": \"1\"", rb"\"version\": \"7\""),
        GOOD.replace(b"fedrecon-message", b"fedrecon-massage"),
    ],
)
def test_foreign_and_cut_off_bytes_are_a_sentence(data):
    with pytest.raises(fr.kit.WireError):
        fr.kit.from_bytes(data, LIKE)


def test_any_damage_is_a_sentence_or_other_numbers_of_the_same_shape():
    """Damage to the numbers themselves is for whoever transports the message; nothing else may go wrong."""
    draw = random.Random(0)
    for _ in range(400):
        damaged = bytearray(GOOD)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        if draw.random() < 0.3:
            damaged = damaged[: draw.randrange(len(damaged))]
        try:
            found = fr.kit.from_bytes(bytes(damaged), LIKE)
        except fr.kit.WireError:
            continue
        assert [leaf.shape[0] for leaf in jax.tree.leaves(found)] == [3] * len(jax.tree.leaves(found))
