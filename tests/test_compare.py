"""Several ways of training side by side, on clients that none has seen."""

import csv
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.simulation.comparison import measure_costs
from toy_models import a_and_b, clients_of, descend, linear, one_by_one, one_round, squared_error, xy

pytestmark = pytest.mark.slow


def line(local):
    """prediction = w * x + b from zero, with any part of it local."""
    return fr.models.from_function(
        lambda params, x: params["w"] * x + params["b"],
        {"w": jnp.zeros(()), "b": jnp.zeros(())},
        local=local,
        inputs="x",
        label="y",
        loss="mse",
        metrics=["mae"],
    )


def recon(model, rate=0.1, **options):
    return fr.federated_reconstruction(
        model, reconstruct=descend(0.1), update=descend(rate), server=optax.sgd(1.0), **options
    )


def averaging(model):
    return fr.federated_averaging(model, update=descend(0.1), server=optax.sgd(1.0))


def three_ways():
    return {
        "local only": fr.local_training(line("*"), train=descend(0.1)),
        "global only": averaging(line(())),
        "partially local": recon(line("b")),
    }


def compared(algorithms, unseen, **options):
    return fr.compare(algorithms, a_and_b(), unseen, rounds=1, layout=one_by_one(), **options)


def test_three_ways_are_the_ones_worked_out_by_hand():
    """The unseen client has support (1, 2) and query (2, 5).

    Local: from (0, 0) at x=1, y=2, a step of .1 gives w = b = .4; error at x=2: 1.2 - 5.
    Partially local: half and half gives A and B support x in {1, 2}, query x=3. b becomes 1, then 1 + .2 * 5 = 2 for A
    and 1 + .2 * 4 = 1.8 for B; w becomes .2 * 6 * 3 = 3.6 and .2 * 7.2 * 3 = 4.32, in the mean 3.96.
    The unseen client's b is then .2 * (2 - 3.96).
    """
    found = compared(three_ways(), xy(([1, 2], [2, 5])), split=fr.split.half())
    assert list(found.rows) == ["local only", "global only", "partially local"]
    assert found["local only"]["mae"] == pytest.approx(3.8, rel=1e-5)
    w = 3.96
    assert found["partially local"]["mae"] == pytest.approx(abs(2 * w + 0.2 * (2 - w) - 5), rel=1e-5)
    w, b = averaged_by_hand(a_and_b())
    assert found["global only"]["mae"] == pytest.approx(abs(2 * w + b - 5), rel=1e-5)
    assert [way.unseen[0].examples for way in found.rows.values()] == [1, 1, 1]
    assert [way.runs[0].rounds for way in found.rows.values()] == [0, 1, 1]
    assert [way.costs.up for way in found.rows.values()] == [0, 8, 4]


def averaged_by_hand(clients, rate=0.1):
    after = []
    for client in clients:
        w = b = 0.0
        for x, y in zip(client["x"], client["y"], strict=True):
            error = w * x + b - y
            w, b = w - rate * 2 * error * x, b - rate * 2 * error
        after.append((w, b))
    return np.mean(after, axis=0)


def test_support_changes_nothing_where_nothing_is_local():
    one, other = (compared(three_ways(), xy(([1, 2], [y, 5]))) for y in (2, 9))
    assert one["global only"] == other["global only"]
    assert one["partially local"] != other["partially local"]
    assert one["local only"] != other["local only"]


def test_the_table_is_aligned_and_says_on_whom_it_was_measured():
    lines = str(compared(three_ways(), xy(([1, 2], [2, 5]), ([1, 2, 3], [1, 1, 1])))).splitlines()
    assert lines[0].split() == ["unseen", "mae", "worst", "tenth", "down", "up", "keeps", "steps", "seconds", "once"]
    assert [text[:15].strip() for text in lines[2:5]] == ["local only", "global only", "partially local"]
    assert len({len(text) for text in lines[:5]}) == 1
    assert lines[5] == "2 clients never seen in training, 2 query examples"


def test_costs_are_those_of_a_round():
    """A and B have three examples each: partially local, two support and one query."""
    ways = three_ways() | {"ditto": ditto(0.1)}
    costs = {name: row.costs for name, row in compared(ways, xy(([1, 2], [2, 5]))).rows.items()}
    assert [c.down for c in costs.values()] == [0, 8, 4, 8]
    assert [c.up for c in costs.values()] == [0, 8, 4, 8]
    assert [c.state for c in costs.values()] == [0, 0, 0, 8]
    assert [c.steps for c in costs.values()] == [0, 3, 3, 6]
    assert [c.once for c in costs.values()] == [True, True, True, False]


