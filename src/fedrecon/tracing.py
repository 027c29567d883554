"""Lookups without being told: which tables a model reads only by rows, found by tracing it, and then run by rows.

A model is traced to a jaxpr at the shapes of whole tables. There a table may only be the operand of gathers of single
rows, at indices that are a batch's ids but for their shape. What is traced can then be evaluated with fewer rows: all
equations as they are, except that those gathers take the rows that are here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fedrecon.lookups import ORIGINAL, Rows, original_batch
from fedrecon.model import Batch, Model, Params, Step, flatten, unflatten

# Names of primitives. Ids stay ids under the first, in order under the second; rows of a table may be taken before the
# third just as well as after.
_MOVES = {"transpose", "slice", "rev", "copy", "convert_element_type", "reshape", "squeeze", "broadcast_in_dim"}
_IN_ORDER = {"copy", "convert_element_type", "reshape", "squeeze", "expand_dims"}
_BY_ROW = {"copy", "convert_element_type", "stop_gradient"}


class Reads(NamedTuple):
    """How a model reads one global parameter.

    Attributes:
      features: those whose ids index it, if it is only read by rows; else empty.
      why: why it is not only read by rows; empty if it is.
    """

    features: tuple[str, ...]
    why: str = ""


class _Table(NamedTuple):
    path: str
    then: tuple[tuple[Any, dict], ...] = ()  # what is done to it before its rows are taken


class _Ids(NamedTuple):
    feature: str
    slots: Any  # where the rows are, in the shape that the ids have come to; None where tables are whole
    in_order: bool = True  # whether they are all of the feature's ids, in their order
    most: int | None = None  # ids above this were changed


class _About(NamedTuple):
    """Something computed from ids that only counts together with them."""

    kind: str
    ids: _Ids


class _Known(NamedTuple):
    value: Any


class _Value(NamedTuple):
    array: Any  # None for a table of which only some rows are here
    tag: Any = None


def find_lookups(model: Model, batch: Batch) -> dict[str, tuple[str, ...]]:
    """Find the global tables that a model reads only by rows at the ids in features of a batch.

    Args:
      model: what is traced; nothing is computed.
      batch: features in the shapes and types that the model will see; their values do not matter.

    Returns:
      `{path: features}`, to be used as a model's `lookups`.
    """
    return {path: reads.features for path, reads in find_reads(model, batch).items() if reads.features}


def find_reads(model: Model, batch: Batch) -> dict[str, Reads]:
    """Find out how a model reads each of its global parameters; see `find_lookups`."""
    key = jax.random.key(0)
    shared, local = jax.eval_shape(model.init_global, key), jax.eval_shape(model.init_local, key)
    leaves, structure = flatten(shared)
    examples = next(iter(batch.values())).shape[0]
    mask: Any = jax.ShapeDtypeStruct((examples,), jnp.bool_)
    watched = _Watch()
    calls: list[tuple[Callable, tuple]] = [(model.predict, ())]
    if model.fit is not None:
        calls.append((model.fit, (Step(mask, jax.eval_shape(lambda: key)),)))
    if model.state is not None:
        calls.append((model.state.advance, (mask,)))
    if model.evidence is not None:
        calls.append((_with_local(model.evidence), (mask,)))
    for function, more in calls:
        closed, _ = _trace(function, structure, leaves, local, batch, more)
        jax.eval_shape(functools.partial(_run, closed, tables=watched, given=batch), leaves, local, dict(batch), more)
    state = () if model.state is None else model.state.shared
    found = {}
    for path in leaves:
        if path in state:
            found[path] = Reads((), "it is state, not trained")
        elif path in watched.spoiled:
            found[path] = Reads((), watched.spoiled[path])
        elif path not in watched.features:
            found[path] = Reads((), "no row of it is looked up")
        else:
            found[path] = Reads(tuple(sorted(watched.features[path])))
    return _without_conflicts(found, leaves)


def _without_conflicts(found: dict[str, Reads], leaves: Mapping[str, Any]) -> dict[str, Reads]:
    """Leave tables dense that share features with a larger one but not all: one numbering must serve both."""
    taken: dict[str, tuple[str, ...]] = {}
    for path in sorted(found, key=lambda p: -leaves[p].size):
        features = found[path].features
        other = next((taken[f] for f in features if f in taken and taken[f] != features), None)
        if other is not None:
            found[path] = Reads((), f"a larger table is read at {' and '.join(other)}, not just the same features")
        else:
            taken |= dict.fromkeys(features, features)
    return found


def by_rows(model: Model, lookups: Mapping[str, tuple[str, ...]]) -> Model:
    """Return a model whose lookups are these, and which can be run with just some rows of those tables.

    Where it is given whole tables it is the same model, untraced.
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
        fit=None if model.fit is None else narrowing(model.fit),
        state=None if state is None else state._replace(advance=narrowing(state.advance)),
    )


