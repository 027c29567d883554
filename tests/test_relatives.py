"""SCAFFOLD and Ditto: rounds by hand."""

import numpy as np
import optax
import pytest

import fedrecon as fr
from toy_models import descend, one_round, squared_error, xy


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
    algorithm = fr.scaffold(line(), learning_rate=0.1, batch_size=1, num_clients=2, server=optax.sgd(1.0))
    run = one_round(algorithm, xy(A, B), rounds=rounds)
    w, _, own = scaffold_by_hand([A, B], rounds)
    assert run.params["w"] == pytest.approx(w, rel=1e-5)
    np.testing.assert_allclose(run.client_state["w"], own, 1e-5)


def test_scaffold_moves_its_control_by_the_share_of_clients_that_took_part():
    algorithm = fr.scaffold(line(), learning_rate=0.1, batch_size=1, num_clients=4, server=optax.sgd(1.0))
    clients = xy(A, B)
    keys = fr.kit.run_keys(0)
    state = algorithm.init(keys.init)
    kept = fr.init_client_state(algorithm, clients, 0)
    found = fr.kit.client_round(algorithm, algorithm.message(state), clients, fr.kit.round_key(0, 0), kept)
    state = fr.server_update(algorithm, state, [found.upload])
    _, c, own = scaffold_by_hand([A, B], 1)
    assert state.method[1]["w"] == pytest.approx(c * 2 / 4, rel=1e-5)
    np.testing.assert_allclose(found.client_state["w"], own, 1e-5)


def test_scaffold_clients_without_examples_keep_their_control():
    algorithm = fr.scaffold(line(), learning_rate=0.1, batch_size=1, num_clients=2, server=optax.sgd(1.0))
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
    algorithm = fr.ditto(
        line(1.0), update=descend(0.1), personal=descend(0.2), strength=strength, server=optax.sgd(1.0)
    )
    run = one_round(algorithm, xy(A, B), rounds=3)
    w, own = ditto_by_hand([A, B], strength, 3)
    assert run.params["w"] == pytest.approx(w, rel=1e-5)
    np.testing.assert_allclose(run.client_state["w"], own, 1e-5)


def test_ditto_serves_an_unseen_client_from_the_global_model():
    algorithm = fr.ditto(line(), update=descend(0.1), personal=descend(0.2), strength=0.5, server=optax.sgd(1.0))
    own = 1.0
    for target in (3, 5):
        own -= 0.2 * (2 * (own - target) + 0.5 * (own - 1.0))
    found = fr.reconstruct(algorithm, {"w": np.float32(1)}, {"x": np.float32([1, 1]), "y": np.float32([3, 5])})
    assert found["w"] == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_models_with_local_parameters_are_refused(method):
    model = line()._replace(init_local=lambda key: {"b": np.float32(0)})
    options = {
        "scaffold": {"learning_rate": 0.1, "batch_size": 1, "num_clients": 2, "server": optax.sgd(1.0)},
        "ditto": {"update": descend(0.1), "personal": descend(0.1), "strength": 1.0, "server": optax.sgd(1.0)},
    }
    with pytest.raises(ValueError, match="make it with everything global"):
        getattr(fr, method)(model, **options[method])
