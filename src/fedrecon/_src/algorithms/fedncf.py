"""FedNCF: neural collaborative filtering whose users keep their vectors.

References:
  Perifanis, Efraimidis, Federated Neural Collaborative Filtering, Knowledge-Based Systems 2022.
"""

import optax

from fedrecon import kit
from fedrecon._src.algorithms.fedper import fedper


@kit.register_factory
def fedncf(
    model: kit.Model, *, update: kit.Solver, server: optax.GradientTransformation, reconstruct: kit.Solver
) -> kit.Algorithm:
    """Train a network on user and item vectors, and average the network and the items: `fedper` of such a model.

    Args:
      model: `models.logistic_factorization` with hidden layers.
      update: how a client trains its vector, the items' vectors and the network.
      server: the optimizer that takes the negative mean change as a gradient.
      reconstruct: how unseen users get their vector: steps on it alone.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.logistic_factorization(num_items=10, dim=4, hidden=(8,))
      >>> fedncf = fr.algorithms.fedncf(model, update=descend, server=optax.sgd(1.0), reconstruct=descend)
    """
    return fedper(model, update=update, server=server, reconstruct=reconstruct)
