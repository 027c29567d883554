"""The same model without reconstruction, and means as a model: rows of the demo beside those of `fr.baselines`."""

from __future__ import annotations

import dataclasses

import numpy as np
import optax

from fedrecon.algorithm import Algorithm
from fedrecon.algorithms.federated_averaging import federated_averaging
from fedrecon.app.build import build_algorithm, build_model
from fedrecon.app.config import RatingsConfig, Reconstruct
from fedrecon.model import Model
from fedrecon.models import matrix_factorization
from fedrecon.solvers.descent import gradient_descent


def means_algorithm(num_items: int) -> Algorithm:
    """Return an algorithm that predicts its parameters, one number an item: for evaluating means, not for training."""
    ratings = matrix_factorization(num_items, 1)  # for its loss and metrics
    model = Model(
        init_global=lambda key: np.zeros(num_items, np.float32),
        init_local=lambda key: (),
        predict=lambda means, local, batch: means[batch["item"]],
        loss=ratings.loss,
        metrics=ratings.metrics,
    )
    return federated_averaging(model, update=gradient_descent(optax.sgd(0.0), batch_size=1), server=optax.sgd(0.0))


def without_reconstruction(config: RatingsConfig, num_items: int) -> Algorithm:
    """Return the same algorithm, but that local parameters stay as they were initialised."""
    model = build_model(config.model, num_items)
    return build_algorithm(dataclasses.replace(config, reconstruct=Reconstruct(steps=0)), model)
