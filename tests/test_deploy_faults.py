"""Deployments in which things go wrong: bad nodes, nodes that leave, servers that are killed, messages of any kind."""

import dataclasses
import resource
import signal

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from deployed import (
    ITEMS,
    Waiting,
    config_of,
    deployed,
    files_of,
    grid_of,
    node_of,
    plan_of,
    ratings_rows,
    simulated,
    write_ratings,
)
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.core.model import metric_names
from fedrecon._src.core.wire import to_bytes
from fedrecon._src.deploy.messages import Envelope, Failure, pack, read_tree, unpack
from fedrecon._src.deploy.plan import digest_of, is_prefix
from fedrecon._src.deploy.sums import from_integers, ring_grids, secure_sum_of, sum_users, to_evaluation, to_integers
from fedrecon._src.deploy.transport import Channel, open_reply
from fedrecon._src.recommend.config import Aggregate, Data, Reconstruct, Update
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.run_folder import RunFolder
from fedrecon.deploy import InProcess, NotEnoughNodes, Pace, Plan, PlanError, Promises, serve, weaker

# Least squares, and nobody to evaluate on: quick to compile.
CONFIG = config_of(
    reconstruct=Reconstruct(solver="least-squares", ridge=0.5),
    data=Data(source="", fractions=(1.0, 0.0, 0.0), max_examples=10),
)
PLAN = plan_of(CONFIG)
SECURE = plan_of(CONFIG, secure=True, least_nodes=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("files"))


@pytest.mark.slow
def test_nodes_learn_that_training_failed_and_refuse_the_model(files, tmp_path):
    broken = dataclasses.replace(CONFIG, update=Update(learning_rate=1e30, batch_size=4), aggregate=Aggregate())
    nodes = {k: node_of(part, tmp_path / f"node{k}") for k, part in enumerate(files[1])}
    outcome = deployed(plan_of(broken), InProcess({k: node.handle for k, node in nodes.items()}), tmp_path / "run")
    assert outcome.failed is not None
    assert all(node.finished for node in nodes.values())
    for model in (tmp_path / "run", *(tmp_path / f"node{k}" / "model" for k in nodes)):
        assert open_model(model).failed == outcome.failed


def assert_close(found, expected, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)


def union_of(folder, nodes):
    rows = [row for row in ratings_rows() if int(row[0][1:]) % 3 in nodes]
    return write_ratings(folder / "some.csv", rows)


def kind_of(data):
    return unpack(data, 2**30).kind


def message_of(plan, kind="train", /, number=0, run="run", **changes):
    state = plan.algorithm.init(jax.random.key(0))
    body = {"train": to_bytes(plan.algorithm.message(state)), "join": plan.content}.get(kind, b"")
    return Envelope(kind, plan.digest, run, number, {}, body)._replace(**changes)


def answer(node, message):
    return unpack(node.handle(pack(message)), 2**30)


def reason(node, message):
    return answer(node, message).facts["reason"]


# ---- bad nodes ----


def spoiled(handle, how):
    """A node that joins as it should, and answers training with something else."""

    def spoil(data):
        reply = handle(data)
        if kind_of(data) != "train":
            return reply
        good = unpack(reply, 2**30)
        return how(good)

    return spoil


def not_finite(good):
    total = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), total_shapes(PLAN.algorithm))
    return pack(good._replace(body=to_bytes(total)))


def dies(good):
    raise ConnectionError("gone")


BAD = {
    "garbage": lambda good: b"\x00" * 100,
    "not_finite": not_finite,
    "wrong_plan": lambda good: pack(good._replace(plan="0" * 64)),
    "old_round": lambda good: pack(good._replace(round=good.round + 1)),
    "too_large": lambda good: pack(good._replace(body=bytes(10**7))),
    "unreachable": dies,
}


@pytest.mark.slow
def test_bad_replies_are_counted_by_reason_and_leave_no_trace(files, tmp_path):
    _, parts = files
    handlers = {0: node_of(parts[0]).handle, 1: node_of(parts[1]).handle}
    for k, how in enumerate(BAD.values()):
        handlers[10 + k] = spoiled(node_of(parts[2]).handle, how)
    outcome = deployed(PLAN, InProcess(handlers), tmp_path / "run", min_nodes=2)
    rounds = [record for record in outcome.history if record["kind"] == "round"]
    assert all(record["failed"] == dict.fromkeys(sorted(BAD), 1) for record in rounds)
    assert all(record["answered"] == 2 for record in rounds)
    assert_close(outcome.params, simulated(PLAN, union_of(tmp_path, {0, 1}))[0].params)


