"""Training of a job, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import fedrecon as fr
from fedrecon._src.core.display import Progress
from studies.study import Job

Measure = Callable[[int, Any, Any], Mapping[str, fr.Evaluation]]  # (round, params, local state) -> by measure


def train(
    job: Job, algorithm: fr.Algorithm, clients: fr.Clients, measure: Measure, *, seed: int, progress: Progress
) -> tuple[Any, dict[str, Any]]:
    """Train a job, evaluating every `config.evaluate_every` rounds.

    Returns:
      The trained parameters and the result: `evaluations` (by round and measure), `losses` of all rounds, `global` and
      `local` (numbers of parameters), `sent` (numbers to and from a client in a round), `clients` and `seconds`.
    """
    start = time.perf_counter()
    evaluations: list[dict[str, Any]] = []

    def evaluate(params: Any, local_state: Any) -> fr.Evaluation:
        rounds = (len(evaluations) + 1) * job.config.evaluate_every
        measured = measure(rounds, params, local_state)
        evaluations.append({"round": rounds} | {name: value.summary() for name, value in measured.items()})
        return measured[job.measures[0]]

    central = job.method == "centralized"
    run = fr.train(
        algorithm,
        clients,
        rounds=job.continue_to or job.config.rounds,
        clients_per_round=1 if central else job.config.sampling,
        valid=fr.Validation(evaluate, every=job.config.evaluate_every),
        seed=seed,
        layout=fr.layout(1, 1) if central else None,
        callbacks=[fr.ProgressBar(progress)],
    )
    if run.interrupted:
        raise KeyboardInterrupt
    size = count(run.params)
    return run.params, {
        "evaluations": evaluations,
        "losses": [round(entry["loss"], 5) for entry in run.history if entry["kind"] == "round"],
        "global": size,
        "local": count(jax.eval_shape(algorithm.model.init_local, jax.random.key(0))),
        "sent": 0 if central else 2 * size,  # down and up
        "clients": len(clients),
        "seconds": round(time.perf_counter() - start, 2),
    }


def baseline_result(job: Job, measured: Mapping[str, Mapping[str, Any]], clients: int) -> dict[str, Any]:
    """Return the result of something that does not train in rounds and sends nothing."""
    return {
        "evaluations": [{"round": job.config.rounds, **measured}],
        "losses": [],
        "global": 0,
        "local": 0,
        "sent": 0,
        "clients": clients,
        "seconds": 0.0,
    }


def count(tree: Any) -> int:
    """Count the numbers in a tree of arrays."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))
