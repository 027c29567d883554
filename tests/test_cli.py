"""The commands, end to end on small files: results, files, and one sentence for every error."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import fedrecon as fr
from fedrecon._src.app.cli import COMMANDS, main, train, tune
from fedrecon._src.recommend.config import Factorization, RatingsConfig, Scale
from fedrecon._src.recommend.saved_models import FORMAT
from fedrecon._src.recommend.tasks import RATINGS
from fedrecon._src.storage.manifest import write_manifest

SMALL = [
    "--preset",
    "paper",
    "--model.dim",
    "3",
    "--sampling.clients-per-round",
    "6",
    "--evaluate-every",
    "4",
    "--jax-devices",
    "1",
]
SMALL += ["--data.fractions", "0.6", "0.2", "0.2", "--checkpoint-every", "3"]


def write_ratings(path, users=20, items=12, seed=0):
    """Write a file of ratings in which every user rates eight items."""
    rng = np.random.default_rng(seed)
    lines = ["user,item,rating"]
    for user in range(users):
        chosen = rng.choice(items, 8, replace=False)
        lines += [f"u{user},{100 + item},{rng.integers(1, 6)}" for item in chosen]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a ratings file and the folder of a run on it."""
    folder = tmp_path_factory.mktemp("cli")
    ratings = write_ratings(folder / "ratings.csv")
    assert main(["train", str(ratings), "--out", str(folder / "run"), "--rounds", "8", *SMALL]) == 0
    return ratings, folder / "run"


