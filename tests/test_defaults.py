"""Training without options: presets, round zero saved with the model, counts, baselines, recommendations to trust."""

import dataclasses
import json

import numpy as np
import pytest

import fedrecon as fr
from fedrecon._src.app.cli import main
from fedrecon._src.app.cli.train import parse
from fedrecon._src.recommend.config import (
    DEFAULT,
    PRESETS,
    Aggregate,
    Data,
    Factorization,
    RatingsConfig,
    TextConfig,
    TextData,
    config_from_json,
    to_json,
)
from fedrecon._src.recommend.evaluation_table import compare_with_baselines
from fedrecon._src.recommend.round_zero import estimate_ratings
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.simulation.evaluation import Evaluation

pytestmark = pytest.mark.slow

SMALL = ["--model.dim", "2", "--rounds", "4", "--evaluate-every", "0", "--jax-devices", "1"]


def write(path, users=40, items=15, seed=0):
    """Write counts: long-tailed, more for some users and items than for others; item 14 is had by one user."""
    rng = np.random.default_rng(seed)
    busy, popular = rng.normal(0, 0.7, users), rng.normal(0, 0.7, items)
    lines = ["user,item,rating"]
    for user in range(users):
        for item in rng.choice(items - 1, 10, replace=False):
            lines.append(f"u{user},{item},{int(np.exp(1.5 + busy[user] + popular[item] + rng.normal(0, 0.5)))}")
    path.write_text("\n".join([*lines, f"u0,{items - 1},5000"]) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("defaults")
    counts = write(folder / "counts.csv")
    assert main(["train", str(counts), "--out", str(folder / "run"), *SMALL]) == 0
    return counts, folder / "run"


# ---- presets ----


def test_the_paper_is_a_preset_and_no_longer_the_default():
    settings = parse(["x.csv", "--out", "y", "--preset", "paper"]).settings
    assert settings == RatingsConfig(data=Data(source="x.csv"), model=Factorization(least_ratings=5))
    assert parse(["x.csv", "--out", "y"]).settings.model.round_zero
    assert parse(["x.csv", "--out", "y", "--preset", "quick"]).settings.rounds == PRESETS["ratings"]["quick"].rounds


def test_text_has_its_own_defaults_and_presets():
    settings = parse(["x", "--task", "text", "--out", "y"]).settings
    clipped = Aggregate(weigh="tokens", clip_quantile="auto", clip_times=3.0)
    assert settings == TextConfig(data=TextData(source="x"), aggregate=clipped)
    paper = parse(["x", "--task", "text", "--out", "y", "--preset", "paper"]).settings
    assert (paper.model.local, paper.model.ngrams, paper.reconstruct.solver) == (
        "oov_embedding",
        False,
        "gradient-descent",
    )
    with pytest.raises(ValueError, match="preset"):
        parse(["x", "--task", "text", "--out", "y", "--preset", "quick"])


def test_a_config_file_builds_on_the_defaults(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"model": {"dim": 3}}))
    settings = parse(["x.csv", "--out", "y", "--config", str(file)]).settings
    assert (settings.model.dim, settings.model.round_zero) == (3, True)


def test_settings_of_round_zero_survive_json():
    for preset in PRESETS["ratings"].values():
        assert config_from_json(json.loads(json.dumps(to_json(preset))), "file") == preset


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.no-biases"], "--model.round-zero"),
        (["--model.no-round-zero"], "--model.item-traits"),
        (["--preset", "fast"], "--preset"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message, capsys):
    assert main(["train", "x.csv", "--out", "y", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "followed"),
    [
        ([], 0.5),
        (["--preset", "quick"], 0.5),
        (["--preset", "paper"], None),
        (["--aggregate.clip-norm", "1"], None),
        (["--aggregate.clip-quantile", "None"], None),
        (["--aggregate.clip-quantile", "0.8"], 0.8),
        (["--aggregate.secure", "--aggregate.clip-norm", "1"], None),
    ],
)
def test_norms_are_clipped_unless_an_option_says_otherwise(options, followed):
    assert parse(["x.csv", "--out", "y", *options]).settings.aggregate.followed == followed


# ---- a hostile client ----


