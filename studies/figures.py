"""Figures of studies. Each function returns two others: one computes the numbers, the other draws them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from studies.study import Result, Results, as_float, evaluation_at, reported_rounds, spread

Numbers = dict[str, Any]
Draw = Callable[[Numbers, Any], None]
Plot = tuple[Callable[[Results], Numbers], Draw]
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
WINDOW = 10  # rounds of the running mean of losses
MAX_RMSE = 2.5  # users above are drawn together


def relative_accuracy(points: Mapping[int, str], base: str, what: str) -> Plot:
    """Plot accuracy against a number of steps, each seed's relative to its own base."""

    def data(results: Results) -> Numbers:
        bases = {result["seed"]: _accuracy(result) for result in results[base]}
        values = []
        for steps, job in points.items():
            group = [result for result in results[job] if result["seed"] in bases]
            accuracy = spread([_accuracy(result) for result in group])
            share = spread([_accuracy(result) / (bases[result["seed"]] or np.nan) for result in group])
            values.append(
                {
                    "steps": steps,
                    "accuracy": accuracy.mean,
                    "accuracy_deviation": accuracy.deviation,
                    "relative": share.mean,
                    "relative_deviation": share.deviation,
                }
            )
        return {"base": base, "rounds": reported_rounds(results[base][0]), "seeds": len(bases), "points": values}

    def draw(numbers: Numbers, figure: Any) -> None:
        axes = _axes(figure, xlabel=f"{what} steps (at most)", ylabel="accuracy relative to the base")
        points = numbers["points"]
        share = [point["relative"] for point in points]
        errors = [point["relative_deviation"] for point in points]
        axes.axhline(1, color="gray", linewidth=1, linestyle="--")
        axes.errorbar(range(len(points)), share, errors, fmt="o-", color=COLORS[0], capsize=3, markersize=5)
        for x, point in enumerate(points):
            offset = (7, -13) if point["relative"] > 0.1 else (9, -3)
            label = f"{point['accuracy']:.1f} %"
            axes.annotate(label, (x, share[x]), xytext=offset, textcoords="offset points", fontsize=8)
        axes.set_xticks(range(len(points)), [str(point["steps"]) for point in points])
        axes.set_xlim(-0.4, len(points) - 0.4)
        axes.set_ylim(min(0, min(share)) - 0.03, 1.12)

    return data, draw


def accuracy_curve(points: Mapping[int, str], xlabel: str) -> Plot:
    """Plot accuracy against some number that each job has its own of."""

    def data(results: Results) -> Numbers:
        accuracy = {x: spread([_accuracy(result) for result in results[job]]) for x, job in points.items()}
        return {"points": [{"x": x, "accuracy": y.mean, "deviation": y.deviation} for x, y in accuracy.items()]}

    def draw(numbers: Numbers, figure: Any) -> None:
        axes = _axes(figure, xlabel=xlabel, ylabel="accuracy on unseen clients (%)")
        xs, ys, errors = zip(*(point.values() for point in numbers["points"]), strict=True)
        axes.errorbar(xs, ys, errors, fmt="o-", color=COLORS[0], capsize=3, markersize=5)
        axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:,}" for x in xs])
        axes.minorticks_off()

    return data, draw


