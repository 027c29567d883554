"""The `>>>` examples of public functions and classes run, and print what they show.

Examples may use `fr`, `np`, `jax`, `jnp` and `optax` without importing them. `python tests/test_doctests.py` lists the
public names without an example.
"""

import doctest
import importlib
import inspect
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # keras reads it when it is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrecon as fr

MODULES = (
    *("fedrecon", "fedrecon.aggregators", "fedrecon.data", "fedrecon.deploy", "fedrecon.device", "fedrecon.kit"),
    *("fedrecon.models", "fedrecon.optimizers", "fedrecon.privacy", "fedrecon.recommend", "fedrecon.split"),
)
WITHOUT_EXAMPLE = 0  # names at most; this number only goes down
NAMES = {"fr": fr, "np": np, "jax": jax, "jnp": jnp, "optax": optax}


def public_objects():
    """Return public functions and classes by their first public path, without exceptions."""
    objects = {}
    for path in MODULES:
        module = importlib.import_module(path)
        for name in dir(module):
            value = getattr(module, name)
            ours = getattr(value, "__module__", "").startswith("fedrecon")
            if name.startswith("_") or not ours or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            if not (inspect.isclass(value) and issubclass(value, BaseException)):
                objects.setdefault(value, f"{path}.{name}")
    return {path: value for value, path in objects.items()}


def examples_of(path, value):
    """Return the doctests of a function, or of a class and its methods."""
    tests = doctest.DocTestFinder().find(value, path, module=False, globs=dict(NAMES))
    return [test for test in tests if test.examples]


OBJECTS = public_objects()
EXAMPLES = {path: tests for path, value in OBJECTS.items() if (tests := examples_of(path, value))}


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_print_what_they_show(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for test in EXAMPLES[path]:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        report = []
        assert runner.run(test, out=report.append).failed == 0, "".join(report)


def test_public_names_have_examples():
    missing = sorted(set(OBJECTS) - set(EXAMPLES))
    assert len(missing) <= WITHOUT_EXAMPLE, missing


if __name__ == "__main__":
    print("\n".join(sorted(set(OBJECTS) - set(EXAMPLES))))