def test_a_client_with_ratings_of_1000_does_not_harm_a_run_without_options(tmp_path, capsys):
    ratings = fr.data.synthetic_ratings(num_users=80, num_items=40, mean_ratings=16, seed=1)
    train, _, test = ratings.split_clients(0.76, 0.0, 0.24, seed=0)
    hostile = str(train.names[0])
    lines = ["user,item,rating"]
    for user in range(80):
        mine, bad = ratings[user], str(user) == hostile
        pairs = list(zip(mine["item"], mine["rating"], strict=True))[: 10 if bad else None]
        lines += [f"{user},{item},{1000 if bad else rating}" for item, rating in pairs]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    run = tmp_path / "run"
    command = ["train", str(tmp_path / "ratings.csv"), "--out", str(run), *SMALL, "--rounds", "20"]
    assert main([*command, "--data.fractions", "0.76", "0", "0.24"]) == 0

    told, found = capsys.readouterr(), json.loads((run / "run.json").read_text())
    assert "far outside the usual range: 10, left out" in told.err
    assert "look like counts" not in told.err
    assert (found["test"]["clients"], found["test"]["diverged"]) == (len(test), 0)
    assert found["test"]["micro"]["rmse"] < 1.02 * found["test"]["baselines"]["item + user bias"]["rmse"]
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rounds = [record for record in rounds if record["kind"] == "round"]
    assert not any(record["skipped"] for record in rounds)
    assert found["updates"]["clipped"] == sum(record["clipped"] for record in rounds) >= 10
    updates = found["updates"]
    assert f"{updates['learned_from']:,} learned from, {updates['clipped']} of them clipped" in told.out


# ---- a run on counts ----


def test_what_was_read_and_decided_is_said(trained, tmp_path, capsys):
    counts, _ = trained
    capsys.readouterr()
    assert main(["train", str(counts), "--out", str(tmp_path / "run"), *SMALL, "--rounds", "1"]) == 0
    said = capsys.readouterr().err
    assert "users: 40; items: 15; ratings: 401" in said
    assert "these look like counts, so the model learns log(1+x); --data.transform none turns this off" in said
    assert " train, " in said


def test_what_round_zero_found_is_saved_with_the_model(trained):
    counts, run = trained
    ratings = fr.data.load(counts).shuffle(0).cap(300)
    train = ratings.split_clients(0.8, 0.1, 0.1, seed=0)[0]
    zero = estimate_ratings(train, 15)
    assert zero.transform == "log1p"
    model = open_model(run)
    scale = model.config.model.scale
    assert (scale.transform, scale.mean, scale.noise) == (
        "log1p",
        pytest.approx(zero.mean, rel=1e-5),
        pytest.approx(zero.noise, rel=1e-4),
    )
    np.testing.assert_allclose(scale.trait_ridges, zero.trait_ridge, rtol=1e-3)
    np.testing.assert_allclose(model.params["shared"]["item_bias"], zero.item_bias, atol=1e-4)
    np.testing.assert_allclose(model.params["shared"]["item_traits"], zero.traits(), atol=1e-3)
    np.testing.assert_array_equal(model.legend.counts, zero.item_count)


def test_a_model_is_rebuilt_from_its_folder(trained, capsys):
    _, run = trained
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((run / "run.json").read_text())["test"]
    assert set(found["baselines"]) == {"global mean", "item mean", "item + user bias"}


def test_a_model_alone_knows_the_baselines_of_the_run(trained):
    counts, run = trained
    model = open_model(run)
    test = fr.data.load(counts).shuffle(0).cap(300).split_clients(0.8, 0.1, 0.1, seed=0)[2]
    alone = model.task.baselines(model.config, model.legend, None, model.task.view(model.config, test))
    whole = json.loads((run / "run.json").read_text())["test"]["baselines"]
    for name in ("global mean", "item + user bias"):
        assert alone[name]["rmse"] == pytest.approx(whole[name]["rmse"], rel=1e-4)


def test_a_run_whose_rate_comes_down_over_all_rounds_goes_on_to_no_others(trained, capsys):
    counts, run = trained
    again = ["train", str(counts), "--resume", str(run), *SMALL]
    assert main([*again, "--rounds", "8"]) == 2
    assert "--rounds: must stay 4" in capsys.readouterr().err


def test_a_model_that_loses_to_a_baseline_is_reported():
    assert compare_with_baselines(with_rmse(0.9), TABLE, DEFAULT) is None
    told = compare_with_baselines(with_rmse(1.1), TABLE, DEFAULT)
    assert "the model loses to a baseline: 'item + user bias' has RMSE 1.0000, the model 1.1000" in told
    assert compare_with_baselines(with_rmse(9.0), {}, DEFAULT) is None


def test_a_difference_on_few_users_is_said_to_be_within_chance():
    assert compare_with_baselines(with_rmse(0.9, clients=1), TABLE, DEFAULT) is None
    told = compare_with_baselines(with_rmse(1.1, clients=1), TABLE, DEFAULT)
    assert "For so few users (1), this difference is within chance." in told
    assert "loses" not in told
    assert "Try" not in told


