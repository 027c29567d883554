"""Mutations of good configs, model folders and run folders: each is refused with a sentence, or means what it says.

Seeded; `FEDRECON_FUZZ_CASES` says how many cases of each kind, `FEDRECON_FUZZ_SEED` which ones (`make fuzz`: many).
"""

import contextlib
import copy
import dataclasses
import json
import os
import shutil
import warnings

import numpy as np
import pytest

from fedrecon._src.app.cli.train import parse
from fedrecon._src.app.experiment import run_to_resume, users_of_run
from fedrecon._src.recommend.config import (
    ConfigError,
    Data,
    Factorization,
    NextWord,
    RatingsConfig,
    TextConfig,
    TextData,
    to_json,
)
from fedrecon._src.recommend.saved_models import FORMAT, SavedModel, open_model
from fedrecon._src.recommend.tasks import TASKS, Items
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import write_folder_manifest, write_manifest
from fedrecon._src.storage.run_folder import RunFolder
from fedrecon.data import DataError, Vocabulary
from toy_models import assert_same_bits

CASES = int(os.environ.get("FEDRECON_FUZZ_CASES", "60"))
SEED = int(os.environ.get("FEDRECON_FUZZ_SEED", "0"))

NASTY = [None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 2**70, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf")]
NASTY += ["", "x", "../../x", "\0", "\x1b[31m", "[/red]", "ratings", "none", "x" * 5000, "9" * 400, "\ud800"]
NASTY += [[], {}, [[]], [None], [1, 2], {"a": 1}, {"": {}}]


def rng_of(case):
    return np.random.default_rng([SEED, case])


def places_of(value, path=()):
    """List the paths of everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places_of(one, (*path, key)))]


def mutate_json(value, rng):
    """Replace, remove, rename, repeat or nest a few things."""
    value = copy.deepcopy(value)
    for _ in range(rng.integers(1, 4)):
        places = [place for place in places_of(value) if place]
        if not places:
            break
        *path, last = places[rng.integers(len(places))]
        holder = value
        for key in path:
            holder = holder[key]
        how = rng.integers(5)
        if how == 0:
            del holder[last]
        elif how == 1 and isinstance(holder, dict):
            holder[f"{last}x"] = holder.pop(last)
        elif how == 2:
            holder[last] = [holder[last]] * int(rng.integers(1, 4))
        elif how == 3:
            holder[last] = {str(last): holder[last]}
        else:
            holder[last] = copy.deepcopy(NASTY[rng.integers(len(NASTY))])
    return value


def mutate_bytes(content, rng):
    """Flip, cut, repeat or overwrite a few bytes; what comes out is never what went in."""
    found = bytearray(content)
    while bytes(found) == content:
        at = int(rng.integers(len(content) + 1))
        length = int(rng.integers(1, 9))
        how = rng.integers(4)
        if how == 0 and at < len(found):
            found[at] ^= 1 << int(rng.integers(8))
        elif how == 1:
            del found[at:]
        elif how == 2:
            found[at:at] = bytes(found[at : at + length])
        else:
            found[at : at + length] = rng.bytes(length)
    return bytes(found)


def write_json(path, value):
    path.write_bytes(json.dumps(value).encode("utf-8", "surrogatepass"))


# ---- configs ----

CONFIGS = {
    "ratings": to_json(RatingsConfig(data=Data(source="ratings.csv"))),
    "text": to_json(TextConfig(data=TextData(source="posts.jsonl"))),
}


@pytest.mark.parametrize("task", CONFIGS)
def test_a_mutated_config_is_refused_with_a_sentence_or_makes_sense(task, tmp_path):
    file = tmp_path / "config.json"
    good = json.dumps(CONFIGS[task]).encode()
    refused = 0
    for case in range(CASES):
        rng = rng_of(case)
        if case % 3:
            write_json(file, mutate_json(CONFIGS[task], rng))
        else:
            file.write_bytes(mutate_bytes(good, rng))
        try:
            found = parse(["--config", str(file), "--out", "x"]).settings
        except ConfigError:
            refused += 1
        else:
            numbers = [found.update.learning_rate, found.server.learning_rate, found.reconstruct.ridge]
            assert np.isfinite(numbers).all(), case
            assert min(numbers) >= 0, case
            assert 0 <= found.seed < 2**32, case
    assert refused > CASES // 4


# ---- model folders ----


def save_ratings(folder):
    config = RatingsConfig(data=Data(source=""), model=Factorization(dim=2, biases=True))
    items = Items(np.arange(5) + 10, np.array(list("abcde")))
    saved = SavedModel(config, params_of(config, items), items)
    saved.save(folder)
    return saved


def save_text(folder):
    model = NextWord(vocabulary=4, oov_buckets=2, embedding=3, hidden=3, projection=3, max_words=4)
    config, words = TextConfig(data=TextData(source=""), model=model), Vocabulary(("a", "b", "c", "d"), 2)
    saved = SavedModel(config, params_of(config, words), words)
    saved.save(folder)
    return saved


def params_of(config, legend):
    import jax

    task = TASKS[config.task]
    shapes = jax.eval_shape(task.build_model(config, legend).init_global, jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)


SAVED = {"ratings": save_ratings, "text": save_text}


@pytest.mark.parametrize("task", SAVED)
def test_damage_to_a_model_is_noticed(task, tmp_path):
    saved = SAVED[task](tmp_path / "good")
    files = sorted(path.name for path in (tmp_path / "good").iterdir())
    assert_same_bits(open_model(tmp_path / "good").params, saved.params)
    for case in range(CASES):
        rng = rng_of(case)
        bad = shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True)
        name = files[rng.integers(len(files))]
        (bad / name).write_bytes(mutate_bytes((bad / name).read_bytes(), rng))
        with pytest.raises(StorageError, match=name):
            open_model(bad)


@pytest.mark.parametrize("task", SAVED)
def test_a_hostile_model_whose_seal_is_right_is_refused_or_fits_together(task, tmp_path):
    SAVED[task](tmp_path / "good")
    good = json.loads((tmp_path / "good" / "model.json").read_text())
    for case in range(CASES):
        rng = rng_of(case)
        bad = shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True)
        facts = mutate_json({name: value for name, value in good.items() if name not in ("files", "sha256")}, rng)
        (bad / "model.json").unlink()
        try:
            write_folder_manifest(bad / "model.json", FORMAT, facts)
        except UnicodeEncodeError:
            continue  # nothing that could be in a file
        with contextlib.suppress(StorageError):
            assert open_model(bad).algorithm is not None


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_unusable_parameters_are_refused_unless_the_model_is_marked_as_failed(value, tmp_path):
    saved = save_ratings(tmp_path / "model")
    saved.params["item_embedding"][0, 0] = value
    saved.save(tmp_path / "model")
    with pytest.raises(StorageError, match="item_embedding"):
        open_model(tmp_path / "model")
    dataclasses.replace(saved, failed="it diverged").save(tmp_path / "model")
    assert open_model(tmp_path / "model").failed == "it diverged"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("counts", [3, -1, 0, 0, 0]),
        ("counts", [3, 1]),
        ("scale", [5.0, 1.0]),
        ("liking", {"bias": [0.0] * 5, "user_ridge": 0.0}),
        ("liking", {"bias": [0.0] * 4, "user_ridge": 1.0}),
    ],
)
def test_what_no_training_finds_is_refused(field, value, tmp_path):
    save_ratings(tmp_path / "model")
    facts = json.loads((tmp_path / "model" / "model.json").read_text())
    write_manifest(tmp_path / "model" / "model.json", FORMAT, {**facts, field: value})
    with pytest.raises(StorageError, match=field):
        open_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["model.json", "global.safetensors"])
@pytest.mark.parametrize("replace", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
def test_a_model_is_read_from_regular_files_only(name, replace, tmp_path):
    save_ratings(tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    replace(tmp_path / "model" / name)
    with pytest.raises(StorageError, match=name):
        open_model(tmp_path / "model")


# ---- run folders ----


def state(value):
    return {"server": {"w": np.full(5, value, np.float32)}, "kept": {"u": np.full((2, 2), value, np.float32)}}


def test_damage_to_a_checkpoint_is_noticed_and_damaged_metrics_do_no_harm(tmp_path):
    good = RunFolder(tmp_path / "good")
    for number in (1, 2, 3):
        good.record({"kind": "round", "round": number, "loss": 1 / number})
    good.checkpoint(3, state(3))
    files = sorted(path.relative_to(good.path) for path in good.path.rglob("*") if path.is_file())
    files = [file for file in files if file.name != ".fedrecon"]
    for case in range(CASES):
        rng = rng_of(case)
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        bad = RunFolder(shutil.copytree(good.path, tmp_path / "bad"))
        file = bad.path / files[rng.integers(len(files))]
        file.write_bytes(mutate_bytes(file.read_bytes(), rng))
        if file == bad.metrics_path:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                done, tree, _ = bad.restore(state(0))
            assert done == 3
            assert_same_bits(tree, state(3))
        else:
            with pytest.raises(StorageError, match=file.name):
                bad.restore(state(0))


def test_a_mutated_run_json_is_a_sentence(tmp_path):
    config = to_json(RatingsConfig(data=Data(source=str(tmp_path / "none.csv")), model=Factorization(dim=2)))
    facts = {"config": config, "versions": {}, "data": {"fingerprint": "0", "path": None}, "layout": {"jax_devices": 1}}
    for case in range(CASES):
        rng = rng_of(case)
        try:
            RunFolder(tmp_path / "run").describe(mutate_json(facts, rng))
        except UnicodeEncodeError:
            continue
        file = tmp_path / "run" / "run.json"
        if case % 3 == 0:
            file.write_bytes(mutate_bytes(file.read_bytes(), rng))
        with pytest.raises((StorageError, DataError)):  # at best, the data is not there
            users_of_run(tmp_path / "run")


def test_a_mutated_run_json_with_a_new_checksum_resumes_only_if_it_is_complete(tmp_path):
    config = RatingsConfig(data=Data(source="none.csv"), model=Factorization(dim=2))
    place = {"platform": "cpu", "jax_devices": 1, "block": 1, "sharing": 1}
    facts = {"config": to_json(config), "data": {"fingerprint": "0"}, "layout": place, "started": "", "resumed": []}
    for case in range(CASES):
        try:
            RunFolder(tmp_path / "run").describe(mutate_json(facts, rng_of(case)))
        except UnicodeEncodeError:
            continue
        with contextlib.suppress(StorageError, ConfigError):
            found = run_to_resume(config, RunFolder(tmp_path / "run"), resume=True)
            assert {type(found["layout"][name]) for name in ("jax_devices", "block", "sharing")} == {int}
