"""The form of an algorithm that is exported: reconstruction of one client from a given start, and predictions.

This is the only file here that knows how algorithms and models are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import as_clients
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.keys import client_keys
from fedrecon._src.core.model import Batch, Step, predict_in
from fedrecon._src.core.pytrees import Params
from fedrecon._src.models.text.shared_weights import plain_layers

HIGHEST_LOG = 80.0  # higher predictions are cut to this: float32 ends at the exponential of 88


class Form(NamedTuple):
    """What runs on a device.

    Attributes:
      reconstruct: `(global, start, columns of (N, ...), count) -> local`; a model's evidence is added to the start.
      predict: `(global, local, columns) -> array`.
      start: where reconstruction starts: the learned default, or the fresh parameters of a single client.
      limit: how many examples reconstruction can use; None for no limit.
      evidence: whether the support moves the start.
    """

    reconstruct: Callable[[Params, Params, Batch, Array], Params]
    predict: Callable[[Params, Params, Batch], Array]
    start: Params
    limit: int | None
    evidence: bool


def export_form(algorithm: Algorithm, params: Params, seed: int, *, ranked: bool = False) -> Form:
    """Return the form of an algorithm that is exported.

    Args:
      algorithm: the algorithm to export.
      params: global parameters.
      seed: of the start, where it is not learned: the start of the only client in `fr.reconstruct(..., seed=seed)`.
      ranked: predict as in training, which is not clipped: clipped predictions of the best items are all the same.
    """
    model = algorithm.model
    alone = as_clients({"any": np.zeros(1)})
    key = client_keys(jax.random.key(seed), jnp.asarray(alone.identities()))[0]
    start = model.init_local(key) if model.default_local is None else model.default_local(params)

    def reconstruct(params: Params, start: Params, columns: Batch, count: Array) -> Params:
        # A device would draw other numbers from a key, so it gets the start instead.
        given = algorithm.define(model._replace(init_local=lambda key: start, default_local=None))
        support = Examples({name: column[None] for name, column in columns.items()}, count[None])
        unused_keys = jnp.zeros((1, 2), jnp.uint32)
        with plain_layers():
            return jax.tree.map(lambda leaf: leaf[0], given.reconstruct(params, (), support, unused_keys))

    def predict(params: Params, local: Params, columns: Batch) -> Array:
        first = next(iter(columns.values()))
        step = Step(jnp.ones(first.shape[:1], bool), None) if ranked else None
        with plain_layers():
            found: Any = predict_in(model, params, local, columns, step)
            return found.values() if hasattr(found, "values") else found  # logits are kept as a product

    return Form(reconstruct, predict, start, algorithm.method.support_limit, model.evidence is not None)


def of_counts(form: Form, feature: str = "rating") -> Form:
    """Make a form that has learned log(1 + count) take and give counts.

    Args:
      form: the form, learned from logarithms.
      feature: the column that holds the counts; what is below 0 counts as 0, as in training.
    """

    def reconstruct(params: Params, start: Params, columns: Batch, count: Array) -> Params:
        logs = jnp.log1p(jnp.maximum(columns[feature], 0))
        return form.reconstruct(params, start, {**columns, feature: logs}, count)

    def predict(params: Params, local: Params, columns: Batch) -> Array:
        return jnp.expm1(jnp.minimum(form.predict(params, local, columns), HIGHEST_LOG))

    return form._replace(reconstruct=reconstruct, predict=predict)


def of_weighed(form: Form, weight: Callable[[Array], Array], feature: str = "rating") -> Form:
    """Make a form whose examples have weights take counts, which `weight` turns into weights.

    Args:
      form: the form, which reads the column `weight`.
      weight: the weight of a count; counts below 1 are taken as 1.
      feature: the column that holds the counts.
    """

    def reconstruct(params: Params, start: Params, columns: Batch, count: Array) -> Params:
        rest = {name: column for name, column in columns.items() if name != feature}
        weights = weight(jnp.maximum(columns[feature], 1))
        return form.reconstruct(params, start, {**rest, "weight": weights}, count)

    return form._replace(reconstruct=reconstruct)
