"""The model of ratings from its settings, and what round zero adds to them: scale, biases, ridges, traits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from optax import GradientTransformation, piecewise_constant_schedule

from fedrecon._src.client.closed_form import Ridge
from fedrecon._src.client.optimizers import Strength, keep_constant, with_prior
from fedrecon._src.core.checks import check_rules
from fedrecon._src.core.model import Model
from fedrecon._src.models import implicit_feedback, learned_default, matrix_factorization, standardize
from fedrecon._src.recommend.config import Factorization, RatingsConfig, Scale, change_settings
from fedrecon._src.recommend.estimate import Estimate, Transform
from fedrecon._src.recommend.round_zero import RoundZero
from fedrecon._src.recommend.settings import FOUND, relaxed_rounds

RELAXED = 0.25  # what a relaxation leaves of the prior


class Liking(NamedTuple):
    """What training users thought of the items, as sums over them tell: what a baseline needs.

    Attributes:
      bias: of item k, standardised and damped.
      user_ridge: the ridge on a newcomer's bias beside it.
    """

    bias: np.ndarray
    user_ridge: float


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
        biases, ridge = self.liking or (None, 1.0)
        shape, least = self.ids.shape, 0 if self.counts is None else self.counts.min(initial=0)
        finite = biases is None or np.isfinite(biases).all()
        rules = {
            f"`ids` must be a list of at least one item (got shape {shape})": len(shape) == 1 and shape[0] > 0,
            f"`counts` must not be negative (got {least})": least >= 0,
            f"`scale` must be finite, with the lowest rating first (got {self.scale})": -np.inf < low <= high < np.inf,
            "`liking.bias` must be finite": finite,
            f"`liking.user_ridge` must be finite and above 0 (got {ridge})": 0 < ridge < math.inf,
        }
        for name, values in {"titles": self.titles, "counts": self.counts, "liking.bias": biases}.items():
            got = shape if values is None else values.shape
            rules[f"`{name}` must have one entry for each item (got shape {got}, items {shape})"] = got == shape
        check_rules(rules)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.ids)

    def title(self, k: int) -> str:
        """Return the title of item `k`, or its original id where there is none."""
        return str(self.ids[k] if self.titles is None else self.titles[k])


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
    return piecewise_constant_schedule(prior, dict.fromkeys(starts, RELAXED))


def add_priors(config: RatingsConfig, optimizer: GradientTransformation, examples: float) -> GradientTransformation:
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
    config = change_settings(config, {"model.scale": scale})
    items = dataclasses.replace(items, liking=Liking(estimate.item_bias, estimate.user_bias_ridge))
    if counts is not None:
        items = dataclasses.replace(items, counts=np.rint(counts).astype(np.int64), scale=estimate.ends)
    if config.privacy.on and not config.model.round_zero:  # only the scale was asked for
        items = dataclasses.replace(items, counts=None, liking=None)
    return config, items
