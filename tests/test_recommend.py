"""The library's first screen: train, evaluate next to baselines, recommend titles, save and load."""

import dataclasses

import numpy as np
import pytest

import fedrecon as fr
from fedrecon._src.recommend import cold_start
from fedrecon._src.recommend.evaluation_table import EvaluationTable, measure_model
from fedrecon._src.recommend.settings import Privacy
from fedrecon._src.simulation.training import RecordCallback


@pytest.fixture(scope="module")
def ratings():
    ratings = fr.data.synthetic_ratings(num_users=300, num_items=60, mean_ratings=30, seed=0)
    titles = np.array([f"Film {k} ({1950 + k})" for k in range(60)])
    return dataclasses.replace(ratings, titles=titles)


@pytest.fixture(scope="module")
def recommender(ratings):
    return fr.recommend.train(ratings, rounds=40, dim=4)


def test_the_default_recipe_beats_the_mean_and_biases(recommender):
    table = recommender.evaluate()
    assert table.reliable
    assert table.rows["model"]["rmse"] < table.rows["global mean"]["rmse"]
    assert table.rows["model"]["rmse"] <= table.rows["item + user bias"]["rmse"] * 1.001
    assert "global mean" in str(table)


def test_the_method_by_hand_beats_the_mean(ratings):
    """S, R and U of the README, with settings that suit a small data set."""
    train, test = ratings.split_clients(0.9, 0.1, seed=0)
    estimate = fr.recommend.estimate_ratings(train, ratings.num_items)
    model = fr.models.matrix_factorization(ratings.num_items, 4, biases=True, init_item_bias=estimate.item_bias)
    model = fr.models.standardize(model, estimate.mean, estimate.deviation)
    algorithm = fr.federated_reconstruction(
        model,
        split=fr.split.half(),
        reconstruct=fr.least_squares({"user_bias": estimate.user_ridge, "*": 10 * estimate.noise}),
        update=fr.gradient_descent(fr.optimizers.sgd(0.01), batch_size=50),
        server=fr.optimizers.sgd(1.0),
    )
    run = fr.train(algorithm, train, rounds=20, clients_per_round=50)
    rmse = fr.evaluate(algorithm, run.params, test).micro["rmse"]
    assert rmse < fr.recommend.rating_baselines(train, test).table["global mean"]["rmse"]


def test_items_are_ids_or_titles_with_or_without_a_year(recommender):
    by_id = recommender.recommend({3: 5.0, 7: 1.0}, n=3)
    assert recommender.recommend({"Film 3": 5.0, "Film 7 (1957)": 1.0}, n=3) == by_id
    assert len(by_id) == 3
    assert {"Film 3 (1953)", "Film 7 (1957)"}.isdisjoint(item.title for item in by_id)
    assert recommender.predict({"Film 3": 5.0}, ["Film 7", "Film 8"]).shape == (2,)


@pytest.mark.slow
def test_a_title_that_names_two_items_needs_its_year():
    ratings = fr.data.synthetic_ratings(num_users=30, num_items=9, mean_ratings=4, seed=0)
    titles = np.array(["Solaris (1972)", "Solaris (2002)", "Alien (1979)", *"abcdef"])
    recommender = fr.recommend.train(dataclasses.replace(ratings, titles=titles), rounds=0)
    with pytest.raises(ValueError, match="Solaris"):
        recommender.predict({"Solaris": 5.0})
    assert recommender.predict({"Solaris (2002)": 5.0, "Alien": 4.0}).shape == (9,)


def test_a_saved_recommender_recommends_the_same(recommender, tmp_path):
    recommender.save(tmp_path / "model")
    loaded = fr.recommend.load(tmp_path / "model")
    assert loaded.recommend({"Film 3": 5.0}) == recommender.recommend({"Film 3": 5.0})
    with pytest.raises(ValueError, match="`clients`"):
        loaded.evaluate()


def test_other_users_are_measured_with_what_the_model_knows(recommender, ratings):
    table = recommender.evaluate(ratings.take(np.arange(40)))
    assert (table.evaluation.clients, table.reliable) == (40, True)
    with pytest.raises(ValueError, match="other items"):
        recommender.evaluate(dataclasses.replace(ratings, item_ids=np.arange(1, 61)))


