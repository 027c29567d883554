"""Ratings: matrix factorization with a local embedding for every user."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.display import Progress, readable, silent
from fedrecon._src.core.model import Model
from fedrecon._src.data import Ratings, RatingsSchema, load, load_titles, unique_labels
from fedrecon._src.data.columns import MissingColumnsError
from fedrecon._src.data.movielens import NAMES
from fedrecon._src.data.ratings import RatingLimits
from fedrecon._src.data.sources import DataError, RowErrors
from fedrecon._src.data.tables import JsonLinesError, open_table
from fedrecon._src.privacy.accounting import Release
from fedrecon._src.recommend import cold_start
from fedrecon._src.recommend.baselines import (
    Columns,
    fit_baselines,
    predict_by_biases,
    rating_errors,
    split_examples,
)
from fedrecon._src.recommend.config import (
    ClicksConfig,
    Data,
    RatingsConfig,
    Reading,
    change_settings,
    changed,
    is_default,
)
from fedrecon._src.recommend.estimate import Estimate, State
from fedrecon._src.recommend.protection import Population, round_zero_noise
from fedrecon._src.recommend.rating_model import (
    Items,
    Liking,
    add_priors,
    apply_estimate,
    build_model,
    ridges_of,
    round_zero_of,
)
from fedrecon._src.recommend.recipe import build_reconstruction_algorithm, evaluation_split, server_optimizer
from fedrecon._src.recommend.round_zero import RoundZero, run_round_zero
from fedrecon._src.recommend.settings import COLUMNS, Scale
from fedrecon._src.recommend.stopping import say_rounds
from fedrecon._src.recommend.task import (
    ACCURACY,
    Measure,
    Read,
    Ready,
    Table,
    Task,
    Users,
    check_source,
    refuse_settings,
    split_users,
)
from fedrecon._src.server import Aggregator
from fedrecon._src.simulation.evaluation import Evaluation


def read_ratings(path: str | Path, reading: Reading, **options: object) -> Ratings:
    """Read a ratings file.

    Args:
      path: the file; names of data sets, folders and archives are none.
      reading: how it is read.
      **options: of `fedrecon._src.data.load_ratings`.

    Raises:
      DataError: it is no such file, or cannot be read.
    """
    if _is_collection(Path(path)):
        raise DataError(f"{path} is not a ratings file; give a file with one rating per line, or a Parquet file.")
    settings = {field.name: getattr(reading, field.name) for field in dataclasses.fields(Reading)}
    return load(path, **settings, **options)


def _is_collection(path: Path) -> bool:
    """Tell whether a path is the name of a data set, a folder or an archive, rather than a file of ratings."""
    return str(path) in (*NAMES, "synthetic") or path.is_dir() or path.suffix == ".zip"


def load_ratings(settings: Data) -> Ratings:
    """Load the ratings that settings name, whole and in their own order, with titles if there are any."""
    check_source(settings)
    load_source = _load_collection if _is_collection(Path(settings.source)) else _load_file
    ratings = load_source(settings, getattr(settings, "at_least", None))
    if settings.titles is None:
        return ratings
    return dataclasses.replace(ratings, titles=_titles(settings.titles, ratings.item_ids, settings.source))


def _load_collection(settings: Data, at_least: float | None) -> Ratings:
    """Load a data set by its name, or from a folder or an archive."""
    synthetic = settings.source == "synthetic"
    unused = [*changed(settings, Reading), *(["at_least"] if synthetic and at_least is not None else [])]
    refuse_settings(unused, settings.source, "not a ratings file")
    if synthetic:
        return load(settings.source).at_least(settings.min_ratings)
    return load(settings.source, min_ratings=settings.min_ratings, at_least=at_least)


def _load_file(settings: Data, at_least: float | None) -> Ratings:
    """Load a ratings file; if it is for another task, say so."""
    try:
        return read_ratings(settings.source, settings, min_ratings=settings.min_ratings, at_least=at_least)
    except (MissingColumnsError, JsonLinesError) as problem:
        advice = "if these are posts to learn text from, give --task text"
        if isinstance(problem, MissingColumnsError):
            if problem.fields != ("rating",) or settings.rating != Reading.rating:
                raise
            advice = "if it holds clicks, plays or purchases, which have no ratings, give --task clicks"
        raise DataError(f"{problem}; {advice}", problem.fields) from None


def _titles(file: str | Path, ids: np.ndarray, source: str) -> np.ndarray:
    """Read the titles of items; those without one are called by their id."""
    titles = load_titles(file)
    if not any(str(item_id) in titles for item_id in ids.tolist()):
        raise DataError(f"{file} has no title for any item of {source}: are its ids the same?")
    return np.array([titles.get(str(item_id), str(item_id)) for item_id in ids.tolist()], dtype=str)


def with_titles(items: Items, file: str | Path) -> Items:
    """Return items with the titles of a file, each of which then stands for one item."""
    titles = _titles(file, items.ids, "the model")
    return dataclasses.replace(items, titles=np.array(unique_labels(titles.tolist(), items.ids.tolist())))


def read_items(path: Path, item: str = "item", title: str = "title") -> Items:
    """Read a catalogue: a table with a header, one item per line.

    Items are numbered in the order of their ids, whatever the order of the file.

    Args:
      path: the file.
      item: header of the column with ids.
      title: header of the column with titles, which is optional.

    Raises:
      DataError: the file is not a catalogue; the message says why.
    """
    titles: dict[str, str] = {}
    with open_table(path, header=True, delimiter=",") as table:
        names = table.names or []
        if item not in names:
            raise DataError(f"{path} has no column {item!r}; it has: {', '.join(names)}. Use --item-column.")
        positions = {role: names.index(name) for role, name in (("item", item), ("title", title)) if name in names}
        for batch in table.batches(positions, RowErrors("error")):
            columns = [[str(text or "").strip() for text in batch.columns[role].to_pylist()] for role in positions]
            for row, (item_id, name) in enumerate(zip(columns[0], columns[-1], strict=True)):
                if item_id and titles.setdefault(item_id, name) != name:
                    where = (batch.reread() if batch.reread else batch).describe_row(row, 0)
                    raise DataError(
                        f"{path} {where}: item {item_id[:40]!r} has the title {name[:40]!r}, but "
                        f"{titles[item_id][:40]!r} above; give every item one title"
                    )
    if not titles:
        raise DataError(f"{path} lists no items")
    numeric = all(text.isascii() and text.isdigit() and str(int(text)) == text and len(text) < 19 for text in titles)
    ids = np.array(sorted(map(int, titles)) if numeric else sorted(titles))
    labels = [titles[str(item_id)] or str(item_id) for item_id in ids.tolist()]
    return Items(ids, np.array(unique_labels(labels, ids.tolist())) if title in names else None)


# ---- the tasks ----

T = TypeVar("T", bound=RatingsConfig | ClicksConfig)


class ItemsTask(Task[T, Ratings, Items]):
    """What ratings and clicks have in common."""

    def load(self, config: T, progress: Progress) -> Ratings:
        """Load the data that settings name."""
        return load_ratings(config.data)

    def legend(self, config: T, data: Ratings, users: Users | None = None) -> Items:
        """Return what items are called, and how often training users have them.

        Whoever validates or tests leaves no trace in a saved model.
        """
        train = (users or self.divide(config, data, silent)).train
        rows = rows_of(train.starts, train.ends)
        items, values = np.asarray(train.columns["item"])[rows], np.asarray(train.columns["rating"])[rows]
        ids, titles = np.asarray(data.item_ids), data.titles
        return Items(
            ids,
            None if titles is None else np.array(unique_labels(titles.tolist(), ids.tolist())),
            np.bincount(items, minlength=data.num_items),
            (float(values.min()), float(values.max())) if len(values) else None,
        )

    def divide(self, config: T, data: Ratings, progress: Progress) -> Users:
        """Split the clients into those that train, validate and test."""
        return split_users(data, config.data)

    def facts(self, config: T, data: Ratings) -> dict[str, Any]:
        """Return what run.json says about the data."""
        return {self.examples: data.num_examples, "items": data.num_items}

    def read(self, config: T, items: Items, path: Path, reading: Reading, progress: Progress) -> Read:
        """Read the users of another file, with the same items; columns may be called as in training."""
        data = config.data
        columns = {role: getattr(data, role) for role in changed(data, Reading) if role in COLUMNS}
        return self._read(config, path, reading, RatingsSchema(items.ids, columns, self.limits(config, items)))

    def read_node(self, config: T, items: Items, path: Path, reading: Reading, progress: Progress) -> Read:
        """Read the users of a node's file, in the order of the file."""
        return self._read(config, path, reading, RatingsSchema(items.ids))

    def _read(self, config: T, path: Path, reading: Reading, schema: RatingsSchema) -> Read:
        """Read a file; where nothing says how, its columns and duplicates are treated as those of this kind of data."""
        kind, names = type(config.data), ("rating", "duplicates")
        usual: dict[str, Any] = {
            name: getattr(kind, name) for name in names if getattr(reading, name) == getattr(Reading, name)
        }
        at_least, reading = getattr(config.model, "at_least", None), dataclasses.replace(reading, **usual)
        ratings = read_ratings(path, reading, at_least=at_least, schema=schema)
        return Read(ratings, ratings.skipped)

    def describe(self, items: Items) -> dict[str, Any]:
        """Return items as what JSON can hold."""
        columns = {"item_ids": items.ids, "titles": items.titles, "counts": items.counts}
        scale, liking = items.scale, items.liking
        return {
            **{name: None if column is None else column.tolist() for name, column in columns.items()},
            "scale": scale and list(scale),
            "liking": liking and {"bias": np.round(liking.bias, DIGITS).tolist(), "user_ridge": liking.user_ridge},
        }

    def recall(self, description: Mapping[str, Any]) -> Items:
        """Undo `describe`; raises KeyError, TypeError or ValueError if it is nothing of the kind."""
        ids, titles = description["item_ids"], description["titles"]
        # Older models have none of these.
        counts, scale, liking = (description.get(name) for name in ("counts", "scale", "liking"))
        return Items(
            np.array(ids),
            None if titles is None else np.array(unique_labels(titles, ids), dtype=str),  # older models repeat titles
            None if counts is None else np.array(counts, np.int64),
            None if scale is None else (float(scale[0]), float(scale[1])),
            None if liking is None else Liking(np.asarray(liking["bias"], np.float64), float(liking["user_ridge"])),
        )


