"""A deployed training: the same numbers as the simulation, whoever holds the data and whatever fails on the way."""

import json

import jax
import numpy as np
import pytest

from deployed import config_of, deployed, files_of, grid_of, plan_of, simulated
from fedrecon._src.deploy.settings_plan import make_plan
from fedrecon._src.recommend.config import (
    Aggregate,
    Factorization,
    NextWord,
    Reconstruct,
    Server,
    TextConfig,
    TextData,
    Update,
)
from fedrecon._src.recommend.recipe import make_evaluator
from fedrecon.data import Vocabulary
from fedrecon.deploy import Plan

CASES = {
    "by rows": config_of(),
    "dense": config_of(update=Update(optimizer="adam", learning_rate=0.05, batch_size=4)),
    "least squares": config_of(reconstruct=Reconstruct(solver="least-squares", ridge=0.5)),
    "biases and clipping": config_of(model=Factorization(dim=2, biases=True), aggregate=Aggregate(clip_norm=0.3)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("files"))


def assert_close(found, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "least squares" else pytest.mark.slow) for case in CASES]
)
def test_nodes_give_what_the_simulation_of_the_union_gives(case, files, tmp_path):
    union, parts = files
    plan = plan_of(CASES[case])
    outcome = deployed(plan, grid_of(parts), tmp_path)
    run, users = simulated(plan, union)
    assert_close(outcome.params, run.params)
    losses = [[e["loss"] for e in history if e["kind"] == "round"] for history in (outcome.history, run.history)]
    np.testing.assert_allclose(*losses, 1e-5)
    test = make_evaluator(plan.config, plan.algorithm, users, part="test")(run.params)
    assert (outcome.test.clients, outcome.test.examples) == (test.clients, test.examples)
    for name in test.micro:
        np.testing.assert_allclose(outcome.test.micro[name], test.micro[name], 1e-5)
        np.testing.assert_allclose(outcome.test.macro[name], test.macro[name], 1e-5)
        for q, value in test.quantiles[name].items():
            np.testing.assert_allclose(outcome.test.quantiles[name][q], value, 0.025, 1e-4)


@pytest.mark.slow
def test_secure_sums_give_the_same_to_their_stated_error(files, tmp_path):
    union, parts = files
    plan = plan_of(secure=True, least_nodes=3)
    outcome = deployed(plan, grid_of(parts), tmp_path)
    run, _ = simulated(plan, union)
    assert_close(outcome.params, run.params, 2e-6)
    assert outcome.test.clients > 0


TALK = ("the cat sat on the mat", "a dog ran", "the dog and the cat ran home", "on the mat a zebra sat", "go home now")


def write_talk(path, people):
    """Write sentences of some people, each with a word of their own that no vocabulary has."""
    lines = [
        {"client": f"p{i}", "text": f"{TALK[(i + k) % len(TALK)]} word{i}", "time": k}
        for i in people
        for k in range(3 + i % 3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("local", "solver"), [("output_bias", "closed-form"), ("oov_embedding", "gradient-descent")])
def test_text_gives_what_the_simulation_of_the_union_gives(local, solver, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    config = TextConfig(
        data=TextData(source="", fractions=(0.8, 0.1, 0.1), max_sentences=6),
        model=NextWord(vocabulary=12, oov_buckets=4, embedding=4, hidden=5, projection=4, max_words=8, local=local),
        reconstruct=Reconstruct(solver=solver, learning_rate=0.5, steps=2, epochs=1, batch_size=4),
        update=Update(learning_rate=0.5, steps=2, batch_size=4),
        server=Server(learning_rate=1.0),
        rounds=2,
        evaluate_every=0,
        seed=5,
    )
    words = ("the", "a", "cat", "dog", "on", "mat", "sat", "ran", "and", "home")
    plan = Plan.from_bytes(make_plan(config, Vocabulary(words, 4)).content)
    parts = [write_talk(tmp_path / f"node{k}.jsonl", range(k, 12, 2)) for k in range(2)]
    outcome = deployed(plan, grid_of(parts), tmp_path / "run")
    run, users = simulated(plan, write_talk(tmp_path / "union.jsonl", range(12)))
    assert len(users.train) >= 6
    assert_close(outcome.params, run.params)
