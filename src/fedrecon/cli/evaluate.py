"""`fedrecon evaluate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fedrecon.cli import options, show
from fedrecon.config import Reading


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a trained model on users it has never met: each one's parameters are rebuilt from one half of their
    ratings and measured on the other (ReconEval).

    The users are those the run held back, or those of another file. Example: fedrecon evaluate runs/mine --json

    Attributes:
      run: the folder of a run; with --ratings, the folder of a saved model is enough.
      split: which users of the run: test, or valid, the ones to choose settings on.
      ratings: evaluate on the users of this ratings file instead.
      json: print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    split: Literal["test", "valid"] = "test"
    ratings: Path | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    data: Reading = field(default_factory=Reading)


def parse(argv: Sequence[str]) -> Evaluate:
    """Parse the options."""
    return options.parse(Evaluate, "evaluate", argv)


def run(args: Evaluate) -> int:
    """Evaluate and print."""
    from fedrecon.build import Users, build_layout
    from fedrecon.engine import start_devices
    from fedrecon.experiment import make_evaluator, users_of_run
    from fedrecon.progress import bars
    from fedrecon.saved import open_model
    from fedrecon.storage import without_nan

    start_devices(None)
    model = open_model(args.run)
    if args.ratings is None:
        config, users = users_of_run(args.run)
        title, part = f"{args.split} users of {args.run}", args.split
    else:
        ratings = model.read(args.ratings, args.data)
        show.left_out(ratings)
        config, users = model.config, Users(ratings, ratings, ratings)
        title, part = f"users of {args.ratings}", "test"
    algorithm = model.algorithm
    evaluator = make_evaluator(config, algorithm, users, build_layout(config, algorithm.model), part)
    if evaluator is None:
        raise ValueError(f"the run in {args.run} has no {part} users")
    found = evaluator(model.params, progress=bars)
    if args.json:
        print(json.dumps(without_nan(found.summary())))
    else:
        show.evaluation(title, found)
    return 0
