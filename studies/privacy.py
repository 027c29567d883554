"""The cost of privacy on MovieLens 1M: error against epsilon, against the number of global parameters, and leakage.

python -m studies privacy --data ml-1m.zip --out study
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import fedrecon as fr
from fedrecon._src.client.optimizers import keep_constant, with_prior
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.recommend.config import DEFAULT, Privacy, RatingsConfig, Update
from fedrecon._src.recommend.protection import Population, Protection, protect
from fedrecon._src.recommend.rating_model import Items, ridges_of
from fedrecon._src.recommend.recipe import build_descent, build_reconstruction, build_server
from fedrecon._src.recommend.settings import FOUND
from fedrecon._src.recommend.task import Ready, Users
from fedrecon._src.recommend.tasks import RATINGS, build_algorithm
from studies.leakage import leakage
from studies.ratings import MAX_EXAMPLES, RatingsData, load
from studies.study import Block, Figure, Job, Kind, Result, Results, Section, Study, Table, as_float
from studies.training import train

ATTACKED = 100
GROUP = 50
BIASES = "item + user bias"
BUDGETS = (1.0, 2.0, 4.0, 8.0)
DIMS = (2, 4, 8, 32)
MILLION = 1_000_000
LARGER = {100_000: 5_000, MILLION: 10_000}  # clients in a larger population, and how many of them per round


def make_config(
    epsilon: float | None = None, dim: int = 16, method: str = "fedrecon", rounds: int = 200
) -> RatingsConfig:
    """Return the default settings, for a budget of round zero and all rounds; None trains without noise."""
    local = method == "fedrecon"
    return dataclasses.replace(
        DEFAULT,
        model=dataclasses.replace(DEFAULT.model, dim=dim, implicit_feedback=local),
        split=DEFAULT.split if local else dataclasses.replace(DEFAULT.split, train="none"),
        privacy=Privacy(epsilon=epsilon),
        sampling=fr.Sampling(None, poisson=True),
        rounds=rounds,
        evaluate_every=rounds,
    )


# ---- jobs ----


def prepare(job: Job, data: RatingsData, seed: int) -> tuple[Ready, Protection]:
    """Run round zero, and compute the noise of the rounds: that of `job.population`, or of those who train."""
    assert isinstance(job.config, RatingsConfig)
    config = dataclasses.replace(job.config, seed=seed)
    population = None if job.population is None else Population(*job.population)
    users, items = Users(*data.divide("unseen", seed)), Items(np.asarray(data.ratings.item_ids))
    ready = RATINGS.prepare(config, data.ratings, users, items, population)
    return ready, protect(ready, population=population)


def make_algorithms(method: str, ready: Ready, protection: Protection) -> tuple[fr.Algorithm, fr.Algorithm]:
    """Return what trains and what serves users: for `global`, users' embeddings and biases are tables on the server."""
    config, clients = protection.config, ready.users.train
    assert isinstance(config, RatingsConfig)
    if method == "fedrecon":
        algorithm = build_algorithm(config, ready.model, protection.examples, protection.aggregator)
        return algorithm, algorithm
    ridges: Any = ridges_of(config)
    priors = {"*item_embedding": config.model.prior, "*user_embedding": 2 * ridges["*"]}
    priors |= {f"*{name}": 2 * float(np.mean(ridges[name])) for name in ("user_bias", "user_traits")}
    server = with_prior(build_server(config.server, config.rounds), priors, examples=protection.examples)
    update = build_descent(Update(learning_rate=1.0, steps=1, batch_size=MAX_EXAMPLES))
    rebuild = build_reconstruction(config.reconstruct, ridges)
    training = fr.federated_averaging(
        fr.models.client_table(ready.model, len(clients)),
        update=update,
        server=keep_constant(server, FOUND),
        aggregate=protection.aggregator,
    )
    return training, fr.federated_averaging(ready.model, update=update, server=server, reconstruct=rebuild)


