"""optax optimizers and schedules that can be saved with an algorithm, server optimizers, and priors on parameters."""

from fedrecon._src.client.optimizers import adagrad as adagrad
from fedrecon._src.client.optimizers import adam as adam
from fedrecon._src.client.optimizers import adamw as adamw
from fedrecon._src.client.optimizers import add_decayed_weights as add_decayed_weights
from fedrecon._src.client.optimizers import chain as chain
from fedrecon._src.client.optimizers import clip_by_global_norm as clip_by_global_norm
from fedrecon._src.client.optimizers import cosine_decay_schedule as cosine_decay_schedule
from fedrecon._src.client.optimizers import fedadagrad as fedadagrad
from fedrecon._src.client.optimizers import fedyogi as fedyogi
from fedrecon._src.client.optimizers import identity as identity
from fedrecon._src.client.optimizers import keep_constant as keep_constant
from fedrecon._src.client.optimizers import linear_schedule as linear_schedule
from fedrecon._src.client.optimizers import rmsprop as rmsprop
from fedrecon._src.client.optimizers import scale as scale
from fedrecon._src.client.optimizers import scale_by_schedule as scale_by_schedule
from fedrecon._src.client.optimizers import sgd as sgd
from fedrecon._src.client.optimizers import with_prior as with_prior
