"""The checker: does a bundle hold what its manifest says, and does it give the numbers that it promises?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrecon_device.bundle import Bundle
from fedrecon_device.errors import BundleError
from fedrecon_device.files import check_files
from fedrecon_device.plan import PLAN
from fedrecon_device.ranking import rank
from fedrecon_device.training import Trainer

VECTORS, TRAINING_VECTORS = "test_vectors.json", "training_vectors.json"
TOLERANCE = 1e-5
STEPS = 1  # by which integers of a ring may differ: numbers halfway between two are rounded either way


class Checked(NamedTuple):
    """What was checked: files, test vectors, and the largest difference from what they promise."""

    files: int
    vectors: int
    difference: float


def check(folder: str | Path) -> Checked:
    """Check a bundle: digests, shapes, versions, and every test vector to 1e-5.

    Args:
      folder: the bundle's folder.

    Raises:
      BundleError: the first thing that is wrong.
    """
    bundle = Bundle(folder)
    files = check_files(bundle.folder, bundle.manifest)
    cases = bundle.read_json(VECTORS)
    if not isinstance(cases, list) or not cases:
        raise BundleError(f"{VECTORS} has no test vectors")
    with _naming(VECTORS):
        worst = max(_differences(bundle, case) for case in cases)
    if PLAN not in bundle.manifest["files"]:
        return Checked(files, len(cases), worst)
    trainer, training = Trainer(bundle), bundle.read_json(TRAINING_VECTORS)
    with _naming(TRAINING_VECTORS):
        message = {name: _sent(bundle, about) for name, about in training["message"].items()}
        worst = max(worst, *(_update_difference(bundle, trainer, message, case) for case in training["cases"]))
    return Checked(files, len(cases) + len(training["cases"]), worst)


@contextlib.contextmanager
def _naming(file: str) -> Iterator[None]:
    """Turn whatever a damaged file of test vectors leads to into an error that names it."""
    try:
        yield
    except BundleError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError, MemoryError) as problem:
        raise BundleError(f"{file} is damaged: {problem!r}") from None


def _sent(bundle: Bundle, about: Mapping[str, Any]) -> np.ndarray:
    """Return an array of a message: a table of the bundle, or the numbers given."""
    if "table" in about:
        return bundle.tables[about["table"]]
    return np.array(about["values"], about["dtype"]).reshape(about["shape"])


def _update_difference(
    bundle: Bundle, trainer: Trainer, message: Mapping[str, np.ndarray], case: Mapping[str, Any]
) -> float:
    """Run the rounds of one test vector of training; return the largest difference, integers apart."""
    about = trainer.plan["examples"]["columns"]
    columns = {name: np.asarray(case["examples"][name], column["dtype"]) for name, column in about.items()}
    state, worst = None, 0.0
    for number, promised in enumerate(case["rounds"]):
        key: Any = tuple(promised["key"])
        vector, state = trainer.update(message, key, case["name"], columns, state)
        where = f"training vector {case['name']!r}, round {number}"
        for path, leaf in promised["state"].items():
            worst = max(worst, _difference(state[path], leaf, f"{where}, {path!r}"))
        worst = max(worst, _vector_difference(vector, promised["vector"], where))
    return worst


def _vector_difference(vector: np.ndarray, promised: Mapping[str, Any], where: str) -> float:
    """Compare what a device sends; integers may differ by a step, which counts as no difference.

    Other numbers are compared relative to the largest: all are changes of one update, weighted alike.
    """
    if vector.dtype == np.float32:
        return _difference(vector, promised, where, least=float(np.max(np.abs(promised["values"]), initial=1.0)))
    places = np.asarray(promised.get("at", range(vector.size)), np.int64)
    steps = vector.view(np.int32)[places].astype(np.int64) - np.asarray(promised["values"], np.int64)
    if [vector.size] != promised["shape"] or np.max(np.abs(steps), initial=0) > STEPS:
        raise BundleError(
            f"{where} differs from what JAX gave by {np.max(np.abs(steps))} steps; at most {STEPS} may be"
        )
    return 0.0


def _differences(bundle: Bundle, case: Mapping[str, Any]) -> float:
    """Run one test vector; return its largest difference, relative to numbers above 1."""
    columns = {name: _column(bundle, name, values) for name, values in case["examples"].items()}
    local = bundle.reconstruct(columns)
    worst = 0.0
    for path, promised in case["local"].items():
        at = f"test vector {case['name']!r}, local parameter {path!r}"
        worst = max(worst, _difference(local[path], promised, at))
    prediction = case["predict"]
    examples = {name: np.asarray(values, prediction["dtypes"][name]) for name, values in prediction["examples"].items()}
    predictions = bundle.predict(local, examples)
    worst = max(worst, _difference(predictions, prediction["prediction"], f"test vector {case['name']!r}, predictions"))
    if "top" in case:
        _check_top(bundle, local, case)
    return worst


def _column(bundle: Bundle, name: str, values: Any) -> np.ndarray:
    about = bundle.columns[name]
    return np.asarray(values, about["dtype"]).reshape(-1, *about["shape"])


def _difference(actual: np.ndarray, promised: Mapping[str, Any], what: str, *, least: float = 1.0) -> float:
    """Return the largest difference, relative to numbers above `least`."""
    if list(actual.shape) != promised["shape"]:
        raise BundleError(f"{what} has shape {list(actual.shape)}; expected {promised['shape']}")
    values = actual.reshape(-1)
    if "at" in promised:
        values = values[np.asarray(promised["at"], np.int64)]
    expected = np.asarray(promised["values"], np.float64)
    difference = float(np.max(np.abs(values - expected) / np.maximum(least, np.abs(expected)), initial=0.0))
    if not difference <= TOLERANCE:
        raise BundleError(f"{what} differs from what JAX gave by {difference:.1e}; at most {TOLERANCE:.0e} is allowed")
    return difference


def _check_top(bundle: Bundle, local: Mapping[str, np.ndarray], case: Mapping[str, Any]) -> None:
    """Compare the order of recommendations; items with nearly equal scores may change places."""
    scores = bundle.predict(local, {"item": np.arange(len(bundle.items), dtype=np.int32)})
    rated = {int(k) for k in case["examples"]["item"]}
    ranked = rank(scores, len(case["top"]), left_out=rated, counts=bundle.items.counts, least=bundle.least_count)
    for k, promised in zip(ranked, case["top"], strict=True):
        if k != promised and abs(float(scores[k]) - float(scores[promised])) > 2 * TOLERANCE:
            raise BundleError(f"test vector {case['name']!r} recommends item {k} where JAX recommends {promised}")
