"""FedBN: everything is averaged except normalisation layers, which every client keeps.

References:
  Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

import optax

from fedrecon import kit
from fedrecon._src.algorithms.federated_averaging import federated_averaging


@kit.register_factory
def fedbn(
    model: kit.Model,
    *,
    update: kit.Solver,
    server: optax.GradientTransformation,
    reconstruct: kit.Solver | None = None,
) -> kit.Algorithm:
    """Average a model whose normalisation layers are local: `federated_averaging` of such a partition.

    Args:
      model: with the parameters and the statistics of its normalisation layers local, such as
        `from_flax(module, local="BatchNorm*", state="local", ...)`.
      update: how a client trains all parameters.
      server: the optimizer that takes the negative mean change as a gradient.
      reconstruct: how unseen clients get the parameters of their layers, on support. By default these stay as they
        start, and only the statistics are set from support.

    Example:
      >>> import fedrecon as fr
      >>> import jax.numpy as jnp
      >>> import optax
      >>> def normalize(params, state, x, training):
      ...     used = x.mean() if training else state["mean"]
      ...     return params["scale"] * (x - used) * params["w"], {"mean": 0.9 * state["mean"] + 0.1 * x.mean()}
      >>> model = fr.models.from_function(
      ...     normalize, {"scale": jnp.ones(()), "w": jnp.zeros(())}, init_state={"mean": jnp.zeros(())}, state="local",
      ...     local="scale", inputs="x", label="y", loss="mse",
      ... )
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> fedbn = fr.algorithms.fedbn(model, update=descend, server=optax.sgd(1.0))
    """
    only_statistics = kit.gradient_descent(optax.set_to_zero(), batch_size=64)
    return federated_averaging(model, update=update, server=server, reconstruct=reconstruct or only_statistics)
