"""Clicks from a file to recommendations: what counts as a click, who is measured how, and what stands beside it."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import fedrecon as fr
from fedrecon._src.app.cli import main
from fedrecon._src.app.tuning import SPACES
from fedrecon._src.core.display import silent
from fedrecon._src.data.sources import DataError
from fedrecon._src.models.factorization import ranking_params
from fedrecon._src.recommend import ranking
from fedrecon._src.recommend.cold_start import blend_popularity, exceeds_chance, repeat_shuffled
from fedrecon._src.recommend.config import ClickData, ClicksConfig, Reconstruct, change_settings, check_config
from fedrecon._src.recommend.default_training import prepare_training
from fedrecon._src.recommend.evaluation_table import compare_with_baselines
from fedrecon._src.recommend.settings import Ranking
from fedrecon._src.recommend.task import Users
from fedrecon._src.recommend.tasks import CLICKS, build_algorithm
from fedrecon._src.recommend.tasks.clicks import (
    LENGTHS,
    PRIORS,
    choose_start,
    largest_dim,
    prior_of,
    rank_for_judges,
    upload_bytes,
)
from fedrecon._src.simulation.evaluation import Evaluation

OPTIONS = ["--rounds", "60", "--jax-devices", "1", "--model.dim", "4", "--data.fractions", "0.6", "0.2", "0.2"]
OPTIONS += ["--server.learning-rate", "0.05", "--evaluate-every", "0"]


def rows_of_two_kinds(people=60, seed=0):
    """Two kinds of people, each with items of their own half; counts and times are noise."""
    rng = np.random.default_rng(seed)
    for user, kind in enumerate(rng.integers(0, 2, people)):
        for item in rng.permutation(10)[: rng.integers(5, 9)]:
            yield f"u{user}", f"i{10 * kind + item}", rng.integers(1, 6), rng.integers(0, 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with `clicks.csv` and the run that was trained on it."""
    folder = tmp_path_factory.mktemp("clicks")
    lines = [",".join(map(str, row)) for row in rows_of_two_kinds()]
    (folder / "clicks.csv").write_text("\n".join(["user,item,count,time", *lines]) + "\n")
    assert main(["train", str(folder / "clicks.csv"), "--task", "clicks", "--out", str(folder / "run"), *OPTIONS]) == 0
    return folder


def load(path, **options):
    config = ClicksConfig(data=ClickData(source=str(path), **options))
    return config, CLICKS.load(config, silent)


def test_training_ends_with_ranking_beside_baselines(folder, capsys):
    test = json.loads((folder / "run" / "run.json").read_text())["test"]
    names = {"ndcg@100", "recall@20", "recall@50", "hit@20", "coverage@20"}
    assert names <= set(test["micro"])
    assert set(test["baselines"]) == {"popularity", "item kNN", "EASE"}
    names |= {f"after {k}" for k in (0, 1, 2, 5, 10, 20)}
    assert all(set(row) == names for row in test["baselines"].values())
    assert test["micro"]["ndcg@100"] > test["baselines"]["popularity"]["ndcg@100"]


