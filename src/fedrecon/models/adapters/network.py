"""Models of any framework as partially local models: what a framework must provide, and all that is the same then."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon.clients import Clients
from fedrecon.model import AUTO, Batch, Model, State, Step
from fedrecon.models.adapters.losses import Loss, Metrics, feature, make_loss, make_metrics
from fedrecon.models.adapters.selection import Locate, near_miss, select
from fedrecon.trees import Params

Treatment = Literal["local", "averaged", "frozen"]
Inputs = str | Sequence[str] | Mapping[str, str]
Arrays = dict[str, Any]  # by path
NEEDED = ("local", "inputs", "loss")  # of the options


class Mode(NamedTuple):
    """How a network is to run.

    Attributes:
      statistics: whether layers that keep statistics use those of the batch and bring their own up to date.
      key: for dropout and the like; None where nothing is to be random.
      mask: `(examples,)`, false where an example only fills the batch up; None where all count.
    """

    statistics: bool = False
    key: Array | None = None
    mask: Array | None = None


class Network(NamedTuple):
    """A model of some framework as functions.

    Attributes:
      init: `key -> (parameters by path, state by path)`. What the key does not decide is the same for every key.
      apply: `(parameters, state, inputs, named inputs, mode) -> (outputs, state)`.
      random: whether anything in it may want a key.
      locate: `layer -> paths of its parameters`, None for what is not a layer.
      momenta: of the state that is a moving average, the momentum by path, at least 0 and below 1.
    """

    init: Callable[[Array], tuple[Arrays, Arrays]]
    apply: Callable[[Arrays, Arrays, tuple, dict[str, Any], Mode], tuple[Any, Arrays]]
    random: bool = False
    locate: Locate = lambda layer: None
    momenta: Mapping[str, float] = {}


class Options(TypedDict, total=False):
    """What is said of a model beside the model itself, in every framework.

    Attributes:
      local: which parameters are local: a glob pattern on paths (`"user"`, `"*/bias"`; what is below a match is
        selected too), a layer, a predicate `(path, leaf) -> bool`, `rows(...)`, or a list of these. `()` for none,
        `"*"` for all.
      inputs: the feature that feeds the model, a list of several in the order of its arguments, or a mapping from the
        model's names of its inputs to features.
      loss: "mse", "mae", "huber", "cross_entropy" (of logits), "binary_cross_entropy" (of logits), or a function
        `(predictions, labels) -> values`, one or more for each example and no mean over them.
      label: the feature with the labels, "label" by default; None gives functions the whole batch instead.
      metrics: names ("accuracy", "rmse", "perplexity", or a loss) or a mapping from names to functions like a loss.
      weight: the feature with the weight of each value of loss and metrics; by default all weigh the same.
      frozen: which parameters keep their values, in the forms of `local`. Those that are not floating point always do.
      state: what becomes of running statistics and other state that training changes. "local": training normalises by
        batch, and statistics are rebuilt from support, a client's own. "averaged": they are global, advanced by clients
        after U and averaged. "frozen": they keep their values, in training too. By default "local" for a model that has
        local parameters and "averaged" for one that has none. State that is not floating point is always frozen.
      lookups: "auto" (the default) finds the tables that are only read by rows; a mapping declares them; `{}` says
        there are none.
    """

    local: Required[Any]
    inputs: Required[Inputs]
    loss: Required[Loss]
    label: str | None
    metrics: Metrics
    weight: str | None
    frozen: Any
    state: Treatment | None
    lookups: Mapping[str, Any] | Literal["auto"]


def adapt(network: Network, **options: Unpack[Options]) -> Model:
    """Make a partially local model of a network.

    The global parameters become `{path: array}` and so do the local ones.

    Args:
      network: what a framework's model comes down to.
      **options: see `Options`; `local`, `inputs` and `loss` are needed.
    """
    check_options(options)
    state, inputs = options.get("state"), options["inputs"]
    label, weight = options.get("label", "label"), options.get("weight")
    if state not in (None, "local", "averaged", "frozen"):
        raise ValueError(f"`state` is {state!r}; use 'local', 'averaged' or 'frozen'")
    shapes, state_shapes = jax.eval_shape(network.init, jax.random.key(0))
    if not shapes:
        raise ValueError("the model has no parameters; build it first, by calling it on some examples")
    parts = _Parts(network, shapes, options["local"], options.get("frozen", ()))
    floats = {path for path, leaf in state_shapes.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    treatment = state or ("local" if parts.has_local else "averaged")
    averaged = tuple(sorted(floats)) if treatment == "averaged" else ()
    rebuilt = tuple(sorted(floats)) if treatment == "local" else ()
    live = bool(averaged or rebuilt)
    momenta = {path: network.momenta[path] for path in rebuilt if path in network.momenta}
    constants = _constants(network, parts.frozen, set(state_shapes) - set(averaged) - set(rebuilt))

    def run(shared: Params, own: Params, batch: Batch, mode: Mode) -> tuple[Any, Arrays]:
        params = {**parts.merge(shared, own), **constants[0]}
        held = {**constants[1], **{path: shared[path] for path in averaged}, **{path: own[path] for path in rebuilt}}
        return network.apply(params, held, *feed(inputs, batch), mode)

    def fit(shared: Params, own: Params, batch: Batch, step: Step) -> Any:
        return run(shared, own, batch, Mode(live, step.key, step.mask if live else None))[0]

    def advance(shared: Params, own: Params, batch: Batch, mask: Array) -> tuple[Arrays, Arrays]:
        new = run(shared, own, batch, Mode(True, None, mask))[1]
        return {path: new[path] for path in averaged}, {path: new[path] for path in rebuilt}

    # Inside a jit what is not asked for is not computed: drawing one client's local parameters draws no global table.
    def init_global(key: Array) -> Params:
        params, found = network.init(key)
        return parts.shared(params) | {path: found[path] for path in averaged}

    def init_local(key: Array) -> Params:
        params, found = network.init(key)
        return parts.local(params) | {path: found[path] for path in rebuilt}

    return Model(
        init_global=jax.jit(init_global),
        init_local=jax.jit(init_local),
        predict=lambda shared, own, batch: run(shared, own, batch, Mode())[0],
        loss=make_loss(options["loss"], label, weight),
        metrics=make_metrics(options.get("metrics", ()), label, weight),
        lookups=options.get("lookups", AUTO),
        fit=fit if live or network.random else None,
        state=State(averaged, rebuilt, advance, momenta) if live else None,
        frozen=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), constants[0] | constants[1]),
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Fail naming an option that is not known or that is needed and missing."""
    for name in options:
        if name not in Options.__annotations__:
            known = near_miss(name, Options.__annotations__)
            raise TypeError(f"`{name}` is no option{known}; there are: {', '.join(Options.__annotations__)}")
    for name in NEEDED:
        if name not in options:
            raise TypeError(f"`{name}` is missing; a model is made with at least `local`, `inputs` and `loss`")


