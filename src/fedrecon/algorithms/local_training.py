"""Local training: every client for itself alone. What any federated way must beat."""

from __future__ import annotations

import optax

from fedrecon.algorithm import Algorithm, shapes_of
from fedrecon.algorithms.federated_reconstruction import federated_reconstruction
from fedrecon.model import Model
from fedrecon.recipes import recorded
from fedrecon.solvers.problem import Solver
from fedrecon.trees import flatten


@recorded
def local_training(model: Model, *, train: Solver) -> Algorithm:
    """Let every client train a whole model on its own support examples, and send nothing.

    There is nothing to learn in rounds; evaluate it as it is, on any clients, with the empty parameters that
    `init` gives it. Training is then what rebuilds local parameters, in which dropout is off.

    Args:
      model: one with nothing global, such as `from_flax(module, local="*", ...)`.
      train: how a client trains, from a fresh start.

    Returns:
      An `Algorithm` whose `reconstruct` is all there is to it.

    Raises:
      ValueError: if the model has global parameters.
    """
    shared = flatten(shapes_of(model.init_global))[0]
    if shared:
        raise ValueError(
            f"in local training everything is local, but the model has global parameters ({', '.join(shared)}); "
            "make it with local='*'"
        )
    return federated_reconstruction(model, reconstruct=train, update=train, server=optax.identity())
