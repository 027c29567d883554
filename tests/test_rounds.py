"""Rounds made of client_update and server_update give what the simulator gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.algorithms.rounds import total_shapes
from relatives import RELATIVES, make, model_of
from toy_models import assert_close, descend, lookup_clients, lookup_model, one_by_one, squared_error

SEED, ROUNDS = 3, 2
CLIENTS = lookup_clients([6, 9, 4, 1, 7], seed=1)
NAMED = dataclasses.replace(CLIENTS, names=np.array(["ann", "bob", "cy", "dee", "eve"]))


def recon(model=None, **options):
    options = {"reconstruct": descend(0.1, 2), "update": descend(0.1, 2), "server": optax.adam(0.05), **options}
    return fr.federated_reconstruction(lookup_model() if model is None else model, **options)


def all_global():
    """The lookup model with its local part as a global one."""
    model = lookup_model()

    def init_global(key):
        return {"model": model.init_global(key), "own": model.init_local(key)}

    return fr.Model(
        init_global=init_global,
        init_local=lambda key: (),
        predict=lambda params, local, batch: model.predict(params["model"], params["own"], batch),
        loss=model.loss,
        metrics=model.metrics,
    )


def noisy():
    """Dropout of a kind: training adds noise that depends on the step's key."""
    model = lookup_model()

    def predict_train(params, local, batch, step):
        noise = 0.0 if step.key is None else 0.1 * jax.random.normal(step.key, batch["y"].shape)
        return model.predict(params, local, batch) + noise

    return model._replace(predict_train=predict_train)


def with_statistics():
    """A global running mean of the targets and a local one, beside the lookup model."""
    model = lookup_model()

    def advance(params, local, batch, mask):
        here = jnp.sum(jnp.where(mask, batch["y"], 0)) / jnp.maximum(jnp.sum(mask), 1)
        return {"seen": 0.9 * params["seen"] + 0.1 * here}, {"mine": 0.5 * local["mine"] + 0.5 * here}

    return model._replace(
        init_global=lambda key: {**model.init_global(key), "seen": jnp.zeros(())},
        init_local=lambda key: {**model.init_local(key), "mine": jnp.zeros(())},
        predict=lambda params, local, batch: model.predict(params, local, batch) + params["seen"] + local["mine"],
        state=fr.kit.ModelState(("seen",), ("mine",), advance, {"mine": 0.5}),
    )


def squares():
    """Linear in the local part, for least squares."""
    return fr.models.matrix_factorization(9, dim=2, init_scale=0.5)


RATED = fr.data.synthetic_ratings(num_users=6, num_items=9, mean_ratings=5, seed=0)

CASES = {
    "lookups by rows": (recon(), CLIENTS),
    "names": (recon(), NAMED),
    "lookups as copies": (recon(update=fr.gradient_descent(optax.sgd(0.1, momentum=0.9), batch_size=2)), CLIENTS),
    "dense": (recon(lookup_model(lookups=False)), CLIENTS),
    "whole tables": (recon(update=fr.gradient_descent(optax.adamw(0.01), batch_size=2)), CLIENTS),
    "joint": (recon(joint=True), CLIENTS),
    "second order": (recon(second_order=True), CLIENTS),
    "redrawn split": (recon(split=fr.split.redrawn(fr.split.half())), NAMED),
    "learned default": (recon(fr.models.learned_default(lookup_model())), CLIENTS),
    "evidence": (
        fr.federated_reconstruction(
            fr.models.implicit_feedback(squares(), 9),
            reconstruct=fr.least_squares(1.0),
            update=descend(0.1, 2),
            server=optax.sgd(1.0),
        ),
        RATED,
    ),
    "least squares": (recon(squares(), reconstruct=fr.least_squares(0.5)), RATED),
    "all items": (
        fr.federated_ials(
            fr.models.ranking_factorization(9, dim=2, init_scale=1.0),
            unobserved=0.3,
            ridge=0.5,
            server=optax.adam(0.05),
        ),
        RATED,
    ),
    "random steps": (recon(noisy()), NAMED),
    "statistics": (recon(with_statistics()), CLIENTS),
    "clipped": (recon(aggregate=fr.aggregators.mean("uniform", clip_norm=0.1, zero_norm=2.0)), CLIENTS),
    "averaging": (fr.federated_averaging(all_global(), update=descend(0.1, 2), server=optax.sgd(1.0)), CLIENTS),
    "averaging with local parts": (
        fr.federated_averaging(
            lookup_model(), update=descend(0.1, 2), server=optax.sgd(1.0), reconstruct=descend(0.1, 2)
        ),
        NAMED,
    ),
    "finetuning": (fr.with_finetuning(recon(), descend(0.1, 2), which="mix/*"), CLIENTS),
    **{name: (make(name, model_of(name)), NAMED) for name in RELATIVES},
}


