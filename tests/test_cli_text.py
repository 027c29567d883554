"""The commands on text, end to end: a corpus in which everybody has a word that only their own embedding can tell."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedrecon._src.app.cli import main, show
from fedrecon._src.recommend.config import Data, RatingsConfig
from fedrecon._src.recommend.saved_models import FORMAT, SavedModel
from fedrecon._src.recommend.tasks import Items
from fedrecon._src.storage.manifest import write_manifest
from fedrecon._src.storage.run_folder import RUN_FORMAT
from fedrecon.data import load_text

pytestmark = pytest.mark.slow

SMALL = [
    "--task",
    "text",
    "--preset",
    "paper",
    "--model.vocabulary",
    "5",
    "--model.oov-buckets",
    "8",
    "--model.max-words",
    "5",
]
SMALL += ["--model.hidden", "16", "--model.embedding", "8", "--model.projection", "8", "--jax-devices", "1"]
SMALL += ["--reconstruct.learning-rate", "1", "--reconstruct.epochs", "5", "--reconstruct.batch-size", "4"]
SMALL += ["--update.batch-size", "4", "--update.learning-rate", "0.3", "--server.learning-rate", "0.1"]
SMALL += ["--sampling.clients-per-round", "10", "--block", "1"]
SMALL += ["--evaluate-every", "30", "--checkpoint-every", "30"]
ROUNDS = ["--rounds", "90"]


def write_posts(path, clients=range(40)):
    """Write sentences such as `w2 name7 name7 .`: nobody else has client 7's word, which comes twice."""
    posts = []
    for c in clients:
        rng = np.random.default_rng(c)
        texts = [f"w{rng.integers(4)} name{c} name{c} ." for _ in range(16)]
        posts += [{"client": f"client{c:02}", "time": t, "text": text} for t, text in enumerate(texts)]
    path.write_text("".join(json.dumps(post) + "\n" for post in posts))
    return path


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keep prepared corpora away from the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDRECON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a file of posts and the folder of a run on it."""
    folder = tmp_path_factory.mktemp("text")
    posts = write_posts(folder / "posts.jsonl")
    assert main(["train", str(posts), "--out", str(folder / "run"), *SMALL, *ROUNDS]) == 0
    return posts, folder / "run"


@pytest.fixture
def mine(tmp_path):
    """Return a text of somebody who took no part."""
    path = tmp_path / "mine.txt"
    path.write_text("W3 fedrecon fedrecon. w1 fedrecon fedrecon.\n" * 3)
    return path


@pytest.fixture(scope="module")
def recommender(tmp_path_factory):
    """Return the folder of a model of ratings."""
    folder = tmp_path_factory.mktemp("ratings") / "model"
    config, items = RatingsConfig(data=Data(source="")), Items(np.arange(2))
    params = {"item_embedding": np.zeros((2, config.model.dim), np.float32)}
    SavedModel(config, params, items).save(folder)
    return folder


def said(capsys):
    """Return what a failed command said, which must be one sentence on standard error alone."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fedrecon: ")
    assert err.count("\n") == 1
    return err


