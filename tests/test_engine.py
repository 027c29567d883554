import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.app.cli import train
from fedrecon._src.core.cohort import ABSENT
from fedrecon._src.recommend.config import RatingsConfig, TextConfig
from fedrecon._src.simulation import multihost
from fedrecon._src.simulation import sampling as sampling_module
from fedrecon._src.simulation.engine import MOST_IN_BLOCK, MOST_SHARING, compile_each, compile_rounds, put_on_devices
from fedrecon._src.simulation.sampling import Cohorts
from toy_models import (
    assert_close,
    descend,
    linear,
    lookup_clients,
    lookup_model,
    one_by_one,
    one_round,
    run_cohort,
    xy,
)

PLACES = 12  # of a cohort, for all layouts below
LARGEST = 7
LAYOUTS = [(2, 1, None), (12, 1, None), (3, 2, None), (1, 4, None), (1, 1, 12), (2, 2, 6)]

ALGORITHM = fr.federated_reconstruction(
    lookup_model(),
    reconstruct=descend(0.1, 2),
    update=descend(0.1, 2, epochs=2),
    server=optax.sgd(1.0),
    aggregate=fr.aggregators.mean(clip_norm=0.4),
)


@functools.cache
def compiled(block, devices, sharing=None):
    place = fr.layout(block, devices, sharing=sharing)
    return compile_rounds(ALGORITHM, place), place


def run(clients, order, block=1, devices=1, sharing=None):
    """The parameters and metrics of one round with these clients in this order."""
    rounds, place = compiled(block, devices, sharing)
    order = np.concatenate([order, np.full(PLACES - len(order), ABSENT)]).astype(int)
    state = put_on_devices(ALGORITHM.init(jax.random.key(0)), place)
    state, metrics = run_cohort(rounds, ALGORITHM, state, clients, order)
    return jax.tree.map(np.asarray, (state.method.params, metrics))


def population(sizes, seed):
    """Clients of which one always has the largest size, so that every population has the same shape."""
    return lookup_clients([LARGEST, *sizes], seed)


sizes_lists = st.lists(st.integers(0, LARGEST), min_size=1, max_size=8)


@pytest.mark.slow
@pytest.mark.parametrize(("block", "devices", "sharing"), LAYOUTS)
@settings(max_examples=12, deadline=None)
@given(sizes=sizes_lists, seed=st.integers(0, 10_000))
def test_neither_block_size_nor_device_count_changes_a_result(block, devices, sharing, sizes, seed):
    clients = population(sizes, seed)
    order = np.arange(len(clients))
    assert_close(run(clients, order, block, devices, sharing), run(clients, order))


@pytest.mark.slow
@pytest.mark.parametrize(("block", "devices"), [(1, 1), (3, 2)])
@settings(max_examples=25, deadline=None)
@given(sizes=sizes_lists, seed=st.integers(0, 10_000), data=st.data())
def test_neither_the_order_of_packing_nor_empty_places_change_a_result(block, devices, sizes, seed, data):
    clients = population(sizes, seed)
    straight = np.arange(len(clients))
    order = data.draw(st.permutations([*straight, *[ABSENT] * (PLACES - len(clients))]))
    assert_close(run(clients, np.array(order), block, devices), run(clients, straight, block, devices))


