"""The study of relatives: made data is as stated, every method runs, and its tables show what was measured."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from studies.relatives import (
    JOBS,
    KEEPING,
    METHODS,
    RATES,
    SEEN,
    STUDY,
    SYNTHETIC,
    SYNTHETIC_ONLY,
    TASKS,
    RelativesData,
    make_classes,
    metric_of,
    rate_beyond,
    run_job,
)
from studies.report import compose, to_markdown

DATA = RelativesData(Path("nowhere"), clients=60, many=200)


def small(job, rounds=2, rates=(0.3, 1.0)):
    config = dataclasses.replace(job.config, rounds=rounds, evaluate_every=rounds)
    return dataclasses.replace(job, config=config, candidates={"learning_rate": rates})


def by_name(name):
    return next(job for job in JOBS if job.name == name)


def test_every_task_has_every_method_that_it_has_a_model_for():
    assert len(JOBS) == len(TASKS) * len(METHODS) - len(SYNTHETIC_ONLY) * (len(TASKS) - len(SYNTHETIC))
    assert len({len(job.candidates["learning_rate"]) for job in JOBS}) == 1  # equally many trials


def test_clients_of_made_data_share_a_body_and_disagree_about_heads():
    clients = make_classes(300)
    assert 10 <= clients.sizes.min() <= clients.sizes.max() <= 40
    assert set(np.unique(clients.columns["label"])) == set(range(5))
    np.testing.assert_array_equal(make_classes(300).columns["x"], clients.columns["x"])


@pytest.mark.parametrize(
    ("losses", "rate"),
    [((2.0, 1.0), 9.0), ((1.0, 2.0), 0.33), ((1.0, np.nan), 0.33), ((np.nan, 2.0), 9.0), ((np.inf, np.nan), 0.33)],
)
def test_the_third_rate_is_beyond_the_better_of_two(losses, rate):
    trials = [{"learning_rate": tried, "valid": loss} for tried, loss in zip((1.0, 3.0), losses, strict=True)]
    assert rate_beyond(trials) == rate


def test_a_shortened_job_tries_one_rate():
    job = by_name("classes-local").shorten(2, {})
    assert len(run_job(job, DATA, seed=0)["trials"]) == 1


def test_later_examples_of_those_who_train_are_not_trained_on():
    task = DATA.task("classes")
    np.testing.assert_array_equal(task.train.ends, task.later.starts)
    np.testing.assert_array_equal(task.train.sizes, SEEN.counts(task.everything.sizes)[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_and_is_measured(method):
    result = run_job(small(by_name(f"classes-{method}")), DATA, 0)
    measured = result["evaluations"][0]
    assert 0 < measured["unseen"]["micro"]["accuracy"] < 1
    assert measured["worst"]["micro"]["loss"] >= measured["unseen"]["micro"]["loss"]
    keeps_local = method in KEEPING and method != "scaffold"  # which keeps control variates
    assert measured["seen"]["protocol"] == ("standard" if keeps_local else "recon")


@pytest.mark.slow
def test_nobody_takes_part_twice_and_the_report_shows_it():
    job = small(by_name("once-fedper"), rounds=4, rates=RATES["once"])
    result = run_job(job, DATA, 0)
    assert 4 * result["per_round"] <= result["clients"]
    best = min(result["trials"], key=lambda trial: trial["valid"])
    results = {job.name: [{**result, "settings": job.settings}]}
    page = to_markdown(compose(STUDY, results, [], Path("unused"), [], quick=True), Path("unused"))
    shown = f"{metric_of(results, job.name).mean:.1f}"
    row = next(line for line in page.splitlines() if line.startswith("| FedPer"))
    assert shown in row
    assert f"| {best['learning_rate']:g} |" in row
