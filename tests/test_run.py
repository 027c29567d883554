import json

import numpy as np
import pytest

from fedrecon.disk.arrays import StorageError
from fedrecon.disk.runs import RunFolder
from toy_models import assert_same_bits


def state(value):
    return {"server": {"w": np.full(3, value, np.float32)}, "kept": ()}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "deep" / "run")


def write(folder, *rounds):
    for number in rounds:
        folder.record({"kind": "round", "round": number, "loss": 1 / number})


def test_a_new_folder_has_nothing_to_resume_from(folder):
    assert not folder.has_checkpoint()
    assert folder.restore(state(0)) is None
    assert folder.records() == []


def test_the_newest_checkpoint_is_restored_and_older_ones_are_gone(folder):
    write(folder, 1, 2, 3, 4, 5, 6)
    folder.checkpoint(2, state(2))
    folder.checkpoint(4, state(4))
    done, found, records = folder.restore(state(0))
    assert done == 4
    assert_same_bits(found, state(4))
    assert [entry["round"] for entry in records] == [1, 2, 3, 4]
    assert len(list((folder.path / "checkpoint").iterdir())) == 1


def test_metrics_after_the_checkpoint_are_cut_off(folder):
    write(folder, 1, 2, 3, 4)
    folder.checkpoint(3, state(3))
    folder.restore(state(0))
    lines = folder.metrics_path.read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]


def test_a_line_that_was_cut_off_is_not_read(folder):
    write(folder, 1, 2)
    folder.checkpoint(2, state(2))
    with folder.metrics_path.open("a") as file:
        file.write('{"kind": "round", "rou')
    assert [entry["round"] for entry in folder.records()] == [1, 2]
    folder.restore(state(0))
    assert folder.metrics_path.read_text().endswith("\n")
    write(folder, 3)
    assert [entry["round"] for entry in folder.records()] == [1, 2, 3]


@pytest.mark.parametrize("content", ["", "half of it"])
def test_a_half_written_checkpoint_is_never_read(folder, content):
    folder.checkpoint(2, state(2))
    partial = folder.path / "checkpoint" / ".round-000000004.partial"
    partial.mkdir()
    (partial / "arrays.safetensors").write_text(content)
    (partial / "manifest.json").write_text('{"format": 1, "rounds": 4}')
    done, found, _ = folder.restore(state(0))
    assert done == 2
    assert_same_bits(found, state(2))
    folder.checkpoint(4, state(4))
    assert folder.restore(state(0))[0] == 4
    assert not partial.exists()


def test_only_a_half_written_checkpoint_is_no_checkpoint(folder):
    partial = folder.path / "checkpoint" / ".round-000000004.partial"
    partial.mkdir(parents=True)
    write(folder, 1, 2)
    assert not folder.has_checkpoint()
    assert folder.restore(state(0)) is None
    assert folder.records() == []


def test_a_checkpoint_of_another_model_is_refused(folder):
    folder.checkpoint(2, state(2))
    with pytest.raises(StorageError, match=r"'server/w' is float32\(3,\); expected float32\(4,\)"):
        folder.restore({"server": {"w": np.zeros(4, np.float32)}, "kept": ()})


def test_forgetting_leaves_nothing_to_resume_from(folder):
    write(folder, 1)
    folder.checkpoint(1, state(1))
    folder.model_path.mkdir()
    folder.forget()
    assert not folder.has_checkpoint()
    assert folder.records() == []
    assert not folder.model_path.exists()


def test_settings_are_read_back(folder):
    folder.describe({"seed": 3, "rounds": 10})
    assert folder.description() == {"seed": 3, "rounds": 10}
