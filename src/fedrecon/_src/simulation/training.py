"""The training loop: run rounds, evaluate, record, checkpoint, stop early."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm, ServerState
from fedrecon._src.algorithms.rounds import init_client_state
from fedrecon._src.algorithms.validation import check_training, decide_lookups
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.client_sampling import Sampling
from fedrecon._src.core.clients import Clients, check_clients
from fedrecon._src.core.display import Progress, bars
from fedrecon._src.core.keys import run_keys
from fedrecon._src.core.model import Model, finish, metric_names
from fedrecon._src.privacy.ledger import Ledger, Spending, spending
from fedrecon._src.server.aggregator import Report
from fedrecon._src.simulation.divergence import DivergenceMonitor
from fedrecon._src.simulation.engine import Layout, compile_rounds, put_on_devices
from fedrecon._src.simulation.engine import layout as choose_layout
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator
from fedrecon._src.simulation.multihost import check_same, interruptible, share_folder
from fedrecon._src.simulation.sampling import Cohorts, PackedRounds
from fedrecon._src.storage.run_folder import KEPT, RunFolder

ROUNDS_AT_ONCE = 10  # rounds of one compiled call: enough that the cost of starting it does not matter
Score = Callable[[Mapping[str, float]], float]  # metrics over all examples -> lower is better
Evaluate = Callable[[Any, Any], Evaluation]  # (global parameters, state of the training clients) -> evaluation
Record = dict[str, Any]


def loss_of(metrics: Mapping[str, float]) -> float:
    """Return the loss of an evaluation.

    Args:
      metrics: over all examples.
    """
    return metrics.get("loss", np.nan)


class Callback:
    """Hooks into training; override those that you need, and pass an instance to `train`.

    Example:
      >>> import fedrecon as fr
      >>> class PrintLoss(fr.Callback):
      ...     def after_round(self, record):
      ...         print(record["round"], record["loss"])
    """

    def after_round(self, record: Record) -> None:
        """Handle the record of a round, as in `metrics.jsonl`.

        Args:
          record: its number, metrics, and how many clients took part.
        """

    def after_evaluation(self, record: Record) -> None:
        """Handle the record of an evaluation, as in `metrics.jsonl`.

        Args:
          record: its round and what `Evaluation.summary` returns.
        """

    def at_end(self, run: Run) -> None:
        """Handle the result of training, also if Ctrl-C ended it.

        Args:
          run: the result.
        """

    def while_training(self, done: int, rounds: int) -> AbstractContextManager[None]:
        """Return a context that is open while rounds run, such as a display.

        Args:
          done: rounds that a resumed run has behind it.
          rounds: all of them.
        """
        return contextlib.nullcontext()


class ProgressBar(Callback):
    """Shows the rounds and the loss on standard error, if that is a terminal.

    Example:
      >>> import fedrecon as fr
      >>> callbacks = [fr.ProgressBar()]  # of `fr.train`
    """

    def __init__(self, progress: Progress = bars, title: str = "training"):
        """Use a display.

        Args:
          progress: opens it.
          title: what it says.
        """
        self._progress, self._title = progress, title

    @contextlib.contextmanager
    def while_training(self, done: int, rounds: int) -> Iterator[None]:
        """Open the display."""
        with self._progress(self._title, rounds) as self._advance:
            self._advance(done, "compiling" if done < rounds else "")
            yield

    def after_round(self, record: Record) -> None:
        """Advance by a round."""
        self._advance(1, f"loss {record['loss']:.4f}")


class RecordCallback(Callback):
    """Calls a function with every record."""

    def __init__(self, function: Callable[[Record], None]):
        """Use a function of a record."""
        self._function = function

    def after_round(self, record: Record) -> None:
        """Call the function."""
        self._function(record)

    after_evaluation = after_round


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Keep the best global parameters, and stop when evaluations get no better.

    The initial parameters are evaluated too. The best evaluation has the fewest diverged clients, then the lowest
    score. For methods whose clients keep no state between rounds.

    Attributes:
      patience: stop when this many evaluations in a row were no better than the best before them.
      rounds: evaluate after these rounds, and let only these evaluations and the one before the first round count.
        While the learning rate is high, evaluations are mostly chance. Empty for all.
      score: a function of the metrics over all examples; lower is better.

    Example:
      >>> import fedrecon as fr
      >>> fr.EarlyStopping(patience=3, score=lambda metrics: -metrics["accuracy"]).patience
      3
    """

    patience: int = 1
    rounds: Collection[int] = ()
    score: Score = loss_of

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("patience", self.patience, least=1)

    def counts(self, record: Record) -> bool:
        """Return whether a record is of an evaluation that counts.

        Args:
          record: of a round or an evaluation.
        """
        return record["kind"] == "evaluation" and (not self.rounds or record["round"] in {0, *self.rounds})

    def rank(self, record: Record) -> tuple[float, float]:
        """Return what evaluations are compared by, lower is better: diverged clients, then the score.

        Args:
          record: of an evaluation.
        """
        score = self.score({name: np.nan if value is None else value for name, value in record["micro"].items()})
        return record["diverged"], score if np.isfinite(score) else np.inf


