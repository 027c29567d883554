"""Plain functions as models: what is local, what a batch feeds, losses by name, keys and state by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core.model import Step
from fedrecon._src.models.losses import make_loss, make_metrics
from toy_frameworks import DIM, ITEMS, RATINGS, assert_a_round_equals_ours
from toy_models import a_and_b, assert_close, assert_same_bits, clients_of, descend, leaves_of, one_round, xy

KEY = jax.random.key(0)


def two_layers(key):
    draw = lambda n, shape: jax.random.normal(jax.random.fold_in(key, n), shape)  # noqa: E731
    return {
        "body": {"kernel": draw(0, (4, 3)), "bias": draw(1, (3,))},
        "head": {"kernel": draw(2, (3, 2)), "bias": draw(3, (2,))},
    }


def forward(params, x):
    hidden = jnp.tanh(x @ params["body"]["kernel"] + params["body"]["bias"])
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


def function_model(local="head", **options):
    options = {"inputs": "x", "loss": "cross_entropy", **options}
    return fr.models.from_function(forward, two_layers, local=local, **options)


def parts(model):
    return set(model.init_global(KEY)), set(model.init_local(KEY))


HEAD = {"head/kernel", "head/bias"}
BIASES = {"body/bias", "head/bias"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("head", HEAD),
        ("head/*", HEAD),
        ("*/bias", BIASES),
        (["head/bias", "body/b*"], BIASES),
        (lambda path, leaf: leaf.ndim == 1, BIASES),
        (["head/kernel", lambda path, leaf: path == "head/bias"], HEAD),
        ((), set()),
        ("*", HEAD | BIASES | {"body/kernel"}),
    ],
    ids=["layer", "glob", "suffix", "several", "predicate", "mixed", "nothing", "everything"],
)
def test_what_is_local_is_said_by_pattern_or_predicate(local, expected):
    shared, own = parts(function_model(local))
    assert own == expected
    assert shared == (HEAD | BIASES | {"body/kernel"}) - expected


def test_frozen_parameters_are_neither_global_nor_local_and_keep_their_value():
    shared, own = parts(function_model("head", frozen="body/kernel"))
    assert (shared, own) == ({"body/bias"}, HEAD)
    model = function_model("head", frozen="body")
    batch = {"x": jnp.ones((2, 4))}
    params = two_layers(KEY)
    found = model.predict({}, {path: params["head"][path[5:]] for path in HEAD}, batch)
    np.testing.assert_allclose(found, forward(params, batch["x"]), 1e-5)


def test_parameters_that_are_not_floats_are_frozen():
    init = {"table": jnp.arange(3), "w": jnp.ones(3), "b": jnp.zeros(3)}
    model = fr.models.from_function(
        lambda p, x: p["w"][p["table"]] * x + p["b"], init, local="b", inputs="x", loss="mse"
    )
    assert parts(model) == ({"w"}, {"b"})


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ("haed", r"`local`: 'haed' selects no parameter \(did you mean 'head'"),
        ("head/kernle", r"did you mean 'head/kernel'"),
        (
            ["head", "*/gamma"],
            r"'\*/gamma' selects no parameter.*: body/bias, body/kernel",
        ),
        (lambda path, leaf: False, "`local`: <function .* selects no parameter"),
        (fr.models.rows("head/kernel", [7]), r"`rows` of 'head/kernel' must be some, not all, of 0 to 2 \(got \[7\]"),
        (fr.models.rows("head/kernel", slice(None)), "must be some, not all, of 0 to"),
        (["head", fr.models.rows("head/kernel", [1])], "'head/kernel' twice, whole and by rows"),
    ],
    ids=["misspelt", "misspelt leaf", "one of several", "predicate", "no such row", "all rows", "twice"],
)
def test_a_local_that_matches_nothing_is_named_with_what_was_meant(local, message):
    with pytest.raises(ValueError, match=message):
        function_model(local)


def test_a_local_that_is_no_selection_is_refused():
    with pytest.raises(TypeError, match="`local` must be a path pattern"):
        function_model(3)


def test_local_and_frozen_must_not_overlap():
    with pytest.raises(ValueError, match="`local` selects 'head/bias', but `frozen` selects it too"):
        function_model("head", frozen="*/bias")


def test_rows_cannot_be_frozen():
    with pytest.raises(ValueError, match="`frozen` selects rows of 'body/kernel'; select whole parameters"):
        function_model(frozen=fr.models.rows("body/kernel", [1]))


def test_a_misspelt_or_missing_option_is_named():
    with pytest.raises(TypeError, match=r"`metric` is not an option \(did you mean 'metrics'"):
        function_model(metric=["accuracy"])
    with pytest.raises(TypeError, match="`inputs` is missing"):
        fr.models.from_function(forward, two_layers, local="head", loss="mse")


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="the model has no parameters; build it first"):
        fr.models.from_function(lambda p, x: x, {}, local=(), inputs="x", loss="mse")


def test_an_unknown_state_treatment_is_named():
    with pytest.raises(ValueError, match=r"`state`.*'sometimes'"):
        function_model(state="sometimes")


def test_initial_parameters_follow_the_key_and_clients_draw_their_own():
    model = function_model()
    assert_same_bits(model.init_global(KEY), model.init_global(KEY))
    one, other = (model.init_local(jax.random.key(n)) for n in (1, 2))
    assert (one["head/kernel"] != other["head/kernel"]).all()
    np.testing.assert_allclose(model.init_global(KEY)["body/kernel"], two_layers(KEY)["body"]["kernel"])


def test_given_parameters_are_where_everybody_starts():
    params = two_layers(KEY)
    model = fr.models.from_function(forward, params, local="head", inputs="x", loss="cross_entropy")
    for n in (1, 2):
        assert_same_bits(model.init_local(jax.random.key(n))["head/kernel"], params["head"]["kernel"])


@pytest.mark.parametrize("inputs", [["a", "b"], {"first": "a", "second": "b"}], ids=["in order", "by name"])
def test_several_features_feed_several_arguments(inputs):
    model = fr.models.from_function(
        lambda p, first, second: p["w"] * first - p["b"] * second,
        {"w": jnp.float32(2), "b": jnp.float32(3)},
        local="b",
        inputs=inputs,
        loss="mse",
    )
    batch = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([5.0, 7.0])}
    assert model.predict({"w": 2.0}, {"b": 3.0}, batch).tolist() == [-13.0, -17.0]


def test_a_feature_that_a_batch_lacks_is_named():
    model = function_model(inputs="image")
    params = model.init_global(KEY), model.init_local(KEY)
    with pytest.raises(ValueError, match=r"`inputs` names 'image' \(did you mean 'images'\?\); a batch has"):
        model.predict(*params, {"images": jnp.ones((2, 4))})
    with pytest.raises(ValueError, match="`label` names 'label'; a batch has: image"):
        model.loss(jnp.zeros((2, 2)), {"image": jnp.ones((2, 4))})
    with pytest.raises(ValueError, match="`inputs` names 'image'"):
        fr.train(
            fr.federated_reconstruction(model, reconstruct=descend(1), update=descend(1), server=optax.sgd(1.0)),
            xy(([1], [2])),
            rounds=1,
        )


LOGITS = np.array([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]])
LOG_SUMS = np.log(np.exp(LOGITS).sum(1))


@pytest.mark.parametrize(
    ("name", "predictions", "labels", "expected"),
    [
        ("mse", [[1.0], [3.0]], [2.0, 5.0], [1.0, 4.0]),
        ("mae", [1.0, 3.0], [2.0, 5.0], [1.0, 2.0]),
        ("huber", [1.0, 3.0], [1.5, 5.0], [0.125, 1.5]),
        ("cross_entropy", LOGITS, np.array([0, 2]), [LOG_SUMS[0] - 2, LOG_SUMS[1]]),
        ("cross_entropy", LOGITS, np.eye(3)[[0, 2]], [LOG_SUMS[0] - 2, LOG_SUMS[1]]),
        ("binary_cross_entropy", [[0.5], [-1.0]], np.array([1, 1]), np.log1p(np.exp([-0.5, 1.0]))),
    ],
)
def test_losses_by_name(name, predictions, labels, expected):
    labels = jnp.asarray(labels, jnp.int32 if np.asarray(labels).dtype.kind == "i" else jnp.float32)
    values, weights = make_loss(name, "y", None)(jnp.asarray(predictions), {"y": labels})
    np.testing.assert_allclose(values, expected, 1e-5)
    assert weights.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "predictions", "labels", "expected"),
    [
        ("accuracy", LOGITS, np.array([0, 2]), 0.5),
        ("accuracy", LOGITS, np.eye(3)[[0, 1]], 1.0),
        ("accuracy", [[0.5], [-1.0]], np.array([1, 1]), 0.5),
        ("rmse", [1.0, 3.0], [2.0, 5.0], 2.5**0.5),
        ("perplexity", LOGITS, np.array([0, 2]), np.exp((LOG_SUMS[0] - 2 + LOG_SUMS[1]) / 2)),
    ],
)
def test_metrics_by_name(name, predictions, labels, expected):
    labels = jnp.asarray(labels, jnp.int32 if np.asarray(labels).dtype.kind == "i" else jnp.float32)
    (metric,) = make_metrics([name], "y", None).values()
    values, weights = metric.measure(jnp.asarray(predictions), {"y": labels})
    assert metric.finish(float((values * weights).sum() / weights.sum())) == pytest.approx(expected, rel=1e-5)


def test_weights_come_from_a_feature():
    batch = {"y": jnp.zeros((2, 3)), "w": jnp.array([1.0, 0.0])}
    values, weights = make_loss("mse", "y", "w")(jnp.ones((2, 3)), batch)
    assert values.shape == weights.shape == (2, 3)
    assert weights.sum(1).tolist() == [3, 0]


def test_functions_may_take_the_whole_batch():
    loss = make_loss(lambda p, batch: p - batch["y"] * batch["z"], None, None)
    assert loss(jnp.array([5.0]), {"y": jnp.array([2.0]), "z": jnp.array([2.0])})[0].tolist() == [1.0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda p, y: jnp.mean((p[:, 0] - y) ** 2),
            r"`loss` returned shape \(\) for 2 examples; return values, not a mean",
        ),
        (lambda p, y: jnp.zeros((3, 2)), r"`loss` returned shape \(3, 2\) for 2 examples"),
        ("mse", r"predictions have shape \(2, 3\) and labels \(2,\)"),
        ("cross_entropy", r"needs class numbers of shape \(2,\) or probabilities .* not float32 of shape \(2,\)"),
    ],
    ids=["a mean", "other examples", "mse", "cross entropy"],
)
def test_a_loss_of_the_wrong_shape_is_named(loss, message):
    with pytest.raises(ValueError, match=message):
        make_loss(loss, "y", None)(jnp.zeros((2, 3)), {"y": jnp.zeros(2)})


def test_an_unknown_loss_or_metric_is_named_with_what_was_meant():
    with pytest.raises(ValueError, match=r"`loss` is 'crossentropy' \(did you mean .*'cross_entropy'"):
        make_loss("crossentropy", "y", None)
    with pytest.raises(ValueError, match=r"`metrics` is 'acuracy' \(did you mean 'accuracy'\?\)"):
        make_metrics(["acuracy"], "y", None)
    with pytest.raises(ValueError, match="`metrics` is 3; give a function, or one of"):
        make_metrics([3], "y", None)


def test_a_metric_in_a_list_is_named_after_its_function():
    assert list(make_metrics([jnp.abs, "rmse"], "y", None)) == [jnp.abs.__name__, "rmse"]


def factors(params, item):
    return jnp.take(params["items"], item, axis=0) @ params["user"]


def factor_model(local="user", **options):
    init = lambda key: {  # noqa: E731
        "items": jax.random.normal(key, (ITEMS, DIM)),
        "user": jax.random.normal(key, (DIM,)),
    }
    return fr.models.from_function(factors, init, **{**RATINGS, **options, "local": local})


@pytest.mark.slow
def test_a_round_of_a_plain_function_equals_ours():
    assert_a_round_equals_ours(factor_model(), "items", "user", (DIM,))


LOCAL_ROWS = [2, 3, 7]


@pytest.mark.parametrize("ids", [LOCAL_ROWS, np.array([7, 3, 2])], ids=["list", "array"])
def test_some_rows_of_a_table_are_local_and_the_rest_global(ids):
    model = factor_model(["user", fr.models.rows("items", ids)])
    shared, own = model.init_global(KEY), model.init_local(KEY)
    assert shared["items"].shape == (ITEMS - 3, DIM)
    assert own["items"].shape == (3, DIM)
    table = np.arange(ITEMS * DIM, dtype=np.float32).reshape(ITEMS, DIM)
    rest = np.delete(table, LOCAL_ROWS, 0)
    found = model.predict(
        {"items": rest}, {"items": table[LOCAL_ROWS], "user": np.ones(DIM)}, {"item": jnp.arange(ITEMS)}
    )
    np.testing.assert_allclose(found, table.sum(1))


def test_rows_may_be_a_slice():
    model = factor_model(fr.models.rows("items", slice(ITEMS - 4, None)))
    assert model.init_global(KEY)["items"].shape == (ITEMS - 4, DIM)
    assert parts(model) == ({"items", "user"}, {"items"})


def test_a_round_with_local_rows_is_the_one_worked_out_by_hand():
    """One client, one example each of support and query, both of item 1, whose row is local: no global row moves."""
    model = fr.models.from_function(
        lambda p, item: p["items"][item] * p["scale"],
        {"items": jnp.zeros(3), "scale": jnp.float32(1)},
        local=fr.models.rows("items", [1]),
        inputs="item",
        label="y",
        loss="mse",
    )
    clients = clients_of({"item": np.array([1, 1], np.int32), "y": np.array([2.0, 4.0])})
    algorithm = fr.federated_reconstruction(
        model, reconstruct=descend(0.25), update=descend(0.1), server=optax.sgd(1.0)
    )
    params = one_round(algorithm, clients).params
    # The row becomes 0 + .25 * 2 * 2 = 1; the scale then 1 + .1 * 2 * (4 - 1) * 1 = 1.6.
    assert params["scale"] == pytest.approx(1.6)
    assert params["items"].tolist() == [0, 0]


def noisy(params, x, key=None):
    """A prediction whose slope in w is random: x times a number that only the key decides."""
    factor = 1.0 if key is None else jax.random.uniform(key)
    return params["w"] * x * factor + params["b"]


def noisy_model():
    return fr.models.from_function(
        noisy,
        {"w": jnp.float32(0), "b": jnp.float32(0)},
        local="b",
        inputs="x",
        label="y",
        loss=lambda p, y: p + 0 * y,  # so that the change of w is -rate * x * what was drawn
    )


@functools.cache
def noisy_algorithm(epochs):
    return fr.federated_reconstruction(
        noisy_model(),
        reconstruct=descend(0.0),
        update=descend(1.0, epochs=epochs),
        server=optax.sgd(1.0),
        split=fr.split.none(),
    )


def noisy_run(clients, rounds=1, epochs=1, **options):
    return -float(one_round(noisy_algorithm(epochs), clients, rounds, **options).params["w"])


@pytest.mark.slow
def test_what_is_random_differs_by_client_round_and_step():
    alone, pair = xy(([1], [0])), xy(([1], [0]), ([1], [0]))
    first = noisy_run(alone)
    assert 0 < first < 1
    both = 2 * noisy_run(pair)  # the mean of two clients
    assert both - first != pytest.approx(first, rel=1e-3)
    assert noisy_run(alone, rounds=2) - first != pytest.approx(first, rel=1e-3)
    assert noisy_run(alone, epochs=2) - first != pytest.approx(first, rel=1e-3)


@pytest.mark.slow
def test_what_is_random_follows_from_the_seed_and_not_from_the_layout():
    clients = xy(([1, 2], [0, 0]), ([3], [0]), ([1], [0]))
    here = noisy_run(clients, epochs=2)
    assert noisy_run(clients, epochs=2) == here
    assert noisy_run(clients, epochs=2, layout=fr.layout(block=2, jax_devices=1)) == pytest.approx(here, rel=1e-6)
    assert noisy_run(clients, epochs=2, seed=1) != here


def test_federated_averaging_gives_keys_too():
    algorithm = fr.federated_averaging(noisy_model(), update=descend(1.0), server=optax.sgd(1.0))
    assert 0 < -float(one_round(algorithm, xy(([1], [0]))).params["w"]) < 1


def test_nothing_is_random_in_evaluation_and_in_rebuilding_for_inference():
    algorithm = fr.federated_reconstruction(
        fr.models.from_function(
            noisy, {"w": jnp.float32(1), "b": jnp.float32(0)}, local="w", inputs="x", label="y", loss=lambda p, y: p + y
        ),
        reconstruct=descend(0.5),
        update=descend(0.1),
        server=optax.sgd(1.0),
    )
    params = {"b": np.float32(1)}
    clients = xy(([2, 4], [0, 0]))
    # Rebuilt on x=2: w = 1 - .5 * 2 = 0, and the query at x=4 is 0 * 4 + 1; nothing was drawn.
    assert fr.evaluate(algorithm, params, clients).micro["loss"] == pytest.approx(1.0)
    assert fr.reconstruct(algorithm, params, {"x": np.float32([2]), "y": np.float32([0])})["w"] == 0


MOMENTUM = 0.9


def centred(params, state, x, training, mask):
    """prediction = w * (x - mean) + b, with the batch's mean in training and a running one otherwise."""
    mask = jnp.ones(x.shape) if mask is None else mask
    mean = jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1)
    new = {"mean": MOMENTUM * state["mean"] + (1 - MOMENTUM) * mean}
    return params["w"] * (x - (mean if training else state["mean"])) + params["b"], new if training else state


