"""Relatives of Federated Reconstruction: rounds by hand, and rows equal dense tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon import algorithms
from relatives import RELATIVES, make, model_of
from toy_models import assert_close, assert_same_bits, descend, linear, lookup_clients, one_round, squared_error, xy


def line(w=0.0):
    """prediction = w * x, with everything global."""
    return fr.Model(
        init_global=lambda key: {"w": np.float32(w)},
        init_local=lambda key: (),
        predict=lambda params, local, batch: params["w"] * batch["x"],
        loss=squared_error,
    )


A, B = ([1, 1], [1, 2]), ([1, 1], [3, 5])


def scaffold_by_hand(clients, rounds, rate=0.1):
    """Batches of one, every client in every round, server SGD 1.0."""
    x, c, own = 0.0, 0.0, [0.0] * len(clients)
    for _ in range(rounds):
        moves, changes = [], []
        for i, (_, targets) in enumerate(clients):
            y = x
            for target in targets:
                y -= rate * (2 * (y - target) - own[i] + c)
            new = own[i] - c + (x - y) / (len(targets) * rate)
            moves.append(y - x)
            changes.append(new - own[i])
            own[i] = new
        x += np.mean(moves)
        c += np.mean(changes)
    return x, c, own


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_scaffold_gives_the_rounds_by_hand(rounds):
    algorithm = fr.algorithms.scaffold(line(), learning_rate=0.1, batch_size=1, num_clients=2, server=optax.sgd(1.0))
    run = one_round(algorithm, xy(A, B), rounds=rounds)
    w, _, own = scaffold_by_hand([A, B], rounds)
    assert run.params["w"] == pytest.approx(w, rel=1e-5)
    np.testing.assert_allclose(run.client_state["w"], own, 1e-5)


def test_scaffold_moves_its_control_by_the_share_of_clients_that_took_part():
    algorithm = fr.algorithms.scaffold(line(), learning_rate=0.1, batch_size=1, num_clients=4, server=optax.sgd(1.0))
    clients = xy(A, B)
    keys = fr.kit.run_keys(0)
    state = algorithm.init(keys.init)
    kept = fr.kit.init_client_state(algorithm, clients, 0)
    found = fr.kit.client_round(algorithm, algorithm.message(state), clients, fr.kit.round_key(0, 0), kept)
    state = fr.kit.server_update(algorithm, state, [found.upload])
    _, c, own = scaffold_by_hand([A, B], 1)
    assert state.method[1]["w"] == pytest.approx(c * 2 / 4, rel=1e-5)
    np.testing.assert_allclose(found.client_state["w"], own, 1e-5)


def test_scaffold_clients_without_examples_keep_their_control():
    algorithm = fr.algorithms.scaffold(line(), learning_rate=0.1, batch_size=1, num_clients=2, server=optax.sgd(1.0))
    run = one_round(algorithm, xy(A, ([], [])), rounds=3)
    assert run.client_state["w"][1] == 0
    assert run.client_state["w"][0] != 0


def ditto_by_hand(clients, strength, rounds, rate=0.1, own_rate=0.2):
    w, own = 1.0, [1.0] * len(clients)
    for _ in range(rounds):
        moves = []
        for i, (_, targets) in enumerate(clients):
            y = w
            for target in targets:
                y -= rate * 2 * (y - target)
                own[i] -= own_rate * (2 * (own[i] - target) + strength * (own[i] - w))
            moves.append(y - w)
        w += np.mean(moves)
    return w, own


@pytest.mark.parametrize("strength", [0.0, 0.5, 2.0])
def test_ditto_gives_the_rounds_by_hand(strength):
    algorithm = fr.algorithms.ditto(
        line(1.0), update=descend(0.1), personal=descend(0.2), strength=strength, server=optax.sgd(1.0)
    )
    run = one_round(algorithm, xy(A, B), rounds=3)
    w, own = ditto_by_hand([A, B], strength, 3)
    assert run.params["w"] == pytest.approx(w, rel=1e-5)
    np.testing.assert_allclose(run.client_state["w"], own, 1e-5)


def test_ditto_serves_an_unseen_client_from_the_global_model():
    algorithm = fr.algorithms.ditto(
        line(), update=descend(0.1), personal=descend(0.2), strength=0.5, server=optax.sgd(1.0)
    )
    own = 1.0
    for target in (3, 5):
        own -= 0.2 * (2 * (own - target) + 0.5 * (own - 1.0))
    found = fr.reconstruct(algorithm, {"w": np.float32(1)}, {"x": np.float32([1, 1]), "y": np.float32([3, 5])})
    assert found["w"] == pytest.approx(own, rel=1e-5)


def by_hand(clients, client, rounds=1, w=1.0, server=1.0):
    """Rounds of a method whose client is a function of `w` and its targets that returns its new `w`."""
    for _ in range(rounds):
        w += server * np.mean([client(w, targets) - w for _, targets in clients])
    return w


SGD = optax.sgd(1.0)
W = {"w": np.float32(1)}
SUPPORT = {"x": np.float32([1, 1]), "y": np.float32([3, 5])}


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_fedprox_pulls_back_to_what_the_server_sent(strength):
    def client(w, targets):
        y = w
        for target in targets:
            y -= 0.1 * (2 * (y - target) + strength * (y - w))
        return y

    found = one_round(algorithms.fedprox(line(1.0), update=descend(0.1), strength=strength, server=SGD), xy(A, B), 2)
    assert found.params["w"] == pytest.approx(by_hand([A, B], client, 2), rel=1e-5)


def test_reptile_moves_half_of_the_way_and_finetunes():
    """Clients weigh alike, whatever they have: A with one example, B with two."""

    def client(w, targets):
        for target in targets:
            w -= 0.1 * 2 * (w - target)
        return w

    uneven = [([1], [1]), B]
    reptile = algorithms.reptile(line(1.0), update=descend(0.1), learning_rate=0.5, finetune=descend(0.2))
    assert one_round(reptile, xy(*uneven)).params["w"] == pytest.approx(by_hand(uneven, client, server=0.5), rel=1e-5)
    found = fr.reconstruct(reptile, W, SUPPORT)["finetuned"]["w"]
    assert found == pytest.approx(1 + 0.4 * 2 + 0.4 * (5 - 1.8), rel=1e-5)


@pytest.mark.parametrize("first_order", [True, False])
def test_per_fedavg_takes_the_gradient_after_a_step(first_order):
    """f = (w x - y)^2 has the Hessian 2 x^2; support is the first example, query the second."""

    def client(w, x, y):
        adapted = w - 0.05 * 2 * x[0] * (w * x[0] - y[0])
        gradient = 2 * x[1] * (adapted * x[1] - y[1])
        return w - 0.1 * gradient * (1 if first_order else 1 - 0.05 * 2 * x[0] ** 2)

    clients = [([2, 1], [1, 2]), ([1, 3], [3, 5])]
    algorithm = algorithms.per_fedavg(
        line(1.0), adapt=descend(0.05, steps=1), update=descend(0.1), server=SGD, first_order=first_order
    )
    w = np.mean([client(1.0, x, y) for x, y in clients])
    assert one_round(algorithm, xy(*clients)).params["w"] == pytest.approx(w, rel=1e-5)
    assert fr.reconstruct(algorithm, W, SUPPORT)["w"] == pytest.approx(1 - 0.05 * 2 * (1 - 3), rel=1e-5)


def test_per_fedavg_multiplies_by_the_hessian_of_several_parameters():
    """The exact step is (I - a H) g; H and g by finite formulas of a model with two parameters, w * x + b."""
    model = fr.models.from_function(
        lambda params, x: params["w"] * x + params["b"],
        {"w": jnp.float32(1), "b": jnp.float32(0)},
        local=(),
        inputs="x",
        label="y",
        loss="mse",
    )
    algorithm = algorithms.per_fedavg(model, adapt=descend(0.05, steps=1), update=descend(0.1), server=SGD)
    run = one_round(algorithm, xy(([2, 3], [1, 5])))
    w, a, b = np.array([1.0, 0.0]), np.array([2.0, 1.0]), np.array([3.0, 1.0])
    adapted = w - 0.05 * 2 * a * (a @ w - 1)
    exact = w - 0.1 * (np.eye(2) - 0.05 * 2 * np.outer(a, a)) @ (2 * b * (b @ adapted - 5))
    np.testing.assert_allclose([run.params["w"], run.params["b"]], exact, 1e-5)


def near(w, target, strength, rate, steps):
    v = w
    for _ in range(steps):
        v -= rate * (2 * (v - target) + strength * (v - w))
    return v


def test_pfedme_moves_towards_personal_models():
    def client(w, targets):
        for target in targets:
            w -= 0.1 * 1.5 * (w - near(w, target, 1.5, 0.2, 3))
        return w

    algorithm = algorithms.pfedme(
        line(1.0), update=descend(0.1), personal=optax.sgd(0.2), steps=3, strength=1.5, server=optax.sgd(0.8)
    )
    w = by_hand([A, B], client, 2, server=0.8)
    assert one_round(algorithm, xy(A, B), 2).params["w"] == pytest.approx(w, rel=1e-5)
    found = fr.reconstruct(algorithm, W, {"x": np.float32([1]), "y": np.float32([3])})["w"]
    assert found == pytest.approx(near(1.0, 3, 1.5, 0.2, 3), rel=1e-5)


def test_apfl_mixes_and_learns_how_much():
    def client(w, v, alpha, targets):
        for target in targets:
            share = np.clip(alpha, 0, 1)
            error = 2 * (share * v + (1 - share) * w - target)
            w, v, alpha = w - 0.1 * 2 * (w - target), v - 0.1 * share * error, alpha - 0.1 * (v - w) * error
        return w, v, np.clip(alpha, 0, 1)

    w, own = 1.0, [(1.0, 0.3), (1.0, 0.3)]
    for _ in range(3):
        after = [client(w, *mine, targets) for mine, (_, targets) in zip(own, [A, B], strict=True)]
        w, own = np.mean([new for new, _, _ in after]), [mine for _, *mine in after]
    run = one_round(algorithms.apfl(line(1.0), update=descend(0.1), server=SGD, alpha=0.3), xy(A, B), 3)
    assert run.params["w"] == pytest.approx(w, rel=1e-5)
    np.testing.assert_allclose(run.client_state["own"]["w"], [v for v, _ in own], 1e-5)
    np.testing.assert_allclose(run.client_state["alpha"], [alpha for _, alpha in own], 1e-5)


def test_apfl_projects_how_much_it_mixes():
    """After the target 10, w = 2 and v = 1.8 (mixed: 1.82); at -10, alpha moves from .9 by .1 * .2 * 23.64 to 1.37."""
    run = one_round(algorithms.apfl(line(0.0), update=descend(0.1), server=SGD, alpha=0.9), xy(([1, 1], [10, -10])))
    assert run.client_state["alpha"].tolist() == [1.0]


def test_fedrep_fits_the_head_then_the_body():
    """w * x + b at (2, 6) from w = 1, b = 0: b moves by .8, and w by -.1 * 2 * (2.8 - 6) * 2."""
    algorithm = algorithms.fedrep(linear(1.0), head=descend(0.1), body=descend(0.1), server=SGD)
    run = one_round(algorithm, xy(([2], [6])))
    assert (run.params["w"], run.client_state["b"][0]) == (pytest.approx(2.28), pytest.approx(0.8))
    run = one_round(algorithm, xy(([2], [6])), 2)  # b continues from .8, at the new w: error 4.56 + .8 - 6
    assert run.client_state["b"][0] == pytest.approx(0.8 + 0.2 * 0.64)


@pytest.mark.parametrize("name", ["fedper", "fedsim", "lg_fedavg"])
def test_fedper_and_its_other_names_train_both_parts_at_once(name):
    """Both move at the error -4: w by .1 * 8 * 2, b by .1 * 8."""
    algorithm = getattr(algorithms, name)(linear(1.0), update=descend(0.1), server=SGD, reconstruct=descend(0.1))
    run = one_round(algorithm, xy(([2], [6])))
    assert (run.params["w"], run.client_state["b"][0]) == (pytest.approx(2.6), pytest.approx(0.8))


def test_fedbabu_trains_the_body_under_one_head_for_all():
    model = linear(1.0)._replace(init_local=lambda key: {"b": jax.random.normal(key)})
    algorithm = algorithms.fedbabu(model, head=descend(0.1), update=descend(0.1), server=SGD, seed=7)
    b = float(jax.random.normal(jax.random.key(7)))
    run = one_round(algorithm, xy(([2], [6])))
    assert run.params["w"] == pytest.approx(1 + 0.1 * 2 * 2 * (4 - b), rel=1e-5)
    assert run.client_state == ()
    found = fr.reconstruct(algorithm, W, {"x": np.float32([2]), "y": np.float32([6])})["b"]
    assert found == pytest.approx(b + 0.1 * 2 * (4 - b), rel=1e-5)


def test_fedbn_keeps_scale_and_statistics_and_sets_statistics_of_unseen_clients():
    def normalize(params, state, x, training, mask=None):
        used = x.mean() if training else state["mean"]
        return params["scale"] * params["w"] * (x - used), {"mean": x.mean()}

    model = fr.models.from_function(
        normalize,
        {"scale": jnp.float32(1), "w": jnp.float32(1)},
        init_state={"mean": jnp.float32(0)},
        state="local",
        local="scale",
        inputs="x",
        label="y",
        loss="mse",
    )
    algorithm = algorithms.fedbn(model, update=descend(0.1, 2), server=SGD)
    run = one_round(algorithm, xy(([1, 3], [1, 1]), ([5, 9], [0, 4])))
    # A: x - mean is (-1, 1), errors (-2, 0), the gradient of w and scale (2 * 2) / 2; B: (-2, 2), errors (-2, -2), 0
    np.testing.assert_allclose(run.client_state["scale"], [0.8, 1.0], 1e-5)
    np.testing.assert_allclose(run.client_state["mean"], [2, 7], 1e-5)
    assert run.params["w"] == pytest.approx((0.8 + 1.0) / 2, rel=1e-5)
    unseen = fr.reconstruct(algorithm, run.params, {"x": np.float32([4, 8]), "y": np.float32([0, 0])})
    assert (unseen["scale"], unseen["mean"]) == (1, pytest.approx(6))


def test_pfedrec_keeps_its_own_items_and_shares_their_change():
    """The score function first (b by .8), then the items (w by 1.28); the user keeps both, and is served with both."""
    algorithm = algorithms.pfedrec(linear(1.0), personal=descend(0.1), update=descend(0.1), server=optax.sgd(0.5))
    run = one_round(algorithm, xy(([2], [6])))
    assert run.params["w"] == pytest.approx(1 + 1.28 / 2)
    assert run.client_state["items"]["w"][0] == pytest.approx(2.28)
    assert run.client_state["score"]["b"][0] == pytest.approx(0.8)
    found = fr.reconstruct(algorithm, W, {"x": np.float32([2]), "y": np.float32([6])})
    assert (found["items"]["w"], found["score"]["b"]) == (pytest.approx(2.28), pytest.approx(0.8))


@pytest.mark.parametrize("name", ["fedmf", "fedncf"])
def test_recommenders_train_user_and_items_at_once(name):
    """Log-odds of 0 for everything: the gradient of the cross-entropy is 1/2 - label."""
    model = fr.models.logistic_factorization(3, dim=1, hidden=(2,) if name == "fedncf" else (), init_scale=0.0)
    clients = fr.Clients.from_columns({"item": [0, 2], "label": np.float32([1, 1])}, client=[0, 0])
    algorithm = getattr(algorithms, name)(model, update=descend(0.1, 2), server=SGD, reconstruct=descend(0.1, 2))
    run = one_round(algorithm, clients)
    assert run.client_state["user_bias"][0] == pytest.approx(0.05)
    assert fr.reconstruct(algorithm, run.params, clients[0])["user_bias"] > 0


def test_steps_of_pfedrec_are_random_if_the_model_is():
    """In training, the prediction is the step's uniform number; the loss follows it, and w the gradient of 0."""
    model = line()._replace(
        predict_train=lambda params, local, batch, step: (
            0 * params["w"] + jax.random.uniform(step.key, batch["x"].shape)
        )
    )
    clients = xy(([1], [0]))
    losses = {round(one_round(make("pfedrec", model), clients, 1, seed=seed).history[0]["loss"], 5) for seed in (0, 1)}
    assert len(losses) == 2


