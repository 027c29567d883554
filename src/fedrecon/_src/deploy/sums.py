"""A sum over nodes, open or secure: the only thing that the server ever asks them for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.deploy import node_keys
from fedrecon._src.deploy.messages import TRAIN, Envelope, Failure, pack_pair, question_number, shapes_of
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.transport import Channel, Replies, open_reply, read_arrays
from fedrecon._src.privacy import ring

T = TypeVar("T")
BITS = 64  # of the integers of a secure sum
WIDE_LIMIT, WIDE_UNIT = 2.0**60, 2.0**16  # the largest number of a wide sum, and the unit of its first half


class Question(NamedTuple):
    """What is summed: of which run and round, for what purpose, with which parameters."""

    run: str
    round: int
    purpose: str  # training, the part of the users that is measured, or a question of round zero
    body: bytes

    def envelope(self, plan: Plan, kind: str, facts: Mapping[str, Any], body: bytes) -> Envelope:
        """Return a message about it."""
        return Envelope(kind, plan.digest, self.run, self.round, facts, body)


class NodeSum(NamedTuple):
    """Parts whose sum is the result (one, if it was secure), the nodes in it, and how collecting went."""

    parts: list[Any]
    nodes: list[int]
    replies: Replies


def open_sum(
    plan: Plan, channel: Channel, question: Question, nodes: Sequence[int], *, enough: int, seconds: float
) -> NodeSum:
    """Collect the sums of nodes, which the server sees."""
    kind, facts = TRAIN, dict[str, Any]()
    if question.purpose != TRAIN:
        number = question_number(question.purpose)
        kind, facts = ("evaluate", {"part": question.purpose}) if number is None else ("prepare", {"number": number})
    request, like = question.envelope(plan, kind, facts, question.body), shapes_of(plan, question.purpose)
    replies = channel.collect(
        dict.fromkeys(nodes, request), lambda request, data: read_arrays(data, request, like), enough, seconds
    )
    answered = sorted(replies.good)
    return NodeSum([replies.good[node] for node in answered], answered, replies)


class SecureSum:
    """Masked sums in four messages; nodes may leave between any two of them."""

    def __init__(
        self, plan: Plan, channel: Channel, question: Question, numbers: Mapping[int, int], max_reply_bytes: int
    ):
        """Begin, with the numbers that nodes have in the protocol."""
        self.plan, self.channel, self.question = plan, channel, question
        self.numbers, self.nodes = numbers, {number: node for node, number in numbers.items()}
        self.max_reply_bytes = max_reply_bytes
        self.replies = Replies()

    def stage(self, kind: str, bodies: Mapping[int, bytes], seconds: float, **facts: Any) -> list[tuple[int, bytes]]:
        """Send each number its body, and return the bodies of the replies."""
        requests = {}
        for number, body in bodies.items():
            own_facts = {**facts, "me": number} if facts else {}
            requests[self.nodes[number]] = self.question.envelope(self.plan, kind, own_facts, body)
        replies = self.channel.collect(
            requests, lambda request, data: open_reply(data, request, self.max_reply_bytes), len(requests), seconds
        )
        replies.add_cost_of(self.replies)
        self.replies = replies
        return [(self.numbers[node], body) for node, body in sorted(replies.good.items())]


def secure_sum_of(
    plan: Plan,
    channel: Channel,
    question: Question,
    nodes: Sequence[int],
    *,
    numbers: Mapping[int, int] | None,
    stage_seconds: float,
    seconds: float,
) -> NodeSum:
    """Collect masked sums of nodes, of which the server learns only the total.

    Args:
      plan: the plan, in which sums are secure.
      channel: reaches the nodes.
      question: what is summed.
      nodes: who is invited.
      numbers: the nodes' numbers in the plan's list, if keys are signed.
      stage_seconds: how long to wait for each small message.
      seconds: how long to wait for masked sums.
    """
    from fedrecon._src.privacy import secure_sum

    nodes = sorted(nodes[: plan.most_nodes])
    least = max(plan.least_nodes, len(nodes) // 2 + 1)
    if len(nodes) < least:
        return NodeSum([], [], Replies(failed=dict.fromkeys(nodes, "secure_sum")))
    like, wide = shapes_of(plan, question.purpose), question_number(question.purpose) is not None
    length, cohort = length_of(like, wide), len(nodes)
    terms = secure_sum.plan(cohort, length, bits=bits_of(like), round=question.round, circle=cohort, threshold=least)
    numbers = {node: k for k, node in enumerate(nodes)} if numbers is None else {node: numbers[node] for node in nodes}
    run = SecureSum(plan, channel, question, numbers, 8 * length + 2**16 + 256 * cohort)
    try:
        terms_for_all = dict.fromkeys(run.nodes, terms.to_bytes())
        hellos = run.stage("advertise", terms_for_all, stage_seconds, purpose=question.purpose)
        state, rosters = secure_sum.introduce(terms, hellos, verify_keys=node_keys.verify_keys(plan))
        state, deliveries = secure_sum.deliver(state, run.stage("share", rosters, stage_seconds))
        bodies = {number: pack_pair(delivery, question.body) for number, delivery in deliveries.items()}
        state, requests = secure_sum.collect(state, run.stage("mask", bodies, seconds))
        total = secure_sum.total(state, run.stage("unmask", requests, stage_seconds))
    except secure_sum.SecureSumError:
        replies = run.replies
        for node in set(nodes) - set(replies.late):
            replies.failed.setdefault(node, "secure_sum")
        replies.good = {}
        return NodeSum([], [], replies)
    for number in total.refused:
        run.replies.failed[run.nodes[number]] = "garbage"
    parts = [from_integers(plan, total.total, like, wide)]
    return NodeSum(parts, [run.nodes[number] for number in total.clients], run.replies)


# ---- numbers as integers ----


def ring_grid(plan: Plan, limit: float | None = None) -> ring.Grid:
    """Return what integers stand for in the secure sums of a plan."""
    return ring.grid(plan.limit if limit is None else limit, plan.most_nodes, bits=BITS)


def bits_of(like: Any) -> int:
    """Return how wide the integers of a secure sum are: a tree of integers of a ring stays in that ring."""
    return 32 if _in_ring(like) else BITS


def _in_ring(tree: Any) -> bool:
    """Say whether a tree is of integers already, as `aggregators.secure` makes them."""
    return all(leaf.dtype == np.uint32 for leaf in flatten(tree)[0].values())


def length_of(like: Any, wide: bool = False) -> int:
    """Return how many integers a tree of arrays becomes."""
    return (2 if wide else 1) * sum(int(np.prod(leaf.shape)) for leaf in flatten(like)[0].values())


def to_integers(plan: Plan, tree: Any, wide: bool = False) -> np.ndarray:
    """Write a tree of arrays as integers, leaf after leaf.

    Args:
      plan: whose secure sums these are for.
      tree: the arrays.
      wide: write every number as two integers, whole multiples of `WIDE_UNIT` and the rest: for sums of very different
        size.

    Raises:
      Failure: a number is not finite, or is beyond the limit, where it would change silently.
    """
    leaves, limit = flatten(tree)[0], WIDE_LIMIT if wide else plan.limit
    flat = [np.asarray(leaves[path]).reshape(-1) for path in sorted(leaves)]
    if _in_ring(tree):
        return np.concatenate(flat).astype("<u4")
    values = np.concatenate(flat, dtype=np.float64)
    if not np.isfinite(values).all() or np.abs(values).max(initial=0) > limit:
        raise Failure("beyond_limit", f"a sum of this node has a number beyond the plan's limit of {limit:g}")
    if not wide:
        return ring.quantise(ring_grid(plan), values).astype("<u8")
    high = np.rint(values / WIDE_UNIT)
    halves = zip(_wide_grids(plan), (high, values - WIDE_UNIT * high), strict=True)
    return np.concatenate([ring.quantise(grid, half).astype("<u8") for grid, half in halves])


def from_integers(plan: Plan, total: np.ndarray, like: T, wide: bool = False) -> T:
    """Read a sum of integers as a tree of arrays."""
    if _in_ring(like):
        values = total
    elif wide:
        halves = zip(_wide_grids(plan), np.split(total, 2), strict=True)
        high, low = (np.asarray(ring.restore(grid, half), np.float64) for grid, half in halves)
        values = WIDE_UNIT * high + low
    else:
        values = np.asarray(ring.restore(ring_grid(plan), total), np.float64)
    leaves, structure = flatten(like)
    ends = np.cumsum([int(np.prod(leaves[path].shape)) for path in sorted(leaves)])
    pieces = dict(zip(sorted(leaves), np.split(values, ends[:-1]), strict=True))
    arrays = {path: pieces[path].reshape(leaf.shape).astype(leaf.dtype) for path, leaf in leaves.items()}
    return unflatten(structure, arrays)


def _wide_grids(plan: Plan) -> tuple[ring.Grid, ring.Grid]:
    return ring_grid(plan, WIDE_LIMIT / WIDE_UNIT), ring_grid(plan, WIDE_UNIT)
