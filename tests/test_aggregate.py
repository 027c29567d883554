import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.server.averaging import all_finite
from fedrecon._src.simulation.engine import compile_rounds, put_on_devices
from toy_models import assert_same_bits, descend, linear, one_by_one, one_round, run_cohort, xy

A = ([1, 2, 3], [5, 6, 8])  # delta 1.44, loss 12.96, one query example
B = ([1, 2, 3], [5, 5, 9])  # delta .96, loss 5.76
C = ([1, 2, 3, 2], [5, 5, 9, 5])  # delta 1.152, losses 5.76 and .2304, two query examples
BAD = ([1, 0, 3], [5, 3e38, 8])  # its error overflows, and infinity times 0 is NaN
WORSE = ([1, 2, 3], [5, 3e38, 8])
SUPPORT_ONLY = ([1], [5])
NOTHING = ([], [])


def recon(aggregate=None, server=None):
    return fr.federated_reconstruction(
        linear(),
        reconstruct=descend(0.1),
        update=descend(0.1),
        server=server or optax.sgd(1.0),
        split=fr.split.alternate(),
        aggregate=aggregate,
    )


def result(*clients, **options):
    run = one_round(recon(fr.aggregators.mean(**options)), xy(*clients))
    return float(run.params["w"]), run.history[0]


@pytest.mark.parametrize(
    ("weigh", "w", "weight"),
    [
        ("examples", (1.44 + 2 * 1.152) / 3, 3),
        ("uniform", (1.44 + 1.152) / 2, 2),
        (lambda examples, sums: examples**2, (1.44 + 4 * 1.152) / 5, 5),
        (lambda examples, sums: 3 * sums[:, 0, 1], (1.44 + 2 * 1.152) / 3, 9),
        (lambda examples, sums: 2.0 - examples, 1.44, 1),
    ],
    ids=["examples", "uniform", "squared", "weight of the loss", "zero for one"],
)
def test_clients_are_weighed(weigh, w, weight):
    found, entry = result(A, C, weigh=weigh)
    assert found == pytest.approx(w, rel=1e-5)
    assert entry["weight"] == pytest.approx(weight)


@pytest.mark.parametrize("bad", [BAD, WORSE], ids=["nan", "infinite"])
def test_a_client_that_is_not_finite_contributes_nothing_and_is_counted(bad):
    w, entry = result(A, bad, B)
    assert w == pytest.approx(1.2, rel=1e-5)
    assert entry["loss"] == pytest.approx(9.36, rel=1e-5)
    assert (entry["clients"], entry["non_finite"], entry["weight"]) == (2, 1, 2)
    assert not entry["skipped"]


def test_a_weight_that_is_not_finite_counts_as_a_client_that_is_not():
    w, entry = result(A, C, weigh=lambda examples, sums: 1.0 / (2.0 - examples))
    assert w == pytest.approx(1.44, rel=1e-5)
    assert (entry["clients"], entry["non_finite"]) == (1, 1)


@pytest.mark.parametrize(
    ("clients", "options", "counts"),
    [
        ([BAD, WORSE], {}, {"clients": 0, "non_finite": 2}),
        ([SUPPORT_ONLY, SUPPORT_ONLY], {}, {"clients": 0, "non_finite": 0}),
        ([A, B], {"weigh": lambda examples, sums: 0 * examples}, {"clients": 0, "non_finite": 0}),
        ([A, B], {"zero_norm": 0.1}, {"clients": 0, "zeroed": 2}),
        ([A, B], {"weigh": lambda examples, sums: 3e38 + 0 * sums[:, 0, 0]}, {}),
    ],
    ids=["none is finite", "none has query data", "no weight", "all zeroed", "the mean is not finite"],
)
def test_a_round_without_a_mean_leaves_model_and_optimizer_as_they_were(clients, options, counts):
    algorithm = recon(fr.aggregators.mean(**options), server=optax.adam(0.1))
    good, bad = xy(A, B), xy(*clients)
    place = one_by_one()
    rounds = compile_rounds(algorithm, place)

    def run(state, population):
        return jax.tree.map(np.asarray, run_cohort(rounds, algorithm, state, population, [0, 1]))

    state = put_on_devices(algorithm.init(jax.random.key(0)), place)
    if not options:
        state, metrics = run(state, good)
        assert not metrics["skipped"][0]
        assert state.method.params["w"] != 0
        state = put_on_devices(state, place)
    after, metrics = run(state, bad)
    assert metrics["skipped"][0]
    assert_same_bits(after, jax.tree.map(np.asarray, state))
    assert {name: int(metrics[name][0]) for name in counts} == counts