def test_few_users_are_flagged(recommender, ratings):
    table = recommender.evaluate(ratings.take(np.arange(5)))
    assert isinstance(table, EvaluationTable)
    assert not table.reliable
    assert "too few" in str(table)


@pytest.mark.slow
def test_clients_without_ids_train_by_the_numbers_of_their_items():
    ratings = fr.data.synthetic_ratings(num_users=40, num_items=10, seed=0)
    clients = fr.Clients(ratings.columns, ratings.starts, ratings.ends)
    assert fr.recommend.train(clients, rounds=1).recommend({0: 4.0}, n=1)[0].item in range(1, 10)


@pytest.mark.slow
def test_a_table_of_columns_is_trained_on_as_it_is():
    users, items = np.repeat(np.arange(30), 8), np.tile(np.array(list("abcdefgh")), 30)
    table = {"user": users, "item": items, "rating": 1.0 + (users + np.tile(np.arange(8), 30)) % 5}
    assert set(fr.recommend.train(table, rounds=1).items.ids) == set("abcdefgh")


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"rating": [1.0, 2.0]}, "column 'item' of numbers from 0"),
        ({"item": ["a", "b"], "rating": [1.0, 2.0]}, "column 'item' of numbers from 0"),
        ({"item": [0, -1], "rating": [1.0, 2.0]}, "column 'item' of numbers from 0"),
        ({"item": [0, 1]}, "column 'rating'"),
        ({"item": [0, 1], "rating": [1.0, np.nan]}, "column 'rating' holds nan"),
    ],
)
def test_clients_that_are_no_ratings_are_refused_by_column(columns, rule):
    clients = fr.Clients.from_columns(columns, client=[0, 0])
    with pytest.raises(ValueError, match=rule):
        fr.recommend.train(clients)


def test_an_unknown_option_of_training_is_an_error(ratings):
    with pytest.raises(TypeError, match="round"):
        fr.recommend.train(ratings, round=3)


@pytest.mark.slow
def test_training_calls_back_and_keeps_the_history(ratings):
    class Count(fr.Callback):
        rounds = 0

        def after_round(self, record):
            self.rounds += 1

    count = Count()
    recommender = fr.recommend.train(ratings, rounds=2, dim=2, callbacks=[count])
    assert count.rounds == recommender.run.rounds >= 2
    assert recommender.algorithm.model.init_global is not None


def test_an_interrupted_training_is_finished_too(ratings, monkeypatch):
    def stop(record):
        if (record["kind"], record["round"]) == ("round", 1):
            raise KeyboardInterrupt

    shrunk = []
    monkeypatch.setattr(cold_start, "shrink_evidence", lambda algorithm, params, *_: shrunk.append(params) or params)
    recommender = fr.recommend.train(ratings, rounds=2, dim=2, callbacks=[RecordCallback(stop)])
    assert recommender.run.interrupted
    assert len(shrunk) == 1


@pytest.mark.slow
def test_clicks_are_ranked_above_chance(ratings):
    recommender = fr.recommend.train_clicks(ratings, rounds=20, dim=4)
    table = recommender.evaluate()
    assert table.rows["model"]["ndcg@100"] > 0
    assert "popularity" in table.rows
    assert len(recommender.recommend(["Film 3", 7], n=2)) == 2


@pytest.mark.slow
def test_text_is_completed(tmp_path):
    corpus = fr.data.synthetic_text(seed=0)
    completer = fr.recommend.train_text(corpus, rounds=5, vocabulary=50)
    assert 0 <= completer.evaluate().rows["model"]["accuracy"] <= 1
    private = dataclasses.replace(completer.saved.config, privacy=Privacy(epsilon=1.0))
    table = measure_model(private, completer.saved, completer._users, "test")
    assert table.baselines == {}  # these are sums over the training clients' text
    assert set(table.personal.rows) == {"impersonal", "personal_frozen", "personal"}
    word = completer.vocabulary.words[0]
    suggestions = completer.suggest(word, text=[f"{word} {word} zyzzyva."], n=3)
    assert len(suggestions) == 3
    completer.save(tmp_path / "model")
    assert fr.recommend.load_completer(tmp_path / "model").suggest(word, n=2) == completer.suggest(word, n=2)