def _with_local(evidence: Any) -> Callable:
    """Return evidence as a function that takes local parameters, as a model's other functions do."""
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
    """Runs gathers on whole tables, and notes which rows are read and what else is done to tables."""

    def __init__(self) -> None:
        self.features: dict[str, set[str]] = {}
        self.spoiled: dict[str, str] = {}

    def value(self, path: str, leaf: Any) -> _Value:
        return _Value(leaf, _Table(path))

    def slots(self, feature: str, batch: Batch) -> Any:
        return None

    def take(self, eqn: Any, table: _Table, indices: _Value, operand: Any) -> Any:
        why, ids = _row_gather(eqn, indices)
        if why:
            self.spoil(table, why)
        else:
            self.features.setdefault(table.path, set()).add(ids.feature)
        return None  # let the equation itself be evaluated

    def spoil(self, table: _Table, why: str) -> None:
        self.spoiled.setdefault(table.path, why)


class _Narrow:
    """Runs gathers on the rows that are here."""

    def __init__(self, tables: Mapping[str, Any]):
        self.tables = tables

    def value(self, path: str, leaf: Any) -> _Value:
        return _Value(None, _Table(path)) if path in self.tables else _Value(leaf)

    def slots(self, feature: str, batch: Batch) -> Any:
        return batch[feature] if ORIGINAL + feature in batch else None

    def take(self, eqn: Any, table: _Table, indices: _Value, operand: Any) -> Any:
        _, ids = _row_gather(eqn, indices)
        rows, shape = self.tables[table.path], eqn.outvars[0].aval.shape
        if isinstance(rows, Rows) and ids.in_order:
            found = rows.values[rows.places[ids.feature]]
        else:
            values = rows.values if isinstance(rows, Rows) else rows
            found = values.at[ids.slots].get(mode="promise_in_bounds")
        found = found.reshape(shape)
        for primitive, params in table.then:
            found = primitive.bind(found, **params)
        return found

    def spoil(self, table: _Table, why: str) -> None:
        raise ValueError(f"the table {table.path!r} was found to be read by rows only, but now {why}")


def _row_gather(eqn: Any, indices: _Value) -> tuple[str, Any]:
    """Return why a gather does not just take rows at ids (empty if it does), and the ids."""
    operand, out = eqn.invars[0].aval, eqn.outvars[0].aval
    numbers, sizes, mode = (eqn.params[name] for name in ("dimension_numbers", "slice_sizes", "mode"))
    tag = indices.tag
    others = len(numbers.start_index_map) > 1
    if isinstance(tag, _About) and tag.kind.startswith("column") and others:
        column = int(tag.kind.removeprefix("column"))
        if numbers.start_index_map[column] != 0 or mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
            return "it is read along another axis than its rows", None
        tag = tag.ids
    elif not isinstance(tag, _Ids):
        return "its rows are read at indices that are not a feature's ids", None
    elif numbers.start_index_map != (0,):
        return "it is read along another axis than its rows", None
    if tuple(sizes) != (1, *operand.shape[1:]) or numbers.operand_batching_dims:
        return "more or less than single rows of it are read", None
    within = len(numbers.offset_dims)
    if tuple(numbers.offset_dims) != tuple(range(out.ndim - within, out.ndim)):
        return "its rows are read in another order of axes", None
    if tag.most is not None and tag.most < operand.shape[0] - 1:
        return f"its rows are read at ids of which those above {tag.most} were changed", None
    return "", tag


def _run(
    closed: Any,
    leaves: Mapping[str, Any],
    local: Any,
    batch: Mapping[str, Any],
    more: tuple,
    tables: _Watch | _Narrow,
    given: Batch,
) -> list[Any]:
    """Evaluate what was traced, with tables and ids marked as such."""
    marked = {path: tables.value(path, leaf) for path, leaf in leaves.items()}
    columns = {}
    for name, column in batch.items():
        is_ids = jnp.issubdtype(column.dtype, jnp.integer)
        columns[name] = _Value(column, _Ids(name, tables.slots(name, given)) if is_ids else None)
    rest = jax.tree.map(_Value, (local, more))
    arguments = jax.tree.leaves((marked, rest[0], columns, rest[1]), is_leaf=lambda x: isinstance(x, _Value))
    consts = [_Value(c) for c in closed.consts]
    found = _evaluate(closed.jaxpr, consts, arguments, tables)
    for value in found:
        if isinstance(value.tag, _Table):
            tables.spoil(value.tag, "it is returned as it is")
    return [value.array for value in found]


