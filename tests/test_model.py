import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.core.model import finish, measure, metric_names
from fedrecon._src.core.pytrees import flatten, unflatten
from toy_models import assert_same_bits

PARAMS = {
    "user": {"embedding": np.ones(2), "bias": np.zeros(())},
    "item": [np.arange(3.0), np.arange(4.0)],
    "steps": np.int32(7),
}
EVERY = ["item/0", "item/1", "steps", "user/bias", "user/embedding"]

WHICH = {
    "a glob": ("user/*", ["user/bias", "user/embedding"]),
    "a path": ("item/1", ["item/1"]),
    "several globs": (["*/bias", "item/0"], ["item/0", "user/bias"]),
    "globs that overlap": (["user/*", "*/bias"], ["user/bias", "user/embedding"]),
    "a predicate": (lambda path, leaf: leaf.size == 3, ["item/0"]),
}


@pytest.mark.parametrize(("local", "expected"), WHICH.values(), ids=WHICH)
def test_parameters_are_partitioned_by_path_or_predicate(local, expected):
    parts = fr.partition(PARAMS, local, frozen="steps")
    assert sorted(parts.local) == expected
    assert sorted(parts.frozen) == ["steps"]
    assert sorted(parts.shared) == [p for p in EVERY if p not in expected and p != "steps"]
    assert_same_bits(parts.merge(parts.shared, parts.local, parts.frozen), PARAMS)


@pytest.mark.parametrize(
    ("local", "frozen", "message"),
    [
        ("user/*", ["steps", "*/bias"], r"`local` and `frozen` overlap: both select \['user/bias'\]"),
        ("usr/*", "steps", r"`local`: 'usr/\*' selects no parameter.*; the parameters are: item/0, item/1"),
        (["user/*", "x"], "steps", "`local`: 'x' selects no parameter"),
        ("user/*", "step", "`frozen`: 'step' selects no parameter"),
        (lambda path, leaf: False, "steps", "`local`: <function .* selects no parameter; the parameters are"),
        ([], "steps", r"`local`: \[\] selects no parameter"),
        (["user/*", "item/*"], "steps", "`local` selects everything, so nothing would be left for the server"),
        ("user/*", (), "{'steps': 'int32'} cannot be trained; select them with `frozen`"),
        (["user/*", "steps"], (), "{'steps': 'int32'} cannot be trained"),
    ],
    ids=[
        *("overlap", "local nothing", "second pattern nothing", "frozen nothing", "predicate nothing"),
        *("no pattern", "everything", "integer global", "integer local"),
    ],
)
def test_a_partition_that_makes_no_sense_is_refused(local, frozen, message):
    with pytest.raises(ValueError, match=message):
        fr.partition(PARAMS, local, frozen)


names = st.text("abc", min_size=1, max_size=3)
trees = st.recursive(
    st.integers(0, 100).map(lambda n: np.full(2, n, np.float32)),
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: len(jax.tree.leaves(tree)) >= 2)


@settings(max_examples=60, deadline=None)
@given(tree=trees, data=st.data())
def test_merging_undoes_a_partition(tree, data):
    leaves, structure = flatten(tree)
    assert_same_bits(unflatten(structure, dict(reversed(leaves.items()))), tree)
    paths = list(leaves)
    local = data.draw(st.sets(st.sampled_from(paths), min_size=1, max_size=len(paths) - 1))
    parts = fr.partition(tree, lambda path, leaf: path in local)
    assert set(parts.local) == local
    assert set(parts.shared) == set(paths) - local
    assert_same_bits(parts.merge(parts.shared, parts.local, parts.frozen), tree)
    zeroed = parts.merge(parts.shared, jax.tree.map(np.zeros_like, parts.local), parts.frozen)
    for path, leaf in flatten(zeroed)[0].items():
        np.testing.assert_array_equal(leaf, np.zeros(2) if path in local else leaves[path])


def test_two_parameters_of_one_path_are_refused():
    with pytest.raises(ValueError, match="two parameters have the same path"):
        flatten({"a": {"b": np.ones(1)}, "a/b": np.ones(1)})


def tokens_model():
    """Loss and metric over tokens; id 0 is padding and has no weight."""

    def wrong(predictions, batch):
        return (predictions != batch["target"]).astype(jnp.float32), (batch["target"] > 0).astype(jnp.float32)

    return fr.Model(
        init_global=lambda key: {},
        init_local=lambda key: (),
        predict=lambda g, local, batch: batch["guess"],
        loss=wrong,
        metrics={
            "percent": fr.Metric(wrong, lambda mean: 100 * mean),
            "by_example": fr.Metric(lambda p, b: (b["target"][:, 0] * 1.0, jnp.array([1.0, 2.0, 4.0]))),
        },
    )


TARGET = jnp.array([[1, 2, 0], [3, 0, 0], [4, 4, 4]])
GUESS = jnp.array([[1, 9, 9], [9, 0, 5], [4, 4, 9]])


def test_padded_tokens_and_padded_examples_have_no_weight():
    model = tokens_model()
    batch = {"target": TARGET, "guess": GUESS}
    loss, sums = measure(model, GUESS, batch, jnp.array([True, True, True]))
    np.testing.assert_allclose(sums, [[3, 6], [3, 6], [1 + 2 * 3 + 4 * 4, 7]])
    assert loss == pytest.approx(3 / 6)
    assert finish(model, sums) == pytest.approx({"loss": 0.5, "percent": 50.0, "by_example": 23 / 7})
    loss, sums = measure(model, GUESS, batch, jnp.array([True, False, True]))
    np.testing.assert_allclose(sums, [[2, 5], [2, 5], [1 + 4 * 4, 5]])
    assert loss == pytest.approx(2 / 5)


def test_metrics_are_named_in_order():
    assert metric_names(tokens_model()) == ["loss", "percent", "by_example"]


def test_without_any_weight_the_loss_is_zero_and_the_metrics_are_nan():
    model = tokens_model()
    batch = {"target": TARGET, "guess": GUESS}
    loss, sums = measure(model, GUESS, batch, jnp.zeros(3, bool))
    assert loss == 0
    assert all(math.isnan(value) for value in finish(model, sums).values())


def test_what_a_masked_example_holds_reaches_neither_loss_nor_gradient():
    model = fr.Model(
        init_global=lambda key: {},
        init_local=lambda key: (),
        predict=lambda g, local, batch: g * batch["x"],
        loss=lambda p, batch: (p**2, jnp.ones_like(p)),
    )

    def loss(g, x):
        return measure(model, g * x, {"x": x}, jnp.array([True, True, False]))[0]

    value, slope = jax.value_and_grad(loss)(3.0, jnp.array([1.0, 2.0, 1e30]))
    assert value == pytest.approx(9 * 5 / 2)
    assert slope == pytest.approx(2 * 3 * 5 / 2)