def completions(capsys, *argv):
    capsys.readouterr()
    assert main(["complete", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- train ----


def test_help_is_of_the_task(capsys):
    assert main(["train", "--task", "text", "--help"]) == 0
    told = " ".join(re.sub("[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
    assert "--model.oov-buckets INT how many buckets all other words share. (default: 500)" in told
    assert "--sampling.clients-per-round" in told
    assert "--model.dim" not in told
    assert "--data.user" not in told


def test_a_run_leaves_what_the_design_says(trained):
    _, run = trained
    facts = json.loads((run / "run.json").read_text())
    assert facts["config"]["task"] == "text"
    data = facts["data"]
    assert sum(data["users"]) == 40
    assert (data["sentences"], data["words"], data["vocabulary"]) == (640, 2560, 5)
    assert data["coverage"] == 0.5
    assert data["left_out"]["bad_rows"] == 0
    assert facts["test"]["clients"] == data["users"][2]
    assert facts["test"]["examples"] == data["users"][2] * 8 * 5  # four words and the end of every query sentence
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rounds = [record for record in records if record["kind"] == "round"]
    assert [record["round"] for record in rounds] == list(range(1, 91))
    assert rounds[0]["weight"] == 10 * 8 * 5  # clients are weighed by tokens
    assert [record["round"] for record in records if record["kind"] == "evaluation"] == [30, 60, 90]
    assert [p.name for p in (run / "checkpoint").iterdir()] == ["round-000000090"]
    assert (run / "plots" / "learning_curve.png").exists()


def test_a_model_folder_holds_words_and_tells_nothing_of_who_wrote_them(trained):
    _, run = trained
    text = (run / "model" / "model.json").read_text()
    assert sorted(json.loads(text)["vocabulary"]["words"]) == [".", "w0", "w1", "w2", "w3"]
    assert not re.search(r"client\d|posts\.jsonl|name\d", text)
    params = load_file(run / "model" / "global.safetensors")
    assert params["word_embedding"].shape == (5 + 3, 8)
    assert params["output/kernel"].shape == (8, 5 + 3 + 8)
    assert "oov_embedding" not in params


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(trained, tmp_path, monkeypatch, capsys):
    posts, run = trained

    def stop(record, *_):
        if record["round"] == 34:
            raise KeyboardInterrupt

    monkeypatch.setattr(show, "progress_of", stop)
    command = ["train", str(posts), "--out", str(tmp_path), *SMALL, *ROUNDS]
    capsys.readouterr()
    assert main(command) == 130
    assert "to continue: fedrecon train " in capsys.readouterr().err
    assert (tmp_path / "model" / "model.json").exists()
    monkeypatch.undo()
    assert main(["train", "--resume", str(tmp_path)]) == 0
    whole, parts = (load_file(p / "model" / "global.safetensors") for p in (run, tmp_path))
    assert {name: leaf.tobytes() for name, leaf in whole.items()} == {n: leaf.tobytes() for n, leaf in parts.items()}
    assert (tmp_path / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()


def test_a_config_file_says_which_task(trained, tmp_path, capsys):
    _, run = trained
    out, again = tmp_path / "run", ["train", "--config", str(run / "run.json")]
    assert main([*again, "--out", str(out), "--rounds", "1", "--seed", "5"]) == 0
    old, new = (json.loads((p / "run.json").read_text())["config"] for p in (run, out))
    assert new == {**old, "rounds": 1, "seed": 5}
    capsys.readouterr()
    assert main([*again, "--out", str(out), "--task", "ratings"]) == 2
    assert "--task: must be text" in said(capsys)


def test_a_run_on_ratings_is_not_resumed_on_text(trained, tmp_path, capsys):
    posts, run = trained
    shutil.copytree(run, tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    facts["config"] = {"data": {"source": "ratings.csv"}}
    write_manifest(tmp_path / "run" / "run.json", RUN_FORMAT, facts)
    assert main(["train", str(posts), "--resume", str(tmp_path / "run"), *SMALL, *ROUNDS]) == 2
    assert "--task: must stay 'ratings'" in said(capsys)


def test_bad_lines_are_refused_or_counted(tmp_path, capsys):
    posts = write_posts(tmp_path / "posts.jsonl")
    posts.write_text(posts.read_text() + '{"client": "x"}\n')
    command = ["train", str(posts), "--out", str(tmp_path / "run"), *SMALL, "--rounds", "1"]
    assert main(command) == 1
    assert "posts.jsonl line 641: 'text' is missing" in said(capsys)
    assert not (tmp_path / "run").exists()
    assert main([*command, "--data.bad-rows", "skip"]) == 0
    assert "bad rows (1)" in capsys.readouterr().err


# ---- evaluate ----


def test_evaluation_is_one_json_object(trained, capsys):
    _, run = trained
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((run / "run.json").read_text())["test"].items() <= found.items()
    assert found["personal"]["own_top3"] > found["impersonal"]["own_top3"] == 0
    assert set(found["micro"]) >= {"loss", "perplexity", "accuracy", "accuracy_with_oov_eos"}


def test_another_file_is_measured_in_the_words_of_the_run(trained, tmp_path, capsys):
    posts, run = trained
    tested = [int(name.removeprefix("client")) for name in load_text(posts).test.names.tolist()]
    other = write_posts(tmp_path / "other.jsonl", tested)
    capsys.readouterr()
    assert main(["evaluate", str(run / "model"), "--text", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    test = json.loads((run / "run.json").read_text())["test"]
    assert found["clients"] == len(tested)
    for name, value in test["micro"].items():
        assert found["micro"][name] == pytest.approx(value, rel=1e-4)
    assert main(["evaluate", str(run), "--text", str(other)]) == 0
    table = capsys.readouterr().out
    assert "perplexity" in table
    assert " 0 diverged" in table
    assert "personal, still learning" in table


# ---- complete ----


def test_a_word_of_ones_own_is_suggested_where_only_its_embedding_can_tell(trained, mine, capsys):
    found = completions(capsys, trained[1], "--text", mine, "--prompt", "w2 fedrecon", "-n", "3")
    assert (found["sentences"], found["own_words"]) == (6, 1)
    (one,) = found["prompts"]
    assert one["prompt"] == "w2 fedrecon"
    assert one["words"] == ["w2", "fedrecon"]
    best = one["with"][0]
    assert (best["word"], best["personal"]) == ("fedrecon", True)
    before = [other["probability"] for other in one["without"] if other["word"] == "fedrecon"]
    assert best["probability"] > max(0.25, 2 * max(before, default=0))
    assert [len(one[side]) for side in ("with", "without")] == [3, 3]
    assert {other["word"] for other in one["with"][1:]} <= {".", "w0", "w1", "w2", "w3"}
    assert not any(other["personal"] for other in one["with"][1:])


def test_several_prompts_are_completed_and_ones_own_words_marked(trained, mine, capsys):
    _, run = trained
    capsys.readouterr()
    prompts = ["--prompt", "w2 fedrecon", "--prompt=w1 fedrecon fedrecon"]
    assert main(["complete", str(run / "model"), "--text", str(mine), *prompts]) == 0
    out = capsys.readouterr().out
    first, second = out.split("after: ")[1:]
    assert first.startswith("w2 fedrecon\n")
    assert second.startswith("w1 fedrecon fedrecon\n")
    assert re.search(r"\n +fedrecon \* +\d+\.\d % ", first)
    assert re.search(r"\n +\. +\d+\.\d % ", second)
    assert "learned from 6 sentences" in second


def test_of_a_long_prompt_the_last_words_count(trained, mine, capsys):
    _, run = trained
    command = ["complete", str(run), "--text", str(mine), "--prompt"]
    capsys.readouterr()
    assert main([*command, "w0 w0 w0 w0 w2 fedrecon"]) == 0
    told = capsys.readouterr()
    assert "only the last 4 words of the prompt" in told.err
    assert "after: w0 w0 w2 fedrecon\n" in told.out


# ---- errors ----


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["train", "x", "--task", "sound", "--out", "out"], 2, "--task"),
        (["train", "gone.jsonl", "--task", "text", "--out", "out"], 1, "gone.jsonl is neither a file nor a prepared"),
        (["train", "x", "--task", "text", "--out", "out", "--model.dim", "3"], 2, "--model.dim"),
        (["train", "x", "--task", "text", "--out", "out", "--model.hidden", "0"], 2, "--model.hidden"),
        (
            ["train", "x", "--task=text", "--out", "o", "--reconstruct.solver", "least-squares"],
            2,
            "--reconstruct.solver",
        ),
        (["train", "x", "--out", "out", "--aggregate.weigh", "tokens"], 2, "--aggregate.weigh"),
        (["recommend", "run", "--ratings", "x.csv"], 1, "trained on text, not on ratings: use fedrecon complete run"),
        (["evaluate", "run", "--ratings", "x.csv"], 2, "give --text, not --ratings"),
        (["evaluate", "run", "--text", "gone.jsonl"], 1, "gone.jsonl is neither a file nor a prepared corpus"),
        (["evaluate", "ratings", "--text", "mine.txt"], 2, "give --ratings, not --text"),
        (["complete", "run", "--text", "mine.txt"], 2, "--prompt: must be given"),
        (["complete", "run", "--prompt", "a"], 2, "--text"),
        (["complete", "run", "--text", "mine.txt", "--prompt", "a", "b"], 2, "Unrecognized"),
        (["complete", "run", "--text", "mine.txt", "--prompt", " "], 1, "the prompt ' ' has no words"),
        (["complete", "run", "--text", "mine.txt", "--prompt", "a", "-n", "0"], 2, "--top"),
        (["complete", "run", "--text", "gone.txt", "--prompt", "a"], 1, "gone.txt is not a file"),
        (["complete", "run", "--text", "empty.txt", "--prompt", "a"], 1, "empty.txt contains no words"),
        (["complete", "run", "--text", "bytes.txt", "--prompt", "a"], 1, "bytes.txt is not UTF-8 text"),
        (["complete", "gone", "--text", "mine.txt", "--prompt", "a"], 1, "gone is not a folder"),
        (["complete", "ratings", "--text", "mine.txt", "--prompt", "a"], 1, "use fedrecon recommend ratings --rat"),
    ],
)
def test_an_error_is_one_sentence(argv, code, message, trained, recommender, mine, monkeypatch, capsys):
    monkeypatch.chdir(mine.parent)
    for name, folder in (("run", trained[1]), ("ratings", recommender)):
        (mine.parent / name).symlink_to(folder)
    (mine.parent / "empty.txt").write_text(" \n")
    (mine.parent / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    capsys.readouterr()
    assert main(argv) == code
    assert message in (said(capsys) if code == 1 else capsys.readouterr().err)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "sound"}, "is of task 'sound'; this version of fedrecon knows ratings, clicks, text"),
        ({"vocabulary": {"words": [1], "buckets": 8}}, "is damaged: its vocabulary is not a list of words"),
        ({"vocabulary": {"words": ["a", "a"], "buckets": 8}}, "is damaged: 'a' is in the vocabulary twice"),
        ({"vocabulary": None}, "is damaged"),
        ({"vocabulary": {"words": ["a"], "buckets": 8}}, "expected float32"),
    ],
)
def test_a_damaged_model_is_one_sentence(change, message, trained, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(trained[1] / "model", model)
    file = model / "model.json"
    write_manifest(file, FORMAT, {**json.loads(file.read_text()), **change})
    assert main(["evaluate", str(model), "--text", "x"]) == 1
    assert message in said(capsys)
