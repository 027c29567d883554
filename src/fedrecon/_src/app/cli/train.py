"""`fedrecon train`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fedrecon._src.app.cli import FAILED, options, show
from fedrecon._src.app.config import (
    CONFIGS,
    ClicksConfig,
    Config,
    RatingsConfig,
    TextConfig,
    config_from_json,
    read_config,
    to_json,
)
from fedrecon._src.app.presets import PRESETS, Preset, base_of


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Which of several processes this is, where nothing in the environment says so.

    Attributes:
      coordinator: HOST:PORT at which the first process listens for the others.
      processes: how many processes there are.
      process_id: the number of this process, from 0; the first one writes and prints everything.
      timeout: seconds after which a process that has not connected, or no longer answers, counts as dead.
    """

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    timeout: int = 100

    @property
    def given(self) -> bool:
        """Whether this says anything."""
        return (self.coordinator, self.processes, self.process_id) != (None, None, None)


Log = Literal["tensorboard", "mlflow", "wandb"]  # as in fedrecon._src.app.logs, which is imported where it is used


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model by Federated Reconstruction.

    Attributes:
      out: the folder for everything that the run writes: run.json, metrics.jsonl, checkpoint/, model/, plots/.
      preset: settings to start from; a config file and options override them. default suits ratings of any scale and
        number, quick is the same in fewer rounds, paper has the paper's settings for MovieLens 1M.
      config: a JSON file of settings, or the run.json of an earlier run; options given here override it.
      log: also log the training to tensorboard (in the folder tensorboard/), mlflow or wandb.
      resume: continue the run in the folder; the result is the same as if it had never stopped.
      overwrite: replace the run in the folder; the old one is put aside until the new one is complete.
      distributed: run in several processes that SLURM or Open MPI started with the same options.
    """

    settings: Annotated[Config, tyro.conf.arg(name="")]
    out: Path
    preset: Preset | None = None
    config: Path | None = None
    log: Log | None = None
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    distributed: Literal["auto"] | None = None
    processes: Annotated[Processes, tyro.conf.arg(name="distributed")] = field(default_factory=Processes)
    typed: tyro.conf.Suppress[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class TrainRatings(Train):
    """Train a recommender by Federated Reconstruction. The server learns the item parameters. Every user reconstructs
    their user parameters from their own ratings and never sends them. With --task clicks: rank items, from what
    users have. With --task text: a model of the next word.

    Ends with an evaluation on test users, who took no part in training, next to baselines. The defaults follow from
    the data; --preset paper has the paper's. Example: fedrecon train ratings.csv --out runs/mine
    """

    settings: Annotated[RatingsConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class TrainClicks(Train):
    """Train a recommender on clicks, plays or purchases. It ranks items, and what a user does not have counts too. The
    server learns the item parameters. Every user reconstructs their user parameters from their own items.

    Ends by looking for hidden items of test users, who took no part in training, next to popularity and, if there are
    few items, item kNN and EASE. Example: fedrecon train plays.csv --task clicks --out runs/plays
    """

    settings: Annotated[ClicksConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class TrainText(Train):
    """Train a model of the next word by Federated Reconstruction. The server learns the model. Every client
    reconstructs the embeddings of words outside the vocabulary from its own text and never sends them.

    Ends with an evaluation on test clients, who took no part in training. The defaults suit a CPU; the paper's sizes
    need an accelerator. Example: fedrecon train posts.jsonl.gz --task text --out runs/words --model.vocabulary 2000
    """

    settings: Annotated[TextConfig, tyro.conf.arg(name="")]


COMMANDS: dict[str, type[Train]] = {"ratings": TrainRatings, "clicks": TrainClicks, "text": TrainText}


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


def start_processes(args: Train) -> None:
    """Connect to the other processes, if the options say that there are any."""
    from fedrecon._src.simulation.multihost import is_first_process, start_hosts

    if args.distributed is None and not args.processes.given:
        return
    if args.distributed is not None and args.processes.given:
        raise options.UsageError(
            "--distributed auto finds out what --distributed.coordinator, .processes and .process-id say: give one or "
            "the other"
        )
    if args.settings.data.source == "-":
        raise options.UsageError("several processes cannot read one standard input: give a file")
    of = args.processes
    start_hosts(of.coordinator, of.processes, of.process_id, jax_devices=args.settings.jax_devices, timeout=of.timeout)
    if not is_first_process():
        warnings.simplefilter("ignore")  # the first process has the same, and says so


def run(args: Train) -> int:
    """Train, evaluate on the test users, and say what to do next."""
    from fedrecon._src.app.experiment import run_experiment
    from fedrecon._src.app.health import say_updates
    from fedrecon._src.app.logs import log_to
    from fedrecon._src.app.plots import learning_curve
    from fedrecon._src.app.stopping import say_how_to_test_more, say_kept
    from fedrecon._src.app.tasks import task_of
    from fedrecon._src.core.formatting import how_many
    from fedrecon._src.core.progress import bars
    from fedrecon._src.privacy.ledger import NOT_COVERED
    from fedrecon._src.simulation.multihost import is_first_process
    from fedrecon._src.storage.replacement import put_aside_in
    from fedrecon._src.storage.run_folders import RunFolder

    start_processes(args)
    folder, task = RunFolder(args.out), task_of(args.settings)
    logging: Any = contextlib.nullcontext(None)
    if args.log is not None and is_first_process():
        logging = log_to(args.log, args.out, to_json(args.settings))
    with logging as log:

        def told(record: dict[str, Any]) -> None:
            show.progress_of(record, task.measures)
            if log is not None:
                log(record)

        shown: dict[str, Any] = {"progress": bars, "on_record": told, "say": show.remark}
        found = run_experiment(
            args.settings, folder, resume=args.resume, overwrite=args.overwrite, **(shown if is_first_process() else {})
        )
    if not is_first_process():
        return 130 if found.run.interrupted else 0 if found.failed is None else FAILED
    if not found.described:
        show.left_out(found.left_out)
    learning_curve(found.run.history, folder.plots_path / "learning_curve.png", task.curve)
    if found.failed is not None:
        show.alarm(f"training {'fails' if found.run.interrupted else 'failed'}: {found.failed}")
    if found.run.interrupted:
        typed = [word for word in args.typed if word not in ("--overwrite", "--resume")]
        done = f"{found.run.rounds} of {found.most_rounds} rounds"
        show.remark(f"stopped after {done}; what was learned is saved in {args.out}")
        show.remark(f"to continue: {shlex.join(['fedrecon', 'train', *typed, '--resume'])}")
        if args.overwrite and (aside := put_aside_in(args.out)):
            show.remark(f"the run that this one replaces is in {aside[-1]} until this one is complete")
        return 130
    config = found.model.config
    if found.test is None:
        show.remark(f"nothing was measured: there are no test {task.people}. {say_how_to_test_more(config)}")
    else:
        title = f"{how_many(len(found.users.test), f'test {task.people}')}, none seen in training"
        show.evaluation(title, found.test, task, found.baselines, config, say_how_to_test_more(config))
    if updates := say_updates(found.run.history):
        print(updates)
    if found.run.ledger is not None:
        print(f"privacy: {found.run.ledger.summary()}")
        print(f"         {NOT_COVERED}")
    if found.run.best is not None:
        show.remark(say_kept(config, found.run.best, task.people))
    if found.run.stopped is not None:
        show.remark(f"stopped after {found.run.rounds} of {found.most_rounds} rounds: {found.run.stopped}")
    if found.failed is not None:
        show.remark(
            f"{args.out}/metrics.jsonl shows what went wrong; recommend and complete refuse the model of this run"
        )
        return FAILED
    out = shlex.quote(str(args.out))
    print(f"saved: {args.out} (model/ is all that is needed to serve; plots/learning_curve.png shows the training)")
    again = [] if found.test is None else [f"evaluate {out} --json"]
    show.following(*again, task.serve.format(run=out))
    return 0
