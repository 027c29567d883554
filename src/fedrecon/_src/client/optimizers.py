"""optax optimizers and schedules that can be saved with an algorithm, and our own federated ones.

`fr.optimizers.sgd(0.1)` is `optax.sgd(0.1)`. Any optax optimizer can train; those made here can also be saved with
`fr.save`.
"""

import optax

from fedrecon._src.client.optimizer_rules import adagrad as fedadagrad
from fedrecon._src.client.optimizer_rules import yogi as fedyogi
from fedrecon._src.core.factories import recorded

sgd = recorded(optax.sgd)
adam = recorded(optax.adam)
adamw = recorded(optax.adamw)
adagrad = recorded(optax.adagrad)
rmsprop = recorded(optax.rmsprop)
chain = recorded(optax.chain)
identity = recorded(optax.identity)
clip_by_global_norm = recorded(optax.clip_by_global_norm)
add_decayed_weights = recorded(optax.add_decayed_weights)
scale = recorded(optax.scale)
scale_by_schedule = recorded(optax.scale_by_schedule)
linear_schedule = recorded(optax.linear_schedule)
cosine_decay_schedule = recorded(optax.cosine_decay_schedule)

__all__ = [
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "chain",
    "clip_by_global_norm",
    "cosine_decay_schedule",
    "fedadagrad",
    "fedyogi",
    "identity",
    "linear_schedule",
    "rmsprop",
    "scale",
    "scale_by_schedule",
    "sgd",
]