def simulated(algorithm, clients):
    run = fr.train(algorithm, clients, rounds=ROUNDS, clients_per_round=len(clients), seed=SEED, layout=one_by_one())
    return run.params, run.client_state


def rounds_of_hosts(algorithm, clients, client_side):
    """Train with the functions of hosts alone; `client_side` returns what reaches the server, and what is kept."""
    state = jax.tree.map(np.asarray, algorithm.init(fr.kit.run_keys(SEED).init))
    kept = None if algorithm.method.init_client is None else fr.kit.init_client_state(algorithm, clients, SEED)
    for number in range(ROUNDS):
        key = fr.kit.round_key(SEED, number)
        message = fr.kit.from_bytes(fr.kit.to_bytes(algorithm.message(state)), algorithm.message(state))
        uploads, kept = client_side(message, key, kept)
        state = jax.tree.map(np.asarray, fr.kit.server_update(algorithm, state, uploads, key))
    return algorithm.params(state), () if kept is None else kept


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in ("lookups by rows", "all items") else pytest.mark.slow) for case in CASES],
)
def test_one_client_at_a_time_gives_what_the_simulator_gives(case):
    """Every client by itself, from plain columns, in arrays of one length; everything travels as bytes."""
    algorithm, clients = CASES[case]
    lengths = fr.kit.Lengths(8, 16)
    like = upload_without_examples(algorithm, clients.columns)

    def client_side(message, key, kept):
        found = []
        for i in reversed(range(len(clients))):  # nothing may depend on the order
            mine = None if kept is None else jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], kept)
            name = i if clients.names is None else clients.names[i]
            found.append(fr.kit.client_round(algorithm, message, clients[i], key, mine, client=name, lengths=lengths))
        kept = (
            None if kept is None else jax.tree.map(lambda *x: np.concatenate(x[::-1]), *[f.client_state for f in found])
        )
        return [fr.kit.from_bytes(fr.kit.to_bytes(f.upload), like) for f in found], kept

    assert_close(rounds_of_hosts(algorithm, clients, client_side), simulated(algorithm, clients), 1e-6)