def losses(series: Mapping[str, str], loss: str, legend: str) -> Plot:
    """Plot the mean training loss of each round, up to the fewest rounds of any job."""

    def data(results: Results) -> Numbers:
        rounds = min(reported_rounds(result) for job in series.values() for result in results[job])
        lines = []
        for name, job in series.items():
            values = np.nanmean(np.array([result["losses"][:rounds] for result in results[job]], float), 0)
            lines.append({"name": name, "loss": [round(float(value), 5) for value in values]})
        return {"rounds": rounds, "seeds": len(results[next(iter(series.values()))]), "series": lines}

    def draw(numbers: Numbers, figure: Any) -> None:
        axes = _axes(figure, xlabel="round", ylabel=f"{loss} of the round's clients")
        rounds = np.arange(1, numbers["rounds"] + 1)
        window = min(WINDOW, len(rounds))
        highest = 0.0
        for line, color in zip(numbers["series"], COLORS, strict=False):
            smooth = np.convolve(line["loss"], np.ones(window) / window, "valid")
            axes.plot(rounds[window - 1 :], smooth, label=line["name"], color=color, linewidth=1.6)
            highest = max(highest, float(np.nanmax(smooth[len(smooth) // 10 :])))
        lowest = min(min(line["loss"]) for line in numbers["series"])
        axes.set_ylim(lowest * 0.97, min(highest * 1.15, 3 * lowest))
        axes.set_xlim(0, numbers["rounds"])
        axes.legend(frameon=False, title=legend)

    return data, draw


def communication(series: Mapping[str, tuple[str, str]]) -> Plot:
    """Plot accuracy against all parameters sent so far, for named jobs and measures."""

    def data(results: Results) -> Numbers:
        lines = []
        for name, (job, measure) in series.items():
            first = results[job][0]
            clients = first["settings"]["config"]["sampling"]["clients_per_round"]
            rounds = [entry["round"] for entry in first["evaluations"]]
            curves = [[100 * as_float(e[measure]["micro"]["accuracy"]) for e in r["evaluations"]] for r in results[job]]
            lines.append(
                {
                    "name": name,
                    "sent_per_client_and_round": first["sent"],
                    "rounds": rounds,
                    "communicated": [n * clients * first["sent"] for n in rounds],
                    "accuracy": [round(float(x), 3) for x in np.mean(curves, 0)],
                }
            )
        return {"seeds": len(results[next(iter(series.values()))[0]]), "series": lines}

    def draw(numbers: Numbers, figure: Any) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        xlabel = "parameters communicated in total, all clients (billions)"
        axes = _axes(figure, xlabel=xlabel, ylabel="accuracy on unseen clients (%)")
        for line, color in zip(numbers["series"], COLORS, strict=False):
            label = f"{line['name']} ({line['sent_per_client_and_round']:,} per client and round)"
            sent = np.array(line["communicated"]) / 1e9
            axes.plot(sent, line["accuracy"], "o-", markersize=3, linewidth=1.4, color=color, label=label)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        figure.legend(frameon=False, fontsize=8, loc="outside lower center")

    return data, draw


def rmse_distribution(series: Mapping[str, str]) -> Plot:
    """Plot how many users have which RMSE after reconstruction, for named jobs, all seeds together."""

    def data(results: Results) -> Numbers:
        lines = []
        for name, job in series.items():
            users = [value for result in results[job] for value in result["per_client"]["recon"]]
            rmse = sorted(value for value in users if value is not None)
            lines.append({"name": name, "users": len(users), "diverged": len(users) - len(rmse), "rmse": rmse})
        return {"seeds": len(results[next(iter(series.values()))]), "series": lines}

    def draw(numbers: Numbers, figure: Any) -> None:
        axes = _axes(figure, xlabel="RMSE of a single user", ylabel="share of users (%)")
        bins = np.append(np.arange(0.2, MAX_RMSE + 0.01, 0.05), MAX_RMSE + 0.05)
        for line, color in zip(numbers["series"], COLORS, strict=False):
            values = np.array(line["rmse"])
            label = (
                f"{line['name']}: median {np.median(values):.2f}, 95 % of users below {np.quantile(values, 0.95):.2f}; "
                f"of {line['users']} users {int((values > MAX_RMSE).sum())} beyond {MAX_RMSE:g}, "
                f"{line['diverged']} diverged"
            )
            share = np.full(len(values), 100 / line["users"])
            drawn = np.minimum(values, bins[-1])  # the last bar is for all above
            axes.hist(drawn, bins, weights=share, histtype="stepfilled", alpha=0.12, color=color)
            axes.hist(drawn, bins, weights=share, histtype="step", color=color, linewidth=1.4, label=label)
        ticks = np.arange(0.5, MAX_RMSE, 0.5)
        axes.set_xlim(bins[0], bins[-1])
        axes.set_xticks([*ticks, bins[-1]], [*(f"{x:g}" for x in ticks), f">{MAX_RMSE:g}"])
        figure.legend(frameon=False, fontsize=8, loc="outside lower center")

    return data, draw


def save_figure(path: Path, draw: Draw, numbers: Numbers, title: str) -> None:
    """Draw a figure to a PNG file, with its numbers in a JSON file next to it."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({"title": title, **numbers}))
    figure = Figure(figsize=(6.6, 4.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    draw(numbers, figure)
    figure.savefig(path, dpi=130)


def _axes(figure: Any, **labels: str) -> Any:
    axes = figure.subplots()
    axes.set(**labels)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _accuracy(result: Result) -> float:
    return 100 * as_float(evaluation_at(result)["recon"]["micro"]["accuracy"])
