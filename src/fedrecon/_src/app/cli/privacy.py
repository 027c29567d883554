"""`fedrecon privacy plan`: the noise that a privacy budget needs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge

from fedrecon._src.app.cli import options, show
from fedrecon._src.recommend.config import Rule
from fedrecon._src.recommend.settings import Epsilon, Noise, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class PlanNoise:
    """Compute the noise that a privacy budget needs, or the epsilon that a noise level gives.

    Every upload is clipped to a norm, and Gaussian noise is added to their sum in every round.
    Example: fedrecon privacy plan --clients 1000000 --per-round 1000 --rounds 500 --epsilon 4

    Attributes:
      part: what to do.
      clients: how many clients there are.
      per_round: how many take part in a round, on average; each is drawn independently, with the same probability.
      rounds: how many rounds are planned.
      epsilon: the budget, from which the noise is computed.
      noise_multiplier: instead of epsilon: the noise in the sum, in units of the clipping norm.
      delta: the probability that the promise fails; by default a little below 1 / clients.
      parameters: how many global parameters there are, to compare the noise with a clipped upload.
      json: print one JSON object.
    """

    part: Annotated[Literal["plan"], tyro.conf.Positional]
    clients: Annotated[int, Ge(2)]
    per_round: PositiveInt
    rounds: PositiveInt
    epsilon: Epsilon | None = None
    noise_multiplier: Noise | None = None
    delta: Share | None = None
    parameters: Annotated[int, Ge(1)] | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def rules(self) -> Iterator[Rule]:
        """Yield the rule that the budget or the noise is given."""
        single = (self.epsilon is None) != (self.noise_multiplier is None)
        yield Rule(not single, "epsilon", "must be given, or `noise_multiplier`, but not both")
        yield Rule(self.per_round > self.clients, "per_round", f"must be at most {self.clients}, the number of clients")


parse = partial(options.parse, PlanNoise, "privacy")


def run(args: PlanNoise) -> int:
    """Compute and print."""
    plan = _plan(args)
    if args.json:
        print(json.dumps(plan))
    else:
        _print(plan)
    return 0


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
    odds = f"{math.exp(plan['epsilon']):,.3g}" if plan["epsilon"] < 50 else "any number of"
    print(
        f"Promise: somebody who sees every model and knows everything about everybody else cannot raise the odds that "
        f"a given person took part more than {odds} times. It fails with probability {plan['delta']:.2g} at most."
    )
    times = plan["rounds"] * plan["per_round"] / plan["clients"]
    promises = ", ".join(f"{e:.3g} (k = {k})" for k, e in plan["seen"].items())
    print(
        f"This assumes that every round draws each client independently (a client takes part in {times:,.2g} of them "
        f"on average), and that the observer does not see who was drawn. Against one who does, such as the server, the "
        f"same noise promises a client that took part k times epsilon {promises}."
    )
    print(f"{NOT_COVERED[0].upper()}{NOT_COVERED[1:]}.")
