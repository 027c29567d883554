"""Privacy in whole runs: the ledger in records and run.json, budgets that end training, commands."""

import json
import math
import stat

import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.app.experiment import run_experiment, users_of_run
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.core.display import silent
from fedrecon._src.privacy.accounting import Release, epsilon_of
from fedrecon._src.privacy.ledger import Ledger
from fedrecon._src.recommend.config import DEFAULT, config_from_json
from fedrecon._src.recommend.tasks import CLICKS, RATINGS
from fedrecon._src.simulation.training import RecordCallback
from toy_models import descend, linear, one_by_one, xy

pytestmark = pytest.mark.slow

SETTINGS = {
    "data": {"source": "synthetic", "max_examples": 20},
    "model": {"dim": 2},
    "reconstruct": {"steps": 2},
    "update": {"steps": 2},
    "sampling": {"clients_per_round": 20, "poisson": True},
    "rounds": 6,
    "evaluate_every": 2,
    "checkpoint_every": 2,
    "jax_devices": 1,
}


def settings(**changes):
    return config_from_json({**SETTINGS, **changes}, "test")


def toy(aggregate):
    return fr.federated_reconstruction(
        linear(), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0), aggregate=aggregate
    )


def train_toy(ledger, rounds=6, noise=2.0, poisson=True, **options):
    clients = xy(*[([1, 2, 3], [5, 6, 8])] * 20)
    aggregate = fr.aggregators.private(1.0, noise, per_round=4)
    return fr.train(
        toy(aggregate),
        clients,
        rounds=rounds,
        clients_per_round=Sampling(4, poisson=poisson),
        ledger=ledger,
        layout=one_by_one(),
        valid=fr.Validation(clients, every=2),
        **options,
    )


def test_evaluations_say_what_was_spent_and_the_ledger_agrees():
    run = train_toy(Ledger(20, 1e-4))
    spent = {entry["round"]: entry["epsilon"] for entry in run.history if entry["kind"] == "evaluation"}
    assert list(spent) == [2, 4, 6]
    expected = epsilon_of([Release(2.0, 0.2, 6)], 1e-4)
    assert spent[6] == run.ledger.epsilon == pytest.approx(expected, rel=1e-6)
    assert spent[2] < spent[4] < spent[6]
    assert run.stopped is None


def test_training_ends_before_the_budget_is_exceeded():
    allowed = epsilon_of([Release(2.0, 0.2, 3)], 1e-4) * 1.001
    run = train_toy(Ledger(20, 1e-4, allowed), rounds=10)
    assert run.rounds == 3
    assert run.ledger.epsilon <= allowed
    assert "budget is spent" in run.stopped
    again = train_toy(Ledger(20, 1e-4, allowed, run.ledger.releases), rounds=10)  # a second run on the same people
    assert again.rounds == 0


def test_without_poisson_sampling_no_amplification_is_claimed():
    assert train_toy(Ledger(20, 1e-4), poisson=False).ledger.epsilon == pytest.approx(
        epsilon_of([Release(2.0, 1.0, 6)], 1e-4), rel=1e-6
    )


def test_a_ledger_needs_an_aggregator_that_promises_something():
    clients = xy(([1, 2, 3], [5, 6, 8]), ([1, 2, 3], [5, 6, 8]))
    with pytest.raises(ValueError, match="needs an aggregator that adds noise"):
        fr.train(toy(None), clients, rounds=1, ledger=Ledger(2, 1e-4), layout=one_by_one())


def test_a_run_is_not_both_resumed_and_replaced(tmp_path):
    with pytest.raises(ValueError, match="`resume` and `overwrite` cannot be combined"):
        run_experiment(settings(), fr.RunFolder(tmp_path / "run"), resume=True, overwrite=True)
    assert not (tmp_path / "run").exists()


def test_the_ledger_survives_an_interruption_to_the_digit(tmp_path):
    config = settings(privacy={"epsilon": 4.0, "clip_norm": 1.0})
    whole = run_experiment(config, fr.RunFolder(tmp_path / "whole"))

    def stop(record):
        if record["round"] == 3:
            raise KeyboardInterrupt

    stopped = run_experiment(config, fr.RunFolder(tmp_path / "parts"), callbacks=[RecordCallback(stop)])
    assert stopped.run.interrupted
    assert stopped.run.ledger.rounds < 6
    run_experiment(config, fr.RunFolder(tmp_path / "parts"), resume=True)
    one, two = (json.loads((tmp_path / name / "run.json").read_text())["privacy"] for name in ("whole", "parts"))
    assert one == two
    assert 3.9 < one["epsilon"] <= 4.0
    assert one["planned"] == {"rounds": 6, "epsilon": one["epsilon"]}
    assert one["rounds"] == 6
    assert "validation" in one["not_covered"]
    assert one["randomness"] == "seed 0"
    assert math.isnan(whole.run.history[0]["loss"])


