"""Tuning: what it tries, what it leaves, and that the settings it finds can be trained with."""

import json
import math

import numpy as np
import pytest

import fedrecon as fr
from fedrecon._src.app import tuning
from fedrecon._src.app.cli import main
from fedrecon._src.app.cli.train import parse
from fedrecon._src.app.tuning import SPACES, Trial, Tuned, seconds_of, what_mattered
from fedrecon._src.recommend.config import DEFAULT, Data, RatingsConfig, TextConfig, change_settings
from fedrecon._src.recommend.default_training import train_algorithm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Return a folder with a ratings file, and what two trials on it left in `tuned`."""
    folder = tmp_path_factory.mktemp("tuning")
    rng = np.random.default_rng(0)
    rows = [f"{u},{i},{rng.integers(1, 6)}" for u in range(30) for i in rng.choice(12, 8, replace=False)]
    (folder / "ratings.csv").write_text("\n".join(["user,item,rating", *rows]) + "\n")
    options = ["--trials", "2", "--budget", "2m", "--rounds", "4", "--jax-devices", "1", "--model.dim", "4"]
    options += ["--data.fractions", "0.6", "0.2", "0.2"]
    assert main(["tune", str(folder / "ratings.csv"), "--out", str(folder / "tuned"), *options]) == 0
    return folder


def test_tuning_leaves_settings_trials_a_report_and_a_picture(tuned):
    trials = json.loads((tuned / "tuned" / "trials.json").read_text())
    assert len(trials) == 2
    assert set(trials[0]["values"]) == set(SPACES["ratings"])
    assert trials[0]["finished"]
    report = (tuned / "tuned" / "report.md").read_text()
    assert "fedrecon train --config" in report
    assert "baseline: item + user bias" in report
    assert (tuned / "tuned" / "what_mattered.png").stat().st_size > 1000


def test_the_settings_found_are_a_config_file(tuned):
    settings = parse(["--config", str(tuned / "tuned" / "config.json"), "--out", "x"]).settings
    assert settings.data.source == str(tuned / "ratings.csv")
    trials = json.loads((tuned / "tuned" / "trials.json").read_text())
    best = min((one for one in trials if one["finished"]), key=lambda one: one["value"])
    if best is not trials[0]:  # the first has settings outside of what is tried: 4 rounds
        assert settings.model.prior == best["values"]["model.prior"]
    else:
        assert (settings.model.dim, settings.rounds) == (4, 4)


def test_the_first_trial_is_what_training_measures(tuned):
    first = json.loads((tuned / "tuned" / "trials.json").read_text())[0]
    options = ["--rounds", "4", "--jax-devices", "1", "--model.dim", "4", "--data.fractions", "0.6", "0.2", "0.2"]
    assert main(["train", str(tuned / "ratings.csv"), "--out", str(tuned / "run"), *options]) == 0
    last = json.loads((tuned / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["micro"]["rmse"] == pytest.approx(first["value"], rel=1e-5)
    assert (first["values"]["rounds"], first["values"]["model.dim"]) == (4, 4)


def test_a_trial_goes_on_as_training_does_and_has_the_error_of_what_that_keeps(tmp_path):
    rng = np.random.default_rng(0)
    taste = rng.normal(size=(80, 2)) @ rng.normal(size=(2, 12))
    rows = [f"{u},{i},{taste[u, i]:.3f}" for u in range(80) for i in rng.choice(12, 9, replace=False)]
    (tmp_path / "ratings.csv").write_text("\n".join(["user,item,rating", *rows]) + "\n")
    options = [str(tmp_path / "ratings.csv"), "--rounds", "8", "--jax-devices", "1", "--model.dim", "4"]
    options += ["--data.fractions", "0.6", "0.2", "0.2", "--server.learning-rate", "0.1", "--model.prior", "20"]
    assert main(["tune", *options, "--trials", "1", "--out", str(tmp_path / "tuned")]) == 0
    assert main(["train", *options, "--out", str(tmp_path / "run")]) == 0
    (first,) = json.loads((tmp_path / "tuned" / "trials.json").read_text())
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    judged = [one for one in records if one["kind"] == "evaluation" and one["round"] in (0, *range(8, 99, 2))]
    best = min(judged, key=lambda one: one["micro"]["loss"])
    assert best["round"] > 8  # otherwise relaxations had no part in it
    assert first["value"] == pytest.approx(best["micro"]["rmse"], rel=1e-5)


def test_tuning_whose_every_trial_fails_ends_with_its_code_and_leaves_no_settings(tuned, tmp_path, capsys):
    capsys.readouterr()
    options = ["--trials", "1", "--rounds", "4", "--jax-devices", "1", "--data.fractions", "0.6", "0.2", "0.2"]
    options += ["--server.learning-rate", "1e30"]
    assert main(["tune", str(tuned / "ratings.csv"), "--out", str(tmp_path / "tuned"), *options]) == 3
    assert "tuning failed: validation users diverged" in capsys.readouterr().err
    assert not (tmp_path / "tuned" / "config.json").exists()
    assert (tmp_path / "tuned" / "trials.json").exists()


def test_tuning_needs_rounds(tuned, tmp_path, capsys):
    assert main(["tune", str(tuned / "ratings.csv"), "--out", str(tmp_path / "tuned"), "--rounds", "0"]) == 2
    assert "--rounds: must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()


def test_an_interrupted_tuning_keeps_what_it_found(tuned, tmp_path, monkeypatch, capsys):
    first = tuning._Bench.measure

    def measure(self, values, trial, *rest):
        if trial.number:
            raise KeyboardInterrupt
        return first(self, values, trial, *rest)

    monkeypatch.setattr("fedrecon._src.app.tuning._Bench.measure", measure)
    options = ["--rounds", "4", "--jax-devices", "1", "--model.dim", "4", "--data.fractions", "0.6", "0.2", "0.2"]
    assert main(["tune", str(tuned / "ratings.csv"), "--out", str(tmp_path / "tuned"), *options]) == 130
    assert "interrupted after 1 trials" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "tuned" / "trials.json").read_text())) == 1
    assert (tmp_path / "tuned" / "config.json").exists()


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), ("20", 20)])
def test_budgets_have_units(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "m", "5 minutes", "-1s"])
def test_a_budget_that_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="such as 90s, 5m or 1h"):
        seconds_of(text)


def test_a_folder_that_is_not_ours_is_refused_before_anything_is_tried(tuned, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    assert main(["tune", str(tuned / "ratings.csv"), "--out", str(tmp_path), "--budget", "1h"]) == 1
    told = capsys.readouterr().err
    assert "fedrecon did not make it" in told
    assert "trial" not in told
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_settings_of_another_kind_are_not_tuned():
    with pytest.raises(ValueError, match="around --preset default"):
        fr.recommend.tune(RatingsConfig(data=Data(source="x.csv")))
    with pytest.raises(ValueError, match="`task`: must be one of ratings, clicks to be tuned"):
        fr.recommend.tune(TextConfig())


def test_what_goes_with_the_error_is_found():
    """The error follows the prior and nothing else; given-up trials and those that diverged say nothing."""
    rng = np.random.default_rng(0)

    def values(prior):
        drawn = {path: rng.choice(len(space)) + 1.0 for path, space in SPACES["ratings"].items()}
        return drawn | {"model.prior": prior}

    trials = [Trial(values(2.0**k), 1 + k, finished=True) for k in range(30)]
    trials += [Trial(values(9e9), 0.1, finished=False), Trial(values(9e9), math.inf, finished=True)]
    tuned = Tuned(RatingsConfig(data=Data(source="x")), tuple(trials), {})
    found = what_mattered(tuned)
    assert next(iter(found)) == "model.prior"
    assert found["model.prior"] == pytest.approx(1.0)
    assert max(value for path, value in found.items() if path != "model.prior") < 0.7
    assert tuned.best is trials[0]


def test_tuning_touches_no_folder_of_somebody_else_and_no_earlier_tuning(tuned, tmp_path, capsys):
    (tmp_path / "config.json").write_text("mine")
    for folder, message in [(tmp_path, "fedrecon did not make it"), (tuned / "tuned", "contains tuning results")]:
        before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        capsys.readouterr()
        assert main(["tune", str(tuned / "ratings.csv"), "--out", str(folder), "--trials", "1"]) == 1
        assert message in capsys.readouterr().err
        after = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        assert {name: after[name] for name in before if name != ".lock"} == {
            name: content for name, content in before.items() if name != ".lock"
        }


@pytest.mark.parametrize("private", [[], ["--privacy.epsilon", "9", "--privacy.clip-norm", "1"]])
def test_clicks_are_tuned_from_the_dimensions_that_training_finds(private, tmp_path, capsys):
    rows = [f"{u},{(u + k) % 12}" for u in range(40) for k in range(5)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    options = ["--trials", "1", "--rounds", "2", "--jax-devices", "1", "--out", str(tmp_path / "tuned")]
    assert main(["tune", str(tmp_path / "clicks.csv"), *options, *private]) == 0
    (trial,) = json.loads((tmp_path / "tuned" / "trials.json").read_text())
    assert trial["values"]["model.dim"] == 12  # as many as there are items
    said = capsys.readouterr().err
    assert "read with --task clicks" in said
    assert ("every trial has the noise of a private run" in said) == bool(private)


def test_private_trials_have_the_noise_of_the_settings(tuned, monkeypatch):
    runs = []

    def record(*arguments, **options):
        runs.append(train_algorithm(*arguments, **options))
        return runs[-1]

    monkeypatch.setattr(tuning, "train_algorithm", record)
    private = {"privacy.noise_multiplier": 3.0, "privacy.rating_range": (1.0, 5.0), "rounds": 2}
    private["data.source"] = str(tuned / "ratings.csv")
    found = fr.recommend.tune(change_settings(DEFAULT, private), trials=1)
    assert (runs[0].ledger.releases[-1].noise_multiplier, runs[0].ledger.releases[-1].rounds) == (3.0, 2)
    assert "item mean" not in found.baselines  # which would be an exact sum
