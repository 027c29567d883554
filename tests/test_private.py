"""Aggregators that protect clients, or the model from clients: by hand, and by their distributions."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.algorithms.algorithm import encode
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.core.client_sampling import OVERFLOW
from fedrecon._src.core.upload import RowChanges, Upload, add, no_total, summand_of
from fedrecon._src.privacy.accounting import epsilon_after, epsilon_of, noise_for
from fedrecon._src.privacy.ledger import Ledger, spending
from fedrecon._src.server.averaging import BINS, quantile_of
from fedrecon._src.simulation.sampling import sample
from toy_models import descend, linear, lookup_clients, lookup_model, one_round, xy

A = ([1, 2, 3], [5, 6, 8])  # delta 1.44
B = ([1, 2, 3], [5, 5, 9])  # delta .96
BAD = ([1, 0, 3], [5, 3e38, 8])  # its error overflows, and infinity times 0 is NaN


def recon(aggregate, model=None):
    return fr.federated_reconstruction(
        model or linear(),
        reconstruct=descend(0.1),
        update=descend(0.1),
        server=optax.sgd(1.0),
        split=fr.split.alternate(),
        aggregate=aggregate,
    )


def uploads(*deltas, examples=None):
    values = jnp.asarray(np.array(deltas, np.float32))
    count = jnp.ones(len(deltas)) if examples is None else jnp.asarray(examples, jnp.float32)
    return Upload({"delta": {"w": values}}, count, jnp.ones((len(deltas), 1, 2)))


def through(aggregator, upload, state=None, key=0):
    """Encode, add up and decode uploads of whole parts."""
    parts = {"delta": {"w": jax.ShapeDtypeStruct(upload.delta["w"].shape[1:], jnp.float32)}}
    state = aggregator.init(parts) if state is None else state
    keys = jax.random.split(jax.random.key(key), len(upload.examples))
    summand = aggregator.encode(aggregator.message(state), summand_of(upload), keys)
    total = add(no_total(summand), summand)
    return (*aggregator.decode(state, total, jax.random.key(key)), total)


# ---- private ----


def test_uploads_are_clipped_weighed_alike_and_divided_by_the_expected_number():
    aggregator = fr.aggregators.private(5.0, 1e-9, per_round=10)
    mean, *_ = through(aggregator, uploads([3, 4], [30, 40], [0, 1], examples=[1, 100, 0]))
    assert mean.parts["delta"]["w"] == pytest.approx(np.array([0.6, 0.8]), rel=1e-4)


def test_nothing_leaves_but_the_clipped_change():
    *_, total = through(fr.aggregators.private(1.0, 1.0, per_round=2), uploads([3, 4], [np.inf, 0]))
    assert total.scalars == {}
    run = one_round(recon(fr.aggregators.private(1.0, 1.0, per_round=2)), xy(A, B, BAD))
    entry = run.history[0]
    assert math.isnan(entry["loss"])
    assert not {"clients", "non_finite", "clipped"} & set(entry)


def test_no_client_moves_the_sum_by_more_than_the_norm():
    rng = np.random.default_rng(0)
    aggregator = fr.aggregators.private(2.0, 1e-12, per_round=1)
    for scale in (1e-3, 1.0, 1e6, 1e12):
        mean, *_ = through(aggregator, uploads(scale * rng.standard_normal(20_000)))
        assert np.linalg.norm(np.asarray(mean.parts["delta"]["w"], np.float64)) <= 2.0


def test_noise_has_the_deviation_that_was_asked_for_and_goes_on_every_entry():
    aggregator = fr.aggregators.private(2.0, 1.5, per_round=10)
    mean, *_ = through(aggregator, uploads(np.zeros(40_000)))
    noise = np.asarray(mean.parts["delta"]["w"])
    assert noise.std() == pytest.approx(2.0 * 1.5 / 10, rel=0.02)
    assert abs(noise.mean()) < 5 * 0.3 / 200
    assert (noise != 0).all()


@pytest.mark.slow
def test_every_row_of_a_table_is_noised_and_rounds_differ():
    algorithm = recon(fr.aggregators.private(1.0, 1.0, per_round=2), lookup_model())
    state = algorithm.init(jax.random.key(0))
    clients = lookup_clients([4, 5])
    message = algorithm.message(state)
    upload = fr.kit.client_update(algorithm, message, clients, fr.kit.round_key(0, 0))
    changes = []
    for number in range(2):
        after = fr.kit.server_update(algorithm, state, [upload], jax.random.key(number))
        changes.append(
            jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after.method.params, state.method.params)
        )
    for one, other in zip(*map(jax.tree.leaves, changes), strict=True):
        assert (one != 0).all()
        assert (one != other).all()


def test_an_explanation_says_what_whole_uploads_cost():
    clients = lookup_clients([4, 5])  # of a model with 9 x 2 + 9 + 6 x 2 + 2 = 41 global parameters
    plain = fr.explain(recon(fr.aggregators.mean(), lookup_model()), clients)
    noised = fr.explain(recon(fr.aggregators.private(1.0, 1.0, per_round=2), lookup_model()), clients)
    assert (plain.noised, noised.noised) == (False, True)
    assert "a client sends all" not in str(plain)
    assert "a client sends all 164 B, not 102 B of rows" in str(noised)


def test_a_budget_is_met_by_the_planned_rounds():
    sizes = {"clients": 5000, "per_round": 100, "rounds": 50}
    noise = noise_for(2.0, delta=1e-5, **sizes)
    release = fr.aggregators.private(1.0, noise, per_round=100).release({})
    assert epsilon_of([release._replace(rate=0.02, rounds=50)], 1e-5) == pytest.approx(2.0, rel=0.01)
    assert epsilon_after(release.noise_multiplier, delta=1e-5, **sizes) <= 2.0


def test_the_count_of_adaptive_clipping_is_paid_for():
    fixed = fr.aggregators.private(1.0, 1.0, per_round=40).release({})
    adaptive = fr.aggregators.private(1.0, 1.0, per_round=40, quantile=0.5).release({})
    assert adaptive.noise_multiplier > fixed.noise_multiplier
    assert adaptive.effective() == pytest.approx(fixed.effective())


def test_the_norm_follows_the_quantile_in_private():
    aggregator = fr.aggregators.private(100.0, 0.01, per_round=200, quantile=0.5, count_noise=1.0)
    lengths = np.linspace(1, 3, 200)  # median 2
    upload = uploads(*(np.array([length, 0.0]) for length in lengths))
    state = None
    for number in range(60):
        _, state, report, _ = through(aggregator, upload, state, number)
    assert float(report["clip_norm"]) == pytest.approx(2.0, rel=0.1)
    assert float(report["below"]) != round(float(report["below"]) * 2) / 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clip": 0.0, "noise_multiplier": 1.0, "per_round": 5}, "clip"),
        ({"clip": 1.0, "noise_multiplier": 0.0, "per_round": 5}, "noise_multiplier"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "per_round": 0}, "per_round"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "per_round": 5, "quantile": 1.0}, "quantile"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "per_round": 5, "quantile": 0.5, "count_noise": 0.1}, "count"),
    ],
)
def test_settings_that_promise_nothing_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        fr.aggregators.private(**options)


# ---- adaptive_clip ----


def test_a_quantile_is_found_from_a_histogram():
    norms = np.exp(np.random.default_rng(0).normal(1.0, 1.5, 4000))
    aggregator = fr.aggregators.adaptive_clip(0.7, memory=0.0)
    _, state, _, _ = through(aggregator, uploads(*norms[:, None]))
    assert float(state.limit) == pytest.approx(np.quantile(norms, 0.7), rel=0.05)
    assert quantile_of(jnp.zeros(BINS).at[10].set(4.0), 0.5) == pytest.approx(2.0 ** (-40 + 10.5 / 4))


def test_the_limit_is_a_multiple_of_the_quantile():
    norms = uploads(*np.arange(1.0, 10.0)[:, None])
    one, three = (through(fr.aggregators.adaptive_clip(times=times), norms)[1] for times in (1.0, 3.0))
    assert float(three.limit) == pytest.approx(3 * float(one.limit))
    with pytest.raises(ValueError, match="`times`"):
        fr.aggregators.adaptive_clip(times=0)


def test_the_first_round_gives_all_updates_the_median_norm_and_the_next_clips_to_it():
    aggregate = fr.aggregators.chain(
        fr.aggregators.finite(), fr.aggregators.adaptive_clip(), fr.aggregators.by_weight("uniform")
    )
    run = one_round(recon(aggregate), xy(A, A, ([1, 2, 3], [5, 1e6, 8])), rounds=2)
    first, second = run.history
    assert not first["skipped"]
    assert not second["skipped"]
    assert (first["clipped"], second["clipped"]) == (0, 1)
    for record in (first, second):
        assert 1.44 / 2**0.25 <= record["clip_norm"] <= 1.44 * 2**0.25
    assert abs(run.params["w"]) < 2 * 1.44 * 2**0.25


def test_a_first_round_is_the_mean_of_directions_times_the_median_norm():
    aggregator = fr.aggregators.adaptive_clip()
    mean, state, report, _ = through(aggregator, uploads([1e9, 0.0], [0.0, 2.0], [0.0, 0.0], [3.0, 4.0], [0.0, -2.0]))
    assert mean.parts["delta"]["w"] == pytest.approx(float(report["clip_norm"]) * np.array([1.6, 0.8]), rel=1e-5)
    assert 2 / 2**0.25 <= float(report["clip_norm"]) <= 2 * 2**0.25
    assert float(state.limit) == float(report["clip_norm"])


def test_hostile_clients_cannot_raise_the_limit_of_their_own_round():
    aggregator = fr.aggregators.adaptive_clip(start=1.0)
    mean, state, _, _ = through(aggregator, uploads([1e9, 0.0], [0.5, 0.0], [0.4, 0.0]))
    assert float(mean.parts["delta"]["w"][0]) == pytest.approx(1.9)
    assert float(state.limit) < 1.0


# ---- secure ----


def test_the_sum_of_integers_is_the_mean_of_floats_to_the_rounding():
    deltas = np.random.default_rng(1).normal(0, 0.3, (7, 50))
    examples = np.array([1, 5, 3, 9, 2, 8, 4])
    exact, *_ = through(fr.aggregators.mean(clip_norm=2.0), uploads(*deltas, examples=examples))
    mean, _, report, total = through(
        fr.aggregators.secure(2.0, clients=7, max_weight=10), uploads(*deltas, examples=examples)
    )
    assert mean.parts["delta"]["w"] == pytest.approx(np.asarray(exact.parts["delta"]["w"]), abs=1e-6)
    assert (float(report["weight"]), float(report["clients"])) == (32, 7)
    assert all(leaf.dtype == np.uint32 for leaf in jax.tree.leaves(total))


@pytest.mark.parametrize("bits", [20, 24, 32])
def test_a_ring_of_few_bits_has_the_sum_of_the_simulation(bits):
    """Two servers cut sums to the ring's bits: they decode to the mean of the simulation, negative values included."""
    deltas = np.random.default_rng(1).normal(0, 0.2, (7, 50))
    aggregator = fr.aggregators.secure(2.0, clients=8, max_weight=8, protocol="two-servers", bits=bits)
    mean, _, report, total = through(aggregator, uploads(*deltas, examples=np.full(7, 8)))
    cut = jax.tree.map(lambda leaf: leaf & np.uint32(2**bits - 1), total)
    is_cut = [bool((left != right).any()) for left, right in zip(*map(jax.tree.leaves, (cut, total)), strict=True)]
    assert any(is_cut) == (bits < 32)
    decoded, *_ = aggregator.decode(aggregator.init(total.parts), cut, jax.random.key(0))
    for left, right in zip(*map(jax.tree.leaves, (decoded, mean)), strict=True):
        np.testing.assert_array_equal(left, right)
    assert np.abs(mean.parts["delta"]["w"] - deltas.mean(0)).max() < 2.0 * 8 * 8 / 2 ** (bits - 1)
    assert (float(report["weight"]), float(report["clients"])) == (56, 7)
    assert aggregator.ring == ("two-servers", bits)


