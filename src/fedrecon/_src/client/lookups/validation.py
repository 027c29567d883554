"""Find out which features of the clients' data a model reads, and check that the model fits the data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.client.lookups.tables import lookup_groups, random_params
from fedrecon._src.client.lookups.tracing import Reads, find_reads
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.model import Model, Step, measure, predict_in
from fedrecon._src.core.pytrees import flatten

RANGE_CHECKED = 2**26  # at most this many ids of a feature have their range checked before training
PROBED = 8  # examples of the batch that a model is traced with


NUMBERED = "Number them from 0 first: ids, numbers = numpy.unique(column, return_inverse=True)."


class _Recorder(Mapping[str, Any]):
    """A batch that records which of its features are read."""

    def __init__(self, columns: Mapping[str, Any], used: set[str], all_columns: Collection[str]):
        self._columns, self._used, self._all_columns = columns, used, all_columns

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns and name in self._all_columns:
            raise ValueError(f"the model reads the feature {name!r}, which holds text, not numbers. {NUMBERED}")
        if name not in self._columns:
            raise ValueError(f"the model reads the feature {name!r}; the clients have: {', '.join(self._columns)}")
        self._used.add(name)
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


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
    batch = probe(clients)
    key = jax.random.key(0)

    def run_model(params: Any, local: Any, columns: Mapping[str, Any]) -> Any:
        recorder = _Recorder(columns, used, clients.columns)
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
    for path, features in lookup_groups(model).items():
        for feature in features:
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
    reads = find_reads(model, {name: jnp.asarray(column) for name, column in probe(clients).items() if name in used})
    shapes = flatten(_shapes(model)[0])[0]
    for path, read in reads.items():
        rows = shapes[path].shape[0] if shapes[path].shape else 0
        outside = [feature for feature in read.features if not _in_range(clients.columns[feature], rows)]
        if outside:
            reads[path] = Reads((), f"{outside[0]} holds ids outside its rows 0 to {rows - 1}")
    return reads


def _in_range(ids: np.ndarray, rows: int) -> bool:
    # Larger features take too long to check here; packing checks the ids that it packs.
    return ids.size > RANGE_CHECKED or ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < rows)


def stand_ins(model: Model, clients: Clients, used: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
    """Return global parameters, local parameters and a batch to try a model with: noise, noise and real examples.

    Args:
      model: what is tried.
      clients: the data.
      used: the features that the model reads.
    """
    batch = {name: jnp.asarray(column) for name, column in probe(clients).items() if name in used}
    params, local = (random_params(shapes) for shapes in _shapes(model))
    return params, local, batch


def _shapes(model: Model) -> tuple[Any, Any]:
    return jax.eval_shape(lambda: (model.init_global(jax.random.key(0)), model.init_local(jax.random.key(0))))


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
