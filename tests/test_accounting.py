"""Privacy accounting: against formulas, against another accountant, and the ledger that keeps it."""

import json
import math

import dp_accounting
import dp_accounting.pld
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedrecon as fr
from fedrecon._src.privacy import accounting
from fedrecon._src.privacy.accounting import Release, epsilon_after, epsilon_of, noise_for
from fedrecon._src.privacy.ledger import BudgetError, Ledger
from fedrecon._src.privacy.noise import share_of_noise


def analytic_delta(epsilon, noise):
    """Return delta of one Gaussian release (Balle and Wang 2018)."""
    cdf = stats.norm.cdf
    return cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * cdf(-0.5 / noise - epsilon * noise)


# ---- epsilon ----


@pytest.mark.parametrize("noise", [0.6, 1.0, 4.0])
def test_one_release_is_what_the_formula_says(noise):
    found = epsilon_of([Release(noise, 1.0, 1)], 1e-5)
    assert analytic_delta(found, noise) <= 1e-5  # never too small
    assert analytic_delta(0.99 * found, noise) > 1e-5


def test_rounds_without_sampling_are_one_release_of_less_noise():
    assert epsilon_of([Release(8.0, 1.0, 16)], 1e-6) == pytest.approx(
        epsilon_of([Release(2.0, 1.0, 1)], 1e-6), rel=5e-3
    )


def test_the_rule_of_thumb_for_a_sampled_run_lies_above():
    # RDP is looser than privacy loss distributions, by a known amount here: 4.74 and 4.05.
    loose = RdpAccountant().compose(
        dp_accounting.PoissonSampledDpEvent(100 / 4832, dp_accounting.GaussianDpEvent(0.8)), 500
    )
    delta = 4832**-1.1
    found = epsilon_after(0.8, clients=4832, per_round=100, rounds=500)
    assert 4.0479 < found < 4.0479 * 1.001  # 4.04798 with steps of 1e-4; ours are coarser, and round upwards
    assert loose.get_epsilon(delta) == pytest.approx(4.741, abs=1e-3)


def test_nothing_released_costs_nothing():
    assert epsilon_of([], 1e-5) == 0
    assert epsilon_of([Release(1.0, 0.1, 0)], 1e-5) == 0


# ---- noise for an epsilon ----


@pytest.mark.parametrize(
    ("clients", "per_round", "epsilon", "noise"),
    [(4832, 100, 1, 1.70), (100_000, 1000, 4, 0.70), (1_000_000, 1000, 4, 0.52)],
)
def test_the_noise_of_published_plans(clients, per_round, epsilon, noise):
    found = noise_for(epsilon, clients=clients, per_round=per_round, rounds=500)
    assert found == pytest.approx(noise, abs=0.0051)
    spent = epsilon_after(found, clients=clients, per_round=per_round, rounds=500)
    assert 0.99 * epsilon < spent <= epsilon


TABLE = {  # the noise multiplier for epsilon 1, 2, 4 and 8; 500 rounds, delta = N^-1.1
    (4832, 100): (1.70, 1.10, 0.80, 0.62),
    (100_000, 1000): (1.20, 0.88, 0.70, 0.56),
    (1_000_000, 1000): (0.71, 0.62, 0.52, 0.41),
}


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "per_round"), TABLE)
def test_the_table_of_noise_holds_for_the_accountant_of_the_library(clients, per_round):
    """Against dp-accounting itself, with nothing of ours between: it allows our noise, and not one percent less."""
    delta = clients**-1.1

    def library(noise):
        accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
        event = dp_accounting.PoissonSampledDpEvent(per_round / clients, dp_accounting.GaussianDpEvent(noise))
        return accountant.compose(event, 500).get_epsilon(delta)

    for epsilon, published in zip((1, 2, 4, 8), TABLE[clients, per_round], strict=True):
        found = noise_for(epsilon, clients=clients, per_round=per_round, rounds=500)
        assert found == pytest.approx(published, abs=0.0051)
        assert library(found) <= epsilon
        assert library(0.99 * found) > epsilon