@dataclasses.dataclass(frozen=True)
class Validation:
    """Evaluations during training, and what follows from them.

    Attributes:
      data: what `train` takes as `valid`: clients, an `Evaluator` or a function.
      every: evaluate every this many rounds, and after the last; 0 for only after the last.
      early_stopping: when to stop early, and which parameters to keep. None runs all rounds and returns the last
        parameters.

    Example:
      >>> import fedrecon as fr
      >>> clients = fr.Clients.from_columns({"item": [0, 1], "rating": [5.0, 3.0]}, client=[0, 0])
      >>> fr.Validation(clients, every=10, early_stopping=fr.EarlyStopping(patience=3)).every
      10
    """

    data: Clients | Evaluate
    every: int = 0
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("every", self.every)
        if not callable(self.data):
            check_clients(self.data, "evaluate on")


@dataclasses.dataclass(repr=False)
class Run:
    """The result of training.

    Attributes:
      params: the global parameters.
      history: one dict per round and per evaluation, as in `metrics.jsonl`.
      rounds: how many rounds were run in all.
      client_state: what the clients keep between rounds, clients first; empty for methods that keep nothing.
      interrupted: whether Ctrl-C stopped it before the last round.
      ledger: the privacy spent; None if `train` got no ledger.
      stopped: why training ended before the last round by itself; None if it did not.
      best: with `early_stopping`, the round whose parameters these are, if not the last; None if they are the last. 0
        is before the first round: the initial parameters.

    Example:
      >>> import fedrecon as fr
      >>> fr.Run(params={}, history=[{"kind": "round", "round": 1, "loss": 0.25}], rounds=1)
      Run(1 rounds, 0 global parameters, last training loss 0.25)
    """

    params: Any
    history: list[Record]
    rounds: int
    client_state: Any = ()
    interrupted: bool = False
    ledger: Ledger | None = None
    stopped: str | None = None
    best: int | None = None

    def __repr__(self) -> str:
        """Describe the run in one line, without its parameters."""
        size = sum(np.size(leaf) for leaf in jax.tree.leaves(self.params))
        losses = [entry["loss"] for entry in self.history if entry["kind"] == "round" and "loss" in entry]
        parts = [f"{self.rounds} rounds", f"{size:,} global parameters"]
        parts += [f"last training loss {losses[-1]:.4g}"] if losses else []
        parts += [f"best round {self.best}"] if self.best is not None else []
        parts += ["interrupted"] if self.interrupted else []
        parts += [f"stopped: {self.stopped}"] if self.stopped else []
        return f"Run({', '.join(parts)})"


