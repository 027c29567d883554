"""When training ends: after the rounds of the settings, or when validation clients say so."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from fedrecon.app.config import Config
from fedrecon.app.settings import relaxed_rounds
from fedrecon.app.tasks.task import Users
from fedrecon.evaluation import Evaluation, Evaluator, summarize

JUDGES = 10  # validation clients; the loss of fewer is mostly chance
VERDICTS = 600  # pairs of support and query that a loss should be of, though a client gives several of them
MOST_DIVISIONS = 8  # of one client: more of them are too much alike to tell anything new


@dataclasses.dataclass(frozen=True, eq=False)
class Divided:
    """Evaluates clients by several divisions into support and query, for a loss that depends less on chance.

    Attributes:
      evaluators: of the same clients in the same order, with examples in another order each.
    """

    evaluators: tuple[Evaluator, ...]

    def __call__(self, params: Any, kept: Any = ()) -> Evaluation:
        """Evaluate global parameters; a client's metrics are over the query examples of all divisions.

        Args:
          params: global parameters.
          kept: what clients kept from training; nothing, as clients that are divided keep nothing.
        """
        first = self.evaluators[0]
        total = np.sum([one.sums(params, kept) for one in self.evaluators], axis=0)
        return summarize(first.algorithm.model, first.protocol, total)


def divided(evaluator: Evaluator | None, config: Config, users: Users) -> Evaluator | Divided | None:
    """Return how validation clients judge: by one division into support and query if there are many, else by several.

    Args:
      evaluator: of the validation clients by one division; None if there are none.
      config: the settings.
      users: divided into those who train, judge and are measured.
    """
    if evaluator is None or (times := divisions_of(config, users)) == 1:
        return evaluator
    others = [evaluator.on(users.valid.shuffle(number)) for number in range(1, times)]
    return Divided((evaluator, *others))


def divisions_of(config: Config, users: Users) -> int:
    """Return by how many divisions each validation client judges: one if nobody judges, or if an order is asked for."""
    if patience_of(config, users) is None or config.split.by_time:
        return 1
    return min(MOST_DIVISIONS, math.ceil(VERDICTS / len(users.valid)))


def patience_of(config: Config, users: Users) -> int | None:
    """Return how long training waits for a better evaluation: as settings say, if there are enough to judge it by."""
    return config.patience if len(users.valid) >= JUDGES else None


def rounds_of(config: Config, users: Users) -> int:
    """Return how many rounds there are at most: more than settings say only if there are enough to judge them by."""
    return config.rounds if patience_of(config, users) is None else config.most_rounds


def judgements_of(config: Config) -> range:
    """Return after which rounds evaluations decide: the last of the settings, and the last of each relaxation."""
    return range(config.rounds, config.most_rounds + 1, max(1, relaxed_rounds(config.rounds, 1)))


def say_rounds(config: Config, users: Users) -> str:
    """Say who does what, and when training ends."""
    train, valid, test = map(len, users)
    said = (
        f"{train:,} users train, {valid:,} are for choosing settings, {test:,} are for testing; "
        f"{config.sampling.wanted(train):,} take part in each of {config.rounds} rounds."
    )
    if patience_of(config, users) is None:
        few = f" {valid} validation users are too few to choose a model, so the model of the last round is kept."
        return said + (few if config.patience is not None else "")
    if more := rounds_of(config, users) - config.rounds:
        said += f" Up to {more} more follow with a weaker and weaker prior, as long as validation results improve."
    return said + " The best model for validation users is kept, even if it is the one before the first round."
