"""`bundle`: one folder that reconstructs and predicts without Python or JAX."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._version import __version__
from fedrecon.algorithm import Algorithm
from fedrecon.device.export_form import Form, export_form
from fedrecon.device.onnx_graphs import OPSET, ExportError, OnnxGraph, to_onnx
from fedrecon.device.tables import Quantisation, packed, tables_file, unpacked
from fedrecon.device.vectors import draws, numbers, plain, promised
from fedrecon.disk.folders import whole_folder
from fedrecon.trees import flatten, unflatten
from fedrecon_device.bundle import ITEMS, TABLES, WORDS
from fedrecon_device.check import VECTORS, check
from fedrecon_device.errors import BundleError
from fedrecon_device.files import FORMAT, MANIFEST, VERSION, digest_of, manifest_bytes
from fedrecon_device.graphs import Graph
from fedrecon_device.ranking import rank

MOST_EXAMPLES = 300
EXPORTED = "reconstruct.jaxexport"


class Legend(NamedTuple):
    """What ids stand for, as files of a bundle.

    Attributes:
      task: `ratings`, `text`, or `model` for anything else.
      files: JSON contents by the name of the file.
      scale: the lowest and highest rating; None if there is none.
      least_count: items with fewer ratings are not recommended.
      roles: where a page without ONNX finds its tables, by what they are.
    """

    task: str = "model"
    files: Mapping[str, Any] = {}
    scale: Sequence[float] | None = None
    least_count: int = 0
    roles: Mapping[str, str] = {}


def bundle(
    algorithm: Algorithm,
    params: Any,
    out: str | Path,
    *,
    like: Mapping[str, Any],
    ask: Mapping[str, Any] | None = None,
    most: int = MOST_EXAMPLES,
    seed: int = 0,
    quantise: Quantisation | None = None,
    settings: Mapping[str, Any] | None = None,
    legend: Legend | None = None,
    web: Callable[[Mapping[str, Any]], Mapping[str, bytes]] | None = None,
    replace: bool = False,
) -> Path:
    """Write a bundle that reconstructs and predicts wherever ONNX Runtime runs.

    Args:
      algorithm: whose reconstruction it is.
      params: the trained global parameters.
      out: the folder to write.
      like: made-up examples, one array a feature: their types and shapes count, and they are written into the bundle
        as test vectors. Never give a person's own.
      ask: examples to predict for, with the features that predictions read; those of `like` by default.
      most: how many examples of a person a device uses, the newest ones.
      seed: of where reconstruction starts, for models whose start is not learned.
      quantise: store tables in `int8` or `float16`; None keeps float32.
      settings: the solver's, written into the manifest for whoever runs it without ONNX.
      legend: what ids stand for.
      web: `manifest so far -> files` of a page; None for no page.
      replace: whether a folder that is there is replaced.

    Returns:
      The folder.

    Raises:
      ExportError: something cannot be translated to ONNX. The folder is there all the same and holds the StableHLO
        form; the message names the operation and the parameter.
    """
    legend = legend or Legend()
    examples = _wide(like)
    leaves, structure = flatten(jax.tree.map(np.asarray, params))
    stored = packed(leaves, quantise)
    tables = unpacked(stored)  # what a device computes with; so test vectors come from them
    form = export_form(algorithm, unflatten(structure, tables), seed)
    most = most if form.limit is None else min(most, form.limit)
    if most < 1:
        raise ValueError(f"`most` is {most}; a device needs at least 1 example to reconstruct from")
    exporter = _Exporter(form, tables, structure, examples, most, ask)
    graphs, problems = exporter.graphs()
    files: dict[str, bytes] = {f"{name}.onnx": graph.data for name, graph in graphs.items()}
    files[TABLES] = tables_file(stored, exporter.start)
    files[EXPORTED] = exporter.stablehlo()
    files[VECTORS] = _json(exporter.vectors(legend))
    files |= {name: _json(content) for name, content in legend.files.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "task": legend.task,
        "made_with": {"fedrecon": __version__, "jax": jax.__version__, **_versions("jax2onnx", "onnx")},
        "opset": OPSET,
        "examples": {"most": most, "columns": _types(examples)},
        "graphs": {name: _graph_entry(name, graphs, problems) for name in ("reconstruct", "predict")},
        "reconstruct": {**(settings or {}), "evidence": form.evidence, "warm_start": _warm(settings, form, legend)},
        "scale": None if legend.scale is None else numbers(legend.scale),
        "least_count": legend.least_count,
        "quantised": quantise,
        "roles": dict(legend.roles),
    }
    if web is not None:
        files |= web({**manifest, "files": _entries(files)})
    with whole_folder(out, replace=replace) as folder:
        _write(folder, manifest, files)
        wrong = None if problems else _disproved(folder)
        if wrong is not None:  # nobody gets graphs that do something else than the model
            problems = dict.fromkeys(graphs, wrong)
            files = {name: data for name, data in files.items() if not name.endswith(".onnx")}
            entries = {name: _graph_entry(name, {}, problems) for name in problems}
            for name in graphs:
                (folder / f"{name}.onnx").unlink()
            _write(folder, {**manifest, "graphs": entries}, files)
    if problems:
        raise ExportError(f"{out} holds the StableHLO form only ({EXPORTED}): {next(iter(problems.values()))}")
    return Path(out)


def _write(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / MANIFEST).write_bytes(manifest_bytes({**manifest, "files": _entries(files)}))


def _disproved(folder: Path) -> str | None:
    """Run the test vectors in ONNX Runtime; return what is wrong, None if nothing is."""
    try:
        check(folder)
    except BundleError as problem:
        return f"the exported graphs do not do what the model does: {problem}"
    return None


def _entries(files: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: {"bytes": len(data), "sha256": digest_of(data)} for name, data in sorted(files.items())}


def _graph_entry(name: str, graphs: Mapping[str, OnnxGraph], problems: Mapping[str, str]) -> dict[str, Any]:
    if name not in graphs:
        return {"missing": problems.get(name, "not exported")}
    return {"file": f"{name}.onnx", "inputs": graphs[name].inputs, "outputs": graphs[name].outputs}


def _types(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: {"dtype": str(one.dtype), "shape": list(one.shape[1:])} for name, one in columns.items()}


def _wide(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return columns of types that ONNX Runtime computes with: whole numbers of 32 bits, floats of 32."""
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    wide = {"i": np.int32, "u": np.int32, "f": np.float32}
    return {name: one.astype(wide.get(one.dtype.kind, one.dtype)) for name, one in arrays.items()}