def train(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    clients_per_round: int | Sampling | None = None,
    valid: Clients | Evaluate | Validation | None = None,
    seed: int = 0,
    ledger: Ledger | None = None,
    folder: RunFolder | str | Path | None = None,
    layout: Layout | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train global parameters.

    Args:
      algorithm: what to run.
      clients: the population.
      rounds: how many rounds in all, those of a resumed run included.
      clients_per_round: how many clients take part in a round, or a `Sampling` that says how they are chosen; 100 by
        default.
      valid: clients to evaluate on after the last round, half of whose examples are support; an `Evaluator`, for
        another split or protocol; any function of the global parameters and the training clients' state that returns
        an `Evaluation`; or a `Validation`, to evaluate during training, too, and to stop early.
      seed: for everything random.
      ledger: the privacy already spent on these clients (`fedrecon.privacy.Ledger`), for an aggregator that adds
        noise. Evaluations then report `epsilon`, and training ends before the ledger's budget is exceeded.
      folder: where to write metrics and checkpoints; training continues from its newest checkpoint if it has one. A
        `RunFolder` says how often there is a checkpoint.
      layout: on which JAX devices and in what blocks clients run.
      callbacks: called after every round and evaluation, and at the end; `ProgressBar()` shows how far it is.

    Returns:
      A `Run`. Ctrl-C ends training early and keeps what was learned until then. A `DivergenceWarning` says, once, if
      nothing is learned for several rounds in a row, or if more than half of the clients of an evaluation diverge.

    Example:
      >>> import optax
      >>> import fedrecon as fr
      >>> ratings = fr.Clients.from_columns({"item": [0, 1, 0, 1], "rating": [5.0, 3.0, 4.0, 2.0]}, client=[0, 0, 1, 1])
      >>> steps = fr.gradient_descent(optax.sgd(0.1), batch_size=2, steps=2)
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(2, 3), reconstruct=steps, update=steps, server=optax.sgd(1.0)
      ... )
      >>> fr.train(algorithm, ratings, rounds=2, clients_per_round=2).rounds
      2
    """
    check_clients(clients, "train on")
    check_number("rounds", rounds)
    sampling = _as_sampling(clients_per_round)
    validation = valid if isinstance(valid, Validation) or valid is None else Validation(valid)
    folder = None if folder is None else share_folder(folder if isinstance(folder, RunFolder) else RunFolder(folder))
    facts = {"clients": len(clients), "examples": clients.num_examples, "rounds": rounds, "seed": seed}
    every = {"evaluate_every": validation and validation.every, "checkpoint_every": folder and folder.checkpoint_every}
    check_same(facts | every)
    algorithm = decide_lookups(algorithm, clients)
    check_training(algorithm, clients)
    spent = None if ledger is None else spending(algorithm, len(clients), sampling, rounds, ledger)
    affordable = rounds if spent is None else spent.allowed(rounds)
    loop = _Loop(algorithm, clients, sampling, seed, layout or choose_layout(model=algorithm.model))
    if validation is not None and isinstance(validation.data, Clients):
        evaluator = Evaluator(algorithm, validation.data, seed=seed, layout=loop.layout)
        validation = dataclasses.replace(validation, data=evaluator)
    recorders = [RecordCallback(folder.record)] if folder else []
    monitored = [*recorders, *callbacks, RecordCallback(DivergenceMonitor())]
    training = _Training(loop, affordable, validation, spent, folder, monitored)
    done = training.restore()
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(folder.lock())
        for callback in callbacks:
            stack.enter_context(callback.while_training(done, affordable))
        interrupted = training.run(stack.enter_context(interruptible()))
    run = training.result(interrupted)
    if spent and not interrupted and run.stopped is None and run.rounds < rounds:
        run.stopped = spent.why_stopped(run.rounds)
    for callback in callbacks:
        callback.at_end(run)
    return run


def _as_sampling(clients_per_round: int | Sampling | None) -> Sampling:
    if isinstance(clients_per_round, Sampling):
        return clients_per_round
    return Sampling() if clients_per_round is None else Sampling(clients_per_round)


def _due(done: int, rounds: int, every: int) -> bool:
    return done == rounds or (every > 0 and done % every == 0)


def _next_stop(now: int, rounds: int, *every: int) -> int:
    """Return the next round after which there is something to evaluate or to save, or the last round."""
    return min([rounds, *((now // n + 1) * n for n in every if n)])


@dataclasses.dataclass
class _Training:
    """Rounds, with records, evaluations and checkpoints when they are due."""

    loop: _Loop
    rounds: int
    validation: Validation | None
    spent: Spending | None
    folder: RunFolder | None
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        self.history: list[Record] = []
        self.stopper = _Stopper(None if self.validation is None else self.validation.early_stopping, self.loop)

    def restore(self) -> int:
        """Continue from the folder's newest checkpoint, if it has one; return how many rounds are done."""
        newest = self.folder.restore(self._state()) if self.folder else None
        if newest is not None:
            done, saved, records = newest
            self.loop.restore(done, saved)
            self.stopper.restore(saved, records)
            self.history.extend(records)
        return self.loop.now.round

    def run(self, stop_requested: Callable[[], bool]) -> bool:
        """Run rounds until the last one; return whether Ctrl-C stopped them."""
        loop, stopper = self.loop, self.stopper
        evaluate_every = self.validation.every if self.validation else 0
        checkpoint_every = self.folder.checkpoint_every if self.folder else 0
        try:
            self._evaluate_if_due()  # an interruption may have come between a round and its evaluation
            while loop.now.round < self.rounds and not stopper.out_of_patience:
                if stop_requested():
                    raise KeyboardInterrupt
                stop = _next_stop(loop.now.round, self.rounds, evaluate_every, checkpoint_every)
                stop = min([stop, *(number for number in stopper.rounds if number > loop.now.round)])
                loop.advance(stop, self._record_rounds)
                if loop.now.round < stop:
                    continue  # records of these rounds are written while the devices run the next ones
                self._record_rounds()
                self._evaluate_if_due()
                if stopper.out_of_patience or _due(loop.now.round, self.rounds, checkpoint_every):
                    self._checkpoint()
        except KeyboardInterrupt:
            self._record_rounds()
            self._checkpoint()
            return True
        return False

    def _record_rounds(self) -> None:
        while self.loop.pending:
            self._record(self.loop.pending.popleft())

    def _record(self, entry: Record) -> None:
        self.history.append(entry)
        for callback in self.callbacks:
            (callback.after_round if entry["kind"] == "round" else callback.after_evaluation)(entry)

    def _evaluate_if_due(self) -> None:
        now, stopper, validation = self.loop.now.round, self.stopper, self.validation
        if validation is None or any(e["kind"] == "evaluation" and e["round"] == now for e in self.history[-1:]):
            return
        is_due = now in stopper.rounds or _due(now, self.rounds, validation.every)
        if not (is_due if now else stopper.settings):
            return
        state, evaluate = self.loop.now.client_state, validation.data
        if isinstance(evaluate, Evaluator):
            state = () if evaluate.protocol == "recon" else state
            evaluate = evaluate.measure  # the monitor warns of clients that diverged, once
        params = self.loop.params()
        entry = {"kind": "evaluation", "round": now, **evaluate(params, state).summary()}  # type: ignore[operator]
        entry |= {} if self.spent is None else {"epsilon": self.spent.after(now).epsilon}
        stopper.judge(entry, params)
        self._record(entry)

    def _state(self) -> dict[str, Any]:
        return self.loop.checkpoint() | self.stopper.checkpoint()

    def _checkpoint(self) -> None:
        if self.folder:
            self.folder.checkpoint(self.loop.now.round, self._state())

    def result(self, interrupted: bool) -> Run:
        now, stopper = self.loop.now, self.stopper
        best = stopper.better_than_last(now.round)
        params = jax.tree.map(np.asarray, self.loop.params() if best is None else stopper.params)
        ledger = None if self.spent is None else self.spent.after(now.round)
        run = Run(params, self.history, now.round, now.client_state, interrupted, ledger)
        if best is not None:
            run.best, why = best, f"no improvement in {stopper.worse} evaluations; keeping round {best}"
            run.stopped = f"early stopping: {why}" if stopper.out_of_patience and not interrupted else None
        return run