def test_noise_stays_as_it_was_when_more_rounds_are_planned(tmp_path):
    """Noise was computed for six rounds: with more of them planned the budget ends training after the same six."""
    privacy = {"epsilon": 4.0, "clip_norm": 1.0}
    first = run_experiment(settings(privacy=privacy), fr.RunFolder(tmp_path / "run"))
    more = run_experiment(settings(privacy=privacy, rounds=40), fr.RunFolder(tmp_path / "run"), resume=True)
    assert more.run.rounds == 6
    assert more.run.ledger.epsilon == first.run.ledger.epsilon
    assert "budget is spent" in more.run.stopped


@pytest.mark.parametrize("privacy", [{}, {"noise_multiplier": 1.0, "clip_norm": 1.0}], ids=["sums", "noise of clients"])
def test_secure_sums_in_a_run(privacy, tmp_path):
    clip = {} if privacy else {"clip_norm": 10.0}
    config = settings(rounds=2, aggregate={"secure": True, **clip}, privacy=privacy)
    found = run_experiment(config, fr.RunFolder(tmp_path / "run"))
    assert all(np.isfinite(leaf).all() for leaf in found.run.params.values())
    if privacy:
        assert found.run.ledger.releases[0].mechanism == "skellam"
    else:
        plain = settings(rounds=2, aggregate={"clip_norm": 10.0})
        expected = run_experiment(plain, fr.RunFolder(tmp_path / "plain"))
        assert found.run.params["item_embedding"] == pytest.approx(expected.run.params["item_embedding"], abs=1e-4)
        assert found.run.history[0]["clients"] == expected.run.history[0]["clients"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"privacy": {"epsilon": 1.0}}, "privacy.clip_norm"),
        ({"privacy": {"clip_norm": 1.0}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": 1.0, "clip_norm": 1.0, "delta": 1.0}}, "delta"),
        ({"privacy": {"epsilon": 1.0, "clip_norm": 1.0}, "aggregate": {"clip_norm": 1.0}}, "aggregate.clip_norm"),
        ({"aggregate": {"secure": True}}, "aggregate.clip_norm"),
        ({"aggregate": {"clip_quantile": 0.5, "clip_norm": 1.0}}, "clip_quantile"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        settings(**changes)


# ---- the default recipe ----

RECIPE = {"data": {"source": "synthetic", "max_examples": 20}, "rounds": 3, "evaluate_every": 3, "jax_devices": 1}


def recipe(**changes):
    return config_from_json({**RECIPE, "privacy": {"epsilon": 4.0}, **changes}, "test", base=DEFAULT)


@pytest.mark.parametrize("secure", [False, True], ids=["noise of the server", "noise of the clients"])
def test_the_default_recipe_keeps_its_budget_with_an_epsilon_alone(secure, tmp_path):
    said = []
    config = recipe(aggregate={"secure": secure})
    found = run_experiment(config, fr.RunFolder(tmp_path / "run"), say=said.append)
    told = json.loads((tmp_path / "run" / "run.json").read_text())["privacy"]
    assert told["rounds"] == found.run.rounds == 3  # noise was computed such that all rounds fit
    assert 3.5 < told["epsilon"] <= 4.0
    zero = [release for release in told["releases"] if release.get("purpose") == "round zero"]
    assert len(zero) == 5
    assert {release["mechanism"] for release in told["releases"]} == {"skellam" if secure else "gaussian"}
    assert any("round zero asks every client 5 times" in remark for remark in said)
    assert np.isfinite(found.test.micro["rmse"])


def test_nothing_of_the_training_users_gets_into_a_private_model_without_noise(tmp_path):
    """One user's ratings are all changed: with the noise of other numbers nothing is the same, without it little is."""
    one = run_experiment(recipe(), fr.RunFolder(tmp_path / "one")).model
    plain = run_experiment(recipe(privacy={}), fr.RunFolder(tmp_path / "plain")).model
    assert not np.array_equal(one.legend.counts, plain.legend.counts)
    assert not np.allclose(one.legend.liking.bias, plain.legend.liking.bias)
    assert one.legend.scale != plain.legend.scale
    assert one.config.model.scale.mean != plain.config.model.scale.mean


def test_a_rating_cannot_be_guessed_from_the_run_json_of_a_private_run(tmp_path):
    """Whoever knows all ratings but one hashes every possible value of that one."""
    ratings = [f"u{user},i{item},{(user * item) % 5 + 1}" for user in range(40) for item in range(6)]

    def configure(name, *lines):
        (tmp_path / name).write_text("\n".join(["user,item,rating", *lines]) + "\n")
        data = {**RECIPE["data"], "source": str(tmp_path / name), "user": "user", "item": "item", "rating": "rating"}
        return recipe(data=data, rounds=1, privacy={"epsilon": 8.0, "rating_range": [1.0, 5.0]})

    def run(name):
        run_experiment(config, fr.RunFolder(tmp_path / name))
        return json.loads((tmp_path / name / "run.json").read_text())["data"]

    config = configure("true.csv", *ratings)
    facts = run("run")
    guesses = []
    for rating in range(1, 6):
        guessed = configure("guess.csv", f"u0,i0,{rating}", *ratings[1:])
        guesses.append(RATINGS.load(guessed, silent).fingerprint())
    assert RATINGS.load(config, silent).fingerprint() in guesses, "without a key the rating would be found"
    assert facts["fingerprint"] not in guesses
    assert facts["ratings"] == 200  # of 240
    assert run("other")["fingerprint"] != facts["fingerprint"], "every run has its own key"
    key = tmp_path / "run.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not any(key.read_bytes().strip() in file.read_bytes() for file in (tmp_path / "run").rglob("*.*"))
    assert len(users_of_run(tmp_path / "run")[1].train)  # its owner still knows whether the data is the same
    key.unlink()
    with pytest.raises(ValueError, match=r"run\.key"):
        users_of_run(tmp_path / "run")


def test_baselines_beside_a_private_run_know_what_it_released_and_no_more(tmp_path):
    found = run_experiment(recipe(), fr.RunFolder(tmp_path / "run"))
    exact = RATINGS.baselines(found.model.config, found.model.legend, found.users, found.users.test)
    assert set(found.baselines) == {"global mean", "item + user bias"}
    for name, metrics in found.baselines.items():
        assert metrics["rmse"] != exact[name]["rmse"]


def test_a_private_run_of_clicks_saves_no_counts(tmp_path):
    data = {"source": "synthetic", "max_examples": 5}
    settings = {"task": "clicks", "data": data, "model": {"dim": 2}, "rounds": 1, "jax_devices": 1}
    noise = {"privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0}}
    config = config_from_json({**settings, **noise, "sampling": {"clients_per_round": 50}}, "test")
    found = run_experiment(config, fr.RunFolder(tmp_path / "run"))
    model = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    assert model["counts"] is None
    assert model["scale"] is None
    data = CLICKS.load(config, silent)
    users, legend = CLICKS.divide(config, data, silent), CLICKS.legend(config, data)
    assert legend.counts is not None
    ready = CLICKS.prepare(config, data, users, legend)
    assert not any("popularity" in remark for remark in ready.remarks)
    assert found.model.params["item_embedding"][:, 1].any()


def test_correlated_noise_in_a_run_counts_turns(tmp_path):
    config = recipe(privacy={"epsilon": 4.0, "correlated": 2, "rating_range": [0.0, 6.0]})
    found = run_experiment(config, fr.RunFolder(tmp_path / "run"))
    assert found.run.rounds == 3
    assert [release.apart for release in found.run.ledger.releases] == [None] * 4 + [2]
    assert 3.5 < found.run.ledger.epsilon <= 4.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"privacy": {"epsilon": 1.0, "round_zero": 1.0}}, "round_zero"),
        ({"privacy": {"epsilon": 1.0, "rating_range": [5.0, 1.0]}}, "lowest and the highest"),
        ({"privacy": {"epsilon": 1.0, "correlated": 0}}, "correlated"),
        ({"privacy": {"epsilon": 1.0, "correlated": 2}, "sampling": {"poisson": True}}, "sampling.poisson"),
        ({"privacy": {"epsilon": 1.0, "correlated": 2, "clip_quantile": 0.5}}, "privacy.clip_quantile"),
    ],
)
def test_settings_of_a_private_recipe_that_make_no_sense_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        recipe(**changes)
