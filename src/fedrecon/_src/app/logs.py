"""Records of a run where people look: TensorBoard, MLflow or Weights & Biases. Callbacks of `fr.train`."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from fedrecon._src.core.checks import check_choice
from fedrecon._src.simulation.training import Callback, RecordCallback
from fedrecon._src.storage.run_folder import LOGS

Log = Literal["tensorboard", "mlflow", "wandb"]


@contextlib.contextmanager
def log_to(kind: Log, folder: str | Path, settings: Mapping[str, Any] | None = None) -> Iterator[Callback]:
    """Send the records of a run to a tool that plots them, during a `with` block.

    Nothing is written before the first record. Numbers of rounds are named `train/loss` and so on, those of evaluations
    `valid/rmse` and so on.

    Args:
      kind: `tensorboard` writes event files to `folder/tensorboard`. `mlflow` and `wandb` write to where their own
        settings say, as a run that has the folder's name.
      folder: the run's folder.
      settings: the run's settings, which MLflow and Weights & Biases show beside its numbers.

    Yields:
      A callback to pass to `fr.train`.

    Raises:
      ValueError: there is no such tool, or its package is not installed.

    Example:
      >>> import tempfile
      >>> import fedrecon as fr
      >>> with tempfile.TemporaryDirectory() as folder, fr.log_to("tensorboard", folder) as callback:
      ...     isinstance(callback, fr.Callback)
      True
    """
    check_choice("kind", kind, get_args(Log))
    try:
        importlib.import_module(kind)
    except ImportError as problem:
        raise ValueError(f"--log {kind} needs a package: pip install 'fedrecon[{kind}]' ({problem})") from None
    opened = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[kind]
    with contextlib.ExitStack() as stack:
        write: list[Any] = []

        def record(entry: dict[str, Any]) -> None:
            if not write:
                write.append(stack.enter_context(opened(Path(folder), dict(settings or {}), entry["round"])))
            write[0](numbers_of(entry), entry["round"])

        yield RecordCallback(record)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by name.

    Args:
      record: of a round or an evaluation, as in `metrics.jsonl`.
    """
    kind, values = ("train", record) if record["kind"] == "round" else ("valid", {**record, **record["micro"]})
    numbers = {name: value for name, value in values.items() if name != "round" and isinstance(value, int | float)}
    return {f"{kind}/{name}": float(value) for name, value in numbers.items()}


@contextlib.contextmanager
def _tensorboard(folder: Path, settings: Mapping[str, Any], first: int) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder / LOGS))
    # A resumed run begins at its checkpoint: later steps are logged again, and the old ones are dropped.
    writer.add_event(Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)))

    def write(numbers: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    try:
        yield write
    finally:
        writer.close()


@contextlib.contextmanager
def _mlflow(folder: Path, settings: Mapping[str, Any], first: int) -> Iterator[Any]:
    import mlflow

    with mlflow.start_run(run_name=folder.resolve().name):
        mlflow.log_dict(dict(settings), "settings.json")
        yield lambda numbers, step: mlflow.log_metrics(dict(numbers), step=step)


@contextlib.contextmanager
def _wandb(folder: Path, settings: Mapping[str, Any], first: int) -> Iterator[Any]:
    import wandb

    with wandb.init(project="fedrecon", name=folder.resolve().name, config=dict(settings)) as run:
        # A round and its evaluation are two calls of one step, so the step is a number among the others.
        yield lambda numbers, step: run.log({**numbers, "round": step})
