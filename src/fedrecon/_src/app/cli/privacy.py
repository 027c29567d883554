"""`fedrecon privacy`: plan, leakage, audit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Le

from fedrecon._src.app.cli import FAILED, options, show
from fedrecon._src.recommend.config import Rule
from fedrecon._src.recommend.settings import Positive, Seed

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True)
class PlanNoise:
    """Compute the noise that a privacy budget needs, or the epsilon that a noise level gives.

    Every upload is clipped to a norm, and Gaussian noise is added to their sum in every round.
    Example: fedrecon privacy plan --clients 1000000 --per-round 1000 --rounds 500 --epsilon 4

    Attributes:
      clients: how many clients there are.
      per_round: how many take part in a round, on average; each is drawn independently, with the same probability.
      rounds: how many rounds are planned.
      epsilon: the budget, from which the noise is computed.
      noise_multiplier: instead of epsilon: the noise in the sum, in units of the clipping norm.
      delta: the probability that the promise fails; by default a little below 1 / clients.
      parameters: how many global parameters there are, to compare the noise with a clipped upload.
      json: print one JSON object.
    """

    clients: int
    per_round: int
    rounds: int
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    parameters: Annotated[int, Ge(1)] | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def rules(self) -> Iterator[Rule]:
        """Yield the rule that the budget or the noise is given."""
        single = (self.epsilon is None) != (self.noise_multiplier is None)
        yield Rule(not single, "epsilon", "must be given, or `noise_multiplier`, but not both")


@dataclass(frozen=True, kw_only=True)
class MeasureLeakage:
    """Attack the uploads of a run's clients as a curious server would, and report what leaks.

    Example: fedrecon privacy leakage runs/first --picture leakage.png

    Attributes:
      run: the folder of the run.
      people: how many test clients to attack (or validation clients, if there are no test clients).
      noise_multiplier: the noise in the last row, in units of the clipping norm.
      clip_norm: the clipping norm in that row; by default the median norm of the uploads.
      picture: also plot the result to this PNG file.
      json: print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    people: Annotated[int, Ge(2)] = 100
    noise_multiplier: Annotated[float, Ge(0), Le(1e6)] = 1.0
    clip_norm: Positive | None = None
    picture: Path | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


@dataclass(frozen=True, kw_only=True)
class AuditNoise:
    """Audit the noise: train a small recommender with canaries among its clients, and try to detect them.

    Prints the claimed epsilon, the measured lower bound, and the confidence of the bound.
    Example: fedrecon privacy audit --noise-multiplier 1 --rounds 8

    Attributes:
      noise_multiplier: noise in the sum of updates, in units of the clipping norm.
      rounds: rounds of training; canaries take part in all of them.
      canaries: how many.
      delta: of the promise.
      noise_by: whose noise is audited: the server's, the clients' own in integers of a secure sum, or round zero's.
      sabotage: break something on purpose, to check that the audit detects it.
      seed: of everything random.
      json: print one JSON object.
    """

    noise_multiplier: Annotated[float, Ge(0.05), Le(1e6)] = 2.0
    rounds: Annotated[int, Ge(1), Le(10**6)] = 4
    canaries: Annotated[int, Ge(20), Le(10**5)] = 1000
    delta: float = 1e-5
    noise_by: Literal["server", "clients", "round-zero"] = "server"
    sabotage: Literal["none", "half-noise", "no-clipping", "twice"] = "none"
    seed: Seed = 0
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


Part = (
    Annotated[PlanNoise, tyro.conf.subcommand("plan")]
    | Annotated[MeasureLeakage, tyro.conf.subcommand("leakage")]
    | Annotated[AuditNoise, tyro.conf.subcommand("audit")]
)


parse = partial(options.parse, Part, "privacy")


def run(args: PlanNoise | MeasureLeakage | AuditNoise) -> int:
    """Compute and print."""
    if isinstance(args, MeasureLeakage):
        return _leakage(args)
    if isinstance(args, AuditNoise):
        return _audit(args)
    plan = _plan(args)
    if args.json:
        print(json.dumps(plan))
    else:
        _print(plan)
    return 0


def _leakage(args: MeasureLeakage) -> int:
    from fedrecon._src.app.experiment import users_of_run
    from fedrecon._src.core.progress import bars
    from fedrecon._src.privacy.leakage import leakage
    from fedrecon._src.recommend.saved_models import open_model
    from fedrecon._src.recommend.tasks import build_algorithm
    from fedrecon._src.simulation.multihost import start_jax_devices
    from fedrecon._src.storage.atomic import without_nan
    from fedrecon._src.storage.ownership import check_overwritable

    if args.picture is not None:  # before all the work
        check_overwritable(args.picture, PNG, "a PNG picture")
    start_jax_devices(None)
    model = open_model(args.run)
    config, users = users_of_run(args.run, bars)
    people = users.test if len(users.test) else users.valid
    measured = leakage(
        build_algorithm(config, model.algorithm.model),
        model.params,
        people,
        most=args.people,
        clip=args.clip_norm,
        noise_multiplier=args.noise_multiplier,
    )
    if args.picture is not None:
        measured.plot(args.picture)
    if args.json:
        kinds = [exposure._asdict() for exposure in measured.exposures]
        print(json.dumps(without_nan({"people": measured.people, "strangers": measured.strangers, "kinds": kinds})))
        return 0
    columns, rows = measured.table()
    show.table(f"What attacks find out about {measured.people} {model.task.people} of {args.run}", columns, rows)
    print(measured.summary())
    return 0