class _Parts:
    """Which parameters, or rows of them, are global, local and frozen."""

    def __init__(self, network: Network, shapes: Arrays, local: Any, frozen: Any):
        chosen = select(frozen, "frozen", shapes, network.locate)
        if chosen.rows:
            raise ValueError(
                f"`frozen` selects rows of {next(iter(chosen.rows))!r}; it can only select whole parameters"
            )
        self.frozen = set(chosen.whole)
        self.frozen |= {path for path, leaf in shapes.items() if not jnp.issubdtype(leaf.dtype, jnp.inexact)}
        self._whole, self._rows = select(local, "local", shapes, network.locate)
        if _is_everything(local):
            self._whole -= self.frozen
        for path in sorted((self._whole | set(self._rows)) & self.frozen):
            why = "`frozen` selects it too" if jnp.issubdtype(shapes[path].dtype, jnp.inexact) else "it is not a float"
            raise ValueError(f"`local` selects {path!r}, but {why}; make `local` narrower")
        self._shared = [path for path in shapes if path not in self.frozen and path not in self._whole]
        self._rest = {path: np.setdiff1d(np.arange(shapes[path].shape[0]), ids) for path, ids in self._rows.items()}

    @property
    def has_local(self) -> bool:
        return bool(self._whole or self._rows)

    def shared(self, params: Arrays) -> Arrays:
        return {path: params[path][self._rest[path]] if path in self._rest else params[path] for path in self._shared}

    def local(self, params: Arrays) -> Arrays:
        own = {path: leaf for path, leaf in params.items() if path in self._whole}
        return own | {path: params[path][ids] for path, ids in self._rows.items()}

    def merge(self, shared: Arrays, own: Arrays) -> Arrays:
        whole = {path: shared[path] for path in self._shared} | {path: own[path] for path in self._whole}
        for path, ids in self._rows.items():
            place = np.argsort(np.concatenate([self._rest[path], ids]))
            whole[path] = jnp.concatenate([shared[path], own[path]])
            if (place != np.arange(len(place))).any():
                whole[path] = whole[path][place]
        return whole


