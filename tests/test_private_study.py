"""The study of privacy: its jobs run, and noise is that of the population it names."""

import pytest
from studies.privacy import JOBS, STUDY, make_config, prepare, run_job
from studies.ratings import RatingsData
from studies.study import Job

import fedrecon as fr
from fedrecon._src.privacy.accounting import epsilon_of

POPULATION = (100_000, 5_000)


@pytest.fixture(scope="module")
def data():
    return RatingsData(fr.data.synthetic_ratings(num_users=300, num_items=40, mean_ratings=15, seed=0), 20)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedrecon", "global"])
def test_a_job_measures_and_attacks(method, data):
    config = make_config(4.0, dim=2, method=method, rounds=2)
    result = run_job(Job("job", "job", config, method, population=POPULATION), data, 0)
    assert 0 < result["evaluations"][-1]["recon"]["micro"]["rmse"] < 3
    assert 0 < result["round_zero"] < 4
    assert 0 <= result["leakage"]["first"] <= 1


def test_the_noise_of_a_larger_population_is_its_own(data):
    ready, protection = prepare(Job("job", "job", make_config(4.0, rounds=100), population=POPULATION), data, 0)
    rounds = protection.aggregator.release({})._replace(
        noise_multiplier=protection.noise_multiplier, rate=0.05, rounds=100
    )
    assert 3.9 < epsilon_of([*ready.releases, rounds], protection.ledger.delta) <= 4
    noise = protection.aggregator.release({}).noise_multiplier
    per_round = protection.config.sampling.cohort_size(len(ready.users.train))
    assert noise / per_round == pytest.approx(protection.noise_multiplier / 5_000)


def test_there_is_a_row_for_every_budget_and_population():
    names = {job.name for job in JOBS}
    for epsilon in ("none", "1", "2", "4", "8"):
        assert {f"fedrecon-{epsilon}", f"global-{epsilon}"} <= names
    assert {"as-if-100000", "as-if-1000000"} <= names
    assert {job for section in STUDY.sections for job in section.jobs} == names