def _evaluate(
    jaxpr: Any, consts: Iterable[_Value], arguments: Iterable[_Value], tables: _Watch | _Narrow
) -> list[_Value]:
    env: dict[Any, _Value] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> _Value:
        return _Value(atom.val, _Known(atom.val)) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, _equation(eqn, values, tables), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, values: list[_Value], tables: _Watch | _Narrow) -> list[_Value]:
    name, tags = eqn.primitive.name, [value.tag for value in values]
    marked = [tag for tag in tags if isinstance(tag, _Table)]
    if name in ("jit", "pjit", "closed_call", "core_call") and any(tag is not None for tag in tags):
        inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        return _evaluate(inner.jaxpr, [_Value(c) for c in inner.consts], values, tables)
    if name == "remat2" and marked:
        return _checkpointed(eqn, values, tables)
    if marked:
        table = marked[0]
        if name == "gather" and len(marked) == 1 and isinstance(tags[0], _Table):
            found = tables.take(eqn, table, values[1], values[0].array)
            if found is not None:
                return [_Value(found)]
        elif name in _BY_ROW:
            then = (*table.then, (eqn.primitive, eqn.primitive.get_bind_params(eqn.params)))
            array = None if values[0].array is None else _bind(eqn, values)[0]
            return [_Value(array, table._replace(then=then))]
        else:
            for each in marked:
                tables.spoil(each, _spoiling(name))
    arrays = _bind(eqn, values)
    tag = _tag_of(eqn, name, tags)
    return [_Value(array, tag if len(arrays) == 1 else None) for array in arrays]


def _bind(eqn: Any, values: list[_Value]) -> list[Any]:
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*(v.array for v in values), **eqn.primitive.get_bind_params(eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


def _spoiling(name: str) -> str:
    if name in ("scan", "while", "cond"):
        return f"it is read inside a {name}"
    if name.startswith("custom_"):
        return "it is read inside a function with a derivative of its own"
    return f"it is also used whole, by {name}"


def _checkpointed(eqn: Any, values: list[_Value], tables: _Watch | _Narrow) -> list[_Value]:
    """Evaluate what is to be computed again in the backward pass, so that it is."""
    tags: list[Any] = []

    def inner(arrays: list[Any]) -> list[Any]:
        inside = [_Value(array, value.tag) for array, value in zip(arrays, values, strict=True)]
        found = _evaluate(eqn.params["jaxpr"], [], inside, tables)
        tags[:] = [value.tag if not isinstance(value.tag, _Ids | _About) else None for value in found]
        return [value.array for value in found]

    arrays = [value.array for value in values]
    policy, prevent = eqn.params["policy"], eqn.params["prevent_cse"]
    found = jax.checkpoint(inner, policy=policy, prevent_cse=prevent)(arrays)
    return [_Value(array, tag) for array, tag in zip(found, tags, strict=True)]


def _tag_of(eqn: Any, name: str, tags: list[Any]) -> Any:
    """Return what is known of an equation's result: whether it still is a feature's ids."""
    ids = next((tag for tag in tags if isinstance(tag, _Ids)), None)
    if name in ("convert_element_type", "broadcast_in_dim") and isinstance(tags[0], _Known):
        return tags[0]
    if name == "select_n" and len(tags) == 3:
        which, plain, wrapped = tags
        same = all(
            isinstance(tag, _About) and tag.kind == kind and tag.ids is plain
            for tag, kind in ((which, "negative"), (wrapped, "wrapped"))
        )
        return plain if same else None
    if ids is None:
        return None
    if name in _MOVES:
        return _moved(eqn, name, ids)
    if name == "concatenate":
        return _column(eqn, tags)
    other = next((tag.value for tag in tags if isinstance(tag, _Known)), None)
    if other is None or jnp.ndim(other) != 0:
        return None
    if name == "lt" and other == 0 and tags[0] is ids:
        return _About("negative", ids)
    if name == "add":
        return _About("wrapped", ids)
    if name == "max" and other <= 0:
        return ids
    if name == "min":
        return _at_most(ids, int(other))
    return None


def _at_most(ids: _Ids, most: int) -> _Ids:
    return ids._replace(most=most if ids.most is None else min(ids.most, most))


def _moved(eqn: Any, name: str, ids: _Ids) -> _Ids | None:
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "convert_element_type":
        return _at_most(ids, jnp.iinfo(after.dtype).max) if jnp.issubdtype(after.dtype, jnp.integer) else None
    if len(eqn.invars) != 1:
        return None
    slots = None if ids.slots is None else eqn.primitive.bind(ids.slots, **eqn.primitive.get_bind_params(eqn.params))
    kept = name in _IN_ORDER or (name == "broadcast_in_dim" and before.size == after.size)
    return ids._replace(slots=slots, in_order=ids.in_order and kept)


def _column(eqn: Any, tags: list[Any]) -> _About | None:
    """Recognise indices of rows and of further axes side by side: which column holds the ids of rows."""
    last = eqn.outvars[0].aval.ndim - 1
    columns = [number for number, tag in enumerate(tags) if isinstance(tag, _Ids)]
    single = all(atom.aval.shape[-1] == 1 for atom in eqn.invars)
    if eqn.params["dimension"] != last or len(columns) != 1 or not single:
        return None
    return _About(f"column{columns[0]}", tags[columns[0]])
