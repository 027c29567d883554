"""Models of any framework as partially local models: what an adapter must provide, and what all adapters share."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.core.checks import check_choice, check_known, check_number, check_selection, near_miss
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.model import AUTO, Batch, Model, ModelState, Step
from fedrecon._src.core.pytrees import Params, flatten, select_paths, unflatten
from fedrecon._src.models.losses import CLASS_LOSSES, Loss, Metrics, feature, make_loss, make_metrics

Inputs = str | Sequence[str] | Mapping[str, str]
Arrays = dict[str, Any]  # by path
REQUIRED = ("local", "inputs", "loss")  # of the options


class Mode(NamedTuple):
    """How to run a network.

    Attributes:
      statistics: whether layers with running statistics normalise by the batch and update their statistics.
      key: for dropout and the like; None if nothing should be random.
      mask: `(examples,)`, false for padding; None if there is no padding.
    """

    statistics: bool = False
    key: Array | None = None
    mask: Array | None = None


class Network(NamedTuple):
    """A model of some framework as functions.

    Attributes:
      init: `key -> (parameters, state)`, two pytrees. Values that are not random are the same for every key.
      apply: `(parameters, state, inputs, named inputs, mode) -> (outputs, state)`.
      random: whether anything in it may use a key.
      layers: the class of the framework's layers.
      locate: `layer -> paths of its parameters`.
      momenta: the momentum, by path, of state that is a moving average; with 1 it never moves.
    """

    init: Callable[[Array], tuple[Params, Params]]
    apply: Callable[[Any, Any, tuple, dict[str, Any], Mode], tuple[Any, Params]]
    random: bool = False
    layers: Any = ()
    locate: Callable[[Any], Collection[str]] = lambda layer: ()
    momenta: Mapping[str, float] = {}


class Options(TypedDict, total=False):
    """Options of every adapter.

    Attributes:
      local: which parameters are local: a glob pattern on paths (`"user"`, `"*/bias"`; everything below a match is
        selected too), a layer, a predicate `(path, leaf) -> bool`, `rows(...)`, or a list of these. `()` for none,
        `"*"` for all.
      inputs: the feature that is the model's input, a list of several in the order of its arguments, or a mapping from
        the names of the model's inputs to features.
      loss: "mse", "mae", "huber", "cross_entropy" (of logits), "binary_cross_entropy" (of logits), or a function
        `(predictions, labels) -> values` with one or more values per example; it must not take the mean.
      label: the feature with the labels, "label" by default; with None, functions get the whole batch instead.
      metrics: names ("accuracy", "rmse", "perplexity", or a loss) or functions like a loss, or a mapping from names.
      weight: the feature with the weight of each value of loss and metrics; by default all weigh the same.
      frozen: which parameters keep their values, in the forms of `local`. Those that are not floating point always do.
      state: how to treat running statistics and other state that training changes. "local": training normalises by
        batch, and each client sets its own statistics from its support. "averaged": statistics are global; clients
        advance them after U, and the server averages them. "frozen": they keep their values, also in training. The
        default is "local" for a model with local parameters and "averaged" for one without. State that is not floating
        point is always frozen.
      lookups: "auto" (the default) finds the tables that are only read by rows; a mapping declares them; `{}` means
        there are none.

    Example:
      >>> import fedrecon as fr
      >>> options = fr.models.Options(local="head", inputs="x", loss="cross_entropy", metrics=["accuracy"])
      >>> sorted(options)
      ['inputs', 'local', 'loss', 'metrics']
    """

    local: Required[Any]
    inputs: Required[Inputs]
    loss: Required[Loss]
    label: str | None
    metrics: Metrics
    weight: str | None
    frozen: Any
    state: Literal["local", "averaged", "frozen"] | None
    lookups: Mapping[str, Any] | Literal["auto"]


def adapt(network: Network, **options: Unpack[Options]) -> Model:
    """Make a partially local model from a network.

    Both global and local parameters are `{path: array}`.

    Args:
      network: the framework's model as functions.
      **options: see `Options`; `local`, `inputs` and `loss` are required.
    """
    check_options(options)
    state, inputs = options.get("state"), options["inputs"]
    label, weight = options.get("label", "label"), options.get("weight")
    check_choice("state", state, (None, "local", "averaged", "frozen"))
    (shapes, structure), (state_shapes, state_structure) = map(flatten, jax.eval_shape(network.init, jax.random.key(0)))
    if not shapes:
        raise ValueError("the model has no parameters; build it first, by calling it on some examples")
    parts = _Parts(network, shapes, options["local"], options.get("frozen", ()))
    floats = {path for path, leaf in state_shapes.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    treatment = state or ("local" if parts.local else "averaged")
    averaged = tuple(sorted(floats)) if treatment == "averaged" else ()
    local_state = tuple(sorted(floats)) if treatment == "local" else ()
    live = bool(averaged or local_state)
    momenta = {path: float(network.momenta[path]) for path in local_state if 0 <= network.momenta.get(path, 1) < 1}

    # jit drops unused results, so drawing one client's local parameters does not draw the global tables.
    def draw(selection: Selection, state_paths: Collection[str] = ()) -> Callable[[Array], Arrays]:
        def init(key: Array) -> Arrays:
            params, state = (flatten(tree)[0] for tree in network.init(key))
            drawn = {path: params[path] if ids is None else params[path][ids] for path, ids in selection.items()}
            return drawn | _take(state, state_paths)

        return jax.jit(init)

    key = jax.random.key(0)
    frozen_params = draw(dict.fromkeys(parts.frozen))(key)
    frozen_state = draw({}, set(state_shapes) - set(averaged) - set(local_state))(key)

    def run(shared: Params, local: Params, batch: Batch, mode: Mode) -> tuple[Any, Arrays]:
        params = unflatten(structure, parts.merge(shared, local) | frozen_params)
        state = unflatten(state_structure, frozen_state | _take(shared, averaged) | _take(local, local_state))
        outputs, new = network.apply(params, state, *feed(inputs, batch), mode)
        return outputs, flatten(new)[0]

    def predict_train(shared: Params, local: Params, batch: Batch, step: Step) -> Any:
        return run(shared, local, batch, Mode(live, step.key, step.mask if live else None))[0]

    def advance(shared: Params, local: Params, batch: Batch, mask: Array) -> tuple[Arrays, Arrays]:
        new = run(shared, local, batch, Mode(True, None, mask))[1]
        return _take(new, averaged), _take(new, local_state)

    return Model(
        init_global=draw(parts.shared, averaged),
        init_local=draw(parts.local, local_state),
        predict=lambda shared, local, batch: run(shared, local, batch, Mode())[0],
        loss=make_loss(options["loss"], label, weight),
        metrics=make_metrics(options.get("metrics", ()), label, weight),
        lookups=options.get("lookups", AUTO),
        predict_train=predict_train if live or network.random else None,
        state=ModelState(averaged, local_state, advance, momenta) if live else None,
        class_label=label if options["loss"] in CLASS_LOSSES else None,
        frozen=jax.eval_shape(lambda: frozen_params | frozen_state),
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise an error that names an unknown option, or a required one that is missing.

    Args:
      options: as given to an adapter.
    """
    names = Options.__annotations__
    problems = [f"`{name}` is not an option{near_miss(name, names)}" for name in options if name not in names]
    problems += [f"`{name}` is missing" for name in REQUIRED if name not in options]
    if problems:
        raise TypeError(f"{'; '.join(problems)}; the options are: {', '.join(names)}")


