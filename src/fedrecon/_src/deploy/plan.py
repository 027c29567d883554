"""A plan: all that the server and its nodes agree on, with a digest that every message names."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
from annotated_types import Ge, Gt, Le

from fedrecon._src.algorithms.algorithm import Algorithm, RoundMessage
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import Lengths
from fedrecon._src.core.display import Say
from fedrecon._src.core.keys import as_number, mix_hashes, round_key, words_of
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.deploy import plan_privacy
from fedrecon._src.privacy.accounting import LEAST_NOISE, MOST_NOISE, Release
from fedrecon._src.privacy.ledger import NOT_COVERED
from fedrecon._src.recommend.config import ConfigError, Rule, check_config, enforce
from fedrecon._src.recommend.estimate import State
from fedrecon._src.recommend.round_zero import RoundZero
from fedrecon._src.recommend.tasks import Users
from fedrecon._src.simulation.evaluation import Evaluator
from fedrecon._src.storage.atomic import StorageError, read_bytes, write_bytes
from fedrecon._src.storage.ownership import check_names

FORMAT, VERSION, FILE = "fedrecon-plan", 5, "plan.json"
_FILES = re.compile(r"plan\.json|\.plan\.json\.partial")
MOST_BYTES = 2**28  # of a plan: a catalogue of some millions of items
SHORTEST = 16  # the fewest characters that may name a digest
PARTICIPATION_SALT = 0xD6E8FEB86659FD93  # so that who takes part has nothing to do with how splits are redrawn
LIMIT = 2.0**20  # of any number in a node's sum, if sums are secure
OPTIONS = ("share", "least_users", "least_nodes", "secure", "limit", "most_nodes", "users", "round_zero_noise")


class PlanError(ValueError):
    """A plan that cannot be used; the message says why."""


class NodeData(NamedTuple):
    """The users of a node, and counts of what was left out of its file.

    Example:
      >>> users = fr.data.synthetic_ratings(num_users=4, seed=0)
      >>> data = fr.deploy.NodeData((users, users, users), {"users_below_minimum": 2})
      >>> len(data.users[0])
      4
    """

    users: Users
    skipped: Mapping[str, int]


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

    Example:
      >>> promises = fr.deploy.Promises(
      ...     secure=True, least_nodes=3, least_users=5, least_examples=1, clip_norm=1.0, share=0.1
      ... )
      >>> promises.epsilon is None
      True
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


Count = Annotated[int, Ge(1), Le(2**31 - 1)]
NodeCount = Annotated[int, Ge(1), Le(2**15)]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PlanOptions:
    """The options of a plan, whatever is trained; `Plan` says what they mean."""

    share: Annotated[float, Gt(0), Le(1)] = 1.0
    least_users: Count = 1
    least_nodes: NodeCount = 1
    secure: bool = False
    limit: Annotated[float, Gt(0)] = LIMIT
    most_nodes: NodeCount = 128
    nodes: tuple[str, ...] = ()
    users: int = 0
    round_zero_noise: float = 0.0
    rounds: Annotated[int, Ge(1)] = 100
    seed: int = 0
    evaluate_every: Annotated[int, Ge(0)] = 0
    min_examples: Annotated[int, Ge(1)] = 1
    max_examples: Annotated[int, Ge(2)] = 300


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(PlanOptions, abc.ABC):
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
      rounds: how many rounds are trained.
      seed: the seed of everything random.
      evaluate_every: measure the validation users every this many rounds; 0 for only at the end.
      min_examples: users with fewer examples do not take part.
      max_examples: at most this many examples of a user are used.
      clip_norm: the largest norm of a user's change that is promised; None for no promise.
      delta: the probability that the promise of privacy fails; None for the customary one.
      users: with noise, roughly how many users all nodes have together; sums are divided by `share` of this number.
      round_zero_noise: the noise multiplier of one release that costs as much as asking each question of round zero
        once; 0 without noise.
      result: the last state of round zero. It is not part of the agreement: the digest does not depend on it.

    Example:
      >>> fr.deploy.Plan.from_bytes(b"{}")
      Traceback (most recent call last):
      fedrecon._src.deploy.plan.PlanError: this is not a plan of format fedrecon-plan 5: ...
    """

    kind: ClassVar[str]

    lengths: Lengths
    clip_norm: float | None = None
    delta: float | None = None
    result: State | None = None

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for options that must fit together."""
        hides, noise, keys = not self.secure or self.least_nodes >= 2, self.round_zero_noise, self.nodes
        yield Rule(not hides, "least_nodes", "must be at least 2 with `secure`: a secure sum of one node hides nothing")
        bounds = f"must be 0, or from {LEAST_NOISE} to {MOST_NOISE:g}"
        yield Rule(noise != 0 and not LEAST_NOISE <= noise <= MOST_NOISE, "round_zero_noise", bounds)
        complete = not keys or len(set(keys)) == len(keys) >= self.least_nodes
        yield Rule(not complete, "nodes", "must list every node once, and at least `least_nodes` of them")
        yield from plan_privacy.noise_rules(self)

    def __post_init__(self) -> None:
        """Check the options."""
        try:
            names = [field.name for field in dataclasses.fields(PlanOptions)]
            check_config(PlanOptions(**{name: getattr(self, name) for name in names}))
            enforce(self.rules(), self)
        except ConfigError as error:
            raise PlanError(str(error)) from error

    # ---- what is trained ----

    @property
    @abc.abstractmethod
    def algorithm(self) -> Algorithm:
        """What is run, the same on every host."""

    @property
    @abc.abstractmethod
    def task(self) -> Any:
        """What commands show: `people`, `examples`, `measures`, `curve`, and what a model is for (`serve`)."""

    @property
    def zero(self) -> RoundZero | None:
        """Round zero: sums over users that the model begins with; None if there is none."""
        return None

    @property
    def unprepared(self) -> bool:
        """Whether round zero comes first."""
        return self.zero is not None and self.result is None

    def prepared(self, result: bytes) -> Plan:
        """Return the plan with the result of round zero, given as bytes; its digest stays.

        Raises:
          StateError, WireError: the bytes are nothing that round zero can end with.
        """
        raise PlanError("this plan has no round zero")

    def participants(self, users: Clients, number: int) -> Clients:
        """Return the users that train in a round. Each is drawn with the plan's share, from its name and the round.

        In plans with noise nobody else may know who they are, so they are drawn from the system's entropy.
        """
        if self.release is not None:
            return plan_privacy.draw_participants(users, self.share)
        if self.share == 1 or not len(users):
            return users
        salt = as_number(words_of(round_key(self.seed, number))) ^ np.uint64(PARTICIPATION_SALT)
        with np.errstate(over="ignore"):
            drawn = mix_hashes(as_number(users.identities()), salt)
        return users.take(drawn.astype(np.float64) < self.share * 2.0**64)

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
    def about(self) -> str:
        """Say what is trained, in a few words."""

    @abc.abstractmethod
    def evaluator(self, users: Users, part: str) -> Evaluator | None:
        """Return an evaluator of a part of the users; None if there are none."""

    @abc.abstractmethod
    def save_model(self, folder: Path, params: Any, failed: str | None = None) -> None:
        """Save trained parameters with all that inference needs."""

    @abc.abstractmethod
    def watch(self, say: Say) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that looks at every record and warns when something goes wrong."""

    @classmethod
    @abc.abstractmethod
    def read(cls, values: Mapping[str, Any], algorithm: Algorithm | None, options: Mapping[str, Any]) -> Plan:
        """Undo `subject`."""

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
        release, parts = self.algorithm.aggregator.release, plan_privacy.parts_of(self.algorithm)
        return None if release is None else release(parts)._replace(rate=float(self.share))

    @functools.cached_property
    def promises(self) -> Promises:
        """What it promises the owners of data."""
        spent = plan_privacy.ledger_of(self, plan_privacy.max_answers(self.rounds))
        privacy = (None, None) if spent is None else (spent.epsilon, spent.delta)
        least = (self.least_nodes, self.least_users, self.min_examples)
        signed = self.secure and bool(self.nodes)
        return Promises(self.secure, *least, self.clip_norm, float(self.share), signed, *privacy)

    # ---- as bytes ----

    @functools.cached_property
    def content(self) -> bytes:
        """The plan as it is saved and sent."""
        lookups = self.algorithm.model.lookups
        values = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "lookups": {path: [f] if isinstance(f, str) else list(f) for path, f in lookups.items()},  # type: ignore[union-attr]
            "lengths": list(self.lengths),
            "nodes": list(self.nodes),
            **self.subject(),
            **{name: getattr(self, name) for name in OPTIONS},
        }
        return (json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

    @functools.cached_property
    def digest(self) -> str:
        """The digest, which identifies exactly this plan."""
        return digest_of(self.content)

    @staticmethod
    @functools.lru_cache(maxsize=4)  # all nodes of a process have one plan, so that what is compiled is compiled once
    def from_bytes(data: bytes, algorithm: Algorithm | None = None) -> Plan:
        """Read a plan from bytes that may come from anywhere.

        Args:
          data: the bytes.
          algorithm: what is trained, for a plan of an algorithm made in Python: plans hold no code.

        Raises:
          PlanError: they are not a plan of this version, or the plan is for another algorithm.
        """
        from fedrecon._src.deploy.algorithm_plan import AlgorithmPlan
        from fedrecon._src.deploy.settings_plan import SettingsPlan

        if len(data) > MOST_BYTES:
            raise PlanError(f"the plan has {len(data)} bytes; at most {MOST_BYTES} are accepted")
        try:
            values = json.loads(data)
            if not isinstance(values, dict) or (values.get("format"), values.get("version")) != (FORMAT, VERSION):
                rule = "server and nodes need the same format"
                raise PlanError(f"this is not a plan of format {FORMAT} {VERSION}: {rule}")
            options = {name: values[name] for name in OPTIONS} | {"nodes": tuple(map(str, values["nodes"]))}
            kinds: dict[str, type[Plan]] = {kind.kind: kind for kind in (AlgorithmPlan, SettingsPlan)}
            plan = kinds[values["kind"]].read(values, algorithm, options)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            says_why = isinstance(error, PlanError | ConfigError)
            raise PlanError(str(error) if says_why else f"this is not a plan: {error!r}") from None
        # What else is in it, such as the lengths of arrays, follows from what was read.
        if plan.content != data:
            raise PlanError("the plan was written by another version of fedrecon; make it again with this one")
        return plan

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
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from None


def digest_of(data: bytes) -> str:
    """Return the digest of a plan's bytes."""
    return hashlib.sha256(data).hexdigest()


def is_prefix(digest: str, name: str) -> bool:
    """Say whether a name is the beginning of a digest, and long enough."""
    return len(name) >= SHORTEST and digest.startswith(name.lower())


def weaker(before: Promises, now: Promises) -> list[str]:
    """List in what a plan promises less than an earlier one.

    Args:
      before: what the plan that was accepted promises.
      now: what the other one promises.

    Example:
      >>> before = fr.deploy.Promises(True, 3, 5, 1, 1.0, 0.1)
      >>> fr.deploy.weaker(before, before._replace(least_nodes=2))
      ['least_nodes falls from 3 to 2']
    """
    texts = {"secure": "sums are no longer secure", "signed": "the keys of secure sums are no longer signed"}
    losses = [text for name, text in texts.items() if getattr(before, name) and not getattr(now, name)]
    for name in ("least_nodes", "least_users", "least_examples"):
        if getattr(now, name) < getattr(before, name):
            losses.append(f"{name} falls from {getattr(before, name)} to {getattr(now, name)}")
    for name in ("clip_norm", "share", "epsilon", "delta"):
        was, now_is = getattr(before, name), getattr(now, name)
        if was is not None and (now_is is None or now_is > was):
            losses.append(f"{name} rises from {was:.4g} to {'no promise' if now_is is None else f'{now_is:.4g}'}")
    return losses


def describe(plan: Plan) -> list[tuple[str, str]]:
    """Say in words what a node takes part in if it accepts a plan."""
    people, examples, promises = plan.task.people, plan.task.examples, plan.promises
    leaves = flatten(plan.params_shapes)[0]
    sent = ", ".join(f"{path} {'x'.join(map(str, leaf.shape)) or '1'}" for path, leaf in leaves.items())
    privacy = "no noise: no differential privacy is promised"
    if promises.epsilon is not None:
        questions = "" if plan.zero is None else f"{plan_privacy.max_answers(len(plan.zero.questions))} questions and "
        by = "every node" if plan.secure else "the server, which sees sums without it"
        privacy = (
            f"epsilon {promises.epsilon:.3g} at delta {promises.delta:.2g} for every user, with noise that {by} adds; "
            f"a node answers {questions}{plan_privacy.max_answers(plan.rounds)} times at most. "
            f"{NOT_COVERED[0].upper()}{NOT_COVERED[1:]}"
        )
    if promises.clip_norm is not None:
        privacy = f"a user's change has norm {promises.clip_norm:g} at most; {privacy}"
    sums = "open: the server sees the sum of every node"
    if promises.secure:
        keys = "Keys are not signed: the server is trusted not to invent nodes"
        if plan.nodes:
            names = ", ".join(map(name_of, plan.nodes))
            keys = f"Keys are signed by the {len(plan.nodes)} nodes of the plan: {names}"
        sums = f"secure: the server learns sums over {promises.least_nodes} nodes or more. {keys}"
    first = "" if plan.zero is None else f"first {plan.zero.description}; then "
    counts = "; counts, loss" if promises.epsilon is None else ""
    return [
        ("plan", plan.digest),
        ("task", plan.about()),
        ("training", f"{plan.rounds} rounds with {promises.share:.0%} of the {people}, seed {plan.seed}"),
        ("who", f"{people} with {promises.least_examples} {examples} or more, at most {plan.max_examples} each"),
        ("sent", f"{first}the sum over {promises.least_users} {people} or more of changes of: {sent}{counts}"),
        ("stays", f"{examples}, ids of {people}, and local parameters"),
        ("sums", sums),
        ("privacy", privacy),
    ]


def name_of(key: str) -> str:
    """Return the name of a public key: its comment, or its last characters."""
    words = key.split()
    return words[2] if len(words) > 2 else words[-1][-12:]