def centred_model(state, local="b"):
    return fr.models.from_function(
        centred,
        {"w": jnp.float32(1), "b": jnp.float32(0)},
        init_state={"mean": jnp.float32(5)},
        momentum=MOMENTUM,
        local=local,
        inputs="x",
        label="y",
        loss="mse",
        state=state,
    )


def centred_algorithm(state, server=None, make=fr.federated_reconstruction, **options):
    return make(
        centred_model(state),
        reconstruct=descend(0.0, 2),
        update=descend(0.0, 2),
        server=server or optax.sgd(1.0),
        **options,
    )


X = [1, 2, 6, 10, 4, 20]  # support 1 2 6, query 10 4 20


def test_local_statistics_are_those_of_the_support():
    algorithm = centred_algorithm("local")
    params = algorithm.model.init_global(KEY)
    assert set(params) == {"w"}
    found = fr.reconstruct(algorithm, params, {"x": np.float32(X[:3]), "y": np.zeros(3, np.float32)})
    assert found["mean"] == pytest.approx(3.0, rel=1e-5)
    losses = (np.array(X[3:]) - 3.0) ** 2
    assert fr.evaluate(algorithm, params, xy((X, np.zeros(6)))).micro["loss"] == pytest.approx(losses.mean(), rel=1e-4)