@pytest.mark.parametrize("block", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_padding_never_changes_a_result(block):
    """A client that takes no part but is much larger makes everybody's arrays longer."""
    clients = population([3, 5, 1, 6], seed=1)
    longer = lookup_clients([LARGEST, 3, 5, 1, 6, 40], seed=1)
    for name, column in longer.columns.items():
        column[: clients.num_examples] = clients.columns[name]
    found = run(longer, np.arange(5), block)
    assert_close(found, run(clients, np.arange(5), block), 1e-6)


@pytest.mark.slow
def test_the_number_of_devices_does_not_change_what_is_learned_or_evaluated():
    algorithm = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    clients = xy(*(([1, 0.5, -1][: i % 4], [i, 2, 0][: i % 4]) for i in range(1, 8)))
    options = {"rounds": 3, "clients_per_round": 4, "valid": clients, "seed": 2}
    expected, found = (one_round(algorithm, clients, layout=place, **options) for place in (one_by_one(), fr.layout()))
    assert_close(found.params, expected.params)
    for name in ("micro", "macro"):
        assert found.history[-1][name] == pytest.approx(expected.history[-1][name], rel=1e-5)


def test_nothing_is_compiled_again_whatever_the_cohort():
    algorithm, place = dataclasses.replace(ALGORITHM), fr.layout(2, 2)
    clients = population([3, 5, 1, 6, 0, 0], seed=1)
    rounds = compile_rounds(algorithm, place)
    state = put_on_devices(algorithm.init(jax.random.key(0)), place)
    orders = [[0, 1, 2, 3], [6, 5, 4, 0], [1, ABSENT, ABSENT, 2], [5, 6, 5, 6], [ABSENT] * 4]
    for number, order in enumerate(orders):
        state, _ = run_cohort(rounds, algorithm, state, clients, order, seed=number)
    assert rounds._cache_size() == 1


def test_nothing_is_compiled_again_however_many_rounds_are_left():
    clients, place = population([3, 5, 1, 6, 0, 0], seed=1), one_by_one()
    rounds = compile_rounds(dataclasses.replace(ALGORITHM), place)  # compared by identity: one that no test has used
    sampling = fr.Sampling(4, drop_out=0.5)
    cohorts = Cohorts(ALGORITHM, clients, sampling, place, fr.kit.run_keys(0), 5)
    start = put_on_devices(ALGORITHM.init(jax.random.key(0)), place)
    for steps in ([5, 4], [1, 5, 3], [2, 2, 2, 2, 1]):
        state, first = start, 0
        for number in steps:
            ready = cohorts.prepare(first, number)
            assert (ready.first, ready.number) == (first, number)
            state, _, metrics = rounds(state, (), ready.cohorts, jax.random.key(1), first, number)
            assert np.asarray(metrics["weight"])[number:].sum() == 0
            first += number
        params = jax.tree.map(np.asarray, state.method.params)
        expected = params if steps == [5, 4] else expected  # noqa: F821
        jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert rounds._cache_size() == 1


@pytest.mark.parametrize(
    "place", [pytest.param((2, 2), id="two devices"), pytest.param((1, 1), id="one", marks=pytest.mark.slow)]
)
def test_clients_packed_once_train_to_the_bits_of_clients_packed_in_every_round(place, monkeypatch):
    clients = population([3, 5, 1, 6, 0, 0], seed=1)
    options = {"rounds": 4, "clients_per_round": fr.Sampling(4, drop_out=0.5), "layout": fr.layout(*place), "seed": 3}
    expected = fr.train(ALGORITHM, clients, **options)
    monkeypatch.setattr(sampling_module, "RESIDENT_BYTES", 0)
    found = fr.train(ALGORITHM, clients, **options)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    assert found.history == expected.history


@pytest.mark.slow
def test_clients_that_keep_state_find_it_again_however_they_are_packed(monkeypatch):
    clients = population([3, 5, 1, 6, 2, 4], seed=1)
    algorithm = fr.federated_averaging(lookup_model(), update=descend(0.1, 2), server=optax.sgd(1.0))
    options = {"rounds": 4, "clients_per_round": fr.Sampling(4), "layout": fr.layout(1, 2, sharing=3), "seed": 3}
    expected = fr.train(algorithm, clients, **options)
    monkeypatch.setattr(sampling_module, "RESIDENT_BYTES", 0)
    found = fr.train(algorithm, clients, **options)
    jax.tree.map(
        np.testing.assert_array_equal, (found.params, found.client_state), (expected.params, expected.client_state)
    )


@pytest.mark.parametrize("dtype", [np.int8, pytest.param(np.uint16, marks=pytest.mark.slow)])
def test_the_type_of_ids_does_not_change_what_is_learned(dtype):
    """The table has as many rows as the type can count, and the sum of several devices has one more."""
    items = np.array([126, 0, 5, 7, 126, 3], dtype)
    columns = {"item": items, "rating": np.arange(6, dtype=np.float32)}
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(127, 10), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    found, expected = (
        fr.train(
            algorithm,
            fr.Clients({**columns, "item": ids}, np.array([0, 4]), np.array([4, 6])),
            rounds=2,
            clients_per_round=2,
            layout=fr.layout(1, 2),
            seed=1,
        )
        for ids in (items, items.astype(np.int32))
    )
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jax_devices": 5}, "jax_devices"),
        ({"jax_devices": 0}, "jax_devices"),
        ({"block": 0}, "`block` must be .* at least 1"),
        ({"block": 4, "sharing": 6}, "`sharing` must be a multiple of `block`"),
    ],
)
def test_an_impossible_layout_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fr.layout(**options)


