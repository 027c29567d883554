"""Pytrees of parameters: paths of leaves, patterns that select leaves, and partitions into parts."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.checks import check_rules, check_selection

Params = Any  # a pytree of arrays
Which = str | Sequence[str] | Callable[[str, Any], bool]


def path_name(path: Sequence[Any]) -> str:
    """Return a key path of a pytree as text: `encoder/0/kernel`.

    Args:
      path: as `jax.tree_util` returns it.
    """
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


class Structure(NamedTuple):
    """The shape of a pytree and the paths of its leaves, in order."""

    treedef: Any
    paths: tuple[str, ...]


def flatten(params: Params) -> tuple[dict[str, Any], Structure]:
    """Flatten a pytree to `{path: leaf}` and the structure that `unflatten` needs.

    Args:
      params: any pytree.

    Example:
      >>> from fedrecon import kit
      >>> leaves, structure = kit.flatten({"encoder": [1.0, 2.0], "head": 3.0})
      >>> leaves
      {'encoder/0': 1.0, 'encoder/1': 2.0, 'head': 3.0}
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    by_path = {path_name(path): leaf for path, leaf in leaves}
    if len(by_path) != len(leaves):
        raise ValueError("two parameters have the same path; rename one of them")
    return by_path, Structure(treedef, tuple(by_path))


def unflatten(structure: Structure, leaves: Mapping[str, Any]) -> Params:
    """Undo `flatten`.

    Args:
      structure: as `flatten` returned it.
      leaves: by path, in any order.

    Example:
      >>> from fedrecon import kit
      >>> leaves, structure = kit.flatten({"encoder": [1.0, 2.0], "head": 3.0})
      >>> kit.unflatten(structure, leaves | {"head": 4.0})
      {'encoder': [1.0, 2.0], 'head': 4.0}
    """
    return jax.tree_util.tree_unflatten(structure.treedef, [leaves[path] for path in structure.paths])


def to_named_arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves of a pytree as numpy arrays, by path; a pytree that is a single array is called `value`.

    Args:
      tree: of numpy or JAX arrays.
    """
    return {path or "value": np.asarray(leaf, order="C") for path, leaf in flatten(tree)[0].items()}


def from_named_arrays(
    arrays: Mapping[str, np.ndarray], like: Any, source: Any, error: type[ValueError], free: Mapping[str, int] = {}
) -> Any:
    """Undo `to_named_arrays`, for arrays that come from outside.

    Args:
      arrays: by path.
      like: the expected pytree, of arrays or of shapes.
      source: where the arrays come from, for the message of an error.
      error: what to raise if an array is missing, unexpected, or of another type or shape.
      free: by path, how many of the leading dimensions may have any length.
    """
    (leaves, structure), expected = flatten(like), {}
    for path, leaf in leaves.items():
        name = path or "value"
        begin = arrays[name].shape[: free.get(path, 0)] if name in arrays else ()
        expected[name] = f"{np.dtype(leaf.dtype)}{(*begin, *leaf.shape[len(begin) :])}"
    if problem := first_difference({name: f"{array.dtype}{array.shape}" for name, array in arrays.items()}, expected):
        raise error(f"{source}: {problem}")
    return unflatten(structure, {path: arrays[path or "value"] for path in leaves})


def first_difference(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Say how two mappings differ, such as `'w' is (3,); expected (4,)`, for the first name that does; None if equal.

    Args:
      actual: by name.
      expected: what should be there, in the same form.
    """
    for name in sorted({*actual, *expected}):
        if actual.get(name) != expected.get(name):
            return f"{name!r} is {actual.get(name, 'missing')}; expected {expected.get(name, 'none')}"
    return None


def check_shapes(name: str, params: Params, like: Params) -> None:
    """Raise an error unless parameters have the paths and shapes of others.

    Args:
      name: of the argument.
      params: what was given.
      like: the expected parameters, or their shapes.
    """
    shapes = [{path: np.shape(leaf) for path, leaf in flatten(tree)[0].items()} for tree in (params, like)]
    if problem := first_difference(*shapes):
        raise ValueError(f"`{name}` must have the paths and shapes of the global parameters: {problem}")


def nbytes(tree: Any) -> int:
    """Return how many bytes the arrays of a pytree take.

    Args:
      tree: of arrays or of shapes.
    """
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def copy_params(params: Params, keys: Array) -> Params:
    """Return a copy of the global parameters for every client, clients first.

    Args:
      params: the global parameters.
      keys: one entry for each client, such as their keys; only the number counts.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedrecon import kit
      >>> kit.copy_params({"w": jnp.float32(2)}, jax.random.split(jax.random.key(0), 3))["w"].tolist()
      [2.0, 2.0, 2.0]
    """
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(keys), *jnp.shape(leaf))), params)


