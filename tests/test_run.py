import json
import os
import shutil
import stat

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.run_folder import RunFolder, StorageWarning, find_part, list_stashes
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


def test_a_run_that_is_replaced_comes_back_unless_the_new_one_has_begun(folder):
    write(folder, 1)
    folder.checkpoint(1, state(1))
    folder.describe({"seed": 1})
    folder.replace()  # nothing comes after it
    assert folder.restore(state(0))[0] == 1
    assert folder.description()["seed"] == 1
    with folder.lock():
        folder.replace()
        assert not folder.has_checkpoint()
        assert folder.records() == []
        folder.describe({"seed": 2})
        write(folder, 1, 2)
        folder.checkpoint(2, state(2))
    assert folder.restore(state(0))[0] == 2
    assert len(list_stashes(folder.path)) == 1
    folder.complete()
    assert list_stashes(folder.path) == []
    assert folder.description()["seed"] == 2


def test_whoever_reads_during_a_replacement_reads_one_run(folder):
    folder.describe({"seed": 1})
    folder.checkpoint(1, state(1))
    (folder.model_path).mkdir()
    with folder.lock():
        folder.replace()
        assert find_part(folder.path, "model").is_dir()
        assert folder.description()["seed"] == 1
        folder.describe({"seed": 2})
        assert folder.description()["seed"] == 1
        folder.checkpoint(1, state(2))
        assert folder.description()["seed"] == 2
        assert not find_part(folder.path, "model").exists()


@pytest.mark.parametrize("moved", [("model",), ("model", "checkpoint"), ("model", "checkpoint", "run.json")])
def test_a_replacement_that_was_killed_half_way_is_undone(folder, moved):
    folder.describe({"seed": 1})
    folder.checkpoint(1, state(1))
    folder.model_path.mkdir()
    partial = folder.path / ".replaced.partial"
    partial.mkdir()
    for name in moved:
        (folder.path / name).rename(partial / name)
    assert all(find_part(folder.path, name).exists() for name in ("model", "checkpoint", "run.json"))
    assert folder.restore(state(0))[0] == 1
    assert folder.model_path.is_dir()
    assert not partial.exists()


# ---- whose it is ----


@pytest.mark.parametrize(
    "file",
    ["notes.txt", "model/weights.bin", "model/model.json", "checkpoint/best.pt", "metrics.jsonl", "run.json"],
)
def test_a_folder_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path, file):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    for use in (lambda folder: folder.restore(state(0)), lambda folder: folder.replace()):
        with pytest.raises(StorageError, match="fedrecon did not make it; give a new or empty folder"):
            use(RunFolder(tmp_path))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


@pytest.mark.parametrize("file", ["model/weights.bin", "checkpoint/best.pt"])
def test_a_part_of_somebody_else_in_a_folder_of_ours_is_refused(folder, file):
    folder.describe({})
    (folder.path / file).parent.mkdir()
    (folder.path / file).write_text("")
    with pytest.raises(StorageError, match=f"holds {file.split('/')[1]}, and fedrecon did not make it"):
        folder.replace()
    assert (folder.path / file).exists()


def test_other_files_beside_a_run_stay(folder):
    folder.describe({})
    (folder.path / "notes.txt").write_text("mine")
    folder.replace()
    folder.complete()
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_a_second_writer_is_told_who_the_first_is(folder):
    with folder.lock(), folder.lock():
        with pytest.raises(StorageError, match=rf"in use by process {os.getpid()} on .* \(since "):
            RunFolder(folder.path).restore(state(0))
        folder.restore(state(0))
    assert RunFolder(folder.path).restore(state(0)) is None


def test_a_folder_that_nothing_was_written_to_is_not_left_behind(tmp_path):
    with RunFolder(tmp_path / "run").lock():
        pass
    assert list(tmp_path.iterdir()) == []


# ---- damage ----


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def with_kept(value):
    return {"server": {"w": np.full(3, value, np.float32)}, "kept": {"u": np.full((2, 2), value, np.float32)}}


def test_any_byte_of_a_checkpoint_that_changes_is_noticed_and_its_file_named(folder):
    write(folder, 1, 2)
    folder.checkpoint(2, with_kept(2))
    (checkpoint,) = (folder.path / "checkpoint").iterdir()
    files = files_of(checkpoint)
    assert {path.name for path in files} == {"manifest.json", "arrays.safetensors", "kept.safetensors", "README"}
    for path in files:
        whole = path.read_bytes()
        damages = [
            whole[:-1],
            whole + b" ",
            b"",
            *(whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1 :] for k in range(len(whole))),
        ]
        for damaged in damages:
            path.write_bytes(damaged)
            with pytest.raises(StorageError, match=path.name):
                folder.restore(with_kept(0))
        path.unlink()
        with pytest.raises(StorageError, match=f"{path.name} is missing"):
            folder.restore(with_kept(0))
        path.write_bytes(whole)
    assert folder.restore(with_kept(0))[0] == 2


def test_files_of_two_checkpoints_are_not_mixed(tmp_path):
    one, other = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "other")
    for number, folder in enumerate((one, other)):
        folder.checkpoint(2, state(number))
    shutil.copy(next(one.path.glob("*/*/arrays.safetensors")), next(other.path.glob("*/*/arrays.safetensors")))
    with pytest.raises(StorageError, match=r"arrays.safetensors is damaged"):
        other.restore(state(0))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("0.5", "0.6"),
        lambda text: text.replace('"round": 2', '"rou'),
        lambda text: "[" * 100_000 + text,
    ],
    ids=["a figure", "a line", "nested"],
)
def test_damaged_metrics_name_themselves_and_keep_nothing_from_going_on(folder, damage):
    write(folder, 1, 2, 3)
    folder.checkpoint(3, state(3))
    folder.metrics_path.write_text(damage(folder.metrics_path.read_text()))
    with pytest.warns(StorageWarning, match=r"metrics.jsonl is damaged.*kept as .*metrics.damaged.jsonl"):
        done, _, records = folder.restore(state(0))
    assert done == 3
    assert records[-1] == {"kind": "round", "round": 3, "loss": 1 / 3}
    assert (folder.path / "metrics.damaged.jsonl").exists()
    write(folder, 4)
    folder.checkpoint(4, state(4))
    assert folder.restore(state(0))[0] == 4  # without a warning


# ---- what is private ----


def test_what_clients_keep_is_readable_by_its_owner_alone(folder):
    folder.checkpoint(2, with_kept(2))
    private = next(folder.path.glob("checkpoint/*/private"))
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in private.iterdir()} == {0o600}
    assert "do not pass it on" in (private / "README").read_text()
    assert set(load_file(private.parent / "arrays.safetensors")) == {"server/w"}
    assert_same_bits(folder.restore(with_kept(0))[1], with_kept(2))


def test_settings_are_read_back(folder):
    folder.describe({"seed": 3, "rounds": 10})
    assert folder.description().items() >= {"seed": 3, "rounds": 10, "format": "fedrecon-run", "version": 2}.items()
