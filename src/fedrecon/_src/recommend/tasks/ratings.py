"""Ratings: matrix factorization with a local embedding for every user."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.progress import Progress
from fedrecon._src.data import Ratings, RatingsSchema, load, load_titles, unique_labels
from fedrecon._src.data.columns import MissingColumnsError
from fedrecon._src.data.movielens import NAMES
from fedrecon._src.data.sources import DataError
from fedrecon._src.data.tables import JsonLinesError
from fedrecon._src.recommend.config import COLUMNS, Data, RatingsConfig, Reading, changed
from fedrecon._src.recommend.rating_model import (
    Items,
    Liking,
    accepted_ratings,
    build_model,
    prepare_ratings,
    transformed,
)
from fedrecon._src.recommend.task import ACCURACY, Measure, Read, Task, Users, split_users


def read_ratings(path: str | Path, reading: Reading, **options: object) -> Ratings:
    """Read a ratings file.

    Args:
      path: the file; names of data sets, folders and archives are none.
      reading: how it is read.
      **options: of `fedrecon._src.data.load_ratings`.

    Raises:
      DataError: it is no such file, or cannot be read.
    """
    if str(path) in (*NAMES, "synthetic") or Path(path).is_dir() or Path(path).suffix == ".zip":
        raise DataError(f"{path} is not a ratings file; give a file with one rating per line, or a Parquet file.")
    settings = {field.name: getattr(reading, field.name) for field in dataclasses.fields(Reading)}
    return load(path, **settings, **options)


def load_ratings(settings: Data, at_least: float | None = None) -> Ratings:
    """Load the ratings that settings name, whole and in their own order, with titles if there are any.

    Args:
      settings: which file, and how it is read.
      at_least: lower ratings are left out; None keeps all.
    """
    ratings = _load(settings, at_least)
    if settings.titles is None:
        return ratings
    return dataclasses.replace(ratings, titles=_titles(settings.titles, ratings.item_ids, settings.source))


def _titles(file: str | Path, ids: np.ndarray, source: str) -> np.ndarray:
    """Read the titles of items; those without one are called by their id."""
    titles = load_titles(file)
    if not any(str(own) in titles for own in ids.tolist()):
        raise DataError(f"{file} has no title for any item of {source}: are its ids the same?")
    return np.array([titles.get(str(own), str(own)) for own in ids.tolist()], dtype=str)


def with_titles(items: Items, file: str | Path) -> Items:
    """Return items with the titles of a file, each of which then stands for one item."""
    titles = _titles(file, items.ids, "the model")
    return dataclasses.replace(items, titles=np.array(unique_labels(titles.tolist(), items.ids.tolist())))


def _load(settings: Data, at_least: float | None) -> Ratings:
    path = Path(settings.source)
    if settings.source == "":
        raise DataError("the name of the data is empty; give a known name or a path.")
    known = settings.source in (*NAMES, "synthetic")
    if not known and not path.is_dir() and path.suffix != ".zip":
        return _load_file(settings, at_least)
    own = [f"data.{name}" for name in changed(settings, Reading)]
    if own:
        raise DataError(f"{settings.source} is not a ratings file, so there is no use for {', '.join(own)}.")
    if settings.source == "synthetic":
        if at_least is not None:
            raise DataError("synthetic ratings are taken as they are, so there is no use for data.at_least.")
        return load(settings.source).at_least(settings.min_ratings)
    return load(settings.source, min_ratings=settings.min_ratings, at_least=at_least)


def _load_file(settings: Data, at_least: float | None) -> Ratings:
    """Load a ratings file; if it is for another task, say so."""
    try:
        return read_ratings(settings.source, settings, min_ratings=settings.min_ratings, at_least=at_least)
    except MissingColumnsError as problem:
        if problem.roles != ("rating",) or settings.rating != Reading.rating:
            raise
        advice = "if it holds clicks, plays or purchases, which have no ratings, give --task clicks"
        raise DataError(f"{problem}; {advice}") from None
    except JsonLinesError as problem:
        raise DataError(f"{problem}; if these are posts to learn text from, give --task text") from None


def divide_users(ratings: Ratings, settings: Data) -> Users:
    """Split the users; at least one must train."""
    users = split_users(ratings, settings)
    if not len(users.train):
        raise DataError(f"{settings.source} has {len(ratings)} users: too few to train on.")
    return users


def name_items(ratings: Ratings, seen: Clients) -> Items:
    """Say what items are called and how often training users have them.

    Args:
      ratings: as loaded.
      seen: the training users alone: whoever validates or tests leaves no trace in a saved model.
    """
    rows = rows_of(seen.starts, seen.ends)
    items, values = np.asarray(seen.columns["item"])[rows], np.asarray(seen.columns["rating"])[rows]
    ids = np.asarray(ratings.item_ids)
    return Items(
        ids,
        None if ratings.titles is None else np.array(unique_labels(ratings.titles.tolist(), ids.tolist())),
        np.bincount(items, minlength=ratings.num_items),
        (float(values.min()), float(values.max())) if len(values) else None,
    )


def usual_columns(data: Data) -> dict[str, int | str | None]:
    """Return what columns are called in the file that a model was trained on, where settings say so.

    Args:
      data: the settings of that file.
    """
    return {role: getattr(data, role) for role in changed(data, Reading) if role in COLUMNS}


def _read(config: RatingsConfig, items: Items, path: Path, reading: Reading, progress: Progress) -> Read:
    del progress
    schema = RatingsSchema(items.ids, usual_columns(config.data), accepted_ratings(config, items))
    ratings = read_ratings(path, reading, schema=schema)
    return Read(ratings, ratings.skipped)


def describe_items(items: Items) -> dict[str, Any]:
    """Return items as what JSON can hold."""
    return {
        "item_ids": items.ids.tolist(),
        "titles": None if items.titles is None else items.titles.tolist(),
        "counts": None if items.counts is None else items.counts.tolist(),
        "scale": None if items.scale is None else list(items.scale),
        "liking": None if items.liking is None else items.liking.to_json(),
    }


def recall_items(description: Mapping[str, Any]) -> Items:
    """Undo `describe_items`; raises KeyError, TypeError or ValueError if it is nothing of the kind."""
    titles = description["titles"]
    # Older models have none of these.
    counts, scale, liking = (description.get(name) for name in ("counts", "scale", "liking"))
    ids = description["item_ids"]
    return Items(
        np.array(ids),
        None if titles is None else np.array(unique_labels(titles, ids), dtype=str),  # older models repeat titles
        None if counts is None else np.array(counts, np.int64),
        None if scale is None else (float(scale[0]), float(scale[1])),
        None if liking is None else Liking.from_json(liking),
    )


def read_items(path: Path, item: str = "item", title: str = "title") -> Items:
    """Read a catalogue: a CSV file with a header, one item per line.

    Items are numbered in the order of their ids, whatever the order of the file.

    Args:
      path: the file.
      item: header of the column with ids.
      title: header of the column with titles, which is optional.

    Raises:
      DataError: the file is not a catalogue; the message says why.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if item not in (rows.fieldnames or ()):
                header = ", ".join(rows.fieldnames or ()) or "nothing"
                raise DataError(f"{path} has no column {item!r}; its first line names: {header}. Use --item-column.")
            titles: dict[str, str] = {}
            for row in rows:
                if not (item_id := (row[item] or "").strip()):
                    continue
                name = (row.get(title) or "").strip()
                if titles.setdefault(item_id, name) != name:
                    raise DataError(
                        f"{path} line {rows.line_num}: item {item_id[:40]!r} has the title {name[:40]!r}, but "
                        f"{titles[item_id][:40]!r} above; give every item one title"
                    )
            named = title in (rows.fieldnames or ())
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file: {error}") from None
    if not titles:
        raise DataError(f"{path} lists no items")
    if all(text.isascii() and text.isdigit() and str(int(text)) == text and len(text) < 19 for text in titles):
        ids = np.array(sorted(map(int, titles)))
    else:
        ids = np.array(sorted(titles))
    labels = [titles[str(item_id)] or str(item_id) for item_id in ids.tolist()]
    return Items(ids, np.array(unique_labels(labels, ids.tolist())) if named else None)


