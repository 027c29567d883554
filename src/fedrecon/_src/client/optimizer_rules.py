"""Server optimizers whose accumulators start at other values than optax's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedrecon._src.core.factories import recorded


@recorded
def adagrad(learning_rate: float, eps: float = 1e-3, initial_accumulator: float = 0.0) -> optax.GradientTransformation:
    """Adagrad as federated optimization uses it: accumulators start at zero, `eps` is large and outside the root.

    `optax.adagrad` starts them at 0.1. The mean updates of federated rounds are far smaller than that, so it would need
    hundreds of rounds to adapt.

    Args:
      learning_rate: the learning rate.
      eps: added to the root of the accumulators.
      initial_accumulator: where the accumulators start.

    References:
      Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """

    def init(params: optax.Params) -> optax.Updates:
        return jax.tree.map(lambda x: jnp.full_like(x, initial_accumulator), params)

    def update(
        updates: optax.Updates, state: optax.Updates, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.Updates]:
        del params
        state = jax.tree.map(lambda total, g: total + g**2, state, updates)
        return jax.tree.map(lambda total, g: -learning_rate * g / (jnp.sqrt(total) + eps), state, updates), state

    return optax.GradientTransformation(init, update)


@recorded
def yogi(
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    initial_accumulator: float = 0.0,
) -> optax.GradientTransformation:
    """Yogi as federated optimization uses it: accumulators start at zero, `eps` is large.

    Args:
      learning_rate: the learning rate.
      b1: decay of the mean of gradients.
      b2: how fast the accumulators follow the squares of gradients.
      eps: added to the root of the accumulators.
      initial_accumulator: where the accumulators start.

    References:
      Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """
    return optax.chain(
        optax.scale_by_yogi(b1=b1, b2=b2, eps=eps, initial_accumulator_value=initial_accumulator),
        optax.scale_by_learning_rate(learning_rate),
    )
