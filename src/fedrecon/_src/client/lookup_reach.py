"""The reach of an optimizer: how little of a table it must see for its updates to be exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedrecon._src.core.pytrees import Params

Reach = Literal["each", "rows", "copy", "whole"]
SCALES = (1.0, 1e6)  # of the gradients tried: an optimizer that clips does so only if they are large


def state_labels(optimizer: optax.GradientTransformation, params: Params, tables: Collection[str]) -> dict[int, str]:
    """Return, by their number, the leaves of an optimizer's state that belong to tables, and to which.

    Args:
      optimizer: any optax optimizer.
      params: by path, of arrays or of shapes.
      tables: paths of some of them.
    """
    if not tables:
        return {}
    labelled = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, path: path,
        jax.eval_shape(optimizer.init, params),
        {path: path for path in params},
        transform_non_params=lambda leaf: "",
    )
    return {number: path for number, path in enumerate(jax.tree.leaves(labelled)) if path in tables}


def map_labelled(function: Callable[..., Any], labels: Mapping[int, str], *states: Any) -> Any:
    """Apply a function to those leaves of optimizer states that belong to tables; take others from the last state.

    Args:
      function: `(path of the table, leaf of each state) -> leaf`.
      labels: as `state_labels` returns them.
      *states: of one structure.
    """
    leaves = zip(*map(jax.tree.leaves, states), strict=True)
    mapped = [function(labels[n], *leaf) if n in labels else leaf[-1] for n, leaf in enumerate(leaves)]
    return jax.tree.unflatten(jax.tree.structure(states[0]), mapped)


def reach(optimizer: optax.GradientTransformation) -> Reach:
    """Find out how little of a table this optimizer must see for its updates to be exact.

    An optimizer is just a pair of functions, so we try it: a few steps on a small random table are compared with the
    same steps on less and less of it, with gradients of ordinary size and with large ones.

    Args:
      optimizer: any optax optimizer.

    Returns:
      `each`: every occurrence of a row in a batch on its own (plain SGD);
      `rows`: the rows of a batch, repeats summed, with the state of just those rows (Adagrad; SGD clipped by norm);
      `copy`: all rows that the client has touched so far (momentum, Adam);
      `whole`: the whole table (weight decay moves rows that no example touches).
    """
    with jax.ensure_compile_time_eval():  # an algorithm may be used for the first time while JAX traces
        ways = {name: jax.tree.map(np.asarray, moved) for name, moved in _trials(optimizer).items()}
    exact: list[Reach] = ["each", "rows", "copy"]  # the least first
    for trial in range(len(SCALES)):
        expected = {leaf: moved[trial] for leaf, moved in ways["whole"].items()}
        largest = max(float(np.max(np.abs(moved))) for moved in expected.values())
        # If nothing moved, the trial says nothing: the learning rate may start at 0. No gradient touches the last row.
        if largest == 0 or np.any(expected["table"][-1] != 0):
            return "whole"
        close = functools.partial(np.allclose, rtol=1e-4, atol=1e-5 * largest)
        exact = [name for name in exact if all(close(ways[name][leaf][trial], expected[leaf]) for leaf in expected)]
    return exact[0] if exact else "whole"


def _trials(optimizer: optax.GradientTransformation) -> dict[Reach, Params]:
    """Take the same steps with each reach and each scale of gradients; return the moves of all parameters, by reach.

    The first dimension of every leaf is the scale.
    """
    params, grads, touched = _probe()
    so_far = [range(max(map(max, touched[: step + 1])) + 1) for step in range(len(touched))]
    labels = state_labels(optimizer, params, ["table"])

    def move(grads: Any, places: Sequence[Iterable[int]], parts: int = 1, blank: bool = False) -> Params:
        """Take steps in which the optimizer sees only some rows of the table; return how far the parameters moved.

        Args:
          grads: the gradients of each step, for the dense parameter and the table.
          places: the rows that each step sees.
          parts: how often a step sees each of them, with its gradient divided by that number.
          blank: whether the state is initialised without the table's values, as for a client that changes rows.
        """
        state = optimizer.init({**params, "table": jnp.zeros_like(params["table"])} if blank else params)
        moved = jax.tree.map(jnp.zeros_like, params)
        for (dense, table), rows in zip(grads, places, strict=True):
            at = np.array([*rows] * parts)
            held = {"dense": params["dense"] + moved["dense"], "table": (params["table"] + moved["table"])[at]}
            gradient = {"dense": dense, "table": table[at] / parts}
            seen = map_labelled(lambda path, leaf, at=at: leaf[at], labels, state)
            updates, new = optimizer.update(gradient, seen, held)
            moved = {"dense": moved["dense"] + updates["dense"], "table": moved["table"].at[at].add(updates["table"])}
            state = map_labelled(lambda path, leaf, fresh, at=at: leaf.at[at].set(fresh), labels, state, new)
        return moved

    def run(scale: Any) -> dict[Reach, Params]:
        scaled = jax.tree.map(lambda g: scale * g, grads)
        return {
            "each": move(scaled, touched, parts=2, blank=True),
            "rows": move(scaled, touched, blank=True),
            "copy": move(scaled, so_far),
            "whole": move(scaled, [range(5)] * len(touched)),
        }

    return jax.jit(lambda scales: jax.lax.map(run, scales))(jnp.asarray(SCALES, jnp.float32))


def _probe() -> tuple[dict[str, Any], list[tuple[Any, Any]], list[list[int]]]:
    """Make a table of five rows, a dense parameter, and gradients of four steps, each of which touches some rows."""
    generator = np.random.default_rng(1)
    touched, grads = [[0, 1], [1, 2], [0, 3], [2, 0]], []
    for rows in touched:
        gradient = np.zeros((5, 3), np.float32)
        gradient[rows] = generator.standard_normal((2, 3))
        grads.append((generator.standard_normal(2, np.float32), gradient))
    shapes = {"dense": (2,), "table": (5, 3)}
    params = {name: jnp.asarray(generator.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    return params, grads, touched