def run_job(job: Job, data: RatingsData, seed: int, part: str = "test", progress: Progress = silent) -> dict[str, Any]:
    """Train a job with one seed, measure it on users who took no part, and attack its updates."""
    ready, protection = prepare(job, data, seed)
    algorithm, serving = make_algorithms(job.method, ready, protection)
    test, local = getattr(ready.users, part), job.method == "fedrecon"
    clients = ready.users.train if local else fr.data.with_owner(ready.users.train)
    evaluator = fr.Evaluator(serving, test, split=fr.split.half())

    def measure(rounds: int, params: Any, local_state: Any) -> Mapping[str, fr.Evaluation]:
        return {"recon": evaluator(params if local else params["shared"])}

    job = dataclasses.replace(job, config=dataclasses.replace(job.config, sampling=protection.config.sampling))
    params, result = train(job, algorithm, clients, measure, seed=seed, progress=progress)
    options: dict[str, Any] = {"split": fr.split.half(), "num_items": data.ratings.num_items}
    ledger, noise = protection.ledger, protection.noise_multiplier
    return result | {
        "losses": [],
        "biases": fr.recommend.rating_baselines(ready.users.train, test, **options).table[BIASES]["rmse"],
        "noise": noise,
        "round_zero": None if ledger is None else ledger.epsilon,
        "leakage": attack(algorithm, params, clients.take(np.arange(ATTACKED)), noise),
    }


