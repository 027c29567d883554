"""A plan: all that the server and its nodes agree on, with a digest that every message names."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax

from fedrecon._src.algorithms.algorithm import Algorithm, RoundMessage
from fedrecon._src.core.cohort import Lengths
from fedrecon._src.deploy import noise
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.privacy.ledger import NOT_COVERED
from fedrecon._src.recommend.config import ConfigError
from fedrecon._src.recommend.round_zero import RoundZero
from fedrecon._src.recommend.tasks import Users
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator
from fedrecon._src.storage.atomic import StorageError, read_bytes, write_bytes
from fedrecon._src.storage.ownership import check_names
from fedrecon._version import __version__

FORMAT, VERSION, FILE = "fedrecon-plan", 3, "plan.json"
_FILES = re.compile(r"plan\.json|\.plan\.json\.partial")
MOST_BYTES = 2**28  # of a plan: a catalogue of some millions of items
MOST_USERS, MOST_NODES = 2**31 - 1, 2**15
SHORTEST = 16  # the fewest characters that may name a digest
LIMIT = 2.0**20  # of any number in a node's sum, if sums are secure
OWN = ("share", "least_users", "least_nodes", "secure", "limit", "most_nodes", "users")  # written under their own names


class PlanError(ValueError):
    """A plan that cannot be used; the message says why."""


class Promises(NamedTuple):
    """What a plan promises the owners of data. A node refuses a plan that promises less than one it accepted.

    Attributes:
      secure: whether the server sees only sums over nodes.
      least_nodes: the server learns only sums of at least this many nodes.
      least_users: a node sends only sums of at least this many users.
      least_examples: users with fewer examples do not take part.
      clip_norm: the largest norm of a user's change; None for no limit.
      share: the largest share of its users that a node takes in a round.
      signed: whether the keys of secure sums are signed by the nodes that the plan lists.
      epsilon: the most that all answers of a node give away about one of its users; None without a promise.
      delta: the probability that this promise fails.
    """

    secure: bool
    least_nodes: int
    least_users: int
    least_examples: int
    clip_norm: float | None
    share: float
    signed: bool = False
    epsilon: float | None = None
    delta: float | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(abc.ABC):
    """What server and nodes agree on. Both get the same algorithm from it.

    Attributes:
      lengths: room for support and query examples, so that all nodes run one program.
      share: the share of a node's users that train in a round, drawn anew in each.
      least_users: a node sends a sum of at least this many users, or none.
      least_nodes: the server takes a step with the sums of at least this many nodes, or none.
      secure: whether the server sees only sums over nodes.
      limit: with secure sums, the largest absolute value in a node's sum.
      most_nodes: with secure sums, the largest number of nodes in one.
      nodes: public keys of the nodes, in OpenSSH's format. With secure sums a node accepts only keys that these have
        signed. Without a list, the server is trusted not to invent nodes.
      users: with noise, roughly how many users all nodes have together; sums are divided by `share` of this number.
      version: of fedrecon.
    """

    kind: ClassVar[str]

    lengths: Lengths
    share: float = 1.0
    least_users: int = 1
    least_nodes: int = 1
    secure: bool = False
    limit: float = LIMIT
    most_nodes: int = 128
    nodes: tuple[str, ...] = ()
    users: int = 0
    version: str = __version__

    def __post_init__(self) -> None:
        """Check what the settings' own types do not."""
        if not 0 < self.share <= 1:
            raise PlanError(f"the share of users in a round is {self.share}; it must be above 0, and at most 1")
        if not 1 <= self.least_users <= MOST_USERS:
            raise PlanError(f"the least number of users is {self.least_users}; it must be from 1 to {MOST_USERS}")
        if not 1 <= self.least_nodes <= MOST_NODES or not 1 <= self.most_nodes <= MOST_NODES:
            raise PlanError(
                f"the least number of nodes is {self.least_nodes} and the most in a secure sum {self.most_nodes}; both "
                f"must be from 1 to {MOST_NODES}"
            )
        if self.secure and self.least_nodes < 2:
            raise PlanError("a secure sum of one node hides nothing: set `least_nodes` to 2 or more")
        if not (self.limit > 0 and math.isfinite(self.limit)):
            raise PlanError(f"the limit of secure sums is {self.limit}; it must be a number above 0")
        if self.nodes and (len(set(self.nodes)) < len(self.nodes) or len(self.nodes) < self.least_nodes):
            raise PlanError(
                f"the plan lists {len(set(self.nodes))} different nodes in {len(self.nodes)} lines, and a round needs "
                f"{self.least_nodes}: list every node once"
            )
        if (problem := noise.problem_of(self)) is not None:
            raise PlanError(problem)

    # ---- what is trained ----

    @property
    @abc.abstractmethod
    def algorithm(self) -> Algorithm:
        """What is run, the same on every host."""

    @property
    @abc.abstractmethod
    def task(self) -> Any:
        """What people and examples are called, and which metrics are shown; a `Task` or similar."""

    @property
    @abc.abstractmethod
    def rounds(self) -> int:
        """How many rounds are trained."""

    @property
    @abc.abstractmethod
    def seed(self) -> int:
        """The seed of everything random."""

    @property
    @abc.abstractmethod
    def evaluate_every(self) -> int:
        """The validation users are measured every this many rounds; 0 for only at the end."""

    @property
    @abc.abstractmethod
    def least_examples(self) -> int:
        """Users with fewer examples do not take part."""

    @property
    @abc.abstractmethod
    def most_examples(self) -> int:
        """At most this many examples of a user are used."""

    @property
    @abc.abstractmethod
    def clip_norm(self) -> float | None:
        """The largest norm of a user's change that the settings promise; None for no promise."""

    @property
    def zero(self) -> RoundZero | None:
        """Round zero: sums over users that the model begins with; None if there is none."""
        return None

    @property
    def unprepared(self) -> bool:
        """Whether round zero comes first."""
        return False

    def view(self, users: Users) -> Users:
        """Return users as the model sees them.

        Args:
          users: as they were read.
        """
        return users

    @abc.abstractmethod
    def subject(self) -> dict[str, Any]:
        """Return what is trained, as JSON values."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return what `run.json` says about the settings."""

    @abc.abstractmethod
    def about(self) -> str:
        """Say what is trained, in a few words."""

    @abc.abstractmethod
    def evaluator(self, users: Users, part: str) -> Evaluator | None:
        """Return an evaluator of a part of the users; None if there are none."""

    @abc.abstractmethod
    def save_model(self, folder: Path, params: Any, failed: str | None = None) -> None:
        """Save trained parameters with all that inference needs."""

    @abc.abstractmethod
    def watch(self, say: Callable[[str], None]) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that looks at every record and warns when something goes wrong."""

    @abc.abstractmethod
    def why_failed(self, history: Sequence[Mapping[str, Any]], test: Evaluation | None = None) -> str | None:
        """Say why a run has failed; None if it has not."""

    # ---- what follows from it ----

    @functools.cached_property
    def message_shapes(self) -> RoundMessage:
        """What the server sends in a round, with shapes instead of arrays."""
        return jax.eval_shape(lambda: self.algorithm.message(self.algorithm.init(jax.random.key(0))))

    @functools.cached_property
    def params_shapes(self) -> Any:
        """The global parameters, with shapes instead of arrays."""
        return jax.eval_shape(self.algorithm.model.init_global, jax.random.key(0))

    @functools.cached_property
    def release(self) -> Release | None:
        """What a round releases; None without noise."""
        return noise.release_of(self)

    @property
    def delta(self) -> float | None:
        """The probability that its promise of privacy fails; None for the customary one."""
        return None

    @functools.cached_property
    def promises(self) -> Promises:
        """What it promises the owners of data."""
        spent = noise.spent(self, noise.answers_of(self.rounds))
        return Promises(
            self.secure,
            self.least_nodes,
            self.least_users,
            self.least_examples,
            self.clip_norm,
            float(self.share),
            self.secure and bool(self.nodes),
            *((spent.epsilon, spent.delta) if spent else (None, None)),
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
            "kind": self.kind,
            "lookups": {path: [f] if isinstance(f, str) else list(f) for path, f in lookups.items()},  # type: ignore[union-attr]
            "lengths": list(self.lengths),
            "nodes": list(self.nodes),
            **self.subject(),
            **{name: getattr(self, name) for name in OWN},
        }
        return (json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

    @functools.cached_property
    def digest(self) -> str:
        """The digest, which identifies exactly this plan."""
        return digest_of(self.content)

    @staticmethod
    def from_bytes(data: bytes, algorithm: Algorithm | None = None) -> Plan:
        """Read a plan from bytes that may come from anywhere.

        Args:
          data: the bytes.
          algorithm: what is trained, for a plan of an algorithm made in Python: plans hold no code.

        Raises:
          PlanError: they are not a plan of this version, or the plan is for another algorithm.
        """
        if len(data) > MOST_BYTES:
            raise PlanError(f"the plan has {len(data)} bytes; at most {MOST_BYTES} are accepted")
        return _from_bytes(data, algorithm)

    def save(self, path: str | Path) -> None:
        """Save to a folder.

        Raises:
          StorageError: the folder holds another plan, or something else.
        """
        check_names(Path(path), _FILES)
        if (Path(path) / FILE).exists() and read_bytes(Path(path) / FILE, MOST_BYTES) != self.content:
            raise StorageError(f"{path} holds another plan; use another folder")
        Path(path).mkdir(parents=True, exist_ok=True)
        write_bytes(Path(path) / FILE, self.content)

    @staticmethod
    def open(path: str | Path, algorithm: Algorithm | None = None) -> Plan:
        """Open the plan in a folder.

        Args:
          path: the folder.
          algorithm: what is trained, for a plan of an algorithm made in Python.

        Raises:
          StorageError: there is no plan.
          PlanError: the plan cannot be used.
        """
        file = Path(path) / FILE
        if not file.is_file():
            raise StorageError(f"{path} holds no plan; make one with fedrecon plan --out {path}")
        try:
            return Plan.from_bytes(read_bytes(file, MOST_BYTES), algorithm)
        except PlanError as problem:
            raise PlanError(f"{file}: {problem}") from None


@functools.lru_cache(maxsize=4)
def _from_bytes(data: bytes, algorithm: Algorithm | None) -> Plan:
    """Read a plan, once for all nodes of a process, so that what is compiled for it is compiled once."""
    try:
        plan = _read(json.loads(data), algorithm)
    except (ConfigError, PlanError) as problem:
        raise PlanError(str(problem)) from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise PlanError(f"this is not a plan: {problem!r}") from None
    if plan.content != data:
        raise PlanError("the plan is not written as this version of fedrecon writes it; make it with this version")
    return plan


def _read(values: Any, algorithm: Algorithm | None) -> Plan:
    from fedrecon._src.deploy.algorithm_plan import AlgorithmPlan
    from fedrecon._src.deploy.settings_plan import SettingsPlan

    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise PlanError(f"this is not a plan; expected {FORMAT} {VERSION}")
    if values["version"] != VERSION:
        raise PlanError(
            f"`version` of the plan must be {VERSION}, the protocol of this fedrecon ({__version__}); it is "
            f"{values['version']}, of fedrecon {values['fedrecon']}"
        )
    kinds = {"share": float, "limit": float, "secure": bool}
    for name in OWN:
        if type(values[name]) is not kinds.get(name, int):
            raise PlanError(f"the plan's {name} is {values[name]!r}, which is not {kinds.get(name, int).__name__}")
    options = {name: values[name] for name in OWN} | {"nodes": tuple(map(str, values["nodes"]))}
    if values["kind"] == AlgorithmPlan.kind:
        plan: Plan = AlgorithmPlan.read(values, algorithm, options)
    elif values["kind"] == SettingsPlan.kind:
        plan = SettingsPlan.read(values, options)
    else:
        raise PlanError(f"a plan of the unknown kind {str(values['kind'])[:40]!r}")
    if list(plan.lengths) != values["lengths"]:
        raise PlanError(f"the plan's arrays have lengths {values['lengths']}; its settings lead to {plan.lengths}")
    return plan


def digest_of(data: bytes) -> str:
    """Return the digest of a plan's bytes."""
    return hashlib.sha256(data).hexdigest()


