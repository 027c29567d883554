"""Figures of studies: the numbers each shows, for its JSON file, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from studies.numbers import number, spread
from studies.study import Result, Results

Data = dict[str, Any]
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
SMOOTHED = 10  # rounds of the running mean of losses
SHOWN_RMSE = 2.5  # users above are drawn together


def relative_accuracy(points: Mapping[int, str], base: str) -> Callable[[Results], Data]:
    """Return a function that computes accuracy against a number of steps, each seed's relative to its own base."""

    def data(results: Results) -> Data:
        bases = {result["seed"]: _accuracy(result) for result in results[base]}
        lines = []
        for steps, job in points.items():
            found = [result for result in results[job] if result["seed"] in bases]
            percent = spread([_accuracy(result) for result in found])
            share = spread([_accuracy(result) / (bases[result["seed"]] or np.nan) for result in found])
            lines.append(
                {
                    "steps": steps,
                    "accuracy": percent.mean,
                    "accuracy_deviation": percent.deviation,
                    "relative": share.mean,
                    "relative_deviation": share.deviation,
                }
            )
        return {"base": base, "rounds": results[base][0]["setting"]["rounds"], "seeds": len(bases), "points": lines}

    return data


def draw_relative_accuracy(what: str) -> Callable[[Data, Any], None]:
    """Return a function that draws accuracy against a number of steps."""

    def draw(data: Data, figure: Any) -> None:
        axes = _axes(figure, xlabel=f"{what} steps (at most)", ylabel="accuracy relative to the base")
        points = data["points"]
        places = np.arange(len(points))
        share = [point["relative"] for point in points]
        axes.axhline(1, color="gray", linewidth=1, linestyle="--")
        axes.errorbar(
            places, share, [p["relative_deviation"] for p in points], fmt="o-", color=COLORS[0], capsize=3, markersize=5
        )
        for place, point in zip(places, points, strict=True):
            axes.annotate(
                f"{point['accuracy']:.1f} %",
                (place, point["relative"]),
                xytext=(7, -13) if point["relative"] > 0.1 else (9, -3),
                textcoords="offset points",
                fontsize=8,
            )
        axes.set_xticks(places, [str(point["steps"]) for point in points])
        axes.set_xlim(-0.4, len(points) - 0.4)
        axes.set_ylim(min(0, min(share)) - 0.03, 1.12)

    return draw


def accuracy_against(series: Mapping[str, Mapping[int, str]]) -> Callable[[Results], Data]:
    """Return a function that computes accuracy against some number, for named series of jobs."""

    def data(results: Results) -> Data:
        lines = []
        for name, points in series.items():
            found = {n: spread([_accuracy(result) for result in results[job]]) for n, job in points.items()}
            lines.append(
                {
                    "name": name,
                    "points": [{"at": n, "accuracy": x.mean, "deviation": x.deviation} for n, x in found.items()],
                }
            )
        return {"series": lines}

    return data


def draw_accuracy_against(what: str) -> Callable[[Data, Any], None]:
    """Return a function that draws accuracy against some number."""

    def draw(data: Data, figure: Any) -> None:
        axes = _axes(figure, xlabel=what, ylabel="accuracy on unseen clients (%)")
        for line, color in zip(data["series"], COLORS, strict=False):
            xs, ys, errors = zip(*((p["at"], p["accuracy"], p["deviation"]) for p in line["points"]), strict=True)
            axes.errorbar(xs, ys, errors, fmt="o-", color=color, capsize=3, markersize=5, label=line["name"])
        ticks = sorted({point["at"] for line in data["series"] for point in line["points"]})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False)

    return draw


def losses(series: Mapping[str, str]) -> Callable[[Results], Data]:
    """Return a function that computes the mean training loss of each round, up to the fewest rounds of any job."""

    def data(results: Results) -> Data:
        rounds = min(int(result["setting"]["rounds"]) for job in series.values() for result in results[job])
        lines = []
        for name, job in series.items():
            loss = np.nanmean(np.array([result["losses"][:rounds] for result in results[job]], float), 0)
            lines.append({"name": name, "loss": [round(float(x), 5) for x in loss]})
        return {"rounds": rounds, "seeds": len(results[next(iter(series.values()))]), "series": lines}

    return data


def draw_losses(loss: str, legend: str) -> Callable[[Data, Any], None]:
    """Return a function that draws losses over rounds."""

    def draw(data: Data, figure: Any) -> None:
        axes = _axes(figure, xlabel="round", ylabel=f"{loss} of the round's clients")
        _draw_losses(data, axes)
        axes.legend(frameon=False, title=legend)

    return draw


