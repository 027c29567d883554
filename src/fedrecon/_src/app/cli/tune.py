"""`fedrecon tune`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge

from fedrecon._src.app.cli import FAILED, options, show


@dataclass(frozen=True, kw_only=True)
class Tune(options.TaskOptions):
    """Options of `fedrecon tune` for any task.

    Attributes:
      out: the folder for config.json, trials.json, report.md and a picture of what mattered.
      budget: how long to search, such as 90s, 5m or 1h; at least one trial is completed.
      trials: the largest number of trials.
    """

    out: Path
    budget: str = "5m"
    trials: Annotated[int, Ge(1)] | None = None


class TuneRatings(Tune):
    """Try settings on the validation users of a ratings file, and write the best of them as a config file.

    The first trial has the settings as given. Test users are never looked at. Needs optuna: pip install
    'fedrecon[tune]'. Example: fedrecon tune ratings.csv --budget 5m --out tuned
    """


class TuneClicks(Tune):
    """Try settings on the validation users of a file of clicks, and write the best of them as a config file.

    The first trial has the settings as given. Test users are never looked at. Needs optuna: pip install
    'fedrecon[tune]'. Example: fedrecon tune plays.csv --task clicks --budget 5m --out tuned
    """


COMMANDS: dict[str, type[Tune]] = {"ratings": TuneRatings, "clicks": TuneClicks}


parse = partial(options.parse_for_task, COMMANDS, "tune", out=tyro.MISSING)


def run(args: Tune) -> int:
    """Tune, and print the best settings."""
    from fedrecon._src.app.tuning import command_of, compared, tune, what_mattered
    from fedrecon._src.simulation.multihost import start_jax_devices

    start_jax_devices(args.settings.jax_devices, small_loops=args.settings.small_loops)
    tuned = tune(args.settings, budget=args.budget, trials=args.trials, folder=args.out, say=show.remark)
    if tuned.failed is not None:
        show.alarm(f"tuning failed: {tuned.failed}. Lower --server.learning-rate, or check the data")
        show.remark(f"saved: {args.out} (report.md says what was tried)")
        return FAILED
    show.metrics("validation users (used to choose the settings)", [tuned.goal], compared(tuned))
    if mattered := what_mattered(tuned):
        print(f"what mattered most: {', '.join(list(mattered)[:3])} ({args.out / 'what_mattered.png'})")
    print(f"saved: {args.out} (report.md says what was tried)")
    print(f"next:  {command_of(tuned, args.out)}")
    if tuned.interrupted:
        show.remark(f"interrupted after {len(tuned.trials)} trials; these are the best settings so far")
    return 130 if tuned.interrupted else 0
