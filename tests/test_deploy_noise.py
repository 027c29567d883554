"""A deployed training with noise: who adds it, from which entropy, what it promises, and when nodes end it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr
from deployed import Waiting, config_of, deployed, files_of, grid_of, node_of, plan_of
from fedrecon._src.core.keys import round_key
from fedrecon._src.core.upload import Total
from fedrecon._src.deploy import plan_privacy
from fedrecon._src.deploy.algorithm_plan import plan_for
from fedrecon._src.deploy.coordinator import Training
from fedrecon._src.deploy.messages import Envelope, pack, unpack
from fedrecon._src.deploy.plan import PlanError, describe, weaker
from fedrecon._src.privacy.accounting import epsilon_of
from fedrecon._src.privacy.ring import WIDTHS, restore
from fedrecon._src.recommend.config import DEFAULT, Privacy
from fedrecon._src.recommend.round_zero import run_round_zero
from fedrecon._src.server import fixed_point, gaussian
from fedrecon.deploy import InProcess, NotEnoughNodes, Plan
from toy_models import descend, linear, xy


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("files"))


def private_plan(privacy=None, **options):
    settings = Privacy(**({"clip_norm": 0.5, "noise_multiplier": 0.7} | (privacy or {})))
    return plan_of(config_of(privacy=settings), **{"users": 24, "least_nodes": 3, **options})


SECURE = {"secure": True}


def parameters(outcome):
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(outcome.params)])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SECURE], ids=["noise of the server", "noise of the nodes"])
def test_two_runs_of_one_plan_have_other_noise(options, files, tmp_path):
    """It cannot follow from the plan's seed, which everybody knows."""
    plan = private_plan(**options)
    outcomes = [deployed(plan, grid_of(files[1]), tmp_path / str(k)) for k in range(2)]
    one, two = map(parameters, outcomes)
    assert (one != two).all()
    assert np.std(one - two) > 0.01


@pytest.mark.slow
def test_without_its_noise_the_sum_of_integers_is_that_of_clipped_changes(files, tmp_path, monkeypatch):
    monkeypatch.setattr(fixed_point, "draw", lambda share, rng, hosts: np.zeros(share.length, np.uint32))
    monkeypatch.setattr(gaussian, "draw_noise", lambda like, deviation, key: jax.tree.map(jnp.zeros_like, like))
    by_nodes, by_server = (
        deployed(private_plan({"clip_norm": 0.4}, **options), grid_of(files[1]), tmp_path / str(len(options)))
        for options in (SECURE, {})
    )
    np.testing.assert_allclose(parameters(by_nodes), parameters(by_server), atol=2e-3)


def test_the_least_nodes_together_have_the_noise_that_is_promised(monkeypatch):
    plan = private_plan(**SECURE)
    shapes = plan_privacy.parts_of(plan.algorithm)
    zeros = Total(
        {name: {path: np.zeros(v.shape, np.uint32) for path, v in part.items()} for name, part in shapes.items()}, {}
    )
    share, rng = plan.algorithm.aggregator.share(shapes), np.random.default_rng(0)
    monkeypatch.setattr(plan_privacy, "system_generator", lambda: rng)
    assert share.least == 3
    sums = []
    for _ in range(300):
        nodes = [plan_privacy.add_node_noise(plan.algorithm, zeros).parts["delta"] for _ in range(3)]
        total = sum(np.concatenate([values.reshape(-1) for values in node.values()]) for node in nodes)
        sums.append(total.astype(np.int32).astype(float))
    assert np.std(sums) == pytest.approx(0.7 * share.steps, rel=0.02)


@pytest.mark.slow
def test_the_plan_says_what_it_promises_and_the_run_what_was_spent(files, tmp_path):
    plan = private_plan({"noise_multiplier": None, "epsilon": 8.0}, share=0.5, **SECURE)
    assert 7.9 < plan.promises.epsilon <= 8.0
    told = dict(describe(plan))
    assert "epsilon 7.99 at delta 0.03 for every user, with noise that every node adds" in told["privacy"]
    assert "a node answers 4 times at most" in told["privacy"]
    assert "validation" in told["privacy"]
    assert "counts" not in told["sent"]
    outcome = deployed(plan, grid_of(files[1]), tmp_path)
    spent = json.loads((tmp_path / "run.json").read_text())["privacy"]
    assert (
        spent["epsilon"] == epsilon_of([plan.release._replace(rounds=3)], plan.promises.delta) < plan.promises.epsilon
    )
    assert spent["randomness"] == "system"
    assert "not_covered" in spent
    evaluations = [entry for entry in outcome.history if entry["kind"] == "evaluation"]
    assert [entry["epsilon"] for entry in evaluations][-1] == spent["epsilon"]
    rounds = [entry for entry in outcome.history if entry["kind"] == "round"]
    assert rounds[-1]["epsilon"] == spent["epsilon"] > rounds[0]["epsilon"]
    assert all(np.isnan(entry["loss"]) and np.isnan(entry["weight"]) for entry in rounds)
    assert not {"clients", "clipped", "non_finite"} & set(rounds[0])


