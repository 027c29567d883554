"""A learned default for the local parameters: where reconstruction starts, and what clients without data use."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array

from fedrecon._src.client.lookups.tables import prefixed
from fedrecon._src.core.factories import recorded
from fedrecon._src.core.model import Batch, Model, State
from fedrecon._src.core.pytrees import Params


@recorded
def learned_default(model: Model) -> Model:
    """Make the starting point of reconstruction a global parameter.

    The global parameters become `{"shared": ..., "default_local": ...}`. In training the default gets the gradient of
    the query loss at the reconstructed local parameters (or, in second order, the gradient through R). The local
    parameters themselves never leave the client.

    Args:
      model: one that has local parameters and no learned default yet.

    Returns:
      The same model with `default_local` set.
    """
    if model.default_local is not None:
        raise ValueError("the model already has a learned default")

    def init_global(key: Array) -> Params:
        shared_key, local_key = jax.random.split(key)
        return {"shared": model.init_global(shared_key), "default_local": model.init_local(local_key)}

    def predict(params: Params, local: Params, batch: Batch) -> Array:
        return model.predict(params["shared"], local, batch)

    return model._replace(
        init_global=init_global,
        predict=predict,
        lookups=prefixed("shared", model.lookups),
        default_local=lambda params: params["default_local"],
        evidence=within_shared(model.evidence),
        fit=within_shared(model.fit),
        state=state_within_shared(model.state),
    )


def within_shared(function: Callable[..., Params] | None) -> Callable[..., Params] | None:
    """Return a function of a model's global parameters that finds them under `shared`.

    Args:
      function: its first argument is the global parameters; None stays None.
    """
    if function is None:
        return None
    return lambda params, *rest: function(params["shared"], *rest)


def state_within_shared(state: State | None) -> State | None:
    """Return a model's state for when its global parameters are under `shared`.

    Args:
      state: the model's state; None stays None.
    """
    if state is None:
        return None
    known = state

    def advance(params: Params, local: Params, batch: Batch, mask: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        shared, mine = known.advance(params["shared"], local, batch, mask)
        return {f"shared/{path}": value for path, value in shared.items()}, mine

    return State(tuple(f"shared/{path}" for path in known.shared), known.local, advance, known.momenta)
