"""Which items come first, on MovieLens 1M: a federated model beside central ones that see everybody's data.

fedrecon reproduce ranking --data ml-1m.zip --out study
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedrecon._src.app.config import ClickData, ClicksConfig
from studies.numbers import Spread, number, spread
from studies.ranking_jobs import NDCG, RANKING, Setting
from studies.study import Claim, Figure, Job, Part, Result, Results, Section, Study, Table

DEFAULT = ClicksConfig(data=ClickData(source=""))
METRICS = {
    NDCG: "NDCG@100",
    "recall@20": "recall@20",
    "recall@50": "recall@50",
    "hit@20": "hit rate@20",
    "coverage@20": "coverage@20",
}
NEAR = 0.02

JOBS = (
    Job("popularity", "Popularity", Setting(method="popularity")),
    Job(
        "item-knn",
        "Item kNN",
        Setting(method="item kNN", tried={"neighbours": (50.0, 200.0), "shrink": (0.0, 20.0, 100.0)}),
    ),
    Job("ease", "EASE", Setting(method="EASE", tried={"ridge": (300.0, 500.0, 800.0, 1200.0)})),
    Job(
        "ials",
        "iALS, 128 factors",
        Setting(
            method="iALS",
            tried={"factors": (128.0,), "alpha": (3.0, 5.0, 8.0), "regularization": (40.0, 60.0, 80.0)},
        ),
    ),
    Job(
        "federated",
        "Federated",
        Setting(method="federated", model=DEFAULT.model, rounds=DEFAULT.rounds, every=DEFAULT.rounds),
        {"model.unobserved": (0.2, 0.4, 0.8), "model.prior": (5.0, 10.0, 20.0)},
    ),
)
CENTRAL = ("item-knn", "ease", "ials")


def found(results: Sequence[Result], metric: str = NDCG) -> Spread:
    """Return a metric on unseen users, mean and deviation over seeds."""
    return spread([number(result["evaluations"][-1]["unseen"]["micro"][metric]) for result in results])


def _cell(results: Sequence[Result], metric: str) -> str:
    value = found(results, metric)
    if value.seeds == 1:
        return f"{value.mean:.4f}"
    return f"{value.mean:.4f} ± {value.deviation:.4f}"


def _main(results: Results) -> list[Part]:
    there = [job for job in JOBS if job.name in results]
    if not there:
        return ["None of these is finished."]
    lines = [[job.title, *(_cell(results[job.name], metric) for metric in METRICS)] for job in there]
    first = results[there[0].name][0]["evaluations"][-1]["unseen"]
    words = (
        f"Means over {first['clients']} users who were not in training, whose known items are excluded; the standard "
        f"error of an NDCG is about {number(first['errors'][NDCG]):.3f}, of differences between rows less, since all "
        "rows rank for the same users. Only the federated row leaves everybody's items where they are."
    )
    return [Table(["", *METRICS.values()], lines), words, *_missing(results)]


def _missing(results: Results) -> list[Part]:
    gone = [job.title for job in JOBS if job.name not in results]
    return [f"Not run: {', '.join(gone)}."] if gone else []


def _tried(results: Results) -> list[Part]:
    lines = []
    for job in JOBS:
        for one in results[job.name][0].get("tried", []) if job.name in results else []:
            values = ", ".join(f"{name} {value:g}" for name, value in one.items() if name != "valid")
            lines.append([job.title, values, f"{number(one['valid']):.4f}"])
    words = (
        "Central models choose among these on validation users, whose NDCG@100 is shown; the best is measured on test "
        "users. The federated model's settings were chosen by hand on the same validation users."
    )
    return [words, Table(["", "settings", "NDCG@100, validation users"], lines)] if lines else [words]


def _near(results: Results) -> tuple[bool, str]:
    ours = found(results["federated"]).mean
    best = max(("ease", "ials"), key=lambda name: found(results[name]).mean)
    theirs = found(results[best]).mean
    words = (
        f"federated: NDCG@100 {ours:.4f}; the better of EASE and iALS, {best}: {theirs:.4f}. That is "
        f"{ours / theirs:.1%} of it; near is at least {1 - NEAR:.0%}."
    )
    return ours >= (1 - NEAR) * theirs, words


def _beats_popularity(results: Results) -> tuple[bool, str]:
    ours, theirs = found(results["federated"]).mean, found(results["popularity"]).mean
    return ours > theirs, f"federated: NDCG@100 {ours:.4f}; popularity: {theirs:.4f}."


def _bars(results: Results) -> dict[str, Any]:
    shown = (NDCG, "recall@20", "recall@50")
    return {
        "metrics": [METRICS[metric] for metric in shown],
        "rows": [[job.title, [found(results[job.name], metric).mean for metric in shown]] for job in JOBS],
    }


def _draw(data: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    width = 0.8 / len(data["rows"])
    for k, (title, values) in enumerate(data["rows"]):
        places = [place + (k - (len(data["rows"]) - 1) / 2) * width for place in range(len(values))]
        axes.bar(
            places, values, width, label=title, color="tab:red" if title == "Federated" else f"{0.85 - 0.15 * k:.2f}"
        )
    axes.set_xticks(range(len(data["metrics"])), data["metrics"])
    axes.set_ylabel("mean over unseen users")
    axes.legend()


_ALL = tuple(job.name for job in JOBS)
STUDY = Study(
    name="ranking",
    title="Which items come first",
    kind=RANKING,
    jobs=JOBS,
    sections=(
        Section("On users who took no part in training", _ALL, _main),
        Section("How settings were chosen", _ALL, _tried),
    ),
    figures=(
        Figure(
            "ranking",
            "Ranking for unseen users",
            "The federated model (red) and models that are fitted where everybody's data is.",
            _ALL,
            _bars,
            _draw,
        ),
    ),
    claims=(
        Claim("Federated ranks better than popularity", ("popularity", "federated"), _beats_popularity),
        Claim("Federated is within 2 % of the better of EASE and iALS", ("ease", "ials", "federated"), _near),
    ),
    seeds=1,
    claimed="What was aimed for",
)
