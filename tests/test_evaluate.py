import importlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from toy_models import a_and_b, descend, linear, one_by_one, xy

W = {"w": np.float32(5)}


def recon(rate=0.1, model=None, **options):
    return fr.federated_reconstruction(
        model or linear(), reconstruct=descend(rate), update=descend(0.1), server=optax.sgd(1.0), **options
    )


def evaluate(clients, w=5.0, rate=0.1, split=None, model=None, **options):
    split = split or fr.split.alternate()
    params = {"w": np.float32(w)}
    return fr.evaluate(recon(rate, model), params, clients, split=split, layout=one_by_one(), **options)


def losing(*losses):
    """Clients whose query loss is known: the model predicts 0 throughout, and y is the loss's square root."""
    return xy(*(([0, 0], [0, math.sqrt(loss)]) for loss in losses))


def losses(*values, **options):
    return evaluate(losing(*values), 0.0, 0.0, fr.split.half(), **options)


def test_micro_is_over_examples_and_macro_over_clients():
    clients = xy(([1, 2, 3], [5, 6, 8]), ([1, 2, 3, 2], [5, 5, 9, 5]))
    found = evaluate(clients)
    assert found.protocol == "recon"
    assert (found.clients, found.diverged, found.examples) == (2, 0, 3)
    assert found.micro["loss"] == pytest.approx((6.76 + 2 * 14.44) / 3, rel=1e-5)
    assert found.macro["loss"] == pytest.approx((6.76 + 14.44) / 2, rel=1e-5)
    np.testing.assert_allclose(found.per_client["loss"], [6.76, 14.44], 1e-5)


def rooted():
    return linear()._replace(metrics={"rmse": fr.Metric(linear().loss, lambda mean: mean**0.5)})


def test_a_metric_is_finished_after_the_mean_over_examples_and_before_the_mean_over_clients():
    found = losses(1, 4, 16, model=rooted())
    assert found.micro["rmse"] == pytest.approx(7**0.5, rel=1e-5)
    assert found.macro["rmse"] == pytest.approx((1 + 2 + 4) / 3, rel=1e-5)