def ditto(rate):
    model = line(())
    return fr.algorithms.ditto(model, update=descend(rate), personal=descend(0.1), strength=0.0, server=optax.sgd(1.0))


def test_rows_are_what_a_client_sends():
    """Per-FedAvg hides its model's lookups, yet sends rows: those of support and query, with their ids."""
    model = fr.models.client_table(fr.models.matrix_factorization(50, 2), num_clients=2)
    ratings = clients_of(
        {"item": np.array([1, 2, 3, 4]), "client": np.zeros(4, int), "rating": np.ones(4)},
        {"item": np.array([5, 6]), "client": np.ones(2, int), "rating": np.ones(2)},
    )
    algorithm = fr.algorithms.per_fedavg(model, adapt=descend(0.1), update=descend(0.1), server=optax.sgd(1.0))
    costs = measure_costs(algorithm, ratings)
    assert costs.down == 4 * (50 * 2 + 2 * 2)
    assert costs.up == 3 * (8 + 4) + 1 * (8 + 4)  # three items in the mean, one row of its own, and their ids


def test_what_is_sent_by_rows_has_the_bytes_on_the_wire():
    model = fr.models.matrix_factorization(50, 2, biases=True)
    ratings = clients_of({"item": np.array([1, 2, 3, 4, 5, 6]), "rating": np.ones(6)})
    algorithm = fr.federated_reconstruction(model, reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0))
    message = algorithm.message(algorithm.init(jax.random.key(0)))
    upload = fr.kit.client_update(algorithm, message, ratings, jax.random.key(1))
    data = fr.kit.to_bytes(upload)
    counts = [change.count for change in upload.delta.values() if isinstance(change, fr.kit.RowChanges)]
    assert len(counts) == 2
    header = 8 + int.from_bytes(data[:8], "little")
    changes = len(data) - header - sum(array.nbytes for array in (*counts, upload.examples, upload.sums))
    assert measure_costs(algorithm, ratings).up == changes
    assert fr.explain(algorithm, ratings).sends_by_rows == changes


def test_settings_are_chosen_on_validation_clients():
    """With a rate of 0 the unseen error is that of w = b = 0."""
    ways = {"recon": {rate: recon(line("b"), rate) for rate in (0.0, 0.1)}, "ditto": {r: ditto(r) for r in (0.1, 0.0)}}
    found = compared(ways, xy(([1, 2], [2, 5])), valid=xy(([1, 2], [5, 6])))
    assert found.rows["recon"].setting == 0.1
    assert found.rows["ditto"].setting in (0.1, 0.0)
    assert str(found).splitlines()[2].startswith("recon (0.1)")
    with pytest.raises(ValueError, match="equally many settings"):
        compared({"one": {1: recon(line("b")), 2: recon(line("b"))}, "other": recon(line("b"))}, xy(([1, 2], [2, 5])))
    with pytest.raises(ValueError, match="`valid` is missing"):
        compared({"one": {1: recon(line("b")), 2: recon(line("b"))}}, xy(([1, 2], [2, 5])))


def test_seen_clients_are_measured_on_later_examples_with_what_they_keep():
    """One client trains on its first two examples and is measured on the third."""
    clients = xy(([1, 2, 3], [5, 6, 8]))
    ways = {
        "recon": recon(line("b"), 0.0),
        "averaging": fr.federated_averaging(
            line("b"), update=descend(0.1), server=optax.sgd(1.0), reconstruct=descend(0.1)
        ),
    }
    found = fr.compare(
        ways, clients, xy(([1, 2], [2, 5])), seen=fr.split.fraction(2 / 3), rounds=1, layout=one_by_one()
    )
    b = w = 0.0
    for x, y in ((1, 5), (2, 6)):
        error = w * x + b - y
        w, b = w - 0.2 * error * x, b - 0.2 * error
    assert found.rows["averaging"].seen[0].micro["mae"] == pytest.approx(abs(3 * w + b - 8), rel=1e-5)
    b = 1.0 + 0.2 * 5  # reconstructed with w = 0 from both
    assert found.rows["recon"].seen[0].micro["mae"] == pytest.approx(8 - b, rel=1e-5)
    with pytest.raises(ValueError, match="`seen`"):
        fr.compare(ways, clients, xy(([1], [1])), seen=fr.split.alternate(), rounds=1)


