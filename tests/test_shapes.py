"""Shapes in jaxtyping annotations are those that arrays have when a round is traced."""

import functools
import inspect
import re
import sys
import typing

import jaxtyping
import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.client import closed_form
from fedrecon._src.simulation import training
from toy_models import clients_of, one_round

ROOMS = tuple(f"fedrecon._src.{room}" for room in ("core", "client", "server", "algorithms", "simulation"))
LOADED = [closed_form, training]  # with all that a round needs


def has_shapes(function):
    return re.search(r"\[(Array|ndarray)", str(inspect.get_annotations(function))) is not None


def check(value, hint, what):
    if typing.get_origin(hint) is tuple:
        for part, inner in zip(value, typing.get_args(hint), strict=False):
            check(part, inner, what)
    elif hasattr(hint, "dim_str"):
        assert isinstance(value, hint), f"{what} has shape {np.shape(value)}"


def checked(function, calls):
    hints, signature = typing.get_type_hints(function), inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        with jaxtyping.jaxtyped("context"):
            values = signature.bind(*args, **kwargs).arguments | {"return": function(*args, **kwargs)}
            for name in values.keys() & hints.keys():
                check(values[name], hints[name], f"{function.__qualname__}: {name}")
        calls.add(function.__name__)
        return values["return"]

    return call


@pytest.fixture
def calls(monkeypatch):
    """Check the shapes of annotated functions while a test runs; return the names of those that were called."""
    calls, wrappers = set(), {}
    for module in [module for name, module in sys.modules.items() if name.startswith(ROOMS)]:
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        for owner in [module, *(value for value in classes if value.__module__ == module.__name__)]:
            for name, value in list(vars(owner).items()):
                if inspect.isfunction(value) and value.__module__.startswith(ROOMS) and has_shapes(value):
                    wrappers[value] = wrappers.get(value) or checked(value, calls)
                    monkeypatch.setattr(owner, name, wrappers[value])
    return calls


def test_arrays_have_the_shapes_that_annotations_say(calls):
    # The first client has an item twice, so its rows are listed and its repeats merged.
    ratings = [{"item": [0, 1, 1, 3], "rating": [5.0, 3.0, 4.0, 1.0]}, {"item": [2, 0, 3], "rating": [1.0, 2.0, 5.0]}]
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(5, 3),
        reconstruct=fr.least_squares(1.0),
        update=fr.gradient_descent(optax.adagrad(0.1), batch_size=2),
        server=optax.sgd(1.0),
        split=fr.split.none(),
        aggregate=fr.aggregators.mean(clip_norm=1.0),
    )
    one_round(algorithm, clients_of(*ratings), valid=clients_of(*ratings))
    expected = {"read_rows", "change_rows", "merge_repeats", "solve_positive", "_filled", "mask", "broadcast_clients"}
    assert calls >= expected | {"norms", "client_keys", "measure", "measure_all"}


def test_a_wrong_shape_is_noticed():
    def halve(x: jaxtyping.Float[np.ndarray, " n"]) -> jaxtyping.Float[np.ndarray, " n"]:
        return x[::2]

    with pytest.raises(AssertionError, match=r"halve: return has shape \(2,\)|halve: x has shape \(4,\)"):
        checked(halve, set())(np.zeros(4))