RMSE = Measure("rmse", "RMSE")
STARS = 5.0  # the widest scale on which predictions within half a star of the rating are called accurate
SEED_OF_NOISE = 13  # beside the run's seed, so that noise is drawn from numbers that nothing else has
BESIDE = 0.1  # of the scale's width: so far beside it ratings are still taken
FAR_BESIDE = 1.0  # the same for ends found with noise, which hides rare ratings
SAME = 1e-5  # of two numbers that differ by rounding alone
DIGITS = 5  # of biases on disk: they are standardised, and a baseline needs no more


class _RatingsTask(ItemsTask[RatingsConfig]):
    """Ratings: how much people like items."""

    name, examples = "ratings", "ratings"
    measures = curve = (RMSE, ACCURACY)
    goal = RMSE
    serve = "recommend {run} --ratings FILE"

    def are_counts(self, config: RatingsConfig, data: Ratings) -> bool:
        return config.data.transform == "none" and data.describe().are_counts

    def view(self, config: RatingsConfig, clients: Clients) -> Clients:
        """Return clients with log(1 + rating) for ratings, if that is the transform; what is below 0 counts as 0."""
        scale = config.model.scale
        if scale is None or scale.transform == "none" or "rating" not in clients.columns:
            return clients
        logs = np.log1p(np.maximum(np.asarray(clients.columns["rating"], np.float32), 0))
        return dataclasses.replace(clients, columns={**clients.columns, "rating": logs})

    # ---- training ----

    def build_model(self, config: RatingsConfig, items: Items) -> Model:
        return build_model(config.model, len(items))

    def build_algorithm(
        self, config: RatingsConfig, model: Model, examples: float, aggregator: Aggregator
    ) -> Algorithm:
        server = add_priors(config, server_optimizer(config), examples)
        return build_reconstruction_algorithm(config, model, server, aggregator, ridges_of(config))

    def prepare(
        self,
        config: RatingsConfig,
        data: Ratings,
        users: Users,
        items: Items,
        population: Population | None = None,
        *,
        progress: Progress = silent,
    ) -> Ready:
        """Ask the training users for sums, and put what follows from them into settings, items and model.

        In a private run the sums have noise, and nothing else of the training users gets into a model.

        Args:
          config: the settings.
          data: all ratings, for what is said.
          users: divided.
          items: what ids stand for.
          population: in a private run, compute the noise for these, and let the sums have as much of it as theirs;
            None for those who train.
          progress: a progress display.
        """
        state, releases = _run_round_zero(config, users.train, len(items), population)
        counts = None if state.bounds is None else state.visible_counts
        config, items = apply_estimate(config, items, state.estimate, counts)
        users = Users(*(self.view(config, part) for part in users))
        model = build_model(config.model, len(items), state.estimate)
        remarks = _remarks(config, data, users, state.estimate.outliers)
        return Ready(config, users, items, model, tuple(remarks), releases)

    def finish(self, config: RatingsConfig, users: Users, algorithm: Algorithm, params: Any) -> Any:
        """Choose how much implicit feedback says of a newcomer's bias, if there are enough to judge it by."""
        if config.privacy.on or config.patience is None:
            return params
        return cold_start.shrink_evidence(algorithm, params, users.valid, evaluation_split(config))

    # ---- evaluation and inference ----

    def shown(self, measures: tuple[Measure, ...], config: RatingsConfig) -> tuple[Measure, ...]:
        scale = config.model.scale
        stars = scale is None or (scale.transform == "none" and scale.high - scale.low <= STARS)
        return tuple(measure for measure in measures if stars or measure.name != ACCURACY.name)

    def add_metrics(
        self, config: RatingsConfig, algorithm: Algorithm, params: Any, clients: Clients, evaluation: Evaluation
    ) -> Evaluation:
        """Add metrics after so many ratings of a person."""
        if not evaluation.clients or evaluation.diverged:
            return evaluation
        after = cold_start.rate_after(algorithm, params, clients, evaluation_split(config))
        return dataclasses.replace(evaluation, micro={**evaluation.micro, **after})

    def baselines(self, config: RatingsConfig, items: Items, users: Users | None, measured: Clients) -> Table:
        split = evaluation_split(config)
        support, query = split_examples(measured, split, "rating")
        if not len(query["rating"]):
            return {}
        if users is None:
            return _known_baselines(config, items, support, query)
        predict = fit_baselines(users.train, len(items))
        after = cold_start.rating_baselines_after(predict, measured, split)
        ratings = predict(support, query).items()
        return {name: {**rating_errors(guess, query["rating"]), **after.get(name, {})} for name, guess in ratings}

    def advice(self, best: str, config: RatingsConfig) -> str:
        preset = "" if config.privacy.on or is_default(config) else "--preset default, "
        return (
            f"With few ratings per user, there may be nothing to learn beyond biases. Try {preset}more --rounds, fewer "
            "dimensions (--model.dim 4), a larger --model.prior, or fedrecon tune."
        )

    def ends(self, config: RatingsConfig, items: Items) -> tuple[float, float] | None:
        """Return the ends of the scale, as ratings are in the data; None if nothing is known.

        Round zero finds the ends as means of equal ratings, with rounding errors. Here they are those of the data
        again.
        """
        scale = config.model.scale
        if scale is None:  # a model of an earlier version
            return items.scale
        low, high = np.expm1([scale.low, scale.high]) if scale.transform == "log1p" else (scale.low, scale.high)
        seen = items.scale or (low, high)
        return _round_end(low, seen[0]), _round_end(high, seen[1])

    def limits(self, config: RatingsConfig, items: Items) -> RatingLimits | None:
        """Return which ratings of new users a model takes: all that training had, and what is near its scale. Counts
        have no largest one: somebody may well play a song more often than anybody before.
        """
        ends = self.ends(config, items)
        if ends is None or not ends[0] < ends[1]:
            return None
        if config.model.scale is not None and config.model.scale.transform == "log1p":
            return RatingLimits(0.0, math.inf, 0.0, math.inf)
        (low, high), (lowest, highest) = ends, items.scale or ends
        noised = config.privacy.on and config.privacy.rating_range is None
        room = (FAR_BESIDE if noised else BESIDE) * (high - low) * (1 + SAME)
        least, most = float(min(low - room, lowest)), float(max(high + room, highest))
        return RatingLimits(least, most, min(low, lowest), max(high, highest))

    def restore(self, config: RatingsConfig, items: Items, scores: np.ndarray) -> np.ndarray:
        """Return predictions within the scale, and as counts if the model has learned their logarithms."""
        scale, ends = config.model.scale, self.ends(config, items)
        if scale is not None and scale.transform == "log1p":
            scores = np.expm1(np.minimum(scores, scale.high))
        return scores.copy() if ends is None else np.clip(scores, *ends)

    # ---- over nodes ----

    def pin(self, config: RatingsConfig, items: Items) -> RatingsConfig:
        return change_settings(config, {"model.scale": None})

    def round_zero(self, config: RatingsConfig, num_items: int, options: Any) -> RoundZero | None:
        if not (config.model.round_zero or config.data.transform != "none"):
            return None
        noise: dict[str, Any] = {}
        if config.privacy.on:
            clients = max(round(options.users * config.data.fractions[0]), 1)
            noise = {"noise_multiplier": options.round_zero_noise, "clients": clients, "approximate": True}
            noise["hosts"] = options.least_nodes if options.secure else 0
        return round_zero_of(config, num_items, **noise)

    def start(self, config: RatingsConfig, items: Items, zero: Any) -> tuple[RatingsConfig, Items, Model]:
        """Return settings, items and model with what round zero estimated."""
        if zero is not None and config.model.scale is None:  # else this was done before
            config, items = apply_estimate(config, items, zero.estimate, zero.visible_counts if zero.done else None)
        return config, items, build_model(config.model, len(items), zero and zero.estimate)


