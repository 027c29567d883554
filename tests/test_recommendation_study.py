"""The studies of recommendation and of expressions: how files are read, what is hidden, and what counts as a hit."""

import gzip

import jax
import numpy as np
import pytest
from studies import expressions, recommendation
from studies.report import compose, to_markdown

import fedrecon as fr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with a file in the format of MovieLens 100K: two kinds of people."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "protocols").mkdir()
    rng = np.random.default_rng(0)
    lines = [
        f"{user},{item + 60 * (user % 2)},5,{time}"
        for user in range(1, 61)
        for time, item in enumerate(rng.permutation(60)[: rng.integers(5, 15)])
    ]
    (folder / "protocols" / "ml-100k.ratings.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return recommendation.load(str(folder))


def test_the_test_item_is_the_last_and_is_not_among_its_candidates(data):
    clients, protocol = data.clients("ml-100k"), data.protocol("ml-100k")
    assert data.names == ["ml-100k"]
    assert clients.columns["item"][0] == 0, "items are numbered in order of their first appearance"
    last = [clients.columns["item"][end - 1] for end in clients.ends]
    np.testing.assert_array_equal(protocol.test.item, last)
    assert not (protocol.candidates == protocol.test.item[:, None]).any()
    assert len(protocol.everything.item) - len(protocol.train.item) == 2 * len(clients)


def test_a_job_measures_seen_and_unseen_users_and_its_report_names_what_is_missing(data, tmp_path):
    job = next(job for job in recommendation.JOBS if job.name == "ml-100k-popularity")
    result = recommendation.run_job(job, data, 0)
    metrics = result["evaluations"][0]["seen"]["micro"]
    assert set(metrics) == {"a hr@10", "a ndcg@10", "unseen ndcg@100", "unseen recall@20"}
    assert all(0 < value < 1 for value in metrics.values())
    report = to_markdown(compose(recommendation.STUDY, {job.name: [result]}, data.facts(), tmp_path), tmp_path)
    assert "EASE (central)" in report


def test_negatives_are_items_that_are_not_excluded(data):
    protocol = data.protocol("ml-100k")
    drawn = recommendation.Negatives(protocol.everything, 120).draw(np.full(60, 2), seed=0)
    assert np.bincount(drawn.user).tolist() == [2 * recommendation.NEGATIVES] * 60
    taken = set(zip(protocol.everything.user.tolist(), protocol.everything.item.tolist(), strict=True))
    assert not taken & set(zip(drawn.user.tolist(), drawn.item.tolist(), strict=True))


@pytest.mark.slow
def test_pfedrec_without_stored_items_is_pfedrec_and_other_examples_are_drawn_in_every_round(data):
    protocol, rates = data.protocol("ml-100k"), recommendation.Rates(1, 10, 0.01)
    full, lean = (recommendation._algorithm(name, 120, rates) for name in ("pfedrec", "fedalt"))
    sizes, seen = np.bincount(protocol.train.user), []

    def draw(number):
        negatives = recommendation.Negatives(protocol.train, 120).draw(sizes, number)
        seen.append(negatives.item)
        return recommendation._labelled(protocol.train, negatives, number)

    state, stored = recommendation.train_redrawn(full, draw, range(3), seed=0)
    assert not np.array_equal(seen[1], seen[2])
    lean_state, lean_stored = recommendation.train_pfedrec(full, lean, draw, 3, seed=0)
    params = [algorithm.params(found) for algorithm, found in ((full, state), (lean, lean_state))]
    for expected, result in zip(*map(jax.tree.leaves, ((params[0], stored), (params[1], lean_stored))), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", recommendation.SAMPLING)
def test_methods_that_sample_negatives_score_seen_and_unseen_users(data, method):
    protocol = data.protocol("ml-100k")
    fitted = recommendation._fit_with_negatives(
        method, protocol.train, protocol.train, 120, 0, recommendation.GRIDS[method][0], rounds=2
    )
    assert fitted.seen(0, 3).shape == fitted.unseen(protocol.train.rows(0, 3)).shape == (3, 120)
    assert fitted.sent > 0
    assert (fitted.kept == 0) == (method == "fedavg")


def test_a_fifth_of_the_uses_is_hidden_and_hits_are_shares_of_uses():
    columns = {"item": np.array([0, 1, 2]), "rating": np.array([6.0, 4.0, 1.0])}
    uses = expressions.hide_uses(fr.Clients.from_columns(columns, client=np.array([0, 0, 1])), 8)
    assert uses.counts.shape == (1, 8), "a single use cannot be known and hidden"
    assert (uses.counts.sum(), uses.hidden.sum()) == (8, 2)
    assert (uses.counts + uses.hidden)[0].tolist() == [6, 4, 0, 0, 0, 0, 0, 0]
    scores, hidden = np.arange(8.0)[None], np.array([[1, 0, 0, 2, 0, 0, 0, 1]])
    assert expressions.hit_rate(scores, hidden) == 0.75, "3 of 4 uses are of the items from 3 to 7"


def test_people_with_more_examples_are_drawn_more_often():
    sizes = [4, 5, 45]
    clients = fr.Clients.from_columns({"item": np.arange(54)}, client=np.repeat(np.arange(3), sizes))
    assert expressions.oversample(clients).sizes.tolist() == [5, 45, 45, 45]
