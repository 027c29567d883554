import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.simulation import training as training_module
from fedrecon._src.simulation.evaluation import Evaluation
from fedrecon._src.simulation.training import _next_stop
from fedrecon._src.storage.run_folder import StorageWarning
from toy_models import (
    a_and_b,
    assert_same_bits,
    assert_same_history,
    clients_of,
    descend,
    leaves_of,
    linear,
    one_by_one,
    one_round,
)

ITEMS = 12


def ratings(sizes=(9, 4, 7, 2, 6, 0), seed=0):
    generator = np.random.default_rng(seed)
    return clients_of(
        *(
            {
                "item": generator.permutation(ITEMS)[:n].astype(np.int32),
                "rating": generator.integers(1, 6, n).astype(np.float32),
            }
            for n in sizes
        )
    )


def recon_with(split, server):
    return fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS, dim=2),
        reconstruct=descend(0.1, 2),
        update=descend(0.1, 2),
        server=server,
        split=split,
    )


def momentum():
    """Federated Reconstruction with an optimizer on the server that has something to remember."""
    return recon_with(None, optax.chain(optax.scale_by_adam(), optax.trace(0.9), optax.scale(-0.05)))


def keeping():
    """Federated averaging whose clients keep their local parameters."""
    return fr.federated_averaging(
        fr.models.matrix_factorization(ITEMS, dim=2),
        update=descend(0.1, 2),
        server=optax.sgd(1.0, momentum=0.5),
        reconstruct=descend(0.1, 2),
    )


DEFAULT = fr.Validation(ratings(seed=9), every=5)


def run(algorithm, rounds=12, folder=None, checkpoint_every=4, **options):
    options = {"valid": DEFAULT, "seed": 3, **options}
    return fr.train(
        algorithm,
        ratings(),
        rounds=rounds,
        clients_per_round=3,
        folder=fr.RunFolder(folder, checkpoint_every) if folder else None,
        layout=one_by_one(),
        **options,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of twelve rounds that nothing disturbed, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return run(momentum(), folder=folder), folder


@pytest.fixture(scope="module")
def whole_keeping():
    return run(keeping())


def of_kind(history, kind):
    return [entry for entry in history if entry["kind"] == kind]


def test_there_is_a_record_a_round_and_an_evaluation_every_n_rounds_and_after_the_last(whole):
    history = whole[0].history
    assert [entry["round"] for entry in of_kind(history, "round")] == list(range(1, 13))
    assert [entry["round"] for entry in of_kind(history, "evaluation")] == [5, 10, 12]
    assert [entry["round"] for entry in history] == sorted(entry["round"] for entry in history)


def test_a_round_reports_its_metrics_and_what_the_guards_did(whole):
    entry = of_kind(whole[0].history, "round")[0]
    assert entry.keys() == {
        *("kind", "round", "loss", "rmse", "accuracy", "weight"),
        *("clients", "non_finite", "invited", "too_small", "dropped", "skipped"),
    }
    assert entry["rmse"] == pytest.approx(entry["loss"] ** 0.5)
    assert entry["invited"] == 3


def test_metrics_jsonl_holds_the_history(whole):
    run, folder = whole
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.history


def test_an_evaluation_in_training_is_the_evaluation_of_those_parameters(whole):
    found = fr.evaluate(momentum(), whole[0].params, ratings(seed=9), seed=3, layout=one_by_one())
    assert of_kind(whole[0].history, "evaluation")[-1] == {
        "kind": "evaluation",
        "round": 12,
        **found.summary(),
    }


def test_one_seed_gives_one_result_to_the_bit(whole):
    again = run(momentum())
    assert_same_bits(again.params, whole[0].params)
    assert again.history == whole[0].history


def test_another_seed_gives_another_result(whole):
    other = run(momentum(), seed=4, valid=None)
    assert (leaves_of(other.params) != leaves_of(whole[0].params)).mean() > 0.9


def test_evaluating_and_saving_do_not_change_what_is_learned(whole):
    assert_same_bits(run(momentum(), valid=None).params, whole[0].params)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [momentum, keeping])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, algorithm, whole, whole_keeping):
    expected = whole[0] if algorithm is momentum else whole_keeping
    first = run(algorithm(), rounds=7, folder=tmp_path)
    assert first.rounds == 7
    assert (leaves_of(first.params) != leaves_of(expected.params)).any()
    found = run(algorithm(), folder=tmp_path)
    assert found.rounds == 12
    assert_same_bits(found.params, expected.params)
    assert_same_bits(found.client_state, expected.client_state)
    assert of_kind(found.history, "round") == of_kind(expected.history, "round")
    evaluations = {entry["round"]: entry for entry in of_kind(found.history, "evaluation")}
    assert sorted(evaluations) == [5, 7, 10, 12]
    assert [evaluations[r] for r in (5, 10, 12)] == of_kind(expected.history, "evaluation")
    assert fr.RunFolder(tmp_path).records() == found.history


