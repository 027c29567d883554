"""A whole secure sum in one process: what tests, benchmarks and simulations run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from fedrecon._src.privacy.secure_sum import client, server
from fedrecon._src.privacy.secure_sum.entropy import SYSTEM, Entropy
from fedrecon._src.privacy.secure_sum.terms import Terms

Step = Callable[[client.ClientState, bytes], tuple[client.ClientState, bytes]]


class Dropouts(NamedTuple):
    """Clients that drop out, by the first message that they do not send.

    Attributes:
      advertise: from the first.
      share: from the second.
      mask: from the third; their input is in no sum.
      unmask: from the last; their input is in the sum.
    """

    advertise: Collection[int] = ()
    share: Collection[int] = ()
    mask: Collection[int] = ()
    unmask: Collection[int] = ()


def rehearse(
    vectors: np.ndarray, terms: Terms, *, dropouts: Dropouts | None = None, entropy: Entropy = SYSTEM
) -> server.Sum:
    """Run all four messages for `(clients, length)` integers.

    Args:
      vectors: a row for each client.
      terms: of the sum.
      dropouts: who leaves when; nobody by default.
      entropy: where keys come from. The sum does not depend on it.
    """
    gone = dropouts or Dropouts()
    left = set(range(len(vectors))) - set(gone.advertise)
    begun = {me: client.advertise(terms, me, least=0, entropy=entropy) for me in sorted(left)}
    states = {me: state for me, (state, _) in begun.items()}
    host, rosters = server.introduce(terms, ((me, hello) for me, (_, hello) in begun.items()), entropy=entropy)

    def step(take: Step, answers: dict[int, bytes], leaving: Collection[int]) -> Iterator[tuple[int, bytes]]:
        for me in sorted(set(answers) - set(leaving)):
            states[me], message = take(states[me], answers[me])
            yield me, message

    host, deliveries = server.deliver(
        host, step(lambda state, answer: client.share(state, answer, entropy=entropy), rosters, gone.share)
    )
    host, requests = server.collect(
        host, step(lambda state, answer: client.mask(state, answer, vectors[state.me]), deliveries, gone.mask)
    )
    return server.total(host, step(client.unmask, requests, gone.unmask))
