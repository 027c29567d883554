import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.algorithms.validation import check_training, check_values, features_used
from toy_models import a_and_b, descend, linear, lookup_clients, lookup_model, squared_error


def with_columns(**columns):
    clients = a_and_b()
    return fr.Clients({**clients.columns, **columns}, clients.starts, clients.ends)


def test_only_features_that_are_read_are_used():
    clients = with_columns(time=np.arange(6), name=np.array(list("abcdef")))
    assert features_used(linear(), clients) == ["x", "y"]
    assert features_used(lookup_model(), lookup_clients([3, 2])) == ["item", "tags", "main_tag", "y"]


def test_features_that_only_a_metric_reads_are_used():
    model = linear()._replace(metrics={"t": fr.Metric(lambda p, b: (b["time"] * 1.0, jnp.ones_like(p)))})
    assert features_used(model, with_columns(time=np.arange(6))) == ["x", "y", "time"]


def test_a_feature_that_the_clients_do_not_have_is_named():
    with pytest.raises(ValueError, match="the model reads the feature 'rating', which is none of x, y"):
        features_used(linear()._replace(loss=lambda p, b: (p - b["rating"], jnp.ones_like(p))), a_and_b())


def test_a_model_may_ask_whether_a_feature_is_there():
    def loss(predictions, batch):
        weights = batch["weight"] if "weight" in batch else jnp.ones_like(predictions)
        return squared_error(predictions, batch)[0], weights

    model = linear()._replace(loss=loss)
    assert features_used(model, a_and_b()) == ["x", "y"]
    assert features_used(model, with_columns(weight=np.ones(6, np.float32))) == ["x", "y", "weight"]


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, b: (jnp.mean((p - b["y"]) ** 2), jnp.ones(())),
        lambda p, b: ((p - b["y"]) ** 2, jnp.ones(())),
        lambda p, b: ((p - b["y"])[:3], jnp.ones(3)),
    ],
    ids=["already a mean", "one weight for all", "too few values"],
)
def test_a_loss_of_the_wrong_shape_is_named(loss):
    with pytest.raises(ValueError, match=r"`loss` returns values of shape .* for 8 examples"):
        features_used(linear()._replace(loss=loss), a_and_b())


def test_clients_without_examples_are_refused():
    nothing = fr.Clients({"x": np.zeros(0), "y": np.zeros(0)}, np.array([0]), np.array([0]))
    algorithm = fr.federated_averaging(linear(), update=descend(0.1), server=optax.sgd(1.0))
    with pytest.raises(ValueError, match="the clients have no examples"):
        check_training(algorithm, nothing)


