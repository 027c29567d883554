"""Sample the clients of a round, and pack their cohorts."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.validation import features_of
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import ABSENT, Cohort, Drawn, Packer
from fedrecon._src.core.keys import RunKeys, as_number, threefry, words_of
from fedrecon._src.simulation.engine import Layout, put_on_devices

RESIDENT_BYTES = 2**27  # up to this many bytes, a population is packed once and stays on the devices
PACKING_NICENESS = 10


class Sample(NamedTuple):
    """The clients of one round, and counts of those that were invited but do not take part."""

    clients: np.ndarray  # (capacity,) indices, ABSENT if too few answered
    counts: dict[str, int]


def sample(key: np.ndarray, number: int, clients: Clients, sampling: Sampling) -> Sample:
    """Draw the clients of a round without replacement, in time that does not grow with the population.

    This runs while compiled rounds run and must not wait for their devices, so it draws with numpy.

    Args:
      key: the words of a JAX key (`jax.random.key_data`).
      number: of the round; the same key and number draw the same clients.
      clients: the population.
      sampling: how clients are chosen.
    """
    every = sampling.apart or 1
    eligible = len(range(number % every, len(clients), every))  # every so many clients take turns
    generator = np.random.Generator(np.random.Philox(key=np.array([as_number(key), number], np.uint64)))
    capacity = sampling.capacity(len(clients))
    if sampling.poisson:
        # Drawing the number of clients first and then that many of them is the same as a coin for each, but faster.
        invited = min(int(generator.binomial(len(clients), sampling.rate(len(clients)))), capacity)
    else:
        invited = min(eligible, int(np.ceil(capacity * sampling.oversample)))
    drawn = number % every + every * generator.choice(eligible, invited, replace=False)
    sizes = clients.ends[drawn] - clients.starts[drawn]
    answered = sampling.replies(generator, drawn, sizes)
    taken = drawn[answered][:capacity]
    chosen = np.full(capacity, ABSENT, np.int64)
    chosen[: len(taken)] = taken
    if sampling.poisson:
        return Sample(chosen, {})
    small = int((sizes < sampling.min_examples).sum())
    return Sample(chosen, {"invited": invited, "too_small": small, "dropped": invited - small - len(answered)})


class PackedRounds(NamedTuple):
    """Several rounds ready to run in one call; every leaf of packed cohorts is `(rounds, clients, ...)`."""

    first: int
    number: int
    cohorts: Cohort | Drawn  # of this process's clients, where there are several
    samples: list[Sample]
    orders: list[np.ndarray]  # all clients of each round, in the order of the layout


@functools.cache
def _packing_thread() -> ThreadPoolExecutor:
    """Return a thread with a lower priority than those of JAX's devices.

    Where every core has a device, the thread that packs takes time from one of them, and in every round the others wait
    for that one. With a lower priority it takes the time in which devices wait for each other anyway.
    """
    return ThreadPoolExecutor(1, "fedrecon-packing", _lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere a priority is of the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PACKING_NICENESS)


class Cohorts:
    """Draws and packs the cohorts of rounds. A round's cohort depends only on the keys and the round's number."""

    def __init__(
        self, algorithm: Algorithm, clients: Clients, sampling: Sampling, layout: Layout, keys: RunKeys, at_once: int
    ):
        """Prepare to draw cohorts.

        Args:
          algorithm: what is trained.
          clients: the population.
          sampling: how the clients of a round are chosen.
          layout: on which devices and in what blocks clients run.
          keys: of the run.
          at_once: how many rounds are packed together; always the same number, so that nothing is compiled twice.
        """
        self._clients, self._sampling, self._layout, self._at_once = clients, sampling, layout, at_once
        self._sampling_words, self._client_words = words_of(keys.sampling), words_of(keys.clients)
        needs = algorithm.method.needs._replace(columns=features_of(algorithm, clients))
        self._packer, self._redrawn = Packer(clients, needs), needs.split.redrawn
        everybody = self._packer.pack_everybody(RESIDENT_BYTES)
        self._population = None if everybody is None else put_on_devices(everybody, layout)

    def prepare(self, first: int, number: int) -> PackedRounds:
        """Prepare rounds; if they are fewer than `at_once`, the others have absent clients only.

        Args:
          first: the first round.
          number: how many rounds.
        """
        number = min(number, self._at_once)
        samples = [sample(self._sampling_words, first + r, self._clients, self._sampling) for r in range(number)]
        drawn = np.stack([s.clients for s in samples])
        orders = [self._layout.arrange(*pair) for pair in zip(drawn, self._packer.work(drawn), strict=True)]
        orders += [np.full_like(orders[0], ABSENT)] * (self._at_once - number)
        local = [self._layout.local(order) for order in orders]
        if self._population is not None:
            return PackedRounds(first, number, Drawn.from_indices(self._population, np.stack(local)), samples, orders)
        packed = self._packer.pack(np.concatenate(local), self._draws(first, len(local[0])))
        cohorts = jax.tree.map(lambda x: x.reshape(self._at_once, -1, *x.shape[1:]), packed)
        return PackedRounds(first, number, cohorts, samples, orders)

    def prepare_ahead(self, first: int, number: int) -> Future[PackedRounds]:
        """Begin to prepare rounds while the devices run others; do not call `prepare` before it is done.

        Args:
          first: the first round.
          number: how many rounds.
        """
        return _packing_thread().submit(self.prepare, first, number)

    def _draws(self, first: int, clients: int) -> np.ndarray | None:
        """Return from what each of a call's clients redraws its split; None if splits are not redrawn."""
        if not self._redrawn:
            return None
        rounds = np.arange(first, first + self._at_once).astype(np.int32)
        return np.repeat(as_number(np.stack(threefry(self._client_words, rounds), -1)), clients)