class _Stopper:
    """Early stopping: the best evaluation, and how many after it were no better; without settings, never."""

    def __init__(self, settings: EarlyStopping | None, loop: _Loop):
        if settings is not None and jax.tree.leaves(loop.now.client_state):
            raise ValueError("`early_stopping` restores global parameters only: it needs clients that keep no state")
        self.settings, self.rounds = settings, () if settings is None else settings.rounds
        self.best, self.rank, self.params = -1, (np.inf, np.inf), None if settings is None else loop.params()
        self.judged: list[int] = []  # the rounds of all evaluations that count

    @property
    def worse(self) -> int:
        """How many evaluations after the best one were no better."""
        return sum(number > self.best for number in self.judged)

    @property
    def out_of_patience(self) -> bool:
        return self.settings is not None and self.worse >= self.settings.patience

    def judge(self, record: Record, params: Any) -> None:
        """Keep the parameters if this evaluation is better than all before it."""
        if self.settings is None or not self.settings.counts(record):
            return
        self.judged.append(record["round"])
        if (rank := self.settings.rank(record)) < self.rank:
            # A copy, since the next call may write to these buffers.
            self.best, self.rank, self.params = record["round"], rank, jax.tree.map(np.array, params)

    def better_than_last(self, done: int) -> int | None:
        """Return the round of the best evaluation if its parameters are not those of the last one."""
        is_last = self.worse == 0 if self.judged else self.best == done
        return None if self.best < 0 or is_last else self.best

    def checkpoint(self) -> dict[str, Any]:
        if self.settings is None:
            return {}
        numbers = np.array([self.best, *self.rank], np.float64)
        return {"best": {"numbers": numbers, "params": jax.tree.map(np.asarray, self.params)}}

    def restore(self, saved: Mapping[str, Any], records: Sequence[Record]) -> None:
        if self.settings is None:
            return
        number, diverged, score = map(float, saved["best"]["numbers"])
        self.best, self.rank, self.params = int(number), (diverged, score), saved["best"]["params"]
        self.judged = [record["round"] for record in records if self.settings.counts(record)]