def test_local_statistics_of_many_examples_are_the_mean_over_batches_weighed_by_examples():
    algorithm = centred_algorithm("local")
    x = np.random.default_rng(0).normal(3, 1, 150).astype(np.float32)
    found = fr.reconstruct(algorithm, {"w": np.float32(1)}, {"x": x, "y": 0 * x})
    assert found["mean"] == pytest.approx(x.mean(), rel=1e-4)


def test_local_statistics_of_a_client_without_support_stay_as_they_start():
    found = fr.reconstruct(centred_algorithm("local"), {"w": np.float32(1)}, xy(([], []), ([2], [0])))
    assert found["mean"].tolist() == pytest.approx([5.0, 2.0], rel=1e-5)


def test_training_normalises_by_the_real_examples_of_a_batch():
    """With w fixed the loss of the query batches (10, 4) and (20) is that of their distances from their own means."""
    for state in ("local", "averaged"):
        run = one_round(centred_algorithm(state), xy((X, np.zeros(6))))
        assert run.history[0]["loss"] == pytest.approx((9 + 9 + 0) / 3, rel=1e-5)


def test_averaged_statistics_move_as_the_layer_moves_them_and_are_averaged():
    clients = xy((X, np.zeros(6)), ([0, 0, 7, 9], np.zeros(4)))
    one = 5 * MOMENTUM**2 + 7 * 0.1 * MOMENTUM + 20 * 0.1  # batches (10, 4) and (20)
    other = 5 * MOMENTUM + 8 * 0.1  # batch (7, 9)
    run = one_round(centred_algorithm("averaged"), clients)
    assert run.params["mean"] == pytest.approx((3 * one + 2 * other) / 5, rel=1e-5)
    assert run.params["w"] == 1


