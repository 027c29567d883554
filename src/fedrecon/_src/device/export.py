"""What runs on a device: reconstruction of one client and predictions, as ONNX graphs, StableHLO and test vectors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import save

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import as_clients
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Batch, Step, predict_in
from fedrecon._src.core.pytrees import Params, flatten, unflatten
from fedrecon._src.device.inlining import ExportError, used_inputs
from fedrecon._src.device.onnx_graphs import OnnxGraph, to_onnx
from fedrecon._src.models.text.shared_weights import plain_layers
from fedrecon_device.bundle import ITEM_TASKS, ITEMS, padded
from fedrecon_device.errors import BundleError
from fedrecon_device.graphs import Graph
from fedrecon_device.ranking import rank
from fedrecon_device.tensors import GLOBAL, ROW_SCALE, START

Quantisation = Literal["int8", "float16"]
SMALL = 1024  # numbers: smaller leaves stay float32: quantising them would save next to nothing
NARROW = 2  # numbers of a row: with a scale of two bytes, int8 rows this short are no smaller than float16


def packed(
    leaves: Mapping[str, Any], quantise: Quantisation | None, exact: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return global parameters as they are stored, by the name of the tensor.

    Args:
      leaves: float arrays by path.
      quantise: `int8`, with one float16 scale per row of a table, and float16 for tables with few numbers per row; or
        `float16`; None keeps float32.
      exact: patterns of paths that stay float32.

    Raises:
      ValueError: a leaf has numbers that the form cannot hold.
    """
    stored_tables: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        values = np.asarray(leaf)
        if not np.all(np.isfinite(values)):
            raise ValueError(f"global parameter {path!r} has entries that are not finite; train again or repair it")
        small = values.dtype != np.float32 or values.size < SMALL
        if quantise is None or small or any(fnmatchcase(path, pattern) for pattern in exact):
            stored_tables[GLOBAL + path] = values
        elif quantise == "float16" or values.size <= NARROW * len(values):
            if np.max(np.abs(values)) > np.finfo(np.float16).max:
                raise ValueError(f"global parameter {path!r} has entries above 65504: float16 cannot hold them")
            stored_tables[GLOBAL + path] = values.astype(np.float16)
        else:
            rows = values.reshape(len(values), -1)
            needed = np.max(np.abs(rows), 1) / np.float32(127)
            if np.max(needed) > np.finfo(np.float16).max:
                raise ValueError(
                    f"global parameter {path!r} has entries above 8,319,008: rows of int8 cannot hold them"
                )
            near = needed.astype(np.float16)
            # Rounded up: divided by its scale, no number of a row is above 127.
            scale = np.where(near < needed, np.nextafter(near, np.float16(np.inf)), near)
            safe = np.where(scale > 0, scale, 1).astype(np.float32)
            stored_tables[GLOBAL + path] = np.rint(rows / safe[:, None]).astype(np.int8).reshape(values.shape)
            stored_tables[ROW_SCALE + path] = scale
    return stored_tables


def tables_file(stored: Mapping[str, np.ndarray], start: Mapping[str, Any]) -> bytes:
    """Return the file with global parameters and the start of local ones."""
    local = {START + path: np.asarray(leaf, order="C") for path, leaf in start.items()}
    return save({**{name: np.asarray(table, order="C") for name, table in stored.items()}, **local})


FULL = 512  # numbers: of larger arrays only some are written
Columns = Mapping[str, np.ndarray]