def test_quantiles_are_over_clients():
    found = losses(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    expected = {"0.05": 1.5, "0.25": 3.5, "0.5": 6, "0.75": 8.5, "0.95": 10.5}
    assert found.quantiles["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [3e38, -3e38])
def test_a_client_that_is_not_finite_is_counted_and_kept_out(bad):
    clients = xy(([0, 0], [0, 1]), ([0, 0], [0, bad]), ([0, 0], [0, 2]))
    found = evaluate(clients, 0.0, 0.0, fr.split.half())
    assert (found.clients, found.diverged, found.examples) == (3, 1, 2)
    assert found.micro["loss"] == found.macro["loss"] == pytest.approx(2.5)
    assert found.quantiles["loss"]["0.95"] <= 4
    np.testing.assert_allclose(found.per_client["loss"], [1, np.nan, 4])


def test_a_client_whose_reconstruction_blew_up_is_counted_and_kept_out():
    """A rate of 30 multiplies the error by 59 in every step."""
    long = ([0] * 60 + [0], [1] * 60 + [1])
    found = evaluate(xy(([0, 0], [0, 1]), long, ([0, 0], [0, 2])), 0.0, 30.0, fr.split.fraction(0.99))
    assert (found.clients, found.diverged) == (3, 1)
    assert math.isfinite(found.micro["loss"])


@pytest.mark.parametrize(("largest", "diverged"), [(999, 0), (1001, 1)])
def test_a_client_a_thousand_times_worse_than_the_median_has_diverged(largest, diverged):
    found = losses(1, 1, 1, 4, largest)
    assert found.diverged == diverged
    assert (found.macro["loss"] < 2) == bool(diverged)


def test_clients_are_not_diverged_because_most_are_perfect():
    found = losses(0, 0, 0, 1, 4)
    assert found.diverged == 0
    assert found.macro["loss"] == pytest.approx(1)


def test_a_warning_says_if_more_than_half_of_the_clients_diverged():
    good, bad = ([0, 0], [0, 1]), ([0, 0], [0, 3e38])
    evaluator = fr.Evaluator(recon(0.0), xy(good, bad, bad), layout=one_by_one())
    with pytest.warns(
        fr.DivergenceWarning, match="2 of 3 .* the other 1 alone.*smaller learning rates.*clip_norm"
    ) as told:
        evaluator({"w": np.float32(0)})
    assert [one.filename for one in told] == [__file__]
    assert evaluator.on(xy(good, bad))({"w": np.float32(0)}).diverged == 1  # half: no warning, which would be an error
    assert evaluator.measure({"w": np.float32(0)}).diverged == 2


def test_a_data_frame_is_not_taken_for_clients():
    with pytest.raises(TypeError, match=r"must be fr.Clients, made with fr.Clients.from_columns"):
        fr.evaluate(recon(), W, [1, 2])


def test_when_all_diverged_the_means_are_nan():
    clients = xy(([0, 0], [0, 3e38]), ([0, 0], [0, -3e38]))
    with pytest.warns(fr.DivergenceWarning, match="2 of 2 evaluated clients diverged: no metric has a value"):
        found = evaluate(clients, 0.0, 0.0, fr.split.half())
    assert (found.clients, found.diverged, found.examples) == (2, 2, 0)
    assert math.isnan(found.micro["loss"])
    assert math.isnan(found.macro["loss"])
    assert math.isnan(found.quantiles["loss"]["0.5"])


def test_clients_without_query_data_are_not_counted():
    clients = xy(([1, 2, 3], [5, 6, 8]), ([1], [5]), ([], []))
    found = evaluate(clients)
    assert (found.clients, found.diverged, found.examples) == (1, 0, 1)
    assert found.macro["loss"] == pytest.approx(6.76, rel=1e-5)
    np.testing.assert_array_equal(np.isnan(found.per_client["loss"]), [False, True, True])


def test_a_metric_that_nobody_has_weight_for_is_nan():
    nowhere = fr.Metric(lambda p, batch: (p, jnp.zeros_like(p)))
    found = losses(1, 2, model=linear()._replace(metrics={"nowhere": nowhere}))
    assert found.macro["loss"] == pytest.approx(1.5)
    for value in (found.micro["nowhere"], found.macro["nowhere"], found.quantiles["nowhere"]["0.5"]):
        assert math.isnan(value)


def test_standard_eval_measures_kept_parameters_and_recon_eval_rebuilds_them():
    """At w=1: y - x is 4, 4, 5 and 4, 3, 6; kept b are 4 and 5."""
    kept = {"b": np.array([4, 5], np.float32)}
    algorithm = fr.federated_averaging(linear(), update=descend(0.1), server=optax.sgd(1.0), reconstruct=descend(0.5))
    params = {"w": np.float32(1)}
    options = {"layout": one_by_one(), "client_state": kept}
    standard = fr.evaluate(algorithm, params, a_and_b(), protocol="standard", **options)
    assert standard.protocol == "standard"
    assert standard.examples == 6
    np.testing.assert_allclose(standard.per_client["loss"], [(0 + 0 + 1) / 3, (1 + 4 + 1) / 3], 1e-5)
    assert standard.micro["loss"] == pytest.approx(7 / 6, rel=1e-5)
    # A rate of .5 sets b to the last support example's y - x: 5 and 6; query is x=2, where y - x is 4 and 3.
    recon = fr.evaluate(algorithm, params, a_and_b(), split=fr.split.alternate(), **options)
    np.testing.assert_allclose(recon.per_client["loss"], [1, 9], 1e-5)


def test_standard_eval_of_what_training_kept_is_the_loss_on_seen_clients():
    algorithm = fr.federated_averaging(linear(), update=descend(0.05, epochs=20), server=optax.sgd(1.0))
    run = fr.train(algorithm, a_and_b(), rounds=5, clients_per_round=2, layout=one_by_one())
    found = fr.evaluate(
        algorithm, run.params, a_and_b(), client_state=run.client_state, protocol="standard", layout=one_by_one()
    )
    for i, client in enumerate(a_and_b()):
        error = run.params["w"] * client["x"] + run.client_state["b"][i] - client["y"]
        assert found.per_client["loss"][i] == pytest.approx(np.mean(error**2), rel=1e-4)


def test_evaluation_splits_even_where_training_does_not():
    algorithm = recon(split=fr.split.none())
    default, half, none = (
        fr.evaluate(algorithm, W, a_and_b(), split=split, layout=one_by_one())
        for split in (None, fr.split.half(), fr.split.none())
    )
    assert default.examples == half.examples == 2
    assert default.micro == half.micro
    assert none.examples == 6
    assert none.micro["loss"] == pytest.approx(10.267466, rel=1e-5)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_every_client_is_evaluated_however_many_run_at_once(monkeypatch, at_once):
    monkeypatch.setattr(importlib.import_module("fedrecon._src.simulation.evaluation"), "CLIENTS_AT_ONCE", at_once)
    found = losses(1, 2, 3, 4, 5, 6, 7)
    np.testing.assert_allclose(found.per_client["loss"], [1, 2, 3, 4, 5, 6, 7], 1e-5)


def test_one_evaluator_serves_many_parameters_and_other_clients():
    evaluator = fr.Evaluator(recon(), a_and_b(), split=fr.split.alternate(), layout=one_by_one())
    assert evaluator(W).macro["loss"] == pytest.approx(10.6, rel=1e-5)
    assert evaluator({"w": np.float32(0)}).macro["loss"] == pytest.approx(9.36, rel=1e-5)
    other = evaluator.on(xy(([1, 2, 3], [5, 6, 8])))
    assert other(W).macro["loss"] == pytest.approx(6.76, rel=1e-5)
    assert evaluator(W).macro["loss"] == pytest.approx(10.6, rel=1e-5)
    with pytest.raises(ValueError, match="column 'y' holds nan"):
        evaluator.on(xy(([1, 2], [5, np.nan])))


def test_the_seed_is_that_of_the_local_parameters():
    model = linear()._replace(init_local=lambda key: {"b": jax.random.normal(key)})
    one, same, other = (evaluate(a_and_b(), model=model, seed=seed).micro["loss"] for seed in (1, 1, 2))
    assert one == same != other


def test_a_summary_is_ready_for_json():
    summary = json.loads(json.dumps(losses(1, 2).summary()))
    assert summary.keys() == {"protocol", "clients", "diverged", "examples", "micro", "macro", "quantiles"}
    assert summary["macro"] == pytest.approx({"loss": 1.5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "recall"}, "`protocol` must be one of"),
        ({"protocol": "standard"}, "client_state"),
    ],
)
def test_impossible_evaluations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(a_and_b(), **options)


def test_no_clients_are_refused():
    with pytest.raises(ValueError, match="`clients`"):
        evaluate(a_and_b().take(np.array([], int)))