def test_averaged_statistics_are_not_given_to_the_server_s_optimizer():
    clients = xy((X, np.zeros(6)), ([0, 0, 7, 9], np.zeros(4)))
    plain, adam = (
        one_round(centred_algorithm("averaged", server), clients, rounds=2)
        for server in (optax.sgd(1.0), optax.adam(0.5))
    )
    assert adam.params["mean"] == pytest.approx(plain.params["mean"], rel=1e-6)


def test_frozen_statistics_are_used_in_training_too_and_stay():
    algorithm = centred_algorithm("frozen")
    run = one_round(algorithm, xy((X, np.zeros(6))))
    assert run.history[0]["loss"] == pytest.approx(((np.array(X[3:]) - 5) ** 2).mean(), rel=1e-5)
    assert set(run.params) == {"w"}
    assert set(algorithm.model.init_local(KEY)) == {"b"}


def test_federated_averaging_rebuilds_the_local_statistics_of_its_owners():
    algorithm = centred_algorithm("local", make=fr.federated_averaging)
    run = one_round(algorithm, xy(([1, 2, 6], np.zeros(3)), ([4, 8], np.zeros(2))))
    assert run.client_state["mean"].tolist() == pytest.approx([3, 6], rel=1e-5)


def test_statistics_follow_what_is_local_by_default():
    assert centred_model(None).state.local == ("mean",)
    assert centred_model(None, local=()).state.shared == ("mean",)


