"""A plan: all that the server and its nodes agree on, with a digest that every message names."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedrecon._version import __version__
from fedrecon.algorithm import Algorithm, Message
from fedrecon.app.build import build_algorithm
from fedrecon.app.config import Config, ConfigError, config_from_json, to_json
from fedrecon.app.tasks import Task, task_of
from fedrecon.cohort import Lengths, lengths_for
from fedrecon.disk.arrays import write_bytes
from fedrecon.disk.errors import StorageError
from fedrecon.model import AUTO

FORMAT, VERSION, FILE = "fedrecon-plan", 1, "plan.json"
MOST_BYTES = 2**28  # of a plan: a catalogue of some millions of items
SHORTEST = 16  # characters by which a digest may be named
LIMIT = 2.0**20  # of any number in a node's sum, if sums are secure


class PlanError(ValueError):
    """A plan that cannot be used; the message says why."""


class Promises(NamedTuple):
    """What a plan promises the owners of data. A node refuses a plan that promises less than one it accepted.

    Attributes:
      secure: whether the server sees sums over nodes only.
      least_nodes: of how many nodes at least the server learns a sum.
      least_users: of how many users at least a node sends a sum.
      least_examples: how many examples a user has at least who takes part.
      clip_norm: the largest norm of a user's change; None for no limit.
      share: the largest share of its users that a node takes in a round.
    """

    secure: bool
    least_nodes: int
    least_users: int
    least_examples: int
    clip_norm: float | None
    share: float


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What server and nodes agree on. Both build the same algorithm from it.

    Attributes:
      config: the settings of task, model, split, R, U, server, aggregator and seed. They name no data.
      legend: what ids stand for: the items of a catalogue, or the words of a vocabulary.
      lengths: room for support and query examples, so that all nodes run one program.
      share: the share of a node's users that train in a round, drawn anew in each.
      least_users: a node sends a sum of so many users or none.
      least_nodes: the server makes a step with the sums of so many nodes or none.
      secure: whether the server sees sums over nodes only.
      limit: with secure sums, the largest absolute value in a node's sum.
      most_nodes: with secure sums, the largest number of nodes in one.
      version: of fedrecon.
    """

    config: Config
    legend: Any
    lengths: Lengths
    share: float = 1.0
    least_users: int = 1
    least_nodes: int = 1
    secure: bool = False
    limit: float = LIMIT
    most_nodes: int = 128
    version: str = __version__

    def __post_init__(self) -> None:
        """Check what the settings' own types do not."""
        if not 0 < self.share <= 1:
            raise PlanError(f"the share of users in a round is {self.share}; it must be above 0, and at most 1")
        if self.least_users < 1 or self.least_nodes < 1 or not 1 <= self.most_nodes <= 2**15:
            raise PlanError(
                f"the least numbers of users and nodes are {self.least_users} and {self.least_nodes}, and the most "
                f"nodes are {self.most_nodes}: each must be at least 1, and the last at most {2**15}"
            )
        if self.secure and self.least_nodes < 2:
            raise PlanError("a secure sum of one node hides nothing: let `least_nodes` be 2 or more")
        if not (self.limit > 0 and math.isfinite(self.limit)):
            raise PlanError(f"the limit of secure sums is {self.limit}; it must be a number above 0")

    # ---- what follows from it ----

    @property
    def task(self) -> Task[Any, Any, Any]:
        """The task."""
        return task_of(self.config)

    @functools.cached_property
    def algorithm(self) -> Algorithm:
        """What is run, the same on every host."""
        return build_algorithm(self.config, self.task.build_model(self.config, self.legend))

    @functools.cached_property
    def message_shapes(self) -> Message:
        """What the server sends in a round, with shapes instead of arrays."""
        return jax.eval_shape(lambda: self.algorithm.message(self.algorithm.init(jax.random.key(0))))

    @functools.cached_property
    def params_shapes(self) -> Any:
        """The global parameters, with shapes instead of arrays."""
        return jax.eval_shape(self.algorithm.model.init_global, jax.random.key(0))

    @property
    def least_examples(self) -> int:
        """How many examples a user has at least who takes part."""
        data: Any = self.config.data
        return data.min_ratings if self.config.task == "ratings" else data.min_sentences

    @property
    def promises(self) -> Promises:
        """What it promises the owners of data."""
        clip_norm = self.config.aggregate.clip_norm
        return Promises(
            self.secure, self.least_nodes, self.least_users, self.least_examples, clip_norm, float(self.share)
        )

    # ---- as bytes ----

    @functools.cached_property
    def content(self) -> bytes:
        """The plan as it is saved and sent."""
        lookups = self.algorithm.model.lookups
        values = {
            "format": FORMAT,
            "version": VERSION,
            "fedrecon": self.version,
            "config": to_json(self.config),
            "legend": self.task.describe(self.legend),
            "lookups": {path: [f] if isinstance(f, str) else list(f) for path, f in lookups.items()},  # type: ignore[union-attr]
            "lengths": list(self.lengths),
            **{name: getattr(self, name) for name in OWN},
        }
        return (json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

    @functools.cached_property
    def digest(self) -> str:
        """What stands for exactly this plan."""
        return digest_of(self.content)

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Read a plan from bytes that may come from anywhere.

        Raises:
          PlanError: they are no plan of this version.
        """
        if len(data) > MOST_BYTES:
            raise PlanError(f"the plan has {len(data)} bytes; at most {MOST_BYTES} are accepted")
        return _from_bytes(data)

    def save(self, path: str | Path) -> None:
        """Save to a folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        write_bytes(Path(path) / FILE, self.content)

    @classmethod
    def open(cls, path: str | Path) -> Plan:
        """Open the plan in a folder.

        Raises:
          StorageError: there is none.
          PlanError: it is none that can be used.
        """
        file = Path(path) / FILE
        if not file.is_file():
            raise StorageError(f"{path} holds no plan; make one with fedrecon plan --out {path}")
        try:
            return cls.from_bytes(file.read_bytes())
        except PlanError as problem:
            raise PlanError(f"{file}: {problem}") from None


OWN = ("share", "least_users", "least_nodes", "secure", "limit", "most_nodes")  # written under their own names


def make_plan(config: Config, legend: Any, **options: Any) -> Plan:
    """Make a plan of settings and of what ids stand for.

    Args:
      config: the settings. What they say of a file is dropped; what they say of users stays.
      legend: items or a vocabulary.
      **options: fields of `Plan` that are not to have their default.

    Raises:
      PlanError: arrays would have no bound.
    """
    config = dataclasses.replace(config, data=_without_places(config.data))
    algorithm = build_algorithm(config, task_of(config).build_model(config, legend))
    if algorithm.model.lookups == AUTO:
        raise PlanError("the model's lookups are not decided; a plan needs a model that names them")
    data: Any = config.data
    largest = data.max_examples if config.task == "ratings" else data.max_sentences
    if largest is None:
        raise PlanError("give --data.max-examples: a plan bounds what a user brings, so that all nodes run one program")
    return Plan(config, legend, lengths_for(largest, algorithm.method.needs), **options)


def _without_places(data: Any) -> Any:
    """Return settings of data that name no file: a node reads its own, as its own options say."""
    gone = {"source": "", "items": None, "word_count": None}
    return dataclasses.replace(data, **{name: value for name, value in gone.items() if hasattr(data, name)})


@functools.lru_cache(maxsize=4)
def _from_bytes(data: bytes) -> Plan:
    """Read a plan, once for all nodes of a process, so that what is compiled for it is compiled once."""
    try:
        plan = _read(json.loads(data))
    except (ConfigError, PlanError) as problem:
        raise PlanError(str(problem)) from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise PlanError(f"this is no plan: {problem!r}") from None
    if plan.content != data:
        raise PlanError("the plan is not written as this version of fedrecon writes it; make it with this version")
    return plan


def _read(values: Any) -> Plan:
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise PlanError(f"this is no plan; expected {FORMAT} {VERSION}")
    if values["version"] != VERSION or values["fedrecon"] != __version__:
        raise PlanError(
            f"the plan was made by fedrecon {values['fedrecon']} (format {values['version']}), and this is "
            f"{__version__} (format {VERSION}): server and nodes need one version"
        )
    config = config_from_json(values["config"], "the plan")
    support, query = values["lengths"]
    kinds = {"share": float, "limit": float, "secure": bool}
    for name in OWN:
        if type(values[name]) is not kinds.get(name, int):
            raise PlanError(f"the plan's {name} is {values[name]!r}, which is not {kinds.get(name, int).__name__}")
    legend = task_of(config).recall(values["legend"])
    plan = make_plan(config, legend, **{name: values[name] for name in OWN})
    if plan.lengths != (support, query):
        raise PlanError(f"the plan's arrays have lengths {support}, {query}; its settings lead to {plan.lengths}")
    return plan


def digest_of(data: bytes) -> str:
    """Return the digest of a plan's bytes."""
    return hashlib.sha256(data).hexdigest()


def names(digest: str, name: str) -> bool:
    """Say whether a name, the beginning of a digest, is that of a digest."""
    return len(name) >= SHORTEST and digest.startswith(name.lower())


def weaker(before: Promises, now: Promises) -> list[str]:
    """List what a plan promises less than another one did."""
    found = []
    if before.secure and not now.secure:
        found.append("sums are no longer secure")
    for name in ("least_nodes", "least_users", "least_examples"):
        if getattr(now, name) < getattr(before, name):
            found.append(f"{name} falls from {getattr(before, name)} to {getattr(now, name)}")
    if before.clip_norm is not None and (now.clip_norm is None or now.clip_norm > before.clip_norm):
        found.append(f"clip_norm rises from {before.clip_norm} to {now.clip_norm}")
    if now.share > before.share:
        found.append(f"share rises from {before.share} to {now.share}")
    return found


def describe(plan: Plan) -> list[tuple[str, str]]:
    """Say in words what somebody takes part in who accepts a plan."""
    config, task, promises = plan.config, plan.task, plan.promises
    sent = ", ".join(f"{path} {'x'.join(map(str, leaf.shape)) or '1'}" for path, leaf in _leaves(plan.params_shapes))
    privacy = "no noise: no differential privacy is promised"
    if promises.clip_norm is not None:
        privacy = f"a user's change has norm {promises.clip_norm:g} at most; {privacy}"
    sums = (
        f"secure: the server learns sums over {promises.least_nodes} nodes or more"
        if promises.secure
        else "open: the server sees the sum of every node"
    )
    return [
        ("plan", plan.digest),
        ("task", f"{task.name}, {len(plan.legend)} {'items' if task.name == 'ratings' else 'words'}"),
        ("training", f"{config.rounds} rounds with {promises.share:.0%} of the {task.people}, seed {config.seed}"),
        ("who", f"{task.people} with {promises.least_examples} {task.examples} or more, at most {_most(config)} each"),
        ("sent", f"the sum over {promises.least_users} {task.people} or more of changes of: {sent}; counts, loss"),
        ("stays", f"{task.examples}, ids of {task.people}, and local parameters"),
        ("sums", sums),
        ("privacy", privacy),
    ]


def _most(config: Config) -> int:
    data: Any = config.data
    return data.max_examples if config.task == "ratings" else data.max_sentences


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    from fedrecon.trees import flatten

    return list(flatten(tree)[0].items())
