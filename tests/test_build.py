import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.recommend.config import DEFAULT, Privacy, RatingsConfig, Server, SplitSettings, Update, check_config
from fedrecon._src.recommend.rating_model import relaxed_prior
from fedrecon._src.recommend.recipe import build_descent, build_server
from fedrecon._src.recommend.stopping import (
    divisions_of,
    early_stopping_of,
    evaluate_by_divisions,
    patience_of,
    rounds_of,
    say_few_tested,
    say_rounds,
)
from fedrecon._src.recommend.tasks import Users
from fedrecon._src.simulation.training import loss_of
from toy_models import descend, linear, one_by_one, one_round, xy


@pytest.mark.slow
def test_a_gradient_longer_than_its_limit_is_shortened_to_it():
    """At w = b = 0 and (x, y) = (2, 5) the gradient in w is -20: cut to -1, a step of rate 0.5 adds 0.5."""

    def learned(clip_norm):
        update = build_descent(Update(learning_rate=0.5, batch_size=1, clip_norm=clip_norm))
        algorithm = fr.federated_reconstruction(
            linear(), split=fr.split.none(), reconstruct=descend(0.1, steps=0), update=update, server=optax.sgd(1.0)
        )
        return float(one_round(algorithm, xy(([2], [5]))).params["w"])

    assert learned(1.0) == pytest.approx(0.5)
    assert learned(None) == pytest.approx(10.0)


def test_a_limit_of_the_gradient_that_allows_no_step_is_refused():
    with pytest.raises(ValueError, match=r"`update\.clip_norm`"):
        check_config(RatingsConfig(update=Update(clip_norm=0.0)))


def test_the_rate_of_the_server_falls_along_a_cosine_to_a_fiftieth():
    server = build_server(Server(optimizer="sgd", learning_rate=2.0, decay_rounds=2))
    params = jnp.zeros(())
    state, steps = server.init(params), []
    for _ in range(4):
        step, state = server.update(jnp.ones(()), state, params)
        steps.append(float(step))
    assert steps == pytest.approx([-2, -1.02, -0.04, -0.04])


# ---- relaxations of the prior ----


def relaxing(**options):
    model = dataclasses.replace(DEFAULT.model, prior=8.0, relax=2)
    return dataclasses.replace(DEFAULT, **{"rounds": 8, "model": model, **options})


def people(valid):
    one = fr.Clients.from_columns({"item": np.zeros(2, np.int32)}, client=np.zeros(2, int))
    return Users(one, one.take(np.zeros(valid, int)), one)


def test_each_relaxation_has_a_quarter_of_the_prior_and_the_whole_rate_again():
    config = relaxing()
    prior = relaxed_prior(config)
    assert [float(prior(step)) for step in (0, 7, 8, 9, 10, 11)] == [8, 8, 2, 2, 0.5, 0.5]
    server = build_server(Server(optimizer="sgd", learning_rate=1.0, decay="linear", decay_rounds="all"), 8, 2)
    state, steps = server.init(jnp.zeros(())), []
    for _ in range(12):
        step, state = server.update(jnp.ones(()), state, jnp.zeros(()))
        steps.append(-float(step))
    assert steps == pytest.approx([1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 1, 0.5, 1, 0.5])
    assert list(early_stopping_of(config, people(10), loss_of).rounds) == [8, 10, 12]


def test_relaxations_need_validation_users_to_judge_them_and_no_promise_of_privacy():
    config = relaxing()
    assert (rounds_of(config, people(10)), patience_of(config, people(10))) == (12, 2)
    assert "Up to 4 more follow" in say_rounds(config, people(10))
    assert "The best model for validation clients is kept" in say_rounds(config, people(10), "clients")
    assert (rounds_of(config, people(9)), patience_of(config, people(9))) == (8, None)
    assert "only 9 validation users have" in say_rounds(config, people(9))
    private = relaxing(privacy=Privacy(noise_multiplier=1.0))
    assert rounds_of(private, people(10)) == 8
    assert rounds_of(relaxing(patience=None), people(10)) == 8


def test_who_has_no_support_and_query_cannot_judge():
    lonely = fr.Clients.from_columns({"item": np.zeros(20, np.int32)}, client=np.arange(20))
    users = people(10)._replace(valid=lonely)
    assert patience_of(relaxing(), users) is None
    assert "only 0 validation users have support and query" in say_rounds(relaxing(), users)


def test_who_does_what_is_said_with_no_more_than_there_are():
    said = say_rounds(dataclasses.replace(DEFAULT, sampling=fr.Sampling(100)), people(1))
    assert said.startswith(
        "users: 1 train, 1 validate, 1 test; 1 in each of 200 rounds. The model of the last round is kept"
    )


def test_too_few_test_users_are_flagged_with_the_option_that_gives_more():
    option = "Train with --data.fractions .6 .2 .2"
    assert say_few_tested(DEFAULT, 10) == []
    assert " ".join(say_few_tested(DEFAULT, 1)).startswith(
        f"Fewer than 10 test users (1) are too few for reliable results. {option}"
    )
    assert " ".join(say_few_tested(DEFAULT, 9)).startswith(
        f"Fewer than 10 test users (9) are too few for reliable results. {option}"
    )
    assert " ".join(say_few_tested(DEFAULT, 0)).startswith(
        f"No users are left for testing, so nothing is measured. {option}"
    )
    many = dataclasses.replace(DEFAULT, data=dataclasses.replace(DEFAULT.data, fractions=(0.5, 0.2, 0.3)))
    assert "--data.fractions" not in " ".join(say_few_tested(many, 9))


# ---- how validation users judge ----


def test_few_validation_users_judge_by_more_divisions_than_many():
    numbers = {valid: divisions_of(DEFAULT, people(valid)) for valid in (9, 10, 100, 299, 600, 5000)}
    assert numbers == {9: 1, 10: 8, 100: 6, 299: 3, 600: 1, 5000: 1}


def test_an_order_that_settings_ask_for_is_not_shuffled():
    in_time = dataclasses.replace(DEFAULT, split=SplitSettings(train="half", by_time=True))
    assert divisions_of(in_time, people(10)) == 1
    assert divisions_of(dataclasses.replace(DEFAULT, patience=None), people(10)) == 1


def test_divided_clients_are_measured_on_the_queries_of_all_divisions():
    rng = np.random.default_rng(0)
    clients = xy(*((rng.normal(size=6), rng.normal(size=6)) for _ in range(300)))
    algorithm = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    plain = fr.Evaluator(algorithm, clients, split=fr.split.half(), layout=one_by_one())
    users = Users(clients, clients, clients)
    judges = evaluate_by_divisions(plain, DEFAULT, users)
    assert divisions_of(DEFAULT, users) == 2
    params = {"w": np.float32(2)}
    # The first division is the one that results are reported by.
    found, parts = judges(params), [plain(params), plain.on(clients.shuffle(1))(params)]
    assert parts[1].micro["loss"] != pytest.approx(parts[0].micro["loss"], rel=1e-5)
    assert found.micro["loss"] == pytest.approx(np.mean([one.micro["loss"] for one in parts]), rel=1e-5)
    assert (found.clients, found.examples) == (300, 2 * parts[0].examples)


def test_there_is_no_early_stopping_without_validation_users():
    assert evaluate_by_divisions(None, DEFAULT, people(0)) is None
