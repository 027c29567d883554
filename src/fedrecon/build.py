"""From settings to what they stand for: ratings, users, a model, an algorithm, a place to run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import optax

from fedrecon import aggregate, split
from fedrecon.algorithm import Algorithm, federated_reconstruction
from fedrecon.config import Config, Data, Factorization, Reading, Reconstruct, Server, Split
from fedrecon.data import Ratings, load
from fedrecon.data.errors import DataError
from fedrecon.data.movielens import NAMES
from fedrecon.descent import gradient_descent
from fedrecon.engine import Layout, layout
from fedrecon.least_squares import least_squares
from fedrecon.local import Solver
from fedrecon.model import Model
from fedrecon.models import implicit_feedback, learned_default, matrix_factorization
from fedrecon.optimizers import adagrad, yogi

UNTRAINED = Config(data=Data(source=""))  # for what training alone needs, where nothing is trained


def build_optimizer(name: str, learning_rate: float) -> optax.GradientTransformation:
    """Return the optimizer of a name; its momentum, if it is `momentum`, is 0.9."""
    if name == "momentum":
        return optax.sgd(learning_rate, momentum=0.9)
    known = {"sgd": optax.sgd, "adagrad": optax.adagrad, "fedadagrad": adagrad, "adam": optax.adam, "yogi": yogi}
    return known[name](learning_rate)


def build_server(settings: Server) -> optax.GradientTransformation:
    """Return the server's optimizer."""
    optimizer = build_optimizer(settings.optimizer, settings.learning_rate)
    if settings.decay_rounds is None:
        return optimizer
    return optax.chain(
        optimizer, optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, settings.decay_rounds, alpha=0.02))
    )


def build_model(settings: Factorization, num_items: int) -> Model:
    """Return the model."""
    model = matrix_factorization(num_items, settings.dim, biases=settings.biases, init_mean=settings.init_mean)
    model = learned_default(model) if settings.learned_default else model
    return implicit_feedback(model, num_items) if settings.implicit_feedback else model


def build_reconstruction(settings: Reconstruct) -> Solver:
    """Return R."""
    if settings.solver == "least-squares":
        return least_squares(settings.ridge)
    return gradient_descent(
        build_optimizer(settings.optimizer, settings.learning_rate),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        steps=settings.steps,
    )


def build_split(name: str, settings: Split) -> split.Split:
    """Return S."""
    return split.named(name)._replace(by="time" if settings.by_time else None)


def build_algorithm(config: Config, num_items: int) -> Algorithm:
    """Return Federated Reconstruction with these settings."""
    update = config.update
    return federated_reconstruction(
        build_model(config.model, num_items),
        split=build_split(config.split.train, config.split),
        reconstruct=build_reconstruction(config.reconstruct),
        update=gradient_descent(
            build_optimizer(update.optimizer, update.learning_rate),
            batch_size=update.batch_size,
            epochs=update.epochs,
            steps=update.steps,
        ),
        server=build_server(config.server),
        joint=update.joint,
        second_order=update.second_order,
        aggregate=aggregate.mean(
            config.aggregate.weigh,
            clip_norm=config.aggregate.clip_norm,
            zero_norm=config.aggregate.zero_norm,
        ),
    )


def build_layout(config: Config, model: Model) -> Layout:
    """Return where clients run."""
    return layout(config.block, config.devices, model=model)


class Users(NamedTuple):
    """Ratings divided by user: those that train, those that settings may be chosen on, those that neither touches."""

    train: Ratings
    valid: Ratings
    test: Ratings


def read_ratings(path: str | Path, reading: Reading, **options: object) -> Ratings:
    """Read a ratings file."""
    settings = {field.name: getattr(reading, field.name) for field in dataclasses.fields(Reading)}
    return load(path, **settings, **options)


def load_ratings(settings: Data) -> Ratings:
    """Load the ratings that settings name, whole and in their own order."""
    path = Path(settings.source)
    if settings.source == "":
        raise DataError("the name of the data is empty; give a known name or a path.")
    known = settings.source in (*NAMES, "synthetic")
    if not known and not path.is_dir() and path.suffix != ".zip":
        return read_ratings(settings.source, settings, min_ratings=settings.min_ratings)
    own = [
        f"data.{field.name}" for field in dataclasses.fields(Reading) if getattr(settings, field.name) != field.default
    ]
    if own:
        raise DataError(f"{settings.source} is not a ratings file, so there is no use for {', '.join(own)}.")
    if settings.source == "synthetic":
        return load(settings.source).at_least(settings.min_ratings)
    return load(settings.source, min_ratings=settings.min_ratings)


def divide_users(ratings: Ratings, settings: Data) -> Users:
    """Shuffle and cap each user's ratings, and divide the users."""
    if settings.shuffle_seed is not None:
        ratings = ratings.shuffle(settings.shuffle_seed)
    if settings.max_examples is not None:
        ratings = ratings.cap(settings.max_examples)
    users = Users(*ratings.split_clients(*settings.fractions, seed=settings.split_seed))
    if not len(users.train):
        raise DataError(f"{settings.source} has {len(ratings)} users: too few to train on.")
    return users
