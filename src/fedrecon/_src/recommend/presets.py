"""Presets: whole settings by name, for options and config files to build on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from fedrecon._src.recommend.config import ClicksConfig, Config, ConfigError, RatingsConfig, Sampling, TextConfig
from fedrecon._src.recommend.settings import Aggregate, Data, Factorization, Reconstruct, Server, Split, Update

Preset = Literal["default", "quick", "paper"]

# One setting of constants for ratings of any scale and size. Round zero finds the scale, the item biases and the
# ridges; besides, the prior on item embeddings matters most: without it, rows with few ratings would fit noise.
DEFAULT = RatingsConfig(
    data=Data(transform="auto"),
    model=Factorization(
        dim=16,
        biases=True,
        implicit_feedback=True,
        round_zero=True,
        item_traits=True,
        init_scale=0.0173,  # so small that the first evaluation is that of the biases
        prior=200.0,
        relax=8,
        implicit_prior=2.0,
        least_ratings=5,
    ),
    split=Split(train="redrawn-half"),
    reconstruct=Reconstruct(solver="least-squares"),
    update=Update(learning_rate=1.0, steps=1, batch_size=150, second_order=True),
    server=Server(optimizer="adam", learning_rate=0.01, decay="linear", decay_rounds="all"),
    # Updates far longer than the median are shortened; a limit of three times it leaves nearly all others as they are.
    aggregate=Aggregate(clip_quantile="auto", clip_times=3.0),
    sampling=Sampling(clients_per_round=None, least=200),  # cheap where there are few, and steps are less noisy
    rounds=200,
    evaluate_every=25,
    patience=2,
)

TEXT = TextConfig(aggregate=Aggregate(weigh="tokens", clip_quantile="auto", clip_times=3.0))

PRESETS: Mapping[str, Mapping[str, Config]] = {
    "ratings": {
        "default": DEFAULT,
        "quick": dataclasses.replace(
            DEFAULT, rounds=50, evaluate_every=25, patience=1, model=dataclasses.replace(DEFAULT.model, relax=0)
        ),
        "paper": RatingsConfig(model=Factorization(least_ratings=5)),
    },
    "clicks": {"default": ClicksConfig(), "quick": ClicksConfig(rounds=50, evaluate_every=25)},
    "text": {"default": TEXT},
}


def preset_of(task: str, name: str = "default") -> Config:
    """Return the settings that options and a config file build on.

    Raises:
      ConfigError: the task has no such preset.
    """
    if name not in PRESETS[task]:
        raise ConfigError("preset", name, f"must be one of {', '.join(PRESETS[task])} for {task}")
    return PRESETS[task][name]


def is_default(config: Config) -> bool:
    """Return whether a model is trained as the preset `default` says, whatever the data."""
    base = preset_of(config.task)
    names = ("split", "reconstruct", "update", "server", "aggregate", "privacy", "sampling", "rounds", "patience")
    measured = {name: getattr(base.model, name) for name in ("scale", "at_least") if hasattr(base.model, name)}
    same_model = dataclasses.replace(config.model, **measured) == base.model
    return same_model and all(getattr(config, name) == getattr(base, name) for name in names)
