"""How far an optimizer reaches: how little of a table it must be given for its updates to be exact."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedrecon.trees import Params

Reach = Literal["each", "rows", "copy", "whole"]
SCALES = (1.0, 1e6)  # of the gradients tried: an optimizer that clips does so only where they are large


def state_labels(optimizer: optax.GradientTransformation, params: Mapping[str, Any]) -> Any:
    """Label the leaves of an optimizer's state with the path of the parameter they belong to, or with None.

    The result is a list in the order of the state's leaves.
    """
    state = jax.eval_shape(optimizer.init, dict(params))
    labelled = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, path: _Label(path),
        state,
        {path: path for path in params},
        transform_non_params=lambda leaf: _Label(None),
    )
    return [label.path for label in jax.tree.leaves(labelled, is_leaf=lambda x: isinstance(x, _Label))]


class _Label:
    def __init__(self, path: str | None):
        self.path = path


def reach(optimizer: optax.GradientTransformation) -> Reach:
    """Find out how little of a table this optimizer must be given for its updates to be exact.

    An optimizer is only a pair of functions, so it is asked: a few steps on a small random table, whole, are
    compared with the same steps on less and less of it, with gradients of ordinary size and with large ones.

    Returns:
      `each`: every occurrence of a row in a batch on its own (plain SGD);
      `rows`: the rows of a batch, repeats summed, with the state of just those rows (Adagrad; SGD clipped by norm);
      `copy`: all rows that the client has touched so far (momentum, Adam);
      `whole`: the whole table (weight decay: it moves rows that nobody touched).
    """
    with jax.ensure_compile_time_eval():  # an algorithm may be used for the first time while JAX traces
        ways = {name: jax.tree.map(np.asarray, moved) for name, moved in _trials(optimizer).items()}
    exact: list[Reach] = ["each", "rows", "copy"]  # the least first
    for trial in range(len(SCALES)):
        expected = {leaf: moved[trial] for leaf, moved in ways["whole"].items()}
        largest = max(float(np.max(np.abs(moved))) for moved in expected.values())
        # Where nothing moved nothing was learned of the optimizer: its rate may start at 0. The last row is one that no
        # gradient touches.
        if largest == 0 or np.any(expected["table"][-1] != 0):
            return "whole"
        close = functools.partial(np.allclose, rtol=1e-4, atol=1e-5 * largest)
        exact = [name for name in exact if all(close(ways[name][leaf][trial], expected[leaf]) for leaf in expected)]
    return exact[0] if exact else "whole"


def _trials(optimizer: optax.GradientTransformation) -> dict[Reach, Params]:
    """Take the same steps in every way, with gradients of every scale; return how far all has moved, scales first."""
    params, grads, touched = _probe()
    so_far = [range(max(map(max, touched[: step + 1])) + 1) for step in range(len(touched))]

    def run(scale: Any) -> dict[Reach, Params]:
        scaled = jax.tree.map(lambda g: scale * g, grads)
        return {
            "each": _moves(optimizer, params, scaled, touched, parts=2, blank=True),
            "rows": _moves(optimizer, params, scaled, touched, blank=True),
            "copy": _moves(optimizer, params, scaled, so_far),
            "whole": _moves(optimizer, params, scaled, [range(5)] * len(touched)),
        }

    return jax.jit(lambda scales: jax.lax.map(run, scales))(jnp.asarray(SCALES, jnp.float32))


def _probe() -> tuple[dict[str, Any], list[tuple[Any, Any]], list[list[int]]]:
    """Make a table of five rows, a dense parameter, and four steps of gradients that touch some rows each."""
    generator = np.random.default_rng(1)
    touched, grads = [[0, 1], [1, 2], [0, 3], [2, 0]], []
    for rows in touched:
        gradient = np.zeros((5, 3), np.float32)
        gradient[rows] = generator.standard_normal((2, 3))
        grads.append((generator.standard_normal(2, np.float32), gradient))
    shapes = {"dense": (2,), "table": (5, 3)}
    params = {name: jnp.asarray(generator.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    return params, grads, touched


def _moves(
    optimizer: optax.GradientTransformation,
    params: Params,
    grads: Sequence[Any],
    places: Sequence[Iterable[int]],
    *,
    parts: int = 1,
    blank: bool = False,
) -> Params:
    """Descend with the optimizer seeing only some rows of the table in each step; return how far all has moved.

    Args:
      optimizer: what is asked.
      params: a dense parameter and a table.
      grads: of each step, for both.
      places: the rows seen in each step.
      parts: how often each of them is seen, with as small a part of its gradient.
      blank: whether the state begins without knowing the table's values, as a client's does that changes rows.
    """
    labels = state_labels(optimizer, params)
    state = optimizer.init({**params, "table": jnp.zeros_like(params["table"])} if blank else params)
    moved = jax.tree.map(jnp.zeros_like, params)
    for (dense, table), rows in zip(grads, places, strict=True):
        at = np.array([*rows] * parts)
        leaves, structure = jax.tree.flatten(state)
        small = [leaf[at] if label == "table" else leaf for leaf, label in zip(leaves, labels, strict=True)]
        held = {"dense": params["dense"] + moved["dense"], "table": (params["table"] + moved["table"])[at]}
        gradient = {"dense": dense, "table": table[at] / parts}
        updates, new = optimizer.update(gradient, jax.tree.unflatten(structure, small), held)
        moved = {"dense": moved["dense"] + updates["dense"], "table": moved["table"].at[at].add(updates["table"])}
        written = [
            leaf.at[at].set(fresh) if label == "table" else fresh
            for leaf, fresh, label in zip(leaves, jax.tree.leaves(new), labels, strict=True)
        ]
        state = jax.tree.unflatten(structure, written)
    return moved
