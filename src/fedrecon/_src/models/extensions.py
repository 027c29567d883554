"""Extensions of models: learned starts of local parameters, tables of local parameters, standardised ratings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon._src.core.checks import MOST_FLOAT, check_number
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import AUTO, Batch, Model, ModelState, Step, Weighted, predict_in, shapes_of
from fedrecon._src.core.pytrees import Params, Which, flatten, select_paths, unflatten


@register_factory
def learned_default(model: Model) -> Model:
    """Make the starting point of reconstruction a global parameter.

    The global parameters become `{"shared": ..., "default_local": ...}`. In training the default gets the gradient of
    the query loss at the reconstructed local parameters (or, in second order, the gradient through R). The local
    parameters themselves never leave the client.

    Args:
      model: one that has local parameters and no learned default yet.

    Returns:
      The same model with `default_local` set.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> model = fr.models.learned_default(fr.models.matrix_factorization(num_items=10))
      >>> sorted(model.init_global(jax.random.key(0)))
      ['default_local', 'shared']
    """
    if model.default_local is not None:
        raise ValueError("the model already has a learned default")

    def init_global(key: Array) -> Params:
        shared_key, local_key = jax.random.split(key)
        return {"shared": model.init_global(shared_key), "default_local": model.init_local(local_key)}

    return _under_shared(model, init_global)._replace(default_local=lambda params: params["default_local"])


def _lookups(model: Model, tables: Mapping[str, str]) -> Any:
    """Return the lookups of a model whose global parameters were put under `shared`, with further tables."""
    if model.lookups == AUTO:
        return AUTO
    return {**{f"shared/{path}": features for path, features in model.lookups.items()}, **tables}


def _under_shared(model: Model, init_global: Callable[[Array], Params], tables: Mapping[str, str] = {}) -> Model:
    """Return a model whose global parameters are those of another under `shared`, and more, such as lookup tables."""

    def within(function: Callable[..., Any] | None) -> Any:
        return None if function is None else lambda params, *rest: function(params["shared"], *rest)

    return model._replace(
        init_global=init_global,
        predict=within(model.predict),
        lookups=_lookups(model, tables),
        default_local=within(model.default_local),
        evidence=within(model.evidence),
        predict_train=within(model.predict_train),
        state=None if model.state is None else _state_under_shared(model.state),
    )


def _state_under_shared(state: ModelState) -> ModelState:
    def advance(params: Params, local: Params, batch: Batch, mask: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        shared, local_values = state.advance(params["shared"], local, batch, mask)
        return {f"shared/{path}": value for path, value in shared.items()}, local_values

    return ModelState(tuple(f"shared/{path}" for path in state.shared), state.local, advance, state.momenta)


@register_factory
def implicit_feedback(model: Model, num_ids: int, *, feature: str = "item", moves: Which = "*") -> Model:
    """Learn, for every id in a client's support, a shift of where its local parameters start.

    What people choose to rate says something about them, however they rate it. The global parameters become
    `{"shared": ..., "evidence": ...}`. Every leaf of `evidence` has one row per id, in the shape of a local parameter,
    and starts at zero. Reconstruction starts where it did before plus the sum of the support's rows, divided by the
    square root of one plus their number.

    In training, a client's upload then has rows of its support examples too, not only of its query examples.

    Args:
      model: one that has local parameters and takes no evidence yet.
      num_ids: ids are 0 to `num_ids - 1`.
      feature: the feature that holds one id per example.
      moves: which local parameters are shifted, as a pattern on their paths; all by default.

    References:
      Koren, Factorization Meets the Neighborhood, KDD 2008.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> model = fr.models.implicit_feedback(fr.models.matrix_factorization(num_items=10, dim=2), num_ids=10)
      >>> model.init_global(jax.random.key(0))["evidence"]["user_embedding"].shape
      (10, 2)
    """
    local = shapes_of(model.init_local)
    if model.evidence is not None or not jax.tree.leaves(local):
        raise ValueError("`model` must have local parameters and must not use implicit feedback already")

    leaves, structure = flatten(local)
    moved = select_paths(moves, "moves", leaves)

    def init_global(key: Array) -> Params:
        zeros = {path: jnp.zeros((num_ids, *leaves[path].shape), leaves[path].dtype) for path in moved}
        whole = len(moved) == len(leaves)
        return {"shared": model.init_global(key), "evidence": unflatten(structure, zeros) if whole else zeros}

    def evidence(params: Params, support: Batch, mask: Array) -> Params:
        weight = mask / jnp.sqrt(1.0 + jnp.sum(mask))
        tables, _ = flatten(params["evidence"])
        start = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
        start |= {path: jnp.tensordot(weight, table[support[feature]], 1) for path, table in tables.items()}
        return unflatten(structure, start)

    tables = {f"evidence/{path}": feature for path in moved}
    return _under_shared(model, init_global, tables)._replace(evidence=evidence)


@register_factory
def client_table(model: Model, num_clients: int, *, feature: str = "client") -> Model:
    """Make every client's local parameters rows of global tables.

    The global parameters become `{"shared": ..., "locals": ...}`, with the clients first in every leaf of `locals`; a
    batch has each example's client in `feature`. Nothing is local any more, so the model can be trained centrally, on
    all data in one place, or by federated averaging of everything.

    Args:
      model: a partially local model.
      num_clients: rows of the tables.
      feature: the feature with the row of each example's client.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> model = fr.models.client_table(fr.models.matrix_factorization(num_items=10, dim=2), num_clients=5)
      >>> model.init_global(jax.random.key(0))["locals"]["user_embedding"].shape
      (5, 2)
    """

    def init_global(key: Array) -> Params:
        shared_key, local_key = jax.random.split(key)
        locals_ = jax.vmap(model.init_local)(jax.random.split(local_key, num_clients))
        return {"shared": model.init_global(shared_key), "locals": locals_}

    if model.state is not None:
        raise ValueError("`client_table` cannot have batch statistics; make the model with state='frozen'")

    def predict(params: Params, local: Params, batch: Batch, step: Step | None = None) -> Any:
        ids = batch[feature]
        local_rows = jax.tree.map(lambda table: table[ids], params["locals"], is_leaf=lambda x: hasattr(x, "shape"))
        columns = {name: batch[name] for name in batch if name != feature}

        def predict_example(local: Params, example: Batch, step: Step | None) -> Any:
            batch_of_one = {name: value[None] for name, value in example.items()}
            step = None if step is None else step._replace(mask=step.mask[None])
            return jax.tree.map(lambda x: x[0], predict_in(model, params["shared"], local, batch_of_one, step))

        if step is not None and step.key is not None:
            step = step._replace(key=jax.random.split(step.key, step.mask.shape[0]))
        return jax.vmap(predict_example)(local_rows, columns, step)

    return model._replace(
        init_global=init_global,
        init_local=lambda key: {},
        predict=predict,
        lookups=_lookups(model, {f"locals/{path}": feature for path in flatten(shapes_of(model.init_local))[0]}),
        predict_train=None if model.predict_train is None else predict,
    )


@register_factory
def standardize(
    model: Model,
    mean: float,
    deviation: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    feature: str = "rating",
) -> Model:
    """Standardise ratings: the model predicts with mean 0 and deviation 1, and its predictions are scaled back.

    The loss is the squared error divided by the variance, so learning rates, ridges and priors do not depend on the
    unit of the ratings. Predictions are clipped to `low` and `high` in use and in evaluation, but not in training and
    reconstruction, since a clipped prediction has no gradient. Metrics see ratings in their own scale.

    Args:
      model: one with the squared error as its loss, and one prediction per example.
      mean: the mean of the ratings.
      deviation: their standard deviation, above 0.
      low: the lowest prediction.
      high: the highest prediction.
      feature: the feature that holds the ratings.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> model = fr.models.standardize(fr.models.matrix_factorization(num_items=1, dim=1), mean=3.5, deviation=0.5)
      >>> params, local = {"item_embedding": jnp.ones((1, 1))}, {"user_embedding": jnp.ones(1)}
      >>> model.predict(params, local, {"item": jnp.array([0])}).tolist()
      [4.0]
    """
    check_number("mean", mean, least=-MOST_FLOAT)
    check_number("deviation", deviation, above=True)
    if not low <= high:
        raise ValueError(f"`low` must not be above `high` (got low={low}, high={high})")

    def predict_train(params: Params, local: Params, batch: Batch, step: Step) -> Any:
        return mean + deviation * predict_in(model, params, local, batch, step)

    def predict(params: Params, local: Params, batch: Batch) -> Any:
        return jnp.clip(mean + deviation * model.predict(params, local, batch), low, high)

    def loss(predictions: Array, batch: Batch) -> Weighted:
        return ((predictions - batch[feature]) / deviation) ** 2, jnp.ones_like(predictions)

    return model._replace(predict=predict, predict_train=predict_train, loss=loss)
