import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.client.lookup_reach import reach
from fedrecon._src.client.lookup_tables import check_lookups, lookup_groups, merge_repeats
from fedrecon._src.core import cohort
from fedrecon._src.core.cohort import Packer
from toy_models import (
    DIM,
    ITEMS,
    assert_close,
    assert_same_history,
    descend,
    lookup_clients,
    lookup_model,
    one_round,
)

MANY_TAGS = 24  # enough for a client to have none twice
CLIENTS = lookup_clients([7, 1, 4, 10, 0, 2], seed=1)

SGD_CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
SGD_DECAYED = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), "each"),
    "sgd with a schedule": (optax.sgd(optax.linear_schedule(0.1, 0.01, 3)), "each"),
    "sgd clipped by value": (optax.chain(optax.clip(0.1), optax.sgd(0.1)), "rows"),
    "sgd clipped by norm": (SGD_CLIPPED, "rows"),
    "sgd seldom clipped": (optax.chain(optax.clip_by_global_norm(50.0), optax.sgd(0.1)), "rows"),
    "adagrad": (optax.adagrad(0.1), "rows"),
    "momentum": (optax.sgd(0.1, momentum=0.9), "copy"),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), "copy"),
    "adam": (optax.adam(0.05), "copy"),
    "rmsprop": (optax.rmsprop(0.01), "copy"),
    "yogi": (fr.optimizers.fedyogi(0.01), "copy"),
    "sgd with weight decay": (SGD_DECAYED, "whole"),
    "adamw": (optax.adamw(0.01, weight_decay=0.1), "whole"),
    "lamb": (optax.lamb(0.01), "whole"),
}


def clients_without_repeats():
    """Clients of the lookup model that have no id twice, with four tags in each of up to five examples."""
    generator = np.random.default_rng(2)
    sizes = np.array([5, 1, 4, 2])
    tags = np.concatenate([generator.permutation(MANY_TAGS)[: 4 * size].reshape(-1, 4) for size in sizes])
    item = np.concatenate([generator.permutation(ITEMS)[:size] for size in sizes]).astype(np.int32)
    y, ends = generator.normal(size=len(item)).astype(np.float32), np.cumsum(sizes)
    tags = tags.astype(np.int32)
    return fr.Clients({"item": item, "tags": tags[:, :3], "main_tag": tags[:, 3], "y": y}, ends - sizes, ends)


def ratings_without_repeats():
    generator = np.random.default_rng(3)
    sizes = [7, 1, 4, 9, 2]
    ends = np.cumsum(sizes)
    item = np.concatenate([generator.permutation(ITEMS)[:size] for size in sizes]).astype(np.int32)
    rating = generator.integers(1, 6, len(item)).astype(np.float32)
    return fr.Clients({"item": item, "rating": rating}, ends - sizes, ends)


ROW_OPTIMIZERS = {"sgd": optax.sgd(0.1), "adagrad": optax.adagrad(0.1), "adam": optax.adam(0.05)}
ROW_CASES = [
    pytest.param(
        kind,
        ROW_OPTIMIZERS[name],
        epochs,
        id=f"{kind}-{name}-{epochs}",
        marks=[] if (kind, name, epochs) == ("ratings", "sgd", 1) else pytest.mark.slow,
    )
    for kind, name, epochs in itertools.product(["ratings", "several features"], ROW_OPTIMIZERS, [1, 2])
]


@pytest.mark.parametrize(("kind", "optimizer", "epochs"), ROW_CASES)
def test_rows_in_order_are_as_good_as_listed_ones_and_whole_tables(kind, optimizer, epochs):
    """If no client has an id twice, packing lists no rows, and steps read slices: nothing else changes."""
    clients = ratings_without_repeats() if kind == "ratings" else clients_without_repeats()
    model = fr.models.matrix_factorization(ITEMS, 3) if kind == "ratings" else lookup_model(tags=MANY_TAGS)
    solver = fr.gradient_descent(optimizer, batch_size=3, epochs=epochs)

    def trained(model):
        split = fr.split.half() if kind == "ratings" else fr.split.none()
        algorithm = fr.federated_reconstruction(
            model, split=split, reconstruct=descend(0.1, 2), update=solver, server=optax.sgd(1.0)
        )
        packed = Packer(clients, algorithm.method.needs).pack(np.arange(len(clients)))
        return one_round(algorithm, clients, rounds=2, layout=fr.layout(2, 1)), packed.rows

    in_order, no_rows = trained(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cohort, "LOOKED_THROUGH", 0)
        listed, rows = trained(model)
    dense, _ = trained(model._replace(lookups={}))
    assert not no_rows
    assert rows
    assert_close(in_order.params, listed.params)
    assert_close(in_order.params, dense.params)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "lamb" else []) for name in OPTIMIZERS]
)
def test_reach_is_as_little_as_is_exact(name):
    optimizer, expected = OPTIMIZERS[name]
    assert reach(optimizer) == expected


