"""Find lookups by tracing: which tables a model reads only by rows, and how to run it with only those rows.

A model is traced to a jaxpr with the shapes of whole tables. A table is a lookup if it is only the operand of gathers
of single rows, at indices that are a batch's ids, possibly reshaped. The jaxpr can then be evaluated with fewer rows:
all equations stay the same, except that those gathers take the rows that are available.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedrecon._src.client.lookups.jaxprs import IdsTag, TableTag, Value, evaluate
from fedrecon._src.client.lookups.lookup_tables import ORIGINAL, BatchRows, original_batch
from fedrecon._src.core.model import Batch, Model, Step
from fedrecon._src.core.pytrees import Params, flatten, unflatten


class Reads(NamedTuple):
    """How a model reads one global parameter.

    Attributes:
      features: if it is only read by rows, the features whose ids index it; else empty.
      why: why it is not only read by rows; empty if it is.
    """

    features: tuple[str, ...]
    why: str = ""


def find_lookups(model: Model, batch: Batch) -> dict[str, tuple[str, ...]]:
    """Find the global tables that a model reads only by rows at the ids in features of a batch.

    Args:
      model: what is traced; nothing is computed.
      batch: features in the shapes and types that the model will see; their values do not matter.

    Returns:
      `{path: features}`, for a model's `lookups`.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> model = fr.models.matrix_factorization(num_items=100)
      >>> fr.kit.find_lookups(model, {"item": jnp.array([1, 2]), "rating": jnp.array([4.0, 5.0])})
      {'item_embedding': ('item',)}
    """
    return {path: reads.features for path, reads in find_reads(model, batch).items() if reads.features}


def find_reads(model: Model, batch: Batch) -> dict[str, Reads]:
    """Find out how a model reads each of its global parameters; see `find_lookups`.

    Args:
      model: what is traced; nothing is computed.
      batch: features in the shapes and types that the model will see; their values do not matter.
    """
    key = jax.random.key(0)
    shared, local = jax.eval_shape(model.init_global, key), jax.eval_shape(model.init_local, key)
    leaves, structure = flatten(shared)
    examples = next(iter(batch.values())).shape[0]
    mask: Any = jax.ShapeDtypeStruct((examples,), jnp.bool_)
    watched = _Watch()
    calls: list[tuple[Callable, tuple]] = [(model.predict, ())]
    if model.predict_train is not None:
        calls.append((model.predict_train, (Step(mask, jax.eval_shape(lambda: key)),)))
    if model.state is not None:
        calls.append((model.state.advance, (mask,)))
    if model.evidence is not None:
        calls.append((_with_local(model.evidence), (mask,)))
    for function, more in calls:
        closed, _ = _trace(function, structure, leaves, local, batch, more)
        jax.eval_shape(
            functools.partial(_run, closed, tables=watched, original=batch), leaves, local, dict(batch), more
        )
    state = () if model.state is None else model.state.shared
    reads = {}
    for path in leaves:
        if path in state:
            reads[path] = Reads((), "it is state, not trained")
        elif path in watched.spoiled:
            reads[path] = Reads((), watched.spoiled[path])
        elif path not in watched.features:
            reads[path] = Reads((), "no row of it is looked up")
        else:
            reads[path] = Reads(tuple(sorted(watched.features[path])))
    return _without_conflicts(reads, leaves)


def _without_conflicts(reads: dict[str, Reads], leaves: Mapping[str, Any]) -> dict[str, Reads]:
    """Keep a table dense if it shares some but not all features with a larger one: both must use one numbering."""
    taken: dict[str, tuple[str, ...]] = {}
    for path in sorted(reads, key=lambda p: -leaves[p].size):
        features = reads[path].features
        other = next((taken[f] for f in features if f in taken and taken[f] != features), None)
        if other is not None:
            reads[path] = Reads((), f"a larger table is read at {' and '.join(other)}, which are not the same features")
        else:
            taken |= dict.fromkeys(features, features)
    return reads


def by_rows(model: Model, lookups: Mapping[str, tuple[str, ...]]) -> Model:
    """Return a model that has these lookups and can run with only some rows of those tables.

    With whole tables it runs as before, untraced.

    Args:
      model: any model.
      lookups: `{path: features}`, as `find_lookups` returns them.
    """
    shapes = flatten(jax.eval_shape(model.init_global, jax.random.key(0)))[0]

    def narrowing(function: Callable) -> Callable:
        def run(params: Params, local: Params, batch: Batch, *more: Any) -> Any:
            narrow = [path for path, features in lookups.items() if ORIGINAL + features[0] in batch]
            if not narrow:
                return function(params, local, batch, *more)
            leaves, structure = flatten(params)
            before = original_batch(batch)
            whole = {**leaves, **{path: shapes[path] for path in narrow}}
            closed, out = _trace(function, structure, whole, local, before, more)
            tables = _Narrow({path: leaves[path] for path in narrow})
            return jax.tree.unflatten(out, _run(closed, leaves, local, before, more, tables, batch))

        return run

    def evidence(params: Params, batch: Batch, mask: Any) -> Params:
        return narrowing(_with_local(model.evidence))(params, (), batch, mask)

    state = model.state
    return model._replace(
        lookups=dict(lookups),
        predict=narrowing(model.predict),
        evidence=None if model.evidence is None else evidence,
        predict_train=None if model.predict_train is None else narrowing(model.predict_train),
        state=None if state is None else state._replace(advance=narrowing(state.advance)),
    )


def _with_local(evidence: Any) -> Callable:
    """Return a model's evidence as a function that also takes local parameters, like the model's other functions."""
    return lambda params, local, *rest: evidence(params, *rest)


def _trace(
    function: Callable, structure: Any, leaves: Mapping[str, Any], local: Any, batch: Batch, more: tuple
) -> tuple[Any, Any]:
    """Trace a function of a model; return the closed jaxpr and the structure of its outputs."""

    def call(leaves: Any, local: Any, batch: Any, more: Any) -> Any:
        return function(unflatten(structure, leaves), local, batch, *more)

    arguments = jax.tree.map(_shape, (dict(leaves), local, dict(batch), more))
    closed, out = jax.make_jaxpr(call, return_shape=True)(*arguments)
    return closed, jax.tree.structure(out)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


class _Watch:
    """Runs gathers on whole tables, and records by which features tables are read and how else they are used."""

    def __init__(self) -> None:
        self.features: dict[str, set[str]] = {}
        self.spoiled: dict[str, str] = {}

    def value(self, path: str, leaf: Any) -> Value:
        return Value(leaf, TableTag(path))

    def slots(self, feature: str, batch: Batch) -> Any:
        return None

    def take(self, eqn: Any, table: TableTag, ids: IdsTag | None, why: str) -> Any:
        if ids is None:
            self.spoil(table, why)
        else:
            self.features.setdefault(table.path, set()).add(ids.feature)
        return None  # let the equation itself be evaluated

    def spoil(self, table: TableTag, why: str) -> None:
        self.spoiled.setdefault(table.path, why)


class _Narrow:
    """Runs gathers on the rows that are available."""

    def __init__(self, tables: Mapping[str, Any]):
        self.tables = tables

    def value(self, path: str, leaf: Any) -> Value:
        return Value(None, TableTag(path)) if path in self.tables else Value(leaf)

    def slots(self, feature: str, batch: Batch) -> Any:
        return batch[feature] if ORIGINAL + feature in batch else None

    def take(self, eqn: Any, table: TableTag, ids: IdsTag | None, why: str) -> Any:
        if ids is None:
            return self.spoil(table, why)
        rows, shape = self.tables[table.path], eqn.outvars[0].aval.shape
        if isinstance(rows, BatchRows) and ids.in_order:
            values_read = rows.values[rows.places[ids.feature]]
        else:
            values = rows.values if isinstance(rows, BatchRows) else rows
            values_read = values.at[ids.slots].get(mode="promise_in_bounds")
        values_read = values_read.reshape(shape)
        for primitive, params in table.then:
            values_read = primitive.bind(values_read, **params)
        return values_read

    def spoil(self, table: TableTag, why: str) -> None:
        raise ValueError(f"the table {table.path!r} was only read by rows when the model was traced, but now {why}")


def _run(
    closed: Any,
    leaves: Mapping[str, Any],
    local: Any,
    batch: Mapping[str, Any],
    more: tuple,
    tables: _Watch | _Narrow,
    original: Batch,
) -> list[Any]:
    """Evaluate a traced function, with tables and ids marked."""
    marked = {path: tables.value(path, leaf) for path, leaf in leaves.items()}
    columns = {}
    for name, column in batch.items():
        is_ids = jnp.issubdtype(column.dtype, jnp.integer)
        columns[name] = Value(column, IdsTag(name, tables.slots(name, original)) if is_ids else None)
    rest = jax.tree.map(Value, (local, more))
    arguments = jax.tree.leaves((marked, rest[0], columns, rest[1]), is_leaf=lambda x: isinstance(x, Value))
    consts = [Value(c) for c in closed.consts]
    outputs = evaluate(closed.jaxpr, consts, arguments, tables)
    for value in outputs:
        if isinstance(value.tag, TableTag):
            tables.spoil(value.tag, "it is returned unchanged")
    return [value.array for value in outputs]
