"""An aggregator: what is done to an upload before it is added to others, and to the sum before the server takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.keys import fold_keys
from fedrecon._src.core.upload import Parts, Summand, Total
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.privacy.noise import ShareOfNoise

Report = dict[str, Array]  # what is known about a round beside the mean: counts, the weight, whether it was skipped


class RingSum(NamedTuple):
    """How a sum of integers is made in deployment.

    Attributes:
      protocol: `four-messages`, or `two-servers` with one message per client.
      bits: of the ring: sums are modulo 2**bits.
    """

    protocol: str
    bits: int


class Aggregator(NamedTuple):
    """From uploads to what the server takes. Between `encode` and `decode` there is nothing but a sum.

    Attributes:
      init: `parts -> state`, what the server keeps for it; `parts` has the shapes of what is added up, without clients.
      message: `state -> message`, what it tells clients.
      encode: `(message, summand, keys) -> summand`, on the client, for several clients at once; `keys` are the
        clients' own, for what must be random.
      decode: `(state, total, key) -> (total, state, report)`, on the server.
      release: `parts -> Release`, what one round gives away, for a ledger of privacy, as if every client took part in
        it; None for an aggregator that promises nothing.
      share: `parts -> ShareOfNoise`, noise in integers that a host of clients adds to what it sends, from entropy of
        its own; None for an aggregator whose hosts add nothing.
      ring: which secure sum it is made for; None for sums of real numbers.

    Example:
      >>> import fedrecon as fr
      >>> aggregator = fr.aggregators.mean("uniform", clip_norm=1.0)
      >>> aggregator.release is None  # it promises no privacy
      True
    """

    init: Callable[[Parts], Any]
    message: Callable[[Any], Any]
    encode: Callable[[Any, Summand, Array], Summand]
    decode: Callable[[Any, Total, Array], tuple[Total, Any, Report]]
    release: Callable[[Parts], Release] | None = None
    share: Callable[[Parts], ShareOfNoise] | None = None
    ring: RingSum | None = None


def stateless(
    encode: Callable[[Summand], Summand] = lambda summand: summand,
    decode: Callable[[Total], tuple[Total, Report]] = lambda total: (total, {}),
) -> Aggregator:
    """Return an aggregator without state, message or randomness.

    Args:
      encode: what a client does to its summand.
      decode: what the server does to the total; also returns what to report.

    Example:
      >>> import fedrecon as fr
      >>> halved = fr.aggregators.stateless(lambda summand: summand._replace(scale=summand.scale / 2))
      >>> aggregate = fr.aggregators.chain(halved, fr.aggregators.by_weight())
    """

    def encode_one(message: Any, summand: Summand, keys: Array) -> Summand:
        return encode(summand)

    def decode_one(state: Any, total: Total, key: Array) -> tuple[Total, Any, Report]:
        total, report = decode(total)
        return total, state, report

    return Aggregator(lambda parts: (), lambda state: (), encode_one, decode_one)


@register_factory
def chain(*stages: Aggregator) -> Aggregator:
    """Chain aggregators: the client encodes in this order, the server decodes in the reverse order.

    Args:
      *stages: what is done to an upload, in order. `chain(clip(1.0), weigh())` clips, then weighs; the server
        divides by the weight.

    Example:
      >>> from fedrecon import aggregators
      >>> aggregate = aggregators.chain(aggregators.finite(), aggregators.clip(1.0), aggregators.by_weight("uniform"))
    """

    def init(parts: Parts) -> Any:
        return tuple(stage.init(parts) for stage in stages)

    def message(state: Any) -> Any:
        return tuple(stage.message(stage_state) for stage, stage_state in zip(stages, state, strict=True))

    def encode(message: Any, summand: Summand, keys: Array) -> Summand:
        for number, (stage, stage_message) in enumerate(zip(stages, message, strict=True)):
            summand = stage.encode(stage_message, summand, fold_keys(keys, number))
        return summand

    def decode(state: Any, total: Total, key: Array) -> tuple[Total, Any, Report]:
        states, report = list(state), Report()
        for number in reversed(range(len(stages))):
            stage_key = jax.random.fold_in(key, number)
            total, states[number], stage_report = stages[number].decode(state[number], total, stage_key)
            report |= stage_report
        return total, tuple(states), report

    promises = [stage for stage in stages if stage.release is not None]
    if len(promises) > 1:
        raise ValueError(f"only one stage may add noise for differential privacy (got {len(promises)})")
    release, share = (promises[0].release, promises[0].share) if promises else (None, None)
    ring = next((stage.ring for stage in stages if stage.ring is not None), None)
    return Aggregator(init, message, encode, decode, release, share, ring)
