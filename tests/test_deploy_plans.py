"""Deployments of the defaults and of any algorithm: round zero over nodes, models of other frameworks, signed keys."""

import dataclasses
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import pytest

import fedrecon as fr
from deployed import ITEMS, config_of, deployed, files_of, grid_of, plan_of, ratings_rows, simulated, write_ratings
from fedrecon._src.app.cli import join, main
from fedrecon._src.core.display import silent
from fedrecon._src.deploy import admission
from fedrecon._src.deploy.coordinator import ROUND_ZERO
from fedrecon._src.deploy.messages import Envelope, largest_message, pack, unpack
from fedrecon._src.deploy.sums import length_of, shapes_of
from fedrecon._src.privacy import secure_sum
from fedrecon._src.recommend.config import DEFAULT, ClickData, ClicksConfig, Data, Reconstruct
from fedrecon._src.recommend.recipe import make_evaluator
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.recommend.settings import Ranking
from fedrecon._src.recommend.tasks import CLICKS, RATINGS, Items, build_algorithm
from fedrecon.deploy import (
    InProcess,
    Memory,
    Node,
    Plan,
    PlanError,
    make_plan,
    plan_for,
    weaker,
)

ROUND_ZERO_CONFIG = dataclasses.replace(
    DEFAULT,
    data=Data(source="", transform="auto", fractions=(0.6, 0.2, 0.2), max_examples=10),
    model=dataclasses.replace(DEFAULT.model, dim=3),
    rounds=3,
    evaluate_every=0,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("files"))


def assert_close(found, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)


@pytest.fixture(scope="module")
def prepared_simulation(files):
    """Train with the default preset as `fedrecon train` does, everybody in every round."""
    plan = plan_of(ROUND_ZERO_CONFIG)
    ratings = fr.data.load(files[0], schema=fr.data.RatingsSchema(np.arange(100, 100 + ITEMS)))
    ready = RATINGS.prepare(plan.config, ratings, plan.read_file(files[0]).users, plan.legend)
    algorithm = build_algorithm(ready.config, ready.model, ready.users.train.num_examples)
    everybody = len(ready.users.train)
    run = fr.train(algorithm, ready.users.train, rounds=3, clients_per_round=everybody, seed=ready.config.seed)
    return ready, run


def test_a_node_recognises_common_names_of_columns(files, tmp_path):
    plan, text = plan_of(ROUND_ZERO_CONFIG), files[0].read_text()
    assert text.startswith("user,item,rating")
    (tmp_path / "own.csv").write_text(text.replace("user,item,rating", "Member ID,film,Score", 1))
    found, expected = (plan.read_file(path).users.train for path in (tmp_path / "own.csv", files[0]))
    assert found.fingerprint() == expected.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize(("secure", "tolerance"), [(False, 1e-6), pytest.param(True, 5e-6, marks=pytest.mark.slow)])
def test_the_default_preset_on_nodes_gives_what_the_simulation_gives(
    secure, tolerance, files, prepared_simulation, tmp_path
):
    plan = plan_of(ROUND_ZERO_CONFIG, secure=secure, least_nodes=2)
    names = plan.read_file(files[0]).users.train.names.tolist()
    grid = grid_of(files[1])
    outcome = deployed(plan, grid, tmp_path)
    assert not any(name.encode() in reply for _, _, reply in grid.seen for name in names)
    ready, run = prepared_simulation
    assert_close(outcome.params, run.params, tolerance)
    saved = open_model(tmp_path)
    for name in ("mean", "deviation", "low", "high", "noise", "user_ridge", "trait_ridges"):
        np.testing.assert_allclose(
            getattr(saved.config.model.scale, name), getattr(ready.config.model.scale, name), 10 * tolerance
        )
    np.testing.assert_allclose(saved.legend.liking.bias, ready.legend.liking.bias, 1e-4, 1e-4)
    assert (tmp_path / ROUND_ZERO).exists()


