"""Save and load algorithms: a folder with the parameters, the recipe and the decided lookups."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.validation import with_lookups
from fedrecon._src.client.lookup_tables import lookup_groups
from fedrecon._src.core.factories import RecipeError, digest_of, follow, recipe_of
from fedrecon._src.core.model import AUTO, shapes_of
from fedrecon._src.core.pytrees import Params, check_shapes, flatten
from fedrecon._src.storage.arrays import check_parameters, load_arrays, save_arrays
from fedrecon._src.storage.atomic import StorageError, atomic_folder
from fedrecon._src.storage.manifest import Format, read_folder_manifest, write_folder_manifest
from fedrecon._src.storage.ownership import check_replaceable

FORMAT = Format("fedrecon-algorithm", 1)
DESCRIPTION, ARRAYS = "algorithm.json", "params.safetensors"
# The last one imports all solvers.
_FACTORY_MODULES = tuple(f"fedrecon.{name}" for name in ("aggregators", "models", "optimizers", "split", "algorithms"))


class SavedAlgorithm(NamedTuple):
    """What `load_algorithm` returns.

    Attributes:
      algorithm: as it was saved, with decided lookups.
      params: the global parameters.
    """

    algorithm: Algorithm
    params: Params


def save_algorithm(folder: str | Path, algorithm: Algorithm, params: Params, *, replace: bool = False) -> str:
    """Save an algorithm with its global parameters, so that others can build the same one.

    A model made by your own code, or an optimizer made by optax itself, cannot be saved as a recipe. Its parameters
    and lookups are saved all the same; pass the algorithm to `load_algorithm` again.

    Args:
      folder: where to save. It appears under this name only when it is complete.
      algorithm: what to save. If its lookups are "auto", decide them first (`fr.kit.decide_lookups`).
      params: the global parameters.
      replace: whether to replace a folder that `save_algorithm` wrote before. One with other files is never replaced.

    Returns:
      The digest of what was saved, parameters aside (`fr.kit.digest`).

    Example:
      >>> import tempfile, jax, fedrecon as fr
      >>> model = fr.models.matrix_factorization(num_items=9, dim=2)
      >>> sgd = fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=2)
      >>> algorithm = fr.federated_averaging(model, update=sgd, server=fr.optimizers.sgd(1.0))
      >>> folder = tempfile.mkdtemp() + "/saved"
      >>> digest = fr.save_algorithm(folder, algorithm, model.init_global(jax.random.key(0)))
      >>> fr.kit.digest(fr.load_algorithm(folder).algorithm) == digest
      True
    """
    folder, facts = Path(folder), _describe(algorithm)
    if replace:
        check_replaceable(folder, (DESCRIPTION, ARRAYS))
    check_shapes("params", params, shapes_of(algorithm.model.init_global))
    with atomic_folder(folder, replace=replace) as temporary:
        save_arrays(temporary / ARRAYS, jax.tree.map(np.asarray, params))
        write_folder_manifest(temporary / DESCRIPTION, FORMAT, facts)
    return facts["digest"]


def load_algorithm(folder: str | Path, algorithm: Algorithm | None = None) -> SavedAlgorithm:
    """Load what `save_algorithm` wrote.

    Args:
      folder: a folder that `save_algorithm` made.
      algorithm: needed only if its recipe could not be saved. It gets the saved lookups.

    Raises:
      StorageError: the folder is missing, damaged or of another kind, or `algorithm` is not what was saved.

    Example:
      >>> import tempfile, fedrecon as fr
      >>> fr.load_algorithm(tempfile.mkdtemp())  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      fedrecon...StorageError: ...algorithm.json is missing
    """
    path = Path(folder) / DESCRIPTION
    facts = read_folder_manifest(path, FORMAT, ARRAYS)
    if algorithm is None:
        if facts["recipe"] is None:
            raise StorageError(f"{folder} has no recipe ({facts['why']}); pass the `algorithm` to `load_algorithm`")
        for module in _FACTORY_MODULES:  # factories are known once their modules are imported
            importlib.import_module(module)
        try:
            algorithm = follow(facts["recipe"])
        except RecipeError as problem:
            raise StorageError(f"{path}: {problem}") from None
    lookups = tuple((path, tuple(map(str, features))) for path, features in facts["lookups"].items())
    algorithm = with_lookups(algorithm, lookups)
    actual = _describe(algorithm)
    comparable = facts["recipe"] is not None and actual["recipe"] is not None
    if actual["parameters"] != facts["parameters"] or (comparable and actual["digest"] != facts["digest"]):
        raise StorageError(
            f"{folder} was saved from another algorithm, or with parameters of other shapes "
            f"(digest {facts['digest'][:12]}, not {actual['digest'][:12]})"
        )
    params = load_arrays(Path(folder) / ARRAYS, shapes_of(algorithm.model.init_global))
    check_parameters(Path(folder) / ARRAYS, params)
    return SavedAlgorithm(algorithm, params)


def digest(algorithm: Algorithm) -> str:
    """Return a digest of an algorithm: of its recipe, its lookups and the shapes of its parameters.

    Hosts with the same digest run the same algorithm.

    Args:
      algorithm: whose lookups are decided.

    Example:
      >>> import fedrecon as fr
      >>> model = fr.models.matrix_factorization(num_items=9, dim=2)
      >>> sgd = fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=2)
      >>> fr.kit.digest(fr.federated_averaging(model, update=sgd, server=fr.optimizers.sgd(1.0)))[:8]
      '31f59b81'
    """
    return _describe(algorithm)["digest"]


def _describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return what is saved of an algorithm besides its parameters, as a JSON value."""
    model = algorithm.model
    if model.lookups == AUTO:
        raise ValueError("the lookups are not decided yet: call fr.kit.decide_lookups(algorithm, clients) first")
    why = None
    try:
        recipe = recipe_of(algorithm, "the algorithm")
    except RecipeError as problem:
        recipe, why = None, str(problem)
    shapes = flatten(shapes_of(model.init_global))[0]
    identity = {
        "recipe": recipe,
        "lookups": {path: list(features) for path, features in lookup_groups(model).items()},
        "parameters": {path: [str(leaf.dtype), *map(int, leaf.shape)] for path, leaf in shapes.items()},
    }
    return {**identity, "why": why, "digest": digest_of(identity)}
