"""A trained model on disk: the global parameters and all that inference needs, nothing of who trained it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

from fedrecon.algorithm import Algorithm
from fedrecon.app.build import build_algorithm
from fedrecon.app.config import Config, ConfigError, config_from_json, to_json
from fedrecon.app.tasks import TASKS, Task, task_of
from fedrecon.disk.arrays import StorageError, load_arrays, read_json, save_arrays, write_json
from fedrecon.disk.folders import whole_folder

FORMAT = "fedrecon-model"
VERSION = 1
ARRAYS, DESCRIPTION = "global.safetensors", "model.json"
SETTINGS = ("model", "reconstruct", "split", "seed")  # of a run's config: what inference needs

L = TypeVar("L")


@dataclasses.dataclass(frozen=True)
class SavedModel(Generic[L]):
    """A model ready to serve people.

    Attributes:
      config: the settings of model, reconstruction and evaluation; those of training are not kept.
      params: the global parameters.
      legend: what its ids stand for: items or words.
    """

    config: Config
    params: Any
    legend: L

    @property
    def task(self) -> Task[Any, Any, L]:
        """What it was trained for."""
        return task_of(self.config)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm, for reconstruction and evaluation."""
        return build_algorithm(self.config, self.task.build_model(self.config, self.legend))


def save_model(path: Path, config: Config, params: Any, legend: L) -> SavedModel[L]:
    """Save a model to a folder, which is replaced as a whole."""
    settings = to_json(config)
    description = {
        "format": FORMAT,
        "version": VERSION,
        "task": config.task,
        "settings": {name: settings[name] for name in SETTINGS},
        **task_of(config).describe(legend),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(path, replace=True) as folder:
        save_arrays(folder / ARRAYS, params)
        write_json(folder / DESCRIPTION, description)
    return SavedModel(config, params, legend)


def open_model(path: str | Path) -> SavedModel[Any]:
    """Open a model folder, or the one in a run's folder.

    Raises:
      StorageError: there is none, or it is damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise StorageError(f"{path} is not a folder; expected the folder of a run or of a saved model")
    if not (folder / DESCRIPTION).exists():
        folder = folder / "model"
    if not folder.is_dir():
        raise StorageError(f"{path} holds no model: train one with fedrecon train DATA --out {path}")
    file = folder / DESCRIPTION
    description = read_json(file)
    try:
        if description["format"] != FORMAT or description["version"] > VERSION:
            raise StorageError(
                f"{file} is of format {description['format']} {description['version']}; "
                f"this version of fedrecon reads {FORMAT} up to {VERSION}"
            )
        name = description.get("task", "ratings")  # all that there was once
        if name not in TASKS:
            raise StorageError(f"{file} is of task {name!r}; this version of fedrecon knows {', '.join(TASKS)}")
        settings = {**to_json(TASKS[name].untrained), **{part: description["settings"][part] for part in SETTINGS}}
        config = config_from_json(settings, str(file))
        legend = TASKS[name].recall(description)
    except ConfigError as problem:
        raise StorageError(str(problem)) from None
    except StorageError:
        raise
    except (KeyError, TypeError, AttributeError) as problem:
        raise StorageError(f"{file} is damaged: {problem!r}") from None
    except ValueError as problem:
        raise StorageError(f"{file} is damaged: {problem}") from None
    saved = SavedModel(config, None, legend)
    like = jax.eval_shape(saved.algorithm.model.init_global, jax.random.key(0))
    return dataclasses.replace(saved, params=load_arrays(folder / ARRAYS, like))


def open_for(task: Task[Any, Any, L], path: str | Path) -> SavedModel[L]:
    """Open a model that was trained for a task.

    Raises:
      StorageError: there is none, it is damaged, or it is for another task; the message says what to do with it.
    """
    saved = open_model(path)
    if saved.task is not task:
        use = saved.task.serve.format(run=path)
        raise StorageError(f"{path} was trained on {saved.task.name}, not on {task.name}: use fedrecon {use}")
    return saved
