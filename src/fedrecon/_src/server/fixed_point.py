"""Sums as a secure sum makes them: uploads become integers at the client and are added up in a ring.

Everything that is added is in the ring, also the weight, counts and metrics, so that one masked vector holds all
that leaves a client (`to_vectors`, for `fedrecon._src.privacy.secure_sum`). Integers add up exactly in any order: the
simulation has the result of the protocol to the bit. Rounding costs at most half a step per client and entry.

With `noise` clients add noise themselves, and the server never sees a sum without it. Then all weigh the
same, the sum is divided by the expected number of clients, counts and metrics are not sent, and uploads are whole, with
noise on rows that nobody touched. Here that noise is a rounded Gaussian of the variance that the client's share of
Skellam noise has, since this is a simulation and protects nobody; a deployment encodes with `simulated=False` and adds
`fedrecon._src.privacy.noise.draw`, which is exact and from the system's entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.checks import check_choice, check_numbers
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.keys import fold_keys
from fedrecon._src.core.upload import (
    Parts,
    Summand,
    Total,
    broadcast_clients,
    map_values,
    no_total,
    whole_changes,
)
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.privacy.noise import ShareOfNoise, draw, share_of_noise
from fedrecon._src.privacy.ring import IntegerGrid, grid, quantise, restore
from fedrecon._src.server.aggregator import Aggregator, Report, RingSum, chain, stateless
from fedrecon._src.server.averaging import (
    Scales,
    Weigh,
    WeightFunction,
    all_finite,
    by_weight,
    clip,
    finite,
    rescale,
    weigh_and_clip,
    weigher,
)
from fedrecon._src.server.gaussian import MARGIN

Protocol = Literal["four-messages", "two-servers"]
RESOLUTION = 2**12  # integers that the noise in the sum is wide: a float32 can be rounded to each of them


class ClientNoise(NamedTuple):
    """Noise that clients add to their own summands, so that the server never sees a sum without it.

    Attributes:
      multiplier: noise in the sum that clients add together, in units of the clipping norm.
      per_round: how many take part on average; the sum is divided by this.
      least: this many trusted clients together add all of it. Fewer add less than was promised, so a round with fewer
        must not be unmasked.
      scales: what changes of the parameters are multiplied by meanwhile, as for `rescale`.
      simulated: add it here. False where hosts of clients add it, as many as `least` or more (`Aggregator.share`),
        which nodes of a deployment do.

    Example:
      >>> import fedrecon as fr
      >>> noise = fr.aggregators.ClientNoise(1.0, per_round=100, least=80)
      >>> aggregate = fr.aggregators.secure(clip_norm=1.0, clients=120, noise=noise)
    """

    multiplier: float
    per_round: float
    least: int
    scales: Scales | None = None
    simulated: bool = True


@register_factory
def secure(
    clip_norm: float,
    *,
    clients: int,
    weigh: Weigh | None = None,
    max_weight: float = 1000.0,
    max_metric: float = 1e5,
    noise: ClientNoise | None = None,
    protocol: Protocol = "four-messages",
    bits: int = 32,
) -> Aggregator:
    """Average uploads through a sum of integers, as a secure sum does.

    Args:
      clip_norm: the largest norm of an upload; it bounds every entry, so that sums cannot overflow.
      clients: the most clients that are added up; sums of this many cannot overflow.
      weigh: as for `mean`, by examples by default; with noise as for `private`, where all weigh the same by default.
      max_weight: the largest weight of a client; larger ones are cut to this.
      max_metric: the largest sum of a metric over a client's examples; larger ones are cut to this.
      noise: what clients add together; None for none.
      protocol: how a deployment makes the sum: `four-messages` between clients and one server, or `two-servers` that do
        not work together, with one message per client. The result is the same.
      bits: of the ring, 20, 24 or 32. With two servers, fewer bits make reports smaller and rounding coarser: of
        values, of the weight and of metrics, each relative to its largest possible sum.

    Returns:
      An `Aggregator`.

    Example:
      >>> import fedrecon as fr
      >>> aggregate = fr.aggregators.secure(clip_norm=1.0, clients=100)
    """
    if clients < 2:
        raise ValueError(f"`clients` must be at least 2: a sum over one client hides nothing (got {clients})")
    check_choice("protocol", protocol, get_args(Protocol))
    check_choice("bits", bits, (20, 24, 32) if protocol == "two-servers" else (32,))
    ring = RingSum(protocol, bits)
    if noise is not None:
        noise = ClientNoise(*noise)  # a saved algorithm has it as a plain tuple
        settings = {"clients": clients, "least": noise.least, "bits": bits, "resolution": RESOLUTION}
        noise_multiplier = noise.multiplier

        def share(length: int) -> ShareOfNoise:
            return share_of_noise(clip_norm, length, noise_multiplier, **settings)

        share(1)  # bad settings are reported here, not in the first round
        stages = [] if noise.scales is None else [rescale(noise.scales)]
        weights_of, limit = weigher(weigh or "uniform"), clip_norm * (1 - MARGIN)
        clipped = stateless(lambda summand: weigh_and_clip(summand, weights_of, jnp.float32(limit))[0])
        noised = _noised_integers(share, noise.per_round, noise.simulated)._replace(ring=ring)
        return chain(finite(), *stages, clipped, noised)
    check_numbers({"max_weight": max_weight, "max_metric": max_metric}, above=True)
    weighed = _at_most(weigher(weigh or "examples"), max_weight)
    values, counts = grid(clip_norm * max_weight, clients, bits=bits), IntegerGrid(1.0, clients, 1.0, bits)
    scalar_grids = {"weight": grid(max_weight, clients, bits=bits), "sums": grid(max_metric, clients, bits=bits)}
    integers = _integers(values, scalar_grids, counts)._replace(ring=ring)
    return chain(finite(), clip(clip_norm), by_weight(weighed), integers)


def _at_most(weights_of: WeightFunction, most: float) -> WeightFunction:
    def bounded(examples: Array, sums: Array) -> Array:
        weights = weights_of(examples, sums)
        return jnp.where(jnp.isfinite(weights), jnp.minimum(weights, most), weights)

    return bounded


def _integers(values: IntegerGrid, scalar_grids: Mapping[str, IntegerGrid], counts: IntegerGrid) -> Aggregator:
    """Make integers of what is added, and numbers of the sum; counts are integers already."""

    def convert(function: Callable[..., Array], numbers: Mapping[str, Array]) -> dict[str, Array]:
        return {name: function(scalar_grids.get(name, counts), value, jnp) for name, value in numbers.items()}

    def encode(summand: Summand) -> Summand:
        small, flags = convert(quantise, summand.scalars), convert(quantise, summand.flags)
        return summand._replace(parts=_quantised(values, summand, summand.parts), scalars=small, flags=flags)

    def decode(total: Total) -> tuple[Total, Report]:
        scalars = convert(restore, total.scalars)
        return Total(map_values(lambda array: restore(values, array, jnp), total.parts), scalars), dict(scalars)

    return stateless(encode, decode)


def _noised_integers(share_for: Callable[[int], ShareOfNoise], per_round: float, simulated: bool) -> Aggregator:
    """Make integers of what is added, with noise; `share_for` says how much, for a sum of so many numbers."""

    def share_of(parts: Parts) -> ShareOfNoise:
        return share_for(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parts)))

    def encode(message: Any, summand: Summand, keys: Array) -> Summand:
        share = share_of(jax.eval_shape(no_total, summand).parts)
        leaves, structure = jax.tree.flatten(_quantised(share.grid, summand, whole_changes(summand.parts)))
        if simulated:
            leaves = [_noised(leaf, share, keys, number) for number, leaf in enumerate(leaves)]
        return summand._replace(parts=jax.tree.unflatten(structure, leaves), scalars={}, flags={})

    def decode(state: Any, total: Total, key: Array) -> tuple[Total, Any, Report]:
        share = share_of(total.parts)
        parts = jax.tree.map(lambda array: restore(share.grid, array, jnp) / per_round, total.parts)
        return Total(parts, {}), state, {"skipped": ~all_finite(parts)}

    def release(parts: Parts) -> Release:
        return share_of(parts).release(1.0)

    return Aggregator(lambda parts: (), lambda state: (), encode, decode, release, None if simulated else share_of)


def _noised(values: Array, share: ShareOfNoise, keys: Array, number: int) -> Array:
    noise = jax.vmap(lambda key: jax.random.normal(key, values.shape[1:]))(fold_keys(keys, number))
    return values + jnp.rint(noise * math.sqrt(share.variance)).astype(jnp.int32).astype(jnp.uint32)


def _quantised(grid: IntegerGrid, summand: Summand, parts: Parts) -> Parts:
    """Scale the numbers of clients that take part, and round them to integers; others add nothing anyway."""

    def quantise_included(array: Array) -> Array:
        included = jnp.where(broadcast_clients(summand.scale > 0, array), array, 0)
        return quantise(grid, included * broadcast_clients(summand.scale, array), jnp)

    return map_values(quantise_included, parts)


def add_noise(share: ShareOfNoise, total: Total, rng: np.random.Generator, hosts: int = 1) -> Total:
    """Add to a sum of integers what hosts of clients add (`Aggregator.share`).

    Args:
      share: of one host.
      total: the integers.
      rng: `system_generator()` in deployment; a simulation may seed one, and must say so.
      hosts: how many hosts; their noise is drawn at once.
    """
    noise = _unravel(draw(share, rng, hosts), total.parts)
    parts = jax.tree.map(lambda values, more: np.asarray(values, more.dtype) + more, total.parts, noise)
    return Total(parts, total.scalars)


def _unravel(vector: np.ndarray, template: Any) -> Any:
    """Divide a vector among the leaves of a pytree, in the order of JAX: dicts by sorted keys."""
    leaves, structure = jax.tree.flatten(template)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
    parts = zip(np.split(vector, ends[:-1]), leaves, strict=True)
    return jax.tree.unflatten(structure, [part.reshape(leaf.shape) for part, leaf in parts])


# ---- vectors for the protocol ----


def to_vectors(summand: Summand) -> np.ndarray:
    """Lay out what clients add as vectors of integers, for a secure sum.

    Args:
      summand: of several clients, as `secure` encoded it.

    Returns:
      `(clients, length)` integers: everything that is added, whole, in one order. A client that is left out has zeros,
      its flags apart.

    Example:
      >>> import jax.numpy as jnp
      >>> import fedrecon as fr
      >>> delta, weight = jnp.array([[1, 2], [3, 4]], jnp.uint32), jnp.array([5, 6], jnp.uint32)
      >>> summand = fr.aggregators.Summand(
      ...     {"delta": {"w": delta}}, jnp.ones(2), jnp.ones(2), jnp.zeros((2, 1, 2)), {"weight": weight}, {}
      ... )
      >>> fr.privacy.to_vectors(summand).tolist()
      [[1, 2, 5], [3, 4, 6]]
    """
    present = np.asarray(summand.scale) > 0
    parts, small = (
        [np.asarray(leaf).reshape(len(present), -1) for leaf in jax.tree.leaves(tree)]
        for tree in (whole_changes(summand.parts), {**summand.scalars, **summand.flags})
    )
    return np.concatenate([*(np.where(present[:, None], part, 0) for part in parts), *small], 1).astype(np.uint32)


def from_vector(vector: np.ndarray, template: Any) -> Total:
    """Return the total that a sum of vectors stands for.

    Args:
      vector: the sum of what `to_vectors` returned.
      template: a total, or the shapes of one (`fedrecon._src.algorithms.rounds.total_shapes`).

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> zeros = {"w": np.zeros(2, np.uint32)}
      >>> template = fr.aggregators.Total({"delta": zeros}, {"weight": np.uint32(0)})
      >>> total = fr.privacy.from_vector(np.array([4, 6, 11]), template)
      >>> total.parts["delta"]["w"].tolist(), int(total.scalars["weight"])
      ([4, 6], 11)
    """
    length = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(template))
    if vector.shape != (length,):
        raise ValueError(f"`vector` must have shape ({length},) (got {vector.shape})")
    return jax.tree.map(lambda part, leaf: jnp.asarray(part, leaf.dtype), _unravel(vector, template), template)
