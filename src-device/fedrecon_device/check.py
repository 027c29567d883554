"""The checker: does a bundle hold what its manifest says, and does it give the numbers that it promises?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrecon_device.bundle import Bundle
from fedrecon_device.errors import BundleError
from fedrecon_device.files import check_files
from fedrecon_device.ranking import rank

VECTORS = "test_vectors.json"
TOLERANCE = 1e-5


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
    try:
        worst = max(_differences(bundle, case) for case in cases)
    except BundleError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError, MemoryError) as problem:
        raise BundleError(f"{VECTORS} is damaged: {problem!r}") from None
    return Checked(files, len(cases), worst)


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


def _difference(actual: np.ndarray, promised: Mapping[str, Any], what: str) -> float:
    if list(actual.shape) != promised["shape"]:
        raise BundleError(f"{what} has shape {list(actual.shape)}; expected {promised['shape']}")
    values = actual.reshape(-1)
    if "at" in promised:
        values = values[np.asarray(promised["at"], np.int64)]
    expected = np.asarray(promised["values"], np.float64)
    difference = float(np.max(np.abs(values - expected) / np.maximum(1.0, np.abs(expected)), initial=0.0))
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
