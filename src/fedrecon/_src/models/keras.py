"""Keras 3 models, on the JAX backend, as partially local models."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.checks import require
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.model import Batch, Model
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
)

SEED = "seed_generator_state"  # what Keras calls the variables that hold random seeds


def from_keras(model: Any, *, example: Batch | Clients | None = None, **options: Unpack[Options]) -> Model:
    """Make a partially local model from a Keras 3 model: sequential, functional or subclassed.

    A weight that still has its initial value is drawn anew from the run's key, for every seed and, if it is local, for
    every client. For layers of your own this needs the initialiser to be an attribute of the layer, because Keras
    forgets what `add_weight` was given: `self.start = keras.initializers.RandomNormal()`, and then
    `self.add_weight(..., initializer=self.start)`. A weight that was trained, loaded or made in another way keeps its
    value, and every client starts from it.

    BatchNormalization's statistics leave out padding. Weights of layers with `trainable=False` are frozen. Losses that
    layers add (regularizers) are not used.

    Args:
      model: a Keras model; without `example` it must be built.
      example: a batch, or clients, to build the model with.
      **options: `local`, `inputs`, `loss`, `label`, `metrics`, `state` and others; see `Options`. `inputs` of a
        functional model are by default the features that its inputs are named after. `local` may be a layer of the
        model. Paths are Keras's without the model's own name: "items/embeddings". `loss` may also be a `keras.losses`
        object. `state` decides how statistics and other non-trainable weights are treated.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> import keras
      >>> network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
      >>> model = fr.models.from_keras(network, local="head/bias", inputs="x", loss="cross_entropy")
      >>> model.init_local(jax.random.key(0))["head/bias"].shape
      (2,)
    """
    keras = require("keras")
    if "inputs" not in options and (names := _input_names(keras, model)):
        options["inputs"] = names
    check_options(options)
    if keras.backend.backend() != "jax":
        raise RuntimeError(
            f"Keras runs on {keras.backend.backend()}; set the environment variable KERAS_BACKEND=jax before keras "
            "is imported"
        )
    if example is not None and not model.built:
        _call(keras, model, *feed(options["inputs"], as_batch(example)), {})
    if not model.built or not model.weights:
        raise ValueError("the Keras model has no weights yet; build it, call it on a batch, or give `example`")
    if isinstance(loss := options["loss"], keras.losses.Loss):  # its `call` returns a value for each example
        options["loss"] = lambda predictions, labels: loss.call(labels, predictions)
    return adapt(_network(keras, model), **options)


def _network(keras: Any, model: Any) -> Network:
    layers = _all_layers(keras, model)
    named_variables = {variable.path.removeprefix(f"{model.name}/"): variable for variable in model.weights}
    if len(named_variables) != len(model.weights):
        raise ValueError("two weights of the Keras model have the same path; give their layers different names")
    params = {path: v for path, v in named_variables.items() if v.trainable}
    initializers = {
        id(v): initializer for layer in layers for v in layer.weights if (initializer := _initializer(layer, v))
    }
    # Statistics and the like. All weights of a frozen layer are constants, and so is a frozen weight that was drawn.
    frozen = {id(v) for layer in layers for v in layer.weights if not layer.trainable or _is_drawn(layer, v)}
    state = {path: v for path, v in named_variables.items() if not v.trainable and id(v) not in frozen}
    seeds = [variable for variable in model.variables if variable.name == SEED]

    def init(key: Array) -> tuple[Arrays, Arrays]:
        def value(number: int, variable: Any) -> Array:
            if id(variable) not in initializers:
                return variable.value
            initializer = copy.copy(initializers[id(variable)])
            initializer.seed = jax.random.bits(jax.random.fold_in(key, number), (2,), jnp.uint32)
            return initializer(variable.shape, variable.dtype)

        drawn = {path: value(number, variable) for number, (path, variable) in enumerate(params.items())}
        return drawn, {path: variable.value for path, variable in state.items()}

    def apply(
        param_values: Arrays, state_values: Arrays, inputs: tuple, named: dict[str, Any], mode: Mode
    ) -> tuple[Any, Arrays]:
        mapping = [(variable, param_values[path]) for path, variable in params.items()]
        mapping += [(variable, state_values[path]) for path, variable in state.items()]
        if mode.key is not None:
            bits = jax.random.bits(mode.key, (len(seeds), 2), jnp.uint32)
            mapping += [(variable, bits[number]) for number, variable in enumerate(seeds)]
        training = mode.statistics or mode.key is not None
        with _in_mode(keras, layers, mode), keras.StatelessScope(state_mapping=mapping) as scope:
            outputs = _call(keras, model, inputs, named, {"training": training})
        return outputs, {path: scope.get_current_value(variable) for path, variable in state.items()}

    def locate(layer: Any) -> list[str]:
        weight_ids = {id(variable) for variable in layer.weights}
        return [path for path, variable in params.items() if id(variable) in weight_ids]

    norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    momenta = {id(v): layer.momentum for layer in norms for v in (layer.moving_mean, layer.moving_variance)}
    averages = {path: momenta[id(variable)] for path, variable in state.items() if id(variable) in momenta}
    return Network(init, apply, bool(seeds), keras.layers.Layer, locate, averages)


def _all_layers(keras: Any, model: Any) -> list[Any]:
    """List the model and its layers at any depth: its `layers`, and those that attributes of a layer hold."""
    layers: dict[int, Any] = {}
    pending: list[Any] = [model]
    while pending:
        item = pending.pop()
        if isinstance(item, keras.layers.Layer) and id(item) not in layers:
            layers[id(item)] = item
            pending += [*getattr(item, "layers", ()), *vars(item).values()]
        elif isinstance(item, list | tuple | set | dict):
            pending += item.values() if isinstance(item, dict) else item
    return list(layers.values())


def _input_names(keras: Any, model: Any) -> list[str] | dict[str, str] | None:
    """Return what a functional model calls its inputs, in the form it takes them; None for other models."""
    if not isinstance(model, keras.Function) or isinstance(model, keras.Sequential):
        return None
    names = [str(tensor.name) for tensor in model.inputs]
    return {name: name for name in names} if isinstance(model.input, dict) else names


def _initializer(layer: Any, variable: Any) -> Any:
    """Return the initialiser that made a weight; None if none made its current value.

    Initialisers return the same values every time. A weight with other values was trained or loaded, or was made in
    another way.
    """
    names = [f"{name}_initializer" for name in (variable.name, variable.name.removesuffix("_kernel"))]
    named = [getattr(layer, name, None) for name in names]
    for candidate in (*named, *vars(layer).values()):
        seeded = hasattr(type(candidate), "get_config") and isinstance(getattr(candidate, "seed", None), int)
        if seeded and callable(candidate) and _makes(candidate, variable):
            return candidate
    return None


def _is_drawn(layer: Any, variable: Any) -> bool:
    """Say whether a weight started at random, as no statistic does."""
    return hasattr(getattr(layer, f"{variable.name}_initializer", None), "seed")


def _makes(initializer: Any, variable: Any) -> bool:
    """Say whether an initialiser gives a weight's value. Some refuse the shapes of weights that they did not make."""
    try:
        return np.array_equal(initializer(variable.shape, variable.dtype), variable.value)
    except ValueError:
        return False


