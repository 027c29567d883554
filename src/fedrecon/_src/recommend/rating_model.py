"""The model of ratings from its settings, and what round zero adds to them: scale, biases, ridges, traits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from fedrecon._src.client.closed_form import Ridge
from fedrecon._src.client.optimizers import Strength, keep_constant, with_prior
from fedrecon._src.core.checks import check_rules
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import readable
from fedrecon._src.core.model import Model
from fedrecon._src.data import Ratings
from fedrecon._src.data.ratings import RatingLimits
from fedrecon._src.models import implicit_feedback, learned_default, matrix_factorization, standardize
from fedrecon._src.recommend.config import Factorization, RatingsConfig, Scale
from fedrecon._src.recommend.estimate import Estimate, Transform
from fedrecon._src.recommend.protection import Population, round_zero_noise
from fedrecon._src.recommend.round_zero import Answers, RoundZero, run_round_zero
from fedrecon._src.recommend.settings import FOUND, relaxed_rounds
from fedrecon._src.recommend.stopping import say_rounds
from fedrecon._src.recommend.task import Ready, Users

SEED_OF_NOISE = 13  # beside the run's seed, so that noise is drawn from numbers that nothing else has
RELAXED = 0.25  # what a relaxation leaves of the prior
BESIDE = 0.1  # of the scale's width: so far beside it ratings are still taken
FAR_BESIDE = 1.0  # the same for ends found with noise, which hides rare ratings
SAME = 1e-5  # of two numbers that differ by rounding alone


@dataclass(frozen=True, eq=False)
class Liking:
    """What training users thought of the items, as sums over them tell: what a baseline needs.

    Attributes:
      bias: of item k, standardised and damped.
      user_ridge: the ridge on a newcomer's bias beside it.
    """

    bias: np.ndarray
    user_ridge: float

    def __post_init__(self) -> None:
        """Check that the numbers make sense."""
        sound = np.isfinite(self.bias).all() and 0 < self.user_ridge < math.inf
        check_rules({"item biases must be finite and their ridge must be above 0": sound})


@dataclass(frozen=True, eq=False)
class Items:
    """What items are called, and what training users thought of them.

    Attributes:
      ids: the original id of item k.
      titles: the title of item k, or None.
      counts: how many ratings item k was learned from, or None where that is not known.
      scale: the lowest and the highest rating as they are in the data, or None.
      liking: what training users thought of them, or None where that is not known.
    """

    ids: np.ndarray
    titles: np.ndarray | None = None
    counts: np.ndarray | None = None
    scale: tuple[float, float] | None = None
    liking: Liking | None = None

    def __post_init__(self) -> None:
        """Check that there is a title, a count and a bias for every item, if there are any."""
        low, high = self.scale or (0, 1)
        rules = {
            "`ids` must be a list of at least one item": self.ids.ndim == 1 and len(self.ids) > 0,
            "`counts` must not be negative": self.counts is None or self.counts.min(initial=0) >= 0,
            "`scale` must be finite, with the lowest rating first": -np.inf < low <= high < np.inf,
        }
        biases = None if self.liking is None else self.liking.bias
        columns = {"titles": self.titles, "counts": self.counts, "liking": biases}
        for name, values in columns.items():
            rules[f"`{name}` must have one entry for each item"] = values is None or values.shape == self.ids.shape
        got = f"(got {len(self.ids)} items, scale {self.scale})"
        check_rules({f"{rule} {got}": holds for rule, holds in rules.items()})

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.ids)

    def title(self, k: int) -> str:
        """Return the title of item `k`, or its original id where there is none."""
        return str(self.ids[k] if self.titles is None else self.titles[k])


# ---- the scale ----


def scale_ends(settings: Factorization, items: Items) -> tuple[float, float] | None:
    """Return the ends of the scale, as ratings are in the data; None if nothing is known.

    Round zero finds the ends as means of equal ratings, with rounding errors. Here they are those of the data again.

    Args:
      settings: those of the model.
      items: of the model.
    """
    scale = settings.scale
    if scale is None:  # a model of an earlier version
        return items.scale
    low, high = np.expm1([scale.low, scale.high]) if scale.transform == "log1p" else (scale.low, scale.high)
    seen = items.scale or (low, high)
    return _round_end(low, seen[0]), _round_end(high, seen[1])


def _round_end(end: float, seen: float) -> float:
    """Return an end of the scale without rounding errors: ratings have single precision."""
    single = float(np.float32(end))
    return float(seen) if abs(seen - end) <= SAME * max(1.0, abs(end)) and float(np.float32(seen)) == seen else single


def accepted_ratings(config: RatingsConfig, items: Items) -> RatingLimits | None:
    """Return which ratings of new users a model takes: all that training had, and what is near its scale. Counts have
    no largest one: somebody may well play a song more often than anybody before.

    Args:
      config: settings of the model.
      items: of the model.
    """
    ends = scale_ends(config.model, items)
    if ends is None or not ends[0] < ends[1]:
        return None
    if config.model.scale is not None and config.model.scale.transform == "log1p":
        return RatingLimits(0.0, math.inf, 0.0, math.inf)
    (low, high), (lowest, highest) = ends, items.scale or ends
    noised = config.privacy.on and config.privacy.rating_range is None
    room = (FAR_BESIDE if noised else BESIDE) * (high - low) * (1 + SAME)
    least, most = float(min(low - room, lowest)), float(max(high + room, highest))
    return RatingLimits(least, most, min(low, lowest), max(high, highest))


# ---- the model ----


def build_model(settings: Factorization, num_items: int, zero: Estimate | None = None) -> Model:
    """Return the model.

    Args:
      settings: those of the model, with the scale that round zero found if there was one.
      num_items: item ids are 0 to `num_items - 1`.
      zero: what round zero found; only where the model is to be trained, later it is among the parameters.
    """
    scale = settings.scale if settings.scale is not None and settings.scale.standardized else None
    traits = np.zeros((num_items, len(scale.trait_ridges))) if scale is not None and scale.trait_ridges else None
    model = matrix_factorization(
        num_items,
        settings.dim,
        biases=settings.biases,
        init_scale=settings.init_scale,
        init_mean=0.0 if scale else settings.init_mean,
        init_local_scale=0.0 if scale else None,
        init_item_bias=zero.item_bias if zero is not None and scale else None,
        item_traits=zero.traits() if zero is not None and traits is not None else traits,
    )
    model = learned_default(model) if settings.learned_default else model
    if settings.implicit_feedback:
        moves = ("user_embedding", *(["user_bias"] if settings.biases else []))
        model = implicit_feedback(model, num_items, moves=moves)
    return standardize(model, scale.mean, scale.deviation, low=scale.low, high=scale.high) if scale else model


def ridges_of(config: RatingsConfig) -> Ridge | None:
    """Return the ridges that round zero found, times that of the settings; None if it found none."""
    scale = config.model.scale
    if scale is None or not scale.standardized:
        return None
    traits = {"user_traits": np.array(scale.trait_ridges)} if scale.trait_ridges else {}
    ridges: dict[str, Any] = {"user_bias": scale.user_ridge, **traits, "*": scale.noise}
    return {path: config.reconstruct.ridge * value for path, value in ridges.items()}


def relaxed_prior(config: RatingsConfig) -> Strength:
    """Return the prior on item embeddings: constant in all rounds, then a quarter in each relaxation after them."""
    prior, times = config.model.prior, config.model.relax
    if not times or not config.rounds:
        return prior
    starts = [config.rounds + relaxed_rounds(config.rounds, number) for number in range(times)]
    return optax.piecewise_constant_schedule(prior, dict.fromkeys(starts, RELAXED))


def add_priors(
    config: RatingsConfig, optimizer: optax.GradientTransformation, examples: float
) -> optax.GradientTransformation:
    """Wrap the server optimizer with the configured priors; freeze parameters estimated in round zero."""
    settings = config.model
    priors: dict[str, Strength] = {}
    if settings.prior:
        priors["*item_embedding"] = relaxed_prior(config)
    if settings.implicit_prior and settings.implicit_feedback:
        priors["evidence/*"] = settings.implicit_prior
    if priors:
        optimizer = with_prior(optimizer, priors, examples=examples)
    constant = constant_parameters(settings)
    return keep_constant(optimizer, constant) if constant else optimizer


def constant_parameters(settings: Any) -> tuple[str, ...]:
    """Return patterns of the parameters of a model that the server leaves as they are, if any."""
    scale = getattr(settings, "scale", None)
    if scale is None or not scale.standardized:
        return ()
    return FOUND if scale.trait_ridges else FOUND[:-1]


# ---- round zero ----


def transformed(clients: Clients, transform: str) -> Clients:
    """Return clients with log(1 + rating) for ratings, if that is the transform; what is below 0 counts as 0."""
    if transform == "none" or "rating" not in clients.columns:
        return clients
    logs = np.log1p(np.maximum(np.asarray(clients.columns["rating"], np.float32), 0))
    return dataclasses.replace(clients, columns={**clients.columns, "rating": logs})


def round_zero_of(config: RatingsConfig, num_items: int, **noise: Any) -> RoundZero:
    """Return the round zero of ratings that settings ask for; `noise` has the fields of that of a private run."""
    transform: Transform | None = None if config.data.transform == "auto" else config.data.transform
    passes: dict[str, Any] = {} if config.model.item_traits else {"trait_passes": 0}
    if config.privacy.on:
        noise["scale"] = config.privacy.rating_range
        passes |= {} if config.model.round_zero else {"bias_passes": 0, "trait_passes": 0}
    return RoundZero(num_items=num_items, transform=transform, **passes, **noise)


def apply_estimate(
    config: RatingsConfig, items: Items, estimate: Estimate, counts: np.ndarray | None = None
) -> tuple[RatingsConfig, Items]:
    """Put what round zero estimated into settings and items: the scale, the ridges and what users like.

    Args:
      config: the settings.
      items: of the model.
      estimate: from round zero.
      counts: replace the counts and the scale of the items by these and by the estimated one.
    """
    names = ("transform", "mean", "deviation", "low", "high", "noise", "user_ridge")
    traits = tuple(map(float, estimate.trait_ridge)) if config.model.item_traits else ()
    estimates: dict[str, Any] = {name: getattr(estimate, name) for name in names}
    scale = Scale(**estimates, standardized=config.model.round_zero, trait_ridges=traits)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, scale=scale))
    items = dataclasses.replace(items, liking=Liking(estimate.item_bias, estimate.user_bias_ridge))
    if counts is not None:
        items = dataclasses.replace(items, counts=np.rint(counts).astype(np.int64), scale=estimate.ends)
    if config.privacy.on and not config.model.round_zero:  # only the scale was asked for
        items = dataclasses.replace(items, counts=None, liking=None)
    return config, items


def prepare_ratings(
    config: RatingsConfig, ratings: Ratings, users: Users, items: Items, population: Population | None = None
) -> Ready:
    """Ask the training users for sums, and put what follows from them into settings, items and model.

    In a private run the sums have noise, and nothing else of the training users gets into a model.

    Args:
      config: the settings.
      ratings: all of them, for what is said.
      users: divided.
      items: what ids stand for.
      population: in a private run, compute the noise for these, and let the sums have as much of it as theirs; None
        for those who train.
    """
    answers = _estimate(config, users.train, len(items), population)
    estimate = answers.estimate
    users = Users(*(transformed(part, estimate.transform) for part in users))
    config, items = apply_estimate(config, items, estimate, answers.counts)
    model = build_model(config.model, len(items), estimate)
    return Ready(config, users, items, model, tuple(_remarks(config, ratings, users, estimate)), answers.releases)


def _estimate(config: RatingsConfig, clients: Clients, num_items: int, population: Population | None) -> Answers:
    """Run round zero, in a private run with noise."""
    if not config.privacy.on:
        return run_round_zero(round_zero_of(config, num_items), clients)
    actual = Population(len(clients), config.sampling.cohort_size(len(clients)))
    target = population or actual
    rng = np.random.default_rng([config.seed, SEED_OF_NOISE])
    noise = round_zero_noise(config, target)
    round_zero = round_zero_of(config, num_items, noise_multiplier=noise, clients=len(clients))
    noise_scale = actual.clients / target.clients
    return run_round_zero(round_zero, clients, rng, secure=config.aggregate.secure, noise_scale=noise_scale)


def _remarks(config: RatingsConfig, ratings: Ratings, users: Users, zero: Estimate) -> list[str]:
    """Summarize the data, the client groups and the settings derived from them."""
    transform, model, scale = config.data.transform, config.model, config.model.scale
    assert scale is not None
    remarks = [ratings.describe().sentence(counts=transform != "auto"), say_rounds(config, users)]
    if scale.transform == "log1p":
        why = "these look like counts, so " if transform == "auto" else ""
        undo = "; --data.transform none turns this off" if transform == "auto" else ""
        remarks.append(f"{why}the model learns log(1+x){undo}. All errors are those of log(1+x).")
    if model.round_zero:
        remarks.append(_say_scale(scale))
        if zero.outliers:
            far = f"ratings of training users far outside the usual range: {zero.outliers:,}"
            remarks.append(f"{far}, left out of these sums. Remove from the file what is a mistake.")
    return remarks


def _say_scale(scale: Scale) -> str:
    """Summarize the results of round zero."""
    low, high, ridge = readable(scale.low, 3), readable(scale.high, 3), readable(scale.user_ridge, 2)
    return (
        f"From sums over the training users: mean {readable(scale.mean)}, standard deviation "
        f"{readable(scale.deviation)}, and a bias for every item. Predictions stay between {low} and {high}. The prior "
        f"on a user's bias is as strong as {ridge} ratings."
    )
