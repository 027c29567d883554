"""The training loop: run rounds, evaluate, report, checkpoint."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from fedrecon.aggregate.aggregator import Report
from fedrecon.algorithm import Algorithm, ServerState
from fedrecon.clients import Clients
from fedrecon.cluster.folders import first_writes
from fedrecon.cluster.wire import check_same, interruptible
from fedrecon.disk.runs import RunFolder
from fedrecon.engine import Layout, compile_rounds, everywhere, layout
from fedrecon.evaluation import Evaluation, Evaluator, kept_at_first
from fedrecon.fitting import check_fit, decide_lookups
from fedrecon.keys import run_keys
from fedrecon.model import finish, metric_names
from fedrecon.privacy.ledger import Ledger
from fedrecon.privacy.spending import spending
from fedrecon.progress import Progress, silent
from fedrecon.sampling import Cohorts, Prepared, Sampling
from fedrecon.split import Split

ROUNDS_AT_ONCE = 10  # rounds of one compiled call: enough that starting it does not show
OnRecord = Callable[[dict[str, Any]], None]
Evaluate = Callable[[Any, Any], Evaluation]  # of the global parameters and of what the training clients kept


@dataclasses.dataclass
class Run:
    """What training leaves in memory.

    Attributes:
      params: the global parameters.
      history: one dict a round or evaluation, as in `metrics.jsonl`.
      rounds: how many rounds were run in all.
      kept: what the owners kept, clients first; empty for stateless clients.
      interrupted: whether it was stopped before the last round.
      ledger: what was spent of privacy; None where nothing is promised.
      stopped: why training ended before the last round although nobody interrupted it; None if it did not.
    """

    params: Any
    history: list[dict[str, Any]]
    rounds: int
    kept: Any = ()
    interrupted: bool = False
    ledger: Ledger | None = None
    stopped: str | None = None


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
    seed: int = 0,
    ledger: Ledger | None = None,
    folder: RunFolder | None = None,
    checkpoint_every: int = 100,
    place: Layout | None = None,
    progress: Progress = silent,
    on_record: OnRecord | None = None,
) -> Run:
    """Train global parameters.

    Args:
      algorithm: what to run.
      clients: the population.
      rounds: how many rounds in all, those of a resumed run included.
      clients_per_round: short for `sampling=Sampling(clients_per_round=...)`.
      sampling: who takes part in a round.
      valid: clients to evaluate on, an evaluator of them (with StandardEval, of other examples of the training
        clients), or any function of the global parameters and of what the training clients kept.
      evaluate_every: evaluate after every so many rounds, and after the last; 0 for the last alone.
      evaluate_split: support and query in evaluation; half and half by default.
      seed: of everything random.
      ledger: of what was spent on these clients' privacy before (`fedrecon.privacy.ledger.Ledger`), for an aggregator
        that adds noise. Evaluations then have `epsilon`, and training ends before the ledger's budget is exceeded.
      folder: where to write metrics and checkpoints; training continues from its newest checkpoint if it has one.
      checkpoint_every: how many rounds at most are lost when the process is killed.
      place: on which devices and in what blocks clients run.
      progress: a progress display.
      on_record: called with every record of the history.

    Returns:
      A `Run`. Ctrl-C ends training early, with what was learned until then.
    """
    if sampling is not None and clients_per_round is not None:
        raise ValueError("give `clients_per_round` or `sampling`, not both")
    if sampling is None:
        sampling = Sampling() if clients_per_round is None else Sampling(clients_per_round)
    if rounds < 0 or checkpoint_every < 1 or evaluate_every < 0:
        raise ValueError("`rounds` and `evaluate_every` must be at least 0 and `checkpoint_every` at least 1")
    if len(clients) == 0:
        raise ValueError("there are no clients to train on")
    folder = None if folder is None else first_writes(folder)
    every = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every if folder else 0}
    check_same(
        {"clients": len(clients), "examples": clients.num_examples, "rounds": rounds, "seed": seed} | every,
    )
    algorithm = decide_lookups(algorithm, clients)
    check_fit(algorithm, clients)
    spent = None if ledger is None else spending(algorithm, len(clients), sampling, rounds, ledger)
    planned, rounds = rounds, rounds if spent is None else spent.allowed(rounds)
    loop = _Loop(algorithm, clients, sampling, seed, place or layout(model=algorithm.model))
    evaluator = (
        Evaluator(algorithm, valid, split=evaluate_split, seed=seed, place=loop.place)
        if isinstance(valid, Clients)
        else valid
    )
    history: list[dict[str, Any]] = []
    done = loop.restore(folder, history) if folder else 0

    def record(entry: dict[str, Any]) -> None:
        history.append(entry)
        if folder:
            folder.record(entry)
        if on_record:
            on_record(entry)

    def record_pending() -> None:
        while loop.pending:
            record(loop.pending.popleft())
            advance(1, f"loss {history[-1]['loss']:.4f}")

    evaluated = max((entry["round"] for entry in history if entry["kind"] == "evaluation"), default=0)

    def evaluate_if_due() -> None:
        nonlocal evaluated
        now = loop.now.round
        if evaluator is None or now == evaluated or not _due(now, rounds, evaluate_every):
            return
        rebuilt = isinstance(evaluator, Evaluator) and evaluator.protocol == "recon"
        kept = () if rebuilt else loop.now.kept
        cost = {} if spent is None else {"epsilon": spent.after(now).epsilon}
        record({"kind": "evaluation", "round": now, **evaluator(loop.params(), kept).summary(), **cost})
        evaluated = now

    stops = (evaluate_every if evaluator else 0, checkpoint_every if folder else 0)
    interrupted = False
    held = folder.held() if folder else contextlib.nullcontext()
    with held, progress("training", rounds) as advance, interruptible() as asked_to_stop:
        advance(done, "compiling" if done < rounds else "")
        try:
            evaluate_if_due()  # an interruption may have come between a round and its evaluation
            while loop.now.round < rounds:
                if asked_to_stop():
                    raise KeyboardInterrupt
                loop.advance(_next_stop(loop.now.round, rounds, *stops))
                record_pending()
                evaluate_if_due()
                if folder and _due(loop.now.round, rounds, checkpoint_every):
                    folder.checkpoint(loop.now.round, loop.everything())
        except KeyboardInterrupt:
            interrupted = True
            record_pending()
            if folder:
                folder.checkpoint(loop.now.round, loop.everything())
    params = jax.tree.map(np.asarray, loop.params())
    done = loop.now.round
    stopped = spent.why_stopped(done) if spent and not interrupted and done < planned else None
    after = None if spent is None else spent.after(done)
    return Run(params, history, done, loop.now.kept, interrupted, after, stopped)


def _due(done: int, rounds: int, every: int) -> bool:
    return done == rounds or (every > 0 and done % every == 0)


def _next_stop(now: int, rounds: int, *every: int) -> int:
    """Return the next round after which the loop has something else to do."""
    return min([rounds, *((now // n + 1) * n for n in every if n)])


class _Now(NamedTuple):
    """Where training is: replaced as a whole after every call, so that an interruption finds it consistent."""

    round: int
    server: ServerState
    kept: Any


class _Loop:
    """Training between rounds, and how to run some more of them."""

    def __init__(self, algorithm: Algorithm, clients: Clients, sampling: Sampling, seed: int, place: Layout):
        self.place, self._algorithm = place, algorithm
        keys = run_keys(seed)
        self._key = everywhere(keys.clients, place)
        kept = kept_at_first(algorithm, clients, seed)
        self.now = _Now(0, everywhere(algorithm.init(keys.init), place), kept)
        self.pending: collections.deque[dict[str, Any]] = collections.deque()
        at_once = 1 if jax.tree.leaves(kept) else ROUNDS_AT_ONCE
        self._cohorts = Cohorts(algorithm, clients, sampling, place, keys, at_once)
        self._ahead: Prepared | None = None
        self._no_sums = np.zeros((len(metric_names(algorithm.model)), 2))  # where metrics stay with the clients
        self._run = compile_rounds(algorithm, place)

    def params(self) -> Any:
        return self._algorithm.params(self.now.server)

    def everything(self) -> Any:
        return {"server": jax.tree.map(np.asarray, self.now.server._asdict()), "kept": self.now.kept}

    def restore(self, folder: RunFolder, history: list[dict[str, Any]]) -> int:
        found = folder.restore(self.everything())
        if found is None:
            return 0
        done, saved, records = found
        self.now = _Now(done, everywhere(ServerState(**saved["server"]), self.place), saved["kept"])
        history.extend(records)
        return done

    def advance(self, stop: int) -> None:
        """Run one call of rounds, `stop` at most, packing the next call's cohorts while the devices run this one's."""
        ready = self._ahead
        if ready is None or ready.first != self.now.round or ready.first + ready.number > stop:
            ready = self._cohorts.prepare(self.now.round, stop - self.now.round)
        who = ready.orders[0]
        mine = np.maximum(self.place.mine(who), 0)
        theirs = jax.tree.map(lambda x: x[mine], self.now.kept)
        server, theirs, reports = self._run(
            self.now.server, theirs, ready.cohorts, self._key, ready.first, ready.number
        )
        done = ready.first + ready.number
        self._ahead = self._cohorts.prepare(done, stop - done) if done < stop else None
        found = jax.tree.map(np.asarray, reports)
        self.now = _Now(done, server, _put(self.now.kept, who, theirs))
        self.pending.extend(self._entry(ready, found, r) for r in range(ready.number))

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
    """Return a count as an integer, anything else as it is."""
    number = float(value)
    return int(number) if number.is_integer() else number


def _put(kept: Any, client: np.ndarray, theirs: Any) -> Any:
    """Return what owners keep with the entries of some clients replaced."""

    def put(store: np.ndarray, new: Array) -> np.ndarray:
        store = store.copy()
        store[client[client >= 0]] = np.asarray(new)[client >= 0]
        return store

    return jax.tree.map(put, kept, theirs)
