"""Closed-form reconstruction: rounds by hand, and the output bias of next words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from toy_models import a_and_b, descend, linear, one_by_one, one_round, squared_error


def residual_model(w=0.0):
    """Predict w * x + b, where b is the sum of the residuals of w * x over one more than their number."""

    def statistics(predictions, batch, mask):
        return {"sum": jnp.sum(jnp.where(mask, batch["y"] - predictions, 0)), "number": jnp.sum(mask * 1.0)}

    return fr.Model(
        init_global=lambda key: {"w": jnp.float32(w)},
        init_local=lambda key: {"sum": jnp.zeros(()), "number": jnp.zeros(())},
        predict=lambda shared, local, batch: shared["w"] * batch["x"] + local["sum"] / (1 + local["number"]),
        loss=squared_error,
        statistics=statistics,
    )


def algorithm_of(model, solver=None, **options):
    options = {"update": descend(0.1), "server": optax.sgd(1.0), "split": fr.split.alternate(), **options}
    return fr.federated_reconstruction(model, reconstruct=solver or fr.closed_form(batch_size=1), **options)


def test_a_round_by_hand():
    """A: b = (5 + 8) / 3, error 13/3 - 6; B: b = (5 + 9) / 3, error 14/3 - 5. Deltas .4 * 5/3 and .4 * 1/3."""
    run = one_round(algorithm_of(residual_model()), a_and_b())
    assert run.params["w"] == pytest.approx((2 / 3 + 0.4 / 3) / 2, rel=1e-5)
    assert run.history[0]["loss"] == pytest.approx((25 / 9 + 1 / 9) / 2, rel=1e-5)


def test_an_evaluation_by_hand_and_what_is_reconstructed():
    algorithm = algorithm_of(residual_model(5.0))
    params = {"w": jnp.float32(5)}
    local = fr.reconstruct(algorithm, params, {"x": np.float32([1, 3]), "y": np.float32([5, 8])})
    assert {name: float(leaf) for name, leaf in local.items()} == {"sum": -7, "number": 2}
    found = fr.evaluate(algorithm, params, a_and_b(), split=fr.split.alternate(), layout=one_by_one())
    assert found.micro["loss"] == pytest.approx((25 / 9 + 9) / 2, rel=1e-5)


def test_second_order_flows_through_the_statistics():
    """With b = sum(y - w x) / 3, A's error is 2w + (13 - 4w) / 3 - 6: its derivative by w is 2/3."""
    run = one_round(algorithm_of(residual_model(), second_order=True), a_and_b())
    deltas = [0.1 * 2 * (6 - 13 / 3) * 2 / 3, 0.1 * 2 * (5 - 14 / 3) * 2 / 3]
    assert run.params["w"] == pytest.approx(np.mean(deltas), rel=1e-5)


def test_batches_do_not_matter_and_the_limit_does():
    examples = {"x": np.float32([1, 2, 3]), "y": np.float32([5, 6, 8])}
    sums = {
        options: float(
            fr.reconstruct(algorithm_of(residual_model(), fr.closed_form(**dict(options))), {"w": 1.0}, examples)["sum"]
        )
        for options in [(("batch_size", 1),), (("batch_size", 2),), (("batch_size", 2), ("limit", 2))]
    }
    assert list(sums.values()) == [13, 13, 8]


def test_a_model_without_statistics_is_refused():
    with pytest.raises(ValueError, match="statistics"):
        fr.evaluate(algorithm_of(linear()), {"w": 1.0}, a_and_b())


def test_without_steps_all_of_the_support_is_packed():
    assert fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=0).limit is None


def test_the_output_bias_compares_counts_with_what_the_model_expects():
    """A model whose output kernel is 0 always expects softmax(bias); ids: 1 and 2 words, 4 the end, 5 and 6 buckets."""
    model = fr.models.next_word(2, 2, embedding=2, hidden=3, projection=2, local="output_bias")
    params = model.init_global(jax.random.key(0))
    shares = np.array([0.0001, 0.4, 0.1, 0.0001, 0.2998, 0.15, 0.05])
    params["output"] = {"kernel": jnp.zeros((2, 7)), "bias": jnp.log(shares)}
    examples = {
        "word": np.int32([[3, 1, 0], [3, 0, 0]]),
        "oov": np.int16([[0, 0, 1], [0, 0, 0]]),
        "target": np.int32([[1, 5, 4], [6, 0, 0]]),
    }
    algorithm = algorithm_of(model, fr.closed_form())
    local = fr.reconstruct(algorithm, params, examples)
    np.testing.assert_allclose(local["count"], [0, 1, 0, 0, 1, 2])
    np.testing.assert_allclose(local["expected"], 4 * np.array([0.0001, 0.4, 0.1, 0.0001, 0.2998, 0.2]), rtol=1e-4)
    logits = fr.predict(model, params, local, examples)[0, 0]
    bias = np.log((local["count"] + 5) / (local["expected"] + 5))
    np.testing.assert_allclose(logits, np.log(shares) + bias[[0, 1, 2, 3, 4, 5, 5]], rtol=1e-4)


def test_a_group_of_rare_words_has_a_bias_of_its_own():
    """As above with the first word alone in the head: at the first level, its group and the buckets have one each."""
    model = fr.models.next_word(2, 2, embedding=2, hidden=3, projection=2, local="output_bias", head=1)
    params = jax.tree.map(jnp.zeros_like, model.init_global(jax.random.key(0)))
    local = {"count": jnp.array([0.0, 1, 3, 0, 1, 2]), "expected": jnp.array([0.0, 2, 1, 0, 1, 1])}
    examples = {"word": np.int32([[3]]), "oov": np.int16([[0]]), "target": np.int32([[1]])}
    shares = np.exp(fr.predict(model, params, local, examples)[0, 0])
    weights = np.array([1, 6 / 7, 8 / 6, 1, 1, 7 / 6])  # (count + 5) / (expected + 5) of each id, all buckets last
    expected = weights[[0, 1, 2, 3, 4, 5, 5]] * [1, 1, 1, 1, 1, 0.5, 0.5]
    np.testing.assert_allclose(shares, expected / expected.sum(), rtol=1e-5)
