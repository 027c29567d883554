"""FedPer, and methods that differ from it only in the model or the name: FedSim and LG-FedAvg.

References:
  Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
  Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022 (FedSim).
  Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020 (LG-FedAvg).
"""

import optax

from fedrecon import kit
from fedrecon._src.algorithms.federated_averaging import federated_averaging


@kit.register_factory
def fedper(
    model: kit.Model, *, update: kit.Solver, server: optax.GradientTransformation, reconstruct: kit.Solver
) -> kit.Algorithm:
    """Train an averaged body together with a head that every client keeps: `federated_averaging` of such a model.

    Args:
      model: with the last layers local.
      update: how a client trains all parameters, local and global ones together.
      server: the optimizer that takes the negative mean change as a gradient.
      reconstruct: how unseen clients get local parameters, on support.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.matrix_factorization(num_items=10)
      >>> fedper = fr.algorithms.fedper(model, update=descend, server=optax.sgd(1.0), reconstruct=descend)
    """
    return federated_averaging(model, update=update, server=server, reconstruct=reconstruct)


@kit.register_factory
def fedsim(
    model: kit.Model, *, update: kit.Solver, server: optax.GradientTransformation, reconstruct: kit.Solver
) -> kit.Algorithm:
    """Train local and global parameters simultaneously, whichever part of the model is local: `fedper` by another name.

    Args:
      model: with local parameters, which clients keep.
      update: how a client trains all parameters.
      server: the optimizer that takes the negative mean change as a gradient.
      reconstruct: how unseen clients get local parameters, on support.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.matrix_factorization(num_items=10)
      >>> fedsim = fr.algorithms.fedsim(model, update=descend, server=optax.sgd(1.0), reconstruct=descend)
    """
    return fedper(model, update=update, server=server, reconstruct=reconstruct)


@kit.register_factory
def lg_fedavg(
    model: kit.Model, *, update: kit.Solver, server: optax.GradientTransformation, reconstruct: kit.Solver
) -> kit.Algorithm:
    """Train local representations under a global head: `fedper` of a model whose first layers are local.

    Args:
      model: with the first layers local, such as `from_flax(module, local="encoder/*", ...)`.
      update: how a client trains all parameters.
      server: the optimizer that takes the negative mean change as a gradient.
      reconstruct: how unseen clients get local parameters, on support.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.matrix_factorization(num_items=10)
      >>> lg_fedavg = fr.algorithms.lg_fedavg(model, update=descend, server=optax.sgd(1.0), reconstruct=descend)
    """
    return fedper(model, update=update, server=server, reconstruct=reconstruct)
