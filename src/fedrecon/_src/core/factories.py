"""Recipes: which factory made a model, a solver or an algorithm, and with what settings, so that it can be saved.

A factory returns functions, which cannot be written to a file. But a factory marked with `register_factory` remembers
its arguments, and another process with the same version of fedrecon can call it again.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")

FREE = {"lookups"}  # fields of a model that may be replaced later: they are saved next to the recipe
DEEPEST = 32  # how far recipes may be nested


class RecipeError(ValueError):
    """Something was not made by a recorded factory, or a recipe cannot be followed.

    Example:
      >>> import fedrecon as fr
      >>> issubclass(fr.kit.RecipeError, ValueError)
      True
    """


class _Made(NamedTuple):
    make: str
    arguments: dict[str, Any]
    fields: dict[str, Any]  # of the result, to notice later changes


FACTORIES: dict[str, Callable[..., Any]] = {}
# By a function among the result's fields; several results may share one, such as a split and the same one redrawn.
_made: weakref.WeakKeyDictionary[Any, list[_Made]] = weakref.WeakKeyDictionary()


def register_factory(factory: Callable[P, T]) -> Callable[P, T]:
    """Let a factory remember its arguments, for `recipe_of`.

    Args:
      factory: a function that makes a model, solver, optimizer, split, aggregator or algorithm.

    Example:
      >>> import optax
      >>> from fedrecon import kit
      >>> @kit.register_factory
      ... def slow_sgd(learning_rate):
      ...     return optax.sgd(learning_rate / 10)
      >>> optimizer = slow_sgd(0.1)  # an algorithm with it can be saved
    """
    signature = inspect.signature(factory)
    name = f"optax.{factory.__name__}" if (factory.__module__ or "").startswith("optax.") else factory.__name__

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        made = factory(*args, **kwargs)
        anchor = _anchor(made)
        if anchor is not None:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            different = [record for record in _made.get(anchor, []) if record.fields != _fields(made)]
            _made[anchor] = [*different, _Made(name, arguments, _fields(made))]
        return made

    FACTORIES[name] = make
    return make


def recipe_of(made: Any, what: str = "it") -> dict[str, Any]:
    """Return how something was made, as a JSON value: `{"make": factory, "settings": {...}}`.

    Args:
      made: a model, solver, optimizer, split, aggregator or algorithm made by a factory of fedrecon.
      what: its name in error messages.

    Raises:
      RecipeError: it was made by hand, or changed later; the message says what to do.
    """
    candidates = [] if (anchor := _anchor(made)) is None else _made.get(anchor, [])
    if not candidates:
        raise RecipeError(
            f"{what} was not made by a factory of fedrecon, so it cannot be saved as a recipe: use one "
            "(optimizers are in fr.optimizers), or pass the same thing again when loading"
        )
    now = _fields(made)
    record = next((candidate for candidate in candidates if candidate.fields == now), candidates[-1])
    if changed := [name for name, value in now.items() if record.fields.get(name) != value]:
        raise RecipeError(f"{what} was changed after {record.make} made it: `{changed[0]}` was replaced")
    settings = {name: _describe(value, f"`{name}` of {record.make}") for name, value in record.arguments.items()}
    return {"make": record.make, "settings": settings}


def follow(recipe: Any, depth: int = 0) -> Any:
    """Make what a recipe describes. Only recorded factories are called.

    Args:
      recipe: as `recipe_of` returns it.
      depth: how deeply it is nested in other recipes.

    Raises:
      RecipeError: it is not a recipe, or names a factory that this version of fedrecon does not have.
    """
    if depth > DEEPEST:
        raise RecipeError("the recipe is nested too deeply")
    if isinstance(recipe, list):
        return tuple(follow(item, depth + 1) for item in recipe)
    if not isinstance(recipe, dict):
        return recipe
    if set(recipe) == {"mapping"}:
        return {name: follow(value, depth + 1) for name, value in recipe["mapping"].items()}
    if set(recipe) == {"array", "dtype"}:
        return np.asarray(recipe["array"], np.dtype(str(recipe["dtype"])))
    if set(recipe) != {"make", "settings"} or recipe["make"] not in FACTORIES:
        raise RecipeError(f"the recipe names {str(recipe.get('make'))[:60]!r}, which this version does not have")
    factory = FACTORIES[recipe["make"]]
    settings = {name: follow(value, depth + 1) for name, value in recipe["settings"].items()}
    several = [p.name for p in inspect.signature(factory).parameters.values() if p.kind is p.VAR_POSITIONAL]
    positional = [item for name in several for item in settings.pop(name, ())]
    try:
        return factory(*positional, **settings)
    except TypeError as problem:
        raise RecipeError(f"the recipe for {recipe['make']} failed: {problem}") from None


def digest_of(value: Any) -> str:
    """Return a digest of a JSON value. It does not depend on the order of keys.

    Args:
      value: any JSON value.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _describe(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or hasattr(value, "__jax_array__") or type(value).__name__ == "ArrayImpl":
        array = np.asarray(value)
        return {"array": array.tolist(), "dtype": array.dtype.name}
    if isinstance(value, Mapping):
        return {"mapping": {str(name): _describe(inner, what) for name, inner in value.items()}}
    if isinstance(value, Sequence) and _anchor(value) is None:
        return [_describe(inner, what) for inner in value]
    return recipe_of(value, what)


def _anchor(made: Any) -> types.FunctionType | None:
    """Return a function that identifies what was made: one that its factory defined."""
    candidates = [made] if isinstance(made, types.FunctionType) else _values(made).values()
    functions = (f for f in candidates if isinstance(f, types.FunctionType))
    return next((f for f in functions if "<locals>" in f.__qualname__), None)


def _values(made: Any) -> dict[str, Any]:
    if hasattr(made, "_asdict"):
        return made._asdict()
    return {name: getattr(made, name) for name in getattr(type(made), "__dataclass_fields__", {})}


def _fields(made: Any) -> dict[str, Any]:
    """Return the fields of something for comparison: plain values as they are, anything else by identity."""

    def identity(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return tuple(_fields(value).items()) if hasattr(value, "_asdict") else id(value)

    return {name: identity(value) for name, value in _values(made).items() if name not in FREE}
