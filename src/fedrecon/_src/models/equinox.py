"""Equinox modules as partially local models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon._src.core.checks import require
from fedrecon._src.core.model import Model
from fedrecon._src.core.pytrees import Params, flatten, path_name
from fedrecon._src.models.network import Mode, Network, Options, adapt


def from_equinox(
    module: Any | Callable[[Array], Any],
    *,
    batched: bool = False,
    axis_name: str = "batch",
    **options: Unpack[Options],
) -> Model:
    """Make a partially local model from an Equinox module.

    A module already has its weights: with every seed, training starts from these global parameters and every client
    from these local ones. With `key -> module`, both are drawn from the key.

    Equinox's BatchNorm takes no mask. A client's last batch, if partial, is padded with the client's examples from the
    first on, and these enter the statistics, though not the loss.

    Args:
      module: an Equinox module, or `key -> module`; for a module with state, a pair `(module, state)` as
        `eqx.nn.make_with_state` returns it, or a function that returns such a pair.
      batched: whether the module takes a whole batch. By default it takes one example and is mapped over the batch.
      axis_name: the name of the mapped axis, as given to BatchNorm.
      **options: `local`, `inputs`, `loss`, `label`, `metrics`, `state` and others; see `Options`. `local` may be a
        module inside this one. `state` decides how BatchNorm's statistics are treated.

    Example:
      >>> import equinox as eqx
      >>> import fedrecon as fr
      >>> import jax
      >>> model = fr.models.from_equinox(
      ...     lambda key: eqx.nn.Linear(3, 2, key=key), local="bias", inputs="x", loss="cross_entropy"
      ... )
      >>> model.init_local(jax.random.key(0))["bias"].shape
      (2,)
    """
    eqx = require("equinox")
    original = module[0] if isinstance(module, tuple) else module
    make = (lambda key: module) if isinstance(original, eqx.Module) else module

    def pair(key: Array) -> tuple[Any, Any]:
        made = make(key)
        return made if isinstance(made, tuple) else (made, None)

    def start(key: Array) -> tuple[Params, Params]:
        made, state = pair(key)
        return eqx.filter(made, eqx.is_inexact_array), _numbered(state)

    # Everything that is not a parameter (activation functions, sizes, flags) does not depend on the key.
    fixed_module, fixed_state = pair(jax.random.key(0))
    static = eqx.filter(fixed_module, eqx.is_inexact_array, inverse=True)
    has_state = fixed_state is not None
    names = inspect.signature(type(fixed_module).__call__).parameters

    def run(params: Params, state: Params, inputs: tuple, named: dict[str, Any], mode: Mode) -> tuple[Any, Params]:
        whole = _in_mode(eqx, eqx.combine(params, static), mode)
        # Equinox compares the types of old and new state, and what comes from outside the trace has another type (and
        # from JAX 0.11 on another sharding) than the result of an addition.
        leaves = [leaf + 0 if jnp.issubdtype(leaf.dtype, jnp.number) else leaf for leaf in state["state"]]
        states = (jax.tree.unflatten(jax.tree.structure(fixed_state), leaves),) if has_state else ()

        def call(inputs: tuple, named: dict[str, Any], key: Array | None) -> Any:
            more = {"key": key} if "key" in names else {}
            result = whole(*inputs, *states, **named, **more)
            return result if has_state else (result, None)

        if batched:
            outputs, new = call(inputs, named, mode.key)
        else:
            examples = jax.tree.leaves((inputs, named))[0].shape[0]
            keys = None if mode.key is None else jax.random.split(mode.key, examples)
            outputs, new = jax.vmap(call, axis_name=axis_name, out_axes=(0, None))(inputs, named, keys)
        return outputs, _numbered(new)

    locate, momenta = functools.partial(_locate, original), _momenta(eqx, fixed_module, fixed_state)
    return adapt(Network(start, run, "key" in names, eqx.Module, locate, momenta), **options)


def _numbered(state: Any) -> Params:
    """List the leaves of an Equinox state, since they have no paths."""
    return {"state": jax.tree.leaves(state)}


def _momenta(eqx: Any, module: Any, state: Any) -> dict[str, float]:
    """Return the momentum of each statistic that is a moving average.

    With `mode="ema"` the first batch sets the statistics directly. The flag for the first batch is not a float, so it
    is frozen: such statistics are either always moving averages, or never.
    """

    def is_norm(node: Any) -> bool:
        return isinstance(node, eqx.nn.BatchNorm)

    momenta: dict[int, float] = {}
    for layer in filter(is_norm, jax.tree.leaves(module, is_leaf=is_norm)):
        if layer.mode == "ema" and bool(state.get(layer.ema_first_time_index)):
            continue
        index = layer.ema_state_index if layer.mode == "ema" else layer.batch_state_index
        momenta |= {id(leaf): layer.momentum for leaf in jax.tree.leaves(state.get(index))}
    return {name: momenta[id(leaf)] for name, leaf in flatten(_numbered(state))[0].items() if id(leaf) in momenta}


def _in_mode(eqx: Any, module: Any, mode: Mode) -> Any:
    """Set the `inference` flags: of BatchNorm by `mode.statistics`, of all other layers by the key."""

    def has_flag(node: Any) -> bool:
        return hasattr(node, "inference")

    def flagged(tree: Any) -> list[Any]:
        return [node for node in jax.tree.leaves(tree, is_leaf=has_flag) if has_flag(node)]

    nodes = flagged(module)
    values = [not mode.statistics if isinstance(node, eqx.nn.BatchNorm) else mode.key is None for node in nodes]
    return eqx.tree_at(lambda tree: [node.inference for node in flagged(tree)], module, values) if nodes else module


def _locate(module: Any, layer: Any) -> list[str]:
    """List the paths of a layer's parameters inside a module."""
    nodes = jax.tree_util.tree_leaves_with_path(module, is_leaf=lambda node: node is layer)
    prefixes = [path_name(path) for path, node in nodes if node is layer][:1]
    return [f"{prefix}/{path}" for prefix in prefixes for path in flatten(layer)[0]]