def _warm(settings: Mapping[str, Any] | None, form: Form, legend: Legend) -> bool:
    """Say whether a device should go on from its old local parameters.

    Not where the solution does not depend on the start (least squares), where the support moves the start, or for
    ratings: there a reconstruction takes milliseconds, and from one start it does not depend on the past.
    """
    descends = (settings or {}).get("solver", "gradient-descent") == "gradient-descent"
    return descends and not form.evidence and legend.task != "ratings"


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(ImportError):
            found[name] = version(name)
    return found


def _json(content: Any) -> bytes:
    return (json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


class _Exporter:
    """The two functions of a form with flat, named inputs, as graphs, as StableHLO, and as test vectors."""

    def __init__(
        self,
        form: Form,
        tables: Mapping[str, np.ndarray],
        structure: Any,
        like: Mapping[str, np.ndarray],
        most: int,
        ask: Mapping[str, Any] | None,
    ):
        self._form, self._tables, self._structure = form, tables, structure
        self._like, self._most = like, most
        start, self._local = flatten(form.start)
        self.start = {path: np.asarray(leaf) for path, leaf in start.items()}
        self._ask = self._predicting(like if ask is None else ask)

    def _predicting(self, ask: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the columns that predictions read."""
        from fedrecon.device.inlining import used_inputs

        columns = _wide(ask)
        given = {f"example/{name}": column for name, column in columns.items()}
        used = used_inputs(lambda named: self._predict({**self._named("local"), **named}), given)
        return {name: column for name, column in columns.items() if f"example/{name}" in used}

    def _named(self, local: str) -> dict[str, np.ndarray]:
        """Name the tables, and local parameters as `start` or `local`."""
        found = {f"global/{path}": table for path, table in self._tables.items()}
        return found | {f"{local}/{path}": leaf for path, leaf in self.start.items()}

    def _parts(self, named: Mapping[str, Any], local: str) -> tuple[Any, Any, dict[str, Any]]:
        """Return global and local parameters and columns from named inputs."""
        params = unflatten(self._structure, {path: jnp.asarray(named[f"global/{path}"]) for path in self._tables})
        mine = unflatten(self._local, {path: jnp.asarray(named[f"{local}/{path}"]) for path in self.start})
        columns = {name.removeprefix("example/"): one for name, one in named.items() if name.startswith("example/")}
        return params, mine, columns

    def _reconstruct(self, named: Mapping[str, Any]) -> list[Any]:
        params, start, columns = self._parts(named, "start")
        return list(flatten(self._form.reconstruct(params, start, columns, named["count"]))[0].values())

    def _predict(self, named: Mapping[str, Any]) -> list[Any]:
        return [self._form.predict(*self._parts(named, "local"))]

    def _support(self) -> dict[str, Any]:
        columns = {
            f"example/{name}": np.zeros((self._most, *one.shape[1:]), one.dtype) for name, one in self._like.items()
        }
        return {**self._named("start"), **columns, "count": np.int32(0)}

    def graphs(self) -> tuple[dict[str, OnnxGraph], dict[str, str]]:
        """Translate both functions; what cannot be translated is in the second mapping, with the reason."""
        graphs: dict[str, OnnxGraph] = {}
        problems: dict[str, str] = {}
        outputs = [f"local/{path}" for path in self.start]
        asked = {f"example/{name}": column for name, column in self._ask.items()}
        predicting = {**self._named("local"), **asked}
        try:
            graphs["reconstruct"] = to_onnx(self._reconstruct, self._support(), outputs)
        except ExportError as problem:
            problems["reconstruct"] = str(problem)
        try:
            if any(len(column) != 1 for column in asked.values()):
                with contextlib.suppress(ExportError, BundleError):
                    graph = to_onnx(self._predict, predicting, ["prediction"], any_number=list(asked))
                    if self._predicts(graph, predicting):
                        graphs["predict"] = graph
            if "predict" not in graphs:
                graphs["predict"] = to_onnx(self._predict, predicting, ["prediction"])
        except ExportError as problem:
            problems["predict"] = str(problem)
        return graphs, problems

    def _predicts(self, graph: OnnxGraph, inputs: Mapping[str, Any]) -> bool:
        """Say whether a graph for any number of examples is right: exporters know some layers for one number only."""
        found = Graph("predict.onnx", graph.data, graph._asdict()).run(inputs)["prediction"]
        expected = np.asarray(jax.jit(self._predict)(inputs)[0])
        return found.shape == expected.shape and bool(np.allclose(found, expected, 1e-5, 1e-5))

    def stablehlo(self) -> bytes:
        """Return reconstruction as jax.export writes it, without a word about where it was written."""
        with _without_places():
            shapes = {name: jax.ShapeDtypeStruct(np.shape(one), one.dtype) for name, one in self._support().items()}
            return bytes(jax.export.export(jax.jit(self._reconstruct))(shapes).serialize())

    def vectors(self, legend: Legend) -> list[dict[str, Any]]:
        """Return test vectors, from JAX and the tables of the device."""
        reconstruct, predict = jax.jit(self._reconstruct), jax.jit(self._predict)
        found = []
        for name, columns in draws(self._like, self._most).items():
            count = min(self._most, len(next(iter(columns.values()))))
            support = self._support()
            for feature, column in columns.items():
                support[f"example/{feature}"][:count] = column[len(column) - count :]
            local = reconstruct({**support, "count": jnp.int32(count)})
            named = self._named("local") | {f"local/{path}": x for path, x in zip(self.start, local, strict=True)}
            asked = {f"example/{feature}": column for feature, column in self._ask.items()}
            case = {
                "name": name,
                "examples": plain(columns),
                "local": {path: promised(x, self.start[path]) for path, x in zip(self.start, local, strict=True)},
                "predict": {
                    "examples": plain(self._ask),
                    "dtypes": {feature: str(column.dtype) for feature, column in self._ask.items()},
                    "prediction": promised(predict({**named, **asked})[0]),
                },
            }
            if legend.task == "ratings":
                case["top"] = self._top(legend, lambda asked, named=named: predict({**named, **asked})[0], columns)
            found.append(case)
        return found

    def _top(self, legend: Legend, predict: Callable[[Mapping[str, Any]], Any], columns: Any) -> list[int]:
        counts = legend.files[ITEMS]["counts"]
        rows = next(len(one) for path, one in self._tables.items() if path.endswith("item_embedding"))
        scores = np.asarray(predict({"example/item": np.arange(rows, dtype=np.int32)}))
        known = None if counts is None else np.asarray(counts)
        return rank(scores, 10, left_out=set(columns["item"].tolist()), counts=known, least=legend.least_count).tolist()


@contextlib.contextmanager
def _without_places() -> Iterator[None]:
    """Trace without noting source files and lines, which differ from machine to machine."""
    names = {
        "jax_traceback_in_locations_limit": 0,
        "jax_include_full_tracebacks_in_locations": False,
        "jax_hlo_source_file_canonicalization_regex": ".*",
    }
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        jax.clear_caches()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


__all__ = ["EXPORTED", "ITEMS", "WORDS", "ExportError", "Legend", "bundle"]