def test_a_model_without_local_parameters_can_still_have_local_statistics():
    model = centred_model("local", local=())
    algorithm = fr.federated_averaging(model, update=descend(0.0, 2), server=optax.sgd(1.0))
    found = fr.evaluate(algorithm, model.init_global(KEY), xy((X, np.zeros(6))))
    assert found.micro["loss"] == pytest.approx(((np.array(X[3:]) - 3) ** 2).mean(), rel=1e-4)


def test_state_that_is_no_moving_average_becomes_what_batches_make_of_it():
    def counting(params, state, x, training, mask):
        del mask
        return params["w"] * x + params["b"] + 0 * state["most"], {"most": jnp.maximum(state["most"], x.max())}

    model = fr.models.from_function(
        counting, {"w": jnp.float32(1), "b": jnp.float32(0)}, init_state={"most": jnp.float32(4)}, local="b",
        inputs="x", label="y", loss="mse",
    )  # fmt: skip
    algorithm = fr.federated_reconstruction(model, reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0))
    found = fr.reconstruct(algorithm, {"w": np.float32(1)}, xy(([1, 2], [0, 0]), ([9, 3], [0, 0])))
    assert found["most"].tolist() == [4, 9]


def test_second_order_refuses_averaged_statistics():
    with pytest.raises(ValueError, match="give the model state='local' or state='frozen'"):
        centred_algorithm("averaged", second_order=True)


