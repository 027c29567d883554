"""Settings: what a config file may say, what is refused, what makes two runs the same."""

import json
import re

import pytest

from fedrecon._src.app.cli.train import parse
from fedrecon._src.app.config import (
    ConfigError,
    Data,
    Factorization,
    NextWord,
    RatingsConfig,
    Reconstruct,
    Server,
    Split,
    TextConfig,
    TextData,
    config_from_json,
    differences,
    from_json,
    read_config,
    to_json,
)

CONFIG = RatingsConfig(
    data=Data(source="ratings.csv", user=0, fractions=(0.6, 0.2, 0.2)), server=Server(optimizer="fedyogi")
)


def test_settings_survive_json():
    assert from_json(RatingsConfig, json.loads(json.dumps(to_json(CONFIG))), "file") == CONFIG


def test_what_a_file_leaves_out_takes_its_default():
    found = from_json(RatingsConfig, {"data": {"source": "x"}, "model": {"dim": 3}}, "file")
    assert found == RatingsConfig(data=Data(source="x"), model=Factorization(dim=3))


def test_settings_of_text_have_the_defaults_of_text():
    default = TextConfig(data=TextData(source="x"))
    assert (default.rounds, default.sampling.clients_per_round, default.split.by_time) == (400, 5, True)
    assert (default.server.optimizer, default.server.learning_rate, default.update.learning_rate) == (
        "fedyogi",
        0.02,
        3.0,
    )
    found = config_from_json({"task": "text", "data": {"source": "x"}, "reconstruct": {"epochs": 2}}, "file")
    assert found == TextConfig(
        data=TextData(source="x"),
        reconstruct=Reconstruct(learning_rate=1.0, steps=100, epochs=2, batch_size=16),
    )
    assert config_from_json(json.loads(json.dumps(to_json(found))), "file") == found


def test_settings_that_name_no_task_are_of_ratings_unless_told():
    assert config_from_json({"data": {"source": "x"}}, "file") == RatingsConfig(data=Data(source="x"))
    assert config_from_json({"data": {"source": "x"}}, "file", "text") == TextConfig(data=TextData(source="x"))
    with pytest.raises(ConfigError, match="file: task is 'sound'; expected one of ratings, clicks, text"):
        config_from_json({"task": "sound", "data": {"source": "x"}}, "file")
    with pytest.raises(ConfigError, match="file: the config must be an object"):
        config_from_json([], "file")
    with pytest.raises(ConfigError, match=r"unknown setting 'model\.dim'"):
        config_from_json({"task": "text", "data": {"source": "x"}, "model": {"dim": 3}}, "file")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": {"source": "x"}, "ronds": 3}, "file: unknown setting 'ronds'; did you mean 'rounds'?"),
        ({"data": {"source": "x"}, "model": {"zzz": 3}}, "file: unknown setting 'model.zzz'; there are: dim, biases"),
        ({}, "file: the setting data is missing"),
        ({"data": {}}, "file: the setting data.source is missing"),
        ({"data": {"source": "x"}, "rounds": "many"}, 'file: rounds is "many"; expected a whole number'),
        ({"data": {"source": "x"}, "rounds": True}, "file: rounds is true; expected a whole number"),
        ({"data": {"source": "x"}, "jax_devices": 1.5}, "file: jax_devices is 1.5; expected a whole number or null"),
        ({"data": {"source": "x"}, "model": {"biases": 1}}, "file: model.biases is 1; expected true or false"),
        ({"data": {"source": "x"}, "server": {"optimizer": "lion"}}, 'server.optimizer is "lion"; expected one of sgd'),
        ({"data": {"source": "x", "fractions": [1, 2]}}, "data.fractions is [1, 2]; expected a list of 3 numbers"),
        ({"data": {"source": "x"}, "model": 3}, "file: model must be an object of settings, not 3"),
        ({"data": {"source": "x"}, "model": {"dim": 0}}, "file: dim is 0; it must be at least 1 and at most 65536"),
        ({"data": {"source": "x"}, "sampling": {"drop_out": 1.0}}, "file: sampling needs"),
    ],
)
def test_a_bad_setting_is_named(values, message):
    with pytest.raises(ConfigError) as caught:
        from_json(RatingsConfig, values, "file")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Data(source="x", max_examples=1), "max_examples is 1"),
        (lambda: Data(source="x", fractions=(0.0, 0.5, 0.5)), "training .above 0."),
        (lambda: Data(source="x", fractions=(0.5, 0.1, 0.1)), "sum to 1"),
        (lambda: TextData(source="x", max_sentences=1), "max_sentences is 1"),
        (lambda: NextWord(oov_buckets=0), "oov_buckets is 0"),
        (lambda: Split(train="thirds"), "split.train"),
        (lambda: Split(evaluate="none"), "says little"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_config_file_may_be_plain_or_the_description_of_a_run(tmp_path):
    plain, run = tmp_path / "plain.json", tmp_path / "run.json"
    plain.write_text(json.dumps({"rounds": 7}))
    run.write_text(json.dumps({"config": {"rounds": 7}, "versions": {}}))
    assert read_config(plain) == read_config(run) == {"rounds": 7}


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not valid JSON"), ("[1]", "must hold an object"), (None, "cannot be read")]
)
def test_a_config_file_that_is_none_is_named(tmp_path, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"config\.json {message}"):
        read_config(file)


def test_only_what_changes_parameters_counts_as_a_difference():
    old = to_json(CONFIG)
    new = {**old, "rounds": 9, "evaluate_every": 1, "checkpoint_every": 2}
    assert differences(old, new) == []
    changed = {**old, "seed": 1, "model": {**old["model"], "dim": 8}}
    assert differences(old, changed) == ["model.dim (was 50, now 8)", "seed (was 0, now 1)"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.max-examples", "1"], "--data.max-examples is 1"),
        (["--update.learning-rate", "nan"], "--update.learning-rate is nan"),
        (["--aggregate.secure"], "--aggregate.secure needs --aggregate.clip-norm"),
        (["--split.train", "redrawn-half", "--split.by-time"], "it cannot be used with --split.by-time"),
    ],
)
def test_messages_spell_settings_as_the_command_line_does(options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse(["x.csv", "--out", "y", *options])
    assert "_" not in str(caught.value)