@pytest.mark.parametrize(
    ("optimizer", "allowed"),
    [
        (optax.sgd(1e-7, momentum=0.9), {"copy", "whole"}),
        (optax.sgd(optax.linear_schedule(0.0, 0.1, 100_000), momentum=0.9), {"copy", "whole"}),
        (optax.sgd(optax.join_schedules([lambda t: 0.0, lambda t: 0.1], [20]), momentum=0.9), {"copy", "whole"}),
        (optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(1e-3)), {"whole"}),
    ],
    ids=["tiny rate", "long warm-up", "late start", "slight weight decay"],
)
def test_reach_is_not_fooled_by_small_or_late_steps(optimizer, allowed):
    assert reach(optimizer) in allowed


def algorithm(lookups, optimizer, **options):
    return fr.federated_reconstruction(
        lookup_model(lookups),
        reconstruct=descend(0.1, 3, epochs=2),
        update=fr.gradient_descent(optimizer, batch_size=3, epochs=2, steps=5),
        server=optax.sgd(1.0),
        split=fr.split.fraction(0.4),
        **options,
    )


EXACT = ["sgd", "sgd clipped by norm", "adagrad", "momentum", "sgd with weight decay"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_declared_lookups_change_nothing_but_the_time(name):
    place = fr.layout(block=2, jax_devices=1)
    sparse, dense = (
        one_round(algorithm(lookups, OPTIMIZERS[name][0]), CLIENTS, rounds=2, layout=place) for lookups in (True, False)
    )
    assert_close(sparse.params, dense.params)
    assert_same_history(sparse, dense)


@pytest.mark.slow
def test_declared_lookups_change_nothing_in_joint_training_or_clipping():
    options = {"joint": True, "aggregate": fr.aggregators.mean(clip_norm=0.5)}
    sparse, dense = (one_round(algorithm(lookups, optax.sgd(0.1), **options), CLIENTS) for lookups in (True, False))
    assert sparse.history[0]["clipped"] > 0
    assert_close(sparse.params, dense.params)
    assert_same_history(sparse, dense)


def test_rows_that_no_client_touches_do_not_move():
    used = np.unique(CLIENTS.columns["item"])
    unused = np.setdiff1d(np.arange(ITEMS + 3), used)
    model = lookup_model()
    wider = model._replace(init_global=lambda key: model.init_global(key) | {"item": jnp.ones((ITEMS + 3, DIM))})
    found = fr.federated_reconstruction(
        wider, reconstruct=descend(0.1, 3), update=descend(0.1, 3), server=optax.sgd(1.0)
    )
    table = one_round(found, CLIENTS).params["item"]
    np.testing.assert_array_equal(table[unused], 1.0)
    assert len(unused) >= 3
    assert (table[used] != 1.0).any()


def test_repeats_are_summed_into_their_first_place():
    slot = jnp.array([4, 2, 4, 4, 0])
    grads = jnp.arange(10.0).reshape(5, 2)
    merged, at = merge_repeats(slot, grads)
    assert at.tolist()[:2] == [4, 2]
    assert at.tolist()[4] == 0
    assert min(at.tolist()[2:4]) > 1_000_000
    np.testing.assert_allclose(merged, [[0 + 4 + 6, 1 + 5 + 7], [2, 3], [0, 0], [0, 0], [8, 9]])


def test_tables_that_share_a_feature_must_share_all():
    model = lookup_model()._replace(lookups={"item": "item", "item_bias": ("item", "main_tag")})
    with pytest.raises(ValueError, match="'item' and 'item_bias' share features but differ"):
        lookup_groups(model)


def small_model(use):
    return fr.Model(
        init_global=lambda key: {"table": jnp.zeros((ITEMS, DIM)), "scale": jnp.ones(())},
        init_local=lambda key: {"u": jnp.zeros(DIM)},
        predict=lambda shared, local, batch: use(shared["table"], batch) @ local["u"] * shared["scale"],
        loss=lambda p, b: (p**2, jnp.ones_like(p)),
        lookups={"table": "item"},
    )


def check(use, ids=(3, 5, 3, 1)):
    model = small_model(use)
    key = jax.random.key(0)
    check_lookups(model, model.init_global(key), model.init_local(key), {"item": jnp.array(ids)})


HONEST = {
    "brackets": lambda t, b: t[b["item"]],
    "brackets twice": lambda t, b: t[b["item"]] + jnp.sin(t[b["item"]]),
    "reshaped ids": lambda t, b: t[b["item"][:, None]][:, 0],
    "part of the ids": lambda t, b: t[b["item"][::2]].sum(0) + t[b["item"]],
    "the width of the table": lambda t, b: t[b["item"]] / t.shape[1],
}
UNTRUE = {
    "jnp.mean": lambda t, b: t[b["item"]] + jnp.mean(t),
    "method mean": lambda t, b: t[b["item"]] + t.mean(),
    "sum over rows": lambda t, b: t[b["item"]] + jnp.asarray(t).sum(0),
    "number of rows": lambda t, b: t[b["item"]] / t.shape[0],
    "softmax over the table": lambda t, b: jax.nn.softmax(jnp.asarray(t), 0)[b["item"]],
    "product with the table": lambda t, b: t[b["item"]] + (t @ jnp.ones(DIM)).sum(),
    "transposed": lambda t, b: t.T[:, b["item"]].T + t.T.sum(1),
    "a neighbouring row": lambda t, b: t[b["item"] + 1],
    "a fixed row": lambda t, b: t[b["item"]] + t[2],
    "a slice": lambda t, b: t[b["item"]] + t[:2].sum(0),
    "arithmetic on the table": lambda t, b: (t + 1)[b["item"]] + (t * 2).sum(),
}


@pytest.mark.parametrize("use", HONEST.values(), ids=HONEST)
def test_a_true_declaration_passes(use):
    check(use)


def test_a_table_that_is_not_read_with_brackets_is_refused_too():
    with pytest.raises(ValueError, match="`lookups`"):
        check(lambda t, b: jnp.take(t, b["item"], axis=0))


@pytest.mark.parametrize("use", UNTRUE.values(), ids=UNTRUE)
def test_an_untrue_declaration_fails_loudly(use):
    with pytest.raises(ValueError, match="`lookups` says the table 'table' is only read by rows at item"):
        check(use)


@pytest.mark.parametrize(
    ("use", "ids"),
    [
        (lambda t, b: t[b["item"]] + t[2], (4, 1, 2)),
        (lambda t, b: t[b["item"]] + jnp.asarray(t).mean(), tuple(range(ITEMS))),
        (lambda t, b: t[b["item"]] + t[:2].sum(0), (0, 1, 4)),
    ],
    ids=["a fixed row in its own place", "every row once", "a slice that comes first"],
)
def test_an_untrue_declaration_fails_whatever_ids_the_batch_happens_to_hold(use, ids):
    with pytest.raises(ValueError, match="only read by rows"):
        check(use, ids)


def test_an_untrue_declaration_stops_training_before_the_first_round():
    model = small_model(UNTRUE["jnp.mean"])
    bad = fr.federated_reconstruction(model, reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0))
    with pytest.raises(ValueError, match="take it out of `lookups`"):
        fr.train(bad, CLIENTS, rounds=1, clients_per_round=2)


