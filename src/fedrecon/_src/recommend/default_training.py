"""Train a recommender or a completer with the default recipe, on any ratings, clicks or text."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.validation import check_finite
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.display import Progress, silent
from fedrecon._src.data import Corpus, Ratings, load, load_ratings, load_text
from fedrecon._src.recommend.config import Config, change_settings, check_config, preset_of
from fedrecon._src.recommend.recipe import build_layout, check_some_can_learn, make_evaluator
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.serving import Completer, Recommender
from fedrecon._src.recommend.stopping import early_stopping_of, evaluate_by_divisions, rounds_of, why_failed
from fedrecon._src.recommend.task import Ready, Users
from fedrecon._src.recommend.tasks import build_algorithm, task_of
from fedrecon._src.simulation.evaluation import Evaluator
from fedrecon._src.simulation.training import Callback, ProgressBar, Run, Validation
from fedrecon._src.simulation.training import train as run_rounds

logger = logging.getLogger(__name__)


def prepare_training(config: Config, data: Any, progress: Progress = silent) -> Ready:
    """Divide the clients of loaded data and return all that training needs, by sums over those who train.

    Raises:
      DataError: nothing can be learned from them.
    """
    task = task_of(config)
    users = task.divide(config, data, progress)
    check_some_can_learn(config, task, users)
    return task.prepare(config, data, users, task.legend(config, data, users), progress=progress)


def train_algorithm(ready: Ready, algorithm: Algorithm, evaluator: Evaluator | None, **options: Any) -> Run:
    """Train the algorithm of a configuration: rounds, sampling and early stopping are those of the settings.

    Args:
      ready: the settings, who trains and who validates.
      algorithm: as `build_algorithm` returns it.
      evaluator: of the validation clients; None if there are none.
      **options: of `fr.train`, for how it is run: folder, layout, ledger and callbacks. None changes the result.
    """
    config, users = ready.config, ready.users
    evaluate = evaluate_by_divisions(evaluator, config, users)
    early_stopping = early_stopping_of(config, users, task_of(config).score)
    return run_rounds(
        algorithm,
        users.train,
        rounds=rounds_of(config, users),
        clients_per_round=config.sampling,
        valid=None if evaluate is None else Validation(evaluate, config.evaluate_every, early_stopping),
        seed=config.seed,
        **options,
    )


def train_model(
    ready: Ready, algorithm: Algorithm, evaluator: Evaluator | None, **options: Any
) -> tuple[Run, SavedModel[Any]]:
    """Train as `train_algorithm` does, and return the run and its model, which knows why the training failed if so."""
    task, run = task_of(ready.config), train_algorithm(ready, algorithm, evaluator, **options)
    if not run.interrupted or "folder" not in options:  # an interrupted run with a folder can be continued
        run = dataclasses.replace(run, params=task.finish(ready.config, ready.users, algorithm, run.params))
    return run, SavedModel(ready.config, run.params, ready.legend, why_failed(run.history, task))


class TrainOptions(TypedDict, total=False):
    """Options of training with the default recipe.

    Attributes:
      rounds: rounds of training; for ratings, those before priors are relaxed. 200 by default, for clicks 60, for
        text 1,000.
      seed: for everything random in training.
      fractions: the shares of clients that train, validate and test; a corpus has them already.
      out: a folder to save the model in.
      callbacks: called after every round and evaluation, and at the end.
      progress: a progress display.

    Example:
      >>> import fedrecon as fr
      >>> options = fr.recommend.TrainOptions(rounds=100, seed=1)
      >>> options["rounds"]
      100
    """

    rounds: int
    seed: int
    fractions: tuple[float, float, float]
    out: str | Path
    callbacks: Sequence[Callback]
    progress: Progress


def _train(
    task_name: str, data: Any, model: Mapping[str, Any], options: TrainOptions
) -> tuple[SavedModel[Any], Users, Run]:
    """Divide the clients, run round zero, train, and save the model if a folder is given."""
    if unknown := set(options) - set(TrainOptions.__annotations__):
        raise TypeError(f"no such option: {', '.join(unknown)}; there are {', '.join(TrainOptions.__annotations__)}")
    progress = options.get("progress", silent)
    paths = {"fractions": "data.fractions", "rounds": "rounds", "seed": "seed"}
    changes = {"data.source": "the data", **{paths[name]: value for name, value in options.items() if name in paths}}
    changes |= {path: value for path, value in model.items() if value is not None}
    ready = prepare_training(check_config(change_settings(preset_of(task_name), changes)), data, progress)
    for line in ready.remarks:
        logger.info(line)
    algorithm = build_algorithm(ready.config, ready.model, ready.users.train.num_examples)
    layout = build_layout(ready.config, ready.model)
    evaluator = make_evaluator(ready.config, algorithm, ready.users, layout)
    callbacks = [*options.get("callbacks", ()), ProgressBar(progress)]
    run, saved = train_model(ready, algorithm, evaluator, layout=layout, callbacks=callbacks)
    if remark := task_of(ready.config).remark(saved.params):
        logger.info(remark)
    if saved.failed is not None:
        warnings.warn(f"training failed: {saved.failed}", stacklevel=3)
    if "out" in options:
        saved.save(options["out"])
    return saved, ready.users, run


def _as_ratings(data: Any, **options: Any) -> Ratings:
    """Return ratings; clients without ids or titles of items have the numbers of their items."""
    if isinstance(data, Ratings):
        return data
    if isinstance(data, str | Path):
        return load(str(data), **options)
    if not isinstance(data, Clients):
        return load_ratings(data, **options)
    columns = dict(data.columns)
    item = columns.get("item")
    if item is None or item.dtype.kind not in "iu" or item.min(initial=0) < 0:
        raise ValueError("clients need a column 'item' of numbers from 0; fr.data.load_ratings numbers other ids")
    if "rating" not in columns and options.get("rating") == "auto":
        columns["rating"] = np.ones(len(item), np.float32)
    if "rating" not in columns:
        raise ValueError(f"clients need a column 'rating' (got {', '.join(columns)})")
    fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(Clients)} | {"columns": columns}
    ratings = Ratings(**fields, item_ids=np.arange(int(item.max(initial=0)) + 1))
    check_finite(ratings, "rating")
    return ratings


def train(ratings: Any, *, dim: int | None = None, **options: Unpack[TrainOptions]) -> Recommender:
    """Train a recommender on ratings of any scale, as `fedrecon train` does.

    The scale, item biases and ridges are estimated in round zero. Training stops when validation users gain nothing
    more from it, and keeps the model that is best for them.

    Args:
      ratings: what `fr.data.load` returns, or a file or name that it takes; a data frame or a dict with the columns
        `user`, `item` and `rating`; or `Clients` with the columns `item` (numbers from 0) and `rating`.
      dim: the length of the embeddings; 16 by default.
      **options: rounds, seed, fractions, out, callbacks and progress; see `TrainOptions`.

    Returns:
      A `Recommender`. Its `evaluate()` measures the test users.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(num_users=60, num_items=20, seed=0)  # doctest: +SKIP
      >>> recommender = fr.recommend.train(ratings, rounds=2)  # doctest: +SKIP
      >>> recommender  # doctest: +SKIP
      Recommender(20 items, trained on ratings from 1 to 5)
    """
    return Recommender(*_train("ratings", _as_ratings(ratings), {"model.dim": dim}, options))


def train_clicks(clicks: Any, *, dim: int | None = None, **options: Unpack[TrainOptions]) -> Recommender:
    """Train a recommender on clicks, plays or purchases, as `fedrecon train --task clicks` does.

    Args:
      clicks: what `fr.data.load` returns, or a file of users and items; a data frame or a dict with the columns `user`
        and `item`; or `Clients` with the column `item` (numbers from 0).
      dim: the length of the embeddings; by default as long as validation users need them, up to 1,024.
      **options: rounds, seed, fractions, out, callbacks and progress; see `TrainOptions`.

    Returns:
      A `Recommender`, which ranks items. Its `evaluate()` measures the test users.

    Example:
      >>> import fedrecon as fr
      >>> clicks = fr.data.synthetic_ratings(num_users=60, num_items=20, seed=0)  # doctest: +SKIP
      >>> fr.recommend.train_clicks(clicks, rounds=2, dim=4)  # doctest: +SKIP
      Recommender(20 items, trained on clicks)
    """
    data = _as_ratings(clicks, rating="auto", duplicates="sum")
    return Recommender(*_train("clicks", data, {"model.dim": dim}, options))


def train_text(
    corpus: Corpus | str | Path, *, vocabulary: int | None = None, **options: Unpack[TrainOptions]
) -> Completer:
    """Train a model of the next word, as `fedrecon train --task text` does.

    Args:
      corpus: what `fr.data.load_text` returns, or a file that it takes.
      vocabulary: how many words the model knows; 5,000 by default, all if there are fewer.
      **options: rounds, seed, out, callbacks and progress; see `TrainOptions`.

    Returns:
      A `Completer`. Its `evaluate()` measures the test clients.

    Example:
      >>> import fedrecon as fr
      >>> corpus = fr.data.synthetic_text(seed=0)
      >>> fr.recommend.train_text(corpus, rounds=5)  # doctest: +SKIP
    """
    data = corpus if isinstance(corpus, Corpus) else load_text(corpus, progress=options.get("progress", silent))
    return Completer(*_train("text", data, {"model.vocabulary": vocabulary}, options))