def attack(algorithm: fr.Algorithm, params: Any, clients: fr.Clients, noise: float | None) -> dict[str, Any] | None:
    """Attack a plain update without privacy, and the noised sum of a few dozen clients with it."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        return None
    multiplier = 1.0 if noise is None else noise
    measured = leakage(algorithm, params, clients, groups=(GROUP,), noise_multiplier=multiplier, most=ATTACKED)
    exposure = measured.exposures[0 if noise is None else -2]
    return {name: None if value != value else value for name, value in exposure._asdict().items()}


KIND = Kind(load, run_job, metrics=("rmse",), quick_rounds=20)


def budget_name(epsilon: float | None) -> str:
    """Return how names of jobs spell a budget."""
    return "none" if epsilon is None else f"{epsilon:g}"


def make_jobs() -> tuple[Job, ...]:
    """Return a job for every budget with both methods, and for larger populations and other dimensions."""
    jobs = []
    for method, title in (("fedrecon", "FedRecon"), ("global", "Everything global")):
        jobs += [
            Job(
                f"{method}-{budget_name(epsilon)}",
                f"{title}, epsilon {budget_name(epsilon)}",
                make_config(epsilon, method=method),
                method,
            )
            for epsilon in (None, *BUDGETS)
        ]
    larger = [(f"as-if-{n}", "FedRecon", "fedrecon", 16, n) for n in LARGER]
    larger += [(f"dim-{dim}", f"FedRecon, dim {dim}", "fedrecon", dim, 100_000) for dim in DIMS]
    larger += [(f"global-as-if-{MILLION}", "Everything global", "global", 16, MILLION)]
    for name, title, method, dim, population in larger:
        title = f"{title}, epsilon 4 with the noise that {population:,} clients need"
        config = make_config(4.0, dim, method)
        jobs.append(Job(name, title, config, method, population=(population, LARGER[population])))
    return tuple(jobs)


JOBS = make_jobs()


# ---- tables ----


def _mean(results: Sequence[Result], value: Any) -> float:
    values = [value(result) for result in results]
    return float(np.mean([x for x in values if x is not None])) if any(x is not None for x in values) else float("nan")


def rmse(results: Sequence[Result]) -> float:
    """Return the mean error over seeds, on users who took no part in training."""
    return _mean(results, lambda result: as_float(result["evaluations"][-1]["recon"]["micro"]["rmse"]))


def _row(job: Job, results: Results) -> list[str]:
    group = results[job.name]
    accuracy = _mean(group, lambda result: as_float(result["evaluations"][-1]["recon"]["micro"]["accuracy"]))
    noise, zero = group[0].get("noise"), group[0].get("round_zero")
    return [
        job.title,
        f"{group[0]['global']:,}",
        "-" if noise is None else f"{noise:.2f}",
        "-" if zero is None else f"{zero:.2f}",
        f"{rmse(group):.4f}",
        f"{accuracy:.1%}",
        _leak(group, "rows"),
        _leak(group, "first"),
    ]


def _leak(results: Sequence[Result], name: str) -> str:
    value = _mean(results, lambda result: (result.get("leakage") or {}).get(name))
    return "-" if np.isnan(value) else f"{value:.0%}"


HEADER = (
    *("", "global parameters", "noise multiplier", "epsilon of round zero", "RMSE", "accuracy"),
    *("rows recovered", "user identified"),
)


def section(title: str, names: Sequence[str], note: str) -> Section:
    """Return a section with one table of jobs."""

    def compose(results: Results) -> list[Block]:
        rows = [_row(job, results) for job in JOBS if job.name in names and results.get(job.name)]
        return [note, Table(HEADER, rows) if rows else "None of these is finished."]

    return Section(title, tuple(names), compose)


def _curve(results: Results) -> dict[str, Any]:
    def of(prefix: str) -> list[list[float]]:
        return [[e, rmse(results[f"{prefix}-{e:g}"])] for e in BUDGETS if results.get(f"{prefix}-{e:g}")]

    none = {
        prefix: rmse(results[f"{prefix}-none"]) for prefix in ("fedrecon", "global") if results.get(f"{prefix}-none")
    }
    large = {
        name: rmse(group)
        for name in ("as-if", "global-as-if")
        if (group := results.get(f"{name}-{MILLION}")) is not None
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


_MAIN = tuple(f"{kind}-{budget_name(epsilon)}" for kind in ("fedrecon", "global") for epsilon in (None, *BUDGETS))
_POPULATIONS = (
    *("fedrecon-none", "fedrecon-4", *(f"as-if-{n}" for n in LARGER)),
    *("global-none", "global-4", f"global-as-if-{MILLION}"),
)
_DIMS = ("fedrecon-none", *(f"dim-{dim}" for dim in DIMS), "as-if-100000")
STUDY = Study(
    name="privacy",
    title="What privacy costs",
    kind=KIND,
    jobs=JOBS,
    sections=(
        section(
            "Error and leakage against epsilon",
            _MAIN,
            "User-level (epsilon, delta) with delta = N^-1.1, Poisson sampling, noise in everything that is released, "
            "round zero included. Both methods begin with the same round zero. Rows recovered and user identified are "
            "the success of attacks on 100 training users: without noise on a plain update, with noise on the sum of "
            f"{GROUP} updates clipped to their median norm, with the noise of the rounds. `biases` in rows/ is the "
            "RMSE of item and user biases alone, without noise, on the same users.",
        ),
        section(
            "Against the number of global parameters",
            _DIMS,
            "The norm of the noise grows with the root of the number of global parameters. All at epsilon 4 with the "
            "noise that 100,000 clients need: with the noise that the training users need, the rounds add next to "
            "nothing to round zero, whatever the dimension. Only dimension 16 has a row without noise.",
        ),
        section(
            "With the noise of a larger population",
            _POPULATIONS,
            "The same training users with the noise in sums and mean updates that a larger population would need for "
            "epsilon 4. It does not protect the users of MovieLens: it shows what the same training costs a large "
            "service.",
        ),
    ),
    figures=(
        Figure(
            "error-by-epsilon",
            "Error by epsilon",
            "RMSE on unseen users against the privacy budget. Lines: the noise that the training users need. "
            "Dotted: none.",
            (*_MAIN, f"as-if-{MILLION}", f"global-as-if-{MILLION}"),
            _curve,
            _draw,
        ),
    ),
    seeds=1,
)
