"""The training loop: sample, pack, run, report, checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon.aggregate import COUNTS
from fedrecon.algorithm import Algorithm, ServerState
from fedrecon.clients import Clients
from fedrecon.cohort import ABSENT, Cohort, Packer
from fedrecon.engine import Layout, RoundMetrics, compile_rounds, everywhere, layout
from fedrecon.evaluate import Evaluator, kept_like
from fedrecon.features import check_fit, features_used
from fedrecon.model import finish
from fedrecon.progress import Progress, silent
from fedrecon.run import RunFolder
from fedrecon.split import Split

ROUNDS_AT_ONCE = 10  # rounds of one compiled call: enough that starting it does not show


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Who takes part in a round.

    Attributes:
      clients_per_round: how many clients' updates a round takes.
      oversample: invite this many times as many, and take the first that answer.
      drop_out: the share of invited clients that never answer.
      min_examples: clients with fewer examples do not answer either.
    """

    clients_per_round: int = 100
    oversample: float = 1.0
    drop_out: float = 0.0
    min_examples: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.clients_per_round < 1 or self.oversample < 1 or not 0 <= self.drop_out < 1:
            raise ValueError(
                "sampling needs clients_per_round >= 1, oversample >= 1 and 0 <= drop_out < 1, not "
                f"{self.clients_per_round}, {self.oversample} and {self.drop_out}"
            )


class Sample(NamedTuple):
    """The clients of one round, and what became of the others that were invited."""

    clients: np.ndarray  # (clients per round,) indices, ABSENT where too few answered
    counts: dict[str, int]


def sample(key: np.ndarray, clients: Clients, sampling: Sampling) -> Sample:
    """Draw the clients of a round without replacement, in time that does not grow with the population.

    Args:
      key: the words of a JAX key (`jax.random.key_data`); the same key draws the same clients.
      clients: the population.
      sampling: how many, and who does not answer.
    """
    words = np.asarray(key, np.uint32).astype(np.uint64)
    generator = np.random.Generator(
        np.random.Philox(key=[words[0] << np.uint64(32) | words[1], np.uint64(0)])
    )
    wanted = sampling.clients_per_round
    invited = min(len(clients), int(np.ceil(wanted * sampling.oversample)))
    drawn = generator.choice(len(clients), invited, replace=False)
    large = clients.ends[drawn] - clients.starts[drawn] >= sampling.min_examples
    answered = generator.random(invited) >= sampling.drop_out
    taken = drawn[large & answered][:wanted]
    chosen = np.full(wanted, ABSENT, np.int64)
    chosen[: len(taken)] = taken
    counts = {"invited": invited, "too_small": int((~large).sum()), "dropped": int((large & ~answered).sum())}
    return Sample(chosen, counts)


@dataclasses.dataclass
class Run:
    """What training leaves in memory.

    Attributes:
      params: the global parameters.
      history: one dict a round or evaluation, as in `metrics.jsonl`.
      rounds: how many rounds were run in all.
      kept: what the owners kept, clients first; empty for stateless clients.
      interrupted: whether it was stopped before the last round.
    """

    params: Any
    history: list[dict[str, Any]]
    rounds: int
    kept: Any = ()
    interrupted: bool = False