def test_few_bits_are_for_two_servers():
    with pytest.raises(ValueError, match="`bits`"):
        fr.aggregators.secure(1.0, clients=8, bits=20)
    with pytest.raises(ValueError, match="`protocol`"):
        fr.aggregators.secure(1.0, clients=8, protocol="one-server")


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 1.0], ids=["plain", "noise of the clients"])
def test_simulation_equals_the_protocol_bit_for_bit(noise):
    """What the simulator adds up is what the server of a secure sum gets, and it decodes it to the same model."""
    pytest.importorskip("cryptography")
    from fedrecon._src.privacy.secure_sum import plan
    from fedrecon._src.server.fixed_point import from_vector, to_vectors
    from rehearsal import Dropouts, rehearse

    options = {} if noise is None else {"noise": fr.aggregators.ClientNoise(noise, per_round=4, least=3)}
    algorithm = recon(fr.aggregators.secure(1.0, clients=8, **options), lookup_model())
    state = algorithm.init(jax.random.key(0))
    message, key = algorithm.message(state), fr.kit.round_key(0, 0)
    upload = fr.kit.client_update(algorithm, message, lookup_clients([4, 5, 6, 1, 3]), key)
    assert any(isinstance(change, RowChanges) for change in upload.delta.values())
    summand = encode(algorithm, message, jax.tree.map(jnp.asarray, upload), jax.random.split(key, 5))
    simulated = add(no_total(summand), summand)
    vectors = to_vectors(summand)
    result = rehearse(vectors, plan(5, vectors.shape[1]))
    total = from_vector(result.total, total_shapes(algorithm))
    for one, other in zip(jax.tree.leaves(total), jax.tree.leaves(simulated), strict=True):
        np.testing.assert_array_equal(one, other)
    after = [fr.kit.server_update(algorithm, state, [t], key) for t in (total, jax.tree.map(np.asarray, simulated))]
    for one, other in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_array_equal(one, other)
    without = rehearse(vectors, plan(5, vectors.shape[1]), dropouts=Dropouts(mask=[1]))
    np.testing.assert_array_equal(without.total, vectors[[0, 2, 3, 4]].sum(0, dtype=np.uint32))


