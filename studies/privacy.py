"""What privacy costs on MovieLens 1M: error against epsilon, against the number of global parameters, and leakage.

fedrecon reproduce privacy --data ml-1m.zip --out study
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from studies.numbers import number
from studies.privacy_jobs import PRIVACY, TOGETHER, Setting
from studies.study import Figure, Job, Part, Result, Results, Section, Study, Table

BUDGETS = (1.0, 2.0, 4.0, 8.0)
DIMS = (2, 4, 8, 32)
MILLION = 1_000_000
LARGER = {100_000: 5_000, MILLION: 10_000}  # clients there would be, and how many of them a round


def _name(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def _jobs() -> tuple[Job, ...]:
    jobs = [Job(f"fedrecon-{_name(e)}", f"FedRecon, epsilon {_name(e)}", Setting(epsilon=e)) for e in (None, *BUDGETS)]
    jobs += [
        Job(
            f"as-if-{population}",
            f"FedRecon, epsilon 4 with the noise that {population:,} clients need",
            Setting(epsilon=4.0, population=population, cohort=cohort),
        )
        for population, cohort in LARGER.items()
    ]
    jobs += [
        Job(
            f"dim-{dim}",
            f"FedRecon, dim {dim}, epsilon 4 with the noise that 100,000 clients need",
            Setting(epsilon=4.0, dim=dim, population=100_000, cohort=LARGER[100_000]),
        )
        for dim in DIMS
    ]
    jobs += [
        Job(
            f"global-{_name(e)}",
            f"Everything global, epsilon {_name(e)}",
            Setting(train="everything global", epsilon=e),
        )
        for e in (None, *BUDGETS)
    ]
    jobs.append(
        Job(
            f"global-as-if-{MILLION}",
            f"Everything global, epsilon 4 with the noise that {MILLION:,} clients need",
            Setting(train="everything global", epsilon=4.0, population=MILLION, cohort=LARGER[MILLION]),
        )
    )
    return tuple(jobs)


JOBS = _jobs()


def _mean(results: Sequence[Result], value: Any) -> float:
    values = [value(result) for result in results]
    return float(np.mean([x for x in values if x is not None])) if any(x is not None for x in values) else float("nan")


def rmse(results: Sequence[Result]) -> float:
    """Return the mean error over seeds, on users who took no part in training."""
    return _mean(results, lambda result: number(result["evaluations"][-1]["recon"]["micro"]["rmse"]))


def _line(job: Job, results: Results) -> list[str]:
    some = results[job.name]
    accuracy = _mean(some, lambda result: number(result["evaluations"][-1]["recon"]["micro"]["accuracy"]))
    noise, zero = some[0].get("noise"), some[0].get("round_zero")
    return [
        job.title,
        f"{some[0]['global']:,}",
        "-" if noise is None else f"{noise:.2f}",
        "-" if zero is None else f"{zero:.2f}",
        f"{rmse(some):.4f}",
        f"{accuracy:.1%}",
        _leak(some, "rows"),
        _leak(some, "first"),
    ]


def _leak(results: Sequence[Result], name: str) -> str:
    value = _mean(results, lambda result: (result.get("leakage") or {}).get(name))
    return "-" if np.isnan(value) else f"{value:.0%}"


def _table(results: Results, names: Sequence[str]) -> list[Part]:
    there = [job for job in JOBS if job.name in names and results.get(job.name)]
    if not there:
        return ["None of these is finished."]
    head = [
        "",
        "global parameters",
        "noise multiplier",
        "epsilon of round zero",
        "RMSE",
        "accuracy",
        "rows found",
        "who it is",
    ]
    return [Table(head, [_line(job, results) for job in there])]


def _budgets(results: Results) -> list[Part]:
    words = (
        "User-level (epsilon, delta) with delta = N^-1.1, Poisson sampling, everything that is released noised, round "
        "zero among it. Both kinds begin with the same round zero. Rows found and who it is: what attacks find out "
        "about 100 training users, without noise from a plain upload, with it from the sum of "
        f"{TOGETHER} uploads clipped to their median norm, with the noise of the rounds."
    )
    biases = next((some[0]["biases"] for some in results.values() if some and some[0].get("biases")), None)
    if biases is not None:
        words += f" Item and user biases alone, without any noise, have RMSE {biases:.4f} on the same users."
    return [words, *_table(results, _MAIN)]


def _sizes(results: Results) -> list[Part]:
    words = (
        "The norm of the noise grows with the root of the number of global parameters. All at epsilon 4 with the "
        "noise that 100,000 clients need: with that of the users there are, the rounds add next to nothing to round "
        "zero, whatever the dimension. As many dimensions without noise would need a row each; only 16 has one."
    )
    return [words, *_table(results, ["fedrecon-none", *(f"dim-{dim}" for dim in DIMS), "as-if-100000"])]


def _populations(results: Results) -> list[Part]:
    words = (
        "The same training users with the noise in sums and mean uploads that a larger population would need for "
        "epsilon 4. The users of MovieLens are not protected by it: this shows what the same training costs a large "
        "service."
    )
    return [words, *_table(results, _POPULATIONS)]


def _curve(results: Results) -> dict[str, Any]:
    def of(prefix: str) -> list[list[float]]:
        return [[e, rmse(results[f"{prefix}-{e:g}"])] for e in BUDGETS if results.get(f"{prefix}-{e:g}")]

    none = {
        prefix: rmse(results[f"{prefix}-none"]) for prefix in ("fedrecon", "global") if results.get(f"{prefix}-none")
    }
    large = {
        name: rmse(some) for name in ("as-if", "global-as-if") if (some := results.get(f"{name}-{MILLION}")) is not None
    }
    return {"fedrecon": of("fedrecon"), "global": of("global"), "none": none, **large}


def _draw(data: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    kinds = (("fedrecon", "FedRecon", "C0", "o-"), ("global", "everything global", "C1", "x--"))  # they may coincide
    for name, title, color, style in kinds:
        if data[name]:
            axes.plot(*zip(*data[name], strict=True), style, color=color, label=title)
        if name in data["none"]:
            axes.axhline(data["none"][name], color=color, linestyle=":", label=f"{title}, no noise")
    for name, title, color, marker in (
        ("as-if", "FedRecon, noise of a million clients", "C0", "s"),
        ("global-as-if", "everything global, noise of a million clients", "C1", "D"),
    ):
        if data.get(name) is not None:
            axes.plot([4.0], [data[name]], marker, color=color, label=title)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BUDGETS, [f"{epsilon:g}" for epsilon in BUDGETS])
    axes.set_xlabel("epsilon")
    axes.set_ylabel("RMSE, unseen users")
    axes.legend(fontsize="small")


_MAIN = tuple(f"{kind}-{_name(epsilon)}" for kind in ("fedrecon", "global") for epsilon in (None, *BUDGETS))
_POPULATIONS = (
    *("fedrecon-none", "fedrecon-4", *(f"as-if-{n}" for n in LARGER)),
    *("global-none", "global-4", f"global-as-if-{MILLION}"),
)
STUDY = Study(
    name="privacy",
    title="What privacy costs",
    kind=PRIVACY,
    jobs=JOBS,
    sections=(
        Section("Error and leakage against epsilon", _MAIN, _budgets),
        Section(
            "Against the number of global parameters",
            ("fedrecon-none", *(f"dim-{dim}" for dim in DIMS), "as-if-100000"),
            _sizes,
        ),
        Section(
            "With the noise of a larger population",
            _POPULATIONS,
            _populations,
        ),
    ),
    figures=(
        Figure(
            "error-by-epsilon",
            "Error by epsilon",
            "RMSE on unseen users against the privacy budget. Lines: the noise of those there are. Dotted: none.",
            (*_MAIN, f"as-if-{MILLION}", f"global-as-if-{MILLION}"),
            _curve,
            _draw,
        ),
    ),
    claims=(),
    seeds=1,
)
