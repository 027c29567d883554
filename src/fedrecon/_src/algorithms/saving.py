"""Save and load models and algorithms: a folder with the parameters, the recipe and the decided lookups."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm, shapes_of
from fedrecon._src.client.lookups.tables import lookup_groups
from fedrecon._src.client.lookups.tracing import by_rows
from fedrecon._src.core.factories import RecipeError, digest_of, follow, recipe_of
from fedrecon._src.core.model import AUTO, Model
from fedrecon._src.core.pytrees import Params, flatten
from fedrecon._src.storage.arrays import load_arrays, save_arrays
from fedrecon._src.storage.folders import whole_folder
from fedrecon._src.storage.parts import check_replaced
from fedrecon._src.storage.sealed import check_files, read_sealed, seal_folder
from fedrecon._src.storage.storage_errors import StorageError

FORMAT, VERSION = "fedrecon-portable", 1
DESCRIPTION, ARRAYS = "portable.json", "params.safetensors"


class Loaded(NamedTuple):
    """What `load` returns: a model or an algorithm, and the global parameters."""

    made: Any
    params: Params


def save(folder: str | Path, made: Model | Algorithm, params: Params, *, replace: bool = False) -> str:
    """Save a model or an algorithm with its global parameters, so that others can build the same one.

    A model made by your own code, or an optimizer made by optax itself, cannot be saved as a recipe. Its parameters
    and lookups are saved all the same; pass the model or algorithm to `load` again.

    Args:
      folder: where to save. It appears under this name only when it is complete.
      made: what to save. If its lookups are "auto", decide them first (`fr.decide_lookups`).
      params: the global parameters.
      replace: whether to replace a folder that `save` made there before. A folder with other files is never replaced.

    Returns:
      The digest of what was saved, parameters aside. Hosts with the same digest run the same algorithm.
    """
    folder, about = Path(folder), describe(made)
    if replace:
        check_replaced(folder, (DESCRIPTION, ARRAYS))
    _check_params(folder, _model_of(made), params)
    with whole_folder(folder, replace=replace) as temporary:
        save_arrays(temporary / ARRAYS, jax.tree.map(np.asarray, params))
        seal_folder(temporary, DESCRIPTION, about)
    return about["digest"]


def load(folder: str | Path, made: Model | Algorithm | None = None) -> Loaded:
    """Load what `save` wrote.

    Args:
      folder: a folder that `save` made.
      made: the model or algorithm, if its recipe could not be saved. It gets the saved lookups.

    Raises:
      StorageError: the folder is missing, damaged or of another kind, or `made` is not what was saved.
    """
    path = Path(folder) / DESCRIPTION
    about = read_sealed(path)
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise StorageError(f"{path} is of format {about.get('format')!r} {about.get('version')!r}; expected {FORMAT}")
    check_files(path, about, ARRAYS)
    if made is None:
        if about["recipe"] is None:
            raise StorageError(
                f"{folder} does not say how to make its {about['kind']}; pass it to `load` as `made`: {about['why']}"
            )
        try:
            made = follow(about["recipe"])
        except RecipeError as problem:
            raise StorageError(f"{path}: {problem}") from None
    made = with_lookups(made, {name: tuple(features) for name, features in about["lookups"].items()})
    found = describe(made)
    if about["recipe"] is not None and found["digest"] != about["digest"] and found["recipe"] is not None:
        raise StorageError(f"{folder} was saved from another {about['kind']} (digest {about['digest'][:12]})")
    if found["parameters"] != about["parameters"]:
        raise StorageError(f"{folder} holds parameters of other shapes than the {about['kind']} has")
    return Loaded(made, load_arrays(Path(folder) / ARRAYS, shapes_of(_model_of(made).init_global)))


def digest(made: Model | Algorithm) -> str:
    """Return a digest of a model or algorithm: of its recipe, its lookups and the shapes of its parameters.

    Args:
      made: a model or an algorithm whose lookups are decided.
    """
    return describe(made)["digest"]


def describe(made: Model | Algorithm) -> dict[str, Any]:
    """Return what is saved of a model or algorithm besides its parameters, as a JSON value.

    Args:
      made: a model or an algorithm whose lookups are decided.
    """
    model = _model_of(made)
    if model.lookups == AUTO:
        raise ValueError("the model's lookups are not decided: use fr.decide_lookups(algorithm, clients) first")
    why = None
    try:
        recipe = recipe_of(made, "the algorithm" if isinstance(made, Algorithm) else "the model")
    except RecipeError as problem:
        recipe, why = None, str(problem)
    shapes = flatten(shapes_of(model.init_global))[0]
    core = {
        "kind": "algorithm" if isinstance(made, Algorithm) else "model",
        "recipe": recipe,
        "lookups": {path: list(features) for path, features in lookup_groups(model).items()},
        "parameters": {path: [str(leaf.dtype), *map(int, leaf.shape)] for path, leaf in shapes.items()},
    }
    return {"format": FORMAT, "version": VERSION, **core, "why": why, "digest": digest_of(core)}


def _model_of(made: Model | Algorithm) -> Model:
    return made.model if isinstance(made, Algorithm) else made


def with_lookups(made: Any, lookups: dict[str, tuple[str, ...]]) -> Any:
    """Return a model or an algorithm with lookups that were decided elsewhere."""
    model = _model_of(made)
    if model.lookups == AUTO:
        model = by_rows(model, lookups)
    elif lookup_groups(model) != lookups:
        model = model._replace(lookups=lookups)
    return dataclasses.replace(made, model=model) if isinstance(made, Algorithm) else model


def _check_params(folder: Path, model: Model, params: Params) -> None:
    expected, given = (flatten(tree)[0] for tree in (shapes_of(model.init_global), params))
    wrong = sorted(set(expected) ^ set(given))
    wrong += [path for path in expected if path in given and expected[path].shape != np.shape(given[path])]
    if wrong:
        raise ValueError(f"the parameters to save in {folder} are not those of the model: look at {wrong[0]!r}")
