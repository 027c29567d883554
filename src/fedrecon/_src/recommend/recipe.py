"""Build what settings of any task describe: optimizers, solvers, an aggregator, an evaluator, a layout."""

from __future__ import annotations

import functools
from typing import Any

import optax
from optax import GradientTransformation

from fedrecon._src import server as aggregators
from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.federated_reconstruction import federated_reconstruction
from fedrecon._src.client.closed_form import Ridge, closed_form, least_squares
from fedrecon._src.client.gradient_descent import gradient_descent
from fedrecon._src.client.objectives import Solver
from fedrecon._src.client.optimizers import fedadagrad, fedyogi
from fedrecon._src.core import split
from fedrecon._src.core.model import Model
from fedrecon._src.data.sources import DataError
from fedrecon._src.recommend.config import Config
from fedrecon._src.recommend.settings import Reconstruct, Server, SplitSettings, Update, relaxed_rounds
from fedrecon._src.recommend.task import Task, Users
from fedrecon._src.server import Aggregator
from fedrecon._src.simulation.engine import Layout, layout
from fedrecon._src.simulation.evaluation import Evaluator


def build_optimizer(name: str, learning_rate: float) -> GradientTransformation:
    """Return an optimizer by name; `momentum` is SGD with momentum 0.9."""
    makers: dict[str, Any] = {
        "fedadagrad": fedadagrad,
        "fedyogi": fedyogi,
        "momentum": functools.partial(optax.sgd, momentum=0.9),
    }
    return (makers.get(name) or getattr(optax, name))(learning_rate)


def build_server(settings: Server, rounds: int | None = None, relax: int = 0) -> GradientTransformation:
    """Return the server's optimizer, for a run of `rounds` rounds and `relax` relaxations after them.

    A rate that falls over all rounds starts again with every relaxation.
    """
    optimizer = build_optimizer(settings.optimizer, settings.learning_rate)
    over = rounds if settings.decay_rounds == "all" else settings.decay_rounds
    if not isinstance(over, int) or over < 1:
        return optimizer

    def decay(length: int) -> optax.Schedule:
        linear = settings.decay == "linear"
        return optax.linear_schedule(1.0, 0.0, length) if linear else optax.cosine_decay_schedule(1.0, length, 0.02)

    schedule = decay(over)
    if relax and settings.decay_rounds == "all":
        each = relaxed_rounds(over, 1)
        starts = [over + number * each for number in range(relax)]
        schedule = optax.join_schedules([schedule, *[decay(each)] * relax], starts)
    return optax.chain(optimizer, optax.scale_by_schedule(schedule))


def server_optimizer(config: Config) -> GradientTransformation:
    """Return the server's optimizer for all rounds of a run."""
    return build_server(config.server, config.rounds, config.relaxations)


def build_reconstruction(settings: Reconstruct, ridge: Ridge | None = None) -> Solver:
    """Return R; with least squares, `ridge` replaces that of the settings if given."""
    if settings.solver == "least-squares":
        return least_squares(settings.ridge if ridge is None else ridge)
    if settings.solver == "closed-form":
        limit = None if settings.steps is None else max(1, settings.steps) * settings.batch_size
        return closed_form(limit=limit)
    return build_descent(settings)


def build_descent(settings: Reconstruct | Update) -> Solver:
    """Return gradient descent, which is U, and R unless it has another solver."""
    optimizer = build_optimizer(settings.optimizer, settings.learning_rate)
    if isinstance(settings, Update) and settings.clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(settings.clip_norm), optimizer)
    return gradient_descent(optimizer, batch_size=settings.batch_size, epochs=settings.epochs, steps=settings.steps)


def build_split(name: str, settings: SplitSettings) -> split.Split:
    """Return S."""
    return split.named(name)._replace(by="time" if settings.by_time else None)


def evaluation_split(config: Config) -> split.Split:
    """Return how evaluation divides examples."""
    return build_split(config.split.evaluate, config.split)


def build_weights(config: Config, model: Model) -> aggregators.Weigh:
    """Return how clients are weighed."""
    weigh = config.aggregate.weigh
    # Perplexity is over tokens whatever the loss is over.
    return aggregators.weight_of(model, "perplexity") if weigh == "tokens" else weigh


def build_aggregator(config: Config, model: Model) -> Aggregator:
    """Return how updates become one mean if clients need no protection from the server."""
    settings, weigh, quantile = config.aggregate, build_weights(config, model), config.aggregate.followed
    if quantile is None:
        return aggregators.mean(weigh, clip_norm=settings.clip_norm, zero_norm=settings.zero_norm)
    zero = [] if settings.zero_norm is None else [aggregators.zero(settings.zero_norm)]
    clip = aggregators.adaptive_clip(quantile, times=settings.clip_times)
    return aggregators.chain(aggregators.finite(), *zero, clip, aggregators.by_weight(weigh))


def build_reconstruction_algorithm(
    config: Config, model: Model, server: GradientTransformation, aggregator: Aggregator, ridge: Ridge | None = None
) -> Algorithm:
    """Return Federated Reconstruction of a model with these settings; `ridge` is for `build_reconstruction`."""
    update = config.update
    return federated_reconstruction(
        model,
        split=build_split(config.split.train, config.split),
        reconstruct=build_reconstruction(config.reconstruct, ridge),
        update=build_descent(update),
        server=server,
        joint=update.joint,
        second_order=update.second_order,
        both_ways=update.both_ways,
        aggregate=aggregator,
    )


def build_layout(config: Config, model: Model) -> Layout:
    """Return the layout."""
    block = config.usual_block if config.block is None else config.block
    return layout(block, config.jax_devices, model=model)


def make_evaluator(
    config: Config, algorithm: Algorithm, users: Users, place: Layout | None = None, part: str = "valid"
) -> Evaluator | None:
    """Return an evaluator of the users of a part, split according to settings; None if there are none."""
    chosen = getattr(users, part)
    if not len(chosen):
        return None
    return Evaluator(algorithm, chosen, split=evaluation_split(config), seed=config.seed, layout=place)


def check_some_can_learn(config: Config, task: Task[Any, Any, Any], users: Users) -> None:
    """Check that something can be learned at all: from clients with both support and query.

    Args:
      config: the settings.
      task: what is trained.
      users: divided.

    Raises:
      DataError: there are no training clients, or none has two examples.
    """
    data, examples, least = config.data, task.unit or task.examples, 1 if config.split.train == "none" else 2
    if not (users.train.sizes >= least).any():
        number = f"{max(least, getattr(data, data.bounds[0]))} {examples}"
        everyone, training = f"{sum(map(len, users)):,} {task.people}", f"{len(users.train):,} training {task.people}"
        why = " Some must have one to reconstruct from (support) and one to learn from (query)." if least > 1 else ""
        fields = ["user"] if hasattr(data, "user") else []
        raise DataError(f"{data.source} has {everyone}: none of {training} have {number} or more.{why}", fields)
