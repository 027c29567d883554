"""Flax modules, NNX and Linen, as partially local models."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import jax
from jax import Array

from fedrecon._src.core.checks import require
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.model import Batch, Model
from fedrecon._src.core.pytrees import Params, flatten
from fedrecon._src.models.network import (
    Arrays,
    Mode,
    Network,
    Options,
    adapt,
    as_batch,
    check_options,
    feed,
    mask_padding,
    mode_arguments,
)


def from_flax(
    module: Any | Callable[[Any], Any], *, example: Batch | Clients | None = None, **options: Unpack[Options]
) -> Model:
    """Make a partially local model from a Flax module.

    The initialisers of a Linen module draw its parameters from the run's key. So do those of a function
    `rngs -> NNX module` (such as a class that takes just `rngs`). An NNX module already has its weights: with every
    seed, training starts from these global parameters and every client from these local ones.

    In training, `deterministic` and `use_running_average` are set according to `state` and dropout. If a module's
    `__call__` has an argument such as `train`, `training` or `deterministic`, it is passed. BatchNorm's statistics
    leave out padding.

    Args:
      module: a Linen module, an NNX module, or a function that makes an NNX module from `nnx.Rngs`.
      example: a batch, or clients, from which a Linen module infers its shapes; not needed for NNX.
      **options: `local`, `inputs`, `loss`, `label`, `metrics`, `state` and others; see `Options`. `local` may be a
        module inside an NNX module, or a Linen module with a name. `state` decides how BatchNorm's statistics are
        treated; variables of other kinds keep their values.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> from flax import nnx
      >>> model = fr.models.from_flax(
      ...     lambda rngs: nnx.Linear(3, 2, rngs=rngs), local="bias", inputs="x", loss="cross_entropy"
      ... )
      >>> model.init_local(jax.random.key(0))["bias"].shape
      (2,)
    """
    check_options(options)
    linen = require("flax.linen")
    if isinstance(module, linen.Module):
        return adapt(_linen(module, example, options), **options)
    return adapt(_nnx(module), **options)


def _linen(module: Any, example: Batch | Clients | None, options: Options) -> Network:
    linen = require("flax.linen")
    if example is None:
        raise ValueError("`example` is missing: a Linen module infers its shapes from it; give a batch or clients")
    inputs, named = feed(options["inputs"], as_batch(example))
    off = mode_arguments(type(module).__call__, Mode())
    drops: list[bool] = []  # for each layer that was called, whether it may use dropout
    momenta: dict[str, float] = {}

    def first_call(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        drops.append(_may_drop(layer))
        if isinstance(layer, linen.BatchNorm):
            momenta.update({"/".join(("batch_stats", *layer.path, name)): layer.momentum for name in ("mean", "var")})
        return _in_linen_mode(linen, Mode(), call, args, kwargs, context)

    def init(key: Array) -> tuple[Params, Params]:
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        with linen.intercept_methods(first_call):
            variables = dict(linen.meta.unbox(module.init(keys, *inputs, **named, **off)))
        return variables.pop("params", {}), variables

    def apply(params: Params, state: Params, inputs: tuple, named: dict[str, Any], mode: Mode) -> tuple[Any, Params]:
        variables = {"params": params, **state}
        rngs = {} if mode.key is None else {"params": mode.key, "dropout": jax.random.fold_in(mode.key, 1)}
        arguments = named | mode_arguments(type(module).__call__, mode)
        with linen.intercept_methods(functools.partial(_in_linen_mode, linen, mode)):
            if not mode.statistics or not state:
                return module.apply(variables, *inputs, **arguments, rngs=rngs), state
            outputs, new = module.apply(variables, *inputs, **arguments, rngs=rngs, mutable=list(state))
        return outputs, state | dict(new)

    def locate(layer: Any) -> list[str]:
        if layer.name is None:
            raise ValueError("`local` is a Linen module without a name; name it (name='head') or give a path pattern")
        paths = flatten(jax.eval_shape(init, jax.random.key(0))[0])[0]
        return [path for path in paths if layer.name in path.split("/")[:-1]]

    jax.eval_shape(init, jax.random.key(0))
    return Network(init, apply, bool(off) or any(drops), linen.Module, locate, momenta)


def _in_linen_mode(linen: Any, mode: Mode, call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
    """Call a Linen layer in a mode: with batch statistics or running ones, with or without dropout."""
    layer = context.module
    if context.method_name != "__call__":
        return call(*args, **kwargs)
    if isinstance(layer, linen.BatchNorm):
        mask = mask_padding(kwargs.get("mask"), mode.mask, args[0])
        with _without(layer, "use_running_average"):
            return call(args[0], use_running_average=not mode.statistics, mask=mask)
    if _may_drop(layer):
        bound = inspect.signature(type(layer).__call__).bind(layer, *args, **kwargs)
        if mode.key is None or (layer.deterministic is None and bound.arguments.get("deterministic") is None):
            bound.arguments["deterministic"] = mode.key is None
            with _without(layer, "deterministic"):
                return call(*bound.args[1:], **bound.kwargs)
    return call(*args, **kwargs)


def _may_drop(layer: Any) -> bool:
    """Return whether a Linen layer may use dropout: Dropout itself, attention."""
    return hasattr(layer, "deterministic") and "deterministic" in inspect.signature(type(layer).__call__).parameters


@contextlib.contextmanager
def _without(layer: Any, attribute: str) -> Iterator[None]:
    """Remove a layer's setting for a while, since the layer refuses it as an attribute and an argument at once."""
    before = getattr(layer, attribute)
    object.__setattr__(layer, attribute, None)
    try:
        yield
    finally:
        object.__setattr__(layer, attribute, before)


