"""Lookups without being told: which reads are found, which are not, and that rows give what whole tables give."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.client.lookup_tables import LookupTables, random_params
from fedrecon._src.client.lookup_tracing import by_rows, find_reads
from toy_models import (
    assert_close,
    assert_same_history,
    clients_of,
    descend,
    lookup_clients,
    lookup_model,
    one_round,
    squared_error,
)

ROWS, WIDTH = 11, 2
BATCH = {
    "item": jnp.array([3, 5, 3, 10], jnp.int32),
    "tags": jnp.array([[1, 2, 1], [0, 0, 9], [4, 3, 2], [10, 1, 7]], jnp.int32),
    "x": jnp.array([0.5, -1.0, 2.0, 1.5]),
}


def table_model(use, **options):
    """A model of one table, read as `use(table, batch, scale)` says; summed to one number an example."""

    def predict(shared, local, batch):
        found = use(shared["table"], batch, shared["scale"])
        return found.reshape(found.shape[0], -1).sum(1) * local["u"]

    return fr.Model(
        init_global=lambda key: {"table": jax.random.normal(key, (ROWS, WIDTH)), "scale": jnp.float32(1)},
        init_local=lambda key: {"u": jnp.float32(1)},
        predict=predict,
        loss=lambda p, b: (p**2, jnp.ones_like(p)),
        lookups="auto",
        **options,
    )


@jax.custom_jvp
def twice(x):
    return 2 * x


twice.defjvps(lambda t, out, x: 5 * t)


def by_vmap(t, b, s):
    return jax.vmap(lambda i: t[i])(b["item"])


def in_a_scan(t, b, s):
    return jax.lax.scan(lambda c, i: (c, t[i]), 0.0, b["item"])[1]


def in_a_cond(t, b, s):
    return jax.lax.cond(s > 0, lambda: t[b["item"]], lambda: 2 * t[b["item"]])


ITEM, TAGS = ("item",), ("tags",)
FOUND = {
    "brackets": (lambda t, b, s: t[b["item"]], ITEM),
    "jnp.take": (lambda t, b, s: jnp.take(t, b["item"], axis=0), ITEM),
    "jnp.take, clipped": (lambda t, b, s: jnp.take(t, b["item"], axis=0, mode="clip"), ITEM),
    "at get": (lambda t, b, s: t.at[b["item"]].get(mode="fill", fill_value=0), ITEM),
    "several ids an example": (lambda t, b, s: t[b["tags"]], TAGS),
    "two features": (lambda t, b, s: t[b["tags"]].sum(1) + t[b["item"]], ("item", "tags")),
    "reshaped ids": (lambda t, b, s: t[b["tags"].reshape(-1)].reshape(4, -1), TAGS),
    "part of the ids": (lambda t, b, s: t[b["tags"][:, 1:]], TAGS),
    "transposed ids": (lambda t, b, s: jnp.moveaxis(t[b["tags"].T], 1, 0), TAGS),
    "clipped ids": (lambda t, b, s: t[jnp.clip(b["item"], 0, ROWS - 1)], ITEM),
    "wider ids": (lambda t, b, s: t[b["item"].astype(jnp.uint32)], ITEM),
    "one example at a time": (by_vmap, ITEM),
    "inside jit": (jax.jit(lambda t, b, s: jnp.sin(t[b["item"]])), ITEM),
    "inside checkpoint": (jax.checkpoint(lambda t, b, s: jnp.sin(t[b["item"]])), ITEM),
    "converted": (lambda t, b, s: t.astype(jnp.bfloat16)[b["item"]].astype(jnp.float32), ITEM),
    "without gradient": (lambda t, b, s: jax.lax.stop_gradient(t)[b["item"]], ITEM),
    "ids that are values too": (lambda t, b, s: t[b["item"]] * (b["item"] != 3)[:, None], ITEM),
    "the number of rows": (lambda t, b, s: t[b["item"]] / t.shape[0], ITEM),
    "a derivative of its own afterwards": (lambda t, b, s: twice(t[b["item"]]), ITEM),
}
NOT_FOUND = {
    "mean": (lambda t, b, s: t[b["item"]] + t.mean(), "used whole, by reduce_sum"),
    "product": (lambda t, b, s: t[b["item"]] @ t.T, "used whole, by"),
    "tied output": (lambda t, b, s: jax.nn.softmax(b["x"][:, None] * t[:, 0]), "used whole, by"),
    "a fixed row": (lambda t, b, s: t[b["item"]] + t[2], "used whole, by|at indices that are not a feature's ids"),
    "a neighbour": (lambda t, b, s: t[b["item"] + 1], "at indices that are not a feature's ids"),
    "ids from parameters": (lambda t, b, s: t[b["item"] * s.astype(int)], "not a feature's ids"),
    "ids in fewer buckets": (lambda t, b, s: t[b["item"] % 4], "not a feature's ids"),
    "ids cut short": (lambda t, b, s: t[jnp.minimum(b["item"], 4)], "ids above 4 are changed"),
    "columns": (lambda t, b, s: t[:, b["item"] % 2].T, "used whole|an axis other|not a feature's ids"),
    "columns at ids": (lambda t, b, s: jnp.take(t, b["item"], axis=1).T, "an axis other than its rows"),
    "single entries": (lambda t, b, s: t[b["item"], 0], "other than single whole rows|an axis other"),
    "arithmetic first": (lambda t, b, s: (t * 2)[b["item"]], "used whole, by mul"),
    "scan": (in_a_scan, "inside a scan"),
    "cond": (in_a_cond, "inside a cond"),
    "a derivative of its own": (lambda t, b, s: twice(t)[b["item"]], "a function with a custom derivative"),
    "not at all": (lambda t, b, s: b["x"][:, None], "no row of it is looked up"),
    "ids made of floats": (lambda t, b, s: t[b["x"].astype(int)], "not a feature's ids"),
}


@pytest.mark.parametrize(("use", "features"), FOUND.values(), ids=FOUND)
def test_reads_by_rows_are_found_and_rows_give_the_same(use, features):
    model = table_model(use)
    assert fr.kit.find_lookups(model, BATCH) == {"table": features}
    narrow = by_rows(model, {"table": features})
    params, local = random_params(jax.eval_shape(model.init_global, jax.random.key(0))), {"u": jnp.float32(1.5)}

    def total(predict, params, batch):
        return jnp.sum(predict(params, local, batch) * jnp.array([1.0, -2.0, 0.5, 3.0]))

    expected, slope = jax.value_and_grad(functools.partial(total, model.predict))(params, BATCH)
    tables = LookupTables({"table": params["table"]}, {"table": features}, {}, {})
    rows, batch = tables.fetch({"table": 0.0}, BATCH)

    def of_rows(values, wrap):
        table = tables.as_tables({"table": values}, batch)["table"] if wrap else values
        return total(narrow.predict, {**params, "table": table}, batch)

    ids = jnp.concatenate([BATCH[feature].reshape(-1) for feature in features])
    for wrap in (True, False):
        found, row_slope = jax.value_and_grad(of_rows)(rows["table"], wrap)
        np.testing.assert_allclose(found, expected, 1e-5)
        summed = jnp.zeros_like(params["table"]).at[ids].add(row_slope)
        np.testing.assert_allclose(summed, slope["table"], 1e-4, 1e-5)


@pytest.mark.parametrize(("use", "why"), NOT_FOUND.values(), ids=NOT_FOUND)
def test_other_reads_are_left_dense_and_the_reason_is_given(use, why):
    reads = find_reads(table_model(use), BATCH)["table"]
    assert reads.features == ()
    assert re.search(why, reads.why), reads.why


def test_of_tables_that_share_some_features_the_larger_is_sparse():
    def predict(shared, local, batch):
        small = shared["small"][batch["item"]]
        return (small + shared["large"][batch["item"]] + shared["large"][batch["tags"]].sum(1)).sum(1) * local["u"]

    model = table_model(FOUND["brackets"][0])._replace(
        init_global=lambda key: {"small": jnp.ones((ROWS, WIDTH)), "large": jnp.ones((2 * ROWS, WIDTH))},
        predict=predict,
    )
    reads = find_reads(model, BATCH)
    assert reads["large"].features == ("item", "tags")
    assert reads["small"].features == ()
    assert "a larger table is read at item and tags" in reads["small"].why


CLIENTS = lookup_clients([7, 1, 4, 10, 0, 2], seed=1)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
}


def in_library_words(shared, local, batch):
    """The lookup model of the other tests as a framework's layers would write it, with ids as values too."""
    take = functools.partial(jnp.take, axis=0)
    tags = take(shared["tag"], batch["tags"]).mean(1) + take(shared["tag"], batch["main_tag"])
    rows = take(shared["item"], batch["item"]) * (local["u"] + shared["mix"]["dense"])
    rows = rows * (batch["item"] != 2)[:, None]
    return rows.sum(-1) + tags @ local["u"] + take(shared["item_bias"], batch["item"]) + local["v"]


