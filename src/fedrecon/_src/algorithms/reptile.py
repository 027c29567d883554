"""Reptile: federated averaging whose server moves part of the way, for models that clients then finetune.

References:
  Nichol, Achiam, Schulman, On First-Order Meta-Learning Algorithms, 2018.
  Jiang et al., Improving Federated Learning Personalization via Model Agnostic Meta Learning, 2019.
"""

import optax

from fedrecon import kit
from fedrecon._src.algorithms.federated_averaging import federated_averaging
from fedrecon._src.algorithms.finetuning import with_finetuning


@kit.register_factory
def reptile(model: kit.Model, *, update: kit.Solver, learning_rate: float, finetune: kit.Solver) -> kit.Algorithm:
    """Move the model towards the mean of what clients learn, and finetune it on a client's support to serve it.

    This is `federated_averaging` with the server's SGD at a rate below 1, all clients weighted alike, and
    `with_finetuning`.

    Args:
      model: with everything global.
      update: how a client trains; several steps, or it is plain SGD on the mean loss.
      learning_rate: the server's, above 0 and at most 1 (epsilon in the first paper).
      finetune: how a client adapts the model on its support.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> model = fr.models.client_table(fr.models.matrix_factorization(10), num_clients=5)
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> reptile = fr.algorithms.reptile(model, update=descend, learning_rate=0.5, finetune=descend)
    """
    kit.check_whole_model(model, "Reptile")
    kit.check_number("learning_rate", learning_rate, above=True, most=1)
    averaging = federated_averaging(
        model, update=update, server=optax.sgd(learning_rate), aggregate=kit.mean("uniform")
    )
    return with_finetuning(averaging, finetune)
