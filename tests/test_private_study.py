"""The study of privacy: its jobs run, and noise is that of the population it names."""

import pytest
from studies.privacy import JOBS, STUDY
from studies.privacy_jobs import Setting, _prepared, run_job
from studies.rating_jobs import Divided

import fedrecon as fr
from fedrecon._src.privacy.accounting import epsilon_of


@pytest.fixture(scope="module")
def divided():
    return Divided(fr.data.synthetic_ratings(num_users=300, num_items=40, mean_ratings=15, seed=0), 20)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["fedrecon", "everything global"])
def test_a_job_measures_and_attacks(train, divided):
    setting = Setting(train=train, dim=2, epsilon=4.0, population=100_000, cohort=5_000, rounds=2, every=2)
    found = run_job(setting, divided, 0)
    assert 0 < found["evaluations"][-1]["recon"]["micro"]["rmse"] < 3
    assert 0 < found["round_zero"] < 4
    assert 0 <= found["leakage"]["first"] <= 1


def test_the_noise_of_a_larger_population_is_its_own(divided):
    setting = Setting(epsilon=4.0, population=100_000, cohort=5_000, rounds=100)
    ready, protection = _prepared(setting, divided, 0)
    rounds = protection.aggregator.release({})._replace(
        noise_multiplier=protection.noise_multiplier, rate=0.05, rounds=100
    )
    assert 3.9 < epsilon_of([*ready.releases, rounds], protection.ledger.delta) <= 4
    here = protection.aggregator.release({}).noise_multiplier
    per_round = protection.config.sampling.wanted(len(ready.users.train))
    assert here / per_round == pytest.approx(protection.noise_multiplier / 5_000)


def test_there_is_a_row_for_every_budget_and_population():
    names = {job.name for job in JOBS}
    for epsilon in ("none", "1", "2", "4", "8"):
        assert {f"fedrecon-{epsilon}", f"global-{epsilon}"} <= names
    assert {"as-if-100000", "as-if-1000000"} <= names
    assert {job for section in STUDY.sections for job in section.jobs} == names