def test_ratings_far_outside_count_as_little_on_nodes_as_in_the_simulation(files, tmp_path):
    """One user's ratings of a million would move the scale; round zero leaves them out, wherever they are."""
    rows = list(ratings_rows())
    rows = [(user, item, 1e6 if user == rows[0][0] else rating) for user, item, rating in rows]
    union = write_ratings(tmp_path / "union.csv", rows)
    parts = [write_ratings(tmp_path / f"n{k}.csv", [r for r in rows if int(r[0][1:]) % 2 == k]) for k in range(2)]
    config = dataclasses.replace(
        ROUND_ZERO_CONFIG, data=dataclasses.replace(ROUND_ZERO_CONFIG.data, fractions=(1.0, 0.0, 0.0)), rounds=1
    )
    plan = plan_of(config)
    zero, users = plan.zero, plan.read_file(union).users
    state = zero.start()
    while not state.done:
        nodes = [plan.read_file(part).users.train for part in parts]
        answers = [zero.answer(zero.from_bytes(zero.to_bytes(state)), clients) for clients in nodes]
        state = zero.advance(state, {name: sum(answer[name] for answer in answers) for name in answers[0]})
    found = plan.prepared(zero.to_bytes(state)).config.model.scale
    ratings = fr.data.load(union, schema=fr.data.RatingsSchema(np.arange(100, 100 + ITEMS)))
    expected = RATINGS.prepare(plan.config, ratings, users, plan.legend).config.model.scale
    assert state.estimate.outliers > 0
    assert expected.mean < 10
    for name in ("mean", "deviation", "low", "high", "noise", "user_ridge", "trait_ridges"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), 1e-9)


# ---- clicks ----

CLICKS_CONFIG = ClicksConfig(
    data=ClickData(source="", fractions=(0.6, 0.2, 0.2), max_examples=6, at_least=2.0),
    model=Ranking(dim=3),
    rounds=3,
    evaluate_every=0,
    seed=5,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "secure", "tolerance"),
    [
        ({}, False, 1e-6),
        pytest.param({"counts": "log"}, False, 1e-6, marks=pytest.mark.slow),
        pytest.param({}, True, 2e-6, marks=pytest.mark.slow),
    ],
)
def test_clicks_on_nodes_give_what_the_simulation_of_the_union_gives(changes, secure, tolerance, files, tmp_path):
    config = dataclasses.replace(CLICKS_CONFIG, model=dataclasses.replace(CLICKS_CONFIG.model, **changes))
    plan = plan_of(config, secure=secure, least_nodes=2)
    outcome = deployed(plan, grid_of(files[1]), tmp_path / "run")
    found, path = open_model(tmp_path / "run"), str(files[0])
    ours = dataclasses.replace(plan.config, data=dataclasses.replace(plan.config.data, source=path))
    clicks = CLICKS.load(ours, silent)
    known = np.arange(100, 100 + ITEMS)
    assert np.array_equal(clicks.item_ids, known)  # or the simulation would number items in another way
    users = CLICKS.divide(ours, clicks, silent)
    ready = CLICKS.prepare(ours, clicks, users, CLICKS.legend(ours, clicks))
    algorithm = build_algorithm(ready.config, ready.model, ready.users.train.num_examples)
    run = fr.train(
        algorithm, ready.users.train, rounds=3, clients_per_round=len(ready.users.train), seed=plan.config.seed
    )
    assert_close(outcome.params, run.params, tolerance)
    assert found.legend.counts.tolist() == ready.legend.counts.tolist()
    test = make_evaluator(ready.config, algorithm, ready.users, part="test")(run.params)
    assert (outcome.test.clients, outcome.test.examples) == (test.clients, test.examples)
    for name in ("ndcg@100", "recall@20", "loss"):
        np.testing.assert_allclose(outcome.test.micro[name], test.micro[name], 1e-4)
    assert main(["recommend", str(tmp_path / "run"), "--clicks", path, "--user", "u001"]) == 0


def test_a_plan_names_no_file():
    data = dataclasses.replace(CLICKS_CONFIG.data, source="private.csv", titles="private.csv")
    assert b"private" not in plan_of(dataclasses.replace(CLICKS_CONFIG, data=data)).content


# ---- an algorithm made in Python ----


