"""Local training: every client trains alone. A baseline that any federated algorithm should beat."""

from __future__ import annotations

import optax

from fedrecon._src.algorithms.algorithm import Algorithm, shapes_of
from fedrecon._src.algorithms.federated_reconstruction import federated_reconstruction
from fedrecon._src.client.objectives import Solver
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Model
from fedrecon._src.core.pytrees import flatten


@register_factory
def local_training(model: Model, *, train: Solver) -> Algorithm:
    """Train a whole model on every client's own support examples, and send nothing.

    There are no rounds to run. Evaluate the algorithm as it is, on any clients, with the empty global parameters that
    `init` returns. A client trains when its local parameters are reconstructed, so dropout is off.

    Args:
      model: one with nothing global, such as `from_flax(module, local="*", ...)`.
      train: how a client trains, from a fresh start.

    Returns:
      An `Algorithm` that does nothing but reconstruct.

    Raises:
      ValueError: if the model has global parameters.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> import optax
      >>> model = fr.models.from_function(
      ...     lambda params, x: params["w"] * x, {"w": jnp.zeros(())}, local="*", inputs="x", label="y", loss="mse"
      ... )
      >>> alone = fr.local_training(model, train=fr.gradient_descent(optax.sgd(0.1), batch_size=5, epochs=20))
      >>> alone.has_local()  # evaluate it as it is, with the empty global parameters that `init` returns
      True
    """
    shared = flatten(shapes_of(model.init_global))[0]
    if shared:
        raise ValueError(f"local training needs local='*', no global parameters (got {', '.join(shared)})")
    return federated_reconstruction(model, reconstruct=train, update=train, server=optax.identity())