def test_what_was_released_before_takes_more_noise_after():
    plan = {"clients": 10_000, "per_round": 200, "rounds": 50}
    before = [Release(2.0, 1.0, 1)]
    fresh, later = noise_for(4, **plan), noise_for(4, **plan, before=before)
    assert later > fresh
    delta = accounting.default_delta(10_000)
    assert epsilon_of([*before, Release(later, 0.02, 50)], delta) <= 4
    assert epsilon_of([*before, Release(0.99 * later, 0.02, 50)], delta) > 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epsilon": 0}, "`epsilon`"),
        ({"epsilon": -1}, "`epsilon`"),
        ({"delta": 1.0}, "`delta`"),
        ({"delta": 0.0}, "`delta`"),
        ({"per_round": 2000}, "`per_round`"),
        ({"per_round": 0}, "`per_round`"),
        ({"clients": 1}, "`clients`"),
        ({"rounds": 0}, "`rounds`"),
        ({"rounds": 10**7}, "`rounds`"),
        ({"epsilon": 0.5, "before": (Release(0.5, 1.0, 1),)}, "`epsilon` must be above .* spent before"),
    ],
)
def test_plans_that_cannot_be_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        noise_for(**({"epsilon": 4, "clients": 1000, "per_round": 100, "rounds": 10} | change))


def test_a_budget_that_is_all_but_spent_is_refused():
    before = [Release(1.0, 1.0, 1)]
    spent = epsilon_of(before, 1e-3)
    with pytest.raises(ValueError, match="no amount of noise"):
        noise_for(spent * (1 + 1e-9), clients=1000, per_round=1000, rounds=10, delta=1e-3, before=before)


def test_a_clipping_norm_must_bound_something():
    for clip in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="`clip`"):
            share_of_noise(clip, 10, 1.0, clients=10, least=10)
        with pytest.raises(ValueError, match="`clip`"):
            fr.aggregators.private(clip, noise_multiplier=1.0, per_round=10)
    assert share_of_noise(0.5, 10, 1.0, clients=10, least=10).grid.limit == 0.5


# ---- adaptive clipping ----


@given(st.floats(0.3, 5), st.floats(3, 200))
def test_noise_is_divided_between_updates_and_the_count_and_adds_up_again(noise, count_noise):
    update = accounting.update_noise_for(noise, count_noise)
    assert update > noise
    assert Release(update, 1.0, 1, count_noise=count_noise).effective() == pytest.approx(noise)


def test_the_count_costs_as_much_as_it_gives_away():
    # By hand: one half over noise 5 is a sensitivity of 1/10; with 1/2 of the updates: (1/4 + 1/100) ** -.5.
    assert Release(2.0, 1.0, 1, count_noise=5.0).effective() == pytest.approx(0.26**-0.5)
    plain, counted = Release(2.0, 0.1, 20), Release(2.0, 0.1, 20, count_noise=1.5)
    assert epsilon_of([counted], 1e-5) > epsilon_of([plain], 1e-5)
    with pytest.raises(ValueError, match=r"must be above half of 1 "):
        accounting.update_noise_for(1.0, 0.4)


# ---- Rényi divergences ----