def test_a_finished_run_is_not_run_again(whole, tmp_path):
    result, folder = whole
    recorder = Recorder()
    again = run(momentum(), folder=folder, callbacks=[recorder])
    assert recorder.rounds == recorder.evaluations == []
    assert_same_bits(again.params, result.params)
    assert again.history == result.history


class Stop(fr.Callback):
    """Presses Ctrl-C when a record comes."""

    def __init__(self, kind, number):
        self.kind, self.number = kind, number

    def after_round(self, record):
        if (record["kind"], record["round"]) == (self.kind, self.number):
            raise KeyboardInterrupt

    after_evaluation = after_round


class Recorder(fr.Callback):
    """Remembers what it is called with."""

    def __init__(self):
        self.rounds, self.evaluations, self.runs = [], [], []

    def after_round(self, record):
        self.rounds.append(record)

    def after_evaluation(self, record):
        self.evaluations.append(record)

    def at_end(self, run):
        self.runs.append(run)


def test_callbacks_get_every_round_every_evaluation_and_the_result():
    recorder = Recorder()
    result = run(momentum(), rounds=3, valid=fr.Validation(ratings(), 2), callbacks=[recorder, fr.Callback()])
    assert recorder.rounds == of_kind(result.history, "round")
    assert recorder.evaluations == of_kind(result.history, "evaluation")
    assert recorder.runs == [result]


def test_the_first_parameters_are_not_kept_while_others_are_trained():
    class Count(fr.Callback):
        def after_round(self, record):
            copies.append(sum(array.shape == (ITEMS, 2) for array in jax.live_arrays()) - before)

    before, copies = sum(array.shape == (ITEMS, 2) for array in jax.live_arrays()), []
    run(recon_with(None, optax.sgd(1.0)), rounds=2, valid=None, callbacks=[Count()])
    assert copies == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("round", 3), ("evaluation", 5), ("round", 12)])
def test_ctrl_c_leaves_what_was_learned_and_the_run_can_go_on(tmp_path, whole, kind, number):
    stopped = run(momentum(), folder=tmp_path, callbacks=[Stop(kind, number)])
    assert stopped.interrupted
    assert number <= stopped.rounds <= 12
    folder = fr.RunFolder(tmp_path)
    assert folder.has_checkpoint()
    found = run(momentum(), folder=tmp_path)
    assert not found.interrupted
    assert_same_bits(found.params, whole[0].params)
    assert [entry["round"] for entry in of_kind(found.history, "round")] == list(range(1, 13))
    assert of_kind(found.history, "evaluation")[-1]["round"] == 12
    assert folder.records() == found.history


def test_ctrl_c_while_a_record_is_made_leaves_no_round_without_one(tmp_path, monkeypatch):
    def interrupt(model, number, report):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training_module, "describe_round", interrupt)
        stopped = run(momentum(), rounds=3, valid=None, folder=tmp_path)
    assert (stopped.interrupted, stopped.rounds) == (True, len(stopped.history))
    found = run(momentum(), rounds=3, valid=None, folder=tmp_path)
    assert [entry["round"] for entry in found.history] == [1, 2, 3]


@pytest.mark.slow
def test_ctrl_c_without_a_folder_returns_what_was_learned():
    stopped = run(momentum(), valid=None, callbacks=[Stop("round", 3)])
    assert stopped.interrupted
    assert np.isfinite(leaves_of(stopped.params)).all()


SCRIPT = """
import sys, time
import numpy as np
sys.path.insert(0, {tests!r})
import jax
jax.config.update("jax_num_cpu_devices", 4)
from fedrecon._src.simulation.training import RecordCallback
from test_train import momentum, run
from toy_models import leaves_of

pause = float(sys.argv[2])
found = run(
    momentum(), rounds=40, folder=sys.argv[1], checkpoint_every=3,
    callbacks=[RecordCallback(lambda entry: time.sleep(pause))],
)
np.save(sys.argv[1] + "/found.npy", leaves_of(found.params))
"""


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_bits(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    folder = tmp_path / "run"

    def start(pause):
        return subprocess.Popen([sys.executable, script, folder, str(pause)], env=environment)

    killed = start(0.05)
    while not fr.RunFolder(folder).has_checkpoint():
        assert killed.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.01)
    time.sleep(np.random.default_rng().uniform(0, 0.5))
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (folder / "found.npy").exists()

    assert start(0).wait() == 0
    expected = run(momentum(), rounds=40)
    np.testing.assert_array_equal(np.load(folder / "found.npy"), leaves_of(expected.params), strict=True)
    assert fr.RunFolder(folder).records() == expected.history


