"""ReconEval and StandardEval: reconstruct, predict, measure every client on its own, and summarise over clients."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import as_clients, concatenate
from fedrecon._src.algorithms.validation import check_reconstruction, check_values, features_of
from fedrecon._src.client.objectives import Objective, measure_all
from fedrecon._src.core.checks import check_choice
from fedrecon._src.core.clients import Clients, check_clients
from fedrecon._src.core.cohort import ABSENT, Cohort, Needs, Packer, lengths_for
from fedrecon._src.core.display import Progress, silent, warn_caller
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Model, evaluated_names, finish
from fedrecon._src.core.split import Split, half, query_only, support_only
from fedrecon._src.simulation.divergence import DivergenceWarning, describe_evaluation
from fedrecon._src.simulation.engine import Layout, compile_each, layout, put_on_devices
from fedrecon._src.simulation.engine import layout as choose_layout

CLIENTS_AT_ONCE = 600
NUMBERS_AT_ONCE = 1000  # about how many numbers a client's batch of features has
DIVERGED_ABOVE = 1000.0
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics of a model on a set of clients.

    Attributes:
      protocol: `recon` or `standard`.
      clients: how many clients were measured; those without query examples are not.
      diverged: how many of them diverged. They are excluded from all means.
      examples: how many query examples the means are over.
      micro: metrics over all examples together; for metrics of a client as a whole (`Model.client_metrics`), the mean
        over clients.
      macro: metrics of each client, averaged over clients.
      quantiles: quantiles of each metric over clients, as `{metric: {quantile: value}}`.
      per_client: each metric of each client, NaN for clients that were not measured or that diverged.

    Example:
      >>> import fedrecon as fr
      >>> evaluation = fr.Evaluation("recon", 2, 0, 9, {"loss": 0.5}, {"loss": 0.6}, {}, {})
      >>> evaluation.summary()["micro"]
      {'loss': 0.5}
    """

    protocol: str
    clients: int
    diverged: int
    examples: int
    micro: dict[str, float]
    macro: dict[str, float]
    quantiles: dict[str, dict[str, float]]
    per_client: dict[str, np.ndarray] = dataclasses.field(repr=False)

    def summary(self) -> dict[str, Any]:
        """Return everything except `per_client`, ready for JSON."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "per_client"}

    def worst(self, share: float) -> dict[str, float]:
        """Return the metrics of the worst clients, those with the highest loss: means over clients.

        Args:
          share: which share of the clients these are, at least one; clients that diverged are not among them.
        """
        measured = np.flatnonzero(~np.isnan(self.per_client["loss"]))
        count = max(1, round(share * len(measured)))
        chosen = measured[np.argsort(-self.per_client["loss"][measured], kind="stable")[:count]]
        return {name: _over_clients(np.mean, values[chosen]) for name, values in self.per_client.items()}


class Evaluator:
    """Evaluates one algorithm on one set of clients, as often as needed, compiled once.

    Example:
      >>> import jax
      >>> import optax
      >>> import fedrecon as fr
      >>> ratings = fr.Clients.from_columns({"item": [0, 1, 0, 1], "rating": [5.0, 3.0, 4.0, 2.0]}, client=[0, 0, 1, 1])
      >>> steps = fr.gradient_descent(optax.sgd(0.1), batch_size=2, steps=2)
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(2, 3), reconstruct=steps, update=steps, server=optax.sgd(1.0)
      ... )
      >>> evaluator = fr.Evaluator(algorithm, ratings, split=fr.split.half())
      >>> params = algorithm.params(algorithm.init(jax.random.key(0)))
      >>> evaluation = evaluator(params)  # again and again, without compiling again
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        *,
        protocol: str = "recon",
        split: Split | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        layout: Layout | None = None,
    ):
        """Prepare to evaluate.

        Args:
          algorithm: its model and its reconstruction are used.
          clients: the clients to measure; with `recon`, clients that took no part in training.
          protocol: `recon` or `standard`; see `evaluate`.
          split: support and query for `recon`; half and half by default.
          batch_size: how many examples of a client are measured at once; by default chosen from the size of an example.
          seed: for the initial local parameters.
          layout: on which JAX devices and in what blocks clients run.
        """
        check_choice("protocol", protocol, ("recon", "standard"))
        check_clients(clients, "evaluate on")
        if protocol == "recon":
            check_reconstruction(algorithm, clients)
        check_values(algorithm, clients)
        self.algorithm, self.clients, self.protocol = algorithm, clients, protocol
        self._split = query_only() if protocol == "standard" else split or half()
        self._key = jax.random.key(seed)
        self._layout = layout or choose_layout(model=algorithm.model)
        used = features_of(algorithm, clients)
        self._needs = Needs(self._split, algorithm.method.support_limit, columns=used)
        numbers = sum(math.prod(clients.columns[name].shape[1:]) for name in used)
        self._batch_size = batch_size or int(np.clip(NUMBERS_AT_ONCE // max(numbers, 1), 16, 64))
        self._packer = Packer(clients, self._needs)
        self._run = compile_each(self._block, self._layout)

    def on(self, clients: Clients) -> Evaluator:
        """Return an evaluator of other clients; if they pack to the same shapes, nothing is compiled again.

        Args:
          clients: the clients to measure.
        """
        check_clients(clients, "evaluate on")
        check_values(self.algorithm, clients)
        other = copy.copy(self)
        other.clients = clients
        other._packer = Packer(clients, self._needs)
        return other

    def _block(self, shared: Any, part: tuple[Cohort, Any]) -> Any:
        params, (cohort, client_state) = shared[0], part
        model, local = self.algorithm.model, client_state
        if self.protocol == "recon":
            local = _reconstruct_block(self.algorithm, shared, part)
        objective = Objective(model, lambda local, _, batch: model.predict(params, local, batch))
        sums = measure_all(objective, local, (), cohort.query, batch_size=self._batch_size)
        if model.client_metrics is None:
            return sums
        # Metrics of clients as a whole: a client that has a value counts once.
        measure = jax.vmap(model.client_metrics.measure, (None, 0, 0, 0))
        values = measure(params, local, cohort.support, cohort.query)  # (clients, names)
        measured = ~jnp.isnan(values) & (cohort.query.count > 0)[:, None]
        of_clients = jnp.stack([jnp.where(measured, values, 0), measured.astype(values.dtype)], -1)
        return jnp.concatenate([sums, of_clients], 1)

    def __call__(self, params: Any, client_state: Any = (), *, progress: Progress = silent) -> Evaluation:
        """Evaluate global parameters; a `DivergenceWarning` says if more than half of the clients diverged.

        Args:
          params: global parameters.
          client_state: what each client keeps from training, clients first, if the protocol or the algorithm uses it.
          progress: a progress display.
        """
        evaluation = self.measure(params, client_state, progress=progress)
        if problem := describe_evaluation(evaluation.clients, evaluation.diverged):
            warn_caller(problem, DivergenceWarning)
        return evaluation

    def measure(self, params: Any, client_state: Any = (), *, progress: Progress = silent) -> Evaluation:
        """Evaluate global parameters without warning about diverged clients.

        Args:
          params: global parameters.
          client_state: as for an evaluation.
          progress: a progress display.
        """
        return summarize(self.algorithm.model, self.protocol, self.sums(params, client_state, progress=progress))

    def sums(self, params: Any, client_state: Any = (), *, progress: Progress = silent) -> np.ndarray:
        """Return each client's sums of loss and metrics, `(clients, metrics, 2)`: totals and weights.

        Args:
          params: global parameters.
          client_state: as for an evaluation.
          progress: a progress display.
        """
        if self.protocol == "standard" and self.algorithm.has_local() and not jax.tree.leaves(client_state):
            raise ValueError("`client_state` is missing: 'standard' measures local parameters from training")
        run = functools.partial(self._run, put_on_devices((params, self._key), self._layout))
        parts = []
        with progress("evaluating", len(self.clients)) as advance:
            for sums in _run_in_parts(run, self._packer, self._layout, CLIENTS_AT_ONCE, client_state):
                parts.append(sums.astype(np.float64))
                advance(len(sums))
        return np.concatenate(parts)


def evaluate(
    algorithm: Algorithm,
    params: Any,
    clients: Clients,
    *,
    client_state: Any = (),
    protocol: str = "recon",
    split: Split | None = None,
    seed: int = 0,
    layout: Layout | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Evaluate global parameters on every client.

    Args:
      algorithm: its model and its reconstruction are used.
      params: global parameters.
      clients: the clients to measure; with `recon`, clients that took no part in training.
      client_state: what each of these clients keeps from training (`Run.client_state`); empty if they keep nothing.
      protocol: `recon` reconstructs the local parameters on each client's support and measures on its query;
        `standard` measures the local parameters in `client_state` on all examples of `clients`.
      split: support and query for `recon`; half and half by default, whatever training does.
      seed: for the initial local parameters.
      layout: on which JAX devices and in what blocks clients run.
      progress: a progress display.

    Returns:
      An `Evaluation`: means over examples and over clients, quantiles over clients, and the metrics of each client. A
      `DivergenceWarning` says if more than half of the clients diverged.

    Example:
      >>> import jax
      >>> import optax
      >>> import fedrecon as fr
      >>> ratings = fr.Clients.from_columns({"item": [0, 1, 0, 1], "rating": [5.0, 3.0, 4.0, 2.0]}, client=[0, 0, 1, 1])
      >>> steps = fr.gradient_descent(optax.sgd(0.1), batch_size=2, steps=2)
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(2, 3), reconstruct=steps, update=steps, server=optax.sgd(1.0)
      ... )
      >>> params = algorithm.params(algorithm.init(jax.random.key(0)))
      >>> evaluation = fr.evaluate(algorithm, params, ratings)
      >>> evaluation.clients, evaluation.examples, sorted(evaluation.micro)
      (2, 2, ['accuracy', 'loss', 'rmse'])
    """
    evaluator = Evaluator(algorithm, clients, protocol=protocol, split=split, seed=seed, layout=layout)
    return evaluator(params, client_state, progress=progress)


def summarize(model: Model, protocol: str, sums: np.ndarray) -> Evaluation:
    """Summarise the metrics of clients.

    A client has diverged if any of its sums is not finite, or if its loss is more than `DIVERGED_ABOVE` times the
    median client's. One such client would dominate the mean, so it is excluded and counted in `diverged`.

    Args:
      model: its metrics are summarised.
      protocol: `recon` or `standard`, for the result.
      sums: `(clients, metrics, 2)` of loss and metrics: totals and weights.
    """
    measured = ~(sums[:, 0, 1] == 0)
    finite = np.isfinite(sums).all((1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        losses = np.where(measured & finite, sums[:, 0, 0] / sums[:, 0, 1], np.nan)
    usual = np.nanmedian(losses) if np.isfinite(losses).any() else np.nan
    good = measured & finite & ~((losses > DIVERGED_ABOVE * usual) & (usual > 0))
    names = evaluated_names(model)
    per_client = {name: np.full(len(sums), np.nan) for name in names}
    for i in np.flatnonzero(good):
        for name, value in finish(model, sums[i]).items():
            per_client[name][i] = value
    return Evaluation(
        protocol=protocol,
        clients=int(measured.sum()),
        diverged=int((measured & ~good).sum()),
        examples=int(sums[good, 0, 1].sum()),
        micro=finish(model, sums[good].sum(0)),
        macro={name: _over_clients(np.mean, values) for name, values in per_client.items()},
        quantiles={
            name: {f"{q:g}": _over_clients(functools.partial(np.quantile, q=q), values) for q in QUANTILES}
            for name, values in per_client.items()
        },
        per_client=per_client,
    )


def _over_clients(statistic: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    """Return a statistic over the clients that have a value; NaN if none has."""
    measured = values[~np.isnan(values)]
    return float(statistic(measured)) if measured.size else float("nan")


# ---- local parameters of people, and predictions for them ----

SHORTEST = 16  # the least number of support examples that arrays have room for
PART = 4096  # clients that are packed and run together


def reconstruct(algorithm: Algorithm, params: Any, examples: Clients | Mapping[str, Any], *, seed: int = 0) -> Any:
    """Reconstruct a client's local parameters, with all of its examples as support.

    The first call compiles. Later calls with the same algorithm object and about as much data do not.

    Args:
      algorithm: its reconstruction is run.
      params: global parameters.
      examples: one client's columns, or `Clients` for many at once.
      seed: for the initial local parameters. They also depend on the client's name, just as in `evaluate`.

    Returns:
      The client's local parameters; for `Clients`, with the clients first in every leaf.

    Example:
      >>> import jax
      >>> import optax
      >>> import fedrecon as fr
      >>> ratings = fr.Clients.from_columns({"item": [0, 1, 0, 1], "rating": [5.0, 3.0, 4.0, 2.0]}, client=[0, 0, 1, 1])
      >>> steps = fr.gradient_descent(optax.sgd(0.1), batch_size=2, steps=2)
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(2, 3), reconstruct=steps, update=steps, server=optax.sgd(1.0)
      ... )
      >>> params = algorithm.params(algorithm.init(jax.random.key(0)))
      >>> fr.reconstruct(algorithm, params, {"item": [0, 1], "rating": [5.0, 3.0]})["user_embedding"].shape
      (3,)
      >>> fr.reconstruct(algorithm, params, ratings)["user_embedding"].shape
      (2, 3)
    """
    if not isinstance(examples, Clients):
        local = reconstruct(algorithm, params, as_clients(examples), seed=seed)
        return jax.tree.map(lambda leaf: leaf[0], local)
    compiled_layout, run = _compile_reconstruction(algorithm)
    check_reconstruction(algorithm, examples)
    check_values(algorithm, examples)
    needs = Needs(support_only(), algorithm.method.support_limit, columns=features_of(algorithm, examples))
    lengths = lengths_for(examples.max_size, needs)
    if algorithm.model.state is None:  # statistics of layers that take no mask would depend on the padding
        lengths = lengths._replace(support=_round_up(lengths.support, needs.support_limit))
    packer = Packer(examples, needs, lengths)
    run = functools.partial(run, put_on_devices((params, jax.random.key(seed)), compiled_layout))
    return concatenate(list(_run_in_parts(run, packer, compiled_layout, PART, round_up=True)))


def _round_up(number: int, most: int | None = None, least: int = SHORTEST) -> int:
    """Return the next power of two, at least `least` and at most `most`, so that few lengths are compiled."""
    rounded = max(least, 1 << max(0, number - 1).bit_length())
    return rounded if most is None else max(number, min(rounded, most))


def _run_in_parts(
    run: Callable[[Any], Any], packer: Packer, layout: Layout, most: int, state: Any = (), *, round_up: bool = False
) -> Iterator[Any]:
    """Run clients, at most so many at a time, as a layout runs them best; yield results in the clients' order.

    Absent clients are computed too. With `round_up` their number is such that few different ones are compiled.
    """
    clients = packer.clients
    for chosen in np.split(np.arange(len(clients)), range(most, len(clients), most)):
        room = _round_up(len(chosen), least=1) if round_up else min(most, len(clients))
        indices, sizes = np.full(room, ABSENT), np.zeros(room, np.int64)
        indices[: len(chosen)], sizes[: len(chosen)] = chosen, clients.sizes[chosen]
        order = layout.arrange(indices, sizes)
        local = layout.local(order)
        of_cohort = jax.tree.map(lambda leaf, local=local: np.asarray(leaf)[np.maximum(local, 0)], state)
        results = run((packer.pack(local), of_cohort))
        places = np.argsort(order)[len(order) - len(chosen) :]  # absent clients, with an index below 0, come first
        yield jax.tree.map(lambda leaf, places=places: np.asarray(leaf)[places], results)


@functools.lru_cache(maxsize=8)
def _compile_reconstruction(algorithm: Algorithm) -> tuple[Layout, Callable[..., Any]]:
    """Return the layout of an algorithm's reconstruction, and how to run it, compiled once for every shape."""
    chosen = layout(model=algorithm.model, alone=True)
    return chosen, compile_each(functools.partial(_reconstruct_block, algorithm), chosen)


def _reconstruct_block(algorithm: Algorithm, shared: tuple[Any, Any], part: tuple[Cohort, Any]) -> Any:
    """Reconstruct the local parameters of a block of clients, given global parameters and a key."""
    (params, key), (cohort, client_state) = shared, part
    return algorithm.method.reconstruct(params, client_state, cohort.support, client_keys(key, cohort.identity))


def predict(model: Model, params: Any, local: Any, batch: Mapping[str, Any]) -> np.ndarray:
    """Predict for one client, with its local parameters.

    Args:
      model: what predicts; after `with_finetuning`, the `model` of the algorithm that it returned.
      params: global parameters.
      local: the client's local parameters, as `reconstruct` returns them.
      batch: columns of examples; only those that the model's predictions read are needed.

    Returns:
      The predictions, as an array.

    Example:
      >>> import numpy as np
      >>> import fedrecon as fr
      >>> model = fr.models.matrix_factorization(num_items=2, dim=2)
      >>> params = {"item_embedding": np.array([[1.0, 0.0], [0.5, 2.0]])}
      >>> fr.predict(model, params, {"user_embedding": np.array([4.0, 1.0])}, {"item": [0, 1]}).tolist()
      [4.0, 4.0]
    """
    columns = {name: jnp.asarray(column) for name, column in batch.items()}
    return np.asarray(model.predict(jax.tree.map(jnp.asarray, params), local, columns))
