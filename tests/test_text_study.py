import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from studies import text, text_people
from studies.__main__ import main
from studies.report import compose, to_markdown
from studies.study import Job
from studies.text_jobs import TextData, comes_close, order_by_size, raises, retains_most, run_job

import fedrecon as fr
from fedrecon._src.data.sentences import PAIR_ROWS
from fedrecon._src.recommend.config import TEXT_DEFAULT, NextWord, Reconstruct, Update
from fedrecon._src.recommend.config import TextData as DataConfig

pytestmark = pytest.mark.slow

TINY = dataclasses.replace(
    text.PAPER,
    data=DataConfig(source="", max_sentences=16),
    model=NextWord(vocabulary=25, oov_buckets=7, embedding=4, hidden=5, projection=3),
    reconstruct=Reconstruct(learning_rate=0.5, steps=3, epochs=1, batch_size=8),
    update=Update(learning_rate=0.5, steps=2, batch_size=8),
    sampling=fr.Sampling(4),
    rounds=2,
    evaluate_every=1,
)
FINETUNE = Update(learning_rate=0.5, steps=2, batch_size=8)
SCALE = text.Scale(TINY, FINETUNE, text.TWO_CORES_GRIDS, (25,), ())


@pytest.fixture(scope="module")
def data():
    return TextData(fr.data.synthetic_text(num_clients=20, sentences=20))


@pytest.fixture(scope="module")
def results(data):
    """Results of the two ways to train, with everything that can be measured of each."""
    recon = Job("recon", "", TINY, measures=("recon", "recon-finetune"), finetune=FINETUNE)
    measures = ("plain", "oov-finetune", "full-finetune")
    yogi = Job("yogi", "", TINY, "fedyogi", measures=measures, finetune=FINETUNE)
    return {job.name: run_job(job, data, 0) for job in (recon, yogi)}


def test_the_first_measure_is_taken_at_every_evaluation_and_all_after_the_last_round(results):
    assert [list(entry) for entry in results["recon"]["evaluations"]] == [
        ["round", "recon"],
        ["round", "recon", "recon-finetune"],
    ]
    assert list(results["yogi"]["evaluations"][-1]) == ["round", "plain", "oov-finetune", "full-finetune"]


def test_personal_next_words_are_measured_beside_finetuning(data):
    model = dataclasses.replace(TINY.model, head=10)
    config = dataclasses.replace(TEXT_DEFAULT, data=TINY.data, model=model, sampling=TINY.sampling)
    config = dataclasses.replace(config, rounds=2, evaluate_every=2)
    people = run_job(Job("personal", "", config, method="personal", few=(2, 8)), data, 0)["people"]
    assert {len(people[known]["rows"]) for known in ("2", "8")} == {5, 8}
    assert people["2"]["rows"]["impersonal"] == people["8"]["rows"]["impersonal"]
    assert people["8"]["rows"][text_people.ONCE] != people["8"]["rows"]["impersonal"]
    assert people["8"]["known"] == 8


def test_finetuning_rows_of_tables_is_finetuning_of_whole_tables(data):
    sentences = data.examples("valid", 25, 7)
    model = fr.models.next_word(25, 7, embedding=4, hidden=5, projection=3, local="nothing", pair_rows=PAIR_ROWS)
    batch = {name: sentences.columns[name][:4] for name in text_people.INPUTS}
    params = model.init_global(jax.random.key(0))

    def loss(params):
        values, weights = model.loss(model.predict(params, {}, batch), batch)
        return (values * weights).sum() / weights.sum()

    gradient = jax.grad(loss)(params)
    scale = 0.5 * min(1.0, 1 / float(optax.tree.norm(gradient)))
    expected = jax.tree.map(lambda leaf, slope: leaf - scale * slope, params, gradient)
    stepped = text_people.Finetuner(model, 25).descend(params, batch, 0.5, epochs=1)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), stepped, expected)


def test_settings_are_chosen_by_going_to_better_neighbours():
    counts = {(1, 1): 5, (1, 2): 6, (2, 2): 7, (3, 2): 7}
    grid = ((1, 2, 3), (0, 1, 2))
    assert text_people.climb(grid, (0, 1), lambda *point: counts.get(point, 0)) == (2, 2), "a tie is no reason to go on"


def test_all_measures_are_on_the_same_examples_of_all_unseen_clients(results, data):
    measured = [
        one for result in results.values() for name, one in result["evaluations"][-1].items() if name != "round"
    ]
    assert len({(one["clients"], one["examples"]) for one in measured}) == 1
    assert measured[0]["clients"] == len(data.examples("test", 25, 7)) == 2
    losses = [one["micro"]["loss"] for one in measured]
    assert len(set(losses)) == 5, "two ways of personalising gave the same model"


def test_what_is_sent_is_counted_from_the_arrays(results):
    shared = 4 * 28 + 4 * 5 * (4 + 5 + 1) + 3 * (5 + 1) + (28 + 7) * (3 + 1)
    assert (results["recon"]["global"], results["recon"]["local"]) == (shared, 7 * 4)
    assert (results["yogi"]["global"], results["yogi"]["local"]) == (shared + 7 * 4, 0)
    for result in results.values():
        assert result["sent"] == 2 * result["global"]
        assert result["sent_bytes"] == 4 * result["sent"]


