"""Attacks on uploads find what is known to be in them, and less where less is."""

import json
import math

import numpy as np
import optax
import pytest
from studies.leakage import leakage, main

import fedrecon as fr
from fedrecon._src.app.experiment import run_experiment
from fedrecon._src.recommend.config import config_from_json
from toy_models import descend, linear, lookup_clients, lookup_model, xy

pytestmark = pytest.mark.slow

RATINGS = fr.data.synthetic_ratings(num_users=30, num_items=120, mean_ratings=24, seed=0)


@pytest.fixture(scope="module")
def factorization():
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(RATINGS.num_items, dim=8),
        reconstruct=fr.gradient_descent(optax.sgd(0.1), batch_size=5, epochs=5, steps=50),
        update=fr.gradient_descent(optax.sgd(0.2), batch_size=5, steps=50),
        server=optax.sgd(1.0),
    )
    params = fr.train(algorithm, RATINGS, rounds=10, clients_per_round=10).params
    return leakage(algorithm, params, RATINGS, groups=(2, 10))


def test_a_plain_upload_of_factorization_gives_everything_away(factorization):
    plain = factorization["plain upload"]
    assert plain.rows == 1.0
    assert plain.local == pytest.approx(1.0, abs=1e-4)
    assert plain.ratings < 1e-4
    assert (plain.rank, plain.first) == (1.0, 1.0)


def test_a_method_that_learns_from_support_gives_that_away_too():
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(RATINGS.num_items, dim=4),
        reconstruct=fr.least_squares(ridge=1.0),
        update=fr.gradient_descent(optax.sgd(1.0), batch_size=50, steps=1),
        server=optax.sgd(0.1),
        second_order=True,
    )
    params = fr.train(algorithm, RATINGS, rounds=2, clients_per_round=10).params
    assert leakage(algorithm, params, RATINGS, groups=(2,))["plain upload"].rows == 1.0


def test_larger_sums_and_noise_give_away_less(factorization):
    plain, two, ten, noised, guess = factorization.exposures
    assert plain.rows > two.rows > ten.rows
    assert plain.local > two.local > ten.local > 0
    assert plain.ratings < two.ratings < ten.ratings
    assert noised.rows < 0.7
    assert noised.first < two.first
    assert noised.rank > plain.rank
    assert factorization.strangers == 20
    assert guess.first == pytest.approx(1 / 21)
    assert 0 < guess.rows < 1


def test_it_is_said_in_a_table_in_words_and_in_a_picture(factorization, tmp_path):
    columns, rows = factorization.table()
    assert [row[0] for row in rows][:3] == ["plain upload", "sum of 2", "sum of 10"]
    assert all(len(row) == len(columns) for row in rows)
    assert "100% of what they have rated" in factorization.summary()
    assert "plain upload" in str(factorization)
    factorization.plot(tmp_path / "leakage.png")
    assert (tmp_path / "leakage.png").read_bytes().startswith(b"\x89PNG")


def test_any_model_can_be_attacked():
    recon = {"reconstruct": descend(0.1, 2), "update": descend(0.1, 2), "server": optax.sgd(1.0)}
    tables = fr.federated_reconstruction(lookup_model(), **recon)
    found = leakage(
        tables, lookup_model().init_global(fr.kit.round_key(0, 0)), lookup_clients([5, 6, 7, 8]), groups=(2,)
    )
    assert found["plain upload"].rows == 1.0
    assert found["plain upload"].first == 1.0
    line = fr.federated_reconstruction(linear(), split=fr.split.alternate(), **recon)
    some = xy(([1, 2, 3], [5, 6, 8]), ([1, 2, 3], [5, 5, 9]), ([1, 2, 4], [0, 5, 1]))
    alone = leakage(line, {"w": np.float32(0)}, some, groups=())
    assert math.isnan(alone["plain upload"].rows)
    assert math.isnan(alone["plain upload"].ratings)


def test_a_split_that_is_drawn_anew_is_that_of_the_round():
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(RATINGS.num_items, dim=3),
        reconstruct=descend(0.1, 5),
        update=descend(0.1, 5),
        server=optax.sgd(1.0),
        split=fr.split.redrawn(fr.split.half()),
    )
    params = algorithm.params(algorithm.init(fr.kit.round_key(0, 0)))
    plain = leakage(algorithm, params, RATINGS, groups=(), most=8)["plain upload"]
    assert (plain.rows, plain.first) == (1.0, 1.0)
    assert plain.local == pytest.approx(1.0, abs=1e-4)


def test_one_person_cannot_be_mistaken_for_another():
    algorithm = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    with pytest.raises(ValueError, match="must be at least 2"):
        leakage(algorithm, {"w": np.float32(0)}, xy(([1, 2, 3], [5, 6, 8])))


# ---- the command ----


def test_leakage_of_a_run(tmp_path, capsys):
    config = {"data": {"source": "synthetic", "max_examples": 20}, "rounds": 2, "model": {"dim": 2}, "jax_devices": 1}
    run_experiment(config_from_json(config, "test"), fr.RunFolder(tmp_path / "run"))
    picture = str(tmp_path / "leak.png")
    assert main([str(tmp_path / "run"), "--people", "10", "--json", "--picture", picture]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["kinds"][0]["rows"] == 1.0
    assert measured["kinds"][0]["first"] == 1.0
    assert (tmp_path / "leak.png").exists()


def test_a_picture_replaces_pictures_alone_and_that_is_known_before_the_work(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert main([str(tmp_path / "nowhere"), "--picture", str(tmp_path / "thesis.tex")]) == 1
    assert "thesis.tex already exists and is not a PNG picture" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    assert main([str(tmp_path / "nowhere"), "--picture", str(tmp_path)]) == 1
    assert "it must be a regular file" in capsys.readouterr().err
    (tmp_path / "old.png").write_bytes(b"\x89PNG\r\n\x1a\nrest")
    assert main([str(tmp_path / "nowhere"), "--picture", str(tmp_path / "old.png")]) == 1
    assert "nowhere is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("noise", [{"noise_multiplier": math.nan}, {"clip": 0.0}])
def test_noise_that_cannot_be_is_refused(noise):
    algorithm = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    with pytest.raises(ValueError, match=f"`{next(iter(noise))}`"):
        leakage(algorithm, {"w": np.float32(0)}, xy(([1, 2, 3], [5, 6, 8]), ([1, 2], [3, 4])), **noise)
