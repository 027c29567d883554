"""Settings: what a config file may say, what is refused, what makes two runs the same."""

import json
import os

import pytest

from fedrecon._src.app.cli import main
from fedrecon._src.recommend.config import (
    ConfigError,
    RatingsConfig,
    TextConfig,
    check_config,
    config_from_json,
    differences,
    read_config,
    to_json,
)
from fedrecon._src.recommend.settings import Data, Factorization, NextWord, Reconstruct, Server, SplitSettings, TextData

CONFIG = RatingsConfig(
    data=Data(source="ratings.csv", user=0, fractions=(0.6, 0.2, 0.2)), server=Server(optimizer="fedyogi")
)


def test_settings_survive_json():
    assert config_from_json(json.loads(json.dumps(to_json(CONFIG))), "file") == CONFIG


def test_what_a_file_leaves_out_takes_its_default():
    config = config_from_json({"data": {"source": "x"}, "model": {"dim": 3}}, "file")
    assert config == RatingsConfig(data=Data(source="x"), model=Factorization(dim=3))


def test_settings_of_text_have_the_defaults_of_text():
    default = TextConfig(data=TextData(source="x"))
    assert (default.rounds, default.sampling.clients_per_round, default.split.train) == (1000, None, "redrawn-.1")
    assert (default.server.optimizer, default.server.learning_rate, default.update.learning_rate) == (
        "fedyogi",
        0.04,
        3.0,
    )
    found = config_from_json({"task": "text", "data": {"source": "x"}, "reconstruct": {"epochs": 2}}, "file")
    assert found == TextConfig(
        data=TextData(source="x"),
        reconstruct=Reconstruct(solver="closed-form", learning_rate=1.0, steps=100, epochs=2, batch_size=16),
    )
    assert config_from_json(json.loads(json.dumps(to_json(found))), "file") == found


def test_settings_that_name_no_task_are_of_ratings_unless_the_caller_says_otherwise():
    assert config_from_json({"data": {"source": "x"}}, "file") == RatingsConfig(data=Data(source="x"))
    assert config_from_json({"data": {"source": "x"}}, "file", "text") == TextConfig(data=TextData(source="x"))
    with pytest.raises(ConfigError, match="object of settings"):
        config_from_json([], "file")


@pytest.mark.parametrize(
    ("values", "field", "value"),
    [
        ({"task": "sound"}, "task", "sound"),
        ({"task": "text", "model": {"dim": 3}}, "model.dim", 3),
        ({"ronds": 3}, "ronds", 3),
        ({"model": {"zzz": 3}}, "model.zzz", 3),
        ({"rounds": "many"}, "rounds", "many"),
        ({"rounds": True}, "rounds", True),
        ({"jax_devices": 1.5}, "jax_devices", 1.5),
        ({"model": {"biases": 1}}, "model.biases", 1),
        ({"server": {"optimizer": "lion"}}, "server.optimizer", "lion"),
        ({"server": {"decay_rounds": "some"}}, "server.decay_rounds", "some"),
        ({"data": {"fractions": [1, 2]}}, "data.fractions", [1, 2]),
        ({"model": 3}, "model", 3),
        ({"model": {"dim": 0}}, "model.dim", 0),
        ({"aggregate": {"secure": True}}, "aggregate.secure", True),
        ({"privacy": {"delta": 0.1}}, "privacy.delta", 0.1),
        ({"model": {"round_zero": True}}, "model.round_zero", True),
        ({"split": {"train": "thirds"}}, "split.train", "thirds"),
        ({"split": {"evaluate": "none"}}, "split.evaluate", "none"),
    ],
)
def test_an_error_carries_the_setting_and_its_value(values, field, value):
    with pytest.raises(ConfigError) as caught:
        config_from_json(values, "file")
    assert (caught.value.source, caught.value.field, caught.value.value) == ("file", field, value)
    assert f"`{field}`" in str(caught.value)


def test_a_misspelled_setting_is_answered_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"did you mean rounds\?"):
        config_from_json({"ronds": 3}, "file")
    with pytest.raises(ConfigError, match=r"there are: optimizer, .*decay"):
        config_from_json({"server": {"xyz": 3}}, "file")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (RatingsConfig(data=Data(source="x", max_examples=1)), "data.max_examples"),
        (RatingsConfig(data=Data(source="x", fractions=(0.0, 0.5, 0.5))), "data.fractions"),
        (RatingsConfig(data=Data(source="x", fractions=(0.5, 0.1, 0.1))), "data.fractions"),
        (TextConfig(data=TextData(source="x", max_sentences=1)), "data.max_sentences"),
        (TextConfig(model=NextWord(oov_buckets=0)), "model.oov_buckets"),
        (TextConfig(reconstruct=Reconstruct(solver="least-squares")), "reconstruct.solver"),
        (RatingsConfig(split=SplitSettings(train="redrawn-half", by_time=True)), "split.train"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, field):
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    assert caught.value.field == field


def test_a_config_file_may_be_plain_or_the_description_of_a_run(tmp_path):
    plain, run = tmp_path / "plain.json", tmp_path / "run.json"
    plain.write_text(json.dumps({"rounds": 7}))
    run.write_text(json.dumps({"config": {"rounds": 7}, "versions": {}}))
    assert read_config(plain) == read_config(run) == {"rounds": 7}


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not valid JSON"), ("[1]", "must be an object"), (None, "is missing")]
)
def test_a_config_file_that_is_none_is_named(tmp_path, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"config\.json:? {message}"):
        read_config(file)


def test_only_what_changes_parameters_counts_as_a_difference():
    old = to_json(CONFIG)
    new = {**old, "rounds": 9, "evaluate_every": 1, "checkpoint_every": 2}
    assert differences(old, new) == {}
    changed = {**old, "seed": 1, "model": {**old["model"], "dim": 8}}
    assert differences(old, changed) == {"model.dim": (50, 8), "seed": (0, 1)}


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (["--data.max-examples", "1"], "--data.max-examples"),
        (["--update.learning-rate", "nan"], "--update.learning-rate"),
        (["--aggregate.secure"], "--aggregate.secure"),
        (["--split.train", "redrawn-half", "--split.by-time"], "--split.train"),
        (["--preset", "quick", "--task", "text"], "--preset"),
    ],
)
def test_errors_of_options_name_the_flag(options, flag, capsys):
    assert main(["train", "x.csv", "--out", "y", *options]) == 2
    assert f"fedrecon: {flag}: " in capsys.readouterr().err


def test_a_config_file_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(ConfigError, match="must be a regular file"):
        read_config(tmp_path / "run.json")
