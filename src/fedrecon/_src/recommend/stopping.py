"""When training ends, whether it went well, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedrecon._src.recommend.config import Config
from fedrecon._src.recommend.settings import relaxed_rounds
from fedrecon._src.recommend.task import Task, Users
from fedrecon._src.simulation.divergence import find_divergence, find_failures
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator, summarize
from fedrecon._src.simulation.training import EarlyStopping, Evaluate, Score

Records = Sequence[Mapping[str, Any]]

GUARDS = {"learned_from": "clients", "clipped": "clipped", "too_long": "zeroed", "not_finite": "non_finite"}
JUDGES = 10  # validation or test clients; the loss of fewer is mostly chance
TESTED = (0.6, 0.2, 0.2)  # fractions that suit few clients
VERDICTS = 600  # pairs of support and query that a loss should be of, though a client gives several of them
MOST_DIVISIONS = 8  # of one client: more of them are too much alike to tell anything new


def evaluate_by_divisions(evaluator: Evaluator | None, config: Config, users: Users) -> Evaluate | None:
    """Return the evaluator of validation clients: one support/query division if there are many clients, else several.

    With several, a client's metrics are over the query examples of all of them, so that the loss depends less on
    chance.

    Args:
      evaluator: of the validation clients by one division; None if there are none.
      config: the settings.
      users: divided into those who train, judge and are measured.
    """
    if evaluator is None or (times := divisions_of(config, users)) == 1:
        return evaluator
    evaluators = [evaluator, *(evaluator.on(users.valid.shuffle(number)) for number in range(1, times))]

    def evaluate(params: Any, client_state: Any = ()) -> Evaluation:
        total = np.sum([division.sums(params, client_state) for division in evaluators], axis=0)
        return summarize(evaluator.algorithm.model, evaluator.protocol, total)

    return evaluate


def divisions_of(config: Config, users: Users) -> int:
    """Return how many support/query divisions validate a client: one without early stopping or with a split by time."""
    if patience_of(config, users) is None or config.split.by_time:
        return 1
    return min(MOST_DIVISIONS, math.ceil(VERDICTS / len(users.valid)))


def patience_of(config: Config, users: Users) -> int | None:
    """Return the patience of early stopping; None if there are too few validation clients."""
    return config.patience if judges_of(users) >= JUDGES else None


def judges_of(users: Users) -> int:
    """Return how many validation clients have both support and query examples."""
    return int((users.valid.sizes >= 2).sum())


def early_stopping_of(config: Config, users: Users, score: Score) -> EarlyStopping | None:
    """Return when training stops early; None if it runs all rounds."""
    if (patience := patience_of(config, users)) is None:
        return None
    # The evaluations that count: after the last round of the settings, and of each relaxation.
    rounds = range(config.rounds, config.most_rounds + 1, max(1, relaxed_rounds(config.rounds, 1)))
    return EarlyStopping(patience, rounds, score)


def rounds_of(config: Config, users: Users) -> int:
    """Return the largest number of rounds; relaxations of the prior need enough validation clients."""
    return config.rounds if patience_of(config, users) is None else config.most_rounds


def say_rounds(config: Config, users: Users, people: str = "users") -> str:
    """Describe the client groups, when training ends, and whether there are enough test clients."""
    train, test = len(users.train), len(users.test)
    part = min(config.sampling.cohort_size(train), train)
    text = (
        f"{people}: {train:,} train, {len(users.valid):,} validate, {test:,} test; "
        f"{part:,} in each of {config.rounds:,} rounds."
    )
    if patience_of(config, users) is None and config.patience is not None:
        few = f"only {judges_of(users)} validation {people} have support and query, of at least {JUDGES} needed"
        text += f" The model of the last round is kept: {few}."
    elif config.patience is not None:
        if more := rounds_of(config, users) - config.rounds:
            text += f" Up to {more} more follow with a weaker and weaker prior, as long as validation results improve."
        text += f" The best model for validation {people} is kept, even if it is the one before the first round."
    return text + "".join(f" {sentence}" for sentence in say_few_tested(config, test, people))


def say_few_tested(config: Config, number: int, people: str = "users") -> list[str]:
    """Say that there are too few test clients to tell much about a model, and what to do; nothing if there are enough.

    Args:
      config: the settings.
      number: how many test clients there are.
      people: what clients are called.
    """
    if number >= JUDGES:
        return []
    none = f"No {people} are left for testing, so nothing is measured."
    return [say_few(number, f"test {people}") if number else none, say_how_to_test_more(config)]


def say_few(number: int, people: str) -> str:
    """Say that results on so few clients are unreliable.

    Args:
      number: how many there are, at least 1.
      people: what they are called.
    """
    return f"Fewer than {JUDGES} {people} ({number}) are too few for reliable results."


def say_how_to_test_more(config: Config) -> str:
    """Say how to test on more clients: with other fractions, unless they already leave enough."""
    if not config.divides_clients or config.data.fractions[-1] >= TESTED[-1]:
        return "It takes data of more people to say more."
    option = " ".join(f"{share:.1g}".removeprefix("0") for share in TESTED)
    return f"Train with --data.fractions {option} to test on about a fifth of all."


def say_kept(best: int, people: str) -> str:
    """Say which model is kept, where it is not the last.

    Args:
      best: the round after which it was the model; 0 for what there was before the first.
      people: what clients are called.
    """
    when = f"after round {best}" if best else "from before the first round"
    return f"kept the model {when}, the best on validation {people}"


# ---- whether it went well ----


def warn_of_divergence(
    config: Config, task: Task[Any, Any, Any], say: Callable[[str], None], counts: bool = False
) -> Callable[[Mapping[str, Any]], None]:
    """Return a function of the records of a run that warns at the first sign of each kind of divergence, with advice.

    Args:
      config: the settings.
      task: what is trained.
      say: called with warnings.
      counts: whether the ratings look like counts.
    """
    warned, advice = set(), remedy(config, counts)

    def watch(record: Mapping[str, Any]) -> None:
        problem = find_divergence(record)
        if problem is None or problem.kind in warned:
            return
        warned.add(problem.kind)
        of = f"{problem.count} of {problem.total}"
        texts = {
            "diverged": f"{of} validation {task.people} diverged, excluded from the means. {advice}",
            "unmeasured": f"no validation {task.people} have enough {task.examples}",
            "non_finite": f"{of} updates are not finite and were left out. {advice}",
        }
        text = texts.get(problem.kind) or f"nothing was learned: {_why_skipped(record, config, task, advice)}"
        say(f"warning: round {record['round']}: {text}")

    return watch


def _why_skipped(record: Mapping[str, Any], config: Config, task: Task[Any, Any, Any], advice: str) -> str:
    """Say why a round had no update to learn from, and what to do about it."""
    sampling = config.sampling
    if sampling.poisson and "invited" not in record:
        return f"the mean of the updates is not finite, or nobody took part. {advice}"
    invited, few, dropped = record["invited"], record.get("too_small", 0), record["dropped"]  # no node is too small
    if few == invited:
        return f"all {invited} invited {task.people} have fewer than --sampling.min-examples {sampling.min_examples}"
    if few + dropped == invited:
        return f"nobody answered: {dropped} of {invited} invited dropped out (--sampling.drop-out {sampling.drop_out})"
    if record.get("zeroed"):
        return f"all updates are longer than --aggregate.zero-norm {config.aggregate.zero_norm}"
    if record.get("clients"):
        return f"the mean of the updates is not finite. {advice}"
    return f"the {task.people} who answered have too few {task.examples} for both support and query"


def remedy(config: Config, counts: bool = False) -> str:
    """Give advice against divergence.

    Args:
      config: the settings.
      counts: whether ratings that are learned as they are look like counts.
    """
    if counts:
        return "The ratings look like counts: use --data.transform log1p, so that the model learns log(1+x)."
    return f"If this continues: {config.remedy}."


def why_failed(history: Records, task: Task[Any, Any, Any], test: Evaluation | None = None) -> str | None:
    """Say why a run has failed, or None if it went well.

    Args:
      history: records of the whole run.
      task: what was trained.
      test: how the model serves the test clients, if they were measured.
    """
    failures = find_failures(history, test)
    return "; ".join(problem.describe(f"{name} {task.people}") for name, problem in failures.items()) or None


def updates_of(history: Records) -> dict[str, int]:
    """Count the updates that a run was learned from, and those that a guard clipped or left out.

    Args:
      history: records of the whole run.
    """
    rounds = [record for record in history if record["kind"] == "round"]
    return {name: sum(record.get(of, 0) for record in rounds) for name, of in GUARDS.items()}


def say_updates(history: Records) -> str | None:
    """Say how many updates a guard clipped or left out; None if there were none."""
    updates = updates_of(history)
    if not any(updates[name] for name in ("clipped", "too_long", "not_finite")):
        return None
    return (
        f"updates: {updates['learned_from']:,} learned from, {updates['clipped']:,} of them clipped; "
        f"left out: {updates['too_long']:,} longer than --aggregate.zero-norm, {updates['not_finite']:,} not finite"
    )


def evaluation_failed(evaluation: Evaluation, people: str) -> str | None:
    """Say why an evaluation is not meaningful; None if it is."""
    problem = find_divergence({"kind": "evaluation", **evaluation.summary()})
    return problem.describe(people) if problem is not None and problem.failed else None
