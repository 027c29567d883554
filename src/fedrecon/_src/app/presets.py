"""Presets: whole settings by name, for options and config files to build on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from fedrecon._src.app.config import (
    Aggregate,
    ClickData,
    ClicksConfig,
    Config,
    Data,
    Factorization,
    RatingsConfig,
    Reconstruct,
    Sampling,
    Server,
    Split,
    TextConfig,
    TextData,
    Update,
)

Preset = Literal["default", "quick", "paper"]

# One setting of constants for ratings of any scale and size. Round zero finds the scale, the item biases and the
# ridges; besides, the prior on item embeddings matters most: without it, rows with few ratings would fit noise.
DEFAULT = RatingsConfig(
    data=Data(source="", transform="auto"),
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

TEXT = TextConfig(
    data=TextData(source=""),
    aggregate=Aggregate(weigh="tokens", clip_quantile="auto", clip_times=3.0),
)

PRESETS: Mapping[str, RatingsConfig] = {
    "default": DEFAULT,
    "quick": dataclasses.replace(
        DEFAULT, rounds=50, evaluate_every=25, patience=1, model=dataclasses.replace(DEFAULT.model, relax=0)
    ),
    "paper": RatingsConfig(data=Data(source=""), model=Factorization(least_ratings=5)),
}
CLICKS: Mapping[str, ClicksConfig] = {
    "default": ClicksConfig(data=ClickData(source="")),
    "quick": ClicksConfig(data=ClickData(source=""), rounds=50, evaluate_every=25),
}
GROUPS = ("data", "model", "split", "reconstruct", "update", "server", "aggregate", "sampling", "rounds", "seed")


def base_of(preset: str | None, task: str, values: Mapping[str, Any]) -> Config:
    """Return the settings that options and a config file build on.

    Args:
      preset: what was asked for; None for `default`. If the config file has every group, as a run's does, None is for
        `paper`: settings that a run of an earlier version does not name had these values.
      task: ratings, clicks or text.
      values: the settings of the config file, if there is one.

    Raises:
      ValueError: the task has no such preset.
    """
    if task == "text":
        if preset not in (None, "default"):
            raise ValueError(
                f"--preset is {preset!r}, which is for ratings; fedrecon reproduce text --scale paper has the paper's "
                "settings for text"
            )
        return TEXT
    if task == "clicks":
        if preset == "paper":
            raise ValueError("--preset is 'paper', which is for ratings; clicks have default and quick")
        return CLICKS[preset or "default"]
    if preset is None:
        preset = "paper" if all(name in values for name in GROUPS) else "default"
    return PRESETS[preset]


def is_default(config: Config) -> bool:
    """Return whether a model is trained as the preset `default` says, whatever the data.

    Args:
      config: the settings, also with what was found in the data.
    """
    base = base_of("default", config.task, {})
    names = ("split", "reconstruct", "update", "server", "aggregate", "privacy", "sampling", "rounds", "patience")
    found: dict[str, Any] = {
        name: getattr(base.model, name) for name in ("scale", "at_least") if hasattr(base.model, name)
    }
    same_model = dataclasses.replace(config.model, **found) == base.model
    return same_model and all(getattr(config, name) == getattr(base, name) for name in names)
