"""Whether a run went well: warnings while it trains, and a verdict at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedrecon.app.config import Config
from fedrecon.app.tasks import Task
from fedrecon.evaluation import Evaluation

GUARDS = {"learned_from": "clients", "shortened": "clipped", "too_long": "zeroed", "not_finite": "non_finite"}
MOST_FAILED = 0.1  # share of updates, rounds or evaluated clients above which a run has failed


class Watch:
    """Looks at every record of a run, and says at the first sign of trouble what it is and what to do."""

    def __init__(self, config: Config, task: Task[Any, Any, Any], say: Callable[[str], None]):
        """Say warnings with `say`, each kind once."""
        self._config, self._task, self._say = config, task, say
        self._said: set[str] = set()

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Look at a record."""
        where = f"warning: round {record['round']}:"
        people = self._task.people
        if record["kind"] == "evaluation":
            if record["diverged"]:
                of = f"{record['diverged']} of {record['clients']} validation {people}"
                self._once("diverged", f"{where} {of} diverged and are excluded. {_slower(self._config)}")
            elif not record["clients"]:
                self._once("unmeasured", f"{where} no validation {people[:-1]} has enough {self._task.examples}")
            return
        if lost := record.get("non_finite", 0):
            of = f"{lost} of {lost + record.get('clients', 0)} updates"
            self._once("non_finite", f"{where} {of} are not finite and were left out. {_slower(self._config)}")
        elif record["skipped"]:
            self._once("skipped", f"{where} nothing was learned: {why_skipped(record, self._config, self._task)}")

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


def why_skipped(record: Mapping[str, Any], config: Config, task: Task[Any, Any, Any]) -> str:
    """Say why a round had no update to learn from, and what to do about it."""
    sampling = config.sampling
    if sampling.poisson and "invited" not in record:
        return f"the mean of the updates is not finite, or nobody took part. {_slower(config)}"
    invited, few, dropped = (record[name] for name in ("invited", "too_small", "dropped"))
    if few == invited:
        return f"all {invited} invited {task.people} have fewer than --sampling.min-examples {sampling.min_examples}"
    if few + dropped == invited:
        return f"nobody answered: {dropped} of {invited} invited dropped out (--sampling.drop-out {sampling.drop_out})"
    if record.get("zeroed"):
        return f"all updates are longer than --aggregate.zero-norm {config.aggregate.zero_norm}"
    if record.get("clients"):
        return f"the mean of the updates is not finite. {_slower(config)}"
    return f"the {task.people} who answered have too few {task.examples} for both support and query"


def _slower(config: Config) -> str:
    """Say what to do about parameters that run away."""
    if config.task == "clicks":
        rate = config.server.learning_rate
        return f"If this continues, lower --server.learning-rate (now {rate:g}) or raise --model.ridge."
    return (
        f"If this continues, lower --update.learning-rate (now {config.update.learning_rate:g}) and "
        f"--reconstruct.learning-rate (now {config.reconstruct.learning_rate:g}), set --aggregate.clip-norm, or "
        "rescale the data."
    )


def why_failed(
    history: Sequence[Mapping[str, Any]],
    task: Task[Any, Any, Any],
    test: Evaluation | None = None,
) -> str | None:
    """Say why a run has failed, or None if it went well.

    Args:
      history: records of the whole run.
      task: what was trained.
      test: how the model serves the test clients, if they were measured.
    """
    rounds = [record for record in history if record["kind"] == "round"]
    evaluations = [record for record in history if record["kind"] == "evaluation"]
    lost = sum(record.get("non_finite", 0) for record in rounds)
    updates = lost + sum(record.get("clients", 0) for record in rounds)
    skipped = sum(bool(record.get("skipped")) for record in rounds)
    found = []
    if lost > MOST_FAILED * updates:
        found.append(f"{lost} of {updates} updates were not finite")
    if skipped > MOST_FAILED * len(rounds):
        found.append(f"nothing was learned in {skipped} of {len(rounds)} rounds")
    if evaluations:
        last = evaluations[-1]
        found += _evaluation_failed(f"validation {task.people}", last.get("clients", 0), last.get("diverged", 0))
    if test is not None:
        found += _evaluation_failed(f"test {task.people}", test.clients, test.diverged)
    return "; ".join(found) or None


def updates_of(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the updates that a run was learned from, and those that a guard shortened or left out.

    Args:
      history: records of the whole run.
    """
    rounds = [record for record in history if record["kind"] == "round"]
    return {name: sum(record.get(of, 0) for record in rounds) for name, of in GUARDS.items()}


def say_updates(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Say how many updates a guard shortened or left out; None if there were none."""
    found = updates_of(history)
    everyone = found["learned_from"] + found["not_finite"] + found["too_long"]
    told = [
        f"{found[name]:,} {what}"
        for name, what in (
            ("shortened", "were longer than --aggregate allows and were shortened"),
            ("too_long", "were longer than --aggregate.zero-norm and were left out"),
            ("not_finite", "were not finite and were left out"),
        )
        if found[name]
    ]
    return f"of {everyone:,} updates, {', '.join(told)}" if told else None


def evaluation_failed(found: Evaluation, people: str) -> str | None:
    """Say why an evaluation says nothing about a model, or None if it does."""
    return "; ".join(_evaluation_failed(people, found.clients, found.diverged)) or None


def _evaluation_failed(people: str, clients: int, diverged: int) -> list[str]:
    if not clients:
        return [f"no {people} could be measured: they have too little data for support and query"]
    return [f"{diverged} of {clients} {people} diverged"] if diverged > MOST_FAILED * clients else []