def train(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    clients_per_round: int | None = None,
    sampling: Sampling | None = None,
    valid: Clients | None = None,
    evaluate_every: int = 0,
    evaluate_split: Split | None = None,
    seed: int = 0,
    folder: RunFolder | None = None,
    checkpoint_every: int = 100,
    place: Layout | None = None,
    progress: Progress = silent,
    on_record: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train global parameters.

    Args:
      algorithm: what to run.
      clients: the population.
      rounds: how many rounds in all, those of a resumed run included.
      clients_per_round: short for `sampling=Sampling(clients_per_round=...)`.
      sampling: who takes part in a round.
      valid: clients to evaluate on.
      evaluate_every: evaluate after every so many rounds, and after the last; 0 for the last alone.
      evaluate_split: support and query in evaluation; half and half by default.
      seed: of everything random.
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
    sampling = sampling or Sampling(clients_per_round or 100)
    if rounds < 0 or checkpoint_every < 1 or evaluate_every < 0:
        raise ValueError("`rounds` and `evaluate_every` must be at least 0 and `checkpoint_every` at least 1")
    if len(clients) == 0:
        raise ValueError("there are no clients to train on")
    check_fit(algorithm, clients)
    loop = _Loop(algorithm, clients, sampling, seed, place or layout(model=algorithm.model))
    evaluator = None
    if valid is not None:
        evaluator = Evaluator(algorithm, valid, split=evaluate_split, seed=seed, place=loop.place)
    history: list[dict[str, Any]] = []
    done = loop.restore(folder, history) if folder else 0

    def record(entry: dict[str, Any]) -> None:
        history.append(entry)
        if folder:
            folder.record(entry)
        if on_record:
            on_record(entry)

    stops = _stops(rounds, evaluate_every if evaluator else 0, checkpoint_every if folder else 0)
    with progress("training", rounds) as advance, contextlib.ExitStack() as at_end:
        if folder:
            at_end.callback(lambda: folder.checkpoint(loop.round, loop.everything()))
        advance(done)
        try:
            while loop.round < rounds:
                stop = next(s for s in stops if s > loop.round)
                for entry in loop.advance(stop):
                    record(entry)
                    advance(1, f"loss {entry['loss']:.4f}")
                if evaluator and _due(loop.round, rounds, evaluate_every):
                    found = evaluator(loop.state.params, ()).summary()
                    record({"kind": "evaluation", "round": loop.round, **found})
                if folder and _due(loop.round, rounds, checkpoint_every):
                    folder.checkpoint(loop.round, loop.everything())
        except KeyboardInterrupt:
            return Run(loop.params(), history, loop.round, loop.kept, interrupted=True)
    return Run(loop.params(), history, loop.round, loop.kept)


def _due(done: int, rounds: int, every: int) -> bool:
    return done == rounds or (every > 0 and done % every == 0)


def _stops(rounds: int, *every: int) -> list[int]:
    """List the rounds after which the loop has something else to do."""
    return sorted({rounds}.union(*(range(n, rounds, n) for n in every if n)))


class _Loop:
    """The state of training between rounds, and how to run some more of them."""

    def __init__(self, algorithm: Algorithm, clients: Clients, sampling: Sampling, seed: int, place: Layout):
        self.algorithm, self.clients, self.sampling, self.place = algorithm, clients, sampling, place
        init_key, self._round_key = jax.random.split(jax.random.key(seed))
        self._seed = seed
        self.state: ServerState = everywhere(algorithm.init(init_key), place)
        self.kept = kept_like(algorithm, len(clients), seed)
        self.round = 0
        self._at_once = 1 if jax.tree.leaves(self.kept) else ROUNDS_AT_ONCE
        needs = algorithm.needs._replace(columns=features_used(algorithm.model, clients))
        self._packer = Packer(clients, needs)
        self._run = compile_rounds(algorithm, place)

    def params(self) -> Any:
        return jax.tree.map(np.asarray, self.state.params)

    def everything(self) -> Any:
        return {"server": jax.tree.map(np.asarray, self.state._asdict()), "kept": self.kept}

    def restore(self, folder: RunFolder, history: list[dict[str, Any]]) -> int:
        found = folder.restore(self.everything())
        if found is None:
            return 0
        self.round, saved, records = found
        self.state = everywhere(ServerState(**saved["server"]), self.place)
        self.kept = jax.tree.map(np.array, saved["kept"])
        history.extend(records)
        return self.round

    def advance(self, stop: int) -> list[dict[str, Any]]:
        """Run rounds until `stop`, packing the next call's cohorts while the devices run this call's."""
        entries: list[dict[str, Any]] = []
        ahead = self._prepare(self.round, stop)
        while ahead is not None:
            first, number, cohorts, keys, samples = ahead
            theirs = jax.tree.map(lambda x, at=np.maximum(cohorts.client[0], 0): x[at], self.kept)
            state, theirs, metrics = self._run(self.state, theirs, cohorts, keys, number)
            ahead = self._prepare(first + number, stop)
            self._keep(cohorts.client[0], theirs)
            found = jax.tree.map(np.asarray, metrics)
            self.state, self.round = state, first + number
            entries += [self._entry(first + r, found, r, samples[r]) for r in range(number)]
        return entries

    def _prepare(self, first: int, stop: int) -> tuple[int, int, Cohort, Array, list[Sample]] | None:
        number = min(self._at_once, stop - first)
        if number <= 0:
            return None
        keys = _round_keys(self._round_key, np.arange(first, first + self._at_once, dtype=np.uint32))
        words = np.asarray(jax.random.key_data(keys[:, 0]))
        samples = [sample(words[r], self.clients, self.sampling) for r in range(number)]
        packed = [self._pack(s.clients) for s in samples]
        packed += [packed[-1]] * (self._at_once - number)  # never run: only there to keep the shape
        return first, number, jax.tree.map(lambda *x: np.stack(x), *packed), keys[:, 1], samples

    def _pack(self, chosen: np.ndarray) -> Cohort:
        safe = np.maximum(chosen, 0)
        sizes = np.where(chosen >= 0, self.clients.ends[safe] - self.clients.starts[safe], 0)
        return self._packer.pack(self.place.arrange(chosen, sizes))

    def _keep(self, client: np.ndarray, theirs: Any) -> None:
        if not jax.tree.leaves(self.kept):
            return
        here = client >= 0
        for store, new in zip(jax.tree.leaves(self.kept), jax.tree.leaves(theirs), strict=True):
            store[client[here]] = np.asarray(new)[here]

    def _entry(self, number: int, metrics: RoundMetrics, r: int, drawn: Sample) -> dict[str, Any]:
        return {
            "kind": "round",
            "round": number + 1,
            **finish(self.algorithm.model, metrics.sums[r]),
            "weight": float(metrics.weight[r]),
            **{name: int(metrics.counts[name][r]) for name in COUNTS},
            **drawn.counts,
            "skipped": bool(metrics.skipped[r]),
        }


@jax.jit
def _round_keys(key: Array, numbers: Array) -> Array:
    """Derive, for every round, the key that samples clients and the key that clients get: `(rounds, 2)`."""
    return jax.vmap(lambda r: jax.random.split(jax.random.fold_in(key, r)))(jnp.asarray(numbers))