def _call(keras: Any, model: Any, inputs: tuple, named: dict[str, Any], more: dict[str, Any]) -> Any:
    """Call a model with its inputs in the form it takes: one, several in a list or a mapping, or several arguments."""
    functional = isinstance(model, (keras.Sequential, keras.Function))
    if named and (functional or not set(named) <= set(inspect.signature(model.call).parameters)):
        return model(named, **more)
    if functional and len(inputs) > 1:
        return model(list(inputs), **more)
    return model(*inputs, **named, **more)


@contextlib.contextmanager
def _in_mode(keras: Any, layers: list[Any], mode: Mode) -> Iterator[None]:
    """Set statistics and dropout of layers separately, which Keras's `training` argument cannot."""
    kinds = keras.layers
    random = (kinds.Dropout, kinds.GaussianDropout, kinds.GaussianNoise, kinds.AlphaDropout)
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, kinds.BatchNormalization):
                layer.__dict__["call"] = functools.partial(_normalize, layer.call, mode)
            elif isinstance(layer, random) and mode.key is None:
                layer.__dict__["call"] = lambda inputs, *args, **kwargs: inputs
            else:
                continue
            stack.callback(layer.__dict__.pop, "call")
        yield


def _normalize(call: Callable, mode: Mode, inputs: Array, training: Any = None, mask: Array | None = None) -> Array:
    """Call a BatchNormalization layer in a mode."""
    # Keras's masks have no channels.
    return call(inputs, training=mode.statistics, mask=mask_padding(mask, mode.mask, inputs[..., 0]))
