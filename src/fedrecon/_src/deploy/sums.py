"""A sum over nodes, open or secure: the only thing that the server ever asks them for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedrecon._src.deploy import node_keys
from fedrecon._src.deploy.asking import Answers, ask, open_reply, read_tree
from fedrecon._src.deploy.grid import Clock, Grid
from fedrecon._src.deploy.messages import TRAIN, Envelope, join_bodies, pack, question_number, shapes_of
from fedrecon._src.deploy.plan import Plan


class Question(NamedTuple):
    """What is summed: of which run and round, with which parameters."""

    run: str
    round: int
    of: str  # training, the part of the users that is measured, or a question of round zero
    body: bytes


class Summed(NamedTuple):
    """Parts whose sum is the result (one, if it was secure), who is in it, and how asking went."""

    parts: list[Any]
    nodes: list[int]
    answers: Answers


def open_sum(
    plan: Plan, grid: Grid, question: Question, nodes: Sequence[int], *, enough: int, seconds: float, clock: Clock
) -> Summed:
    """Ask nodes for their sums, which the server sees."""
    kind, facts = _asking_for(question.of)
    asked = Envelope(kind, plan.digest, question.run, question.round, facts, question.body)
    data, like = pack(asked), shapes_of(plan, question.of)
    answers = ask(
        grid,
        dict.fromkeys(nodes, data),
        lambda node, reply: read_tree(reply, asked, like),
        enough=enough,
        seconds=seconds,
        clock=clock,
        number=question.round,
    )
    there = sorted(answers.good)
    return Summed([answers.good[node] for node in there], there, answers)


def _asking_for(of: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of message that asks for an open sum, and its facts."""
    if of == TRAIN:
        return TRAIN, {}
    number = question_number(of)
    return ("evaluate", {"part": of}) if number is None else ("prepare", {"number": number})


def secure_sum_of(
    plan: Plan,
    grid: Grid,
    question: Question,
    nodes: Sequence[int],
    *,
    stage_seconds: float,
    seconds: float,
    clock: Clock,
    numbers: Mapping[int, int] | None = None,
) -> Summed:
    """Ask nodes for masked sums in four messages; nodes may leave between any two of them.

    Args:
      plan: the plan, in which sums are secure.
      grid: reaches the nodes.
      question: what is summed.
      nodes: who is asked.
      stage_seconds: how long to wait for each small message.
      seconds: how long to wait for masked sums.
      clock: tells the time.
      numbers: the nodes' numbers in the plan's list, if keys are signed.
    """
    from fedrecon._src.deploy.secret import bits_of, from_integers, length_of
    from fedrecon._src.privacy import secure_sum

    like = shapes_of(plan, question.of)
    nodes = list(nodes)[: plan.most_nodes]
    cohort, so_far = len(nodes), Answers()
    least = max(plan.least_nodes, cohort // 2 + 1)
    if cohort < least:
        return Summed([], [], Answers(failed=dict.fromkeys(nodes, "secure_sum")))
    wide = question_number(question.of) is not None
    length = length_of(like, wide)
    terms = secure_sum.plan(cohort, length, bits=bits_of(like), round=question.round, circle=cohort, threshold=least)
    number = {node: k if numbers is None else numbers[node] for k, node in enumerate(sorted(nodes))}
    node_of = {k: node for node, k in number.items()}
    most = 8 * length + 2**16 + 256 * cohort

    def stage(kind: str, bodies: dict[int, bytes], wait: float, facts: Callable[[int], dict[str, Any]]) -> Any:
        nonlocal so_far
        envelopes = {
            node_of[k]: Envelope(kind, plan.digest, question.run, question.round, facts(k), body)
            for k, body in bodies.items()
        }
        answers = ask(
            grid,
            {node: pack(envelope) for node, envelope in envelopes.items()},
            lambda node, reply: open_reply(reply, envelopes[node], most),
            enough=len(envelopes),
            seconds=wait,
            clock=clock,
            number=question.round,
        )
        answers.take_over(so_far)
        so_far = answers
        return [(number[node], body) for node, body in sorted(answers.good.items())]

    def nothing(k: int) -> dict[str, Any]:
        return {}

    try:
        hellos = stage(
            "advertise",
            dict.fromkeys(node_of, terms.to_bytes()),
            stage_seconds,
            lambda k: {"of": question.of, "me": k},
        )
        state, rosters = secure_sum.introduce(terms, hellos, verify_keys=node_keys.verify_keys(plan))
        state, deliveries = secure_sum.deliver(state, stage("share", rosters, stage_seconds, nothing))
        bodies = {k: join_bodies(delivery, question.body) for k, delivery in deliveries.items()}
        state, requests = secure_sum.collect(state, stage("mask", bodies, seconds, nothing))
        found = secure_sum.total(state, stage("unmask", requests, stage_seconds, nothing))
    except secure_sum.SecureSumError:
        gone = {node: "secure_sum" for node in nodes if node not in so_far.failed and node not in so_far.late}
        return Summed([], [], Answers({}, {**so_far.failed, **gone}, so_far.late, so_far.sent, so_far.received))
    for k, why in found.refused.items():
        del why
        so_far.failed[node_of[k]] = "garbage"
    return Summed([from_integers(plan, found.total, like, wide)], [node_of[k] for k in found.clients], so_far)
