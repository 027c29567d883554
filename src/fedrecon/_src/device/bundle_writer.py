"""`bundle`: one folder that reconstructs and predicts without Python or JAX."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.device.export import (
    Exporter,
    Legend,
    Quantisation,
    column_types,
    export_form,
    numbers,
    packed,
    tables_file,
    wide,
)
from fedrecon._src.device.inlining import ExportError
from fedrecon._src.device.onnx_graphs import OPSET, OnnxGraph
from fedrecon._src.device.update_graph import DevicePlan, UpdateGraph
from fedrecon._src.storage.atomic import atomic_folder, read_json
from fedrecon._src.storage.ownership import check_replaceable
from fedrecon._version import __version__
from fedrecon_device.bundle import TABLES
from fedrecon_device.check import TRAINING_VECTORS, VECTORS, check
from fedrecon_device.contents import written
from fedrecon_device.errors import BundleError
from fedrecon_device.files import FORMAT, MANIFEST, VERSION, digest_of, manifest_bytes
from fedrecon_device.plan import PLAN
from fedrecon_device.tensors import GLOBAL, as_float32

MOST_EXAMPLES = 300
EXPORTED = "reconstruct.jaxexport"


def bundle(
    algorithm: Algorithm,
    params: Any,
    out: str | Path,
    *,
    like: Mapping[str, Any],
    most: int = MOST_EXAMPLES,
    quantise: Quantisation | None = None,
    legend: Legend | None = None,
    onnx: bool = True,
    train: DevicePlan | bool = False,
    replace: bool = False,
) -> Path:
    """Write a bundle that reconstructs and predicts wherever ONNX Runtime runs.

    Args:
      algorithm: the algorithm to export.
      params: the trained global parameters.
      out: the folder to write.
      like: made-up examples, one array per feature. They give types and shapes, and are written into the bundle
        as test vectors. Never give a person's own.
      most: how many examples of a person a device uses, the newest ones.
      quantise: store tables in `int8` or `float16`; None keeps float32.
      legend: what ids stand for, and what else the bundle says.
      onnx: whether to write graphs and StableHLO. The page of a model that ranks items needs neither; without them,
        no exporter is needed.
      train: add the client's part of a round (`update.onnx`), so that devices can train, under this plan; True for the
        default one.
      replace: whether to replace a bundle that is there. A folder with other files is never replaced.

    Returns:
      The folder.

    Raises:
      ExportError: something cannot be translated to ONNX. The folder is written all the same, without the graphs that
        it concerns; the message names the operation and the parameter.
      ValueError: `train` without graphs, or a plan that does not fit the algorithm's aggregator.
      StorageError: the folder to be replaced holds something that is not part of a bundle.

    Example:
      >>> import tempfile
      >>> import jax, optax
      >>> import fedrecon as fr
      >>> sgd = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> algorithm = fr.federated_reconstruction(
      ...     fr.models.matrix_factorization(30, dim=2), reconstruct=sgd, update=sgd, server=optax.sgd(1.0)
      ... )
      >>> params = algorithm.params(algorithm.init(jax.random.key(0)))
      >>> like, out = {"item": [0, 1], "rating": [4.0, 5.0]}, tempfile.mkdtemp() + "/bundle"
      >>> folder = fr.device.bundle(algorithm, params, out, like=like, onnx=False)  # doctest: +SKIP
      >>> sorted(file.name for file in folder.iterdir())  # doctest: +SKIP
      ['global.safetensors', 'manifest.json', 'test_vectors.json']
    """
    if replace:
        check_bundle(Path(out))
    terms = DevicePlan() if train is True else train or None
    if terms is not None:
        terms.check(algorithm, onnx=onnx)
    legend, examples, limit = legend or Legend(), wide(like), algorithm.method.support_limit
    used = most if limit is None else min(most, limit)
    check_number("most", used, least=1)
    leaves, structure = flatten(jax.tree.map(np.asarray, params))
    stored = packed(leaves, quantise, legend.exact)
    tables = as_float32(stored, GLOBAL)  # a device computes with these, so test vectors come from them
    params = unflatten(structure, tables)
    form = export_form(algorithm, params, legend.seed, ranked=legend.ranks)
    form = form if legend.adapt is None else legend.adapt(form)
    exporter = Exporter(form, tables, structure, examples, used, legend.queries)
    files = {TABLES: tables_file(stored, exporter.start), VECTORS: written(VECTORS, exporter.vectors(legend))}
    files |= {name: written(name, content) for name, content in legend.files.items()}
    graphs: dict[str, OnnxGraph] = {}
    problems: dict[str, str] = {}  # why a graph is missing
    if onnx:
        files[EXPORTED] = exporter.stablehlo()
        for name, export in (("reconstruct", exporter.reconstruct_graph), ("predict", exporter.predict_graph)):
            with _note(problems, name):
                graphs[name] = export()
    if terms is not None:
        update = UpdateGraph(algorithm, examples, most, form.prepare, terms.constant)
        with _note(problems, "update"):
            graph, first_state = update.graph(), update.state_graph()
            graphs |= {"update": graph} | ({} if first_state is None else {"state": first_state})
            plan, vectors = update.plan(terms, graph, legend.seed), update.vectors(params, legend.seed)
            files |= {PLAN: written(PLAN, plan), TRAINING_VECTORS: written(TRAINING_VECTORS, vectors)}
    files |= {f"{name}.onnx": graph.data for name, graph in graphs.items()}
    manifest = _describe(algorithm, legend, examples, used)
    manifest |= {"graphs": _graph_entries(graphs, problems), "quantised": quantise}
    if legend.page is not None:
        files |= legend.page({**manifest, "files": _entries(files)})
    with atomic_folder(out, replace=replace) as folder:
        _write(folder, manifest, files)
        if onnx and not problems:
            problems = _check_graphs(folder, manifest, files, graphs)
    if set(problems) == {"update"}:
        raise ExportError(f"{out} cannot train: {problems['update']}")
    if problems:
        raise ExportError(f"{out} holds the StableHLO form only ({EXPORTED}): {next(iter(problems.values()))}")
    return Path(out)


@contextlib.contextmanager
def _note(problems: dict[str, str], name: str) -> Iterator[None]:
    """Note why a graph cannot be exported."""
    try:
        yield
    except ExportError as problem:
        problems[name] = str(problem)


def _describe(algorithm: Algorithm, legend: Legend, examples: Mapping[str, np.ndarray], most: int) -> dict[str, Any]:
    """Return what a manifest says, besides graphs, quantisation and files."""
    tools = {name: version(name) for name in ("jax2onnx", "onnx") if find_spec(name)}
    evidence = algorithm.model.evidence is not None
    # A device does not continue from its old local parameters where the solution does not depend on the start (least
    # squares), where the support moves the start, or for items: there a reconstruction takes milliseconds, and from a
    # fixed start it does not depend on the past.
    descends = legend.settings.get("solver", "gradient-descent") == "gradient-descent"
    warm_start = descends and not evidence and not legend.ranks
    return {
        "format": FORMAT,
        "version": VERSION,
        "task": legend.task,
        "made_with": {"fedrecon": __version__, "jax": jax.__version__, "zlib": zlib.ZLIB_RUNTIME_VERSION, **tools},
        "opset": OPSET,
        "examples": {"most": most, "columns": column_types(examples)},
        "reconstruct": {**legend.settings, "evidence": evidence, "warm_start": warm_start},
        "scale": None if legend.scale is None else numbers(legend.scale),
        "least_count": legend.least_count,
        "roles": dict(legend.roles),
    }


def check_bundle(folder: Path) -> None:
    """Check that a folder may be replaced: it does not exist, is empty, or holds a bundle and nothing else.

    Raises:
      StorageError: it holds something else.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        ours = {MANIFEST, *manifest["files"]} if manifest["format"] == FORMAT else set()
    except (OSError, ValueError, TypeError, KeyError):
        ours = set()
    check_replaceable(folder, ours)


