"""Training on a device: what it draws, packs, computes and reports is what the simulator does."""

import contextlib
import json
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from device_vectors import DAMAGE, changed, keys_of, packed_examples, places_in, whole_plan
from fedrecon._src.algorithms.algorithm import with_params
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.core.keys import words_of
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.privacy.secure_sum.two_servers import read_served_plan
from fedrecon_device import Bundle, BundleError, check
from fedrecon_device.keys import client_key, name_hash, redrawn_order
from fedrecon_device.plan import read_plan
from fedrecon_device.training import Trainer, lay_out, pack_examples

WEB = Path(__file__).parent / "web"
HELPER = "ab" * 32
SIZES = {"ann": 0, "bo": 1, "cy": 2, "dee": 7, "eve": 12, "flo": 3, "gus": 9, "hal": 5, "ida": 11, "jo": 4, "kim": 6}
SEED, ROUND, MOST, ITEMS = 3, 4, 12, 200


CASES = packed_examples()


def test_a_device_draws_keys_and_orders_as_jax_does():
    for case in keys_of():
        round_key, name = tuple(case["round"]), case["name"]
        assert f"{name_hash(name):016x}" == case["hash"]
        assert list(client_key(round_key, name)) == case["key"]
        assert redrawn_order(round_key, name, len(case["order"])) == case["order"]


def test_a_device_packs_examples_as_the_simulator_does():
    for case in CASES:
        inputs = pack_examples(case["plan"], case["columns"], tuple(case["round"]), case["name"])
        assert {name: np.asarray(x).tolist() for name, x in inputs.items()} == case["inputs"]


def test_ids_outside_the_table_and_columns_that_do_not_fit_are_refused():
    case = CASES[3]
    with pytest.raises(BundleError, match="40 rows"):
        pack_examples(case["plan"], {**case["columns"], "item": [40] * 7}, (0, 0), "ann")
    with pytest.raises(BundleError, match="same length"):
        pack_examples(case["plan"], {**case["columns"], "item": [4]}, (0, 0), "ann")


def test_rows_and_arrays_go_to_their_places_in_the_vector():
    about = {
        "length": 9,
        "dtype": "uint32",
        "layout": [
            {"at": 0, "values": "table", "ids": "ids", "count": "count"},
            {"at": 8, "values": "weight"},
        ],
    }
    outputs = {"table": np.uint32([[1, 2], [3, 4], [0, 0]]), "ids": np.int32([3, 1, 0]), "count": np.int32(2)}
    vector = lay_out(about, {**outputs, "weight": np.uint32(7)})
    assert vector.tolist() == [0, 0, 3, 4, 0, 0, 1, 2, 7]
    with pytest.raises(BundleError, match="does not fit"):
        lay_out(about, {**outputs, "ids": np.int32([5, 1, 0]), "weight": np.uint32(7)})


# ---- whole rounds ----


def sgd(learning_rate=0.1, **limits):
    return fr.gradient_descent(fr.optimizers.sgd(learning_rate), batch_size=5, **limits)


def secure(**more):
    return fr.aggregators.secure(5.0, clients=100, max_weight=100.0, **more)


def paper(aggregate):
    """Return the paper's factorization: SGD in R and U, half and half."""
    model = fr.models.matrix_factorization(ITEMS, 6)
    solver = sgd(steps=50)
    server = fr.optimizers.sgd(1.0)
    return fr.federated_reconstruction(model, reconstruct=solver, update=solver, server=server, aggregate=aggregate)


def recipe(aggregate):
    """Return the default recipe for ratings: least squares, second order, redrawn halves, evidence."""
    from device_models import default_model
    from fedrecon._src.recommend.tasks import build_algorithm

    saved = default_model()
    return build_algorithm(saved.config, saved.algorithm.model, 1, aggregate)


def ratings_of(name, items=ITEMS):
    draw = np.random.default_rng(sum(map(ord, name)))
    items = draw.permutation(items)[: SIZES[name]].astype(np.int32)
    return {"item": items, "rating": draw.integers(1, 6, SIZES[name]).astype(np.float32)}


def everybody():
    columns = {name: np.concatenate([ratings_of(client)[name] for client in SIZES]) for name in ("item", "rating")}
    return fr.Clients.from_columns(columns, client=np.repeat(list(SIZES), list(SIZES.values())))