def test_noise_of_the_clients_adds_up_to_what_was_asked_for():
    zeros = uploads(*np.zeros((5, 20_000)))
    mean, _, _, total = through(
        fr.aggregators.secure(2.0, clients=10, noise=fr.aggregators.ClientNoise(1.5, per_round=10, least=5)), zeros
    )
    assert total.scalars == {}
    assert np.asarray(mean.parts["delta"]["w"]).std() == pytest.approx(2.0 * 1.5 / 10, rel=0.05)


# ---- Poisson sampling ----


def test_every_client_is_drawn_by_itself():
    clients = xy(*[A] * 40)
    sampling = fr.Sampling(8, poisson=True)
    rounds = [sample(np.array([1, 2], np.uint32), number, clients, sampling) for number in range(2000)]
    there = np.array([np.isin(np.arange(40), one.clients) for one in rounds])
    assert there.mean() == pytest.approx(0.2, abs=0.01)
    assert there.sum(1).var() == pytest.approx(40 * 0.2 * 0.8, rel=0.15)  # of independent coins
    assert np.abs(np.corrcoef(there.T) - np.eye(40)).max() < 0.12
    assert rounds[0].counts == {}


@pytest.mark.parametrize(("clients", "per_round"), [(40, 8), (4832, 100), (1_000_000, 1000), (10, 10), (5, 20)])
def test_a_round_has_places_for_nearly_everybody_that_may_be_drawn(clients, per_round):
    from scipy.stats import binom

    sampling = fr.Sampling(per_round, poisson=True)
    capacity = sampling.capacity(clients)
    assert capacity <= clients
    assert binom.sf(capacity, clients, sampling.rate(clients)) <= OVERFLOW
    assert capacity < per_round + 15 * math.sqrt(per_round) + 20


