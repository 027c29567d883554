"""A learned default for the local parameters: where reconstruction starts, and what clients without data use."""

from __future__ import annotations

import jax
from jax import Array

from fedrecon.lookups import prefixed
from fedrecon.model import Batch, Model, Params, State, Step, predict_in


def learned_default(model: Model) -> Model:
    """Make the starting point of reconstruction a global parameter.

    The global parameters become `{"shared": ..., "default_local": ...}`. In training the default receives the
    gradient of the query loss at the rebuilt local parameters (or, in second order, the gradient through R), never
    the local parameters themselves.

    Args:
      model: one that has local parameters and no learned default yet.

    Returns:
      The same model with `default_local` set.
    """
    if model.default_local is not None:
        raise ValueError("the model's default is learned already")

    def init_global(key: Array) -> Params:
        shared_key, local_key = jax.random.split(key)
        return {"shared": model.init_global(shared_key), "default_local": model.init_local(local_key)}

    def predict(params: Params, local: Params, batch: Batch) -> Array:
        return model.predict(params["shared"], local, batch)

    def fit(params: Params, local: Params, batch: Batch, step: Step) -> Array:
        return predict_in(model, params["shared"], local, batch, step)

    return model._replace(
        init_global=init_global,
        predict=predict,
        lookups=prefixed("shared", model.lookups),
        default_local=lambda params: params["default_local"],
        fit=None if model.fit is None else fit,
        state=None if model.state is None else _in_shared(model.state),
    )


def _in_shared(state: State) -> State:
    def advance(params: Params, local: Params, batch: Batch, mask: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        shared, mine = state.advance(params["shared"], local, batch, mask)
        return {f"shared/{path}": value for path, value in shared.items()}, mine

    return State(tuple(f"shared/{path}" for path in state.shared), state.local, advance)