class _State(NamedTuple):
    """The state of training, replaced as a whole after every call, so that an interruption leaves it consistent."""

    round: int
    server: ServerState
    client_state: Any


class _Loop:
    """The state of training between rounds, and how to run more of them."""

    def __init__(self, algorithm: Algorithm, clients: Clients, sampling: Sampling, seed: int, layout: Layout):
        self.layout, self._algorithm = layout, algorithm
        keys = run_keys(seed)
        self._key = put_on_devices(keys.clients, layout)
        client_state = init_client_state(algorithm, clients, seed)
        self.now = _State(0, put_on_devices(algorithm.init(keys.init), layout), client_state)
        self.pending: collections.deque[Record] = collections.deque()
        at_once = 1 if jax.tree.leaves(client_state) else ROUNDS_AT_ONCE
        self._cohorts = Cohorts(algorithm, clients, sampling, layout, keys, at_once)
        self._ahead: Future[PackedRounds] | None = None
        self._run = compile_rounds(algorithm, layout)

    def params(self) -> Any:
        return self._algorithm.params(self.now.server)

    def checkpoint(self) -> dict[str, Any]:
        return {"server": jax.tree.map(np.asarray, self.now.server._asdict()), KEPT: self.now.client_state}

    def restore(self, done: int, saved: Mapping[str, Any]) -> None:
        client_state = jax.tree.map(np.array, saved[KEPT])  # rounds write to it
        self.now = _State(done, put_on_devices(ServerState(**saved["server"]), self.layout), client_state)

    def advance(self, stop: int, meanwhile: Callable[[], None]) -> None:
        """Run some rounds in one call, at most up to `stop`; call `meanwhile` while the devices are busy."""
        packed = None if self._ahead is None else self._ahead.result()
        if packed is None or packed.first != self.now.round or packed.first + packed.number > stop:
            packed = self._cohorts.prepare(self.now.round, stop - self.now.round)
        order = packed.orders[0]
        local = np.maximum(self.layout.local(order), 0)
        cohort_state = jax.tree.map(lambda leaf: leaf[local], self.now.client_state)
        server, cohort_state, reports = self._run(
            self.now.server, cohort_state, packed.cohorts, self._key, packed.first, packed.number
        )
        done = packed.first + packed.number
        self._ahead = self._cohorts.prepare_ahead(done, stop - done) if done < stop else None
        meanwhile()
        reports = jax.tree.map(np.asarray, reports)
        records = []
        for r, drawn in enumerate(packed.samples):
            report = {name: value[r] for name, value in reports.items()}
            records.append(describe_round(self._algorithm.model, packed.first + r + 1, report) | drawn.counts)
        self._put(order, cohort_state, _State(done, server, self.now.client_state), records)

    def _put(self, order: np.ndarray, cohort_state: Any, after: _State, records: Sequence[Record]) -> None:
        """Write a cohort's state into that of all clients, in place: a copy would take longer than a round.

        An interruption in the middle undoes what was written, so that the state is that before the round or after it.
        """
        before, rows = self.now, order[order >= 0]
        stores = jax.tree.leaves(before.client_state)
        new = [np.asarray(leaf)[order >= 0] for leaf in jax.tree.leaves(cohort_state)]
        old = [store[rows] for store in stores]
        try:
            for store, values in zip(stores, new, strict=True):
                store[rows] = values
            self.now = after
            self.pending.extend(records)
        except BaseException:
            if self.now is before:
                for store, values in zip(stores, old, strict=True):
                    store[rows] = values
            raise


def describe_round(model: Model, number: int, report: Report) -> Record:
    """Return what a round's record says about the sum: metrics, weight, counts, whether it was skipped."""
    numbers: dict[str, Any] = {name: np.asarray(value) for name, value in report.items()}
    no_sums = np.zeros((len(metric_names(model)), 2))  # for aggregators that report no metrics
    return {
        "kind": "round",
        "round": number,
        **finish(model, numbers.pop("sums", no_sums)),
        "weight": float(numbers.pop("weight", np.nan)),
        "skipped": bool(numbers.pop("skipped")),
        **{name: int(n) if float(n).is_integer() else float(n) for name, n in numbers.items() if n.ndim == 0},
    }