@pytest.mark.slow
def test_a_node_that_hangs_is_late_once_and_then_left_out_for_a_while(files, tmp_path):
    _, parts = files
    handlers = {k: node_of(part).handle for k, part in enumerate(parts)}
    handlers[2] = spoiled(handlers[2], lambda good: None)
    clock = Waiting()
    outcome = deployed(PLAN, InProcess(handlers), tmp_path / "run", min_nodes=2, clock=clock, deadline=5.0)
    rounds = [record for record in outcome.history if record["kind"] == "round"]
    assert [(record["invited"], record["late"]) for record in rounds] == [(3, 1), (2, 0), (2, 0)]
    assert clock.now < 2 * 5.0
    assert_close(outcome.params, simulated(PLAN, union_of(tmp_path, {0, 1}))[0].params)


def test_a_round_is_closed_by_the_first_good_replies(files, tmp_path):
    _, parts = files
    outcome = deployed(PLAN, grid_of(parts), tmp_path, per_round=2, oversample=1.5, min_nodes=2)
    rounds = [record for record in outcome.history if record["kind"] == "round"]
    assert [(r["invited"], r["answered"], r["late"]) for r in rounds] == [(3, 2, 1)] * 3


def test_too_few_nodes_end_with_a_sentence(files, tmp_path):
    _, parts = files
    clock = Waiting()
    with pytest.raises(NotEnoughNodes, match="1 nodes take part, and a round needs 2: no others joined within 20 s"):
        deployed(PLAN, grid_of(parts[:1]), tmp_path / "a", min_nodes=2, clock=clock)
    assert 20 <= clock.now < 30
    grid = grid_of(parts[:2])
    grid.handlers[1] = spoiled(grid.handlers[1], dies)
    with pytest.raises(NotEnoughNodes, match=r"round 1 got 1 valid replies.*failed: \{'unreachable': 1\}"):
        deployed(PLAN, grid, tmp_path / "b", min_nodes=2)


def test_nodes_that_restart_are_asked_to_join_again(files, tmp_path):
    _, parts = files
    grid = grid_of(parts)
    seen = []

    def restarting(data):
        if kind_of(data) == "train" and not seen:
            seen.append(True)
            grid.handlers[1] = node_of(parts[1]).handle  # a new process, which has not joined
            return grid.handlers[1](data)
        return first(data)

    first, grid.handlers[1] = grid.handlers[1], restarting
    outcome = deployed(PLAN, grid, tmp_path / "run", min_nodes=2)
    rounds = [record for record in outcome.history if record["kind"] == "round"]
    assert [(r["answered"], r["failed"]) for r in rounds] == [(2, {"not_joined": 1}), (3, {}), (3, {})]


class Killed(BaseException):
    """As sudden as kill -9."""


def test_a_killed_server_goes_on_to_the_same_parameters(files, tmp_path):
    union, parts = files
    grid = grid_of(parts)

    def kill(record):
        if record["round"] == 2:
            raise Killed

    with pytest.raises(Killed):
        serve(PLAN, grid, RunFolder(tmp_path), Pace(min_nodes=3), clock=Waiting(), on_record=kill)
    with pytest.raises(StorageError, match="--resume"):
        deployed(PLAN, grid, tmp_path)
    outcome = deployed(PLAN, grid, tmp_path, resume=True)
    assert_close(outcome.params, simulated(PLAN, union)[0].params)
    assert [r["round"] for r in RunFolder(tmp_path).records() if r["kind"] == "round"] == [1, 2, 3]
    saved = open_model(tmp_path)
    assert_close(saved.params, outcome.params, 0)


