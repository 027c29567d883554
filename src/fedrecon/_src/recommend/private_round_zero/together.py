"""Round zero over all clients at once: questions, answers, sums with noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.privacy.noise import draw, share_of_noise
from fedrecon._src.privacy.ring import quantise, restore
from fedrecon._src.recommend.private_round_zero.answers import answer
from fedrecon._src.recommend.private_round_zero.estimation import advance
from fedrecon._src.recommend.private_round_zero.message import PURPOSE, Entries, done, noise_of, start
from fedrecon._src.recommend.round_zero import Plan, Preparation, Transform

Add = Callable[[Entries, int, float], tuple[np.ndarray, Release]]


def gaussian(rng: np.random.Generator) -> Add:
    """Return how a server that sees the sums noises them: `(answers, clients, noise multiplier) -> sum, release`.

    Args:
      rng: of the noise.
    """

    def add(entries: Entries, clients: int, noise: float) -> tuple[np.ndarray, Release]:
        del clients
        return entries.total() + rng.normal(0.0, noise, entries.length), Release(noise, 1.0, 1)

    return add


def integers(rng: np.random.Generator) -> Add:
    """Return how sums of integers are made with the clients' own noise, as in a secure sum.

    Args:
      rng: of all clients' noise; a deployment draws each client's from the system's entropy.
    """

    def add(entries: Entries, clients: int, noise: float) -> tuple[np.ndarray, Release]:
        share = share_of_noise(1.0, entries.length, noise, clients=clients, least=clients, bits=64)
        total = np.zeros(entries.length, np.uint64)
        np.add.at(total, entries.place, quantise(share.grid, entries.value))
        total += draw(share, rng, clients)
        return restore(share.grid, total), share.release(1.0)

    return add


class Found(NamedTuple):
    """What round zero found, and what it gave away.

    Attributes:
      preparation: as in `fedrecon._src.recommend.round_zero`; item counts are weighted and noised.
      counts: the same counts, 0 for items that noise hides.
      releases: one for each question.
    """

    preparation: Preparation
    counts: np.ndarray
    releases: tuple[Release, ...]


def prepare(
    clients: Clients,
    num_items: int,
    *,
    noise_multiplier: float,
    add: Add,
    noise_scale: float = 1.0,
    scale: tuple[float, float] | None = None,
    transform: Transform | None = None,
    plan: Plan | None = None,
) -> Found:
    """Run round zero over all clients at once.

    Args:
      clients: with columns `item` and `rating`.
      num_items: item ids are 0 to `num_items - 1`.
      noise_multiplier: of one release that costs as much as all of round zero.
      add: how answers are added up and noised: `gaussian(...)` or `integers(...)`.
      noise_scale: multiply the noise by this; below 1 to see what a larger population would have, which protects none
        of these clients.
      scale: the lowest and the highest rating, where that is known from elsewhere.
      transform: of the ratings, where it should not be decided from their skewness.
      plan: how often clients are asked for biases and traits.
    """
    rows = rows_of(clients.starts, clients.ends)
    item, rating = clients.columns["item"][rows], clients.columns["rating"][rows]
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    message, releases = start(num_items, clients=len(clients), scale=scale, transform=transform, plan=plan), []
    while not done(message):
        noise = noise_of(message, noise_multiplier)
        total, release = add(answer(message, item, rating, owner), len(clients), noise * noise_scale)
        releases.append(release._replace(noise_multiplier=noise, purpose=PURPOSE))
        message = advance(message, total, noise * noise_scale)
    count = message.found.item_count
    return Found(message.found, np.where(count > message.deviation, count, 0.0), tuple(releases))