@pytest.mark.slow
def test_nodes_count_their_answers_over_all_runs_of_a_plan(files, tmp_path):
    plan = private_plan(**SECURE)
    nodes = {k: node_of(part, tmp_path / f"node{k}") for k, part in enumerate(files[1])}
    deployed(plan, InProcess({k: node.handle for k, node in nodes.items()}), tmp_path / "first")
    assert nodes[0].memory.answers == {plan.digest: 3}
    # A second run, with the nodes started anew: one answer is left to each, and the promise is for all of them.
    again = {k: node_of(part, tmp_path / f"node{k}") for k, part in enumerate(files[1])}
    with pytest.raises(NotEnoughNodes, match="budget"):
        deployed(plan, InProcess({k: node.handle for k, node in again.items()}), tmp_path / "second")
    assert again[0].memory.answers == {plan.digest: 4}


@pytest.mark.slow
def test_a_run_that_goes_on_counts_the_round_that_may_have_been_summed_twice(files, tmp_path):
    plan = private_plan(**SECURE)
    grid = grid_of(files[1])
    clock = Waiting()
    outcome = deployed(plan, grid, tmp_path, clock=clock)
    before = json.loads((tmp_path / "run.json").read_text())["privacy"]
    assert outcome.rounds == 3
    deployed(plan, grid, tmp_path, clock=clock, resume=True)
    after = json.loads((tmp_path / "run.json").read_text())["privacy"]
    assert after["rounds"] == before["rounds"] + 1
    assert after["epsilon"] > before["epsilon"]


def test_participation_does_not_follow_from_the_seed():
    plan = private_plan(share=0.5)
    clients = xy(*[([1, 2], [3, 4])] * 400)
    drawn = [set(plan_privacy.draw_participants(clients, plan.share).names.tolist()) for _ in range(2)]
    assert drawn[0] != drawn[1]
    assert all(140 < len(one) < 260 for one in drawn)


@pytest.mark.parametrize(
    ("privacy", "options", "says"),
    [
        ({}, {"users": 0}, "give --users"),
        ({}, {"least_users": 2}, "`least_users`: must be 1"),
        ({"correlated": 2}, {}, "leave out correlated"),
        ({"clip_quantile": 0.5}, SECURE, "leave out correlated and clip_quantile"),
        ({"epsilon": 1e-7, "delta": 1e-12, "noise_multiplier": None}, SECURE, "no amount of noise gives epsilon 1e-07"),
    ],
)
def test_plans_whose_promise_cannot_be_kept_are_refused(privacy, options, says):
    with pytest.raises(PlanError, match=says):
        private_plan(privacy, **options)


# ---- round zero ----


def recipe_plan(privacy=None, **options):
    config = dataclasses.replace(
        DEFAULT,
        data=dataclasses.replace(DEFAULT.data, source="", fractions=(0.6, 0.2, 0.2), max_examples=10),
        model=dataclasses.replace(DEFAULT.model, dim=3),
        privacy=Privacy(**({"noise_multiplier": 0.5, "clip_norm": 8.0, "rating_range": (0.0, 6.0)} | (privacy or {}))),
        rounds=2,
        evaluate_every=0,
    )
    return plan_of(config, **{"users": 24, "least_nodes": 3, **options})


class NoNoise:
    """A generator that draws nothing but zeros."""

    def random(self, size):
        return np.zeros(size)

    def poisson(self, rate, size):
        return np.zeros(size, np.int64)

    def normal(self, mean, deviation, size):
        return np.zeros(size)


def ask_round_zero(zero, users):
    """Ask all questions; no noise is drawn."""
    state = zero.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_privacy, "system_generator", NoNoise)
        while not state.done:
            parts = [plan_privacy.answer_round_zero(zero, state, part) for part in users]
            state = plan_privacy.advance_round_zero(zero, state, parts, len(users))
    return state