def test_a_full_disk_ends_the_server_with_a_sentence_and_loses_no_round(files, tmp_path):
    union, parts = files
    grid, limits = grid_of(parts), resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing fails as on a full disk

    def fill(record):
        if record["round"] == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))

    try:
        with pytest.raises(StorageError, match="cannot be written: File too large"):
            serve(PLAN, grid, RunFolder(tmp_path / "run"), Pace(min_nodes=3), clock=Waiting(), on_record=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    outcome = deployed(PLAN, grid, tmp_path / "run", resume=True)
    assert_close(outcome.params, simulated(PLAN, union)[0].params)
    assert [r["round"] for r in RunFolder(tmp_path / "run").records() if r["kind"] == "round"] == [1, 2, 3]


class Huge(bytes):
    """Bytes that say they are ten gigabytes, and fail when anybody looks at them."""

    def __len__(self):
        return 10 * 2**30

    def __getitem__(self, key):
        raise AssertionError("a message was read before its size was looked at")


def test_a_message_of_ten_gigabytes_is_refused_unread_on_both_sides(files, tmp_path):
    node = node_of(files[1][0])
    answer(node, message_of(PLAN, "join"))
    assert unpack(node.handle(Huge()), 2**20).facts["reason"] == "too_large"
    handlers = {0: node_of(files[1][0]).handle, 1: spoiled(node_of(files[1][1]).handle, lambda good: Huge())}
    outcome = deployed(PLAN, InProcess(handlers), tmp_path / "run", min_nodes=1)
    assert [r["failed"] for r in outcome.history if r["kind"] == "round"] == [{"too_large": 1}] * 3


# ---- what a node refuses ----


def test_a_node_trains_in_as_many_rounds_as_the_plan_has_and_is_evaluated_after_the_last(files):
    node, last = node_of(files[1][0]), PLAN.rounds - 1
    params = to_bytes(PLAN.algorithm.params(PLAN.algorithm.init(jax.random.key(0))))
    assert answer(node, message_of(PLAN, "join")).kind == "ok"
    assert answer(node, message_of(PLAN, number=last)).kind == "ok"
    assert reason(node, message_of(PLAN, number=PLAN.rounds)) == "old_round"
    evaluate = message_of(PLAN, "evaluate", number=PLAN.rounds, facts={"part": "test"}, body=params)
    assert answer(node, evaluate).kind == "ok"
    assert reason(node, evaluate._replace(round=PLAN.rounds + 1)) == "old_round"


def test_a_node_refuses_what_it_did_not_agree_to(files, tmp_path):
    node = node_of(files[1][0], tmp_path)
    assert reason(node, message_of(PLAN)) == "not_joined"
    assert answer(node, message_of(PLAN, "join")).kind == "ok"
    assert reason(node, message_of(PLAN, plan="0" * 64)) == "wrong_plan"
    assert reason(node, message_of(PLAN, run="other")) == "old_run"
    assert answer(node, message_of(PLAN, number=1)).kind == "ok"
    assert reason(node, message_of(PLAN, number=0)) == "old_round"
    assert reason(node, message_of(PLAN, number=4)) == "old_round"
    assert reason(node, message_of(PLAN, number=1, body=b"x" * 50)) == "garbage"
    assert reason(node, message_of(PLAN, "exec")) == "garbage"
    broken = jax.tree.map(lambda leaf: np.full(leaf.shape, np.inf, leaf.dtype), PLAN.message_shapes)
    assert reason(node, message_of(PLAN, number=1, body=to_bytes(broken))) == "not_finite"
    assert unpack(node.handle(bytes(10**8)), 2**20).facts["reason"] == "too_large"
    again = node_of(files[1][0], tmp_path, accept=lambda plan: False)  # started anew: it remembers
    assert answer(again, message_of(PLAN, "join")).kind == "ok"
    assert reason(again, message_of(PLAN, number=0)) == "old_round"
    assert answer(again, message_of(PLAN, "join", run="next")).kind == "ok"
    assert reason(again, message_of(PLAN, "join", run="run")) == "old_run"


def test_a_node_asks_its_owner_once_and_refuses_a_weaker_plan(files):
    asked = []
    node = node_of(files[1][0], accept=lambda plan: asked.append(plan.digest) or True)
    strong = plan_of(CONFIG, least_users=2)
    clipped = plan_of(dataclasses.replace(CONFIG, aggregate=Aggregate(clip_norm=1.0)), least_users=2)
    for plan in (strong, strong, clipped):
        assert answer(node, message_of(plan, "join")).kind == "ok"
    assert asked == [strong.digest, clipped.digest]
    assert reason(node, message_of(strong, "join")) == "weaker_plan"
    refusing = node_of(files[1][0], accept=lambda plan: False)
    assert reason(refusing, message_of(PLAN, "join")) == "not_accepted"
    assert reason(refusing, message_of(PLAN)) == "not_joined"


def test_weaker_names_every_promise_that_falls():
    strong = Promises(True, 3, 5, 20, 1.0, 0.1)
    assert weaker(strong, strong) == []
    assert weaker(strong, Promises(True, 4, 6, 30, 0.5, 0.05)) == []
    assert len(weaker(strong, Promises(False, 2, 4, 10, None, 0.2))) == 6


def test_a_secure_plan_has_no_open_sums(files):
    node = node_of(files[1][0])
    answer(node, message_of(SECURE, "join"))
    assert reason(node, message_of(SECURE)) == "weaker_plan"
    assert reason(node, message_of(SECURE, "evaluate", facts={"part": "test"})) == "weaker_plan"
    assert reason(node, message_of(SECURE, "mask", body=b"\0" * 8)) == "secure_sum"


# ---- secure sums ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "counted"),
    [
        pytest.param("share", {0, 1}, marks=pytest.mark.slow),
        ("mask", {0, 1}),
        pytest.param("unmask", {0, 1, 2}, marks=pytest.mark.slow),
    ],
)
def test_a_secure_sum_survives_a_node_lost_between_messages(stage, counted, files, tmp_path):
    """Whose masked sum arrived is counted, once, also if it left right after."""
    _, parts = files
    once = dataclasses.replace(CONFIG, rounds=1)
    plan = plan_of(once, secure=True, least_nodes=2)
    grid = grid_of(parts)
    whole = grid.handlers[2]
    grid.handlers[2] = lambda data: None if kind_of(data) == stage else whole(data)
    outcome = deployed(plan, grid, tmp_path / "run", min_nodes=2)
    record = outcome.history[0]
    assert record["answered"] == len(counted)
    assert_close(outcome.params, simulated(plan, union_of(tmp_path, counted))[0].params)


