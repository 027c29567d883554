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
from fedrecon._src.simulation.evaluation import Evaluation, Evaluator, evaluate
from fedrecon._src.simulation.explanation import explain
from fedrecon._src.simulation.training import Run, train


class ComparisonRow(NamedTuple):
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
    """Algorithms side by side; `print` it for a table. See `compare`.

    Attributes:
      rows: the result of each algorithm, by name.
    """

    rows: dict[str, ComparisonRow]

    def __getitem__(self, name: str) -> dict[str, float]:
        """Return the metrics of one algorithm, over all query examples together."""
        return self.rows[name].evaluation.micro

    def __str__(self) -> str:
        """Return a table of metrics (means over query examples) and of what a client sends in a round."""
        metrics = list(dict.fromkeys(metric for row in self.rows.values() for metric in row.evaluation.micro))
        cells = [["", *metrics, "sent a round"]]
        for name, row in self.rows.items():
            means = row.evaluation.micro
            values = [f"{means[metric]:.3f}" if metric in means else "" for metric in metrics]
            diverged = row.evaluation.diverged
            cells.append([name, *values, f"{row.sent:,.0f} B", *([f"({diverged} diverged)"] if diverged else [])])
        clients, examples = (
            max(getattr(row.evaluation, n) for row in self.rows.values()) for n in ("clients", "examples")
        )
        sizes = f"{clients:,} clients never seen in training, {examples:,} query examples"
        return "\n".join([*lay_out(cells, right=True), sizes])


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
      layout: on which JAX devices and in what blocks clients run.
      progress: a progress display.

    Returns:
      A `Comparison`.

    Raises:
      ValueError: if an unseen client also trains. This is only noticed if both are views of the same data, such
        as those that `split_clients` returns.
      KeyboardInterrupt: on Ctrl-C, while any of the algorithms trains.

    Example:
      >>> import optax
      >>> import fedrecon as fr
      >>> ratings = fr.Clients.from_columns({"item": [0, 1, 0, 1], "rating": [5.0, 3.0, 4.0, 2.0]}, client=[0, 0, 1, 1])
      >>> steps = fr.gradient_descent(optax.sgd(0.1), batch_size=2, steps=2)
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(2, 3), reconstruct=steps, update=steps, server=optax.sgd(1.0)
      ... )
      >>> train, test = ratings.take([0]), ratings.take([1])
      >>> results = fr.compare({"reconstruction": algorithm}, train, test, rounds=1)
      >>> results.rows["reconstruction"].sent
      16.0
    """
    if not algorithms:
        raise ValueError("`algorithms` is empty; give at least one, by name")
    for held_out, name in ((unseen, "unseen"), (valid, "valid")):
        if held_out is not None:
            _check_disjoint(clients, held_out, name)
    per_round = None if clients_per_round is None else min(clients_per_round, len(clients))
    rows = {}
    for name, algorithm in algorithms.items():
        explained = explain(algorithm, clients)
        run = train(
            algorithm,
            clients,
            rounds=rounds if explained.sends else 0,
            clients_per_round=per_round,
            valid=None if valid is None else Evaluator(algorithm, valid, split=split, seed=seed, layout=layout),
            evaluate_every=evaluate_every,
            seed=seed,
            layout=layout,
            progress=progress,
        )
        if run.interrupted:
            raise KeyboardInterrupt
        evaluation = evaluate(algorithm, run.params, unseen, split=split, seed=seed, layout=layout, progress=progress)
        by_rows = explained.sends_by_rows
        rows[name] = ComparisonRow(algorithm, run, evaluation, explained.sends if by_rows is None else by_rows)
    return Comparison(rows)


def _check_disjoint(clients: Clients, held_out: Clients, argument: str) -> None:
    """Fail if some of the held-out clients also train. This is only known if both are views of the same data."""
    if not any(ours is theirs for ours in clients.columns.values() for theirs in held_out.columns.values()):
        return
    both = np.intersect1d(rows_of(clients.starts, clients.ends), rows_of(held_out.starts, held_out.ends)).size > 0
    if clients.names is not None and held_out.names is not None:
        both |= np.intersect1d(clients.names, held_out.names).size > 0
    if both:
        raise ValueError(f"`{argument}` has clients that train too; divide them with `split_clients` first")
