"""Differential privacy of a deployed training: what a plan promises, and who adds which noise.

The unit is one user of a node, never the node: every user's change is clipped by itself before a node adds them up. If
sums are open, the server adds Gaussian noise, and the promise holds against everybody but the server. If they are
secure, every node adds its share of integer noise before it masks its sum. The plan's least number of nodes together
add all of the noise, and the server never sees a sum without it.

All noise is drawn from the system's entropy. So are the users of a node that take part in a round: only the node knows
who they are, and the accounting takes the plan's share of users as their probability. A node counts its answers over
all runs of a plan, and stops answering when the promise is used up. Round zero asks all users: its questions are
counted one by one, and one of them, whichever costs most, may be asked twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.upload import Total
from fedrecon._src.privacy.accounting import Release, default_delta
from fedrecon._src.privacy.ledger import Ledger
from fedrecon._src.privacy.noise import ShareOfNoise, draw, system_generator
from fedrecon._src.recommend.config import Rule
from fedrecon._src.recommend.estimate import State, Sums
from fedrecon._src.recommend.round_zero import ANSWER, RoundZero
from fedrecon._src.server.fixed_point import add_noise

if TYPE_CHECKING:
    from fedrecon._src.deploy.plan import Plan


def parts_of(algorithm: Algorithm) -> Any:
    """Return the shapes of what uploads add up to."""
    return algorithm.method.parts(jax.eval_shape(algorithm.method.init, jax.random.key(0)))


def max_answers(rounds: int) -> int:
    """Return how often a node answers at most: once per round, with some rounds repeated."""
    return rounds + rounds // 10 + 1


def share_of_noise(algorithm: Algorithm) -> ShareOfNoise | None:
    """Return the noise that each node or device adds to its sum; None if they add none."""
    share = algorithm.aggregator.share
    return None if share is None else share(parts_of(algorithm))


def ledger_of(plan: Plan, rounds: int) -> Ledger | None:
    """Return what was spent after round zero and this many rounds; None for a plan that promises nothing."""
    if plan.release is None:
        return None
    delta = default_delta(plan.users) if plan.delta is None else plan.delta
    before = () if plan.zero is None else round_zero_releases(plan.zero)
    return Ledger(plan.users, delta, None, (*before, plan.release._replace(rounds=rounds)) if rounds else before)


def spare_questions(zero: RoundZero) -> int:
    """Return how many questions of round zero a node answers a second time."""
    return max_answers(len(zero.questions)) - len(zero.questions)


def round_zero_releases(zero: RoundZero) -> tuple[Release, ...]:
    """Return the most that round zero gives away: every question once, and spare ones for whichever costs most."""
    releases = zero.releases()
    if not releases:
        return ()
    worst = min(releases, key=lambda release: release.noise_multiplier)
    return (*releases, worst._replace(rounds=spare_questions(zero)))


def noise_rules(plan: Plan) -> Iterator[Rule]:
    """Yield the rules of plans with noise, which say when a plan cannot keep its promise."""
    release, share = plan.algorithm.aggregator.release, share_of_noise(plan.algorithm)
    if release is None:
        return
    each = release(parts_of(plan.algorithm))
    yield Rule(plan.users < 2, "users", "must be the number of users of all nodes together: noise hides one among many")
    yield Rule(plan.least_users > 1, "least_users", "must be 1 with noise: leaving out a node reveals that it is small")
    yield Rule(each.apart is not None, "algorithm", "cannot have correlated noise: nodes do not promise to take turns")
    if each.mechanism == "gaussian":
        return
    yield Rule(not plan.secure, "secure", "must be on: noise of nodes protects nobody in open sums; use secure sums")
    yield Rule(share is None, "algorithm", "has noise that would be simulated; use ClientNoise(..., simulated=False)")
    least = 0 if share is None else share.least
    few = f"is too low: {least} nodes are needed to add the promised noise"
    yield Rule(least > plan.least_nodes, "least_nodes", few)


# ---- on the server ----


def advance_round_zero(zero: RoundZero, state: State, parts: Sequence[Sums], nodes: int) -> State:
    """Return the next state of round zero from the answers of nodes, with the server's noise if it adds any."""
    total: dict[str, Any] = {name: sum(part[name] for part in parts) for name in parts[0]}
    noise = zero.noise_of(state)
    if zero.hosts:
        noise *= math.sqrt(nodes / zero.hosts)  # nodes beyond the least number add their share, too
    elif zero.noised:
        total[ANSWER] = total[ANSWER] + system_generator().normal(0.0, noise, total[ANSWER].shape)
    return zero.advance(state, total, noise)


# ---- on a node ----


def answer_round_zero(zero: RoundZero, state: State, users: Any) -> Sums:
    """Return a node's answer to a question, with its share of the noise if nodes add any.

    Raises:
      StateError: the state is forged: it asks for answers that have no bound.
    """
    sums, share = zero.answer(state, users) if len(users) else zero.zeros(state.answered), zero.share_of_noise(state)
    return sums if share is None else {ANSWER: sums[ANSWER] + draw(share, system_generator())}


def draw_participants(users: Any, share: float) -> Any:
    """Return the users of a node that train in a round, each drawn by itself; nobody else knows who they are."""
    return users.take(system_generator().random(len(users)) < share)


def add_node_noise(algorithm: Algorithm, total: Total) -> Total:
    """Add a node's share of the noise to its sum, if nodes add any."""
    share = share_of_noise(algorithm)
    return total if share is None else add_noise(share, total, system_generator())
