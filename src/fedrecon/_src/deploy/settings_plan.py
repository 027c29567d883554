"""A plan of settings, as the command line makes it: ratings, clicks or text, and what their ids stand for."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax

from fedrecon._src import server as aggregators
from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.checks import check_rules
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.core.cohort import lengths_for
from fedrecon._src.core.display import Progress, Say, silent
from fedrecon._src.core.model import AUTO
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.core.upload import DELTA
from fedrecon._src.data.sources import DataError
from fedrecon._src.deploy.plan import NodeData, Plan, PlanError, PlanOptions
from fedrecon._src.deploy.plan_privacy import max_answers, round_zero_releases
from fedrecon._src.privacy.accounting import Release, noise_for
from fedrecon._src.recommend.config import Config, Reading, change_settings, config_from_json, to_json
from fedrecon._src.recommend.protection import Population, build_private, build_secure, round_zero_noise, with_rule
from fedrecon._src.recommend.recipe import make_evaluator
from fedrecon._src.recommend.round_zero import OVERFLOW_ROOM, RoundZero
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.stopping import warn_of_divergence
from fedrecon._src.recommend.task import split_users
from fedrecon._src.recommend.tasks import Task, Users, build_algorithm, task_of
from fedrecon._src.simulation.evaluation import Evaluator


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SettingsPlan(Plan):
    """A plan of settings.

    Attributes:
      config: the settings of task, model, split, R, U, server, aggregator and seed. They name no data.
      legend: what ids stand for: the items of a catalogue, or the words of a vocabulary.

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

    @property
    def task(self) -> Task[Any, Any, Any]:
        """The task."""
        return task_of(self.config)

    @functools.cached_property
    def algorithm(self) -> Algorithm:
        """What is run, the same on every host."""
        zero = self.result or (None if self.zero is None else self.zero.start())
        config, _, model = self.task.start(self.config, self.legend, zero)
        examples: float | None = None if self.result is None else self.result.num_examples
        noise, aggregator = config.privacy.noise_multiplier, None
        if noise is not None:
            config, examples = with_rule(config, self.users, noise / (self.share * self.users))
            aggregator = _aggregator_of(config, self)
        return build_algorithm(config, model, 1 if examples is None else examples, aggregator)

    @functools.cached_property
    def zero(self) -> RoundZero | None:
        """Round zero, if there is one."""
        return self.task.round_zero(self.config, len(self.legend), self)

    def prepared(self, result: bytes) -> SettingsPlan:
        """Return the plan with the result of round zero in settings, legend and model; its digest stays."""
        return _prepared(self, result)

    def subject(self) -> dict[str, Any]:
        """Return settings and legend."""
        return {"config": to_json(self.config), "legend": self.task.describe(self.legend)}

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
        SavedModel(self.config, params, self.legend, failed).save(folder)

    def watch(self, say: Say) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that looks at every record."""
        return warn_of_divergence(self.config, self.task, say)

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
        read = self.task.read_node(self.config, self.legend, Path(path), reading or Reading(), progress)
        enough = read.clients.at_least(least := max(least, self.min_examples))
        if not len(enough):
            unit = self.task.unit or self.task.examples
            raise DataError(f"{path} has no {self.task.people} with {least} {unit} or more")
        skipped = {**read.skipped, "users_below_minimum": len(read.clients) - len(enough)}
        return NodeData(split_users(enough, self.config.data), skipped)

    @classmethod
    def read(cls, values: Mapping[str, Any], algorithm: Algorithm | None, options: Mapping[str, Any]) -> SettingsPlan:
        """Undo `subject`."""
        del algorithm
        config = config_from_json(values["config"], "the plan")
        return make_plan(config, task_of(config).recall(values["legend"]), **options)


@functools.lru_cache(maxsize=8)
def _prepared(plan: SettingsPlan, data: bytes) -> SettingsPlan:
    """Prepare a plan, once for all nodes of a process, so that what is compiled for it is compiled once."""
    assert plan.zero is not None
    result = plan.zero.read_result(data)
    config, legend, _ = plan.task.start(plan.config, plan.legend, result)
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
    # Who takes part is up to nodes and server, and all rounds are trained.
    config = dataclasses.replace(config, data=_without_places(config.data), sampling=Sampling(), patience=None)
    config, privacy = task_of(config).pin(config, legend), config.privacy
    fewest, largest = (getattr(config.data, name) for name in config.data.bounds)
    numbers: dict[str, Any] = {"min_examples": fewest, "max_examples": largest}
    numbers |= {name: getattr(config, name) for name in ("rounds", "seed", "evaluate_every")}
    agreed = PlanOptions(**numbers, **options)
    simulated, alone = config.aggregate.secure, privacy.on and agreed.users < 2
    varies = privacy.correlated is not None or (privacy.clip_quantile is not None and agreed.secure)
    rules = {
        "--aggregate.secure is for simulations; here it is --secure, with --least-nodes 2 or more": not simulated,
        "give --data.max-examples: a plan limits examples per user, so that all nodes run one program": largest,
        "nodes add independent noise for one clipping norm: leave out correlated and clip_quantile": not varies,
        "with --privacy options, give --users, the number of users of all nodes together": not alone,
    }
    check_rules(rules, PlanError)
    try:
        config, agreed = _with_noise(config, legend, agreed) if privacy.on else (config, agreed)
    except (ValueError, ImportError) as error:
        raise PlanError(str(error)) from None
    algorithm = build_algorithm(config, task_of(config).build_model(config, legend))
    assert algorithm.model.lookups != AUTO
    return SettingsPlan(
        config=config,
        legend=legend,
        lengths=lengths_for(agreed.max_examples, algorithm.method.needs),
        clip_norm=config.privacy.clip_norm if privacy.on else config.aggregate.clip_norm,
        delta=privacy.delta,
        **vars(agreed),
    )


def _without_places(data: Any) -> Any:
    """Return settings of data that name no file: a node reads its own, as its own options say."""
    removed = {"source": "", "titles": None, "word_count": None}
    return dataclasses.replace(data, **{name: value for name, value in removed.items() if hasattr(data, name)})


def _with_noise(config: Config, legend: Any, options: PlanOptions) -> tuple[Config, PlanOptions]:
    """Return settings and options that say how much noise there is, also if they give only an epsilon.

    Raises:
      ValueError: a deployment cannot keep what the settings promise.
    """
    users, share, rounds = options.users, float(options.share), max_answers(config.rounds)
    per_round, before = share * users, tuple[Release, ...]()
    task = task_of(config)
    zero = task.round_zero(config, len(legend), dataclasses.replace(options, round_zero_noise=1.0))
    if zero is not None:
        if not zero.noised:
            raise ValueError(f"round zero of {config.task} adds no noise: leave out --privacy options")
        noise_of_zero = options.round_zero_noise or _noise_of_round_zero(config, Population(users, per_round), zero)
        options = dataclasses.replace(options, round_zero_noise=noise_of_zero)
        before = round_zero_releases(dataclasses.replace(zero, noise_multiplier=noise_of_zero))
    *_, model = task.start(config, legend, None if zero is None else zero.start())
    parts = {DELTA: flatten(jax.eval_shape(model.init_global, jax.random.key(0)))[0]}

    def with_noise(noise: float) -> Config:
        return with_rule(change_settings(config, {"privacy.noise_multiplier": noise}), users, noise / per_round)[0]

    def release(noise: float) -> Release:
        aggregator = _aggregator_of(with_noise(noise), options)
        assert aggregator.release is not None
        return aggregator.release(parts)._replace(rate=share, rounds=rounds)

    noise = config.privacy.noise_multiplier
    if noise is None:
        assert config.privacy.epsilon is not None
        cohort: dict[str, Any] = {"clients": users, "per_round": per_round, "rounds": rounds}
        noise = noise_for(config.privacy.epsilon, **cohort, delta=config.privacy.delta, before=before, release=release)
    return dataclasses.replace(config, privacy=with_noise(noise).privacy), options


def _noise_of_round_zero(config: Config, population: Population, zero: RoundZero) -> float:
    """Return the noise multiplier of round zero with which it stays within its share of the budget.

    Args:
      config: the settings.
      population: who it is computed for.
      zero: with noise of multiplier 1.
    """

    def release(noise: float) -> Release:
        releases = dataclasses.replace(zero, noise_multiplier=noise).releases()
        return max(releases, key=lambda release: release.length or 0)._replace(noise_multiplier=noise)

    repeats = sum(release.rounds / release.noise_multiplier**2 for release in round_zero_releases(zero))
    return round_zero_noise(config, population, release) * math.sqrt(repeats)


def _aggregator_of(config: Config, options: PlanOptions) -> aggregators.Aggregator:
    """Return the aggregator of a plan with noise."""
    noise, users, least = config.privacy.noise_multiplier, options.users, options.least_nodes
    assert noise is not None
    per_round = float(options.share) * users
    if not options.secure:
        return build_private(config, noise, per_round)
    client_noise = aggregators.ClientNoise(noise, per_round, least, simulated=False)
    return build_secure(config, client_noise, max(OVERFLOW_ROOM * users, least))
