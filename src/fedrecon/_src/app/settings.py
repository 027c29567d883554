"""The settings that every run has, whatever it trains: groups of options, typed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

Optimizer = Literal["sgd", "momentum", "adagrad", "adam"]
ServerOptimizer = Literal["sgd", "momentum", "adagrad", "fedadagrad", "adam", "fedyogi"]


MOST_FLOAT = 3.4e38  # beyond it, numbers are infinite on the devices, which compute in 32 bits
MOST_ROUNDS = 2**31 - 1  # the number of a round is 32 bits wide on the devices
MOST_SEEDS = 2**32  # JAX would take only the last 32 bits of a larger seed
MOST = 10**7  # of anything that there is an array of
MEDIAN = 0.5
MOST_RELAXATIONS = 100  # of a prior: far more than can matter
MOST_WIDTH = 2**16  # of a layer or an embedding


def check_number(
    name: str, value: Any, *, least: float = 0, most: float = MOST_FLOAT, above: bool = False, fails: str = ""
) -> None:
    """Check a number of the settings; None is always allowed here; the setting's type decides about it.

    Args:
      name: the setting's name, for the message.
      value: what was given.
      least: the smallest number that makes sense.
      most: the largest.
      above: whether `least` itself is too small.
      fails: what to do instead, for the message.

    Raises:
      ValueError: it is not finite, too small or too large.
    """
    if value is None:
        return
    finite = isinstance(value, int) or math.isfinite(value)  # `isfinite` fails for an int of 400 digits
    if finite and value <= most and (value > least if above else value >= least):
        return
    bounds = f"above {least}" if above else f"at least {least}"
    bounds += f" and at most {most}" if most < MOST_FLOAT or (finite and value > most) else ""
    raise ValueError(f"{name} is {str(value)[:30]}; it must be {bounds}{fails and ', ' + fails}")


def check_steps(group: str, settings: Any) -> None:
    """Check the settings of gradient descent."""
    check_number(f"{group}.learning_rate", settings.learning_rate)
    check_number(f"{group}.steps", settings.steps, most=MOST_ROUNDS)
    check_number(f"{group}.epochs", settings.epochs, least=1, most=MOST)
    check_number(f"{group}.batch_size", settings.batch_size, least=1, most=MOST)


def check_run(config: Any) -> None:
    """Check the settings that a run has outside its groups, and those of sampling."""
    check_number("rounds", config.rounds, most=MOST_ROUNDS)
    check_number("evaluate_every", config.evaluate_every, most=MOST_ROUNDS)
    check_number("patience", config.patience, least=1, most=MOST_ROUNDS, fails="or none at all")
    check_number("checkpoint_every", config.checkpoint_every, least=1, most=MOST_ROUNDS)
    check_seed("seed", config.seed)
    check_number("block", config.block, least=1, most=MOST)
    check_number("sampling.clients_per_round", config.sampling.clients_per_round, least=1, most=MOST)
    check_number("sampling.least", config.sampling.least, least=1, most=MOST)
    check_number("sampling.oversample", config.sampling.oversample, least=1, most=1000)
    check_number("sampling.min_examples", config.sampling.min_examples, most=MOST_ROUNDS)


def relaxed_rounds(rounds: int, times: int) -> int:
    """Return how many rounds `times` relaxations of a prior take, after `rounds` rounds."""
    return times * -(-rounds // 4)


def check_seed(name: str, value: int | None) -> None:
    """Check a seed: every seed that passes gives different random numbers."""
    check_number(name, value, most=MOST_SEEDS - 1)


def check_split(name: str, value: str) -> None:
    """Check the name of a split, or the share of support that stands for one."""
    share = re.fullmatch(r"(?:redrawn-)?(half|alternate|none|[0-9.]+)", value)
    if share is None or (share[1][0] in "0123456789." and not 0 < float(share[1]) < 1):
        raise ValueError(f"{name} is {value!r}; it must be half, alternate, none or a share such as 0.8")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which of a client's examples are support (to reconstruct from) and which are query (to learn from or measure on).

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
        check_split("split.train", self.train)
        check_split("split.evaluate", self.evaluate)
        if self.train.startswith("redrawn-") and self.by_time:
            other = self.train.removeprefix("redrawn-")
            raise ValueError(
                f"split.train is {self.train!r}, which shuffles; it cannot be used with split.by_time: add split.train "
                f"{other}"
            )
        if self.evaluate == "none":
            raise ValueError("split.evaluate is 'none'; an error on the support examples says little: use 'half'")


@dataclass(frozen=True, kw_only=True)
class Reconstruct:
    """R: how a client reconstructs its local parameters on its support, with the global ones frozen.

    Attributes:
      solver: gradient descent in steps, or least squares at once (exact for ratings, not for text).
      optimizer: the optimizer of gradient descent, fresh for every client.
      learning_rate: its learning rate.
      steps: at most this many steps; None for no limit.
      epochs: how often a client goes through its support.
      batch_size: examples per step.
      ridge: with least squares: the penalty on the squared distance from where the parameters start; after
        --model.round-zero, a multiple of the penalties that it found.
    """

    solver: Literal["gradient-descent", "least-squares"] = "gradient-descent"
    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.1
    steps: int | None = 50
    epochs: int = 5
    batch_size: int = 5
    ridge: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_steps("reconstruct", self)
        check_number("reconstruct.ridge", self.ridge)


@dataclass(frozen=True, kw_only=True)
class Update:
    """U: how a client updates the global parameters on its query.

    Attributes:
      optimizer: the optimizer, fresh for every client.
      learning_rate: its learning rate.
      steps: at most this many steps; None for no limit.
      epochs: how often a client goes through its query.
      batch_size: examples per step.
      clip_norm: shorten the gradient of a step to this norm if it is longer; None leaves it as it is.
      joint: change the local parameters too (they are still discarded).
      second_order: differentiate through the reconstruction; slow, so use few steps.
      both_ways: run every client twice, the second time with support and query exchanged, at twice the cost.
    """

    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.5
    steps: int | None = 50
    epochs: int = 1
    batch_size: int = 5
    clip_norm: float | None = None
    joint: bool = False
    second_order: bool = False
    both_ways: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        check_steps("update", self)
        check_number("update.clip_norm", self.clip_norm, above=True, fails="or none at all")


@dataclass(frozen=True, kw_only=True)
class Server:
    """What the server does with the mean of the clients' updates.

    Attributes:
      optimizer: takes the negative mean update as a gradient; sgd at 1.0 is plain averaging; fedadagrad is Adagrad
        with accumulators from 0 instead of 0.1.
      learning_rate: its learning rate.
      decay: how the learning rate falls: along a cosine to a fiftieth, or linearly to zero.
      decay_rounds: over how many rounds; all for all rounds of the run; None keeps the rate constant.
    """

    optimizer: ServerOptimizer = "sgd"
    learning_rate: float = 1.0
    decay: Literal["cosine", "linear"] = "cosine"
    decay_rounds: int | Literal["all"] | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("server.learning_rate", self.learning_rate)
        if self.decay_rounds != "all":
            check_number("server.decay_rounds", self.decay_rounds, least=1, most=MOST_ROUNDS, fails="or none at all")


@dataclass(frozen=True, kw_only=True)
class Aggregate:
    """How the clients' updates become one mean.

    Attributes:
      weigh: weigh clients by their query examples, by the tokens of their query (text only), or all the same.
      clip_norm: scale updates with a larger norm down to this; None for no limit.
      zero_norm: ignore updates with a larger norm than this; None for no limit.
      clip_quantile: let the clipping norm follow this share of the clients' norms, such as 0.5, against clients that
        are far off; in the first round all updates get one norm. Not private. auto is 0.5 unless clip-norm, secure or
        privacy give a norm. None for no such limit.
      clip_times: the norm is this multiple of that quantile.
      secure: add up integers as a secure sum does; needs clip_norm, and gives what the protocol would give.
    """

    weigh: Literal["examples", "tokens", "uniform"] = "examples"
    clip_norm: float | None = None
    zero_norm: float | None = None
    clip_quantile: float | Literal["auto"] | None = None
    clip_times: float = 1.0
    secure: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        asked = None if self.clip_quantile == "auto" else self.clip_quantile
        if asked is not None and not 0 < asked < 1:
            raise ValueError(f"aggregate.clip_quantile is {asked}; it is a share of clients, above 0 and below 1")
        if asked is not None and (self.clip_norm is not None or self.secure):
            raise ValueError("aggregate.clip_quantile chooses the norm; leave out aggregate.clip_norm and secure")
        check_number("aggregate.clip_times", self.clip_times, above=True)
        check_number("aggregate.clip_norm", self.clip_norm, above=True, fails="or none at all")
        check_number("aggregate.zero_norm", self.zero_norm, above=True, fails="or none at all")

    @property
    def followed(self) -> float | None:
        """The share of the clients' norms that the clipping norm follows; None if it follows none."""
        if self.clip_quantile != "auto":
            return self.clip_quantile
        return MEDIAN if self.clip_norm is None and not self.secure else None


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Differential privacy for clients: clipped uploads, noise, and a budget. Needs the extra privacy.

    With epsilon, the noise for round zero and all --rounds together is computed. With noise_multiplier as well, epsilon
    is a budget, and training stops before it exceeds it. Clients are drawn by Poisson sampling, unless correlated is
    given.

    Attributes:
      epsilon: the budget; None for none.
      delta: the probability that the promise fails; a little below one in the number of training clients by default.
      noise_multiplier: noise in the sum of updates, in units of the clipping norm, instead of what epsilon needs.
      clip_norm: the largest norm of an update; with clip_quantile, that of the first round. After round zero it is
        chosen by default, else it must be given.
      clip_quantile: let the norm follow this share of the clients' norms, privately; None keeps it.
      correlated: correlate the noise of this many rounds in a row, for when clients cannot be drawn at random and in
        secret. Instead, a client must take part at most once in this many rounds. None draws clients at random (Poisson
        sampling) and relies on that.
      rating_range: the lowest and the highest rating there can be, where that is known, such as 1 5; by default they
        are found in round zero, with noise.
      round_zero: round zero's share of the budget (of 1 / noise^2); by default more with fewer clients.
    """

    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    clip_norm: float | None = None
    clip_quantile: float | None = None
    correlated: int | None = None
    rating_range: tuple[float, float] | None = None
    round_zero: float | None = None

    @property
    def on(self) -> bool:
        """Whether anything is promised."""
        return self.epsilon is not None or self.noise_multiplier is not None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("privacy.epsilon", self.epsilon, above=True, most=1e4, fails="or none at all")
        check_number("privacy.noise_multiplier", self.noise_multiplier, least=0.05, most=1e6, fails="or none at all")
        check_number("privacy.clip_norm", self.clip_norm, above=True, fails="or none at all")
        for name in ("delta", "clip_quantile", "round_zero"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"privacy.{name} is {value}; it must be above 0 and below 1")
        check_number("privacy.correlated", self.correlated, least=1, most=MOST_ROUNDS)
        if self.correlated is not None and self.clip_quantile is not None:
            raise ValueError("privacy.correlated needs one clipping norm for all rounds; leave out clip_quantile")
        ends = self.rating_range
        if ends is not None and not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
            raise ValueError(f"privacy.rating_range is {ends}; give the lowest and the highest rating, such as 1 5")
        others = (self.clip_norm, self.delta, self.clip_quantile, self.correlated, self.rating_range, self.round_zero)
        if not self.on and any(value is not None for value in others):
            raise ValueError("privacy has neither epsilon nor noise_multiplier: give one, or nothing is promised")
