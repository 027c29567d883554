"""What a model must beat: the same users and the same query examples, served without personal parameters."""

from __future__ import annotations

import dataclasses

import numpy as np
import optax

from fedrecon.algorithm import Algorithm
from fedrecon.algorithms.federated_averaging import federated_averaging
from fedrecon.app.build import build_algorithm, build_model
from fedrecon.app.config import RatingsConfig, Reconstruct
from fedrecon.clients import Clients
from fedrecon.model import Model
from fedrecon.models import matrix_factorization
from fedrecon.solvers.descent import gradient_descent


def item_means(clients: Clients, num_items: int) -> np.ndarray:
    """Return each item's mean rating over these clients, and the mean of all ratings for items they have not rated."""
    owned = np.zeros(len(clients.columns["item"]) + 1, np.int64)  # rows of these clients, of the columns they share
    np.add.at(owned, clients.starts, 1)
    np.add.at(owned, clients.ends, -1)
    mine = np.cumsum(owned)[:-1] > 0
    item, rating = clients.columns["item"][mine], clients.columns["rating"][mine].astype(np.float64)
    count = np.bincount(item, minlength=num_items)
    total = np.bincount(item, rating, num_items)
    return np.where(count > 0, total / np.maximum(count, 1), rating.mean()).astype(np.float32)


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
