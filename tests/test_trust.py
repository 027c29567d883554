"""Nothing lost, nothing silently wrong: what commands do with folders that are not theirs, and with runs that fail."""

import dataclasses
import json
import resource
import shutil
import stat
import sys
import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedrecon._src.app.cli import main, show
from fedrecon._src.data.sources import cache_folder
from fedrecon._src.recommend.config import (
    DEFAULT,
    PRESETS,
    ConfigError,
    Data,
    RatingsConfig,
    TextConfig,
    config_from_json,
    read_config,
)
from fedrecon._src.recommend.stopping import remedy, warn_of_divergence, why_failed
from fedrecon._src.recommend.tasks import RATINGS
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.storage.arrays import save_arrays
from fedrecon._src.storage.atomic import StorageError, read_json, write_json
from fedrecon._src.storage.manifest import write_manifest
from fedrecon._src.storage.run_folder import RUN_FORMAT, RunFolder
from fedrecon.data import DataError, load_text
from test_cli import SMALL, said, write_ratings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a ratings file and the folder of a run on it."""
    folder = tmp_path_factory.mktemp("trust")
    ratings = write_ratings(folder / "ratings.csv")
    assert main(["train", str(ratings), "--out", str(folder / "run"), "--rounds", "3", *SMALL]) == 0
    return ratings, folder / "run"


@pytest.fixture
def run(trained, tmp_path, capsys):
    """Return a copy of the run."""
    capsys.readouterr()
    return shutil.copytree(trained[1], tmp_path / "run")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def facts_of(run):
    return json.loads((run / "run.json").read_text())


# ---- what people have ----


@pytest.mark.parametrize(
    "command", [["train", "none.csv", "--out"], ["train", "{ratings}", "--resume"], ["demo", "--rounds", "1", "--out"]]
)
@pytest.mark.parametrize("file", ["model/weights.pt", "checkpoint/last.pt", "metrics.jsonl", "thesis.tex"])
def test_a_folder_that_fedrecon_did_not_make_is_not_touched(trained, tmp_path, capsys, command, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("years of work")
    before = contents(tmp_path)
    words = [word.format(ratings=trained[0]) for word in command]
    capsys.readouterr()
    assert main([*words, str(tmp_path)]) == 1
    assert "fedrecon did not make it" in said(capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("none.csv", [], "neither a file"),
        ("{ratings}", ["--data.user", "nobody"], "nobody"),
        ("{ratings}", ["--update.joint", "--update.second-order"], "cannot be combined"),
        ("{ratings}", ["--jax-devices", "60"], "jax_devices"),
    ],
)
def test_overwriting_with_a_run_that_cannot_start_loses_nothing(trained, run, capsys, data, options, message):
    before = contents(run)
    command = ["train", data.format(ratings=trained[0]), "--out", str(run), *SMALL, *options, "--overwrite"]
    assert main(command) == 1
    assert message in said(capsys)
    assert contents(run) == before


def test_a_run_that_is_overwritten_is_gone_when_the_new_one_is_complete(trained, run):
    old = contents(run / "model")
    command = ["train", str(trained[0]), "--out", str(run), *SMALL, "--rounds", "2", "--seed", "4", "--overwrite"]
    assert main(command) == 0
    assert contents(run / "model") != old
    assert facts_of(run)["seed"] == 4
    assert {path.name for path in run.iterdir()} == {
        *(".fedrecon", "run.json", "metrics.jsonl", "checkpoint", "model", "plots"),
    }


@pytest.mark.slow
def test_the_old_run_is_there_until_an_interrupted_new_one_is_complete(trained, run, monkeypatch, capsys):
    from fedrecon._src.app.cli import show

    def stop(record, *_):
        if record["round"] == 1:
            raise KeyboardInterrupt

    command = ["train", str(trained[0]), "--out", str(run), *SMALL, "--rounds", "3", "--seed", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(show, "progress_of", stop)
        assert main([*command, "--overwrite"]) == 130
    assert f"in {run / '.replaced.1'} until this one is complete" in capsys.readouterr().err
    assert facts_of(run / ".replaced.1")["seed"] == 0
    assert main(["train", "--resume", str(run)]) == 0
    assert not (run / ".replaced.1").exists()


def test_a_run_in_a_folder_with_braces_in_its_name_is_resumed(run):
    assert main(["train", "--resume", str(run.rename(run.with_name("run {x}")))]) == 0


@pytest.mark.parametrize("option", ["--out", "--resume"])
def test_a_finished_run_without_its_checkpoint_is_kept(trained, run, capsys, option):
    shutil.rmtree(run / "checkpoint")
    before = contents(run)
    assert main(["train", str(trained[0]), option, str(run), "--rounds", "3", *SMALL]) == 1
    assert "--overwrite" in said(capsys)
    assert contents(run) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(trained, run, capsys):
    whole = contents(run / "model")
    shutil.rmtree(run / "checkpoint")
    shutil.rmtree(run / "model")
    write_manifest(run / "run.json", RUN_FORMAT, {**facts_of(run), "ended": None})
    command = ["train", str(trained[0]), "--out", str(run), "--rounds", "3", *SMALL]
    assert main(command) == 1
    assert "holds a run" in said(capsys)
    assert main([*command, "--resume", str(run)]) == 0
    assert contents(run / "model") == whole


def test_a_model_is_found_where_a_killed_replacement_had_put_it(trained, run):
    (run / "model").rename(run / ".model.old")
    assert main(["evaluate", str(run)]) == 0
    assert main(["evaluate", str(run / "model"), "--ratings", str(trained[0])]) == 0
    assert main(["train", str(trained[0]), "--resume", str(run), "--rounds", "3", *SMALL]) == 0
    assert (run / "model" / "model.json").exists()
    assert not (run / ".model.old").exists()


def test_the_demo_replaces_demos_alone(run, capsys):
    before = contents(run)
    assert main(["demo", "--out", str(run), "--rounds", "1"]) == 1
    assert "holds a run that is not a demo" in said(capsys)
    assert contents(run) == before


def test_a_run_a_study_and_a_tuning_do_not_share_a_folder(trained, run, tmp_path, capsys):
    before = contents(run)
    assert main(["tune", str(trained[0]), "--out", str(run)]) == 1
    assert "holds a run; give a new or empty folder" in capsys.readouterr().err
    assert contents(run) == before
    for kind, name in (("tuning", "trials.json"),):
        made = tmp_path / kind
        made.mkdir()
        (made / ".fedrecon").touch()
        (made / name).touch()
        assert main(["train", str(trained[0]), "--out", str(made), *SMALL]) == 1
        assert f"holds a {kind}; give a new or empty folder" in said(capsys)


def test_a_second_process_is_told_who_holds_the_folder(trained, run, capsys):
    before = contents(run)
    with RunFolder(run).lock():
        assert main(["train", str(trained[0]), "--out", str(run), *SMALL, "--overwrite"]) == 1
        assert "in use by process" in said(capsys)
        assert main(["evaluate", str(run)]) == 0  # readers may
    assert contents(run) == before


def test_a_resume_that_fails_leaves_the_run_as_it_was(trained, run, capsys):
    arrays = next(run.glob("checkpoint/*/arrays.safetensors"))
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"!")
    before = contents(run)
    assert main(["train", str(trained[0]), "--resume", str(run), "--rounds", "9", *SMALL]) == 1
    assert "arrays.safetensors is damaged" in said(capsys)
    assert contents(run) == before


@pytest.mark.slow
def test_damaged_metrics_are_named_and_do_not_keep_a_run_from_going_on(trained, run, capsys):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0][:-9], *lines[1:]]) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["train", str(trained[0]), "--resume", str(run), "--rounds", "4", *SMALL]) == 0
    assert f"fedrecon: warning: {run / 'metrics.jsonl'} is damaged" in capsys.readouterr().err


# ---- on another machine ----


@pytest.mark.slow
def test_a_run_goes_on_laid_out_as_it_began(trained, run, capsys):
    """This process has four devices; the settings of the run, which say one, are taken out of it."""
    facts = facts_of(run)
    facts["config"]["jax_devices"] = None
    write_manifest(run / "run.json", RUN_FORMAT, facts)
    options = [word for word in SMALL if word not in ("--jax-devices", "1")]
    command = ["train", str(trained[0]), "--resume", str(run), *options, "--rounds", "4"]
    assert main(command) == 0
    assert "continues with 1 devices, as it began, although this machine has" in capsys.readouterr().err
    assert facts_of(run)["layout"] == facts["layout"]
    for other in ({"jax_devices": 60}, {"platform": "tpu"}):
        write_manifest(run / "run.json", RUN_FORMAT, {**facts_of(run), "layout": {**facts["layout"], **other}})
        assert main(command) == 1
        assert "began on" in capsys.readouterr().err


# ---- training that fails ----


def play_counts(path, users=20, most=5000):
    rng = np.random.default_rng(0)
    rows = [f"u{u},{i},{rng.integers(1, most)}" for u in range(users) for i in rng.choice(12, 8, replace=False)]
    path.write_text("\n".join(["user,item,rating", *rows]) + "\n")
    return path


@pytest.mark.slow
def test_a_training_that_fails_says_so_from_its_first_round_to_its_exit_code(tmp_path, capsys):
    counts, run = play_counts(tmp_path / "plays.csv"), tmp_path / "run"
    assert main(["train", str(counts), "--out", str(run), "--rounds", "8", *SMALL]) == 3
    out, err = capsys.readouterr()
    assert "warning: round 2: 6 of 6 updates are not finite and were left out" in err
    assert "--update.learning-rate (now 0.5)" in err
    assert "training failed: " in err
    assert "next:" not in out
    assert "RMSE" not in out
    facts = facts_of(run)
    assert "updates were not finite" in facts["failed"]
    assert main(["recommend", str(run), "--ratings", str(counts)]) == 1
    assert "cannot be used because its training failed" in said(capsys)
    assert main(["recommend", str(run / "model"), "--ratings", str(counts)]) == 1
    assert "cannot be used because its training failed" in said(capsys)
    assert main(["evaluate", str(run)]) == 3
    assert "the training of" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampling.min-examples", "99"], "all 6 invited users have fewer than --sampling.min-examples 99"),
        (["--sampling.drop-out", "0.9999"], "nobody answered: 6 of 6 invited dropped out (--sampling.drop-out 0.9999)"),
        (["--aggregate.zero-norm", "1e-9"], "all updates are longer than --aggregate.zero-norm 1e-09"),
    ],
)
def test_rounds_that_learn_nothing_say_why(trained, tmp_path, capsys, options, message):
    assert main(["train", str(trained[0]), "--out", str(tmp_path / "run"), "--rounds", "2", *SMALL, *options]) == 3
    err = capsys.readouterr().err
    assert f"warning: round 1: nothing was learned: {message}" in err
    assert "training failed: nothing was learned in 2 of 2 rounds" in err


@pytest.mark.slow
def test_empty_rounds_fail_with_adaptive_clipping_too(trained, tmp_path, capsys):
    options = ["--sampling.min-examples", "99", "--aggregate.clip-quantile", "0.5"]
    assert main(["train", str(trained[0]), "--out", str(tmp_path / "run"), "--rounds", "2", *SMALL, *options]) == 3
    assert "training failed: nothing was learned in 2 of 2 rounds" in capsys.readouterr().err


@pytest.mark.slow
def test_a_single_round_learns_also_where_the_clipping_norm_follows_the_clients(trained, tmp_path):
    options = ["--aggregate.clip-quantile", "0.5", "--evaluate-every", "1"]
    for rounds in ("0", "1"):
        out = ["--out", str(tmp_path / rounds), "--rounds", rounds]
        assert main(["train", str(trained[0]), *out, *SMALL, *options]) == 0
    before, after = (load_file(tmp_path / rounds / "model" / "global.safetensors") for rounds in ("0", "1"))
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.slow
def test_clients_with_a_single_example_are_counted(tmp_path, capsys):
    lonely, command = tmp_path / "lonely.csv", ["--rounds", "2", *SMALL, "--data.fractions", "1", "0", "0"]
    rows = [f"u{k},{k % 3},4" for k in range(20)]
    lonely.write_text("\n".join(["user,item,rating", *rows, "u0,1,3"]) + "\n")
    assert main(["train", str(lonely), "--out", str(tmp_path / "run"), *command]) == 3
    err = capsys.readouterr().err
    assert "training users with a single example: 19 of 20; nothing is learned from them" in err
    assert "the users who answered have too few ratings for both support and query" in err


def test_a_file_without_support_and_query_is_refused_before_anything_is_written(tmp_path, capsys):
    lonely = tmp_path / "lonely.csv"
    lonely.write_text("\n".join(["user,item,rating", *(f"u{k},{k % 3},4" for k in range(20))]) + "\n")
    assert main(["train", str(lonely), "--out", str(tmp_path / "run"), "--rounds", "2", *SMALL]) == 1
    err = said(capsys)
    assert "training users have 2 ratings or more" in err
    assert not (tmp_path / "run" / "run.json").exists()


def test_ratings_of_a_few_users_that_diverge_are_counted_beside_the_others(capsys):
    found = an_evaluation(clients=41, diverged=4)
    show.evaluation("title", found, RATINGS)
    told = "users: 37 measured, 4 diverged and excluded, 3 with too few ratings; query ratings: 99"
    assert told in capsys.readouterr().out
    show.evaluation("title", an_evaluation(clients=40, diverged=5), RATINGS)
    out, err = capsys.readouterr()
    assert "RMSE" not in out
    assert "5 of 40 users diverged: figures of the other 35 would be misleading" in err


def test_a_table_of_few_users_has_no_quantiles_and_says_that_it_says_little(capsys):
    show.evaluation("title", an_evaluation(clients=10, diverged=0), RATINGS, advice="Do this.")
    out = capsys.readouterr().out
    assert "50% of users are below" in out
    assert "reliable" not in out
    show.evaluation("title", an_evaluation(clients=9, diverged=0), RATINGS, advice="Do this.")
    out = capsys.readouterr().out
    assert "of users are below" not in out
    assert "Fewer than 10 users (9) are too few for reliable results. Do this." in out


def test_one_user_is_told_of_in_the_singular(capsys):
    found = dataclasses.replace(an_evaluation(clients=1, diverged=0), examples=1, per_client={"loss": np.zeros(2)})
    show.evaluation("title", found, RATINGS)
    told = "users: 1 measured, 0 diverged and excluded, 1 with too few ratings; query ratings: 1"
    assert told in capsys.readouterr().out
    show.evaluation("title", an_evaluation(clients=41, diverged=1), RATINGS)
    assert "users: 40 measured, 1 diverged and excluded" in capsys.readouterr().out


def an_evaluation(clients, diverged):
    numbers = {"loss": 1.0, "rmse": 1.0, "accuracy": 0.5}
    quantiles = {name: {"0.5": value} for name, value in numbers.items()}
    return Evaluation("recon", clients, diverged, 99, numbers, numbers, quantiles, {"loss": np.zeros(clients + 3)})


def a_round(number, **counts):
    fine = {"clients": 10, "non_finite": 0, "zeroed": 0, "invited": 10, "too_small": 0, "dropped": 0, "skipped": False}
    return {"kind": "round", "round": number, **fine, **counts}


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], None),
        ([a_round(1, clients=9, non_finite=1)], None),
        ([a_round(1, clients=8, non_finite=2)], "2 of 10 updates were not finite"),
        ([a_round(1, skipped=True), *(a_round(k) for k in range(2, 11))], None),
        ([a_round(1, skipped=True), *(a_round(k) for k in range(2, 10))], "nothing was learned in 1 of 9 rounds"),
        ([{"kind": "evaluation", "round": 1, "clients": 10, "diverged": 1}], None),
        ([{"kind": "evaluation", "round": 1, "clients": 9, "diverged": 1}], "1 of 9 validation users diverged"),
        (
            [{"kind": "evaluation", "round": r, "clients": 9, "diverged": 2 - r} for r in (1, 2)],
            None,
        ),  # the last counts
        ([{"kind": "evaluation", "round": 1, "clients": 0, "diverged": 0}], "no validation users could be measured"),
    ],
)
def test_a_run_has_failed_if_more_than_a_tenth_of_it_has(records, reason):
    found = why_failed(records, RATINGS)
    assert found is None if reason is None else found.startswith(reason)


def test_a_warning_is_said_once():
    told = []
    watch = warn_of_divergence(RatingsConfig(data=Data(source="x")), RATINGS, told.append)
    for number in (1, 2, 3):
        watch(a_round(number, clients=4, non_finite=number - 1))
    watch({"kind": "evaluation", "round": 3, "clients": 9, "diverged": 2})
    assert [text.partition(" of ")[0] for text in told] == ["warning: round 2: 1", "warning: round 3: 2"]


def test_a_remedy_names_what_plays_a_part():
    paper = RatingsConfig(data=Data(source="x"))
    told = remedy(paper)
    assert "--update.learning-rate (now 0.5)" in told
    assert "--reconstruct.learning-rate (now 0.1)" in told
    assert "--aggregate.clip-norm" in told
    solved = remedy(DEFAULT)
    assert "--reconstruct.learning-rate" not in solved
    assert "--server.learning-rate (now 0.01)" in solved
    assert "raise --reconstruct.ridge (now 1)" in solved
    assert "--data.transform log1p" in remedy(paper, counts=True)
    assert "--reconstruct.learning-rate" not in remedy(PRESETS["text"]["default"])
    assert "--reconstruct.learning-rate (now 1)" in remedy(PRESETS["text"]["paper"])


def test_counts_that_run_away_are_met_with_their_logarithm(tmp_path, capsys):
    rng = np.random.default_rng(0)
    plays = [f"u{u},{i},{rng.lognormal(5, 2):.0f}" for u in range(20) for i in rng.choice(12, 8, replace=False)]
    (tmp_path / "plays.csv").write_text("\n".join(["user,item,rating", *plays]) + "\n")
    command = ["train", str(tmp_path / "plays.csv"), "--out", str(tmp_path / "run"), "--rounds", "3", *SMALL]
    assert main(command) == 3
    assert "The ratings look like counts: use --data.transform log1p" in capsys.readouterr().err


# ---- settings that make no sense ----

NUMBERS = {
    "update.learning_rate": [float("nan"), float("inf"), -1.0],
    "reconstruct.learning_rate": [float("nan"), float("inf"), -1.0, 10**400],
    "server.learning_rate": [float("nan"), float("inf"), -1.0, 1e39],
    "reconstruct.ridge": [float("nan"), -1.0],
    "reconstruct.batch_size": [0, -5, 10**12],
    "update.epochs": [0, 10**400],
    "update.steps": [-1],
    "update.clip_norm": [0.0, float("nan"), float("inf"), -1.0],
    "aggregate.clip_norm": [0.0, float("nan"), -1.0],
    "aggregate.zero_norm": [0.0, float("inf")],
    "server.decay_rounds": [0, -3],
    "sampling.oversample": [float("nan"), float("inf"), 0.5],
    "sampling.clients_per_round": [0, 10**12],
    "sampling.drop_out": [float("nan"), 1.0, -0.1],
    "sampling.min_examples": [-1],
    "data.fractions": [[float("nan"), 0.5, 0.5], [float("inf"), 0, 0], [1.5, -0.5, 0]],
    "data.split_seed": [-1, 2**32],
    "rounds": [-1, 2**31, 10**400],
    "evaluate_every": [-1],
    "checkpoint_every": [0],
    "seed": [-1, 2**32, 2**70],
    "block": [0, -1],
}
RATINGS_NUMBERS = {
    "model.dim": [0, 10**12],
    "model.init_mean": [float("nan"), 1e300, -1e39],
    "data.shuffle_seed": [2**70],
    "data.max_examples": [1],
}
TEXT_NUMBERS = {"model.vocabulary": [0, 10**12], "model.hidden": [0, 10**9], "model.oov_buckets": [10**12]}


def with_setting(name, value):
    *groups, last = name.split(".")
    values = {"data": {"source": "x"}}
    inner = values
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[last] = value
    return values


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(RatingsConfig, name, v) for name, wrong in (NUMBERS | RATINGS_NUMBERS).items() for v in wrong]
    + [(TextConfig, name, v) for name, wrong in TEXT_NUMBERS.items() for v in wrong],
    ids=lambda value: str(value)[:30],
)
def test_a_number_that_makes_no_sense_is_named(kind, name, value):
    with pytest.raises(ConfigError) as caught:
        config_from_json({"task": kind().task, **with_setting(name, value)}, "file")
    assert caught.value.field == ("sampling" if name == "sampling.drop_out" else name) or name.startswith("sampling")


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_learning_rate_that_makes_no_sense_is_refused_on_the_command_line(tmp_path, capsys, value):
    assert main(["train", "synthetic", "--out", str(tmp_path / "run"), "--update.learning-rate", value]) == 2
    assert "--update.learning-rate" in said(capsys)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"rounds": ' + "9" * 5000 + "}", '{"data": ' * 900 + "1" + "}" * 900])
def test_hostile_json_is_a_sentence(tmp_path, capsys, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["train", "x.csv", "--config", str(path), "--out", str(tmp_path / "run")]) in (1, 2)
    said(capsys)
    path.rename(tmp_path / "run.json")
    assert main(["evaluate", str(tmp_path)]) == 1
    said(capsys)
    if not text.endswith("}"):
        with pytest.raises(StorageError, match=r"run.json is not valid"):
            read_json(tmp_path / "run.json")
        with pytest.raises(ConfigError, match="not valid JSON"):
            read_config(tmp_path / "run.json")


# ---- a full disk ----


@pytest.fixture
def small_files():
    """Let this process write no file of more than 2,000 bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_sentence_and_leaves_what_there_was(tmp_path, small_files):
    small, large = {"a": np.zeros(9)}, {"a": np.zeros(9000)}
    path = tmp_path / "arrays.safetensors"
    save_arrays(path, small)
    with pytest.raises(StorageError, match=r"arrays.safetensors cannot be written: File too large"):
        save_arrays(path, large)
    assert load_file(path)["a"].shape == (9,)
    with pytest.raises(StorageError, match=r"it.json cannot be written: File too large"):
        write_json(tmp_path / "it.json", ["long"] * 2000)
    assert [file.name for file in tmp_path.iterdir()] == ["arrays.safetensors"]
    folder = RunFolder(tmp_path / "run")
    folder.checkpoint(1, small)
    with pytest.raises(StorageError, match="cannot be written"):
        folder.checkpoint(2, large)
    with pytest.raises(StorageError, match=r"metrics.jsonl cannot be written"):
        folder.record({"kind": "round", "round": 1, "loss": "x" * 3000})
    assert folder.restore(small)[0] == 1


