"""Plain JAX functions as partially local models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from jax import Array

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.model import Model
from fedrecon._src.core.pytrees import Params, flatten, unflatten
from fedrecon._src.models.adapters.network import Arrays, Mode, Network, Options, adapt, mode_arguments
from fedrecon._src.models.adapters.selection import near_miss


def from_function(
    apply: Callable[..., Any],
    init: Callable[[Array], Params] | Params,
    *,
    init_state: Params | None = None,
    momentum: float | Mapping[str, float] = {},
    **options: Unpack[Options],
) -> Model:
    """Make a partially local model from a plain function.

    `apply` may have these arguments: `training` (or `train`, `deterministic`, ...), `key` (None outside training) and
    `mask` (`(examples,)`, false for padding; None if there is no padding). Batch statistics must leave out padding.

    Args:
      apply: `(params, *inputs) -> outputs` for a batch; with `init_state`,
        `(params, state, *inputs) -> (outputs, new state)`.
      init: `key -> params`, any pytree; or the parameters themselves, and then every client starts from them.
      init_state: state that is not trained, such as running statistics; see `state`.
      momentum: for state that is a moving average, `momentum * old + (1 - momentum) * batch`: one number for all of it,
        or one for each path. Other state is set to the mean of its values after each single batch.
      **options: `local`, `inputs`, `loss`, `label`, `metrics`, `state` and others; see `Options`.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> model = fr.models.from_function(
      ...     lambda params, x: params["w"] * x + params["b"],
      ...     {"w": jnp.float32(2), "b": jnp.float32(1)},
      ...     local="b",
      ...     inputs="x",
      ...     label="y",
      ...     loss="mse",
      ... )
      >>> model.predict({"w": 2.0}, {"b": 1.0}, {"x": jnp.array([3.0])}).tolist()
      [7.0]
    """
    make = init if callable(init) else lambda key: init
    names = inspect.signature(apply).parameters
    structures: dict[str, Any] = {}  # of parameters and state, known once `make` has run

    def start(key: Array) -> tuple[Arrays, Arrays]:
        params, structures["params"] = flatten(make(key))
        state, structures["state"] = flatten(init_state)
        return params, state

    def run(params: Arrays, state: Arrays, inputs: tuple, named: dict[str, Any], mode: Mode) -> tuple[Any, Arrays]:
        more = mode_arguments(apply, mode) | {n: getattr(mode, n) for n in ("key", "mask") if n in names}
        whole = unflatten(structures["params"], params)
        if init_state is None:
            return apply(whole, *inputs, **named, **more), state
        outputs, new = apply(whole, unflatten(structures["state"], state), *inputs, **named, **more)
        return outputs, flatten(new)[0]

    momenta = momentum if isinstance(momentum, Mapping) else dict.fromkeys(flatten(init_state)[0], momentum)
    for path, value in momenta.items():
        if path not in flatten(init_state)[0]:
            raise ValueError(f"`momentum` names {path!r}{near_miss(path, flatten(init_state)[0])}, which is not state")
        check_number("momentum", value, most=1, below=True)
    return adapt(Network(start, run, random="key" in names, momenta=momenta), **options)