RMSE = Measure("rmse", "RMSE")
STARS = 5.0  # the widest scale on which predictions within half a star of the rating are called accurate


def _omit(config: RatingsConfig) -> tuple[str, ...]:
    scale = config.model.scale
    stars = scale is None or (scale.transform == "none" and scale.high - scale.low <= STARS)
    return () if stars else (ACCURACY.name,)


RATINGS: Task[RatingsConfig, Ratings, Items] = Task(
    name="ratings",
    config=RatingsConfig,
    people="users",
    examples="ratings",
    measures=(RMSE, ACCURACY),
    curve=(RMSE, ACCURACY),
    untrained=RatingsConfig(data=Data(source="")),
    load=lambda config, progress: load_ratings(config.data),
    legend=lambda config, ratings: name_items(ratings, divide_users(ratings, config.data).train),
    divide=lambda config, ratings, progress: divide_users(ratings, config.data),
    facts=lambda config, ratings: {"ratings": ratings.num_examples, "items": ratings.num_items},
    build_model=lambda config, items: build_model(config.model, len(items)),
    prepare=prepare_ratings,
    view=lambda config, clients: transformed(clients, config.model.scale.transform if config.model.scale else "none"),
    read=_read,
    describe=describe_items,
    recall=recall_items,
    serve="recommend {run} --ratings FILE",
    omit=_omit,
    looks_like_counts=lambda config, ratings: config.data.transform == "none" and ratings.describe().looks_like_counts,
)
