"""`fedrecon privacy plan`: what it prints, and one sentence for every error."""

import json
import sys

import pytest

from fedrecon._src.app.cli import main

pytestmark = pytest.mark.slow

PLAN = ["privacy", "plan", "--clients", "5000", "--per-round", "50", "--rounds", "20"]


def test_a_plan_says_what_noise_a_budget_takes(capsys):
    assert main([*PLAN, "--epsilon", "4", "--delta", "1e-5", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main([*PLAN, "--noise-multiplier", str(plan["noise_multiplier"]), "--delta", "1e-5", "--json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert 3.98 < back["epsilon"] <= 4  # the two ways agree
    assert plan["mean"] == plan["noise_multiplier"] / 50
    assert [other["epsilon"] for other in plan["others"]] == [1, 2, 8, 4, 4]
    assert [other["per_round"] for other in plan["others"]] == [50, 50, 50, 100, 250]
    strict, _, loose, *larger = (other["noise_multiplier"] for other in plan["others"])
    assert strict > plan["noise_multiplier"] > loose
    assert all(other["mean"] < plan["mean"] for other in plan["others"][3:])
    assert min(larger) > plan["noise_multiplier"]


def test_a_plan_in_words(capsys):
    assert main([*PLAN, "--noise-multiplier", "1.5", "--parameters", "10000"]) == 0
    out = capsys.readouterr().out
    assert "5,000 clients, 20 rounds, delta 8.5e-05" in out
    row = next(line.split() for line in out.splitlines() if "1.500" in line)
    assert row[1:] == ["50", "1.500", "0.03", "3"]  # 1.5 / 50, and times the root of 10,000
    assert "cannot raise the odds" in out
    assert "Not covered: metrics of validation and test clients" in out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (PLAN, 2, "--epsilon: must be given, or `noise_multiplier`, but not both"),
        ([*PLAN, "--epsilon", "2", "--noise-multiplier", "1"], 2, "--epsilon: must be given"),
        ([*PLAN, "--epsilon", "2", "--parameters", "0"], 2, "--parameters"),
        ([*PLAN, "--epsilon", "0"], 2, "--epsilon: "),
        ([*PLAN, "--epsilon", "2", "--delta", "1"], 2, "--delta: "),
        ([*PLAN, "--noise-multiplier", "0"], 2, "--noise-multiplier: "),
        ([*PLAN, "--noise-multiplier", "1e-300"], 2, "--noise-multiplier: "),
        ([*PLAN, "--noise-multiplier", "1e300"], 2, "--noise-multiplier: "),
        ([*PLAN, "--epsilon", "inf"], 2, "--epsilon"),
        ([*PLAN, "--epsilon", "2", "--clients", "0"], 2, "--clients: "),
        ([*PLAN, "--epsilon", "2", "--rounds", str(2**70)], 2, "--rounds: "),
        ([*PLAN, "--noise-multiplier", "1", "--rounds", str(2**70)], 2, "--rounds: "),
        ([*PLAN[:-4], "--per-round", "6000", "--rounds", "2", "--epsilon", "1"], 2, "--per-round: "),
    ],
)
def test_an_error_is_one_sentence(argv, code, message, capsys):
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["privacy"], ["plan"]),
        (["privacy", "plot"], ["plot", "plan"]),
        (["privacy", "plan", "--clients", "10"], ["--per-round", "--rounds"]),
    ],
)
def test_a_part_or_option_that_is_missing_is_named(argv, names, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(name in err for name in names)


NOISE = ["--privacy.noise-multiplier", "1", "--privacy.clip-norm", "1"]
TRAIN = ["train", "synthetic", "--rounds", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--privacy.epsilon", "4", "--privacy.clip-norm", "0"], "--privacy.clip-norm"),
        (["--privacy.epsilon", "4", "--privacy.delta", "1"], "--privacy.delta"),
        (["--privacy.epsilon", "0"], "--privacy.epsilon"),
        (["--privacy.epsilon", "nan"], "--privacy.epsilon"),
        (
            ["--privacy.epsilon", "4", "--privacy.noise-multiplier", "0"],
            "--privacy.noise-multiplier",
        ),
        (["--privacy.epsilon", "1e-7", "--privacy.delta", "1e-12"], "no amount of noise gives epsilon 1e-07"),
        (["--aggregate.secure"], "--aggregate.secure"),
        (
            ["--aggregate.secure", "--aggregate.clip-norm", "1", "--sampling.clients-per-round", "1"],
            "must be at least 2: a sum over one client hides nothing",
        ),
    ],
)
def test_private_runs_without_a_guarantee_are_refused_before_anything_is_written(options, message, tmp_path, capsys):
    assert main([*TRAIN, "--out", str(tmp_path / "run"), *options]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "paper", "--privacy.epsilon", "4", "--privacy.clip-norm", "1"], "give --users"),
        (
            ["--aggregate.secure", "--aggregate.clip-norm", "1"],
            "--aggregate.secure is for simulations; here it is --secure",
        ),
        (["--secure"], "--least-nodes: must be at least 2"),
        (["--preset", "paper", *NOISE, "--users", "9", "--least-users", "5"], "--least-users: must be 1"),
    ],
)
def test_plans_that_could_promise_nothing_are_refused_before_anything_is_written(options, message, tmp_path, capsys):
    (tmp_path / "items.csv").write_text("item\n1\n2\n3\n")
    plan = ["plan", "--items", str(tmp_path / "items.csv"), "--out", str(tmp_path / "plan"), "--data.max-examples", "9"]
    assert main([*plan, *options]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "plan").exists()


def test_a_plan_with_noise_says_what_it_promises(tmp_path, capsys):
    (tmp_path / "items.csv").write_text("item\n1\n2\n3\n")
    plan = ["plan", "--items", str(tmp_path / "items.csv"), "--out", str(tmp_path / "plan"), "--data.max-examples", "9"]
    noise = ["--preset", "paper", "--privacy.epsilon", "4", "--privacy.clip-norm", "1", "--users", "1000"]
    assert main([*plan, *noise, "--secure", "--least-nodes", "3", "--share", "0.1", "--rounds", "20"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "with noise that every node" in out
    assert "a node answers 23 times at most" in out


def test_without_the_extra_it_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert main([*PLAN[:-1], "21", "--noise-multiplier", "1.1"]) == 1
    assert "run: pip install 'fedrecon[privacy]'" in capsys.readouterr().err
