"""Compare algorithms: train each of them, and evaluate all on the same unseen clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.formatting import lay_out
from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.core.split import Split
from fedrecon._src.simulation.engine import Layout
from fedrecon._src.simulation.evaluation import Evaluation, evaluate
from fedrecon._src.simulation.explanation import explain
from fedrecon._src.simulation.training import Run, train


class Way(NamedTuple):
    """The result of one algorithm in a comparison.

    Attributes:
      algorithm: what was trained.
      run: its training; without rounds if the model has nothing global.
      evaluation: on the unseen clients.
      sent: bytes that a client sends in a round; for tables that are read by rows, only the client's rows count.
    """

    algorithm: Algorithm
    run: Run
    evaluation: Evaluation
    sent: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Algorithms side by side; `print` it for a table.

    Attributes:
      ways: the result of each algorithm, by name.
    """

    ways: dict[str, Way]

    def __getitem__(self, name: str) -> dict[str, float]:
        """Return the metrics of one algorithm, over all query examples together."""
        return self.ways[name].evaluation.micro

    def __str__(self) -> str:
        """Return a table of metrics (means over query examples) and of what a client sends in a round."""
        metrics = list(dict.fromkeys(metric for way in self.ways.values() for metric in way.evaluation.micro))
        rows = [["", *metrics, "sent a round"]]
        for name, way in self.ways.items():
            means = way.evaluation.micro
            cells = [f"{means[metric]:.3f}" if metric in means else "" for metric in metrics]
            diverged = way.evaluation.diverged
            rows.append([name, *cells, f"{way.sent:,.0f} B", *([f"({diverged} diverged)"] if diverged else [])])
        clients, examples = (
            max(getattr(way.evaluation, n) for way in self.ways.values()) for n in ("clients", "examples")
        )
        sizes = f"{clients:,} clients never seen in training, {examples:,} query examples"
        return "\n".join([*lay_out(rows, right=True), sizes])


def compare(
    algorithms: Mapping[str, Algorithm],
    clients: Clients,
    unseen: Clients,
    *,
    rounds: int,
    clients_per_round: int | None = None,
    split: Split | None = None,
    valid: Clients | None = None,
    evaluate_every: int = 0,
    seed: int = 0,
    layout: Layout | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Train every algorithm on the same clients, and evaluate all on the same query examples of unseen clients.

    An algorithm may reconstruct local parameters from an unseen client's support examples. If its model has nothing
    local, it never reads them. If its model has nothing global, there is nothing to train, and it runs no rounds.

    Args:
      algorithms: the algorithms, by the names that the table shows.
      clients: the clients to train on.
      unseen: the clients to measure on. They take no part in training.
      rounds: rounds of training for each algorithm.
      clients_per_round: how many clients take part in a round; all of them if there are fewer.
      split: support and query of unseen clients; half and half by default, whatever training does.
      valid: clients to evaluate on during training, for curves; see the histories of the runs.
      evaluate_every: how many rounds there are between evaluations on `valid`.
      seed: for everything random.
      layout: on which devices and in what blocks clients run.
      progress: a progress display.

    Returns:
      A `Comparison`.

    Raises:
      ValueError: if an unseen client also trains. This is only noticed if both are views of the same data, such
        as those that `split_clients` returns.
      KeyboardInterrupt: on Ctrl-C, while any of the algorithms trains.
    """
    if not algorithms:
        raise ValueError("`algorithms` is empty; give at least one, by name")
    for others, name in ((unseen, "unseen"), (valid, "valid")):
        if others is not None:
            _check_apart(clients, others, name)
    per_round = None if clients_per_round is None else min(clients_per_round, len(clients))
    ways = {}
    for name, algorithm in algorithms.items():
        explained = explain(algorithm, clients)
        run = train(
            algorithm,
            clients,
            rounds=rounds if explained.sends else 0,
            clients_per_round=per_round,
            valid=valid,
            evaluate_every=evaluate_every,
            evaluate_split=split,
            seed=seed,
            layout=layout,
            progress=progress,
        )
        if run.interrupted:
            raise KeyboardInterrupt
        evaluation = evaluate(algorithm, run.params, unseen, split=split, seed=seed, layout=layout, progress=progress)
        by_rows = explained.sends_by_rows
        ways[name] = Way(algorithm, run, evaluation, explained.sends if by_rows is None else by_rows)
    return Comparison(ways)


def _check_apart(clients: Clients, others: Clients, argument: str) -> None:
    """Fail if some of the others also train. This is only known if both are views of the same data."""
    if not any(ours is theirs for ours in clients.columns.values() for theirs in others.columns.values()):
        return
    both = np.intersect1d(rows_of(clients.starts, clients.ends), rows_of(others.starts, others.ends)).size > 0
    if clients.names is not None and others.names is not None:
        both |= np.intersect1d(clients.names, others.names).size > 0
    if both:
        raise ValueError(f"`{argument}` has clients that train too; divide them with `split_clients` first")