@pytest.mark.parametrize(
    ("lookups", "message"),
    [
        (
            {"tabel": "item"},
            r"`lookups` names 'tabel' .did you mean 'table'\?.; the global parameters are: scale, table",
        ),
        ({"table": "itme"}, "no column 'itme': `lookups` names it; the clients have item"),
    ],
)
def test_a_misspelt_declaration_is_named(lookups, message):
    model = small_model(HONEST["brackets"])._replace(lookups=lookups)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=message):
        check_lookups(model, model.init_global(key), model.init_local(key), {"item": jnp.array([1])})


def test_an_unknown_table_is_named_when_the_algorithm_is_first_used():
    model = small_model(HONEST["brackets"])._replace(lookups={"tabel": "item"})
    algorithm = fr.federated_reconstruction(model, reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0))
    with pytest.raises(ValueError, match="`lookups` names 'tabel'"):
        algorithm.method  # noqa: B018


def test_ids_that_are_not_whole_numbers_are_named():
    columns = dict(CLIENTS.columns) | {"item": CLIENTS.columns["item"].astype(np.float32)}
    clients = fr.Clients(columns, CLIENTS.starts, CLIENTS.ends)
    with pytest.raises((ValueError, TypeError), match=r"'item', which holds float32, not ids"):
        fr.train(algorithm(True, optax.sgd(0.1)), clients, rounds=1, clients_per_round=2)
