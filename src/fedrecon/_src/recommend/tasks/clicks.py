"""Clicks, plays, purchases: which items come first for a person, from those the person has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedrecon._src.core.clients import Clients
from fedrecon._src.core.formatting import how_many, listed_counts
from fedrecon._src.core.model import Model
from fedrecon._src.core.progress import Progress
from fedrecon._src.data import Ratings, RatingsSchema
from fedrecon._src.data.columns import describe_columns
from fedrecon._src.data.sources import DataError
from fedrecon._src.models import ranking_factorization
from fedrecon._src.models.item_ranking import popularity_factors
from fedrecon._src.recommend.config import ClickData, ClicksConfig, Reading
from fedrecon._src.recommend.rating_model import Items
from fedrecon._src.recommend.stopping import say_rounds
from fedrecon._src.recommend.task import Measure, Read, Ready, Task, Users
from fedrecon._src.recommend.tasks.ratings import (
    describe_items,
    divide_users,
    load_ratings,
    name_items,
    read_ratings,
    recall_items,
    usual_columns,
)

NDCG, RECALL = Measure("ndcg@100", "NDCG@100"), Measure("recall@20", "recall@20")
MEASURES = (
    NDCG,
    RECALL,
    Measure("recall@50", "recall@50"),
    Measure("hit@20", "hit rate@20", 1, percent=True),
    Measure("coverage@20", "coverage@20", 1, percent=True),
)


def with_weights(config: ClicksConfig, clients: Clients) -> Clients:
    """Return clients with what each of their items weighs, if counts say so."""
    if config.model.counts == "ignore" or "rating" not in clients.columns:
        return clients
    count = np.asarray(clients.columns["rating"], np.float32)
    if len(count) and not count.min() >= 1:
        raise DataError(
            f"there is a count of {count.min():g}; --model.counts log is for counts of 1 and more: "
            "leave out smaller ones with --data.at-least 1, or ignore counts"
        )
    return dataclasses.replace(clients, columns={**clients.columns, "weight": click_weight(count)})


def click_weight(count: Any) -> Any:
    """Return what an item of so many clicks weighs, by numpy or JAX, where counts say so: 1 + log(count)."""
    return 1 + (np if isinstance(count, np.ndarray) else jnp).log(count)


def build_ranking(config: ClicksConfig, num_items: int) -> Model:
    """Return the model."""
    settings, weight = config.model, None if config.model.counts == "ignore" else "weight"
    return ranking_factorization(num_items, settings.dim, init_scale=settings.init_scale, weight=weight)


def _load(config: ClicksConfig) -> Ratings:
    return load_ratings(config.data, at_least=config.data.at_least)


def _prepare(config: ClicksConfig, clicks: Ratings, users: Users, items: Items) -> Ready:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, at_least=config.data.at_least))
    users = Users(*(with_weights(config, part) for part in users))
    if config.privacy.on:
        items = dataclasses.replace(items, counts=None, scale=None)  # they are exact, and not paid for
    model = build_ranking(config, len(items))
    fallback = None if items.counts is None else popularity_factors(items.counts, config.model.dim)
    return Ready(config, users, items, model, tuple(_remarks(config, clicks, users)), fallback=fallback)


def _remarks(config: ClicksConfig, clicks: Ratings, users: Users) -> list[str]:
    """Say what was read, who does what, and what is measured."""
    density = 100 * clicks.num_examples / max(1, len(clicks) * clicks.num_items)
    left_out = listed_counts(clicks.skipped)
    return [
        f"{how_many(len(clicks), 'users')} {'has' if len(clicks) == 1 else 'have'} {clicks.num_examples:,} of "
        f"{how_many(clicks.num_items, 'items')}: "
        f"{clicks.num_examples / max(1, len(clicks)):.1f} items per user, {density:.3g} % of all pairs. "
        + (f"Left out: {left_out}. " if left_out else "Nothing was left out. ")
        + describe_columns(clicks.recognised),
        say_rounds(config, users),
        f"A share of each measured user's items is known ({config.split.evaluate}); the model must find the others "
        "among all items that are not known.",
    ]


def _read(config: ClicksConfig, items: Items, path: Path, reading: Reading, progress: Progress) -> Read:
    del progress
    clicks = read_clicks(config, items, path, reading, usual_columns(config.data))
    # What is shown and what is hidden is drawn, in a file of any order.
    return Read(clicks.shuffle(config.data.shuffle_seed or 0), clicks.skipped)


def read_clicks(
    config: ClicksConfig,
    items: Items,
    path: Path,
    reading: Reading,
    usual: Mapping[str, int | str | None] | None = None,
) -> Ratings:
    """Read what people have from another file, with the numbers of these items.

    Args:
      config: settings of the model.
      items: what the model knows.
      path: the file.
      reading: how it is read; a column of counts or ratings need not be there.
      usual: what columns are called where `reading` leaves it open, if the file has them.
    """
    if reading.rating == Reading.rating:
        reading = dataclasses.replace(reading, rating="auto")
    if reading.duplicates == Reading.duplicates:
        reading = dataclasses.replace(reading, duplicates="sum")
    return read_ratings(path, reading, at_least=config.model.at_least, schema=RatingsSchema(items.ids, usual or {}))


CLICKS: Task[ClicksConfig, Ratings, Items] = Task(
    name="clicks",
    config=ClicksConfig,
    people="users",
    examples="clicks",
    measures=MEASURES,
    curve=(NDCG, RECALL),
    untrained=ClicksConfig(data=ClickData(source="")),
    load=lambda config, progress: _load(config),
    legend=lambda config, clicks: name_items(clicks, divide_users(clicks, config.data).train),
    divide=lambda config, clicks, progress: divide_users(clicks, config.data),
    facts=lambda config, clicks: {"clicks": clicks.num_examples, "items": clicks.num_items},
    build_model=lambda config, items: build_ranking(config, len(items)),
    prepare=_prepare,
    view=with_weights,
    read=_read,
    describe=describe_items,
    recall=recall_items,
    serve="recommend {run} --clicks FILE",
    by_client=True,
    score=lambda metrics: -metrics.get(NDCG.name, np.nan),
)