class _Parts:
    """Which parameters, or rows of them, are global, local and frozen."""

    def __init__(self, network: Network, shapes: Arrays, local: Any, frozen: Any):
        floats = {path for path, leaf in shapes.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
        whole = select(frozen, "frozen", shapes, network)
        if by_rows := [path for path, ids in whole.items() if ids is not None]:
            raise ValueError(f"`frozen` selects rows of {by_rows[0]!r}; select whole parameters")
        self.frozen = set(whole) | (set(shapes) - floats)
        self.local = select(local, "local", shapes, network)
        if isinstance(local, str) and local == "*":
            self.local = {path: ids for path, ids in self.local.items() if path not in self.frozen}
        for path in sorted(self.frozen & set(self.local)):
            why = "`frozen` selects it too" if path in floats else "it is not a float"
            raise ValueError(f"`local` selects {path!r}, but {why}; make `local` narrower")
        self._by_row = {path: ids for path, ids in self.local.items() if ids is not None}
        rest = {path: np.setdiff1d(np.arange(shapes[path].shape[0]), ids) for path, ids in self._by_row.items()}
        whole_shared = [path for path in shapes if path not in self.frozen and path not in self.local]
        self.shared: Selection = dict.fromkeys(whole_shared) | rest

    def merge(self, shared: Arrays, local: Arrays) -> Arrays:
        params = _take(shared, self.shared) | _take(local, self.local)
        for path, ids in self._by_row.items():
            order = np.argsort(np.concatenate([self.shared[path], ids]))
            params[path] = jnp.concatenate([shared[path], local[path]])
            if (order != np.arange(len(order))).any():
                params[path] = params[path][order]
        return params


def _take(arrays: Arrays, paths: Collection[str]) -> Arrays:
    return {path: arrays[path] for path in paths}


def feed(inputs: Inputs, batch: Batch) -> tuple[tuple, dict[str, Any]]:
    """Return a model's inputs, positional and named, from a batch.

    Args:
      inputs: which features they are; see `Options`.
      batch: by feature.
    """
    if isinstance(inputs, Mapping):
        return (), {name: feature(batch, column, "inputs") for name, column in inputs.items()}
    columns = [inputs] if isinstance(inputs, str) else inputs
    return tuple(feature(batch, column, "inputs") for column in columns), {}


def as_batch(example: Batch | Clients) -> Batch:
    """Return the numbers of a batch, or of the first examples of clients.

    Args:
      example: clients, or a batch.
    """
    columns: Mapping[str, Any] = example.columns if isinstance(example, Clients) else example
    count = 2 if isinstance(example, Clients) else None
    return {name: jnp.asarray(x[:count]) for name, x in columns.items() if np.asarray(x).dtype.kind in "biuf"}


def mode_arguments(call: Callable[..., Any], mode: Mode) -> dict[str, Any]:
    """Return the mode as the arguments that a model's function has for it, such as `train` or `deterministic`.

    Args:
      call: the function.
      mode: how to run.
    """
    training = mode.statistics or mode.key is not None
    words = {
        **dict.fromkeys(("train", "training", "is_training"), training),
        **dict.fromkeys(("inference", "is_eval"), not training),
        "deterministic": mode.key is None,
        "use_running_average": not mode.statistics,
    }
    return {name: words[name] for name in inspect.signature(call).parameters if name in words}


def mask_padding(mask: Array | None, examples: Array | None, x: Array) -> Array | None:
    """Return a layer's mask without padding; unchanged if the first dimension of its input is not the examples.

    Args:
      mask: of the input; None is true everywhere.
      examples: `(examples,)`, false for padding; None for no padding.
      x: the input.
    """
    if examples is None or x.ndim == 0 or x.shape[0] != examples.shape[0]:
        return mask
    real = jnp.broadcast_to(examples.reshape(-1, *[1] * (x.ndim - 1)), x.shape)
    return real if mask is None else jnp.logical_and(mask, real)


# ---- selection of parameters: by pattern, by layer, by predicate, or some rows of a table ----


Selection = dict[str, np.ndarray | None]  # by path: ascending ids of rows; None for the whole parameter


class LocalRows(NamedTuple):
    """Some rows of the tables at a path or pattern; see `rows`."""

    pattern: str
    ids: Any


def rows(pattern: str, ids: slice | Sequence[int] | np.ndarray) -> LocalRows:
    """Select some rows of a table for `local`; the other rows stay global.

    Args:
      pattern: the path of the table, or a pattern that matches it.
      ids: the rows, as a slice (`slice(100, None)`: all from row 100 on) or as row numbers.

    Example:
      >>> import fedrecon as fr
      >>> import jax
      >>> import jax.numpy as jnp
      >>> model = fr.models.from_function(
      ...     lambda params, word: params["table"][word].sum(-1),
      ...     {"table": jnp.zeros((100, 4))},
      ...     local=fr.models.rows("table", slice(90, None)),  # the last ten rows
      ...     inputs="word",
      ...     loss="mse",
      ... )
      >>> model.init_local(jax.random.key(0))["table"].shape
      (10, 4)
    """
    return LocalRows(pattern, ids)


def select(which: Any, argument: str, leaves: Mapping[str, Any], network: Network) -> Selection:
    """Find the parameters that an argument selects.

    Args:
      which: a glob pattern on paths (it also selects everything below a match, so "head" is every parameter of the
        layer `head`), a layer, a predicate `(path, leaf) -> bool`, `rows(...)`, or several of these.
      argument: the name of the argument, for error messages.
      leaves: parameters by path.
      network: finds the paths of a layer's parameters.

    Raises:
      ValueError: if any of them selects nothing.
    """
    selection: Selection = {}
    several = isinstance(which, (list, tuple, set, frozenset)) and not isinstance(which, LocalRows)
    for item in which if several else [which]:
        pattern, ids = item if isinstance(item, LocalRows) else (item, None)
        for path in _paths(pattern, argument, leaves, network):
            if path in selection and (selection[path] is None) != (ids is None):
                raise ValueError(f"`{argument}` selects {path!r} twice, whole and by rows; give one of them")
            selection[path] = None if ids is None else _row_numbers(path, leaves[path], ids)
    return selection


def _paths(which: Any, argument: str, leaves: Mapping[str, Any], network: Network) -> Collection[str]:
    if isinstance(which, str):
        paths = [p for p in leaves if fnmatch.fnmatchcase(p, which) or fnmatch.fnmatchcase(p, f"{which}/*")]
    elif isinstance(which, network.layers):
        located = network.locate(which)
        paths = [path for path in leaves if path in located]
    elif callable(which):
        paths = select_paths(which, argument, leaves)
    else:
        raise TypeError(
            f"`{argument}` must be a path pattern, a layer of this model, a predicate of path and leaf, or a list of "
            f"these (got {which!r})"
        )
    check_selection(argument, which, paths, leaves)
    return paths


def _row_numbers(path: str, leaf: Any, ids: Any) -> np.ndarray:
    size = leaf.shape[0] if leaf.shape else 0
    numbers = np.arange(size)[ids] if isinstance(ids, slice) else np.unique(np.asarray(ids, np.int64))
    if numbers.ndim != 1 or not 0 < numbers.size < size or numbers.min() < 0 or numbers.max() >= size:
        raise ValueError(f"`rows` of {path!r} must be some, not all, of 0 to {size - 1} (got {ids!r})")
    return np.sort(numbers)


# ---- plain JAX functions ----


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

    def run(params: Params, state: Params, inputs: tuple, named: dict[str, Any], mode: Mode) -> tuple[Any, Params]:
        more = mode_arguments(apply, mode) | {n: getattr(mode, n) for n in ("key", "mask") if n in names}
        if init_state is None:
            return apply(params, *inputs, **named, **more), state
        return apply(params, state, *inputs, **named, **more)

    state_paths = flatten(init_state)[0]
    momenta = momentum if isinstance(momentum, Mapping) else dict.fromkeys(state_paths, momentum)
    check_known("momentum", momenta, state_paths, "the state is")
    for value in momenta.values():
        check_number("momentum", value, most=1, below=True)
    return adapt(Network(lambda key: (make(key), init_state), run, "key" in names, momenta=momenta), **options)