def test_with_too_few_nodes_for_a_secure_sum_nobody_is_asked(files):
    grid = grid_of(files[1][:1])
    found = secure_sum_of(SECURE, Channel(grid, Waiting()), message_of(SECURE), {0: None}, 1.0, 1.0)
    assert (found.parts, found.nodes, found.replies.reasons) == ([], [], {"too_few_invited": 1})
    assert found.replies.sent == 0


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=4, max_size=4), st.integers(1, 5))
def test_integers_add_up_to_the_sum_within_the_stated_error(values, nodes):
    tree = {"a": np.array(values[:3]), "b": {"c": np.array(values[3])}}
    total = sum(to_integers(SECURE, tree) for _ in range(nodes))
    found = from_integers(SECURE, total, tree)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert np.all(np.abs(a - nodes * b) <= nodes * ring_grids(SECURE)[0][1].step / 2 + 1e-9)


@given(st.lists(st.floats(-1e17, 1e17), min_size=1, max_size=4), st.integers(1, 5))
def test_wide_integers_add_up_for_numbers_of_any_size(values, nodes):
    tree = {"a": np.array(values)}
    total = sum(to_integers(SECURE, tree, wide=True) for _ in range(nodes))
    found = from_integers(SECURE, total, tree, wide=True)["a"]
    np.testing.assert_allclose(found, nodes * tree["a"], 1e-15, nodes * 2.0**-30)


def test_numbers_beyond_the_limit_are_not_sent():
    for bad in (np.nan, np.inf, 2 * SECURE.limit):
        with pytest.raises(Failure, match="beyond the plan's limit"):
            to_integers(SECURE, {"a": np.array([bad])})


# ---- messages of any kind ----


@pytest.fixture(scope="module")
def joined(files):
    node = node_of(files[1][0])
    assert answer(node, message_of(PLAN, "join")).kind == "ok"
    good = node.handle(pack(message_of(PLAN)))
    return node, good


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_no_message_makes_a_node_or_the_server_fail(joined, data):
    """Bytes changed, cut, repeated or invented: a node answers with a refusal or a sum, the server counts a failure."""
    node, good = joined
    kinds = "train prepare join evaluate share mask unmask finish advertise"
    kind = data.draw(st.sampled_from(kinds.split()))
    for whole, read in (
        (pack(message_of(PLAN, kind)), lambda raw: unpack(node.handle(raw), 2**30)),
        (good, lambda raw: read_tree(open_reply(raw, message_of(PLAN), 2**30), total_shapes(PLAN.algorithm))),
    ):
        raw = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, min(len(raw) - 1, 600)))
            raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        del raw[data.draw(st.integers(1, len(raw))) :]
        try:
            read(bytes(raw))
        except Failure:
            assert whole is good


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200))
def test_no_bytes_make_a_plan_but_a_plan(raw):
    with pytest.raises(PlanError):
        Plan.from_bytes(raw)
    with pytest.raises(PlanError):
        Plan.from_bytes(PLAN.content[:-30] + raw)


