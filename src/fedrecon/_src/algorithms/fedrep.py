"""FedRep: clients fit their head to the shared representation, then the representation to their head.

References:
  Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.
"""

import optax

from fedrecon import kit
from fedrecon._src.algorithms.fedalt import fedalt


@kit.register_factory
def fedrep(
    model: kit.Model,
    *,
    head: kit.Solver,
    body: kit.Solver,
    server: optax.GradientTransformation,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Take many steps on each client's head, then few on the body: `fedalt` of a model whose last layers are local.

    With a head that is forgotten after every round and reconstructed, this is Federated Reconstruction.

    Args:
      model: with the head local.
      head: how a client trains its head, with the body frozen; many steps.
      body: how it then trains the body, with the head frozen; one step or epoch in the paper.
      server: the optimizer that takes the negative mean change as a gradient.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> many = fr.gradient_descent(optax.sgd(0.1), batch_size=5, epochs=10)
      >>> few = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.matrix_factorization(num_items=10)
      >>> fedrep = fr.algorithms.fedrep(model, head=many, body=few, server=optax.sgd(1.0))
    """
    return fedalt(model, personal=head, update=body, server=server, aggregate=aggregate)