def _is_everything(local: Any) -> bool:
    return isinstance(local, str) and local == "*"


def _constants(network: Network, params: set[str], state: set[str]) -> tuple[Arrays, Arrays]:
    def pick(key: Array) -> tuple[Arrays, Arrays]:
        found = network.init(key)
        return {path: found[0][path] for path in params}, {path: found[1][path] for path in state}

    return jax.jit(pick)(jax.random.key(0))


def feed(inputs: Inputs, batch: Batch) -> tuple[tuple, dict[str, Any]]:
    """Take a model's inputs, positional and named, from a batch."""
    if isinstance(inputs, str):
        return (feature(batch, inputs, "inputs"),), {}
    if isinstance(inputs, Mapping):
        return (), {name: feature(batch, column, "inputs") for name, column in inputs.items()}
    return tuple(feature(batch, column, "inputs") for column in inputs), {}


def as_batch(example: Batch | Clients | None) -> Batch | None:
    """Return the first examples of clients as a batch; a batch as it is."""
    if not isinstance(example, Clients):
        return example
    return {name: jnp.asarray(column[:2]) for name, column in example.columns.items() if column.dtype.kind in "biuf"}


def mode_arguments(call: Callable[..., Any], mode: Mode) -> dict[str, Any]:
    """Say how to run in the words that a model's own function has for it, such as `train` or `deterministic`."""
    training = mode.statistics or mode.key is not None
    words = {
        **dict.fromkeys(("train", "training", "is_training"), training),
        **dict.fromkeys(("inference", "is_eval"), not training),
        "deterministic": mode.key is None,
        "use_running_average": not mode.statistics,
    }
    return {name: words[name] for name in inspect.signature(call).parameters if name in words}


def moving(momenta: Mapping[str, Any]) -> dict[str, float]:
    """Leave out layers whose statistics never move, as those of momentum 1."""
    return {path: float(momentum) for path, momentum in momenta.items() if 0 <= momentum < 1}


def over_examples(mask: Array | None, x: Array) -> Array | None:
    """Shape a mask of examples to fit a layer's input; None where its first dimension is not that of the examples."""
    if mask is None or x.ndim == 0 or x.shape[0] != mask.shape[0]:
        return None
    return jnp.broadcast_to(mask.reshape(-1, *[1] * (x.ndim - 1)), x.shape)


def both(mask: Array | None, other: Array | None) -> Array | None:
    """Return where two masks are true; one that is None is true everywhere."""
    if mask is None or other is None:
        return other if mask is None else mask
    return jnp.logical_and(mask, other)


def need(module: str, extra: str) -> Any:
    """Import a module of a framework; fail naming the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this needs {extra}, which cannot be imported ({error}); run: pip install 'fedrecon[{extra}]'"
        ) from error