def params_of(algorithm):
    """Return parameters as large as trained ones."""
    draw = np.random.default_rng(0)
    start = algorithm.params(algorithm.init(jax.random.key(0)))
    return jax.tree.map(lambda leaf: np.asarray(leaf + 0.1 * draw.normal(size=leaf.shape), np.float32), start)


def vector_of(total):
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(total)])


def arrays_of(message):
    return {f"message/{path}": np.asarray(leaf) for path, leaf in flatten(message)[0].items()}


ALGORITHMS = {
    "paper": lambda: paper(fr.aggregators.mean()),
    "paper, ring": lambda: paper(secure()),
    "recipe, two servers": lambda: recipe(secure(protocol="two-servers", bits=24)),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Export each algorithm once; return by name its bundle, the algorithm and the server's state."""
    made = {}

    def get(name):
        if name not in made:
            algorithm = ALGORITHMS[name]()
            params = params_of(algorithm)
            helper = HELPER if "two servers" in name else None
            out = fr.device.bundle(
                algorithm,
                params,
                tmp_path_factory.mktemp("train") / "bundle",
                like={"item": np.arange(20), "rating": np.resize(np.float32([1, 2.5, 4]), 20)},
                most=MOST,
                train=fr.device.DevicePlan(rounds=5, least=3, helper=helper),
            )
            state = with_params(algorithm.init(fr.kit.run_keys(SEED).init), params)
            made[name] = out, algorithm, state
        return made[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_devices_report_what_the_simulator_adds_up(bundles, name):
    folder, algorithm, state = bundles(name)
    trainer, key = Trainer(Bundle(folder)), fr.kit.round_key(SEED, ROUND)
    message, lengths = (
        algorithm.message(state),
        fr.kit.Lengths(*(trainer.plan["examples"][s] for s in ("support", "query"))),
    )
    total, different = 0, 0
    for client in SIZES:
        columns = ratings_of(client)
        vector = trainer.update(arrays_of(message), tuple(words_of(key).tolist()), client, columns).vector
        expected = vector_of(
            fr.kit.client_total(algorithm, message, columns, key, client=client, lengths=lengths).total
        )
        if vector.dtype == np.uint32:
            steps = (vector - expected).view(np.int32)
            different += np.count_nonzero(steps)
            assert np.abs(steps).max() <= 1
        else:
            np.testing.assert_allclose(vector, expected, rtol=1e-5, atol=1e-5)
        total = total + vector
    assert different <= 1, f"{different} integers differ by a step"
    whole = fr.kit.client_total(algorithm, message, everybody(), key, lengths=lengths).total
    if total.dtype == np.uint32:
        total = fr.privacy.from_vector(total, total_shapes(algorithm))
    else:
        leaves, structure = jax.tree.flatten(total_shapes(algorithm))
        cuts = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = [part.reshape(leaf.shape) for part, leaf in zip(np.split(total, cuts), leaves, strict=True)]
        total = jax.tree.unflatten(structure, parts)
    on_devices, simulated = (
        flatten(algorithm.params(fr.kit.server_update(algorithm, state, [sums], key)))[0] for sums in (total, whole)
    )
    for path, leaf in simulated.items():
        np.testing.assert_allclose(on_devices[path], leaf, atol=1e-6)
    assert any(
        np.abs(leaf - flatten(algorithm.params(state))[0][path]).max() > 1e-3 for path, leaf in simulated.items()
    )


@pytest.mark.slow
def test_the_plan_says_what_devices_agree_to(bundles):
    folder, algorithm, _ = bundles("recipe, two servers")
    plan = read_plan((folder / "plan.json").read_bytes())
    assert plan["sum"] == {"protocol": "two-servers", "bits": 24, "helper": HELPER, "least": 3}
    assert plan["algorithm"] == fr.kit.digest(algorithm)
    assert (plan["rounds"], plan["noise"], plan["split"]["redrawn"]) == (5, None, True)
    assert (
        plan["vector"]["length"] == vector_of(jax.tree.map(lambda s: np.zeros(s.shape), total_shapes(algorithm))).size
    )


@pytest.mark.slow
def test_check_runs_the_training_vectors(bundles, tmp_path):
    folder, *_ = bundles("paper")
    assert check(folder).vectors == 12
    assert json.loads((folder / "training_vectors.json").read_text())["message"]["message/method/item_embedding"] == {
        "table": "item_embedding"
    }


@pytest.mark.slow
@pytest.mark.skipif(not (WEB / "node_modules").is_dir(), reason="needs node and its packages: make test-web")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_node_computes_the_training_vectors(bundles, name):
    command = ["node", "training_vectors.mjs", str(bundles(name)[0])]
    result = json.loads(subprocess.run(command, cwd=WEB, capture_output=True, text=True, check=True).stdout)
    assert result["cases"] == 6
    assert result["worst"] <= (1e-5 if name == "paper" else 1)  # floats; steps of a ring
    assert result["different"] <= 1 or name == "paper"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_plan_is_refused_or_harmless(data):
    case = CASES[data.draw(st.integers(0, len(CASES) - 1))]
    plan = whole_plan(case["plan"])
    path = data.draw(st.sampled_from(list(places_in(plan))))
    plan = changed(plan, path, data.draw(st.sampled_from(DAMAGE)))
    with contextlib.suppress(BundleError):
        pack_examples(read_plan(json.dumps(plan).encode()), case["columns"], tuple(case["round"]), case["name"])


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("sum", "least"), 1, "sum.least"),
        (("limits", "reports_per_day"), 1001, "limits.reports_per_day"),
        (("noise",), {"variance": 0, "least": 2, "epsilon": 8, "delta": 1e-6}, "noise.variance"),
        (("noise",), {"variance": 1, "least": 4, "epsilon": 8, "delta": 1e-6}, "noise.least"),
        (("noise",), {"variance": 1, "least": 2, "delta": 1e-6}, "noise.epsilon"),
        (("noise",), False, "noise"),
    ],
)
def test_a_device_does_not_agree_to(path, value, field):
    plan = whole_plan(CASES[0]["plan"])
    with pytest.raises(BundleError, match=f"`{field}`"):
        read_plan(json.dumps(changed(plan, path, value)).encode())
    plan = changed(plan, ("sum",), {"protocol": "open", "bits": 32, "helper": None, "least": 1})
    assert read_plan(json.dumps(plan).encode())["sum"]["least"] == 1  # nothing is hidden, and that is said