def test_the_round_after_a_skipped_one_goes_on():
    """Of the two clients one is sampled a round; in rounds with the bad one nothing moves."""
    with pytest.warns(fr.DivergenceWarning, match="learned nothing"):
        run = one_round(recon(), xy(A, BAD), rounds=6, clients_per_round=1)
    skipped = [entry["skipped"] for entry in run.history]
    assert 0 < sum(skipped) < 6
    assert [entry["non_finite"] for entry in run.history] == [int(s) for s in skipped]
    assert all(np.isnan(entry["loss"]) == entry["skipped"] for entry in run.history)
    assert np.isfinite(run.params["w"])
    assert run.params["w"] > 1


def test_a_delta_above_the_norm_is_clipped_to_it():
    w, entry = result(A, B, clip_norm=1.0)
    assert w == pytest.approx((1.0 + 0.96) / 2, rel=1e-5)
    assert (entry["clipped"], entry["clients"]) == (1, 2)
    assert entry["loss"] == pytest.approx(9.36, rel=1e-5)


def test_a_delta_above_the_zero_norm_is_dropped():
    w, entry = result(A, B, zero_norm=1.0)
    assert w == pytest.approx(0.96, rel=1e-5)
    assert (entry["zeroed"], entry["clients"]) == (1, 1)
    assert entry["loss"] == pytest.approx(5.76, rel=1e-5)


def test_zeroing_looks_at_the_norm_before_clipping():
    w, entry = result(A, B, C, clip_norm=0.5, zero_norm=1.3)
    assert w == pytest.approx(0.5, rel=1e-5)
    assert (entry["zeroed"], entry["clipped"], entry["clients"]) == (1, 2, 2)


def test_the_norm_is_over_all_parameters_of_a_client():
    """3-4-5: two parameters whose changes are .6 and .8 have a norm of 1."""
    model = fr.Model(
        init_global=lambda key: {"a": np.zeros(1, np.float32), "b": {"c": np.float32(0)}},
        init_local=lambda key: (),
        predict=lambda g, local, batch: batch["x"] * (3 * g["a"][0] + 4 * g["b"]["c"]),
        loss=lambda p, batch: ((p - batch["y"]) ** 2, batch["x"]),
    )
    algorithm = fr.federated_averaging(
        model, update=descend(0.1), server=optax.sgd(1.0), aggregate=fr.aggregators.mean(clip_norm=0.5)
    )
    run = one_round(algorithm, xy(([1], [1])))
    np.testing.assert_allclose([run.params["a"][0], run.params["b"]["c"]], [0.3, 0.4], 1e-5)


def test_a_client_without_query_data_has_no_weight():
    w, entry = result(A, SUPPORT_ONLY, NOTHING)
    assert w == pytest.approx(1.44, rel=1e-5)
    assert (entry["clients"], entry["weight"], entry["non_finite"]) == (1, 1, 0)


@pytest.mark.parametrize("weigh", ["uniform", lambda examples, sums: 1.0 + 0 * examples])
def test_a_client_without_query_data_has_no_weight_however_clients_are_weighed(weigh):
    w, entry = result(A, SUPPORT_ONLY, NOTHING, weigh=weigh)
    assert w == pytest.approx(1.44, rel=1e-5)
    assert (entry["clients"], entry["weight"]) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "`clip_norm`"),
        ({"zero_norm": -1.0}, "`zero_norm`"),
        ({"clip_norm": float("nan")}, "`clip_norm`.*nan"),
        ({"weigh": "median"}, "`weigh`.*'median'"),
    ],
)
def test_impossible_aggregations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fr.aggregators.mean(**options)


@pytest.mark.parametrize(
    ("values", "divisor", "finite"),
    [
        ([1.0, -2.0], 1.0, True),
        ([1e30, 1e38], 1.0, True),  # its squares are not finite, it is
        ([1.0, np.nan], 1.0, False),
        ([1.0, -np.inf], 1.0, False),
        ([1e30, 1.0], 1e-30, False),  # finite before the division only
        ([1e20, 1.0], 1e-10, True),
    ],
)
def test_a_mean_is_finite_if_every_number_is_after_the_division(values, divisor, finite):
    parts = {"delta": {"w": jnp.array(values, jnp.float32), "b": jnp.float32(0.5)}}
    assert bool(all_finite(parts, jnp.float32(divisor))) is finite
