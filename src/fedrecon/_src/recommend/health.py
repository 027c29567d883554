"""Whether a run went well: warnings while it trains, and a verdict at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedrecon._src.recommend.config import Config
from fedrecon._src.recommend.tasks import Task
from fedrecon._src.simulation.divergence import find_divergence, find_failures
from fedrecon._src.simulation.evaluation import Evaluation

GUARDS = {"learned_from": "clients", "shortened": "clipped", "too_long": "zeroed", "not_finite": "non_finite"}


class Watch:
    """Looks at every record of a run, and says at the first sign of trouble what it is and what to do."""

    def __init__(self, config: Config, task: Task[Any, Any, Any], say: Callable[[str], None], counts: bool = False):
        """Say warnings with `say`, each kind once; `counts` is whether the ratings look like counts."""
        self._config, self._task, self._say, self._counts = config, task, say, counts
        self._said: set[str] = set()

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Look at a record."""
        where = f"warning: round {record['round']}:"
        people = self._task.people
        problem = find_divergence(record)
        if problem is None or problem.kind in self._said:
            return
        self._said.add(problem.kind)
        of = f"{problem.count} of {problem.total}"
        if problem.kind == "diverged":
            self._say(f"{where} {of} validation {people} diverged, excluded from the means. {self._remedy(record)}")
        elif problem.kind == "unmeasured":
            self._say(f"{where} no validation {people[:-1]} has enough {self._task.examples}")
        elif problem.kind == "non_finite":
            self._say(f"{where} {of} updates are not finite and were left out. {self._remedy(record)}")
        else:
            why = why_skipped(record, self._config, self._task, self._counts)
            self._say(f"{where} nothing was learned: {why}")

    def _remedy(self, record: Mapping[str, Any]) -> str:
        return remedy(self._config, trained=record["round"] > 0, counts=self._counts)


def why_skipped(record: Mapping[str, Any], config: Config, task: Task[Any, Any, Any], counts: bool = False) -> str:
    """Say why a round had no update to learn from, and what to do about it.

    Args:
      record: of the round.
      config: the settings.
      task: what is trained.
      counts: whether the ratings look like counts.
    """
    sampling = config.sampling
    if sampling.poisson and "invited" not in record:
        return f"the mean of the updates is not finite, or nobody took part. {remedy(config, counts=counts)}"
    invited, few, dropped = (record[name] for name in ("invited", "too_small", "dropped"))
    if few == invited:
        return f"all {invited} invited {task.people} have fewer than --sampling.min-examples {sampling.min_examples}"
    if few + dropped == invited:
        return f"nobody answered: {dropped} of {invited} invited dropped out (--sampling.drop-out {sampling.drop_out})"
    if record.get("zeroed"):
        return f"all updates are longer than --aggregate.zero-norm {config.aggregate.zero_norm}"
    if record.get("clients"):
        return f"the mean of the updates is not finite. {remedy(config, counts=counts)}"
    return f"the {task.people} who answered have too few {task.examples} for both support and query"


def remedy(config: Config, *, trained: bool = True, counts: bool = False) -> str:
    """Say what to do about numbers that run away, by options that have a part in it.

    Args:
      config: the settings.
      trained: whether rounds have been run; before the first one, only reconstruction has changed anything.
      counts: whether ratings that are learned as they are look like counts.
    """
    if counts:
        return "The ratings look like counts: use --data.transform log1p, so that the model learns log(1+x)."
    advice = config.remedies(trained)
    if trained and not config.privacy.on and config.aggregate.clip_norm is None and config.aggregate.followed is None:
        advice.append("set --aggregate.clip-norm")
    when = "" if trained else "Nothing has been learned yet, so this is about the data and reconstruction. "
    return f"{when}If this continues: {', or '.join(advice)}."


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
    failures = find_failures(history, test)
    return "; ".join(problem.describe(f"{name} {task.people}") for name, problem in failures.items()) or None


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


def evaluation_failed(evaluation: Evaluation, people: str) -> str | None:
    """Say why an evaluation says nothing about a model, or None if it does."""
    problem = find_divergence({"kind": "evaluation", **evaluation.summary()})
    return problem.describe(people) if problem is not None and problem.failed else None