def test_plans_as_they_are_written_are_read():
    for case in CASES:
        assert read_plan(json.dumps(whole_plan(case["plan"])).encode())["split"] == case["plan"]["split"]


def test_a_plan_that_does_not_fit_the_sums_is_refused():
    with pytest.raises(ValueError, match="`helper`"):
        fr.device.DevicePlan().check(paper(secure(protocol="two-servers")))
    with pytest.raises(ValueError, match="two servers"):
        fr.device.DevicePlan(helper=HELPER).check(paper(fr.aggregators.mean()))
    with pytest.raises(ValueError, match=r"`least`.* 2 "):
        fr.device.DevicePlan(least=1, helper=HELPER).check(paper(secure(protocol="two-servers")))
    with pytest.raises(ValueError, match="least"):
        fr.device.DevicePlan(least=0).check(paper(fr.aggregators.mean()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["counts", "clicks"])
def test_saved_models_train_on_what_people_have(tmp_path, name):
    """People have counts; the model reads their logarithms, or weights made of them."""
    from device_models import clicks_model, counts_model
    from fedrecon._src.device.model_bundle import DeviceTraining, bundle_model

    saved = counts_model() if name == "counts" else clicks_model("log")
    folder = bundle_model(saved, tmp_path / "b", most=MOST, train=DeviceTraining(fr.device.DevicePlan(helper=HELPER)))
    assert check(folder).vectors == 12
    assert set(Trainer(Bundle(folder)).plan["examples"]["columns"]) == {"item", "rating"}


@pytest.mark.slow
def test_the_command_bundles_a_saved_model_for_training_with_noise(tmp_path):
    from device_models import default_model
    from fedrecon.__main__ import main
    from fedrecon._src.core.factories import follow
    from fedrecon._src.recommend.saved_models import open_model

    default_model().save(tmp_path / "model")
    options = ["--examples", "12", "--train", "--devices.rounds", "7", "--devices.helper", HELPER]
    options += [
        "--devices.least",
        "20",
        "--devices.per-round",
        "40",
        "--privacy.epsilon",
        "8",
        "--privacy.delta",
        "1e-5",
    ]
    assert main(["bundle", str(tmp_path / "model"), "--out", str(tmp_path / "b"), *options]) == 0
    plan = read_plan((tmp_path / "b" / "plan.json").read_bytes())
    again = open_model(tmp_path / "model").trainable(plan["rounds"], follow(plan["aggregator"]))
    assert plan["algorithm"] == fr.kit.digest(again)
    assert read_served_plan(tmp_path / "b").per_round == 40
    assert 7.9 < plan["noise"]["epsilon"] <= 8
    assert (plan["noise"]["least"], plan["noise"]["delta"]) == (20, 1e-5)
    share = again.aggregator.share(total_shapes(again).parts)
    assert plan["noise"]["variance"] == share.variance
    # Neither a weight nor metrics are sent, nor what the server leaves as it is.
    constant = sum(length for _, length in plan["vector"]["left_out"])
    assert plan["vector"]["length"] + constant == share.length
    assert constant == 400 * (1 + 2) + 1  # a bias and two traits of every item, and the mean


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices.rounds", "7"], "--devices: needs --train"),
        (["--train", "--privacy.epsilon", "8"], "--devices.helper: is missing"),
        (["--train", "--devices.per-round", "20"], "--privacy.epsilon: is missing"),
        (["--train", "--devices.helper", "x", "--privacy.epsilon", "8", "--devices.per-round", "5"], "must be from"),
    ],
)
def test_options_of_noise_that_do_not_fit_are_refused(options, message, capsys):
    from fedrecon.__main__ import main

    assert main(["bundle", "run", "--out", "b", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_bundles_a_saved_model_for_training(tmp_path, capsys):
    from device_models import default_model
    from fedrecon.__main__ import main
    from fedrecon._src.core.factories import follow
    from fedrecon._src.recommend.saved_models import open_model

    default_model().save(tmp_path / "model")
    options = ["--examples", "12", "--train", "--devices.rounds", "7", "--devices.helper", HELPER]
    assert main(["bundle", str(tmp_path / "model"), "--out", str(tmp_path / "b"), *options]) == 0
    assert "all test vectors" in capsys.readouterr().out
    plan = read_plan((tmp_path / "b" / "plan.json").read_bytes())
    again = open_model(tmp_path / "model").trainable(plan["rounds"], follow(plan["aggregator"]))
    assert plan["algorithm"] == fr.kit.digest(again)
    assert plan["sum"]["bits"] == 32
    assert "key" not in plan["inputs"]  # this recipe starts at zero


@pytest.mark.slow
def test_simulation_silos_and_devices_train_one_model(bundles):
    """Ring sums are exact in any order, so all three have the same parameters to the bit."""
    folder, algorithm, _ = bundles("recipe, two servers")
    trainer, clients = Trainer(Bundle(folder)), everybody()
    lengths = fr.kit.Lengths(*(trainer.plan["examples"][side] for side in ("support", "query")))
    start = algorithm.init(fr.kit.run_keys(SEED).init)
    silos = [clients.take(np.arange(0, 4)), clients.take(np.arange(4, len(clients)))]
    on_silos = on_devices = start
    for number in range(3):
        key = fr.kit.round_key(SEED, number)
        message = algorithm.message(on_silos)
        totals = [fr.kit.client_total(algorithm, message, silo, key, lengths=lengths).total for silo in silos]
        on_silos = fr.kit.server_update(algorithm, on_silos, totals, key)
        arrays, words = arrays_of(algorithm.message(on_devices)), tuple(words_of(key).tolist())
        reports = [trainer.update(arrays, words, name, ratings_of(name)).vector for name in SIZES]
        total = fr.privacy.from_vector(np.sum(reports, 0, dtype=np.uint32), total_shapes(algorithm))
        on_devices = fr.kit.server_update(algorithm, on_devices, [total], key)
    simulated = fr.train(algorithm, clients, rounds=3, clients_per_round=len(clients), seed=SEED).params
    for state in (on_silos, on_devices):
        for path, leaf in flatten(algorithm.params(state))[0].items():
            np.testing.assert_array_equal(leaf, flatten(simulated)[0][path], err_msg=path)
    before = flatten(algorithm.params(start))[0]
    assert any(np.abs(leaf - before[path]).max() > 1e-3 for path, leaf in flatten(simulated)[0].items())