def upload_without_examples(algorithm, columns):
    nobody = fr.Clients({name: column[:0] for name, column in columns.items()}, np.array([0]), np.array([0]))
    message, key = algorithm.message(algorithm.init(jax.random.key(0))), jax.random.key(0)
    kept = fr.kit.init_client_state(algorithm, nobody, seed=0)
    return fr.kit.client_round(algorithm, message, nobody, key, kept).upload


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64])
def test_what_is_expected_of_a_client_follows_from_its_columns_without_examples(dtype):
    """Whatever the type of ids, and whether or not a client has one twice."""
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(9, 2), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0)
    )
    columns = {"item": np.array([3, 1, 4, 2], dtype), "rating": np.ones(4, np.float32)}
    like = upload_without_examples(algorithm, columns)
    message, key = algorithm.message(algorithm.init(jax.random.key(0))), jax.random.key(1)
    for items in ([3, 1, 4, 2], [3, 1, 1, 1]):
        upload = fr.kit.client_update(algorithm, message, columns | {"item": np.array(items, dtype)}, key)
        found = fr.kit.from_bytes(fr.kit.to_bytes(upload), like)
        assert sorted(set(np.asarray(found.delta["item_embedding"].ids)[0].tolist()) - {0}) == sorted(set(items[2:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["names", "redrawn split", "clipped", "averaging with local parts", "scaffold", "pfedrec"]
)
def test_gateways_that_add_up_their_clients_give_what_the_simulator_gives(case):
    algorithm, clients = CASES[case]
    like = total_shapes(algorithm)

    def client_side(message, key, kept):
        parts = [np.array([0, 3]), np.array([1, 2, 4])]
        mine = [None if kept is None else jax.tree.map(lambda leaf, at=at: leaf[at], kept) for at in parts]
        found = [
            fr.kit.client_total(algorithm, message, clients.take(at), key, own)
            for at, own in zip(parts, mine, strict=True)
        ]
        back = np.argsort(np.concatenate(parts))
        if kept is not None:
            kept = jax.tree.map(lambda *x: np.concatenate(x)[back], *[f.client_state for f in found])
        return [fr.kit.from_bytes(fr.kit.to_bytes(f.total), like) for f in found], kept

    assert_close(rounds_of_hosts(algorithm, clients, client_side), simulated(algorithm, clients), 1e-6)


@pytest.mark.slow
def test_clients_keep_their_identity_in_any_population():
    """Half of the people in another order and file train as the same people do among everybody."""
    algorithm, clients = CASES["random steps"]
    message = algorithm.message(algorithm.init(jax.random.key(0)))
    key = fr.kit.round_key(0, 0)
    everybody = fr.kit.client_update(algorithm, message, clients, key)
    some = clients.take(np.array([3, 1]))
    moved = fr.Clients({n: c.copy() for n, c in some.columns.items()}, some.starts, some.ends, some.names)
    alone = fr.kit.client_update(algorithm, message, moved, key, lengths=fr.kit.Lengths(5, 5))
    np.testing.assert_allclose(alone.delta["mix/dense"], everybody.delta["mix/dense"][[3, 1]], 1e-6)


@pytest.mark.slow
def test_nothing_local_is_in_what_leaves():
    """Local parameters that no global one may show are looked for in every leaf of every algorithm's upload."""
    mark = 1234.5

    def marked(model):
        return model._replace(
            init_local=lambda key: jax.tree.map(lambda leaf: jnp.full_like(leaf, mark), model.init_local(key))
        )

    for options in ({}, {"joint": True}, {"second_order": True}):
        algorithm = recon(marked(lookup_model()), reconstruct=descend(0.0, 2), update=descend(0.0, 2), **options)
        message = algorithm.message(algorithm.init(jax.random.key(0)))
        upload = fr.kit.client_update(algorithm, message, CLIENTS, fr.kit.round_key(0, 0))
        for leaf in jax.tree.leaves(upload.parts):
            assert not np.any(np.isclose(leaf, mark))


def test_nodes_run_one_program_whatever_their_clients(monkeypatch):
    algorithm, clients = recon(), CLIENTS
    message = algorithm.message(algorithm.init(jax.random.key(0)))
    fr.kit.client_update(algorithm, message, clients[0], fr.kit.round_key(0, 0), lengths=fr.kit.Lengths(8, 8))
    from fedrecon._src.algorithms.rounds import _compiled, _run_clients

    before = _compiled(_run_clients, algorithm)._cache_size()
    for i in range(1, len(clients)):
        fr.kit.client_update(
            algorithm, message, clients[i], fr.kit.round_key(0, i), client=i, lengths=fr.kit.Lengths(8, 8)
        )
    assert _compiled(_run_clients, algorithm)._cache_size() == before == 1


def test_making_an_algorithm_computes_nothing():
    """An optimizer that would be asked is not, before the algorithm is used."""

    def fail(*args):
        raise AssertionError("asked")

    lazy = fr.gradient_descent(optax.GradientTransformation(fail, fail), batch_size=1)
    algorithm = fr.federated_reconstruction(lookup_model(), reconstruct=lazy, update=lazy, server=optax.sgd(1.0))
    fr.with_finetuning(algorithm, lazy)
    with pytest.raises(AssertionError, match="asked"):
        algorithm.method  # noqa: B018


def test_a_round_without_uploads_is_refused():
    algorithm = recon()
    with pytest.raises(ValueError, match="`uploads` is empty"):
        fr.kit.server_update(algorithm, algorithm.init(jax.random.key(0)), [])


def test_clients_that_keep_something_must_be_given_it():
    algorithm, clients = CASES["averaging with local parts"]
    message = algorithm.message(algorithm.init(jax.random.key(0)))
    with pytest.raises(ValueError, match="client_state"):
        fr.kit.client_update(algorithm, message, clients, fr.kit.round_key(0, 0))


def test_a_surrogate_is_what_a_step_minimises():
    """One step of SGD on (w - 3)^2 + 2 w at w = 1: the gradient is -4 + 2."""
    from fedrecon import kit

    model = fr.Model(
        init_global=lambda key: {"w": jnp.float32(1)},
        init_local=lambda key: (),
        predict=lambda params, local, batch: params["w"] * batch["x"],
        loss=squared_error,
    )

    def penalized(measure, point, start, pull):
        loss, sums = measure(point)
        return loss + pull * point.params["w"] + 0 * start["w"], sums

    updater = kit.Updater(model, descend(0.1), surrogate=penalized)
    base = fr.federated_averaging(model, update=descend(0.1), server=optax.sgd(1.0))

    def client(params, kept, cohort, key):
        pull = jnp.full(cohort.query.count.shape, 2.0)
        return updater.run(params, cohort, kit.first_order_predict(model), (), pull=pull).upload, kept

    algorithm = dataclasses.replace(base, define=lambda model: base.define(model)._replace(client=client))
    message = algorithm.message(algorithm.init(jax.random.key(0)))
    columns = {"x": np.float32([1]), "y": np.float32([3])}
    upload = fr.kit.client_update(algorithm, message, columns, fr.kit.round_key(0, 0))
    np.testing.assert_allclose(upload.delta["w"], [0.2], 1e-6)