@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-9), (SECURE, 1e-3)])
def test_round_zero_over_nodes_is_that_of_the_simulation_if_no_noise_is_drawn(options, tolerance, files):
    plan = recipe_plan(**options)
    nodes = [plan.read_file(part).users.train for part in files[1]]
    estimate = ask_round_zero(plan.zero, nodes).estimate
    zero = dataclasses.replace(plan.zero, hosts=0)
    union = plan.read_file(files[0]).users.train
    assert sum(map(len, nodes)) == len(union) == zero.clients
    expected = run_round_zero(zero, union)[0]
    for name in ("mean", "deviation", "low", "high", "noise", "user_variance", "item_bias", "item_count"):
        value, other = getattr(estimate, name), getattr(expected.estimate, name)
        np.testing.assert_allclose(value, other, tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize("options", [{}, SECURE], ids=["noise of the server", "noise of the nodes"])
def test_the_answers_of_round_zero_have_the_noise_that_is_promised(options, files, monkeypatch):
    zero, nobody = recipe_plan(**options).zero, xy(([1], [2])).take(np.zeros(1, bool))
    state, rng = zero.start(), np.random.default_rng(0)
    monkeypatch.setattr(plan_privacy, "system_generator", lambda: rng)
    sums = []
    for _ in range(40):
        total = sum(plan_privacy.answer_round_zero(zero, state, nobody)["answer"] for _ in range(3))
        if zero.hosts:
            share = zero.share_of_noise(state)
            sums.append(restore(share.grid, total))
            assert share.release(1.0).noise_multiplier == zero.noise_of(state)
        else:
            assert not total.any()  # the server adds it
            sums.append(rng.normal(0.0, zero.noise_of(state), len(total)))
    assert np.std(sums) == pytest.approx(zero.noise_of(state), rel=0.02)


def test_all_of_round_zero_is_accounted_for_and_one_question_twice(files):
    plan = recipe_plan(**SECURE)
    nodes = [plan.read_file(part).users.train for part in files[1]]
    releases = plan_privacy.ledger_of(plan, 2).releases
    assert [release.purpose for release in releases] == ["round zero"] * 5 + [None]
    assert {release.mechanism for release in releases} == {"skellam"}
    cost = [release.noise_multiplier**-2 for release in releases[:-1]]
    assert sum(cost[:4]) == pytest.approx(plan.round_zero_noise**-2)
    assert cost[4] == max(cost[:4])
    assert releases[-1] == plan.release._replace(rounds=2)
    result = plan.zero.to_bytes(ask_round_zero(plan.zero, nodes))
    assert plan.prepared(result).release == plan.release


def test_a_node_answers_one_question_of_round_zero_twice_and_none_three_times(files):
    plan, node = recipe_plan({"rating_range": None}), node_of(files[1][0])

    def ask(kind, body=b"", **facts):
        return unpack(node.handle(pack(Envelope(kind, plan.digest, "run", 0, facts, body))), 2**20)

    assert ask("join", plan.content).kind == "ok"
    assert [ask("prepare", number=0).kind for _ in range(2)] == ["ok", "ok"]
    assert ask("prepare", number=0).facts["reason"] == "budget"
    histogram = 50.0 * (np.arange(plan.zero.zeros(0)["answer"].size) > 200)
    state = plan.zero.advance(plan.zero.start(), {"answer": histogram})
    body = plan.zero.to_bytes(state)
    assert ask("prepare", body, number=1).kind == "ok"
    assert ask("prepare", body, number=1).facts["reason"] == "budget"  # the spare one is used up
    assert node.memory.answers == {f"{plan.digest} prepare-0": 2, f"{plan.digest} prepare-1": 1}


def test_a_forged_state_does_not_make_answers_without_a_bound(files):
    plan = recipe_plan()
    zero, users = plan.zero, plan.read_file(files[0]).users.train
    state = zero.advance(zero.start(), zero.answer(zero.start(), users))
    assert np.linalg.norm(zero.answer(state, users.take(np.arange(1)))["answer"]) <= 1
    forged = state._replace(estimate=state.estimate._replace(deviation=1e-308, mean=1e308))
    with pytest.raises(ValueError, match="unbounded answers"), np.errstate(all="ignore"):
        plan_privacy.answer_round_zero(zero, forged, users)


def test_a_rough_number_of_users_is_corrected_by_what_they_answer(files):
    """With the number that the plan says, the mean would be off by as much as the number is."""
    means = []
    for users in (24, 32):
        plan = recipe_plan(users=users)
        nodes = [plan.read_file(part).users.train for part in files[1]]
        state = ask_round_zero(dataclasses.replace(plan.zero, noise_multiplier=1e-3), nodes)
        means.append(state.estimate.mean)
        assert state.bounds.clients == pytest.approx(14, rel=0.01)
    assert means[0] == pytest.approx(means[1], rel=0.01)


@pytest.mark.slow
def test_a_run_with_noise_begins_with_round_zero_and_keeps_its_promise(files, tmp_path):
    plan = recipe_plan({"epsilon": 8.0, "noise_multiplier": None, "clip_norm": None}, **SECURE)
    assert 7.9 < plan.promises.epsilon <= 8.0
    assert plan.promises.clip_norm == 8.0
    outcome = deployed(plan, grid_of(files[1]), tmp_path)
    assert np.isfinite(parameters(outcome)).all()
    spent = json.loads((tmp_path / "run.json").read_text())["privacy"]
    assert [release.get("purpose") for release in spent["releases"]] == ["round zero"] * 5 + [None]
    assert spent["epsilon"] == plan_privacy.ledger_of(plan, 2).epsilon < plan.promises.epsilon


@pytest.mark.slow
def test_without_noise_drawn_both_ways_to_add_it_train_the_same_recipe(files, tmp_path, monkeypatch):
    for module in (fixed_point, plan_privacy):
        monkeypatch.setattr(module, "draw", lambda share, *rest: np.zeros(share.length, WIDTHS[share.grid.bits][1]))
    monkeypatch.setattr(gaussian, "draw_noise", lambda like, deviation, key: jax.tree.map(jnp.zeros_like, like))
    monkeypatch.setattr(plan_privacy, "system_generator", NoNoise)
    by_nodes, by_server = (
        deployed(recipe_plan(**options), grid_of(files[1]), tmp_path / str(len(options))) for options in (SECURE, {})
    )
    # The server's optimizer divides by the size of its gradients: of one close to 0, rounding may turn the sign.
    assert np.mean(np.abs(parameters(by_nodes) - parameters(by_server)) < 5e-3) > 0.97


@pytest.mark.slow
def test_a_plan_with_less_privacy_is_weaker():
    strong, weak = private_plan().promises, private_plan({"noise_multiplier": 0.3}).promises
    assert any("epsilon rises" in line for line in weaker(strong, weak))
    assert any("epsilon rises" in line for line in weaker(strong, plan_of().promises))
    assert not any("epsilon" in line for line in weaker(weak, strong))


def made_in_python(aggregate, **options):
    algorithm = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.1), update=descend(0.1), server=optax.sgd(1.0), aggregate=aggregate
    )
    return plan_for(algorithm, xy(([1, 2], [3, 4])), rounds=2, max_examples=3, **options)


