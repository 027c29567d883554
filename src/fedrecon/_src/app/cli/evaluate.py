"""`fedrecon evaluate`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fedrecon._src.app.cli import FAILED, options, show
from fedrecon._src.recommend.settings import OtherReading


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate a trained model on held-out clients.

    Local parameters are reconstructed from some of a client's ratings, clicks or sentences and measured on the others
    (ReconEval); --split.evaluate of the training says from how many. The clients are the run's test clients, or those
    of another file.
    Example: fedrecon evaluate runs/mine --json

    Attributes:
      run: the folder of a run; with --ratings, --clicks or --text, the folder of a saved model is enough.
      split: which clients of the run: test, or valid (those used to choose settings).
      ratings: evaluate a model of ratings on the users of this ratings file instead.
      clicks: evaluate a model of clicks on the users of this file instead.
      text: evaluate a text model on all clients of this file or prepared corpus instead.
      json: print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    split: Literal["test", "valid"] = "test"
    ratings: Path | None = None
    clicks: Path | None = None
    text: Path | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    data: OtherReading = field(default_factory=OtherReading)


parse = partial(options.parse, Evaluate, "evaluate")


def run(args: Evaluate) -> int:
    """Evaluate and print."""
    from fedrecon._src.app.experiment import users_of_run, with_columns
    from fedrecon._src.core.display import bars
    from fedrecon._src.recommend.evaluation_table import measure_model
    from fedrecon._src.recommend.recipe import build_layout, make_evaluator
    from fedrecon._src.recommend.saved_models import open_model
    from fedrecon._src.recommend.stopping import evaluation_failed, say_how_to_test_more
    from fedrecon._src.recommend.tasks import Users
    from fedrecon._src.simulation.multihost import start_jax_devices
    from fedrecon._src.storage.atomic import without_nan

    start_jax_devices(None)
    model = open_model(args.run)
    task = model.task
    files = {"ratings": args.ratings, "clicks": args.clicks, "text": args.text}
    file = options.file_of_task(args.run, task.name, files)
    if file is None:
        config, users = users_of_run(args.run, bars)
        title, part = f"{args.split} {task.people} of {args.run}", args.split
    else:
        settings, reading = with_columns(model.config, args.run, args.data)
        file_data = task.read(settings, model.legend, file, reading, bars)
        show.left_out(file_data.skipped)
        config, users = model.config, Users(file_data.clients, file_data.clients, file_data.clients)
        title, part = f"{task.people} of {file}", "test"
    users = Users(*(task.view(model.config, part) for part in users))
    if not len(getattr(users, part)):
        advice = f"{say_how_to_test_more(config)} To evaluate on others, give their data with --{task.name} FILE."
        raise ValueError(f"the run in {args.run} has no {part} {task.people}. {advice}")
    evaluator = make_evaluator(config, model.algorithm, users, build_layout(config, model.algorithm.model), part)
    table = measure_model(config, model, users, part, trained=file is None, evaluator=evaluator, progress=bars)
    failed = evaluation_failed(table.evaluation, task.people)
    if args.json:
        why = failed or model.failed
        print(json.dumps(without_nan({**table.summary(), **({"failed": why} if why else {})})))
    else:
        advice = "" if file else say_how_to_test_more(config)
        show.evaluation(title, table.evaluation, task, table.baselines, config, advice)
        if table.personal is not None:
            print(f"\n{table.personal}")
    if model.failed is not None:
        show.alarm(f"the training of {args.run} failed: {model.failed}")
    return 0 if failed is None and model.failed is None else FAILED