def promised(values: Any, unlike: Any = None) -> dict[str, Any]:
    """Write an array for a test vector: all of a small one, the most telling places of a large one.

    Args:
      values: the array; unsigned integers of a ring are written with their sign.
      unlike: what it was before. Of a large array, the places that differ most from it are written, and some others.
    """
    array = np.asarray(values)
    array = array.view(np.int32) if array.dtype == np.uint32 else array.astype(np.float32)
    flat, at = array.reshape(-1), {}
    if flat.size > FULL:
        moved = np.abs(flat - (0 if unlike is None else np.asarray(unlike, np.float32).reshape(-1)))
        most = np.argsort(-moved, kind="stable")[: FULL // 2].tolist()
        at = {"at": sorted({*most, *range(0, flat.size, -(-flat.size // (FULL // 2)))})}
        flat = flat[at["at"]]
    return {"shape": list(array.shape), **at, "values": flat.tolist() if flat.dtype == np.int32 else numbers(flat)}


def numbers(values: Any) -> list[float]:
    """Write float32 numbers with as many digits as tell them apart."""
    return [float(f"{value:.9g}") for value in np.asarray(values, np.float32).reshape(-1)]


def plain(columns: Columns) -> dict[str, Any]:
    """Write columns of examples as JSON values."""
    return {
        name: numbers(column) if column.dtype.kind == "f" and column.ndim == 1 else column.tolist()
        for name, column in columns.items()
    }


def draws(like: Columns, most: int) -> dict[str, dict[str, np.ndarray]]:
    """Return examples for test vectors: none, one, five, as many as fit, more, and some that are repeated.

    Args:
      like: made-up examples to take them from, in order, again from the first when there are too few.
      most: how many examples reconstruction takes.
    """

    def first(count: int) -> dict[str, np.ndarray]:
        return {name: np.asarray(column)[np.arange(count) % len(column)] for name, column in like.items()}

    repeated = {name: np.concatenate([column, column[:2]]) for name, column in first(3).items()}
    sizes = {"none": 0, "one": 1, "five": min(5, most), "most": most, "more": most + 3}
    return {**{name: first(size) for name, size in sizes.items()}, "repeated": repeated}


def made_up_ratings(num_items: int, scale: Sequence[float] | None, most: int) -> dict[str, np.ndarray]:
    """Return made-up ratings, for the test vectors of a ratings model."""
    low, high = scale or (1.0, 5.0)
    draw = np.random.default_rng(0)
    count = most + 3
    items = np.resize(draw.permutation(num_items), count).astype(np.int32)
    ratings = low + (high - low) * draw.integers(0, 5, count) / 4
    return {"item": items, "rating": ratings.astype(np.float32)}


HIGHEST_LOG = 80.0  # higher predictions are cut to this: float32 ends at the exponential of 88


class Form(NamedTuple):
    """What runs on a device.

    Attributes:
      reconstruct: `(global, start, prepared columns of (N, ...), count) -> local`; a model's evidence is added to the
        start.
      predict: `(global, local, columns) -> array`.
      start: where reconstruction starts: the learned default, or the fresh parameters of a single client.
      prepare: `columns -> columns`, from what people have to what the model reads.
    """

    reconstruct: Callable[[Params, Params, Batch, Array], Params]
    predict: Callable[[Params, Params, Batch], Array]
    start: Params
    prepare: Callable[[Batch], Batch] = lambda columns: columns


def export_form(algorithm: Algorithm, params: Params, seed: int, *, ranked: bool = False) -> Form:
    """Return the form of an algorithm that is exported.

    Args:
      algorithm: the algorithm to export.
      params: global parameters.
      seed: of the start, where it is not learned: the start of the only client in `fr.reconstruct(..., seed=seed)`.
      ranked: predict as in training, which is not clipped: clipped predictions of the best items are all the same.
    """
    model = algorithm.model
    key = client_keys(jax.random.key(seed), jnp.asarray(as_clients({"any": np.zeros(1)}).identities()))[0]
    start = model.init_local(key) if model.default_local is None else model.default_local(params)

    def reconstruct(params: Params, start: Params, columns: Batch, count: Array) -> Params:
        # A device would draw other numbers from a key, so it gets the start instead.
        fixed_start = algorithm.define(model._replace(init_local=lambda key: start, default_local=None))
        support = Examples({name: column[None] for name, column in columns.items()}, count[None])
        unused_keys = jnp.zeros((1, 2), jnp.uint32)
        with plain_layers():
            return jax.tree.map(lambda leaf: leaf[0], fixed_start.reconstruct(params, (), support, unused_keys))

    def predict(params: Params, local: Params, columns: Batch) -> Array:
        step = Step(jnp.ones(next(iter(columns.values())).shape[:1], bool), None) if ranked else None
        with plain_layers():
            result: Any = predict_in(model, params, local, columns, step)
            return result.values() if hasattr(result, "values") else result  # logits are kept as a product

    return Form(reconstruct, predict, start)


def of_counts(form: Form) -> Form:
    """Make a form that has learned log(1 + count) take and give counts; those below 0 are 0, as in training."""

    def prepare(columns: Batch) -> Batch:
        return {**columns, "rating": jnp.log1p(jnp.maximum(columns["rating"], 0))}

    def predict(params: Params, local: Params, columns: Batch) -> Array:
        return jnp.expm1(jnp.minimum(form.predict(params, local, columns), HIGHEST_LOG))

    return form._replace(predict=predict, prepare=prepare)


def of_weighed(form: Form, weight: Callable[[Array], Array]) -> Form:
    """Make a form whose examples have weights take counts, which `weight` turns into weights.

    Args:
      form: the form, which reads the column `weight`.
      weight: the weight of a count; counts below 1 are taken as 1.
    """

    def prepare(columns: Batch) -> Batch:
        rest = {name: column for name, column in columns.items() if name != "rating"}
        return {**rest, "weight": weight(jnp.maximum(columns["rating"], 1))}

    return form._replace(prepare=prepare)


class Legend(NamedTuple):
    """What ids stand for, as files of a bundle.

    Attributes:
      task: `ratings`, `clicks`, `text`, or `model` for anything else.
      files: JSON contents by the name of the file.
      scale: the lowest and highest rating; None if there is none.
      least_count: items with fewer ratings are not recommended.
      roles: where a page without ONNX finds its tables, by their role.
      adapt: turns the exported form into one that takes and gives what people have, such as counts where the model
        has learned their logarithms; None to leave it as it is.
      exact: patterns of tables that are never quantised.
      queries: made-up examples to predict for, with the features that predictions read; None for those of `like`.
      settings: the solver's settings, for runtimes without ONNX.
      page: `manifest so far -> files` of a page; None for no page.
      seed: of the start of reconstruction, for models whose start is not learned.

    Example:
      >>> import fedrecon as fr
      >>> fr.device.Legend(task="ratings", scale=(1.0, 5.0)).ranks
      True
    """

    task: str = "model"
    files: Mapping[str, Any] = {}
    scale: Sequence[float] | None = None
    least_count: int = 0
    roles: Mapping[str, str] = {}
    adapt: Callable[[Form], Form] | None = None
    exact: Sequence[str] = ()
    queries: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = {}
    page: Callable[[Mapping[str, Any]], Mapping[str, bytes]] | None = None
    seed: int = 0

    @property
    def ranks(self) -> bool:
        """Whether the model puts items in order for a person."""
        return self.task in ITEM_TASKS


def wide(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return columns in the types that ONNX Runtime computes with: 32-bit integers and floats."""
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    wide = {"i": np.int32, "u": np.int32, "f": np.float32}
    return {name: array.astype(wide.get(array.dtype.kind, array.dtype)) for name, array in arrays.items()}


def under(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): jnp.asarray(x) for name, x in named.items() if name.startswith(prefix)}


def column_types(columns: Columns) -> dict[str, Any]:
    """Return the type of each column and the shape of one example, as JSON values."""
    return {name: {"dtype": str(column.dtype), "shape": list(column.shape[1:])} for name, column in columns.items()}


class Exporter:
    """The two functions of a form with flat, named inputs, as graphs, as StableHLO, and as test vectors."""

    def __init__(self, form: Form, tables: Columns, structure: Any, like: Columns, most: int, queries: Any):
        """Prepare a form with the tables that a device has."""
        self._form, self._structure, self._like, self._most = form, structure, like, most
        self._tables = {f"global/{path}": table for path, table in tables.items()}
        start, self._local = flatten(form.start)
        self.start = {path: np.asarray(leaf) for path, leaf in start.items()}
        columns = {f"example/{name}": column for name, column in wide(like if queries is None else queries).items()}
        read = used_inputs(lambda named: self._predict({**self._named("local"), **named}), columns)
        self._queries = {name: columns[name] for name in read}

    def _named(self, local: str) -> dict[str, np.ndarray]:
        """Name the tables, and local parameters as `start` or `local`."""
        return self._tables | {f"{local}/{path}": leaf for path, leaf in self.start.items()}

    def _parts(self, named: Mapping[str, Any], local: str) -> tuple[Any, Any, dict[str, Any]]:
        """Return global and local parameters and columns from named inputs."""
        params, local_params = under("global/", named), under(f"{local}/", named)
        return unflatten(self._structure, params), unflatten(self._local, local_params), under("example/", named)

    def _reconstruct(self, named: Mapping[str, Any]) -> list[Any]:
        params, start, columns = self._parts(named, "start")
        local = self._form.reconstruct(params, start, self._form.prepare(columns), named["count"])
        return list(flatten(local)[0].values())

    def _predict(self, named: Mapping[str, Any]) -> list[Any]:
        return [self._form.predict(*self._parts(named, "local"))]

    def _support(self, columns: Columns) -> dict[str, Any]:
        """Name the inputs of a reconstruction from examples: of many, from the newest."""
        columns = {f"example/{name}": column[-self._most :] for name, column in columns.items()}
        examples = {name: padded(column, self._most) for name, column in columns.items()}
        return {**self._named("start"), **examples, "count": np.int32(len(next(iter(columns.values()))))}

    def reconstruct_graph(self) -> OnnxGraph:
        """Translate reconstruction."""
        return to_onnx(self._reconstruct, self._support(self._like), [f"local/{path}" for path in self.start])

    def predict_graph(self) -> OnnxGraph:
        """Translate prediction, for any number of examples if that works."""
        inputs = {**self._named("local"), **self._queries}
        if any(len(column) != 1 for column in self._queries.values()):
            with contextlib.suppress(ExportError, BundleError):
                graph = to_onnx(self._predict, inputs, ["prediction"], any_number=list(self._queries))
                result = Graph("predict.onnx", graph.data, graph._asdict()).run(inputs)["prediction"]
                expected = np.asarray(jax.jit(self._predict)(inputs)[0])
                # Exporters know some layers for one number of examples only.
                if result.shape == expected.shape and np.allclose(result, expected, 1e-5, 1e-5):
                    return graph
        return to_onnx(self._predict, inputs, ["prediction"])

    def stablehlo(self) -> bytes:
        """Return reconstruction as jax.export writes it, without source locations, which differ between machines."""
        settings = {"jax_traceback_in_locations_limit": 0, "jax_include_full_tracebacks_in_locations": True}
        with contextlib.ExitStack() as stack:
            for name, value in settings.items():
                stack.callback(jax.config.update, name, getattr(jax.config, name))
                jax.config.update(name, value)
            return bytes(jax.export.export(jax.jit(self._reconstruct))(self._support(self._like)).serialize())

    def vectors(self, legend: Legend) -> list[dict[str, Any]]:
        """Return test vectors, from JAX and the tables of the device."""
        reconstruct, predict = jax.jit(self._reconstruct), jax.jit(self._predict)
        queries = {name.removeprefix("example/"): column for name, column in self._queries.items()}
        cases = []
        for name, columns in draws(self._like, self._most).items():
            local = dict(zip(self.start, reconstruct(self._support(columns)), strict=True))
            named = self._tables | {f"local/{path}": leaf for path, leaf in local.items()}
            case: dict[str, Any] = {
                "name": name,
                "examples": plain(columns),
                "local": {path: promised(leaf, self.start[path]) for path, leaf in local.items()},
                "predict": {
                    "examples": plain(queries),
                    "dtypes": {feature: str(column.dtype) for feature, column in queries.items()},
                    "prediction": promised(predict({**named, **self._queries})[0]),
                },
            }
            if legend.ranks:
                rows = next(len(table) for path, table in self._tables.items() if path.endswith("item_embedding"))
                scores = np.asarray(predict({**named, "example/item": np.arange(rows, dtype=np.int32)})[0])
                counts = legend.files[ITEMS]["counts"]
                counts = None if counts is None else np.asarray(counts)
                rated = columns["item"].tolist()
                case["top"] = rank(scores, 10, left_out=rated, counts=counts, least=legend.least_count).tolist()
            cases.append(case)
        return cases
