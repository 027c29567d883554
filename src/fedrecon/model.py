"""A model in two parts, global and local: its parameters, its predictions, its loss and its metrics."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Params = Any  # a pytree of arrays
Batch = Mapping[str, Array]  # feature name -> (examples, ...)
Weighted = tuple[Array, Array]  # values and their weights, of one shape: (examples,) or (examples, tokens)
Which = str | Sequence[str] | Callable[[str, Any], bool]
AUTO: Literal["auto"] = "auto"


class Metric(NamedTuple):
    """A weighted mean over examples: `measure(predictions, batch) -> (values, weights)`, then `finish(mean)`."""

    measure: Callable[[Any, Batch], Weighted]
    finish: Callable[[Any], Any] = lambda mean: mean


class Step(NamedTuple):
    """What a step of training has beside its batch.

    Attributes:
      mask: `(examples,)`, false where an example only fills the batch up.
      key: of this client, round and step; None where nothing random is wanted, as in rebuilding for inference.
    """

    mask: Array
    key: Array | None


class State(NamedTuple):
    """Leaves that examples set and no optimizer moves, such as running statistics.

    Attributes:
      shared: paths of global leaves. A client advances them over its query examples after U; the server takes the mean
        of their changes as it is, whatever its optimizer.
      local: paths of local leaves. They are set from the support examples after R.
      advance: `(global, local, batch, mask) -> ({path: new value}, {path: new value})`, of those global and local
        leaves after one more batch.
    """

    shared: tuple[str, ...]
    local: tuple[str, ...]
    advance: Callable[[Params, Params, Batch, Array], tuple[dict[str, Array], dict[str, Array]]]


class Model(NamedTuple):
    """A partially local model.

    Attributes:
      init_global: `key -> global parameters`, a pytree of float arrays that the server learns.
      init_local: `key -> local parameters`, rebuilt by every client; an empty pytree if there are none.
      predict: `(global, local, batch) -> predictions`.
      loss: `(predictions, batch) -> (values, weights)`; the loss of a batch is the weighted mean.
      metrics: further weighted means to report, by name.
      lookups: global tables that are only read by rows, as `{path of the leaf: feature(s) holding row ids}`.
        Declare a table here and clients touch only their own rows of it. "auto" leaves it to training to find such
        tables by tracing `predict` (see `tracing.find_lookups`).
      default_local: `global -> local` where reconstruction starts, if that is learned; else None.
      evidence: `(global, support batch, mask) -> local`, added to where reconstruction starts: what a client's
        support says before anything is solved; None for nothing.
      fit: `(global, local, batch, step) -> predictions` in a step of training, for a model that then does something
        else than `predict` (dropout, statistics of the batch); else None.
      state: leaves that are not trained but set; None if there are none.
      frozen: shapes of what else `predict` uses, by path: parameters and state that keep their values and never travel.
    """

    init_global: Callable[[Array], Params]
    init_local: Callable[[Array], Params]
    predict: Callable[[Params, Params, Batch], Any]
    loss: Callable[[Any, Batch], Weighted]
    metrics: Mapping[str, Metric] = {}
    lookups: Mapping[str, str | Sequence[str]] | Literal["auto"] = {}
    default_local: Callable[[Params], Params] | None = None
    evidence: Callable[[Params, Batch, Array], Params] | None = None
    fit: Callable[[Params, Params, Batch, Step], Any] | None = None
    state: State | None = None
    frozen: Mapping[str, Any] = {}


def predict_in(model: Model, params: Params, local: Params, batch: Batch, step: Step | None) -> Any:
    """Predict in a step of training, or as always where there is no step or the model knows no difference."""
    if model.fit is None or step is None:
        return model.predict(params, local, batch)
    return model.fit(params, local, batch, step)


def metric_names(model: Model) -> list[str]:
    """Name what `measure` returns, in order: the loss, then the model's metrics."""
    return ["loss", *model.metrics]


def measure(model: Model, predictions: Any, batch: Batch, mask: Array) -> tuple[Array, Array]:
    """Measure the loss and the metrics of one batch.

    Args:
      model: whose loss and metrics are taken.
      predictions: of `model.predict` for this batch.
      batch: features of `(examples, ...)`.
      mask: `(examples,)`, false where an example is padding.

    Returns:
      The mean loss, and sums of `(metrics, 2)`: each metric's weighted values and its weights.
    """
    sums = [_masked_sums(model.loss(predictions, batch), mask)]
    sums += [_masked_sums(metric.measure(predictions, batch), mask) for metric in model.metrics.values()]
    total, weight = sums[0]
    # The weight is the data's, never the parameters': no gradient is wanted through the division's guard.
    mean_loss = total / jnp.where(weight > 0, weight, 1.0)
    return mean_loss, jax.lax.stop_gradient(jnp.stack([jnp.stack(pair) for pair in sums]))


def _masked_sums(weighted: Weighted, mask: Array) -> Weighted:
    values, weights = weighted
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    weights = jnp.where(mask, weights, 0).astype(jnp.float32)
    return jnp.sum(jnp.where(weights > 0, values, 0) * weights), jnp.sum(weights)


