"""Pictures: that they are drawn whatever happened in a run."""

import numpy as np
import pytest

from fedrecon.app.plots import _draw_evaluations, _running_mean, learning_curve
from fedrecon.app.tasks import RATINGS, TEXT

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


def test_a_running_mean_is_over_the_neighbours_that_there_are():
    found = _running_mean(np.array([1.0, 2.0, 6.0, np.nan, 4.0]), 3)
    np.testing.assert_allclose(found, [1.5, 3.0, 4.0, 5.0, 4.0])
