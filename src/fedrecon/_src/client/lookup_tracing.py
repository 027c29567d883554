"""Find lookups by tracing: which tables a model reads only by rows, and how to run it with only those rows.

A model is traced to a jaxpr with the shapes of whole tables. A table is a lookup if it is only the operand of gathers
of single rows, at indices that are a batch's ids, possibly reshaped. The jaxpr can then be evaluated with fewer rows:
all equations stay the same, except that those gathers take the rows that are available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fedrecon._src.client.lookup_tables import ORIGINAL, BatchRows, original_batch
from fedrecon._src.core.model import Batch, Model, Step, shapes_of
from fedrecon._src.core.pytrees import Params, flatten, unflatten

# Names of primitives. `_MOVES` keep ids as they are and `_IN_ORDER` also keep their order; `_BY_ROW` commute with
# taking rows of a table.
_MOVES = {"transpose", "slice", "rev", "copy", "convert_element_type", "reshape", "squeeze", "broadcast_in_dim"}
_IN_ORDER = {"copy", "convert_element_type", "reshape", "squeeze", "expand_dims"}
_BY_ROW = {"copy", "convert_element_type", "stop_gradient"}


class TableTag(NamedTuple):
    """Marks a parameter that may be a table read by rows."""

    path: str
    then: tuple[tuple[Any, dict], ...] = ()  # what is done to it before its rows are taken


class IdsTag(NamedTuple):
    """Marks a feature's ids, possibly reshaped."""

    feature: str
    slots: Any  # positions of the rows, in the current shape of the ids; None if tables are whole
    in_order: bool = True  # whether they are all of the feature's ids, in their original order
    most: int | None = None  # ids above this were changed


class _DerivedTag(NamedTuple):
    """Marks an intermediate value computed from ids, such as whether they are negative."""

    kind: str
    ids: IdsTag


class _ConstantTag(NamedTuple):
    """Marks a constant of the program."""

    value: Any


class Value(NamedTuple):
    """A value and its mark, if it has one."""

    array: Any  # None for a table of which only some rows are available
    tag: Any = None


class GatherHandler:
    """What happens when an equation uses a table: gathers run on whole tables, and all uses are recorded."""

    def __init__(self) -> None:
        self.features: dict[str, set[str]] = {}  # by which tables are read, by path
        self.spoiled: dict[str, str] = {}  # how else tables are used

    def take(self, eqn: Any, table: TableTag, ids: IdsTag) -> Any:
        """Return the rows that a gather takes from a table at a feature's ids; None to evaluate the gather itself."""
        self.features.setdefault(table.path, set()).add(ids.feature)
        return None

    def spoil(self, table: TableTag, why: str) -> None:
        """Note that a table is used in another way than by rows."""
        self.spoiled.setdefault(table.path, why)


