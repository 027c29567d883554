"""Tasks: what can be trained from the command line, and all that differs between them."""

from typing import Any

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.model import Model
from fedrecon._src.recommend.config import Config
from fedrecon._src.recommend.recipe import build_aggregator
from fedrecon._src.recommend.task import Measure as Measure
from fedrecon._src.recommend.task import Ready as Ready
from fedrecon._src.recommend.task import Task as Task
from fedrecon._src.recommend.task import Users as Users
from fedrecon._src.recommend.tasks.clicks import CLICKS as CLICKS
from fedrecon._src.recommend.tasks.ratings import RATINGS as RATINGS
from fedrecon._src.recommend.tasks.ratings import Items as Items
from fedrecon._src.recommend.tasks.text import TEXT as TEXT
from fedrecon._src.server import Aggregator

TASKS: dict[str, Task[Any, Any, Any]] = {task.name: task for task in (RATINGS, CLICKS, TEXT)}


def task_of(config: Config) -> Task[Any, Any, Any]:
    """Return the task that settings are for."""
    return TASKS[config.task]


def build_algorithm(
    config: Config, model: Model, examples: float = 1, aggregator: Aggregator | None = None
) -> Algorithm:
    """Return the algorithm of a task with these settings.

    Args:
      config: the settings, those of a `Ready` for a model that begins with round zero.
      model: what is trained.
      examples: how many examples all training clients have, which a prior is weighed against; only training needs it.
        If uploads are sums over examples (`protection`), how many uploads make up everybody's.
      aggregator: of a run that protects its clients (`protection`), which depends on who trains.
    """
    return task_of(config).build_algorithm(config, model, examples, aggregator or build_aggregator(config, model))
