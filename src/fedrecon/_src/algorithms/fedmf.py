"""FedMF: matrix factorization whose users keep their vectors and share how item vectors should change.

References:
  Ammad-ud-din et al., Federated Collaborative Filtering for Personalized Recommendation System, 2019.
  Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020.
"""

import optax

from fedrecon import kit
from fedrecon._src.algorithms.fedper import fedper


@kit.register_factory
def fedmf(
    model: kit.Model, *, update: kit.Solver, server: optax.GradientTransformation, reconstruct: kit.Solver
) -> kit.Algorithm:
    """Train user and item vectors together, and average those of items: `fedper` of a factorization.

    For clicks, give every user sampled items with the label 0 beside their own with the label 1.

    Args:
      model: `models.matrix_factorization` for ratings, `models.logistic_factorization` for clicks.
      update: how a client trains its vector and the items' vectors.
      server: the optimizer that takes the negative mean change as a gradient.
      reconstruct: how unseen users get their vector, such as `least_squares` for ratings.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> fedmf = fr.algorithms.fedmf(
      ...     fr.models.matrix_factorization(num_items=10),
      ...     update=fr.gradient_descent(optax.sgd(0.1), batch_size=5),
      ...     server=optax.sgd(1.0),
      ...     reconstruct=fr.least_squares(1.0),
      ... )
    """
    return fedper(model, update=update, server=server, reconstruct=reconstruct)