def finish(model: Model, sums: Any) -> dict[str, float]:
    """Turn sums of `(metrics, 2)` into named means; a metric without any weight is NaN."""
    finishers = [lambda mean: mean, *(metric.finish for metric in model.metrics.values())]
    means = (float(total) / float(weight) if weight > 0 else float("nan") for total, weight in sums)
    return {name: float(done(mean)) for name, done, mean in zip(metric_names(model), finishers, means, strict=True)}


def path_name(path: Sequence[Any]) -> str:
    """Write a key path of a pytree as the house writes it: `encoder/0/kernel`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


class Structure(NamedTuple):
    """The shape of a pytree and the paths of its leaves, in order."""

    treedef: Any
    paths: tuple[str, ...]


def flatten(params: Params) -> tuple[dict[str, Any], Structure]:
    """Flatten a pytree to `{path: leaf}` and the structure that `unflatten` needs."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    found = {path_name(path): leaf for path, leaf in leaves}
    if len(found) != len(leaves):
        raise ValueError("two parameters have the same path; rename one of them")
    return found, Structure(treedef, tuple(found))


def unflatten(structure: Structure, leaves: Mapping[str, Any]) -> Params:
    """Undo `flatten`, whatever the order of the mapping."""
    return jax.tree_util.tree_unflatten(structure.treedef, [leaves[path] for path in structure.paths])


class Divided(NamedTuple):
    """Parameters in two parts, and `join(solved, held)` that puts them together again."""

    solved: Params
    held: Params
    join: Callable[[Params, Params], Params]


def divide(params: Params, held: Collection[str]) -> Divided:
    """Divide parameters into those that are solved for and those at the paths `held`."""
    if not held:
        return Divided(params, (), lambda solved, held: solved)
    leaves, structure = flatten(params)
    solved = {path: leaf for path, leaf in leaves.items() if path not in held}
    kept = {path: leaves[path] for path in held}
    return Divided(solved, kept, lambda solved, held: unflatten(structure, {**solved, **held}))


class Partition(NamedTuple):
    """The leaves of one pytree in three parts, each `{path: leaf}`, and how to put them together again."""

    shared: dict[str, Any]
    local: dict[str, Any]
    frozen: dict[str, Any]
    merge: Callable[..., Params]


def partition(params: Params, local: Which, frozen: Which = ()) -> Partition:
    """Partition a pytree of parameters into global, local and frozen leaves.

    Non-trainable state (counters, running statistics, tables of constants) belongs in `frozen`: it is neither
    trained, nor averaged, nor rebuilt, and keeps its value. Leaves that are not floating point can only go there.

    Args:
      params: any pytree.
      local: which leaves are local: a glob pattern on the path (`"user*"`, `"*/adapter/*"`), several of them,
        or a predicate `(path, leaf) -> bool`.
      frozen: which leaves keep their value, in the same forms.

    Returns:
      A `Partition`; `merge(shared, local, frozen)` rebuilds the pytree.

    Raises:
      ValueError: if `local` matches nothing or everything, if a pattern of `frozen` matches nothing, if a leaf is
        both, or if a leaf to be trained is not floating point.
    """
    leaves, structure = flatten(params)
    is_local, is_frozen = matcher(local, "local", leaves), matcher(frozen, "frozen", leaves)
    parts: tuple[dict, dict, dict] = ({}, {}, {})
    for path, leaf in leaves.items():
        if is_local(path, leaf) and is_frozen(path, leaf):
            raise ValueError(f"`local` and `frozen` overlap: both match {path!r}; make one of them narrower")
        part = 1 if is_local(path, leaf) else 2 if is_frozen(path, leaf) else 0
        if part != 2 and not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ValueError(f"{path!r} is {jnp.result_type(leaf)}, which cannot be trained; match it with `frozen`")
        parts[part][path] = leaf
    if not parts[1]:
        raise ValueError(f"`local` matched nothing; the paths are: {', '.join(leaves)}")
    if not parts[0]:
        raise ValueError("`local` matched everything: nothing would be left for the server to learn")

    def merge(shared: Mapping[str, Any], local: Mapping[str, Any], frozen: Mapping[str, Any]) -> Params:
        return unflatten(structure, {**shared, **local, **frozen})

    return Partition(*parts, merge)


def matcher(which: Which, name: str, leaves: Mapping[str, Any]) -> Callable[[str, Any], bool]:
    """Return which leaves are meant, as a predicate; `name` is that of the argument, for messages.

    Raises:
      ValueError: if a pattern matches no leaf.
    """
    if callable(which):
        return which
    patterns = [which] if isinstance(which, str) else list(which)
    for pattern in patterns:
        if not fnmatch.filter(leaves, pattern):
            raise ValueError(f"`{name}` pattern {pattern!r} matched nothing; the paths are: {', '.join(leaves)}")
    return lambda path, leaf: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
