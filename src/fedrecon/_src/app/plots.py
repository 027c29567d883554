"""Pictures of a run, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedrecon._src.recommend.tasks import Measure
from fedrecon._src.storage.atomic import write_bytes

EXPLODES = 100  # times the lowest loss: a curve that diverges is drawn in logarithms
SMOOTHED = 20  # rounds of the running mean, at most a tenth of the run


def learning_curve(records: Sequence[Mapping[str, Any]], path: Path, measures: Sequence[Measure]) -> None:
    """Draw the loss of every round, and two metrics of every evaluation, to a PNG file.

    Args:
      records: a run's history, as in `metrics.jsonl`.
      path: the file; its folder is created.
      measures: the metrics, at most two.
    """
    from matplotlib.figure import Figure

    rounds = [record for record in records if record["kind"] == "round"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.suptitle("Learning curve")
    left, right = figure.subplots(1, 2)
    _draw_loss(left, _column(rounds, "round"), _column(rounds, "loss"))
    _draw_evaluations(right, evaluations, measures)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
    write_figure(figure, path)


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure to a PNG file; its folder is created."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, picture.getvalue())


def _column(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Return a number of every record, NaN where there is none."""
    values = [record.get(name) for record in records]
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], float)


def _draw_loss(axes: Any, rounds: np.ndarray, loss: np.ndarray) -> None:
    axes.set(title="Training clients", xlabel="round", ylabel="loss on query examples")
    _mark(axes, rounds[~np.isfinite(loss)], "no finite loss")
    if not np.isfinite(loss).any():
        _say(axes, "no round has a finite loss" if len(loss) else "no rounds")
        return
    window = min(SMOOTHED, len(loss) // 10)
    faint = {"alpha": 0.25, "linewidth": 0.8} if window > 1 else {"linewidth": 1.8}
    axes.plot(rounds, loss, color="tab:blue", label="each round", **faint)
    if window > 1:
        mean = _running_mean(loss, window)
        axes.plot(rounds, mean, color="tab:blue", linewidth=1.8, label=f"mean of {window} rounds")
    later = loss[len(loss) // 10 :]
    if np.nanmin(loss) > 0 and np.nanmax(later) > EXPLODES * np.nanmin(loss):  # a few rounds would hide all the others
        axes.set_yscale("log")
    elif np.nanmax(loss) > 2 * np.nanmax(later):  # the first rounds would flatten all the others
        low, high = np.nanmin(later), np.nanmax(later)
        axes.set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low))
    axes.legend(frameon=False)


def _mark(axes: Any, rounds: np.ndarray, label: str) -> None:
    """Mark rounds in red at the foot of a picture."""
    if len(rounds):
        feet = axes.get_xaxis_transform()
        axes.plot(rounds, np.full(len(rounds), 0.03), "x", color="tab:red", transform=feet, label=label)
        axes.legend(frameon=False)


def _say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Average each value with its neighbours, over a shorter window at the ends."""
    finite = np.isfinite(values)
    ones = np.ones(window)
    total = np.convolve(np.where(finite, values, 0), ones, "same")
    count = np.convolve(finite.astype(float), ones, "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _draw_evaluations(axes: Any, evaluations: Sequence[Mapping[str, Any]], measures: Sequence[Measure]) -> None:
    axes.set(title="Validation clients, never trained on", xlabel="round")
    if not evaluations:
        _say(axes, "no evaluations")
        return
    rounds = _column(evaluations, "round")
    _mark(axes, rounds[np.nan_to_num(_column(evaluations, "diverged")) > 0], "clients diverged")
    micro = [record.get("micro") or {} for record in evaluations]
    looks = ((axes, "o-", "tab:red"), (axes.twinx(), "s--", "tab:green"))
    for measure, (side, marks, color) in zip(measures, looks, strict=False):
        values = _column(micro, measure.name)
        side.plot(rounds, 100 * values if measure.percent else values, marks, color=color, markersize=4)
        side.set_ylabel(f"{measure.title} (%)" if measure.percent else measure.title, color=color)
        side.tick_params(axis="y", labelcolor=color)