# ---- where output and prepared data go ----


def test_output_that_cannot_be_written_is_a_sentence(monkeypatch, capsys):
    for words in (["--version"], ["--help"]):
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", full)
            assert main(words) == 1
        assert capsys.readouterr().err == "fedrecon: No space left on device\n"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_output_does_not_matter(monkeypatch, closed):
    monkeypatch.setattr(f"sys.{closed}", None)
    try:
        assert main(["train", "--help"]) == 0
        assert main(["nothing"]) == 2
    finally:
        getattr(sys, closed).close()


def test_what_ends_with_words_has_failed(monkeypatch, capsys):
    def leave(options):
        raise SystemExit("it cannot be done")

    monkeypatch.setattr("fedrecon._src.app.cli.keys.run", leave)
    assert main(["keys", "folder"]) == 1
    assert said(capsys) == "fedrecon: it cannot be done\n"


def test_prepared_text_is_for_its_owner_alone(tmp_path, monkeypatch):
    posts = tmp_path / "posts.jsonl"
    posts.write_text("".join(json.dumps({"client": f"c{k}", "text": "some words."}) + "\n" for k in range(9)))
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    load_text(posts)
    assert stat.S_IMODE((tmp_path / "cache" / "text").stat().st_mode) == 0o700


def test_without_a_home_folder_it_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDRECON_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with pytest.raises(DataError, match="set FEDRECON_CACHE"):
        cache_folder()