def keras_algorithm():
    item = keras.Input((), dtype="int32", name="item")
    row = keras.layers.Embedding(ITEMS, 3, name="items")(item)
    network = keras.Model(item, keras.layers.Dense(1, use_bias=False, name="user")(row))
    model = fr.models.from_keras(network, local="user", inputs="item", label="rating", loss="mse")
    solver = fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=4)
    return fr.federated_reconstruction(model, reconstruct=solver, update=solver, server=fr.optimizers.sgd(1.0))


def population(users=range(18)):
    ratings = fr.data.synthetic_ratings(num_users=18, num_items=ITEMS, mean_ratings=6, seed=2)
    named = dataclasses.replace(ratings, names=np.array([f"u{k}" for k in range(18)]))
    return named.take(list(users))


@pytest.mark.slow
def test_a_keras_model_on_nodes_gives_what_the_simulation_gives(tmp_path):
    algorithm, everybody = keras_algorithm(), population()
    plan = plan_for(algorithm, everybody, rounds=3, fractions=(0.8, 0.0, 0.2), max_examples=12, seed=4)
    parts = [population(range(k, 18, 3)) for k in range(3)]
    nodes = [
        Node(lambda plan, own=own: plan.split_clients(own), lambda plan: True, algorithm=algorithm, memory=Memory(None))
        for own in parts
    ]
    outcome = deployed(plan, InProcess({k: node.handle for k, node in enumerate(nodes)}), tmp_path)
    users = plan.split_clients(everybody).users
    everyone = len(users.train)
    run = fr.train(plan.algorithm, users.train, rounds=3, clients_per_round=everyone, seed=4)
    assert_close(outcome.params, run.params)
    assert fr.kit.digest(fr.load_algorithm(tmp_path / "model", algorithm).algorithm) == fr.kit.digest(plan.algorithm)
    assert outcome.test.clients > 0


def test_a_node_refuses_plans_of_other_or_missing_algorithms():
    algorithm, own = keras_algorithm(), population(range(6))
    plan = plan_for(algorithm, own, rounds=1, max_examples=12)
    other = fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS, 2),
        reconstruct=fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=4),
        update=fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=4),
        server=fr.optimizers.sgd(1.0),
    )
    for given, why in ((None, "name it with --algorithm"), (other, "the one given here is")):
        with pytest.raises(PlanError, match=why):
            Plan.from_bytes(plan.content, given)


