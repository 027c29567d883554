"""A partially local model: its parameters, its predictions, its loss and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from fedrecon._src.core.pytrees import Params

Batch = Mapping[str, Array]  # feature name -> (examples, ...)
Weighted = tuple[Array, Array]  # values and their weights, of one shape: (examples,) or (examples, tokens)
AUTO: Literal["auto"] = "auto"


class Metric(NamedTuple):
    """A weighted mean over examples: `measure(predictions, batch) -> (values, weights)`, then `finish(mean)`.

    One that costs as much as a step itself can be left out `in_training`; rounds then report NaN.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> def squared_error(predictions, batch):
      ...     return (predictions - batch["y"]) ** 2, jnp.ones_like(predictions)
      >>> rmse = fr.Metric(squared_error, lambda mean: mean**0.5)
      >>> rmse.finish(4.0)
      2.0
    """

    measure: Callable[[Any, Batch], Weighted]
    finish: Callable[[Any], Any] = lambda mean: mean
    in_training: bool = True


class ClientMetrics(NamedTuple):
    """Metrics of a client as a whole that are not means over its examples, such as NDCG or AUC.

    Attributes:
      names: what they are called, in order.
      measure: `(global, local, support, query) -> (names,)` of one client. Both sides are `Examples`: columns of
        `(examples, ...)`, of which the first `count` rows are real. NaN if a client cannot be measured.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> def examples_of(params, local, support, query):
      ...     return jnp.stack([support.count, query.count]).astype(jnp.float32)
      >>> fr.kit.ClientMetrics(("support", "query"), examples_of).names
      ('support', 'query')
    """

    names: tuple[str, ...]
    measure: Callable[[Params, Params, Any, Any], Array]


class Step(NamedTuple):
    """What a training step gets besides its batch.

    Attributes:
      mask: `(examples,)`, false where an example is padding.
      key: for this client, round and step; None if nothing should be random, as when reconstructing for inference.
    """

    mask: Array
    key: Array | None


class ModelState(NamedTuple):
    """Leaves that examples set and no optimizer moves, such as running statistics.

    Attributes:
      shared: paths of global leaves. A client advances them over its query examples after U; the server adds the mean
        of their changes directly, without its optimizer.
      local: paths of local leaves. They are set from the support examples after R.
      advance: `(global, local, batch, mask) -> ({path: new value}, {path: new value})`: the values of those global and
        local leaves after one more batch.
      momenta: the momentum, by path, of local leaves that are moving averages: `advance` returns
        `momentum * old + (1 - momentum) * batch` for them. With it, the values set from support do not depend on the
        momentum.

    Example:
      >>> import fedrecon as fr
      >>> def advance(params, local, batch, mask):
      ...     return {"largest": batch["x"].max()}, {}
      >>> fr.kit.ModelState(shared=("largest",), local=(), advance=advance).shared
      ('largest',)
    """

    shared: tuple[str, ...]
    local: tuple[str, ...]
    advance: Callable[[Params, Params, Batch, Array], tuple[dict[str, Array], dict[str, Array]]]
    momenta: Mapping[str, float] = {}


class Model(NamedTuple):
    """A partially local model.

    Attributes:
      init_global: `key -> global parameters`, a pytree of float arrays that the server learns.
      init_local: `key -> local parameters`, which every client reconstructs; an empty pytree if there are none.
      predict: `(global, local, batch) -> predictions`.
      loss: `(predictions, batch) -> (values, weights)`; the loss of a batch is the weighted mean.
      metrics: other weighted means to report, by name.
      lookups: global tables that are only read by rows, as `{path of the leaf: feature(s) holding row ids}`.
        Clients then work only on their own rows of these tables. With "auto", training finds such tables by tracing
        `predict` (see `find_lookups`).
      default_local: `global -> local`, a learned starting point for reconstruction; None if it is not learned.
      evidence: `(global, support batch, mask) -> local`, a learned shift of the starting point, computed from the
        client's support; None for none.
      statistics: `(predictions, batch, mask) -> local`, sums over a batch whose predictions were made with the local
        parameters as they started; `closed_form` adds them up. None for models that need another solver.
      predict_train: `(global, local, batch, step) -> predictions` in a training step, for models that predict
        differently in training (dropout, batch statistics); None for others.
      state: leaves that examples set and no optimizer moves; None if there are none.
      frozen: shapes of what else `predict` uses, by path: parameters and state that keep their values and never travel.
      client_metrics: metrics of a client as a whole, which evaluation averages over clients; None for none.
      class_label: the feature with class numbers or probabilities that the loss compares with logits; None if there is
        none. They are checked before anything is computed.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> model = fr.Model(
      ...     init_global=lambda key: {"w": jnp.float32(2)},
      ...     init_local=lambda key: {"b": jnp.float32(1)},
      ...     predict=lambda params, local, batch: params["w"] * batch["x"] + local["b"],
      ...     loss=lambda predictions, batch: ((predictions - batch["y"]) ** 2, jnp.ones_like(predictions)),
      ... )
      >>> float(model.predict({"w": 2.0}, {"b": 1.0}, {"x": 3.0}))
      7.0
    """

    init_global: Callable[[Array], Params]
    init_local: Callable[[Array], Params]
    predict: Callable[[Params, Params, Batch], Any]
    loss: Callable[[Any, Batch], Weighted]
    metrics: Mapping[str, Metric] = {}
    lookups: Mapping[str, str | Sequence[str]] | Literal["auto"] = {}
    default_local: Callable[[Params], Params] | None = None
    evidence: Callable[[Params, Batch, Array], Params] | None = None
    statistics: Callable[[Any, Batch, Array], Params] | None = None
    predict_train: Callable[[Params, Params, Batch, Step], Any] | None = None
    state: ModelState | None = None
    frozen: Mapping[str, Any] = {}
    client_metrics: ClientMetrics | None = None
    class_label: str | None = None

    @property
    def local_state(self) -> tuple[str, ...]:
        """Paths of local leaves that are set from support and not solved for."""
        return () if self.state is None else self.state.local


def shapes_of(init: Callable[[Array], Params]) -> Any:
    """Return the shapes of parameters without computing them or starting JAX's devices.

    Args:
      init: `key -> parameters`, such as a model's `init_global`.

    Example:
      >>> import fedrecon as fr
      >>> from fedrecon import kit
      >>> kit.shapes_of(fr.models.matrix_factorization(10, 2).init_global)["item_embedding"].shape
      (10, 2)
    """
    return jax.eval_shape(lambda: init(jax.random.key(0)))


def predict_in(model: Any, params: Params, local: Any, batch: Batch, step: Step | None) -> Any:
    """Predict as in a training step if there is one and the model has a `predict_train`; otherwise as in use.

    Args:
      model: what predicts: a model, or an objective.
      params: global parameters, or what is solved for.
      local: local parameters, or what is held fixed.
      batch: features of `(examples, ...)`.
      step: the training step; None outside training.
    """
    if model.predict_train is None or step is None:
        return model.predict(params, local, batch)
    return model.predict_train(params, local, batch, step)


def metric_names(model: Model) -> list[str]:
    """Return the names of what `measure` returns, in order: the loss, then the model's metrics.

    Args:
      model: its metrics are named.
    """
    return ["loss", *model.metrics]


def evaluated_names(model: Model) -> list[str]:
    """Name what evaluation measures, in order: the loss, the model's metrics, and those of clients as a whole."""
    return [*metric_names(model), *(model.client_metrics.names if model.client_metrics else ())]