def test_algorithms_of_ones_own_are_held_to_the_same():
    noise = fr.aggregators.ClientNoise(1.0, per_round=9, least=3)
    simulated = fr.aggregators.secure(1.0, clients=50, noise=noise)
    own = fr.aggregators.secure(1.0, clients=50, noise=noise._replace(simulated=False))
    with pytest.raises(PlanError, match="would be simulated"):
        made_in_python(simulated, secure=True, least_nodes=3, users=9)
    with pytest.raises(PlanError, match="use secure sums"):
        made_in_python(own, least_nodes=3, users=9)
    with pytest.raises(PlanError, match="3 nodes are needed to add the promised noise"):
        made_in_python(own, secure=True, least_nodes=2, users=9)
    plan = made_in_python(own, secure=True, least_nodes=3, users=9)
    assert plan.promises.epsilon == pytest.approx(epsilon_of([plan.release._replace(rounds=3)], plan.promises.delta))
    with pytest.raises(PlanError, match="the number of users of all nodes together"):
        made_in_python(fr.aggregators.private(1.0, 1.0, per_round=9))


def test_noise_of_the_server_does_not_follow_from_the_seed_that_clients_know(tmp_path):
    algorithm = made_in_python(fr.aggregators.private(1.0, 1.0, per_round=9), users=9).algorithm
    weights = []
    for name in "ab":
        training = Training(algorithm, fr.RunFolder(tmp_path / name), seed=0)
        message, key = algorithm.message(training.state), round_key(0, 0)
        training.step([fr.kit.client_update(algorithm, message, {"x": [1.0, 2.0], "y": [3.0, 4.0]}, key)])
        weights.append(float(training.params()["w"]))
    assert weights[0] != weights[1]


def test_a_plan_of_an_older_format_is_refused():
    content = json.loads(plan_of().content)
    content["version"] = 2
    with pytest.raises(PlanError, match="format"):
        Plan.from_bytes(json.dumps(content).encode())
