"""A plan of settings, as the command line makes it: ratings, clicks or text, and what their ids stand for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from fedrecon._src import server as aggregators
from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.core.cohort import lengths_for
from fedrecon._src.core.model import AUTO, Model
from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.core.upload import DELTA
from fedrecon._src.data import RatingsSchema
from fedrecon._src.deploy.plan import OPTIONS, NodeData, Plan, PlanError
from fedrecon._src.deploy.plan_privacy import max_answers
from fedrecon._src.privacy.accounting import Release, noise_for
from fedrecon._src.recommend.config import (
    ClicksConfig,
    Config,
    ConfigError,
    RatingsConfig,
    Reading,
    config_from_json,
    to_json,
)
from fedrecon._src.recommend.protection import is_recipe
from fedrecon._src.recommend.rating_model import apply_estimate, build_model, round_zero_of
from fedrecon._src.recommend.recipe import build_algorithm, make_evaluator
from fedrecon._src.recommend.round_zero import Result, RoundZero
from fedrecon._src.recommend.saved_models import save_model
from fedrecon._src.recommend.stopping import Watch, why_failed
from fedrecon._src.recommend.task import Read, split_users
from fedrecon._src.recommend.tasks import Task, Users, task_of
from fedrecon._src.recommend.tasks.clicks import read_clicks
from fedrecon._src.recommend.tasks.ratings import read_ratings
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator

OVERFLOW_ROOM = 4  # sums do not overflow even with this many times the users that the plan says


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SettingsPlan(Plan):
    """A plan of settings.

    Attributes:
      config: the settings of task, model, split, R, U, server, aggregator and seed. They name no data.
      legend: what ids stand for: the items of a catalogue, or the words of a vocabulary.
      result: of round zero. It is not part of the agreement: the digest does not depend on it.

    Example:
      >>> from fedrecon._src.recommend.config import RatingsConfig
      >>> from fedrecon._src.recommend.rating_model import Items
      >>> plan = fr.deploy.make_plan(RatingsConfig(rounds=20), Items(np.arange(8)))
      >>> isinstance(plan, fr.deploy.SettingsPlan), plan.about()
      (True, 'ratings, 8 items')
    """

    kind: ClassVar[str] = "settings"

    config: Config
    legend: Any
    result: Result | None = None

    @property
    def task(self) -> Task[Any, Any, Any]:
        """The task."""
        return task_of(self.config)

    @property
    def people(self) -> str:  # type: ignore[override]
        """What users are called."""
        return self.task.people

    @property
    def examples(self) -> str:  # type: ignore[override]
        """What their examples are called."""
        return self.task.examples

    @functools.cached_property
    def algorithm(self) -> Algorithm:
        """What is run, the same on every host."""
        if self.result is None or self.zero is None:
            model = self.task.build_model(self.config, self.legend)
            aggregator = _aggregator_of(self.config, self.users, {name: getattr(self, name) for name in OPTIONS})
            return build_algorithm(self.config, model, aggregator=aggregator)
        if isinstance(self.config, RatingsConfig):
            model = build_model(self.config.model, len(self.legend), self.result.estimate)
        else:
            model = self.task.build_model(self.config, self.legend)
        return build_algorithm(self.config, model, self.result.num_examples)

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
    def unprepared(self) -> bool:
        """Whether round zero comes first."""
        return self.zero is not None and self.result is None

    def prepared(self, result: Result) -> SettingsPlan:
        """Return the plan with the result of round zero in settings, legend and model; its digest stays."""
        return _prepared(self, result)

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

    def read_file(
        self, path: str | Path, reading: Reading | None = None, least: int = 1, progress: Progress = silent
    ) -> NodeData:
        """Read a node's file.

        Names decide who trains, validates and tests, so the result is the same as for the union of all nodes' files.

        Args:
          path: ratings, clicks, or text.
          reading: how the file is laid out.
          least: users with fewer examples do not take part; the plan's minimum applies if it is larger.
          progress: a progress display.

        Raises:
          DataError: the file cannot be read, or nothing in it can take part.
        """
        clients, skipped = self._read_clients(Path(path), reading or Reading(), max(least, self.min_examples), progress)
        return NodeData(split_users(clients, self.config.data), skipped)

    def _read_clients(self, path: Path, reading: Reading, least: int, progress: Progress) -> Read:
        """Read the users of a file that have enough examples, in the order of the file."""
        config: Any = self.config
        if config.task == "ratings":
            ratings = read_ratings(path, reading, min_ratings=least, schema=RatingsSchema(self.legend.ids))
            return Read(ratings, ratings.skipped)
        if config.task == "clicks":
            clicks = read_clicks(config, self.legend, path, reading)
            everyone = Read(clicks, clicks.skipped)
        else:
            read = self.task.read(config, self.legend, path, reading, progress)
            everyone = Read(read.clients.cap(config.data.max_sentences), read.skipped)
        enough = everyone.clients.at_least(least)
        return Read(enough, {**everyone.skipped, "users_below_minimum": len(everyone.clients) - len(enough)})

    @classmethod
    def read(cls, values: Mapping[str, Any], algorithm: Algorithm | None, options: Mapping[str, Any]) -> SettingsPlan:
        """Undo `subject`."""
        del algorithm
        try:
            config = config_from_json(values["config"], "the plan")
        except ConfigError as error:
            raise PlanError(str(error)) from None
        return make_plan(config, task_of(config).recall(values["legend"]), **options)


@functools.lru_cache(maxsize=8)
def _prepared(plan: SettingsPlan, result: Result) -> SettingsPlan:
    """Prepare a plan, once for all nodes of a process, so that what is compiled for it is compiled once."""
    config, legend, counts = plan.config, plan.legend, result.estimate.item_count
    if isinstance(config, RatingsConfig):
        config, legend = apply_estimate(config, legend, result.estimate, counts)
    else:
        legend = dataclasses.replace(legend, counts=np.rint(counts).astype(np.int64))
    ready = dataclasses.replace(plan, config=config, legend=legend, result=result)
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

    Example:
      >>> from fedrecon._src.recommend.config import RatingsConfig
      >>> from fedrecon._src.recommend.rating_model import Items
      >>> fr.deploy.make_plan(RatingsConfig(rounds=20), Items(np.arange(8)), least_users=5).rounds
      20
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
        config = _with_noise(config, model, options.get("users", 0), options)
    except (ValueError, ImportError) as error:
        raise PlanError(str(error)) from None
    algorithm = build_algorithm(config, model)
    if algorithm.model.lookups == AUTO:
        raise PlanError("the model's lookups are not decided; a plan needs a model that names them")
    data: Any = config.data
    is_text, protected = config.task == "text", config.privacy.on
    largest = data.max_sentences if is_text else data.max_examples
    if largest is None:
        raise PlanError("give --data.max-examples: a plan limits examples per user, so that all nodes run one program")
    return SettingsPlan(
        config=config,
        legend=legend,
        lengths=lengths_for(largest, algorithm.method.needs),
        rounds=config.rounds,
        seed=config.seed,
        evaluate_every=config.evaluate_every,
        min_examples=data.min_sentences if is_text else data.min_ratings,
        max_examples=largest,
        clip_norm=config.privacy.clip_norm if protected else config.aggregate.clip_norm,
        delta=config.privacy.delta,
        **options,
    )


def _without_places(data: Any) -> Any:
    """Return settings of data that name no file: a node reads its own, as its own options say."""
    removed = {"source": "", "items": None, "word_count": None}
    return dataclasses.replace(data, **{name: value for name, value in removed.items() if hasattr(data, name)})


def _with_noise(config: Config, model: Model, users: int, options: dict[str, Any]) -> Config:
    """Return settings that say how much noise there is, also if they give only an epsilon.

    Raises:
      ValueError: a deployment cannot keep what the settings promise.
    """
    privacy = config.privacy
    if not privacy.on:
        return config
    if isinstance(config, ClicksConfig):
        raise ValueError("for clicks, nodes count the users of each item without noise: leave out --privacy options")
    if is_recipe(config):
        raise ValueError(
            "round zero of a deployment has no noise, so nothing could be promised: with --privacy options use "
            "--preset paper, which has no round zero"
        )
    if privacy.correlated is not None or (privacy.clip_quantile is not None and options.get("secure")):
        raise ValueError("nodes add independent noise for one clipping norm: leave out correlated and clip_quantile")
    if users < 2:
        raise ValueError("with --privacy options, give --users, the number of users of all nodes together")
    if privacy.noise_multiplier is not None:
        return config
    assert privacy.epsilon is not None
    share, rounds = float(options.get("share", 1.0)), max_answers(config.rounds)
    parts = {DELTA: flatten(jax.eval_shape(model.init_global, jax.random.key(0)))[0]}

    def release(noise: float) -> Release:
        chosen = dataclasses.replace(config, privacy=dataclasses.replace(privacy, noise_multiplier=noise))
        aggregator = _aggregator_of(chosen, users, options)
        assert aggregator is not None
        assert aggregator.release is not None
        return aggregator.release(parts)._replace(rate=share, rounds=rounds)

    noise = noise_for(
        privacy.epsilon, clients=users, per_round=share * users, rounds=rounds, delta=privacy.delta, release=release
    )
    return dataclasses.replace(config, privacy=dataclasses.replace(privacy, noise_multiplier=noise))


def _aggregator_of(config: Config, users: int, options: dict[str, Any]) -> aggregators.Aggregator | None:
    """Return the aggregator of a plan's updates; None for the one of the settings."""
    settings = config.privacy
    if settings.noise_multiplier is None:
        return None
    assert settings.clip_norm is not None
    per_round = float(options.get("share", 1.0)) * users
    if not options.get("secure"):
        return aggregators.private(
            settings.clip_norm, settings.noise_multiplier, per_round=per_round, quantile=settings.clip_quantile
        )
    least = int(options.get("least_nodes", 1))
    return aggregators.secure(
        settings.clip_norm,
        clients=max(OVERFLOW_ROOM * users, least),
        noise_multiplier=settings.noise_multiplier,
        per_round=per_round,
        least=least,
        simulated_noise=False,
    )
