"""Pictures: that they are drawn whatever happened in a run."""

import numpy as np
import pytest

from fedrecon._src.app.plots import _draw_evaluations, _draw_loss, _running_mean, learning_curve
from fedrecon._src.recommend.tasks import RATINGS, TEXT

ROUNDS = [{"kind": "round", "round": r, "loss": 1 + 10 / r} for r in range(1, 101)]
EVALUATIONS = [{"kind": "evaluation", "round": r, "micro": {"rmse": 1.0, "accuracy": 0.4}} for r in (50, 100)]
UNKNOWN = [
    {"kind": "round", "round": 101, "loss": None},
    {"kind": "evaluation", "round": 101, "micro": {"rmse": None, "accuracy": None}},
]


@pytest.mark.parametrize(
    "records",
    [ROUNDS + EVALUATIONS, ROUNDS, EVALUATIONS, [], UNKNOWN, ROUNDS + EVALUATIONS + UNKNOWN, ROUNDS[:1]],
    ids=["all", "rounds", "evaluations", "nothing", "unknown", "some unknown", "one round"],
)
def test_a_picture_comes_out_of_any_history(tmp_path, records):
    path = tmp_path / "plots" / "curve.png"
    learning_curve(records, path, RATINGS.curve)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_the_metrics_of_the_task(tmp_path):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    _draw_evaluations(axes, [{"round": 5, "micro": {"loss": 4.0, "accuracy": 0.2}}], TEXT.curve)
    other = next(one for one in axes.figure.axes if one is not axes)
    assert (axes.get_ylabel(), other.get_ylabel()) == ("loss", "accuracy (%)")
    assert [one.lines[0].get_ydata().tolist() for one in (axes, other)] == [[4.0], [20.0]]


def test_a_curve_that_diverges_is_drawn_so_that_one_sees_it():
    from matplotlib.figure import Figure

    rounds, axes = np.arange(1.0, 101.0), Figure().subplots()
    _draw_loss(axes, rounds, np.where(rounds < 90, 1.2 ** (rounds - 50), np.nan))
    assert axes.get_yscale() == "log"
    marks = next(line for line in axes.lines if line.get_label() == "no finite loss")
    assert marks.get_xdata().tolist() == list(range(90, 101))
    low, high = axes.get_ylim()
    assert low < 1.2**-49 < 1.2**39 < high

    axes = Figure().subplots()
    _draw_loss(axes, rounds, 1 + 10 / rounds)
    assert axes.get_yscale() == "linear"

    axes = Figure().subplots()
    records = [{"round": 5, "diverged": 0, "micro": {"rmse": 1.0}}, {"round": 10, "diverged": 3, "micro": {}}]
    _draw_evaluations(axes, records, RATINGS.curve)
    assert next(line for line in axes.lines if line.get_label() == "clients diverged").get_xdata().tolist() == [10]


def test_a_running_mean_is_over_the_neighbours_that_there_are():
    found = _running_mean(np.array([1.0, 2.0, 6.0, np.nan, 4.0]), 3)
    np.testing.assert_allclose(found, [1.5, 3.0, 4.0, 5.0, 4.0])