@pytest.mark.slow
def test_drop_out_and_too_small_clients_are_counted_in_the_round():
    found = run(momentum(), valid=None, rounds=8)
    assert {entry["clients"] for entry in found.history} <= {1, 2, 3}
    sampling = fr.Sampling(6, drop_out=0.5, min_examples=3)
    found = fr.train(momentum(), ratings(), rounds=8, clients_per_round=sampling, layout=one_by_one())
    for entry in found.history:
        assert entry["invited"] == 6
        assert entry["too_small"] == 2  # of two examples and of none
        assert entry["clients"] == 6 - 2 - entry["dropped"]
    assert {entry["dropped"] for entry in found.history} > {1}


def test_a_round_in_which_nobody_answers_changes_nothing():
    sampling = fr.Sampling(2, min_examples=99)
    found = fr.train(momentum(), ratings(), rounds=2, clients_per_round=sampling, layout=one_by_one())
    start = fr.train(momentum(), ratings(), rounds=0, clients_per_round=sampling, layout=one_by_one())
    assert_same_bits(found.params, start.params)
    assert [entry["skipped"] for entry in found.history] == [True, True]
    assert np.isnan(found.history[0]["loss"])


def exploding(**options):
    return fr.federated_reconstruction(
        fr.models.matrix_factorization(ITEMS, dim=2),
        reconstruct=descend(50.0, 2),
        update=descend(50.0, 2),
        server=optax.sgd(50.0),
        **options,
    )


def test_training_that_diverges_warns_once_and_says_what_to_try():
    match = r"rounds \d+ to \d+ learned nothing.* updates of clients are not finite.*smaller learning rates.*clip_norm"
    with pytest.warns(fr.DivergenceWarning, match=match) as told:
        found = fr.train(exploding(), ratings(), rounds=20, valid=ratings(), layout=one_by_one())
    assert [one.filename for one in told] == [__file__]
    assert [entry["skipped"] for entry in found.history[-4:-1]] == [True] * 3
    assert found.history[-1]["diverged"] == found.history[-1]["clients"]


def test_evaluations_that_diverge_are_warned_of_once_in_a_training():
    algorithm = recon_with(None, optax.sgd(0.0))
    never = clients_of(*({"item": np.zeros(4, np.int32), "rating": np.full(4, 3e38, np.float32)} for _ in "ab"))
    with pytest.warns(fr.DivergenceWarning, match="the evaluation after round 1: 2 of 2 evaluated clients") as told:
        fr.train(algorithm, ratings(), rounds=3, valid=fr.Validation(never, 1), layout=one_by_one())
    assert len(told) == 1


def test_updates_that_are_all_too_long_are_warned_of():
    short = fr.aggregators.mean(zero_norm=1e-9)
    with pytest.warns(fr.DivergenceWarning, match="rounds 1 to 3 .* longer than `zero_norm`"):
        fr.train(exploding(aggregate=short), ratings(), rounds=4, layout=one_by_one())


def test_rounds_without_anybody_are_warned_of():
    sampling = fr.Sampling(2, min_examples=99)
    with pytest.warns(fr.DivergenceWarning, match="nobody sent an update that counts"):
        fr.train(momentum(), ratings(), rounds=3, clients_per_round=sampling, layout=one_by_one())


def test_a_data_frame_must_be_made_into_clients():
    pd = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match=r"`clients` must be fr.Clients, .* fr.Clients.from_dataframe\(frame"):
        fr.train(momentum(), pd.DataFrame({"user": [1], "item": [1], "rating": [1.0]}), rounds=1)
    with pytest.raises(TypeError, match="got dict"):
        fr.train(momentum(), ratings(), rounds=1, valid={"item": [1], "rating": [1.0]})


