"""A whole secure sum in one process: all four messages, with clients that drop out."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from fedrecon._src.privacy.secure_sum import client_steps
from fedrecon._src.privacy.secure_sum.client_steps import ClientState
from fedrecon._src.privacy.secure_sum.server_steps import Sum, collect, deliver, introduce, total
from fedrecon._src.privacy.secure_sum.terms import Terms

Step = Callable[[ClientState, bytes], tuple[ClientState, bytes]]


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


@contextlib.contextmanager
def system_entropy_from(seed: int) -> Iterator[None]:
    """Let what the system draws, such as keys and circles, follow from a seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", np.random.default_rng(seed).bytes)
        yield


def rehearse(vectors: np.ndarray, terms: Terms, *, dropouts: Dropouts | None = None) -> Sum:
    """Run all four messages for `(clients, length)` integers.

    Args:
      vectors: a row for each client.
      terms: of the sum.
      dropouts: who leaves when; nobody by default.
    """
    gone = dropouts or Dropouts()
    left = set(range(len(vectors))) - set(gone.advertise)
    begun = {me: client_steps.advertise(terms, me, least=0) for me in sorted(left)}
    states = {me: state for me, (state, _) in begun.items()}
    host, rosters = introduce(terms, ((me, hello) for me, (_, hello) in begun.items()))

    def step(take: Step, answers: dict[int, bytes], leaving: Collection[int]) -> Iterator[tuple[int, bytes]]:
        for me in sorted(set(answers) - set(leaving)):
            states[me], message = take(states[me], answers[me])
            yield me, message

    host, deliveries = deliver(host, step(client_steps.share, rosters, gone.share))
    host, requests = collect(
        host, step(lambda state, answer: client_steps.mask(state, answer, vectors[state.me]), deliveries, gone.mask)
    )
    return total(host, step(client_steps.unmask, requests, gone.unmask))