def measure(
    model: Model, predictions: Any, batch: Batch, mask: Bool[Array, " examples"], *, training: bool = False
) -> tuple[Float[Array, ""], Float[Array, "metrics 2"]]:
    """Measure the loss and the metrics of one batch.

    Args:
      model: its loss and metrics are measured.
      predictions: what `model.predict` returned for this batch.
      batch: features of `(examples, ...)`.
      mask: false where an example is padding.
      training: leave out the metrics that are not for training; their sums are 0.

    Returns:
      The mean loss, and sums: each metric's weighted values and its weights.
    """
    sums = [_masked_sums(model.loss(predictions, batch), mask)]
    nothing = jnp.zeros(()), jnp.zeros(())
    sums += [
        _masked_sums(metric.measure(predictions, batch), mask) if metric.in_training or not training else nothing
        for metric in model.metrics.values()
    ]
    total, weight = sums[0]
    # The weight depends on the data only, never on the parameters, so no gradient flows through the guard.
    mean_loss = total / jnp.where(weight > 0, weight, 1.0)
    return mean_loss, jax.lax.stop_gradient(jnp.stack([jnp.stack(pair) for pair in sums]))


def _masked_sums(weighted: Weighted, mask: Array) -> Weighted:
    values, weights = weighted
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    weights = jnp.where(mask, weights, 0).astype(jnp.float32)
    return jnp.sum(jnp.where(weights > 0, values, 0) * weights), jnp.sum(weights)


def finish(model: Model, sums: Any) -> dict[str, float]:
    """Turn sums of `(metrics, 2)` into named means; a metric without any weight, or the root of less than 0, is NaN.

    Args:
      model: the model whose metrics they are.
      sums: in the order of `metric_names` or `evaluated_names`.
    """
    finishers = {name: metric.finish for name, metric in model.metrics.items()}
    means = (float(total) / float(weight) if weight > 0 else float("nan") for total, weight in sums)
    names = metric_names(model) if len(sums) == len(metric_names(model)) else evaluated_names(model)
    values = {name: finishers.get(name, lambda mean: mean)(mean) for name, mean in zip(names, means, strict=True)}
    # Sums come from clients, and some may lie: a sum of squares below 0 must not end the training.
    return {name: float("nan") if isinstance(value, complex) else float(value) for name, value in values.items()}
