"""A node's own data: read as the plan wants it, divided as everybody divides, and never sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrecon.app.config import Reading
from fedrecon.app.tasks import Users
from fedrecon.app.tasks.ratings import read_ratings
from fedrecon.clients import Clients
from fedrecon.deploy import noise
from fedrecon.deploy.algorithm_plan import AlgorithmPlan
from fedrecon.deploy.plan import Plan
from fedrecon.deploy.settings_plan import SettingsPlan
from fedrecon.display.progress import Progress, silent
from fedrecon.keys import as_number, mixed, round_key, words_of

TAKES_PART = 0xD6E8FEB86659FD93  # salt, so that who takes part has nothing to do with how splits are redrawn


class Holding(NamedTuple):
    """The users of a node, and counts of what was left out of its file."""

    users: Users
    skipped: Mapping[str, int]


def read_holding(
    plan: SettingsPlan, path: str | Path, reading: Reading | None = None, least: int = 1, progress: Progress = silent
) -> Holding:
    """Read a node's file for a plan.

    Who trains, validates and tests follows from names, so that nodes decide it as the union of their files would.

    Args:
      plan: what to read it for.
      path: ratings, or text.
      reading: how the file is laid out.
      least: users with fewer examples do not take part; the plan's own least number counts if it is larger.
      progress: a progress display.

    Raises:
      DataError: the file cannot be read, or nothing in it can take part.
    """
    least, data = max(least, plan.least_examples), plan.config.data
    reading = reading or Reading()
    if plan.config.task == "ratings":
        everyone: Clients = read_ratings(path, reading, item_ids=plan.legend.ids, min_ratings=least)
        skipped: Mapping[str, int] = everyone.skipped  # type: ignore[attr-defined]
        if data.shuffle_seed is not None:  # type: ignore[attr-defined]
            everyone = everyone.shuffle(data.shuffle_seed)  # type: ignore[attr-defined]
        everyone = everyone.cap(data.max_examples)  # type: ignore[attr-defined]
    else:
        read = plan.task.read(plan.config, plan.legend, Path(path), reading, progress)
        there = read.clients.cap(data.max_sentences)  # type: ignore[attr-defined]
        everyone = there.at_least(least)
        skipped = {**read.skipped, "users_below_minimum": len(there) - len(everyone)}
    return Holding(Users(*everyone.split_clients(*data.fractions, seed=data.split_seed)), skipped)


def hold(plan: AlgorithmPlan, clients: Clients) -> Holding:
    """Return clients that a program has, as a plan wants them.

    Args:
      plan: of an algorithm that was made in Python.
      clients: those of this node.

    Raises:
      PlanError: they have other columns than the plan says.
    """
    users = plan.divided(clients)
    return Holding(users, {"clients_below_minimum": len(clients) - sum(map(len, users))})


def taking_part(plan: Plan, users: Clients, number: int) -> Clients:
    """Return the users that train in a round: each by itself with the plan's share, by its name and the round.

    Of plans with noise nobody else may know who they are: these are drawn from the system's entropy.
    """
    if plan.release is not None:
        return noise.taking_part(users, plan.share)
    if plan.share == 1 or not len(users):
        return users
    salt = as_number(words_of(round_key(plan.seed, number))) ^ np.uint64(TAKES_PART)
    with np.errstate(over="ignore"):
        drawn = mixed(as_number(users.identities()), salt)
    return users.take(drawn.astype(np.float64) < plan.share * 2.0**64)


def reading_of(options: Any) -> Reading:
    """Return how a file is read from options that have more than that."""
    return Reading(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Reading)})