def names(digest: str, name: str) -> bool:
    """Say whether a name is the beginning of a digest, and long enough."""
    return len(name) >= SHORTEST and digest.startswith(name.lower())


def weaker(before: Promises, now: Promises) -> list[str]:
    """List in what a plan promises less than an earlier one.

    Args:
      before: what the plan that was accepted promises.
      now: what the other one promises.
    """
    found = []
    if before.secure and not now.secure:
        found.append("sums are no longer secure")
    if before.signed and not now.signed:
        found.append("the keys of secure sums are no longer signed")
    for name in ("least_nodes", "least_users", "least_examples"):
        if getattr(now, name) < getattr(before, name):
            found.append(f"{name} falls from {getattr(before, name)} to {getattr(now, name)}")
    if before.clip_norm is not None and (now.clip_norm is None or now.clip_norm > before.clip_norm):
        found.append(f"clip_norm rises from {before.clip_norm} to {now.clip_norm}")
    if now.share > before.share:
        found.append(f"share rises from {before.share} to {now.share}")
    for name in ("epsilon", "delta"):
        was, now_is = getattr(before, name), getattr(now, name)
        if was is not None and (now_is is None or now_is > was):
            found.append(f"{name} rises from {was:.4g} to {'no promise' if now_is is None else f'{now_is:.4g}'}")
    return found


