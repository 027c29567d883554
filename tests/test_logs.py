"""Records where people look, read back as their tools read them: TensorBoard, MLflow and Weights & Biases."""

import json
import math
import struct
import sys

import pytest

import fedrecon as fr
from fedrecon._src.app.cli.train import parse
from fedrecon._src.app.logs import numbers_of


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
            log.after_round(entry)
    found = read(tmp_path)
    assert found["train/loss"] == [(1, 3.0), (2, 2.0)]
    assert found["valid/rmse"] == [(2, 1.5)]
    assert found["valid/diverged"] == [(2, 1.0)]


def test_a_run_that_goes_on_replaces_what_was_drawn_beyond_its_checkpoint(tmp_path):
    with fr.log_to("tensorboard", tmp_path) as log:
        for number in range(1, 6):
            log.after_round(a_round(number, number))
    with fr.log_to("tensorboard", tmp_path) as log:  # killed in round 5, its checkpoint is of round 3
        for number in range(4, 7):
            log.after_round(a_round(number, 10 * number))
    assert read(tmp_path)["train/loss"] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]


def wandb_records(file):
    """Yield the records of an offline run: after 7 bytes a log in blocks of 32 kB, as LevelDB writes it."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for the head of a record: the next block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            yield proto.Record.FromString(whole)
            whole = b""


@pytest.mark.filterwarnings("ignore")  # its own
def test_mlflow_has_what_was_recorded(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs pip install 'fedrecon[mlflow]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with fr.log_to("mlflow", tmp_path / "mine", {"rounds": 2, "data": {"source": "x.csv"}}) as log:
        for entry in [an_evaluation(0, 2.0), a_round(1, 3.0), a_round(2, math.nan), an_evaluation(2, 1.5)]:
            log.after_round(entry)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    curve = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "valid/rmse")]
    assert curve == [(0, 2.0), (2, 1.5)]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2]
    settings = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/settings.json")
    assert settings == {"rounds": 2, "data": {"source": "x.csv"}}


def test_wandb_has_what_was_recorded(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs pip install 'fedrecon[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with fr.log_to("wandb", tmp_path / "mine", {"rounds": 2}) as log:
        for entry in [an_evaluation(0, 2.0), a_round(1, 3.0), a_round(2, math.nan), an_evaluation(2, 1.5)]:
            log.after_round(entry)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, names = [], set()
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in items.items()})
        elif record.WhichOneof("record_type") == "run":
            names.add(record.run.display_name)
    assert names == {"mine"}
    assert [(row["round"], row["valid/rmse"]) for row in rows if "valid/rmse" in row] == [(0, 2.0), (2, 1.5)]
    assert [row["round"] for row in rows if "train/loss" in row] == [1, 2]


def test_a_tool_that_is_not_known_or_not_installed_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="`kind` must be one of 'tensorboard'"), fr.log_to("excel", tmp_path):
        pass
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="fedrecon\\[wandb\\]"), fr.log_to("wandb", tmp_path):
        pass


def test_the_command_has_the_option():
    assert parse(["x.csv", "--out", "y", "--log", "tensorboard"]).log == "tensorboard"
    assert parse(["x.csv", "--out", "y"]).log is None
    with pytest.raises(SystemExit):
        parse(["x.csv", "--out", "y", "--log", "excel"])