def test_nothing_private_leaves_a_node(files, tmp_path):
    """All bytes of a run are searched for names, for local parameters, and for what users rated as support."""
    union, parts = files
    grid = grid_of(parts)
    deployed(PLAN, grid, tmp_path)
    replies = [reply for _, _, reply in grid.seen]
    assert sum(kind_of(data) == "train" for _, data, _ in grid.seen) == 9
    last = next(message for _, data, _ in reversed(grid.seen) if (message := unpack(data, 2**30)).kind == "train")
    params = fr.kit.from_bytes(last.body, PLAN.message_shapes).method
    users = PLAN.read_file(union).users.train
    halves = dataclasses.replace(users, ends=users.starts + users.sizes // 2)  # what training takes as support
    halves = halves.at_least(2)
    local = fr.reconstruct(PLAN.algorithm, params, halves)
    secrets = [leaf[i].tobytes() for leaf in jax.tree.leaves(local) for i in range(len(leaf))]
    secrets += [str(name).encode() for name in users.names]
    for one in halves:
        items = one["item"]
        secrets += [items.tobytes(), (items + 100).tobytes(), items.astype(np.int64).tobytes()]
    secrets = {secret for secret in secrets if any(secret)}
    assert len(secrets) > 60
    for reply in replies:
        for secret in secrets:
            assert secret not in reply


# ---- who takes part, and how it is measured ----


def test_who_trains_in_a_round_follows_from_names_alone(files):
    union, parts = files
    plan = plan_of(CONFIG, share=0.5)
    for number in range(3):
        everywhere = plan.participants(plan.read_file(union).users.train, number).names.tolist()
        apart = [plan.participants(plan.read_file(part).users.train, number).names.tolist() for part in parts]
        assert sorted(everywhere) == sorted(name for one in apart for name in one)
    drawn = [len(plan.participants(plan.read_file(union).users.train, number)) for number in range(40)]
    people = len(plan.read_file(union).users.train)
    assert 0.35 * people < np.mean(drawn) < 0.65 * people
    assert len(set(drawn)) > 1


@pytest.mark.slow
def test_a_node_with_too_few_users_sends_zeros(files):
    plan = plan_of(CONFIG, least_users=1000)
    node = node_of(files[1][0])
    answer(node, message_of(plan, "join"))
    body = open_reply(node.handle(pack(message_of(plan))), message_of(plan), 2**30)
    total = read_tree(body, total_shapes(plan.algorithm))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(total))


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=60))
def test_quantiles_of_histograms_are_near_the_true_ones(values):
    model = PLAN.algorithm.model
    count = len(metric_names(model))
    sums = np.stack([np.stack([np.full(count, value), np.ones(count)], -1) for value in values])
    found = to_evaluation(model, sum_users(model, sums))
    kept = found.clients - found.diverged
    assert kept + found.diverged == len(values)
    if kept == len(values):
        for q, value in found.quantiles["loss"].items():
            np.testing.assert_allclose(value, np.quantile(values, float(q)), 0.024)
        np.testing.assert_allclose(found.macro["loss"], np.mean(values), 1e-9)


def test_a_plan_is_its_bytes(tmp_path):
    PLAN.save(tmp_path)
    again = Plan.open(tmp_path)
    assert again.digest == PLAN.digest == digest_of((tmp_path / "plan.json").read_bytes())
    assert is_prefix(PLAN.digest, PLAN.digest[:16])
    assert not is_prefix(PLAN.digest, PLAN.digest[:8])
    assert plan_of(dataclasses.replace(CONFIG, seed=6)).digest != PLAN.digest
    assert len(PLAN.legend) == ITEMS
    with pytest.raises(StorageError, match="holds no plan"):
        Plan.open(tmp_path / "none")
    with pytest.raises(PlanError, match="max-examples"):
        plan_of(dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, max_examples=None)))
