"""`fedrecon train`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fedrecon._src.app.cli import FAILED, options, show
from fedrecon._src.recommend.config import Rule, to_json

if TYPE_CHECKING:
    from fedrecon._src.app.experiment import ExperimentResult
    from fedrecon._src.recommend.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Several processes on one or more hosts, if the environment does not describe them.

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
class Train(options.TaskOptions):
    """Train a model by Federated Reconstruction.

    Attributes:
      out: the folder for everything that the run writes: run.json, metrics.jsonl, checkpoint/, model/, plots/.
      log: also log the training to tensorboard (in the folder tensorboard/), mlflow or wandb.
      resume: continue the run in this folder, with its data and settings; the result is the same as if it had never
        stopped. If DATA is given and the folder is empty, begin a run in it.
      overwrite: replace the run in the folder; the old one is put aside until the new one is complete.
      distributed: run in several processes that SLURM or Open MPI started with the same options.
    """

    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(required, unless --resume is given)")] = None
    log: Log | None = None
    resume: Path | None = None
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    distributed: Literal["auto"] | None = None
    processes: Annotated[Processes, tyro.conf.arg(name="distributed")] = field(default_factory=Processes)

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for options that must fit together."""
        source, several = self.settings.data.source, self.distributed is not None or self.processes.given
        replaces = self.resume is not None and (self.overwrite or self.out not in (None, self.resume))
        yield Rule(self.out is None and self.resume is None, "out", "is missing: give the folder for the run")
        yield Rule(replaces, "resume", "cannot be combined with `out` or `overwrite`")
        missing = not source and self.resume is None
        rule = "is missing: give a file, the name of a data set, or a run with --resume"
        yield Rule(missing, "settings.data.source", rule)
        twice = self.distributed is not None and self.processes.given
        yield Rule(twice, "distributed", "auto cannot be combined with `coordinator`, `processes` or `process_id`")
        yield Rule(several and source == "-", "settings.data.source", "must be a file for several processes")


class TrainRatings(Train):
    """Train a recommender on ratings (or with --task clicks on clicks, --task text on text).

    The server learns the item parameters. Every user reconstructs their own parameters from their ratings and never
    sends them. Ends with an evaluation on held-out test users, next to baselines. The defaults adapt to the data;
    --preset paper uses the paper's settings. Example: fedrecon train ratings.csv --out runs/mine
    """


class TrainClicks(Train):
    """Train a recommender on clicks, plays or purchases.

    It ranks items, and learns from the items that a user does not have, too. The server learns the item parameters;
    every user reconstructs their own from their items. Ends by ranking hidden items of held-out test users, next to
    popularity and, if there are few items, item kNN and EASE.
    Example: fedrecon train plays.csv --task clicks --out runs/plays
    """


class TrainText(Train):
    """Train a next-word model.

    The server learns the model. Every client reconstructs its local part from its own text and never sends it: an
    output bias, or with --preset paper the embeddings of words outside the vocabulary. Ends with an evaluation on
    held-out test clients. The defaults suit a CPU; the paper's sizes need an accelerator.
    Example: fedrecon train posts.jsonl.gz --task text --out runs/words --model.vocabulary 2000
    """


COMMANDS: dict[str, type[Train]] = {"ratings": TrainRatings, "clicks": TrainClicks, "text": TrainText}


def parse(argv: Sequence[str]) -> Train:
    """Parse the options of the task; defaults come from a config file or the run to resume."""
    args = options.parse_for_task(COMMANDS, "train", argv)
    return dataclasses.replace(args, out=args.resume or args.out)


def start_processes(args: Train) -> None:
    """Connect to the other processes, if there are any."""
    from fedrecon._src.simulation.multihost import is_first_process, start_hosts

    if args.distributed is None and not args.processes.given:
        return
    of, devices, small = args.processes, args.settings.jax_devices, args.settings.small_loops
    start_hosts(of.coordinator, of.processes, of.process_id, jax_devices=devices, timeout=of.timeout, small_loops=small)
    if not is_first_process():
        warnings.simplefilter("ignore")  # the first process has the same, and says so


def run(args: Train) -> int:
    """Train, and report."""
    if not args.settings.data.source:
        raise options.UsageError(f"--resume: there is no run in {args.resume}")
    start_processes(args)
    return train_and_report(args)[1]


