"""Noise in integers: its distribution, its sum, and what it promises."""

import math

import numpy as np
import pytest
from scipy import stats

from fedrecon._src.privacy import accounting, ring
from fedrecon._src.privacy import secure_sum as ss
from fedrecon._src.privacy.accounting import Release, epsilon_of, noise_for
from fedrecon._src.privacy.noise import ShareOfNoise, draw, share_of_noise, system_generator
from rehearsal import Dropouts, rehearse


def signed(integers):
    return integers.astype(np.int32).astype(np.float64)


def test_noise_has_the_distribution_it_says():
    share = ShareOfNoise(ring.grid(1.0, 10), 6.0, 1.0, 1.0, 40_000, 1)
    found = signed(draw(share, np.random.default_rng(0)))
    at = np.arange(-6, 7)
    expected = stats.skellam(3, 3).pmf(at) * len(found)
    counted = np.array([(found == k).sum() for k in at])
    assert stats.chi2.sf(((counted - expected) ** 2 / expected).sum(), len(at)) > 0.001
    assert found.var() == pytest.approx(6, rel=0.03)


def test_the_least_clients_together_have_the_noise_that_was_asked_for():
    share = share_of_noise(2.0, 20_000, 0.8, clients=50, least=30)
    rng = np.random.default_rng(1)
    shares = [signed(draw(share, rng)) for _ in range(30)]
    together = np.sum(shares, 0) * share.grid.step
    assert together.std() == pytest.approx(0.8 * 2.0, rel=0.02)
    assert together.std() >= 0.8 * 2.0 * 0.985
    at_once = signed(draw(share, rng, clients=30)) * share.grid.step
    assert at_once.std() == pytest.approx(together.std(), rel=0.03)
    assert stats.ks_2samp(together, at_once).pvalue > 0.001


@pytest.mark.parametrize(
    ("clip", "noise", "clients", "least"), [(25, 0.7, 1000, 600), (1e-3, 5, 10, 10), (1, 0.01, 3, 1)]
)
def test_everybody_at_the_limit_with_all_their_noise_fits(clip, noise, clients, least):
    share = share_of_noise(clip, 1000, noise, clients=clients, least=least)
    spread = math.sqrt(clients * share.variance)
    assert clients * share.grid.levels + 12 * spread < 2**31
    assert spread * math.sqrt(least / clients) == pytest.approx(noise * share.steps)


def test_rounding_is_part_of_what_a_client_can_add():
    share = share_of_noise(1.0, 250_000, 0.7, clients=100, least=100)
    assert share.steps == 1 / share.grid.step + 250
    vector = np.random.default_rng(0).normal(size=250_000)
    vector /= np.linalg.norm(vector)
    assert np.linalg.norm(signed(ring.quantise(share.grid, vector))) <= share.steps


def test_noise_in_integers_costs_hardly_more_than_gaussian_noise():
    share = share_of_noise(25.0, 200_000, 1.0, clients=1000, least=700)
    loss = epsilon_of([share.release(1.0, 10)], 1e-6)
    assert epsilon_of([Release(1.0, 1.0, 10)], 1e-6) < loss
    same_accountant = accounting.renyi_epsilon([(accounting.gaussian_divergence(1.0), 10)], 1e-6)
    assert same_accountant < loss < 1.001 * same_accountant


def test_noise_in_integers_is_calibrated_for_an_epsilon():
    def release(noise):
        return share_of_noise(1.0, 1000, noise, clients=100, least=60).release(0.05, 20)

    plan = {"clients": 2000, "per_round": 100, "rounds": 20, "delta": 1e-4}
    found = noise_for(4.0, **plan, release=release)
    assert 3.95 < epsilon_of([release(found)], 1e-4) <= 4.0
    assert found > noise_for(4.0, **plan)


def test_a_secure_sum_of_noised_uploads_is_the_sum_and_the_noise_of_those_who_answered():
    rng = np.random.default_rng(2)
    uploads = rng.normal(size=(8, 3000))
    uploads /= np.linalg.norm(uploads, axis=1, keepdims=True)
    share = share_of_noise(1.0, 3000, 2.0, clients=8, least=6)
    sent = np.stack([ring.quantise(share.grid, upload) + draw(share, rng) for upload in uploads])
    result = rehearse(sent, ss.plan(8, 3000), dropouts=Dropouts(share=[0], mask=[4]))
    assert result.clients == (1, 2, 3, 5, 6, 7)
    noise = ring.restore(share.grid, result.total) - uploads[list(result.clients)].sum(0)
    assert noise.std() == pytest.approx(2.0, rel=0.05)


def test_the_generator_of_a_deployment_is_another_each_time():
    draws = {system_generator().integers(2**63) for _ in range(5)}
    assert len(draws) == 5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"clip": 0.0}, "`clip`"),
        ({"noise_multiplier": 0.0}, "`noise_multiplier`"),
        ({"least": 0}, "`least`"),
        ({"least": 11}, "`least`"),
        ({"length": 0}, "`length`"),
        ({"bits": 16}, "`bits`"),
        ({"clients": 2**30, "noise_multiplier": 1e6, "least": 1}, "32 bits cannot hold the sum of 1073741824 clients"),
    ],
)
def test_noise_that_cannot_be_is_refused(change, sentence):
    values = {"clip": 1.0, "length": 10, "noise_multiplier": 1.0, "clients": 10, "least": 6} | change
    with pytest.raises(ValueError, match=sentence):
        share_of_noise(**values)
