"""`fedrecon privacy`: plan."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from fedrecon.app.cli import options, show

PARTS = {"plan": "say what noise a privacy budget takes, before anybody trains"}
HELP = """\
usage: fedrecon privacy PART [OPTIONS]

What protects clients, and how much of it.

parts:
{parts}

example:
  fedrecon privacy plan --clients 1000000 --per-round 1000 --rounds 500 --epsilon 4

fedrecon privacy PART --help tells all about a part.
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Say what noise a privacy budget takes, or what a noise promises, before anybody trains.

    Every upload is clipped to a norm, and Gaussian noise is added to their sum in every round.
    Example: fedrecon privacy plan --clients 1000000 --per-round 1000 --rounds 500 --epsilon 4

    Attributes:
      clients: how many clients there are.
      per_round: how many take part in a round, on average; each is drawn by itself, with the same probability.
      rounds: how many rounds are planned.
      epsilon: the budget; the noise for it is computed.
      noise_multiplier: instead of epsilon: noise in the sum, in units of the clipping norm; its epsilon is computed.
      delta: the probability that the promise fails; a little below one in the number of clients by default.
      parameters: how many global parameters there are, to compare noise with a clipped upload.
      json: print one JSON object.
    """

    clients: int
    per_round: int
    rounds: int
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    parameters: int | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


def parse(argv: Sequence[str]) -> Plan:
    """Parse the part and its options."""
    if not argv:
        raise options.UsageError(f"a part is missing; there are: {', '.join(PARTS)} (see fedrecon privacy --help)")
    if argv[0] in ("-h", "--help"):
        print(HELP.format(parts="\n".join(f"  {name:10} {what}" for name, what in PARTS.items())), end="")
        raise SystemExit(0)
    if argv[0] not in PARTS:
        raise options.UsageError(f"there is no part {argv[0]!r}; there are: {', '.join(PARTS)}")
    return options.parse(Plan, "privacy plan", argv[1:])


def run(args: Plan) -> int:
    """Compute and print."""
    if (args.epsilon is None) == (args.noise_multiplier is None):
        raise options.UsageError("give either --epsilon or --noise-multiplier")
    if args.parameters is not None and args.parameters < 1:
        raise options.UsageError(f"--parameters is {args.parameters}; it must be at least 1")
    try:
        plan = _plan(args)
    except ImportError as problem:
        raise ValueError(str(problem)) from problem
    if args.json:
        print(json.dumps(plan))
    else:
        _print(plan)
    return 0


def _plan(args: Plan) -> dict[str, Any]:
    from fedrecon.privacy import accounting

    delta = accounting.default_delta(args.clients) if args.delta is None else args.delta
    sizes: dict[str, Any] = {"clients": args.clients, "rounds": args.rounds, "delta": delta}

    def noise(epsilon: float, per_round: int) -> dict[str, float]:
        multiplier = accounting.noise_for(epsilon, per_round=per_round, **sizes)
        return {
            "epsilon": epsilon,
            "per_round": per_round,
            "noise_multiplier": multiplier,
            "mean": multiplier / per_round,
        }

    if args.epsilon is None:
        assert args.noise_multiplier is not None
        epsilon = accounting.epsilon_after(args.noise_multiplier, per_round=args.per_round, **sizes)
        spread = {"noise_multiplier": args.noise_multiplier, "mean": args.noise_multiplier / args.per_round}
        this, others = {"epsilon": epsilon, "per_round": args.per_round, **spread}, []
    else:
        this = noise(args.epsilon, args.per_round)
        others = [noise(factor * args.epsilon, args.per_round) for factor in (0.25, 0.5, 2)]
        larger = [k * args.per_round for k in (2, 5) if k * args.per_round <= args.clients]
        others += [noise(args.epsilon, per_round) for per_round in larger]
    seen = {
        times: accounting.epsilon_of([accounting.Release(this["noise_multiplier"], 1.0, times)], delta)
        for times in sorted({1, min(10, args.rounds)})
    }
    return {**sizes, **this, "parameters": args.parameters, "others": others, "seen": seen}


def _print(plan: dict[str, Any]) -> None:
    from fedrecon.privacy.ledger import NOT_COVERED

    def row(of: dict[str, Any]) -> tuple[str, ...]:
        cells = (f"{of['epsilon']:.3g}", f"{of['per_round']:,}", f"{of['noise_multiplier']:.3f}", f"{of['mean']:.2g}")
        return cells if plan["parameters"] is None else (*cells, f"{of['mean'] * math.sqrt(plan['parameters']):.2g}")

    columns = ["epsilon", "clients a round", "noise multiplier", "noise in the mean"]
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
        f"Promise: whoever sees every model and knows all about everybody else cannot raise the odds that a given "
        f"person took part more than {odds} times. It fails with probability {plan['delta']:.2g} at most."
    )


def _sampling(plan: dict[str, Any]) -> str:
    times = plan["rounds"] * plan["per_round"] / plan["clients"]
    known = ", ".join(f"{e:.3g} after {k} {'round' if k == 1 else 'rounds'}" for k, e in plan["seen"].items())
    return (
        f"It counts on drawing every client by itself in every round (on average it takes part in {times:,.2g} of "
        f"them), unknown to the observer. To one who sees who takes part, such as the server, the same noise promises "
        f"that person epsilon {known}."
    )