@pytest.mark.parametrize(("clients", "per_round"), [(4832, 483), (1_000_000, 1000), (40, 8)])
def test_noise_of_clients_counts_on_as_few_as_are_all_but_certain(clients, per_round):
    from scipy.stats import binom

    sampling = fr.Sampling(per_round, poisson=True)
    least = sampling.fewest(clients)
    assert 1 <= least < per_round
    assert least == 1 or binom.cdf(least - 1, clients, sampling.rate(clients)) <= OVERFLOW
    assert binom.cdf(least, clients, sampling.rate(clients)) > OVERFLOW


def test_what_too_many_or_too_few_clients_cost_is_taken_off_delta_beforehand():
    clients = xy(*[A] * 40)
    algorithm, sampling = recon(fr.aggregators.private(1.0, 2.0, per_round=8)), fr.Sampling(8, poisson=True)
    spent = spending(algorithm, len(clients), sampling, 10, Ledger(40, 1e-4))
    assert spent.before.delta == 1e-4 - 2e6 * OVERFLOW * (1 + math.exp(13)) < 1e-4
    assert spending(algorithm, 40, fr.Sampling(8), 10, Ledger(40, 1e-4)).before.delta == 1e-4


def test_poisson_sampling_excludes_invitations_beyond_need():
    with pytest.raises(ValueError, match="poisson"):
        fr.Sampling(5, oversample=1.5, poisson=True)