def automatic(lookups):
    # Drawing the local parameters would be most of what is compiled.
    start = {"u": jnp.array([0.5, -0.3]), "v": jnp.zeros(())}
    return lookup_model(False)._replace(predict=in_library_words, lookups=lookups, init_local=lambda key: start)


def algorithm(lookups, optimizer, **options):
    return fr.federated_reconstruction(
        automatic(lookups),
        reconstruct=descend(0.1, 3),
        update=fr.gradient_descent(optimizer, batch_size=3, epochs=2),
        server=optax.sgd(1.0),
        split=fr.split.fraction(0.4),
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_found_lookups_change_nothing_but_the_time(name):
    sparse, dense = (one_round(algorithm(lookups, OPTIMIZERS[name]), CLIENTS, rounds=2) for lookups in ("auto", {}))
    assert_close(sparse.params, dense.params)
    assert_same_history(sparse, dense)


@pytest.mark.slow
def test_found_lookups_change_nothing_in_second_order():
    sparse, dense = (
        one_round(
            fr.federated_reconstruction(
                automatic(lookups),
                reconstruct=descend(0.1, 4),
                update=descend(0.1, 4),
                server=optax.sgd(1.0),
                second_order=True,
            ),
            CLIENTS.take(np.array([0, 2])),
        )
        for lookups in ("auto", {})
    )
    assert_close(sparse.params, dense.params)


def rows_by_group(algorithm):
    return dict(algorithm.method.needs.groups)


def test_training_finds_lookups_and_packs_rows():
    before = algorithm("auto", optax.sgd(0.1))
    assert before.method.needs.groups == {}
    after = fr.kit.decide_lookups(before, CLIENTS)
    assert rows_by_group(after) == {"item": (9, ("item",)), "main_tag,tags": (6, ("main_tag", "tags"))}
    assert fr.kit.decide_lookups(before, CLIENTS) is after  # so that what is compiled for it is compiled once
    assert fr.kit.decide_lookups(after, CLIENTS) is after


def test_tables_read_at_ids_that_they_do_not_have_are_left_dense():
    """Row -1 is the last one, as JAX has it, and training on it goes on as it did."""
    columns = dict(CLIENTS.columns) | {"item": CLIENTS.columns["item"] - 1}
    clients = fr.Clients(columns, CLIENTS.starts, CLIENTS.ends)
    found = fr.kit.decide_lookups(algorithm("auto", optax.sgd(0.1)), clients)
    assert rows_by_group(found) == {"main_tag,tags": (6, ("main_tag", "tags"))}


@pytest.mark.slow
def test_a_loss_sees_ids_as_they_are():
    """Rows are renumbered for tables alone: here the ids are the labels too."""
    model = fr.Model(
        init_global=lambda key: {"table": jnp.arange(9.0)},
        init_local=lambda key: {"b": jnp.float32(0)},
        predict=lambda shared, local, batch: shared["table"][batch["item"]] + local["b"],
        loss=lambda p, batch: ((p - batch["item"]) ** 2, jnp.ones_like(p)),
        lookups="auto",
    )
    clients = clients_of({"item": np.array([3, 8, 5, 2], np.int32)})
    for lookups in ("auto", {"table": "item"}):
        for optimizer in (optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)):
            found = fr.federated_reconstruction(
                model._replace(lookups=lookups),
                reconstruct=descend(0.1),
                update=fr.gradient_descent(optimizer, batch_size=2),
                server=optax.sgd(1.0),
            )
            assert one_round(found, clients).history[0]["loss"] == 0


