"""The detector of divergence that training, evaluations, the command line and deployments share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedrecon._src.core.display import warn_caller

if TYPE_CHECKING:
    from fedrecon._src.simulation.evaluation import Evaluation

FAILED_SHARE = 0.1  # of updates, rounds or evaluated clients, above which a run has failed
WARN_AFTER = 3  # rounds in a row that learn nothing
REMEDY = (
    "Try smaller learning rates, in reconstruction, update and server, or limit updates with "
    "aggregate=fr.aggregators.mean(clip_norm=...)."
)


class DivergenceWarning(UserWarning):
    """Training learns nothing for several rounds in a row, or most clients of an evaluation diverged."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Part of a run that diverged.

    Attributes:
      kind: `non_finite` updates, `skipped` rounds, or `diverged` clients; `unmeasured` if no client has data to be
        evaluated on.
      count: how many.
      total: of how many.
    """

    kind: str
    count: int
    total: int

    @property
    def failed(self) -> bool:
        """Whether this is too much to trust the model."""
        return self.kind == "unmeasured" or self.count > FAILED_SHARE * self.total

    def describe(self, people: str) -> str:
        """Return a sentence about it.

        Args:
          people: who was evaluated, such as `test users`.
        """
        of = f"{self.count} of {self.total}"
        return {
            "non_finite": f"{of} updates were not finite",
            "skipped": f"nothing was learned in {of} rounds",
            "diverged": f"{of} {people} diverged",
            "unmeasured": f"no {people} could be measured: they have too little data for support and query",
        }[self.kind]


def find_divergence(record: Mapping[str, Any]) -> Divergence | None:
    """Return what diverged in a round or an evaluation; None if nothing did.

    Args:
      record: as in `metrics.jsonl`.
    """
    if record["kind"] == "evaluation":
        clients, diverged = record.get("clients", 0), record.get("diverged", 0)
        if not clients:
            return Divergence("unmeasured", 0, 0)
        return Divergence("diverged", diverged, clients) if diverged else None
    if non_finite := record.get("non_finite", 0):
        return Divergence("non_finite", non_finite, non_finite + record.get("clients", 0))
    return Divergence("skipped", 1, 1) if record["skipped"] else None


def find_failures(history: Sequence[Mapping[str, Any]], test: Evaluation | None = None) -> dict[str, Divergence]:
    """Return why a run has failed, by where: `updates`, `rounds`, `validation` or `test`; empty if it went well.

    Args:
      history: the records of the run.
      test: how the model serves the test clients, if they were measured.
    """
    rounds = [record for record in history if record["kind"] == "round"]
    evaluations = [record for record in history if record["kind"] == "evaluation"][-1:]
    non_finite = sum(record.get("non_finite", 0) for record in rounds)
    updates = non_finite + sum(record.get("clients", 0) for record in rounds)
    parts: dict[str, Divergence | None] = {
        "updates": Divergence("non_finite", non_finite, updates),
        "rounds": Divergence("skipped", sum(bool(record.get("skipped")) for record in rounds), len(rounds)),
        "validation": find_divergence(evaluations[0]) if evaluations else None,
        "test": None if test is None else find_divergence({"kind": "evaluation", **test.summary()}),
    }
    return {name: part for name, part in parts.items() if part is not None and part.failed}


def describe_evaluation(clients: int, diverged: int) -> str | None:
    """Return a warning if most clients diverged; None if they did not."""
    if 2 * diverged <= clients:
        return None
    rest = "no metric has a value" if diverged == clients else f"metrics are of the other {clients - diverged} alone"
    return f"{diverged} of {clients} evaluated clients diverged: {rest}. {REMEDY}"


class DivergenceMonitor:
    """Watches the records of a training, and warns once if it stops learning."""

    def __init__(self) -> None:
        """Start without records."""
        self._lost: list[Mapping[str, Any]] = []  # the last rounds, as long as they learned nothing
        self._warned = False

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Look at a record."""
        if record["kind"] == "round":
            excluded = record.get("non_finite", 0) + record.get("zeroed", 0)
            lost = record["skipped"] or (excluded and not record.get("clients", 1))
            self._lost = [*self._lost, record] if lost else []
            problem = describe_rounds(self._lost) if len(self._lost) == WARN_AFTER else None
        elif problem := describe_evaluation(record["clients"], record["diverged"]):
            problem = f"the evaluation after round {record['round']}: {problem}"
        if problem and not self._warned:
            self._warned = True
            warn_caller(problem, DivergenceWarning)


def describe_rounds(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return why rounds learned nothing, and what to try."""
    first, last = rounds[0]["round"], rounds[-1]["round"]
    learned = f"rounds {first} to {last} learned nothing, and the global parameters stay as they were"
    sums = {name: sum(record.get(name, 0) for record in rounds) for name in ("non_finite", "zeroed", "clients")}
    if sums["non_finite"]:
        return f"{learned}: {sums['non_finite']} updates of clients are not finite and were left out. {REMEDY}"
    if sums["zeroed"]:
        why = f"{sums['zeroed']} updates of clients are longer than `zero_norm` and were left out"
        return f"{learned}: {why}. Raise `zero_norm`, or: {REMEDY}"
    if sums["clients"]:
        return f"{learned}: the mean of the updates is not finite. {REMEDY}"
    return (
        f"{learned}: nobody sent an update that counts. Are there clients with enough examples for support and query, "
        "and does `sampling` let them take part? If they do take part, their updates are not finite: try smaller "
        "learning rates."
    )
