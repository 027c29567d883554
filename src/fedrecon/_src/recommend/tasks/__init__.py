"""Tasks: what can be trained from the command line, and all that differs between them."""

from typing import Any

from fedrecon._src.recommend.config import Config
from fedrecon._src.recommend.task import Measure as Measure
from fedrecon._src.recommend.task import Ready as Ready
from fedrecon._src.recommend.task import Task as Task
from fedrecon._src.recommend.task import Users as Users
from fedrecon._src.recommend.tasks.clicks import CLICKS as CLICKS
from fedrecon._src.recommend.tasks.ratings import RATINGS as RATINGS
from fedrecon._src.recommend.tasks.ratings import Items as Items
from fedrecon._src.recommend.tasks.text import TEXT as TEXT

TASKS: dict[str, Task[Any, Any, Any]] = {task.name: task for task in (RATINGS, CLICKS, TEXT)}


def task_of(config: Config) -> Task[Any, Any, Any]:
    """Return the task that settings are for."""
    return TASKS[config.task]