def test_a_learned_default_and_a_table_of_clients_keep_finding_lookups():
    batch = {name: jnp.asarray(column[:4]) for name, column in CLIENTS.columns.items()}
    default = fr.models.learned_default(automatic("auto"))
    assert set(fr.kit.find_lookups(default, batch)) == {"shared/item", "shared/item_bias", "shared/tag"}
    table = fr.models.client_table(automatic("auto"), 6)
    found = fr.kit.find_lookups(table, batch | {"client": jnp.zeros(4, jnp.int32)})
    assert found["locals/u"] == found["locals/v"] == ("client",)
    assert found["shared/item"] == ("item",)


def centring(params, state, item, training, key=None, mask=None):
    """Rows of a table less their mean, some of them dropped."""
    rows = jnp.take(params["table"], item, axis=0)
    mask = jnp.ones(item.shape) if mask is None else mask
    mean = (rows * mask[:, None]).sum(0) / jnp.maximum(mask.sum(), 1)
    keep = 1.0 if key is None else jax.random.uniform(key) < 0.5
    new = {"mean": 0.5 * state["mean"] + 0.5 * mean}
    return ((rows - (mean if training else state["mean"])) * keep) @ params["u"], new


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)], ids=["by steps", "by copies"])
def test_dropout_and_averaged_statistics_are_run_by_rows_too(optimizer):
    model = fr.models.from_function(
        centring,
        lambda key: {"table": jax.random.normal(key, (ROWS, WIDTH)), "u": jnp.ones(WIDTH)},
        init_state={"mean": jnp.zeros(WIDTH)},
        local="u",
        inputs="item",
        label="y",
        loss="mse",
        state="averaged",
    )
    clients = lookup_clients([5, 4], seed=1)
    sparse, dense = (
        one_round(
            fr.federated_reconstruction(
                model._replace(lookups=lookups),
                reconstruct=descend(0.1, 4),
                update=fr.gradient_descent(optimizer, batch_size=2),
                server=optax.sgd(1.0),
            ),
            clients,
        )
        for lookups in ("auto", {})
    )
    assert (sparse.params["mean"] != 0).all()
    assert_close(sparse.params, dense.params)
    assert_same_history(sparse, dense)