def split_params(params: Params, fixed: Collection[str]) -> tuple[Params, Params, Callable[[Params, Params], Params]]:
    """Split parameters into those that are solved for and those that are held fixed.

    Args:
      params: a pytree.
      fixed: paths of the leaves that are held fixed.

    Returns:
      The parameters that are solved for, those that are held fixed, and `merge(free, fixed)` to combine them again.
    """
    if not fixed:
        return params, (), lambda free, fixed: free
    leaves, structure = flatten(params)
    free = {path: leaf for path, leaf in leaves.items() if path not in fixed}
    fixed_leaves = {path: leaves[path] for path in fixed}
    return free, fixed_leaves, lambda free, fixed: unflatten(structure, {**free, **fixed})


class Partition(NamedTuple):
    """The leaves of a pytree in three parts, each `{path: leaf}`, and `merge` to put them together again."""

    shared: dict[str, Any]
    local: dict[str, Any]
    frozen: dict[str, Any]
    merge: Callable[..., Params]


def partition(params: Params, local: Which, frozen: Which = ()) -> Partition:
    """Partition a pytree of parameters into global, local and frozen leaves.

    Non-trainable state (counters, running statistics, tables of constants) belongs in `frozen`: it is neither
    trained, nor averaged, nor reconstructed, and keeps its value. Leaves that are not floating point must be frozen.

    Args:
      params: any pytree.
      local: which leaves are local: a glob pattern on the path (`"user*"`, `"*/adapter/*"`), several of them,
        or a predicate `(path, leaf) -> bool`.
      frozen: which leaves keep their value, in the same forms.

    Returns:
      A `Partition`; `merge(shared, local, frozen)` returns the pytree again.

    Raises:
      ValueError: if `local` selects nothing or everything, if a pattern of `frozen` selects nothing, if a leaf is
        both, or if a leaf to be trained is not floating point.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> params = {"user": {"bias": jnp.ones(2)}, "item": {"bias": jnp.zeros(3)}}
      >>> parts = fr.partition(params, local="user/*")
      >>> list(parts.shared), list(parts.local)
      (['item/bias'], ['user/bias'])
    """
    leaves, structure = flatten(params)
    local_paths, frozen_paths = select_paths(local, "local", leaves), select_paths(frozen, "frozen", leaves)
    check_selection("local", local, local_paths, leaves)
    shared_paths = [path for path in leaves if path not in (*local_paths, *frozen_paths)]
    both = [path for path in local_paths if path in frozen_paths]
    types = {path: jnp.result_type(leaves[path]) for path in (*shared_paths, *local_paths)}
    untrainable = {path: str(kind) for path, kind in types.items() if not jnp.issubdtype(kind, jnp.inexact)}
    rules = {
        f"`local` and `frozen` overlap: both select {both}; make one of them narrower": not both,
        f"{untrainable} cannot be trained; select them with `frozen`": not untrainable,
        "`local` selects everything, so nothing would be left for the server to learn": shared_paths,
    }
    check_rules(rules)
    parts = [{path: leaves[path] for path in paths} for paths in (shared_paths, local_paths, frozen_paths)]

    def merge(shared: Mapping[str, Any], local: Mapping[str, Any], frozen: Mapping[str, Any]) -> Params:
        return unflatten(structure, {**shared, **local, **frozen})

    return Partition(parts[0], parts[1], parts[2], merge)


def select_paths(which: Which, name: str, leaves: Mapping[str, Any]) -> list[str]:
    """List the paths of the selected leaves.

    Args:
      which: a glob pattern on the path, several of them, or a predicate.
      name: the argument's name, for error messages.
      leaves: by path.

    Raises:
      ValueError: if a pattern matches no leaf.
    """
    if callable(which):
        return [path for path, leaf in leaves.items() if which(path, leaf)]
    patterns = [which] if isinstance(which, str) else list(which)
    for pattern in patterns:
        check_selection(name, pattern, fnmatch.filter(leaves, pattern), leaves)
    return [path for path in leaves if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]


def by_pattern(values: Any | Mapping[str, Any], name: str, params: Params) -> dict[str, Any]:
    """Return the value of every leaf that has one, as `{path: value}`.

    Args:
      values: one value for all leaves, or a mapping from glob patterns on paths to values. If several patterns match
        a leaf, the first one applies.
      name: the name of the argument that holds the values, for error messages.
      params: the pytree.

    Raises:
      ValueError: if a pattern matches no leaf.
    """
    leaves, _ = flatten(params)
    if not isinstance(values, Mapping):
        return dict.fromkeys(leaves, values)
    by_path: dict[str, Any] = {}
    for pattern, value in values.items():
        by_path = dict.fromkeys(select_paths(pattern, name, leaves), value) | by_path
    return by_path