def _audit(args: AuditNoise) -> int:
    from fedrecon._src.privacy.audit import audit_run

    audit = audit_run(
        noise_multiplier=args.noise_multiplier,
        rounds=args.rounds,
        canaries=args.canaries,
        delta=args.delta,
        seed=args.seed,
        sabotage=args.sabotage,
        noise_by=args.noise_by,
    )
    print(json.dumps({**audit._asdict(), "broken": audit.broken}) if args.json else audit.summary())
    return FAILED if audit.broken else 0


def _plan(args: PlanNoise) -> dict[str, Any]:
    from fedrecon._src.privacy import accounting

    delta = accounting.default_delta(args.clients) if args.delta is None else args.delta
    sizes: dict[str, Any] = {"clients": args.clients, "rounds": args.rounds, "delta": delta}

    def row(epsilon: float, per_round: int, noise: float) -> dict[str, float]:
        return {"epsilon": epsilon, "per_round": per_round, "noise_multiplier": noise, "mean": noise / per_round}

    def noise(epsilon: float, per_round: int) -> dict[str, float]:
        return row(epsilon, per_round, accounting.noise_for(epsilon, per_round=per_round, **sizes))

    if args.epsilon is None:
        assert args.noise_multiplier is not None
        epsilon = accounting.epsilon_after(args.noise_multiplier, per_round=args.per_round, **sizes)
        this, alternatives = row(epsilon, args.per_round, args.noise_multiplier), []
    else:
        this = noise(args.epsilon, args.per_round)
        alternatives = [noise(factor * args.epsilon, args.per_round) for factor in (0.25, 0.5, 2)]
        larger = [k * args.per_round for k in (2, 5) if k * args.per_round <= args.clients]
        alternatives += [noise(args.epsilon, per_round) for per_round in larger]
    seen = {
        times: accounting.epsilon_of([accounting.Release(this["noise_multiplier"], 1.0, times)], delta)
        for times in sorted({1, min(10, args.rounds)})
    }
    return {**sizes, **this, "parameters": args.parameters, "others": alternatives, "seen": seen}


def _print(plan: dict[str, Any]) -> None:
    from fedrecon._src.privacy.ledger import NOT_COVERED

    def row(of: dict[str, Any]) -> tuple[str, ...]:
        cells = (f"{of['epsilon']:.3g}", f"{of['per_round']:,}", f"{of['noise_multiplier']:.3f}", f"{of['mean']:.2g}")
        return cells if plan["parameters"] is None else (*cells, f"{of['mean'] * math.sqrt(plan['parameters']):.2g}")

    columns = ["epsilon", "clients per round", "noise multiplier", "noise in the mean"]
    if plan["parameters"] is not None:
        columns.append("its norm")
    title = f"{plan['clients']:,} clients, {plan['rounds']:,} rounds, delta {plan['delta']:.2g}"
    rows = [row(plan), *([tuple("" for _ in columns)] if plan["others"] else []), *map(row, plan["others"])]
    show.table(title, columns, rows, texts=())
    print("Noise multiplier: standard deviation of the noise in the sum of uploads, in units of the clipping norm.")
    norm = "" if plan["parameters"] is None else " Its norm: over all parameters."
    print(f"Noise in the mean: of one entry of the mean upload, for a clipping norm of 1.{norm}")
    print(_meaning(plan))
    print(_sampling(plan))
    print(f"{NOT_COVERED[0].upper()}{NOT_COVERED[1:]}.")


def _meaning(plan: dict[str, Any]) -> str:
    odds = f"{math.exp(plan['epsilon']):,.3g}" if plan["epsilon"] < 50 else "any number of"
    return (
        f"Promise: somebody who sees every model and knows everything about everybody else cannot raise the odds that "
        f"a given person took part more than {odds} times. It fails with probability {plan['delta']:.2g} at most."
    )


def _sampling(plan: dict[str, Any]) -> str:
    times = plan["rounds"] * plan["per_round"] / plan["clients"]
    promises = ", ".join(f"{e:.3g} after {k} {'round' if k == 1 else 'rounds'}" for k, e in plan["seen"].items())
    return (
        f"This assumes that every round draws each client independently (a client takes part in {times:,.2g} of them "
        f"on average), and that the observer does not see who was drawn. Against one who does, such as the server, the "
        f"same noise promises a client that took part epsilon {promises}."
    )
