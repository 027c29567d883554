"""Server optimizers that need other starting values than optax gives them."""

from __future__ import annotations

import optax


def yogi(
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    initial_accumulator: float = 0.0,
) -> optax.GradientTransformation:
    """Yogi as federated optimization uses it: accumulators start at zero, `eps` is large.

    References:
      Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """
    return optax.chain(
        optax.scale_by_yogi(b1=b1, b2=b2, eps=eps, initial_accumulator_value=initial_accumulator),
        optax.scale_by_learning_rate(learning_rate),
    )