def _known_baselines(config: RatingsConfig, items: Items, support: Columns, query: Columns) -> Table:
    """Measure the baselines that follow from the scale and the item biases in a model."""
    scale, liking = config.model.scale, items.liking
    if scale is None or liking is None:
        return {}
    ends = {name: getattr(scale, name) for name in ("mean", "deviation", "low", "high")}
    estimate = Estimate(liking.bias, np.zeros(len(items)), **ends, noise=liking.user_ridge, user_variance=1.0)
    biases = predict_by_biases(estimate, support, query)
    guesses = {"global mean": np.zeros(len(biases)), "item + user bias": biases}
    return {name: rating_errors(estimate.restore(guess), query["rating"]) for name, guess in guesses.items()}


def _round_end(end: float, seen: float) -> float:
    """Return an end of the scale without rounding errors: ratings have single precision."""
    single = float(np.float32(end))
    return float(seen) if abs(seen - end) <= SAME * max(1.0, abs(end)) and float(np.float32(seen)) == seen else single


def _run_round_zero(
    config: RatingsConfig, clients: Clients, num_items: int, population: Population | None
) -> tuple[State, tuple[Release, ...]]:
    """Run round zero, in a private run with noise."""
    if not config.privacy.on:
        return run_round_zero(round_zero_of(config, num_items), clients)
    target = population or Population(len(clients), config.sampling.cohort_size(len(clients)))
    rng = np.random.default_rng([config.seed, SEED_OF_NOISE])
    noise, noise_scale = round_zero_noise(config, target), len(clients) / target.clients
    zero = round_zero_of(config, num_items, noise_multiplier=noise, clients=len(clients))
    return run_round_zero(zero, clients, rng, secure=config.aggregate.secure, noise_scale=noise_scale)


def _remarks(config: RatingsConfig, ratings: Ratings, users: Users, outliers: int) -> list[str]:
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
        if outliers:
            far = f"ratings of training users far outside the usual range: {outliers:,}"
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


RATINGS = _RatingsTask()