def said(capsys):
    """Return what a failed command said, which must be one sentence on standard error alone."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fedrecon: ")
    assert err.count("\n") == 1
    return err


# ---- help ----


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: fedrecon {command}" in out
    undocumented = re.findall(r"│ +(--\S+)[^│]*│\n│ +\(default", out)
    assert not undocumented


def test_the_top_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and what in out for name, what in COMMANDS.items())
    assert main([]) == 2
    assert main(["--version"]) == 0


def test_help_starts_no_device():
    check = "import fedrecon._src.app.cli, jax; fedrecon._src.app.cli.main(['train', '--help']);"
    check += "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL)


# ---- train ----


def test_a_run_leaves_what_the_design_says(trained):
    ratings, run = trained
    facts = json.loads((run / "run.json").read_text())
    assert facts["config"]["model"]["dim"] == 3
    assert facts["seed"] == 0
    assert set(facts["versions"]) == {"python", "jax", "numpy", "optax", "fedrecon"}
    assert facts["data"]["source"] == str(ratings)
    assert facts["data"]["users"] == [9, 4, 7]
    assert facts["started"] <= facts["ended"]
    assert facts["rounds"] == 8
    assert facts["interrupted"] is False
    assert facts["test"]["clients"] == 7
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["round"] for r in records if r["kind"] == "round"] == list(range(1, 9))
    assert [r["round"] for r in records if r["kind"] == "evaluation"] == [4, 8]
    assert [p.name for p in (run / "checkpoint").iterdir()] == ["round-000000008"]
    assert (run / "plots" / "learning_curve.png").exists()


def test_a_model_folder_tells_nothing_of_who_trained_it(trained):
    _, run = trained
    assert {p.name for p in (run / "model").iterdir()} == {"global.safetensors", "model.json"}
    assert set(load_file(run / "model" / "global.safetensors")) == {"item_embedding"}
    text = (run / "model" / "model.json").read_text()
    assert not re.search(r"u\d|ratings\.csv", text)
    assert json.loads(text)["item_ids"] == list(range(100, 112))


def test_a_resumed_run_ends_with_the_same_bits(trained, tmp_path, capsys):
    ratings, run = trained
    again = [str(ratings), "--out", str(tmp_path), *SMALL]
    assert main(["train", *again, "--rounds", "4"]) == 0
    assert main(["train", *again, "--rounds", "8", "--resume", str(tmp_path)]) == 0
    whole, parts = (load_file(p / "model" / "global.safetensors") for p in (run, tmp_path))
    assert whole["item_embedding"].tobytes() == parts["item_embedding"].tobytes()
    assert (tmp_path / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
    facts = json.loads((tmp_path / "run.json").read_text())
    assert len(facts["resumed"]) == 1
    capsys.readouterr()


def test_a_run_goes_on_only_with_the_same_options_of_xla(trained, tmp_path, monkeypatch, capsys):
    ratings, run = trained
    copy = shutil.copytree(run, tmp_path / "copy")
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_extra_options=somebody_elses=1")
    assert main(["train", str(ratings), "--resume", str(copy), *SMALL, "--rounds", "9"]) != 0
    assert "XLA" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_with_biases_and_a_default_resumes_too(trained, tmp_path):
    ratings, _ = trained
    options = [str(ratings), *SMALL, "--model.biases", "--model.learned-default", "--server.optimizer", "fedyogi"]
    options += ["--reconstruct.solver", "least-squares"]
    assert main(["train", *options, "--out", str(tmp_path / "whole"), "--rounds", "5"]) == 0
    assert main(["train", *options, "--out", str(tmp_path / "parts"), "--rounds", "2"]) == 0
    assert main(["train", *options, "--resume", str(tmp_path / "parts"), "--rounds", "5"]) == 0
    whole, parts = (load_file(tmp_path / p / "model" / "global.safetensors") for p in ("whole", "parts"))
    assert {name: leaf.tobytes() for name, leaf in whole.items()} == {n: leaf.tobytes() for n, leaf in parts.items()}
    assert main(["evaluate", str(tmp_path / "parts")]) == 0


def test_a_model_of_a_version_to_come_is_refused(trained, tmp_path, capsys):
    model = shutil.copytree(trained[1] / "model", tmp_path / "model")
    values = json.loads((model / "model.json").read_text())
    write_manifest(model / "model.json", FORMAT, {**values, "version": 3})
    assert main(["evaluate", str(model), "--ratings", str(trained[0])]) == 1
    assert "'fedrecon-model' 3" in said(capsys)


def test_resuming_nothing_begins(trained, tmp_path):
    ratings, _ = trained
    assert main(["train", str(ratings), "--resume", str(tmp_path / "new"), "--rounds", "1", *SMALL]) == 0


def test_a_config_file_gives_defaults_that_options_override(trained, tmp_path):
    _, run = trained
    out = tmp_path / "run"
    assert main(["train", "--config", str(run / "run.json"), "--out", str(out), "--rounds", "2", "--seed", "5"]) == 0
    old, new = (json.loads((p / "run.json").read_text())["config"] for p in (run, out))
    assert new == {**old, "rounds": 2, "seed": 5}


def test_a_config_file_may_leave_the_data_to_the_command_line(trained, tmp_path):
    ratings, _ = trained
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"rounds": 1, "data": {"min_ratings": 2}}))
    assert main(["train", str(ratings), f"--config={file}", "--out", str(tmp_path / "run"), *SMALL]) == 0
    found = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (found["rounds"], found["data"]["min_ratings"], found["data"]["source"]) == (1, 2, str(ratings))
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "other")]) == 2


def test_an_existing_run_is_neither_replaced_nor_mixed_with_another(trained, tmp_path, capsys):
    ratings, run = trained
    command = ["train", str(ratings), "--out", str(run), "--rounds", "8", *SMALL]
    before = (run / "run.json").read_bytes()
    capsys.readouterr()
    assert main(command) == 1
    assert "--resume" in (told := said(capsys))
    assert "--overwrite" in told
    assert main([*command, "--resume", str(run), "--seed", "3"]) == 2
    assert f"--seed: must stay 0 to continue the run in {run} (got 3)" in said(capsys)
    assert main([*command, "--resume", str(run), "--rounds", "5"]) == 1
    assert "is past round 5: it has done 8" in said(capsys)
    assert main(["train", "--resume", str(run), "--task", "clicks"]) == 2
    assert "--task: must be ratings, as in" in said(capsys)
    config = tmp_path / "config.json"
    config.write_text('{"seed": 4}')
    assert main([*command, "--resume", str(run), "--config", str(config)]) == 2
    assert "--seed: must stay 0" in said(capsys)
    assert main([*command, "--resume", str(run), "--config", "none.json"]) == 2
    assert "none.json is missing" in said(capsys)
    assert main([*command, "--resume", str(run), "--overwrite"]) == 2
    assert "`overwrite`" in said(capsys)
    assert (run / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            ["train", "x", "--out", "y", "--preset", "fast"],
            "--preset: must be one of default, quick, paper for",
        ),
        (["train", "x", "--out", "y", "--task", "films"], "--task: must be one of ratings, clicks, text"),
        (["tune", "x", "--out", "y", "--budget", "soon"], "--budget: must be a duration such as 90s"),
        (["recommend", "x", "--ratings", "y", "-n", "0"], "-n (--top): Input should be greater than or equal to 1"),
        (["recommend", "x", "--ratings", "y", "--least-ratings", "-1"], "--least-ratings: Input should be"),
        (
            ["privacy", "plan", "--clients", "9", "--per-round", "10", "--rounds", "1", "--epsilon", "1"],
            "--per-round: ",
        ),
        (["plan", "--items", "x", "--out", "y", "--share", "2"], "--share: Input should be"),
    ],
)
def test_a_wrong_value_is_an_error_of_use_that_names_the_option(command, sentence, capsys):
    assert main(command) == 2
    assert sentence in said(capsys)


@pytest.mark.slow
def test_a_run_is_not_resumed_on_other_data(tmp_path, capsys):
    ratings = write_ratings(tmp_path / "ratings.csv")
    command = ["train", str(ratings), "--out", str(tmp_path / "run"), "--rounds", "1", *SMALL]
    assert main(command) == 0
    write_ratings(ratings, seed=1)
    capsys.readouterr()
    assert main([*command, "--resume", str(tmp_path / "run")]) == 1
    message = said(capsys)
    assert "is no longer what the run" in message
    assert "--overwrite" in message
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    message = said(capsys)
    assert "is no longer what the run" in message
    assert "so its test users are not known" in message
    assert "--ratings FILE" in message
    assert main([*command, "--overwrite"]) == 0


def test_ctrl_c_saves_what_was_learned_and_says_how_to_go_on(trained, tmp_path, monkeypatch, capsys):
    ratings, run = trained
    from fedrecon._src.app.cli import show

    def stop(record, *_):
        if record["round"] == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(show, "progress_of", stop)
    command = ["train", str(ratings), "--out", str(tmp_path), "--rounds", "8", *SMALL]
    capsys.readouterr()
    assert main(command) == 130
    told = capsys.readouterr().err
    assert f"to continue: fedrecon train --resume {tmp_path}" in told
    assert json.loads((tmp_path / "run.json").read_text())["interrupted"] is True
    assert (tmp_path / "model" / "model.json").exists()
    monkeypatch.undo()
    assert main(["train", "--resume", str(tmp_path)]) == 0
    whole, parts = (load_file(p / "model" / "global.safetensors") for p in (run, tmp_path))
    assert whole["item_embedding"].tobytes() == parts["item_embedding"].tobytes()


@pytest.mark.slow
def test_few_users_train_without_validation_or_test(tmp_path, capsys):
    ratings = write_ratings(tmp_path / "ratings.csv", users=1)
    command = ["train", str(ratings), "--out", str(tmp_path / "run"), "--rounds", "1", *SMALL]
    assert main([*command, "--data.fractions", "1", "0", "0"]) == 0
    out, err = capsys.readouterr()
    assert "no evaluation: there are no test users. Train with --data.fractions .6 .2 .2" in err
    assert "fedrecon evaluate" not in out
    assert "next:  fedrecon recommend" in out
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    told = said(capsys)
    assert "has no test users. Train with --data.fractions .6 .2 .2" in told
    assert "give their data with --ratings FILE" in told


def test_the_fractions_that_are_advised_can_be_typed(tmp_path):
    ratings = write_ratings(tmp_path / "ratings.csv")
    command = ["train", str(ratings), "--out", str(tmp_path / "run"), "--rounds", "0", *SMALL]
    assert main([*command, "--data.fractions", ".6", ".2", ".2"]) == 0


@pytest.mark.slow
def test_results_on_one_test_user_are_flagged_as_unreliable(tmp_path, capsys):
    ratings = write_ratings(tmp_path / "ratings.csv", users=20)
    command = ["train", str(ratings), "--out", str(tmp_path / "run"), "--rounds", "1", "--jax-devices", "1"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "too few for reliable results. Train with --data.fractions .6 .2 .2" in err
    assert "too few for reliable results. Train with --data.fractions .6 .2 .2" in out
    assert "of users are below" not in out
    assert "loses" not in out
    assert "--preset default" not in out
    assert re.search(r"; (\d+) in each of", err)[1] == re.search(r"users: (\d+) train", err)[1]
    assert "Predictions stay between 1 and 5." in err


def test_no_table_is_printed_for_a_user_without_recommendations(trained, capsys):
    ratings, run = trained
    capsys.readouterr()
    assert main(["recommend", str(run), "--ratings", str(ratings), "--user", "u1", "--least-ratings", "99"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "users without recommendations: 1 of 1; no other item was rated by 99 training users" in err


# ---- evaluate ----


def test_evaluation_is_one_json_object(trained, capsys):
    _, run = trained
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["protocol"] == "recon"
    assert found["clients"] == 7
    assert found["diverged"] == 0
    assert set(found["micro"]) >= {"rmse", "accuracy"}
    assert set(found["macro"]) >= {"rmse", "accuracy"}
    assert "0.5" in found["quantiles"]["rmse"]
    assert found == json.loads((run / "run.json").read_text())["test"]


def test_validation_users_are_others_than_test_users(trained, capsys):
    _, run = trained
    capsys.readouterr()
    assert main(["evaluate", str(run), "--split", "valid", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found["micro"]["rmse"] == pytest.approx(records[-1]["micro"]["rmse"], rel=1e-5)
    assert found != json.loads((run / "run.json").read_text())["test"]


def test_evaluation_on_a_file_needs_no_more_than_the_model(trained, tmp_path, capsys):
    _, run = trained
    other = write_ratings(tmp_path / "other.csv", users=5, items=14, seed=3)
    capsys.readouterr()
    assert main(["evaluate", str(run / "model"), "--ratings", str(other)]) == 0
    told = capsys.readouterr()
    assert "users: 5 measured" in told.out
    assert "unknown items" in told.err


def test_json_has_null_where_there_is_no_number(trained, tmp_path, capsys):
    _, run = trained
    lonely = tmp_path / "lonely.csv"
    lonely.write_text("user,item,rating\na,100,3\nb,101,4\n")  # nothing is left for query
    capsys.readouterr()
    assert main(["evaluate", str(run), "--ratings", str(lonely), "--json"]) == 3
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["clients"] == 0
    assert found["micro"]["rmse"] is None


# ---- recommend ----


def test_recommendations_leave_out_what_is_rated(trained, tmp_path, capsys):
    ratings, run = trained
    capsys.readouterr()
    wanted = ["--user", "u3", "u1", "-n", "20", "--least-ratings", "0", "--json"]
    assert main(["recommend", str(run), "--ratings", str(ratings), *wanted]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["user"] for one in found["users"]] == ["u3", "u1"]
    rows = [line.split(",") for line in ratings.read_text().splitlines()[1:]]
    for one in found["users"]:
        rated = {int(item) for user, item, _ in rows if user == one["user"]}
        items = [best["item"] for best in one["recommendations"]]
        assert set(items) == set(range(100, 112)) - rated
        scores = [best["rating"] for best in one["recommendations"]]
        assert scores == sorted(scores, reverse=True)


def test_recommendations_are_for_everybody_in_the_file(trained, capsys):
    ratings, run = trained
    capsys.readouterr()
    assert main(["recommend", str(run / "model"), "--ratings", str(ratings), "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("for user u") == 20


@pytest.mark.parametrize("bad", ["3000", "-20", "5.5"])
def test_a_rating_far_outside_of_the_scale_is_a_bad_row(bad, trained, tmp_path, capsys):
    mine = tmp_path / "mine.csv"
    mine.write_text(f"user,item,rating\nme,100,5\nme,101,{bad}\nme,102,5.3\n")
    argv = ["recommend", str(trained[1]), "--ratings", str(mine), "--json"]
    assert main(argv) == 1
    told = f"mine.csv line 3: rating {bad} is outside of the scale that the model was trained on, 1 to 5. Fix it, or "
    message = said(capsys)
    assert told in message
    assert "--data.bad-rows" in message
    assert main([*argv, "--data.bad-rows", "skip"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["users"][0]["rated"] == 2
    assert found["left_out"]["bad_rows"] == 1


def test_a_rating_far_outside_of_the_scale_is_a_bad_row_of_a_parquet_file(trained, tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"user": ["me", "me"], "item": [100, 101], "rating": [5.0, 3000.0]})
    parquet.write_table(table, tmp_path / "mine.parquet")
    argv = ["recommend", str(trained[1]), "--ratings", str(tmp_path / "mine.parquet"), "--json"]
    assert main(argv) == 1
    assert "mine.parquet row 2: rating 3000 is outside of the scale" in said(capsys)
    assert main([*argv, "--data.bad-rows", "skip"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"]["bad_rows"] == 1


# ---- in Python ----


@pytest.fixture(scope="module")
def model(trained):
    return fr.recommend.load(trained[1])


def test_people_of_whom_no_item_is_known_are_refused(model):
    with pytest.raises(ValueError, match="99999999"):
        model.recommend({99999999: 5.0})
    with pytest.raises(ValueError, match=r"none of the items of person 1: 1, 2, 3, 4, 5 and 2 more. "):
        model.recommend([{100: 5.0}, dict.fromkeys(range(1, 8), 3.0)])
    assert len(model.recommend({}, 3)) == 3


def test_items_that_are_not_known_are_left_out_with_a_warning(model):
    match = "left out 1 of 3 items.*: 99999999"
    with pytest.warns(UserWarning, match=match) as told:
        found = model.recommend([{100: 5.0, 99999999: 1.0}, {101: 2.0}])
    assert found == model.recommend([{100: 5.0}, {101: 2.0}])
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("rating", [3000, -20, 5.5, 50000])
def test_python_refuses_ratings_far_outside_of_the_scale(rating, model):
    match = f"rating {rating} is outside of the scale that the model was trained on, 1 to 5; give ratings on that scale"
    clients = fr.Clients({"item": np.array([0]), "rating": np.array([rating], np.float32)}, [0], [1])
    for people in ({100: 4.0, 101: rating}, [{}, {100: rating}], clients):
        with pytest.raises(ValueError, match=match):
            model.predict(people)


def test_predictions_end_exactly_where_the_scale_does(model):
    found = model.predict([dict.fromkeys(range(100, 108), rating) for rating in (5.4, 0.6)])
    assert found.min() >= 1
    assert found.max() <= 5


def test_the_ends_of_the_scale_are_those_of_the_data_whatever_was_rounded(model):
    scale = Scale(low=1 - 4e-13, high=5.000000000000313)

    def ends_of(scale, items):
        return RATINGS.ends(RatingsConfig(model=Factorization(scale=scale)), items)

    assert ends_of(scale, model.items) == (1.0, 5.0)
    logarithms = Scale(low=0.6931471, high=1.7917595, transform="log1p")
    assert ends_of(logarithms, model.items) == (1.0, 5.0)
    nobody_knows = dataclasses.replace(model.items, scale=None)
    assert ends_of(scale, nobody_knows) == (1.0, 5.0)


@pytest.mark.parametrize("people", [[1, 2, 3], {100, 101}, np.array([100]), [[100]], "100", 100, None])
def test_a_model_of_ratings_asks_for_dicts(people, model):
    with pytest.raises(TypeError, match="`people`"):
        model.recommend(people)


def test_a_model_says_in_one_line_what_it_is(model):
    assert repr(model) == "Recommender(12 items, trained on ratings from 1 to 5)"


def test_column_names_are_options(trained, tmp_path, capsys):
    _, run = trained
    mine = tmp_path / "mine.csv"
    mine.write_text("who;what;stars\nme;100;5\nme;103;1\n")
    names = ["--data.user", "who", "--data.item", "what", "--data.rating", "stars"]
    capsys.readouterr()
    assert main(["recommend", str(run), "--ratings", str(mine), "-n", "2", *names]) == 0
    assert "for user me, ratings: 2" in capsys.readouterr().out


def write_odd(path, header, seed=0):
    """Write ratings with a header of their own, and a column in front that is called as a default but is not one."""
    lines = write_ratings(path, seed=seed).read_text().splitlines()[1:]
    path.write_text("\n".join([header, *(f"x,{line}" for line in lines)]) + "\n")
    return str(path)


def test_the_columns_of_a_run_are_those_of_other_files_like_it(tmp_path, capsys):
    odd = write_odd(tmp_path / "odd.csv", "user,Customer No,What,Mark")
    run, columns = str(tmp_path / "run"), ["--data.user", "Customer No", "--data.item", "What", "--data.rating", "Mark"]
    assert main(["train", odd, "--out", run, "--rounds", "1", *SMALL, *columns]) == 0
    assert main(["recommend", run, "--ratings", odd, "--user", "u3", "-n", "1"]) == 0
    assert "for user u3" in capsys.readouterr().out
    assert main(["evaluate", run, "--ratings", odd, "--json"]) == 0
    plain = str(write_ratings(tmp_path / "plain.csv"))
    assert main(["recommend", run, "--ratings", plain, "--user", "u3", "-n", "1"]) == 0
    assert main(["recommend", run, "--ratings", odd, "--data.user", "user", "--user", "x", "-n", "1"]) == 0
    assert "users without recommendations: 1 of 1" in capsys.readouterr().err  # somebody who has rated every item


def test_common_column_names_need_no_options(tmp_path, capsys):
    odd = write_odd(tmp_path / "odd.csv", "row,userId,movieId,Rating")
    run = str(tmp_path / "run")
    assert main(["train", odd, "--out", run, "--rounds", "1", *SMALL]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "Columns taken: 'userId' for user, 'movieId' for item, 'Rating' for rating." in said
    assert main(["recommend", run, "--ratings", odd, "--user", "u3", "-n", "1"]) == 0
    assert main(["evaluate", run, "--ratings", odd, "--json"]) == 0


def test_a_time_that_cannot_be_read_can_be_turned_off(tmp_path, capsys):
    file, out = tmp_path / "a.csv", ["--out", str(tmp_path / "run"), "--rounds", "1", *SMALL]
    write_ratings(file)
    head, *lines = file.read_text().splitlines()
    file.write_text("\n".join([f"{head},timestamp", *(f"{line},last week" for line in lines)]))
    assert main(["train", str(file), *out]) == 1
    assert "load with --data.time None or --data.bad-rows skip." in said(capsys)
    assert main(["train", str(file), *out, "--data.time", "None"]) == 0


def test_all_columns_that_are_missing_are_named_with_their_options(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("a,b,c\n1,2,3\n")
    assert main(["train", str(tmp_path / "a.csv"), "--out", str(tmp_path / "run")]) == 1
    message = said(capsys)
    assert "no column 'user', 'item', 'rating'; it has: a, b, c." in message
    assert "options: --data.user, --data.item, --data.rating" in message


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"user,item\n1,2\n", ["--task", "ratings"], "--data.rating"),
        (b"user,item\n1,2\n", ["--task", "ratings"], "give --task clicks"),
        (b"1,2\n3,4\n", ["--task", "ratings"], "its first line has 2 fields; if it holds clicks"),
        (b"user,item,when\n1,2,now\n", [], "give --task clicks"),
        (b'{"client": "a", "text": "The cat sat."}\n', [], "if these are posts to learn text from, give --task text"),
        (b'{"client": "a", "text": "The cat."}\n', ["--task", "clicks"], "give --task text"),
        (b"user,item,rating\n1,2,3\n", ["--task", "text"], "--data.bad-rows"),
        (b"user,item,rating\n1,2,3\n", ["--task", "text"], "for ratings give --task ratings"),
        (b"user,item,rating\n1,2,\n", [], "--data.bad-rows"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", [], "is not a text file"),
    ],
)
def test_an_unsuitable_file_gives_an_error_with_advice(content, options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.csv").write_bytes(content)
    assert main(["train", str(tmp_path / "a.csv"), "--out", str(tmp_path / "run"), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [train, tune], ids=["train", "tune"])
@pytest.mark.parametrize(
    ("content", "options", "task"),
    [
        ("visitor,page\nann,/a\n", [], "clicks"),
        ("7 8\n9 8\n", [], "clicks"),
        ("visitor,page\nann,/a\n", ["--task", "ratings"], "ratings"),
        ("visitor,page\nann,/a\n", ["--preset", "quick"], "clicks"),
        ("visitor,page\nann,/a\n", ["--preset", "paper"], "ratings"),  # there is no such preset for clicks
        ("user,item,rating\n1,2,3\n", [], "ratings"),
        ("", [], "ratings"),
    ],
)
def test_a_file_of_two_columns_is_read_as_clicks(command, content, options, task, tmp_path):
    (tmp_path / "visits.csv").write_text(content)
    args = command.parse([str(tmp_path / "visits.csv"), "--out", str(tmp_path / "run"), *options])
    assert args.settings.task == task


@pytest.mark.slow
def test_a_file_of_two_columns_is_trained_on_without_options(tmp_path, capsys):
    pairs = [f"{user},{(user + k) % 9}" for user in range(30) for k in range(4)]
    (tmp_path / "visits.csv").write_text("\n".join(["visitor,page", *pairs]))
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "visits.csv"), "--out", str(run), "--rounds", "1", "--model.dim", "2"]) == 0
    assert "--task clicks" in capsys.readouterr().err
    assert json.loads((run / "run.json").read_text())["config"]["task"] == "clicks"


@pytest.mark.slow
def test_splitting_by_time_names_the_option_to_change_and_that_works(tmp_path, capsys):
    file, out = write_ratings(tmp_path / "a.csv"), ["--out", str(tmp_path / "run"), "--rounds", "1", "--model.dim", "2"]
    head, *lines = file.read_text().splitlines()
    file.write_text("\n".join([f"{head},time", *(f"{line},2024-01-{1 + k % 28:02}" for k, line in enumerate(lines))]))
    assert main(["train", str(file), *out, "--split.by-time"]) == 2
    told = said(capsys)
    assert "--split.train" in told
    assert "split.by_time" in told
    assert main(["train", str(file), *out, "--split.by-time", "--split.train", "half"]) == 0


# ---- demo ----


@pytest.mark.slow
def test_the_demo_compares_and_recommends(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert "baseline: item + user bias" in out
    assert "without reconstruction" in out
    assert "10. " in out
    assert (tmp_path / "plots" / "learning_curve.png").exists()


# ---- errors ----


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["fly"], 2, "there is no command 'fly'; there are: train, tune, evaluate"),
        (["trian"], 2, "there is no command 'trian'; did you mean train?"),
        (["train"], 2, "--out: is missing"),
        (["train", "synthetic"], 2, "--out: is missing"),
        (["train", "synthetic", "--out", "run", "--ronds", "3"], 2, "--ronds"),
        (["train", "synthetic", "more", "--out", "run"], 2, "more"),
        (["train", "synthetic", "--out", "run", "--rounds", "x"], 2, "--rounds"),
        (["train", "synthetic", "--out", "run", "--rounds"], 2, "--rounds"),
        (["train", "synthetic", "--out", "run", "--server.optimizer", "lion"], 2, "--server.optimizer"),
        (["train", "synthetic", "--out", "run", "--model.dim", "0"], 2, "--model.dim"),
        (["train", "synthetic", "--out", "run", "--data.fractions", "1", "1", "1"], 2, "sum to 1"),
        (["train", "synthetic", "--out", "run", "--config", "none.json"], 2, "none.json"),
        (["train", "synthetic", "--out", "run", "--data.user", "who"], 1, "data.user cannot be used"),
        (["train", "nothing.csv", "--out", "run"], 1, "nothing.csv is neither a file nor the name of a data set"),
        (["train", "bad.csv", "--out", "run"], 1, "bad.csv line 3: rating 'x' must be a finite number"),
        (["train", "bad.csv", "--out", "run", "--data.user", "who"], 1, "--data.user"),
        (["train", "bad.csv", "--out", "bad.csv"], 1, "bad.csv is a file; give a new or empty folder"),
        (["train", "ok.csv", "--out", "run", "--jax-devices", "0"], 2, "--jax-devices: "),
        (["train", "ok.csv", "--out", "run", "--jax-devices", "60"], 1, "jax_devices"),
        (["train", "ok.csv", "--out", "run", "--jax-devices", "9999"], 1, "jax_devices"),
        (["train", "ok.csv", "--out", "run", "--rounds", "-1"], 2, "--rounds"),
        (["train", "ok.csv", "--out", "run", "--update.joint", "--update.second-order"], 1, "cannot be combined"),
        (["evaluate", "nowhere"], 1, "nowhere is not a folder"),
        (["evaluate", "."], 1, "holds no model"),
        (["recommend", "nowhere", "--ratings", "ok.csv"], 1, "nowhere is not a folder"),
        (["recommend", "nowhere"], 2, "--ratings: is missing"),
    ],
)
def test_an_error_is_one_sentence(argv, code, message, tmp_path, monkeypatch, capsys):
    jax.devices()  # JAX has started, with as many devices as tests have
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("user,item,rating\n1,2,3\n1,3,x\n")
    write_ratings(tmp_path / "ok.csv")
    assert main(argv) == code
    assert message in (said(capsys) if code == 1 else capsys.readouterr().err)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model/model.json", None, "holds no model|model.json is missing"),
        ("model/model.json", "{", "model.json is not valid JSON"),
        ("model/model.json", "{}", "model.json"),
        ("model/global.safetensors", None, "global.safetensors is missing"),
        ("model/global.safetensors", "junk", "global.safetensors is damaged: it has 4 bytes"),
        ("run.json", None, "run.json is missing"),
        ("run.json", '{"config": {"data": {"source": "x"}, "rounds": "many"}}', "run.json"),
        ("run.json", "[]", "run.json is of format 'not an object'"),
    ],
)
def test_a_damaged_run_is_one_sentence(file, content, message, trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained[1], run)
    (run / file).unlink()
    if content is not None:
        (run / file).write_text(content)
    assert main(["evaluate", str(run)]) == 1
    assert re.search(message, said(capsys))


def test_a_damaged_checkpoint_is_one_sentence(trained, tmp_path, capsys):
    ratings, done = trained
    run = tmp_path / "run"
    shutil.copytree(done, run)
    command = ["train", str(ratings), "--resume", str(run), "--rounds", "8", *SMALL]
    arrays = next(run.glob("checkpoint/*/arrays.safetensors"))
    arrays.write_bytes(arrays.read_bytes()[:-10])
    assert main(command) == 1
    assert "arrays.safetensors is damaged" in said(capsys)
    next(run.glob("checkpoint/*/manifest.json")).write_text("{}")
    assert main(command) == 1
    assert "manifest.json" in said(capsys)


def test_unknown_users_and_data_that_is_gone_are_named(trained, tmp_path, capsys):
    ratings, run = trained
    assert main(["recommend", str(run), "--ratings", str(ratings), "--user", "nobody"]) == 1
    assert "no client is named 'nobody'" in said(capsys)
    assert main(["recommend", str(run), "--ratings", str(ratings), "-n", "0"]) == 2
    assert "--top" in said(capsys)
    moved = write_ratings(tmp_path / "moved.csv")
    assert main(["train", str(moved), "--out", str(tmp_path / "run"), "--rounds", "1", *SMALL]) == 0
    moved.unlink()
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    assert "cannot be loaded again" in said(capsys)


def test_a_failed_start_leaves_no_folder(tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.csv"), "--out", str(tmp_path / "run")]) == 1
    assert "neither a file" in said(capsys)
    assert not (tmp_path / "run").exists()


def test_debug_shows_where_an_error_came_from(tmp_path, monkeypatch, capsys):
    assert main(["evaluate", str(tmp_path / "none"), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("FEDRECON_DEBUG", "1")
    assert main(["evaluate", str(tmp_path / "none")]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_as_a_process_on_every_core(tmp_path):
    ratings = write_ratings(tmp_path / "ratings.csv")
    command = [sys.executable, "-m", "fedrecon"]
    options = [option for option in SMALL if option not in ("--jax-devices", "1")]
    train = [*command, "train", str(ratings), "--out", str(tmp_path / "run"), "--rounds", "3", *options]
    done = subprocess.run(train, capture_output=True, text=True, check=True)
    assert "none seen in training" in done.stdout
    assert "round 3: validation RMSE" in done.stderr
    done = subprocess.run(
        [*command, "evaluate", str(tmp_path / "run"), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["clients"] == 7
    done = subprocess.run([*command, "evaluate", str(tmp_path / "gone")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_help_and_refused_options_do_not_wait_for_jax():
    code = """if True:
        import sys
        from fedrecon._src.app.cli import COMMANDS, main

        for command in ([], *([name] for name in COMMANDS)):
            codes = (main([*command, "--help"]), main([*command, "--no-such-option"]))
            assert main(["train", "x.csv", "--out", "y", "--model.dim", "0"]) == 2
            assert main(["train", "x.csv", "--out", "y", "--config", "none.json"]) == 2
            heavy = {"jax", "numpy", "matplotlib", "optax"} & set(sys.modules)
            assert codes == (0, 2) and not heavy, (command, codes, heavy)
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("option", ["--compilation-cache", "--no-compilation-cache"])
def test_compiled_programs_are_kept_for_the_next_command(tmp_path, option):
    code = """if True:
        import sys
        import jax
        from fedrecon._src.app.cli import main

        assert main(["evaluate", "nowhere", sys.argv[1]]) == 1
        print(jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size)
    """
    environment = {**os.environ, "FEDRECON_CACHE": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    command = [sys.executable, "-c", code, option]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()
    cached = option == "--compilation-cache"
    assert printed == ([str(tmp_path / "compiled"), str(2**29)] if cached else ["None", "-1"])


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("fedrecon_device", "device", "page nothing"),
        ("uvicorn", "deploy", "serve nothing --out run --insecure"),
        ("optuna", "tune", "tune synthetic --budget 1s --out tuned"),
    ],
)
def test_a_missing_package_is_no_bug_and_its_extra_is_named(package, extra, command, tmp_path):
    code = f"import sys; sys.modules[{package!r}] = None; from fedrecon._src.app.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *command.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert f"pip install 'fedrecon[{extra}]'" in done.stderr