def evaluate(jaxpr: Any, consts: Iterable[Any], arguments: Iterable[Value], tables: GatherHandler) -> list[Value]:
    """Evaluate a jaxpr; `tables` handles gathers of rows and is notified of any other use of a table.

    Args:
      jaxpr: what was traced.
      consts: its constants.
      arguments: values of its arguments, tables and ids marked.
      tables: the handler.
    """
    env: dict[Any, Value] = dict(zip(jaxpr.constvars, map(Value, consts), strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Value:
        return Value(atom.val, _ConstantTag(atom.val)) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        env.update(zip(eqn.outvars, _equation(eqn, values, tables), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, values: list[Value], tables: GatherHandler) -> list[Value]:
    name, tags = eqn.primitive.name, [value.tag for value in values]
    marked = [tag for tag in tags if isinstance(tag, TableTag)]
    if name in ("jit", "pjit", "closed_call", "core_call") and any(tag is not None for tag in tags):
        inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        return evaluate(inner.jaxpr, inner.consts, values, tables)
    if name == "remat2" and marked:
        return _checkpointed(eqn, values, tables)
    if marked:
        table = marked[0]
        if name == "gather" and len(marked) == 1 and isinstance(tags[0], TableTag):
            why, ids = _row_gather(eqn, values[1])
            if ids is None:
                tables.spoil(table, why)
            elif (rows := tables.take(eqn, table, ids)) is not None:
                return [Value(rows)]
        elif name in _BY_ROW:
            then = (*table.then, (eqn.primitive, eqn.primitive.get_bind_params(eqn.params)))
            array = None if values[0].array is None else _bind(eqn, values)[0]
            return [Value(array, table._replace(then=then))]
        else:
            for each in marked:
                tables.spoil(each, _spoiling(name))
    arrays = _bind(eqn, values)
    tag = _tag_of(eqn, name, tags)
    return [Value(array, tag if len(arrays) == 1 else None) for array in arrays]


def _bind(eqn: Any, values: list[Value]) -> list[Any]:
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*(v.array for v in values), **eqn.primitive.get_bind_params(eqn.params))
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _spoiling(name: str) -> str:
    if name in ("scan", "while", "cond"):
        return f"it is read inside a {name}"
    if name.startswith("custom_"):
        return "it is read inside a function with a custom derivative"
    return f"it is used whole, by {name}"


def _checkpointed(eqn: Any, values: list[Value], tables: GatherHandler) -> list[Value]:
    """Evaluate a `jax.checkpoint` and keep it one, so that the backward pass still recomputes it."""
    tags: list[Any] = []

    def inner(arrays: list[Any]) -> list[Any]:
        inside = [Value(array, value.tag) for array, value in zip(arrays, values, strict=True)]
        outputs = evaluate(eqn.params["jaxpr"], [], inside, tables)
        tags[:] = [value.tag if not isinstance(value.tag, IdsTag | _DerivedTag) else None for value in outputs]
        return [value.array for value in outputs]

    arrays = [value.array for value in values]
    policy, prevent = eqn.params["policy"], eqn.params["prevent_cse"]
    outputs = jax.checkpoint(inner, policy=policy, prevent_cse=prevent)(arrays)
    return [Value(array, tag) for array, tag in zip(outputs, tags, strict=True)]


def _tag_of(eqn: Any, name: str, tags: list[Any]) -> Any:
    """Return the mark of an equation's result: whether it is still a feature's ids."""
    ids = next((tag for tag in tags if isinstance(tag, IdsTag)), None)
    if name in ("convert_element_type", "broadcast_in_dim") and isinstance(tags[0], _ConstantTag):
        return tags[0]
    if name == "select_n" and len(tags) == 3:
        which, plain, wrapped = tags
        same = all(
            isinstance(tag, _DerivedTag) and tag.kind == kind and tag.ids is plain
            for tag, kind in ((which, "negative"), (wrapped, "wrapped"))
        )
        return plain if same else None
    if ids is None:
        return None
    if name in _MOVES:
        return _moved(eqn, name, ids)
    if name == "concatenate":
        return _column(eqn, tags)
    other = next((tag.value for tag in tags if isinstance(tag, _ConstantTag)), None)
    if other is None or jnp.ndim(other) != 0:
        return None
    if name == "lt" and other == 0 and tags[0] is ids:
        return _DerivedTag("negative", ids)
    if name == "add":
        return _DerivedTag("wrapped", ids)
    if name == "max" and other <= 0:
        return ids
    if name == "min":
        return _at_most(ids, int(other))
    return None


def _at_most(ids: IdsTag, most: int) -> IdsTag:
    return ids._replace(most=most if ids.most is None else min(ids.most, most))


def _moved(eqn: Any, name: str, ids: IdsTag) -> IdsTag | None:
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "convert_element_type":
        return _at_most(ids, jnp.iinfo(after.dtype).max) if jnp.issubdtype(after.dtype, jnp.integer) else None
    if len(eqn.invars) != 1:
        return None
    slots = None if ids.slots is None else eqn.primitive.bind(ids.slots, **eqn.primitive.get_bind_params(eqn.params))
    in_order = name in _IN_ORDER or (name == "broadcast_in_dim" and before.size == after.size)
    return ids._replace(slots=slots, in_order=ids.in_order and in_order)


def _column(eqn: Any, tags: list[Any]) -> _DerivedTag | None:
    """Recognise a concatenation of row ids with indices of other axes, and note which column has the row ids."""
    last = eqn.outvars[0].aval.ndim - 1
    columns = [number for number, tag in enumerate(tags) if isinstance(tag, IdsTag)]
    single = all(atom.aval.shape[-1] == 1 for atom in eqn.invars)
    if eqn.params["dimension"] != last or len(columns) != 1 or not single:
        return None
    return _DerivedTag(f"column{columns[0]}", tags[columns[0]])


def _row_gather(eqn: Any, indices: Value) -> tuple[str, Any]:
    """Return the ids if a gather only takes rows at a feature's ids; otherwise None. The text says why not."""
    operand, out = eqn.invars[0].aval, eqn.outvars[0].aval
    numbers, sizes, mode = (eqn.params[name] for name in ("dimension_numbers", "slice_sizes", "mode"))
    tag = indices.tag
    several_axes = len(numbers.start_index_map) > 1
    if isinstance(tag, _DerivedTag) and tag.kind.startswith("column") and several_axes:
        column = int(tag.kind.removeprefix("column"))
        if numbers.start_index_map[column] != 0 or mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
            return "it is read along an axis other than its rows", None
        tag = tag.ids
    elif not isinstance(tag, IdsTag):
        return "its rows are read at indices that are not a feature's ids", None
    elif numbers.start_index_map != (0,):
        return "it is read along an axis other than its rows", None
    if tuple(sizes) != (1, *operand.shape[1:]) or numbers.operand_batching_dims:
        return "slices other than single whole rows of it are read", None
    within = len(numbers.offset_dims)
    if tuple(numbers.offset_dims) != tuple(range(out.ndim - within, out.ndim)):
        return "its rows are read in another order of axes", None
    if tag.most is not None and tag.most < operand.shape[0] - 1:
        return f"ids above {tag.most} are changed before its rows are read", None
    return "", tag


# ---- which tables are lookups ----


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
    local, (leaves, structure) = shapes_of(model.init_local), flatten(shapes_of(model.init_global))
    examples = next(iter(batch.values())).shape[0]
    mask: Any = jax.ShapeDtypeStruct((examples,), jnp.bool_)
    watched = GatherHandler()
    calls: list[tuple[Callable, tuple]] = [(model.predict, ())]
    if model.predict_train is not None:
        calls.append((model.predict_train, (Step(mask, jax.eval_shape(lambda: jax.random.key(0))),)))
    if model.state is not None:
        calls.append((model.state.advance, (mask,)))
    if model.evidence is not None:
        calls.append((_with_local(model.evidence), (mask,)))
    for function, more in calls:

        def run(leaves: Any, *rest: Any, function: Callable = function) -> Any:
            marked = {path: Value(leaf, TableTag(path)) for path, leaf in leaves.items()}
            return _run(function, structure, leaves, marked, watched, {}, *rest)

        jax.eval_shape(run, leaves, local, dict(batch), more)
    why = {path: "no row of it is looked up" for path in leaves if path not in watched.features}
    why |= watched.spoiled
    why |= {} if model.state is None else dict.fromkeys(model.state.shared, "it is state, not trained")
    by_rows_only = {path: tuple(sorted(ids)) for path, ids in watched.features.items() if path not in why}
    reads = {path: Reads(by_rows_only.get(path, ()), why.get(path, "")) for path in leaves}
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
    shapes = flatten(shapes_of(model.init_global))[0]

    def narrowing(function: Callable) -> Callable:
        def run(params: Params, local: Params, batch: Batch, *more: Any) -> Any:
            narrow = [path for path, features in lookups.items() if ORIGINAL + features[0] in batch]
            if not narrow:
                return function(params, local, batch, *more)
            leaves, structure = flatten(params)
            before = original_batch(batch)
            whole = {**leaves, **{path: shapes[path] for path in narrow}}
            marked = {path: Value(leaf) for path, leaf in leaves.items()}
            marked |= {path: Value(None, TableTag(path)) for path in narrow}
            slots = {name: batch[name] for name in before if ORIGINAL + name in batch}
            tables = _AvailableRows({path: leaves[path] for path in narrow})
            return _run(function, structure, whole, marked, tables, slots, local, before, more)

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


class _AvailableRows(GatherHandler):
    """Runs gathers on the rows that are available."""

    def __init__(self, tables: Mapping[str, Any]):
        self.tables = tables

    def take(self, eqn: Any, table: TableTag, ids: IdsTag) -> Any:
        rows = self.tables[table.path]
        if isinstance(rows, BatchRows) and ids.in_order:
            values_read = rows.values[rows.places[ids.feature]]
        else:
            values = rows.values if isinstance(rows, BatchRows) else rows
            values_read = values.at[ids.slots].get(mode="promise_in_bounds")
        values_read = values_read.reshape(eqn.outvars[0].aval.shape)
        for primitive, params in table.then:
            values_read = primitive.bind(values_read, **params)
        return values_read

    def spoil(self, table: TableTag, why: str) -> None:
        raise ValueError(f"the table {table.path!r} was only read by rows when the model was traced, but now {why}")


def _run(
    function: Callable, structure: Any, whole: Any, marked: Any, tables: GatherHandler, slots: Any, *rest: Any
) -> Any:
    """Trace a function of a model with whole tables, and evaluate it with marked parameters and ids.

    Args:
      function: of global parameters, local parameters, a batch, and more.
      structure: of the global parameters.
      whole: their leaves, or the shapes of these, by path.
      marked: the `Value` of each.
      tables: handles gathers.
      slots: positions of the rows of a feature's ids, by feature.
      *rest: local parameters, a batch, and a tuple of what else the function takes.
    """

    def call(leaves: Any, local: Any, batch: Any, more: Any) -> Any:
        return function(unflatten(structure, leaves), local, batch, *more)

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))

    closed, out = jax.make_jaxpr(call, return_shape=True)(*jax.tree.map(shape_of, (whole, *rest)))
    local, batch, more = jax.tree.map(Value, rest)
    for name, column in batch.items():
        if jnp.issubdtype(column.array.dtype, jnp.integer):
            batch[name] = column._replace(tag=IdsTag(name, slots.get(name)))
    arguments = jax.tree.leaves((marked, local, batch, more), is_leaf=lambda x: isinstance(x, Value))
    outputs = evaluate(closed.jaxpr, closed.consts, arguments, tables)
    for value in outputs:
        if isinstance(value.tag, TableTag):
            tables.spoil(value.tag, "it is returned unchanged")
    return jax.tree.unflatten(jax.tree.structure(out), [value.array for value in outputs])
