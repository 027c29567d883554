"""Records where people look, read back with TensorBoard's own reader."""

import sys

import pytest

import fedrecon as fr
from fedrecon.app.cli.train import parse
from fedrecon.app.logs import numbers_of


def a_round(number, loss):
    return {"kind": "round", "round": number, "loss": loss, "skipped": False, "clients": 7, "clip_norm": 0.5}


def an_evaluation(number, rmse):
    micro = {"loss": rmse**2, "rmse": rmse}
    return {"kind": "evaluation", "round": number, "clients": 3, "diverged": 1, "micro": micro, "quantiles": {}}


def read(folder):
    """Return what TensorBoard would draw: the points of every curve."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        name: [(point.step, pytest.approx(point.value)) for point in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_numbers_of_records_have_names():
    assert numbers_of(a_round(4, 2.0)) == {
        "train/loss": 2.0,
        "train/skipped": 0.0,
        "train/clients": 7.0,
        "train/clip_norm": 0.5,
    }
    expected = {"valid/clients": 3, "valid/diverged": 1, "valid/loss": 4.0, "valid/rmse": 2.0}
    assert numbers_of(an_evaluation(4, 2.0)) == expected


def test_tensorboard_draws_what_was_recorded(tmp_path):
    with fr.log_to("tensorboard", tmp_path) as log:
        assert not list(tmp_path.iterdir())  # a run that cannot start leaves nothing
        for entry in [a_round(1, 3.0), a_round(2, 2.0), an_evaluation(2, 1.5)]:
            log(entry)
    found = read(tmp_path)
    assert found["train/loss"] == [(1, 3.0), (2, 2.0)]
    assert found["valid/rmse"] == [(2, 1.5)]
    assert found["valid/diverged"] == [(2, 1.0)]


def test_a_run_that_goes_on_replaces_what_was_drawn_beyond_its_checkpoint(tmp_path):
    with fr.log_to("tensorboard", tmp_path) as log:
        for number in range(1, 6):
            log(a_round(number, number))
    with fr.log_to("tensorboard", tmp_path) as log:  # killed in round 5, its checkpoint is of round 3
        for number in range(4, 7):
            log(a_round(number, 10 * number))
    assert read(tmp_path)["train/loss"] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]


def test_a_tool_that_is_not_known_or_not_installed_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="must be one of tensorboard, mlflow, wandb"), fr.log_to("excel", tmp_path):
        pass
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="fedrecon\\[wandb\\]"), fr.log_to("wandb", tmp_path):
        pass


def test_the_command_has_the_option():
    assert parse(["x.csv", "--out", "y", "--log", "tensorboard"]).log == "tensorboard"
    assert parse(["x.csv", "--out", "y"]).log is None
    with pytest.raises(ValueError, match="must be one of"):
        parse(["x.csv", "--out", "y", "--log", "excel"])