# ---- poisoned clients ----


def poisoned_ratings():
    """Ratings of 61 people, one of whom gives ten of 1,000; and twenty other people."""
    ratings = fr.data.synthetic_ratings(num_users=81, num_items=60, mean_ratings=20, seed=0)
    columns = {name: column.copy() for name, column in ratings.columns.items()}
    ends = ratings.ends.copy()
    ends[0] = min(ends[0], 10)
    columns["rating"][: ends[0]] = 1000.0
    people = fr.Clients(columns, ratings.starts, ends, ratings.names)
    return people.take(np.arange(61)), ratings.take(np.arange(61, 81))


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True], ids=["mean", "adaptive_clip"])
def test_one_poisoned_client_of_61_spoils_a_mean_and_no_clipped_one(adaptive):
    clients, others = poisoned_ratings()
    stages = (fr.aggregators.finite(), fr.aggregators.adaptive_clip(), fr.aggregators.by_weight())
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(60, dim=4),
        reconstruct=fr.gradient_descent(optax.sgd(0.1), batch_size=5, epochs=5, steps=50),
        update=fr.gradient_descent(optax.sgd(0.2), batch_size=5, steps=50),
        server=optax.sgd(1.0),
        aggregate=fr.aggregators.chain(*stages) if adaptive else fr.aggregators.mean(),
    )
    with contextlib.nullcontext() if adaptive else pytest.warns(fr.DivergenceWarning):
        run = fr.train(algorithm, clients, rounds=30, clients_per_round=61)
    with contextlib.nullcontext() if adaptive else pytest.warns(fr.DivergenceWarning):
        found = fr.evaluate(algorithm, run.params, others)
    if adaptive:
        assert found.diverged == 0
        assert found.micro["rmse"] < 3.0
    else:
        assert found.diverged == 20