@pytest.mark.slow
def test_evidence_is_traced_and_run_by_rows_too():
    ours = fr.models.matrix_factorization(12, 2, init_scale=0.5)
    clients = clients_of(
        *(
            {"item": np.array(items, np.int32), "rating": np.arange(len(items)) % 5 + 1.0}
            for items in ([1, 5, 1, 7], [3, 9])
        )
    )
    found, expected = (
        one_round(
            fr.federated_reconstruction(
                fr.models.implicit_feedback(ours._replace(lookups=lookups), 12),
                reconstruct=descend(0.1, 2),
                update=descend(0.1, 2),
                server=optax.sgd(1.0),
            ),
            clients,
        )
        for lookups in ("auto", ours.lookups)
    )
    assert_close(found.params, expected.params)
    batch = {name: jnp.asarray(column[:2]) for name, column in clients.columns.items()}
    automatic = fr.models.implicit_feedback(ours._replace(lookups="auto"), 12)
    assert set(fr.kit.find_lookups(automatic, batch)) == {"shared/item_embedding", "evidence/user_embedding"}


def test_a_model_that_reads_no_table_trains_as_ever():
    model = fr.Model(
        init_global=lambda key: {"w": jnp.float32(0)},
        init_local=lambda key: {"b": jnp.float32(0)},
        predict=lambda shared, local, batch: shared["w"] * batch["x"] + local["b"],
        loss=squared_error,
        lookups="auto",
    )
    clients = clients_of({"x": np.array([1.0, 2.0]), "y": np.array([1.0, 3.0])})
    auto, plain = (
        one_round(
            fr.federated_reconstruction(
                model._replace(lookups=lookups), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
            ),
            clients,
        )
        for lookups in ("auto", {})
    )
    assert_close(auto.params, plain.params)
