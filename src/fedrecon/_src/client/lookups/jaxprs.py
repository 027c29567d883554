"""Evaluate a jaxpr equation by equation, following tables and the ids that index them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core

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


class GatherHandler(Protocol):
    """What to do when an equation uses a table."""

    def take(self, eqn: Any, table: TableTag, ids: IdsTag | None, why: str) -> Any:
        """Return the result of a gather from a table; None to evaluate the gather itself.

        Args:
          eqn: the gather.
          table: its operand.
          ids: its indices; None if it does something other than take rows at a feature's ids.
          why: in that case, what it does instead.
        """

    def spoil(self, table: TableTag, why: str) -> None:
        """Note that a table is used in another way than by rows.

        Args:
          table: the table.
          why: how it is used.
        """


def evaluate(jaxpr: Any, consts: Iterable[Value], arguments: Iterable[Value], tables: GatherHandler) -> list[Value]:
    """Evaluate a jaxpr; `tables` handles gathers of rows and is notified of any other use of a table.

    Args:
      jaxpr: what was traced.
      consts: values of its constants.
      arguments: values of its arguments, tables and ids marked.
      tables: the handler.
    """
    env: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
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
        return evaluate(inner.jaxpr, [Value(c) for c in inner.consts], values, tables)
    if name == "remat2" and marked:
        return _checkpointed(eqn, values, tables)
    if marked:
        table = marked[0]
        if name == "gather" and len(marked) == 1 and isinstance(tags[0], TableTag):
            why, ids = _row_gather(eqn, values[1])
            rows = tables.take(eqn, table, ids, why)
            if rows is not None:
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
