"""A plan of settings, as the command line makes it: ratings, clicks or text, and what their ids stand for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.core.cohort import lengths_for
from fedrecon._src.core.model import AUTO
from fedrecon._src.deploy import noise
from fedrecon._src.deploy.plan import OWN, Plan, PlanError
from fedrecon._src.recommend.config import ClicksConfig, Config, RatingsConfig, config_from_json, to_json
from fedrecon._src.recommend.health import Watch, why_failed
from fedrecon._src.recommend.rating_model import apply_estimate, build_model, round_zero_of
from fedrecon._src.recommend.recipe import build_algorithm, make_evaluator
from fedrecon._src.recommend.round_zero import Result, RoundZero
from fedrecon._src.recommend.saved_models import save_model
from fedrecon._src.recommend.tasks import Task, Users, task_of
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SettingsPlan(Plan):
    """A plan of settings.

    Attributes:
      config: the settings of task, model, split, R, U, server, aggregator and seed. They name no data.
      legend: what ids stand for: the items of a catalogue, or the words of a vocabulary.
      found: what round zero found. It is not part of the agreement: the digest does not depend on it.
    """

    kind: ClassVar[str] = "settings"

    config: Config
    legend: Any
    found: Result | None = None

    @property
    def task(self) -> Task[Any, Any, Any]:
        """The task."""
        return task_of(self.config)

    @functools.cached_property
    def algorithm(self) -> Algorithm:
        """What is run, the same on every host."""
        if self.found is None or self.zero is None:
            model = self.task.build_model(self.config, self.legend)
            aggregator = noise.aggregator_of(self.config, self.users, {name: getattr(self, name) for name in OWN})
            return build_algorithm(self.config, model, aggregator=aggregator)
        if isinstance(self.config, RatingsConfig):
            model = build_model(self.config.model, len(self.legend), self.found.estimate)
        else:
            model = self.task.build_model(self.config, self.legend)
        return build_algorithm(self.config, model, self.found.num_examples)

    @property
    def zero(self) -> RoundZero | None:
        """Round zero, if there is one."""
        if isinstance(self.config, ClicksConfig):
            return RoundZero(num_items=len(self.legend), clicks=True)
        config = self.config
        if isinstance(config, RatingsConfig) and (config.model.round_zero or config.data.transform != "none"):
            return round_zero_of(config, len(self.legend))
        return None

    @property
    def rounds(self) -> int:
        """How many rounds are trained."""
        return self.config.rounds

    @property
    def seed(self) -> int:
        """The seed of everything random."""
        return self.config.seed

    @property
    def evaluate_every(self) -> int:
        """The validation users are measured every this many rounds."""
        return self.config.evaluate_every

    @property
    def least_examples(self) -> int:
        """Users with fewer examples do not take part."""
        data: Any = self.config.data
        return data.min_sentences if self.config.task == "text" else data.min_ratings

    @property
    def most_examples(self) -> int:
        """At most this many examples of a user are used."""
        return _most(self.config)  # type: ignore[return-value]  # `make_plan` checks it

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of a user's change."""
        return self.config.privacy.clip_norm if self.config.privacy.on else self.config.aggregate.clip_norm

    @property
    def delta(self) -> float | None:
        """The probability that its promise of privacy fails."""
        return self.config.privacy.delta

    @property
    def unprepared(self) -> bool:
        """Whether round zero comes first."""
        return self.zero is not None and self.found is None

    def prepared(self, found: Result) -> SettingsPlan:
        """Return the plan with what round zero found in settings, legend and model; its digest stays."""
        return _prepared(self, found)

    def subject(self) -> dict[str, Any]:
        """Return settings and legend."""
        return {"config": to_json(self.config), "legend": self.task.describe(self.legend)}

    def settings(self) -> dict[str, Any]:
        """Return what `run.json` says about the settings."""
        return {"config": to_json(self.config)}

    def about(self) -> str:
        """Say what is trained."""
        return f"{self.task.name}, {len(self.legend)} {'words' if self.task.name == 'text' else 'items'}"

    def view(self, users: Users) -> Users:
        """Return users as the model sees them."""
        return Users(*(self.task.view(self.config, part) for part in users))

    def evaluator(self, users: Users, part: str) -> Evaluator | None:
        """Return an evaluator of a part of the users."""
        return make_evaluator(self.config, self.algorithm, users, part=part)

    def save_model(self, folder: Path, params: Any, failed: str | None = None) -> None:
        """Save a model as `fedrecon train` does."""
        save_model(folder, self.config, params, self.legend, failed)

    def watch(self, say: Callable[[str], None]) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that looks at every record."""
        return Watch(self.config, self.task, say)

    def why_failed(self, history: Sequence[Mapping[str, Any]], test: Evaluation | None = None) -> str | None:
        """Say why a run has failed."""
        return why_failed(history, self.task, test)

    @classmethod
    def read(cls, values: Mapping[str, Any], options: Mapping[str, Any]) -> SettingsPlan:
        """Undo `subject`."""
        config = config_from_json(values["config"], "the plan")
        return make_plan(config, task_of(config).recall(values["legend"]), **options)


@functools.lru_cache(maxsize=8)
def _prepared(plan: SettingsPlan, found: Result) -> SettingsPlan:
    """Prepare a plan, once for all nodes of a process, so that what is compiled for it is compiled once."""
    config, legend, counts = plan.config, plan.legend, found.estimate.item_count
    if isinstance(config, RatingsConfig):
        config, legend = apply_estimate(config, legend, found.estimate, counts)
    else:
        legend = dataclasses.replace(legend, counts=np.rint(counts).astype(np.int64))
    ready = dataclasses.replace(plan, config=config, legend=legend, found=found)
    ready.__dict__["content"] = plan.content  # the agreement
    return ready


def make_plan(config: Config, legend: Any, **options: Any) -> SettingsPlan:
    """Make a plan from settings and from what ids stand for.

    Args:
      config: the settings. What they say about a file is dropped; what they say about users stays.
      legend: items or a vocabulary.
      **options: fields of `Plan` to set.

    Raises:
      PlanError: arrays would have no bound, or the settings promise what a deployment cannot keep.
    """
    if config.aggregate.secure:
        raise PlanError("--aggregate.secure is for simulations; here it is --secure, with --least-nodes 2 or more")
    # Who takes part is up to nodes and server, and all rounds are trained.
    config = dataclasses.replace(config, data=_without_places(config.data), sampling=Sampling(), patience=None)
    if isinstance(config, RatingsConfig) and config.model.scale is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, scale=None))
    if isinstance(config, ClicksConfig):  # a node's file may leave out less
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, at_least=config.data.at_least))
    model = task_of(config).build_model(config, legend)
    try:
        config = noise.with_noise(config, model, options.get("users", 0), options)
    except (ValueError, ImportError) as problem:
        raise PlanError(str(problem)) from None
    algorithm = build_algorithm(config, model)
    if algorithm.model.lookups == AUTO:
        raise PlanError("the model's lookups are not decided; a plan needs a model that names them")
    largest = _most(config)
    if largest is None:
        raise PlanError("give --data.max-examples: a plan limits examples per user, so that all nodes run one program")
    lengths = lengths_for(largest, algorithm.method.needs)
    return SettingsPlan(config=config, legend=legend, lengths=lengths, **options)


def _most(config: Config) -> int | None:
    data: Any = config.data
    return data.max_sentences if config.task == "text" else data.max_examples


def _without_places(data: Any) -> Any:
    """Return settings of data that name no file: a node reads its own, as its own options say."""
    gone = {"source": "", "items": None, "word_count": None}
    return dataclasses.replace(data, **{name: value for name, value in gone.items() if hasattr(data, name)})