def test_pfedme_decays_rows_that_no_example_touches():
    decay = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    sparse, dense = (
        algorithms.pfedme(
            model_of("pfedme", lookups), update=descend(0.1), personal=decay, steps=2, strength=1.0, server=SGD
        )
        for lookups in (True, False)
    )
    runs = [one_round(algorithm, ROWS, 1) for algorithm in (sparse, dense)]
    assert_close(runs[0].params, runs[1].params, 2e-6)


def test_fedalt_of_a_model_with_nothing_local_is_federated_averaging():
    both = (
        algorithms.fedalt(line(1.0), personal=descend(0.1), update=descend(0.1), server=SGD),
        fr.federated_averaging(line(1.0), update=descend(0.1), server=SGD),
    )
    found, expected = (one_round(algorithm, xy(A, B)).params["w"] for algorithm in both)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ["scaffold", "fedprox", "pfedme", "apfl", "per_fedavg"])
def test_steps_are_random_if_the_model_is(name):
    """In training, the prediction is the step's uniform number; the loss follows it, and w the gradient of 0."""
    model = line()._replace(
        predict_train=lambda params, local, batch, step: (
            0 * params["w"] + jax.random.uniform(step.key, batch["x"].shape)
        )
    )
    clients = xy(([1, 1], [0, 0]))
    losses = {round(one_round(make(name, model), clients, 1, seed=seed).history[0]["loss"], 5) for seed in (0, 1)}
    assert len(losses) == 2