def test_a_job_that_counts_words_is_measured_like_a_training_and_sends_nothing(results, data, tmp_path):
    study = text.make_study(SCALE)
    job = next(job for job in study.jobs if job.name == "counting-25")
    result = run_job(job, data, 0)
    assert result["evaluations"][-1]["round"] == job.config.rounds
    assert result["sent"] == 0
    assert result.keys() == results["recon"].keys()
    accuracy = 100 * result["evaluations"][-1]["counted bigrams"]["micro"]["accuracy"]
    assert 0 < accuracy < 100
    rows = {"counting-25": [result | {"settings": job.settings}]}
    report = to_markdown(compose(study, rows, [], tmp_path), tmp_path)
    assert f"| Baseline: counted bigrams | {accuracy:.2f} |  | none |" in report
    assert "| FedRecon, 500 OOV |  |  |  |" in report, "what was not run has no figures"


def test_a_job_of_text_is_shortened_to_few_rounds():
    kind = text.STUDY.kind
    for job in text.STUDY.jobs:
        config = job.shorten(kind.quick_rounds, kind.quick_changes).config
        assert config.rounds % config.evaluate_every == 0
        assert config.rounds <= 4
        assert config.data.max_sentences == 32


def of(accuracy, sent=2_000_000):
    """A result whose accuracy, by measure, is this."""
    measures = accuracy if isinstance(accuracy, dict) else {"recon": accuracy}
    entry = {name: {"micro": {"accuracy": x / 100}} for name, x in measures.items()}
    return [
        {"seed": 0, "settings": {"config": {"rounds": 5}}, "evaluations": [{"round": 5, **entry}], "sent_bytes": sent}
    ]


def jobs(kind, *accuracies, **more):
    return {f"{kind}-{v}": of(x, **more) for v, x in zip((1, 2, 3), accuracies, strict=True)}


def names(kind):
    return {v: f"{kind}-{v}" for v in (1, 2, 3)}


@pytest.mark.parametrize(
    ("having", "rises", "ordered"),
    [((29.6, 28.1, 27.7), True, True), ((26, 29, 27.7), False, False), ((24.2, 28, 26.5), False, False)],
)
def test_claims_of_vocabularies_follow_from_the_numbers(having, rises, ordered):
    found = {**jobs("without", 24.1, 26.2, 26.4), **jobs("having", *having)}
    assert raises(found, names("without"), names("having"))[0] is rises
    assert order_by_size(found, names("without"), names("having"))[0] is ordered
    gain = having[0] - 24.1
    assert f"{gain:+.2f} points for V = 1" in raises(found, names("without"), names("having"))[1]


def test_claims_of_finetuning_and_steps_follow_from_the_numbers():
    mine, theirs = jobs("mine", 29.6, 28.1, 27.7), jobs("theirs", 30.0, 28.1, 27.9, sent=3_000_000)
    held, words = comes_close({**mine, **theirs}, (names("mine"), "recon"), (names("theirs"), "recon"))
    assert held
    assert "V = 1: 29.60 % with 2.00 MB, against 30.00 % with 3.00 MB" in words
    theirs = jobs("theirs", 30.0, 28.1, 30.0)
    assert not comes_close({**mine, **theirs}, (names("mine"), "recon"), (names("theirs"), "recon"))[0]
    assert retains_most({"none": of(28.0), "base": of(30.0)}, "none", "base") == (
        True,
        "28.00 % without steps, 30.00 % with all: 93.3% of it.",
    )
    assert not retains_most({"none": of(26.0), "base": of(30.0)}, "none", "base")[0]


@pytest.mark.parametrize("study", [text.STUDY, text.PAPER_STUDY])
def test_the_text_study_has_the_papers_rows_and_says_what_is_missing(study, tmp_path):
    report = to_markdown(compose(study, {}, [], tmp_path), tmp_path)
    for row in ("FedYogi (all global)", "FedRecon, 500 OOV, no split", "FedRecon + finetune (500)"):
        assert f"| {row} |" in report
    assert "30.8 |" in report
    for claim in study.claims:
        assert f"**{claim.text}**: not measured" in report
    assert all(job.config.rounds % job.config.evaluate_every == 0 for job in study.jobs)


def test_the_command_runs_one_job_of_a_text_study(results, tmp_path, monkeypatch, capsys):
    """The job is one that `results` has compiled already."""
    lines = [
        json.dumps({"client": f"c{k % 20:02}", "time": k, "text": f"the cat n{k % 29} sat on mat. so it was."})
        for k in range(400)
    ]
    path = tmp_path / "posts.jsonl"
    path.write_text("\n".join(lines))
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "STUDY", text.make_study(SCALE))
    out = tmp_path / "out"
    assert main(["text", "--data", str(path), "--out", str(out), "--only", "recon-25", "--workers", "1"]) == 0
    assert json.loads((out / "rows" / "recon-25-0.json").read_text())["evaluations"][-1]["round"] == 2
    assert "20 clients" in (out / "report.md").read_text()