@pytest.mark.parametrize(("noise", "rate"), [(0.8, 0.02), (2.0, 0.3), (1.0, 1.0)])
def test_the_divergence_of_sampled_gaussian_noise_is_the_other_accountants(noise, rate):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    other = RdpAccountant(orders=accounting.ORDERS).compose(event, 30)
    found = accounting.renyi_epsilon(
        [(accounting.sampled_divergence(accounting.gaussian_divergence(noise), rate, gaussian=True), 30)], 1e-5
    )
    assert found == pytest.approx(other.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize(("variance", "shift"), [(4.0, 1), (30.0, 3), (900.0, 20)])
@pytest.mark.parametrize("order", [2, 5, 16])
def test_the_bound_on_skellam_noise_lies_above_its_true_divergence(variance, shift, order):
    reach = int(12 * math.sqrt(variance)) + order * shift
    at = np.arange(-reach, reach + 1)
    noise = stats.skellam(variance / 2, variance / 2)
    log_p, log_q = noise.logpmf(at - shift), noise.logpmf(at)
    usable = np.isfinite(log_p) & np.isfinite(log_q)
    log_p, log_q = log_p[usable], log_q[usable]
    true = np.logaddexp.reduce(order * log_p - (order - 1) * log_q) / (order - 1)
    bound = accounting.skellam_divergence(variance, shift, 1)(order)
    assert true <= bound
    if variance > 100:
        assert bound < 1.1 * true


def test_fine_steps_make_skellam_noise_as_good_as_gaussian():
    gaussian = epsilon_of([Release(1.0, 0.01, 100)], 1e-6)
    fine = Release(1.0, 0.01, 100, "skellam", steps=2.0**15, length=200_000)
    coarse = fine._replace(steps=20.0)
    loose = accounting.renyi_epsilon(
        [(accounting.sampled_divergence(accounting.gaussian_divergence(1.0), 0.01), 100)], 1e-6
    )
    assert epsilon_of([fine], 1e-6) == pytest.approx(loose, rel=0.01)
    assert gaussian < epsilon_of([fine], 1e-6) < epsilon_of([coarse], 1e-6)


# ---- ledger ----


def test_rounds_added_one_by_one_are_as_many_at_once():
    one = Release(1.0, 0.05, 1)
    ledger = Ledger(1000, 1e-4)
    for _ in range(12):
        ledger = ledger.add(one)
    assert ledger.releases == (one._replace(rounds=12),)
    assert ledger.epsilon == epsilon_after(1.0, clients=1000, per_round=50, rounds=12, delta=1e-4)
    assert ledger.rounds == 12


def test_a_ledger_survives_json_to_the_digit():
    ledger = Ledger(1000, 1000**-1.1, 8.0, randomness="seed 3").add(Release(0.1 + 0.7, 1 / 7, 5, count_noise=3.3))
    ledger = ledger.add(Release(1.0, 1.0, 1))
    text = json.dumps(ledger.to_dict())
    again = Ledger.from_dict(json.loads(text))
    assert again == ledger
    assert again.epsilon == ledger.epsilon == json.loads(text)["epsilon"]
    assert json.dumps(again.to_dict()) == text
    assert "not covered" in json.loads(text)["not_covered"]


@settings(max_examples=2, deadline=None)
@given(st.floats(0.8, 1.5))
def test_a_ledger_never_passes_its_budget(noise):
    ledger, release = Ledger(1000, 1e-4, 2.0), Release(noise, 0.1, 1)
    left = ledger.rounds_left(release)
    assert left > 0
    full = ledger.add(release._replace(rounds=left))
    assert full.epsilon <= 2.0
    with pytest.raises(BudgetError, match="at most 0 more fit"):
        full.add(release)
    almost = ledger.add(release._replace(rounds=left - 1))
    with pytest.raises(BudgetError, match="at most 1 more fit"):
        almost.add(release._replace(rounds=2))


def test_going_past_the_budget_is_a_sentence_and_spends_nothing():
    ledger = Ledger(1000, 1e-4, 2.0).add(Release(1.0, 0.1, 5))
    before = ledger.epsilon
    with pytest.raises(BudgetError, match=r"1000 more would spend epsilon .* of 2 \(so far .*use more noise"):
        ledger.add(Release(1.0, 0.1, 1000))
    assert ledger.epsilon == before
    assert Ledger(1000, 1e-4).rounds_left(Release(1.0, 0.1, 1), most=77) == 77


@pytest.mark.parametrize("most", [1, 3, 4, 5])
def test_as_many_rounds_fit_as_were_asked_about(most):
    assert Ledger(1000, 1e-4, 5.0).rounds_left(Release(4.0, 0.1, 1), most) == most


def test_two_runs_on_the_same_clients_add_up():
    first = Ledger(1000, 1e-4, 8.0).add(Release(1.0, 0.1, 20))
    second = Ledger(1000, 1e-4, randomness="seed 0").add(Release(1.0, 0.1, 10)).add(Release(3.0, 1.0, 1))
    both = first.and_then(second)
    assert both.releases == (Release(1.0, 0.1, 30), Release(3.0, 1.0, 1))
    assert max(first.epsilon, second.epsilon) < both.epsilon < first.epsilon + second.epsilon
    assert both.budget == 8.0
    assert "simulated: noise from system, seed 0" in both.summary()
    with pytest.raises(ValueError, match="only at the same delta"):
        first.and_then(Ledger(1000, 1e-5))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Ledger(1000, 1.0), "`delta`"),
        (lambda: Ledger(1, 0.1), "`clients`"),
        (lambda: Ledger(1000, 1e-4, 0.0), "`budget`"),
        (lambda: Ledger(1000, 1e-4).add(Release(0.0, 0.1, 1)), "`noise_multiplier`"),
        (lambda: Ledger(1000, 1e-4).add(Release(1.0, 0.0, 1)), "`rate`"),
        (lambda: Ledger(1000, 1e-4).add(Release(1.0, 0.1, -1)), "`rounds`"),
        (lambda: Ledger(1000, 1e-4).add(Release(1.0, 0.1, 1, "laplace")), "`mechanism`"),
        (lambda: Ledger(1000, 1e-4).add(Release(1.0, 0.1, 1, "skellam")), "Skellam noise needs `steps` and `length`"),
        (lambda: Ledger.from_dict({"clients": 3}), "this is not a ledger of privacy"),
        (lambda: Ledger.from_dict(Ledger(9, 0.1).to_dict() | {"releases": [{"x": 1}]}), "this is not a ledger"),
    ],
)
def test_ledgers_that_promise_nothing_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