ROWS = lookup_clients([6, 9, 4, 1, 7], seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVES)
def test_rows_of_lookup_tables_equal_dense_tables(name):
    sparse, dense = (make(name, model_of(name, lookups)) for lookups in (True, False))
    runs = [one_round(algorithm, ROWS, 3, layout=fr.layout(block=4, jax_devices=1)) for algorithm in (sparse, dense)]
    assert_close(runs[0].params, runs[1].params, 2e-6)
    assert_close(runs[0].client_state, runs[1].client_state, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "ditto", "apfl", "fedper", "fedalt", "pfedrec"])
def test_what_clients_keep_survives_an_interruption(name, tmp_path):
    algorithm = make(name, model_of(name))
    straight = one_round(algorithm, ROWS, 4)
    one_round(algorithm, ROWS, 2, folder=tmp_path / "run")
    resumed = one_round(algorithm, ROWS, 4, folder=tmp_path / "run")
    assert_same_bits(resumed.params, straight.params)
    assert_same_bits(resumed.client_state, straight.client_state)


@pytest.mark.parametrize("name", RELATIVES)
def test_what_a_client_sends_is_explained(name):
    explained = fr.explain(make(name, model_of(name)), ROWS)
    sizes = [np.size(leaf) for leaf in jax.tree.leaves(jax.eval_shape(model_of(name).init_global, jax.random.key(0)))]
    assert explained.sends == 4 * sum(sizes)


@pytest.mark.parametrize("name", ["fedprox", "per_fedavg", "pfedme", "fedalt", "fedbabu", "pfedrec"])
def test_methods_work_on_rows_where_they_can(name):
    assert make(name, model_of(name)).method.needs.groups


@pytest.mark.parametrize("method", ["scaffold", "ditto", "fedprox", "reptile", "per_fedavg", "pfedme", "apfl"])
def test_models_with_local_parameters_are_refused(method):
    with pytest.raises(ValueError, match="make it with everything global"):
        make(method, linear())