def test_seeds_give_a_mean_and_a_spread_in_every_format():
    found = compared({"a & b": recon(line("b"))}, xy(([1, 2], [2, 5])), seeds=(0, 1))
    row = next(csv.DictReader(io.StringIO(found.to_csv())))
    assert (row["method"], row["seeds"], float(row["unseen_mae_std"])) == ("a & b", "2", 0)
    assert float(row["unseen_mae"]) == pytest.approx(found["a & b"]["mae"])
    assert found.to_markdown().splitlines()[1].startswith("| --- | ---: |")
    assert "± 0.000" in str(found)
    latex = found.to_latex("loss").splitlines()
    assert latex[0] == r"\begin{tabular}{lrrrrrrrr}"
    assert latex[4].startswith(r"a \& b & ")
    assert r"$\pm$ 0.000" in latex[4]


def test_the_worst_tenth_are_the_clients_with_the_highest_loss():
    per_client = {"loss": np.array([1.0, np.nan, 3.0, 2.0]), "accuracy": np.array([0.1, np.nan, 0.5, 0.3])}
    evaluation = fr.Evaluation("recon", 4, 1, 9, {}, {}, {}, per_client)
    assert evaluation.worst(0.1) == {"loss": 3.0, "accuracy": 0.5}
    assert evaluation.worst(0.5)["accuracy"] == pytest.approx(0.4)


def test_the_table_counts_clients_that_diverged():
    wild = fr.federated_reconstruction(
        line("b"), reconstruct=descend(1e30, epochs=3), update=descend(0.0), server=optax.sgd(1.0)
    )
    with pytest.warns(fr.DivergenceWarning, match="1 of 1 evaluated clients"):
        text = str(compared({"steady": recon(line("b")), "wild": wild}, xy(([1, 2], [2, 5]))))
    assert "wild" in text
    assert "(1 diverged)" in text
    assert "nan" in text


def test_ways_with_different_metrics_have_no_number_where_one_is_missing():
    plain = line("b")._replace(metrics={})
    text = str(compared({"with": recon(line("b")), "without": recon(plain)}, xy(([1, 2], [2, 5]))))
    assert "nan" in text.splitlines()[3]


def test_clients_that_train_are_refused_as_unseen():
    both = clients_of(*({"x": np.ones(4), "y": np.ones(4)} for _ in range(4)), names=np.arange(4))
    ways = {"one": recon(linear())}
    with pytest.raises(ValueError, match="`unseen` must not contain training clients"):
        fr.compare(ways, both.take([0, 1]), both.take([1, 2]), rounds=1)
    earlier, later = both.split_time(0.5, 0.5, column="x")
    with pytest.raises(ValueError, match="`unseen` must not contain training clients"):
        fr.compare(ways, earlier, later, rounds=1)
    with pytest.raises(ValueError, match="`valid` must not contain training clients"):
        fr.compare(ways, both.take([0, 1]), both.take([2, 3]), rounds=1, valid=both.take([0]))


def test_nothing_to_compare_is_named():
    with pytest.raises(ValueError, match="`algorithms` and `seeds` must not be empty"):
        fr.compare({}, a_and_b(), a_and_b(), rounds=1)


def test_curves_of_validation_clients_are_in_the_histories():
    found = compared(
        {"one": recon(line("b"))}, xy(([1, 2], [2, 5])), valid=fr.Validation(xy(([1, 2], [2, 3])), every=1)
    )
    assert [entry["kind"] for entry in found.rows["one"].runs[0].history] == ["round", "evaluation"]


def test_local_training_refuses_a_model_with_global_parameters():
    with pytest.raises(ValueError, match=r"global parameters \(got w\)"):
        fr.local_training(line("b"), train=descend(0.1))


def test_a_model_without_global_parameters_goes_through_rounds_that_learn_nothing():
    """Rebuilt on support x in {1, 2} of A and B, measured on x=3, round after round."""

    def by_hand(client):
        w = b = 0.0
        for x, y in zip(client["x"][:2], client["y"][:2], strict=True):
            error = w * x + b - y
            w, b = w - 0.2 * error * x, b - 0.2 * error
        return (3 * w + b - client["y"][2]) ** 2

    run = one_round(recon(line("*")), a_and_b(), rounds=2)
    assert run.params == {}
    expected = np.mean([by_hand(client) for client in a_and_b()])
    assert [entry["loss"] for entry in run.history] == pytest.approx([expected, expected], rel=1e-5)


def test_ways_without_local_parameters_work_for_models_that_are_written_out():
    slope = fr.Model(
        init_global=lambda key: {"w": jnp.float32(0)},
        init_local=lambda key: (),
        predict=lambda shared, local, batch: shared["w"] * batch["x"],
        loss=squared_error,
    )
    found = compared({"slope": averaging(slope), "line": recon(linear())}, xy(([1, 2], [2, 5])))
    assert found["slope"].keys() == {"loss"}