def test_a_losing_model_with_other_settings_is_advised_to_use_the_defaults():
    found = with_rmse(1.1)
    assert "--preset default" not in compare_with_baselines(found, TABLE, DEFAULT)
    file = dataclasses.replace(DEFAULT, data=dataclasses.replace(DEFAULT.data, source="x", fractions=(0.6, 0.2, 0.2)))
    assert "--preset default" not in compare_with_baselines(found, TABLE, dataclasses.replace(file, seed=3))
    assert "Try --preset default, more --rounds" in compare_with_baselines(found, TABLE, PRESETS["ratings"]["paper"])
    assert "Try --preset default, more --rounds" in compare_with_baselines(
        found, TABLE, dataclasses.replace(file, rounds=20)
    )


TABLE = {"global mean": {"rmse": 2.0}, "item + user bias": {"rmse": 1.0}}


def with_rmse(value, clients=10):
    return Evaluation("recon", clients, 0, 2, {"rmse": value}, {}, {}, {})


# ---- recommendations ----


def test_recommendations_stay_in_the_scale_and_need_ratings(trained):
    model = fr.recommend.load(trained[1])
    person = {0: 3, 1: 90, 2: 2}
    with pytest.warns(UserWarning, match="left out 1 of 4 items.*: unheard of"):
        found = model.recommend(person | {"unheard of": 1}, 15)
    assert {one.item for one in found} == set(range(3, 14))  # item 14 has a single rating
    low, high = model.saved.task.ends(model.saved.config, model.items)
    assert all(low <= one.rating <= high for one in found)
    assert 14 in {one.item for one in model.recommend(person, 15, least_ratings=0)}


def test_counts_may_be_above_those_of_training_and_predictions_are_not(trained):
    model = fr.recommend.load(trained[1])
    high = max(model.saved.task.ends(model.saved.config, model.items)[1], model.items.scale[1])
    assert model.predict({0: 3, 1: 10 * high**2}).max() <= high
    with pytest.raises(ValueError, match="rating -1 is outside of the scale that the model was trained on"):
        model.predict({0: 3, 1: -1})


def test_many_people_get_what_each_gets_alone(trained):
    model = fr.recommend.load(trained[1])
    people = [{0: 3, 1: 5}, {}, {k: k + 1.0 for k in range(9)}]
    together = model.predict(people)
    assert together.shape == (3, 15)
    for person, row in zip(people, together, strict=True):
        np.testing.assert_allclose(model.predict(person), row, rtol=1e-4)
    np.testing.assert_allclose(model.predict(people[0], [7, 2]), together[0, [7, 2]], rtol=1e-4)
    for person, found in zip(people, model.recommend(people, 3), strict=True):
        assert [one.item for one in found] == [one.item for one in model.recommend(person, 3)]


def test_predictions_are_those_of_the_library(trained):
    model = fr.recommend.load(trained[1])
    saved, person = model.saved, {0: 3.0, 1: 5.0, 4: 20.0}
    columns = {"item": np.array([0, 1, 4], np.int32), "rating": np.log1p(np.array([3, 5, 20], np.float32))}
    local = fr.reconstruct(saved.algorithm, saved.params, columns, seed=saved.config.seed)
    expected = fr.predict(saved.algorithm.model, saved.params, local, {"item": np.arange(15, dtype=np.int32)})
    np.testing.assert_allclose(model.predict(person), np.expm1(expected), rtol=1e-3)


def test_an_unknown_item_is_named(trained):
    with pytest.raises(ValueError, match="does not know the item 'x'"):
        fr.recommend.load(trained[1]).predict({0: 1.0}, ["x"])


def test_items_have_the_titles_of_a_file(trained, tmp_path, capsys):
    counts, run = trained
    (tmp_path / "titles.csv").write_text("item,title\n3,Heat\n4,Heat\n")
    capsys.readouterr()
    argv = ["recommend", str(run), "--ratings", str(counts), "--user", "u1", "-n", "15", "--json"]
    assert main([*argv, "--titles", str(tmp_path / "titles.csv")]) == 0
    found = json.loads(capsys.readouterr().out)["users"][0]["recommendations"]
    titles = [one["title"] for one in found]
    assert len(set(titles)) == len(titles)
    assert all("Heat" in one["title"] for one in found if one["item"] in (3, 4))


# ---- compiled once ----


def test_reconstruction_is_compiled_once_for_lengths_alike(trained):
    from fedrecon._src.simulation import evaluation

    saved = open_model(trained[1])
    algorithm, params = saved.algorithm, saved.params

    def person(n):
        return {"item": np.arange(n, dtype=np.int32), "rating": np.ones(n, np.float32)}

    fr.reconstruct(algorithm, params, person(5))
    before = evaluation._compile_reconstruction(algorithm)[1]._cache_size()
    for n in (6, 7, 8):
        fr.reconstruct(algorithm, params, person(n))
    assert evaluation._compile_reconstruction(algorithm)[1]._cache_size() == before
