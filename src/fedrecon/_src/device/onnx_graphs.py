"""From functions to ONNX: named inputs and outputs, the same bytes every time, errors that name the operation."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from fedrecon._src.core.checks import check_rules, require
from fedrecon._src.device.inlining import ExportError, inlined, used_inputs

LARGE = 256  # numbers of a constant that is worth replacing
OPSET = 21  # ONNX Runtime reads it since 1.18, also on phones and in browsers


class OnnxGraph(NamedTuple):
    """A graph, and how it is called: `{"name", "dtype", "shape"}` for each input and output."""

    data: bytes
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]


def to_onnx(
    function: Callable[..., Any],
    named: Mapping[str, Any],
    outputs: Sequence[str],
    *,
    any_number: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
) -> OnnxGraph:
    """Translate a function to ONNX.

    Args:
      function: of a mapping from name to array; returns a flat list of arrays.
      named: arrays, or their shapes, by the name of the input. Inputs that no output depends on are left out.
      outputs: names of the outputs.
      any_number: inputs whose first dimension may have any size.
      refused: inputs that no output may depend on, and why.

    Raises:
      ExportError: an operation has no translation; the message names it, and the parameters that it reads. Or an
        output depends on an input that is refused.
    """
    jax2onnx = require("jax2onnx")
    shapes = {name: jax.ShapeDtypeStruct(np.shape(array), array.dtype) for name, array in named.items()}
    inline = inlined(lambda *values: function(dict(zip(shapes, values, strict=True))), *shapes.values())
    names = used_inputs(lambda values: inline(*values.values()), shapes)
    check_rules({reason: name not in names for name, reason in (refused or {}).items()}, ExportError)

    def flat(*values: Any) -> Any:
        named_values = dict(zip(names, values, strict=True))
        inputs = {name: named_values.get(name, np.zeros(array.shape, array.dtype)) for name, array in shapes.items()}
        # sizes that are not known cannot be evaluated from a trace
        return function(inputs) if any_number else inline(*inputs.values())

    arguments = [_with_any(shapes[name]) if name in any_number else shapes[name] for name in names]
    try:
        # The exporter logs and warns about its own internals.
        with warnings.catch_warnings(action="ignore"), contextlib.ExitStack() as stack:
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
            model = jax2onnx.to_onnx(flat, arguments, opset=OPSET, input_names=names, output_names=list(outputs))
    except Exception as problem:  # an operation without translation may raise anything
        raise ExportError(_explained(problem, inline, shapes)) from problem
    _clean(model)
    return OnnxGraph(
        model.SerializeToString(deterministic=True), _described(model.graph.input), _described(model.graph.output)
    )


def _with_any(shape: Any) -> Any:
    return jax.ShapeDtypeStruct((jax.export.symbolic_shape("B")[0], *shape.shape[1:]), shape.dtype)


def _described(values: Any) -> list[dict[str, Any]]:
    import onnx

    result = []
    for value in values:
        tensor = value.type.tensor_type
        shape = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        result.append({"name": value.name, "dtype": str(dtype), "shape": shape})
    return result


# ---- cleaning ----


def _clean(model: Any) -> None:
    """Leave out what runtimes trip over or what differs between machines.

    jax2onnx notes shapes between operations, some with wrong ranks: Python's runtime warns, the browser's refuses to
    load. It also leaves constants that nothing uses, and notes where in our sources an operation comes from.
    """
    model.doc_string, model.producer_name, model.producer_version = "", "fedrecon", ""
    del model.metadata_props[:]
    for graph in [model.graph, *model.functions]:
        _clean_graph(graph)


def _clean_graph(graph: Any) -> set[str]:
    """Clean a graph and those within it; return the names that it uses."""
    used = {value if isinstance(value, str) else value.name for value in graph.output}
    graph.doc_string = ""
    for field in ("value_info", "metadata_props"):
        if hasattr(graph, field):
            del getattr(graph, field)[:]
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
        used |= set(node.input)
        for attribute in node.attribute:
            attribute.doc_string = ""
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                used |= _clean_graph(inner)
    if hasattr(graph, "initializer"):
        remaining = [array for array in graph.initializer if array.name in used]
        del graph.initializer[:]
        graph.initializer.extend(array for array in remaining if not _in_few_words(graph, array))
    return used


def _in_few_words(graph: Any, constant: Any) -> bool:
    """Replace a large constant whose numbers are all equal, such as initial zeros, by its shape and one number."""
    from onnx import helper, numpy_helper

    values = numpy_helper.to_array(constant)
    if values.size < LARGE or np.any(values != values.flat[0]):
        return False
    shape = helper.make_tensor(f"{constant.name}/shape", 7, [values.ndim], values.shape)  # 7: whole numbers of 64 bits
    value = helper.make_tensor(f"{constant.name}/value", constant.data_type, [1], [values.flat[0].item()])
    nodes = [
        helper.make_node("Constant", [], [f"{constant.name}/of"], f"{constant.name}/of", value=shape),
        helper.make_node("ConstantOfShape", [f"{constant.name}/of"], [constant.name], constant.name, value=value),
    ]
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    return True


# ---- explaining ----


def _explained(problem: Exception, inline: Callable[..., Any], shapes: Mapping[str, Any]) -> str:
    """Name the operation that cannot be converted, and the parameters it reads."""
    operation = _operation_of(problem)
    if operation is None:
        return f"jax2onnx cannot translate the function: {type(problem).__name__}: {problem}"
    reads = _reads(jax.make_jaxpr(inline)(*shapes.values()).jaxpr, [{name} for name in shapes], operation) or set()
    params = sorted(name for name in reads if name.startswith(("global/", "start/", "local/", "message/")))
    of = f", which reads {', '.join(params)}," if params else ""
    return f"the operation {operation!r}{of} has no translation to ONNX: {problem}"


def _operation_of(problem: BaseException) -> str | None:
    """Find the operation that the exporter was at, in the frames that the error went through."""
    equation: Any = None
    cause: BaseException | None = problem
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            equation = frame.f_locals.get("eqn", equation)
        cause = cause.__cause__ or cause.__context__
    return getattr(getattr(equation, "primitive", None), "name", None)


def _reads(jaxpr: Any, inputs: Sequence[set[str]], operation: str) -> set[str] | None:
    """Return which inputs the first operation of a name depends on; None if there is none."""
    origins: dict[Any, set[str]] = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        reads = [set() if isinstance(atom, core.Literal) else origins.get(atom, set()) for atom in equation.invars]
        everything = set().union(*reads)
        if equation.primitive.name == operation:
            return everything
        bodies: list[Any] = [getattr(param, "jaxpr", None) for param in equation.params.values()]
        for body in (body for body in bodies if hasattr(body, "eqns")):
            count = len(body.invars)
            inner = _reads(body, reads[-count:] if count <= len(reads) else [everything] * count, operation)
            if inner is not None:
                return inner
        origins |= dict.fromkeys(equation.outvars, everything)
    return None