def train_and_report(args: Train, made_by: str = "train") -> tuple[ExperimentResult, int]:
    """Train, evaluate on the test users, and print the next steps; return the result and the exit code.

    The first process shows progress and writes the log.
    """
    from fedrecon._src.app.experiment import run_experiment
    from fedrecon._src.app.logs import log_to
    from fedrecon._src.app.plots import learning_curve
    from fedrecon._src.core.display import bars
    from fedrecon._src.recommend.tasks import task_of
    from fedrecon._src.simulation.multihost import is_first_process
    from fedrecon._src.simulation.training import Callback, RecordCallback
    from fedrecon._src.storage.run_folder import RunFolder

    assert args.out is not None
    config, folder, task = args.settings, RunFolder(args.out), task_of(args.settings)
    modes: dict[str, Any] = {"resume": args.resume is not None, "overwrite": args.overwrite, "made_by": made_by}
    with contextlib.ExitStack() as stack:
        if is_first_process():
            # With patience, validation clients are evaluated before the first round.
            first = 0 if config.patience is not None else config.evaluate_every or config.rounds
            callbacks: list[Callback] = [RecordCallback(lambda record: show.progress_of(record, task.measures, first))]
            if args.log is not None:
                callbacks.append(stack.enter_context(log_to(args.log, folder.path, to_json(config))))
            modes |= {"progress": bars, "callbacks": callbacks, "say": show.remark}
        outcome = run_experiment(config, folder, **modes)
    failed = outcome.model.failed
    if is_first_process():
        curve = task.shown(task.curve, outcome.model.config)
        learning_curve(outcome.run.history, folder.plots_path / "learning_curve.png", curve)
        if failed is not None:
            show.alarm(f"training {'fails' if outcome.run.interrupted else 'failed'}: {failed}")
        if outcome.run.interrupted:
            _say_how_to_continue(args.out, outcome, replaced=args.overwrite)
        else:
            _report(args.out, outcome, task)
    return outcome, 130 if outcome.run.interrupted else 0 if failed is None else FAILED


def _say_how_to_continue(out: Path, outcome: ExperimentResult, replaced: bool) -> None:
    from fedrecon._src.storage.run_folder import list_stashes

    done = f"{outcome.run.rounds} of {outcome.most_rounds} rounds"
    show.remark(f"stopped after {done}; the model so far is saved in {out}")
    show.remark(f"to continue: fedrecon train --resume {shlex.quote(str(out))}")
    if replaced and (aside := list_stashes(out)):
        show.remark(f"the replaced run stays in {aside[-1]} until this one is complete")


def _report(out: Path, outcome: ExperimentResult, task: Task[Any, Any, Any]) -> None:
    """Print the evaluation on the test clients, the cost, and the next steps."""
    from fedrecon._src.privacy.ledger import NOT_COVERED
    from fedrecon._src.recommend.stopping import say_how_to_test_more, say_kept, say_updates

    config, run = outcome.model.config, outcome.run
    advice = say_how_to_test_more(config)
    if outcome.test is None:
        show.remark(f"no evaluation: there are no test {task.people}. {advice}")
    else:
        title = f"test {task.people}, none seen in training: {len(outcome.users.test):,}"
        show.evaluation(title, outcome.test, task, outcome.baselines, config, advice)
    if updates := say_updates(run.history):
        print(updates)
    if run.ledger is not None:
        print(f"privacy: {run.ledger.summary()}")
        print(f"         {NOT_COVERED}")
    if remark := task.remark(run.params):
        show.remark(remark)
    elif run.best is not None:
        show.remark(say_kept(run.best, task.people))
    if run.stopped is not None:
        show.remark(f"stopped after {run.rounds} of {outcome.most_rounds} rounds: {run.stopped}")
    if outcome.model.failed is not None:
        show.remark(f"{out}/metrics.jsonl shows what went wrong; recommend and complete refuse the model of this run")
        return
    print(f"saved: {out} (model/ is all you need for serving; plots/learning_curve.png shows the training)")
    quoted = shlex.quote(str(out))
    again = [] if outcome.test is None else [f"evaluate {quoted} --json"]
    show.following(*again, task.serve.format(run=quoted))
