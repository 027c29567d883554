"""Check that data, model and algorithm fit together before a long run starts, and decide the model's lookups."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.client.lookup_tables import check_lookups, lookup_groups, random_params
from fedrecon._src.client.lookup_tracing import Reads, by_rows, find_reads
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.model import AUTO, Model, Step, measure, predict_in, shapes_of
from fedrecon._src.core.pytrees import flatten

LARGEST_CHECKED = 2**26  # columns with more numbers than this are not read through before training
CHECKED_AT_ONCE = 2**14  # clients
PROBED = 8  # examples of the batch that a model is traced with
NUMBERED = "Number them from 0 first: ids, numbers = numpy.unique(column, return_inverse=True)."


def decide_lookups(algorithm: Algorithm, clients: Clients) -> Algorithm:
    """Decide the lookups of an algorithm's model, the same for all hosts that will run it.

    A model whose lookups are "auto" is traced with the shapes of the data; tables that it reads only by rows are then
    handled by rows. Without this it runs on whole tables, with the same results. `train` does this by itself.

    Args:
      algorithm: any algorithm.
      clients: data with the features that the model will see on every host.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> import optax
      >>> clients = fr.Clients.from_columns({"item": np.array([0, 3]), "rating": np.float32([1, 5])}, client=[0, 1])
      >>> model = fr.models.matrix_factorization(num_items=10)._replace(lookups="auto")
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=descend, update=descend, server=optax.sgd(1.0))
      >>> fr.kit.decide_lookups(algorithm, clients).model.lookups
      {'item_embedding': ('item',)}
    """
    if algorithm.model.lookups != AUTO:
        return algorithm
    reads = known_lookups(algorithm.model, clients)
    return with_lookups(algorithm, tuple((path, read.features) for path, read in reads.items() if read.features))


@functools.lru_cache(maxsize=8)
def with_lookups(algorithm: Algorithm, lookups: tuple[tuple[str, tuple[str, ...]], ...]) -> Algorithm:
    """Put decided lookups into an algorithm's model. Cached, so that code for the result is compiled once.

    Args:
      algorithm: any algorithm.
      lookups: `(path, features)` of every lookup table.
    """
    model = algorithm.model
    if model.lookups == AUTO:
        model = by_rows(model, dict(lookups))
    elif lookup_groups(model) != dict(lookups):
        model = model._replace(lookups=dict(lookups))
    return dataclasses.replace(algorithm, model=model)


def check_training(algorithm: Algorithm, clients: Clients) -> None:
    """Raise an error if the model, the algorithm and the data do not fit together.

    Args:
      algorithm: the algorithm to run.
      clients: the data.
    """
    if clients.num_examples == 0:
        raise ValueError("the clients have no examples")
    check_values(algorithm, clients)
    check_lookups(algorithm.model, *stand_ins(algorithm, clients))
    check_reconstruction(algorithm, clients)


def check_reconstruction(algorithm: Algorithm, clients: Clients) -> None:
    """Raise an error if the algorithm cannot reconstruct its model's local parameters.

    Args:
      algorithm: the algorithm to run.
      clients: the data.
    """
    facts = _facts_of(algorithm, _kind(clients))
    if "reconstructs" not in facts:
        algorithm.method.check(*stand_ins(algorithm, clients), jnp.ones(PROBED, bool))
        facts["reconstructs"] = True


def check_values(algorithm: Algorithm, clients: Clients) -> None:
    """Raise an error if a column that the model reads has NaN or infinite values, or labels that are no class.

    Args:
      algorithm: the algorithm to run.
      clients: the data; columns of more than `LARGEST_CHECKED` numbers are not checked.
    """
    for name in features_of(algorithm, clients):
        check_finite(clients, name)
    label = algorithm.model.class_label
    if label is None:
        return
    batch = probe(clients)
    logits = jax.eval_shape(algorithm.model.predict, *_shapes(algorithm.model), batch)
    largest, rule = 1, "labels are 0 to 1, since there is one logit for each"
    if logits.shape[:-1] == batch[label].shape and logits.shape[-1] > 1:
        largest = logits.shape[-1] - 1
        rule = f"classes are 0 to {largest}, since the model has {largest + 1} logits"
    _check_column(clients, label, lambda values: (values < 0) | (values > largest), rule)


def check_finite(clients: Clients, name: str) -> None:
    """Raise an error if a column that a model reads has NaN or infinite values.

    Args:
      clients: the data.
      name: of the column.
    """
    if clients.columns[name].dtype.kind == "f":
        _check_column(clients, name, lambda values: ~np.isfinite(values), "the model reads it, so it must be finite")


def _check_column(clients: Clients, name: str, is_bad: Callable[[np.ndarray], np.ndarray], rule: str) -> None:
    column = clients.columns[name]
    for first in range(0, len(clients) if column.size <= LARGEST_CHECKED else 0, CHECKED_AT_ONCE):
        starts, ends = (bounds[first : first + CHECKED_AT_ONCE] for bounds in (clients.starts, clients.ends))
        rows = rows_of(starts, ends)  # rows that belong to no client, such as those of a client left out, may be bad
        bad = is_bad(column[rows])  # (rows, ...)
        if bad.any():
            at = int(bad.any(tuple(range(1, bad.ndim))).argmax())
            client = int(np.searchsorted(np.cumsum(ends - starts), at, side="right"))
            value, example = np.ravel(column[rows[at]])[bad[at].argmax()], rows[at] - starts[client]
            shown = first + client if clients.names is None else clients.names[first + client]
            raise ValueError(f"column {name!r} holds {value} (client {shown}, example {example}); {rule}")


def features_of(algorithm: Algorithm, clients: Clients) -> list[str]:
    """List the features that the algorithm's model reads; see `features_used`.

    Args:
      algorithm: the algorithm to run.
      clients: the data.
    """
    facts = _facts_of(algorithm, _kind(clients))
    if "features" not in facts:
        facts["features"] = features_used(algorithm.model, clients)
    return facts["features"]


@functools.lru_cache(maxsize=256)
def _facts_of(algorithm: Algorithm, kind: tuple) -> dict[str, Any]:
    """Return what is known about an algorithm and a kind of columns, to be added to: finding out traces the model."""
    return {}


def _kind(clients: Clients) -> tuple:
    """Return the name, the type and the shape of each column."""
    return tuple((name, column.dtype.str, column.shape[1:]) for name, column in clients.columns.items())


def features_used(model: Model, clients: Clients) -> list[str]:
    """List the features that the model's predictions, loss and metrics read, in the order the clients have them.

    Args:
      model: what is traced.
      clients: the data.

    Raises:
      ValueError: if the model reads a feature that the clients do not have, if a feature that a declared lookup reads
        holds no ids, or if loss or predictions have a shape that does not fit the examples.
    """
    _check_ids(model, clients)
    used: set[str] = set()
    batch, key = probe(clients), jax.random.key(0)

    class Recorder(collections.UserDict[str, Any]):
        """A batch that records which of its features are read."""

        def __getitem__(self, name: str) -> Any:
            used.add(name)
            return super().__getitem__(name)

        def __missing__(self, name: str) -> Any:
            is_text = name in clients.columns
            why = f"holds text, not numbers. {NUMBERED}" if is_text else f"is none of {', '.join(self.data)}"
            raise ValueError(f"the model reads the feature {name!r}, which {why}")

        def __contains__(self, name: object) -> bool:
            return name in clients.columns  # also if it holds text, so that reading it says so

    def run_model(params: Any, local: Any, columns: Mapping[str, Any]) -> Any:
        recorder = Recorder(columns)
        predictions = model.predict(params, local, recorder)
        predict_in(model, params, local, recorder, Step(jnp.ones(PROBED, bool), key))
        if model.evidence is not None:
            model.evidence(params, recorder, jnp.ones(PROBED, bool))
        for name, weighted in [("loss", model.loss), *((n, m.measure) for n, m in model.metrics.items())]:
            values, weights = weighted(predictions, recorder)
            if jnp.shape(values)[:1] != (PROBED,) or jnp.shape(values) != jnp.shape(weights):
                raise ValueError(
                    f"`{name}` returns values of shape {jnp.shape(values)} and weights of shape {jnp.shape(weights)} "
                    f"for {PROBED} examples; both must be ({PROBED}, ...)"
                )
        return measure(model, predictions, recorder, jnp.ones(PROBED, bool))

    jax.eval_shape(run_model, *_shapes(model), batch)
    return [name for name in clients.columns if name in used]


def _check_ids(model: Model, clients: Clients) -> None:
    for path, feature in ((path, f) for path, features in lookup_groups(model).items() for f in features):
        kind = clients.columns[feature].dtype if feature in clients.columns else np.dtype(int)
        if not np.issubdtype(kind, np.integer):
            holds = "text" if kind.kind in "SU" else str(kind)
            raise ValueError(f"`lookups` reads {path!r} at {feature!r}, which holds {holds}, not ids. {NUMBERED}")


def known_lookups(model: Model, clients: Clients) -> dict[str, Reads]:
    """Find out how a model reads its global parameters, given the clients' data.

    A table is not treated as a lookup if the data has ids outside its rows: the model may handle those in its own way.

    Args:
      model: what is traced.
      clients: the data.
    """
    used = features_used(model, clients)
    reads = find_reads(model, _probe_of(clients, used))
    shapes = flatten(_shapes(model)[0])[0]
    for path, read in reads.items():
        rows = shapes[path].shape[0] if shapes[path].shape else 0
        if outside := [feature for feature in read.features if not _in_range(clients.columns[feature], rows)]:
            reads[path] = Reads((), f"{outside[0]} holds ids outside its rows 0 to {rows - 1}")
    return reads


def _in_range(ids: np.ndarray, rows: int) -> bool:
    # Larger features take too long to check here; packing checks the ids that it packs.
    return ids.size > LARGEST_CHECKED or ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < rows)


def stand_ins(algorithm: Algorithm, clients: Clients) -> tuple[Any, Any, dict[str, Any]]:
    """Return global parameters, local parameters and a batch to try a model with: noise, noise and real examples.

    Args:
      algorithm: its model is tried.
      clients: the data.
    """
    params, local = map(random_params, _shapes(algorithm.model))
    return params, local, _probe_of(clients, features_of(algorithm, clients))


def _probe_of(clients: Clients, features: Sequence[str]) -> dict[str, Any]:
    return {name: jnp.asarray(column) for name, column in probe(clients).items() if name in features}


def _shapes(model: Model) -> tuple[Any, Any]:
    return shapes_of(model.init_global), shapes_of(model.init_local)


def probe(clients: Clients) -> dict[str, np.ndarray]:
    """Return a batch of `PROBED` examples. Examples repeat if there are not enough; without any, all are zeros.

    Args:
      clients: the data.
    """
    numbers = {name: column for name, column in clients.columns.items() if column.dtype.kind in "biuf"}
    if clients.num_examples == 0:
        return {name: np.zeros((PROBED, *column.shape[1:]), column.dtype) for name, column in numbers.items()}
    sizes = clients.ends[:1000] - clients.starts[:1000]  # not of all clients: there may be millions
    who = int(np.argmax(sizes))
    at = int(clients.starts[who]) + np.arange(PROBED) % max(1, int(sizes[who]))
    return {name: np.asarray(column[at]) for name, column in numbers.items()}
