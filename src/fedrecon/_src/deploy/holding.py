"""A node's own data: read as the plan wants it, divided by the rule that all nodes use, and never sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.core.clients import Clients
from fedrecon._src.core.keys import as_number, mix_hashes, round_key, words_of
from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.data import RatingsSchema
from fedrecon._src.deploy import noise
from fedrecon._src.deploy.algorithm_plan import AlgorithmPlan
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.settings_plan import SettingsPlan
from fedrecon._src.recommend.config import Reading
from fedrecon._src.recommend.task import Read
from fedrecon._src.recommend.tasks import Users
from fedrecon._src.recommend.tasks.clicks import read_clicks
from fedrecon._src.recommend.tasks.ratings import read_ratings

TAKES_PART = 0xD6E8FEB86659FD93  # salt, so that who takes part has nothing to do with how splits are redrawn


class Holding(NamedTuple):
    """The users of a node, and counts of what was left out of its file."""

    users: Users
    skipped: Mapping[str, int]


def read_holding(
    plan: SettingsPlan, path: str | Path, reading: Reading | None = None, least: int = 1, progress: Progress = silent
) -> Holding:
    """Read a node's file for a plan.

    Names decide who trains, validates and tests, so the result is the same as for the union of all nodes' files.

    Args:
      plan: the plan.
      path: ratings, clicks, or text.
      reading: how the file is laid out.
      least: users with fewer examples do not take part; the plan's minimum applies if it is larger.
      progress: a progress display.

    Raises:
      DataError: the file cannot be read, or nothing in it can take part.
    """
    config: Any = plan.config
    data, task = config.data, config.task
    found = _read(plan, Path(path), reading or Reading(), max(least, plan.least_examples), progress)
    everyone = found.clients
    if task != "text" and data.shuffle_seed is not None:
        everyone = everyone.shuffle(data.shuffle_seed)
    if task == "ratings":
        everyone = everyone.cap(data.max_examples)
    users = Users(*everyone.split_clients(*data.fractions, seed=data.split_seed))
    if task == "clicks":  # users that are measured keep all
        users = users._replace(train=users.train.cap(data.max_examples))
    return Holding(users, found.skipped)


def _read(plan: SettingsPlan, path: Path, reading: Reading, least: int, progress: Progress) -> Read:
    """Read the users of a file that have enough examples, in the order of the file."""
    config: Any = plan.config
    if config.task == "ratings":
        ratings = read_ratings(path, reading, min_ratings=least, schema=RatingsSchema(plan.legend.ids))
        return Read(ratings, ratings.skipped)
    if config.task == "clicks":
        clicks = read_clicks(config, plan.legend, path, reading)
        there: Clients = clicks
        skipped = clicks.skipped
    else:
        read = plan.task.read(config, plan.legend, path, reading, progress)
        there, skipped = read.clients.cap(config.data.max_sentences), read.skipped
    enough = there.at_least(least)
    return Read(enough, {**skipped, "users_below_minimum": len(there) - len(enough)})


def hold(plan: AlgorithmPlan, clients: Clients) -> Holding:
    """Return a program's clients as a plan wants them.

    Args:
      plan: a plan of an algorithm made in Python.
      clients: the node's clients.

    Raises:
      PlanError: their columns are not those of the plan.
    """
    users = plan.divided(clients)
    return Holding(users, {"clients_below_minimum": len(clients) - sum(map(len, users))})


def taking_part(plan: Plan, users: Clients, number: int) -> Clients:
    """Return the users that train in a round. Each is drawn with the plan's share, from its name and the round.

    In plans with noise nobody else may know who they are, so they are drawn from the system's entropy.
    """
    if plan.release is not None:
        return noise.taking_part(users, plan.share)
    if plan.share == 1 or not len(users):
        return users
    salt = as_number(words_of(round_key(plan.seed, number))) ^ np.uint64(TAKES_PART)
    with np.errstate(over="ignore"):
        drawn = mix_hashes(as_number(users.identities()), salt)
    return users.take(drawn.astype(np.float64) < plan.share * 2.0**64)


def reading_of(options: Any) -> Reading:
    """Pick the options that say how a file is read."""
    return Reading(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Reading)})