def test_second_order_with_local_statistics_goes_through_training():
    run = one_round(centred_algorithm("local", second_order=True), xy((X, np.zeros(6))))
    assert run.history[0]["loss"] == pytest.approx((9 + 9 + 0) / 3, rel=1e-5)


def test_least_squares_refuses_local_statistics():
    algorithm = fr.federated_reconstruction(
        centred_model("local"), reconstruct=fr.least_squares(1.0), update=descend(0.1), server=optax.sgd(1.0)
    )
    with pytest.raises(ValueError, match="needs predictions that do not use local statistics"):
        one_round(algorithm, xy((X, np.zeros(6))))


def test_a_learned_default_keeps_statistics_and_keys():
    model = fr.models.learned_default(centred_model("averaged"))
    assert model.state.shared == ("shared/mean",)
    algorithm = fr.federated_reconstruction(
        model, reconstruct=descend(0.0, 2), update=descend(0.0, 2), server=optax.sgd(1.0)
    )
    run = one_round(algorithm, xy((X, np.zeros(6))))
    expected = 5 * MOMENTUM**2 + 7 * 0.1 * MOMENTUM + 20 * 0.1
    assert run.params["shared"]["mean"] == pytest.approx(expected, rel=1e-5)
    assert fr.models.learned_default(noisy_model()).predict_train is not None


