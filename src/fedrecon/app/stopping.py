"""When training ends: after the rounds of the settings, or when validation clients say so."""

from __future__ import annotations

from fedrecon.app.config import Config
from fedrecon.app.settings import relaxed_rounds
from fedrecon.app.tasks.task import Users

JUDGES = 10  # validation clients; the loss of fewer is mostly chance


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
        f"{train:,} users train, {valid:,} are for choosing settings, {test:,} are measured on in the end; "
        f"{config.sampling.wanted(train):,} take part in each of {config.rounds} rounds."
    )
    if patience_of(config, users) is None:
        few = f" {valid} validation users are too few to judge by, so the model of the last round is kept."
        return said + (few if config.patience is not None else "")
    if more := rounds_of(config, users) - config.rounds:
        said += f" Up to {more} more follow, with ever less of a prior, as long as validation users gain."
    return said + " What is kept is what suits them best, be it the model before the first round."