def _write(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / MANIFEST).write_bytes(manifest_bytes({**manifest, "files": _entries(files)}))


def _check_graphs(
    folder: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes], graphs: Mapping[str, OnnxGraph]
) -> dict[str, str]:
    """Run the test vectors in ONNX Runtime; remove graphs that disagree with the model, and return why."""
    try:
        check(folder)
    except BundleError as problem:
        problems = dict.fromkeys(graphs, f"the exported graphs do not do what the model does: {problem}")
        removed = {PLAN, TRAINING_VECTORS, *(f"{name}.onnx" for name in graphs)} & set(files)
        for name in removed:
            (folder / name).unlink()
        rest = {name: data for name, data in files.items() if name not in removed}
        _write(folder, {**manifest, "graphs": _graph_entries({}, problems)}, rest)
        return problems
    return {}


def _entries(files: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: {"bytes": len(data), "sha256": digest_of(data)} for name, data in sorted(files.items())}


def _graph_entries(graphs: Mapping[str, OnnxGraph], problems: Mapping[str, str]) -> dict[str, Any]:
    missing = {"reconstruct": "not exported", "predict": "not exported", **problems}
    return {name: {"missing": reason} for name, reason in missing.items()} | {
        name: {"file": f"{name}.onnx", "inputs": graph.inputs, "outputs": graph.outputs}
        for name, graph in graphs.items()
    }
