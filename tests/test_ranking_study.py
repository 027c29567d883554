"""The study of ranking: what is compared, on whom, and that settings are chosen on validation users alone."""

import dataclasses

import numpy as np
import pytest
from studies.ranking import DEFAULT, JOBS, STUDY, ClicksData, by_embeddings, central, ials, run_job
from studies.report import compose, to_markdown
from studies.study import Job

from fedrecon._src.recommend import ranking
from fedrecon._src.recommend.config import ClickData, ClicksConfig, Ranking
from fedrecon._src.recommend.ranking import ItemSets
from fedrecon.data import synthetic_ratings

SMALL = Job(
    "small",
    "Small",
    dataclasses.replace(DEFAULT, model=Ranking(dim=4), rounds=3, evaluate_every=3),
    "federated",
    measures=("unseen",),
)


@pytest.fixture(scope="module")
def data():
    clicks = synthetic_ratings(num_users=80, num_items=30, mean_ratings=8, seed=0)
    return ClicksData(clicks, ClicksConfig(data=ClickData(source="x", fractions=(0.6, 0.2, 0.2), max_examples=6)))


def test_central_models_see_all_items_of_those_who_train(data):
    assert data.users.train.sizes.max() == 6
    assert np.bincount(data.train.user).max() > 6
    assert data.train.users == len(data.users.train)


def test_settings_are_chosen_on_validation_users(data):
    result = run_job(central("ease", "EASE", "EASE", ridge=(1.0, 10.0, 1000.0)), data, 0)
    best = max(result["trials"], key=lambda trial: trial["valid"])["ridge"]
    chosen = data.rank(ranking.ease(data.train, 30, ridge=best), "test")
    assert result["evaluations"][0]["unseen"]["micro"] == chosen.metrics
    for trial in result["trials"]:
        score = ranking.ease(data.train, 30, ridge=trial["ridge"])
        assert trial["valid"] == data.rank(score, "valid").metrics["ndcg@100"]


@pytest.mark.slow
def test_the_federated_job_measures_as_the_others_do(data):
    result = run_job(SMALL, data, 0)
    measured = result["evaluations"][0]["unseen"]
    assert measured["clients"] == data.rank(ranking.popularity(data.train, 30), "test").users
    assert result["sent"] == round(data.users.train.num_examples / len(data.users.train) * 2 * 4 + 16)
    assert 0 < measured["micro"]["ndcg@100"] < 1


def test_newcomers_are_solved_for_exactly():
    # Least squares with one row an item: weight alpha and target 1 for known ones, weight 1 and target 0 for others.
    rng = np.random.default_rng(0)
    items, alpha, ridge = rng.normal(size=(9, 3)), 4.0, 0.5
    scores = by_embeddings(items, alpha, ridge)(ItemSets(2, np.array([0, 0, 1]), np.array([2, 5, 7])))
    for user, known in enumerate(([2, 5], [7])):
        has = np.isin(np.arange(9), known)
        root = np.sqrt(np.where(has, alpha, 1.0))
        rows = np.concatenate([root[:, None] * items, ridge**0.5 * np.eye(3)])
        own = np.linalg.lstsq(rows, np.concatenate([root * has, np.zeros(3)]))[0]
        np.testing.assert_allclose(scores[user], items @ own, atol=1e-10)


def test_ials_of_the_package_finds_what_goes_together():
    pytest.importorskip("implicit")
    rng = np.random.default_rng(0)
    mine = [rng.permutation(8)[:5] + 8 * kind for kind in (0, 1) for _ in range(20)]
    train = ItemSets(40, np.repeat(np.arange(40), 5), np.concatenate(mine))
    score = ials(train, 16, alpha=5.0, regularization=1.0, factors=2)(
        ItemSets(1, np.zeros(3, int), np.array([0, 1, 2]))
    )
    assert score[0, 3:8].min() > score[0, 8:].max()


def make_result(job, ndcg):
    metrics = {"ndcg@100": ndcg, "recall@20": ndcg, "recall@50": ndcg, "hit@20": ndcg, "coverage@20": ndcg}
    unseen = {"micro": metrics, "errors": metrics, "clients": 9, "diverged": 0}
    return [{"evaluations": [{"round": 1, "unseen": unseen}], "trials": [], "seed": 0, "seconds": 1.0, "job": job}]


@pytest.mark.parametrize(("ours", "verdict"), [(0.41, "holds"), (0.39, "does not hold")])
def test_the_report_says_whether_the_federated_model_is_near(tmp_path, ours, verdict):
    figures = {"popularity": 0.2, "item-knn": 0.3, "ease": 0.41, "ials": 0.4, "federated": ours}
    results = {name: make_result(name, ndcg) for name, ndcg in figures.items()}
    report = to_markdown(compose(STUDY, results, ["facts"], tmp_path), tmp_path)
    assert f"**Federated is within 2 % of the better of EASE and iALS**: {verdict}." in report
    assert "| Federated | " + f"{ours:.4f}" in report
    assert (tmp_path / "figures" / "ranking.png").exists()


def test_quick_jobs_try_one_setting():
    kind = STUDY.kind
    quick = [job.shorten(kind.quick_rounds, kind.quick_changes) for job in JOBS]
    assert all(len(values) == 1 for job in quick for values in job.candidates.values())
    assert max(job.config.rounds for job in quick) == 20
    assert quick[-1].config.model.dim == 16
