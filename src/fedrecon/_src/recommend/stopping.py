"""When training ends, whether it went well, and what is said about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedrecon._src.recommend.config import Config
from fedrecon._src.recommend.settings import relaxed_rounds
from fedrecon._src.recommend.task import Task, Users
from fedrecon._src.simulation.divergence import find_divergence, find_failures
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator, summarize
from fedrecon._src.simulation.training import EarlyStopping, Score

GUARDS = {"learned_from": "clients", "shortened": "clipped", "too_long": "zeroed", "not_finite": "non_finite"}
JUDGES = 10  # validation or test clients; the loss of fewer is mostly chance
TESTED = (0.6, 0.2, 0.2)  # fractions that suit few clients
VERDICTS = 600  # pairs of support and query that a loss should be of, though a client gives several of them
MOST_DIVISIONS = 8  # of one client: more of them are too much alike to tell anything new


@dataclasses.dataclass(frozen=True, eq=False)
class DivisionsEvaluator:
    """Evaluates clients by several divisions into support and query, for a loss that depends less on chance.

    Attributes:
      evaluators: of the same clients in the same order, with examples in another order each.
    """

    evaluators: tuple[Evaluator, ...]

    def __call__(self, params: Any, kept: Any = ()) -> Evaluation:
        """Evaluate global parameters; a client's metrics are over the query examples of all divisions.

        Args:
          params: global parameters.
          kept: what clients kept from training; nothing, as clients that are divided keep nothing.
        """
        first = self.evaluators[0]
        total = np.sum([evaluator.sums(params, kept) for evaluator in self.evaluators], axis=0)
        return summarize(first.algorithm.model, first.protocol, total)


def evaluate_by_divisions(
    evaluator: Evaluator | None, config: Config, users: Users
) -> Evaluator | DivisionsEvaluator | None:
    """Return how validation clients judge: by one division into support and query if there are many, else by several.

    Args:
      evaluator: of the validation clients by one division; None if there are none.
      config: the settings.
      users: divided into those who train, judge and are measured.
    """
    if evaluator is None or (times := divisions_of(config, users)) == 1:
        return evaluator
    others = [evaluator.on(users.valid.shuffle(number)) for number in range(1, times)]
    return DivisionsEvaluator((evaluator, *others))


def divisions_of(config: Config, users: Users) -> int:
    """Return by how many divisions each validation client judges: one if nobody judges, or if an order is asked for."""
    if patience_of(config, users) is None or config.split.by_time:
        return 1
    return min(MOST_DIVISIONS, math.ceil(VERDICTS / len(users.valid)))


def patience_of(config: Config, users: Users) -> int | None:
    """Return how long training waits for a better evaluation: as settings say, if there are enough to judge it by."""
    return config.patience if judges_of(users) >= JUDGES else None


def judges_of(users: Users) -> int:
    """Return how many validation clients can judge: those with an example each for support and query."""
    return int((users.valid.sizes >= 2).sum())


def early_stopping_of(config: Config, users: Users, score: Score, fallback: Any) -> EarlyStopping | None:
    """Return when training stops early; None if it runs all rounds."""
    patience = patience_of(config, users)
    return None if patience is None else EarlyStopping(patience, judgements_of(config), score, fallback)


def rounds_of(config: Config, users: Users) -> int:
    """Return how many rounds there are at most: more than settings say only if there are enough to judge them by."""
    return config.rounds if patience_of(config, users) is None else config.most_rounds


def judgements_of(config: Config) -> range:
    """Return after which rounds evaluations decide: the last of the settings, and the last of each relaxation."""
    return range(config.rounds, config.most_rounds + 1, max(1, relaxed_rounds(config.rounds, 1)))


def say_rounds(config: Config, users: Users, people: str = "users") -> str:
    """Say who does what, when training ends, and whether there are enough to measure the model on."""
    train, test = len(users.train), len(users.test)
    part = min(config.sampling.cohort_size(train), train)
    said = (
        f"{people}: {train:,} train, {len(users.valid):,} validate, {test:,} test; "
        f"{part:,} in each of {config.rounds:,} rounds."
    )
    if patience_of(config, users) is None and config.patience is not None:
        few = f"only {judges_of(users)} validation {people} have support and query, of at least {JUDGES} needed"
        said += f" The model of the last round is kept: {few}."
    elif config.patience is not None:
        if more := rounds_of(config, users) - config.rounds:
            said += f" Up to {more} more follow with a weaker and weaker prior, as long as validation results improve."
        simple = "popularity" if config.falls_back_on_popularity else "the one before the first round"
        said += f" The best model for validation users is kept, even if it is {simple}."
    return said + "".join(f" {sentence}" for sentence in say_few_tested(config, test, people))


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
    """Say that so few clients tell little about a model.

    Args:
      number: how many there are, at least 1.
      people: what they are called.
    """
    return f"Fewer than {JUDGES} {people} ({number}) are too few for reliable results."


def say_how_to_test_more(config: Config) -> str:
    """Say how to test on more clients: by other fractions, unless these leave as many already."""
    if not config.divides_clients or config.data.fractions[-1] >= TESTED[-1]:
        return "It takes data of more people to say more."
    option = " ".join(f"{share:.1g}".removeprefix("0") for share in TESTED)
    return f"Train with --data.fractions {option} to test on about a fifth of all."


def say_kept(config: Config, best: int, people: str) -> str:
    """Say which model is kept, where it is not the last.

    Args:
      config: the settings.
      best: the round after which it was the model; 0 for what there was before the first.
      people: what clients are called.
    """
    if best == 0 and config.falls_back_on_popularity:
        return f"kept popularity: the trained model does not rank better for validation {people}"
    when = f"after round {best}" if best else "from before the first round"
    return f"kept the model {when}, the best on validation {people}"


# ---- whether it went well ----


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
