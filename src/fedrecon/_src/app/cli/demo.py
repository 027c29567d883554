"""`fedrecon demo`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedrecon._src.app.cli import options, show
from fedrecon._src.recommend.config import DEFAULT, change_settings

if TYPE_CHECKING:
    from fedrecon._src.app.experiment import ExperimentResult
    from fedrecon._src.simulation.evaluation import Evaluation

SETTINGS = change_settings(DEFAULT, {"data.source": "movielens-small"})
LIKED = 5  # how many of the user's own favourites are shown


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train on MovieLens small and recommend films to a held-out user.

    MovieLens small has 100,004 ratings by 671 people. The model is evaluated on held-out users, next to baselines.

    Attributes:
      out: the folder for the run; an earlier demo in it is replaced.
      rounds: rounds of training; fewer are faster but worse.
      data: other MovieLens data: the path of a zip or folder, or a known name.
    """

    out: Path = Path("demo")
    rounds: int = SETTINGS.rounds
    data: str = SETTINGS.data.source


parse = partial(options.parse, Demo, "demo")


def run(args: Demo) -> int:
    """Train, compare, recommend."""
    from fedrecon._src.app.cli.train import TrainRatings, train_and_report
    from fedrecon._src.storage.atomic import StorageError
    from fedrecon._src.storage.run_folder import RunFolder

    config = change_settings(SETTINGS, {"rounds": args.rounds, "data.source": args.data})
    folder = RunFolder(args.out)
    with folder.lock():
        if folder.has_run() and folder.description().get("made_by") != "demo":
            raise StorageError(f"{args.out} holds a run that is not a demo; give another folder with --out")
    outcome, code = train_and_report(TrainRatings(settings=config, out=args.out, overwrite=True), made_by="demo")
    if code:
        return code
    if outcome.test is None:
        raise ValueError(f"{args.data} has too few users: none is left to test on")
    _compare(outcome, outcome.test)
    _recommend(outcome)
    show.following(f"page {shlex.quote(str(args.out))}   (rate films in your browser; nothing leaves it)")
    return 0


def _compare(outcome: ExperimentResult, test: Evaluation) -> None:
    """Compare the model with itself without reconstruction."""
    from fedrecon._src.recommend.evaluation_table import without_reconstruction
    from fedrecon._src.recommend.recipe import make_evaluator
    from fedrecon._src.recommend.tasks import RATINGS

    config, users = outcome.model.config, outcome.users
    evaluator = make_evaluator(config, without_reconstruction(config, len(outcome.model.legend)), users, part="test")
    assert evaluator is not None  # there are test users
    initial = evaluator(outcome.run.params)
    rows = {"reconstructed from half of a person's ratings": test.micro, "without reconstruction": initial.micro}
    show.metrics(f"{len(users.test)} test users, measured on the other half of their ratings", RATINGS.measures, rows)
    print("accuracy: predictions within half a star of the rating")


def _recommend(outcome: ExperimentResult) -> None:
    """Recommend to a test user with a typical number of ratings."""
    import numpy as np

    from fedrecon._src.recommend.serving import Recommender

    test, items = outcome.users.test, outcome.model.legend
    usual = int(np.argsort(test.sizes, kind="stable")[len(test) // 2])
    person = test.take([usual])
    theirs = person[0]
    best = np.argsort(-theirs["rating"], kind="stable")[:LIKED]
    name = "?" if test.names is None else test.names[usual]
    show.table(
        f"user {name} has rated {len(theirs['item'])} movies, among them",
        ("title", "own rating"),
        [(items.title(theirs["item"][k]), f"{theirs['rating'][k]:g}") for k in best],
    )
    (advice,) = Recommender(outcome.model).recommend(person)
    show.recommendations("recommended to them, best first", [item._asdict() for item in advice])
