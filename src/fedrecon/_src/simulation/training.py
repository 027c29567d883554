"""The training loop: run rounds, evaluate, record, checkpoint."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from fedrecon._src.algorithms.algorithm import Algorithm, ServerState
from fedrecon._src.algorithms.validation import check_training, decide_lookups
from fedrecon._src.core.clients import Clients, check_clients
from fedrecon._src.core.keys import run_keys
from fedrecon._src.core.model import finish, metric_names
from fedrecon._src.core.progress import Advance, Progress, silent, warn_caller
from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.core.split import Split
from fedrecon._src.privacy.ledger import Ledger
from fedrecon._src.privacy.spending import Spending, spending
from fedrecon._src.server.aggregator import Report
from fedrecon._src.simulation.engine import Layout, compile_rounds, everywhere
from fedrecon._src.simulation.engine import layout as choose_layout
from fedrecon._src.simulation.evaluation import (
    REMEDY,
    DivergenceWarning,
    Evaluation,
    Evaluator,
    kept_at_first,
    why_diverged,
)
from fedrecon._src.simulation.multihost import check_same, interruptible, share_folder
from fedrecon._src.simulation.sampling import Cohorts, Prepared, Sampling
from fedrecon._src.storage.run_folders import RunFolder

LOST_IN_A_ROW = 3  # rounds that learn nothing, one after another, before somebody is told
ROUNDS_AT_ONCE = 10  # rounds of one compiled call: enough that the cost of starting it does not matter
JudgeBy = Callable[[Mapping[str, float]], float]  # metrics over all examples -> less is better
OnRecord = Callable[[dict[str, Any]], None]
Evaluate = Callable[[Any, Any], Evaluation]  # (global parameters, what the training clients kept) -> evaluation


def loss_of(metrics: Mapping[str, float]) -> float:
    """Return the loss of an evaluation.

    Args:
      metrics: over all examples.
    """
    return metrics.get("loss", np.nan)


@dataclasses.dataclass(repr=False)
class Run:
    """The result of training.

    Attributes:
      params: the global parameters.
      history: one dict per round and per evaluation, as in `metrics.jsonl`.
      rounds: how many rounds were run in all.
      kept: what the clients kept, clients first; empty for methods that keep nothing.
      interrupted: whether Ctrl-C stopped it before the last round.
      ledger: the privacy spent; None if `train` got no ledger.
      stopped: why training ended before the last round by itself; None if it did not.
      best: with `patience`, the round whose parameters these are, if not the last; None if they are the last. 0 is
        before the first round: the initial parameters, or the `fallback`.
    """

    params: Any
    history: list[dict[str, Any]]
    rounds: int
    kept: Any = ()
    interrupted: bool = False
    ledger: Ledger | None = None
    stopped: str | None = None
    best: int | None = None

    def __repr__(self) -> str:
        """Describe the run in one line, without its parameters."""
        size = sum(np.size(leaf) for leaf in jax.tree.leaves(self.params))
        told = [f"{self.rounds} rounds", f"{size:,} global parameters"]
        losses = [entry["loss"] for entry in self.history if entry["kind"] == "round" and "loss" in entry]
        told += [f"last training loss {losses[-1]:.4g}"] if losses else []
        told += [f"kept from round {self.best}"] if self.best is not None else []
        told += ["interrupted"] if self.interrupted else []
        told += [f"stopped: {self.stopped}"] if self.stopped else []
        return f"Run({', '.join(told)})"


def train(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    clients_per_round: int | None = None,
    sampling: Sampling | None = None,
    valid: Clients | Evaluate | None = None,
    evaluate_every: int = 0,
    evaluate_split: Split | None = None,
    patience: int | None = None,
    judge_after: Collection[int] = (),
    judge_by: JudgeBy | None = None,
    fallback: Any = None,
    seed: int = 0,
    ledger: Ledger | None = None,
    folder: RunFolder | None = None,
    checkpoint_every: int = 100,
    layout: Layout | None = None,
    progress: Progress = silent,
    on_record: OnRecord | None = None,
) -> Run:
    """Train global parameters.

    Args:
      algorithm: what to run.
      clients: the population.
      rounds: how many rounds in all, those of a resumed run included.
      clients_per_round: short for `sampling=Sampling(clients_per_round=...)`.
      sampling: how the clients of a round are chosen.
      valid: clients to evaluate on, an evaluator of them (with StandardEval, of other examples of the training
        clients), or any function of the global parameters and of what the training clients kept.
      evaluate_every: evaluate every this many rounds, and after the last; 0 for only after the last.
      evaluate_split: support and query in evaluation; half and half by default.
      patience: evaluate before the first round, too, and keep the parameters of the best evaluation: fewest diverged
        clients, then what `judge_by` says. Stop when this many evaluations in a row were no better than the best before
        them. None runs all rounds and returns the last parameters. For methods whose clients keep nothing between
        rounds.
      judge_after: rounds after which to evaluate for `patience`. Evaluations after others then decide nothing, but for
        the one before the first round: while the learning rate is high, they are mostly chance. Empty for all.
      judge_by: for `patience`: a function of the metrics over all examples, by which evaluations are compared; less is
        better. None for the loss.
      fallback: for `patience`: global parameters of something simple, which the evaluation before the first round
        measures instead of the initial ones. They are kept if no others are better.
      seed: for everything random.
      ledger: the privacy already spent on these clients (`fedrecon._src.privacy.ledger.Ledger`), for an aggregator that
        adds noise. Evaluations then report `epsilon`, and training ends before the ledger's budget is exceeded.
      folder: where to write metrics and checkpoints; training continues from its newest checkpoint if it has one.
      checkpoint_every: how many rounds are lost, at most, when the process is killed.
      layout: on which devices and in what blocks clients run.
      progress: a progress display.
      on_record: called with every record of the history.

    Returns:
      A `Run`. Ctrl-C ends training early and keeps what was learned until then. A `DivergenceWarning` says, once, if
      nothing is learned for several rounds in a row, or if more than half of the clients of an evaluation diverge.
    """
    check_clients(clients)
    if sampling is not None and clients_per_round is not None:
        raise ValueError("give `clients_per_round` or `sampling`, not both")
    if sampling is None:
        sampling = Sampling() if clients_per_round is None else Sampling(clients_per_round)
    if rounds < 0 or checkpoint_every < 1 or evaluate_every < 0:
        raise ValueError(
            "`rounds` and `evaluate_every` must be at least 0 and `checkpoint_every` at least 1, not "
            f"{rounds}, {evaluate_every} and {checkpoint_every}"
        )
    if len(clients) == 0:
        raise ValueError("there are no clients to train on")
    folder = None if folder is None else share_folder(folder)
    every = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every if folder else 0}
    check_same(
        {"clients": len(clients), "examples": clients.num_examples, "rounds": rounds, "seed": seed} | every,
    )
    algorithm = decide_lookups(algorithm, clients)
    check_training(algorithm, clients)
    spent = None if ledger is None else spending(algorithm, len(clients), sampling, rounds, ledger)
    planned, rounds = rounds, rounds if spent is None else spent.allowed(rounds)
    loop = _Loop(algorithm, clients, sampling, seed, layout or choose_layout(model=algorithm.model))
    if isinstance(valid, Clients):
        valid = Evaluator(algorithm, valid, split=evaluate_split, seed=seed, layout=loop.layout)
    if patience is not None:
        loop.keep_best(_Judging(patience, frozenset(judge_after), judge_by or loss_of, fallback), valid is not None)
    log = _Log(folder, on_record)
    done = loop.restore(folder, log.history) if folder else 0
    evaluations = _Evaluations(valid, evaluate_every, rounds, spent, log)
    held = folder.held() if folder else contextlib.nullcontext()
    with held, progress("training", rounds) as advance, interruptible() as asked_to_stop:
        advance(done, "compiling" if done < rounds else "")
        interrupted = _run_rounds(loop, rounds, evaluations, checkpoint_every, log, advance, asked_to_stop)
    done, best = loop.now.round, loop.better_than_last()
    params = jax.tree.map(np.asarray, loop.params() if best is None else best.params)
    stopped = spent.why_stopped(done) if spent and not interrupted and done < planned else None
    if best is not None and not interrupted and done < rounds:
        which = ", of those that decide," if judge_after else ""
        stopped = f"{patience} evaluations in a row{which} were no better than {_called(best.round)}"
    after = None if spent is None else spent.after(done)
    kept_from = None if best is None else best.round
    return Run(params, log.history, done, loop.now.kept, interrupted, after, stopped, kept_from)


def _called(number: int) -> str:
    return f"that of round {number}" if number else "the one before the first round"


def _run_rounds(
    loop: _Loop,
    rounds: int,
    evaluations: _Evaluations,
    checkpoint_every: int,
    log: _Log,
    advance: Advance,
    asked_to_stop: Callable[[], bool],
) -> bool:
    """Run rounds until the last one, with evaluations and checkpoints; return whether Ctrl-C stopped them."""
    folder = log.folder

    def record_pending() -> None:
        while loop.pending:
            log.record(loop.pending.popleft())
            advance(1, f"loss {log.history[-1]['loss']:.4f}")

    try:
        evaluations.run_if_due(loop)  # an interruption may have come between a round and its evaluation
        while loop.now.round < rounds and not loop.patience_is_over():
            if asked_to_stop():
                raise KeyboardInterrupt
            stop = _next_stop(loop.now.round, rounds, evaluations.every, checkpoint_every if folder else 0)
            stop = min([stop, *(number for number in loop.judge_after if number > loop.now.round)])
            loop.advance(stop, record_pending)
            if loop.now.round < stop:
                continue  # records of these rounds are written while the devices run the next ones
            record_pending()
            evaluations.run_if_due(loop)
            if folder and (loop.patience_is_over() or _due(loop.now.round, rounds, checkpoint_every)):
                folder.checkpoint(loop.now.round, loop.everything())
    except KeyboardInterrupt:
        record_pending()
        if folder:
            folder.checkpoint(loop.now.round, loop.everything())
        return True
    return False


@dataclasses.dataclass
class _Log:
    """The history of a run, which also goes to its folder and to `on_record`."""

    folder: RunFolder | None
    on_record: OnRecord | None
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    watch: _Watch = dataclasses.field(default_factory=lambda: _Watch())

    def record(self, entry: dict[str, Any]) -> None:
        self.history.append(entry)
        if self.folder:
            self.folder.record(entry)
        if self.on_record:
            self.on_record(entry)
        self.watch.look(entry)


class _Watch:
    """Looks at the records of a training, and warns once if it goes nowhere."""

    def __init__(self) -> None:
        self._lost: list[dict[str, Any]] = []  # the last rounds, as long as they learned nothing
        self._warned = False

    def look(self, entry: dict[str, Any]) -> None:
        problem = self._in_round(entry) if entry["kind"] == "round" else _in_evaluation(entry)
        if problem and not self._warned:
            self._warned = True
            warn_caller(problem, DivergenceWarning)

    def _in_round(self, entry: dict[str, Any]) -> str | None:
        excluded = entry.get("non_finite", 0) + entry.get("zeroed", 0)
        lost = entry["skipped"] or (excluded and not entry.get("clients", 1))
        self._lost = [*self._lost, entry] if lost else []
        return _why_lost(self._lost) if len(self._lost) == LOST_IN_A_ROW else None


def _in_evaluation(entry: dict[str, Any]) -> str | None:
    problem = why_diverged(entry["clients"], entry["diverged"])
    return problem and f"the evaluation after round {entry['round']}: {problem}"


def _why_lost(rounds: list[dict[str, Any]]) -> str:
    """Say why rounds learned nothing, and what to try."""
    first, last = rounds[0]["round"], rounds[-1]["round"]
    learned = f"rounds {first} to {last} learned nothing, and the global parameters stay as they were"
    sums = {name: sum(entry.get(name, 0) for entry in rounds) for name in ("non_finite", "zeroed", "clients")}
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


class _Evaluations:
    """The evaluations during training: when they are due, and what they record."""

    def __init__(self, evaluate: Evaluate | None, every: int, rounds: int, spent: Spending | None, log: _Log):
        self.every = 0 if evaluate is None else every
        self._evaluate, self._rounds, self._spent, self._log = evaluate, rounds, spent, log
        evaluated = (entry["round"] for entry in log.history if entry["kind"] == "evaluation")
        self._last = max(evaluated, default=-1)

    def run_if_due(self, loop: _Loop) -> None:
        now = loop.now.round
        due = loop.judges if now == 0 else now in loop.judge_after or _due(now, self._rounds, self.every)
        if self._evaluate is None or now == self._last or not due:
            return
        reconstructs = isinstance(self._evaluate, Evaluator) and self._evaluate.protocol == "recon"
        kept = () if reconstructs else loop.now.kept
        cost = {} if self._spent is None else {"epsilon": self._spent.after(now).epsilon}
        # The log warns of clients that diverged, once.
        measure = self._evaluate.measure if isinstance(self._evaluate, Evaluator) else self._evaluate
        what = {"fallback": True} if loop.falls_back() else {}
        entry = {"kind": "evaluation", "round": now, **what, **measure(loop.evaluated(), kept).summary(), **cost}
        loop.judge(entry)
        self._log.record(entry)
        self._last = now


def _like(params: Any, fallback: Any) -> Any:
    """Return what to fall back on in the types and containers of global parameters."""
    (expected, structure), (given, _) = flatten(params), flatten(fallback)
    shapes = [{path: np.shape(leaf) for path, leaf in leaves.items()} for leaves in (given, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"`fallback` has {shapes[0]}; the algorithm's global parameters are {shapes[1]}")
    return unflatten(structure, {path: np.asarray(given[path], leaf.dtype) for path, leaf in expected.items()})


class _Judging(NamedTuple):
    """How evaluations decide what is kept, as `train` documents it."""

    patience: int
    after: frozenset[int]
    by: JudgeBy
    fallback: Any

    def rank(self, evaluation: dict[str, Any]) -> tuple[float, float]:
        """Return what an evaluation is judged by, less is better: diverged clients, then what judges."""
        value = self.by({name: np.nan if one is None else one for name, one in evaluation["micro"].items()})
        return evaluation["diverged"], value if np.isfinite(value) else np.inf

    def counts(self, record: dict[str, Any]) -> bool:
        """Say whether a record is of an evaluation that decides."""
        return record["kind"] == "evaluation" and (not self.after or record["round"] in self.after | {0})


class _Best(NamedTuple):
    """The best evaluation so far: its round, its rank, and the global parameters."""

    round: int
    rank: tuple[float, float]
    params: Any


def _due(done: int, rounds: int, every: int) -> bool:
    return done == rounds or (every > 0 and done % every == 0)


def _next_stop(now: int, rounds: int, *every: int) -> int:
    """Return the next round after which there is something to evaluate or to save, or the last round."""
    return min([rounds, *((now // n + 1) * n for n in every if n)])


class _Now(NamedTuple):
    """The state of training, replaced as a whole after every call, so that an interruption leaves it consistent."""

    round: int
    server: ServerState
    kept: Any


class _Loop:
    """The state of training between rounds, and how to run more of them."""

    def __init__(self, algorithm: Algorithm, clients: Clients, sampling: Sampling, seed: int, layout: Layout):
        self.layout, self._algorithm = layout, algorithm
        keys = run_keys(seed)
        self._key = everywhere(keys.clients, layout)
        kept = kept_at_first(algorithm, clients, seed)
        self.now = _Now(0, everywhere(algorithm.init(keys.init), layout), kept)
        self.pending: collections.deque[dict[str, Any]] = collections.deque()
        at_once = 1 if jax.tree.leaves(kept) else ROUNDS_AT_ONCE
        self._cohorts = Cohorts(algorithm, clients, sampling, layout, keys, at_once)
        self._ahead: Future[Prepared] | None = None
        self._judging: _Judging | None = None
        self.best: _Best | None = None
        self._worse = 0  # evaluations in a row, up to the last, that are a reason to stop
        self._judged = 0
        self._no_sums = np.zeros((len(metric_names(algorithm.model)), 2))  # for aggregators that report no metrics
        self._run = compile_rounds(algorithm, layout)

    def params(self) -> Any:
        return self._algorithm.params(self.now.server)

    @property
    def judges(self) -> bool:
        """Whether evaluations decide what is kept."""
        return self._judging is not None

    @property
    def judge_after(self) -> frozenset[int]:
        """The rounds after which evaluations decide; none if all do."""
        return frozenset() if self._judging is None else self._judging.after

    def evaluated(self) -> Any:
        """Return the global parameters that an evaluation is of: before the first round, what to fall back on."""
        return self._judging.fallback if self._judging and self.falls_back() else self.params()

    def falls_back(self) -> bool:
        """Say whether no round was run, and there is something to fall back on."""
        return self.now.round == 0 and self._judging is not None and self._judging.fallback is not None

    def keep_best(self, judging: _Judging, evaluates: bool) -> None:
        """Judge evaluations from now on."""
        if judging.patience < 1 or not evaluates:
            raise ValueError(
                f"`patience` is {judging.patience} with{'' if evaluates else 'out'} `valid`: it must be 1 or more, and "
                "needs clients to evaluate on"
            )
        if jax.tree.leaves(self.now.kept):
            raise ValueError("`patience` keeps only global parameters, but the clients of this method keep state, too")
        fallback = None if judging.fallback is None else _like(self.params(), judging.fallback)
        self._judging = judging._replace(fallback=fallback)

    def judge(self, evaluation: dict[str, Any]) -> None:
        """Keep the parameters if this evaluation is better than all before it."""
        if self._judging is None or not self._judging.counts(evaluation):
            return
        self._judged, rank = evaluation["round"], self._judging.rank(evaluation)
        if self.best is None or rank < self.best.rank:
            # A copy, since the next call may write to these buffers.
            self.best = _Best(evaluation["round"], rank, jax.tree.map(np.array, self.evaluated()))
            self._worse = 0
        else:
            self._worse += 1

    def better_than_last(self) -> _Best | None:
        """Return the best evaluation if its parameters are not those of the last one."""
        last = self.best is not None and self.best.round == self._judged
        return None if last and not self.falls_back() else self.best

    def patience_is_over(self) -> bool:
        """Say whether enough evaluations in a row were no better than the best one."""
        return self._judging is not None and self._worse >= self._judging.patience

    def everything(self) -> Any:
        state = {"server": jax.tree.map(np.asarray, self.now.server._asdict()), "kept": self.now.kept}
        if self._judging is None:
            return state
        best = _Best(-1, (np.inf, np.inf), self.params()) if self.best is None else self.best
        numbers = np.array([best.round, *best.rank], np.float64)
        return state | {"best": {"numbers": numbers, "params": jax.tree.map(np.asarray, best.params)}}

    def restore(self, folder: RunFolder, history: list[dict[str, Any]]) -> int:
        found = folder.restore(self.everything())
        if found is None:
            return 0
        done, saved, records = found
        self.now = _Now(done, everywhere(ServerState(**saved["server"]), self.layout), saved["kept"])
        history.extend(records)
        if self._judging and saved["best"]["numbers"][0] >= 0:
            best, diverged, value = map(float, saved["best"]["numbers"])
            self.best = _Best(int(best), (diverged, value), saved["best"]["params"])
            judged = [record["round"] for record in records if self._judging.counts(record)]
            self._judged, self._worse = max(judged), sum(number > self.best.round for number in judged)
        return done

    def advance(self, stop: int, meanwhile: Callable[[], None]) -> None:
        """Run some rounds in one call, at most up to `stop`, and pack the next cohorts while the devices are busy.

        Args:
          stop: the last round to run.
          meanwhile: what else to do while the devices are busy.
        """
        ready = None if self._ahead is None else self._ahead.result()
        if ready is None or ready.first != self.now.round or ready.first + ready.number > stop:
            ready = self._cohorts.prepare(self.now.round, stop - self.now.round)
        who = ready.orders[0]
        mine = np.maximum(self.layout.local(who), 0)
        theirs = jax.tree.map(lambda x: x[mine], self.now.kept)
        server, theirs, reports = self._run(
            self.now.server, theirs, ready.cohorts, self._key, ready.first, ready.number
        )
        done = ready.first + ready.number
        self._ahead = self._cohorts.prepare_ahead(done, stop - done) if done < stop else None
        meanwhile()
        reports = jax.tree.map(np.asarray, reports)
        self.now = _Now(done, server, _put(self.now.kept, who, theirs))
        self.pending.extend(self._entry(ready, reports, r) for r in range(ready.number))

    def _entry(self, ready: Prepared, reports: Report, r: int) -> dict[str, Any]:
        report = {name: value[r] for name, value in reports.items()}
        return {
            "kind": "round",
            "round": ready.first + r + 1,
            **finish(self._algorithm.model, report.pop("sums", self._no_sums)),
            "weight": float(report.pop("weight", np.nan)),
            "skipped": bool(report.pop("skipped")),
            **{name: _number(value) for name, value in report.items() if value.ndim == 0},
            **ready.samples[r].counts,
        }


def _number(value: Any) -> float | int:
    """Return a whole number as an integer, any other as a float."""
    number = float(value)
    return int(number) if number.is_integer() else number


def _put(kept: Any, client: np.ndarray, theirs: Any) -> Any:
    """Return what clients keep with the entries of some clients replaced."""

    def put(store: np.ndarray, new: Array) -> np.ndarray:
        store = store.copy()
        store[client[client >= 0]] = np.asarray(new)[client >= 0]
        return store

    return jax.tree.map(put, kept, theirs)
