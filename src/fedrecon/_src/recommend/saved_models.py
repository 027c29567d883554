"""A trained model on disk: the global parameters and all that inference needs, nothing about who trained it."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.checks import check_rules
from fedrecon._src.recommend.config import Config, config_from_json, to_json
from fedrecon._src.recommend.tasks import TASKS, Task, build_algorithm, task_of
from fedrecon._src.server.aggregator import Aggregator
from fedrecon._src.storage.arrays import check_parameters, load_arrays, save_arrays
from fedrecon._src.storage.atomic import StorageError, atomic_folder, find_complete
from fedrecon._src.storage.manifest import Format, read_folder_manifest, write_folder_manifest
from fedrecon._src.storage.ownership import MODEL, check_model_folder
from fedrecon._src.storage.run_folder import find_part, list_checkpoints

FORMAT = Format("fedrecon-model", 2)
ARRAYS, DESCRIPTION = "global.safetensors", "model.json"
SETTINGS = ("model", "reconstruct", "split", "seed")  # of a run's config: what inference needs
TRAINING = ("update", "server", "aggregate")  # what training on needs, too

L = TypeVar("L")


@dataclasses.dataclass(frozen=True)
class SavedModel(Generic[L]):
    """A model ready to serve people.

    Attributes:
      config: the settings of model, reconstruction, evaluation and update; those of who was drawn are not kept.
      params: the global parameters.
      legend: what its ids stand for: items or words.
      failed: why its training failed, in which case it should serve nobody; None if it did not.
    """

    config: Config
    params: Any
    legend: L
    failed: str | None = None

    @property
    def task(self) -> Task[Any, Any, L]:
        """What it was trained for."""
        return task_of(self.config)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm, for reconstruction and evaluation."""
        return build_algorithm(self.config, self.task.build_model(self.config, self.legend))

    def trainable(self, rounds: int, aggregator: Aggregator | None = None) -> Algorithm:
        """Return the algorithm to train this model further with, the same wherever it is called.

        Args:
          rounds: how many, over which learning rates fall.
          aggregator: that of the settings by default.
        """
        counts = getattr(self.legend, "counts", None)  # priors are weighed against all examples of the first training
        config = dataclasses.replace(self.config, rounds=rounds)
        model = self.task.build_model(config, self.legend)
        return build_algorithm(config, model, 1 if counts is None else float(counts.sum()), aggregator)

    def save(self, path: str | Path) -> None:
        """Save the model to a folder, which is replaced as a whole; one that holds anything but a model is refused."""
        settings = to_json(self.config)
        description = {
            "task": self.config.task,
            "failed": self.failed,
            "settings": {name: settings[name] for name in (*SETTINGS, *TRAINING)},
            **self.task.describe(self.legend),
        }
        check_model_folder(Path(path))
        with atomic_folder(Path(path), replace=True) as folder:
            save_arrays(folder / ARRAYS, self.params)
            write_folder_manifest(folder / DESCRIPTION, FORMAT, description)


def open_model(path: str | Path) -> SavedModel[Any]:
    """Open a model folder, or the one in a run's folder.

    Raises:
      StorageError: there is no model, or it is damaged.
    """
    folder = find_complete(Path(path))
    if not folder.is_dir():
        raise StorageError(f"{path} is not a folder; expected the folder of a run or of a saved model")
    if not (folder / DESCRIPTION).exists():
        folder = find_part(folder, MODEL)
    if not folder.is_dir():
        untrained = f"{path} holds no model: train one with fedrecon train DATA --out {path}"
        unfinished = f"the run in {path} has no model yet: unless it is running, continue with its command and --resume"
        raise StorageError(unfinished if list_checkpoints(Path(path)) else untrained)
    saved = _read_description(folder / DESCRIPTION)
    try:
        like = jax.eval_shape(saved.algorithm.model.init_global, jax.random.key(0))
    except (ValueError, TypeError, OverflowError, MemoryError) as problem:
        raise StorageError(f"{folder / DESCRIPTION} describes no model that can be built: {problem}") from None
    params = load_arrays(folder / ARRAYS, like)
    if saved.failed is None:  # that of a failed training can be measured, though it serves nobody
        check_parameters(folder / ARRAYS, params)
    return dataclasses.replace(saved, params=params)


def _read_description(file: Path) -> SavedModel[Any]:
    """Read all of a model except its parameters."""
    description = read_folder_manifest(file, FORMAT, ARRAYS)
    if (name := str(description.get("task"))) not in TASKS:
        raise StorageError(f"{file} is of task {name!r}; this version of fedrecon knows {', '.join(TASKS)}")
    try:
        task = TASKS[name]
        saved = description["settings"]
        settings = {"task": name, **{part: saved[part] for part in SETTINGS}}
        settings |= {part: saved[part] for part in TRAINING if part in saved}
        config = config_from_json(settings, str(file))
        legend, failed = task.recall(description), description["failed"]
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as problem:
        reason = problem if isinstance(problem, ValueError) else repr(problem)
        raise StorageError(f"{file} is damaged: {reason}") from None
    return SavedModel(config, None, legend, None if failed is None else str(failed))


def open_for(task: Task[Any, Any, L], path: str | Path, *others: Task[Any, Any, L]) -> SavedModel[L]:
    """Open a model that was trained for a task, or for another that serves in the same way.

    Raises:
      StorageError: there is none, it is damaged, its training failed, or it is for another task; the message says what
        to do with it.
    """
    saved = open_model(path)
    use = saved.task.serve.format(run=path)
    wrong_task = f"{path} was trained on {saved.task.name}, not on {task.name}: use fedrecon {use}"
    failed = f"{path} cannot be used because its training failed: {saved.failed}"
    check_rules({wrong_task: saved.task in (task, *others), failed: saved.failed is None}, StorageError)
    return saved
