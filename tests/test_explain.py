import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from toy_models import clients_of, descend, linear

ITEMS, DIM = 40, 5


def apply(params, state, item, training, mask=None):
    rows = jnp.take(params["items"], item, axis=0) + params["bias"] * params["fixed"]
    new = {"mean": 0.9 * state["mean"] + 0.1 * rows.mean(0)}
    return (rows - (rows.mean(0) if training else state["mean"])) @ params["user"], new


def model(**options):
    params = {
        "items": jnp.zeros((ITEMS, DIM)),
        "bias": jnp.zeros(DIM),
        "fixed": jnp.ones(DIM),
        "user": jnp.ones(DIM),
    }
    options = {"local": "user", "frozen": "fixed", **options}
    state = {"mean": jnp.zeros(DIM)}
    return fr.models.from_function(
        apply, params, init_state=state, inputs="item", label="rating", loss="mse", **options
    )


def clients():
    return clients_of(
        {"item": np.array([1, 2, 1, 3], np.int32), "rating": np.ones(4)},
        {"item": np.array([7, 7, 8, 9, 7, 7], np.int32), "rating": np.ones(6)},
    )


def algorithm(model, optimizer=None):
    return fr.federated_reconstruction(
        model,
        reconstruct=descend(0.1),
        update=fr.gradient_descent(optimizer or optax.sgd(0.1), batch_size=2),
        server=optax.sgd(1.0),
    )


def kinds(report):
    return {part.path: part.kind for part in report.parts}


@pytest.mark.parametrize(
    ("state", "expected"),
    [("local", {"mean": "local state"}), ("averaged", {"mean": "global state"}), ("frozen", {"mean": "frozen"})],
)
def test_every_parameter_and_state_has_its_part(state, expected):
    report = fr.explain(model(state=state), clients())
    assert kinds(report) == {"items": "global", "bias": "global", "user": "local", "fixed": "frozen"} | expected


def test_tables_read_by_rows_are_named_with_their_feature_and_others_with_the_reason():
    parts = {part.path: part for part in fr.explain(model(), clients()).parts}
    assert parts["items"].features == ("item",)
    assert parts["bias"].features == ()
    assert parts["bias"].note == "it is used whole, by mul"
    assert parts["user"].note == "starts the same for every client"
    assert parts["mean"].note == "set from support"


def test_bytes_are_those_of_what_is_global():
    report = fr.explain(model(state="averaged"), clients())
    assert report.receives == report.sends == 4 * (ITEMS * DIM + DIM + DIM)
    dense = 4 * (DIM + DIM)
    # All examples touch 3 rows each; a row travels with its number.
    assert report.receives_by_rows == pytest.approx(dense + 3 * (4 * DIM + 4))
    assert report.clients == 2


def test_of_an_algorithm_only_rows_of_query_examples_are_sent():
    report = fr.explain(algorithm(model(state="frozen")), clients())
    # Query of the first: 1 3; of the second: 9 7 7.
    assert report.receives_by_rows == pytest.approx(4 * DIM + 3 * (4 * DIM + 4))
    assert report.sends_by_rows == pytest.approx(4 * DIM + 2 * (4 * DIM + 4))


@pytest.mark.slow
def test_an_optimizer_that_moves_every_row_leaves_tables_dense():
    report = fr.explain(algorithm(model(), optax.adamw(0.1)), clients())
    (items,) = (part for part in report.parts if part.path == "items")
    assert (items.features, items.note) == ((), "its optimizer needs all of it")
    assert report.receives_by_rows is None


def test_without_examples_it_says_what_it_cannot_know():
    parts = {part.path: part for part in fr.explain(model()).parts}
    assert parts["items"].note == "whole, or by rows: give `examples` to find out"


def test_a_batch_is_enough_to_find_what_is_read_by_rows():
    report = fr.explain(model(), {"item": jnp.zeros(3, jnp.int32), "rating": jnp.zeros(3)})
    assert next(part for part in report.parts if part.path == "items").features == ("item",)
    assert report.receives_by_rows is None


def test_declared_tables_are_reported_and_those_that_could_be_are_named():
    declared = fr.models.matrix_factorization(ITEMS, DIM)
    batch = {"item": jnp.zeros(3, jnp.int32), "rating": jnp.zeros(3)}
    assert fr.explain(declared).parts[0].features == ("item",)
    undeclared = fr.explain(declared._replace(lookups={}), batch).parts[0]
    assert undeclared.features == ()
    assert "declare it in `lookups`, read by rows at item" in undeclared.note
    assert fr.explain(declared, batch).parts[1].note == "drawn for every client"


def test_ids_outside_of_a_table_are_a_reason():
    columns = clients().columns
    others = fr.Clients(dict(columns) | {"item": columns["item"] - 2}, np.array([0]), np.array([10]))
    part = next(part for part in fr.explain(model(), others).parts if part.path == "items")
    assert part.note == "item holds ids outside its rows 0 to 39"


def test_it_reads_as_a_table():
    text = str(fr.explain(model(state="averaged"), clients()))
    assert text.splitlines()[0].split() == ["parameter", "part", "shape", "size", "read"]
    assert "items      global        (40, 5)  800 B  by rows at item" in text
    assert "A client receives 840 B a round, sends 840 B, and keeps 20 B to itself." in text
    assert "Row-wise it would receive 112 B and send 112 B (mean over 2 clients)." in text


def test_a_learned_default_is_where_local_parameters_start():
    parts = fr.explain(fr.models.learned_default(linear())).parts
    assert parts[-1].note == "starts at a learned default"