def test_by_default_all_devices_run_blocks_that_fit_a_cache():
    def model(size):
        return lookup_model()._replace(init_global=lambda key: {"dense": jnp.zeros(size)}, lookups={})

    assert fr.layout().jax_devices == 4
    assert fr.layout(jax_devices=2).jax_devices == 2
    assert fr.layout(model=model(10)).block == MOST_IN_BLOCK
    assert fr.layout(model=model(10_000_000)).block == 1
    assert 1 < fr.layout(model=model(50_000)).block < MOST_IN_BLOCK


def test_clients_share_a_large_model_by_default_if_their_local_part_is_small():
    def place(shared, own):
        model = linear()._replace(
            init_global=lambda key: {"dense": jnp.zeros(shared)}, init_local=lambda key: {"own": jnp.zeros(own)}
        )
        return fr.layout(model=model)

    assert place(10, 10).sharing == MOST_IN_BLOCK
    assert place(10_000_000, 10).sharing == MOST_SHARING
    assert place(10_000_000, 10_000_000).sharing == 1
    between = place(50_000, 10)
    assert MOST_SHARING - between.block < between.sharing <= MOST_SHARING
    assert between.sharing % between.block == 0


@pytest.mark.parametrize(
    ("clients", "wide", "places"),
    # Blocks that share are of one size, and no larger than the cohort needs.
    [(1, 1, 2), (7, 4, 8), (20, 10, 20), (32, 16, 32), (33, 9, 36), (100, 13, 104)],
)
def test_a_cohort_is_divided_into_blocks_of_one_size(clients, wide, places):
    place = fr.layout(1, 2, sharing=16)
    order = place.arrange(np.arange(clients), np.ones(clients))
    assert len(order) == places
    assert place.sharing_block(places // 2) == wide
    assert sorted(order[order >= 0]) == list(range(clients))


@pytest.mark.parametrize(("block", "devices"), [(1, 1), (3, 1), (2, 2), (1, 4)])
def test_each_client_gets_its_own_result(block, devices):
    function = compile_each(lambda shared, part: part["x"] * shared + part["y"], fr.layout(block, devices))
    x, y = np.arange(24.0).reshape(12, 2), np.ones((12, 2))
    np.testing.assert_allclose(function(jnp.float32(3), {"x": x, "y": y}), 3 * x + 1)


@pytest.mark.parametrize(
    "make",
    [
        "fr.optimizers.with_prior(optax.sgd(0.1), 1.0, examples=10)",
        "fr.aggregators.secure(1.0, clients=9, noise=fr.aggregators.ClientNoise(1.0, 5.0, least=3))",
    ],
)
def test_parts_of_an_algorithm_are_made_before_devices_are_started(make):
    program = f"import fedrecon as fr, optax, jax; {make}; fr.start_jax_devices(3); assert jax.device_count() == 3"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"})


def test_loops_stay_as_they_are_where_products_are_large(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    fr.start_jax_devices(1, small_loops=TextConfig.small_loops)
    assert os.environ["XLA_FLAGS"] == ""
    fr.start_jax_devices(1, small_loops=RatingsConfig.small_loops)
    assert "small_while_loop" in os.environ["XLA_FLAGS"]


@pytest.mark.parametrize("config", [TextConfig(), RatingsConfig()])
def test_several_processes_compile_loops_as_one_does(config, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **options: None)
    train.start_processes(train.Train(settings=config, processes=train.Processes(processes=2)))
    assert ("small_while_loop" in os.environ["XLA_FLAGS"]) == config.small_loops


@pytest.mark.parametrize("given", ["", "--xla_foo=1", "--xla_backend_extra_options=own=1"])
def test_small_loops_are_compiled_as_one_unless_xla_flags_are_set(given, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    multihost._compile_small_loops()
    multihost._compile_small_loops()
    flags = os.environ["XLA_FLAGS"].split()
    ours = f"--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold={multihost.SMALL_LOOP}"
    assert flags == (given.split() if "extra" in given else [*given.split(), ours])