def describe(plan: Plan) -> list[tuple[str, str]]:
    """Say in words what a node takes part in if it accepts a plan."""
    task, promises = plan.task, plan.promises
    sent = ", ".join(f"{path} {'x'.join(map(str, leaf.shape)) or '1'}" for path, leaf in _leaves(plan.params_shapes))
    privacy = "no noise: no differential privacy is promised"
    if promises.epsilon is not None:
        by = "every node" if plan.secure else "the server, which sees sums without it"
        privacy = (
            f"epsilon {promises.epsilon:.3g} at delta {promises.delta:.2g} for every user, with noise that {by} adds; "
            f"a node answers {noise.answers_of(plan.rounds)} times at most. {NOT_COVERED[0].upper()}{NOT_COVERED[1:]}"
        )
    if promises.clip_norm is not None:
        privacy = f"a user's change has norm {promises.clip_norm:g} at most; {privacy}"
    sums = "open: the server sees the sum of every node"
    if promises.secure:
        sums = f"secure: the server learns sums over {promises.least_nodes} nodes or more. " + (
            f"Keys are signed by the {len(plan.nodes)} nodes of the plan: {', '.join(map(name_of, plan.nodes))}"
            if plan.nodes
            else "Keys are not signed: the server is trusted not to invent nodes"
        )
    first = "" if plan.zero is None else f"first {plan.zero.description}; then "
    return [
        ("plan", plan.digest),
        ("task", plan.about()),
        ("training", f"{plan.rounds} rounds with {promises.share:.0%} of the {task.people}, seed {plan.seed}"),
        (
            "who",
            f"{task.people} with {promises.least_examples} {task.examples} or more, at most {plan.most_examples} each",
        ),
        (
            "sent",
            f"{first}the sum over {promises.least_users} {task.people} or more of changes of: {sent}"
            + ("; counts, loss" if promises.epsilon is None else ""),
        ),
        ("stays", f"{task.examples}, ids of {task.people}, and local parameters"),
        ("sums", sums),
        ("privacy", privacy),
    ]


def name_of(key: str) -> str:
    """Return the name of a public key: its comment, or its last characters."""
    words = key.split()
    return words[2] if len(words) > 2 else words[-1][-12:]


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    from fedrecon._src.core.pytrees import flatten

    return list(flatten(tree)[0].items())
