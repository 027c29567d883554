"""A sum over nodes, open or secure: the only thing that the server ever asks them for."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.core.model import Model, evaluated_names, finish
from fedrecon._src.core.pytrees import flatten, nbytes, unflatten
from fedrecon._src.core.wire import SLACK
from fedrecon._src.deploy import admission
from fedrecon._src.deploy.messages import (
    MOST_HEADER,
    TRAIN,
    Envelope,
    Failure,
    pack_pair,
    purpose_of,
    question_number,
    read_tree,
)
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.transport import Channel, Replies
from fedrecon._src.privacy import ring
from fedrecon._src.simulation.evaluation import QUANTILES, Evaluation, summarize

T = TypeVar("T")
BITS = 64  # of the integers of a secure sum
WIDE_LIMIT, WIDE_UNIT = 2.0**60, 2.0**16  # the largest number of a wide sum, and the unit of its first half


PER_DECADE, LOWEST, HIGHEST = 100, -4, 5  # of the histograms: quantiles are right to 2.4 %
# A value v is in bin k where EDGES[k - 1] < v <= EDGES[k]; bin 0 has all that is 0 or less.
EDGES = np.concatenate([[0.0], 10.0 ** (np.arange(LOWEST * PER_DECADE, HIGHEST * PER_DECADE + 1) / PER_DECADE)])


def shapes_of(plan: Plan, purpose: str) -> Any:
    """Return what a node sends, as shapes or zeros: for training, an evaluation, or a question of round zero."""
    if purpose == TRAIN:
        return total_shapes(plan.algorithm)
    number = question_number(purpose)
    if number is None:
        return no_users(plan.algorithm.model)
    if plan.zero is None or not plan.unprepared:
        raise Failure("garbage", "this plan has no round zero, or it is over")
    return plan.zero.zeros(number)


class NodeSum(NamedTuple):
    """Parts whose sum is the result (one, if it was secure), the nodes in it, and how collecting went."""

    parts: list[Any]
    nodes: list[int]
    replies: Replies


def open_sum(
    plan: Plan, channel: Channel, question: Envelope, nodes: Sequence[int], enough: int, seconds: float
) -> NodeSum:
    """Collect the sums of nodes, which the server sees."""
    like, requests = shapes_of(plan, purpose_of(question)), dict.fromkeys(nodes, question)
    most = nbytes(like) + SLACK + MOST_HEADER
    replies = channel.collect(requests, enough, seconds, most, lambda body: read_tree(body, like))
    answered = sorted(replies.good)
    return NodeSum([replies.good[node] for node in answered], answered, replies)


def secure_sum_of(
    plan: Plan, channel: Channel, question: Envelope, invited: Mapping[int, int | None], seconds: float, stage: float
) -> NodeSum:
    """Collect masked sums of nodes, of which the server learns only the total; nodes may leave between two messages.

    Args:
      plan: the plan, in which sums are secure.
      channel: reaches the nodes.
      question: what is summed.
      invited: nodes, with their numbers in the plan's list if keys are signed.
      seconds: how long to wait for masked sums.
      stage: how long to wait for each small message.
    """
    from fedrecon._src.privacy import secure_sum

    nodes, purpose, replies = sorted(list(invited)[: plan.most_nodes]), purpose_of(question), Replies()
    least = max(plan.least_nodes, len(nodes) // 2 + 1)
    if len(nodes) < least:
        return NodeSum([], [], Replies(failed=dict.fromkeys(nodes, "too_few_invited")))  # so none was asked
    like, wide = shapes_of(plan, purpose), question_number(purpose) is not None
    length, cohort = length_of(like, wide), len(nodes)
    terms = secure_sum.plan(cohort, length, bits=bits_of(like), round=question.round, circle=cohort, threshold=least)
    numbers = {node: k if (number := invited[node]) is None else number for k, node in enumerate(nodes)}
    by_number = {number: node for node, number in numbers.items()}
    most = 8 * length + 2**16 + 256 * cohort  # bytes of a reply

    def send(kind: str, bodies: Mapping[int, bytes], seconds: float, **facts: Any) -> list[tuple[int, bytes]]:
        """Send each number its body, and return the bodies of the replies."""
        requests = {
            by_number[k]: question._replace(kind=kind, facts={**facts, "me": k} if facts else {}, body=body)
            for k, body in bodies.items()
        }
        answers = channel.collect(requests, len(bodies), seconds, most)
        replies.add(answers)
        return [(numbers[node], body) for node, body in sorted(answers.good.items())]

    try:
        hellos = send("advertise", dict.fromkeys(by_number, terms.to_bytes()), stage, purpose=purpose)
        state, rosters = secure_sum.introduce(terms, hellos, verify_keys=admission.verify_keys(plan))
        state, deliveries = secure_sum.deliver(state, send("share", rosters, stage))
        bodies = {number: pack_pair(delivery, question.body) for number, delivery in deliveries.items()}
        state, requests = secure_sum.collect(state, send("mask", bodies, seconds))
        total = secure_sum.total(state, send("unmask", requests, stage))
    except secure_sum.SecureSumError:
        for node in set(nodes) - set(replies.late):
            replies.failed.setdefault(node, "secure_sum")
        return NodeSum([], [], replies)
    for number in total.refused:
        replies.failed[by_number[number]] = "garbage"
    parts = [from_integers(plan, total.total, like, wide)]
    return NodeSum(parts, [by_number[number] for number in total.clients], replies)


# ---- numbers as integers ----


def ring_grids(plan: Plan, wide: bool = False) -> list[tuple[float, ring.IntegerGrid]]:
    """Return what the integers of each number stand for in the secure sums of a plan, coarse ones first, by unit.

    A wide number is two integers, whole multiples of `WIDE_UNIT` and the rest: for sums of very different size.
    """
    limits = {WIDE_UNIT: WIDE_LIMIT / WIDE_UNIT, 1.0: WIDE_UNIT} if wide else {1.0: plan.limit}
    return [(unit, ring.grid(limit, plan.most_nodes, bits=BITS)) for unit, limit in limits.items()]


def bits_of(like: Any) -> int:
    """Return how wide the integers of a secure sum are: a tree of integers of a ring stays in that ring."""
    return 8 * next(iter(flatten(like)[0].values())).dtype.itemsize if _in_ring(like) else BITS


def _in_ring(tree: Any) -> bool:
    """Say whether a tree is of integers already: what `aggregators.secure` makes, or round zero with noise."""
    return all(leaf.dtype in (np.uint32, np.uint64) for leaf in flatten(tree)[0].values())


def length_of(like: Any, wide: bool = False) -> int:
    """Return how many integers a tree of arrays becomes."""
    size = sum(math.prod(leaf.shape) for leaf in flatten(like)[0].values())
    return 2 * size if wide and not _in_ring(like) else size


def to_integers(plan: Plan, tree: Any, wide: bool = False) -> np.ndarray:
    """Write a tree of arrays as integers, leaf after leaf.

    Args:
      plan: whose secure sums these are for.
      tree: the arrays.
      wide: write every number as two integers.

    Raises:
      Failure: a number is not finite, or is beyond the limit, where it would change silently.
    """
    leaves, limit = flatten(tree)[0], WIDE_LIMIT if wide else plan.limit
    flat = [np.asarray(leaves[path]).reshape(-1) for path in sorted(leaves)]
    if _in_ring(tree):
        return np.concatenate(flat).astype(f"<u{bits_of(tree) // 8}")
    values = np.concatenate(flat, dtype=np.float64)
    if not np.isfinite(values).all() or np.abs(values).max(initial=0) > limit:
        raise Failure("beyond_limit", f"a sum of this node has a number beyond the plan's limit of {limit:g}")
    integers = []
    for unit, grid in ring_grids(plan, wide):
        multiples = values if unit == 1 else np.rint(values / unit)
        integers.append(ring.quantise(grid, multiples).astype("<u8"))
        values = values - unit * multiples
    return np.concatenate(integers)


def from_integers(plan: Plan, total: np.ndarray, like: T, wide: bool = False) -> T:
    """Read a sum of integers as a tree of arrays."""
    values = total
    if not _in_ring(like):
        grids = ring_grids(plan, wide)
        parts = zip(grids, np.split(total, len(grids)), strict=True)
        values = sum(unit * ring.restore(grid, part) for (unit, grid), part in parts)
    leaves, structure = flatten(like)
    ends = np.cumsum([int(np.prod(leaves[path].shape)) for path in sorted(leaves)])
    pieces = dict(zip(sorted(leaves), np.split(values, ends[:-1]), strict=True))
    arrays = {path: pieces[path].reshape(leaf.shape).astype(leaf.dtype) for path, leaf in leaves.items()}
    return unflatten(structure, arrays)


# ---- evaluation as sums: what nodes say about their held-out users ----


class EvaluationSums(NamedTuple):
    """Sums over the users of a node, or of many.

    Attributes:
      sums: `(metrics, 2)` totals and weights.
      macro: `(metrics,)` sums of users' own metrics.
      histogram: `(metrics, bins)` how many users have which value.
      users: `(3,)` how many there are, were measured, and diverged.
    """

    sums: np.ndarray
    macro: np.ndarray
    histogram: np.ndarray
    users: np.ndarray


def no_users(model: Model) -> EvaluationSums:
    """Return the sum over nobody."""
    metrics = len(evaluated_names(model))
    sizes = ((metrics, 2), (metrics,), (metrics, len(EDGES) + 1), (3,))
    return EvaluationSums(*(np.zeros(size) for size in sizes))


def sum_users(model: Model, sums: np.ndarray) -> EvaluationSums:
    """Add up users.

    A user has diverged by the rule of `evaluation.summarize`, with the median of these users alone.

    Args:
      model: the model that has these metrics.
      sums: `(users, metrics, 2)`.
    """
    evaluation = summarize(model, "recon", sums)
    good = ~np.isnan(evaluation.per_client["loss"])
    names = evaluated_names(model)
    values = np.stack([evaluation.per_client[name][good] for name in names])  # (metrics, users)
    histogram = np.zeros((len(names), len(EDGES) + 1))
    for k, row in enumerate(values):
        np.add.at(histogram[k], np.searchsorted(EDGES, row[~np.isnan(row)]), 1)
    users = np.array([len(sums), evaluation.clients, evaluation.diverged], float)
    return EvaluationSums(sums[good].sum(0), np.nansum(values, 1), histogram, users)


def to_evaluation(model: Model, total: EvaluationSums) -> Evaluation:
    """Return an evaluation from sums. Nothing is known about single users: their metrics are NaN."""
    present, clients, diverged = (round(float(n)) for n in total.users)
    good = max(clients - diverged, 0)
    names = evaluated_names(model)
    macro = {name: float(total.macro[k] / good) if good else float("nan") for k, name in enumerate(names)}
    quantiles = {name: {f"{q:g}": _quantile(total.histogram[k], q) for q in QUANTILES} for k, name in enumerate(names)}
    unknown = {name: np.full(present, np.nan) for name in names}
    micro = finish(model, total.sums)
    if model.client_metrics is not None:  # some clients may have no value for these
        macro |= {name: micro[name] for name in model.client_metrics.names}
    return Evaluation("recon", clients, diverged, round(float(total.sums[0, 1])), micro, macro, quantiles, unknown)


def _quantile(histogram: np.ndarray, q: float) -> float:
    """Return a quantile as numpy does, as far as the histogram tells."""
    count = float(histogram.sum())
    if count < 1:
        return float("nan")
    rank = q * (count - 1)  # from 0, between two users if not whole
    ranks = np.floor(rank), np.ceil(rank)
    # As if users were spread evenly over their bin, each in the middle of its share of it.
    values = np.interp(np.add(ranks, 0.5), np.cumsum(histogram)[: len(EDGES)], EDGES)
    return float(np.interp(rank, ranks, values))


def add_sums(parts: Sequence[T]) -> T:
    """Add up the sums of nodes, trees of arrays."""
    return functools.reduce(lambda total, part: jax.tree.map(np.add, total, part), parts)