@pytest.mark.slow
def test_an_operator_names_the_function_that_brings_the_algorithm(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import test_deploy_plans as t\ndef make(path):\n    return t.keras_algorithm(), t.population(range(6))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = plan_for(keras_algorithm(), population(), rounds=1, max_examples=12)

    def operated(name):
        words = [str(tmp_path / "unused.csv"), "--server", "a:1", "--insecure", "--accept", plan.digest]
        return join.make_node(join.parse([*words, "--algorithm", name]), tmp_path / "state", None, print)

    reply = operated("mine:make").handle(pack(Envelope("join", plan.digest, "run", 0, {}, plan.content)))
    assert unpack(reply, 2**20).kind == "ok"
    with pytest.raises(PlanError, match="got 'mine:nothing'"):
        operated("mine:nothing")


# ---- signed keys ----


@pytest.fixture(scope="module")
def signing_keys():
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    return [ed25519.Ed25519PrivateKey.generate() for _ in range(4)]


def lines_of(keys):
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    lines = [key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() for key in keys]
    return tuple(f"{line} n{k}" for k, line in enumerate(lines))


def signing_node(plan, file, key, known=None):
    return Node(lambda plan: plan.read_file(file), lambda plan: True, key=key, trusted=known)


SIGNED = dataclasses.replace(
    config_of(
        reconstruct=Reconstruct(solver="least-squares", ridge=0.5),
        data=Data(source="", fractions=(1.0, 0.0, 0.0), max_examples=10),
    ),
    rounds=1,
)


@pytest.mark.slow
def test_secure_sums_with_signed_keys_give_the_same(files, signing_keys, tmp_path):
    plan = plan_of(SIGNED, secure=True, least_nodes=3, nodes=lines_of(signing_keys[:3]))
    grid = InProcess(
        {7 - k: signing_node(plan, part, signing_keys[k]).handle for k, part in enumerate(files[1])}
    )  # numbers of the grid are not those of the plan's list
    outcome = deployed(plan, grid, tmp_path)
    assert_close(outcome.params, simulated(plan, files[0])[0].params, 2e-6)


@pytest.mark.slow
def test_a_server_cannot_invent_a_node(files, signing_keys, tmp_path):
    """The server stands in for the third node with a key of its own: real nodes refuse its roster, and send nothing."""
    plan = plan_of(SIGNED, secure=True, least_nodes=2, nodes=lines_of(signing_keys[:3]))
    handlers = {k: signing_node(plan, files[1][k], signing_keys[k]).handle for k in range(2)}
    invented = signing_node(plan, files[1][2], signing_keys[2])
    grid = InProcess({**handlers, 2: invented.handle})
    terms = secure_sum.plan(3, length_of(shapes_of(plan, "train")), bits=64, round=0, circle=3, threshold=2)
    hellos = []
    for k in range(3):
        invented.key = signing_keys[2]
        for message in (
            Envelope("join", plan.digest, "run", 0, {}, plan.content),
            Envelope("advertise", plan.digest, "run", 0, {"purpose": "train", "me": k}, terms.to_bytes()),
        ):
            reply = unpack(grid.handlers[k](pack(message)), 2**20)
            assert reply.kind == "ok"
            invented.key = signing_keys[3]  # after it has joined: the server has no key of the list
        hellos.append((k, reply.body))
    _, rosters = secure_sum.introduce(terms, hellos)  # a server that does not look at signatures
    for k in range(2):
        message = Envelope("share", plan.digest, "run", 0, {}, rosters[k])
        reply = unpack(grid.handlers[k](pack(message)), 2**20)
        assert reply.facts["reason"] == "secure_sum"
        assert "has not signed its keys" in reply.facts["why"]


def test_a_node_without_a_key_is_in_no_list(signing_keys):
    lines = lines_of(signing_keys[:3])
    others = {
        (): "not among them",
        ("",): "'' is damaged, or is not a public",
        ("ssh-new AA",): "'ssh-new AA' is damaged",
    }
    for more, sentence in others.items():
        nodes = (*lines, *more)
        plan = plan_of(SIGNED, secure=True, least_nodes=2, nodes=nodes)
        with pytest.raises(ValueError, match=sentence):
            admission.number_in_plan(plan, None, None)


def test_a_node_accepts_no_list_with_strangers_and_none_without_itself(files, signing_keys):
    plan = plan_of(SIGNED, secure=True, least_nodes=2, nodes=lines_of(signing_keys[:3]))
    join = pack(Envelope("join", plan.digest, "run", 0, {}, plan.content))
    for key, known, why in (
        (signing_keys[3], None, "not among them"),
        (None, None, "not among them"),
        (signing_keys[0], lines_of(signing_keys[:2]), "1 nodes that this node's owner does not know"),
    ):
        reply = unpack(signing_node(plan, files[1][0], key, known).handle(join), 2**20)
        assert reply.facts["reason"] == "not_accepted"
        assert why in reply.facts["why"]
    unsigned = plan_of(SIGNED, secure=True, least_nodes=2)
    node = signing_node(unsigned, files[1][0], signing_keys[0], lines_of(signing_keys))
    reply = unpack(node.handle(pack(Envelope("join", unsigned.digest, "run", 0, {}, unsigned.content))), 2**20)
    assert "in this plan keys are not signed" in reply.facts["why"]
    assert weaker(plan.promises, unsigned.promises) == ["the keys of secure sums are no longer signed"]


def test_the_largest_message_of_a_plan_has_room_for_joining_after_round_zero():
    """Of a narrow model with many items, what round zero found is larger than the parameters."""
    config = dataclasses.replace(
        ROUND_ZERO_CONFIG,
        model=dataclasses.replace(ROUND_ZERO_CONFIG.model, dim=1, implicit_feedback=False, implicit_prior=0.0),
    )
    plan = make_plan(config, Items(np.arange(300_000)))
    state = plan.zero.start()._replace(answered=1)
    assert len(plan.content) + len(plan.zero.to_bytes(state)) + 2**14 < largest_message(plan)