def test_a_model_that_fits_passes():
    algorithm = fr.federated_reconstruction(
        lookup_model(), reconstruct=fr.least_squares(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    assert check_training(algorithm, lookup_clients([0, 3, 2])) is None


def logistic(classes=4, loss="cross_entropy"):
    return fr.models.from_function(
        lambda params, x: x[:, None] * params["w"] + params["b"],
        {"w": jnp.zeros(classes), "b": jnp.zeros(classes)},
        local="b",
        inputs="x",
        label="y",
        loss=loss,
    )


def trained(model, clients, reconstruct=None):
    algorithm = fr.federated_reconstruction(
        model, reconstruct=reconstruct or descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    return fr.train(algorithm, clients, rounds=1, clients_per_round=2)


def classes(*labels):
    return fr.Clients.from_columns({"x": np.arange(6.0), "y": np.array(labels)}, client=list("aaabbb"))


@pytest.mark.parametrize(("labels", "bad"), [((-1, 0, 1, 2, 2, 1), "-1"), ((1, 2, 3, 4, 1, 2), "4")])
def test_labels_that_are_no_class_of_the_logits_are_refused(labels, bad):
    with pytest.raises(ValueError, match=rf"column 'y' holds {bad} .*0 to 3"):
        trained(logistic(), classes(*labels))
    with pytest.raises(ValueError, match=rf"column 'y' holds {bad} .*0 to 3"):
        fr.evaluate(
            fr.federated_averaging(logistic(), update=descend(0.1), reconstruct=descend(0.1), server=optax.sgd(1.0)),
            {"w": jnp.zeros(4)},
            classes(*labels),
        )


def test_labels_of_the_integer_loss_of_optax_are_checked_too():
    with pytest.raises(ValueError, match=r"column 'y' holds 4 .*0 to 3"):
        trained(logistic(loss=optax.softmax_cross_entropy_with_integer_labels), classes(1, 2, 3, 4, 1, 2))


def test_labels_of_one_logit_are_between_0_and_1():
    model = logistic(classes=1, loss="binary_cross_entropy")
    assert trained(model, classes(0, 1, 1, 0, 1, 0)).rounds == 1
    for labels in ((0, 1, 2, 3, 0, 1), (-1.0, 1.0, 1.0, -1.0, 1.0, -1.0)):
        with pytest.raises(ValueError, match=r"column 'y' holds (2|-1.0) .*0 to 1"):
            trained(model, classes(*labels))


def test_reconstruction_checks_labels_too():
    algorithm = fr.federated_averaging(logistic(), update=descend(0.1), reconstruct=descend(0.1), server=optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"column 'y' holds 4 .*0 to 3"):
        fr.reconstruct(algorithm, {"w": jnp.zeros(4)}, {"x": np.arange(2.0), "y": [4, 0]})


def test_labels_of_a_wrong_type_are_named():
    with pytest.raises(ValueError, match=r"column 'y': .* not float32"):
        trained(logistic(), classes(*np.arange(6, dtype=np.float32)))


def test_labels_of_clients_that_are_left_out_do_not_matter():
    assert trained(logistic(), classes(0, 1, 2, 7, 8, 9).take([0])).rounds == 1


def test_the_first_bad_value_is_named_and_no_examples_are_fine():
    x = np.zeros((4, 2), np.float32)
    x[3, 1] = np.nan
    clients = fr.Clients({"x": x, "y": np.zeros(4, np.float32)}, [0, 1, 1], [1, 1, 4])
    model = fr.models.from_function(
        lambda params, x: x @ params["w"] + params["b"],
        {"w": jnp.zeros(2), "b": jnp.zeros(())},
        **{"local": "b", "inputs": "x", "label": "y", "loss": "mse"},
    )
    algorithm = fr.federated_averaging(model, update=descend(0.1), reconstruct=descend(0.1), server=optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"column 'x' holds nan \(client 2, example 2\)"):
        check_values(algorithm, clients)
    check_values(algorithm, clients.cap(0))


@pytest.mark.parametrize(("column", "bad"), [("x", np.nan), ("y", np.inf)])
def test_numbers_that_are_not_finite_are_refused(column, bad):
    columns = {"x": np.arange(6.0, dtype=np.float32), "y": np.ones(6, np.float32)}
    columns[column][4] = bad
    with pytest.raises(ValueError, match=rf"column '{column}' holds {bad} \(client b, example 1\)"):
        trained(linear(), fr.Clients.from_columns(columns, client=list("aaabbb")))


def test_text_labels_are_named():
    with pytest.raises(ValueError, match="'y', which holds text"):
        trained(logistic(), classes(*"abcabc"))


def test_least_squares_refuses_cross_entropy():
    with pytest.raises(ValueError, match="`loss`"):
        trained(logistic(), classes(0, 1, 2, 3, 0, 1), reconstruct=fr.least_squares(1.0))


def test_a_dict_of_columns_alone_is_answered_with_from_columns():
    with pytest.raises(TypeError, match=r"Clients\.from_columns"):
        fr.Clients({"x": np.arange(3)})


@pytest.mark.parametrize("argument", ["reconstruct", "update"])
def test_an_optimizer_is_not_taken_for_a_solver(argument):
    arguments = {"reconstruct": descend(0.1), "update": descend(0.1), "server": optax.sgd(1.0)}
    algorithm = fr.federated_reconstruction(logistic(), **arguments | {argument: optax.sgd(0.1)})
    with pytest.raises(TypeError, match=f"`{argument}` must be a solver"):
        fr.train(algorithm, classes(0, 1, 2, 3, 0, 1), rounds=1)