def test_finetuning_holds_statistics():
    algorithm = fr.with_finetuning(centred_algorithm("local"), descend(0.0, 2))
    found = fr.evaluate(algorithm, {"w": np.float32(1)}, xy((X, np.zeros(6))))
    assert found.micro["loss"] == pytest.approx(((np.array(X[3:]) - 3) ** 2).mean(), rel=1e-4)
    shared = fr.with_finetuning(centred_algorithm("averaged"), descend(0.0, 2))
    assert set(shared.model.init_local(KEY)["finetuned"]) == {"w"}


def test_recommendations_come_from_a_model_with_one_output_too():
    model = fr.models.from_function(
        lambda p, item: p["items"][item][:, None] * p["user"],
        {"items": jnp.array([1.0, 3.0, 2.0]), "user": jnp.float32(1)},
        **RATINGS,
    )
    found = fr.recommend.recommend_items(
        model, {"items": np.float32([1, 3, 2])}, {"user": np.float32(1)}, num_items=3, n=2
    )
    assert found.items.tolist() == [1, 2]


def test_a_table_of_clients_refuses_statistics_and_passes_keys_on():
    with pytest.raises(ValueError, match="cannot have batch statistics"):
        fr.models.client_table(centred_model("local"), 3)
    model = fr.models.client_table(noisy_model(), 2)
    params = {"shared": {"w": jnp.float32(1)}, "locals": {"b": jnp.zeros(2)}}
    batch = {"client": jnp.array([0, 1]), "x": jnp.ones(2), "y": jnp.zeros(2)}
    drawn = model.predict_train(params, {}, batch, Step(jnp.ones(2, bool), KEY))
    assert 0 < drawn[0] != drawn[1] < 1
    assert model.predict(params, {}, batch).tolist() == [1, 1]


def test_models_that_use_no_key_and_no_state_are_as_they_were():
    model = factor_model()
    assert model.predict_train is None
    assert model.state is None
    assert leaves_of(model.init_local(KEY)).size == DIM


def test_the_spec_s_linear_model_gives_the_spec_s_round_as_a_function():
    model = fr.models.from_function(
        lambda p, x: p["w"] * x + p["b"],
        {"w": jnp.float32(0), "b": jnp.float32(0)},
        local="b",
        inputs="x",
        label="y",
        loss="mse",
    )
    algorithm = fr.federated_reconstruction(
        model, reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0), split=fr.split.alternate()
    )
    run = one_round(algorithm, a_and_b())
    assert_close(run.params, {"w": np.float32(1.2)})
    assert run.history[0]["loss"] == pytest.approx(9.36, rel=1e-5)


def test_the_momentum_of_a_function_s_state_is_checked():
    def model(momentum):
        return fr.models.from_function(
            centred, {"w": jnp.float32(1), "b": jnp.float32(0)}, init_state={"mean": jnp.float32(5)},
            momentum=momentum, local="b", inputs="x", label="y", loss="mse",
        )  # fmt: skip

    assert model({"mean": 0.5}).state.momenta == {"mean": 0.5}
    with pytest.raises(ValueError, match=r"names 'means' .did you mean 'mean'..*; the state is: mean"):
        model({"means": 0.5})
    with pytest.raises(ValueError, match="`momentum`"):
        model(1)
