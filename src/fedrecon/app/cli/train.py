"""`fedrecon train`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fedrecon.app.cli import FAILED, options, show
from fedrecon.app.config import CONFIGS, Config, RatingsConfig, TextConfig, config_from_json, read_config, to_json
from fedrecon.app.presets import PRESETS, Preset, base_of

Log = Literal["tensorboard", "mlflow", "wandb"]  # as in fedrecon.app.logs, which is imported where it is used


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model by Federated Reconstruction.

    Attributes:
      out: the folder for everything the run leaves: run.json, metrics.jsonl, checkpoint/, model/, plots/.
      preset: settings to begin with; a config file and options override them. default suits ratings of any scale and
        number, quick is the same in fewer rounds, paper is what the paper used for MovieLens 1M.
      config: a JSON file of settings, or the run.json of an earlier run; options given here override it.
      log: draw the training with tensorboard (in the folder tensorboard/), mlflow or wandb, as it goes.
      resume: go on with the run in the folder, to the same parameters as if it had never stopped.
      overwrite: replace the run in the folder; the old one is put aside until the new one is complete.
    """

    settings: Annotated[Config, tyro.conf.arg(name="")]
    out: Path
    preset: Preset | None = None
    config: Path | None = None
    log: Log | None = None
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    typed: tyro.conf.Suppress[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class TrainRatings(Train):
    """Train a recommender by Federated Reconstruction: item parameters are learned by the server, user parameters
    are reconstructed by every user from their own ratings and never leave them. With --task text: a model of the next
    word.

    Ends by evaluating on test users, none of whom took part in training, beside baselines. The defaults follow from the
    data; --preset paper has the paper's. Example: fedrecon train ratings.csv --out runs/mine --data.user userId
    """

    settings: Annotated[RatingsConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class TrainText(Train):
    """Train a model of the next word by Federated Reconstruction: the model is learned by the server, the embeddings of
    words outside its vocabulary are reconstructed by every client from their own text and never leave them.

    Ends by evaluating on test clients, none of whom took part in training. The defaults suit a CPU; the paper's sizes
    want an accelerator. Example: fedrecon train posts.jsonl.gz --task text --out runs/words --model.vocabulary 2000
    """

    settings: Annotated[TextConfig, tyro.conf.arg(name="")]


COMMANDS: dict[str, type[Train]] = {"ratings": TrainRatings, "text": TrainText}


def parse(argv: Sequence[str]) -> Train:
    """Parse the options, those of the task; those of `--config` become the defaults of the others."""
    task, file = options.given("--task", argv), options.given("--config", argv)
    if task is not None and task not in COMMANDS:
        raise options.UsageError(f"--task is {task!r}; it must be one of {', '.join(COMMANDS)}")
    default = defaults(task, None if file is None else Path(file), options.given("--preset", argv))
    command = COMMANDS[default.task]
    found = options.parse(command, "train", argv, default=command(settings=default, out=tyro.MISSING))
    return dataclasses.replace(found, typed=tuple(argv))


def defaults(task: str | None, file: Path | None, preset: str | None) -> Config:
    """Return the settings of the file or of the preset; the data is MISSING where nothing names it."""
    values = {} if file is None else read_config(file)
    named = isinstance(values.get("data"), dict) and "source" in values["data"]
    if not named and isinstance(values.setdefault("data", {}), dict):
        values["data"]["source"] = ""
    if task is not None and values.get("task", task) != task and values["task"] in CONFIGS:
        raise options.UsageError(f"--task is {task!r}, but the settings in {file} are for {values['task']!r}")
    if preset is not None and preset not in PRESETS:
        raise options.UsageError(f"--preset is {preset!r}; it must be one of {', '.join(PRESETS)}")
    base = base_of(preset, values.get("task", task or "ratings"), values)
    found = config_from_json(values, str(file), task, base)
    return found if named else dataclasses.replace(found, data=dataclasses.replace(found.data, source=tyro.MISSING))


def run(args: Train) -> int:
    """Train, evaluate on the test users, and say what to do next."""
    from fedrecon.app.experiment import run_experiment
    from fedrecon.app.health import say_updates
    from fedrecon.app.logs import log_to
    from fedrecon.app.plots import learning_curve
    from fedrecon.app.tasks import task_of
    from fedrecon.disk.replacement import put_aside_in
    from fedrecon.disk.runs import RunFolder
    from fedrecon.privacy.ledger import NOT_COVERED
    from fedrecon.progress import bars

    folder, task = RunFolder(args.out), task_of(args.settings)
    logging = log_to(args.log, args.out, to_json(args.settings)) if args.log else contextlib.nullcontext(None)
    with logging as log:

        def told(record: dict[str, Any]) -> None:
            show.progress_of(record, task.measures)
            if log is not None:
                log(record)

        found = run_experiment(
            args.settings,
            folder,
            resume=args.resume,
            overwrite=args.overwrite,
            progress=bars,
            on_record=told,
            say=show.remark,
        )
    if not found.described:
        show.left_out(found.left_out)
    learning_curve(found.run.history, folder.plots_path / "learning_curve.png", task.curve)
    if found.failed is not None:
        show.alarm(f"training {'fails' if found.run.interrupted else 'failed'}: {found.failed}")
    if found.run.interrupted:
        again = [word for word in args.typed if word not in ("--overwrite", "--resume")]
        done = f"{found.run.rounds} of {args.settings.rounds} rounds"
        show.remark(f"stopped after {done}; what was learned is saved in {args.out}")
        show.remark(f"to go on: {shlex.join(['fedrecon', 'train', *again, '--resume'])}")
        if args.overwrite and (aside := put_aside_in(args.out)):
            show.remark(f"the run that this one replaces is in {aside[-1]} until this one is complete")
        return 130
    if found.test is None:
        show.remark(f"there are no test {task.people} to evaluate on")
    else:
        title = f"{len(found.users.test)} test {task.people}, none seen in training"
        show.evaluation(title, found.test, task, found.baselines)
    if updates := say_updates(found.run.history):
        print(updates)
    if found.run.ledger is not None:
        print(f"privacy: {found.run.ledger.summary()}")
        print(f"         {NOT_COVERED}")
    if found.run.best is not None:
        show.remark(f"kept the model after round {found.run.best}, the best on validation {task.people}")
    if found.run.stopped is not None:
        show.remark(f"stopped after {found.run.rounds} of {args.settings.rounds} rounds: {found.run.stopped}")
    if found.failed is not None:
        show.remark(
            f"{args.out} has all of it, to see what went wrong (metrics.jsonl); nobody is served with its model"
        )
        return FAILED
    out = shlex.quote(str(args.out))
    print(f"saved: {args.out} (model/ is all that is needed to serve; plots/learning_curve.png shows the training)")
    print(f"next:  fedrecon evaluate {out} --json")
    print(f"       fedrecon {task.serve.format(run=out)}")
    return 0
