"""Losses and metrics of models, from names or from functions of predictions and labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon._src.core.checks import check_known, near_miss
from fedrecon._src.core.model import Batch, Metric, Weighted

Values = Callable[[Any, Any], Any]  # (predictions, labels) -> (examples, ...)
Loss = str | Values
Metrics = Sequence[str | Values] | Mapping[str, str | Values | Metric]


def _aligned(predictions: Any, labels: Array) -> Array:
    """Drop a last dimension of 1 that labels do not have: (examples, 1) and (examples,) would broadcast."""
    predictions = jnp.asarray(predictions)
    if predictions.ndim == labels.ndim + 1 and predictions.shape[-1] == 1:
        predictions = predictions[..., 0]
    if predictions.shape != labels.shape:
        raise ValueError(
            f"predictions have shape {predictions.shape} and labels {labels.shape}, which this loss or metric cannot "
            "compare; make the model return the labels' shape, or give a function of predictions and labels"
        )
    return predictions


def _cross_entropy(logits: Any, labels: Array) -> Array:
    logits = jnp.asarray(logits)
    if jnp.issubdtype(labels.dtype, jnp.integer) and logits.shape[:-1] == labels.shape:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if logits.shape == labels.shape and logits.ndim > 1:
        return optax.softmax_cross_entropy(logits, labels)
    raise ValueError(
        f"cross entropy of logits of shape {logits.shape} needs class numbers of shape {logits.shape[:-1]} or "
        f"probabilities of the logits' shape as labels, not {labels.dtype} of shape {labels.shape}"
    )


def _accuracy(predictions: Any, labels: Array) -> Array:
    predictions = jnp.asarray(predictions)
    if predictions.ndim == labels.ndim + 1 and predictions.shape[-1] > 1:
        right = jnp.argmax(predictions, -1) == labels
    elif predictions.shape == labels.shape and predictions.ndim > 1 and predictions.shape[-1] > 1:
        right = jnp.argmax(predictions, -1) == jnp.argmax(labels, -1)
    else:
        right = (_aligned(predictions, labels) > 0) == (labels > 0.5)
    return right.astype(jnp.float32)


LOSSES: dict[str, Values] = {
    "mse": lambda predictions, labels: (_aligned(predictions, labels) - labels) ** 2,
    "mae": lambda predictions, labels: jnp.abs(_aligned(predictions, labels) - labels),
    "huber": lambda predictions, labels: optax.huber_loss(_aligned(predictions, labels), labels),
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": lambda logits, labels: optax.sigmoid_binary_cross_entropy(
        _aligned(logits, labels), labels.astype(jnp.float32)
    ),
}
CLASS_LOSSES = (  # their labels are class numbers, or probabilities
    *("cross_entropy", "binary_cross_entropy"),
    *(optax.softmax_cross_entropy_with_integer_labels, optax.sigmoid_binary_cross_entropy),
)
METRICS = {**LOSSES, "rmse": LOSSES["mse"], "accuracy": _accuracy, "perplexity": _cross_entropy}
FINISH: dict[Any, Callable[[Any], Any]] = {"rmse": lambda mean: mean**0.5, "perplexity": math.exp}  # of the mean


def feature(batch: Batch, name: str, argument: str) -> Array:
    """Return a feature of a batch; the error names the argument.

    Args:
      batch: by feature.
      name: the feature's name.
      argument: the argument that named it.
    """
    check_known(argument, [name], batch, "a batch has")
    return batch[name]


def make_loss(loss: Loss, label: str | None, weight: str | None) -> Callable[[Any, Batch], Weighted]:
    """Make the loss of a model from a name or a function; see `Options`.

    Args:
      loss: a name or a function.
      label: the feature with the labels; None for the whole batch.
      weight: the feature with the weights; None if all weigh the same.
    """
    return _weighted(_values(loss, "loss", LOSSES), "loss", label, weight)


def make_metrics(metrics: Metrics, label: str | None, weight: str | None) -> dict[str, Metric]:
    """Make the metrics of a model from names, functions or `Metric`s; see `Options`.

    Args:
      metrics: names or functions, or a mapping from names to them.
      label: the feature with the labels; None for the whole batch.
      weight: the feature with the weights; None if all weigh the same.
    """
    listed = [metrics] if isinstance(metrics, str) else metrics
    named = listed if isinstance(listed, Mapping) else {getattr(m, "__name__", str(m)): m for m in listed}
    return {name: _metric(metric, name, label, weight) for name, metric in named.items()}


def _metric(metric: Any, name: str, label: str | None, weight: str | None) -> Metric:
    if isinstance(metric, Metric):
        return metric
    measure = _weighted(_values(metric, "metrics", METRICS), name, label, weight)
    return Metric(measure, FINISH[metric]) if metric in FINISH else Metric(measure)


def _values(which: Any, argument: str, choices: Mapping[str, Values]) -> Values:
    if callable(which):
        return which
    if which not in choices:
        hint = near_miss(which, choices) if isinstance(which, str) else ""
        raise ValueError(f"`{argument}` is {which!r}{hint}; give a function, or one of {', '.join(choices)}")
    return choices[which]


def _weighted(values: Values, name: str, label: str | None, weight: str | None) -> Callable[[Any, Batch], Weighted]:
    def measure(predictions: Any, batch: Batch) -> Weighted:
        target = batch if label is None else feature(batch, label, "label")
        try:
            result = values(predictions, target)
        except ValueError as problem:
            raise ValueError(f"`{name}` with the labels in column {label!r}: {problem}") from None
        examples = len(jax.tree.leaves(predictions if label is None else target)[0])
        if isinstance(result, tuple):
            return result
        shape = jnp.shape(result)
        if shape[:1] != (examples,):
            raise ValueError(f"`{name}` returned shape {shape} for {examples} examples; return values, not a mean")
        weights = jnp.ones(shape) if weight is None else feature(batch, weight, "weight")
        if jnp.shape(weights) != shape:
            weights = jnp.broadcast_to(jnp.reshape(weights, weights.shape + (1,) * (len(shape) - weights.ndim)), shape)
        return result, weights

    return measure
