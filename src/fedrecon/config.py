"""The settings of a run as typed dataclasses: the command line's options, and what a config file holds."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from fedrecon import split as splits
from fedrecon.sampling import Sampling as Sampling

Optimizer = Literal["sgd", "momentum", "adagrad", "adam"]
ServerOptimizer = Literal["sgd", "momentum", "adagrad", "fedadagrad", "adam", "yogi"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a ratings file is read (MovieLens archives need none of this).

    Attributes:
      user: header of the column with user ids, or its position counted from 0.
      item: the same for item ids; ids may be numbers or text.
      rating: the same for ratings.
      time: the same for timestamps; 'auto' takes a column 'time' or 'timestamp' if there is one.
      delimiter: what separates fields; by default whichever of tab, comma, semicolon or '::' the first line has.
      header: whether the first line names the columns; by default a line without any number does.
      encoding: the encoding of a text file.
      duplicates: which of several ratings of one item by one user counts, or that they are an error.
      bad_rows: whether a row that cannot be read is an error or is skipped and counted.
    """

    user: int | str = "user"
    item: int | str = "item"
    rating: int | str = "rating"
    time: int | str | None = "auto"
    delimiter: str | None = None
    header: bool | None = None
    encoding: str = "utf-8"
    duplicates: Literal["last", "first", "mean", "error"] = "last"
    bad_rows: Literal["error", "skip"] = "error"


@dataclass(frozen=True, kw_only=True)
class Data(Reading):
    """Which ratings, how they are read, and which users train.

    Attributes:
      source: what to train on: movielens-small, movielens-100k, movielens-1m, synthetic, the path of a MovieLens zip
        or folder, or any file of ratings (text or Parquet).
      min_ratings: users with fewer ratings are left out.
      max_examples: at most this many ratings of a user are used, after shuffling; None for all.
      shuffle_seed: seed of the order of each user's ratings; None keeps the order of the file.
      fractions: shares of the users for training, validation and test. No user is in two of them.
      split_seed: seed of who trains, validates and tests; apart from --seed, so that runs share their test users.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="DATA", metavar="DATA")]
    min_ratings: int = 1
    max_examples: int | None = 300
    shuffle_seed: int | None = 0
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    split_seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.max_examples is not None and self.max_examples < 2:
            raise ValueError(f"max_examples is {self.max_examples}; support and query need at least 2")
        if min(self.fractions) < 0 or not self.fractions[0] > 0 or abs(sum(self.fractions) - 1) > 1e-6:
            raise ValueError(
                f"fractions are {self.fractions}; give shares for training (above 0), validation and test that sum to 1"
            )


@dataclass(frozen=True, kw_only=True)
class Factorization:
    """The model: a rating is the product of an item's embedding (global) and a user's (local).

    Attributes:
      dim: length of the embeddings.
      biases: add a global mean, a bias of each item (global) and a bias of the user (local).
      init_mean: where the global mean starts; only with biases.
      learned_default: learn where reconstruction starts, which serves users with few ratings.
      implicit_feedback: let what a user rated, whatever the ratings, move where reconstruction starts.
    """

    dim: int = 50
    biases: bool = False
    init_mean: float = 0.0
    learned_default: bool = False
    implicit_feedback: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.dim < 1:
            raise ValueError(f"dim is {self.dim}; embeddings need at least 1 number")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which of a user's ratings are support (to rebuild from) and which are query (to learn from or measure on).

    Attributes:
      train: in training: half, alternate, none (both are everything), or the share of support such as 0.8; with
        redrawn- before it (redrawn-half), a user's ratings are put in a new random order in every round.
      evaluate: in evaluation, which always splits: half, alternate, or the share of support.
      by_time: order a user's ratings by time before splitting, so that the query is later than the support.
    """

    train: str = "half"
    evaluate: str = "half"
    by_time: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        if splits.named(self.train).redrawn and self.by_time:
            raise ValueError(f"split.train is {self.train!r}, which draws an order; it excludes split.by_time")
        splits.named(self.evaluate)
        if self.evaluate == "none":
            raise ValueError("split.evaluate is 'none'; measuring on what was rebuilt from says nothing: use 'half'")


@dataclass(frozen=True, kw_only=True)
class Reconstruct:
    """R: how a client rebuilds its local parameters on its support, with the global ones frozen.

    Attributes:
      solver: gradient descent in steps, or least squares at once (exact for this model).
      optimizer: the optimizer of gradient descent, fresh for every client.
      learning_rate: its learning rate.
      steps: at most this many steps; None for no limit.
      epochs: how often a client goes through its support.
      batch_size: ratings of one step.
      ridge: with least squares: the penalty on the squared distance from where the parameters start.
    """

    solver: Literal["gradient-descent", "least-squares"] = "gradient-descent"
    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.1
    steps: int | None = 50
    epochs: int = 5
    batch_size: int = 5
    ridge: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Update:
    """U: how a client updates the global parameters on its query.

    Attributes:
      optimizer: the optimizer, fresh for every client.
      learning_rate: its learning rate.
      steps: at most this many steps; None for no limit.
      epochs: how often a client goes through its query.
      batch_size: ratings of one step.
      joint: move the local parameters as well (they are forgotten all the same).
      second_order: differentiate through the reconstruction; slow, so use few steps.
    """

    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.5
    steps: int | None = 50
    epochs: int = 1
    batch_size: int = 5
    joint: bool = False
    second_order: bool = False