def test_a_run_is_shown_in_one_line():
    found = run(momentum(), valid=None, rounds=2)
    assert re.fullmatch(r"Run\(2 rounds, 24 global parameters, last training loss [0-9.]+\)", repr(found))
    best = fr.Run({}, [], 3, best=1, stopped="enough", interrupted=True)
    assert repr(best) == "Run(3 rounds, 0 global parameters, best round 1, interrupted, stopped: enough)"


def test_rounds_come_out_the_same_however_they_are_grouped():
    """Evaluations and checkpoints stop the loop at other rounds than ten at a time."""
    algorithm = fr.federated_reconstruction(
        linear(), reconstruct=descend(0.05), update=descend(0.01), server=optax.sgd(1.0)
    )
    one = one_round(algorithm, a_and_b(), rounds=23)
    other = one_round(algorithm, a_and_b(), rounds=23, valid=fr.Validation(a_and_b(), 3))
    assert_same_bits(other.params, one.params)
    other.history = of_kind(other.history, "round")
    assert_same_history(other, one, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fr.train(momentum(), ratings(), rounds=-1), "`rounds` must be .* at least 0"),
        (lambda: fr.Validation(ratings(), every=-1), "`every` must be .* at least 0"),
        (lambda: fr.RunFolder("x", checkpoint_every=0), "`checkpoint_every` must be .* at least 1"),
    ],
)
def test_impossible_training_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_no_clients_are_refused():
    nobody = ratings().take(np.array([], int))
    with pytest.raises(ValueError, match="there are no clients to train on"):
        fr.train(momentum(), nobody, rounds=1)


@pytest.mark.slow
def test_a_redrawn_split_resumes_to_the_bit_and_differs_from_a_fixed_one(tmp_path):
    def algorithm(split):
        return recon_with(split, optax.chain(optax.sgd(0.5), optax.scale_by_schedule(lambda n: 1.0 / (1 + n))))

    redrawn = fr.split.redrawn(fr.split.half())
    straight = run(algorithm(redrawn))
    run(algorithm(redrawn), rounds=7, folder=tmp_path / "parts")
    resumed = run(algorithm(redrawn), folder=tmp_path / "parts")
    assert_same_bits(resumed.params, straight.params)
    assert leaves_of(straight.params) != pytest.approx(leaves_of(run(algorithm(fr.split.half())).params))


@given(st.integers(1, 60), st.integers(0, 9), st.integers(0, 9))
def test_the_loop_stops_wherever_something_is_due(rounds, evaluate_every, checkpoint_every):
    due = sorted({rounds}.union(*(range(n, rounds, n) for n in (evaluate_every, checkpoint_every) if n)))
    found, now = [], 0
    while now < rounds:
        now = _next_stop(now, rounds, evaluate_every, checkpoint_every)
        found.append(now)
    assert found == due


def test_no_clients_a_round_are_refused():
    with pytest.raises(ValueError, match="`clients_per_round`"):
        fr.train(momentum(), ratings(), rounds=1, clients_per_round=0)


# ---- patience ----


def norm_of(params):
    return float(np.linalg.norm(leaves_of(params)))


def judged_by(best):
    """Return an evaluation whose loss is least for parameters of this norm."""

    def evaluate(params, kept):
        del kept
        loss = abs(norm_of(params) - best)
        return Evaluation("recon", 4, 0, 9, {"loss": loss}, {"loss": loss}, {"loss": {}}, {})

    return evaluate


@pytest.fixture(scope="module")
def norms():
    """The norm of the parameters after every second round, which grows."""
    found = []
    valid = judged_by(0.0)

    def measure(params, kept):
        found.append(norm_of(params))
        return valid(params, kept)

    run(momentum(), valid=fr.Validation(measure, 2))
    assert found == sorted(found)
    return found


PATIENT = fr.EarlyStopping(patience=2)


def patient(norms, early_stopping=PATIENT, **options):
    return run(momentum(), valid=fr.Validation(judged_by(norms[1]), 2, early_stopping), **options)


def test_training_ends_when_evaluations_get_no_better_and_keeps_the_best(norms):
    found = patient(norms)
    assert (found.rounds, found.best) == (8, 4)
    assert found.stopped == "early stopping: no improvement in 2 evaluations; keeping round 4"
    assert_same_bits(found.params, run(momentum(), rounds=4).params)
    every = run(momentum(), valid=fr.Validation(judged_by(norms[-1]), 2, PATIENT))
    assert (every.rounds, every.best, every.stopped) == (12, None, None)
    assert_same_bits(every.params, run(momentum()).params)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("round", 3), ("evaluation", 4), ("round", 5), ("evaluation", 8)])