@pytest.mark.slow
def test_popularity_is_kept_where_no_round_improves_on_it(tmp_path, capsys):
    """What people have is drawn by popularity alone, so there is nothing else to learn."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(2, 102)
    lines = [f"u{u},i{i}" for u in range(200) for i in rng.choice(100, 3, replace=False, p=share / share.sum())]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item", *lines]) + "\n")
    command = ["train", str(tmp_path / "clicks.csv"), "--task", "clicks", "--out", str(tmp_path / "run"), *OPTIONS]
    assert main(command) == 0
    out = capsys.readouterr()
    assert "kept popularity: the trained model is not clearly better for validation users" in out.out + out.err
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    test, popularity = facts["test"]["micro"], facts["test"]["baselines"]["popularity"]
    assert test["ndcg@100"] == pytest.approx(popularity["ndcg@100"], abs=0.01), "but for the order of ties"
    model = fr.recommend.load(tmp_path / "run")
    counts = dict(zip(model.saved.legend.ids, model.saved.legend.counts, strict=True))
    found = [counts[one.item] for one in model.recommend(["i3"], 5)]
    assert found == sorted((count for item, count in counts.items() if item != "i3"), reverse=True)[:5]


@pytest.mark.parametrize("number", [4, 40], ids=["too few to choose a blend", "enough to choose a blend"])
def test_popularity_counts_where_the_model_knows_less(number):
    """Half of the people have items 0 and 1, which are the most popular, and half have 2 and 3."""
    counts = np.array([9, 8, 2, 1])
    clients = fr.Clients.from_columns(
        {"item": np.tile([0, 1, 2, 3], number)}, client=np.repeat(np.arange(2 * number), 2)
    )

    def blend(rows, people):
        params = fr.models.ranking_params(np.eye(2, dtype=np.float32)[rows], counts)
        return blend_popularity(params, people, fr.split.half(), 0.4, 1.0)["popularity_weight"].tolist()

    assert blend([0, 0, 1, 1], clients) == [1, 0, 0, 0, 0, 0], "0 and 1 go together, and so do 2 and 3"
    first = clients.take(np.arange(0, 2 * number, 2))
    assert blend([0, 0, 1, 1], first)[1:] == 5 * [1.0], "the model is right, but popularity is as well"
    assert blend([0, 1, 0, 0], first)[1:] == 5 * [1.0], (
        "popularity ranks better than a model in which 1 goes with nothing"
    )


def test_whoever_gets_popularity_alone_is_measured_with_the_others(folder):
    config, clicks = load(folder / "clicks.csv", fractions=(0.6, 0.2, 0.2))
    ready = prepare_training(change_settings(config, {"rounds": 1}), clicks)
    params = jax.tree.map(np.array, ready.model.init_global(jax.random.key(0)))
    params["popularity_weight"][:4] = 1  # of people with less than 10 items
    people = fr.Clients.from_columns({"item": np.arange(60) % 20}, client=np.repeat([0, 1, 2, 3], [4, 6, 25, 25]))
    algorithm = build_algorithm(ready.config, ready.model, 100)
    found = fr.evaluate(algorithm, params, people, split=fr.split.fraction(0.8))
    assert (found.clients, found.diverged) == (4, 0)


def test_evaluation_of_a_run_gives_what_training_gave(folder, capsys):
    assert main(["evaluate", str(folder / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    test = json.loads((folder / "run" / "run.json").read_text())["test"]
    assert found["micro"] == pytest.approx(test["micro"], abs=1e-5)
    assert found["baselines"] == test["baselines"]


def test_a_model_ranks_as_the_ranking_module_says(folder):
    config, clicks = load(folder / "clicks.csv", fractions=(0.6, 0.2, 0.2))
    test = CLICKS.divide(config, clicks, silent).test
    saved = fr.recommend.load(folder / "run").saved
    division = ranking.split_items(test, fr.split.fraction(0.8))
    found = ranking.rank(ranking.score_by_model(saved.algorithm, saved.params), division, clicks.num_items)
    told = json.loads((folder / "run" / "run.json").read_text())["test"]["micro"]
    assert found.metrics == pytest.approx({name: told[name] for name in found.metrics}, abs=1e-5)


def test_the_table_of_another_file_has_popularity_beside_the_model(folder, capsys):
    assert main(["evaluate", str(folder / "run"), "--clicks", str(folder / "clicks.csv")]) == 0
    out = capsys.readouterr().out
    assert "mean over users" in out
    assert "baseline: popularity" in out
    assert "macro" not in out


def test_recommendations_are_of_what_a_person_does_not_have(folder, capsys):
    (folder / "mine.csv").write_text("user,item\nme,i1\nme,i2\nme,i3\n")
    assert main(["recommend", str(folder / "run"), "--clicks", str(folder / "mine.csv"), "-n", "4", "--json"]) == 0
    [me] = json.loads(capsys.readouterr().out)["users"]
    assert me["clicked"] == 3
    items = [one["item"] for one in me["recommendations"]]
    assert set(items) <= {f"i{k}" for k in range(10)} - {"i1", "i2", "i3"}
    in_python = fr.recommend.load(folder / "run").recommend({"i1": 1, "i2": 1, "i3": 1}, 4)
    assert [one.item for one in in_python] == items


@pytest.mark.parametrize("kind", [list, tuple, set, np.array, iter], ids=lambda kind: kind.__name__)
def test_items_alone_are_a_person(folder, kind):
    model, mine = fr.recommend.load(folder / "run"), ["i1", "i2", "i3"]
    expected = model.recommend(dict.fromkeys(mine, 1), 4)
    assert model.recommend(kind(mine), 4) == expected
    first, second = model.recommend([kind(mine), kind(["i11"])], 4)
    assert [one.item for one in first] == [one.item for one in expected]
    assert len(second) == 4


def test_an_empty_list_of_users_gets_nothing_and_a_user_without_items_something(folder):
    model = fr.recommend.load(folder / "run")
    assert model.recommend([]) == []
    assert model.predict([]).shape == (0, len(model.items))
    assert len(model.recommend(set(), 4)) == len(model.recommend({}, 4)) == 4


@pytest.mark.parametrize("given", [["i1", {"i2": 1}], [["i1"], "i2"], "i1", 7], ids=str)
def test_people_that_are_neither_items_nor_lists_of_them_are_refused(folder, given):
    with pytest.raises(TypeError, match="`people`"):
        fr.recommend.load(folder / "run").recommend(given)


def test_a_model_of_clicks_says_in_one_line_what_it_is(folder):
    model = fr.recommend.load(folder / "run")
    assert repr(model) == "Recommender(20 items, trained on clicks)"


@pytest.mark.parametrize("given", [["--ratings", "mine.csv"], []])
def test_a_model_of_clicks_asks_for_clicks(folder, capsys, given):
    given = [str(folder / word) if word.endswith("csv") else word for word in given]
    assert main(["recommend", str(folder / "run"), *given]) == 2
    assert "--clicks" in capsys.readouterr().err


@pytest.mark.slow
def test_tuning_tries_settings_on_validation_users(folder, capsys):
    out = folder / "tuned"
    small = [*OPTIONS, "--rounds", "4", "--trials", "1"]
    assert main(["tune", str(folder / "clicks.csv"), "--task", "clicks", "--out", str(out), *small]) == 0
    [trial] = json.loads((out / "trials.json").read_text())
    assert set(trial["values"]) == set(SPACES["clicks"])
    assert 0 < trial["value"] <= 1
    assert "NDCG@100 on validation users" in (out / "report.md").read_text()
    assert json.loads((out / "config.json").read_text())["task"] == "clicks"


# ---- what counts as a click ----


def test_files_need_no_counts(tmp_path):
    (tmp_path / "two.csv").write_text("user,item\na,x\na,y\nb,x\n")
    clicks = load(tmp_path / "two.csv")[1]
    np.testing.assert_array_equal(clicks.columns["rating"], [1, 1, 1])
    (tmp_path / "plain.tsv").write_text("7\t1\n7\t2\n8\t1\n")
    assert load(tmp_path / "plain.tsv")[1].num_examples == 3
    (tmp_path / "quoted.csv").write_text('user,item\n"a, b",x\nb,x\n')  # read row by row
    np.testing.assert_array_equal(load(tmp_path / "quoted.csv")[1].columns["rating"], [1, 1])


@pytest.mark.slow
def test_columns_of_clicks_are_recognised_and_said(tmp_path, capsys):
    lines = [f"u{user},{item},{1 + user % 3}" for user in range(20) for item in range(8) if (user + item) % 3]
    (tmp_path / "plays.csv").write_text("\n".join(["Listener,artist_id,plays", *lines]))
    clicks = load(tmp_path / "plays.csv")[1]
    assert clicks.columns["rating"].max() == 3
    assert load(tmp_path / "plays.csv", rating=None)[1].columns["rating"].max() == 1
    run, file = str(tmp_path / "run"), str(tmp_path / "plays.csv")
    assert main(["train", file, "--task", "clicks", "--out", run, "--rounds", "1", "--model.dim", "2"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "Columns taken: 'Listener' for user, 'artist_id' for item, 'plays' for rating." in said
    assert main(["recommend", run, "--clicks", file, "--user", "u1", "-n", "1"]) == 0
    assert main(["evaluate", run, "--clicks", file, "--json"]) == 0


def test_two_columns_of_counts_are_an_error_that_names_the_option(tmp_path, capsys):
    (tmp_path / "plays.csv").write_text("user,item,plays,weight\na,x,1,2\n")
    assert main(["train", str(tmp_path / "plays.csv"), "--task", "clicks", "--out", str(tmp_path / "run")]) == 1
    assert "'plays' and 'weight' could each be the rating column; name it with" in (capsys.readouterr().err)


def test_parquet_files_need_no_counts(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"user": ["a", "a", "b"], "item": [3, 4, 3]}), tmp_path / "clicks.parquet")
    clicks = load(tmp_path / "clicks.parquet")[1]
    np.testing.assert_array_equal(clicks.columns["rating"], [1, 1, 1])


def test_low_ratings_are_no_clicks(tmp_path):
    (tmp_path / "rated.csv").write_text("user,item,rating\na,x,5\na,y,3\na,z,4\nb,y,2\nb,x,4\n")
    clicks = load(tmp_path / "rated.csv", at_least=4)[1]
    assert clicks.item_ids.tolist() == ["x", "z"]
    assert clicks.skipped["low_ratings"] == 2


def test_rows_of_an_event_log_add_up(tmp_path):
    (tmp_path / "log.csv").write_text("user,item,time\na,x,1\na,x,2\na,y,3\na,x,4\n")
    clicks = load(tmp_path / "log.csv", at_least=2)[1]
    assert clicks.item_ids.tolist() == ["x"]
    np.testing.assert_array_equal(clicks.columns["rating"], [3])


def test_counts_weigh_by_their_logarithm(tmp_path):
    (tmp_path / "counts.csv").write_text("user,item,count\na,x,1\na,y,20\n")
    config, clicks = load(tmp_path / "counts.csv")
    config = ClicksConfig(data=config.data, model=type(config.model)(counts="log"))
    np.testing.assert_allclose(CLICKS.view(config, clicks).columns["weight"], [1, 1 + np.log(20)], rtol=1e-6)
    (tmp_path / "zero.csv").write_text("user,item,count\na,x,0\na,y,20\n")
    with pytest.raises(DataError, match="count of 0"):
        CLICKS.view(config, load(tmp_path / "zero.csv")[1])


def test_evaluated_users_keep_all_items(folder):
    config, clicks = load(folder / "clicks.csv", fractions=(0.6, 0.2, 0.2), max_examples=3)
    users = CLICKS.divide(config, clicks, silent)
    assert users.train.sizes.max() == 3
    assert users.test.sizes.max() > 3


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="`reconstruct`"):
        check_config(ClicksConfig(reconstruct=Reconstruct(steps=3)))
    with pytest.raises(ValueError, match=r"`split\.train`"):
        check_config(ClicksConfig(split=dataclasses.replace(ClicksConfig().split, train="none")))


# ---- the verdict ----


def evaluation(ndcg, clients=30):
    return Evaluation("recon", clients, 0, 99, {"ndcg@100": ndcg, "loss": 0.5}, {}, {}, {})


def test_the_table_says_so_when_the_model_loses():
    table = {"popularity": {"ndcg@100": 0.2}, "EASE": {"ndcg@100": 0.4}}
    assert compare_with_baselines(evaluation(0.41), table, ClicksConfig()) is None
    told = compare_with_baselines(evaluation(0.3), table, ClicksConfig())
    assert "'EASE' has NDCG@100 0.4000, the model 0.3000" in told


def test_that_a_baseline_needs_all_data_in_one_place_is_said_of_the_one_that_won():
    table = {"popularity": {"ndcg@100": 0.2}, "EASE": {"ndcg@100": 0.4}}
    remark = "It needs everybody's data in one place"
    assert remark in compare_with_baselines(evaluation(0.3), table, ClicksConfig())
    assert remark not in compare_with_baselines(evaluation(0.1), table | {"EASE": {"ndcg@100": 0.15}}, ClicksConfig())


def test_few_users_cannot_tell_a_model_from_a_baseline():
    told = compare_with_baselines(evaluation(0.3, clients=9), {"popularity": {"ndcg@100": 0.4}}, ClicksConfig())
    assert "For so few users (9), this difference is within chance" in told
    assert "loses" not in told


def test_baselines_that_pair_items_are_left_out_where_there_are_many(folder, monkeypatch):
    monkeypatch.setattr("fedrecon._src.recommend.tasks.clicks.MOST_ITEMS", 3)
    config, clicks = load(folder / "clicks.csv", fractions=(0.6, 0.2, 0.2))
    users = CLICKS.divide(config, clicks, silent)
    found = CLICKS.baselines(config, CLICKS.legend(config, clicks), users, users.test)
    assert list(found) == ["popularity", "EASE (needs 0 GB, 0 min)"]
    assert not found["EASE (needs 0 GB, 0 min)"], "what it would cost stands beside the model"


def test_popularity_ranks_for_new_users_and_the_model_wins_after_some_examples(folder):
    test = json.loads((folder / "run" / "run.json").read_text())["test"]
    assert test["micro"]["after 0"] == pytest.approx(test["baselines"]["popularity"]["after 0"], abs=1e-6)
    assert test["micro"]["after 5"] > test["baselines"]["popularity"]["after 5"]


@pytest.mark.slow
def test_a_failed_training_on_clicks_is_reported_and_its_model_refused(folder, tmp_path, capsys):
    command = ["train", str(folder / "clicks.csv"), "--task", "clicks", "--out", str(tmp_path / "run"), *OPTIONS]
    assert main([*command, "--rounds", "4", "--server.learning-rate", "1e38"]) == 3
    assert "training failed: " in capsys.readouterr().err
    assert main(["recommend", str(tmp_path / "run"), "--clicks", str(folder / "clicks.csv")]) == 1
    assert "cannot be used because its training failed" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["failed"]


def test_each_repetition_has_the_items_of_all_clients_in_another_order():
    columns = {"item": np.arange(60), "time": np.arange(60) / 60}
    clients = fr.Clients.from_columns(columns, client=np.repeat([0, 1], [20, 40]))
    repeated = repeat_shuffled(clients, 3)
    assert repeated.sizes.tolist() == [20, 40] * 3
    orders = [repeated[number]["item"].tolist() for number in (0, 2, 4)]
    assert orders[0] == list(range(20))
    assert all(sorted(order) == orders[0] for order in orders)
    assert orders[0] != orders[1] != orders[2]
    np.testing.assert_allclose(repeated.columns["time"], repeated.columns["item"] / 60)


def clicks_of_two_kinds(people):
    """Return people who have seven of ten items of their kind."""
    rng = np.random.default_rng(0)
    item = np.concatenate([rng.permutation(10)[:7] + 10 * kind for kind in rng.integers(0, 2, people)])
    return fr.Clients.from_columns({"item": item}, client=np.repeat(np.arange(people), 7))


def test_the_usual_length_is_changed_while_that_ranks_clearly_better():
    config, valid = ClicksConfig(), clicks_of_two_kinds(20)
    users = Users(valid, valid, valid)
    # Only the second dimension tells the kinds apart, and with short embeddings the ridge hides it.
    start = np.float32([[1.0, 0.1]] * 10 + [[1.0, -0.1]] * 10)
    start[:, 0] += np.linspace(0, 0.5, 20, dtype=np.float32)
    counts = np.ones(20)
    rank = rank_for_judges(config, users, 20)
    dim, length = choose_start(config, users, start, counts)
    assert dim == 2
    params = {factor: ranking_params(np.float32(factor) * start, counts) for factor in LENGTHS}
    scores = {factor: rank(ranking.score_by_factors(found, 0.4, 1.0)) for factor, found in params.items()}
    assert exceeds_chance(scores[1.4] - scores[1.0])
    assert not exceeds_chance(scores[2.0] - scores[1.4])
    assert length == 1.4


@pytest.mark.parametrize(("column", "noise", "dim"), [(1, 1, 32), (1, 0, 128), (100, 0, 128), (200, 0, 256)])
def test_as_many_dimensions_are_taken_as_tell_people_apart_and_fewer_where_more_only_add_noise(column, noise, dim):
    clicks, start = clicks_of_two_kinds(20), np.zeros((20, 300), np.float32)
    start[:, 0] = 1
    start[:, 40:] = noise * np.random.default_rng(0).normal(size=(20, 260))
    start[:, column] = np.repeat([1, -1], 10)
    assert choose_start(ClicksConfig(), Users(clicks, clicks, clicks), start, np.ones(20))[0] == dim


def test_the_usual_length_is_kept_where_length_does_not_matter():
    clicks = fr.Clients.from_columns({"item": np.tile([0, 1], 20)}, client=np.repeat(np.arange(20), 2))
    assert (
        choose_start(ClicksConfig(), Users(clicks, clicks, clicks), np.eye(2, dtype=np.float32), np.ones(2))[1] == 1.0
    )


@pytest.mark.slow
@pytest.mark.parametrize("priors", [(1e6, 0.1), (0.1, 1e6)])
def test_a_run_has_another_prior_if_it_ranks_clearly_better(folder, monkeypatch, priors):
    """With steps of gradient descent that long, a strong prior diverges."""
    config, clicks = load(folder / "clicks.csv", fractions=(0.6, 0.2, 0.2))
    sgd = {"server.optimizer": "sgd", "server.learning_rate": 0.1, "server.decay_rounds": None}
    config = change_settings(config, {"rounds": 60, "model.dim": 4, **sgd})
    monkeypatch.setattr("fedrecon._src.recommend.tasks.clicks.PRIORS", priors)
    assert prepare_training(config, clicks).config.model.prior == 0.1


@pytest.mark.slow
def test_a_resumed_run_keeps_the_prior_that_it_began_with(folder, tmp_path):
    command = ["train", str(folder / "clicks.csv"), "--task", "clicks", "--out", str(tmp_path / "run"), *OPTIONS]
    assert main([*command, "--rounds", "3", "--server.decay-rounds", "5"]) == 0
    run = fr.RunFolder(tmp_path / "run")
    assert run.description()["found_by_training"]["model.prior"] in PRIORS
    with run.lock():
        run.describe({**run.description(), "found_by_training": {"model.prior": 7.0}})
    assert main(["train", "--resume", str(tmp_path / "run"), "--rounds", "6"]) == 0
    assert fr.recommend.load(tmp_path / "run").saved.config.model.prior == 7


def test_ease_beside_a_model_has_the_ridge_that_ranks_best_for_validation_users(folder, monkeypatch):
    config, clicks = load(folder / "clicks.csv", fractions=(0.6, 0.2, 0.2))
    users = CLICKS.divide(config, clicks, silent)
    holdout = ranking.split_items(users.test, fr.split.fraction(0.8))
    scores = []
    for ridge in (0.1, 1e6):
        monkeypatch.setattr("fedrecon._src.recommend.tasks.clicks.EASE_RIDGES", (ridge,))
        scores.append(CLICKS.baselines(config, CLICKS.legend(config, clicks), users, users.test)["EASE"]["ndcg@100"])
        scorer = ranking.ease(ranking.item_sets(users.train), clicks.num_items, ridge=ridge)
        assert scores[-1] == ranking.rank(scorer, holdout, clicks.num_items).metrics["ndcg@100"]
    measure = rank_for_judges(config, users, clicks.num_items)
    by_ridge = {
        ridge: measure(ranking.ease(ranking.item_sets(users.train), clicks.num_items, ridge=ridge)).mean()
        for ridge in (0.1, 1e6)
    }
    monkeypatch.setattr("fedrecon._src.recommend.tasks.clicks.EASE_RIDGES", (0.1, 1e6))
    chosen = CLICKS.baselines(config, CLICKS.legend(config, clicks), users, users.test)["EASE"]["ndcg@100"]
    assert scores[0] != scores[1]
    assert chosen == scores[int(by_ridge[1e6] > by_ridge[0.1])]


def test_clicks_can_be_divided_by_time(tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"u{u},i{i},{rng.integers(1000)}" for u in range(60) for i in rng.permutation(12)[:6]]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,time", *lines]) + "\n")
    command = ["train", str(tmp_path / "clicks.csv"), "--task", "clicks", "--out", str(tmp_path / "run"), *OPTIONS]
    assert main([*command, "--rounds", "3", "--split.by-time", "--split.train", "half"]) == 0


def test_too_few_validation_users_choose_neither_a_start_nor_a_prior():
    clicks, valid = clicks_of_two_kinds(20), clicks_of_two_kinds(9)
    users, start = Users(clicks, valid, valid), np.eye(20, 4, dtype=np.float32)
    assert choose_start(ClicksConfig(), users, start, np.ones(20)) == (4, 1.0)
    assert prior_of(ClicksConfig().model) == 10
    assert prior_of(Ranking(prior=3.0)) == 3


def test_dimensions_stay_within_the_budget_of_an_upload_and_the_number_of_items():
    people = fr.Clients.from_columns({"item": np.tile(np.arange(10), 2000)}, client=np.repeat(np.arange(2000), 10))
    assert upload_bytes(64, people) == 4 * (64 * 64 + 2 * 10 * 64)

    def largest(num_items, **settings):
        return largest_dim(ClicksConfig(model=Ranking(**settings)), people, num_items)

    assert largest(5000) == 1024
    assert largest(5000, upload_bytes=300_000) == 256
    assert largest(5000, upload_bytes=100) == 32
    assert largest(100) == 100
    assert largest(200_000) == 256, "the server's memory"