@dataclass(frozen=True, kw_only=True)
class Server:
    """What the server does with the mean of the clients' updates.

    Attributes:
      optimizer: takes the negative mean update for a gradient; sgd at 1.0 is plain averaging; fedadagrad is Adagrad
        with accumulators from 0 instead of 0.1.
      learning_rate: its learning rate.
      decay_rounds: bring the learning rate down to a fiftieth over so many rounds, along a cosine; None keeps it.
    """

    optimizer: ServerOptimizer = "sgd"
    learning_rate: float = 1.0
    decay_rounds: int | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.decay_rounds is not None and self.decay_rounds < 1:
            raise ValueError(f"server.decay_rounds is {self.decay_rounds}; give at least 1 round, or none at all")


@dataclass(frozen=True, kw_only=True)
class Aggregate:
    """How the clients' updates become one mean.

    Attributes:
      weigh: weigh clients by their query ratings, or all the same.
      clip_norm: scale updates with a larger norm down to this; None for no limit.
      zero_norm: ignore updates with a larger norm than this; None for no limit.
    """

    weigh: Literal["examples", "uniform"] = "examples"
    clip_norm: float | None = None
    zero_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. The defaults are the paper's for MovieLens 1M..

    Attributes:
      rounds: rounds of training, those before --resume included.
      evaluate_every: evaluate the validation users every so many rounds, and at the end; 0 for the end alone.
      checkpoint_every: save the state every so many rounds: what is lost at most if the process is killed.
      seed: seed of the parameters and of who takes part when.
      devices: how many devices run clients; by default all, with one for each core of a CPU.
      block: how many clients a device runs side by side; by default as many as suit its cache.
    """

    data: Data
    model: Factorization = field(default_factory=Factorization)
    split: Split = field(default_factory=Split)
    reconstruct: Reconstruct = field(default_factory=Reconstruct)
    update: Update = field(default_factory=Update)
    server: Server = field(default_factory=Server)
    aggregate: Aggregate = field(default_factory=Aggregate)
    sampling: Sampling = field(default_factory=Sampling)
    rounds: int = 500
    evaluate_every: int = 100
    checkpoint_every: int = 100
    seed: int = 0
    devices: int | None = None
    block: int | None = None


HARMLESS = ("rounds", "evaluate_every", "checkpoint_every")  # may differ between a run and its continuation

T = TypeVar("T")


class ConfigError(ValueError):
    """A config file that is not what it should be."""


def to_json(config: Any) -> dict[str, Any]:
    """Return settings as what JSON can hold."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(kind: type[T], values: Any, source: str, *, within: str = "") -> T:
    """Make settings from JSON; what is not there takes its default.
    Args:
      kind: one of the dataclasses above.
      values: an object as `to_json` returns, or part of one.
      source: where it comes from, for messages.
      within: the group these settings are in, for messages.

    Raises:
      ConfigError: a setting is unknown, missing or of the wrong type; the message names it.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: {within or 'the config'} must be an object of settings, not {values!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{within}.{name}" if within else name
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(fields)}"
            raise ConfigError(f"{source}: unknown setting {where!r}; {hint}")
        if dataclasses.is_dataclass(hints[name]):
            found[name] = from_json(typing.cast(type, hints[name]), value, source, within=where)
        else:
            found[name] = _typed(hints[name], value, where, source)
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in found:
            raise ConfigError(f"{source}: the setting {within + '.' if within else ''}{name} is missing")
    try:
        return kind(**found)
    except ConfigError:
        raise
    except ValueError as problem:
        raise ConfigError(f"{source}: {problem}") from None


def _typed(hint: Any, value: Any, where: str, source: str) -> Any:
    """Return a JSON value as the type that is asked for, or fail naming it."""
    for kind in typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        origin, choices = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal and value in choices:
            return value
        if origin is tuple and isinstance(value, list | tuple) and len(value) == len(choices):
            return tuple(_typed(one, x, where, source) for one, x in zip(choices, value, strict=True))
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind in (int, str, bool, type(None)) and type(value) is kind:
            return value
    raise ConfigError(f"{source}: {where} is {json.dumps(value)}; expected {_name(hint)}")


def _name(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(kind) for kind in inner)
    if origin is tuple:
        return f"a list of {len(inner)} numbers"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names[hint]


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings of a config file, or of the `run.json` of a run."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"the config file {path} cannot be read: {problem.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the config file {path} is not valid JSON: {problem}") from None
    if isinstance(values, dict) and "config" in values:
        values = values["config"]
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold an object of settings")
    return values


def differences(old: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> list[str]:
    """List the settings that differ between two configs as JSON, but for those that cannot change the parameters."""
    found = []
    for name in dict.fromkeys([*old, *new]):
        if not within and name in HARMLESS:
            continue
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{within}{name}.")
        elif before != after:
            found.append(f"{within}{name} (was {json.dumps(before)}, now {json.dumps(after)})")
    return found