def test_a_run_with_patience_resumes_to_the_same_bits(tmp_path, norms, kind, number):
    whole = patient(norms)
    assert patient(norms, folder=tmp_path, callbacks=[Stop(kind, number)]).interrupted
    found = patient(norms, folder=tmp_path)
    assert (found.rounds, found.best, found.interrupted) == (8, 4, False)
    assert_same_bits(found.params, whole.params)
    assert found.history == whole.history
    again = patient(norms, folder=tmp_path)
    assert (again.rounds, again.best, len(again.history)) == (8, 4, len(whole.history))
    assert_same_bits(again.params, whole.params)


def test_a_run_with_patience_goes_on_without_its_records(tmp_path, norms):
    assert patient(norms, folder=tmp_path, callbacks=[Stop("evaluation", 6)]).interrupted
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.warns(StorageWarning, match="metrics.jsonl"):
        found = patient(norms, folder=tmp_path)
    assert (found.rounds, found.best) == (8, 4)
    assert_same_bits(found.params, run(momentum(), rounds=4).params)


def test_the_best_parameters_are_returned_if_records_are_lost_and_no_evaluation_follows(tmp_path, norms):
    assert patient(norms, folder=tmp_path, callbacks=[Stop("evaluation", 6)]).interrupted
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.warns(StorageWarning, match="metrics.jsonl"):
        found = patient(norms, folder=tmp_path, callbacks=[Stop("round", 7)])
    assert (found.interrupted, found.best) == (True, 4)
    assert_same_bits(found.params, run(momentum(), rounds=4).params)


def test_diverged_clients_weigh_more_than_the_loss_in_what_is_best():
    def evaluation(diverged, loss):
        return {"diverged": diverged, "micro": {"loss": loss}}

    stopping = fr.EarlyStopping()
    ranks = [
        stopping.rank(evaluation(*of)) for of in [(0, 0.5), (0, 0.7), (0, np.inf), (0, None), (0, np.nan), (1, 0.1)]
    ]
    assert ranks == sorted(ranks)


def test_a_model_that_training_makes_worse_is_kept_as_it_was_before_the_first_round(norms):
    found = run(momentum(), valid=fr.Validation(judged_by(0.0), 2, PATIENT))
    assert (found.rounds, found.best) == (4, 0)
    assert "keeping round 0" in found.stopped
    assert_same_bits(found.params, run(momentum(), rounds=0).params)
    assert [entry["round"] for entry in found.history if entry["kind"] == "evaluation"] == [0, 2, 4]


def test_what_evaluations_are_judged_by_can_be_chosen(norms):
    stopping = fr.EarlyStopping(2, score=lambda metrics: -metrics["loss"])
    found = run(momentum(), valid=fr.Validation(judged_by(0.0), 2, stopping))
    assert (found.rounds, found.best) == (12, None), "the loss grows, and that is wanted here"


def test_only_evaluations_after_the_rounds_that_are_named_decide(norms, tmp_path):
    found = patient(norms, fr.EarlyStopping(2, rounds=[6, 8, 10]))  # that of round 4 would be best
    assert (found.rounds, found.best) == (8, 0)
    assert "keeping round 0" in found.stopped
    stopping = fr.EarlyStopping(2, rounds=[5, 6, 7, 9])
    options = {"valid": fr.Validation(judged_by(norms[2] - 0.01), early_stopping=stopping)}
    found = run(momentum(), **options)
    assert (found.rounds, found.best) == (9, 6)
    assert [entry["round"] for entry in found.history if entry["kind"] == "evaluation"] == [0, 5, 6, 7, 9]
    assert run(momentum(), folder=tmp_path, callbacks=[Stop("round", 7)], **options).interrupted
    again = run(momentum(), folder=tmp_path, **options)
    assert (again.rounds, again.best) == (9, 6)
    assert_same_bits(again.params, found.params)


def test_an_interrupted_run_keeps_rounds_after_its_last_evaluation(norms, tmp_path):
    found = patient(norms, folder=tmp_path, callbacks=[Stop("round", 3)])
    assert (found.rounds, found.best) == (4, None)
    assert_same_bits(found.params, run(momentum(), rounds=4).params)


def test_patience_needs_clients_that_keep_nothing():
    with pytest.raises(ValueError, match="`early_stopping`"):
        run(keeping(), valid=fr.Validation(ratings(), early_stopping=PATIENT))
    with pytest.raises(ValueError, match="`patience`"):
        fr.EarlyStopping(patience=0)