def _draw_losses(data: Data, axes: Any) -> None:
    rounds = np.arange(1, data["rounds"] + 1)
    window = min(SMOOTHED, len(rounds))
    highest = 0.0
    for line, color in zip(data["series"], COLORS, strict=False):
        smooth = np.convolve(line["loss"], np.ones(window) / window, "valid")
        axes.plot(rounds[window - 1 :], smooth, label=line["name"], color=color, linewidth=1.6)
        highest = max(highest, float(np.nanmax(smooth[len(smooth) // 10 :])))
    lowest = min(min(line["loss"]) for line in data["series"])
    axes.set_ylim(lowest * 0.97, min(highest * 1.15, 3 * lowest))
    axes.set_xlim(0, data["rounds"])


def communication(series: Mapping[str, str | tuple[str, str]]) -> Callable[[Results], Data]:
    """Return a function that computes accuracy against all parameters sent, for named jobs (and measures)."""
    jobs = {name: (one, "recon") if isinstance(one, str) else one for name, one in series.items()}

    def data(results: Results) -> Data:
        lines = []
        for name, (job, measure) in jobs.items():
            found = results[job]
            clients = found[0]["setting"]["clients_per_round"]
            rounds = [entry["round"] for entry in found[0]["evaluations"]]
            curves = [[100 * number(entry[measure]["micro"]["accuracy"]) for entry in r["evaluations"]] for r in found]
            lines.append(
                {
                    "name": name,
                    "sent_per_client_and_round": found[0]["sent"],
                    "rounds": rounds,
                    "communicated": [n * clients * found[0]["sent"] for n in rounds],
                    "accuracy": [round(float(x), 3) for x in np.mean(curves, 0)],
                }
            )
        return {"seeds": len(results[next(iter(jobs.values()))[0]]), "series": lines}

    return data


def draw_communication(data: Data, figure: Any) -> None:
    """Draw accuracy against parameters communicated."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = _axes(
        figure,
        xlabel="parameters communicated in total, all clients (billions)",
        ylabel="accuracy on unseen clients (%)",
    )
    for line, color in zip(data["series"], COLORS, strict=False):
        label = f"{line['name']} ({line['sent_per_client_and_round']:,} a client and round)"
        axes.plot(
            np.array(line["communicated"]) / 1e9,
            line["accuracy"],
            "o-",
            markersize=3,
            linewidth=1.4,
            color=color,
            label=label,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(frameon=False, fontsize=8, loc="outside lower center")


def distribution(series: Mapping[str, tuple[str, str]]) -> Callable[[Results], Data]:
    """Return a function that lists the RMSE of every single user, for named jobs and measures, all seeds together."""

    def data(results: Results) -> Data:
        lines = []
        for name, (job, measure) in series.items():
            users = [value for result in results[job] for value in result["per_client"][measure]]
            lines.append(
                {
                    "name": name,
                    "users": len(users),
                    "diverged": sum(value is None for value in users),
                    "rmse": sorted(value for value in users if value is not None),
                }
            )
        return {"seeds": len(results[next(iter(series.values()))[0]]), "series": lines}

    return data


def draw_distribution(data: Data, figure: Any) -> None:
    """Draw how many users have which RMSE."""
    axes = _axes(figure, xlabel="RMSE of a single user", ylabel="share of users (%)")
    bins = np.append(np.arange(0.2, SHOWN_RMSE + 0.01, 0.05), SHOWN_RMSE + 0.05)
    for line, color in zip(data["series"], COLORS, strict=False):
        values = np.array(line["rmse"])
        label = (
            f"{line['name']}: median {np.median(values):.2f}, 95 % of users below {np.quantile(values, 0.95):.2f}; "
            f"of {line['users']} users {int((values > SHOWN_RMSE).sum())} beyond {SHOWN_RMSE:g}, "
            f"{line['diverged']} diverged"
        )
        share = np.full(len(values), 100 / line["users"])
        shown = np.minimum(values, bins[-1])  # the last bar is for all above
        axes.hist(shown, bins, weights=share, histtype="stepfilled", alpha=0.12, color=color)
        axes.hist(shown, bins, weights=share, histtype="step", color=color, linewidth=1.4, label=label)
    axes.set_xlim(bins[0], bins[-1])
    axes.set_xticks(
        [*np.arange(0.5, SHOWN_RMSE, 0.5), bins[-1]],
        [*(f"{x:g}" for x in np.arange(0.5, SHOWN_RMSE, 0.5)), f">{SHOWN_RMSE:g}"],
    )
    figure.legend(frameon=False, fontsize=8, loc="outside lower center")


def draw_to(path: Any, draw: Callable[[Data, Any], None], data: Data, title: str) -> None:
    """Draw a figure to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    draw(data, figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _axes(figure: Any, **labels: str) -> Any:
    axes = figure.subplots()
    axes.set(**labels)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _accuracy(result: Result) -> float:
    rounds = result["setting"]["rounds"]
    at = next(entry for entry in result["evaluations"] if entry["round"] == rounds)
    return 100 * number(at["recon"]["micro"]["accuracy"])