_mask: contextvars.ContextVar[Array | None] = contextvars.ContextVar("mask", default=None)


@functools.cache
def _masked_batch_norm() -> type:
    layer: Any = require("flax.nnx").BatchNorm

    class MaskedBatchNorm(layer):
        """BatchNorm whose statistics leave out padding."""

        def __call__(self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None) -> Array:
            return super().__call__(x, use_running_average, mask=mask_padding(mask, _mask.get(), x))

    return MaskedBatchNorm


def _nnx(module: Any) -> Network:
    nnx = require("flax.nnx")
    is_made = isinstance(module, nnx.Module)
    if not is_made and not callable(module):
        raise TypeError(f"`module` must be a Flax module, or a function of nnx.Rngs that makes one (got {module!r})")

    def make(key: Array) -> Any:
        return module if is_made else module(nnx.Rngs(key))

    def values(key: Array) -> tuple[Arrays, Arrays]:
        return tuple(_by_path(nnx.state(make(key), kind)) for kind in (nnx.Param, nnx.BatchStat))  # type: ignore[return-value]

    fixed = make(jax.random.key(0))
    graph, params_state, stats_state, rest = nnx.split(fixed, nnx.Param, nnx.BatchStat, ...)
    rest_flat = nnx.to_flat_state(rest)
    random = any(isinstance(variable, nnx.RngState) for _, variable in rest_flat)

    def put(template: Any, new: Arrays) -> Any:
        pairs = [(path, variable.replace(new[_name(path)])) for path, variable in nnx.to_flat_state(template)]
        return nnx.from_flat_state(pairs)

    def keyed(key: Array | None) -> Any:
        # A variable belongs to the trace it was made in, so even one with its old value must be made anew.
        new = _by_path(rest)
        if key is not None:
            keys = [(number, path) for number, (path, v) in enumerate(rest_flat) if isinstance(v, nnx.RngKey)]
            new |= {_name(path): jax.random.fold_in(key, number) for number, path in keys}
        return put(rest, new)

    def apply(params: Arrays, state: Arrays, inputs: tuple, named: dict[str, Any], mode: Mode) -> tuple[Any, Arrays]:
        whole = nnx.merge(graph, put(params_state, params), put(stats_state, state), keyed(mode.key))
        whole.set_attributes(deterministic=mode.key is None, raise_if_not_found=False)
        whole.set_attributes(use_running_average=not mode.statistics, raise_if_not_found=False)
        for _, layer in nnx.iter_modules(whole):
            if type(layer) is nnx.BatchNorm:
                layer.__class__ = _masked_batch_norm()
        token = _mask.set(mode.mask)
        try:
            outputs = whole(*inputs, **named, **mode_arguments(type(whole).__call__, mode))
        finally:
            _mask.reset(token)
        return outputs, _by_path(nnx.state(whole, nnx.BatchStat))

    def locate(layer: Any) -> list[str]:
        prefixes = [_name(path) for path, node in nnx.iter_modules(fixed) if node is layer]
        return [f"{prefix}/{path}" for prefix in prefixes for path in _by_path(nnx.state(layer, nnx.Param))]

    norms = [(path, layer) for path, layer in nnx.iter_modules(fixed) if isinstance(layer, nnx.BatchNorm)]
    momenta = {_name((*path, name)): layer.momentum for path, layer in norms for name in ("mean", "var")}
    return Network(values, apply, random, nnx.Module, locate, momenta)


def _name(path: tuple) -> str:
    return "/".join(map(str, path))


def _by_path(state: Any) -> Arrays:
    nnx = require("flax.nnx")
    return {_name(path): variable[...] for path, variable in nnx.to_flat_state(state)}
