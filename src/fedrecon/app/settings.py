"""The settings that every run has, whatever it trains: groups of options, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedrecon import split as splits

Optimizer = Literal["sgd", "momentum", "adagrad", "adam"]
ServerOptimizer = Literal["sgd", "momentum", "adagrad", "fedadagrad", "adam", "yogi"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which of a client's examples are support (to rebuild from) and which are query (to learn from or measure on).

    Attributes:
      train: in training: half, alternate, none (both are everything), or the share of support such as 0.8; with
        redrawn- before it (redrawn-half), a client's examples are put in a new random order in every round.
      evaluate: in evaluation, which always splits: half, alternate, or the share of support.
      by_time: order a client's examples by time before splitting, so that the query is later than the support.
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
      solver: gradient descent in steps, or least squares at once (exact for ratings, not for text).
      optimizer: the optimizer of gradient descent, fresh for every client.
      learning_rate: its learning rate.
      steps: at most this many steps; None for no limit.
      epochs: how often a client goes through its support.
      batch_size: examples of one step.
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
      batch_size: examples of one step.
      clip_norm: shorten the gradient of a step to this norm if it is longer; None leaves it as it is.
      joint: move the local parameters as well (they are forgotten all the same).
      second_order: differentiate through the reconstruction; slow, so use few steps.
    """

    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.5
    steps: int | None = 50
    epochs: int = 1
    batch_size: int = 5
    clip_norm: float | None = None
    joint: bool = False
    second_order: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"update.clip_norm is {self.clip_norm}; give a norm above 0, or none at all")


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
      weigh: weigh clients by their query examples, by the tokens of their query (text alone), or all the same.
      clip_norm: scale updates with a larger norm down to this; None for no limit.
      zero_norm: ignore updates with a larger norm than this; None for no limit.
    """

    weigh: Literal["examples", "tokens", "uniform"] = "examples"
    clip_norm: float | None = None
    zero_norm: float | None = None
